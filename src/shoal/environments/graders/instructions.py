"""Verifiable instructions (IFEval): all of a task's, or nothing, which IFEval calls strict accuracy of the prompt.

A check takes the text, as it is, and the instruction's settings. It is linear in the text, so that no completion makes
it slow, and raises on bad settings only (`KeyError`, `TypeError`, `ValueError`): found before anything is scored.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar

from shoal.environments.graders.thinking import after_thinking
from shoal.environments.protocol import Score
from shoal.errors import ScoringFailure

WORD = re.compile(r"\w+")
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


def _letter_frequency(text: str, settings: Settings) -> bool:
    letter = _word(settings["letter"]).lower()
    if len(letter) != 1:
        raise ValueError(f"{letter[:40]!r} is no letter")
    return _compare(text.lower().count(letter), settings["let_relation"], settings["let_frequency"])


def _is_in_language(text: str, settings: Settings) -> bool:
    language = _word(settings["language"])
    if language.lower() not in SCRIPT_OF:
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


# Which language a text is in: by its script, and where languages share one, by their commonest words. A task that asks
# for a language that is not here is refused as one that cannot be decided, instead of being scored by chance

LOOKED_AT = 20_000
SCRIPTS = {
    "LATIN": "LATIN", "CYRILLIC": "CYRILLIC", "ARABIC": "ARABIC", "DEVANAGARI": "DEVANAGARI", "BENGALI": "BENGALI",
    "GURMUKHI": "GURMUKHI", "GUJARATI": "GUJARATI", "TAMIL": "TAMIL", "TELUGU": "TELUGU", "KANNADA": "KANNADA",
    "MALAYALAM": "MALAYALAM", "THAI": "THAI", "HANGUL": "HANGUL", "HEBREW": "HEBREW", "GREEK": "GREEK",
    "HIRAGANA": "KANA", "KATAKANA": "KANA", "CJK": "HAN",
}  # fmt: skip
ALONE = {
    "bn": "BENGALI", "pa": "GURMUKHI", "gu": "GUJARATI", "ta": "TAMIL", "te": "TELUGU", "kn": "KANNADA",
    "ml": "MALAYALAM", "th": "THAI", "ko": "HANGUL", "he": "HEBREW", "el": "GREEK", "zh": "HAN", "zh-cn": "HAN",
    "zh-tw": "HAN", "ja": "KANA",
}  # fmt: skip
"""Languages that have a script to themselves here."""
COMMON = {
    "LATIN": {
        "en": "the of and to in is that it for was with as are be this have not you by from on at or which",
        "es": "el la de que y en los se del las por un con para una su al es como más pero sus este está",
        "pt": "o de que e do da em um para com não uma os no se na por mais as dos como mas ao das é são",
        "fr": "le de et la les des en un une du est que pour dans qui par sur pas plus avec ce au sont il",
        "de": "der die und das den von zu mit sich des auf für ist im dem nicht ein eine als auch es an sie",
        "it": "di che e il la per un in del non una sono le con si da come dei nel alla più gli della è",
        "pl": "w i na z do się nie że to jest o jak za od po przez dla jego ale są czy być oraz który tym",
        "vi": "và của là có trong được cho các một không với những người này đã để khi từ tôi như nhiều ở",
        "sw": "ya na wa kwa ni katika za la kuwa hii yake hiyo kama ili pia moja au lakini sana watu wao huo",
        "fi": "ja on ei se että hän oli joka mutta ovat kun sen myös niin kuin tai hänen mukaan ole voi olla",
        "nl": "de van het een en in is dat op te zijn voor met die niet aan er om ook als dan bij wordt naar",
        "sv": "och i att det som en på är av för med till den har de inte om ett men var sig så vi kan",
        "id": "yang dan di untuk dengan ini dari dalam tidak itu pada akan adalah juga ke bisa ada mereka oleh",
        "tr": "ve bir bu için ile da de çok olarak gibi daha olan kadar sonra ne ama var değil her",
    },
    "CYRILLIC": {
        "ru": "и в не на что с он как это по но из у за от его для то же так был бы вы или ещё когда только",  # noqa: RUF001
        "uk": "і в не на що з та як це по але із у за від його для то ж так був би ви або ще коли тільки є",  # noqa: RUF001
        "bg": "и в не на че с той като това по но от за се да е са му или още когато само ще си има във към",  # noqa: RUF001
    },
    "ARABIC": {
        "ar": "في من على إلى أن التي الذي هذا هذه مع كان عن ما لا أو كما بعد قد ذلك بين هو هي كل لم",
        "fa": "در از به که این را با است برای آن یک خود تا بر هم نیز می شود شد اما های کرد هر است",
        "ur": "کے کی میں ہے اور سے کا کو پر یہ نے ہیں کہ بھی ایک اس جو کر تھا لیے نہیں ہو گیا تو",
    },
    "DEVANAGARI": {
        "hi": "के में है की और से को का पर यह हैं एक ने कि भी इस नहीं था लिए जो कर हो तो गया",
        "mr": "आणि आहे या ते हे मध्ये की एक नाही होते व तो त्या असे आहेत त्यांनी म्हणून करून होता ही पण",
        "ne": "र छ मा को का यो पनि छन् हो भने एक गर्न लागि थियो यस गरेको तथा हुन्छ नेपाल उनले गर्ने भएको",
    },
}  # fmt: skip
FREQUENT = {script: {code: frozenset(text.split()) for code, text in codes.items()} for script, codes in COMMON.items()}
SCRIPT_OF = {**ALONE, **{code: script for script, codes in COMMON.items() for code in codes}}


def is_language(text: str, language: str) -> bool:
    """Whether a text is in the language, as far as its script and its commonest words tell."""
    code = language.lower()
    counts = _scripts(text[:LOOKED_AT])
    if not counts or code not in SCRIPT_OF:
        return False
    script = SCRIPT_OF[code]
    if script in ("HAN", "KANA"):  # Japanese mixes kana with Chinese signs; Chinese has none
        signs, kana = counts["HAN"] + counts["KANA"], counts["KANA"]
        others = max((count for name, count in counts.items() if name not in ("HAN", "KANA")), default=0)
        return signs > others and (kana > 0.1 * signs) == (script == "KANA")
    if counts.most_common(1)[0][0] != script:
        return False
    hits = {} if code in ALONE else _hits(text[:LOOKED_AT], script)
    return code in ALONE or 0 < hits[code] >= max(hits.values())


def may_be_english(text: str) -> bool:
    """Whether nothing speaks against English: a text of two words cannot prove it."""
    counts = _scripts(text[:LOOKED_AT])
    if not counts or counts.most_common(1)[0][0] != "LATIN":
        return False
    hits = _hits(text[:LOOKED_AT], "LATIN")
    return hits["en"] >= max(hits.values())


def _hits(text: str, script: str) -> dict[str, int]:
    counts = Counter(word.lower() for word in WORD.findall(text))
    return {code: sum(counts[word] for word in known) for code, known in FREQUENT[script].items()}


def _scripts(text: str) -> Counter[str]:
    found = (SCRIPTS.get(unicodedata.name(letter, "").partition(" ")[0]) for letter in text if letter.isalpha())
    return Counter(script for script in found if script is not None)


CHECKS: dict[str, Check] = {
    "keywords:existence": lambda t, s: all(word.lower() in t.lower() for word in _listed(s["keywords"])),
    "keywords:frequency": lambda t, s: _compare(
        t.lower().count(_word(s["keyword"]).lower()), s["relation"], s["frequency"]
    ),
    "keywords:forbidden_words": lambda t, s: (
        not any(re.search(rf"\b{re.escape(word)}\b", t, re.IGNORECASE) for word in _listed(s["forbidden_words"]))
    ),
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
    "detectable_format:multiple_sections": lambda t, s: (
        len(re.findall(rf"{re.escape(_word(s['section_spliter']))}\s?\d", t)) >= _number(s["num_sections"])
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _has_title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda t, s: t.strip().lower().startswith(_word(s["prompt_to_repeat"]).lower()),
    "startend:end_checker": lambda t, s: t.strip().strip('"').lower().endswith(_word(s["end_phrase"]).lower()),
    "startend:quotation": lambda t, _s: re.fullmatch(r'\s*".*"\s*', t, re.DOTALL) is not None,
    "change_case:capital_word_frequency": lambda t, s: _compare(
        sum(word.isupper() for word in re.findall(r"[\w'-]+", t)), s["capital_relation"], s["capital_frequency"]
    ),
    "change_case:english_capital": lambda t, _s: t.isupper() and may_be_english(t),
    "change_case:english_lowercase": lambda t, _s: t.islower() and may_be_english(t),
    "punctuation:no_comma": lambda t, _s: "," not in t,
}
