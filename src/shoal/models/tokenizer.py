"""Text to token ids and back, from tokenizer.json alone: the hub and the validator need no more, and no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tokenizers import Tokenizer

from shoal.errors import ModelError
from shoal.models.folder import eos_token_id
from shoal.models.tokenizer_rules import check_tokenizer


class TextTokenizer:
    """A tokenizer that adds nothing and hides nothing.

    `decode` takes away one end-of-sequence token at the very end and no other special token: a completion that
    scatters special tokens over a right answer is not that answer.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        if "tokenizer.json" not in files:
            raise ModelError("the model has no tokenizer.json")
        check_tokenizer(files["tokenizer.json"])
        with _in_words("be read"):
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._plain: Tokenizer | None = None
        self.eos_token_id = eos_token_id(files)

    @property
    def vocabulary_size(self) -> int:
        size: int = self._tokenizer.get_vocab_size()
        return size

    @property
    def unknown_token_id(self) -> int | None:
        """What a character that the tokenizer does not know becomes; None if there is no such thing."""
        name = getattr(self._tokenizer.model, "unk_token", None)
        return None if name is None else self._tokenizer.token_to_id(name)

    def encode(self, text: str) -> tuple[int, ...]:
        with _in_words("encode a text"):
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Text as nothing but text: what looks like a special token is spelt out."""
        if self._plain is None:
            self._plain = Tokenizer.from_str(self._tokenizer.to_str())
            self._plain.encode_special_tokens = True
        with _in_words("encode a text"):
            return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        ids = [int(token) for token in token_ids]
        if ids and ids[-1] == self.eos_token_id:
            ids.pop()
        with _in_words("decode tokens"):
            text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def decode_many(self, completions: Sequence[list[int]]) -> list[str]:
        """The texts of many completions at once, which must not have an end-of-sequence token at their end."""
        with _in_words("decode tokens"):
            texts: list[str] = self._tokenizer.decode_batch(list(completions), skip_special_tokens=False)
        return texts


@contextmanager
def _in_words(action: str) -> Iterator[None]:
    """The library raises plain `Exception` for what it refuses, and a `BaseException` of its own where it breaks."""
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or isinstance(error, ValueError) or type(error).__name__ == "PanicException":
            raise ModelError(f"the model's tokenizer.json cannot {action}: {str(error)[:200]}") from error
        raise
