r"""Reads an answer's text. A text with two meanings ("1,234" is a number or a list) has two `readings`.

A unit may be missing on one side ("5 cm" equals "5"); two units must agree, and nothing is converted. Other words ("12
apples") are ignored; number words multiply ("5 million"); words with another meaning ("5 squared") make the text no
number. Single letters are units in `\text{…}` only: in "5m", m is a variable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from shoal.environments.graders.mathematics.answer import plain
from shoal.environments.graders.mathematics.formula import number, tree

Unit = tuple[str, ...]


@dataclass(frozen=True)
class Form:
    r"""One reading of an answer. `kind` is one of

    value      a formula, its text, with its unit
    words      language, folded to letters and digits
    matrix     its rows, which are of the kind "row"; bars: between bars, a determinant
    () [] [) (] {}    brackets with their items; "" a bare list, ":" a ratio, "or" a union, "and"
    = < > \le \ge \ne \to \in \equiv     a relation: left side, right side, and what a chain says on the way
    \approx    an exact and a rounded value
    """

    kind: str
    items: tuple[Form, ...] = ()
    text: str = ""
    unit: Unit = ()


INEQUALITIES = ("<", ">", "\\le", "\\ge")
RELATIONS = frozenset(("=", "\\ne", "\\to", "\\in", "\\equiv", *INEQUALITIES))
INTERVALS = ("()", "[]", "(]", "[)")
LOW, HIGH = Form("value", text="-\\infty"), Form("value", text="\\infty")
_DEEPEST = 8  # levels of nested brackets that are read as lists

_GROUPED = r"\d{1,3}(?:,\d{3})+"
_WHOLE_THOUSANDS = re.compile(rf"-?{_GROUPED}(?:\.\d+)?")
_THOUSANDS = re.compile(rf"(?<![\d.,]){_GROUPED}(?![\d,])")
_SPACED_THOUSANDS = re.compile(r"(-?\d{1,3}(?: \d{3})+)((?:\.\d+)?)")
_DECIMAL_COMMA = re.compile(r"-?0,\d+|-?\d+,(?:\d\d|\d{4,})")
_MIXED = re.compile(r"(-?)(\d+)(?: +| *\\text\{and\} *)(\d+) ?/ ?(\d+)")
_BASE = re.compile(r"([0-9]+) ?_ ?\{? ?(?:\\text\{)?(\d+|[a-z]+)\}? ?\}?")
_BASES = dict(zip("two three four five six seven eight nine ten".split(), map(str, range(2, 11)), strict=True))  # noqa: SIM905
CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::[0-5]\d)?(\D.*)?")
_RATIO = re.compile(r":|\\text\{to\}")
_TERM = re.compile(r"[-\w.\\{}^()/ ]+")
_SEPARATOR = re.compile(r",? ?\\text ?\{ ?,? ?(?:and|or) ?,? ?\} ?|,? (?:and|or) |(?<=\))(?:and|or)(?=\()|\\text\{, \}")
_AND, _OR = re.compile(r"\band\b"), re.compile(r"\bor\b")
_SIGNS = re.compile(r"\\(?:le|ge|ne|in|approx|equiv|to)(?![a-zA-Z])|(?<![<>!])=|<=|>=|!=|<|>")
_SIGN_NAMES = {"<=": "\\le", ">=": "\\ge", "!=": "\\ne"}
_NAMES = re.compile(r"\(? ?(?:\\?[a-zA-Z]++(?:_\{?\w++\}?)?'*+[ ,]*+){1,4}\)?|[a-zA-Z]\([^()=]*\)")
"""A name, or a few: x, a_1, \\theta, (x, y), f(x)."""
_MATRIX = re.compile(
    r"[(\[]? ?\\begin ?\{([bpvV]?(?:small)?matrix|array)\}(?:\{[clr| ]*\})?(.*)\\end ?\{\1\} ?[)\]]?", re.DOTALL
)
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")
_INFINITY = re.compile(r"([+-]?) ?(?:\\infty|\\text\{infinity\}|infinity)")
_REALS = re.compile(r"\\mathbb ?\{? ?R ?\}?|\\text\{(?:all )?reals?(?: numbers)?\}|(?:all )?real numbers", re.I)
_ALL_BUT = re.compile(r"(?:\\mathbb ?\{? ?R ?\}?) ?(?:\\setminus|-|\\ ) ?\\\{(.*)\\\}", re.DOTALL)
_QUALIFIER = re.compile(
    r"(?<=\S) ?, ?\(? ?(?:\\text ?\{[a-z ]+\} ?)?[a-zA-Z] ?\\in ?\\mathbb ?\{? ?[ZNQ] ?\}?(?:\^?[+*])? ?\)?$"
)  # the range of a variable after a formula: ", k \in \mathbb{Z}"
_BUILDER = re.compile(r"\\\{ ?[a-z](?: ?\\in ?\\mathbb ?\{? ?R ?\}?)? ?[:|] ?(.*)\\\}", re.DOTALL)
_CASES = re.compile(r"(?:\\\{ ?)?\\begin ?\{(cases|aligned|align|gathered)\}([^&]*)\\end ?\{\1\}", re.DOTALL)
_BRACKET = re.compile(r"[(\[]|\\\{|^[-\d,.]*$")
"""Where "1,234" is probably two items: in brackets, or in a list of plain numbers."""
_OPENING = {"(": "(", "[": "[", "\\{": "{", "{": "", "]": "("}
_CLOSING = {")": ")", "]": "]", "\\}": "}", "}": "", "[": ")"}


@lru_cache(maxsize=4096)
def readings(text: str) -> tuple[Form, ...]:
    """The readings of an answer, the most likely first; at least one."""
    text = _QUALIFIER.sub("", plain(text))
    found = [_read(text, 0)]
    if _WHOLE_THOUSANDS.fullmatch(text):
        found.append(_group("", text.split(","), 0))
    if _DECIMAL_COMMA.fullmatch(text):
        found.insert(0 if text.lstrip("-")[0] == "0" else 1, Form("value", text=text.replace(",", ".")))
    return tuple(found)


def _read(text: str, depth: int) -> Form:
    if depth > _DEEPEST or text.isdigit():
        return Form("value", text=text)
    special = _special(text, depth)
    if special is not None:
        return special
    cases = _split(text, ";") if ";" in text and "=" in text else []
    if len(cases) > 1 and all("," in case for case in cases):  # p=1,q=2; p=3,q=4
        return Form("", tuple(Form("()", _read(case, depth + 1).items) for case in cases))
    items = _listed(text)
    if len(items) > 1:
        return _list(items, depth, both=bool(_AND.search(text)), either=bool(_OR.search(text)))
    parts = text.split("\\cup")
    if len(parts) > 1 and "=" not in text and all(map(_whole, parts)):
        return _group("or", parts, depth)
    return _relation(text, depth) or _bracketed(text, depth) or _single(text, depth)


def _special(text: str, depth: int) -> Form | None:
    if text.startswith("]") or text.endswith("["):
        return _bracketed(text, depth)
    if _WHOLE_THOUSANDS.fullmatch(text):
        return Form("value", text=text.replace(",", ""))
    if text.startswith("\\{") and (builder := _BUILDER.fullmatch(text)):
        return _read(plain(builder[1]), depth + 1)
    if "\\begin" in text:
        if cases := _CASES.fullmatch(text):
            return _list([plain(row) for row in cases[2].split("\\\\") if row.strip()] or [""], depth + 1)
        matrix = _MATRIX.fullmatch(text)
        rows = re.split(r"\\\\(?:\[[^\]]*\])?", matrix[2].replace("\\hline", "")) if matrix else []
        cells = tuple(_group("row", row.split("&"), depth) for row in rows if row.strip())
        if matrix is None or "\\begin" in matrix[2] or len({len(row.items) for row in cells}) != 1:
            return None
        return Form("bars" if "v" in matrix[1].lower() else "matrix", cells, text)
    if _REALS.fullmatch(text):
        return Form("()", (LOW, HIGH))
    but = _ALL_BUT.fullmatch(text)
    return Form("\\ne", (Form("value", text="x"), _list(_listed(but[1]), depth + 1))) if but else None


def _listed(text: str) -> list[str]:
    r"""The parts between commas, semicolons, "and" and "or" outside brackets. Thousands stay together."""
    if "," not in text and ";" not in text and "or" not in text and "and" not in text:
        return [text]
    text = _SEPARATOR.sub(" , ", text)
    if ", " in text or ";" in text or not _BRACKET.search(text):
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return [part for part in _split(text, ",;") if part]


def _split(text: str, separators: str) -> list[str]:
    """The text split at separators outside any bracket."""
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign in separators and depth <= 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()]


def _list(items: list[str], depth: int, both: bool = False, either: bool = False) -> Form:
    """A bare list. In "x = 1, 2" x is a list; "x < 1 or x > 2" is a union, "x > 1 and x < 2" an interval. A comma may
    mean both: "x > 1, x < 2" is an interval, since the union would be everything."""
    read = tuple(_read(plain(item), depth + 1) for item in items)
    if read[0].kind == "=" and len(read) > 1 and not any(item.kind in RELATIONS for item in read[1:]):
        return Form("=", (read[0].items[0], Form("", (read[0].items[1], *read[1:]))))
    unequal = any(item.kind in INEQUALITIES for item in read)
    if not unequal or not all(item.kind in (*INEQUALITIES, *INTERVALS) for item in read):
        return Form("", _flattened(read))
    lower, upper = ([item for item in read if item.kind in kinds] for kinds in ((">", "\\ge"), ("<", "\\le")))
    between = None
    if not either and len(lower) == 1 == len(upper) and lower[0].items[0] == upper[0].items[0]:
        brackets = ("(" if lower[0].kind == ">" else "[") + (")" if upper[0].kind == "<" else "]")
        between = Form(brackets, (lower[0].items[1], upper[0].items[1]))
    if both:
        return between or Form("and", read)
    low, high = (number(tree(item.text)) for item in between.items) if between else (None, None)
    rising = low is not None and high is not None and bool(low.real < high.real)
    return between if between and rising else Form("or", read)


def _flattened(items: tuple[Form, ...]) -> tuple[Form, ...]:
    r"""`\pm 2, 3` is three values."""
    return tuple(part for item in items for part in (item.items if item.kind == "" else (item,)))


def _group(kind: str, items: list[str], depth: int) -> Form:
    return Form(kind, tuple(_read(plain(item), depth + 1) for item in items))


def _relation(text: str, depth: int) -> Form | None:
    befores = ((sign, text[: sign.start()]) for sign in _SIGNS.finditer(text))
    signs = [  # outside all brackets; square ones do not count: `]1, 2[` is an interval too
        sign for sign, before in befores
        if before.count("{") == before.count("}") and before.count("(") <= before.count(")")
    ]  # fmt: skip
    if not signs:
        return None
    names = [_SIGN_NAMES.get(sign[0], sign[0]) for sign in signs]
    starts, ends = [0, *(sign.end() for sign in signs)], [*(sign.start() for sign in signs), len(text)]
    sides = [plain(text[start:end]) for start, end in zip(starts, ends, strict=True)]
    if not all(sides):
        return _read(sides[1] or sides[0], depth + 1) if len(sides) == 2 else None
    read, named = [_read(side, depth + 1) for side in sides], bool(_NAMES.fullmatch(sides[0]))
    if names[-1] == "\\approx" and (len(read) > 2 or not named):
        read, names = [*read[:-2], Form("\\approx", (read[-2], read[-1]))], names[:-1]
        if not names:
            return read[0]
    if len(read) == 2:  # x \in [0,1] and x \equiv 7 give x a value; A \to B and 5 \equiv 3 do not
        if names[0] == "\\in" and named:
            return read[1]
        return Form("=" if names[0] in ("\\equiv", "\\approx") and named else names[0], tuple(read))
    if all(name == "=" for name in names):
        return Form("=", (read[0], read[-1], *read[1:-1]))
    if len(read) == 3 and set(names) <= {">", "\\ge"}:
        read, names = read[::-1], [{">": "<", "\\ge": "\\le"}[name] for name in reversed(names)]
    if len(read) == 3 and set(names) <= {"<", "\\le"}:  # 1 < x \le 2 is an interval
        return Form(("(" if names[0] == "<" else "[") + (")" if names[1] == "<" else "]"), (read[0], read[2]))
    return None


def _bracketed(text: str, depth: int) -> Form | None:
    opening = next((sign for sign in _OPENING if text.startswith(sign)), None)
    ending = next((sign for sign in _CLOSING if text.endswith(sign)), None)
    if opening is None or ending is None:
        return None
    inner = text[len(opening) : len(text) - len(ending)]
    brackets = _OPENING[opening] + _CLOSING[ending]
    if not _whole(inner) or brackets not in (*INTERVALS, "{}", ""):
        return None
    items = [part for part in _split(_SEPARATOR.sub(",", inner), ",;") if part]
    if len(items) < 2 and brackets != "{}":
        return _read(plain(inner), depth + 1) if brackets == "()" and items else None
    group = _group(brackets, items, depth)
    return Form(brackets, _flattened(group.items)) if brackets in ("{}", "") else group


def _whole(inner: str) -> bool:
    depth = 0
    for sign in inner:
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _single(text: str, depth: int) -> Form:
    if infinite := _INFINITY.fullmatch(text):
        return LOW if infinite[1] == "-" else HIGH
    if _PLUS_MINUS.search(text):  # 1 \pm 2 is 3 and -1; several signs go together
        upper = _PLUS_MINUS.sub(lambda sign: "+" if sign[1] == "pm" else "-", text)
        lower = _PLUS_MINUS.sub(lambda sign: "-" if sign[1] == "pm" else "+", text)
        return Form("", tuple(_value(plain(one).lstrip("+ ")) for one in (upper, lower)))
    if text in ("\\emptyset", "\\{ \\}"):
        return Form("{}")
    terms = _RATIO.split(text)
    if len(terms) > 1 and all(map(_TERM.fullmatch, terms)):
        return Form(":", _group(":", terms, depth).items, text)
    return _value(text)


_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_LETTERS = re.compile(r"[^\W\d_]{2,}")
_NOT_FOLDED = re.compile(r"(?:(?![<>=^]|[+*/] ?\.?\d|(?<![^\W\d_]{2})[-.] ?\.?\d)[\W_])+")
"""Signs to ignore: all but those of a number and of comparisons. "slope -2" is not "slope 2"."""
_SIGN_SPACE = re.compile(r"(?<=[-+*/<>=^]) (?=[\w.])| (?=[<>=^])")
_FUNCTION = re.compile(r"\b(?:sin|cos|tan|log|ln|sqrt|exp|arc\w+)\b|sqrt")


def _value(text: str) -> Form:
    body, unit = _split_unit(text)
    if unit is None or _is_words(body):
        return Form("words", text=folded(text))
    base, spaced, mixed = _BASE.fullmatch(body), _SPACED_THOUSANDS.fullmatch(body), _MIXED.fullmatch(body)
    if base:
        body, unit = base[1], (f"base {_BASES.get(base[2], base[2])}",)
    elif spaced:
        body = spaced[1].replace(" ", "") + spaced[2]
    elif mixed:
        body = f"{mixed[1]}({mixed[2]}+{mixed[3]}/{mixed[4]})"
    return Form("value", text=_THOUSANDS.sub(lambda number: number[0].replace(",", ""), body), unit=unit)


def _is_words(text: str) -> bool:
    r"""Whether a text is language: nothing is left without words and `\text{…}`."""
    if not any(letter.isalpha() for letter in text):
        return False
    rest = _TEXT.sub("", text)
    if rest != text and not rest.strip(" .,-'^") and not rest.startswith("-"):
        return True
    letters = _LETTERS.findall(text)
    bare = "\\" not in text and bool(letters) and not any(sign in text for sign in "^_=+*/<>|")
    return bare and len(max(letters, key=len)) > 3 and not _FUNCTION.search(text)


def folded(text: str) -> str:
    r"""Letters and numbers only, in lower case: `\text{(B) Yes!}` becomes "b yes"."""
    words = _SIGN_SPACE.sub("", _NOT_FOLDED.sub(" ", text.replace("\\text", " ")).strip())
    return words if len(words) == 1 else words.casefold()  # a single letter is a name: C is not c


_SPELLINGS = {
    "cm": "cm centimeter centimetre", "mm": "mm millimeter millimetre", "m": "m meter metre", "%": "percent pct",
    "km": "km kilometer kilometre", "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "kg": "kg kilogram", "g": "g gm gram", "mg": "mg milligram", "t": "t ton tonne", "lb": "lb lbs pound",
    "oz": "oz ounce", "l": "l liter litre", "ml": "ml milliliter millilitre", "gal": "gal gallon", "s": "s sec second",
    "h": "h hr hrs hour", "min": "min minute", "day": "day", "week": "week", "month": "month", "year": "year yr",
    "usd": "usd dollar buck", "cent": "cent", "eur": "€ eur euro", "gbp": "£ gbp", "jpy": "¥ jpy yen",
    "inr": "₹ rs rupee", "cny": "yuan rmb", "deg": "deg degree", "rad": "rad radian", "J": "joule", "N": "newton",
    "W": "watt", "V": "volt", "A": "amp ampere", "Hz": "hertz", "K": "kelvin", "C": "celsius centigrade",
    "F": "fahrenheit", "mol": "mol mole", "Pa": "pascal", "bit": "bit", "B": "byte", "square": "square sq squared",
    "cubic": "cubic cu cubed", "per": "per /", "am": "am a.m", "pm": "pm p.m", "mph": "mph", "kmh": "kmh kmph kph",
}  # fmt: skip
_UNITS = {spelling: unit for unit, names in _SPELLINGS.items() for spelling in names.split()}
_COMPOUND: dict[Unit, Unit] = {("mph",): ("mi", "per", "h"), ("kmh",): ("km", "per", "h"), ("per",): ()}
_PREFIXES = {"": "", "nano": "n", "micro": "u", "milli": "m", "kilo": "k", "mega": "M", "giga": "G", "tera": "T"}
_FACTORS = {
    "k": "1000", "ten": "10", "hundred": "100", "thousand": "1000", "million": "10^6", "billion": "10^9",
    "trillion": "10^{12}", "dozen": "12", "lakh": "10^5", "crore": "10^7", "half": "2^{-1}", "halve": "2^{-1}",
    "third": "3^{-1}", "quarter": "4^{-1}", "fourth": "4^{-1}", "fifth": "5^{-1}", "sixth": "6^{-1}",
    "eighth": "8^{-1}", "tenth": "10^{-1}", "hundredth": "100^{-1}", "thousandth": "1000^{-1}",
}  # fmt: skip
_SAYS_MORE = frozenset(
    "factorial factorials below negative minus plus under not no nor none never neither is isn are was be or but "  # noqa: SIM905
    "wrong incorrect false maybe perhaps possibly probably actually instead rather if unless except than over choose "
    "double doubled triple tripled halved twice modulo inverse gross googol and pi sqrt sin cos tan ln "
    "log exp mod".split()
)
_MATHEMATICAL = frozenset("pi sqrt sin cos tan ln log exp mod and or".split())  # noqa: SIM905
_NO_WORDS = re.compile(r"[\d,;:=<>+*!?(|]")
_NUMERAL = re.compile(r"-? ?(?:\d[\d,]*(?:\.\d+)?|\.\d+|\\frac ?\{\d+\} ?\{\d+\}|\d+ ?/ ?\d+)")
# Possessive (++): otherwise a long answer would take exponential time.
_TRAILING = re.compile(
    r"(?P<body>.*?(?:[\d)}!|\]]\s*|[A-Za-z]\s*(?=\\text)))(?=\\text|[A-Za-z€£¥₹])"
    r"(?P<unit>(?:\\text\s*\{[^{}]*\}|[A-Za-z]++\.?|[€£¥₹]|/|\^\s*\{?-?[123]\}?|\s)++)",
    re.DOTALL,
)
_WORD = re.compile(r"(/ ?)?([A-Za-z]+)")
_PIECE = re.compile(r"[A-Za-z€£¥₹]+(?:\.[mM])?|/|\^\s*\{?(-?[123])\}?")
_CURRENCY = re.compile(r"(-?)\s*(USD|€|£|¥|₹|Rs\.?)\s*(?=[\d.-])")
_DEGREES = re.compile(r"\s*\^\\circ\s*(?:\\text ?\{)?([CF])?\}?$")
_MODULUS = re.compile(r"\s*\(?\s*(?:\\p?mod|\\bmod|\\text ?\{mod\}|mod)\s*\{?\s*(\d{1,9})\s*\}?\s*\)?$")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")


def _split_unit(text: str) -> tuple[str, Unit | None]:
    """The number's text and its unit's common name; None if the words are more than a unit."""
    if text.endswith("%"):
        return text[:-1].strip(), ("%",)
    if text.isascii() and not any(letter.isalpha() for letter in text):
        return text, ()
    currency, unit = _CURRENCY.match(text), ()  # type: re.Match[str] | None, Unit
    if currency:
        text, unit = currency[1] + text[currency.end() :], (_UNITS[currency[2].rstrip(".").lower()],)
    degrees, modulus, trailing = _DEGREES.search(text), _MODULUS.search(text), _TRAILING.fullmatch(text)
    if degrees and not _TRIGONOMETRIC.search(text):
        return text[: degrees.start()], (degrees[1] or "deg",)
    if modulus:
        return text[: modulus.start()], (f"mod {modulus[1]}",)
    if trailing is None:
        return text, unit
    words, quoted = trailing["unit"].replace("\\text", " "), " ".join(_TEXT.findall(trailing["unit"]))
    known = re.findall(r"[a-z]+", words.lower())
    more = known[:1] in (["squared"], ["cubed"]) or "times" in known[:-1] or not _SAYS_MORE.isdisjoint(known)
    if more or len(known) > 5 or _NO_WORDS.search(quoted):
        return text, None if quoted or _MATHEMATICAL.isdisjoint(known) else unit
    for per, word in _WORD.findall(_TEXT.sub(" ", trailing["unit"])):  # a short bare word may be a product of letters
        spelled = (per or len(word) > 1) and word not in ("amp", "bit") and _singular(word) in _UNITS
        if len(word) < 4 and not spelled:
            return text, unit
    body = trailing["body"].strip()
    pieces = list(_PIECE.finditer(words))
    factors = [_FACTORS.get(_singular(piece[0])) for piece in pieces]
    count = next((index for index, factor in enumerate(factors) if factor is None), len(factors))
    if any(factors[count:]) or (count and not _NUMERAL.fullmatch(body)):
        return body, None
    if count:
        body = "*".join([body.replace(",", ""), *(factor for factor in factors[:count] if factor)])
    found: list[str] = []
    for piece in pieces[count:]:
        sign, word = piece[0], _singular(piece[0])
        prefix = next((name for name in _PREFIXES if name and word.startswith(name)), "")
        if piece[1]:
            found.extend({"2": ["square"], "3": ["cubic"], "1": []}.get(piece[1], [piece[1]]))
        elif word in _UNITS or word.removeprefix(prefix) in _UNITS:
            found.append(_UNITS.get(word) or _PREFIXES[prefix] + _UNITS[word.removeprefix(prefix)])
        elif len(sign) <= 2 or (len(sign) <= 4 and not sign[1:].islower()):
            found.append(sign)
    if "deg" in found and ("C" in found or "F" in found):
        found.remove("deg")
    at = found.index("per") if "per" in found else len(found)
    whole = (*sorted(found[:at]), *found[at : at + 1], *sorted(found[at + 1 :]))
    return body, unit or _COMPOUND.get(whole, whole)


def _singular(word: str) -> str:
    """In lower case, without the plural's s. Single letters keep their case: k is a thousand, K is not."""
    lower = word.lower()
    return word if len(word) < 3 and lower not in _UNITS else lower if lower in _UNITS else lower.removesuffix("s")


def units_agree(gold: Unit, given: Unit) -> bool:
    """Whether two units are compatible: one is missing, or they are equal. Only the given answer may leave out a base:
    if 101 is right, 101_2 is wrong."""
    if not gold:
        return not given or not given[0].startswith("base ") or given == ("base 10",)
    return not given or gold == given or {gold, given} in ({("deg",), ("C",)}, {("deg",), ("F",)})
