"""The torch engine on a GPU: it keeps the engine's promises there, in both number formats, and across devices."""

import numpy as np
import pytest
import torch

from shoal.engines import GenerationRequest, PrefillRequest, build, kind_of
from shoal.engines.torch import TorchEngine
from shoal.environments import EnvironmentSettings
from shoal.environments import build as build_environment
from shoal.models.load import load_model
from shoal.models.logprobs import Head
from shoal.models.state import policy_views
from shoal.protocol import PolicyRef, ProofParameters, SamplingParameters
from shoal.sampling import check_seeded, uniforms
from shoal.toploc import check_proofs, compare, split_proofs
from shoal.validator.calibrate import Plan, measure, prompts_of
from shoal.validator.profiles import BUILT_IN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

REF = PolicyRef(incarnation=0, version=0, digest="ab" * 32)
SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=40, eos_token_ids=(95,))
PROOF = ProofParameters(topk=64, rows=16)
PROMPTS = ("31=", "9071348=", "314159=", "5=")
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", "bfloat16")


def engine(tiny, device: str, dtype: str) -> TorchEngine:
    made = build("torch", tiny.files, device, dtype)
    made.load_policy(REF, policy_views(tiny.model))
    return made


def requests(tiny) -> list[GenerationRequest]:
    return [GenerationRequest(tiny.tokenizer.encode(prompt), tuple(range(12)), SAMPLING) for prompt in PROMPTS]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_says_what_it_is(tiny, dtype: str) -> None:
    found = engine(tiny, "auto", dtype)
    assert found.kind == kind_of("torch", "auto", dtype) == f"torch/cuda/{dtype}"
    assert found.copied(tiny.files, dtype, pages=False).kind == f"torch-plain/cuda/{dtype}"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_it_draws_and_proves_in_float32_holds_elsewhere(tiny, device: str) -> None:
    profile = BUILT_IN["torch/cuda/float32"]
    worker, validator = engine(tiny, "cuda", "float32"), engine(tiny, device, "float32")
    for request, group in zip(requests(tiny), worker.generate(requests(tiny), PROOF), strict=True):
        asked = [PrefillRequest(request.prompt_ids, each.token_ids, 1.0) for each in group]
        for seed, completion, prefill in zip(request.seeds, group, validator.prefill(asked, PROOF), strict=True):
            drawn = uniforms(seed, 0, len(completion.token_ids))
            seeded = check_seeded(drawn, prefill.cdf_low, prefill.cdf_high, prefill.logprobs, profile.sampling)
            assert seeded.passed, seeded
            chunks = split_proofs(completion.proofs, len(completion.token_ids), 64, PROOF.topk, PROOF.rows)
            proved = check_proofs(compare(prefill.points, chunks), profile.proofs)
            assert proved.passed, proved
            errors = np.abs(prefill.logprobs - completion.logprobs)
            assert errors.max() <= profile.logprobs.largest


def test_sixteen_bit_products_are_as_exact_as_a_float32_head() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(64, 1024, generator=generator, device="cuda").bfloat16()
    head = Head(torch.randn(5000, 1024, generator=generator, device="cuda").bfloat16(), None)
    exact = hidden.double() @ head.weight.double().T
    with torch.inference_mode():
        fast = head.logits(hidden)
    assert fast.dtype == torch.float32
    assert float((fast - exact).abs().max()) <= 1e-5 * float(exact.abs().max())  # sums of exact products in float32


def test_memory_does_not_grow_with_the_length_of_what_is_proved(tiny) -> None:
    worker = engine(tiny, "cuda", "bfloat16")
    peaks = []
    for length in (160, 32, 160):  # the first time libraries take memory of their own
        sampling = SAMPLING.model_copy(update={"max_new_tokens": length, "eos_token_ids": (500,)})
        request = GenerationRequest(tiny.tokenizer.encode("31="), tuple(range(1024)), sampling)
        kept = []
        for proof in (None, PROOF):
            torch.cuda.reset_peak_memory_stats()
            worker.generate([request], proof)
            kept.append(torch.cuda.max_memory_allocated())
        peaks.append(kept[1] - kept[0])
    assert peaks[2] < peaks[1] + 8 * 2**20  # the states of the longer ones are 16 MiB more


def test_both_formats_are_measured_with_the_kernels_of_the_gpu(tiny) -> None:
    """Limits by every attention kernel that it has."""
    validator, environment = engine(tiny, "cuda", "float32"), build_environment(EnvironmentSettings(name="sort"))
    plan = Plan(prompts_of(tiny.files, environment, 12), tiny.eos_token_ids, tokens=12)
    for dtype, pages in (("float32", True), ("bfloat16", True), ("bfloat16", False)):
        worker = validator.copied(tiny.files, dtype, pages=pages)
        found = measure(worker, {"cuda/float32": validator}, plan)
        assert found.profile.key == f"{'torch' if pages else 'torch-plain'}/cuda/{dtype}"
        names = {name for name, _ in found.variants}
        assert {"batch 1", "batch 64", "main"} <= names
        assert ({"eager", "math"} <= names) == (not pages)
        assert (len(names & {"flash", "efficient"}) >= 1) == (not pages)
        assert found.failures == {"cuda/float32": []}
        int4 = [catch for catch in found.catches if catch.cheat == "int4 weights"]
        assert all(catch.by_either == 1.0 for catch in int4)
