"""Evaluation between audits: a slice is answered greedily and scored, and what goes wrong is said."""

from typing import Any

import pytest
from honest import EOS, HUB, POLICY, RUN, SAMPLING, LengthEnvironment, engine, loaded

from shoal import protocol
from shoal.client import Activity
from shoal.engines.shelf import EngineShelf, LoadedPolicy
from shoal.errors import HubRefused, VersionNotFound
from shoal.runtime import ManualClock, StopToken
from shoal.validator.side_jobs import SHARE, SliceEvaluator

KEY = protocol.SigningKey.from_seed(b"v" * 32)


def part(*tasks: str, **changes: Any) -> protocol.EvaluationSlice:
    asked = tuple(protocol.EvaluationTask(task=task, prompt_ids=(10 + index, 20)) for index, task in enumerate(tasks))
    fields = {"run": RUN, "policy": POLICY, "first": 16, "tasks": asked, "sampling": SAMPLING}
    return protocol.EvaluationSlice(**{**fields, "environment_digest": "e" * 64, "deadline_ms": 1, **changes})


def test_the_scores_are_those_of_the_greedy_completions_and_what_could_not_be_scored_has_none() -> None:
    found = evaluating(Hub()).report(part("t/1", "t/2", "t/3", "t/broken", "t/nan", "unknown"), loaded())
    tokens = engine().greedy([(10, 20), (11, 20), (12, 20)], SAMPLING.max_new_tokens, (EOS,))
    assert found.scores[:3] == tuple(float(len(ids) - (ids[-1] == EOS)) for ids in tokens)
    assert found.scores[3:] == (None, None, None)
    assert (found.first, found.policy, found.problem, found.decided_at_ms) == (16, POLICY, "", ManualClock().now_ms())


def test_an_engine_that_fails_is_a_problem_not_a_score() -> None:
    class Broken:
        def greedy(self, *_arguments: object) -> None:
            raise RuntimeError("out of memory\n\x1b[31m" + "x" * 500)

    found = evaluating(Hub()).report(part("t/1"), LoadedPolicy(POLICY, Broken(), {}))  # type: ignore[arg-type]
    assert found.scores == ()
    assert found.problem.startswith("the validator's engine failed: out of memory ")
    assert len(found.problem) <= 200


class Hub:
    """Stands where the client stands."""

    def __init__(self, refusal: HubRefused | None = None) -> None:
        self.key, self.refusal = KEY, refusal
        self.reports: list[protocol.EvaluationReport] = []
        self.more = 0

    def audits(self, request: protocol.AuditRequest) -> protocol.AuditReply:
        assert request.evaluate == "only"
        self.more -= 1
        return protocol.AuditReply(evaluation=protocol.sign_document(part("t/1"), HUB) if self.more >= 0 else None)

    def open_slice(self, signed: protocol.SignedDocument) -> protocol.EvaluationSlice:
        return protocol.open_document(signed, protocol.EvaluationSlice, HUB.public_key)

    def report_evaluation(self, signed: protocol.SignedDocument) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.reports.append(protocol.open_document(signed, protocol.EvaluationReport, KEY.public_key))


class Shelf(EngineShelf):
    """One policy, or none; fetching it takes so long."""

    def __init__(self, clock: ManualClock, missing: bool = False, takes_s: float = 0.0) -> None:
        self._clock, self._missing, self._takes_s = clock, missing, takes_s

    def get(self, ref: protocol.PolicyRef, deadline_s: float) -> LoadedPolicy:
        self._clock.advance(self._takes_s)
        if self._missing:
            raise VersionNotFound(f"nobody has {ref.label}")
        return loaded()


def evaluating(
    hub: Hub, stop: StopToken | None = None, clock: ManualClock | None = None, **shelf: Any
) -> SliceEvaluator:
    clock = clock or ManualClock()
    client: Any = hub
    given = (Shelf(clock, **shelf), LengthEnvironment(), None, Activity(clock), stop or StopToken(), clock)
    return SliceEvaluator(client, *given)


def test_missing_policy_is_reported_unless_stopping() -> None:
    hub, stop = Hub(), StopToken()
    evaluating(hub, stop, missing=True).measure(protocol.sign_document(part("t/1"), HUB))
    stop.set("enough")
    evaluating(hub, stop, missing=True).measure(protocol.sign_document(part("t/1"), HUB))
    problem = f"the policy could not be fetched: nobody has {POLICY.label}"
    assert [(report.scores, report.problem) for report in hub.reports] == [((), problem)]


@pytest.mark.parametrize("signer", [HUB, KEY])
def test_a_report_that_is_not_wanted_and_a_slice_that_is_forged_end_nothing(signer, caplog):
    hub = Hub(HubRefused(404, "evaluation.unknown", "no such slice"))
    evaluating(hub).measure(protocol.sign_document(part("t/1"), signer))
    assert "was not taken" in caplog.text
    assert hub.reports == []


def test_a_busy_validator_measures_for_its_share_of_the_time() -> None:
    clock = ManualClock()
    role = evaluating(Hub(), clock=clock, takes_s=3.0)
    assert role.readiness == "now", "the first at once"
    role.measure(protocol.sign_document(part("t/1"), HUB))
    assert role.readiness == "idle"
    for took_s in (3.0 * (1 - SHARE) / SHARE - 0.1, 0.2):
        assert role.readiness == "idle"
        with role.auditing():
            clock.advance(took_s)
    assert role.readiness == "now", "audits took four times as long"
    clock.advance(1000)
    role.measure(protocol.sign_document(part("t/1"), HUB))
    assert role.readiness == "idle", "what is waited saves up nothing"


def test_after_a_long_handful_of_audits_several_slices_follow() -> None:
    clock, hub = ManualClock(), Hub()
    hub.more = 9
    role = evaluating(hub, clock=clock, takes_s=1.0)
    with role.auditing():
        clock.advance(11.0)
    role.measure(protocol.sign_document(part("t/1"), HUB))
    assert (len(hub.reports), role.readiness) == (3, "idle"), "a fifth of 13.75 s, rounded up to whole slices"
    with role.auditing():
        clock.advance(4000.0)
    role.measure(None)
    hub.more = 2
    role.measure(protocol.sign_document(part("t/1"), HUB))
    assert len(hub.reports) == 6, "until there are none"
