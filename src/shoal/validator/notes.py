"""What the reward says about completions, for the owner: a file in the validator's folder, and nowhere else.

A reward function may name the answer in its notes, and contributors read verdicts; so verdicts have none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from shoal.runtime.files import is_full

log = logging.getLogger(__name__)

MOST_BYTES = 16 * 1024 * 1024
NAME = "notes.jsonl"


class Notebook:
    """Lines of JSON: unit, task, rollout, note. The newest `most_bytes` or so are kept, in two files.

    >>> import tempfile; folder = Path(tempfile.mkdtemp())
    >>> Notebook(folder).write(7, "sort/train/3", [(0, "too long")]); (folder / NAME).read_text()
    '{"unit": 7, "task": "sort/train/3", "rollout": 0, "note": "too long"}\\n'
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._file = folder / NAME
        self._most_bytes = most_bytes
        self._failed = False

    def write(self, unit: int, task: str, notes: Sequence[tuple[int, str]]) -> None:
        """Add the notes of a group. A disk that takes nothing is no reason to stop judging: it is said once."""
        lines = [{"unit": unit, "task": task, "rollout": rollout, "note": note} for rollout, note in notes]
        if not lines:
            return
        try:
            if self._file.exists() and self._file.stat().st_size >= self._most_bytes // 2:
                self._file.replace(self._file.with_suffix(".1.jsonl"))
            with self._file.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        except OSError as error:
            if not self._failed:
                full = " (the disk is full)" if is_full(self._file.parent) else ""
                log.warning("notes of the reward cannot be written to %s: %s%s", self._file, error.strerror, full)
            self._failed = True
