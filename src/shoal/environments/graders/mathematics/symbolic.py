"""Symbolic algebra where it can be stopped: a helper process with limits, asked over a pipe.

    grader ──"gold\\0given"──► helper ──fork──► worker (math-verify, limits on processor time and memory)
           ◄──one byte───────        ◄── exit ──

Why a process: symbolic algebra can take for ever, also where no signal handler of Python runs or where what it raises
is swallowed; the timers of math-verify need the main thread. Processor time and memory are limited by the kernel
(`ITIMER_PROF`, `RLIMIT_AS`): waiting for a busy machine does not count. What takes nearly the limit may be told on one
machine and not on another; what shoal's own grammar decides never comes here. The helper has read the libraries before
it forks: a worker that was killed is replaced in milliseconds.

An answer that exceeds a limit is wrong. A helper that does not start, that somebody else ended twice, or that does not
answer although its limits had to end it, is a failure of the machinery, and is not remembered.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

from shoal.environments.graders.mathematics.exact import TooLarge
from shoal.errors import ScoringFailure

SECONDS = 2.0
"""Processor time for one comparison."""
_START_S = 120.0
ANSWER_S = 60.0
"""How long an answer is waited for: the limits end every worker long before, unless the machine stands still."""
LONGEST = 600
"""Characters of a formula that is sent: time to read one grows faster than its length."""

SAME, DIFFERENT, LIMIT, READY = b"1", b"0", b"L", b"R"


class Helper:
    """One helper process, started when first asked; safe to use from several threads. One that ended is replaced."""

    def __init__(self, seconds: float = SECONDS, answer_s: float = ANSWER_S) -> None:
        self._seconds, self._answer_s = seconds, answer_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def same(self, gold: str, given: str) -> bool | None:
        """Whether two formulas are equal; None if telling takes more than the limits allow."""
        question = f"{_clean(gold)}\0{_clean(given)}\n".encode("utf-8", "replace")
        with self._lock:
            answer = self._ask(question) or self._ask(question)  # a helper that was killed by others: once more
        if answer not in (SAME, DIFFERENT, LIMIT):
            raise ScoringFailure(
                "the helper for symbolic algebra ended twice without an answer: has this machine memory left?"
            )
        return None if answer == LIMIT else answer == SAME

    def spent_s(self) -> float:
        """Processor time that the helper and its workers have used so far; 0 if none runs."""
        process = self._process
        if process is None or self._owner != os.getpid():
            return 0.0
        workers = _read_text(f"/proc/{process.pid}/task/{process.pid}/children").split()
        return _cpu_s(str(process.pid)) + sum(map(_cpu_s, workers))

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
        except (BrokenPipeError, ValueError):
            self.close()
            return b""
        answer = self._read(process, self._answer_s)
        if not answer:
            self.close()
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.close()
            self._process, self._owner = self._started(), os.getpid()
            atexit.unregister(self.close)
            atexit.register(self.close)
            if self._read(self._process, _START_S) != READY:
                self.close()
                raise ScoringFailure("the helper for symbolic algebra does not start; is math-verify installed?")
        return self._process

    def _started(self) -> subprocess.Popen[bytes]:
        # A fixed hash seed: symbolic algebra goes over sets, and should go the same way everywhere.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "shoal.environments.graders.mathematics.helper", str(self._seconds)]
        try:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
            )
        except OSError as error:
            raise ScoringFailure(f"the helper for symbolic algebra cannot be started: {error}") from error

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        assert process.stdout is not None
        descriptor, waiting = process.stdout.fileno(), select.poll()
        waiting.register(descriptor, select.POLLIN | select.POLLHUP)
        return os.read(descriptor, 1) if waiting.poll(1000 * seconds) else b""


def _cpu_s(process: str) -> float:
    """Processor time of a process and of its children that have ended."""
    fields = _read_text(f"/proc/{process}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _read_text(path: str) -> str:
    """What the kernel says; nothing if the process is gone."""
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _clean(text: str) -> str:
    return text.replace("\0", " ").replace("\n", " ")


_HUGE = re.compile(r"\^\s*\{?\s*-?\d{5,}|\^\s*\{?\s*\d+\s*\^|\d{5,}\s*[})]*\s*!|\d{100,}|!\s*!")
"""What cannot be meant as an answer and takes long: towers of powers, factorials of large numbers."""


class SymbolicEquality:
    """Whether two formulas are equal, by math-verify, within limits. Remembered: a group asks the same again, and what
    took too long once does so again.

    >>> SymbolicEquality(Helper())(r"\\sum_{k=1}^{10} k", "55")
    True
    """

    def __init__(self, helper: Helper) -> None:
        self._helper, self._lock = helper, threading.Lock()
        self._remembered = lru_cache(maxsize=16384)(self._measured)

    def cost_s(self, gold: str, given: str) -> float:
        """Processor time that the comparison took when it was made: the same whether it is remembered or not."""
        if not self._is_asked(gold, given):
            return 0.0
        return self._remembered(gold, given)[1]

    def _measured(self, gold: str, given: str) -> tuple[bool | None, float]:
        with self._lock:
            before = self._helper.spent_s()
            same = self._helper.same(gold, given)
            spent = max(0.0, self._helper.spent_s() - before)
        return same, SECONDS if same is None else spent

    def _is_asked(self, gold: str, given: str) -> bool:
        texts = gold, given
        return all(text.strip() and len(text) <= LONGEST and not _HUGE.search(text) for text in texts)

    def __call__(self, gold: str, given: str) -> bool:
        """`TooLarge` if the given formula exceeds the limits, `ScoringFailure` if the gold one does."""
        if not gold.strip() or not given.strip():
            return False
        if len(given) > LONGEST or _HUGE.search(given):
            raise TooLarge
        if len(gold) > LONGEST or _HUGE.search(gold):
            return False
        same = self._remembered(gold, given)[0]
        if same is None and self._remembered(gold, "0")[0] is None:
            raise ScoringFailure("comparing anything with the gold answer takes more than the limits allow")
        if same is None:
            raise TooLarge
        return same


same = SymbolicEquality(Helper())
"""The one that graders share: its helper starts with the first question."""
