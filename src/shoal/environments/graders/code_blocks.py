"""The blocks of code in a completion, fenced as CommonMark has it, and with what models do besides.

A fence is three or more backticks or tildes; what closes it is as long or longer. It may be in a list or a quotation,
whose marks and indentation are taken off the code. Beyond CommonMark: text before a fence that is marked as Python, a
closing fence at the end of the last line of code, and a last block that is not closed at all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

_OPENING = re.compile(r"(?P<before>[ \t]*(?:(?:>|[-*+]|\d{1,9}[.)])[ \t]*)*)(?P<fence>`{3,}|~{3,})(?P<info>.*)")
_AFTER_TEXT = re.compile(r"(?P<before>[^`~]+)(?P<fence>`{3,}|~{3,})(?P<info>.*)")
_PYTHON = re.compile(r"\{?\s*\.?(?:i?python|pypy|py)[\d.]*(?![\w-])", re.IGNORECASE)
_QUOTED = re.compile(r"[ \t]{0,3}>[ ]?")
_INDENT = re.compile(r"[ \t]*")
CLOSING_INDENT = 3
"""A fence that is indented by more closes nothing: it is in the code, most likely in a docstring."""


@dataclass
class Block:
    """A block while it is read. `code` has neither the list's indentation nor the quotation's marks.

    `indent` is how far the fence itself is indented, and `quotes` how many quotations it is in.
    """

    fence: str
    python: bool
    unmarked: bool
    indent: int
    quotes: int
    lines: list[str] = field(default_factory=list)
    closed: bool = False
    _in_text: dict[str, bool] = field(default_factory=lambda: {'"""': False, "'''": False})

    @property
    def code(self) -> str:
        first = next((line for line in self.lines if line.strip()), "")
        width = min(self.indent, _indent(first))
        return "".join(line[min(width, _indent(line)) :] + "\n" for line in self.lines)

    def add(self, line: str) -> None:
        """Takes the next line, which may be what closes the block."""
        for _ in range(self.quotes):
            line = _QUOTED.sub("", line, count=1)
        bare = line.strip()
        if _is_run(bare, self.fence) and _indent(line) <= self.indent + CLOSING_INDENT:
            self.closed = True
            return
        for quote in self._in_text:
            self._in_text[quote] ^= line.count(quote) % 2 == 1
        code = bare.rstrip(self.fence[0])
        ends = _is_run(bare[len(code) :], self.fence) and self.fence[0] not in code and "#" not in code
        if ends and not any(self._in_text.values()):
            line = line.rstrip()[: len(code) - len(bare)]
            self.closed = True
        self.lines.append(line)


def program(completion: str, functions: Collection[str] = ()) -> str:
    """The program: the last block that defines the functions, if some are wanted; otherwise the last one.

    Blocks that are marked as Python go before those that are not marked at all; others are none. A block of a session
    """
    found = [block for block in blocks(completion) if block.code.strip()]
    marked = [block.code for block in found if block.python]
    plain = [block.code for block in found if block.unmarked and block.closed]
    plain = plain or [block.code for block in found if block.unmarked]
    if functions:
        for code in (*reversed(marked), *reversed(plain)):
            if all(defines(code, name) for name in functions):
                return code
    chosen = marked or plain or [""]
    return next((code for code in reversed(chosen) if not code.lstrip().startswith(">>>")), chosen[-1])


def blocks(completion: str) -> Iterator[Block]:
    """Every block, in order; the last may not be closed."""
    block: Block | None = None
    for line in completion.replace("\r\n", "\n").split("\n"):
        if block is None:
            block = _opened(line)
            continue
        block.add(line)
        if block.closed:
            yield block
            block = None
    if block is not None:
        if block.lines and not block.lines[-1]:
            block.lines.pop()
        yield block


def defines(code: str, name: str) -> bool:
    """Whether it looks as if the code defined this name: a function, a method, an assignment or an import."""
    quoted = re.escape(name)
    kinds = (
        rf"(?:async[ \t]+)?def[ \t]+{quoted}\b|{quoted}[ \t]*(?::[^=\n]*)?=(?!=)|(?:from|import)\b[^#\n]*\b{quoted}\b"
    )
    return re.search(rf"^[ \t]*(?:{kinds})", code, re.MULTILINE) is not None


def _opened(line: str) -> Block | None:
    if "```" not in line and "~~~" not in line:
        return None
    found = _OPENING.fullmatch(line)
    if found is None:
        found = _AFTER_TEXT.fullmatch(line)
        if found is None or not _PYTHON.match(found["info"].strip()):
            return None
    before, fence, info = found["before"], found["fence"], found["info"].strip()
    if "`" in info:
        return None  # code within a line
    begins_line = found.re is _OPENING
    indent = len(before.rpartition(">")[2]) if begins_line else _indent(line)
    quotes = before.count(">") if begins_line else 0
    return Block(fence, bool(_PYTHON.match(info)), not info, indent, quotes)


def _is_run(text: str, fence: str) -> bool:
    """Whether it is a fence that closes this one."""
    return len(text) >= len(fence) and not text.strip(fence[0])


def _indent(line: str) -> int:
    found = _INDENT.match(line)
    return found.end() if found else 0
