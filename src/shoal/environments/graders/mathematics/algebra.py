r"""Symbolic algebra in a helper process with limits, asked over a pipe.

    grader ──"gold\0given"──► helper ──fork──► worker (math-verify, limits on processor time and memory)
           ◄──one byte───────        ◄── exit ──

Symbolic algebra may never end, and Python cannot always interrupt it. So the kernel limits processor time and memory
(`ITIMER_PROF`, `RLIMIT_AS`); waiting on a busy machine does not count. The worker answers questions until a limit kills
it; then the helper answers "limit" and forks again. If anything else kills the worker, both end without an answer. A
helper that does not start, ends twice or does not answer is a failure of the machinery.
"""

import atexit
import logging
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from shoal.environments.graders.mathematics.formula import TooLarge
from shoal.errors import ScoringFailure

SECONDS = 2.0  # processor time for one comparison
ANSWER_S, _START_S = 60.0, 120.0  # for an answer (the limits act long before), and to import the libraries
_MEMORY = 1 << 29  # bytes that a worker may add
LONGEST = 600  # characters of a formula: parsing time grows faster than the length
SAME, DIFFERENT, LIMIT, READY = b"1", b"0", b"L", b"R"
WHOLE = "\1"  # prefix of the gold answer: both are whole texts, which math-verify reads in its own way
_HUGE = re.compile(r"\^\s*\{?\s*-?\d{5,}|\^\s*\{?\s*\d+\s*\^|\d{5,}\s*[})]*\s*!|\d{100,}|!\s*!")
"""Formulas that are no plausible answer and take long: towers of powers, factorials of large numbers."""


class Helper:
    """One helper process, started on first use and replaced when it has ended. Thread-safe."""

    def __init__(self, seconds: float = SECONDS, answer_s: float = ANSWER_S) -> None:
        self._seconds, self._answer_s = seconds, answer_s
        self._lock, self._owner = threading.Lock(), 0
        self._process: subprocess.Popen[bytes] | None = None

    def same(self, gold: str, given: str) -> bool | None:
        """Whether two formulas are equal; None if the limits do not suffice."""
        texts = [text.replace("\0", " ").replace("\n", " ") for text in (gold, given)]
        question = ("\0".join(texts) + "\n").encode("utf-8", "replace")
        with self._lock:
            answer = self._ask(question) or self._ask(question)  # a second attempt if the helper was killed
        if answer not in (SAME, DIFFERENT, LIMIT):
            raise ScoringFailure("the helper for symbolic algebra ended twice without an answer: is memory short?")
        return None if answer == LIMIT else answer == SAME

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def _ask(self, question: bytes) -> bytes:
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(question)
            process.stdin.flush()
            answer = self._read(process, self._answer_s)
        except (BrokenPipeError, ValueError):
            answer = b""
        if not answer:
            self.close()
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self.close()
        # A fixed hash seed: symbolic algebra iterates over sets, and the order should be the same everywhere.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        command, pipe = [sys.executable, "-m", __name__, str(self._seconds)], subprocess.PIPE
        try:
            process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise ScoringFailure(f"the helper for symbolic algebra cannot be started: {error}") from error
        self._process, self._owner = process, os.getpid()
        atexit.unregister(self.close)
        atexit.register(self.close)
        if self._read(process, _START_S) != READY:
            self.close()
            raise ScoringFailure("the helper for symbolic algebra does not start; is math-verify installed?")
        return process

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        assert process.stdout is not None
        descriptor, waiting = process.stdout.fileno(), select.poll()
        waiting.register(descriptor, select.POLLIN | select.POLLHUP)
        return os.read(descriptor, 1) if waiting.poll(1000 * seconds) else b""


class SymbolicEquality:
    """Whether math-verify finds two formulas equal, within limits. Cached: a group repeats its answers."""

    def __init__(self, helper: Helper, whole: bool = False) -> None:
        self._remembered, self._whole = lru_cache(maxsize=16384)(helper.same), whole

    def __call__(self, gold: str, given: str) -> bool:
        """`TooLarge` if the given formula exceeds the limits, `ScoringFailure` if the gold one does."""
        if not gold.strip() or not given.strip():
            return False
        if not self._whole:
            if len(given) > LONGEST or _HUGE.search(given):
                raise TooLarge
            if len(gold) > LONGEST or _HUGE.search(gold):
                return False
        gold = WHOLE + gold if self._whole else gold
        same = self._remembered(gold, given)
        if same is None and self._remembered(gold, "0") is None:
            raise ScoringFailure("comparing anything with the gold answer takes more than the limits allow")
        if same is None:
            raise TooLarge
        return same


_HELPER = Helper()
same, texts_agree = SymbolicEquality(_HELPER), SymbolicEquality(_HELPER, whole=True)
"""Shared by all graders: for formulas, and for whole texts."""


# The helper process. Signals that a question can cause: processor time, stack, memory that C code did not get. Not
# SIGKILL, which a kernel without memory, or a person, sends.
_LIMITS = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT)
_WARM = (("\\sqrt{8}", "2\\sqrt{2}"), ("x^2+2x+1", "(x+1)^2"), ("\\sum_{k=1}^{n} k", "\\frac{n(n+1)}{2}"))
"""Compared before forking, so that every worker has what they import and cache."""


class _Late(BaseException):
    """The processor time of a question is used up. Not an Exception: algebra code catches those."""


def main(seconds: float) -> None:
    logging.disable(logging.CRITICAL)
    import math_verify  # type: ignore[import-untyped]  # noqa: F401  before forking, so that workers need not

    for gold, given in _WARM:
        _compare(gold, given)
    os.write(1, READY)
    while True:
        worker = os.fork()
        if worker == 0:
            try:
                _work(seconds)
            finally:
                os._exit(0)  # never return into the loop that forks
        _pid, status = os.waitpid(worker, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) not in _LIMITS:
            return
        os.write(1, LIMIT)


def _work(seconds: float) -> None:
    """Answer until the pipe ends. Questions are read without a buffer: the next worker continues on the same pipe. Two
    timers of processor time: the first interrupts Python, the second kills the process if it is in C code."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    for kind, value in ((resource.RLIMIT_AS, pages * resource.getpagesize() + _MEMORY), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    signal.signal(signal.SIGVTALRM, _stop)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills; the parent may have ignored or blocked it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGVTALRM))
    questions = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115  ends with the process
    while question := questions.readline():
        gold, _, given = question.decode("utf-8", "replace").rstrip("\n").partition("\0")
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
            signal.setitimer(signal.ITIMER_PROF, seconds * 1.5)
            try:
                answer = SAME if _compare(gold, given) else DIFFERENT
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                signal.setitimer(signal.ITIMER_PROF, 0)
        except (_Late, MemoryError, RecursionError):
            answer = LIMIT
        os.write(1, answer)


def _stop(_signal: int, _frame: Any) -> None:
    raise _Late


def _compare(gold: str, given: str) -> bool:
    """By math-verify, without its timers. Formulas are read from LaTeX only."""
    from math_verify import parse, verify

    if gold.startswith(WHOLE):
        left, right = (parse(text, parsing_timeout=None) for text in (gold[1:], given))
        return bool(verify(left, right, timeout_seconds=None))
    left, right = _parsed(gold), _parsed(given)
    return left is not None and right is not None and bool(verify(left, right, float_rounding=12, timeout_seconds=None))


def _parsed(text: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex  # type: ignore[import-untyped]
    from math_verify.parser import parse_latex_cached  # type: ignore[import-untyped]

    config = NormalizationConfig(basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none")
    try:
        return parse_latex_cached(normalize_latex(text, config=config))
    except Exception:  # noqa: BLE001  the parser raises plain Exceptions for what is no formula
        return None


if __name__ == "__main__":
    try:
        main(float(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
