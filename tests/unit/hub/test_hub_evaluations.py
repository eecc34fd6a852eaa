"""Evaluations over the hub's HTTP interface: slices for validators, reports, and what everybody sees of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kit.hub import HUB, RUN_ID, VALIDATOR, Bench, FakeEnvironment, certificate, code_of, ok, worker_key
from kit.state import NOW_MS, moment, policy
from shoal import protocol
from shoal.environments import Split, Task
from shoal.hub.state import Command, EvaluationPlan, EvaluationRow, EvaluationState, Moment, Save, evaluations

PLAN = EvaluationPlan(every=2, tasks=40)


class WithHeldOut(FakeEnvironment):
    """Held-out tasks, the fourth of which has no tokens."""

    def tasks(self, split: Split) -> Sequence[Task]:
        if split == "train":
            return super().tasks(split)
        return [Task(f"held-{index}", "" if index == 3 else f"{index}+", "") for index in range(44)]


pytestmark = pytest.mark.hub(changes={"environment": WithHeldOut(), "evaluation": PLAN})


def ask(bench: Bench, key: protocol.SigningKey = VALIDATOR, evaluate: str = "idle", **more: Any) -> protocol.AuditReply:
    body = {"max_audits": 8, "evaluate": evaluate, **more}
    return protocol.AuditReply.model_validate_json(ok(bench.actor(key).call("POST", "/audits", body)).content)


def slice_of(reply: protocol.AuditReply) -> protocol.EvaluationSlice:
    assert reply.evaluation is not None
    return protocol.open_document(reply.evaluation, protocol.EvaluationSlice, HUB.public_key)


def report(part: protocol.EvaluationSlice, scores: Sequence[float | None], **changes: Any) -> protocol.EvaluationReport:
    fields = {"run": RUN_ID, "policy": part.policy, "first": part.first, "environment_digest": part.environment_digest}
    return protocol.EvaluationReport(**{**fields, "scores": tuple(scores), "decided_at_ms": 1, **changes})


def send(bench: Bench, said: protocol.EvaluationReport, key: protocol.SigningKey = VALIDATOR) -> Any:
    return bench.actor(key).call("POST", "/evaluations", protocol.sign_document(said, key))


def page(bench: Bench, since: int = 0) -> protocol.EvaluationPage:
    return protocol.EvaluationPage.model_validate_json(ok(bench.http.get(f"/evaluations?since={since}")).content)


def second_validator(bench: Bench) -> protocol.SigningKey:
    key = worker_key(99)
    body = protocol.Registration(public_key=key.public_key, role="validator", certificate=certificate(key, "validator"))
    ok(bench.actor(key).call("POST", "/nodes", body))
    return key


def test_a_version_is_measured_slice_by_slice(bench: Bench) -> None:
    first = slice_of(ask(bench))
    assert (first.run, first.policy.version, first.first) == (RUN_ID, 0, 0)
    assert [task.task for task in first.tasks] == [f"held-{index}" for index in range(32) if index != 3]
    assert first.tasks[0].prompt_ids == tuple(b"0+")
    ok(send(bench, report(first, [1.0] * 30 + [None])))
    second = slice_of(ask(bench))
    assert [task.task for task in second.tasks] == [f"held-{index}" for index in range(32, 40)], "40 of the 44"
    assert not page(bench).evaluations[0].complete
    ok(send(bench, report(second, [0.0] * 8)))
    (found,) = page(bench).evaluations
    assert (found.policy.version, found.complete, found.scored) == (0, True, 38)
    assert found.mean == pytest.approx(30 / 38)
    assert bench.status().evaluations == (found,)
    text = ok(bench.http.get("/metrics")).text
    assert "shoal_hub_held_out_version 0.0" in text
    assert f"shoal_hub_held_out_score {30 / 38}" in text
    assert ask(bench).evaluation is None
    assert page(bench, since=1).evaluations == ()


def test_a_killed_validators_slice_is_taken_up_again(bench: Bench) -> None:
    other = second_validator(bench)
    lost = slice_of(ask(bench))
    assert slice_of(ask(bench, other)).first == 32, "nobody gets what somebody has"
    assert slice_of(ask(bench)).first == lost.first, "it was restarted, and asks again"
    bench.clock.advance(5 * 60 + 1)
    bench.hub.upkeep.tick()
    assert {row.state for row in bench.stored.evaluations_under_way()} == {"open"}, "nobody has to ask for that"
    ok(send(bench, report(again := slice_of(ask(bench, other)), [1.0] * 8), other))
    assert again.first == 32, "its claim ran out once, that of the other slice was lost before"
    assert slice_of(ask(bench, other)).first == lost.first, "it is gone for good: its claim ran out"


def test_the_mean_of_a_part_is_shown_as_that_and_is_no_figure_of_the_run(bench: Bench) -> None:
    ok(send(bench, report(slice_of(ask(bench)), [1.0] * 31)))
    for _ in range(4):
        ok(send(bench, report(slice_of(ask(bench)), [], problem="the policy could not be fetched")))
    (found,) = page(bench).evaluations
    assert (found.complete, found.partial, found.scored, found.tasks) == (True, True, 31, 40)
    assert bench.status().evaluations == (found,)
    assert "held_out_score" not in ok(bench.http.get("/metrics")).text


def test_reports_that_do_not_fit_or_of_others_than_validators_are_refused(bench: Bench) -> None:
    part = slice_of(ask(bench))
    for scores, changes, code in (
        (1, {"environment_digest": "f0" * 32}, (422, "evaluation.environment")), (40, {}, (422, "evaluation.scores")),
        (1, {"run": "other"}, (422, "evaluation.run")), (1, {"first": 7}, (404, "evaluation.unknown")),
    ):  # fmt: skip
        assert code_of(send(bench, report(part, [1.0] * scores, **changes))) == code
    said = report(part, [1.0])
    assert code_of(send(bench, said, worker_key(1))) == (403, "auth.role")
    forged = bench.validator.call("POST", "/evaluations", protocol.sign_document(said, worker_key(1)))
    assert code_of(forged) == (422, "evaluation.signature")
    assert page(bench).evaluations[0].scored == 0


def test_validators_stay_until_the_last_version_is_measured(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"steps": 1}, changes={"environment": WithHeldOut(), "evaluation": PLAN})
    ok(bench.announce(0))
    bench.accept_groups(2)
    assert bench.batch(0) is not None
    ok(bench.announce(1))
    assert ask(bench, evaluate="no").finished, "who does not evaluate may go"
    last = slice_of(ask(bench))
    assert last.policy.version == 1, "version 0 was never begun, and is overtaken"
    other = second_validator(bench)
    ok(send(bench, report(slice_of(ask(bench, other)), [1.0] * 8), other))
    assert not ask(bench, other).finished, "somebody is still at it"
    ok(send(bench, report(last, [1.0] * 31)))
    assert ask(bench, other).finished
    bench.close()


@pytest.mark.parametrize("digest", ["f0" * 32, ""])
def test_a_verdict_of_another_environment_or_of_none_is_refused(bench: Bench, digest: str) -> None:
    audit = bench.audit_of(bench.alice)
    assert code_of(bench.judge(audit, environment_digest=digest)) == (422, "verdict.environment")
    assert bench.status().submissions["auditing"] == 1, "it changes nothing"
    ok(bench.judge(audit))


OPEN, CLAIMED, DONE, VOID = EvaluationState


def now(**changes: Any) -> Moment:
    return moment(**{"evaluation": PLAN, **changes})


def rows_of(commands: list[Command]) -> list[EvaluationRow]:
    assert all(isinstance(command, Save) for command in commands)
    return [command.row for command in commands if isinstance(command, Save)]


def offered(version: int, under_way: list[EvaluationRow] | None = None, tasks: int = 100) -> list[EvaluationRow]:
    return rows_of(evaluations.offer(now(), policy(version), tasks, under_way or []))


def a_slice(version: int = 0, first: int = 0, **changes: Any) -> EvaluationRow:
    fields = {"incarnation": 0, "version": version, "first": first, "digest": "d" * 64, "tasks": 16}
    return EvaluationRow(**{**fields, **changes})


def said(row: EvaluationRow, *scores: float | None, **changes: Any) -> protocol.EvaluationReport:
    fields = {"run": "demo", "policy": row.policy, "first": row.first, "environment_digest": "e" * 64}
    return protocol.EvaluationReport(**{**fields, "scores": scores, "decided_at_ms": NOW_MS, **changes})


class TestOffers:
    def test_every_so_many_versions_and_the_last(self) -> None:
        assert [version for version in range(4) if offered(version)] == [0, 2]
        odd = now(steps=3)
        assert rows_of(evaluations.offer(odd, policy(3), 40, []))
        assert evaluations.offer(moment(), policy(0), 40, []) == [], "nothing without a plan"

    @pytest.mark.parametrize("begun", [CLAIMED, DONE])
    def test_what_is_begun_is_finished(self, begun: EvaluationState) -> None:
        under_way = [a_slice(0, 0, state=begun, validator="v"), a_slice(0, 16)]
        assert {row.version for row in offered(2, under_way)} == {2}

    def test_a_new_incarnation_gives_up_all_of_the_old_one(self) -> None:
        under_way = [a_slice(0, 0, state=CLAIMED, validator="v"), a_slice(0, 16), a_slice(0, 32, state=DONE)]
        rows = rows_of(evaluations.offer(now(), policy(0, incarnation=1), 16, under_way))
        assert [(row.incarnation, row.first, row.state) for row in rows] == [(0, 0, VOID), (0, 16, VOID), (1, 0, OPEN)]


def test_a_version_is_finished_before_the_next_and_one_that_failed_comes_last() -> None:
    slices = [a_slice(version, first) for version in (0, 2) for first in (0, 16)]
    in_turn = []
    while (row := evaluations.next_free(slices, "v", NOW_MS)) is not None:
        in_turn.append(row.key[1:])
        failed = row.version == 0 and row.first == 16 and row.tries == 0
        changed = row.to(CLAIMED).to(OPEN, tries=1) if failed else row.to(DONE)
        slices[[each.key for each in slices].index(row.key)] = changed
    assert in_turn == [(0, 0), (0, 16), (2, 0), (2, 16), (0, 16)]


def test_a_problem_puts_a_slice_back_if_it_is_whose_slice_it_is() -> None:
    held = a_slice(0, 0, state=CLAIMED, validator="v")
    (row,) = rows_of(evaluations.report(held, said(held, problem="no policy"), "v", "{}", NOW_MS))
    assert (row.state, row.tries) == (OPEN, 1)
    assert evaluations.report(held, said(held, problem="no policy"), "w", "{}", NOW_MS) == []


def test_results_of_two_incarnations_are_those_of_the_newer() -> None:
    made = ((4, 0, 1.0), (4, 1, 0.0), (2, 0, 0.5))
    rows = [a_slice(version, 0, incarnation=n, state=DONE, scores=(score,)) for version, n, score in made]
    assert [(each.policy.version, each.mean) for each in evaluations.results(rows)] == [(2, 0.5), (4, 0.0)]
