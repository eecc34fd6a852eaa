"""Generated environments: deterministic, disjoint splits, gold answers score 1 and near-misses 0."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.environments import Environment, EnvironmentSettings, Split, build
from shoal.errors import EnvironmentSetupError

NAMES = ("sort", "addition")
INDICES = st.integers(0, 99_999)


def environment(name: str = "sort", **options: int) -> Environment:
    return build(EnvironmentSettings(name=name, options=options))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_an_environment(name):
    built = environment(name)
    assert isinstance(built, Environment)
    assert built.name == name
    assert (len(built.tasks("train")), len(built.tasks("held_out"))) == (100_000, 256)


@given(INDICES)
@settings(deadline=None)
def test_sort_wants_the_digits_in_order(index):
    task = environment().tasks("train")[index]
    digits = task.prompt.removesuffix("=")
    assert 6 <= len(digits) <= 8
    assert task.answer == "".join(sorted(digits))


@given(INDICES)
@settings(deadline=None)
def test_addition_wants_the_sum(index):
    task = environment("addition").tasks("train")[index]
    left, right = task.prompt.removesuffix("=").split("+")
    assert int(task.answer) == int(left) + int(right)
    assert max(int(left), int(right)) < 100


@pytest.mark.parametrize("name", NAMES)
def test_gold_scores_one_and_near_misses_zero(name):
    built = environment(name)
    for task in built.tasks("train")[:50]:
        assert built.score(task, task.answer).value == 1.0
        for miss in (task.answer[::-1] + "x", task.answer + " ", task.answer[:-1], "", task.answer + task.answer):
            assert built.score(task, miss).value == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_train_and_held_out_share_no_prompt(name):
    built = environment(name)
    held_out = {task.prompt for task in built.tasks("held_out")}
    assert held_out.isdisjoint(task.prompt for task in built.tasks("train")[:20_000])


def test_splits_of_different_options_are_disjoint_too():
    """What one environment holds out, no other length range of it trains on: the split is by content."""
    held_out = {task.prompt for task in environment(min_digits=2, max_digits=4).tasks("held_out")}
    trained = {task.prompt for task in environment(min_digits=2, max_digits=5).tasks("train")[:5000]}
    assert held_out.isdisjoint(trained)


@given(INDICES, st.sampled_from(["train", "held_out"]))
@settings(deadline=None)
def test_an_id_names_its_task(index, split: Split):
    built = environment()
    tasks = built.tasks(split)
    task = tasks[index % len(tasks)]
    assert built.task(task.id) == task


@pytest.mark.parametrize(
    "task_id",
    ["", "sort", "sort/train", "sort/train/x", "sort/train/100000", "sort/train/-1", "sort/train/01", "sort/test/1",
     "addition/train/1", "sort/train/1/2", "sort/train/²"],
)  # fmt: skip
def test_an_unknown_id_is_refused(task_id):
    with pytest.raises(EnvironmentSetupError, match="no task"):
        environment().task(task_id)


def test_tasks_are_a_sequence():
    tasks = build(EnvironmentSettings(train_size=5)).tasks("train")
    assert [task.id for task in tasks] == [f"sort/train/{index}" for index in range(5)]
    assert tasks[-1] == tasks[4]
    assert list(tasks[1:3]) == [tasks[1], tasks[2]]
    with pytest.raises(IndexError):
        tasks[5]


def test_tasks_are_the_same_in_every_process_and_release():
    assert [task.prompt for task in environment().tasks("train")[:3]] == ["833286=", "915332=", "4036562="]
    assert environment().tasks("held_out")[3].prompt == "374952="


def test_all_lengths_occur_about_equally_often():
    lengths = [len(task.answer) for task in environment().tasks("train")[:3000]]
    assert all(850 < lengths.count(length) < 1150 for length in (6, 7, 8))


def test_the_digest_follows_what_determines_tasks():
    base = environment().digest
    assert environment().digest == base
    assert len({base, environment(max_digits=9).digest, environment("addition").digest}) == 3
    assert build(EnvironmentSettings(held_out_size=10)).digest != base
    assert build(EnvironmentSettings(shuffle_rewards=True)).digest == base


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "srot"}, r"no environment 'srot' \(did you mean 'sort'\?\); there are addition, .*sort"),
        ({"options": {"max_digit": 3}}, r"no option 'max_digit' \(did you mean 'max_digits'\?\)"),
        ({"options": {"max_digits": 3}}, r"min_digits \(6\) is above max_digits \(3\)"),
        ({"options": {"max_digits": 0}}, "max_digits: Input should be greater than or equal to 1"),
        ({"options": {"max_digits": "many"}}, "max_digits: Input should be a valid integer"),
    ],
)
def test_wrong_settings_say_what_to_do(settings, said):
    with pytest.raises(EnvironmentSetupError, match=said):
        build(EnvironmentSettings(**settings))


def test_options_that_leave_a_split_empty_are_an_error_not_a_hang():
    tasks = environment(min_digits=1, max_digits=1).tasks
    with pytest.raises(EnvironmentSetupError, match="leave no held_out task"):
        [tasks("held_out")[0], tasks("train")[0]]
