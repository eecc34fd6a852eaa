"""Generated tasks, a reward of one's own, and the calculator: what they ask, score and refuse."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.tables import table
from shoal.environments import DialogueRule, Environment, EnvironmentSettings, Score, build, dialogue_of, has_dialogues
from shoal.environments.settings import LengthSettings
from shoal.environments.tools import MAX_BITS, MAX_CHARACTERS, MAX_DEPTH, TOOLS, NoValue, evaluate, shown
from shoal.errors import EnvironmentSetupError, ScoringFailure

NAMES = ("sort", "addition")
INDICES = st.integers(0, 99_999)


def environment(name: str = "sort", **options: int) -> Environment:
    return build(EnvironmentSettings(name=name, options=options))


@pytest.mark.parametrize("name", NAMES)
def test_gold_scores_one_near_misses_zero_and_splits_share_no_prompt(name):
    built = environment(name)
    for task in built.tasks("train")[:50]:
        assert built.score(task, task.answer).value == 1.0
        for miss in (task.answer[::-1] + "x", task.answer + " ", task.answer[:-1], "", task.answer + task.answer):
            assert built.score(task, miss).value == 0.0
    held_out = {task.prompt for task in built.tasks("held_out")}
    assert held_out.isdisjoint(task.prompt for task in built.tasks("train")[:20_000])


@pytest.mark.parametrize(
    "task_id",
    ["", "sort", "sort/train", "sort/train/x", "sort/train/100000", "sort/train/-1", "sort/train/01", "sort/test/1",
     "addition/train/1", "sort/train/1/2", "sort/train/²"],
)  # fmt: skip
def test_an_unknown_id_is_refused(task_id):
    with pytest.raises(EnvironmentSetupError, match="no task"):
        environment().task(task_id)


def test_tasks_are_pinned_the_digest_follows_the_settings_and_an_empty_split_is_an_error():
    assert [task.prompt for task in environment().tasks("train")[:3]] == ["833286=", "915332=", "4036562="]
    assert environment().tasks("held_out")[3].prompt == "374952="
    base = environment().digest
    assert environment().digest == base
    assert len({base, environment(max_digits=9).digest, environment("addition").digest}) == 3
    assert build(EnvironmentSettings(held_out_size=10)).digest != base
    assert build(EnvironmentSettings(shuffle_rewards=True)).digest == base
    tasks = environment(min_digits=1, max_digits=1).tasks
    with pytest.raises(EnvironmentSetupError, match="leaves no held_out task"):
        [tasks("held_out")[0], tasks("train")[0]]


@pytest.mark.parametrize(("settings", "said"), table("own_environments", "wrong settings"))
def test_wrong_settings_say_what_to_do(settings, said):
    with pytest.raises(EnvironmentSetupError, match=said):
        build(EnvironmentSettings(**settings))


PLAIN = """
tasks = [{"prompt": f"{i}?", "answer": str(i)} for i in range(20)]
def score(prompt, completion, answer):
    return completion == answer
"""


@pytest.fixture
def load(tmp_path: Path):
    def write_and_build(source: str, **settings: object) -> Environment:
        file = tmp_path / "reward.py"
        file.write_text(source)
        return build(EnvironmentSettings(file=file, **settings))

    return write_and_build


def test_a_plain_function_and_a_list_are_enough(load):
    environment = load(PLAIN)
    assert isinstance(environment, Environment)
    assert environment.name == "reward"
    assert (len(environment.tasks("train")), len(environment.tasks("held_out"))) == (16, 4)
    task = environment.tasks("train")[0]
    assert environment.score(task, task.answer) == Score(value=1.0)
    assert environment.score(task, "no").value == 0.0
    assert environment.task(task.id) == task


@pytest.mark.parametrize(("body", "said"), table("own_environments", "no scores"))
def test_a_scorer_that_gives_no_score_is_unscored_never_reward_zero(load, body, said):
    environment = load(f"tasks = [('p', 'a')]\ndef score(prompt, completion, answer): {body}\n")
    with pytest.raises(ScoringFailure, match=said):
        environment.score(environment.tasks("train")[0], "x")


def test_digest_is_another_wherever_unseeded_tasks_are_others(load):
    source = "import random\ndrawn = random.Random({})\ntasks = [(str(drawn.random()), 'a') for _ in range(9)]\n"
    source += "def score(a, b, c): ...\n"
    seeded, unseeded = ([load(source.format(seed)) for _ in range(2)] for seed in ("7", ""))
    assert seeded[0].digest == seeded[1].digest
    assert unseeded[0].digest != unseeded[1].digest


def test_one_prompt_is_never_on_both_sides(load):
    made = load("tasks = [(str(i % 7), str(i)) for i in range(70)]\ndef score(prompt, completion, answer): return 0\n")
    train, held_out = ({task.prompt for task in made.tasks(split)} for split in ("train", "held_out"))
    assert train
    assert held_out
    assert train.isdisjoint(held_out)


ONE, TAKES = "tasks = [('p', 'a')]\n", "def score(a, b, c): ..."


@pytest.mark.parametrize(("source", "said"), table("own_environments", "files that do not load"))
def test_a_file_that_does_not_load_says_why(load, source, said):
    with pytest.raises(EnvironmentSetupError, match=said):
        load(source)


def test_a_missing_file_and_misplaced_options(tmp_path, load):
    with pytest.raises(EnvironmentSetupError, match=r"cannot read environment.file .*: No such file"):
        build(EnvironmentSettings(file=tmp_path / "absent.py"))
    with pytest.raises(EnvironmentSetupError, match="a file has none"):
        load(PLAIN, options={"max_digits": 3})
    with pytest.raises(EnvironmentSetupError, match="no task 'zzz'"):
        load(PLAIN).task("zzz")
    plain_text = tmp_path / "reward.txt"
    plain_text.write_text(PLAIN)
    with pytest.raises(EnvironmentSetupError, match=r"must end in \.py"):
        build(EnvironmentSettings(file=plain_text))


@pytest.mark.parametrize(
    "body",
    ["return {'value': 0.5, 'parts': {'style': 1}, 'notes': 'neat'}", "return Score(0.5, {'style': True}, 'neat')"],
)
def test_a_score_may_have_parts_and_notes(load, body):
    environment = load(f"from shoal.environments import Score\ntasks = [('p', 'a')]\ndef score(t, c): {body}\n")
    score = environment.score(environment.tasks("train")[0], "x")
    assert (score.value, dict(score.parts), score.notes) == (0.5, {"style": 1.0}, "neat")
    assert type(score.parts["style"]) is float


answer = TOOLS["calculator"]

SIGNS = "0123456789.+-*/^()= \n"


@pytest.mark.parametrize(("text", "value"), table("calculator", "values"))
def test_values(text: str, value: str) -> None:
    assert shown(evaluate(text)) == value


TOO_LONG = ["(" * 200 + "1" + ")" * 200, "-" * 250 + "1", "1+" * 200 + "1"]


@pytest.mark.parametrize("text", [*table("calculator", "no value"), *TOO_LONG])
def test_expressions_without_value(text: str) -> None:
    with pytest.raises(NoValue):
        evaluate(text)


def test_the_caps_are_reached_and_not_passed() -> None:
    for within, beyond in (
        ("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH, "(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1)),
        ("1" + " " * (MAX_CHARACTERS - 1), "1" + " " * MAX_CHARACTERS),
    ):
        assert evaluate(within) == 1
        with pytest.raises(NoValue):
            evaluate(beyond)
    assert evaluate(f"2^{MAX_BITS // 8}") == 2 ** (MAX_BITS // 8)


@given(st.text(alphabet=SIGNS, max_size=300))
def test_any_text_is_answered_shortly_or_not_at_all(text: str) -> None:
    said = answer([text])
    assert said is None or (0 < len(said) < 100 and set(said) <= set("0123456789.-eror"))


@pytest.mark.parametrize(("turns", "said"), table("calculator", "turns"))
def test_a_bare_number_is_a_question_once_and_then_the_answer(turns: list[str], said: str | None) -> None:
    assert answer(turns) == said


def test_tasks_are_expressions_gold_scores_one_and_wrong_numbers_what_is_set() -> None:
    environment = build(EnvironmentSettings(name="calculator"))
    tasks = environment.tasks("train")
    assert (tasks[0].prompt, tasks[0].answer) == ("(30-37)*75=", "-525")
    for task in tasks[:200]:
        gold = task.answer
        assert environment.score(task, gold).value == environment.score(task, f" {gold}\n").value == 1.0
        assert answer([task.prompt]) == gold, "the tool can compute what is asked"
        for miss in (f"{gold}0", f"+{gold}", f"{gold}.", f"{gold}=", "", "error"):
            assert environment.score(task, miss).value == 0.0
    assert not {task.prompt for task in tasks[:300]} & {task.prompt for task in environment.tasks("held_out")[:100]}
    environment = build(EnvironmentSettings(name="calculator", options={"number_credit": 0.25}))
    task = environment.tasks("train")[0]
    worth = {text: environment.score(task, text).value for text in (task.answer, "17", "-0.5", "seven", "1+1", "")}
    assert worth == {task.answer: 1.0, "17": 0.25, "-0.5": 0.25, "seven": 0.0, "1+1": 0.0, "": 0.0}
    assert environment.score(task, "17").parts == {"exact": 0.0, "number": 1.0}


def test_dialogues_of_an_inner_environment_are_found() -> None:
    plain = EnvironmentSettings(name="calculator", options={"max_turns": 5})
    dressed = plain.model_copy(update={"length": LengthSettings(targets=(5,))})
    for given_settings in (plain, dressed):
        environment = build(given_settings)
        assert has_dialogues(environment)
        assert dialogue_of(environment, environment.tasks("train")[0]) == DialogueRule("calculator", 5)
    other = build(EnvironmentSettings())
    assert not has_dialogues(other)
    assert dialogue_of(other, other.tasks("train")[0]) is None


@pytest.mark.parametrize(
    ("lines", "turns"),
    [("tool = 'calculator'; max_turns = 5", 5), ("tool = 'calculator'", 3), ("", 0)],
)  # fmt: skip
def test_reward_file_may_name_a_built_in_tool_only(load, lines: str, turns: int) -> None:
    made = load(f"{ONE}{TAKES}\n{lines}")
    assert has_dialogues(made) == bool(turns)
    rule = DialogueRule("calculator", turns) if turns else None
    assert dialogue_of(made, made.tasks("train")[0]) == rule
