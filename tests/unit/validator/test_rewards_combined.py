"""The reward of a group: score, length, judges, and what of it the verdict says."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest
from honest import RUN, LengthEnvironment, audit_job, lease, loaded, submission

from kit import Logs
from shoal.environments import Environment, EnvironmentSettings, Score, budget_of, build, identity_of
from shoal.environments.settings import JudgeSettings, LengthSettings, PromptSettings, ScoringSettings
from shoal.errors import ScoringFailure
from shoal.models.ending import texts_of
from shoal.protocol import Lease, Outcome, Rollout, Verdict, pack_tokens
from shoal.rewards import DirectScorer, Job, NotStarted
from shoal.rewards.panel import JudgedText, JudgeSeat, Panel
from shoal.runtime.clock import ManualClock
from shoal.validator.judge import Judge
from shoal.validator.profiles import load_profiles
from shoal.validator.rewards import Group, RewardNotes, Scored, Scoring, sampled_tokens

REWARD = """
tasks = [{"id": "t/%d" % n, "prompt": "p", "answer": "secret", "split": "train"} for n in range(9)]
def score(prompt, completion, answer):
    return {"value": len(completion) % 3, "notes": "the answer was " + answer}
"""


def composed(tmp_path: Path, **added: object) -> Environment:
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    return build(EnvironmentSettings(file=file, **{"scoring": ScoringSettings(), **added}))  # type: ignore[arg-type]


def leased(environment: Environment, unit: int = 5, **changes: object) -> Lease:
    budget = budget_of(environment)
    target = None if budget is None else budget.target(RUN, unit)
    return lease(unit, environment_digest=environment.digest, length_target=target).model_copy(update=changes)


def verdict_of(environment: Environment, of: Lease, **changes: object) -> Verdict:
    judge = Judge(environment, load_profiles(), clock=ManualClock(), **changes)  # type: ignore[arg-type]
    [verdict] = judge.verdicts([audit_job(of)], loaded())
    return verdict


@dataclass
class Opinion:
    """A judge that says how long an answer is, and fails on those that contain `poison`."""

    poison: str = "\ue000"
    asked: list[JudgedText] = field(default_factory=list)
    open: bool = True

    def prepare(self) -> None:
        """Ready."""

    def values(self, pieces: Sequence[JudgedText]) -> list[float | ScoringFailure]:
        self.asked += pieces
        said = [piece.completion for piece in pieces]
        return [ScoringFailure("no opinion") if self.poison in each else float(len(each)) for each in said]

    def close(self) -> None:
        self.open = False


def seated(judge: Opinion, label: str = "taste", kind: str = "openai", **changes: object) -> JudgeSeat:
    where = {"path": Path("rm")} if kind == "classifier" else {"url": "http://judge.test/v1", "model": "m"}
    given = {"label": label, **where, **changes}
    return JudgeSeat(JudgeSettings(**given), judge)  # type: ignore[arg-type]


def test_the_length_counts_what_was_drawn_without_the_end_token_and_without_what_was_given() -> None:
    def count(tokens: list[int], given: list[int] | None = None, eos: tuple[int, ...] = (1,)) -> int:
        rollout = Rollout(pack_tokens(tokens), b"", "eos", given=pack_tokens(given or []))
        return sampled_tokens(rollout, eos)

    assert [count([7, 8, 1]), count([7, 8]), count([1]), count([])] == [2, 2, 0, 0]
    assert count([7, 1, 9, 9, 9, 8, 8, 1], [2, 3]) == 4
    assert [count([7, 8, 1], eos=()), count([7, 1, 9, 9, 9, 8, 8, 1], [2, 3], eos=())] == [3, 5], "with it"


@pytest.mark.parametrize("count_eos", [False, True])
def test_a_length_budget_makes_of_the_score_what_the_formula_says(tmp_path: Path, count_eos: bool) -> None:
    settings = LengthSettings(targets=(3, 6, 9), alpha=0.01, count_eos=count_eos)
    environment = composed(tmp_path, length=settings)
    of = leased(environment)
    verdict = verdict_of(environment, of)
    assert verdict.outcome is Outcome.ACCEPTED
    target = settings.target(RUN, of.unit)
    for rollout, reward in zip(submission(of).rollouts, verdict.rewards, strict=True):
        tokens = sampled_tokens(rollout, of.sampling.eos_token_ids)
        task = float(tokens % 3)  # the scripted engine's tokens are characters
        assert (reward.parts["task"], reward.parts["target"]) == (task, target)
        counted = len(rollout.token_ids) if count_eos else tokens
        assert reward.value == pytest.approx(task - 0.01 * abs(target - counted))
    assert len({reward.value for reward in verdict.rewards}) > 1


@pytest.mark.parametrize("claimed", [None, 4, 3])
def test_another_length_target_than_the_units_is_not_scored(tmp_path: Path, claimed: int | None) -> None:
    environment = composed(tmp_path, length=LengthSettings(targets=(6,)))
    verdict = verdict_of(environment, leased(environment, length_target=claimed))
    assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "machinery.environment")
    assert "length target" in verdict.message


def groups_of(*units: int) -> list[Group]:
    return [Group(lease(unit), submission(lease(unit)).rollouts) for unit in units]


def scored(panel: Panel, *units: int) -> list[Scored | ScoringFailure]:
    environment = LengthEnvironment()
    return Scoring(environment, DirectScorer(environment), panel).score(groups_of(*units), texts_of({}).decode_many)


def test_judges_are_added_with_their_weights_and_every_part_is_written_down() -> None:
    panel = Panel((seated(Opinion(), "taste", weight=0.5), seated(Opinion(), "rank", weight=-2.0, use="rank")))
    [group] = scored(panel, 1)
    assert isinstance(group, Scored)
    ranks = sorted(reward.parts["judge.rank"] for reward in group.rewards)
    assert (ranks[0] >= 0, ranks[-1] <= 1, len(set(ranks)) > 1) == (True, True, True)
    for reward in group.rewards:
        task = reward.parts["task"]
        assert reward.parts["judge.taste"] == task  # both are the length
        assert reward.value == pytest.approx(task + 0.5 * task - 2.0 * reward.parts["judge.rank"])


def test_failing_judge_leaves_one_group_unscored() -> None:
    alone = next(
        text
        for rollout in submission(lease(1)).rollouts
        if (text := "".join(map(chr, rollout.token_ids.tolist()[:-1])))
        and text not in {"".join(map(chr, r.token_ids.tolist()[:-1])) for r in submission(lease(2)).rollouts}
        and len(text) > 5
    )
    opinion = Opinion(poison=alone)
    first, second = scored(Panel((seated(opinion),)), 1, 2)
    assert isinstance(first, ScoringFailure)
    assert str(first) == "no opinion"
    assert isinstance(second, Scored)
    assert len(opinion.asked) == len(set(opinion.asked))


def test_a_group_that_the_environment_cannot_score_is_not_shown_to_judges() -> None:
    opinion = Opinion()
    environment = LengthEnvironment()
    group = Group(lease(1, task="t/broken"), submission(lease(1)).rollouts)
    scoring = Scoring(environment, DirectScorer(environment), Panel((seated(opinion),)))
    [failure] = scoring.score([group], texts_of({}).decode_many)
    assert isinstance(failure, ScoringFailure)
    assert opinion.asked == []


def test_verdicts_name_the_parts_that_nobody_can_compute_again() -> None:
    panel = Panel((seated(Opinion(), "far"), seated(Opinion(), "near", "classifier")))
    verdict = verdict_of(LengthEnvironment(), lease(), panel=panel)
    assert verdict.outcome is Outcome.ACCEPTED
    assert verdict.unreproducible == ("judge.far",)
    assert {"judge.far", "judge.near", "task"} <= verdict.rewards[0].parts.keys()
    assert verdict_of(LengthEnvironment(), lease()).unreproducible == ()


def test_judges_see_the_answer_after_the_thinking_that_the_prompt_began(tmp_path: Path) -> None:
    environment = composed(tmp_path, prompt=PromptSettings(thinking="<think>"))
    opinion = Opinion()
    verdict_of(environment, leased(environment), panel=Panel((seated(opinion),)))
    assert {piece.completion for piece in opinion.asked} == {""}  # the thinking never ended
    assert opinion.asked[0].prompt == "p"


def test_every_verdict_names_the_environment_that_it_was_scored_with(tmp_path: Path) -> None:
    environment = composed(tmp_path)
    good, bad = leased(environment, 1), leased(environment, 2)
    judge = Judge(environment, load_profiles(), clock=ManualClock())
    verdicts = judge.verdicts([audit_job(good), audit_job(bad, b"garbage")], loaded())
    assert [verdict.outcome for verdict in verdicts] == [Outcome.ACCEPTED, Outcome.REJECTED]
    mine = identity_of(environment)
    for verdict in verdicts:
        assert (verdict.environment, verdict.environment_version) == (mine.name, mine.version)
        assert (verdict.environment_digest, verdict.data_digest) == (mine.digest, mine.data_digest)


def test_notes_are_for_the_owner_and_no_verdict_tells_them(tmp_path: Path) -> None:
    environment = composed(tmp_path)
    verdict = verdict_of(environment, leased(environment), reward_notes=RewardNotes(tmp_path))
    assert "secret" not in verdict.model_dump_json()
    lines = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    note = {"unit": 5, "task": "t/5", "note": "the answer was secret"}
    assert lines == [{**note, "rollout": index} for index in range(12)]


def test_notes_are_bounded_and_a_disk_that_takes_none_is_said_once(tmp_path: Path, caplog: Logs) -> None:
    book = RewardNotes(tmp_path, most_bytes=2000)
    for unit in range(100):
        book.write(unit, "t", [(0, "x" * 100)])
    kept = [*tmp_path.iterdir()]
    assert sum(file.stat().st_size for file in kept) < 2500
    assert '"unit": 99' in (tmp_path / "notes.jsonl").read_text()
    nowhere = RewardNotes(tmp_path / "gone")
    for unit in range(3):
        nowhere.write(unit, "t", [(0, "x")])
    assert caplog.text.count("cannot be written") == 1


def test_message_of_a_failing_reward_function_is_in_no_verdict(tmp_path: Path, caplog: Logs) -> None:
    file = tmp_path / "reward.py"
    file.write_text(REWARD.replace("return", "raise ValueError(answer)\n    return"))
    environment = build(EnvironmentSettings(file=file))
    verdict = verdict_of(environment, leased(environment))
    assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "reward.machinery")
    assert "secret" not in verdict.model_dump_json()
    assert "secret" in caplog.text


@dataclass(frozen=True)
class Limited(DirectScorer):
    """The first job of all exceeded a limit."""

    def scores(self, jobs: Sequence[Job]) -> list[Score | ScoringFailure]:
        return [Score(0.0, {"limit": 1.0}, "scoring it took longer than 1 s"), *super().scores(jobs)[1:]]


def test_a_limit_that_was_exceeded_is_in_the_record() -> None:
    environment = LengthEnvironment()
    verdict = verdict_of(environment, lease(), scorer=Limited(environment))
    assert verdict.outcome is Outcome.ACCEPTED
    assert (verdict.rewards[0].value, verdict.rewards[0].parts) == (0.0, {"limit": 1.0})
    check = verdict.checks[-1]
    assert (check.check, check.passed, check.evidence) == ("reward", True, {"limited": 1})
    assert "1 of 12 completions" in check.message


class Slow(DirectScorer):
    """Has time for so many jobs at a call."""

    most: ClassVar[int] = 15
    calls: ClassVar[list[int]] = []

    def scores(self, jobs: Sequence[Job]) -> list[Score | ScoringFailure]:
        self.calls.append(len(jobs))
        done = super().scores(jobs)
        return [*done[: self.most], *(NotStarted("no time") for _job in done[self.most :])]


@pytest.mark.parametrize(("most", "units", "calls"), [(15, [1], [36]), (5, [1], [36, 7, 2]), (24, [1, 2], [36])])
def test_groups_without_time_have_no_verdict_except_the_first(most, units, calls, monkeypatch):
    environment = LengthEnvironment()
    Slow.calls.clear()
    monkeypatch.setattr(Slow, "most", most)
    judge = Judge(environment, load_profiles(), clock=ManualClock(), scorer=Slow(environment))
    verdicts = judge.verdicts([audit_job(lease(unit)) for unit in (1, 2, 3)], loaded())
    assert [(verdict.unit, verdict.outcome) for verdict in verdicts] == [(unit, Outcome.ACCEPTED) for unit in units]
    assert Slow.calls == calls
    alone = Judge(environment, load_profiles(), clock=ManualClock()).verdicts([audit_job(lease(1))], loaded())
    assert verdicts[0] == alone[0]


def test_a_lease_for_other_data_is_not_this_validators() -> None:
    class WithData(LengthEnvironment):
        data_digest = "d" * 64

    judge = Judge(WithData(), load_profiles())
    assert judge.knows(lease(data_digest="d" * 64))
    assert judge.knows(lease())  # of a hub that does not say
    assert not judge.knows(lease(data_digest="c" * 64))
    assert not judge.knows(lease(environment_digest="a" * 64))
    assert replace(judge, environment=LengthEnvironment()).knows(lease())
