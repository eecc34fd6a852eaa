"""Decoding with pages: rows come and go, groups share their prompt, memory may run out, and a trial decides who may."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig

from shoal.engines import GenerationRequest, paged
from shoal.engines.batching import paged_decoder
from shoal.engines.paged import PagedDecoder
from shoal.engines.pages import PAGE, attend
from shoal.engines.torch import TorchEngine
from shoal.models.load import load_model
from shoal.models.state import policy_views
from shoal.protocol import ProofParameters, SamplingParameters

PROOF = ProofParameters(topk=16, rows=16)
SHAPE = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def engine(tiny, pages: bool, rows: int = 2048) -> TorchEngine:
    made = TorchEngine(tiny.files, max_rows=rows, pages=pages)
    made.load_policy(None, policy_views(tiny.model))
    return made


def requests(tiny) -> list[GenerationRequest]:
    """Prompts of one to forty tokens, limits of 20 and 70 tokens, two temperatures; some end by themselves."""
    prompts = ("1=", "3142=", "9" * 36 + "=", "51=")
    samplings = [
        SamplingParameters(temperature=heat, max_new_tokens=limit, eos_token_id=eos)
        for heat, limit, eos in ((1.0, 20, tiny.eos_token_id), (0.7, 70, 500))
    ]
    return [
        GenerationRequest(tiny.tokenizer.encode(prompt), tuple(range(100 * n, 100 * n + 5)), samplings[n % 2])
        for n, prompt in enumerate(prompts)
    ]


def same(ones, others) -> None:
    for one, other in zip((c for g in ones for c in g), (c for g in others for c in g), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert (one.finish, one.proofs) == (other.finish, other.proofs)


def test_rows_that_wait_for_a_place_are_drawn_as_if_alone(tiny, monkeypatch) -> None:
    expected = engine(tiny, pages=False).generate(requests(tiny), PROOF)
    monkeypatch.setattr(paged, "SIZES", (4,))
    same(engine(tiny, pages=True, rows=4).generate(requests(tiny), PROOF), expected)


def test_a_group_computes_its_prompt_once(tiny, monkeypatch) -> None:
    worker = engine(tiny, pages=True)
    worker.generate(requests(tiny)[:1])  # the trial
    seen = []
    original = type(worker.model.base_model).forward
    monkeypatch.setattr(
        type(worker.model.base_model), "forward",
        lambda self, input_ids, **more: (seen.append(tuple(input_ids.shape)), original(self, input_ids, **more))[1],
    )  # fmt: skip
    worker.generate(requests(tiny))
    prompts = [len(request.prompt_ids) - 1 for request in requests(tiny)]
    assert [shape for shape in seen if shape[1] > 1] == [(len(prompts), max(prompts))]


def test_when_memory_runs_out_whole_chunks_are_kept_and_the_rest_is_drawn(tiny, monkeypatch) -> None:
    worker, shown = engine(tiny, pages=True), []
    asked = requests(tiny)
    expected = engine(tiny, pages=False).generate(asked, PROOF)
    worker.generate(asked[:1], PROOF)
    original, calls = PagedDecoder.run, iter((False, False, True))

    def run(self, *more) -> None:
        if next(calls, False):
            raise torch.OutOfMemoryError("out of memory")
        original(self, *more)

    monkeypatch.setattr(PagedDecoder, "run", run)
    told = GenerationRequest(
        asked[1].prompt_ids, asked[1].seeds, asked[1].sampling, on_chunks=lambda chunks: shown.append(chunks())
    )
    same(worker.generate([asked[0], told, *asked[2:]], PROOF), expected)
    assert next(calls, None) is None
    for chunks in shown:  # what was shown before memory ran out is how the completion begins
        for seed, each in chunks.items():
            whole = expected[1][asked[1].seeds.index(seed)]
            np.testing.assert_array_equal(each.token_ids, whole.token_ids[: len(each.token_ids)])
            assert whole.proofs.startswith(b"".join(each.proofs))


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
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.inference_mode():
        assert paged_decoder(model, 10**9) is not None


@pytest.mark.parametrize("wrong", ["its attention caps scores", "its window is ignored"])
def test_a_model_that_would_give_other_states_is_not(wrong: str, caplog, monkeypatch) -> None:
    torch.manual_seed(0)
    capped = wrong == "its attention caps scores"
    model = AutoModelForCausalLM.from_config(
        Gemma2Config(**SHAPE) if capped else MistralConfig(**SHAPE, sliding_window=8)
    )
    if not capped:
        monkeypatch.setattr("shoal.engines.pages.attend", lambda *given: attend(*given[:5]))
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
