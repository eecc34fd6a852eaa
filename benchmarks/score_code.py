"""How many programs are scored per second, in the sandbox and without one?

    python benchmarks/score_code.py [--programs 200] [--at-once 2] [--tests 5]

Small programs as models write them (sums, words, primes, a heap, paths in a grid, a mean), a handful of tests each,
a third of them wrong. They are scored `--at-once` at a time by the real grader with the real sandbox: a sandbox of its
own for every program, a process of its own for every test.

The alternatives, in the same run, have no sandbox and no limits: `subprocess` starts one plain Python per program,
which runs it for every test in one process and prints what it printed; `per test` starts one plain Python for every
test. Rounds alternate, so that a busy machine slows all of them alike. What the three say must be the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import comb

from shoal.environments.graders.code import CodeGrader, program
from shoal.environments.graders.code_tests import read_tests
from shoal.environments.sandbox import require_sandbox

PROGRAMS: dict[str, tuple[str, Callable[[int], tuple[str, str]]]] = {
    "sum": (
        "n = int(input())\nprint(sum(map(int, input().split())))",
        lambda k: (f"{k + 1}\n{' '.join(map(str, range(k + 1)))}\n", str(k * (k + 1) // 2)),
    ),
    "words": (
        "from collections import Counter\nimport sys\nc = Counter(sys.stdin.read().split())\n"
        "for w in sorted(c): print(w, c[w])",
        lambda k: ("b a " * (k + 1), f"a {k + 1}\nb {k + 1}"),
    ),
    "primes": (
        "n = int(input())\ns = bytearray([1]) * (n + 1)\nfor i in range(2, int(n ** 0.5) + 1):\n  if s[i]:\n"
        "    s[i*i::i] = bytes(len(range(i*i, n + 1, i)))\nprint(max(0, sum(s) - 2))",
        lambda k: (str(10**k), ["0", "4", "25", "168", "1229", "9592"][k % 6]),
    ),
    "heap": (
        "import heapq\nfrom math import inf\nn = int(input())\nh = []\nfor i in range(n):\n"
        "  heapq.heappush(h, (i * 7919) % 1009)\nprint(*[heapq.heappop(h) for _ in range(min(n, 5))])",
        lambda k: (str(1009 * (k + 1)), " ".join(str(i // (k + 1)) for i in range(5))),
    ),
    "grid": (
        "from functools import lru_cache\nn = int(input())\n@lru_cache(None)\ndef f(i, j):\n"
        "  return 1 if i == 0 or j == 0 else f(i - 1, j) + f(i, j - 1)\nprint(f(n, n))",
        lambda k: (str(k), str(comb(2 * k, k))),
    ),
    "mean": (
        "import sys\nx = list(map(float, sys.stdin.read().split()))\nprint(f'{sum(x) / len(x):.6f}')",
        lambda k: (f"1 2 3 {k}", f"{(6 + k) / 4:.6f}"),
    ),
}

HARNESS = """
import io, json, sys
job = json.load(sys.stdin)
printed = []
for given in job["inputs"]:
    sys.stdin, sys.stdout = io.StringIO(given), io.StringIO()
    try:
        exec(compile(job["code"], "solution.py", "exec"), {"__name__": "__main__"})
        printed.append(sys.stdout.getvalue())
    except BaseException:
        printed.append(None)
json.dump(printed, sys.__stdout__)
"""


@dataclass(frozen=True)
class Job:
    answer: str
    completion: str


def jobs(count: int, tests: int) -> list[Job]:
    made = []
    for number in range(count):
        code, case = list(PROGRAMS.values())[number % len(PROGRAMS)]
        cases = [case(k) for k in range(tests)]
        if number % 3 == 0:
            code += "\nprint('done')"
        answer = json.dumps({"inputs": [given for given, _ in cases], "outputs": [wanted for _, wanted in cases]})
        made.append(Job(answer, f"<think>hm</think>Here:\n```python\n{code}\n```\n"))
    return made


def sandboxed(job: Job) -> float:
    return CodeGrader().score(job.answer, job.completion).value


def plain(job: Job) -> float:
    """One unprotected Python for all tests of a program."""
    cases = read_tests(job.answer).cases
    request = json.dumps({"code": program(job.completion), "inputs": [case.given.decode() for case in cases]})
    done = subprocess.run(
        [sys.executable, "-I", "-c", HARNESS], input=request, capture_output=True, text=True, check=True
    )
    printed = json.loads(done.stdout)
    return float(
        all(text is not None and case.passed(text.encode(), b"") for case, text in zip(cases, printed, strict=True))
    )


def per_test(job: Job) -> float:
    """One unprotected Python per test; the first failure ends it."""
    code = program(job.completion)
    for case in read_tests(job.answer).cases:
        done = subprocess.run([sys.executable, "-I", "-c", code], input=case.given, capture_output=True, check=False)
        if done.returncode or not case.passed(done.stdout, b""):
            return 0.0
    return 1.0


WAYS: dict[str, Callable[[Job], float]] = {"sandbox": sandboxed, "subprocess": plain, "per test": per_test}


def measure(score: Callable[[Job], float], work: Sequence[Job], at_once: int) -> tuple[list[float], float]:
    """The scores, and the seconds that they took."""
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        scores = list(pool.map(score, work))
    return scores, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--tests", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    require_sandbox()
    work = jobs(arguments.programs, arguments.tests)
    wall = dict.fromkeys(WAYS, 0.0)
    size = max(1, len(work) // arguments.rounds)
    right = 0.0
    for first in range(0, len(work), size):
        part = work[first : first + size]
        scores = {}
        for name, score in WAYS.items():
            scores[name], wall_s = measure(score, part, arguments.at_once)
            wall[name] += wall_s
        assert scores["sandbox"] == scores["subprocess"] == scores["per test"], scores
        right += sum(scores["sandbox"])
    print(f"{len(work)} programs of {arguments.tests} tests, {right:.0f} right, {arguments.at_once} at once\n")
    print("| | programs/s | against subprocess |\n|---|--:|--:|")
    for name in WAYS:
        print(f"| {name} | {len(work) / wall[name]:.1f} | {wall['subprocess'] / wall[name]:.2f} |")


if __name__ == "__main__":
    main()
