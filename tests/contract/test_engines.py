"""What every engine promises, run against each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.engines import ENGINES, Engine, GenerationRequest, PrefillRequest, build
from shoal.errors import ConfigError, PolicyMismatch
from shoal.models import TensorView
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import policy_views
from shoal.protocol import PolicyRef, SamplingParameters
from shoal.sampling import check_seeded, uniforms

SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=10, eos_token_id=1)
REF = PolicyRef(incarnation=0, version=3, digest="ab" * 32)
OTHER = PolicyRef(incarnation=0, version=4, digest="cd" * 32)
PROMPTS = ("31=", "9071348=", "314159=", "5=")


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(scope="module")
def weights(tiny) -> dict[str, TensorView]:
    return policy_views(tiny.model)


@pytest.fixture(scope="module")
def other_weights(tiny) -> Mapping[str, TensorView]:
    """A policy that differs by about one training step in one tensor."""
    changed = {name: tensor.clone() for name, tensor in tiny.model.state_dict().items()}
    noise = torch.randn(changed["lm_head.weight"].shape, generator=torch.Generator().manual_seed(0))
    changed["lm_head.weight"] += 0.3 * noise
    clone = load_model("tiny").model
    clone.load_state_dict(changed)
    return policy_views(clone)


@pytest.fixture(params=sorted(ENGINES))
def empty(request, tiny) -> Engine:
    return build(request.param, tiny.files)


@pytest.fixture
def engine(empty, weights) -> Engine:
    empty.load_policy(REF, weights)
    return empty


def group(tiny, prompt="314159=", seeds=range(12), **changes) -> GenerationRequest:
    sampling = SAMPLING.model_copy(update=changes)
    return GenerationRequest(tiny.tokenizer.encode(prompt), tuple(seeds), sampling)


def prefill_request(request, completion) -> PrefillRequest:
    return PrefillRequest(request.prompt_ids, completion.token_ids, request.sampling.temperature)


def test_it_is_an_engine_and_says_which(engine):
    assert isinstance(engine, Engine)
    assert ENGINES.keys() >= {engine.name}
    assert engine.vocabulary_size == 96


def test_nothing_works_before_a_policy_is_loaded(empty, tiny):
    assert empty.policy is None
    request = group(tiny)
    for call in (
        lambda: empty.generate([request]),
        lambda: empty.prefill([PrefillRequest(request.prompt_ids, np.array([5], np.int32), 1.0)]),
        lambda: empty.greedy([request.prompt_ids], 3, 1),
    ):
        with pytest.raises(PolicyMismatch, match="no policy is loaded"):
            call()


def test_it_remembers_the_policy_it_holds(engine, other_weights):
    assert engine.policy == REF
    engine.load_policy(OTHER, other_weights)
    assert engine.policy == OTHER


def test_one_list_per_request_one_completion_per_seed_in_order(engine, tiny):
    requests = [group(tiny, prompt, range(i, i + 3 + i)) for i, prompt in enumerate(PROMPTS)]
    together = engine.generate(requests)
    assert [len(completions) for completions in together] == [3, 4, 5, 6]
    for request, completions in zip(requests, together, strict=True):
        for seed, completion in zip(request.seeds, completions, strict=True):
            [[alone]] = engine.generate([replace(request, seeds=(seed,))])
            np.testing.assert_array_equal(completion.token_ids, alone.token_ids)
            np.testing.assert_allclose(completion.logprobs, alone.logprobs, atol=1e-4)


def test_types_and_lengths_of_a_completion(engine, tiny):
    for completion in engine.generate([group(tiny)])[0]:
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert len(completion.logprobs) == len(completion.token_ids) <= SAMPLING.max_new_tokens
        assert np.all(completion.logprobs <= 0.0)
        assert completion.hidden is None


def test_a_completion_ends_at_its_first_end_token_or_at_the_limit(engine, tiny):
    completions = engine.generate([group(tiny, seeds=range(64), max_new_tokens=7)])[0]
    for completion in completions:
        assert not np.any(completion.token_ids[:-1] == 1)
        if completion.finish == "eos":
            assert completion.token_ids[-1] == 1
        else:
            assert len(completion.token_ids) == 7
            assert completion.token_ids[-1] != 1
    assert {completion.finish for completion in completions} == {"eos", "length"}


def test_every_token_is_the_one_its_uniform_points_at(engine, tiny):
    request = group(tiny, seeds=range(100, 132))
    completions = engine.generate([request])[0]
    prefills = engine.prefill([prefill_request(request, completion) for completion in completions])
    for seed, completion, prefill in zip(request.seeds, completions, prefills, strict=True):
        u = uniforms(seed, 0, len(completion.token_ids))
        assert check_seeded(u, prefill.cdf_low, prefill.cdf_high, prefill.logprobs).passed
        assert np.all(prefill.cdf_low - 1e-5 <= u)
        assert np.all(u < prefill.cdf_high + 1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_prefill_agrees_with_generation(engine, tiny, temperature):
    requests = [group(tiny, prompt, temperature=temperature) for prompt in PROMPTS]
    generated = engine.generate(requests, keep_hidden=True)
    pairs = [
        (request, completion)
        for request, completions in zip(requests, generated, strict=True)
        for completion in completions
    ]
    prefills = engine.prefill([prefill_request(*pair) for pair in pairs], keep_hidden=True)
    for (_, completion), prefill in zip(pairs, prefills, strict=True):
        np.testing.assert_allclose(prefill.logprobs, completion.logprobs, atol=1e-4)
        np.testing.assert_allclose(
            np.log(prefill.cdf_high - prefill.cdf_low), completion.logprobs, atol=1e-3, rtol=1e-3
        )
        assert prefill.hidden is not None
        assert prefill.hidden.shape == (len(completion.token_ids), prefill.hidden.shape[1])
        assert prefill.hidden.dtype == completion.hidden.dtype == np.float32
        np.testing.assert_allclose(prefill.hidden, completion.hidden, atol=1e-3)


def test_prefill_results_are_in_order_whatever_the_lengths(engine, tiny):
    tokens = [np.array([5, 6, 7, 8][:n], np.int32) for n in (4, 1, 3, 2)]
    requests = [
        PrefillRequest(tiny.tokenizer.encode(prompt), ids, 1.0) for prompt, ids in zip(PROMPTS, tokens, strict=True)
    ]
    together = engine.prefill(requests)
    for request, prefill in zip(requests, together, strict=True):
        [alone] = engine.prefill([request])
        assert prefill.hidden is None
        np.testing.assert_allclose(prefill.logprobs, alone.logprobs, atol=1e-4)
        np.testing.assert_allclose(prefill.cdf_low, alone.cdf_low, atol=1e-5)
        assert (prefill.logprobs.dtype, prefill.cdf_low.dtype, prefill.cdf_high.dtype) == ("f4", "f8", "f8")


def test_the_same_seeds_give_the_same_tokens(engine, tiny):
    first, second = engine.generate([group(tiny)]), engine.generate([group(tiny)])
    for one, two in zip(first[0], second[0], strict=True):
        np.testing.assert_array_equal(one.token_ids, two.token_ids)
        np.testing.assert_array_equal(one.logprobs, two.logprobs)


def test_other_seeds_give_other_tokens(engine, tiny):
    texts = {tuple(completion.token_ids) for completion in engine.generate([group(tiny, "90713482=")])[0]}
    assert len(texts) > 1


def test_another_policy_is_seen_in_the_prefill(engine, tiny, weights, other_weights):
    request = group(tiny, "90713482=")
    completions = engine.generate([request])[0]
    engine.load_policy(OTHER, other_weights)
    prefills = engine.prefill([prefill_request(request, completion) for completion in completions])
    checks = [
        check_seeded(uniforms(seed, 0, len(p.logprobs)), p.cdf_low, p.cdf_high, p.logprobs)
        for seed, p in zip(request.seeds, prefills, strict=True)
    ]
    assert not all(check.passed for check in checks)
    engine.load_policy(REF, weights)
    again = engine.generate([request])[0]
    for one, two in zip(completions, again, strict=True):
        np.testing.assert_array_equal(one.logprobs, two.logprobs)


def test_greedy_takes_the_most_probable_token_every_time(engine, tiny):
    prompts = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    cold = SamplingParameters(temperature=1e-4, max_new_tokens=10, eos_token_id=1)
    sampled = engine.generate([GenerationRequest(prompt, (1,), cold) for prompt in prompts])
    for greedy, [completion] in zip(engine.greedy(prompts, 10, 1), sampled, strict=True):
        assert greedy.dtype == np.int32
        np.testing.assert_array_equal(greedy, completion.token_ids)
    assert max(len(greedy) for greedy in engine.greedy(prompts, 2, 1)) == 2


def test_requests_of_different_sampling_may_be_mixed(engine, tiny):
    short, long = group(tiny, max_new_tokens=3), group(tiny, max_new_tokens=9, temperature=0.5)
    mixed = engine.generate([long, short, long])
    for request, completions in zip([long, short, long], mixed, strict=True):
        [alone] = engine.generate([request])
        assert [c.token_ids.tolist() for c in completions] == [c.token_ids.tolist() for c in alone]
    assert max(len(completion.token_ids) for completion in mixed[1]) == 3


def test_nothing_asked_nothing_given(engine, tiny):
    assert engine.generate([]) == []
    assert engine.prefill([]) == []
    assert engine.greedy([], 5, 1) == []
    assert engine.generate([group(tiny, seeds=())]) == [[]]
    assert [len(completions) for completions in engine.generate([group(tiny, seeds=()), group(tiny)])] == [0, 12]


@pytest.mark.parametrize("token", [-1, 96, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_refused(engine, token):
    with pytest.raises(ValueError, match="outside the vocabulary of 96"):
        engine.generate([GenerationRequest((5, token), (1,), SAMPLING)])
    with pytest.raises(ValueError, match="outside the vocabulary of 96"):
        engine.prefill([PrefillRequest((5,), np.array([5, token], np.int32), 1.0)])
    with pytest.raises(ValueError, match="outside the vocabulary of 96"):
        engine.greedy([(token,)], 1, 1)


def test_a_request_without_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        GenerationRequest((), (1,), SAMPLING)
    with pytest.raises(ValueError, match="at least one token"):
        PrefillRequest((5,), np.zeros(0, np.int32), 1.0)


def test_an_unknown_engine_is_refused(tiny):
    with pytest.raises(ConfigError, match="no engine 'warp'; there are scripted, torch"):
        build("warp", tiny.files)
