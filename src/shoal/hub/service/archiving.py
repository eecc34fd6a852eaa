"""Records of rollouts (`shoal.records`), written by the hub that does the background work, from rows and bodies that
are on the disk anyway. A kill loses nothing: the newest file says behind which verdict to continue."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from shoal.errors import ShoalError
from shoal.hub.service.context import Context
from shoal.hub.state.rows import LeaseRow, SubmissionRow, SubmissionState, UnitState
from shoal.protocol import unpack, unpack_tokens
from shoal.protocol.codec import BodyLimits
from shoal.protocol.submission import Rollout, Submission
from shoal.protocol.verdict import TokenTrace
from shoal.records import FOLDER, Segments

GROUPS_PER_TICK, FLUSH_ROLLOUTS, FLUSH_MS = 64, 512, 20_000
FLUSH_TOKENS = 2**20
SETTLED_MS = 2_000  # decisions of the last moments may still be on their way into the database
SHARED_MS = 10_000  # where several hubs write
AGAIN_MS = 60_000
TRACE_LIMITS = BodyLimits(2**24, 2**25)

log = logging.getLogger("shoal.hub")


@dataclass(frozen=True)
class JudgedGroup:
    """What the database has of a group; `verdict` is its document."""

    number: int
    step: int
    row: SubmissionRow
    task: str
    is_dropped: bool
    lease: LeaseRow
    verdict: Mapping[str, Any]

    @property
    def outcome(self) -> str:
        state = self.row.state
        return "dropped" if state == SubmissionState.ACCEPTED and self.is_dropped else state.value


class Archiving:
    def __init__(self, context: Context) -> None:
        self._context, self._rows, self._names = context, list[dict[str, Any]](), list[str]()
        self._tokens = 0
        self._cursor, self._since_ms, self._is_open = (0, ""), 0, False
        budget = round(context.config.settings.records_gb * 1e9)
        self._segments = (
            Segments(context.config.folder / FOLDER, budget, context.secret) if context.config.records else None
        )

    def tick(self, now_ms: int) -> None:
        """Records serve people: what fails is tried again later, and never ends the hub."""
        if self._segments is None or now_ms < self._since_ms:
            return
        try:
            self._collect(self._segments, now_ms - (SHARED_MS if self._context.storage.is_shared else SETTLED_MS))
            if (
                len(self._rows) >= FLUSH_ROLLOUTS
                or self._tokens >= FLUSH_TOKENS
                or (self._rows and now_ms - self._since_ms >= FLUSH_MS)
            ):
                self._flush(self._segments)
            if not self._rows:
                self._since_ms = now_ms
        except Exception as error:  # noqa: BLE001
            log.warning("records of rollouts cannot be written, tried again in %d s: %s", AGAIN_MS // 1000, repr(error))
            self.rest()
            self._since_ms = now_ms + AGAIN_MS

    def rest(self) -> None:
        """Another hub does the background work: what is not written yet is read again by the next writer."""
        if self._segments is not None and self._is_open:
            self._rows, self._names, self._tokens, self._is_open = [], [], 0, False
            self._segments.close()

    def close(self) -> None:
        """Write down all that was decided."""
        if self._segments is None or not self._context.leads:
            return
        try:
            found = 1
            while found:
                found = self._collect(self._segments, self._context.clock.now_ms())
                if self._rows:
                    self._flush(self._segments)
        except Exception as error:  # noqa: BLE001
            log.warning("the last records of rollouts are not written, the next start does it: %s", error)
        self.rest()

    def _collect(self, segments: Segments, until_ms: int) -> int:
        if not self._is_open:
            segments.open()
            self._cursor, self._number, self._is_open = segments.cursor, segments.next_group, True
        with self._context.storage.read() as reader:
            found = reader.decided_after(*self._cursor, until_ms, GROUPS_PER_TICK)
            names = [row.submission for row in found]
            verdicts, traces = reader.verdicts_of(names), reader.traces_of(names)
            units = reader.units_named([row.unit for row in found])
            leases = reader.leases_named([row.lease for row in found])
            step = reader.standing().next_step if found else 0
        for place, row in enumerate(found):
            if self._tokens >= FLUSH_TOKENS:  # the rest comes with the next call
                return place
            unit, signed = units[row.unit], json.loads(verdicts.get(row.submission) or "{}")
            is_dropped = unit.state == UnitState.DROPPED and unit.submission == row.submission
            group = JudgedGroup(
                self._number, step, row, unit.task, is_dropped, leases[row.lease], signed.get("document", {})
            )
            rows = self._group_rows(segments, group, traces.get(row.submission))
            self._rows += rows
            self._tokens += sum(each["tokens"] for each in rows)
            self._names.append(row.submission)
            self._number, self._cursor = self._number + 1, (row.decided_at_ms or 0, row.submission)
        return len(found)

    def _flush(self, segments: Segments) -> None:
        from shoal.records.schema import table_of

        segments.append(table_of(self._rows), self._cursor)
        with self._context.storage.write() as transaction:
            transaction.forget_traces(self._names)
        self._rows, self._names, self._tokens = [], [], 0

    def _group_rows(self, segments: Segments, group: JudgedGroup, trace: bytes | None) -> list[dict[str, Any]]:
        lease = json.loads(group.lease.document or "{}").get("document", {})
        rewards, outcome = group.verdict.get("rewards", []), group.outcome
        prompt_ids = lease.get("prompt_ids", [])
        rollouts = self._rollouts(group.row)
        kept = segments.keeps(group.row.submission, outcome)
        texts = self._texts([prompt_ids, *(_ids(each.tokens) for each in rollouts)]) if kept else []
        gaps, margins = _split(trace, rollouts) if kept else ([], [])
        common = {
            "group": group.number, "step": group.step, "task": group.task, "outcome": outcome,
            **{name: getattr(group.row, name) for name in (
                "submission", "unit", "node", "reason", "message", "depth", "incarnation", "version", "received_at_ms",
                "decided_at_ms")},
            "validator": group.row.validator or "", "kind": lease.get("profile", ""),
            "severity": group.verdict.get("severity") or "", "prompt_tokens": len(prompt_ids),
            "length_target": lease.get("length_target"), "kept": kept,
        }  # fmt: skip
        found = []
        for sample, rollout in enumerate(rollouts or [NOTHING]):
            reward = rewards[sample] if sample < len(rewards) else {}
            ids = _ids(rollout.tokens)
            found.append({
                **common, "sample": sample, "reward": reward.get("value"), "tokens": len(ids),
                "parts": list(reward.get("parts", {}).items()), "finish": rollout.finish,
                "checks": json.dumps(group.verdict.get("checks", [])) if kept and sample == 0 else None,
                "prompt": texts[0] if kept else None, "completion": texts[1 + sample] if kept and rollouts else None,
                "pieces": self._texts([[token] for token in ids]) if kept else None,
                "prompt_ids": _array(prompt_ids if kept else []), "token_ids": _array(ids if kept else []),
                "given": _array(_ids(rollout.given) if kept else []),
                "logprobs": _floats(rollout.logprobs if kept else b"", "<f4"),
                "gaps": gaps[sample] if gaps else _floats(b"", "<f2"),
                "margins": margins[sample] if margins else _floats(b"", "<f2"),
            })  # fmt: skip
        return found

    def _rollouts(self, row: SubmissionRow) -> Sequence[Rollout]:
        """Empty if the body cannot be read: it was rejected for that, or the store has lost it."""
        try:
            body = self._context.blobs.get(row.submission)
            rollouts = unpack(body, Submission, self._context.config.submission_limits).rollouts
            most = 4 * self._context.rules.max_new_tokens  # bytes; what is longer was rejected for it
            return [each if len(each.tokens) <= most else replace(each, tokens=each.tokens[:most]) for each in rollouts]
        except ShoalError as error:
            log.debug("submission %s is recorded without its tokens: %s", row.submission[:16], error)
            return []

    def _texts(self, ids: Sequence[list[int]]) -> list[str]:
        """Token ids that the tokenizer does not know have no text."""
        decode = self._context.config.texts
        assert decode is not None, "without it nothing is recorded"
        try:
            return decode(ids)
        except (ShoalError, OverflowError):
            return [""] * len(ids) if len(ids) == 1 else [text for each in ids for text in self._texts([each])]


NOTHING = Rollout(b"", b"", "length")


def _ids(data: bytes) -> list[int]:
    """Of anybody's bytes: what is no whole number of tokens has none, and ids are cut to what a column takes."""
    return [min(each, 2**31 - 1) for each in unpack_tokens(data).tolist()] if len(data) % 4 == 0 else []


def _array(values: Sequence[int]) -> Any:
    import numpy as np

    return np.asarray(values, np.int32)


def _floats(data: bytes, kind: str) -> Any:
    import numpy as np

    return np.frombuffer(data[: len(data) // np.dtype(kind).itemsize * np.dtype(kind).itemsize], kind)


def _split(trace: bytes | None, rollouts: Sequence[Rollout]) -> tuple[list[Any], list[Any]]:
    """Gaps and margins by rollout; nothing without a trace that fits."""
    if trace is None:
        return [], []
    import numpy as np

    lengths = [len(each.tokens) // 4 for each in rollouts]
    try:
        found = unpack(trace, TokenTrace, TRACE_LIMITS)
    except ShoalError:
        return [], []
    gaps, margins = (_floats(data, "<f2") for data in (found.gaps, found.margins))
    if not len(gaps) == len(margins) == sum(lengths):
        return [], []
    ends = np.cumsum(lengths)[:-1]
    return list(np.split(gaps, ends)), list(np.split(margins, ends))
