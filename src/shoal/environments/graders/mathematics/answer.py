r"""Where the final answer of a completion stands.

After the thinking part, in this order:

1. the last `\boxed{…}` (or `\fbox`). Boxes that only "and", "or", commas or spaces part are one answer, a list: a
   completion cannot win by boxing two guesses. A last box that is never closed is no answer: it was cut off.
2. what the last `<answer>…</answer>` holds
3. what follows the last "answer is", "answer:" or "####", up to the end of its sentence, or to "since" or "because"
4. the last formula between dollar signs of the last line; else its last numbers; else that line itself. "It is not 7"
   answers nothing.
"""

from __future__ import annotations

import re

from shoal.environments.graders.mathematics.normal import closing
from shoal.environments.graders.thinking import after_thinking

LONGEST = 2_000
"""Characters of an answer. Anything longer is not what a person would call a final answer, and costs time to read."""
_TAIL = 20_000
"""Where an answer is looked for without a box: the last characters only, so that a long text costs no more."""
_BOXES = 16
"""Boxes that may form one answer."""

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_PARTING = re.compile(r"(?:\s|\$|,|;|\\[,;()\[\] ]|\\q?quad|\band\b|\bor\b|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\*)*")
_MARK = re.compile(
    r"####|(?:answer|result|solution)\s{0,3}(?:\*\*)?\s{0,3}"
    r"(?:is(?![a-z])\s{0,3}(?:equal to\b)?|equals\b|:|=)\s{0,3}:?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\n|(?<=[^\s.])\.(?=\s+[A-Z]|\s*$)|,?\s(?:since|because)\s")
_CLAUSE_END = re.compile(r"[,;:]|[.!?]\s|\b(?:but|so|hence|thus|therefore)\b", re.IGNORECASE)
_DENIAL = re.compile(r"\b(?:not|never|cannot|neither|nor)\b|n't\b", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$?([^$\n]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_NUMBER = r"[-\u2212]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:\s?/\s?\d+)?(?:\s?\\?%)?"
_NUMBERS = re.compile(rf"(?<![\w.]){_NUMBER}(?:\s*(?:,\s*(?:and|or)?|and|or)\s+{_NUMBER})*")


def final_answer(completion: str) -> str | None:
    r"""What the completion answers in the end; None if it does not.

    >>> final_answer("<think>\\boxed{3}?</think> So it is \\boxed{\\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> final_answer("\\boxed{1} or \\boxed{2}")
    '1, 2'
    >>> final_answer("The answer is 12 apples.")
    '12 apples'
    """
    text = after_thinking(completion)
    last = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if last >= 0:
        found = _boxed(text, last)
    else:
        found = _unboxed(text[-_TAIL:])
    return found if found is not None and 0 < len(found) <= LONGEST else None


def _boxed(text: str, last: int) -> str | None:
    """The last box with those that belong to it, from the back."""
    content = _content(text, last)
    if content is None:
        return None
    contents, start = [content[0]], last
    while len(contents) < _BOXES:
        start = max(text.rfind("\\boxed", 0, start), text.rfind("\\fbox", 0, start))
        earlier = _content(text, start) if start >= 0 and last - start <= LONGEST + 200 else None
        if earlier is None or not 0 <= last - earlier[1] <= 80 or not _PARTING.fullmatch(text, earlier[1], last):
            break
        contents.append(earlier[0])
        last = start
    distinct = list(dict.fromkeys(content.strip() for content in reversed(contents)))
    return ", ".join(distinct)


def _content(text: str, start: int) -> tuple[str, int] | None:
    r"""What is in the box that begins at `start`, and where it ends. `\boxed 5` holds all up to a space."""
    opened = _BOX.match(text, start)
    if opened is None:
        return None
    begin = opened.end()
    if begin < len(text) and text[begin] == "{":
        end = closing(text[begin : begin + LONGEST + 2], 0)
        return None if end < 0 else (text[begin + 1 : begin + end], begin + end + 1)
    bare = re.compile(r"[^\s$]{0,200}").match(text, begin)
    content = bare[0].rstrip(".,;)") if bare else ""
    return (content, begin + len(content)) if content else None


def _unboxed(text: str) -> str | None:
    before, tag, _after = text.rpartition("</answer>")
    if tag and "<answer>" in before:
        return before.rpartition("<answer>")[2].strip() or None
    marks = list(_MARK.finditer(text))
    if marks:
        rest = text[marks[-1].end() :].lstrip(" \t*:\n")
        sentence = _SENTENCE_END.split(rest, maxsplit=1)[0]
        return _of_sentence(sentence) or None
    lines = [line for line in text.splitlines() if line.strip(" *`-_#.$")]
    return _of_line(lines[-1].strip()) if lines else None


def _of_sentence(sentence: str) -> str:
    """The formula, if the sentence after "the answer is" begins with one; the sentence otherwise."""
    sentence = sentence[:LONGEST].strip(" *`_").rstrip(".")
    formulas = list(_FORMULA.finditer(sentence))
    if formulas and formulas[0].start() == 0:
        return ", ".join(_inside(formula) for formula in formulas) + _unit_after(sentence, formulas[-1].end())
    return sentence


def _unit_after(sentence: str, end: int) -> str:
    rest = sentence[end:].strip()
    return f" {rest}" if re.fullmatch(r"\\?%|[a-z]{1,12}", rest) else ""


def _of_line(line: str) -> str:
    line = " ".join(line[-LONGEST:].split())
    formulas = list(_FORMULA.finditer(line))
    if formulas:
        return line if _denied(line, formulas[-1].start()) else _inside(formulas[-1])
    if re.search(r"[a-zA-Z]{2} [a-zA-Z]{2}", line):  # prose: its last numbers
        numbers = [found for found in _NUMBERS.finditer(line) if found[0].strip(" ,")]
        return numbers[-1][0] if numbers and not _denied(line, numbers[-1].start()) else line
    return line


def _denied(line: str, at: int) -> bool:
    """Whether the clause that leads to this place says what the answer is not."""
    return bool(_DENIAL.search(_CLAUSE_END.split(line[:at])[-1]))


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()
