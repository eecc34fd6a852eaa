"""Where a completion, or a turn of a dialogue, ends: with the first end-of-sequence token, or where its text has a stop
string.

    token ─► is it an end? ─► the text that it adds ─► has the text a stop string now? ─► the end, or the next token

The text grows as tokens are read in order: what a token adds is what the text of it and the token before it has more
than that of the one before; a character whose bytes come in several tokens is awaited. So the end depends on the tokens
alone. Who stops there, who drew further and who judges find the same one. The token that completes a stop string is
kept as a whole, and so is the string: it is what the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import SamplingParameters

Decode = Callable[[tuple[int, ...]], str]
"""The text of tokens, by the policy's own tokenizer; special tokens are spelt out."""

INCOMPLETE = "\ufffd"  # what bytes are decoded to that are no whole character
MOST_OPEN = 8  # tokens that a character is awaited for; it has 4 bytes at most


class Characters:
    """Tokens that are characters: of a policy without a tokenizer (the scripted engine's)."""

    def encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode_many(self, completions: Sequence[list[int]]) -> list[str]:
        return ["".join(map(chr, ids)) for ids in completions]


Texts = TextTokenizer | Characters  # how a policy's tokens become text and back


def texts_of(files: Mapping[str, bytes]) -> Texts:
    """A policy's tokenizer, kept: versions share it, and it takes long to load."""
    return _texts(tuple(sorted(files.items())))


@lru_cache(maxsize=2)
def _texts(files: tuple[tuple[str, bytes], ...]) -> Texts:
    return TextTokenizer(dict(files)) if "tokenizer.json" in dict(files) else Characters()


def decoding(sampling: SamplingParameters, files: Mapping[str, bytes]) -> Decode | None:
    """What `GenerationRequest.decode` needs for this sampling: None without stop strings."""
    return partial(_text, texts_of(files)) if sampling.stop else None


@lru_cache(maxsize=1 << 15)
def _text(texts: Texts, ids: tuple[int, ...]) -> str:
    """Kept, because two tokens in a row have often been seen before."""
    return texts.decode_many([list(ids)])[0]


@dataclass(frozen=True)
class EndRule:
    """>>> ending = EndRule((1,), ("42",), lambda ids: "".join(map(str, ids)))
    >>> [ending.first(ids) for ids in ([5, 1, 7], [5, 4, 2, 7, 1], [5, 4, 7], [5, 428, 1])]
    [2, 3, None, 2]
    """

    eos_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    decode: Decode | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.stop and self.decode is None:
            raise ValueError("there are stop strings (run.stop), and no tokenizer to find them in the text with")

    @classmethod
    def of(cls, sampling: SamplingParameters, decode: Decode | None) -> EndRule:
        return cls(sampling.eos_token_ids, sampling.stop, decode)

    def first(self, token_ids: Sequence[int]) -> int | None:
        """How many tokens there are up to the first end, with its last token; None: there is no end."""
        reader = EndReader(self)
        return next((count for count, token in enumerate(token_ids, 1) if reader.take(token)), None)

    def said(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens without an end-of-sequence token at their end."""
        return token_ids[:-1] if token_ids and token_ids[-1] in self.eos_token_ids else token_ids


class EndReader:
    """Reads one completion, or one turn, token by token."""

    def __init__(self, ending: EndRule) -> None:
        self._ending, self._longest = ending, max(map(len, ending.stop), default=0)
        self._before, self._open, self._text = tuple[int, ...](), tuple[int, ...](), ""

    def take(self, token: int) -> bool:
        """Whether it ends with this token."""
        ending = self._ending
        if token in ending.eos_token_ids:
            return True
        if ending.decode is None:
            return False
        self._open = (*self._open, token)
        text = self._text + ending.decode(self._before + self._open)[len(ending.decode(self._before)) :]
        if text.endswith(INCOMPLETE) and len(self._open) < MOST_OPEN:
            return any(stop in text.rstrip(INCOMPLETE) for stop in ending.stop)
        self._before, self._open = self._open, ()
        self._text = text[max(0, len(text) - self._longest + 1) :]  # the beginning of a stop string, at most
        return any(stop in text for stop in ending.stop)
