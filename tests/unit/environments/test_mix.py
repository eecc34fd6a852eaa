"""Mixtures: every part has its share, every task its turn, and nothing of a part is lost on the way. And what else is
put around an environment: its digest, length budgets, what scoring needs of the machine.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.environments import Environment, EnvironmentSettings, Score, Split, Task, build, dialogue_of, identity_of
from shoal.environments.generated import GeneratedEnvironment
from shoal.environments.mix import MixedEnvironment, MixSchedule, Part, part_of
from shoal.environments.protocol import DialogueRule, prompt_digest, require_scoring
from shoal.environments.settings import LengthSettings, budget_of
from shoal.errors import EnvironmentSetupError, UnusableTask
from shoal.evaluation.plan import Leaks, find_leaks
from shoal.protocol.lease import permute

weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=9)


@given(weights, st.integers(0, 10**12))
def test_turns_and_counts_agree_everywhere(shares: list[float], position: int) -> None:
    schedule = MixSchedule(shares)
    before, after, (part, nth) = schedule.counts(position), schedule.counts(position + 1), schedule.turn(position)
    assert sum(before) == position
    assert [b - a for a, b in zip(before, after, strict=True)] == [number == part for number in range(len(shares))]
    assert before[part] == nth


@given(weights, st.integers(0, 10**6))
def test_every_prefix_is_in_proportion(shares: list[float], positions: int) -> None:
    counts, total = MixSchedule(shares).counts(positions), sum(shares)
    for count, share in zip(counts, shares, strict=True):  # turns are rounded to one of 10,000, their sum to several
        rounding = 1e-4 * (1 + len(shares) * share / total / 2)
        assert abs(count - positions * share / total) <= 5 + positions * rounding


@settings(max_examples=30)
@given(st.integers(1, 300), st.text(max_size=5), st.integers(4, 6))
def test_a_permutation_meets_everything_once(size: int, key: str, rounds: int) -> None:
    assert sorted(permute(position, size, key, rounds) for position in range(size)) == list(range(size))


class Fixed:
    """An environment of a few tasks; objects to the completion "bad", talks, and has one row that cannot be used."""

    def __init__(self, name: str, train: int, held_out: int, data: str = "") -> None:
        self.name, self.digest, self.version = name, name * 4, 1
        self._sizes: dict[Split, int] = {"train": train, "held_out": held_out}
        self.data_digest = data
        self.seen: list[str] = []

    def tasks(self, split: Split) -> Sequence[Task]:
        return [self.task(f"{split}/{index}") for index in range(self._sizes[split])]

    def task(self, task_id: str) -> Task:
        if task_id == "train/broken":
            raise UnusableTask("its row is broken")
        return Task(task_id, f"{self.name} {task_id}", "yes", kind=f"kind of {self.name}", history=(("system", "s"),))

    def score(self, task: Task, completion: str) -> Score:
        self.seen.append(task.id)
        return Score(0.25, {"exact": 0.25}, "note")

    def dialogue(self, task: Task) -> DialogueRule | None:
        return DialogueRule("calculator", 2)


def mixture(*parts: Part, train: int = 60, held_out: int = 20) -> MixedEnvironment:
    return MixedEnvironment(parts, train, held_out)


def test_shares_passes_and_what_a_task_keeps() -> None:
    mixed = mixture(Part("a", 2.0, Fixed("a", 10, 5)), Part("b", 1.0, Fixed("b", 1000, 5)))
    tasks = list(mixed.tasks("train"))
    assert Counter(task.id.partition(":")[0] for task in tasks) == {"a": 40, "b": 20}
    assert Counter(task.id for task in tasks if task.id.startswith("a:")) == {f"a:train/{n}": 4 for n in range(10)}
    assert len({task.id for task in tasks if task.id.startswith("b:")}) == 20
    of_a = [task.id for task in tasks if task.id.startswith("a:")]
    assert len({tuple(of_a[start : start + 10]) for start in range(0, 40, 10)}) > 1  # another order in each pass
    assert tasks[0] == mixed.task(tasks[0].id) == mixed.tasks("train")[0] == mixed.tasks("train")[-60]
    assert tasks[0].kind.startswith("kind of")
    assert tasks[0].history == (("system", "s"),)
    assert mixed.tasks("train")[2:4] == tasks[2:4]


def test_held_out_tasks_are_in_proportion_and_scores_and_dialogues_are_the_parts_own() -> None:
    empty = Part("c", 5.0, Fixed("c", 9, 0))
    mixed = mixture(Part("a", 3.0, Fixed("a", 9, 6)), Part("b", 1.0, Fixed("b", 9, 100)), empty)
    ids = [task.id for task in mixed.tasks("held_out")]
    assert len(ids) == len(set(ids))
    assert Counter(one[0] for one in ids) == {"a": 6, "b": 2}  # all of a that there are
    assert len(mixture(empty).tasks("held_out")) == 0
    inner = Fixed("a", 9, 9)
    mixed = mixture(Part("maths", 1.0, inner), Part("sort", 1.0, build(EnvironmentSettings())))
    task, sort = mixed.task("maths:train/3"), mixed.task("sort:sort/train/0")
    assert mixed.score(task, "x") == Score(0.25, {"exact": 0.25, "maths": 0.25}, "note")
    assert inner.seen == ["train/3"]
    assert mixed.score(sort, sort.answer).parts == {"exact": 1.0, "sort": 1.0}
    assert [dialogue_of(mixed, each) for each in (task, sort)] == [DialogueRule("calculator", 2), None]


@pytest.mark.parametrize("task_id", ["", "a", "zzz:train/0", "a:sort/train/0"])
def test_other_ids_are_no_tasks(task_id: str) -> None:
    mixed = mixture(Part("a", 1.0, build(EnvironmentSettings())))
    with pytest.raises(EnvironmentSetupError):
        mixed.task(f"{task_id}x")


def test_the_digest_covers_parts_labels_weights_and_sizes() -> None:
    def one(label: str = "a", weight: float = 1.0, name: str = "n", data: str = "", train: int = 60) -> Environment:
        return mixture(Part(label, weight, Fixed(name, 9, 9, data)), train=train)

    made = (one(), one("b"), one(weight=2.0), one(name="m"), one(train=61), one())
    assert len({each.digest for each in made}) == 5
    assert identity_of(one()).data_digest == ""
    assert len({identity_of(one(data="aa")).data_digest, identity_of(one(data="bb")).data_digest, ""}) == 3


def settled(**tables: Any) -> Environment:
    return build(EnvironmentSettings.model_validate(tables))


def built(*parts: dict[str, Any], **more: Any) -> Environment:
    return settled(mix=parts, **more)


REWARD = "def score(task, completion):\n    return 1.0\n"


def own(folder: Path, tasks: object, name: str = "own") -> str:
    """A reward file with these tasks."""
    (folder / f"{name}.py").write_text(f"tasks = {tasks}\n{REWARD}")
    return str(folder / f"{name}.py")


def test_a_recipe_s_mixture_also_if_it_was_written_down(tmp_path: Path) -> None:
    """Settings go to scoring processes and run folders in full: what was left out must not look given there."""
    file = own(tmp_path, [(str(n), "1") for n in range(10)], "My Reward")
    parts = [{"name": "sort"}, {"name": "sort", "weight": 2.0}, {"file": file}, {"name": "sort", "label": "x"}]
    mixed = built(*parts)
    assert isinstance(mixed, MixedEnvironment)
    assert [part.label for part in mixed.parts] == ["sort", "sort-2", "my-reward", "x"]
    assert (mixed.name, len(mixed.tasks("train"))) == ("mix", 499_999)  # those with a fifth of the turns have them all
    task = mixed.tasks("train")[499_998]
    assert mixed.task(task.id) == task
    again = EnvironmentSettings.model_validate_json(
        EnvironmentSettings.model_validate({"mix": parts}).model_dump_json()
    )
    assert build(again).digest == mixed.digest


@pytest.mark.parametrize(("parts", "more", "sentence"), [
    ([{"name": "sort", "label": "a"}, {"name": "addition", "label": "a"}], {}, "same label"),
    ([{"name": "srot"}], {}, "part 'srot': there is no environment 'srot'.*did you mean 'sort'"),
    ([{"name": "sort", "options": {"min_digit": 2}}], {}, "part 'sort': .*did you mean"),
    ([{"name": "sort"}], {"options": {"min_digits": 2}}, "takes the place of"),
    *(([{"label": name}, {"name": "addition"}], {}, f"part '{name}'.*another label")
      for name in ("task", "limit", "judge.taste")),  # they mean something else in scores
])  # fmt: skip
def test_errors_name_the_part(parts: list[dict[str, Any]], more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=sentence):
        built(*parts, **more)


def questions(folder: Path, name: str, numbers: range, text: str = "What is {n}+1?") -> str:
    path = folder / f"{name}.jsonl"
    rows = [{"question": text.format(n=n), "answer": str(n + 1)} for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_without_a_size_every_task_of_every_part_has_its_turn(tmp_path: Path) -> None:
    parts = [
        {"name": "dataset", "data": questions(tmp_path, "large", range(700)), "held_out_size": 1},
        {"name": "dataset", "data": questions(tmp_path, "small", range(1000, 1050)), "held_out_size": 1, "weight": 3.0},
    ]
    mixed = built(*parts)
    assert isinstance(mixed, MixedEnvironment)
    drawn = {task.id for task in mixed.tasks("train")}
    assert len(drawn) == sum(len(part.environment.tasks("train")) for part in mixed.parts) == 699 + 49
    assert len(mixed.tasks("train")) in range(4 * 699 - 4, 4 * 699 + 5)
    assert mixed.digest == built(*parts).digest
    assert len({mixed.digest, built(*parts, train_size=100_000).digest, built(*parts, train_size=9).digest}) == 3


def asked(mixed: Environment, split: Split) -> set[bytes]:
    found = set()
    for index in range(len(mixed.tasks(split))):
        try:
            found.add(prompt_digest(mixed.tasks(split)[index].prompt))
        except UnusableTask:
            continue
    return found


def test_two_data_sets_that_share_questions(tmp_path: Path) -> None:
    """The second spells them otherwise, and holds out fewer: the first holds out what the second would train on."""
    first = questions(tmp_path, "first", range(100))
    second = questions(tmp_path, "second", range(50, 150), "WHAT  is {n} + 1?")
    mixed = built(
        {"name": "dataset", "data": first, "held_out_size": 20}, {"name": "dataset", "data": second, "held_out_size": 4}
    )
    assert isinstance(mixed, MixedEnvironment)
    alone = [part.environment for part in mixed.parts]
    aside = asked(alone[0], "held_out") | asked(alone[1], "held_out")
    assert aside & (asked(alone[0], "train") | asked(alone[1], "train"))  # as parts they would leak
    assert not aside & asked(mixed, "train")
    assert asked(mixed, "train") == (asked(alone[0], "train") | asked(alone[1], "train")) - aside
    assert find_leaks(list(mixed.tasks("held_out")), mixed) == Leaks()


@pytest.mark.parametrize(("holder", "shared", "split"), [("file", "train", "held_out"), ("gen", "held_out", "train")])
def test_a_generator_and_a_file_that_share_questions(tmp_path: Path, holder: str, shared: Split, split: Split) -> None:
    given = {"name": "sort", "options": {"min_digits": 2, "max_digits": 2}, "train_size": 300, "held_out_size": 9}
    sort = build(EnvironmentSettings.model_validate(given))
    prompts = sorted({task.prompt for task in sort.tasks(shared)})[:5]
    tasks = [{"prompt": prompt, "split": split} for prompt in prompts] + [{"prompt": "9=", "split": "train"}]
    mixed = built(given, {"file": own(tmp_path, tasks)}, train_size=600)
    assert asked(mixed, split) & {prompt_digest(prompt) for prompt in prompts}
    assert not asked(mixed, "train") & asked(mixed, "held_out")
    assert asked(mixed, "train") > {prompt_digest("9=")}
    assert len(asked(mixed, "train")) > 40  # what is passed over takes nothing else with it


def test_nothing_is_generated_to_know_what_is_held_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some generators take a minute for each held-out task."""
    mixed = built({"name": "sort"}, {"name": "dataset", "data": questions(tmp_path, "some", range(50))})
    made: list[str] = []
    make = GeneratedEnvironment.make

    def counted(self: GeneratedEnvironment, split: Split, index: int) -> Task:
        made.append(split)
        return make(self, split, index)

    monkeypatch.setattr(GeneratedEnvironment, "make", counted)
    assert len(mixed.tasks("train")[:20]) == 20
    assert made == ["train"] * 10


def test_a_part_of_which_nothing_is_left_is_named(tmp_path: Path) -> None:
    held = [{"prompt": f"What is {n}+1?", "split": "held_out"} for n in range(9)]
    data = questions(tmp_path, "some", range(9))
    mixed = built(
        {"file": own(tmp_path, [*held, ("9=", "9")])},
        {"name": "dataset", "data": data, "label": "sums", "held_out_size": 1},
    )
    with pytest.raises(EnvironmentSetupError, match="part 'sums' has no task to train on: all its questions"):
        list(mixed.tasks("train"))


def test_only_a_mixture_has_parts(tmp_path: Path) -> None:
    file = own(tmp_path, [{"id": "a:b", "prompt": "1="}], "mix")
    alone = build(EnvironmentSettings(file=Path(file)))
    assert (alone.name, part_of(alone, alone.tasks("train")[0].id)) == ("mix", "")
    mixed = built({"file": file, "label": "own"}, prompt={"system": "s"})
    assert part_of(mixed, mixed.tasks("train")[0].id) == "own"


@pytest.mark.parametrize(
    "tables",
    [{"scoring": {}}, {"prompt": {}}, {"scoring": {"processes": 4}}, {"scoring": {"seconds": 10.0}, "prompt": {}}],
)
def test_a_table_that_changes_no_score_changes_no_digest(tables: dict[str, Any]) -> None:
    assert settled(**tables).digest == settled().digest
    changed = {**tables, "length": {"targets": [5]}}
    assert settled(**changed).digest == settled(length={"targets": [5]}).digest != settled().digest


lengths = st.integers(0, 100_000)
rewards = st.sampled_from([0.0, 0.25, 1.0])


def budget(**settings: Any) -> LengthSettings:
    return LengthSettings.model_validate({"targets": [1000], **settings})


@pytest.mark.parametrize(("form", "reward", "tokens", "value"), [
    ("exact", 1.0, 1000, 1.0), ("exact", 1.0, 3000, 0.4), ("exact", 1.0, 0, 0.7), ("exact", 0.0, 3000, -0.6),
    ("max", 1.0, 1000, 0.5), ("max", 1.0, 0, 0.8), ("max", 1.0, 2000, 0.2), ("max", 1.0, 5000, 0.0),
    ("max", 0.0, 10, 0.0), ("clip", 1.0, 1000, 1.0), ("clip", 1.0, 1001, 0.0), ("clip", 0.25, 10, 0.25),
])  # fmt: skip
def test_by_hand(form: str, reward: float, tokens: int, value: float) -> None:
    """α = 0.0003 and δ = 0.5 at a target of 1000, computed by hand."""
    rule = budget(form=form, alpha=0.0003)
    assert rule.worth(Score(reward), 1000, tokens).value == pytest.approx(value)


@given(st.sampled_from(["exact", "max", "clip"]), rewards, st.integers(1, 100_000), lengths)
def test_the_parts_say_how_it_came_about(form: str, reward: float, target: int, tokens: int) -> None:
    score = budget(form=form).worth(Score(reward, {"exact": reward}, "note"), target, tokens)
    assert (score.parts["task"], score.parts["target"], score.parts["exact"]) == (reward, target, reward)
    assert score.value == pytest.approx(score.parts["task"] + score.parts["length"])
    assert score.notes == "note"


def test_targets_are_drawn_equally_often_and_end_the_prompt() -> None:
    rule = budget(targets=[1000, 2000, 3000, 4000])
    drawn = [rule.target("run", unit) for unit in range(4000)]
    assert all(900 < count < 1100 for count in Counter(drawn).values())
    assert drawn == [rule.target("run", unit) for unit in range(4000)]
    assert drawn != [rule.target("another run", unit) for unit in range(4000)]
    task = Task("t", "What is 2 + 2?", "4", "mathematics", (("system", "Be brief."),))
    asked = budget().ask(task, 2000)
    assert asked.prompt == "What is 2 + 2? Think for 2000 tokens before giving a response."
    assert (asked.id, asked.answer, asked.kind, asked.history) == (task.id, task.answer, task.kind, task.history)
    assert budget(text="[{target}] {{braces}}").ask(task, 7).prompt == "What is 2 + 2? [7] {{braces}}"


@pytest.mark.parametrize(
    "wrong", [{"targets": []}, {"targets": [0]}, {"text": "be brief"}, {"form": "min"}, {"alpha": -1}]
)
def test_contradicting_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        budget(**wrong)


def test_the_budget_is_part_of_the_environment_and_of_its_digest() -> None:
    plain = settled()
    lengths = [{"targets": [5]}, {"targets": [6]}, {"targets": [5], "form": "max"}, {"targets": [5], "alpha": 0.1}]
    all_of_them = [plain, *(settled(length=one) for one in lengths)]
    assert [budget_of(one) is not None for one in all_of_them] == [False] + [True] * 4
    assert len({one.digest for one in all_of_them}) == 5
    task = plain.tasks("train")[0]
    assert all_of_them[1].score(task, task.answer) == plain.score(task, task.answer)  # tokens are not known yet


def test_programs_without_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = json.dumps({"test_cases": [{"type": "stdin_stdout", "input": "", "output": "1"}]})
    rows = [{"task_type": "prime_rl_code", "prompt": f"print {i}", "verification_info": tests} for i in range(20)]
    data = tmp_path / "programs.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("PATH", str(tmp_path))
    programs = {"name": "dataset", "data": data}
    for environment in (settled(**programs), settled(mix=[programs, {"name": "sort"}], scoring={})):
        with pytest.raises(EnvironmentSetupError, match=r"bwrap is not on the PATH; install bubblewrap"):
            require_scoring(environment)
