"""Evaluations while training: which versions are offered, who has which slice, and what is known in the end."""

from __future__ import annotations

from typing import Any

import pytest

from kit.state import NOW_MS, moment, policy
from shoal.hub.state import evaluations
from shoal.hub.state.commands import Command, Refusal, SaveEvaluation
from shoal.hub.state.machines import EvaluationState, IllegalMove
from shoal.hub.state.rows import EvaluationPlan, EvaluationRow, Moment
from shoal.protocol import EvaluationReport

PLAN = EvaluationPlan(every=2, tasks=40)
OPEN, CLAIMED, DONE, VOID = EvaluationState


def now(**changes: Any) -> Moment:
    return moment(**{"evaluation": PLAN, **changes})


def rows_of(commands: list[Command]) -> list[EvaluationRow]:
    assert all(isinstance(command, SaveEvaluation) for command in commands)
    return [command.row for command in commands if isinstance(command, SaveEvaluation)]


def offered(version: int, under_way: list[EvaluationRow] | None = None, tasks: int = 100) -> list[EvaluationRow]:
    return rows_of(evaluations.offer(now(), policy(version), tasks, under_way or []))


def slice_of(version: int = 0, first: int = 0, **changes: Any) -> EvaluationRow:
    fields = {"incarnation": 0, "version": version, "first": first, "digest": "d" * 64, "tasks": 16}
    return EvaluationRow(**{**fields, **changes})


def said(row: EvaluationRow, *scores: float | None, **changes: Any) -> EvaluationReport:
    fields = {"run": "demo", "policy": row.policy, "first": row.first, "environment_digest": "e" * 64}
    return EvaluationReport(**{**fields, "scores": scores, "decided_at_ms": NOW_MS, **changes})


class TestOffers:
    def test_the_first_tasks_in_slices(self) -> None:
        assert [(row.first, row.tasks) for row in offered(2)] == [(0, 32), (32, 8)]
        assert [(row.first, row.tasks) for row in offered(2, tasks=33)] == [(0, 32), (32, 1)]
        assert offered(2, tasks=0) == []

    def test_every_so_many_versions_and_the_last(self) -> None:
        assert [version for version in range(4) if offered(version)] == [0, 2]
        odd = now(steps=3)
        assert rows_of(evaluations.offer(odd, policy(3), 40, []))
        assert evaluations.offer(moment(), policy(0), 40, []) == [], "nothing without a plan"

    def test_what_nobody_has_begun_is_given_up_when_the_next_is_due(self) -> None:
        waiting = [slice_of(0, first) for first in (0, 16)]
        given_up = [row for row in offered(2, waiting) if row.version == 0]
        assert [row.state for row in given_up] == [VOID, VOID]

    @pytest.mark.parametrize("begun", [CLAIMED, DONE])
    def test_what_is_begun_is_finished(self, begun: EvaluationState) -> None:
        under_way = [slice_of(0, 0, state=begun, validator="v"), slice_of(0, 16)]
        assert {row.version for row in offered(2, under_way)} == {2}

    def test_a_new_incarnation_gives_up_all_of_the_old_one(self) -> None:
        under_way = [slice_of(0, 0, state=CLAIMED, validator="v"), slice_of(0, 16), slice_of(0, 32, state=DONE)]
        rows = rows_of(evaluations.offer(now(), policy(0, incarnation=1), 16, under_way))
        assert [(row.incarnation, row.first, row.state) for row in rows] == [(0, 0, VOID), (0, 16, VOID), (1, 0, OPEN)]


class TestClaims:
    def test_the_oldest_version_first_and_until_when(self) -> None:
        claim = evaluations.claim(now(), [slice_of(2, 0), slice_of(0, 16), slice_of(0, 0, state=DONE)], "v")
        assert claim is not None
        assert (claim.row.key, claim.row.validator) == ((0, 0, 16), "v")
        assert claim.row.claimed_until_ms == NOW_MS + 5 * 30_000

    def test_there_may_be_none(self) -> None:
        assert evaluations.claim(now(), [slice_of(0, 0, state=CLAIMED, validator="v")], "w") is None

    def test_a_validator_that_asks_again_has_lost_its_slice(self) -> None:
        held = slice_of(0, 0, state=CLAIMED, validator="v", claimed_until_ms=NOW_MS + 1)
        (row,) = rows_of(evaluations.put_back([held], "v", NOW_MS))
        assert (row.state, row.tries, row.validator) == (OPEN, 1, None)
        assert evaluations.put_back([held], "w", NOW_MS) == []
        assert rows_of(evaluations.put_back([held], "w", NOW_MS + 1)) == [row], "its claim ran out"

    def test_after_a_few_tries_a_slice_is_given_up(self) -> None:
        held = slice_of(0, 0, state=CLAIMED, validator="v", tries=evaluations.MOST_TRIES - 1)
        (row,) = rows_of(evaluations.put_back([held], "v", NOW_MS))
        assert row.state is VOID


class TestReports:
    def test_scores_make_it_done(self) -> None:
        held = slice_of(0, 0, state=CLAIMED, validator="v")
        (row,) = rows_of(evaluations.report(held, said(held, 1.0, None, 0.5), "v", "{}", NOW_MS))
        assert (row.state, row.scores, row.document, row.decided_at_ms) == (DONE, (1.0, None, 0.5), "{}", NOW_MS)

    def test_the_first_stands(self) -> None:
        done = slice_of(0, 0, state=DONE, scores=(1.0,))
        assert evaluations.report(done, said(done, 0.0), "w", "{}", NOW_MS) == []

    def test_a_problem_puts_it_back_if_it_is_whose_slice_it_is(self) -> None:
        held = slice_of(0, 0, state=CLAIMED, validator="v")
        (row,) = rows_of(evaluations.report(held, said(held, problem="no policy"), "v", "{}", NOW_MS))
        assert (row.state, row.tries) == (OPEN, 1)
        assert evaluations.report(held, said(held, problem="no policy"), "w", "{}", NOW_MS) == []

    def test_what_was_never_offered_is_refused(self) -> None:
        held = slice_of(0, 0, state=CLAIMED, validator="v")
        for row, report in ((None, said(held, 1.0)), (held, said(held, 1.0, policy=policy(0, digest="c" * 64)))):
            with pytest.raises(Refusal, match="no slice at 0"):
                evaluations.report(row, report, "v", "{}", NOW_MS)
        with pytest.raises(Refusal, match="17 scores for a slice of 16"):
            evaluations.report(held, said(held, *[1.0] * 17), "v", "{}", NOW_MS)

    def test_done_is_done(self) -> None:
        with pytest.raises(IllegalMove):
            slice_of(0, 0, state=DONE).to(OPEN)


class TestResults:
    def test_the_mean_is_of_all_slices_without_what_could_not_be_scored(self) -> None:
        rows = [slice_of(0, 0, state=DONE, scores=(1.0, None)), slice_of(0, 16, state=DONE, scores=(0.0, 0.5))]
        (found,) = evaluations.results(rows)
        assert (found.mean, found.scored, found.tasks, found.complete) == (0.5, 3, 32, True)

    def test_it_is_complete_once_nothing_is_to_come(self) -> None:
        rows = [slice_of(0, 0, state=DONE, scores=(1.0,)), slice_of(0, 16)]
        assert [each.complete for each in evaluations.results(rows)] == [False]
        rows[1] = slice_of(0, 16, state=VOID)
        assert [each.complete for each in evaluations.results(rows)] == [True]

    def test_a_mean_of_some_slices_says_so(self) -> None:
        done, given_up = slice_of(0, 0, state=DONE, scores=(1.0,)), slice_of(0, 16, state=VOID)
        assert [each.partial for each in evaluations.results([done, given_up])] == [True]
        assert [each.partial for each in evaluations.results([done, slice_of(0, 16)])] == [False], "it may still come"
        lost = slice_of(0, 16, state=DONE, scores=(None,))
        assert [each.partial for each in evaluations.results([done, lost])] == [False], "no sample, as ever"

    def test_what_was_given_up_is_left_out(self) -> None:
        assert evaluations.results([slice_of(0, 0, state=VOID)]) == []
        assert [each.mean for each in evaluations.results([slice_of(0, 0)])] == [None]

    def test_of_two_incarnations_the_newer(self) -> None:
        rows = [
            slice_of(4, 0, state=DONE, scores=(1.0,)),
            slice_of(4, 0, incarnation=1, state=DONE, scores=(0.0,)),
            slice_of(2, 0, state=DONE, scores=(0.5,)),
        ]
        assert [(each.policy.version, each.mean) for each in evaluations.results(rows)] == [(2, 0.5), (4, 0.0)]
