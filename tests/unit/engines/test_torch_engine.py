"""The torch engine against plain transformers, and what only it promises. Decoding with pages: rows come and go, groups
share their prompt, memory may run out, and a trial decides who may."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig

from kit.engines import assert_same, begins, exactly
from kit.tiny import build_tiny
from shoal.engines import GenerationRequest, PrefillRequest, decoder
from shoal.engines.batching import paged_decoder
from shoal.engines.cpu.decoder import CpuDecoder
from shoal.engines.cpu.dense import DenseModel
from shoal.engines.decoder import PagedDecoder
from shoal.engines.page_cache import PAGE, attend
from shoal.engines.torch import TorchEngine
from shoal.errors import ModelError
from shoal.models.load import load_model
from shoal.models.state import policy_views
from shoal.protocol import PolicyRef, ProofParameters, SamplingParameters
from shoal.sampling import inverse, uniforms
from shoal.toploc import check_proofs, commit, compare

SAMPLING = SamplingParameters(temperature=0.8, max_new_tokens=12, eos_token_ids=(1,))
PROMPTS = [tuple(range(10, 10 + length)) for length in (1, 7, 3, 20, 7)]
REF = PolicyRef(incarnation=0, version=0, digest="ab" * 32)


@pytest.fixture(scope="module")
def model():
    return build_tiny(5)


def requests(seeds_each: int = 6) -> list[GenerationRequest]:
    seeds = [tuple(range(100 * i, 100 * i + seeds_each)) for i in range(len(PROMPTS))]
    return [GenerationRequest(prompt, own, SAMPLING) for prompt, own in zip(PROMPTS, seeds, strict=True)]


@torch.no_grad()
def plain_completion(model, prompt, seed) -> tuple[list[int], list[float]]:
    """No batch, no cache, no padding: the whole sequence through transformers for every token."""
    sequence, logprobs = list(prompt), []
    for u in uniforms(seed, 0, SAMPLING.max_new_tokens):
        logits = model(torch.tensor([sequence])).logits[0, -1:].numpy()
        token, logprob = inverse.sample(logits, np.array([u]), SAMPLING.temperature)
        sequence.append(int(token[0]))
        logprobs.append(float(logprob[0]))
        if sequence[-1] == 1:
            break
    return sequence[len(prompt) :], logprobs


def test_batched_cached_padded_decoding_equals_plain_transformers(model):
    for request, completions in zip(requests(), TorchEngine.wrap(model).generate(requests()), strict=True):
        for seed, completion in zip(request.seeds, completions, strict=True):
            tokens, logprobs = plain_completion(model, request.prompt_ids, seed)
            assert completion.token_ids.tolist() == tokens
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("patched", "value", "limits"),
    [
        pytest.param("shoal.engines.plain.UNIFORM_BLOCK", 5, {}, id="streams are read block by block"),
        pytest.param("shoal.engines.torch.TILE_ELEMENTS", 96 * 4, {}, id="large vocabularies go through in tiles"),
        pytest.param("", 0, {"max_rows": 7, "max_prefill_tokens": 30}, id="small batches"),
    ],
)
def test_however_work_is_cut_the_numbers_are_the_same(model, monkeypatch, patched, value, limits):
    whole = TorchEngine.wrap(model)
    asked = requests()
    completions, greedy = whole.generate(asked), [ids.tolist() for ids in whole.greedy(PROMPTS, 9, (1,))]
    assert max(len(completion.token_ids) for completion in completions[0]) > 10
    prefilled = [PrefillRequest(prompt, completions[i][0].token_ids, 0.8) for i, prompt in enumerate(PROMPTS)]
    expected = whole.prefill(prefilled)
    if patched:
        monkeypatch.setattr(patched, value)
    cut = TorchEngine.wrap(model, **limits)
    assert exactly(cut.generate(asked)) == exactly(completions)
    assert [ids.tolist() for ids in cut.greedy(PROMPTS, 9, (1,))] == greedy
    for one, two in zip(expected, cut.prefill(prefilled), strict=True):
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-4)


def test_finished_rows_leave_the_batch():
    """The rows that go through the model shrink as completions end (a policy whose completions differ in length)."""
    loaded = load_model("tiny")
    model, encode = loaded.model, loaded.tokenizer.encode
    engine = TorchEngine.wrap(model)
    asked = [GenerationRequest(encode(p), tuple(range(16)), SAMPLING) for p in ("31=", "4321=", "654321=", "87654321=")]
    engine.rows_at_once(1)  # the cache is measured
    rows = []
    with model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape), with_kwargs=True
    ):
        completions = [c for group in engine.generate(asked) for c in group]
    assert rows[0] == (4, 9)  # each prompt once, not once per sample
    assert rows[1][0] == 64
    assert rows[-1][0] < 64
    computed = sum(shape[0] for shape in rows[1:])
    needed = sum(len(completion.token_ids) - 1 for completion in completions)
    assert needed <= computed < 1.3 * needed


def test_weights_that_do_not_fit_leave_no_policy_behind():
    loaded = load_model("tiny")
    engine = TorchEngine(loaded.files)
    views = policy_views(loaded.model)
    engine.load_policy(REF, views)
    del views["lm_head.weight"]
    with pytest.raises(ModelError, match="another model"):
        engine.load_policy(REF, views)
    assert engine.policy is None


def test_a_wrapped_model_is_used_as_it_is_and_keeps_its_mode(model):
    model.train()
    engine = TorchEngine.wrap(model)
    before = engine.greedy(PROMPTS[:1], 5, (1,))[0].tolist()
    assert model.training
    bias = torch.zeros_like(model.lm_head.weight)
    bias[before[0]] = -10.0 * model.lm_head.weight.detach()[before[0]].sign()
    with torch.no_grad():
        model.lm_head.weight.add_(bias)
    after = engine.greedy(PROMPTS[:1], 5, (1,))[0].tolist()
    with torch.no_grad():
        model.lm_head.weight.sub_(bias)
    assert before != after
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.eval() is model


def test_a_prompt_that_a_group_shares_is_computed_once_and_changes_nothing(model):
    engine = TorchEngine.wrap(model)
    tokens = [np.arange(5, 5 + length, dtype=np.int32) for length in (1, 9, 4, 9, 1, 6)]
    asked = [PrefillRequest(PROMPTS[3], ids, 0.8) for ids in tokens] + [PrefillRequest(PROMPTS[1], tokens[1], 0.8)]
    shapes = []
    with model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    ):
        together = engine.prefill(asked, ProofParameters())
    assert shapes == [(2, 20), (7, 8)]
    for request, found in zip(asked, together, strict=True):
        [alone] = engine.prefill([request], ProofParameters())
        np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=1e-4)
        np.testing.assert_allclose(found.cdf_low, alone.cdf_low, atol=1e-5)
        assert check_proofs(compare(found.points, commit(alone.points))).passed
    only_first = [PrefillRequest(PROMPTS[3], ids, 0.8) for ids in (tokens[0], tokens[4])]
    assert len(engine.prefill(only_first)) == 2  # nothing comes after the prompt but the token that is asked about


def test_proofs_are_computed_once_whether_they_are_shown_or_not(model, monkeypatch):
    committed: list[int] = []

    def counting(points):
        committed.append(len(points))
        return commit(points)

    monkeypatch.setattr("shoal.engines.plain.commit", counting)
    engine, proof = TorchEngine.wrap(model), ProofParameters(topk=16, rows=2)
    plain = engine.generate(requests(), proof)
    total = sum(committed)
    committed.clear()
    shown = engine.generate([replace(each, on_chunks=lambda take: take()) for each in requests()], proof)
    assert sum(committed) == total
    assert exactly(shown) == exactly(plain)


PAGE_PROOF = ProofParameters(topk=16, rows=16)
SHAPE = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def engine(tiny, pages: bool | None, rows: int = 2048) -> TorchEngine:
    """With pages, as on a GPU; None: as on a processor."""
    made = TorchEngine(tiny.files, max_rows=rows, pages=pages)
    made.load_policy(None, policy_views(tiny.model))
    return made


def page_requests(tiny) -> list[GenerationRequest]:
    """Prompts of one to forty tokens, limits of 20 and 70 tokens, two temperatures; some end by themselves."""
    prompts = ("1=", "3142=", "9" * 36 + "=", "51=")
    samplings = [
        SamplingParameters(temperature=heat, max_new_tokens=limit, eos_token_ids=eos)
        for heat, limit, eos in ((1.0, 20, tiny.eos_token_ids), (0.7, 70, (500,)))
    ]
    return [
        GenerationRequest(tiny.tokenizer.encode(prompt), tuple(range(100 * n, 100 * n + 5)), samplings[n % 2])
        for n, prompt in enumerate(prompts)
    ]


both_devices = pytest.mark.parametrize("pages", [True, None], ids=["gpu", "processor"])


@both_devices
@pytest.mark.parametrize("rows", [2, 5])
def test_rows_that_wait_for_a_place_are_drawn_as_if_alone(tiny, monkeypatch, pages, rows) -> None:
    expected = engine(tiny, pages=False).generate(page_requests(tiny), PAGE_PROOF)
    monkeypatch.setattr(decoder, "SIZES", (rows,))
    assert_same(engine(tiny, pages=pages, rows=rows).generate(page_requests(tiny), PAGE_PROOF), expected)


@both_devices
@pytest.mark.parametrize("rows", [3, 2048])
def test_a_group_computes_its_prompt_once(tiny, monkeypatch, pages, rows) -> None:
    """Also if its rows get their places one after the other."""
    monkeypatch.setattr(decoder, "SIZES", (min(rows, 64),))
    worker = engine(tiny, pages, rows)
    worker.generate(page_requests(tiny)[:1])  # the trial
    seen = []
    original = type(worker.model.base_model).forward
    monkeypatch.setattr(
        type(worker.model.base_model), "forward",
        lambda self, input_ids, **more: (seen.append(tuple(input_ids.shape)), original(self, input_ids, **more))[1],
    )  # fmt: skip
    worker.generate(page_requests(tiny))
    prompts = [len(request.prompt_ids) - 1 for request in page_requests(tiny)]
    if rows > 3:
        assert [shape for shape in seen if shape[1] > 1] == [(len(prompts), max(prompts))]
    else:
        assert sum(count for count, length in seen if length > 1) == sum(length > 1 for length in prompts)


def test_a_place_is_taken_as_soon_as_its_row_has_ended(tiny, monkeypatch) -> None:
    """One long row and many short ones in two places: the steps are those of the long one, or hardly more."""
    long, short = (SamplingParameters(temperature=1.0, max_new_tokens=limit, eos_token_ids=(500,)) for limit in (96, 4))
    asked = [GenerationRequest((5, 6), (1,), long), GenerationRequest((5, 6), tuple(range(16)), short)]
    monkeypatch.setattr(decoder, "SIZES", (2,))
    monkeypatch.setattr(CpuDecoder, "guessing_rows", 0)
    worker, steps = engine(tiny, None, rows=2), []
    worker.generate(asked[1:])  # the trial
    states = DenseModel.states

    def counted(self, cache, ids, *more):
        steps.append(len(ids))
        return states(self, cache, ids, *more)

    monkeypatch.setattr(DenseModel, "states", counted)
    worker.generate(asked)
    assert sum(steps) == 96 + 16 * 4, "who has ended is not computed"
    assert len(steps) == 96, "and nobody waits for the long one"


@both_devices
def test_when_memory_runs_out_whole_chunks_are_kept_and_the_rest_is_drawn(tiny, monkeypatch, pages) -> None:
    worker, shown = engine(tiny, pages), []
    asked = page_requests(tiny)
    expected = engine(tiny, pages=False).generate(asked, PAGE_PROOF)
    worker.generate(asked[:1], PAGE_PROOF)
    kind = PagedDecoder if pages else CpuDecoder
    original, calls = kind.run, iter((False, False, True))

    def run(self, *more) -> None:
        if next(calls, False):
            raise torch.OutOfMemoryError("out of memory")
        original(self, *more)

    monkeypatch.setattr(kind, "run", run)
    told = replace(asked[1], on_chunks=lambda chunks: shown.append(chunks()))
    assert_same(worker.generate([asked[0], told, *asked[2:]], PAGE_PROOF), expected)
    assert next(calls, None) is None
    for chunks in shown:  # what was shown before memory ran out is how the completion begins
        for seed, each in chunks.items():
            assert begins(each, expected[1][asked[1].seeds.index(seed)])


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE),
        MistralConfig(**SHAPE, sliding_window=8),
        Gemma3TextConfig(**SHAPE, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_gives_the_same_states_is_decoded_with_pages(config) -> None:
    """On a processor those that its forward pass knows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.inference_mode():
        assert paged_decoder(model, 10**9) is not None
        assert (paged_decoder(model, 10**9, CpuDecoder) is None) == (config.model_type == "gemma3_text")


@pytest.mark.parametrize("wrong", ["its attention caps scores", "its window is ignored"])
def test_a_model_that_would_give_other_states_is_not(wrong: str, caplog, monkeypatch) -> None:
    torch.manual_seed(0)
    capped = wrong == "its attention caps scores"
    config = Gemma2Config(**SHAPE) if capped else MistralConfig(**SHAPE, sliding_window=8)
    model = AutoModelForCausalLM.from_config(config)
    if not capped:
        monkeypatch.setattr("shoal.engines.page_cache.attend", lambda *given: attend(*given[:5]))
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(8)
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        assert paged_decoder(model.eval(), 10**9) is None
    assert "decoded without pages and graphs" in caplog.text


@pytest.mark.parametrize("window", [None, 3, 40])
def test_attention_over_pages_is_attention_over_the_tokens_in_them(window: int | None) -> None:
    torch.manual_seed(0)
    stored = (torch.randn(7, 2, PAGE, 8), torch.randn(7, 2, PAGE, 8))
    table, counts, query = torch.tensor([[3, 1], [5, 2]]), torch.tensor([PAGE + 5, 2]), torch.randn(2, 4, 8)
    found = attend(query, stored, table.int(), counts.int(), 0.5, window)
    for row, count in enumerate(counts.tolist()):
        first = max(0, count - (window or count))
        keys, values = (torch.cat([each[page] for page in table[row]], dim=1)[:, first:count] for each in stored)
        for head in range(4):
            weights = torch.softmax(0.5 * keys[head // 2] @ query[row, head], dim=0)
            torch.testing.assert_close(found[row, head], weights @ values[head // 2])
