"""What is put around an environment: its digest, length budgets, what scoring needs of the machine."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.environments import EnvironmentSettings, Score, Task, budget_of, build, require_scoring
from shoal.environments.composed import LengthBudget
from shoal.environments.settings import LengthSettings
from shoal.errors import EnvironmentSetupError


def made(**tables: Any) -> Any:
    return build(EnvironmentSettings.model_validate(tables))


@pytest.mark.parametrize(
    "tables",
    [{"scoring": {}}, {"prompt": {}}, {"scoring": {"processes": 4}}, {"scoring": {"seconds": 10.0}, "prompt": {}}],
)
def test_a_table_that_changes_no_score_changes_no_digest(tables: dict[str, Any]) -> None:
    assert made(**tables).digest == made().digest
    changed = {**tables, "length": {"targets": [5]}}
    assert made(**changed).digest == made(length={"targets": [5]}).digest != made().digest


# Length budgets: targets that anyone can draw again, and rewards that hold the length against them

lengths = st.integers(0, 100_000)
rewards = st.sampled_from([0.0, 0.25, 1.0])


def budget(**settings: Any) -> LengthBudget:
    return LengthBudget(LengthSettings.model_validate({"targets": [1000], **settings}))


@pytest.mark.parametrize(
    ("form", "reward", "tokens", "value"),
    [
        ("exact", 1.0, 1000, 1.0), ("exact", 1.0, 3000, 0.4), ("exact", 1.0, 0, 0.7), ("exact", 0.0, 3000, -0.6),
        ("max", 1.0, 1000, 0.5), ("max", 1.0, 0, 0.8), ("max", 1.0, 2000, 0.2), ("max", 1.0, 5000, 0.0),
        ("max", 0.0, 10, 0.0), ("clip", 1.0, 1000, 1.0), ("clip", 1.0, 1001, 0.0), ("clip", 0.25, 10, 0.25),
    ],
)  # fmt: skip
def test_by_hand(form: str, reward: float, tokens: int, value: float) -> None:
    """α = 0.0003 and δ = 0.5 at a target of 1000, computed by hand."""
    rule = budget(form=form, alpha=0.0003, delta=0.5)
    assert rule.worth(Score(reward), 1000, tokens).value == pytest.approx(value)


@given(st.sampled_from(["exact", "max", "clip"]), rewards, st.integers(1, 100_000), lengths)
def test_the_parts_say_how_it_came_about(form: str, reward: float, target: int, tokens: int) -> None:
    score = budget(form=form).worth(Score(reward, {"exact": reward}, "note"), target, tokens)
    assert (score.parts["task"], score.parts["target"], score.parts["exact"]) == (reward, target, reward)
    assert score.value == pytest.approx(score.parts["task"] + score.parts["length"])
    assert score.notes == "note"


def test_targets_are_drawn_equally_often_and_again_the_same() -> None:
    rule = budget(targets=[1000, 2000, 3000, 4000])
    drawn = [rule.target("run", unit) for unit in range(4000)]
    assert all(900 < count < 1100 for count in Counter(drawn).values())
    assert drawn == [rule.target("run", unit) for unit in range(4000)]
    assert drawn != [rule.target("another run", unit) for unit in range(4000)]


def test_the_prompt_ends_with_the_target() -> None:
    task = Task("t", "What is 2 + 2?", "4", "mathematics", (("system", "Be brief."),))
    asked = budget().ask(task, 2000)
    assert asked.prompt == "What is 2 + 2? Think for 2000 tokens before giving a response."
    assert (asked.id, asked.answer, asked.kind, asked.history) == (task.id, task.answer, task.kind, task.history)
    assert budget(text="[{target}] {{braces}}").ask(task, 7).prompt == "What is 2 + 2? [7] {{braces}}"


@pytest.mark.parametrize(
    "wrong", [{"targets": []}, {"targets": [0]}, {"text": "be brief"}, {"form": "min"}, {"alpha": -1}, {"delta": 2}]
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        budget(**wrong)


def test_the_budget_is_part_of_the_environment_and_of_its_digest() -> None:
    plain = made()
    lengths = [{"targets": [5]}, {"targets": [6]}, {"targets": [5], "form": "max"}, {"targets": [5], "alpha": 0.1}]
    all_of_them = [plain, *(made(length=one) for one in lengths)]
    assert [budget_of(one) is not None for one in all_of_them] == [False] + [True] * 4
    assert len({one.digest for one in all_of_them}) == 5
    task = plain.tasks("train")[0]
    assert all_of_them[1].score(task, task.answer) == plain.score(task, task.answer)  # tokens are not known yet


# Who is about to score is refused at the start where the machine lacks what scoring needs


def test_programs_without_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = json.dumps({"test_cases": [{"type": "stdin_stdout", "input": "", "output": "1"}]})
    rows = [{"task_type": "prime_rl_code", "prompt": f"print {i}", "verification_info": tests} for i in range(20)]
    data = tmp_path / "programs.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("PATH", str(tmp_path))
    programs = {"name": "dataset", "data": data}
    for environment in (made(**programs), made(mix=[programs, {"name": "sort"}], scoring={})):
        with pytest.raises(EnvironmentSetupError, match=r"bwrap is not on the PATH; install bubblewrap"):
            require_scoring(environment)
