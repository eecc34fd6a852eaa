"""Adapters: the function is unchanged at first, only they learn, only they travel, and merging them changes nothing."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import ModelError
from shoal.models import model_folder, read_files
from shoal.models.lora import ADAPTER_FILE, AdapterShape, adapter_shape, add_adapters, merged, without_adapters
from shoal.models.state import apply_state, policy_state
from shoal.models.tiny import build_tiny

SHAPE = AdapterShape(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
IDS = torch.arange(10)[None]


def adapted(seed: int = 0, shape: AdapterShape = SHAPE):
    model = build_tiny(seed)
    add_adapters(model, shape)
    return model


def trained(model, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("lora_a", "lora_b")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def files_with(shape: AdapterShape) -> dict[str, bytes]:
    return {**read_files(model_folder("tiny")), ADAPTER_FILE: shape.as_file()}


def test_at_first_the_model_computes_what_it_did_and_only_adapters_get_a_gradient():
    model = adapted()
    assert torch.equal(model(IDS).logits, build_tiny(0)(IDS).logits)
    model(IDS).logits.sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name in policy_state(model) if name.endswith(("lora_a", "lora_b"))}
    with pytest.raises(ModelError, match="already"):
        add_adapters(model, SHAPE)


def test_every_start_begins_with_the_same_adapters():
    first, second = policy_state(adapted(0)), policy_state(adapted(1))
    downs = [name for name in first if name.endswith("lora_a")]
    assert len(downs) == 2 * 3
    assert all(torch.equal(first[name], second[name]) for name in downs)
    assert len({float(first[name].sum()) for name in downs}) == len(downs)


def test_the_base_is_there_for_as_long_as_the_context_lasts():
    model = trained(adapted())
    expected = build_tiny(0)(IDS).logits
    with without_adapters(model):
        assert torch.equal(model(IDS).logits, expected)
    assert not torch.allclose(model(IDS).logits, expected)


def test_merged_is_an_ordinary_model_that_computes_the_same():
    source = trained(adapted())
    tensors, files = merged(policy_state(source), files_with(SHAPE))
    plain = build_tiny(5)
    assert ADAPTER_FILE not in files
    apply_state(plain, tensors)
    torch.testing.assert_close(plain(IDS).logits, source(IDS).logits, atol=2e-5, rtol=1e-5)
    assert not torch.allclose(plain(IDS).logits, build_tiny(0)(IDS).logits)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"rank": "many", "alpha": 1, "targets": ["q_proj"]}',
     b'{"rank": 0, "alpha": 1, "targets": ["a"]}', b'{"rank": 4, "alpha": -1, "targets": ["a"]}',
     b'{"rank": 4, "alpha": 1, "targets": []}',
     b'{"rank": 99999999, "alpha": 1, "targets": ["q_proj"]}'],
)  # fmt: skip
def test_an_unusable_file_is_refused(data: bytes):
    with pytest.raises(ModelError, match=r"adapter\.json"):
        adapter_shape({ADAPTER_FILE: data})


@pytest.mark.parametrize("target", ["lm_head", "query", "embed_tokens"])
def test_a_layer_that_cannot_have_one_is_named_with_those_that_can(target: str):
    with pytest.raises(ModelError, match=rf"'{target}'.*q_proj"):
        add_adapters(build_tiny(0), AdapterShape(4, 8.0, (target,)))
