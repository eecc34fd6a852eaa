"""Stopping: one token per process, set by SIGTERM or SIGINT, looked at by every loop and every wait."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopToken:
    """Set once, never cleared. Waiting on it is how a loop pauses: it ends at once when the process should stop."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""

    def set(self, reason: str) -> None:
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Pause for at most `seconds`; true if the process should stop."""
        return self._event.wait(seconds)


def stop_on_signals() -> StopToken:
    """A token set by SIGTERM and SIGINT; a second signal of either kind ends the process at once."""
    token = StopToken()

    def handle(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        token.set(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return token
