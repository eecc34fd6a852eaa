"""What a policy's tokenizer.json may say: nothing in it multiplies a text, or searches it for longer than it is worth.

tokenizer.json ─► tokens of bounded length ─► few, plain steps ─► replacements that do not grow ─► the library
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from shoal.errors import ModelError

MAX_TOKEN = 1024  # characters; the longest of well-known tokenizers are a few hundred spaces
MAX_STEPS = 64
MAX_PATTERN = 2000
MAX_CHARACTER = 64  # bytes that one character becomes when a text is normalized; Unicode's longest has 33
ONCE_OR_TWICE = frozenset({"Prepend", "Precompiled", "BPEDecoder", "CTC", "WordPiece", "Metaspace"})
"""Steps that make a text longer: two of them by a little, many without bound."""
REFERENCE = re.compile(r"\\[1-9]|\\[kg][<'{]")
# Of a pattern whose characters and classes are all written as "a":
UNUSUAL = re.compile(r"\(\?|[\[\]]|\)[+*{]|[+*?}][*{]|\}\+")  # a repeated group, a repeated repetition, other syntax
OPTIONAL_END = re.compile(r"(?:\([^()]*\)\?|[^()][?*])+$")
LAST_REPETITION = re.compile(r"(?:\+|\{[^{}]*\})[?+]?$")
LONG_REPETITION = re.compile(r"[+*]|\{(?!\d?,?\d\})")
MAX_REPETITIONS, MAX_BRANCHES = 6, 8  # in one alternative


def check_tokenizer(data: bytes) -> None:
    """Raise `ModelError` for a tokenizer.json that could take memory or time out of proportion."""
    try:
        described = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the model's tokenizer.json cannot be read: {error}") from error
    if not isinstance(described, dict):
        raise ModelError("the model's tokenizer.json cannot be read: it is no object")
    if any(len(token) > MAX_TOKEN for token in _tokens(described)):
        raise _refusal(f"it has a token of more than {MAX_TOKEN} characters")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        steps = list(_steps(described.get(part)))
        counts = Counter(str(step.get("type")) for step in steps)
        if len(steps) > MAX_STEPS or any(counts[kind] > 2 for kind in ONCE_OR_TWICE):
            raise _refusal(f"its {part} has too many steps")
        for step in steps:
            _check_step(part, step)


def _check_step(part: str, step: dict[str, Any]) -> None:
    pattern = step.get("pattern")
    given = next(iter(pattern.values()), None) if isinstance(pattern, dict) else pattern
    is_regex = isinstance(pattern, dict) and "Regex" in pattern
    if is_regex and part == "decoder":  # which sees a whole completion at once
        raise _refusal("the decoder has a pattern, and known ones have none")
    if is_regex and (not isinstance(given, str) or len(given) > MAX_PATTERN or _is_slow(given)):
        raise _refusal(
            f"the {part} has a pattern that can take forever: a repeated group, a reference back, or several "
            "repetitions before something that may not be there"
        )
    if step.get("type") == "Replace":
        longest = 1 if is_regex else len(str(given or ""))
        if not given or len(str(step.get("content", ""))) > longest:
            raise _refusal(f"the {part} replaces something by more than it was")
    if step.get("type") == "Prepend" and len(str(step.get("prepend", ""))) > MAX_CHARACTER:
        raise _refusal(f"the {part} adds more than {MAX_CHARACTER} characters")
    if step.get("type") == "Precompiled" and _longest_mapped(step.get("precompiled_charsmap")) > MAX_CHARACTER:
        raise _refusal(f"the {part} makes more than {MAX_CHARACTER} bytes of one character")


def _is_slow(pattern: str) -> bool:
    """Whether to find nothing with it may take longer than the square of the text's length. What known tokenizers have
    is allowed: in each alternative one long repetition that may have to be tried again, then a last one."""
    plain = re.sub(r"\\[pP]\{[^{}]*\}|\\.", "a", pattern, flags=re.DOTALL)
    while (shorter := re.sub(r"\[[^\[\]]*\]", "a", plain)) != plain:
        plain = shorter
    plain = re.sub(r"\(\?i\)", "", plain)
    plain = re.sub(r"\((\?(i?:|[=!]|<[=!]))?", "(", plain)
    if REFERENCE.search(pattern) or UNUSUAL.search(plain):
        return True
    return any(_is_slow_alternative(each) for each in _alternatives(plain))


def _is_slow_alternative(plain: str) -> bool:
    certain = LAST_REPETITION.sub("", OPTIONAL_END.sub("", plain))
    return (
        len(LONG_REPETITION.findall(certain)) > 1
        or len(re.findall(r"[+*?{]", plain)) > MAX_REPETITIONS
        or plain.count("|") > MAX_BRANCHES
    )


def _alternatives(plain: str) -> list[str]:
    """The parts between those | that are in no group."""
    depth, found = 0, [""]
    for character in plain:
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return found


def _longest_mapped(charsmap: Any) -> int:
    """Of sentencepiece's map: the length of a table of four bytes, the table, texts that each end with a zero."""
    try:
        data = base64.b64decode(charsmap or "")
    except (TypeError, ValueError, binascii.Error):
        return MAX_CHARACTER + 1
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _steps(described: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """All steps, those inside a sequence too; counted only as far as it takes to refuse them."""
    if not isinstance(described, dict):
        return
    yield described
    if depth > MAX_STEPS:
        raise _refusal("its steps are nested too deep")
    for name in ("normalizers", "pretokenizers", "decoders"):
        inner = described.get(name)
        for step in inner if isinstance(inner, list) else ():
            yield from _steps(step, depth + 1)


def _tokens(described: dict[str, Any]) -> Iterator[str]:
    """Every text of the file that becomes a token, or a part of one."""
    model, added = described.get("model"), described.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        yield str(token.get("content", "")) if isinstance(token, dict) else ""
    if isinstance(model, dict):
        yield from (value for value in model.values() if isinstance(value, str))
        vocabulary = model.get("vocab")
        for token in vocabulary if isinstance(vocabulary, dict | list) else ():
            yield token if isinstance(token, str) else str(token[0]) if isinstance(token, list) and token else ""


def _refusal(what: str) -> ModelError:
    return ModelError(f"the model's tokenizer.json is refused: {what}")
