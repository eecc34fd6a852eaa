"""Memory that runs out: batches are halved, groups are split, and what comes out is what would have come out anyway."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kit import engines as kit_engines
from kit.tiny import build_tiny
from shoal.engines import Chunks, GenerationRequest, PrefillRequest, memory
from shoal.engines import torch as engine_module
from shoal.engines.memory import PATIENCE, Room, is_out_of_memory, release_memory
from shoal.engines.torch import TorchEngine
from shoal.errors import ResourceError
from shoal.protocol import ProofParameters, SamplingParameters

SAMPLING = SamplingParameters(temperature=0.8, max_new_tokens=24, eos_token_ids=(1,))
PROOF = ProofParameters(topk=16, rows=4)
PROMPTS = [tuple(range(10, 10 + length)) for length in (1, 7, 3, 20)]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """And what is there by now costs no time when memory is released, which is often here."""
    model = build_tiny(5)
    gc.freeze()
    yield model
    gc.unfreeze()


@contextmanager
def small_device(model: Any, rows: int = 10**9, cells: int = 10**9) -> Iterator[list[tuple[int, int]]]:
    """A device that holds so many rows, and so many tokens of all rows together; yields what it refused."""
    refused: list[tuple[int, int]] = []

    def weigh(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        count, length = kwargs["input_ids"].shape
        if kwargs.get("attention_mask") is not None:
            length = kwargs["attention_mask"].shape[1]
        if count > rows or count * length > cells:
            refused.append((count, length))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with model.base_model.register_forward_pre_hook(weigh, with_kwargs=True):
        yield refused


def requests(seeds_each: int = 4, **more: Any) -> list[GenerationRequest]:
    seeds = [tuple(range(100 * i, 100 * i + seeds_each)) for i in range(len(PROMPTS))]
    return [GenerationRequest(prompt, own, SAMPLING, **more) for prompt, own in zip(PROMPTS, seeds, strict=True)]


def continued(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether memory ran out in the middle of completions."""
    return any(isinstance(record.args, tuple) and record.args[2:] > (0,) for record in caplog.records)


assert_same = partial(kit_engines.assert_same, proofs=False)


@pytest.mark.parametrize("limits", [{"rows": 3}, {"cells": 130}, {"cells": 45}], ids=str)
def test_a_device_that_is_too_small_draws_the_same_completions_with_proofs_that_hold(model, limits, caplog) -> None:
    expected = TorchEngine.wrap(model).generate(requests(), PROOF)
    engine = TorchEngine.wrap(model)
    with small_device(model, **limits) as refused:
        found = engine.generate(requests(), PROOF)
        assert refused
        assert_same(found, expected)
        held = len(refused)
        assert_same(engine.generate(requests(), PROOF), expected)
        assert len(refused) == held, "what does not fit is remembered"
    assert any(len({len(c.token_ids) for c in group}) > 1 for group in expected), "rows that end at different steps"
    assert continued(caplog) or "rows" in limits
    for request, group in zip(requests(), found, strict=True):
        asked = [PrefillRequest(request.prompt_ids, each.token_ids, 0.8) for each in group]
        prefills = TorchEngine.wrap(model).prefill(asked, PROOF)
        assert all(kit_engines.holds(*pair, 64, PROOF) for pair in zip(group, prefills, strict=True))


def test_shown_chunks_hold_after_memory_ran_out(model, caplog) -> None:
    shown: dict[int, list[Chunks]] = {}
    counts: dict[int, list[int]] = {}

    def keep(finished: Any) -> None:
        for seed, chunks in finished().items():
            shown.setdefault(seed, []).append(chunks)

    asked = [
        GenerationRequest(r.prompt_ids, r.seeds, SAMPLING, counts.setdefault(i, []).append, keep)
        for i, r in enumerate(requests())
    ]
    with small_device(model, cells=130):
        groups = TorchEngine.wrap(model).generate(asked, PROOF)
    assert continued(caplog), "after chunks had been shown"
    for request, group in zip(asked, groups, strict=True):
        for seed, completion in zip(request.seeds, group, strict=True):
            assert all(kit_engines.begins(chunks, completion) for chunks in shown[seed])
    for group, told in zip(groups, counts.values(), strict=True):
        total = sum(len(completion.token_ids) for completion in group)
        assert max(told) <= total
        assert max(told) > total // 2, "rows of a group that are not in the batch count, too"


def test_dialogues_are_continued_where_they_were(model, caplog) -> None:
    def respond(token_ids: list[int]) -> tuple[int, ...] | None:
        return (7, 8, 9) if token_ids.count(EARLY) < 3 else None

    sampling = SAMPLING.model_copy(update={"eos_token_ids": (EARLY,)})
    asked = [GenerationRequest(r.prompt_ids, r.seeds, sampling, respond=respond) for r in requests()]
    expected = TorchEngine.wrap(model).generate(asked, PROOF)
    assert any(completion.given for group in expected for completion in group)
    with small_device(model, cells=130):
        assert_same(TorchEngine.wrap(model).generate(asked, PROOF), expected)
    assert continued(caplog)


EARLY = 40  # an end-of-sequence token that the untrained model draws now and then


def test_one_completion_that_does_not_fit_is_said_so(model) -> None:
    with small_device(model, cells=15), pytest.raises(ResourceError, match=r"up to 24 tokens, after a prompt of 1, do"):
        TorchEngine.wrap(model).generate(requests()[:1])


def test_nothing_of_a_failed_attempt_is_held_when_memory_is_released(model, monkeypatch) -> None:
    caches: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        caches.append(weakref.ref(kwargs["past_key_values"]))

    def released() -> None:
        release_memory()
        alive.append(sum(cache() is not None for cache in caches))

    monkeypatch.setattr(engine_module, "release_memory", released)
    with model.base_model.register_forward_pre_hook(note, with_kwargs=True), small_device(model, cells=130):
        TorchEngine.wrap(model).generate(requests(), PROOF)
    assert alive
    assert not any(alive)


def test_a_prefill_that_does_not_fit_is_halved_and_the_same(model) -> None:
    drawn = TorchEngine.wrap(model).generate(requests())
    asked = [PrefillRequest(p, c.token_ids, 0.8) for p, g in zip(PROMPTS, drawn, strict=True) for c in g]
    expected = TorchEngine.wrap(model).prefill(asked, PROOF)
    engine = TorchEngine.wrap(model)
    with small_device(model, rows=3) as refused:
        found = engine.prefill(asked, PROOF)
        assert refused
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-4)
        assert one.points is not None
        assert two.points is not None
        assert one.points.counts.tolist() == two.points.counts.tolist()
    with small_device(model, cells=10), pytest.raises(ResourceError, match="prefill of one sequence"):
        engine.prefill(asked, PROOF)


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
    ids=repr,
)
def test_which_errors_say_that_memory_ran_out_and_others_are_passed_on(model, error: Exception, ran_out: bool) -> None:
    def break_down(*_arguments: Any, **_options: Any) -> None:
        raise error

    assert is_out_of_memory(error) is ran_out
    if not ran_out:
        with model.base_model.register_forward_pre_hook(break_down, with_kwargs=True), pytest.raises(type(error)):
            TorchEngine.wrap(model).generate(requests())


def test_how_much_is_drawn_at_once_follows_from_free_memory(model, monkeypatch) -> None:
    """The tiny model: 3 layers, 2 heads of 32 values, keys and values of 4 bytes, as much again for growth: 3072 bytes
    a token. Of 40 MB free a processor uses half: 6510 tokens, 65 rows of 100."""
    config = model.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (3, 2, 32)
    monkeypatch.setattr("shoal.engines.memory.free_memory_bytes", lambda: 40_000_000)
    engine = TorchEngine.wrap(model)
    assert engine.rows_at_once(100) == 65
    assert engine.rows_at_once(20_000) == 1
    engine.memory_bytes = engine.size_bytes + 4_000_000  # --max-memory
    assert engine.rows_at_once(100) == 6
    monkeypatch.setattr("shoal.engines.memory.free_memory_bytes", lambda: 400_000)
    expected = TorchEngine.wrap(model, max_rows=1).generate(requests())
    with small_device(model, cells=65) as refused:
        assert_same(engine.generate(requests()), expected)
    assert not refused, "what does not fit is not tried"


def test_size_that_did_not_fit_is_forgotten_slowly() -> None:
    room = Room(1000)
    room.failed(600)
    assert room.tokens == 300
    room.fitted(10)  # says nothing about the limit
    for _ in range(PATIENCE - 1):
        room.fitted(300)
    assert room.tokens == 300
    room.fitted(300)
    assert room.tokens == 600
    room.most = 500
    assert room.tokens == 500


def test_a_share_of_a_gpu_bounds_what_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 bytes 900 are free; this process has reserved 80 and uses 50 of them."""
    told: list[float] = []
    monkeypatch.setattr(memory, "_share", 1.0)  # and so afterwards
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (900, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 80)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 50)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", told.append)
    memory.keep_to_share("torch/cpu/float32", 0.3)
    memory.keep_to_share("torch/cuda/bfloat16", 1.0)
    assert memory.free_bytes("cuda") == 900 + 30
    memory.keep_to_share("torch/cuda/bfloat16", 0.3)
    assert memory.free_bytes("cuda") == 300 - 80 + 30
    assert told == [0.3]
