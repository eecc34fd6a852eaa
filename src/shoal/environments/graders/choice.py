"""Graders for a letter (`Answer: B`; the last one counts, and there may be only one) and for exact text."""

import re
from typing import ClassVar

from shoal.environments.graders import after_thinking
from shoal.environments.protocol import Score

LETTERS = frozenset("ABCDEFGHIJ")
READ_CHARACTERS = 20_000  # at the end of an answer
LETTER = r"(?: is)?([ \t:=*_$({\[\\`a-z]{0,24}?)(?<![A-Za-z])([A-J])(?![A-Za-z0-9'])"
ANSWER = re.compile(rf"\banswer\b{LETTER}", re.IGNORECASE)
OPTION = re.compile(rf"\b(?:option|choice)\b{LETTER}", re.IGNORECASE)
BOXED = re.compile(r"\\boxed\{(\s*(?:\\text\{|\\mathrm\{|\\textbf\{)?\s*\(?)([A-J])\)?\s*\}")
ALONE = re.compile(r"^[\s*_$(\[`]*([A-J])[\s*_$)\].:`]*$")
FIRST = re.compile(r"^[\s*_$(\[`]*([A-J])[)\].:*]+\s")  # the letter before its text: `B. Nitrogen`
DENIED = re.compile(r"\b(?:not|cannot|never|neither|nor|no|than|except)\b", re.IGNORECASE)
_BEFORE, _AFTER = r"[\s*_)\]}.$`]*", r"[\s*_(\[{$`]*"
SECOND = re.compile(
    rf"^{_BEFORE}(?:(?:or|and|nor|&|\+|/|,|;|\|){_AFTER}(?:[A-HJ]|I(?! [a-z]))|[-\u2013]?{_AFTER}[A-J](?! [a-z]))"
    r"(?![A-Za-z0-9'])"
)  # A second letter after the chosen one. Without a word between them, "A" or "I" may begin a sentence


class ExactGrader:
    name: ClassVar[str] = "exact"
    version: ClassVar[int] = 2

    def problem(self, answer: str) -> str:
        return "" if answer.strip() else "the answer is empty"

    def score(self, answer: str, completion: str) -> Score:
        exact = float(after_thinking(completion).strip() == answer.strip())
        return Score(value=exact, parts={"exact": exact})


class ChoiceGrader:
    """The answer of a task is a letter. Two letters (`A or B`) count as none."""

    name: ClassVar[str] = "choice"
    version: ClassVar[int] = 2

    def problem(self, answer: str) -> str:
        return "" if answer.strip() in LETTERS else f"the answer is {answer[:20]!r}, not a letter from A to J"

    def score(self, answer: str, completion: str) -> Score:
        chosen = chosen_letter(after_thinking(completion))
        right = float(chosen == answer.strip())
        return Score(value=right, parts={"choice": right}, notes="" if chosen else "no option was chosen")


def chosen_letter(text: str) -> str:
    """The letter that a text gives as its answer; empty if it gives none or two, or only denies one."""
    end = text[-READ_CHARACTERS:]
    found = [*_matches(ANSWER, end), *_matches(BOXED, end)] or _matches(OPTION, end)
    if found:
        _position, letter, denied, rest = max(found)
        return "" if denied or SECOND.match(rest) else letter
    lines = [line for line in end.splitlines() if line.strip()]
    alone, last = (ALONE.match(lines[-1]), FIRST.match(lines[-1])) if lines else (None, None)
    if alone or last is None:
        return alone[1] if alone else ""
    # the first letter of the last line, unless other lines begin with letters, too: then it is a list of options
    several = sum(bool(FIRST.match(line)) for line in lines) > 1
    return "" if several or SECOND.match(lines[-1][last.end(1) :]) else last[1]


def _matches(pattern: re.Pattern[str], text: str) -> list[tuple[int, str, bool, str]]:
    """(position of the letter, the letter, whether it is denied, what follows it); small letters are words."""
    return [
        (match.start(2), match[2], bool(DENIED.search(match[1])), text[match.end() : match.end() + 40])
        for match in pattern.finditer(text)
        if match[2].isupper()
    ]
