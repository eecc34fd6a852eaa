"""Logs for people: one line per record, on stderr and in a file; or for programs, as JSON.

    14:03:07.120 INFO  trainer    step 12: reward 0.71, held out 0.83

A traceback goes to the file in full, indented; stderr shows only its last line unless `verbose`.

With SHOAL_LOG_FORMAT=json every record is one JSON object on one line, on stderr and in the file alike:

    {"time": "2026-11-15T14:03:07.120Z", "level": "info", "role": "hub", "logger": "shoal.hub", "message": "…"}

What else a record carries (`extra={"fields": {…}}`), and what the code around it has set in `log_fields` (the number of
the request that is being answered, say), are further fields of the object.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shoal.errors import ConfigError
from shoal.runtime.files import resource_error
from shoal.runtime.text import clipped, printable, visible, visible_json

LEVELS = {"WARNING": "WARN", "CRITICAL": "FATAL"}
QUIET_LIBRARIES = ("httpx", "httpcore", "uvicorn", "uvicorn.access", "asyncio", "transformers", "urllib3")
FORMAT_VARIABLE = "SHOAL_LOG_FORMAT"
FORMATS = ("text", "json")

log_fields: ContextVar[Mapping[str, Any]] = ContextVar("log_fields", default=MappingProxyType({}))
"""Fields of every record that is made while they are set; threads that work for a request inherit them."""


class LineFormatter(logging.Formatter):
    """`time level role message`; line breaks in messages are folded, so that one record is one line, and no character
    reaches the terminal that is not visible (`runtime.text`)."""

    def __init__(self, role: str, tracebacks: bool) -> None:
        super().__init__()
        self._role = role
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = visible(record.getMessage())
        level = LEVELS.get(record.levelname, record.levelname)
        line = f"{moment}.{int(record.msecs):03d} {level:<5} {self._role:<10} {message}"
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return line
        if not self._tracebacks:
            return f"{line}: {type(error).__name__}: {printable(str(error))}"
        assert record.exc_info is not None
        return "\n    ".join([line, *map(visible, self.formatException(record.exc_info).splitlines())])


class JsonFormatter(logging.Formatter):
    """One JSON object per record. Names that every record has win over fields of the same name."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        said = {
            "time": f"{moment}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "role": self._role,
            "logger": record.name, "message": clipped(record.getMessage()),
        }  # fmt: skip
        fields = {**log_fields.get(), **getattr(record, "fields", {})}
        further = {name: value for name, value in fields.items() if value != "" and name not in said}
        if record.exc_info and record.exc_info[1] is not None:
            further["error"] = type(record.exc_info[1]).__name__
            further["traceback"] = "\n".join(map(clipped, self.formatException(record.exc_info).splitlines()))
        return visible_json(json.dumps({**said, **further}, ensure_ascii=False, default=str))


def setup(role: str, file: Path | None, verbose: bool = False, stderr: bool = True) -> None:
    """Send this process's log to stderr and, if given, to `file` (appended). Calling it again replaces the first."""
    chosen = os.environ.get(FORMAT_VARIABLE) or "text"
    if chosen not in FORMATS:
        raise ConfigError(f"{FORMAT_VARIABLE} is {chosen!r}; it can be {' or '.join(FORMATS)}")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)] if stderr else []
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(_LogFile(file, encoding="utf-8"))
        except OSError as error:
            raise resource_error("write the log", file, error) from error
    for handler in handlers:
        tracebacks = verbose or isinstance(handler, _LogFile)
        handler.setFormatter(JsonFormatter(role) if chosen == "json" else LineFormatter(role, tracebacks))
    logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
    logging.captureWarnings(True)  # libraries warn of what they read in files of others
    logging.getLogger("shoal").setLevel(logging.DEBUG if verbose else logging.INFO)
    for name in QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.WARNING)


class _LogFile(logging.FileHandler):
    """A log that cannot be written (its disk is full, say) is no reason to show tracebacks on the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def is_verbose() -> bool:
    """Whether --debug or SHOAL_DEBUG=1 asks for tracebacks and more log."""
    return os.environ.get("SHOAL_DEBUG", "") not in ("", "0")
