"""What every engine promises, run against each of them; at the end where the environment answers the model's turns."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from kit.engines import ENGINE_NAMES, assert_same, begins, exactly, holds
from shoal.engines import ENGINES, build, kind_of
from shoal.engines.cpu.decoder import CpuDecoder
from shoal.engines.dialogue import Dialogue, greedy_lines
from shoal.engines.guesses import Guessed
from shoal.engines.protocol import Chunks, Completion, Engine, GenerationRequest, Prefill, PrefillRequest
from shoal.engines.torch import TorchEngine
from shoal.errors import ConfigError, PolicyMismatch
from shoal.models import TensorView
from shoal.models.ending import Characters, EndRule, decoding
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import policy_views
from shoal.protocol import DialogueTerms, PolicyRef, ProofParameters, SamplingParameters, drawn_mask, pack_spans
from shoal.sampling import check_seeded, uniforms
from shoal.toploc import check_proofs, chunk_rows, compare, split_proofs

EOS = 1
SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=10, eos_token_ids=(EOS,))
REF = PolicyRef(incarnation=0, version=3, digest="ab" * 32)
OTHER = PolicyRef(incarnation=0, version=4, digest="cd" * 32)
PROOF = ProofParameters()
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


@pytest.fixture(scope="module", params=[*ENGINE_NAMES, "paged", "plain"])
def made(request, tiny) -> Engine:
    """Every engine, and two more paths of the torch engine: that for GPUs, computed on a CPU, and the plain one."""
    if request.param in ("paged", "plain"):
        return TorchEngine(tiny.files, pages=request.param == "paged")
    return build(request.param, tiny.files)


@pytest.fixture
def engine(made, weights) -> Engine:
    made.load_policy(REF, weights)
    return made


def group(tiny, prompt="314159=", seeds=range(12), **changes) -> GenerationRequest:
    sampling = SAMPLING.model_copy(update=changes)
    return GenerationRequest(tiny.tokenizer.encode(prompt), tuple(seeds), sampling)


def prefill_request(request, completion) -> PrefillRequest:
    return PrefillRequest(request.prompt_ids, completion.token_ids, request.sampling.temperature)


def test_engine_names_its_kind_and_sizes(engine, weights):
    assert isinstance(engine, Engine)
    assert ENGINES.keys() >= {engine.name}
    assert engine.kind == kind_of(engine.name, "auto" if engine.name == "scripted" else "cpu")
    assert engine.kind == f"{engine.name}/cpu/float32"
    assert (engine.vocabulary_size, engine.hidden_size) == (96, 64)
    assert engine.size_bytes == sum(view.data.nbytes for view in weights.values())


@pytest.mark.parametrize("name", ENGINE_NAMES)
def test_calls_without_a_policy_are_refused(name, tiny):
    empty = build(name, tiny.files)
    assert empty.policy is None
    request = group(tiny)
    for call in (
        lambda: empty.generate([request]),
        lambda: empty.prefill([PrefillRequest(request.prompt_ids, np.array([5], np.int32), 1.0)]),
        lambda: empty.greedy([request.prompt_ids], 3, (1,)),
    ):
        with pytest.raises(PolicyMismatch, match="no policy is loaded"):
            call()


def test_begun_completion_continues_with_the_same_tokens(engine, tiny):
    """Of different lengths, all in one call: what the same seed gave from there on."""
    request = group(tiny)
    whole = engine.generate([request])[0]
    long = [(seed, each) for seed, each in zip(request.seeds, whole, strict=True) if len(each.token_ids) > 3]
    begun = [
        replace(request, prompt_ids=(*request.prompt_ids, *each.token_ids[:n].tolist()), seeds=(seed,), begun=n)
        for n, (seed, each) in zip((1, 2, 3), long, strict=False)
    ]
    continued = engine.generate(begun)
    assert len(continued) == 3
    for n, (_, each), [rest] in zip((1, 2, 3), long, continued, strict=False):
        assert rest.token_ids[: len(each.token_ids) - n].tolist() == each.token_ids[n:].tolist()


def test_completions_are_in_the_order_of_requests_and_seeds(engine, tiny):
    samplings = ({"max_new_tokens": 3}, {}, {"max_new_tokens": 9, "temperature": 0.5}, {"max_new_tokens": 5})
    requests = [
        group(tiny, prompt, range(i, i + 3 + i), **sampling)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
    ]
    together = engine.generate(requests)
    assert max(len(completion.token_ids) for completion in together[0]) == 3
    assert [len(completions) for completions in together] == [3, 4, 5, 6]
    for request, completions in zip(requests, together, strict=True):
        for seed, completion in zip(request.seeds, completions, strict=True):
            [[alone]] = engine.generate([replace(request, seeds=(seed,))])
            np.testing.assert_array_equal(completion.token_ids, alone.token_ids)
            np.testing.assert_allclose(completion.logprobs, alone.logprobs, atol=1e-4)


def test_progress_of_each_group_is_reported(engine, tiny):
    told: dict[int, list[int]] = {0: [], 1: []}
    asked = [group(tiny, prompt, range(5 + i)) for i, prompt in enumerate(PROMPTS[:2])]
    groups = engine.generate([replace(request, on_tokens=told[i].append) for i, request in enumerate(asked)])
    for said, completions in zip(told.values(), groups, strict=True):
        total = sum(len(completion.token_ids) for completion in completions)
        assert said == sorted(said)
        assert 0 < said[0] <= said[-1] <= total
    assert exactly(groups) == exactly(engine.generate(asked)), "it changes nothing"


class EnoughTold(Exception):
    pass


@pytest.mark.parametrize("by", ["on_tokens", "check"])
def test_call_ended_by_its_listener_changes_nothing(engine, tiny, by):
    def enough(*_tokens):
        raise EnoughTold

    asked = [group(tiny, prompt, range(6)) for prompt in PROMPTS[:3]]
    plain = engine.generate(asked, PROOF)
    with pytest.raises(EnoughTold):
        engine.generate([asked[0], replace(asked[1], **{by: enough}), asked[2]], PROOF)
    assert exactly(plain) == exactly(engine.generate(asked, PROOF))


def test_check_is_called_after_every_token_on_a_processor(engine, tiny):
    """Once for all groups that share it. The scripted engine calls it after each completion."""
    calls = list[None]()
    check = partial(calls.append, None)
    asked = [replace(group(tiny, prompt, range(6)), check=check) for prompt in PROMPTS[:2]]
    longest = max(len(completion.token_ids) for completion in chain(*engine.generate(asked, PROOF)))
    assert len(calls) == 12 if engine.name == "scripted" else longest <= len(calls) <= 2 * longest


def test_completion_ends_at_its_end_token_or_at_the_limit(engine, tiny):
    completions = engine.generate([group(tiny, seeds=range(64), max_new_tokens=7)])[0]
    for completion in completions:
        assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
        assert len(completion.logprobs) == len(completion.token_ids)
        assert not np.any(completion.token_ids[:-1] == 1)
        if completion.finish == "eos":
            assert completion.token_ids[-1] == 1
        else:
            assert len(completion.token_ids) == 7
            assert completion.token_ids[-1] != 1
    assert {completion.finish for completion in completions} == {"eos", "length"}


def test_completion_ends_at_the_first_of_several_end_tokens(engine, tiny):
    """As it would be cut there without them, proofs and greedy completions too."""
    proof, free = ProofParameters(topk=16, rows=4), engine.generate([group(tiny, prompt) for prompt in PROMPTS])
    ends = {1, *[int(each.token_ids[2]) for each in chain(*free) if len(each.token_ids) > 4][:3]}
    asked = [group(tiny, prompt, eos_token_ids=tuple(ends)) for prompt in PROMPTS]
    drawn, found = engine.generate(asked, proof), set[int]()
    for request, cut, whole in ((asked[n], *pair) for n in range(4) for pair in zip(drawn[n], free[n], strict=True)):
        at = next((n + 1 for n, token in enumerate(whole.token_ids.tolist()) if token in ends), 10)
        assert cut.token_ids.tolist() == whole.token_ids[:at].tolist()
        found |= {int(cut.token_ids[-1])} if cut.finish == "eos" else set()
        assert cut.finish == ("eos" if cut.token_ids[-1] in ends else "length")
        [prefill] = engine.prefill([prefill_request(request, cut)], proof)
        assert holds(cut, prefill, engine.hidden_size, proof)
    assert found <= ends
    assert len(found) > 1
    prompts = [request.prompt_ids for request in asked]
    for cut, whole in zip(engine.greedy(prompts, 9, tuple(ends)), engine.greedy(prompts, 9, ()), strict=True):
        assert cut.tolist() == whole[: next((n + 1 for n, token in enumerate(whole) if token in ends), 9)].tolist()


def test_completion_ends_where_its_text_has_a_stop_string(engine, tiny):
    """Strings of several tokens, in rows of a group at different times: as it would be cut there, with its proofs. The
    end is found here by all tokens so far, read as one text."""
    hot, proof, read = {"temperature": 3.0, "max_new_tokens": 40}, ProofParameters(topk=16, rows=4), tiny.tokenizer
    free = engine.generate([group(tiny, prompt, **hot) for prompt in PROMPTS])
    longest = sorted(chain(*free), key=lambda each: -len(each.token_ids))[:3]
    places = [(each, len(each.token_ids) // (2 + n)) for n, each in enumerate(longest)]
    stop = tuple(read.decode_many([each.token_ids[at : at + 2].tolist()])[0] for each, at in places)
    asked = [group(tiny, prompt, stop=stop, **hot) for prompt in PROMPTS]
    asked = [replace(request, decode=decoding(request.sampling, tiny.files)) for request in asked]
    drawn, ends = engine.generate(asked, proof), list[int]()
    for request, cut, whole in ((asked[n], *pair) for n in range(4) for pair in zip(drawn[n], free[n], strict=True)):
        ids = whole.token_ids.tolist()
        texts = read.decode_many([ids[: n + 1] for n in range(len(ids))])
        end = next((n + 1 for n, text in enumerate(texts) if any(each in text for each in stop)), None)
        assert cut.token_ids.tolist() == ids[:end]
        assert cut.finish == (whole.finish if end is None else "eos")
        np.testing.assert_allclose(cut.logprobs, whole.logprobs[:end], atol=1e-4)
        [prefill] = engine.prefill([prefill_request(request, cut)], proof)
        assert holds(cut, prefill, engine.hidden_size, proof)
        ends += [] if end is None else [end]
    assert len(set(ends)) > 1
    begun, place = asked[0], 2
    rest = replace(begun, prompt_ids=(*begun.prompt_ids, *free[0][0].token_ids[:place].tolist()), begun=place)
    [[continued]] = engine.generate([replace(rest, seeds=begun.seeds[:1])])
    if len(drawn[0][0].token_ids) > place:
        assert continued.token_ids.tolist() == drawn[0][0].token_ids[place:].tolist()
    with pytest.raises(ValueError, match="no tokenizer to find them"):
        engine.generate([replace(begun, decode=None)])


def test_greedy_completions_end_at_stop_strings(engine, tiny):
    sampling, prompts = SAMPLING.model_copy(update={"max_new_tokens": 80}), [tiny.tokenizer.encode(p) for p in PROMPTS]
    free = greedy_lines(engine, prompts, [None] * 4, sampling)
    stop = tuple(tiny.tokenizer.decode_many([line.tokens[-3:-1] for line in free if len(line.tokens) > 3]))
    stopped = sampling.model_copy(update={"stop": stop[:2]})
    cut = greedy_lines(engine, prompts, [None] * 4, stopped, decode := decoding(stopped, tiny.files))
    ending = EndRule.of(stopped, decode)
    assert [line.tokens for line in cut] == [line.tokens[: ending.first(line.tokens)] for line in free]
    assert [line.tokens for line in cut] != [line.tokens for line in free]


def test_each_token_is_drawn_by_its_uniform(engine, tiny):
    request = group(tiny, seeds=range(100, 132))
    completions = engine.generate([request])[0]
    prefills = engine.prefill([prefill_request(request, completion) for completion in completions])
    for seed, completion, prefill in zip(request.seeds, completions, prefills, strict=True):
        u = uniforms(seed, 0, len(completion.token_ids))
        assert check_seeded(u, prefill.cdf_low, prefill.cdf_high, prefill.logprobs).passed
        assert np.all(prefill.cdf_low - 1e-5 <= u)
        assert np.all(u < prefill.cdf_high + 1e-5)


def drawn_and_prefilled(engine, requests, proof) -> list[tuple[Completion, Prefill]]:
    groups = engine.generate(requests, proof)
    pairs = [(request, each) for request, group in zip(requests, groups, strict=True) for each in group]
    prefills = engine.prefill([prefill_request(*pair) for pair in pairs], proof)
    return [(completion, prefill) for (_, completion), prefill in zip(pairs, prefills, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_prefill_agrees_with_generation(engine, tiny, temperature):
    requests = [group(tiny, prompt, temperature=temperature) for prompt in PROMPTS]
    for completion, prefill in drawn_and_prefilled(engine, requests, None):
        np.testing.assert_allclose(prefill.logprobs, completion.logprobs, atol=1e-4)
        width_T = prefill.cdf_high - prefill.cdf_low
        np.testing.assert_allclose(np.log(width_T), completion.logprobs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("proof", [ProofParameters(topk=16, rows=4), ProofParameters(topk=32, rows=1), PROOF], ids=str)
def test_proofs_hold_against_a_prefill(engine, tiny, proof):
    """Chunks of `rows` tokens, the last of fewer, in order, aligned: the state that a token was drawn from."""
    requests = [group(tiny, prompt) for prompt in PROMPTS]
    pairs = drawn_and_prefilled(engine, requests, proof)
    sizes = set()
    for completion, prefill in pairs:
        length = len(completion.token_ids)
        chunks = split_proofs(completion.proofs, length, engine.hidden_size, proof.topk, proof.rows)
        compared = compare(prefill.points, chunks)
        assert check_proofs(compared).passed, check_proofs(compared)
        assert compared.exp_mismatches.sum() <= 0.02 * compared.k.sum()
        assert [size // engine.hidden_size for size in prefill.points.sizes] == chunk_rows(length, proof.rows)
        sizes.add(length % proof.rows)
    assert len(sizes) > 1 or proof.rows == 1  # tails of several lengths were seen


SHAPE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize("config", [
    None, LlamaConfig(**SHAPE), Qwen2Config(**SHAPE), MistralConfig(**SHAPE, sliding_window=9),
], ids=["tiny", "llama", "qwen2", "mistral"])  # fmt: skip
def test_tokens_that_are_guessed_are_those_that_are_drawn_and_so_are_their_proofs(tiny, config, monkeypatch):
    """On text that repeats itself: a prompt that does, at a temperature at which rollouts do."""
    torch.manual_seed(0)
    model = tiny.model if config is None else AutoModelForCausalLM.from_config(config).eval()
    prompt, right, heat = tiny.tokenizer.encode("0123456789" * 4), [], 1.0 if config is None else 0.01
    sampling = SamplingParameters(temperature=heat, max_new_tokens=75, eos_token_ids=(96,))
    requests = [
        GenerationRequest(prompt, (3, 4), sampling),
        GenerationRequest(
            prompt[::-1], (5,), sampling.model_copy(update={"max_new_tokens": 40, "eos_token_ids": (40, 17)})
        ),
    ]
    take = Guessed.take
    monkeypatch.setattr(
        Guessed, "take", lambda row, tokens, count: (right.append(len(tokens) - 1), take(row, tokens, count))
    )
    engine, proof = TorchEngine.wrap(model, pages=True), ProofParameters(topk=16, rows=16)
    guessed = drawn_and_prefilled(engine, requests, proof)
    assert sum(right) > 10
    assert all(holds(one, prefill, engine.hidden_size, proof) for one, prefill in guessed)
    right.clear()
    monkeypatch.setattr(CpuDecoder, "guessing_rows", 0)
    plain = engine.generate(requests, proof)
    assert not right
    assert_same([[one for one, _ in guessed]], [list(chain(*plain))], proofs=False)


def test_proofs_change_nothing_else(engine, tiny):
    requests = [group(tiny, prompt) for prompt in PROMPTS]
    proved = engine.generate(requests, ProofParameters(topk=16, rows=4))
    assert_same(engine.generate(requests), [[replace(each, proofs=b"") for each in one] for one in proved], atol=1e-6)


def test_entropy_and_varentropy_match_2000_draws(engine, tiny):
    """Mean and variance of -log p over the distribution of the first token, against many draws from it."""
    request = group(tiny, "90713482=", seeds=range(2000), max_new_tokens=1, temperature=1.3)
    [completions] = engine.generate([request])
    surprise = -np.array([float(completion.logprobs[0]) for completion in completions])
    [prefill] = engine.prefill([prefill_request(request, completions[0])])
    deviation = surprise.std() / len(surprise) ** 0.5
    assert prefill.entropy.dtype == prefill.varentropy.dtype == np.float32
    assert abs(float(prefill.entropy[0]) - surprise.mean()) < 5 * deviation + 1e-4
    assert float(prefill.varentropy[0]) == pytest.approx(surprise.var(), rel=0.2, abs=1e-4)


def test_prefill_results_are_in_order(engine, tiny):
    tokens = [np.array([5, 6, 7, 8][:n], np.int32) for n in (4, 1, 3, 2)]
    prompts = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    requests = [PrefillRequest(prompt, ids, 1.0) for prompt, ids in zip(prompts, tokens, strict=True)]
    together = engine.prefill(requests)
    for request, prefill in zip(requests, together, strict=True):
        [alone] = engine.prefill([request])
        assert prefill.points is None
        np.testing.assert_allclose(prefill.logprobs, alone.logprobs, atol=1e-4)
        np.testing.assert_allclose(prefill.cdf_low, alone.cdf_low, atol=1e-5)
        assert (prefill.logprobs.dtype, prefill.cdf_low.dtype, prefill.cdf_high.dtype) == ("f4", "f8", "f8")


def test_other_weights_fail_the_check_of_seeds(engine, tiny, weights, other_weights):
    request = group(tiny, "90713482=")
    completions = engine.generate([request])[0]
    engine.load_policy(OTHER, other_weights)
    assert engine.policy == OTHER
    prefills = engine.prefill([prefill_request(request, completion) for completion in completions])
    checks = [
        check_seeded(uniforms(seed, 0, len(p.logprobs)), p.cdf_low, p.cdf_high, p.logprobs)
        for seed, p in zip(request.seeds, prefills, strict=True)
    ]
    assert not all(check.passed for check in checks)
    engine.load_policy(REF, weights)
    again = engine.generate([request])[0]
    for one, two in zip(completions, again, strict=True):
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-6)


def test_greedy_takes_the_most_probable_tokens(engine, tiny):
    prompts = [tiny.tokenizer.encode(prompt) for prompt in PROMPTS]
    cold = SamplingParameters(temperature=1e-4, max_new_tokens=10, eos_token_ids=(1,))
    sampled = engine.generate([GenerationRequest(prompt, (1,), cold) for prompt in prompts])
    for greedy, [completion] in zip(engine.greedy(prompts, 10, (1,)), sampled, strict=True):
        assert greedy.dtype == np.int32
        np.testing.assert_array_equal(greedy, completion.token_ids)
    assert max(len(greedy) for greedy in engine.greedy(prompts, 2, (1,))) == 2


@pytest.mark.parametrize("token", [-1, 96])
def test_token_outside_the_vocabulary_is_refused(engine, token):
    with pytest.raises(ValueError, match="outside the vocabulary of 96"):
        engine.generate([GenerationRequest((5, token), (1,), SAMPLING)])
    with pytest.raises(ValueError, match="outside the vocabulary of 96"):
        engine.prefill([PrefillRequest((5,), np.array([5, token], np.int32), 1.0)])
    with pytest.raises(ValueError, match="outside the vocabulary of 96"):
        engine.greedy([(token,)], 1, (1,))


def test_request_without_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        GenerationRequest((), (1,), SAMPLING)
    with pytest.raises(ValueError, match="at least one token"):
        PrefillRequest((5,), np.zeros(0, np.int32), 1.0)


@pytest.mark.parametrize(("choice", "message"), [
    (("warp", "cpu", "float32"), "no engine 'warp'; there are scripted, torch, vllm"),
    (("torch", "tpu", "float32"), "no device 'tpu'; there are auto, cpu, cuda"),
    (("torch", "cpu", "int3"), "the engine torch does not compute in 'int3'; it knows float32, bfloat16"),
    (("scripted", "cpu", "bfloat16"), "the engine scripted does not compute in 'bfloat16'; it knows float32"),
    (("scripted", "cuda", "float32"), 'no device but "cpu"'),
])  # fmt: skip
def test_unknown_engine_device_or_format_is_refused(tiny, choice, message):
    with pytest.raises(ConfigError, match=message):
        build(choice[0], tiny.files, *choice[1:])
    with pytest.raises(ConfigError, match=message):
        kind_of(*choice)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused_and_auto_uses_the_cpu(tiny):
    with pytest.raises(ConfigError, match="torch finds no GPU here"):
        build("torch", tiny.files, "cuda")
    assert build("torch", tiny.files, "auto").kind == kind_of("torch", "auto") == "torch/cpu/float32"


def test_listener_gets_the_first_chunks_of_its_group(engine, tiny):
    proof = ProofParameters(topk=16, rows=2)
    shown: dict[int, list[dict[int, Chunks]]] = {0: [], 2: []}
    asked = [group(tiny, prompt, range(40 * i, 40 * i + 6), max_new_tokens=11) for i, prompt in enumerate(PROMPTS[:3])]
    told = [
        replace(each, on_chunks=lambda take, i=i: shown[i].append(take())) if i in shown else each
        for i, each in enumerate(asked)
    ]
    groups = engine.generate(told, proof)
    for number, looks in shown.items():
        by_seed = dict(zip(asked[number].seeds, groups[number], strict=True))
        assert len(looks) >= 2
        for seed, each in chain(*(chunks.items() for chunks in looks)):
            length, whole = len(each.token_ids), by_seed[seed]
            assert begins(each, whole)
            assert len(each.proofs) == -(-length // 2)
            assert length % 2 == 0 or length == len(whole.token_ids), "a short chunk is a completion's last one"
        first, *_, last = (sum(len(each.token_ids) for each in chunks.values()) for chunks in looks)
        assert 0 < first < last
    assert exactly(groups) == exactly(engine.generate(asked, proof)), "it changes nothing"
    before = [len(looks) for looks in shown.values()]
    engine.generate(told)
    assert [len(looks) for looks in shown.values()] == before


TALK_PROOF = ProofParameters(topk=16, rows=8)
SEEDS = tuple(range(10))


def echo(turns):
    """Says how many tokens each turn had, in characters that are tokens of any vocabulary of 96."""
    return "".join(chr(5 + len(turn)) for turn in turns)


def dialogue(max_turns=3, limit=40, tool=echo) -> Dialogue:
    terms = DialogueTerms(tool="echo", max_turns=max_turns, before=(70, EOS, 71), after=(72,))
    return Dialogue(terms, EndRule((EOS,)), limit, tool, Characters())


def talking(tiny, talk: Dialogue | None, prompt="31=", seeds=SEEDS) -> GenerationRequest:
    limit, respond = (40, None) if talk is None else (talk.max_new_tokens, talk.respond)
    return replace(group(tiny, prompt, seeds, max_new_tokens=limit), respond=respond)


def test_tool_answers_each_turn_but_the_last(engine, tiny):
    [drawn] = engine.generate([talking(tiny, dialogue())])
    assert {len(each.given) for each in drawn} == {2}
    for each in drawn:
        tokens = each.token_ids.tolist()
        assert (tokens[-1], each.finish) == (EOS, "eos")
        ends = [start for start, _ in each.given]
        assert all(tokens[end - 1] == EOS for end in ends)
        start, length = each.given[0]
        assert tokens[start : start + length] == [70, EOS, 71, 5 + ends[0] - 1, 72]
        own = np.flatnonzero(own_tokens(each)).tolist()
        assert EOS not in [tokens[i] for i in own[:-1] if i + 1 not in ends]


def own_tokens(completion: Completion) -> np.ndarray:
    return drawn_mask(pack_spans(completion.given), len(completion.token_ids))


def test_drawn_dialogue_reads_the_same_to_a_validator(engine, tiny):
    for max_turns, limit in ((1, 40), (5, 40), (3, 9)):
        talk = dialogue(max_turns, limit)
        for each in engine.generate([talking(tiny, talk)])[0]:
            reading = talk.read(each.token_ids.tolist())
            assert (reading.given, reading.finish, reading.problem) == (each.given, each.finish, "")
            assert len(each.token_ids) <= limit


def test_tool_tokens_use_up_no_draw_and_are_in_the_proofs_and_shown_chunks(engine, tiny):
    shown: list[dict[int, Chunks]] = []
    request = replace(talking(tiny, dialogue()), on_chunks=lambda take: shown.append(take()))
    last_shown = 0
    for seed, (each, seen) in zip(SEEDS, drawn_and_prefilled(engine, [request], TALK_PROOF), strict=True):
        mask, u_T = own_tokens(each), uniforms(seed, 0, len(each.token_ids))
        assert check_seeded(u_T[mask], seen.cdf_low[mask], seen.cdf_high[mask], seen.logprobs[mask]).passed
        np.testing.assert_allclose(each.logprobs[mask], seen.logprobs[mask], atol=1e-3)
        assert not each.logprobs[~mask].any()
        assert (~mask).sum() >= 8
        assert holds(each, seen, engine.hidden_size, TALK_PROOF)
        assert begins(shown[-1][seed], each)
        last_shown += sum(start < len(shown[-1][seed].token_ids) for start, _ in each.given)
    assert last_shown


def test_dialogues_do_not_change_each_other(engine, tiny):
    """Rows with and without a dialogue, of several prompts and limits, together and alone."""
    prompts = ("31=", "90713=", "5=")
    requests = [
        talking(tiny, dialogue(2), prompts[0]), talking(tiny, None, prompts[1]),
        talking(tiny, dialogue(4), prompts[2]), talking(tiny, None, prompts[0]),
        talking(tiny, dialogue(3, 12), prompts[1]),
    ]  # fmt: skip
    for request, together in zip(requests, engine.generate(requests, TALK_PROOF), strict=True):
        alone = [engine.generate([replace(request, seeds=(seed,))], TALK_PROOF)[0][0] for seed in request.seeds]
        assert_same([together], [alone], proofs=False, atol=1e-3)


def test_silent_tool_changes_nothing(engine, tiny):
    heard: list[list[int]] = []
    silent = dialogue(tool=lambda turns: heard.append(list(turns[-1])))
    [spoken, plain] = engine.generate([talking(tiny, silent), talking(tiny, None)])
    assert exactly([spoken]) == exactly([plain])
    finished = [list(map(chr, each.token_ids.tolist()[:-1])) for each in spoken if each.finish == "eos"]
    assert finished
    assert sorted(heard) == sorted(finished)


def test_tool_answer_that_fills_the_limit_is_left_out(engine, tiny):
    """With one token more of room it is: the limit is exact."""
    [[each]] = engine.generate([talking(tiny, dialogue(), seeds=(3,))])
    (start, length), tokens = each.given[0], each.token_ids.tolist()
    full = start + length
    [[cut]] = engine.generate([talking(tiny, dialogue(limit=full), seeds=(3,))])
    assert (cut.token_ids.tolist(), cut.finish, cut.given) == (tokens[:start], "length", ())
    [[more]] = engine.generate([talking(tiny, dialogue(limit=full + 1), seeds=(3,))])
    assert (more.token_ids.tolist(), more.given) == (tokens[: full + 1], ((start, length),))


def test_tool_tokens_outside_the_vocabulary_are_refused(engine, tiny):
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.generate([replace(talking(tiny, None), respond=lambda _tokens: (96,))])
