"""Untrusted text (of hubs, nodes, sources, model files), made safe for a terminal and a log: one line of visible
characters of limited length. `runtime.logs` applies it to logs, `cli.main` to errors."""

import json
import os
import shutil
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

STAND_IN = "�"
BREAK = " ⏎ "
MAX_LINE = 8192


def visible(text: str) -> str:
    """The same on one line, spaces unchanged: `a\\x1b[2Jb\\nc` as `a�[2Jb ⏎ c`."""
    text = text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}… ({len(text):,} characters)"
    line = text if text.isprintable() else BREAK.join(text.splitlines())
    return "".join(letter if letter.isprintable() else STAND_IN for letter in line)


def duration(seconds: float) -> str:
    """
    >>> duration(63), duration(150), duration(9000)
    ('63 s', '2.5 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    amount, unit = (seconds / 60, "min") if seconds < 7200 else (seconds / 3600, "h")
    return f"{amount:.1f}".removesuffix(".0") + f" {unit}"


def count_of(number: int, noun: str) -> str:
    """`1 row`, `3,000 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def meant(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'sort'?)` if a known word is similar; else empty."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def printable(text: str) -> str:
    return visible(" ".join(text.split()))


def visible_json(text: str) -> str:
    """JSON with the same meaning, in which invisible characters are escaped; line breaks stay."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1] for letter in text)


def shoal_command(name: str = "shoal") -> str:
    """`shoal` if the one on PATH is this one, else its path: `.venv/bin/shoal`. Also for other programs there."""
    ours, found = Path(sys.executable).parent / name, shutil.which(name)
    if not ours.exists() or (found is not None and Path(found).parent.absolute() == ours.parent.absolute()):
        return name
    relative = os.path.relpath(ours)
    return str(ours) if relative.startswith("..") else relative


def install_command(package: str) -> str:
    return f"{shoal_command('python')} -m pip install {package}"
