"""Private words stay out of what people read. `LEFT` says how many each part still has; a part may only lose some."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

WORDS = {
    "dice": "the seed of a rollout; the uniforms drawn from it",
    "given tokens?": "tool tokens",
    "no samples?": "unscored",
    "(?:is|are|was|were|gave) no numbers?": "NaN or infinite; not a number",
    "(?-i:(?:is|are|was|were) none)": "none exists; is not one",
    "of late": "recently",
    "(?:go|goes|going|gone|went) on": "continues, resumes",
    "roads?": "route",
    "learnt": "learned; trained on",
    r"(?<!by\s)hand(?:s|ed|ing)? in": "submit",
    "crews?": "ranks; workers",
    "bites?": "lease size",
    "insist(?:s|ed|ing)?": "retry",
    "obey(?:s|ed|ing)?": "apply, follow",
    "doors?": "entry; limits",
    "courts?|storms?": "the thing itself",
    "(?:be|is|are|was|were) had": "is available; can be fetched",
    "all the same": "anyway; identical",
    "mend(?:s|ed|ing)?": "fix",
    "anew|afresh": "again",
    "whoever|whomever": "a node that, anyone who",
    "thereby|therein|thereof|wherein|whence|thence|lest|henceforth|hitherto": "so, there, from where",
    "(?-i:Nobody|Nor|Only (?:then|so)|(?:Were|Had) (?:it|they|the))": "the subject first; if",
    "(?-i:Of (?:what|all|those|these|both|such))": "the subject first",
}
"""A pattern and what to write in its place. Letters' case does not count, but in the groups that begin with `(?-i:`."""

NAMES = {
    "tells?|told|telling": "report, notify, set_…",
    "hands": "ranks, collective",
    "followers?": "rank",
    "deepen(?:s|ed)?|peel(?:s|ed)?": "what it does",
    "react(?:s|ed|ion)?": "action",
    "(?:held|kept) versions": "keep_versions",
}
"""The same for names in code: of functions, classes, variables, parameters, modules."""

TESTS = {"(?:and|but|nor|of|so|such|what|who|nobody|whoever|more)": "the input and the outcome"}
"""How no test's name begins."""

LEFT = {"tests": 72}
"""How many each part may still have: numbers only go down, and a part that has none is not listed."""


@cache
def any_of(*patterns: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(patterns)})\b", re.IGNORECASE)


def plain(text: str) -> str:
    """Names as words: `own_dice`, `own-dice`, `_dice` and `OwnDice` all have the word dice."""
    return re.sub(r"\b_+(?=\w)|(?<=\w)[_-](?=\w)|(?<=[a-z0-9])(?=[A-Z])", " ", text)


def names(source: str) -> Iterator[tuple[int, str]]:
    """Names that a module defines, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def found(text: str, words: dict[str, str] = WORDS) -> list[tuple[int, str]]:
    """Line and word of each hit; words may be parted by the end of a line."""
    flat = plain(text)
    hits = any_of(*(word.replace(" ", r"\s+") for word in words)).finditer(flat)
    return [(flat.count("\n", 0, hit.start()) + 1, " ".join(hit[0].split())) for hit in hits]


def hits_in(path: Path) -> list[str]:
    text, where = path.read_text(), path.relative_to(ROOT)
    if where.name == "CHANGELOG.md":
        text = re.sub("`[^`]*`", "", text)  # names that are gone
    hits = found(text)
    if where.parts[0] == "src":
        hits += [(line, name) for line, name in names(text) if any_of(*NAMES).search(plain(name))]
        hits += [(0, path.stem) for _ in found(path.stem, WORDS | NAMES)]
    return [f"{where}:{line}: {word}" for line, word in hits]


def hits_in_tests(path: Path) -> list[str]:
    """Of tests only their names are looked at: what a test reads may be anything."""
    tests = [(line, name[5:]) for line, name in names(path.read_text()) if name.startswith("test_")]
    odd = [each for each in tests if found(each[1]) or any_of(*TESTS).match(plain(each[1]))]
    return [f"{path.relative_to(ROOT)}:{line}: test_{name}" for line, name in odd]


def parts() -> dict[str, list[str]]:
    """Part → its hits. A package of src is a part; generated pages and dated records are in none."""
    hits: dict[str, list[str]] = {path.name: hits_in(path) for path in ROOT.glob("*.md")}
    pages = [path for path in sorted((ROOT / "docs").glob("*/*.md")) if path.parent.name != "reference"]
    hits["docs"] = [hit for path in pages for hit in hits_in(path)]
    hits["results"] = [hit for path in sorted((ROOT / "benchmarks/results").glob("*.md")) for hit in hits_in(path)]
    for folder in ("examples", "recipes", "scripts"):
        files = [path for path in (ROOT / folder).glob("*") if path.suffix in (".py", ".toml")]
        hits[folder] = [hit for path in files for hit in hits_in(path)]
    for path in sorted((ROOT / "src/shoal").rglob("*.py")):
        hits.setdefault(path.relative_to(ROOT / "src/shoal").parts[0].removesuffix(".py"), []).extend(hits_in(path))
    hits["tests"] = [hit for path in sorted((ROOT / "tests").rglob("test_*.py")) for hit in hits_in_tests(path)]
    return {part: lines for part, lines in hits.items() if lines}


def too_many(hits: dict[str, list[str]], left: dict[str, int]) -> list[str]:
    over = [part for part, lines in hits.items() if len(lines) > left.get(part, 0)]
    counts = [f"{part}: {len(hits[part])}, allowed {left.get(part, 0)}" for part in over]
    return counts + [line for part in over for line in hits[part]]


def test_private_words_become_fewer() -> None:
    """The tables above say what to write instead. A part that has lost some: lower its number."""
    assert too_many(parts(), LEFT) == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("seeds and dice", "dice"), ("own_dice = 1", "dice"), ("self._dice", "dice"),
        ("class OwnDice", "Dice"), ("--own-dice", "dice"),
        ("what was handed\nin", "handed in"), ("It goes on.", "goes on"), ("Nobody is there", "Nobody"),
        ("a rollout is no sample", "no sample"), ("there are none", "are none"),
    ],
)  # fmt: skip
def test_private_word_is_found(text: str, word: str) -> None:
    assert [hit for _, hit in found(text)] == [word]


@pytest.mark.parametrize(
    "text", ["if x is None", "nobody", "indoors", "worked by hand in tests", "the number of samples"]
)
def test_plain_text_is_not_found(text: str) -> None:
    assert found(text) == []


def test_too_many_names_the_part_and_the_lines() -> None:
    assert too_many({"hub": ["a:1: dice", "a:2: dice"]}, {"hub": 1}) == ["hub: 2, allowed 1", "a:1: dice", "a:2: dice"]
    assert too_many({"hub": ["a:1: dice"]}, {"hub": 1}) == []


def test_names_of_a_module_are_found() -> None:
    source = "class Crew:\n    def tell(self, told):\n        self.hands = road = 1\n"
    assert Counter(name for _, name in names(source)) == Counter(["Crew", "tell", "self", "told", "hands", "road"])
