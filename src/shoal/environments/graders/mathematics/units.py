r"""Units and other words behind a number.

A unit that only one side writes does not matter ("5 cm" is "5"); two that differ do ("5 cm" is not "5 m"), and nothing
is converted. Words that are no units ("12 apples", "3 ways") never matter. Single letters are units in `\text{…}` only:
in "5m", m is a variable; so are short units with a prefix (`2nm` is a product).

Words that are numbers multiply: "5 million" is 5000000, "3 halves" is 3/2. Words that say more than what is counted
("5 squared", "5 below zero", "5 is wrong, it is 7") are no unit, and what has them is no number.
"""

from __future__ import annotations

import re

_NAMES = {
    "cm": "cm centimeter centimetre", "mm": "mm millimeter millimetre", "m": "m meter metre",
    "km": "km kilometer kilometre", "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard",
    "mi": "mi mile", "mph": "mph", "kmh": "kmh kmph kph", "kg": "kg kilogram", "g": "g gm gram",
    "mg": "mg milligram", "t": "t ton tonne", "lb": "lb lbs pound", "oz": "oz ounce", "l": "l L liter litre",
    "ml": "ml mL milliliter millilitre", "gal": "gal gallon", "s": "s sec second", "h": "h hr hour",
    "min": "min minute", "day": "day", "week": "week", "month": "month", "year": "year yr",
    "usd": "USD dollar usd buck", "cent": "cent", "eur": "€ EUR euro", "gbp": "£ GBP", "jpy": "¥ JPY yen",
    "inr": "₹ Rs rupee", "deg": "deg degree", "rad": "rad radian", "J": "J joule", "N": "N newton",
    "W": "W watt", "V": "V volt", "A": "A amp ampere", "Hz": "Hz hertz", "K": "K kelvin", "C": "C celsius centigrade",
    "F": "F fahrenheit", "mol": "mol mole", "Pa": "Pa pascal", "bit": "bit b", "B": "B byte", "eV": "eV electronvolt",
    "cal": "cal calorie", "ohm": "ohm", "T": "T tesla", "bar": "bar", "Wh": "Wh",
    "ha": "hectare", "acre": "acre", "square": "square sq squared",
    "cubic": "cubic cu cubed", "per": "per /", "am": "am a.m", "pm": "pm p.m", "percent": "percent pct percentage",
}  # fmt: skip
_UNITS = {spelling: unit for unit, names in _NAMES.items() for spelling in names.split()}
_POWERS = {"2": "square", "3": "cubic"}
_PREFIXES = {
    "nano": "n", "micro": "u", "milli": "m", "centi": "c", "deci": "d", "kilo": "k", "mega": "M", "giga": "G",
    "tera": "T",
}  # fmt: skip
_PREFIXED = frozenset("m g s l J N W V A Hz Pa bit B eV cal mol ohm T bar Wh".split())  # noqa: SIM905
_TEMPERATURES = ({("deg",), ("C",)}, {("deg",), ("F",)})


def _with_prefixes() -> dict[str, str]:
    """Every unit that takes a prefix, with each: kJ and kilojoule are "kJ". What has a name of its own keeps it."""
    made: dict[str, str] = {}
    for unit in sorted(_PREFIXED):
        for spelling in _NAMES[unit].split():
            for name, sign in _PREFIXES.items():
                made[(name if len(spelling) > 3 else sign) + spelling] = sign + unit
    return made


_DERIVED = _with_prefixes()
_MULTIPLIERS = {
    "k": "1000", "ten": "10", "hundred": "100", "thousand": "1000", "million": "10^6",
    "billion": "10^9", "trillion": "10^{12}", "dozen": "12",
    "lakh": "10^5", "crore": "10^7", "half": "2^{-1}", "halve": "2^{-1}", "third": "3^{-1}", "quarter": "4^{-1}",
    "fourth": "4^{-1}", "fifth": "5^{-1}", "sixth": "6^{-1}", "seventh": "7^{-1}", "eighth": "8^{-1}",
    "ninth": "9^{-1}", "tenth": "10^{-1}", "hundredth": "100^{-1}", "thousandth": "1000^{-1}",
    "millionth": "10^{-6}", "billionth": "10^{-9}",
}  # fmt: skip
_IN_TEXT = frozenset("A B C F T b amp Pa bit eV cal ohm bar Wh".split())  # noqa: SIM905
"""Units that are units in `\\text{…}` only: bare, they are products of variables."""
_MOST_WORDS = 5
_SAYS_MORE = frozenset(
    "factorial factorials below negative minus plus under not no nor none never neither is isn are "  # noqa: SIM905
    "was be or but wrong incorrect false maybe perhaps possibly probably actually instead rather if unless "
    "except than over choose double doubled triple tripled halved twice modulo inverse gross googol".split()
)
_NO_WORDS = re.compile(r"[\d,;:=<>+*!?(|]")
"""What a unit in words does not have."""
_NUMERAL = re.compile(r"-? ?(?:\d[\d,]*(?:\.\d+)?|\.\d+|\\frac ?\{\d+\} ?\{\d+\}|\d+ ?/ ?\d+)")

# Possessive (++): each sign of the unit can be read in one way only, or a long answer would be tried in all of them.
_TRAILING = re.compile(
    r"(?P<body>.*?(?:[\d)}!|\]]\s*|[A-Za-z]\s*(?=\\text)))(?=\\text|[A-Za-z])"
    r"(?P<unit>(?:\\text\s*\{[^{}]*\}|[A-Za-z]++\.?|/|\^\s*\{?-?[123]\}?|\s)++)",
    re.DOTALL,
)
_TEXT = re.compile(r"\\text\s*\{[^{}]*\}")
_WORD = re.compile(r"(/ ?)?([A-Za-z]+)")
_PIECE = re.compile(r"[A-Za-z€£¥₹]+(?:\.[mM])?|/|\^\s*\{?(-?[123])\}?")
_PREFIX = re.compile(r"(-?)\s*(USD|€|£|¥|₹|Rs\.?)\s*(?=[\d.-])")
_DEGREES = re.compile(r"\s*\^\\circ\s*(?:\\text ?\{)?([CF])?\}?$")
_MODULUS = re.compile(r"\s*\(?\s*(?:\\p?mod|\\bmod|\\text ?\{mod\}|mod)\s*\{?\s*(\d{1,9})\s*\}?\s*\)?$")
_FUNCTIONS = ("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc")
_NO_UNIT = frozenset(
    "pi sqrt sin cos tan cot sec csc ln log exp or and arcsin arccos arctan mod".split()  # noqa: SIM905
)

Unit = tuple[str, ...]


def split_unit(text: str) -> tuple[str, Unit | None]:
    r"""The number's own text, and its unit: known units by their common name, in order; empty if there is none. None
    if the words behind the number say more than a unit does.

    >>> split_unit("12 square centimeters")
    ('12', ('cm', 'square'))
    >>> split_unit("5 million dollars")
    ('5*10^6', ('usd',))
    >>> split_unit("12 \\text{apples}")
    ('12', ())
    """
    if text.isascii() and not any(letter.isalpha() for letter in text):
        return text, ()
    prefix = _PREFIX.match(text)
    unit: Unit = ()
    if prefix:
        text, unit = prefix[1] + text[prefix.end() :], (_UNITS.get(prefix[2].rstrip("."), prefix[2]),)
    degrees = _DEGREES.search(text)
    if degrees and not any(name in text for name in _FUNCTIONS):
        return text[: degrees.start()], (degrees[1] or "deg",)
    modulus = _MODULUS.search(text)
    if modulus:
        return text[: modulus.start()], (f"mod {modulus[1]}",)
    trailing = _TRAILING.fullmatch(text)
    if trailing is None:
        return text, unit
    if _says_more(trailing["unit"]):
        return text, None
    if not _all_words(trailing["unit"]):
        return text, unit
    body, words = _multiplied(trailing["body"].strip(), trailing["unit"])
    return body, None if words is None else unit or _canonical(words)


def _says_more(unit: str) -> bool:
    """Whether the words are more than what is counted: a sentence, a sign, another number."""
    words = re.findall(r"[a-z]+", unit.replace("\\text", " ").lower())
    if words[:1] in (["squared"], ["cubed"]) or "times" in words[:-1]:
        return True
    quoted = " ".join(_TEXT.findall(unit)).replace("\\text", "")
    return len(words) > _MOST_WORDS or not _SAYS_MORE.isdisjoint(words) or bool(_NO_WORDS.search(quoted))


def _multiplied(body: str, unit: str) -> tuple[str, str | None]:
    """The number times what the first words say, and the words that are left; None if that cannot be multiplied."""
    rest = unit.replace("\\text", " ").translate(_BRACES).strip()
    factors = []
    while (first := _FIRST.match(rest)) and (factor := _MULTIPLIERS.get(_singular(first[0]))):
        factors.append(factor)
        rest = rest[first.end() :].strip()
    if not factors:
        return body, None if any(_singular(word) in _MULTIPLIERS for word in _FIRST.findall(unit)) else unit
    if not _NUMERAL.fullmatch(body):
        return body, None
    return "*".join([body.replace(",", ""), *factors]), rest


def _all_words(unit: str) -> bool:
    r"""Whether every bare word is a unit, or long enough to be no product of variables."""
    for per, word in _WORD.findall(_TEXT.sub(" ", unit)):
        if word in _NO_UNIT or not (len(word) > 3 or (_is_bare_unit(word) and (per or len(word) > 1))):
            return False
    return not _NO_UNIT & set(re.findall(r"[a-z]+", unit))


def _singular(word: str) -> str:
    """In lower case, without the plural's s. A letter is a sign: k is a thousand, K is not."""
    return word if len(word) == 1 else word.lower().removesuffix("s")


def _is_bare_unit(word: str) -> bool:
    spellings = {word, word.lower(), word.removesuffix("s"), word.lower().removesuffix("s")}
    return word not in _IN_TEXT and not spellings.isdisjoint(_UNITS)


def _canonical(words: str) -> Unit:
    """`cm^2`, "sq cm" and "square centimeters" are ('cm', 'square'); words that are no unit are left out."""
    found: list[str] = []
    for piece in _PIECE.finditer(words.replace("\\text", " ")):
        if piece[1]:
            found.extend(_POWERS.get(piece[1], piece[1]) for _ in range(piece[1] != "1"))
        else:
            found.extend(_known(piece[0]))
    if "deg" in found and ("C" in found or "F" in found):
        found.remove("deg")
    if not found:
        return tuple(f"?{word}" for word in _FIRST.findall(words.replace("\\text", " ")) if _looks_like_one(word))
    first, per, second = found, [], []  # type: tuple[list[str], list[str], list[str]]
    if "per" in found:
        at = found.index("per")
        first, per, second = found[:at], ["per"], found[at + 1 :]
    unit = (*sorted(first), *per, *sorted(second))
    return _COMPOUND.get(unit, unit) if unit != ("per",) else ()


def _known(word: str) -> list[str]:
    """The unit's common name; with its prefix, if it has one (kJ and kilojoules are "kJ")."""
    for spelling in (word, word.lower(), word.removesuffix("s"), word.lower().removesuffix("s")):
        known = _UNITS.get(spelling) or _DERIVED.get(spelling)
        if known:
            return [known]
    return []


def _looks_like_one(word: str) -> bool:
    """Whether a word may be the sign of a unit that is not in the table: kX is not X."""
    return (len(word) <= 3 and word.lower() not in _SMALL_WORDS) or (len(word) <= 4 and not word[1:].islower())


_SMALL_WORDS = frozenset("a an the of in on at to for all way men set day box per new old".split())  # noqa: SIM905
_FIRST = re.compile(r"[A-Za-z]+")
_BRACES = str.maketrans("{}", "  ")
_COMPOUND: dict[Unit, Unit] = {("mph",): ("mi", "per", "h"), ("kmh",): ("km", "per", "h")}


def units_agree(left: Unit, right: Unit) -> bool:
    """Whether two units may belong to the same answer: one is missing, or they are the same. A base may be left out by
    the answer only: 101 is not 101_2, however many write 101 where 101_2 is asked for."""
    if left == right or not right:
        return True
    if not left:
        return not right[0].startswith("base ") or right == ("base 10",)
    return {left, right} in _TEMPERATURES or _unlike(left, right)


def _unlike(left: Unit, right: Unit) -> bool:
    """Whether one is a unit and the other only looks like one: "5 cm" and "5 pcs"."""
    return left[0].startswith("?") != right[0].startswith("?")
