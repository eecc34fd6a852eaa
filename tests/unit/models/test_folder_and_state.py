"""Folders, tokenizers, weights as they travel, and weights rounded to few bits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ModelError
from shoal.models import TextTokenizer, as_numpy, eos_token_id, from_numpy, model_folder, read_files
from shoal.models.quantize import INT8, Quantization, quantized
from shoal.models.state import TORCH_TYPES, apply_state, policy_state, policy_views, to_torch, to_view
from shoal.models.tiny import build_tiny

TINY = read_files(model_folder("tiny"))
TOKENIZER = TextTokenizer(TINY)
KNOWN = "\n 0123456789abcxyzABCXYZ+-*/=?!.,:;()[]{}<>|@#$%^&_'\""


@given(st.text(alphabet=KNOWN))
def test_text_survives_the_round_trip_one_token_per_character(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_decode_takes_away_one_final_end_and_hides_nothing_else():
    one, two, eos, pad = *TOKENIZER.encode("12"), TOKENIZER.eos_token_id, 0
    said = {(one, two, eos): "12", (one, eos, two, eos): "1<eos>2", (one, pad, two): "1<pad>2", (eos, eos): "<eos>"}
    for ids, text in {**said, (eos,): "", (): ""}.items():
        assert TOKENIZER.decode(ids) == text


def test_transformers_reads_the_same_tokenizer():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("tiny"), local_files_only=True)
    assert tuple(tokenizer("314= x").input_ids) == TOKENIZER.encode("314= x")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)
    assert tokenizer.decode(TOKENIZER.encode("3 1 . 4")) == "3 1 . 4"


def test_the_end_of_sequence_is_found_where_models_put_it():
    assert eos_token_id({"config.json": b'{"eos_token_id": 7}'}) == 7
    assert eos_token_id({"config.json": b"{}", "generation_config.json": b'{"eos_token_id": [5, 6]}'}) == 5
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        eos_token_id({"config.json": b'{"eos_token_id": null}'})


@pytest.mark.parametrize("damage", [b"{", b"[]", b"{}", b"\xff\xfe"])
def test_a_damaged_file_is_said_to_be_one(damage):
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        TextTokenizer({**TINY, "tokenizer.json": damage})
    with pytest.raises(ModelError, match=r"config\.json is no JSON|no end-of-sequence token"):
        eos_token_id({"config.json": damage})


def test_missing_folders_and_files(tmp_path):
    with pytest.raises(ModelError, match=r"no model folder .*nowhere.*built-in name \(tiny\)"):
        model_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        model_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert model_folder(tmp_path) == tmp_path
    for read in (lambda: read_files(tmp_path), lambda: TextTokenizer({"config.json": b"{}"})):
        with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
            read()


@pytest.mark.parametrize("tied", [False, True])
def test_applied_weights_give_the_same_outputs_in_place_and_tied_ones_travel_once(tied):
    source, target = (build_tiny(seed, tie_word_embeddings=tied) for seed in (0, 1))
    views, ids, head = policy_views(source), torch.arange(10)[None], target.get_output_embeddings().weight
    before = head.data_ptr()
    assert not torch.equal(source(ids).logits, target(ids).logits)
    apply_state(target, views)
    assert torch.equal(source(ids).logits, target(ids).logits)
    assert target.get_output_embeddings().weight.data_ptr() == before
    assert ("lm_head.weight" in views) != tied
    assert (before == target.get_input_embeddings().weight.data_ptr()) == tied


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda views: views.pop("lm_head.weight"), r"missing \['lm_head.weight'\]"),
        (lambda views: views.update(extra=views["lm_head.weight"]), r"unknown \['extra'\]"),
        (lambda views: views.update({"model.norm.weight": from_numpy("x", np.zeros(63, np.float32))}),
         r"model.norm.weight is torch.float32\[63\], the model's is torch.float32\[64\]"),
        (lambda views: views.update({"model.norm.weight": from_numpy("x", np.zeros(64, np.float64))}),
         r"model.norm.weight is torch.float64\[64\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_changes_nothing(change, said):
    target, views = build_tiny(1), policy_views(build_tiny(0))
    before = {name: tensor.clone() for name, tensor in policy_state(target).items()}
    change(views)
    with pytest.raises(ModelError, match=said):
        apply_state(target, views)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy_state(target).items())


@given(st.sampled_from(sorted(TORCH_TYPES)), st.lists(st.integers(0, 4), max_size=3))
def test_every_type_and_shape_survives(dtype, shape):
    tensor = (torch.rand(shape) * 3).to(TORCH_TYPES[dtype])
    view = to_view("w", tensor)
    again, array = to_torch(view), as_numpy(view)
    assert (view.dtype, view.shape, again.dtype, array.shape) == (dtype, tuple(shape), tensor.dtype, tuple(shape))
    assert torch.equal(again, tensor)
    assert not array.flags.writeable
    assert bytes(from_numpy("w", array, dtype).data) == bytes(view.data)


def test_a_transposed_tensor_travels_in_its_logical_order():
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert as_numpy(to_view("w", tensor)).tolist() == tensor.tolist()
    assert as_numpy(from_numpy("w", tensor.numpy())).tolist() == tensor.tolist()


def test_bfloat16_must_be_named_since_numpy_has_no_such_type():
    bits = np.array([0x3F80], dtype=np.uint16)
    assert to_torch(from_numpy("w", bits, "BF16")).item() == 1.0
    with pytest.raises(ValueError, match="does not travel"):
        from_numpy("w", bits)
    with pytest.raises(ValueError, match="does not travel as F32"):
        from_numpy("w", bits, "F32")
    with pytest.raises(ModelError, match="does not travel"):
        to_view("w", torch.zeros(2, dtype=torch.complex64))


MATRIX = np.random.default_rng(0).standard_normal((48, 96)).astype(np.float32)


@pytest.mark.parametrize(("how", "levels"), [(INT8, 255), (Quantization(bits=4), 15)])
def test_a_row_takes_no_more_values_than_the_bits_allow(how: Quantization, levels: int) -> None:
    rounded = how.round(MATRIX)
    assert max(len(np.unique(row)) for row in rounded) <= levels
    steps = np.abs(MATRIX).max(axis=1) / (levels // 2)
    assert (np.abs(rounded - MATRIX) <= steps[:, None] * 0.501).all()


def test_only_linear_layers_are_touched_and_types_stay() -> None:
    bits = (MATRIX.view(np.uint32) >> 16).astype(np.uint16)
    views = [
        from_numpy("model.embed_tokens.weight", MATRIX), from_numpy("model.norm.weight", MATRIX[0]),
        from_numpy("model.layers.0.mlp.up_proj.weight", MATRIX),
        from_numpy("model.layers.0.mlp.down_proj.weight", bits, "BF16"),
    ]  # fmt: skip
    after = quantized({view.name: view for view in views}, INT8)
    same = [np.array_equal(as_numpy(after[view.name]), as_numpy(view)) for view in views]
    assert same == [True, True, False, False]
    assert [(after[view.name].dtype, after[view.name].shape) for view in views] == [(v.dtype, v.shape) for v in views]
