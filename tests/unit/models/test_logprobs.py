"""Log-probabilities and the gradient of the head."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kit.tiny import build_tiny
from shoal.models import logprobs
from shoal.models.logprobs import Head, hidden_states, token_logprobs


def test_a_bfloat16_model_has_a_float32_head():
    model = build_tiny(0).to(torch.bfloat16)
    ids = torch.arange(8)[None]
    states = hidden_states(model, ids)[0]
    assert states.dtype == torch.bfloat16
    found = token_logprobs(states, Head.of(model), ids[0])
    assert found.logprobs.dtype == torch.float32
    expected = plain(states.float(), model.lm_head.weight.float(), None, ids[0], 1.0)[0]
    torch.testing.assert_close(found.logprobs, expected)


TOKENS, HIDDEN, VOCABULARY = 23, 6, 40


def make(seed=0, bias=True):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, shift = (
        torch.randn(shape, generator=generator) for shape in ((TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    )
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    weights = torch.randn((2, TOKENS), generator=generator)
    return hidden, weight, shift if bias else None, targets, weights


def plain(hidden, weight, bias, targets, temperature, scale=1.0, cap=None):
    """With what Cohere and Granite (scale) and Gemma 2 (cap) do to their logits."""
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    everything = torch.log_softmax((logits if cap is None else cap * torch.tanh(logits / cap)) / temperature, dim=-1)
    return everything.gather(1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(dim=-1)


def objective(found, weights, parts):
    return sum(
        (value * weight).sum() for value, weight, part in zip(found, weights, "le", strict=True) if part in parts
    )


def gradients(call, tensors, weights, parts):
    leaves = [None if each is None else each.clone().requires_grad_() for each in tensors]
    objective(call(*leaves), weights, parts).backward()
    return [None if leaf is None else leaf.grad for leaf in leaves]


def test_tokens_that_can_never_be_drawn_change_nothing():
    """A logit of −∞, e.g. of a vocabulary that is filled up: 0 · −∞ must not become a number, nor no number."""
    hidden, weight, shift, targets, weights = make()
    wider = torch.cat([weight, torch.ones(3, HIDDEN)]), torch.cat([shift, torch.full((3,), -torch.inf)])
    few, more = token_logprobs(hidden, Head(weight, shift), targets), token_logprobs(hidden, Head(*wider), targets)
    torch.testing.assert_close(tuple(more), tuple(few))
    found, expected = (
        gradients(lambda h, w, b: token_logprobs(h, Head(w, b), targets), (hidden, *head), weights, "le")
        for head in (wider, (weight, shift))
    )
    torch.testing.assert_close([found[0], *(each[:VOCABULARY] for each in found[1:])], expected)
    assert not found[1][VOCABULARY:].any()
    assert not found[2][VOCABULARY:].any()


@pytest.mark.parametrize("parts", ["l", "e", "le"])
@pytest.mark.parametrize("rows", [TOKENS, 7, 1])
@pytest.mark.parametrize(
    ("bias", "temperature", "scale", "cap"),
    [(True, 0.6, 1.0, None), (False, 1.0, 1.0, None), (True, 0.6, 0.0625, None), (True, 0.6, 1.0, 3.0),
     (True, 0.6, 1.7, 2.0)],
)  # fmt: skip
def test_values_and_gradients_are_those_of_the_plain_formula_in_double(parts, rows, bias, temperature, scale, cap):
    *tensors, targets, weights = make(2, bias)
    assert cap is None or torch.nn.functional.linear(*tensors).abs().max() > 2 * cap, "the cap is reached"
    wide = [None if each is None else each.double() for each in tensors]

    def call(h, w, b):
        return token_logprobs(h, Head(w, b, scale, cap), targets, temperature, rows * VOCABULARY)

    def exact(h, w, b):
        return plain(h, w, b, targets, temperature, scale, cap)

    for mine, theirs in zip(call(*tensors), exact(*wide), strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=1e-5)
    expected = gradients(exact, wide, weights.double(), parts)
    for mine, theirs in zip(gradients(call, tensors, weights, parts), expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("rows", [TOKENS, 5])
def test_values_on_a_cpu_are_bit_for_bit_those_of_log_softmax(rows):
    """Engines and validators compare them across machines: no other way of adding up."""
    hidden, weight, shift, targets, _weights = make(1)
    found = token_logprobs(hidden, Head(weight, shift), targets, 0.7, rows * VOCABULARY)
    tiles = [plain(h, weight, shift, t, 0.7) for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)]
    for mine, theirs in zip(found, zip(*tiles, strict=True), strict=True):
        assert torch.equal(mine, torch.cat(theirs))


def test_sixteen_bit_weights_get_sixteen_bit_gradients_of_a_float32_sum():
    hidden, weight, _shift, targets, weights = make()
    narrow = [each.bfloat16() for each in (hidden, weight)]
    found = gradients(
        lambda h, w: token_logprobs(h, Head(w, None), targets, 1.0, 4 * VOCABULARY), narrow, weights, "le"
    )
    expected = gradients(
        lambda h, w: plain(h, w, None, targets, 1.0), [each.double() for each in narrow], weights.double(), "le"
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), theirs, rtol=2**-8, atol=1e-5)  # one rounding, not one per tile


def test_only_what_is_asked_for_is_computed(monkeypatch):
    asked, original = [], logprobs.slopes
    monkeypatch.setattr(logprobs, "slopes", lambda *given: asked.append(given[3].entropy_N is None) or original(*given))
    hidden, frozen, _shift, targets, _weights = make()
    leaf = hidden.clone().requires_grad_()
    token_logprobs(leaf, Head(frozen, None), targets).logprobs.sum().backward()
    assert asked == [True]
    assert (leaf.grad is not None, frozen.grad) == (True, None)
    token_logprobs(leaf, Head(frozen, None), targets).entropy.sum().backward()
    assert asked == [True, False]


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gave, forward and backward."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize("cap", [None, 5.0])
def test_the_whole_table_is_made_in_neither_direction(cap):
    tokens, vocabulary, rows = 400, 300, 10
    hidden, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    with Largest() as largest:
        found = token_logprobs(
            hidden, Head(weight, None, 1.0, cap), torch.zeros(tokens, dtype=torch.long), tile_elements=rows * vocabulary
        )
        (found.logprobs.sum() + found.entropy.sum()).backward()
    assert rows * vocabulary <= largest.elements <= rows * vocabulary  # 3,000 of 120,000
