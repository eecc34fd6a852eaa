"""reasoning-gym: a hundred generators of reasoning tasks, each with its own scorer.

    index ─► candidate numbers (a hash) ─► generator ─► entry ─► the first one of the wanted split ─► task
                                                                 that can be answered

The answer is the text between <answer> and </answer> after the thinking, or all text after the thinking. The library
was written for scripts, so it is patched: scorers that evaluate the answer as Python (`eval`, sympy's parser) accept
literals and arithmetic only; generators that use global random numbers, or the order of sets, become deterministic;
scorers that accept one answer for every task must also pass `CONDITIONS`. Only the version that was checked is used.
"""

import ast
import dataclasses
import datetime
import enum
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import random
import re
import string
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, ClassVar

from pydantic import Field

from shoal.environments.generated import IndexedEnvironment, is_held_out
from shoal.environments.graders import after_thinking
from shoal.environments.protocol import Score, Split, Task
from shoal.environments.settings import Table
from shoal.errors import EnvironmentSetupError, ScoringFailure
from shoal.runtime.extras import of_extra
from shoal.runtime.text import install_command, meant

CANDIDATES_PER_TASK, ENTRIES_KEPT = 512, 1024
OPENING, CLOSING = "<answer>", "</answer>"
FULL = 1.0 - 1e-9


class GymOptions(Table):
    """Which generator, how difficult, and how the answer is asked for."""

    generator: str = Field(default="chain_sum", description="a generator of reasoning-gym, by its name")
    settings: dict[str, Any] = Field(default_factory=dict, description="fields of the generator's configuration")
    level: int | None = Field(default=None, ge=0, le=1000, description="level of its own curriculum, from 0")
    seed: int = Field(default=0, ge=0, description="another seed gives other tasks")
    ask: str = Field(
        default="Give your final answer between <answer> and </answer>.",
        description="added to every question, in a line of its own; may be empty",
    )
    partial: bool = Field(default=False, description="take the generator's partial credit; else it is 1 or 0")


class GymEnvironment(IndexedEnvironment):
    """Implements `Environment`. A task's `kind` is its generator; `answer` is one right answer, if one is known."""

    name: ClassVar[str] = "reasoning-gym"
    version: ClassVar[int] = 2
    options: GymOptions

    def __init__(self, options: GymOptions, sizes: dict[Split, int]) -> None:
        super().__init__(options, sizes, library=VERSION)
        self._generator = Generator(options.generator, options.settings, options.level)
        self._found = lru_cache(maxsize=ENTRIES_KEPT)(self._find)

    def make(self, split: Split, index: int) -> Task:
        entry = self._found(split, index)
        return Task(f"{self.name}/{split}/{index}", self._prompt(entry), example_answer(entry), self._generator.name)

    def score(self, task: Task, completion: str) -> Score:
        given, notes = self._generator.score(self._found(*self._place(task.id)), final_answer(completion))
        value = given if self.options.partial else float(given >= FULL)
        return Score(value=value, parts={"generator": given}, notes=notes)

    def _find(self, split: Split, index: int) -> Mapping[str, Any]:
        generator = self._generator
        for attempt in range(CANDIDATES_PER_TASK):
            label = f"shoal/gym/v1\n{self.options.seed}/{split}/{index}/{attempt}"
            number = int.from_bytes(hashlib.sha256(label.encode()).digest()[:4], "big") >> 1
            entry = generator.entry(number)
            if is_held_out(self._prompt(entry)) == (split == "held_out") and generator.is_answerable(entry):
                return entry
        raise EnvironmentSetupError(f"reasoning-gym's {generator.name} has too few different tasks with these settings")

    def _prompt(self, entry: Mapping[str, Any]) -> str:
        question = str(entry["question"])
        return f"{question.rstrip()}\n{self.options.ask}" if self.options.ask else question


def final_answer(completion: str) -> str:
    text = after_thinking(completion)
    before, closing, _rest = text.rpartition(CLOSING)
    if closing and OPENING in before:
        return before.rpartition(OPENING)[2].strip()
    return text.strip()


VERSION, SOLVER = "0.1.25", "pycosat"
REFUSED = {
    "composite": "it is a mixture of others: use environment.mix",
    "codeio": "it runs stored programs whose output differs from process to process",
}
BY_ITS_OWN_SEED = {"acre": 5, "gsm_symbolic": 1, "list_functions": 1, "word_ladder": 1}
"""Generators that list their tasks in advance: each task is taken from a list of this size with its own seed."""
INTEGRALS = ("intermediate_integration", "simple_integration")
EXAMPLES = ("possible_answer", "example_answer", "example_correct_answer")  # of an entry without `answer`
MOST_ANSWER_CHARACTERS = 100_000
UNREADABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions of a scorer for an answer in the wrong form. Any other exception is a failure of the machinery."""

_lock = threading.RLock()


class Generator:
    """A generator with its settings. `entry(number)` is the same everywhere and always for the same number."""

    def __init__(self, name: str, settings: Mapping[str, Any], level: int | None = None) -> None:
        factory, refused, known = _library().factory, _refused(), generator_names()
        if name in refused:
            raise EnvironmentSetupError(f"reasoning-gym's {name} cannot be used here: {refused[name]}")
        if name not in known:
            raise EnvironmentSetupError(f"reasoning-gym has no generator {name!r}{meant(name, known)}")
        self.name = name
        self._class, self._config = factory.DATASETS[name]
        self._values = _values(name, self._config, settings, level)
        self._listed = BY_ITS_OWN_SEED.get(name)
        self._first = self._dataset(1, self._listed or 1)

    def entry(self, number: int) -> dict[str, Any]:
        with _lock:
            _own_random.seed(number)
            try:
                listed = self._listed
                found = self._first[number] if listed is None else self._dataset(number, listed)[number % listed]
            except Exception as error:  # a generator may raise anything for wrong settings
                raise EnvironmentSetupError(f"reasoning-gym's {self.name} makes no task: {error!r}") from error
        return dict(found)

    def is_answerable(self, entry: Mapping[str, Any]) -> bool:
        """Whether the entry has an answer. Of some integrals the gold answer is the integral itself."""
        return self.name not in INTEGRALS or "Integral(" not in str(entry["answer"])

    def score(self, entry: Mapping[str, Any], answer: str) -> tuple[float, str]:
        """A score within [0, 1], and a note if the scorer could not read the answer. Or `ScoringFailure`."""
        if len(answer) > MOST_ANSWER_CHARACTERS:
            return 0.0, "the answer is too long"
        try:
            value = float(self._first.score_answer(answer, dict(entry)))
            condition = CONDITIONS.get(self.name)
            if value > 0 and condition is not None and not condition(answer, entry):
                return 0.0, "the generator's scorer would accept this answer for any task"
        except MemoryError:
            raise
        except Exception as error:
            if not isinstance(error, UNREADABLE) or self._fails_on_gold(entry):
                raise ScoringFailure(f"the scorer of reasoning-gym's {self.name} failed: {error!r}") from error
            return 0.0, f"the scorer could not read the answer: {type(error).__name__}"
        return (min(1.0, max(0.0, value)), "") if math.isfinite(value) else (0.0, "the score is NaN or infinite")

    def _fails_on_gold(self, entry: Mapping[str, Any]) -> bool:
        """Whether the scorer also fails on the gold answer; then the completion is not at fault."""
        gold = example_answer(entry)
        try:
            return bool(gold) and self._first.score_answer(gold, dict(entry)) is None
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001
            return True

    def _dataset(self, seed: int, size: int) -> Any:
        with _lock:
            _own_random.seed(seed)
            try:
                return self._class(self._config(**{**self._values, "seed": seed, "size": size}))
            except Exception as error:  # of the generator's own checks
                raise EnvironmentSetupError(f"reasoning-gym's {self.name} refuses its settings: {error!r}") from error


def generator_names() -> list[str]:
    return sorted(set(_library().factory.DATASETS) - _refused().keys())


def _refused() -> dict[str, str]:
    missing = importlib.util.find_spec(SOLVER) is None
    return REFUSED | ({"zebra_puzzles": f"it needs {SOLVER}, which takes a C compiler"} if missing else {})


def example_answer(entry: Mapping[str, Any]) -> str:
    if entry["answer"] is not None:
        return str(entry["answer"])
    found = next((entry["metadata"][key] for key in EXAMPLES if entry["metadata"].get(key)), "")
    return json.dumps(found) if isinstance(found, Mapping | list) else str(found)


CONDITIONS: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {  # added to scorers that accept too much
    # its scorer accepts any answer
    "game_of_life_halting": lambda answer, entry: answer == str(entry["answer"]).strip(),
    # its scorer accepts "0" as the beginning of every probability
    "coin_flip": lambda answer, entry: (
        abs(float(Fraction(answer.replace(",", ""))) - float(Fraction(entry["answer"]))) <= 1e-4
    ),
    # its scorer finds nan close to everything
    "complex_arithmetic": lambda answer, _entry: not re.search("nan|inf", answer, re.IGNORECASE),
    # its scorer accepts any four numbers
    "puzzle24": lambda answer, entry: (
        sorted(map(int, re.findall(r"\b\d+\b", answer))) == sorted(entry["metadata"]["numbers"])
    ),
    # its scorer reads -120 as 120
    "gsm_symbolic": lambda answer, entry: str(entry["answer"]).startswith("-") or not re.match(r"\s*[-\u2212]", answer),
}


def _values(name: str, config: type[Any], settings: Mapping[str, Any], level: int | None) -> dict[str, Any]:
    """The generator's configuration. A level beyond the last of its curriculum is the last one."""
    values: dict[str, Any] = {}
    if level is not None:
        factory = _library().factory
        if not factory.has_curriculum(name):
            raise EnvironmentSetupError(f"reasoning-gym's {name} has no curriculum, so it has no level")
        curriculum = factory.create_curriculum(name)
        curriculum.set_global_level(level)
        chosen = curriculum.generate_configuration()
        values = {field.name: getattr(chosen, field.name) for field in dataclasses.fields(chosen)}
    fields = {field.name: field for field in dataclasses.fields(config) if field.name not in ("seed", "size")}
    for key, value in settings.items():
        if key not in fields:
            raise EnvironmentSetupError(f"reasoning-gym's {name} has no setting {key!r}{meant(key, fields)}")
        default, make = fields[key].default, fields[key].default_factory
        if default is dataclasses.MISSING and make is not dataclasses.MISSING:
            default = make()
        if isinstance(default, bool | int | float) and not isinstance(value, bool | int | float):
            raise EnvironmentSetupError(f"reasoning-gym's {name}: {key} is a {type(default).__name__}, not {value!r}")
        values[key] = _fitted(default, value)
    return values


def _fitted(default: Any, value: Any) -> Any:
    """A setting in the type of the generator's configuration: a recipe has no tuples, dates, enums or classes."""
    match default, value:
        case tuple(), list():
            return tuple(value)
        case enum.Enum(), str():
            return type(default)(value)
        case datetime.date() | datetime.time(), str():
            return type(default).fromisoformat(value)
        case _, Mapping() if dataclasses.is_dataclass(default) and not isinstance(default, type):
            return dataclasses.replace(default, **value)
    return value


class _Patched:
    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Sorted:
    """A set with a sorted iteration order, whatever the process's hash seed."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__()))  # type: ignore[misc]


_own_random = random.Random(0)  # for `list_functions`, seeded for every task; `pool_matrix` seeds its own


def _library() -> ModuleType:
    """The library, loaded and patched on first use. If its solver is missing, an empty module replaces it."""
    missing, install = importlib.util.find_spec(SOLVER) is None, install_command(of_extra("gym"))
    try:
        if missing:
            sys.modules[SOLVER] = ModuleType(SOLVER)
        library = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise EnvironmentSetupError(f"reasoning-gym needs {error.name}: {install}") from error
    finally:
        if missing:
            del sys.modules[SOLVER]
    with _lock:
        if not getattr(library, "_patched_by_shoal", False):
            installed = importlib.metadata.version("reasoning-gym")
            if installed != VERSION:
                raise EnvironmentSetupError(f"reasoning-gym {installed} was not checked for its scorers: {install}")
            import numpy as np

            for name in EVAL_MODULES:
                vars(_module(name))["eval"] = ast.literal_eval
            for name, called in PARSER_MODULES.items():
                original = getattr(_module(name), called)
                itself = called == "parse_expr"
                guarded = partial(_parse_checked, original if itself else original.parse_expr)
                vars(_module(name))[called] = guarded if itself else _Patched(original, parse_expr=guarded)
            for name in PRINTING_MODULES:
                vars(_module(name))["print"] = lambda *_words, **_options: None
            for name in SET_MODULES:
                vars(_module(name))["list"] = lambda items=(): sorted(items, key=str)
            vars(_module("games.knight_swap"))["frozenset"] = type("frozenset", (_Sorted, frozenset), {})
            vars(_module("algorithmic.word_ladder"))["set"] = type("set", (_Sorted, set), {})
            vars(_module("induction.list_functions.generators"))["random"] = _own_random
            vars(_module("algorithmic.pool_matrix"))["np"] = _Patched(np, random=np.random.RandomState(0))
            library._patched_by_shoal = True  # type: ignore[attr-defined]
    return library


EVAL_MODULES = (  # modules whose scorer calls `eval` on the answer
    "algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion", "games.n_queens",
)  # fmt: skip
PARSER_MODULES = {
    "games.puzzle24": "parse_expr", "games.countdown": "parse_expr", "algebra.polynomial_multiplication": "sp",
    "algebra.simple_integration": "sympy", "algebra.intermediate_integration": "sympy",
}  # fmt: skip
"""Modules whose scorer passes the answer to sympy's parser, which evaluates it; and the parser's name there."""
SET_MODULES = ("algorithmic.isomorphic_strings", "algorithmic.ransom_note", "algebra.polynomial_multiplication")
"""Modules that use the order of a set of texts, which differs between processes."""
PRINTING_MODULES = (  # modules that write to the terminal
    "code.contrib.bfit.Compiler.Optimizer", "code.contrib.bfit.Compiler.FunctionCompiler",
    "games.tower_of_hanoi",
)  # fmt: skip


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"reasoning_gym.{name}")


def _parse_checked(parse: Callable[..., Any], text: str, *rest: Any, **options: Any) -> Any:
    return parse(checked_expression(text), *rest, **options)


# Checks before sympy's parser, which evaluates its input: code must not run, and no number may fill the memory.

FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc", "sinh", "cosh", "tanh",
    "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs", "erf",
})  # fmt: skip
NAMES = FUNCTIONS | {"pi", "E", "I"} | set(string.ascii_letters)
MOST_CHARACTERS, MOST_TERMS, DEEPEST = 8_000, 512, 60
MOST_DIGITS, MOST_DIGITS_OF_A_POWER = 100, 24
LARGEST_EXPONENT, LARGEST_EXPONENT_OF_A_LETTER = 64, 256
MOST_POWERS_OF_NUMBERS = 64
"""Products of polynomials have many terms with long numbers; many powers of long numbers would take minutes."""


def checked_expression(text: str) -> str:
    """The text, if it has only numbers, one-letter names, `+ - * / **`, brackets, known functions and small exponents
    of numbers; else a `ValueError`."""
    if len(text) > MOST_CHARACTERS or not text.isascii() or "_" in text:
        raise ValueError("not an expression of numbers and letters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not an expression") from error
    powers = [node.left for node in ast.walk(tree) if _is_power(node)]  # type: ignore[attr-defined]
    if sum(not any(isinstance(part, ast.Name) for part in ast.walk(base)) for base in powers) > MOST_POWERS_OF_NUMBERS:
        raise ValueError("too many powers of numbers")
    _check(tree.body, 0, MOST_DIGITS)
    return text


def _is_power(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)


def _check(node: ast.expr, depth: int, most_digits: int) -> None:
    if depth > DEEPEST:
        raise ValueError("nested too deeply")
    terms = 0
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):  # terms of a sum are not nested
        terms += 1
        if terms > MOST_TERMS:
            raise ValueError("too many terms")
        _check(node.right, depth + 1, most_digits)
        node = node.left
    inner: list[ast.expr] = []
    match node:
        case ast.Constant(value=value) if type(value) in (int, float) and len(repr(value)) <= most_digits:
            pass  # `True` is an int to Python, and no number here
        case ast.Name(id=name) if name in NAMES:
            pass
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            inner = [operand]
        case ast.BinOp(op=ast.Mult() | ast.Div() | ast.Pow(), left=left, right=right):
            if _is_power(node):
                _check_power(left, right)
                most_digits = MOST_DIGITS_OF_A_POWER
            inner = [left, right]
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            inner = [argument]
        case _:
            raise ValueError(f"{type(node).__name__} is no part of an expression here")
    for part in inner:
        _check(part, depth + 1, most_digits)


def _check_power(base: ast.expr, exponent: ast.expr) -> None:
    numbers = [part.value for part in ast.walk(exponent) if isinstance(part, ast.Constant)]
    largest = LARGEST_EXPONENT_OF_A_LETTER if isinstance(base, ast.Name) else LARGEST_EXPONENT
    too_large = any(isinstance(number, int | float) and abs(number) > largest for number in numbers)
    towers = any(map(_is_power, ast.walk(exponent))) or sum(map(_is_power, ast.walk(base))) > 1  # ((9**64)**64)**64
    if too_large or towers or len(numbers) > 2:  # 64*64*64 in an exponent
        raise ValueError("the exponent is too large, or there are powers of powers")
