"""Stopping: one token per process, set by SIGTERM or SIGINT, checked by every loop and every wait.

first signal ──► token.set: finish cleanly
second ────────► a role: the process ends at once
                 a supervisor: token.hurry; it must live to kill its children
during start-up there is nothing to finish: the first signal ends the process at once (`end_at_start`)
"""

import contextlib
import os
import queue
import signal
from collections.abc import Sequence
from types import FrameType

SUPERVISED = "SHOAL_SUPERVISED"
STOPPED_CODE = 130  # a supervised process that was ended by a signal: it is not done
ROLES = ("hub", "trainer", "validator", "relay", "join")


def end_at_start(words: Sequence[str]) -> bool:
    """Called before slow imports: a signal ends the process at once, without a traceback, with the exit code that a
    later stop would give. True for a role, which installs its own handlers later."""
    is_role = next((word for word in words if not word.startswith("-")), "") in ROLES
    code = 0 if is_role and SUPERVISED not in os.environ else STOPPED_CODE
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(code))
    return is_role


class Flag:
    """Set once, never cleared, also from a signal handler. `threading.Event.set` would deadlock in a handler that
    interrupts `wait` in the same thread; `SimpleQueue.put` cannot, and a waiter puts the item back."""

    def __init__(self) -> None:
        self._is_set, self.reason = False, ""
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self, reason: str = "") -> None:
        self.reason = self.reason if self._is_set else reason
        self._is_set = True
        self._wake.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=max(0.0, seconds))
                self._wake.put(None)
        return self._is_set


class StopToken(Flag):
    """A loop pauses by waiting on it. `hurry`: do not wait for a clean end."""

    def __init__(self) -> None:
        super().__init__()
        self.hurry = Flag()


def stop_on_signals(supervising: bool = False, token: StopToken | None = None) -> StopToken:
    """A token set by SIGTERM and SIGINT; a second signal ends the process at once, or makes a supervisor hurry.
    `token`: an earlier one, of a process that has become a supervisor."""
    token = token or StopToken()

    def handle(number: int, _frame: FrameType | None) -> None:
        if token.is_set():
            token.hurry.set()
        if not supervising:
            signal.signal(number, signal.SIG_DFL)
        token.set(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return token
