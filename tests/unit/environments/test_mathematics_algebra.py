"""Symbolic algebra in its helper process: answers, limits, and who is to blame when they are exceeded."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.environments.graders.mathematics.algebra import Helper, SymbolicEquality
from shoal.environments.graders.mathematics.formula import TooLarge
from shoal.environments.graders.mathematics.grader import MathematicsGrader
from shoal.errors import ScoringFailure

FIFTY_FIVE = ("\\sum_{k=1}^{10} k", "55")


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    """One for all tests of this file: loading the libraries takes a second."""
    started = Helper(seconds=0.3, answer_s=30.0)
    yield started
    started.close()


def test_the_helper_answers_yes_no_and_too_long(helper: Helper) -> None:
    assert helper.same(*FIFTY_FIVE) is True
    assert helper.same(FIFTY_FIVE[0], "45") is False
    assert helper.same("\\prod_{k=1}^{9999} (x+k)^{k}", "1") is None
    assert helper.same("\\sum_{k=1}^{3} (9^{9})^{9^{8}} k", "1") is not True, "memory is limited, too"
    assert helper.same("1\n2\0002", "2\0\n2\0002") is not None, "lines cannot make a second question"
    assert helper.same(*FIFTY_FIVE) is True


DYING = """
import os, pathlib, sys, types
sys.modules["math_verify"] = types.ModuleType("math_verify")  # not needed here, and slow to load
from shoal.environments.graders.mathematics import algebra as helper

def compare(gold, given):
    while gold == "stubborn":
        try:
            while True:
                pass
        except BaseException:
            pass
    name, _, number = gold.partition(" ")
    mark = pathlib.Path({mark!r})
    if name == "always" or (name == "once" and not mark.exists()):
        mark.touch()
        os.kill(os.getpid(), int(number))
    return gold == given or name == "once"

helper._compare = compare
helper.main(0.1)
"""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Helper]:
    """A helper whose worker is killed by a signal: by the first question "once N", by every question "always N"."""
    (tmp_path / "dying.py").write_text(DYING.format(mark=str(tmp_path / "mark")))
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/dying.py\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    made = Helper(answer_s=30.0)
    yield made
    made.close()


@pytest.mark.parametrize("gold", ["stubborn", f"always {signal.SIGSEGV:d}"])
def test_algebra_that_crashes_or_cannot_be_interrupted_exceeds_the_limits(dying: Helper, gold: str) -> None:
    assert dying.same(gold, "1") is None
    assert dying.same("2", "2") is True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_externally_killed_worker_is_retried_then_unscored(dying: Helper, number: int) -> None:
    """As the kernel does when memory is short. A fresh helper is asked; then it is no sample, and not remembered."""
    equal = SymbolicEquality(dying)
    assert equal(f"once {number:d}", "1") is True
    with pytest.raises(ScoringFailure, match="ended twice without an answer"):
        equal(f"always {number:d}", "1")
    assert equal._remembered.cache_info().currsize == 1
    assert equal("2", "2") is True


def test_a_helper_that_was_killed_is_replaced(helper: Helper) -> None:
    assert helper.same(*FIFTY_FIVE) is True
    first = helper._process
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert helper.same(*FIFTY_FIVE) is True
    assert helper._process is not first


@pytest.mark.parametrize(("python", "said"), [
    ("silent", "without an answer"), ("/bin/false", "does not start"), ("/no/such/python", "cannot be started"),
])  # fmt: skip
def test_a_helper_that_does_not_start_or_answer_is_a_failure_of_the_machinery(monkeypatch, tmp_path, python, said):
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nprintf R\nexec cat > /dev/null\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent) if python == "silent" else python)
    helper = Helper(answer_s=0.05)
    with pytest.raises(ScoringFailure, match=said):
        helper.same("1", "1")
    assert helper._process is None


class _Slow(Helper):
    """Takes too long over everything that contains an integral."""

    def same(self, gold: str, given: str) -> bool | None:
        return None if "\\int" in gold + given else gold == given


def test_slow_answer_scores_zero_and_slow_gold_is_unscored() -> None:
    slow = SymbolicEquality(_Slow())
    with pytest.raises(TooLarge):
        slow("\\sum k", "\\int x dx")
    with pytest.raises(ScoringFailure, match="gold"):
        slow("\\int x dx", "\\sum k")
    assert MathematicsGrader(symbolic=slow).score("\\sum k", "\\boxed{\\int x dx}").value == 0.0


@pytest.mark.parametrize("formula", ["\\sum k^{99999}", "\\int 2^{3^4}", "\\lim 123456!", "\\sum " + "1" * 100])
def test_implausible_formulas_are_not_sent_to_the_helper(formula: str) -> None:
    def refuse(self: Helper, gold: str, given: str) -> bool:
        raise AssertionError("asked")

    asked = SymbolicEquality(type("Refusing", (Helper,), {"same": refuse})())
    with pytest.raises(TooLarge):
        asked("1", formula)
    assert asked(formula, "1") is False


@pytest.mark.parametrize("answer", [
    "\\sum_{k=1}^{99999} k^{k^{k}}", "\\int \\sin(\\sin(\\sin(x))) e^{x^x} dx", "\\prod_{k=1}^{9999} (x+k)^{k}",
    "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}^{9999}", "\\lim_{x\\to\\infty} x^{x^{x}}",
    "\\sum_{n=1}^{\\infty} \\frac{\\sin(n^n)}{n!}",
])  # fmt: skip
def test_symbolic_algebra_is_stopped(helper: Helper, answer: str) -> None:
    impatient = MathematicsGrader(symbolic=SymbolicEquality(helper))
    assert impatient.score("\\sqrt{2}", f"\\boxed{{{answer}}}").value == 0.0
    assert impatient.score("\\sum_{k=1}^{3} k", "\\boxed{6}").value == 1.0  # and goes on
