"""The code grader with the real sandbox: gold programs are worth 1, near-misses and garbage 0."""

import json
from typing import Any

import pytest

from kit.sandbox import needs_bubblewrap
from shoal.environments.graders.code import CodeGrader
from shoal.errors import ScoringFailure

SUM = json.dumps({"inputs": ["3\n1 2 3\n", "1\n-5\n", "2\n10 20\n"], "outputs": ["6\n", "-5\n", "30\n"]})
PAIRS = json.dumps({
    "test_cases": [
        {"type": "function_call", "fn_name": "pairs", "input": [[1, 2, 3], 4], "output": [[1, 3]]},
        {"type": "function_call", "fn_name": "pairs", "input": [[], 4], "output": []},
    ],
})  # fmt: skip
ADDS = "input()\nprint(sum(map(int, input().split())))"


def block(code: str, mark: str = "python") -> str:
    return f"<think>hm</think>Here it is:\n```{mark}\n{code}\n```\nDone."


def score(answer: str, code: str) -> tuple[float, float, str]:
    scored = CodeGrader().score(answer, block(code))
    return scored.value, scored.parts["tests"], scored.notes


GOLD_SUM = {
    "plain": ADDS,
    "sys.stdin": "import sys\nprint(sum(map(int, sys.stdin.read().split()[1:])))",
    "bytes": "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split()[1:])))",
    "open(0)": "print(sum(map(int, open(0).read().split()[1:])))",
    "/dev/stdin": "print(sum(map(int, open('/dev/stdin').read().split()[1:])))",
    "os.read": "import os\nprint(sum(map(int, os.read(0, 10**6).split()[1:])))",
    "main guard": "def main():\n  input()\n  print(sum(map(int, input().split())))\n"
    "if __name__ == '__main__':\n  main()",
    "exit": f"{ADDS}\nexit()",
    "sys.exit": f"import sys\n{ADDS}\nsys.exit(0)",
    "atexit": "import atexit\nout = []\natexit.register(lambda: print(*out))\ninput()\n"
    "out.append(sum(map(int, input().split())))",
    "thread": "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
    "def main():\n  input()\n  print(sum(map(int, input().split())))\nthreading.Thread(target=main).start()",
    "stack": "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (2**26, resource.getrlimit(3)[1]))\ninput()\n"
    "print(sum(map(int, input().split())))",
    "future": "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n  x: int\n"
    "input()\nprint(A(sum(map(int, input().split()))).x)",
    "spaces": "input()\nprint(sum(map(int, input().split())), '  ')\nprint()",
    "closes its output": f"import sys\n{ADDS}\nsys.stdout.close()",
    "closes everything": f"import sys\n{ADDS}\nsys.stdout.close()\nsys.stderr.close()",
    "takes its output away": f"import sys\n{ADDS}\nsys.stdout = None",
    "unread input": "n = int(input())\nprint({3: 6, 1: -5, 2: 30}[n])",
}


NEAR_SUM = {
    "off by one": ("input()\nprint(sum(map(int, input().split())) + 1)", 0, "printed something else"),
    "right for one test": ("print(6)", 1, "printed something else"),
    "prints extra": ("input()\nprint('The sum:', sum(map(int, input().split())))", 0, "printed something else"),
    "prints twice": ("input()\ns = sum(map(int, input().split()))\nprint(s)\nprint(s)", 0, "printed something else"),
    "as a float": ("input()\nprint(float(sum(map(int, input().split()))))", 0, "printed something else"),
    "prints nothing": ("input()", 0, "printed something else"),
    "to the errors": ("import sys\ninput()\nprint(sum(map(int, input().split())), file=sys.stderr)", 0, "printed"),
    "wrong status": (f"import sys\n{ADDS}\nsys.exit(3)", 0, "status 3"),
    "status 256": (f"import os\n{ADDS}\nos._exit(1)", 0, "status 1"),
    "raises": (f"{ADDS}\nraise ValueError('6')", 0, "error (ValueError)"),
    "reads too much": (f"{ADDS}\ninput()", 0, "error (EOFError)"),
    "crashes": ("import ctypes\nctypes.string_at(0)", 0, "crashed (signal 11)"),
    "does not parse": ("print(6", 0, "error (SyntaxError)"),
    "null byte": ("print(6)\0", 0, "error"),
    "says that it passed": ("print('all tests passed')", 0, "printed something else"),
    "leaves early": ("import sys\nsys.exit(0)", 0, "printed something else"),
    "at exit": ("import atexit\natexit.register(lambda: print(1))\ninput()\nprint(sum(map(int, input().split())))", 0,
                "printed something else"),
}  # fmt: skip


BODY = """
  found = []
  for i, a in enumerate(xs):
    found += [(a, b) for b in xs[i + 1:] if a + b == n]
  return found"""
METHOD = f"def pairs(self, xs, n):{BODY}".replace("\n", "\n  ")
GOLD_PAIRS = {
    "function, tuples": f"def pairs(xs, n):{BODY}",
    "method of Solution": f"class Solution:\n  {METHOD}",
    "names of LeetCode": f"def pairs(xs: List[int], n: int) -> List[Tuple[int, int]]:\n  d = defaultdict(list){BODY}",
    "prints besides": f"def pairs(xs, n):\n  print('looking'){BODY}",
    "with a main of its own": f"def pairs(xs, n):{BODY}\nif __name__ == '__main__':\n  assert pairs([], 1) == []",
}  # fmt: skip
NEAR_PAIRS = {
    "another value": ("def pairs(xs, n):\n  return [[1, 4]]", "returned another value"),
    "not wrapped": ("def pairs(xs, n):\n  return [1, 3]", "returned another value"),
    "as text": ("def pairs(xs, n):\n  return '[[1, 3]]'", "returned another value"),
    "none": ("def pairs(xs, n):\n  print([[1, 3]])", "returned another value"),
    "no JSON": ("def pairs(xs, n):\n  return {(1, 3)}", "error (TypeError)"),
    "another name": ("def pair(xs, n):\n  return [[1, 3]]", "error (KeyError)"),
    "too few arguments": ("def pairs(xs):\n  return [[1, 3]]", "error (TypeError)"),
    "leaves": ("import sys\ndef pairs(xs, n):\n  sys.exit(0)", "returned another value"),
    "leaves at once": ("import os\nos._exit(0)", "returned another value"),
    "recursion": ("def pairs(xs, n):\n  return pairs(xs, n)", "error (RecursionError)"),
    "deep": ("def pairs(xs, n):\n  x = []\n  for _ in range(900): x = [x]\n  return x", "returned another value"),
    "too deep": ("def pairs(xs, n):\n  x = []\n  for _ in range(9000): x = [x]\n  return x", "error (RecursionError)"),
}


GRANTED = {
    "a name of math": "print(gcd(12, 18) if isqrt(37) == 6 else 0)",
    "a module": "print(math.gcd(12, 18))",
    "in a function": "def f(a: List[int]) -> int:\n  return reduce(lambda x, y: x + y, a)\nprint(f([1, 2, 3]))",
    "standard input": "input = stdin.readline\nprint(max(map(int, deque(['4', input().strip() or '6']))))",
    "of its own": "def gcd(a, b):\n  return 6\npi = gcd\nprint(pi(1, 1))",
    "deep recursion": "def f(n):\n  return f(n - 1) + 1 if n else 0\nprint(f(100000) - 99994)",
    "deep recursion through C": "@cache\ndef f(n):\n  return f(n - 1) + 1 if n else 0\nprint(f(50000) - 49994)",
}


@needs_bubblewrap
@pytest.mark.parametrize(("answer", "code"), [
    *((SUM, code) for code in GOLD_SUM.values()), *((PAIRS, code) for code in GOLD_PAIRS.values()),
    *((json.dumps({"inputs": ["\n"], "outputs": ["6\n"]}), code) for code in GRANTED.values()),
], ids=[*GOLD_SUM, *GOLD_PAIRS, *GRANTED])  # fmt: skip
def test_a_right_program_is_worth_one(answer: str, code: str) -> None:
    assert score(answer, code) == (1.0, 1.0, "")


@needs_bubblewrap
@pytest.mark.parametrize(("answer", "code", "passed", "says"), [
    *((SUM, *near) for near in NEAR_SUM.values()), *((PAIRS, code, 0, says) for code, says in NEAR_PAIRS.values()),
], ids=[*NEAR_SUM, *NEAR_PAIRS])  # fmt: skip
def test_a_wrong_program_is_worth_nothing_and_the_note_says_the_kind(answer, code, passed, says):
    value, share, notes = score(answer, code)
    assert value == 0.0
    if answer == SUM:
        assert (share, notes.startswith(f"test {passed + 1} of 3: ")) == (passed / 3, True)
    assert says in notes


def call_of(name: str, *given: Any, output: Any) -> str:
    case = {"type": "function_call", "fn_name": name, "input": list(given), "output": output}
    return json.dumps({"test_cases": [case]})


@needs_bubblewrap
@pytest.mark.parametrize(("name", "output"), [("gcd", 4), ("sqrt", 2.0), ("Any", None), ("max", 8)])
def test_predefined_names_are_not_the_programs_functions(name: str, output: Any) -> None:
    value, _share, notes = score(call_of(name, 12, 8, output=output), "pass")
    assert (value, notes) == (0.0, "test 1 of 1: ended with an error (KeyError)")


@needs_bubblewrap
def test_an_example_after_the_function_is_not_the_program() -> None:
    completion = "```python\ndef f(x): return x\n```\nFor example:\n```python\nprint(f(2))\n```"
    assert CodeGrader().score(call_of("f", 1, output=1), completion).value == 1.0


@pytest.mark.parametrize("completion", ["", "print(6)", "```python\n\n```", "```rust\nfn main() {}\n```"])
def test_a_completion_without_a_program_is_worth_nothing(completion: str) -> None:
    scored = CodeGrader().score(SUM, completion)
    assert (scored.value, scored.notes) == (0.0, "no program: there is no ```python block")


def test_an_answer_that_cannot_be_read_is_a_failure_of_the_machinery() -> None:
    with pytest.raises(ScoringFailure, match="tests cannot be read"):
        CodeGrader().score("{}", block("print(1)"))


def test_many_tests_are_given_more_time() -> None:
    case = {"type": "stdin_stdout", "input": "", "output": "1"}
    few, many = (json.dumps({"test_cases": [case] * count}) for count in (10, 10_000))
    assert CodeGrader().clock_s(few) == pytest.approx(45.4)
    assert CodeGrader().clock_s(many) == 4 * (200 + 100) + 5


@needs_bubblewrap
def test_time_is_counted_over_all_tests() -> None:
    case = {"type": "stdin_stdout", "input": "", "output": "1"}
    answer = json.dumps({"test_cases": [case] * 9, "limits": {"cpu_s": 1, "test_cpu_s": 1}})
    busy = "import time\nwhile time.process_time() < 0.4: pass\nprint(1)"
    value, share, notes = score(answer, busy)
    assert (value, 0 < share <= 3 / 9) == (0.0, True)
    assert "took longer" in notes
