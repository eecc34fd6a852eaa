"""Verifiable instructions (IFEval): all of a task's, or nothing, which IFEval calls strict accuracy of the prompt.

A check takes the text, as it is, and the instruction's settings. It is linear in the text, so that no completion makes
it slow, and raises on bad settings only (`KeyError`, `TypeError`, `ValueError`): found before anything is scored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar

from shoal.environments.graders.languages import WORD, can_tell, is_language, may_be_english
from shoal.environments.graders.thinking import after_thinking
from shoal.environments.protocol import Score
from shoal.errors import ScoringFailure

Settings = Mapping[str, Any]
Check = Callable[[str, Settings], bool]
LONGEST = 200_000
"""Characters of an answer that are read; one that is longer follows no instruction."""
TRIAL = "A trial, to see whether the settings are possible."
AT_LEAST, LESS_THAN = "at least", "less than"
HIGHLIGHTS = (re.compile(r"\*([^\n*]*)\*"), re.compile(r"\*\*([^\n*]*)\*\*"))
YES_NO_MAYBE = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
FENCES = ("```json", "```Json", "```JSON", "```")
POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
SENTENCE_END = re.compile("[.!?\u3002\uff01\uff1f]+[\"'\u201d\u2019)\\]*_]*(?=\\s|$)|[\u3002\uff01\uff1f]")
ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st vs etc e.g i.e eg ie inc ltd co corp fig no vol approx dept est u.s u.k a.m p.m".split()  # noqa: SIM905
)


class InstructionsGrader:
    """The answer of a task is JSON: {"instructions": [{"id": "punctuation:no_comma", "settings": {}}, …]}.

    Parts of a score are the single instructions, by id; one that occurs twice is numbered.
    """

    name: ClassVar[str] = "instructions"
    version: ClassVar[int] = 2

    def problem(self, answer: str) -> str:
        try:
            for name, settings in _instructions(answer):
                CHECKS[name](TRIAL, settings)
        except (KeyError, TypeError, ValueError) as error:
            return _sentence(error)
        return ""

    def score(self, answer: str, completion: str) -> Score:
        text = after_thinking(completion)
        read = bool(text.strip()) and len(text) <= LONGEST
        try:
            followed = [(name, read and CHECKS[name](text, settings)) for name, settings in _instructions(answer)]
        except (KeyError, TypeError, ValueError) as error:
            raise ScoringFailure(f"the instructions of the task cannot be checked: {_sentence(error)}") from error
        parts: dict[str, float] = {}
        for name, done in followed:
            parts[name if name not in parts else f"{name}#{len(parts) + 1}"] = float(done)
        missed = [name for name, done in followed if not done]
        return Score(value=float(not missed), parts=parts, notes=f"not followed: {', '.join(missed)}" if missed else "")


@lru_cache(maxsize=1024)
def _instructions(answer: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """(id, settings) of each instruction; `ValueError` says what is wrong."""
    content = json.loads(answer)
    listed = content.get("instructions") if isinstance(content, dict) else None
    if not isinstance(listed, list) or not listed:
        raise ValueError("there are no instructions")
    found = []
    for entry in listed:
        name, settings = (entry.get("id"), entry.get("settings", {})) if isinstance(entry, dict) else (None, None)
        if name not in CHECKS or not isinstance(settings, dict):
            raise ValueError(f"there is no instruction {str(name)[:60]!r}")
        found.append((str(name), settings))
    return tuple(found)


def _sentence(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"an instruction lacks its setting {error}"
    return " ".join(str(error).split())[:200]


# Settings


def _compare(count: int, relation: object, bound: object) -> bool:
    if relation not in (AT_LEAST, LESS_THAN):
        raise ValueError(f"the relation is {str(relation)[:40]!r}, not {AT_LEAST!r} or {LESS_THAN!r}")
    return count >= _number(bound) if relation == AT_LEAST else count < _number(bound)


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no number of things")
    return int(value)


def _word(value: object) -> str:
    """Text without the spaces around it."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{str(value)[:40]!r} is no text")
    return value.strip()


def _listed(value: object) -> list[str]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{str(value)[:40]!r} is no list of words")
    return [_word(item) for item in value]


# Checks that take more than a line


def _has_no_forbidden_word(text: str, settings: Settings) -> bool:
    words = _listed(settings["forbidden_words"])
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in words)


def _letter_frequency(text: str, settings: Settings) -> bool:
    letter = _word(settings["letter"]).lower()
    if len(letter) != 1:
        raise ValueError(f"{letter[:40]!r} is no letter")
    return _compare(text.lower().count(letter), settings["let_relation"], settings["let_frequency"])


def _is_in_language(text: str, settings: Settings) -> bool:
    language = _word(settings["language"])
    if not can_tell(language):
        raise ValueError(f"whether a text is in the language {language[:20]!r} cannot be decided here")
    return is_language(text, language)


def _starred_paragraphs(text: str, settings: Settings) -> bool:
    """Paragraphs that three stars separate; an empty one in the middle is a mistake, one at either end is none."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    whole = all(part.strip() for part in parts[1:-1])
    return whole and sum(bool(part.strip()) for part in parts) == _number(settings["num_paragraphs"])


def _nth_paragraph_first_word(text: str, settings: Settings) -> bool:
    wanted, number = _word(settings["first_word"]).lower(), _number(settings["nth_paragraph"])
    parts = [part.strip() for part in re.split(r"\n[ \t]*\n", text) if part.strip()]
    if number < 1:
        raise ValueError("paragraphs are counted from 1")
    if len(parts) != _number(settings["num_paragraphs"]) or number > len(parts):
        return False
    first = parts[number - 1].split()[0].lstrip("\"'").lower()
    return re.split(r"[.,?!'\"]", first, maxsplit=1)[0] == wanted


def _placeholders(text: str) -> int:
    """How many [placeholders] there are, each on one line."""
    count = 0
    for line in text.splitlines():
        position = line.find("[")
        while position >= 0 and (end := line.find("]", position)) >= 0:
            count += 1
            position = line.find("[", end)
    return count


def _bullets(text: str) -> int:
    lines = [line.lstrip() for line in text.splitlines()]
    stars = sum(line.startswith("*") and len(line) > 1 and line[1] != "*" for line in lines)
    return stars + sum(line.startswith("-") for line in lines)


def _postscript(text: str, settings: Settings) -> bool:
    marker = _word(settings["postscript_marker"])
    return re.search(POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None


def _sections(text: str, settings: Settings) -> bool:
    found = re.findall(rf"{re.escape(_word(settings['section_spliter']))}\s?\d", text)
    return len(found) >= _number(settings["num_sections"])


def _is_json(text: str, _settings: Settings) -> bool:
    value = text.strip()
    fence = next((fence for fence in FENCES if value.startswith(fence)), "")
    try:
        json.loads(value.removeprefix(fence).removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str, _settings: Settings) -> bool:
    for line in text.splitlines():
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end and line[begin:end].strip("<>").strip():
            return True
    return False


def _two_responses(text: str, _settings: Settings) -> bool:
    parts = text.split("******")
    answers = [part.strip() for part in parts if part.strip()]
    return all(part.strip() for part in parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def _is_quoted(text: str, _settings: Settings) -> bool:
    value = text.strip()
    return len(value) > 1 and value.startswith('"') and value.endswith('"')


def sentences(text: str) -> int:
    """How many sentences: ends of sentences that follow no abbreviation, initial or bare list number; a rest counts."""
    count, seen, words_seen = 0, 0, False
    for end in SENTENCE_END.finditer(text):
        piece = text[seen : end.start()]  # since the last stop, whatever that was: every character is looked at once
        seen = end.end()
        continues = end[0] == "." and _continues(piece, begins=not words_seen)
        words_seen = words_seen or bool(WORD.search(piece))
        if words_seen and not continues:
            count, words_seen = count + 1, False
    return count + (words_seen or bool(WORD.search(text, seen)))


def _continues(piece: str, begins: bool) -> bool:
    """Whether the full stop after this belongs to its last word."""
    found = piece.split()
    if not found:
        return False
    last = found[-1].lstrip("(\"'").lower()
    is_list_number = begins and len(found) == 1 and last.isdecimal()
    return last in ABBREVIATIONS or (len(last) == 1 and last.isalpha()) or is_list_number


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda t, s: all(word.lower() in t.lower() for word in _listed(s["keywords"])),
    "keywords:frequency": lambda t, s: _compare(
        t.lower().count(_word(s["keyword"]).lower()), s["relation"], s["frequency"]
    ),
    "keywords:forbidden_words": _has_no_forbidden_word,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _is_in_language,
    "length_constraints:number_sentences": lambda t, s: _compare(sentences(t), s["relation"], s["num_sentences"]),
    "length_constraints:number_paragraphs": _starred_paragraphs,
    "length_constraints:number_words": lambda t, s: _compare(len(WORD.findall(t)), s["relation"], s["num_words"]),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda t, s: _placeholders(t) >= _number(s["num_placeholders"]),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda t, s: _bullets(t) == _number(s["num_bullets"]),
    "detectable_format:constrained_response": lambda t, _s: any(answer in t for answer in YES_NO_MAYBE),
    "detectable_format:number_highlighted_sections": lambda t, s: (
        sum(bool(part.strip()) for kind in HIGHLIGHTS for part in kind.findall(t)) >= _number(s["num_highlights"])
    ),
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _has_title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda t, s: t.strip().lower().startswith(_word(s["prompt_to_repeat"]).lower()),
    "startend:end_checker": lambda t, s: t.strip().strip('"').lower().endswith(_word(s["end_phrase"]).lower()),
    "startend:quotation": _is_quoted,
    "change_case:capital_word_frequency": lambda t, s: _compare(
        sum(word.isupper() for word in re.findall(r"[\w'-]+", t)), s["capital_relation"], s["capital_frequency"]
    ),
    "change_case:english_capital": lambda t, _s: t.isupper() and may_be_english(t),
    "change_case:english_lowercase": lambda t, _s: t.islower() and may_be_english(t),
    "punctuation:no_comma": lambda t, _s: "," not in t,
}
