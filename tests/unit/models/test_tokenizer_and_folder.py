"""Model folders and their tokenizers, without torch."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shoal.errors import ModelError
from shoal.models import TextTokenizer, eos_token_id, model_folder, read_files

TINY = read_files(model_folder("tiny"))
TOKENIZER = TextTokenizer(TINY)
KNOWN = "\n 0123456789abcxyzABCXYZ+-*/=?!.,:;()[]{}<>|@#$%^&_'\""


@given(st.text(alphabet=KNOWN))
@settings(deadline=None)
def test_text_survives_the_round_trip_one_token_per_character(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_the_vocabulary_is_small_and_has_an_end():
    assert TOKENIZER.vocabulary_size == 96
    assert TOKENIZER.eos_token_id == 1
    assert TOKENIZER.encode("ü") == (2,)


def test_decode_takes_away_one_final_end_and_hides_nothing_else():
    one, two, eos, pad = *TOKENIZER.encode("12"), TOKENIZER.eos_token_id, 0
    assert TOKENIZER.decode([one, two, eos]) == "12"
    assert TOKENIZER.decode([one, eos, two, eos]) == "1<eos>2"
    assert TOKENIZER.decode([one, pad, two]) == "1<pad>2"
    assert TOKENIZER.decode([eos, eos]) == "<eos>"
    assert TOKENIZER.decode([eos]) == TOKENIZER.decode([]) == ""


def test_it_is_an_ordinary_tokenizer_file():
    plain = Tokenizer.from_file(str(model_folder("tiny") / "tokenizer.json"))
    assert tuple(plain.encode("314=").ids) == TOKENIZER.encode("314=")


def test_transformers_reads_the_same_tokenizer():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("tiny"), local_files_only=True)
    assert tuple(tokenizer("314= x").input_ids) == TOKENIZER.encode("314= x")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)
    assert tokenizer.decode(TOKENIZER.encode("3 1 . 4")) == "3 1 . 4"


def test_only_what_describes_the_model_travels():
    assert set(TINY) == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def test_the_end_of_sequence_is_found_where_models_put_it():
    assert eos_token_id({"config.json": b'{"eos_token_id": 7}'}) == 7
    assert eos_token_id({"config.json": b"{}", "generation_config.json": b'{"eos_token_id": [5, 6]}'}) == 5
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        eos_token_id({"config.json": b'{"eos_token_id": null}'})


@pytest.mark.parametrize("config", [b"{", b"[]", b"\xff"])
def test_a_damaged_config_is_said_to_be_one(config):
    with pytest.raises(ModelError, match=r"config\.json is no JSON"):
        eos_token_id({"config.json": config})


@pytest.mark.parametrize("damage", [b"{", b"{}", b"\xff\xfe"])
def test_a_damaged_tokenizer_is_said_to_be_one(damage):
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        TextTokenizer({**TINY, "tokenizer.json": damage})


def test_missing_folders_and_files(tmp_path):
    with pytest.raises(ModelError, match=r"no model folder .*nowhere.*built-in name \(tiny\)"):
        model_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        model_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert model_folder(tmp_path) == tmp_path
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        read_files(tmp_path)
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        TextTokenizer({"config.json": b"{}"})
