"""The process in which symbolic algebra runs (see `symbolic`). Reads "gold\\0given" by line, answers one byte each.

The first process reads the libraries and then only waits; what it forks does the work, one question after the other,
until a limit kills it. Then it answers "limit" for it and forks again. If anything else kills it, both end without an
answer: what somebody else did says nothing about the question. Both end when the pipe does, too.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from shoal.environments.graders.mathematics.symbolic import DIFFERENT, LIMIT, READY, SAME

_MEMORY = 1 << 29
"""Bytes that a worker may have beyond what it begins with."""

_LIMITS = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT)
"""What a worker dies of by itself: its processor time, its stack, memory that C code was not given. Not SIGKILL: that
is how a kernel without memory, or a person, ends a process."""

_WARM = (("\\sqrt{8}", "2\\sqrt{2}"), ("x^2+2x+1", "(x+1)^2"), ("\\sum_{k=1}^{n} k", "\\frac{n(n+1)}{2}"))
"""Compared before forking: what these load and remember, every worker then has."""


class _Late(BaseException):
    """The processor time of a question is used up. Not an Exception: algebra catches those."""


def main(seconds: float) -> None:
    logging.disable(logging.CRITICAL)
    import math_verify  # type: ignore[import-untyped]  # noqa: F401  before forking: a worker must not pay for it

    for gold, given in _WARM:
        _compare(gold, given)
    _write(READY)
    while True:
        worker = os.fork()
        if worker == 0:
            try:
                _work(seconds)
            finally:
                os._exit(0)  # whatever happened: never back into the loop that forks
        _pid, status = os.waitpid(worker, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) not in _LIMITS:
            return
        _write(LIMIT)


def _work(seconds: float) -> None:
    """Answer until the pipe ends. Questions are read byte by byte: the next worker needs what this one leaves."""
    _limit(resource.RLIMIT_AS, _virtual() + _MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGVTALRM, _stop)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills; whoever started us may have had it ignored, or blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGVTALRM))
    while question := _line():
        gold, _, given = question.decode("utf-8", "replace").rstrip("\n").partition("\0")
        _write(_answer(gold, given, seconds))


def _limit(kind: int, value: int) -> None:
    """A limit, or the stricter one that is already there."""
    _soft, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _answer(gold: str, given: str, seconds: float) -> bytes:
    """Two timers, both of processor time: the first stops Python, the second the process, should it be in C."""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        signal.setitimer(signal.ITIMER_PROF, seconds * 1.5)
        try:
            return SAME if _compare(gold, given) else DIFFERENT
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (_Late, MemoryError, RecursionError):
        return LIMIT


def _stop(_signal: int, _frame: Any) -> None:
    raise _Late


def _compare(gold: str, given: str) -> bool:
    """By math-verify, without its timers, and from LaTeX only: its other reader evaluates Python."""
    from math_verify import verify

    left, right = _parsed(gold), _parsed(given)
    return left is not None and right is not None and bool(verify(left, right, float_rounding=12, timeout_seconds=None))


def _parsed(text: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import (  # type: ignore[import-untyped]
        NormalizationConfig,
        normalize_latex,
    )
    from math_verify.parser import parse_latex_cached  # type: ignore[import-untyped]

    config = NormalizationConfig(basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none")
    try:
        return parse_latex_cached(normalize_latex(text, config=config))
    except Exception:  # noqa: BLE001  the parser raises bare Exceptions: this text is no formula to it
        return None


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def _line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return bytes(line)


def _write(answer: bytes) -> None:
    os.write(1, answer)


if __name__ == "__main__":
    try:
        main(float(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
