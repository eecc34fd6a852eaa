"""One function per instruction of IFEval: whether a text follows it. Strict: the text as it is, nothing trimmed away.

A check takes the text and the instruction's settings. It is linear in the text and raises on bad settings only
(`KeyError`, `TypeError`, `ValueError`), which the grader finds out before anything is scored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from shoal.environments.graders.instructions.languages import can_tell, is_language, may_be_english
from shoal.environments.graders.instructions.words import brackets, paragraphs, sentences, words

Settings = Mapping[str, Any]
Check = Callable[[str, Settings], bool]
AT_LEAST, LESS_THAN = "at least", "less than"
THREE_STARS = re.compile(r"\s?\*\*\*\s?")
HIGHLIGHT = re.compile(r"\*([^\n*]*)\*")
DOUBLE_HIGHLIGHT = re.compile(r"\*\*([^\n*]*)\*\*")
YES_NO_MAYBE = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
FENCES = ("```json", "```Json", "```JSON", "```")


def _compare(count: int, relation: object, bound: object) -> bool:
    if relation not in (AT_LEAST, LESS_THAN):
        raise ValueError(f"the relation is {str(relation)[:40]!r}, not {AT_LEAST!r} or {LESS_THAN!r}")
    return count >= _number(bound) if relation == AT_LEAST else count < _number(bound)


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no number of things")
    return int(value)


def _word(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{str(value)[:40]!r} is no text")
    return value


def _listed(value: object) -> list[str]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{str(value)[:40]!r} is no list of words")
    return [_word(item) for item in value]


# ── keywords ─────────────────────────────────────────────────────────────────────────────────────────────────────


def existence(text: str, settings: Settings) -> bool:
    low = text.lower()
    return all(word.lower() in low for word in _listed(settings["keywords"]))


def frequency(text: str, settings: Settings) -> bool:
    count = text.lower().count(_word(settings["keyword"]).strip().lower())
    return _compare(count, settings["relation"], settings["frequency"])


def forbidden_words(text: str, settings: Settings) -> bool:
    words_ = _listed(settings["forbidden_words"])
    return not any(re.search(rf"\b{re.escape(word.strip())}\b", text, re.IGNORECASE) for word in words_)


def letter_frequency(text: str, settings: Settings) -> bool:
    letter = _word(settings["letter"]).strip().lower()
    if len(letter) != 1:
        raise ValueError(f"{letter[:40]!r} is no letter")
    return _compare(text.lower().count(letter), settings["let_relation"], settings["let_frequency"])


def response_language(text: str, settings: Settings) -> bool:
    language = _word(settings["language"])
    if not can_tell(language):
        raise ValueError(f"whether a text is in the language {language[:20]!r} cannot be decided here")
    return is_language(text, language)


# ── length ───────────────────────────────────────────────────────────────────────────────────────────────────────


def number_sentences(text: str, settings: Settings) -> bool:
    return _compare(sentences(text), settings["relation"], settings["num_sentences"])


def number_paragraphs(text: str, settings: Settings) -> bool:
    """Paragraphs that three stars separate; an empty one in the middle is a mistake, one at either end is none."""
    parts = THREE_STARS.split(text)
    inner = parts[1:-1]
    if any(not part.strip() for part in inner):
        return False
    return sum(bool(part.strip()) for part in parts) == _number(settings["num_paragraphs"])


def number_words(text: str, settings: Settings) -> bool:
    return _compare(len(words(text)), settings["relation"], settings["num_words"])


def nth_paragraph_first_word(text: str, settings: Settings) -> bool:
    wanted, number = _word(settings["first_word"]).strip().lower(), _number(settings["nth_paragraph"])
    parts = paragraphs(text)
    if number < 1:
        raise ValueError("paragraphs are counted from 1")
    if len(parts) != _number(settings["num_paragraphs"]) or number > len(parts):
        return False
    first = parts[number - 1].split()[0].lstrip("\"'").lower()
    return re.split(r"[.,?!'\"]", first, maxsplit=1)[0] == wanted


# ── content ──────────────────────────────────────────────────────────────────────────────────────────────────────


def number_placeholders(text: str, settings: Settings) -> bool:
    return brackets(text) >= _number(settings["num_placeholders"])


def postscript(text: str, settings: Settings) -> bool:
    marker = _word(settings["postscript_marker"]).strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()) is not None


# ── format ───────────────────────────────────────────────────────────────────────────────────────────────────────


def number_bullet_lists(text: str, settings: Settings) -> bool:
    lines = [line.lstrip() for line in text.splitlines()]
    stars = sum(line.startswith("*") and len(line) > 1 and line[1] != "*" for line in lines)
    return stars + sum(line.startswith("-") for line in lines) == _number(settings["num_bullets"])


def constrained_response(text: str, _settings: Settings) -> bool:
    return any(answer in text for answer in YES_NO_MAYBE)


def number_highlighted_sections(text: str, settings: Settings) -> bool:
    found = [*HIGHLIGHT.findall(text), *DOUBLE_HIGHLIGHT.findall(text)]
    return sum(bool(part.strip()) for part in found) >= _number(settings["num_highlights"])


def multiple_sections(text: str, settings: Settings) -> bool:
    mark = re.escape(_word(settings["section_spliter"]).strip())
    return len(re.findall(rf"{mark}\s?\d", text)) >= _number(settings["num_sections"])


def json_format(text: str, _settings: Settings) -> bool:
    value = text.strip()
    fence = next((fence for fence in FENCES if value.startswith(fence)), "")
    try:
        json.loads(value.removeprefix(fence).removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str, _settings: Settings) -> bool:
    for line in text.splitlines():
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end and line[begin:end].strip("<>").strip():
            return True
    return False


# ── combinations, beginnings and ends ────────────────────────────────────────────────────────────────────────────


def two_responses(text: str, _settings: Settings) -> bool:
    parts = text.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    answers = [part.strip() for part in parts if part.strip()]
    return len(answers) == 2 and answers[0] != answers[1]


def repeat_prompt(text: str, settings: Settings) -> bool:
    return text.strip().lower().startswith(_word(settings["prompt_to_repeat"]).strip().lower())


def end_checker(text: str, settings: Settings) -> bool:
    return text.strip().strip('"').lower().endswith(_word(settings["end_phrase"]).strip().lower())


def quotation(text: str, _settings: Settings) -> bool:
    value = text.strip()
    return len(value) > 1 and value.startswith('"') and value.endswith('"')


# ── case and punctuation ─────────────────────────────────────────────────────────────────────────────────────────


def capital_word_frequency(text: str, settings: Settings) -> bool:
    count = sum(word.isupper() for word in re.findall(r"[\w'-]+", text))
    return _compare(count, settings["capital_relation"], settings["capital_frequency"])


def english_capital(text: str, _settings: Settings) -> bool:
    return text.isupper() and may_be_english(text)


def english_lowercase(text: str, _settings: Settings) -> bool:
    return text.islower() and may_be_english(text)


def no_comma(text: str, _settings: Settings) -> bool:
    return "," not in text


CHECKS: dict[str, Check] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
