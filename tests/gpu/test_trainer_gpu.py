"""Training on a GPU: packed attention, the head's kernels, compiled layers and float32 masters keep their promises."""

import time

import numpy as np
import pytest
import torch

from kit.tiny import build_tiny
from shoal.models.logprobs import Head, hidden_states, token_logprobs, usable
from shoal.models.lora import ADAPTER_FILE, AdapterShape, add_adapters, merged
from shoal.models.packed import Packed, compile_layers, packed_states, supports_packing
from shoal.trainer.checkpoint import MODEL, MOMENTS, TRAINING, Copies
from shoal.trainer.learner import new_learner
from shoal.trainer.samples import Prepared, Sample
from shoal.trainer.settings import LoraSettings, MemorySettings, TrainerSettings
from shoal.trainer.step import StepWork, train_samples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

LENGTHS = (5, 1, 120, 33, 200, 64, 7)
DTYPES = (torch.float32, torch.bfloat16)


def model_of(dtype: torch.dtype, **changes):
    model = build_tiny(1, num_key_value_heads=1, **changes).to("cuda")
    for weight in model.parameters():  # buffers stay as they are, as in training
        weight.data = weight.data.to(dtype)
    return model


def sequences(seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (length,), generator=generator).cuda() for length in lengths]


def gradients(model, states):
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1)).cuda()
    model.zero_grad()
    (states.float() * weights).sum().backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def apart(one, other) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_states_and_gradients_are_those_of_the_sequences_alone(dtype):
    """In bfloat16 both ways round; packed may not be further from the exact gradient than the sequences alone are."""
    exact, model, parts = model_of(torch.float32), model_of(dtype), sequences()
    exact.load_state_dict(model.state_dict())
    truth = torch.cat([hidden_states(exact, part[None])[0] for part in parts])
    alone = torch.cat([hidden_states(model, part[None])[0] for part in parts])
    together = packed_states(model, Packed.of(parts))
    floor = 1e-5 if dtype == torch.float32 else 0.0
    assert apart(together, truth) <= 1.3 * apart(alone, truth) + floor
    expected = gradients(exact, truth)
    assert apart(gradients(model, together), expected) <= 1.3 * apart(gradients(model, alone), expected) + floor


@pytest.mark.parametrize("dtype", DTYPES)
def test_changing_one_sequence_changes_no_other(dtype):
    model, parts = model_of(dtype), sequences()
    assert supports_packing(model)
    before = packed_states(model, Packed.of(parts)).split(LENGTHS)
    after = packed_states(model, Packed.of([*parts[:2], (parts[2] + 1) % 96, *parts[3:]])).split(LENGTHS)
    same = [bool(torch.equal(one, other)) for one, other in zip(before, after, strict=True)]
    assert same == [True, True, False, True, True, True, True]


class Rounded(torch.autograd.Function):
    """The same number; its gradient is rounded to `dtype`."""

    @staticmethod
    def forward(ctx, values, dtype):
        ctx.dtype = dtype
        return values.clone()

    @staticmethod
    def backward(ctx, slopes):
        return slopes.to(ctx.dtype).to(slopes.dtype), None


def plain_head(hidden, weight, targets, scale, cap, dtype=torch.float64):
    """Log-probabilities and entropies in float64; `dtype` is what the gradient of every logit is rounded to."""
    logits = Rounded.apply(hidden @ weight.T, dtype) * scale
    everything = torch.log_softmax((logits if cap is None else cap * torch.tanh(logits / cap)) / 0.7, dim=-1)
    return everything.gather(1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 2), (300, 96), (700, 50_001)])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.125, None), (1.0, 10.0)])
def test_the_head_has_the_plain_formulas_values_and_gradients(dtype, tokens, vocabulary, entropy, scale, cap):
    """Gradients round twice: per logit, and in the result. Each rounding to bfloat16 may be off by 2^-8, and with one
    token and two logits nothing averages out. So the limit is the error of float64 with just these two roundings."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=generator).to("cuda", dtype) for shape in ((tokens, 64), (vocabulary, 64))
    )
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).cuda()
    slopes = torch.randn((2, tokens), generator=generator).cuda()
    assert usable(hidden)
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    exact, rounded = ([each.double().requires_grad_() for each in (hidden, weight)] for _ in range(2))
    found = token_logprobs(leaves[0], Head(leaves[1], None, scale, cap), targets, 0.7, 128 * vocabulary)
    expected = plain_head(*exact, targets, scale, cap)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=5e-5)
    for values in (found, expected, plain_head(*rounded, targets, scale, cap, dtype)):
        sum((value * slope).sum() for value, slope in zip(values[: 1 + entropy], slopes, strict=False)).backward()
    for mine, theirs, limit in zip(leaves, exact, rounded, strict=True):
        assert apart(mine.grad, theirs.grad) <= 1.1 * apart(limit.grad.to(dtype), theirs.grad) + 2e-5


@pytest.mark.parametrize("cap", [None, 30.0])
def test_the_heads_memory_is_that_of_a_tile(cap):
    tokens, vocabulary = 32_768, 151_936
    hidden = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_logprobs(hidden, Head(weight, None, 1.0, cap), targets).logprobs.sum().backward()
    whole = tokens * vocabulary * 2  # the smallest that such a table could be
    assert torch.cuda.max_memory_allocated() - before < 0.3 * whole


def test_compiled_layers_agree_with_eager_ones_and_other_lengths_compile_nothing_anew():
    eager, compiled, exact = model_of(torch.bfloat16), model_of(torch.bfloat16), model_of(torch.float32)
    exact.load_state_dict(eager.state_dict())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(compiled)
    graphs = []
    for seed in range(4):
        packed = Packed.of(sequences(seed, [length * (seed + 1) // 2 + 1 for length in LENGTHS]))
        truth = packed_states(exact, packed)
        band = apart(packed_states(eager, packed), truth)
        assert apart(packed_states(compiled, packed), truth) <= 1.3 * band
        expected = gradients(exact, truth)
        eager_gradient = gradients(eager, packed_states(eager, packed))
        found = gradients(compiled, packed_states(compiled, packed))
        assert apart(found, expected) <= 1.3 * apart(eager_gradient, expected)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1] == graphs[-1]


def prepared(count=12) -> Prepared:
    rng = np.random.default_rng(0)
    samples = []
    for size, value in zip(rng.integers(3, 60, count).tolist(), rng.normal(size=count).tolist(), strict=True):
        behaviour, drawn = np.full(size, -4.5, dtype=np.float32), np.ones(size, dtype=np.bool_)
        samples.append(Sample(rng.integers(0, 96, 5), rng.integers(0, 96, size), behaviour, value, drawn))
    return Prepared([samples[:4], samples[4:8], samples[8:]], without_signal=0, rollouts=count, truncated=0)


def test_adapters_in_bfloat16_are_merged_into_the_base_as_it_was():
    """Whose exact weights lie in the host's memory, while adapters are on the GPU."""
    shape = AdapterShape(2, 4.0, ("q_proj",))
    model = build_tiny(1).cuda()
    add_adapters(model, shape)
    memory = MemorySettings(precision="bfloat16")
    learner = new_learner(model, TrainerSettings(lora=LoraSettings(rank=2, targets=shape.targets), memory=memory))
    train_samples(learner, prepared(), StepWork(step=0, temperature=1.0))
    base, state = build_tiny(1).state_dict(), learner.state()
    assert all(torch.equal(state[name].cpu(), value) for name, value in base.items())
    taken = Copies().take(learner, with_training=True)
    taken.arrived()
    copied = taken.weights
    learner.load_state(copied)
    for tensors in (state, copied):
        plain, _ = merged(tensors, {ADAPTER_FILE: shape.as_file()})
        changed = {name for name, value in base.items() if not torch.equal(plain[name].cpu(), value)}
        assert changed == {name for name in base if "q_proj.weight" in name}


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_in_bfloat16_moves_the_masters_as_float32_does(recompute):
    memory = MemorySettings(precision="bfloat16", recompute=recompute)
    learners = [
        new_learner(build_tiny(1).cuda(), TrainerSettings(learning_rate=1e-3, minibatches=1, memory=each))
        for each in (MemorySettings(), memory)
    ]
    before = {name: tensor.clone() for name, tensor in learners[0].state().items()}
    rows = [train_samples(learner, prepared(), StepWork(step=0, temperature=1.0)) for learner in learners]
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=0.02, abs=1e-3)
    assert rows[1]["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=0.05)
    masters = learners[1].state()
    for name, weight in learners[1].model.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, masters[name].bfloat16())
        assert not torch.equal(masters[name], before[name])


def test_copies_leave_beside_training_and_the_next_update_does_not_change_them():
    """The host waits for nothing: with every copy queued behind half a second of work, they are begun in less."""
    settings = TrainerSettings(
        learning_rate=1e-2, publish_dtype="bfloat16", memory=MemorySettings(precision="bfloat16")
    )
    learner, copies = new_learner(build_tiny(1).cuda(), settings), Copies()
    for step in range(2):  # the memory is locked beside the first one
        train_samples(learner, prepared(), StepWork(step=step, temperature=1.0))
        copies.take(learner, with_training=True).arrived()
    before = {name: value.clone() for name, value in [*learner.state().items(), *learner.moments().items()]}
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    began = time.monotonic()
    copied = copies.take(learner, with_training=True)
    begun_s = time.monotonic() - began
    train_samples(learner, prepared(), StepWork(step=2, temperature=1.0))
    copied.arrived()
    assert begun_s < 0.2
    assert not all(torch.equal(value, before[name]) for name, value in learner.state().items())
    assert all(torch.equal(value, before[name].bfloat16().cpu()) for name, value in copied.weights.items())
    saved = {**copied.captured[MODEL], **copied.captured[TRAINING]}
    kept = {name.removeprefix(MOMENTS): value for name, value in saved.items() if "generator" not in name}
    assert kept.keys() == before.keys()
    assert all(torch.equal(value, before[name].cpu()) for name, value in kept.items())
