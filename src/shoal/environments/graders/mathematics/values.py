"""Single values: numbers in their many spellings, times of day, words."""

from __future__ import annotations

import re

from shoal.environments.graders.mathematics.forms import Group, Reading, Value, Words
from shoal.environments.graders.mathematics.units import split_unit

THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"(-?\d{1,3}(?: \d{3})+)((?:\.\d+)?)")
_MIXED = re.compile(r"(-?)(\d+)(?: +| *\\text\{and\} *)(\d+) ?/ ?(\d+)")
_BASE = re.compile(r"([0-9]+) ?_ ?\{? ?(?:\\text\{)?(\d+|[a-z]+)\}? ?\}?")
_BASES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}
TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))? ?(?:\\text ?\{)?([ap])?\.?m?\.?\}?", re.I)
_TEXT_COMMAND = re.compile(r"\\text ?\{([^{}]*)\}")
_LETTERS = re.compile(r"[^\W\d_]{2,}")
_NOT_FOLDED = re.compile(r"(?:(?![<>=^]|[+*/] ?\.?\d|(?<![^\W\d_]{2})[-.] ?\.?\d)[\W_])+")
"""All but the signs that belong to a number or compare: "slope -2" is not "slope 2"."""
_SIGN_SPACE = re.compile(r"(?<=[-+*/<>=^]) (?=[\w.])| (?=[<>=^])")


def value(text: str) -> Reading:
    percent = text.endswith("%")
    body, unit = split_unit(text[:-1].strip() if percent else text)
    if unit is None:
        return Words(folded(text))
    if unit == ("percent",):
        percent, unit = True, ()
    if _is_words(body):
        return Words(folded(text))
    base = _BASE.fullmatch(body)
    if base:
        return Value(base[1], (f"base {_BASES.get(base[2], base[2])}",))
    return Value(_numeral(body), unit, percent)


def _numeral(body: str) -> str:
    """Thousands and mixed numbers in the spelling that formulas have."""
    spaced = _SPACED_THOUSANDS.fullmatch(body)
    if spaced:
        return spaced[1].replace(" ", "") + spaced[2]
    mixed = _MIXED.fullmatch(body)
    if mixed:
        return f"{mixed[1]}({mixed[2]}+{mixed[3]}/{mixed[4]})"
    return THOUSANDS.sub(lambda number: number[0].replace(",", ""), body)


def _is_words(text: str) -> bool:
    r"""Whether a text is language: nothing is left of it once words and `\text{…}` are gone."""
    if not any(letter.isalpha() for letter in text):
        return False
    rest = _TEXT_COMMAND.sub("", text)
    if rest != text and not rest.strip(" .,-'^") and not rest.startswith("-"):
        return True
    return (
        "\\" not in text
        and bool(_LETTERS.search(text))
        and not any(sign in text for sign in "^_=+*/<>|")
        and len(max(_LETTERS.findall(text), key=len)) > 3
        and not _FUNCTION.search(text)
    )


_FUNCTION = re.compile(r"\b(?:sin|cos|tan|log|ln|sqrt|exp|arc\w+)\b|sqrt")


def folded(text: str) -> str:
    r"""Only what words are told by: letters and numbers, in lower case. `\text{(B) Yes!}` is "b yes"."""
    words = _SIGN_SPACE.sub("", _NOT_FOLDED.sub(" ", text.replace("\\text", " ")).strip())
    return words if len(words) == 1 else words.casefold()  # a single letter is a name: C is not c


def time_of_day(time: re.Match[str]) -> Reading:
    """A time of day as hours, minutes and seconds; "pm" adds twelve hours and is remembered as a unit."""
    hours, half = int(time[1]), (time[4] or "").lower()
    if half == "p" and hours < 12:
        hours += 12
    elif half == "a" and hours == 12:
        hours = 0
    parts = (str(hours), *(str(int(part)) for part in (time[2], time[3] or "0")))
    return Group("time", tuple(Value(part, (half,) if half else ()) for part in parts))
