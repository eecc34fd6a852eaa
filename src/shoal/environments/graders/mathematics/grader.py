"""The mathematics graders: reading gold answers, and scoring a completion against them."""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from shoal.environments.graders import after_thinking
from shoal.environments.graders.choice import chosen_letter
from shoal.environments.graders.mathematics import algebra
from shoal.environments.graders.mathematics.answer import LONGEST, balanced, final_answer, plain
from shoal.environments.graders.mathematics.equality import Comparison, Symbolic
from shoal.environments.graders.mathematics.formula import TooLarge
from shoal.environments.graders.mathematics.reading import readings
from shoal.environments.protocol import Score
from shoal.errors import ScoringFailure

# Most symbolic comparisons for one completion: two lists could need one for every pair. A count, not a time, so that
# every machine stops at the same comparison.
_QUESTIONS = 4
_KEYS = ("ground_truth", "answer", "answers", "target", "solution")
_NONE = ("proof", "notfound")  # NuminaMath's words for "no answer"
_LETTER = re.compile(r"(?:\\text ?\{ ?)?\(?([A-J])\)?\.?(?: ?\})?")
_LETTER_FIRST = re.compile(r"(?:\\text ?\{ ?)?(?:\(([A-J])\)|([A-J])[).:])(?: ?\})?[).:]?\s*(.*)", re.DOTALL)
_OTHER = re.compile(r"(?<![A-Za-z0-9\\])(?:[B-HJ]|[AI](?! [a-z]))(?![A-Za-z0-9'])")
"""A second letter after the chosen one: "A) B) C)" chooses none; "(B) A circle" chooses B."""
_MAYBE_SCIENTIFIC = re.compile(r"-?\d+e[+-]\d")
_LIMITS = "comparing the answer took more than the limits allow"


@dataclass(frozen=True)
class MathematicsGrader:
    r"""1 if the completion's final answer has the value of the gold answer, else 0. The gold answer is plain text
    (`\frac{1}{2}`), or JSON: {"ground_truth": "42"}, {"answer": ["3", "-3"]} where any of several is right."""

    name: ClassVar[str] = "mathematics"
    version: ClassVar[int] = 6
    symbolic: Symbolic = algebra.same

    def problem(self, answer: str) -> str:
        try:
            golds(answer)
        except ScoringFailure as failure:
            return str(failure)
        return ""

    def score(self, answer: str, completion: str) -> Score:
        accepted, text = golds(answer), after_thinking(completion).strip()
        if len(text) <= LONGEST and plain(text) in accepted:  # the gold answer word for word
            return _score(True, "")
        given = final_answer(completion)
        if given is None:
            return _score(False, "no final answer was found")
        if "\\boxed" not in text and any(map(_LETTER.fullmatch, accepted)):
            given = chosen_letter(text) or given  # "D, since it cannot be A"
        questions = iter(range(_QUESTIONS))

        def symbolic(gold: str, given: str) -> bool:
            if next(questions, None) is None:
                raise TooLarge
            return self.symbolic(gold, given)

        notes, comparison = "", Comparison(symbolic)
        for gold in accepted:
            try:
                if _right(gold, plain(given), comparison):
                    return _score(True, "")
            except (TooLarge, RecursionError):
                notes = _LIMITS
        return _score(False, notes)


@dataclass(frozen=True)
class MathVerifyGrader:
    """The result of math-verify, for scores that can be compared with others'; within the same limits."""

    name: ClassVar[str] = "math-verify"
    version: ClassVar[int] = 1
    verify: Symbolic = algebra.texts_agree

    def problem(self, answer: str) -> str:
        return MathematicsGrader().problem(answer)

    def score(self, answer: str, completion: str) -> Score:
        golds(answer)  # raises if the answer cannot be used
        given = after_thinking(completion)[-2 * LONGEST :]
        try:
            texts = [text if "$" in text or "\\boxed" in text else f"${text}$" for text in map(str, _named(answer))]
            return _score(any(self.verify(gold, given) for gold in texts), "")
        except TooLarge:
            return _score(False, _LIMITS)


def _score(right: bool, notes: str) -> Score:
    return Score(value=float(right), parts={"correct": float(right)}, notes=notes)


def _right(gold: str, given: str, comparison: Comparison) -> bool:
    if gold == given:
        return True
    choice = _chosen(gold, given)
    if choice is not None:
        letter_right, gold_rest, given_rest = choice
        if not gold_rest or not given_rest or not letter_right:
            return letter_right
        gold, given = gold_rest, given_rest
    given_readings = readings(given)
    if _MAYBE_SCIENTIFIC.fullmatch(given) and "e" not in gold:  # `2e-1` may be 0.2, unless the gold answer has an e
        given_readings += readings(given.replace("e", "E"))
    return any(comparison.same(wanted, one) for wanted in readings(gold) for one in given_readings)


def _chosen(gold: str, given: str) -> tuple[bool, str, str] | None:
    """Multiple choice: whether the letter is right, and the texts after it in gold and answer, if both have one."""
    wanted, given_letter = map(_LETTER.fullmatch, (gold, given))
    first, given_first = map(_LETTER_FIRST.fullmatch, (gold, given))
    if wanted is None and first is None:
        return None
    letter = wanted[1] if wanted else first[1] or first[2] if first else ""
    if given_letter or (wanted and given_first is None):
        return (given_letter[1] == letter, "", "") if given_letter else None
    right = given_first is None or (given_first[1] or given_first[2]) == letter
    if wanted and given_first:
        return right and not _OTHER.search(given_first[3]), "", ""
    return right, first[3] if first else "", given_first[3] if given_first else given


@lru_cache(maxsize=16384)
def golds(answer: str) -> tuple[str, ...]:
    """The gold answers in a task's text, in plain spelling; `ScoringFailure` if it has none."""
    named, found = _named(answer), []
    for item in named:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise ScoringFailure("an answer must be a text or a number")
        text = str(item)
        if len(text) <= 10 * LONGEST:
            worked = "\\boxed" in text or "####" in text or "answer is" in text  # of a solution use the final answer
            text = plain((final_answer(text) if worked else None) or text)
        if len(text) > LONGEST:
            raise ScoringFailure(f"the answer has {len(text)} characters, and at most {LONGEST} can be compared")
        if not text:
            raise ScoringFailure("the answer is empty")
        if text.lower() in _NONE:
            raise ScoringFailure(f"the answer is {text!r}, which is no answer to compare with")
        if not balanced(text):
            raise ScoringFailure("the answer's braces do not match")
        found.append(text)
    if not found:
        raise ScoringFailure("the list of answers is empty")
    return tuple(found)


def _named(answer: str) -> list[Any]:
    """The answers in a task's text: JSON with a known key, or the text itself (`{1, 2}` is a set, not JSON)."""
    try:
        info = json.loads(answer) if answer.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        info = None
    if not isinstance(info, dict):
        return [answer]
    key = next((key for key in _KEYS if key in info), None)
    if key is None:
        raise ScoringFailure(f"the verification info has none of {', '.join(_KEYS)}")
    return list(info[key]) if isinstance(info[key], list) else [info[key]]
