"""Weights as they travel: named, tied ones once, strictly put in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ModelError
from shoal.models import TensorView, as_numpy, from_numpy
from shoal.models.state import TORCH_TYPES, apply_state, policy_state, policy_views, to_torch, to_view
from shoal.models.tiny import build_tiny


def test_state_is_every_weight_by_name():
    model = build_tiny(0)
    state = policy_state(model)
    assert sum(tensor.numel() for tensor in state.values()) == sum(p.numel() for p in model.parameters())
    assert "lm_head.weight" in state
    assert not any(tensor.requires_grad for tensor in state.values())


def test_tied_weights_travel_once_and_arrive_twice():
    source, target = build_tiny(0, tie_word_embeddings=True), build_tiny(1, tie_word_embeddings=True)
    views = policy_views(source)
    assert "lm_head.weight" not in views
    apply_state(target, views)
    head = target.get_output_embeddings().weight
    assert head.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert torch.equal(head, source.get_output_embeddings().weight)


def test_applied_weights_give_the_same_outputs_in_place():
    source, target = build_tiny(0), build_tiny(1)
    before = target.lm_head.weight.data_ptr()
    ids = torch.arange(10)[None]
    assert not torch.equal(source(ids).logits, target(ids).logits)
    apply_state(target, policy_views(source))
    assert torch.equal(source(ids).logits, target(ids).logits)
    assert target.lm_head.weight.data_ptr() == before


def test_views_are_a_snapshot():
    model = build_tiny(0)
    views = policy_views(model)
    before = bytes(views["lm_head.weight"].data)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert bytes(views["lm_head.weight"].data) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda views: views.pop("lm_head.weight"), r"missing \['lm_head.weight'\]"),
        (lambda views: views.update(extra=views["lm_head.weight"]), r"unknown \['extra'\]"),
        (
            lambda views: views.update({"model.norm.weight": from_numpy("x", np.zeros(63, np.float32))}),
            r"model.norm.weight is torch.float32\[63\], the model's is torch.float32\[64\]",
        ),
        (
            lambda views: views.update({"model.norm.weight": from_numpy("x", np.zeros(64, np.float64))}),
            r"model.norm.weight is torch.float64\[64\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(change, said):
    target = build_tiny(1)
    before = {name: tensor.clone() for name, tensor in policy_state(target).items()}
    views = policy_views(build_tiny(0))
    change(views)
    with pytest.raises(ModelError, match=said):
        apply_state(target, views)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy_state(target).items())


@given(st.sampled_from(sorted(TORCH_TYPES)), st.lists(st.integers(0, 4), max_size=3))
@settings(deadline=None)
def test_every_type_and_shape_survives(dtype, shape):
    tensor = (torch.rand(shape) * 3).to(TORCH_TYPES[dtype])
    view = to_view("w", tensor)
    assert (view.dtype, view.shape) == (dtype, tuple(shape))
    again = to_torch(view)
    assert again.dtype == tensor.dtype
    assert torch.equal(again, tensor)
    array = as_numpy(view)
    assert array.shape == tuple(shape)
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


def test_bytes_that_do_not_fill_the_shape_are_refused():
    with pytest.raises(ValueError, match="do not fill"):
        TensorView("w", "F32", (3,), memoryview(b"\0" * 8))
    with pytest.raises(ModelError, match="does not travel"):
        to_view("w", torch.zeros(2, dtype=torch.complex64))
