"""Saving and publishing beside training: copies are begun in front (`checkpoint.Copies`), what is slow is done here.

    main thread                                 publisher thread (one version at a time)
    copy ─► submit ───────────────────────────► rows to the hub ─► copy arrived ─► checkpoint durable, if due
    check() at every wait ◄── failure, raised ─ hub.ledger_head ─► origin.publish ─► hub.announce
    wait() before the next copy: never more than one version on its way, and its memory is free again

A resumed trainer publishes again what was published before the crash. Another digest means that the weights could not
be reproduced (a GPU, another torch): a new incarnation begins.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import DeadlineExceeded, HubRefused, PolicyMismatch
from shoal.models.load import DTYPES
from shoal.models.state import lent_view
from shoal.protocol import (
    BroadcastHead,
    LedgerHead,
    PolicyAnnouncement,
    PolicyManifest,
    SigningKey,
    TensorView,
    sign_document,
)
from shoal.runtime import Clock, SystemClock, point
from shoal.shardcast import Content
from shoal.trainer.checkpoint import CheckpointStore, StateCopy
from shoal.trainer.folder import TrainerProgress
from shoal.trainer.record import Row, RunRecord, TrainerHub

log = logging.getLogger(__name__)

MAX_NEW_INCARNATIONS = 8


class PolicyOrigin(Protocol):
    """Where versions go: `shardcast.Origin`."""

    # fmt: off
    def head(self) -> BroadcastHead | None: ...
    def publish(
        self, version: int, content: Content, *, incarnation: int = 0, ledger_head: LedgerHead | None = None,
    ) -> PolicyManifest: ...
    # fmt: on


def views_of(weights: Mapping[str, Tensor], dtype: str) -> list[TensorView]:
    """The weights in the published type; those that have it already are not copied."""
    return [lent_view(name, cast(tensor, DTYPES[dtype])) for name, tensor in weights.items()]


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@dataclass
class Publisher:
    """Failures are raised in the main thread. Versions up to `republished_until` were published before this process
    started; a digest conflict after that means a second trainer. `worked_s`: time for the last version; `saved_s`: the
    part before publishing."""

    origin: PolicyOrigin
    hub: TrainerHub
    record: RunRecord
    store: CheckpointStore
    files: Mapping[str, bytes]
    dtype: str
    key: SigningKey
    run: str
    incarnation: int
    republished_until: int
    deadline_s: float
    clock: Clock = field(default_factory=SystemClock)
    worked_s: float = 0.0
    saved_s: float = 0.0
    _current: Future[PolicyManifest | None] | None = None

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")

    def submit(
        self, version: int, copied: StateCopy, rows: Sequence[Row] = (), scores: Mapping[int, float] = {},
        publish: bool = True,
    ) -> None:  # fmt: skip
        """Begin with a version, after the previous one is done. It is saved, with `scores`, if `copied` is captured;
        the copied memory must not change until it is done."""
        self.wait()
        self._current = self._pool.submit(self._work, version, copied, rows, scores, publish)

    def check(self) -> None:
        """Raise the failure of the current version, if it has failed. Never waits."""
        if self._current is not None and self._current.done():
            self._current.result()

    def wait(self) -> PolicyManifest | None:
        if self._current is None:
            return None
        try:
            return self._current.result(self.deadline_s)
        except FutureTimeoutError as error:
            details = f"publishing a policy took longer than {self.deadline_s:.0f} s; look at the origin and the hub"
            raise DeadlineExceeded(details) from error

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        if self._current is not None and (failure := self._current.exception()) is not None:
            log.info("the last publication did not complete: %s", failure)

    def _work(
        self, version: int, copied: StateCopy, rows: Sequence[Row], scores: Mapping[int, float], publish: bool
    ) -> PolicyManifest | None:
        began_s = self.clock.monotonic_s()
        self.record.report(rows)
        point("trainer.step.recorded")
        copied.arrived()
        if copied.captured is not None:
            progress = TrainerProgress(self.run, version, self.incarnation)
            self.store.write(copied.captured, progress, self.files, scores)
        content = Content.of(self.files, views_of(copied.weights, self.dtype)) if publish else None
        saved_s = self.clock.monotonic_s() - began_s
        manifest = None if content is None else self._publish(version, content)
        self.worked_s, self.saved_s = self.clock.monotonic_s() - began_s, saved_s
        if manifest is not None:
            size_gb = manifest.size_bytes / 1e9
            log.info("policy %s is out: %.3g GB in %.2f s", manifest.policy.label, size_gb, self.worked_s)
        return manifest

    def _publish(self, version: int, content: Content) -> PolicyManifest:
        for _ in range(MAX_NEW_INCARNATIONS):
            try:
                head = self.hub.ledger_head()
                manifest = self.origin.publish(version, content, incarnation=self.incarnation, ledger_head=head)
                now_ms = self.clock.now_ms()
                announcement = PolicyAnnouncement(run=self.run, policy=manifest.policy, created_at_ms=now_ms)
                point("trainer.publish.before_announce")
                self.hub.announce(sign_document(announcement, self.key))
                point("trainer.publish.after_announce")
                return manifest
            except (PolicyMismatch, HubRefused) as conflict:
                refused = isinstance(conflict, HubRefused) and conflict.code != "policy.digest"
                if refused or version > self.republished_until:
                    raise
                self.incarnation += 1
                message = "version %d could not be reproduced bit for bit; it goes out as incarnation %d: %s"
                log.warning(message, version, self.incarnation, conflict)
        raise PolicyMismatch(f"version {version} conflicts with {MAX_NEW_INCARNATIONS} incarnations: a second trainer?")
