"""Where completions end: tokens of bytes, tokens of several characters, tokens whose text depends on the one before."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from kit.tiny import byte_tokenizer
from shoal.hub.settings import RunSettings
from shoal.models import TextTokenizer
from shoal.models.ending import EndRule, decoding
from shoal.protocol import SamplingParameters

WORDS = ("<unk>", "▁a", "▁the", "b", "</ans", "wer>", "wer>!▁c", "▁", "<0xC3>", "<0xA9>", "<0xFF>", "é", "\n")


def sentences() -> Tokenizer:
    """As sentencepiece has them: the first token loses its space, and bytes make characters together."""
    made = Tokenizer(models.BPE({word: n for n, word in enumerate(WORDS)}, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made


def ending(tokenizer: Tokenizer, *stop: str, eos: int = 500) -> EndRule:
    config = json.dumps({"eos_token_id": eos}).encode()
    sampling = SamplingParameters(temperature=1, max_new_tokens=9, eos_token_ids=(eos,), stop=stop)
    return EndRule.of(
        sampling, decoding(sampling, {"config.json": config, "tokenizer.json": tokenizer.to_str().encode()})
    )


@pytest.mark.parametrize(("words", "stop", "end"), [
    ("▁a </ans wer> b", "</answer>", 3),
    ("▁a </ans wer>!▁c b", "</answer>", 3),  # in the middle of a token, which stays whole
    ("▁a </ans b wer>", "</answer>", None),
    ("▁the ▁the", " the", 2),  # the first has no space in the text
    ("b ▁ ▁the", "b  t", 3),
    ("b <0xC3> <0xA9> b", "é", 3),  # a character of two tokens
    ("b <0xC3> b <0xA9>", "é", None),
    ("b <0xFF> </ans wer>", "</answer>", 4),  # bytes of no character are awaited in vain
    ("b <0xC3> </ans wer>", "</answer>", 4),
    ("▁a \n", "\n", 2),
])  # fmt: skip
def test_the_first_end_by_hand(words: str, stop: str, end: int | None) -> None:
    ids = [WORDS.index(word) if word in WORDS else 0 for word in words.split(" ")]
    assert ending(sentences(), stop).first(ids) == end
    assert ending(sentences(), "never", stop).first(ids) == end


BYTES = TextTokenizer({"config.json": b'{"eos_token_id": 0}', "tokenizer.json": byte_tokenizer().to_str().encode()})


@given(st.text("aé漢🙂", min_size=1, max_size=12), st.text("aé漢🙂", min_size=1, max_size=3), st.binary(max_size=3))
def test_the_end_is_the_first_place_where_the_whole_text_has_the_string(text: str, stop: str, noise: bytes) -> None:
    """Of any bytes: also such that are no text."""
    ids = list(BYTES.encode_plain(text)) + [BYTES.encode_plain(chr(0x41 + each % 4))[0] for each in noise]
    whole = [n for n in range(1, len(ids) + 1) if stop in BYTES.decode_many([ids[:n]])[0]]
    found = ending(byte_tokenizer(), stop)
    assert found.first(ids) == (whole[0] if whole else None)
    assert {found.first(ids[:n]) for n in range(len(ids) + 1)} <= {None, found.first(ids)}, "however many are read"


@pytest.mark.parametrize(("stop", "said"), [
    (["x"] * 9, "9 stop strings are given; at most 8"), ([""], "has 1 to 64 characters"),
    (["x" * 65], r"has 1 to 64 characters, .* has 65"), (["\ufffd"], r"none of them U\+FFFD"),
])  # fmt: skip
def test_bad_stop_strings_are_refused_with_what_is_wrong(stop: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunSettings(stop=stop)
    with pytest.raises(ValueError, match="no tokenizer to find them"):
        EndRule((1,), ("x",))
