"""Code of the run's owner, named by a setting: `FILE.py:NAME`, or an entry point of an installed package.

    "mine.py:loss" ──pinned──► "/home/me/mine.py:loss#sha256=…"   as the run's recipe records it
    "my_loss"      ──pinned──► "my_loss#my-package==1.2"          an entry point of the group "shoal.losses"
                                    └─ resolve ─► the object, or refused: another file or version than at the beginning

Only processes of the owner resolve, and only what their own recipe says: never a lease, a row of data, or anything that
a worker sends. `tests/test_architecture.py` lists the modules that may import this one.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.errors import ConfigError, UserError
from shoal.runtime.text import meant

GROUPS = {
    "loss": "shoal.losses", "advantage": "shoal.advantages", "grader": "shoal.graders",
    "environment": "shoal.environments", "tracker": "shoal.trackers",
}  # fmt: skip
FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
PIN = re.compile(r"#(sha256=[0-9a-f]{64}|[A-Za-z0-9._-]+==[^#]+)$")


def unpinned(value: str) -> str:
    return PIN.sub("", value)


def file_of(value: str) -> Path | None:
    found = FILE.fullmatch(unpinned(value))
    return Path(found[1]) if found else None


def check_word(kind: str, value: str, known: Iterable[str]) -> str:
    """The value, if it is a known word, or names a file or an entry point that is installed here; else `ValueError`."""
    listed = tuple(known)
    if value in listed or file_of(value) or list(entry_points(group=GROUPS[kind], name=unpinned(value))):
        return value
    own = f"or your own: FILE.py:NAME, or an entry point of the group {GROUPS[kind]}"
    raise ValueError(f"there is no {kind} {value!r}{meant(value, listed)}; there are {', '.join(listed)}; {own}")


def pinned(setting: str, kind: str, value: str) -> str:
    """The value with the SHA-256 of its file, or its distribution and version. A value that has them, or names nothing
    (`resolve` refuses it), is returned unchanged."""
    file = file_of(value)
    if PIN.search(value) or (file is None and not entry_points(group=GROUPS[kind], name=value)):
        return value
    if file is None:
        return f"{value}#{_origin(_entry_point(setting, kind, value))}"
    return f"{value}#sha256={hashlib.sha256(_read(setting, file)).hexdigest()}"


def resolve(setting: str, kind: str, value: str) -> Callable[..., Any]:
    """The named function or class; `ConfigError` if it is missing, or differs from the pinned one."""
    found, name, file = PIN.search(value), unpinned(value), file_of(value)
    wanted = found[1] if found else ""
    if file is None:
        entry = _entry_point(setting, kind, name)
        _require(setting, name, wanted, _origin(entry), "install that version again")
        try:
            loaded = entry.load()
        except (Exception, SystemExit) as error:  # code of others may raise anything
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{setting}: the entry point {name} does not load: {why}") from error
    else:
        source, word = _read(setting, file), name.rpartition(":")[2]
        _require(setting, str(file), wanted, f"sha256={hashlib.sha256(source).hexdigest()}", "put the file back")
        module = _module(file, source)
        if not hasattr(module, word):
            raise ConfigError(f"{setting}: {file} defines no {word}{meant(word, vars(module))}")
        loaded = getattr(module, word)
    if not callable(loaded):
        raise ConfigError(f"{setting}: {name} is no function or class, but {type(loaded).__name__}")
    return loaded  # type: ignore[no-any-return]


def load_file(what: str, file: Path, source: bytes, error_type: type[UserError] = ConfigError) -> ModuleType:
    """The module of exactly these bytes. It can be found by its name, as dataclasses and pickles expect."""
    if file.suffix != ".py":
        raise error_type(f"{what} {file} is no Python file (its name must end in .py)")
    module = ModuleType(f"shoal_own_{file.stem}_{hashlib.sha256(str(file).encode() + source).hexdigest()[:12]}")
    module.__file__ = str(file)
    before, sys.modules[module.__name__] = sys.modules.get(module.__name__), module
    try:
        _GivenSource(module.__name__, str(file), source).exec_module(module)
    except (Exception, SystemExit) as error:
        if before is None:
            del sys.modules[module.__name__]
        raise error_type(f"{what} {file} does not load: {type(error).__name__}: {error}") from error
    return module


class _GivenSource(SourceFileLoader):
    """Runs the bytes that were read and hashed. Compiled files are ignored: they may belong to an earlier source."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def path_stats(self, path: str) -> Mapping[str, object]:
        raise OSError(f"{path} is compiled again")

    def get_data(self, path: str) -> bytes:  # noqa: ARG002 - there is only one
        return self._source


@lru_cache(maxsize=16)
def _module(file: Path, source: bytes) -> ModuleType:
    return load_file("the file", file, source)


def _read(setting: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {file}: {error.strerror or error}") from None


def _entry_point(setting: str, kind: str, name: str) -> EntryPoint:
    found = list(entry_points(group=GROUPS[kind], name=name))
    if len(found) != 1:
        owners = ", ".join(sorted(_origin(entry) for entry in found))
        what = f"several packages have it: {owners}; uninstall all but one" if found else "install its package here"
        raise ConfigError(f"{setting}: {len(found)} entry points {name!r} of the group {GROUPS[kind]}: {what}")
    return found[0]


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name}=={entry.dist.version}" if entry.dist else "unknown==0"


def _require(setting: str, name: str, wanted: str, found: str, remedy: str) -> None:
    if wanted and wanted != found:
        change = f"it was {wanted[:24]}, is {found[:24]}"
        raise ConfigError(f"{setting}: {name} has changed since the run began ({change}): {remedy}, or start a new run")
