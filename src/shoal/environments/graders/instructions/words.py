"""Words, sentences and paragraphs of a text. Everything is linear in its length: a completion cannot make it slow."""

from __future__ import annotations

import re

WORD = re.compile(r"\w+")
SENTENCE_END = re.compile("[.!?\u3002\uff01\uff1f]+[\"'\u201d\u2019)\\]*_]*(?=\\s|$)|[\u3002\uff01\uff1f]")
ABBREVIATIONS = frozenset(
    {
        "mr", "mrs", "ms", "dr", "prof", "sr", "jr", "st", "vs", "etc", "e.g", "i.e", "eg", "ie", "inc", "ltd", "co",
        "corp", "fig", "no", "vol", "approx", "dept", "est", "u.s", "u.k", "a.m", "p.m",
    }
)  # fmt: skip
LINE_GAP = re.compile(r"\n[ \t]*\n")


def words(text: str) -> list[str]:
    return WORD.findall(text)


def sentences(text: str) -> int:
    """How many sentences: ends of sentences that follow no abbreviation, initial or bare list number; a rest counts.

    >>> sentences("Dr. Who came at 5 p.m. today. He left!"), sentences("no end")
    (2, 1)
    """
    count, seen, words_seen = 0, 0, False
    for end in SENTENCE_END.finditer(text):
        piece = text[seen : end.start()]  # since the last stop, whatever that was: every character is looked at once
        seen = end.end()
        goes_on = end[0] == "." and _goes_on(piece, begins=not words_seen)
        words_seen = words_seen or bool(WORD.search(piece))
        if words_seen and not goes_on:
            count, words_seen = count + 1, False
    return count + (words_seen or bool(WORD.search(text, seen)))


def _goes_on(piece: str, begins: bool) -> bool:
    """Whether the full stop after this belongs to its last word."""
    found = piece.split()
    if not found:
        return False
    last = found[-1].lstrip("(\"'").lower()
    is_list_number = begins and len(found) == 1 and last.isdecimal()
    return last in ABBREVIATIONS or (len(last) == 1 and last.isalpha()) or is_list_number


def paragraphs(text: str) -> list[str]:
    """What blank lines separate."""
    return [part.strip() for part in LINE_GAP.split(text) if part.strip()]


def brackets(text: str) -> int:
    """How many [placeholders] there are, each on one line."""
    count = 0
    for line in text.splitlines():
        position = line.find("[")
        while position >= 0 and (end := line.find("]", position)) >= 0:
            count += 1
            position = line.find("[", end)
    return count
