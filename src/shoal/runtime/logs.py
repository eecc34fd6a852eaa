"""Logs for people: one line per record, on stderr and in a file.

14:03:07.120 INFO  trainer    step 12: reward 0.71, held out 0.83
"""

import logging
import os
import sys
import time
from pathlib import Path

from shoal.runtime.files import resource_error
from shoal.runtime.text import printable, visible

LEVELS = {"WARNING": "WARN", "CRITICAL": "FATAL"}
QUIET_LIBRARIES = ("asyncio", "transformers", "urllib3")


class LineFormatter(logging.Formatter):
    """`time level role message` on one line of visible characters. The file gets full tracebacks, indented; stderr gets
    only their last line unless verbose."""

    def __init__(self, role: str, tracebacks: bool) -> None:
        super().__init__()
        self._role, self._tracebacks = role, tracebacks

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        message, level = visible(record.getMessage()), LEVELS.get(record.levelname, record.levelname)
        line = f"{moment}.{int(record.msecs):03d} {level:<5} {self._role:<10} {message}"
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return line
        if not self._tracebacks:
            return f"{line}: {type(error).__name__}: {printable(str(error))}"
        assert record.exc_info is not None
        return "\n    ".join([line, *map(visible, self.formatException(record.exc_info).splitlines())])


def setup(role: str, file: Path | None, verbose: bool = False, stderr: bool = True) -> None:
    """Log to stderr and, if given, to `file` (appended). A second call replaces the first."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)] if stderr else []
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(_LogFile(file, encoding="utf-8"))
        except OSError as error:
            raise resource_error("write the log", file, error) from error
    for handler in handlers:
        handler.setFormatter(LineFormatter(role, tracebacks=verbose or isinstance(handler, _LogFile)))
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    logging.captureWarnings(True)  # warnings of libraries go to the log
    logging.getLogger("shoal").setLevel(logging.DEBUG if verbose else logging.INFO)
    for name in QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.WARNING)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def is_verbose() -> bool:
    return os.environ.get("SHOAL_DEBUG", "") not in ("", "0")
