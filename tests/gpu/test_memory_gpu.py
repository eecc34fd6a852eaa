"""A GPU that is too small: batches are halved, groups split, and the cache is given back; what fits is chosen by free
memory. The memory of this process is capped, so that it runs out for real."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from shoal.engines import GenerationRequest, PrefillRequest, build, memory
from shoal.engines.decoder import POOL_SHARE
from shoal.engines.memory import free_bytes, is_out_of_memory, keep_to_share, release_memory
from shoal.engines.torch import TorchEngine
from shoal.errors import ResourceError
from shoal.models.load import load_model
from shoal.models.state import policy_views
from shoal.protocol import PolicyRef, ProofParameters, SamplingParameters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

REF = PolicyRef(incarnation=0, version=0, digest="ab" * 32)
PROOF = ProofParameters(topk=64, rows=16)
LENGTH = 192  # nothing ends early: the cache grows to the last token
SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=LENGTH, eos_token_ids=(500,))
MIB = 2**20
TOKEN_BYTES = 3072  # of the tiny model's cache in float32, with its room to grow


@contextmanager
def only(size_bytes: int) -> Iterator[None]:
    """This process may allocate so much beyond what it has; the allocator refuses the rest."""
    release_memory()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + size_bytes) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        release_memory()


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", "float32")


def engine(tiny, dtype: str = "float32") -> TorchEngine:
    made = build("torch", tiny.files, "cuda", dtype)
    made.load_policy(REF, policy_views(tiny.model))
    return made


def requests(tiny, groups: int, seeds: int) -> list[GenerationRequest]:
    prompt = tiny.tokenizer.encode("31415=")
    return [GenerationRequest(prompt, tuple(range(seeds * i, seeds * (i + 1))), SAMPLING) for i in range(groups)]


def fill(held: list[torch.Tensor]) -> None:
    """Take what is reserved and not in use, too, until nothing is left."""
    while True:
        held.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))


def agreement(one, two) -> float:
    """The share of equal tokens: in float32 rounding changes one in some hundred thousand, and what follows it."""
    pairs = [
        (a.token_ids == b.token_ids).mean() for g, h in zip(one, two, strict=True) for a, b in zip(g, h, strict=True)
    ]
    return float(np.mean(pairs))


def test_completions_that_do_not_fit_together_are_drawn_in_parts_and_are_the_same(tiny, caplog) -> None:
    """One group of 2,000 rows of 198 tokens would take 1.2 GB; 400 MB are there."""
    asked = requests(tiny, 1, 2000)
    expected = engine(tiny).generate(asked, PROOF)
    worker = engine(tiny)
    with only(400 * MIB):
        found = worker.generate(asked, PROOF)
        failures = sum("memory did not suffice" in record.message for record in caplog.records)
        assert agreement(found, expected) > 0.99
        worker.generate(asked, PROOF)
        again = sum("memory did not suffice" in record.message for record in caplog.records)
        assert again == failures, "what does not fit is remembered"
    assert all(len(c.proofs) == len(d.proofs) for c, d in zip(found[0], expected[0], strict=True))


def test_memory_is_given_back_after_it_ran_out(tiny) -> None:
    engine(tiny).generate(requests(tiny, 1, 4), PROOF)  # what libraries allocate once is there now
    gc.collect()
    release_memory()
    before = torch.cuda.memory_allocated()
    worker = engine(tiny)
    with only(200 * MIB):
        worker.generate(requests(tiny, 1, 1000), PROOF)
        assert torch.cuda.memory_allocated() <= before + 200 * MIB
    del worker
    gc.collect()
    release_memory()
    assert torch.cuda.memory_allocated() <= before + 8 * MIB


def test_a_prefill_that_does_not_fit_is_halved(tiny, caplog) -> None:
    validator = engine(tiny)
    random = np.random.default_rng(0)
    prompt = tiny.tokenizer.encode("31415=")
    asked = [PrefillRequest(prompt, random.integers(5, 90, LENGTH).astype(np.int32), 1.0) for _ in range(300)]
    expected = validator.prefill(asked, PROOF)
    with only(60 * MIB):
        found = validator.prefill(asked, PROOF)
    assert any("memory did not suffice for a prefill" in record.message for record in caplog.records)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-3)


def test_one_completion_that_does_not_fit_is_said_so_and_the_engine_lives(tiny) -> None:
    worker = engine(tiny)
    worker.generate(requests(tiny, 1, 4))  # what libraries allocate once is there now
    held: list[torch.Tensor] = []
    with only(0):
        with pytest.raises(torch.OutOfMemoryError) as refused:
            fill(held)
        assert is_out_of_memory(refused.value)
        long = GenerationRequest(tiny.tokenizer.encode("31415=") * 1000, (1, 2, 3, 4), SAMPLING)
        with pytest.raises(ResourceError, match=f"one completion of up to {LENGTH} tokens, after a prompt of"):
            worker.generate([long])
        held.clear()
    assert len(worker.generate(requests(tiny, 1, 4))[0]) == 4


def test_how_many_rows_fit_follows_from_what_is_free(tiny) -> None:
    worker = engine(tiny)
    worker.generate(requests(tiny, 1, 4))
    usable = 0.8 * free_bytes("cuda")
    expected = min(2048, int(POOL_SHARE * usable / (TOKEN_BYTES / 2) / 50_000))  # pages have no room to grow
    assert abs(worker.rows_at_once(50_000) - expected) <= max(1, expected // 50)
    ballast = torch.empty(int(0.5 * free_bytes("cuda")), dtype=torch.uint8, device="cuda")
    fewer = worker.rows_at_once(50_000)
    del ballast
    release_memory()
    assert fewer <= 0.6 * expected + 1


def test_a_share_of_the_gpu_bounds_what_is_computed_at_once_and_what_can_be_allocated(tiny, monkeypatch) -> None:
    monkeypatch.setattr(memory, "_share", 1.0)  # restored afterwards
    total = torch.cuda.get_device_properties(0).total_memory
    release_memory()
    share = (torch.cuda.memory_reserved() + 500 * MIB) / total
    try:
        keep_to_share("torch/cpu/float32", share)
        assert free_bytes("cuda") > 600 * MIB
        keep_to_share("torch/cuda/float32", share)
        assert 400 * MIB < free_bytes("cuda") < 600 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
