"""A trainer process whose hub is a file: `python saving_child.py FOLDER [VERSION]`.

With a version, the save of that version stops halfway, leaves the file `saving` and waits for the file `go`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

from trainer_stubs import SETTINGS, FakeHub, training_run

from shoal.protocol import SignedDocument
from shoal.runtime.stop import stop_on_signals
from shoal.trainer import checkpoint

STEPS = 4
DEADLINE_S = 60.0


class FileHub(FakeHub):
    """A hub that remembers across processes what was announced."""

    def __init__(self, path: Path) -> None:
        super().__init__(STEPS, max_staleness=1)
        self._path = path
        if path.exists():
            self.policies = {tuple(place): digest for place, digest in json.loads(path.read_text())}

    def announce(self, signed: SignedDocument) -> None:
        super().announce(signed)
        self._path.write_text(json.dumps(sorted(self.policies.items())))


def stop_halfway(folder: Path, version: int) -> None:
    save = checkpoint.save_tensors

    def halfway(path: Path, tensors: object) -> None:
        save(path, tensors)
        if path.parent.name == f".saving-{version}.0" and path.name == checkpoint.MODEL:
            (folder / "saving").touch()
            end_s = time.monotonic() + DEADLINE_S
            while not (folder / "go").exists() and time.monotonic() < end_s:
                time.sleep(0.02)  # polling with a deadline: the other side is another process

    checkpoint.save_tensors = halfway


def main() -> None:
    folder, stop = Path(sys.argv[1]), stop_on_signals()
    if len(sys.argv) > 2:
        stop_halfway(folder, int(sys.argv[2]))
    training_run(folder, FileHub(folder / "hub.json"), SETTINGS, stop)[0].run()


if __name__ == "__main__":
    main()
