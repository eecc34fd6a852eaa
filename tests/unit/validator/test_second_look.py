"""The second look: no statistical rejection without one in the worker's own number format."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from honest import POLICY, LengthEnvironment, audit_job, engine, lease, loaded, weights

from kit import Patch
from shoal.engines import Engine, LoadedPolicy, Prefill, PrefillRequest
from shoal.engines.scripted import ScriptedEngine
from shoal.errors import ResourceError
from shoal.protocol import Outcome, PolicyRef, ProofParameters, Severity, Verdict
from shoal.validator import judge
from shoal.validator.case import Case, Finding, failed, passed, unsure
from shoal.validator.checks import AFTER_PREFILL
from shoal.validator.judge import Judge, SecondEngines
from shoal.validator.profiles import BUILT_IN, Profile

COARSE = "scripted/cpu/bfloat16"
RIGHT, WRONG = 3.0, 4.0
PROFILES = {**BUILT_IN, COARSE: Profile(key=COARSE, validators=("float32", "bfloat16"))}


def drift(case: Case, severity: Severity | None = Severity.STATISTICAL) -> Finding:
    """Fails if the engine that replayed has other weights than the worker."""
    off = float(np.abs(case.claimed - case.replayed.logprobs).mean())
    return passed("proofs", off=off) if off < 1e-3 else failed("proofs.drift", "a little off", severity, off=off)


def certain(case: Case) -> Finding:
    return drift(case, Severity.CERTAIN)


def accident(case: Case) -> Finding:
    return passed("accident") if drift(case).passed else unsure("sampling.accident", "nobody can tell")


@pytest.fixture(autouse=True)
def only_drift(monkeypatch: Patch) -> None:
    monkeypatch.setattr(judge, "AFTER_PREFILL", (drift,))


def judged(first: LoadedPolicy, second: Engine | None, profile: str = COARSE, **profiles: Any) -> Verdict:
    asked: list[tuple[PolicyRef, str]] = []

    def engine_of(policy: PolicyRef, dtype: str) -> Engine | None:
        asked.append((policy, dtype))
        return second

    found = Judge(LengthEnvironment(), {**PROFILES, **profiles}, second_engine=engine_of)
    [verdict] = found.verdicts([audit_job(lease(profile=profile))], first)
    assert set(asked) <= {(POLICY, "bfloat16")}
    return verdict


@pytest.mark.parametrize(("check", "second", "outcome", "reason"), [
    pytest.param(drift, RIGHT, Outcome.UNSURE, "second.passed", id="what passes it is unsure"),
    pytest.param(drift, WRONG + 1, Outcome.REJECTED, "proofs.drift", id="what fails both is rejected"),
    pytest.param(drift, None, Outcome.UNSURE, "second.missing", id="a machine that cannot look again is unsure"),
    pytest.param(certain, RIGHT, Outcome.UNSURE, "second.passed", id="a certain failure is looked at again, too"),
    pytest.param(certain, WRONG + 1, Outcome.REJECTED, "proofs.drift", id="a certain failure that fails both"),
    pytest.param(certain, None, Outcome.REJECTED, "proofs.drift", id="a certain failure, by the same engine"),
    pytest.param(accident, RIGHT, Outcome.ACCEPTED, "", id="an accident that it does not see is accepted"),
    pytest.param(accident, WRONG, Outcome.UNSURE, "sampling.accident", id="an accident that it sees"),
    pytest.param(accident, None, Outcome.UNSURE, "sampling.accident", id="an accident without a second look"),
])  # fmt: skip
def test_verdict_after_a_second_look(monkeypatch, check, second, outcome, reason):
    monkeypatch.setattr(judge, "AFTER_PREFILL", (check,))
    verdict = judged(loaded(WRONG), None if second is None else engine(second))
    severity = Severity.CERTAIN if check is certain else Severity.STATISTICAL
    assert (verdict.outcome, verdict.reason) == (outcome, reason)
    assert verdict.severity is (severity if outcome is Outcome.REJECTED else None)


def test_both_looks_are_in_the_verdict_and_its_message_says_what_came_of_the_second() -> None:
    verdict = judged(loaded(WRONG), engine(WRONG + 1))
    failures = {check.check: check for check in verdict.checks if not check.passed}
    assert (list(failures), failures["second"].evidence["format"]) == (["second", "proofs"], "bfloat16")
    assert failures["second"].evidence["off"] != failures["proofs"].evidence["off"]
    passed = judged(loaded(WRONG), engine(RIGHT)).message
    assert "in bfloat16, by a second look, the group is in order: a little off" in passed
    assert "this validator cannot compute in bfloat16 to confirm it" in judged(loaded(WRONG), None).message


def test_a_profile_that_is_not_for_the_workers_own_format_allows_no_second_look() -> None:
    profile = Profile(key=COARSE, validators=("float32",))
    assert judged(loaded(WRONG), engine(WRONG), **{COARSE: profile}).reason == "second.missing"


class Coarse(ScriptedEngine):
    kind = COARSE


@pytest.mark.parametrize(("check", "second", "expected"), [
    (accident, RIGHT, (Outcome.ACCEPTED, "")), (accident, WRONG, (Outcome.UNSURE, "sampling.accident")),
    (accident, None, (Outcome.UNSURE, "sampling.accident")), (drift, RIGHT, (Outcome.UNSURE, "second.passed")),
    (drift, WRONG, (Outcome.REJECTED, "proofs.drift")), (drift, None, (Outcome.REJECTED, "proofs.drift")),
])  # fmt: skip
def test_failure_in_a_coarse_format_is_checked_in_float32(monkeypatch, check, second, expected):
    monkeypatch.setattr(judge, "AFTER_PREFILL", (check,))
    coarse, asked = Coarse(), list[str]()
    coarse.load_policy(POLICY, {tensor.name: tensor for tensor in weights(WRONG)})

    def engine_of(_policy: PolicyRef, dtype: str) -> Engine | None:
        asked.append(dtype)
        return None if second is None else engine(second)

    court = Judge(LengthEnvironment(), PROFILES, second_engine=engine_of)
    [verdict] = court.verdicts([audit_job(lease(profile=COARSE))], LoadedPolicy(POLICY, coarse, {}))
    assert ((verdict.outcome, verdict.reason), asked) == (expected, ["float32"])


class FlawedOnce(ScriptedEngine):
    """Its first prefill is of other weights: a flipped bit, or a kernel that fails in large batches."""

    calls = 0

    def prefill(self, requests: Sequence[PrefillRequest], proof: ProofParameters | None = None) -> list[Prefill]:
        self.calls += 1
        return engine(WRONG).prefill(requests, proof) if self.calls == 1 else super().prefill(requests, proof)


def test_a_fault_of_one_prefill_strikes_nobody_where_both_have_the_same_format() -> None:
    policy = flawed()
    verdict = judged(policy, None, profile="scripted/cpu/float32")
    assert (verdict.outcome, verdict.reason, policy.engine.calls) == (Outcome.UNSURE, "second.passed", 2)  # type: ignore[attr-defined]
    assert judged(loaded(WRONG), None, profile="scripted/cpu/float32").outcome is Outcome.REJECTED


def flawed() -> LoadedPolicy:
    found = FlawedOnce()
    found.load_policy(POLICY, {tensor.name: tensor for tensor in weights(RIGHT)})
    return LoadedPolicy(POLICY, found, {})


@pytest.mark.parametrize("newcomer", [False, True])
def test_a_fault_of_one_prefill_bans_nobody_however_wrong_it_is(newcomer: bool, monkeypatch: Patch) -> None:
    monkeypatch.setattr(judge, "AFTER_PREFILL", AFTER_PREFILL)
    handed_in = audit_job(lease(profile="scripted/cpu/float32"))
    handed_in = replace(handed_in, audit=handed_in.audit.model_copy(update={"newcomer": newcomer}))
    court = Judge(LengthEnvironment(), PROFILES)
    [verdict] = court.verdicts([handed_in], loaded(WRONG))
    assert (verdict.outcome, verdict.severity) == (Outcome.REJECTED, Severity.CERTAIN)
    [verdict] = court.verdicts([handed_in], flawed())
    expected = (Outcome.ACCEPTED, "") if newcomer else (Outcome.UNSURE, "second.passed")  # of whom two are looked at
    assert (verdict.outcome, verdict.reason) == expected


def test_a_format_that_this_machine_lacks_is_tried_once_for_each_policy() -> None:
    fetched: list[int] = []

    def fetch(policy: PolicyRef, deadline_s: float) -> Any:
        fetched.append(policy.version)
        raise ResourceError("no memory")

    others = SecondEngines("scripted", "cpu", fetch)
    newer = POLICY.model_copy(update={"version": 4})
    assert [others.get(policy, "bfloat16") for policy in (POLICY, POLICY, newer, newer)] == [None] * 4
    assert fetched == [3, 4]
