"""Submissions as files, named by their hash: `blobs/<SHA-256>`.

    temporary file ─► fsync ─► rename ─► fsync of the folder ─► only then the row, and only then the receipt

A crash between file and row leaves a file that nobody refers to; the same bytes put again find it there. A file is
never changed: its name is the hash of its content, which is checked when it is read.
"""

from __future__ import annotations

from pathlib import Path

from shoal.errors import ResourceError
from shoal.protocol import submission_digest
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically


class BlobFolder:
    """A folder of immutable files by hash."""

    def __init__(self, folder: Path) -> None:
        self._folder = ensure_folder(folder)
        for left_over in self._folder.glob(".*"):  # of a process that died between writing and renaming
            left_over.unlink(missing_ok=True)

    def put(self, body: bytes) -> str:
        """Store `body` and return its name. On return it survives a crash of the machine."""
        name = submission_digest(body)
        path = self._path(name)
        if path.exists():  # renamed into place after its own fsync, so what is there is whole
            sync_folder(self._folder)  # whoever put it may still be about to do this
        else:
            write_atomically(path, body)
        return name

    def get(self, name: str) -> bytes:
        """The bytes of that name. Raises `ResourceError` if the disk lost or changed them."""
        path = self._path(name)
        try:
            body = path.read_bytes()
        except OSError as error:
            raise resource_error("read the submission", path, error) from error
        if submission_digest(body) != name:
            raise ResourceError(f"the submission {path} is damaged: its content does not match its name")
        return body

    def _path(self, name: str) -> Path:
        return self._folder / name
