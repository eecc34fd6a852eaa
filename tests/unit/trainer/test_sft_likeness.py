"""Likeness: an estimate near the true one, symmetric, the same everywhere; equal texts are found."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.trainer.demonstrations.likeness import HASHES, Lookalikes, Signature, signature_of
from shoal.trainer.demonstrations.likeness import plain_text as marked


def plain_text(texts: list[str]) -> bytes:
    return marked(("", text) for text in texts)


def likeness(one: Signature, other: Signature) -> float:
    return np.count_nonzero(one == other) / HASHES


def runs(plain: bytes) -> set[bytes]:
    padded = plain.ljust(8, b"\0")
    return {padded[start : start + 8] for start in range(len(padded) - 7)}


def words(count: int, seed: int) -> list[str]:
    dice = random.Random(seed)
    return ["".join(dice.choices("abcdefghij", k=6)) for _ in range(count)]


def test_the_estimate_is_near_the_true_share() -> None:
    base = words(300, 0)
    for changed in (1, 10, 40, 120):
        other = [f"other{number}" if number < changed else word for number, word in enumerate(base)]
        one, two = plain_text(base), plain_text(other)
        true = len(runs(one) & runs(two)) / len(runs(one) | runs(two))
        assert abs(likeness(signature_of(one), signature_of(two)) - true) < 0.13  # three standard errors


def test_signatures_do_not_change_between_versions() -> None:
    assert signature_of(b"the same everywhere")[:4].tolist() == PINNED


PINNED = [254_259_876, 193_770_999, 11_516_263, 28_262_786]


@given(st.text(max_size=40))
def test_a_text_is_like_itself_however_it_is_spaced_and_capitalised(text: str) -> None:
    spaced = f" {text}\n"
    assert plain_text([text]) == plain_text([spaced])
    assert likeness(signature_of(plain_text([text])), signature_of(plain_text([spaced]))) == 1.0


def test_the_first_of_a_family_stays_and_strangers_are_strangers() -> None:
    known = Lookalikes(0.7)
    family = words(100, 1)
    assert known.earlier(0, plain_text(family)) is None
    assert known.earlier(1, plain_text(words(100, 2))) is None
    assert known.earlier(2, plain_text([*family[:50], "new", *family[51:]])) == 0
    assert known.earlier(3, plain_text(words(100, 3))) is None


def test_long_texts_are_hashed_in_portions_and_come_out_the_same() -> None:
    long = bytes(np.random.default_rng(0).integers(97, 123, 20_000, dtype=np.uint8))
    whole, front = signature_of(long), signature_of(long[:10_004])
    assert (whole <= front).all()  # more runs can only lower a minimum
    assert abs(likeness(whole, front) - 0.5) < 0.13
