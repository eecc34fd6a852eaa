"""Which language a text is in: by its script, and where languages share one, by their commonest words.

That decides between the languages below; it is no detector for all others. A task that asks for another language is
refused as one that cannot be decided, instead of being scored by chance.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

WORD = re.compile(r"\w+")
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


def can_tell(language: str) -> bool:
    return language.lower() in SCRIPT_OF


def is_language(text: str, language: str) -> bool:
    """Whether a text is in the language, as far as its script and its commonest words tell."""
    code = language.lower()
    counts = _scripts(text[:LOOKED_AT])
    if not counts or code not in SCRIPT_OF:
        return False
    script = SCRIPT_OF[code]
    if script in ("HAN", "KANA"):
        return _east_asian(counts, script)
    if counts.most_common(1)[0][0] != script:
        return False
    return code in ALONE or _has_its_words(text[:LOOKED_AT], code, script)


def may_be_english(text: str) -> bool:
    """Whether nothing speaks against English: a text of two words cannot prove it."""
    counts = _scripts(text[:LOOKED_AT])
    if not counts or counts.most_common(1)[0][0] != "LATIN":
        return False
    hits = _hits(text[:LOOKED_AT], "LATIN")
    return hits["en"] >= max(hits.values())


def _has_its_words(text: str, code: str, script: str) -> bool:
    hits = _hits(text, script)
    return hits[code] > 0 and hits[code] >= max(hits.values())


def _hits(text: str, script: str) -> dict[str, int]:
    counts = Counter(word.lower() for word in WORD.findall(text))
    return {code: sum(counts[word] for word in known) for code, known in FREQUENT[script].items()}


def _east_asian(counts: Counter[str], script: str) -> bool:
    """Japanese mixes kana with Chinese signs; Chinese has none."""
    signs, kana = counts["HAN"] + counts["KANA"], counts["KANA"]
    others = max((count for name, count in counts.items() if name not in ("HAN", "KANA")), default=0)
    return signs > others and (kana > 0.1 * signs) == (script == "KANA")


def _scripts(text: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for letter in text:
        if letter.isalpha():
            script = SCRIPTS.get(unicodedata.name(letter, "").partition(" ")[0])
            if script is not None:
                counts[script] += 1
    return counts
