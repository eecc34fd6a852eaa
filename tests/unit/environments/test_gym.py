"""reasoning-gym: every generator by name, the same tasks in every process, scorers that nothing can fool or hang."""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.tables import table
from shoal.environments import Environment, EnvironmentSettings, build
from shoal.environments import gym as source
from shoal.environments.generated import is_held_out
from shoal.environments.gym import Generator, checked_expression, example_answer, final_answer, generator_names
from shoal.errors import EnvironmentSetupError, ScoringFailure

if importlib.util.find_spec("reasoning_gym") is None:
    pytest.skip("reasoning-gym is not installed", allow_module_level=True)

GENERATORS = Path(__file__).parents[2] / "data" / "reasoning_gym_generators.txt"
SLOW = {
    "countdown", "futoshiki", "intermediate_integration", "knight_swap", "puzzle24", "sokoban", "word_ladder",
    "zebra_puzzles", "rubiks_cube", "sudoku", "arc_agi", "figlet_font", "group_anagrams", "rearc", "quantum_lock",
    "game_of_life", "gsm_symbolic", "polynomial_multiplication", "polynomial_equations", "advanced_geometry",
}  # fmt: skip
NO_GOLD = {"boxnet", "rush_hour"}
NUMBERS = (12345, 2**31 - 1)


def names() -> list[object]:
    """From a file: the library takes seconds to import, and every test process collects this."""
    every = GENERATORS.read_text().split()
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in every]


@cache
def generator(name: str) -> Generator:
    return Generator(name, {})


def gym(**options: object) -> Environment:
    sizes = {"train_size": 200, "held_out_size": 40}
    return build(EnvironmentSettings.model_validate({"name": "reasoning-gym", "options": options, **sizes}))


def test_there_are_a_hundred() -> None:
    assert generator_names() == GENERATORS.read_text().split()
    assert len(generator_names()) >= 100


@pytest.mark.parametrize("name", names())
def test_gold_scores_1_and_other_things_do_not(name: str) -> None:
    made, state = generator(name), random.getstate()
    garbage = ["", "zzz qqq", "\\", "{}", "[[]]", "(", "nan", "[[1,", '{"a": [', "\x00", "9" * 5000, "()" * 3000]
    for number in NUMBERS:
        entry = made.entry(number)
        gold = example_answer(entry).strip()
        if name not in NO_GOLD:
            assert made.score(entry, gold)[0] == 1.0, gold
            assert made.score(entry, f"{gold} or perhaps not, I am not sure @@@")[0] < 1.0 or name in LENIENT
        for text in garbage:
            value, _note = made.score(entry, text)
            assert 0.0 <= value < 1.0, (text, gold)
    assert made.entry(NUMBERS[0]) == made.entry(NUMBERS[0])
    assert random.getstate() == state


LENIENT = {
    "advanced_geometry", "fraction_simplification", "gsm_symbolic", "kakurasu", "knights_knaves", "letter_jumble",
    "sokoban", "spell_backward", "survo", "time_intervals",
}  # fmt: skip
"""Generators whose scorer looks for the answer within the text."""


FINGERPRINT = """
import hashlib, json, sys
from shoal.environments.gym import Generator
def fingerprints(names):
    entries = {name: [Generator(name, {}).entry(number)["question"] for number in (12345, 2**31 - 1)] for name in names}
    return {name: hashlib.sha256(repr(made).encode()).hexdigest() for name, made in entries.items()}
"""


def test_patched_generators_do_not_depend_on_hashes_or_global_random_numbers() -> None:
    chosen = ["isomorphic_strings", "ransom_note", "polynomial_multiplication", "list_functions", "pool_matrix"]
    command = [sys.executable, "-c", f"{FINGERPRINT}print(json.dumps(fingerprints({chosen})))"]
    environ = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True, env=environ).stdout
    random.seed(1)
    np.random.seed(1)
    here: dict[str, Any] = {}
    exec(FINGERPRINT, here)
    assert json.loads(there.splitlines()[-1]) == here["fingerprints"](chosen)


@pytest.mark.parametrize(("name", "hack"), [
    ("game_of_life_halting", "anything"), ("coin_flip", "0"), ("complex_arithmetic", "nan"),
    ("puzzle24", "6 + 6 + 6 + 6"),
])  # fmt: skip
def test_no_answer_fits_every_task(name: str, hack: str) -> None:
    """Each of these is a full score to the library's own scorer, whatever the task."""
    made, entries = generator(name), [generator(name).entry(number) for number in range(3)]
    assert any(made._first.score_answer(hack, entry) == 1.0 for entry in entries)
    assert [made.score(entry, hack)[0] for entry in entries] == [0.0] * 3


class Scorer:
    """Raises at every answer but one."""

    def __init__(self, error: Exception, reads: str | None = None) -> None:
        self._error, self._reads = error, reads

    def score_answer(self, answer: str, _entry: object) -> float:
        if answer != self._reads:
            raise self._error
        return 1.0


@pytest.mark.parametrize(
    "error", [OSError("disk"), ImportError("numpy"), RuntimeError("defect"), MemoryError(), ValueError("no number")]
)
def test_a_scorer_that_fails_is_no_wrong_answer_unless_it_can_read_gold(monkeypatch, error):
    made, entry = Generator("chain_sum", {}), generator("chain_sum").entry(3)
    own = isinstance(error, MemoryError)  # for whoever limits the memory
    monkeypatch.setattr(made, "_first", Scorer(error))
    with pytest.raises(
        MemoryError if own else ScoringFailure, match=None if own else f"failed: {type(error).__name__}"
    ):
        made.score(entry, "twelve")
    if isinstance(error, ValueError):
        monkeypatch.setattr(made, "_first", Scorer(error, reads=entry["answer"]))
        assert made.score(entry, "twelve") == (0.0, "the scorer could not read the answer: ValueError")
        assert made.score(entry, entry["answer"])[0] == 1.0


def test_a_wrong_sign_is_a_wrong_answer() -> None:
    entry = next(e for n in range(20) if not (e := generator("gsm_symbolic").entry(n))["answer"].startswith("-"))
    assert generator("gsm_symbolic").score(entry, f"-{entry['answer']}")[0] == 0.0


CALLS = {"eval", "exec", "compile", "parse_expr", "sympify", "S"}


@pytest.mark.parametrize("name", [*source.EVAL_MODULES, *source.PARSER_MODULES])
def test_nothing_that_an_answer_says_is_run(name: str, tmp_path: Path) -> None:
    made = generator(name.rpartition(".")[2])
    mark = tmp_path / "was_run"
    attacks = [
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"[p for p in [__import__('pathlib').Path({str(mark)!r}).touch()]]", "().__class__.__base__.__subclasses__()",
        "9**9**9**9**9", "((((9**64)**64)**64)**64)", "factorial(10**9)", "lambda: 0",
    ]  # fmt: skip
    entry = made.entry(3)
    assert [made.score(entry, attack)[0] < 1.0 for attack in attacks] == [True] * len(attacks)
    assert not mark.exists()


def test_every_scorer_that_evaluates_is_known() -> None:
    """The list of modules to mend is complete: no other scorer calls anything that evaluates."""
    known = {f"reasoning_gym.{name}" for name in (*source.EVAL_MODULES, *source.PARSER_MODULES)}
    harmless = {  # these evaluate what they made themselves, or have a parser of their own
        f"reasoning_gym.{name}"
        for name in ("algorithmic.number_sorting", "arithmetic.bitwise_arithmetic", "logic.propositional_logic")
    }
    found, words = set(), ("score", "_score", "parse", "_parse", "verify", "_verify", "check", "_check")
    registered = importlib.import_module("reasoning_gym.factory").DATASETS
    for module in {registered[name][0].__module__ for name in generator_names()}:
        tree = ast.parse(inspect.getsource(importlib.import_module(module)))
        scorers = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith(words)]
        made = [c.func for s in scorers for c in ast.walk(s) if isinstance(c, ast.Call)]
        if CALLS & {getattr(function, "id", getattr(function, "attr", "")) for function in made}:
            found.add(module)
    assert found - harmless == known


@pytest.mark.parametrize("text", ["x**2/2 + C", "-3*exp(2*x) + log(x)", "8*43 - 75 + 62", "1/2", "2**x", "1.5e3*y",
                                  "9" * 100, "x**256", "x" + "+x" * 500, "+".join(["9**64"] * 64)])  # fmt: skip
def test_mathematics_is_let_through(text: str) -> None:
    assert checked_expression(text) == text


TOO_LARGE = ["9" * 101, "+".join(["9**64"] * 65), "+".join(["9" * 99] * 81), "x" + "+x" * 2000]


@pytest.mark.parametrize("text", [*table("own_environments", "no expressions of reasoning-gym"), *TOO_LARGE])
def test_anything_else_is_not(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- which kind of wrong it is does not matter
        checked_expression(text)


@pytest.mark.parametrize(("level", "numbers"), [
    (1, range(1, 5)), (2, range(1, 2)), *(pytest.param(level, range(1, 5), marks=pytest.mark.slow) for level in (2, 3)),
])  # fmt: skip
def test_gold_products_of_long_polynomials_score_1(level: int, numbers: range) -> None:
    made = Generator("polynomial_multiplication", {}, level)
    golds = [(entry, example_answer(entry)) for entry in map(made.entry, numbers)]
    assert {made.score(entry, gold)[0] for entry, gold in golds} == {1.0}


def test_an_integral_whose_gold_is_an_integral_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Generator("simple_integration", {})
    first = gym().task("reasoning-gym/train/0").prompt
    assert made.is_answerable({"answer": "x**2/2 + C"})
    assert not made.is_answerable({"answer": "Integral(sin(x)/x, x) + C"})
    monkeypatch.setattr(Generator, "is_answerable", lambda _self, entry: not first.startswith(entry["question"]))
    assert gym().task("reasoning-gym/train/0").prompt != first


@pytest.mark.parametrize(("completion", "answer"), table("own_environments", "where reasoning-gym reads the answer"))
def test_where_the_answer_is(completion: str, answer: str) -> None:
    assert final_answer(completion) == answer


def test_tasks_by_index_and_id_are_scored_by_their_own_generator_with_partial_credit_by_choice() -> None:
    environment = gym(generator="leg_counting")
    for task in environment.tasks("train")[:8]:
        assert task.kind == "leg_counting"
        assert environment.task(task.id) == task
        assert task.prompt.endswith("between <answer> and </answer>.")
        assert environment.score(task, f"<think>hm</think><answer>{task.answer}</answer>").value == 1.0
        assert environment.score(task, "<answer>none</answer>").value == 0.0
    whole, partly = (gym(generator="letter_counting", partial=partial) for partial in (False, True))
    task = whole.tasks("train")[0]
    none, some = (environment.score(task, f"{task.answer} of them") for environment in (whole, partly))
    assert none.value == 0.0 < some.value < 1.0
    assert none.parts == some.parts


def test_splits_share_no_prompt_and_too_few_different_tasks_are_an_error() -> None:
    environment = gym(settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2})
    train, held_out = ({t.prompt for t in environment.tasks(split)} for split in ("train", "held_out"))
    assert not train & held_out
    assert all(is_held_out(prompt) for prompt in held_out)
    only = gym(generator="count_bits", settings={"min_n": 7, "max_n": 7})
    with pytest.raises(EnvironmentSetupError, match="too few different tasks"):
        _ = [only.tasks(split)[0] for split in ("train", "held_out")]


def test_settings_level_and_seed_change_tasks_and_digest_and_are_fitted() -> None:
    made = [gym(), gym(seed=1), gym(level=3), gym(settings={"min_terms": 6, "max_terms": 6}), gym(ask="")]
    assert len({environment.digest for environment in made}) == 5
    assert len({tuple(task.prompt for task in environment.tasks("train")[:9]) for environment in made}) == 5
    assert {task.prompt.count(" + ") + task.prompt.count(" - ") for task in made[3].tasks("train")[:9]} == {5}
    assert gym().digest == gym().digest
    made = Generator("time_intervals", {"min_date": "2000-01-01", "max_date": "2001-01-01", "task_types": ["date"]})
    assert "200" in made.entry(5)["question"]
    assert "*" not in Generator("basic_arithmetic", {"operators": ["+"]}).entry(1)["question"]
    assert Generator("word_sorting", {"transformation": "uppercase"}).entry(1)["answer"].isupper()


@pytest.mark.parametrize(("options", "sentence"), table("own_environments", "generator settings"))
def test_invalid_generator_settings_are_refused_when_built(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=sentence):
        gym(**options)


def test_without_the_package_or_with_another_version_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gym()
    monkeypatch.setattr(sys.modules["reasoning_gym"], "_patched_by_shoal", False)
    monkeypatch.setattr(source.importlib.metadata, "version", lambda _name: "9.9.9")
    with pytest.raises(EnvironmentSetupError, match=r"9\.9\.9 was not checked"):
        gym()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(EnvironmentSetupError, match=r"pip install .shoal-rl\[gym\]"):
        gym()


WITHOUT_THE_SOLVER = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "pycosat" else found(name, *rest)
from shoal.environments.gym import Generator, generator_names
print(Generator("chain_sum", {}).entry(1)["question"])
print("zebra_puzzles" in generator_names(), "pycosat" in sys.modules)
Generator("zebra_puzzles", {})
"""


@pytest.mark.slow
def test_without_a_compiler_only_one_generator_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_THE_SOLVER], capture_output=True, text=True, timeout=120)
    question, listed = done.stdout.splitlines()
    assert question.startswith("State the final answer")
    assert listed == "False False"
    assert "EnvironmentSetupError: reasoning-gym's zebra_puzzles cannot be used here: it needs" in done.stderr
