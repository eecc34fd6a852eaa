"""Log-probabilities: equal to the plain computation, whole or in tiles, forward and backward."""

from __future__ import annotations

import pytest
import torch

from shoal.models.logprobs import Head, hidden_states, token_logprobs
from shoal.models.tiny import build_tiny


@pytest.fixture(scope="module")
def model():
    return build_tiny(3)


def plain(logits, targets, temperature):
    everything = torch.log_softmax(logits.float() / temperature, dim=-1)
    return everything.gather(1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tile_elements", [2**24, 96 * 7, 1])
def test_logprobs_and_entropy_equal_the_plain_computation(model, temperature, tile_elements):
    ids = torch.randint(0, 96, (3, 12), generator=torch.Generator().manual_seed(0))
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    states = hidden_states(model, ids)[:, :-1].flatten(0, 1)
    found = token_logprobs(states, Head.of(model), ids[:, 1:].flatten(), temperature, tile_elements)
    expected = plain(logits, ids[:, 1:].flatten(), temperature)
    torch.testing.assert_close(found.logprobs, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy, expected[1], rtol=1e-5, atol=1e-5)


def test_tiles_carry_the_same_gradient(model):
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    gradients = []
    for tile_elements in (2**24, 96 * 3):
        model.zero_grad()
        states = hidden_states(model, ids)[:, :-1].flatten(0, 1)
        found = token_logprobs(states, Head.of(model), ids[:, 1:].flatten(), 0.7, tile_elements)
        (found.logprobs.sum() + 0.1 * found.entropy.sum()).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert any(gradient.abs().max() > 0 for gradient in gradients[0])
    for whole, tiled in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, tiled, rtol=1e-4, atol=1e-5)


def test_the_whole_table_is_never_made():
    widest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal widest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                widest = max(widest, result.numel())
            return result

    head = Head(torch.randn(500, 8), None)
    with Watch():
        token_logprobs(torch.randn(100, 8), head, torch.zeros(100, dtype=torch.long), tile_elements=500 * 4)
    assert 0 < widest <= 4000  # the head's own 500 × 8, not 100 × 500


def test_a_bfloat16_model_has_a_float32_head():
    model = build_tiny(0).to(torch.bfloat16)
    ids = torch.arange(8)[None]
    states = hidden_states(model, ids)[0]
    assert states.dtype == torch.bfloat16
    found = token_logprobs(states, Head.of(model), ids[0])
    assert found.logprobs.dtype == torch.float32
    expected = plain(states.float() @ model.lm_head.weight.float().T, ids[0], 1.0)[0]
    torch.testing.assert_close(found.logprobs, expected)
