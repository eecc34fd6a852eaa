"""The ledger heads that a hub named in its receipts, kept in the worker's folder: `heads.jsonl`, one receipt per line.

Whoever holds one notices a ledger that was rewritten or cut later, and can prove it: `shoal ledger verify --head FILE`.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from shoal.protocol import SignedDocument
from shoal.runtime.files import open_in_place, write_atomically

log = logging.getLogger(__name__)

HEADS = "heads.jsonl"
KEPT = 1000
"""Receipts kept at least; once there are twice as many, the older half goes. A head covers all rows before it."""


class KeptHeads:
    """`keep` may be called by several threads. A disk that takes nothing costs a head, never the work."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / HEADS
        self._lock = threading.Lock()
        self._newest = ""
        self._lines = _count_lines(self._path)

    def keep(self, receipt: SignedDocument) -> None:
        """Append a receipt, unless the ledger has not grown since the last one."""
        head = receipt.document.get("ledger")
        with self._lock:
            if not isinstance(head, dict) or head.get("hash") == self._newest:
                return
            try:
                with os.fdopen(open_in_place(self._path, os.O_WRONLY | os.O_APPEND), "ab") as file:
                    file.write(receipt.model_dump_json().encode() + b"\n")
                self._newest, self._lines = str(head.get("hash")), self._lines + 1
                if self._lines >= 2 * KEPT:
                    newest = self._path.read_bytes().splitlines(keepends=True)[-KEPT:]
                    write_atomically(self._path, b"".join(newest))
                    self._lines = len(newest)
            except OSError as error:
                log.warning("the ledger head in a receipt could not be kept in %s: %s", self._path, error)


def _count_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0
