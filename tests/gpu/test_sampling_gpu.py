"""Seeded sampling on CUDA: the same dice, the same tokens, the same intervals as on the CPU."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.sampling import kernels, sampler, uniforms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VECTORS = json.loads((Path(__file__).parents[1] / "data/uniform_stream.json").read_text())["vectors"]
VOCABULARIES = (96, 4096, 49_152, 151_936)


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Rows of all kinds: flat, peaked, and with tokens that cannot be."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * torch.linspace(0.1, 6, rows)[:, None]
    logits[0] = -torch.inf
    logits[0, vocabulary // 2] = 1.0
    logits[1, : vocabulary // 3] = -torch.inf
    return logits


def uniforms_on_gpu(seeds, start, count):
    low, high = (torch.tensor([[seed >> shift & 2**32 - 1] for seed in seeds], device="cuda") for shift in (0, 32))
    return sampler.uniforms_of(torch.arange(start, start + count, device="cuda")[None, :], low, high)


def test_the_dice_are_the_same_bits():
    for vector in VECTORS:
        found = uniforms_on_gpu([int(vector["seed"], 16)], vector["position"], 1)
        assert found.item() == vector["bits"] / 2**53
    seeds = [0, 1, 2**63, 2**64 - 1, *range(2**40, 2**40 + 60)]
    np.testing.assert_array_equal(
        uniforms_on_gpu(seeds, 3, 500).cpu().numpy(), [uniforms(seed, 3, 500) for seed in seeds]
    )


def test_the_kernels_are_in_use():
    assert kernels.usable(torch.zeros(1, 8, device="cuda"))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_statistics_agree_with_the_cpu(vocabulary, temperature):
    logits = logits_of(24, vocabulary)
    tokens = torch.randint(0, vocabulary, (24,), generator=torch.Generator().manual_seed(1))
    tokens[0], tokens[2], tokens[3] = vocabulary // 2, 0, vocabulary - 1
    ours = sampler.token_statistics(logits.cuda(), tokens.cuda(), temperature)
    theirs = sampler.token_statistics(logits, tokens, temperature)
    for name in ("low", "high"):
        error = (getattr(ours, name).cpu() - getattr(theirs, name)).abs().max()
        assert float(error) < 1e-12, (name, float(error))
    for name in ("logprobs", "entropy", "varentropy"):
        torch.testing.assert_close(getattr(ours, name).cpu(), getattr(theirs, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_tokens_are_those_of_the_cpu_and_lie_in_their_intervals(vocabulary):
    logits = logits_of(256, vocabulary)
    u = torch.from_numpy(np.concatenate([uniforms(seed, 0, 1) for seed in range(256)]))
    u[0], u[1], u[2] = 1 - 2**-53, 0.0, 1 - 2**-53
    ours, theirs = sampler.sample(logits.cuda(), u.cuda(), 0.8), sampler.sample(logits, u, 0.8)
    assert torch.equal(ours.tokens.cpu(), theirs.tokens)
    torch.testing.assert_close(ours.logprobs.cpu(), theirs.logprobs, rtol=1e-5, atol=1e-5)
    found = sampler.token_statistics(logits.cuda(), ours.tokens, 0.8)
    assert float((found.low.cpu() - u).clamp(min=0).max()) < 1e-12
    assert float((u - found.high.cpu()).clamp(min=0).max()) < 1e-12


def test_plain_torch_on_cuda_gives_the_same(monkeypatch):
    logits, tokens = logits_of(16, 5000).cuda(), torch.arange(16, device="cuda") * 300
    u = torch.linspace(0, 0.999, 16, device="cuda").double()
    kernel, drawn = sampler.token_statistics(logits, tokens, 0.7), sampler.sample(logits, u, 0.7)
    monkeypatch.setattr(kernels, "usable", lambda _: False)
    plain, again = sampler.token_statistics(logits, tokens, 0.7), sampler.sample(logits, u, 0.7)
    for ours, theirs in zip(kernel, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)
    assert torch.equal(drawn.tokens, again.tokens)


def test_a_row_does_not_depend_on_its_neighbours():
    logits, u = logits_of(64, 151_936).cuda(), torch.rand(64, device="cuda").double()
    whole = sampler.sample(logits, u, 1.0)
    alone = sampler.sample(logits[7:8], u[7:8], 1.0)
    assert torch.equal(whole.tokens[7:8], alone.tokens)
    assert torch.equal(whole.logprobs[7:8], alone.logprobs)


def test_nan_logits_give_no_interval_and_no_crash():
    logits = torch.zeros(2, 9000, device="cuda")
    logits[0, 3] = torch.nan
    found = sampler.token_statistics(logits, torch.tensor([1, 1], device="cuda"), 1.0)
    assert bool(found.high[0].isnan())
    assert not bool(found.high[1].isnan())
    assert int(sampler.sample(logits, torch.full((2,), 0.99, device="cuda"), 1.0).tokens[0]) < 9000
