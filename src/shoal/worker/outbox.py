"""Finished work on its way to the hub, as files: no crash loses what was generated.

    generate ─► put (fsync) ─► waiting ─┬─ verified receipt ──► file removed
                   │                    └─ final refusal ─────► file removed, the hub's reason in the log
                   └─ kill -9 anywhere: the next start finds the file and sends it

Sending twice is harmless: the same bytes get the same receipt.

`KeptHeads` are the ledger heads that a hub named in its receipts: `heads.jsonl`, one receipt per line. With one
of them a worker can prove that a ledger was rewritten or cut later: `shoal ledger verify --head FILE`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.client import HubClient
from shoal.errors import CodecError, DeadlineExceeded, HubRefused, ShoalError, ShutOut
from shoal.protocol import BodyLimits, SignedDocument, Submission, pack, submission_digest, unpack
from shoal.runtime import Clock, StopToken, SystemClock, point
from shoal.runtime.files import ensure_folder, open_in_place, resource_error, write_atomically

log = logging.getLogger(__name__)

SUFFIX = ".submission"
OWN_LIMITS = BodyLimits(compressed_bytes=2**30, inflated_bytes=2**32)  # files that this worker wrote itself


@dataclass(frozen=True)
class Parcel:
    path: Path
    run: str
    lease: str
    unit: int


class Outbox:
    """The parcels in one folder, oldest first. Shared by threads, not by processes (the worker locks its folder)."""

    def __init__(self, folder: Path, clock: Clock = SystemClock()) -> None:
        self._folder = ensure_folder(folder, private=True)
        self._clock, self._changed = clock, threading.Condition()
        self._parcels: dict[Path, Parcel] = {}
        self._taken: set[Path] = set()
        try:
            for path in sorted(self._folder.iterdir()):
                if path.is_file() and path.name.startswith("."):
                    path.unlink()  # a temporary of a process that died before its rename
                elif path.name.endswith(SUFFIX):
                    try:
                        found = unpack(path.read_bytes(), Submission, OWN_LIMITS)
                        self._parcels[path] = Parcel(path, found.run, found.lease, found.unit)
                    except CodecError as error:
                        log.warning("%s is damaged and not sent: %s", path, error)
                        path.unlink()
        except OSError as error:
            raise resource_error("read the outbox", self._folder, error) from error

    def put(self, submission: Submission) -> Parcel:
        """Make a finished submission durable: after the return no crash loses it."""
        body = pack(submission)
        name = f"{self._clock.now_ms():013d}-{submission.unit}-{submission_digest(body)[:12]}{SUFFIX}"
        parcel = Parcel(self._folder / name, submission.run, submission.lease, submission.unit)
        write_atomically(parcel.path, body)
        point("worker.outbox.written")
        with self._changed:
            self._parcels[parcel.path] = parcel
            self._changed.notify_all()
        return parcel

    def waiting(self, run: str) -> Sequence[Parcel]:
        """Still to be sent. Parcels of other runs stay for when they are joined again."""
        with self._changed:
            return self._of(run)

    def take(self, run: str, timeout_s: float) -> Parcel | None:
        """Wait for the oldest free parcel of a run. The caller ends with `remove` or `put_back`."""

        def free() -> Parcel | None:
            return next((parcel for parcel in self._of(run) if parcel.path not in self._taken), None)

        with self._changed:
            if (found := self._changed.wait_for(free, timeout_s)) is not None:
                self._taken.add(found.path)
            return found

    def put_back(self, parcel: Parcel) -> None:
        with self._changed:
            self._taken.discard(parcel.path)
            self._changed.notify_all()

    def wait_until_below(self, run: str, limit: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self._of(run)) < limit, timeout_s)

    def remove(self, parcel: Parcel) -> None:
        """The hub has given a receipt, or will never accept the parcel."""
        parcel.path.unlink(missing_ok=True)
        with self._changed:
            self._parcels.pop(parcel.path, None)
            self._taken.discard(parcel.path)
            self._changed.notify_all()

    def _of(self, run: str) -> list[Parcel]:
        return sorted((p for p in self._parcels.values() if p.run == run), key=lambda parcel: parcel.path.name)


HEADS = "heads.jsonl"
KEPT = 1000  # at least; with twice as many the older half is deleted: a head covers all rows before it


class KeptHeads:
    """`keep` may be called by several threads. If the disk is full, a head is lost, but no work."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / HEADS, threading.Lock()
        self._newest = ""
        self._lines = self._path.read_bytes().count(b"\n") if self._path.is_file() else 0

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


POLL_S = 0.1
JOIN_S = 10.0
UPLOADS = 4
UNAUTHORISED = 401


class Uploader:
    """A context manager. `failure` is the error that the worker should end with, if any."""

    def __init__(
        self, client: HubClient, outbox: Outbox, on_sent: Callable[[Parcel, bool], None], clock: Clock = SystemClock()
    ) -> None:
        self._client, self._outbox, self._on_sent, self._clock = client, outbox, on_sent, clock
        self._run, self._end = client.run_info().run, StopToken()
        names = (f"uploader-{number}" for number in range(UPLOADS))
        self._threads = [threading.Thread(target=self._empty, name=name, daemon=True) for name in names]
        self.failure: ShoalError | None = None

    def __enter__(self) -> Uploader:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._end.set("the worker ended")
        end_s = self._clock.monotonic_s() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - self._clock.monotonic_s()))

    def flush(self, timeout_s: float, give_up: Callable[[], bool]) -> bool:
        """Whether everything was sent before the time-out, before a failure, and before `give_up` returned true."""
        end_s = self._clock.monotonic_s() + timeout_s
        while not self._outbox.wait_until_below(self._run, 1, POLL_S):
            if self.failure is not None or give_up() or self._clock.monotonic_s() > end_s:
                return False
        return True

    def _empty(self) -> None:
        while not self._end.is_set() and self.failure is None:
            if (parcel := self._outbox.take(self._run, POLL_S)) is None:
                continue
            try:
                self._send(parcel)
            except DeadlineExceeded:
                self._outbox.put_back(parcel)
                self._end.wait(POLL_S)  # while stopping: try again until the flush is over
            except (ShoalError, OSError) as error:  # also if the disk is full
                self._outbox.put_back(parcel)
                self.failure = error if isinstance(error, ShoalError) else resource_error("send", parcel.path, error)

    def _send(self, parcel: Parcel) -> None:
        point("worker.outbox.before_send")
        try:
            receipt = self._client.submit(parcel.lease, parcel.path.read_bytes())
        except HubRefused as refusal:
            if refusal.status == UNAUTHORISED or isinstance(refusal, ShutOut):
                raise  # about this node, not about the parcel: it stays
            log.warning("unit %d was not taken: %s", parcel.unit, refusal)
            taken = False
        else:
            log.debug("unit %d: receipt for %s", parcel.unit, receipt.submission)
            point("worker.outbox.after_receipt")
            taken = True
        self._outbox.remove(parcel)
        self._on_sent(parcel, taken)
