"""Text to token ids and back, from tokenizer.json alone, without torch. `check_tokenizer` refuses a policy's file that
could multiply a text or search it for too long."""

import base64
import binascii
import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from shoal.errors import ModelError
from shoal.models.folder import eos_token_ids

if TYPE_CHECKING:
    pass


class TextTokenizer:
    """`decode` removes one final end-of-sequence token only: a completion full of special tokens must not be right."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        if "tokenizer.json" not in files:
            raise ModelError("the model has no tokenizer.json")
        check_tokenizer(files["tokenizer.json"])
        from tokenizers import Tokenizer  # here, because who opens a run's folder need not have it

        with _in_words("be read"):
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._plain: Tokenizer | None = None
        self.eos_token_ids = eos_token_ids(files)

    @property
    def eos_token_id(self) -> int:
        """The first one: what a text is ended with by those who have no chat template to ask."""
        return self.eos_token_ids[0]

    @property
    def vocabulary_size(self) -> int:
        size: int = self._tokenizer.get_vocab_size()
        return size

    @property
    def unknown_token_id(self) -> int | None:
        name = getattr(self._tokenizer.model, "unk_token", None)
        return None if name is None else self._tokenizer.token_to_id(name)

    def encode(self, text: str) -> tuple[int, ...]:
        with _in_words("encode a text"):
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Special tokens in the text are spelt out."""
        if self._plain is None:
            self._plain = type(self._tokenizer).from_str(self._tokenizer.to_str())
            self._plain.encode_special_tokens = True
        with _in_words("encode a text"):
            return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        ids = [int(token) for token in token_ids]
        if ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        with _in_words("decode tokens"):
            text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def decode_many(self, completions: Sequence[list[int]]) -> list[str]:
        """The texts of many completions, which must not end with an end-of-sequence token."""
        with _in_words("decode tokens"):
            texts: list[str] = self._tokenizer.decode_batch(list(completions), skip_special_tokens=False)
        return texts


@contextmanager
def _in_words(action: str) -> Iterator[None]:
    """The library raises plain `Exception` for bad input, and its own `BaseException` for internal errors."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or isinstance(error, ValueError) or type(error).__name__ == "PanicException":
            raise ModelError(f"the model's tokenizer.json cannot {action}: {str(error)[:200]}") from error
        raise


MAX_TOKEN = 1024  # characters; the longest tokens of well-known tokenizers are a few hundred spaces
MAX_STEPS, MAX_PATTERN = 64, 2000
MAX_CHARACTER = 64  # bytes of one normalized character; Unicode's longest has 33
ONCE_OR_TWICE = frozenset({"Prepend", "Precompiled", "BPEDecoder", "CTC", "WordPiece", "Metaspace"})
"""Steps that make a text longer: twice at most."""
REFERENCE = re.compile(r"\\[1-9]|\\[kg][<'{]")
# For patterns in which all characters and classes are written as "a":
UNUSUAL = re.compile(r"\(\?|[\[\]]|\)[+*{]|[+*?}][*{]|\}\+")  # a repeated group, a repeated repetition, other syntax
OPTIONAL_END = re.compile(r"(?:\([^()]*\)\?|[^()][?*])+$")
LAST_REPETITION = re.compile(r"(?:\+|\{[^{}]*\})[?+]?$")
LONG_REPETITION = re.compile(r"[+*]|\{(?!\d?,?\d\})")
MAX_REPETITIONS, MAX_BRANCHES = 6, 8  # in one alternative


def check_tokenizer(data: bytes) -> None:
    """Raise `ModelError` for a tokenizer.json that could take too much memory or time."""
    try:
        described = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the model's tokenizer.json cannot be read: {error}") from error
    if not isinstance(described, dict):
        raise ModelError("the model's tokenizer.json cannot be read: it is no object")
    problem = next(_problems(described), None)
    if problem is not None:
        raise ModelError(f"the model's tokenizer.json is refused: {problem}")


def _problems(described: dict[str, Any]) -> Iterator[str]:
    if any(len(token) > MAX_TOKEN for token in _tokens(described)):
        yield f"it has a token of more than {MAX_TOKEN} characters"
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        steps = list(islice(_steps(described.get(part)), MAX_STEPS + 1))
        counts = Counter(str(step.get("type")) for step in steps)
        if len(steps) > MAX_STEPS or any(counts[kind] > 2 for kind in ONCE_OR_TWICE):
            yield f"its {part} has too many steps"
        for step in steps:
            pattern, kind = step.get("pattern"), step.get("type")
            given = next(iter(pattern.values()), None) if isinstance(pattern, dict) else pattern
            is_regex = isinstance(pattern, dict) and "Regex" in pattern
            if is_regex and part == "decoder":  # the decoder gets whole completions
                yield "the decoder has a pattern, and known ones have none"
            if is_regex and (not isinstance(given, str) or len(given) > MAX_PATTERN or _is_slow(given)):
                yield (
                    f"the {part} has a pattern that can take forever: a repeated group, a reference back, or several "
                    "repetitions before something that may not be there"
                )
            longest = 1 if is_regex else len(str(given or ""))
            if kind == "Replace" and (not given or len(str(step.get("content", ""))) > longest):
                yield f"the {part} replaces something by more than it was"
            if kind == "Prepend" and len(str(step.get("prepend", ""))) > MAX_CHARACTER:
                yield f"the {part} adds more than {MAX_CHARACTER} characters"
            if kind == "Precompiled" and _longest_mapped(step.get("precompiled_charsmap")) > MAX_CHARACTER:
                yield f"the {part} makes more than {MAX_CHARACTER} bytes of one character"


def _is_slow(pattern: str) -> bool:
    """Whether a failed search may take longer than the square of the text's length. Patterns of known tokenizers are
    allowed: in each alternative one long repetition with backtracking, then a last one."""
    plain = re.sub(r"\\[pP]\{[^{}]*\}|\\.", "a", pattern, flags=re.DOTALL)
    while (shorter := re.sub(r"\[[^\[\]]*\]", "a", plain)) != plain:
        plain = shorter
    plain = re.sub(r"\(\?i\)", "", plain)
    plain = re.sub(r"\((\?(i?:|[=!]|<[=!]))?", "(", plain)
    if REFERENCE.search(pattern) or UNUSUAL.search(plain):
        return True
    depth, alternatives = 0, [""]  # the parts between those | that are in no group
    for character in plain:
        depth += (character == "(") - (character == ")")
        splits = character == "|" and depth == 0
        alternatives[-1:] = [alternatives[-1], ""] if splits else [alternatives[-1] + character]
    return any(
        len(LONG_REPETITION.findall(LAST_REPETITION.sub("", OPTIONAL_END.sub("", each)))) > 1
        or len(re.findall(r"[+*?{]", each)) > MAX_REPETITIONS
        or each.count("|") > MAX_BRANCHES
        for each in alternatives
    )


def _longest_mapped(charsmap: Any) -> int:
    """The longest text in sentencepiece's map: four bytes of a table's length, the table, zero-terminated texts."""
    try:
        data = base64.b64decode(charsmap or "")
    except (TypeError, ValueError, binascii.Error):
        return MAX_CHARACTER + 1
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _steps(described: Any) -> Iterator[dict[str, Any]]:
    waiting = deque([described])
    while waiting:
        step = waiting.popleft()
        if isinstance(step, dict):
            yield step
            inner = (step.get(name) for name in ("normalizers", "pretokenizers", "decoders"))
            waiting.extend(each for steps in inner if isinstance(steps, list) for each in steps)


def _tokens(described: dict[str, Any]) -> Iterator[str]:
    """Each text of the file that is a token, or a part of one."""
    model, added = described.get("model"), described.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        yield str(token.get("content", "")) if isinstance(token, dict) else ""
    if isinstance(model, dict):
        yield from (value for value in model.values() if isinstance(value, str))
        vocabulary = model.get("vocab")
        for token in vocabulary if isinstance(vocabulary, dict | list) else ():
            yield token if isinstance(token, str) else str(token[0]) if isinstance(token, list) and token else ""
