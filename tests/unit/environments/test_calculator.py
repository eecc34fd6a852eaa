"""The calculator: what it computes, what it refuses, and that nothing it reads is ever run."""

from __future__ import annotations

import ast
import inspect
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.environments import EnvironmentSettings, build, dialogue_of, has_dialogues
from shoal.environments.protocol import DialogueRule
from shoal.environments.settings import LengthSettings
from shoal.environments.tools import MAX_BITS, MAX_CHARACTERS, MAX_DEPTH, TOOLS, NoValue, evaluate, shown
from shoal.errors import EnvironmentSetupError

answer = TOOLS["calculator"]

SIGNS = "0123456789.+-*/^()= \n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", "0"), ("007", "7"), ("1+2*3", "7"), ("(1+2)*3", "9"), ("2-3-4", "-5"), ("8/4/2", "1"), ("-2^2", "-4"),
        ("(-2)^2", "4"), ("2^3^2", "512"), ("2**10", "1024"), ("2^-2", "0.25"), ("--3", "3"), ("-+-3", "3"),
        ("1/3", "0.333333"), ("2/3", "0.666667"), ("1/8", "0.125"), (".5+.25", "0.75"), ("1.50", "1.5"),
        ("0.0000005", "0"), ("0.0000015", "0.000002"), ("-1/1000000000", "0"), (" 1\t+\n1 ", "2"), ("0^0", "1"),
        ("9" * 32, "9" * 32), ("2^64", "18446744073709551616"), ("-7/2", "-3.5"), ("10-0.000001", "9.999999"),
    ],
)  # fmt: skip
def test_values(text: str, value: str) -> None:
    assert shown(evaluate(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "+", "1+", "*1", "(1", "1)", "()", "1 2", "1..2", "1.", "1/0", "1/(2-2)", "0^-1", "2^0.5", "2^65",
        "9" * 33, "1e5", "1_000", "0x10", "\uff11", "\u0663", "x", "1,5", "2^64^64", "(10^30)^30", "__import__('os')",
        "1;2", "(" * 200 + "1" + ")" * 200, "-" * 250 + "1", "1+" * 200 + "1", "//", "1//2", "***",
    ],
)  # fmt: skip
def test_what_has_no_value(text: str) -> None:
    with pytest.raises(NoValue):
        evaluate(text)


def test_the_caps_are_reached_and_not_passed() -> None:
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == 1
    with pytest.raises(NoValue):
        evaluate("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1))
    assert evaluate("1" + " " * (MAX_CHARACTERS - 1)) == 1
    with pytest.raises(NoValue):
        evaluate("1" + " " * MAX_CHARACTERS)
    assert evaluate(f"2^{MAX_BITS // 8}") == 2 ** (MAX_BITS // 8)


@given(st.text(alphabet=SIGNS, max_size=300))
def test_any_text_is_answered_shortly_or_not_at_all(text: str) -> None:
    said = answer([text])
    assert said is None or (0 < len(said) < 100 and set(said) <= set("0123456789.-eror"))


@given(st.lists(st.text(max_size=40), min_size=1, max_size=5))
def test_it_never_raises_and_says_the_same_again(turns: list[str]) -> None:
    assert answer(turns) == answer(list(turns))


numbers = st.integers(0, 999).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({''.join(parts)})"),
    max_leaves=6,
)


@given(expressions)
def test_it_agrees_with_another_parser(text: str) -> None:
    """Of nothing but digits, signs and parentheses that this test itself made."""
    assert evaluate(text) == _folded(ast.parse(text, mode="eval").body)


def _folded(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(int(node.value))
    assert isinstance(node, ast.BinOp)
    left, right = _folded(node.left), _folded(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    return left - right if isinstance(node.op, ast.Sub) else left * right


def test_a_bare_number_is_a_question_once_and_then_the_answer() -> None:
    assert answer(["12"]) == "12"
    assert answer(["12", "12"]) is None
    assert answer(["12", "12*2="]) == "24"
    assert answer(["12", "-3.5"]) is None
    assert answer(["seven"]) is None
    assert answer([""]) is None
    assert answer(["+-"]) is None, "without a digit it is no calculation"
    assert answer(["1+"]) == "error"
    assert answer(["1==2"]) == "error"
    assert answer(["it is 12"]) is None


def test_nothing_that_it_reads_can_be_run() -> None:
    source = Path(inspect.getsourcefile(evaluate) or "").read_text()
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert "Fraction" in names
    assert not names & {"eval", "exec", "compile", "__import__", "open", "getattr"}


def test_tasks_are_expressions_with_their_values_and_gold_scores_one() -> None:
    environment = build(EnvironmentSettings(name="calculator"))
    tasks = environment.tasks("train")
    assert tasks[0].prompt == "(30-37)*75="
    assert tasks[0].answer == "-525"
    for index in range(200):
        task = tasks[index]
        assert environment.score(task, task.answer).value == 1.0
        assert environment.score(task, f" {task.answer}\n").value == 1.0
        assert answer([task.prompt]) == task.answer, "the tool can compute what is asked"
        for miss in (f"{task.answer}0", f"+{task.answer}", f"{task.answer}.", f"{task.answer}=", "", "error"):
            assert environment.score(task, miss).value == 0.0
    assert not {task.prompt for task in tasks[:300]} & {task.prompt for task in environment.tasks("held_out")[:100]}


def test_a_number_that_is_wrong_may_be_worth_something() -> None:
    environment = build(EnvironmentSettings(name="calculator", options={"number_credit": 0.25}))
    task = environment.tasks("train")[0]
    worth = {text: environment.score(task, text).value for text in (task.answer, "17", "-0.5", "seven", "1+1", "")}
    assert worth == {task.answer: 1.0, "17": 0.25, "-0.5": 0.25, "seven": 0.0, "1+1": 0.0, "": 0.0}
    assert environment.score(task, "17").parts == {"exact": 0.0, "number": 1.0}


def test_options_are_in_the_digest_and_unknown_ones_refused() -> None:
    def digest(**options: object) -> str:
        return build(EnvironmentSettings(name="calculator", options=options)).digest

    assert len({digest(), digest(terms=4), digest(operators="+"), digest(max_turns=4), digest(number_credit=0.1)}) == 5
    with pytest.raises(EnvironmentSetupError, match="did you mean 'max_turns'"):
        digest(max_turn=2)
    with pytest.raises(EnvironmentSetupError, match="operators"):
        digest(operators="/")


def test_dialogues_are_seen_through_what_is_put_around_an_environment() -> None:
    plain = EnvironmentSettings(name="calculator", options={"max_turns": 5})
    dressed = plain.model_copy(update={"length": LengthSettings(targets=(5,))})
    for settings in (plain, dressed):
        environment = build(settings)
        assert has_dialogues(environment)
        assert dialogue_of(environment, environment.tasks("train")[0]) == DialogueRule("calculator", 5)
    other = build(EnvironmentSettings())
    assert not has_dialogues(other)
    assert dialogue_of(other, other.tasks("train")[0]) is None


def test_a_rule_names_a_tool_that_there_is() -> None:
    with pytest.raises(EnvironmentSetupError, match="there is no tool 'shell'; there are calculator"):
        DialogueRule("shell", 3)


def own_file(folder: Path, *lines: str) -> EnvironmentSettings:
    file = folder / "own.py"
    file.write_text("\n".join(["tasks = [('1+1=', '2')] * 1", "def score(task, text): return text == '2'", *lines]))
    return EnvironmentSettings(file=file)


def test_a_file_of_ones_own_may_name_a_tool(tmp_path: Path) -> None:
    talking = build(own_file(tmp_path, "tool = 'calculator'", "max_turns = 5"))
    assert has_dialogues(talking)
    assert dialogue_of(talking, talking.tasks("train")[0]) == DialogueRule("calculator", 5)
    assert dialogue_of(build(own_file(tmp_path, "tool = 'calculator'")), talking.tasks("train")[0]) == DialogueRule(
        "calculator", 3
    )
    assert not has_dialogues(build(own_file(tmp_path)))
    assert not has_dialogues(build(own_file(tmp_path, "def tool(turns): return 'rm -rf /'"))), "no code of its own"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["tool = 'shell'"], "there is no tool 'shell'"),
        (["tool = 'calculator'", "max_turns = 1"], "max_turns in .* is 1; it must be from 2 to 64"),
        (["tool = 'calculator'", "max_turns = 'x'"], "max_turns in .* is 'x'"),
    ],
)
def test_a_file_that_names_what_is_not_there_is_refused(tmp_path: Path, lines: list[str], problem: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=problem):
        build(own_file(tmp_path, *lines))
