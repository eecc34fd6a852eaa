r"""What an answer's text says: which of the `forms` it has. This file tells lists, relations and brackets apart.

Some texts can be read in two ways ("1,234" is a number or a list): `readings` gives both, the likelier first.
"""

from __future__ import annotations

import re
from functools import lru_cache

from shoal.environments.graders.mathematics.forms import SHORT, Group, Matrix, Reading, Relation, Value
from shoal.environments.graders.mathematics.normal import plain
from shoal.environments.graders.mathematics.relations import exact_of
from shoal.environments.graders.mathematics.values import THOUSANDS, TIME, time_of_day, value

_DEEPEST = 8
"""Brackets within brackets that are told apart as lists."""


_WHOLE_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_ZERO_COMMA = re.compile(r"(-?0),(\d+)")
_RATIO = re.compile(r":|\\text\{to\}")
_TERM = re.compile(r"[-\w.\\{}^()/ ]+")
_SEPARATOR = re.compile(r",? ?\\text ?\{ ?,? ?(?:and|or) ?,? ?\} ?|,? (?:and|or) |\\text\{, \}")
_AND, _OR = re.compile(r"\band\b"), re.compile(r"\bor\b")
_SIGNS = re.compile(r"\\(?:le|ge|ne|in|approx|equiv|to)(?![a-zA-Z])|(?<![<>!])=|<=|>=|!=|<|>")
_NAMING = ("\\in", "\\to", "\\equiv")
_NAMES = re.compile(r"\(? ?(?:\\?[a-zA-Z]++(?:_\{?\w++\}?)?'*+[ ,]*+){1,4}\)?|[a-zA-Z]\([^()=]*\)")
"""A name, or a few: x, a_1, \\theta, (x, y), f(x)."""
_SIGN_NAMES = {"<=": "\\le", ">=": "\\ge", "!=": "\\ne"}
_MATRIX = re.compile(
    r"[(\[]? ?\\begin ?\{([bpvV]?(?:small)?matrix|array)\}(?:\{[clr| ]*\})?(.*)\\end ?\{\1\} ?[)\]]?", re.DOTALL
)
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")
_INFINITY = re.compile(r"([+-]?) ?(?:\\(?:infty|infin)|\\text\{infinity\}|infinity)")
_REALS = re.compile(r"\\mathbb ?\{? ?R ?\}?|\\text\{(?:all )?reals?(?: numbers)?\}|(?:all )?real numbers", re.I)
_ALL_BUT = re.compile(r"(?:\\mathbb ?\{? ?R ?\}?) ?(?:\\setminus|-|\\ ) ?\\\{(.*)\\\}", re.DOTALL)
_QUALIFIER = re.compile(
    r"(?<=\S) ?, ?\(? ?(?:\\text ?\{[a-z ]+\} ?)?[a-zA-Z] ?\\in ?\\mathbb ?\{? ?[ZNQ] ?\}?(?:\^?[+*])? ?\)?$"
)
"""What says which numbers a variable stands for, after a formula with it: ", k \\in \\mathbb{Z}"."""
_BUILDER = re.compile(r"\\\{ ?[a-z](?: ?\\in ?\\mathbb ?\{? ?R ?\}?)? ?[:|] ?(.*)\\\}", re.DOTALL)
_CASES = re.compile(r"(?:\\\{ ?)?\\begin ?\{(cases|aligned|align|gathered)\}([^&]*)\\end ?\{\1\}", re.DOTALL)
_BRACKET = re.compile(r"[(\[]|\\\{|^[-\d,.]*$")
"""Where "1,234" is more than likely two items: in brackets, or in a list of bare numbers."""


def readings(text: str) -> tuple[Reading, ...]:
    """The ways in which an answer can be read, likelier first; at least one. Short ones are remembered."""
    return _remembered(text) if len(text) <= SHORT else _all(text)


def _all(text: str) -> tuple[Reading, ...]:
    text = _QUALIFIER.sub("", plain(text))
    found = [_read(text, 0)]
    if _WHOLE_THOUSANDS.fullmatch(text):
        found.append(_group("", text.split(","), 0))
    if _ZERO_COMMA.fullmatch(text):
        found.insert(0, Value(text.replace(",", ".")))
    time = TIME.fullmatch(text)
    if time:
        found = [time_of_day(time), *([] if time[4] else found)]
    return tuple(found)


_remembered = lru_cache(maxsize=16384)(_all)


def _read(text: str, depth: int) -> Reading:
    if depth > _DEEPEST:
        return Value(text)
    special = _special(text, depth)
    if special is not None:
        return special
    items = _listed(text)
    if len(items) > 1:
        return _list(items, depth, both=bool(_AND.search(text)), either=bool(_OR.search(text)))
    return _relation(text, depth) or _union(text, depth) or _bracketed(text, depth) or _single(text, depth)


def _special(text: str, depth: int) -> Reading | None:
    """Forms that are told by their whole text."""
    if text.isdigit():
        return Value(text)
    if text.startswith("]") or text.endswith("["):
        return _bracketed(text, depth)
    if _WHOLE_THOUSANDS.fullmatch(text):
        return Value(text.replace(",", ""))
    builder = _BUILDER.fullmatch(text) if text.startswith("\\{") else None
    if builder:
        return _read(plain(builder[1]), depth + 1)
    cases = _CASES.fullmatch(text) if "\\begin" in text else None
    if cases:
        return _list([plain(row) for row in cases[2].split("\\\\") if row.strip()] or [""], depth + 1)
    if "\\begin" in text:
        matrix = _MATRIX.fullmatch(text)
        return _matrix(matrix[2], depth, "v" in matrix[1].lower()) if matrix and "\\begin" not in matrix[2] else None
    if "R" in text or "eal" in text:
        if _REALS.fullmatch(text):
            return Group("()", (Value("-\\infty", infinite=-1), Value("\\infty", infinite=1)))
        but = _ALL_BUT.fullmatch(text)
        return Relation("\\ne", Value("x"), _list(_listed(but[1]), depth + 1)) if but else None
    return None


def _listed(text: str) -> list[str]:
    r"""The parts between commas, semicolons, "and" and "or" outside brackets. Thousands stay together."""
    if "," not in text and ";" not in text and "or" not in text and "and" not in text:
        return [text]
    text = _SEPARATOR.sub(" , ", text)
    if ", " in text or ";" in text or not _BRACKET.search(text):
        text = THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    return [part for part in _split(text, ",;") if part.strip()]


def _split(text: str, separators: str) -> list[str]:
    """The text split at separators outside any bracket."""
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign in separators and depth <= 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return [part.strip() for part in parts]


def _list(items: list[str], depth: int, both: bool = False, either: bool = False) -> Reading:
    """A bare list. "x = 1, 2" says that x is a list; "x < 1 or x > 2" is a union, "x > 1 and x < 2" an interval. Only
    a comma says either: "x > 1, x < 2" is an interval, since everything would be one or the other."""
    read = tuple(_read(plain(item), depth + 1) for item in items)
    first = read[0]
    if isinstance(first, Relation) and first.sign == "=" and not any(isinstance(item, Relation) for item in read[1:]):
        return Relation("=", first.left, Group("", (first.right, *read[1:])))
    if any(map(_is_inequality, read)) and all(_is_inequality(item) or _is_interval(item) for item in read):
        between = None if either else _between(read)
        if both:
            return between or Group("and", read)
        return between if isinstance(between, Group) and _rising(between) else Group("or", read)
    return Group("", _flattened(read))


def _is_inequality(item: Reading) -> bool:
    return isinstance(item, Relation) and item.sign in ("<", ">", "\\le", "\\ge")


def _is_interval(item: Reading) -> bool:
    return isinstance(item, Group) and item.brackets in ("()", "[]", "(]", "[)") and len(item.items) == 2


def _between(bounds: tuple[Reading, ...]) -> Reading | None:
    """The interval between a lower and an upper bound of the same name."""
    lower = [bound for bound in bounds if isinstance(bound, Relation) and bound.sign in (">", "\\ge")]
    upper = [bound for bound in bounds if isinstance(bound, Relation) and bound.sign in ("<", "\\le")]
    if len(lower) != 1 or len(upper) != 1 or lower[0].left != upper[0].left:
        return None
    opening, ending = "(" if lower[0].sign == ">" else "[", ")" if upper[0].sign == "<" else "]"
    return Group(opening + ending, (lower[0].right, upper[0].right))


def _rising(interval: Group) -> bool:
    low, high = exact_of(interval.items[0]), exact_of(interval.items[1])
    return low is not None and high is not None and low < high


def _flattened(items: tuple[Reading, ...]) -> tuple[Reading, ...]:
    r"""`\pm 2, 3` is three values."""
    flat: list[Reading] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Group) and item.brackets == "" else (item,))
    return tuple(flat)


def _group(brackets: str, items: list[str], depth: int) -> Group:
    return Group(brackets, tuple(_read(plain(item), depth + 1) for item in items))


def _relation(text: str, depth: int) -> Reading | None:
    signs = [sign for sign in _SIGNS.finditer(text) if _outside(text, sign.start())]
    if not signs:
        return None
    names = [_SIGN_NAMES.get(sign[0], sign[0]) for sign in signs]
    starts = [0, *(sign.end() for sign in signs)]
    ends = [*(sign.start() for sign in signs), len(text)]
    sides = [plain(text[start:end]) for start, end in zip(starts, ends, strict=True)]
    if names[0] == "\\approx":
        return _read(sides[0] or sides[1], depth + 1)
    if names[0] in _NAMING:
        return _named(names, sides, depth)
    if "\\approx" in names:
        cut = names.index("\\approx")
        names, sides = names[:cut], sides[: cut + 1]
    if not all(sides[:-1]) or not sides[-1]:
        return _read(sides[-1] or sides[0], depth + 1) if len(sides) == 2 else None
    if len(sides) == 2:
        return Relation(names[0], _read(sides[0], depth + 1), _read(sides[1], depth + 1))
    return _chain(names, sides, depth)


def _named(names: list[str], sides: list[str], depth: int) -> Reading | None:
    r"""`x \in [0,1]` says what x is, `x \equiv 7` too; `A \to B` and `5 \equiv 3` say something about both sides."""
    if len(sides) != 2 or not sides[1]:
        return None
    named = bool(_NAMES.fullmatch(sides[0]))
    if names[0] == "\\in" and (named or not sides[0]):
        return _read(sides[1], depth + 1)
    sign = "=" if names[0] == "\\equiv" and named else names[0]
    return Relation(sign, _read(sides[0], depth + 1), _read(sides[1], depth + 1))


def _chain(names: list[str], sides: list[str], depth: int) -> Reading | None:
    """`a = b = c` says what a is in the end; `1 < x \\le 2` is an interval."""
    if all(name == "=" for name in names):
        read = [_read(side, depth + 1) for side in sides]
        return Relation("=", read[0], read[-1], tuple(read[1:-1]))
    if len(sides) != 3 or "=" in names or "\\ne" in names:
        return None
    low, high = _read(sides[0], depth + 1), _read(sides[2], depth + 1)
    if all(name in ("<", "\\le") for name in names):
        return Group(("(" if names[0] == "<" else "[") + (")" if names[1] == "<" else "]"), (low, high))
    if all(name in (">", "\\ge") for name in names):
        return Group(("(" if names[1] == ">" else "[") + (")" if names[0] == ">" else "]"), (high, low))
    return None


def _outside(text: str, at: int) -> bool:
    """Whether a place is outside all brackets. Square ones do not count: `]1, 2[` is an interval too."""
    before = text[:at]
    return before.count("{") == before.count("}") and before.count("(") <= before.count(")")


def _union(text: str, depth: int) -> Reading | None:
    if "\\cup" not in text:
        return None
    parts = text.split("\\cup")
    return _group("or", parts, depth) if all(map(_whole, parts)) else None


_OPENING = {"(": "(", "[": "[", "\\{": "{", "{": "{", "]": "("}
_CLOSING = {")": ")", "]": "]", "\\}": "}", "}": "}", "[": ")"}


def _bracketed(text: str, depth: int) -> Reading | None:
    opening = next((sign for sign in _OPENING if text.startswith(sign)), None)
    ending = next((sign for sign in _CLOSING if text.endswith(sign)), None)
    if opening is None or ending is None:
        return None
    inner = text[len(opening) : len(text) - len(ending)]
    if not _whole(inner):
        return None
    items = [part for part in _split(_SEPARATOR.sub(",", inner), ",;") if part]
    brackets = _OPENING[opening] + _CLOSING[ending]
    if brackets not in ("()", "[]", "(]", "[)", "{}"):
        return None
    if len(items) < 2 and brackets != "{}":
        return _read(plain(inner), depth + 1) if brackets == "()" and items and "^" not in ending else None
    return Group(
        brackets,
        _flattened(_group(brackets, items, depth).items) if brackets == "{}" else _group(brackets, items, depth).items,
    )


def _whole(inner: str) -> bool:
    """Whether brackets are closed within the text: what "(1)(2)" leaves without its first and last is not."""
    depth = 0
    for sign in inner:
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
            if depth < 0:
                return False
    return depth == 0


def _matrix(body: str, depth: int, bars: bool) -> Reading | None:
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", body.replace("\\hline", "")) if row.strip()]
    cells = tuple(tuple(_read(plain(cell), depth + 1) for cell in row.split("&")) for row in rows)
    return Matrix(cells, bars) if cells and len({len(row) for row in cells}) == 1 else None


def _single(text: str, depth: int) -> Reading:
    infinite = _INFINITY.fullmatch(text)
    if infinite:
        return Value(text, infinite=-1 if infinite[1] == "-" else 1)
    if _PLUS_MINUS.search(text):
        return _both(text)
    if text == "\\emptyset" or text == "\\{ \\}":
        return Group("{}", ())
    terms = _RATIO.split(text)
    if len(terms) > 1 and all(map(_TERM.fullmatch, terms)):
        return _group(":", terms, depth)
    return value(text)


def _both(text: str) -> Reading:
    r"""`1 \pm 2` is 3 and -1; several signs go together."""
    upper = _PLUS_MINUS.sub(lambda sign: "+" if sign[1] == "pm" else "-", text)
    lower = _PLUS_MINUS.sub(lambda sign: "-" if sign[1] == "pm" else "+", text)
    return Group("", (value(plain(upper).lstrip("+ ")), value(plain(lower).lstrip("+ "))))
