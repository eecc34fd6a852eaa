"""Judging the audits of one policy together: cheap checks, one batched prefill, the rest, and the reward.

    dockets ─► before the prefill ─┬─ failed ──────────────────────────────────────────► rejected
                                   └─ all rollouts that are left, one prefill ─► after ─┬► rejected
                                                     │ the engine fails                 └► reward ─► accepted
                                                     └► each alone, to find the one it was; that one is inconclusive

Pure but for the engine and the environment: nothing here talks to the hub.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shoal.engines import Engine, Prefill, PrefillRequest
from shoal.engines.shelf import LoadedPolicy
from shoal.environments import Environment
from shoal.errors import ScoringFailure, ShoalError
from shoal.protocol import Verdict
from shoal.runtime.clock import Clock, SystemClock
from shoal.validator.case import Case, Finding, open_case
from shoal.validator.checks import AFTER_PREFILL, BEFORE_PREFILL, run_checks
from shoal.validator.rewards import Decode, Decoders, score_group, shuffled
from shoal.validator.settings import Tolerances
from shoal.validator.verdicts import MACHINERY_PREFILL, MACHINERY_REWARD, Docket

log = logging.getLogger(__name__)

ENGINE_ERRORS = (ShoalError, RuntimeError, ValueError, MemoryError)  # torch reports a full device as RuntimeError


@dataclass
class _Open:
    """A docket that no check has failed so far."""

    docket: Docket
    case: Case
    findings: list[Finding]


@dataclass(frozen=True)
class Judge:
    """Turns dockets into verdicts; the same dockets give the same verdicts, however they are batched."""

    environment: Environment
    tolerances: Tolerances
    shuffle_rewards: bool = False
    clock: Clock = field(default_factory=SystemClock)
    decoders: Decoders = field(default_factory=Decoders, repr=False)

    def verdicts(self, dockets: Sequence[Docket], loaded: LoadedPolicy) -> list[Verdict]:
        """One verdict per docket, in order. All leases must name the loaded policy."""
        decided: dict[str, Verdict] = {}
        open_: list[_Open] = []
        for docket in dockets:
            case = open_case(docket.lease, docket.body, loaded.engine.vocabulary_size, self.tolerances)
            findings = run_checks(BEFORE_PREFILL, case)
            if findings[-1].passed:
                open_.append(_Open(docket, case, findings))
            else:
                decided[docket.audit.submission] = docket.rejected(findings, self.clock.now_ms())
        for entry, prefills in zip(open_, prefill_all(loaded.engine, [entry.case for entry in open_]), strict=True):
            decided[entry.docket.audit.submission] = self._after_prefill(entry, prefills, loaded)
        return [decided[docket.audit.submission] for docket in dockets]

    def _after_prefill(self, entry: _Open, prefills: Prefills, loaded: LoadedPolicy) -> Verdict:
        docket, now_ms = entry.docket, self.clock.now_ms()
        if isinstance(prefills, Exception):
            return docket.inconclusive(
                entry.findings, MACHINERY_PREFILL, f"the validator's engine failed: {prefills}", now_ms
            )
        case = replace(entry.case, prefills=prefills)
        findings = entry.findings + run_checks(AFTER_PREFILL, case)
        if not findings[-1].passed:
            return docket.rejected(findings, now_ms)
        return self._scored(docket, case, findings, self.decoders.of(loaded.files))

    def _scored(self, docket: Docket, case: Case, findings: list[Finding], decode: Decode) -> Verdict:
        try:
            rewards = score_group(self.environment, case.lease, case.rollouts, decode)
        except ScoringFailure as failure:
            log.warning("unit %d could not be scored: %s", case.lease.unit, failure)
            return docket.inconclusive(findings, MACHINERY_REWARD, str(failure), self.clock.now_ms())
        if self.shuffle_rewards:
            rewards = shuffled(rewards, case.lease.run, case.lease.unit)
        return docket.accepted(findings, rewards, len(case.tokens()), self.clock.now_ms())


Prefills = tuple[Prefill, ...] | Exception


def prefill_all(engine: Engine, cases: Sequence[Case]) -> list[Prefills]:
    """The prefills of every case from one engine call; if that call fails, from one call each."""
    try:
        return _prefill_together(engine, cases)
    except ENGINE_ERRORS as error:
        log.warning("a prefill of %d submissions failed (%s); trying each alone", len(cases), error)
        return [_prefill_alone(engine, case) for case in cases]


def _prefill_together(engine: Engine, cases: Sequence[Case]) -> list[Prefills]:
    if not cases:
        return []
    results = iter(engine.prefill([request for case in cases for request in _requests(case)]))
    return [tuple(next(results) for _ in case.rollouts) for case in cases]


def _prefill_alone(engine: Engine, case: Case) -> Prefills:
    try:
        return _prefill_together(engine, [case])[0]
    except ENGINE_ERRORS as error:
        log.warning("the prefill of unit %d failed: %s", case.lease.unit, error)
        return error


def _requests(case: Case) -> list[PrefillRequest]:
    lease = case.lease
    return [
        PrefillRequest(lease.prompt_ids, rollout.token_ids.astype(np.int32), lease.sampling.temperature)
        for rollout in case.rollouts
    ]
