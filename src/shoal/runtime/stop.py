"""Stopping: one token per process, set by SIGTERM or SIGINT, looked at by every loop and every wait.

first signal ──► token.set: end in good order
second ────────► a role: the process ends at once
                 a supervisor: token.hurry, so that it lives to kill what does not end, and to leave no child
while a process starts, there is nothing to end in good order: the first signal ends it at once (`end_at_start`)
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
from collections.abc import Sequence
from types import FrameType

SUPERVISED = "SHOAL_SUPERVISED"
TOLD_TO_STOP_CODE = 130  # of a supervised process that a signal has ended: it is not done, whoever sent it
ROLES = ("hub", "trainer", "validator", "relay", "join")


def end_at_start(words: Sequence[str]) -> bool:
    """Before the imports: from now on a signal ends the process at once, without a traceback, with the code that the
    command has when it is stopped later. True for a role, which listens itself when it begins."""
    is_role = next((word for word in words if not word.startswith("-")), "") in ROLES
    code = 0 if is_role and SUPERVISED not in os.environ else TOLD_TO_STOP_CODE
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(code))
    return is_role


class Flag:
    """Set once, never cleared, from a signal handler too: `threading.Event.set` in a handler that interrupts its own
    thread inside `wait` waits for ever for a lock of this thread. A `SimpleQueue` takes an item whatever was
    interrupted; a waiter puts it back."""

    def __init__(self) -> None:
        self._is_set, self.reason = False, ""
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self, reason: str = "") -> None:
        """The first reason counts."""
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
    """A loop pauses by waiting on it. `hurry`: somebody does not want to wait for an end in good order."""

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
