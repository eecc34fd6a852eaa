r"""How many mathematics answers are scored per second, warm, against calling math-verify directly in the same run?

    OMP_NUM_THREADS=1 python benchmarks/score_math.py [--tasks 1000] [--baseline 400] [--out FILE]

Tasks are drawn from a seed, eight completions each, as a group has: about half of them right, in one of several
spellings, the rest close and wrong; each thinks first. What is drawn:

    35 %  whole numbers              1,234 for 1234
    25 %  fractions and decimals     \frac{3}{4} for 0.75
    12 %  roots and constants        \sqrt{8} for 2\sqrt{2}
    13 %  algebra                    polynomials and equations, factored and expanded, trigonometric identities
    10 %  pairs, sets, intervals
     4 %  words and letters
     1 %  sums and integrals         what only symbolic algebra reads

Every task is new to the process that is timed; a warm-up of other tasks comes first. Both judge the same completions,
and both are held against the answer known from drawing. Then both go through `tests/data/math_pairs.txt`, the table of
shoal's rules, and `tests/data/math_unseen.txt`, pairs that nothing was tuned to.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from cast_parts.report import publish, table

from shoal.environments.graders.mathematics.grader import MathematicsGrader

GROUP = 8
DATA = Path(__file__).parents[1] / "tests" / "data"
THOUGHT = "Let us see. We write the condition down, solve for the unknown, and check: it holds for small cases. "


@dataclass(frozen=True)
class Case:
    """A completion, whether it is right, and what kind of task it belongs to."""

    kind: str
    gold: str
    completion: str
    right: bool


@dataclass(frozen=True)
class Task:
    """A gold answer with right and wrong answers to choose from."""

    gold: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]


def whole(draw: random.Random) -> Task:
    n = draw.randint(-50, 20_000)
    return Task(
        str(n), (str(n), f"{n:,}", f"{n}.0", f"x = {n}", f"{n}\\text{{ cm}}"), (str(n + 1), str(-n - 1), f"{n}0")
    )


def fraction(draw: random.Random) -> Task:
    a, b = draw.randint(1, 400), draw.choice((2, 4, 5, 8, 10, 20, 25))
    spellings = (f"{a}/{b}", f"\\dfrac{{{a}}}{{{b}}}", str(a / b), f"\\frac{{{3 * a}}}{{{3 * b}}}")
    wrong = (f"\\frac{{{b}}}{{{a + 1}}}", str(a / b + 0.01), f"-\\frac{{{a}}}{{{b}}}")
    return Task(f"\\frac{{{a}}}{{{b}}}", spellings, wrong)


def root(draw: random.Random) -> Task:
    a, b = draw.randint(2, 60), draw.choice((2, 3, 5, 7, 11, 13))
    gold = f"{a}\\sqrt{{{b}}}\\pi"
    right = (
        gold,
        f"\\sqrt{{{a * a * b}}}\\pi",
        f"\\pi \\cdot {a}\\sqrt{{{b}}}",
        f"\\frac{{{a * b}\\pi}}{{\\sqrt{{{b}}}}}",
    )
    return Task(gold, right, (f"{b}\\sqrt{{{a}}}\\pi", f"{a}\\sqrt{{{b}}}", f"{a * b**0.5 * 3.14159:.3f}"))


def algebra(draw: random.Random) -> Task:
    a, b, name = draw.randint(1, 99), draw.randint(1, 99), draw.choice("xynt")
    gold = f"{name}^2 + {a + b}{name} + {a * b}"
    factored = f"({name}+{a})({name}+{b})"
    expanded, trigonometric = f"{a * b} + {a + b}{name} + {name}^{{2}}", f"(\\sin^2 {name} + \\cos^2 {name})"
    right = (expanded, factored, f"f({name}) = {factored}", factored + trigonometric)
    return Task(
        gold, right, (f"({name}-{a})({name}+{b + 1})", f"{name}^2 + {a * b}{name} + {a + b + 1}", f"({name}+{a})^2+1")
    )


def several(draw: random.Random) -> Task:
    a, b = sorted(draw.sample(range(-99, 99), 2))
    kind = draw.randrange(3)
    if kind == 0:
        return Task(
            f"({a},{b})", (f"({a}, {b})", f"\\left({a},{b}\\right)"), (f"({b},{a})", f"\\{{{a},{b}\\}}", f"[{a},{b}]")
        )
    if kind == 1:
        return Task(
            f"\\{{{a},{b}\\}}", (f"\\{{{b},{a}\\}}", f"{b}, {a}"), (f"\\{{{a}\\}}", f"({a},{b})", f"{a}, {b}, {b + 1}")
        )
    return Task(f"[{a},{b})", (f"[{a}, {b})", f"{a} \\le x < {b}"), (f"({a},{b}]", f"[{a},{b}]", f"[{a},{b + 1})"))


def words(draw: random.Random) -> Task:
    letter = draw.choice("ABCDE")
    other = draw.choice([choice for choice in "ABCDE" if choice != letter])
    return Task(letter, (letter, f"({letter})", f"\\text{{{letter}}}"), (other, f"({other})", "\\text{none}"))


def sums(draw: random.Random) -> Task:
    n, c = draw.randint(5, 60), draw.randint(1, 99)
    value = c * n * (n + 1) // 2
    return Task(f"\\sum_{{k=1}}^{{{n}}} {c}k", (str(value), f"\\sum_{{j=1}}^{{{n}}} {c}j"), (str(value + 1), str(n)))


KINDS: dict[str, tuple[int, Callable[[random.Random], Task]]] = {
    "whole numbers": (35, whole),
    "fractions and decimals": (25, fraction),
    "roots and constants": (12, root),
    "algebra": (13, algebra),
    "pairs, sets, intervals": (10, several),
    "words and letters": (4, words),
    "sums and integrals": (1, sums),
}


def cases(tasks: int, seed: int) -> Iterator[Case]:
    """The completions of that many tasks; kinds in their exact shares, spread evenly."""
    draw = random.Random(seed)
    order = [kind for kind, (share, _make) in KINDS.items() for _ in range(share)]
    draw.shuffle(order)
    for index in range(tasks):
        kind = order[index % len(order)]
        task = KINDS[kind][1](draw)
        for _completion in range(GROUP):
            right = draw.random() < 0.5
            answer = draw.choice(task.right if right else task.wrong)
            thought = THOUGHT * draw.randint(5, 40)
            yield Case(kind, task.gold, f"<think>{thought}</think>\n\nSo the answer is $\\boxed{{{answer}}}$.", right)


def score_all(given: list[Case]) -> tuple[float, list[bool]]:
    grader = MathematicsGrader()
    started = time.perf_counter()
    said = [grader.score(case.gold, case.completion).value == 1.0 for case in given]
    return time.perf_counter() - started, said


def one_of_two(tasks: int, seed: int) -> tuple[float, float, int]:
    """In a process of its own: when it began and ended, and how many it scored."""
    score_all(list(cases(100, seed + 1_000)))
    given = list(cases(tasks, seed))
    started = time.time()
    score_all(given)
    return started, time.time(), len(given)


def in_two_processes(tasks: int, seed: int) -> float:
    """Answers per second of two processes, over the time from the first that begins to the last that ends."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        runs = list(pool.map(one_of_two, (tasks // 2, tasks // 2), (seed, seed + 1)))
    return sum(run[2] for run in runs) / (max(run[1] for run in runs) - min(run[0] for run in runs))


def directly(gold: str, completion: str) -> bool:
    """What a user of math-verify writes: parse the gold answer, parse what follows the thinking, compare."""
    from math_verify import parse, verify  # type: ignore[import-untyped]

    answer = completion.rpartition("</think>")[2]
    return bool(verify(parse(f"${gold}$"), parse(answer)))


def baseline(given: list[Case]) -> tuple[float, list[bool]]:
    for case in given[:20]:
        directly(case.gold, case.completion)
    started = time.perf_counter()
    said = [directly(case.gold, case.completion) for case in given]
    return time.perf_counter() - started, said


def table_pairs(name: str) -> Iterator[tuple[str, bool, str, str]]:
    for line in (DATA / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("# "):
            category, right, gold, answer = f"{line} ".split(" | ", 3)
            whole_text = answer.startswith(">")
            completion = answer[1:].replace("⏎", "\n") if whole_text else f"So it is $\\boxed{{{answer.strip()}}}$."
            yield category, right == "1", gold, completion


def on_the_table(name: str) -> tuple[str, str]:
    grader = MathematicsGrader()
    counts: Counter[str] = Counter()
    differences = []
    for category, right, gold, completion in table_pairs(name):
        ours, theirs = grader.score(gold, completion).value == 1.0, directly(gold, completion)
        counts["pairs"] += 1
        counts["shoal"] += ours == right
        counts["math-verify"] += theirs == right
        counts["agree"] += ours == theirs
        counts["shoal accepted wrongly"] += ours and not right
        counts["accepted wrongly"] += theirs and not right
        counts["refused wrongly"] += right and not theirs
        if ours != theirs:
            shown = (
                completion.removeprefix("So it is $\\boxed{").removesuffix("}$.").replace("\n", "⏎").replace("|", "\\|")
            )
            differences.append((category, f"`{gold}`".replace("|", "\\|"), f"`{shown}`", "1" if ours else "0"))
    summary = (
        f"On the {counts['pairs']} pairs of `{name}` shoal says what the table says in {counts['shoal']} (and accepts"
        f" {counts['shoal accepted wrongly']} wrongly), math-verify in {counts['math-verify']}: it accepts"
        f" {counts['accepted wrongly']} that are wrong by the table's rules and refuses {counts['refused wrongly']}"
        f" that are right. The two agree on {counts['agree']}."
    )
    return summary, table(("category", "gold", "answer", "shoal"), differences)


def by_kind(given: list[Case], ours: list[bool], theirs: list[bool], times: dict[str, float]) -> str:
    rows = []
    for kind, (share, _make) in KINDS.items():
        mine = [index for index, case in enumerate(given) if case.kind == kind]
        known = [index for index in mine if index < len(theirs)]
        right = sum(ours[index] == given[index].right for index in mine)
        agree = sum(theirs[index] == given[index].right for index in known)
        rows.append(
            (
                kind,
                f"{share} %",
                len(mine),
                f"{1e6 * times[kind]:,.0f}",
                f"{right}/{len(mine)}",
                f"{agree}/{len(known)}",
            )
        )
    return table(("kind", "share", "answers", "µs each", "shoal as drawn", "math-verify as drawn"), rows)


def time_by_kind(tasks: int) -> dict[str, float]:
    """Seconds per answer of each kind, over tasks that nothing has seen."""
    grader, spent, seen = MathematicsGrader(), Counter[str](), Counter[str]()
    for case in cases(tasks, 77):
        started = time.perf_counter()
        grader.score(case.gold, case.completion)
        spent[case.kind] += time.perf_counter() - started  # type: ignore[assignment]
        seen[case.kind] += 1
    return {kind: spent[kind] / max(1, seen[kind]) for kind in KINDS}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tasks", type=int, default=1000, help="tasks, eight completions each")
    options.add_argument("--baseline", type=int, default=400, help="completions that math-verify alone judges")
    options.add_argument("--out", type=Path)
    asked = options.parse_args()
    logging.disable(logging.WARNING)
    score_all(list(cases(100, 5)))
    given = list(cases(asked.tasks, 1))
    before = time.process_time()
    seconds, ours = score_all(given)
    own_s = time.process_time() - before
    rate, two = len(given) / seconds, in_two_processes(asked.tasks, 2)
    baseline_s, theirs = baseline(given[: asked.baseline])
    baseline_rate = len(theirs) / baseline_s
    summary, differences = on_the_table("math_pairs.txt")
    unseen, _differences = on_the_table("math_unseen.txt")
    rows = [
        ("shoal, one process", f"{rate:,.0f}", f"{rate / baseline_rate:,.0f}"),
        ("shoal, per second of that process's processor time", f"{len(given) / own_s:,.0f}", ""),
        ("shoal, two processes", f"{two:,.0f}", f"{two / baseline_rate:,.0f}"),
        ("math-verify directly, one process", f"{baseline_rate:,.0f}", "1"),
    ]
    length = sum(len(case.completion) for case in given) // len(given)
    parts = [
        f"{len(given):,} completions of {asked.tasks:,} tasks, {length:,} characters each on average; math-verify"
        f" judged the first {len(theirs):,}.",
        table(("", "answers per second", "ratio"), rows),
        by_kind(given, ours, theirs, time_by_kind(asked.tasks // 2)),
        summary,
        unseen,
        "Where they differ on the first (1: shoal accepts, math-verify does not; 0: the other way round):",
        differences,
    ]
    publish("Scoring mathematics", "OMP_NUM_THREADS=1 python benchmarks/score_math.py", parts, asked.out)


if __name__ == "__main__":
    main()
