"""The cheats without a run: what they ask of the engine and what they hand on, on the scripted engine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest

from shoal.engines import Completion, Engine, GenerationRequest, PrefillRequest
from shoal.engines.scripted import ScriptedEngine
from shoal.errors import ConfigError
from shoal.protocol import PolicyRef, SamplingParameters, TensorView
from shoal.runtime.stop import StopToken
from shoal.validator import checks
from shoal.worker import WorkerConfig, WorkerSettings, run_worker
from shoal.worker.cheats import CHEATS, TRIES, Loot, Worth, find_cheat, own_seeds

SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=6, eos_token_id=1)
REQUESTS = [GenerationRequest((10, 11), (1, 2, 3), SAMPLING), GenerationRequest((12,), (4, 5), SAMPLING)]
REF = PolicyRef(incarnation=0, version=3, digest="d" * 64)
TENSORS = {"w": TensorView("w", "F32", (1,), memoryview(np.ones(1, dtype="<f4")).cast("B"))}
NOTHING = Loot({}, "my-own")


class Asked(ScriptedEngine):
    """Remembers the seeds it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[tuple[int, ...]] = []

    def generate(self, requests: Sequence[GenerationRequest], keep_hidden: bool = False) -> list[list[Completion]]:
        self.seeds += [request.seeds for request in requests]
        return super().generate(requests, keep_hidden)


def loaded(name: str) -> tuple[Asked, Engine]:
    asked = Asked()
    engine = CHEATS[name].engine(asked, NOTHING)
    engine.load_policy(REF, TENSORS)
    return asked, engine


def tokens(groups: Sequence[Sequence[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids.tolist() for completion in group] for group in groups]


@pytest.mark.parametrize("name", CHEATS)
def test_from_outside_it_is_the_engine_it_hides(name: str) -> None:
    asked, engine = loaded(name)
    assert isinstance(engine, Engine)
    assert (engine.name, engine.policy, engine.vocabulary_size) == ("scripted", REF, asked.vocabulary_size)
    assert [len(group) for group in engine.generate(REQUESTS)] == [3, 2]
    request = PrefillRequest((10, 11), np.array([7, 8], dtype=np.int32), 1.0)
    assert engine.prefill([request])[0].logprobs.tolist() == asked.prefill([request])[0].logprobs.tolist()
    assert engine.greedy([(10,)], 4, 1)[0].tolist() == asked.greedy([(10,)], 4, 1)[0].tolist()


@pytest.mark.parametrize("name", CHEATS)
def test_its_words_and_reasons_are_for_people_and_for_the_table_of_checks(name: str) -> None:
    cheat = CHEATS[name]
    table = set(re.findall(r"^\| ([a-z_.]+) +\|", checks.__doc__ or "", re.MULTILINE))
    assert cheat.name == name
    assert cheat.reasons <= table
    assert cheat.reasons
    assert len(cheat.what.split()) > 5


def test_best_of_rolls_other_dice_and_takes_the_likeliest_without_a_reward() -> None:
    asked, engine = loaded("best-of")
    groups = engine.generate(REQUESTS)
    assert asked.seeds == [own_seeds((1, 2, 3)), own_seeds((4, 5))]
    [candidates] = asked.generate([GenerationRequest((12,), own_seeds((4, 5)), SAMPLING)])
    best = [max(candidates[i : i + TRIES], key=lambda c: c.logprobs.sum()) for i in (0, TRIES)]
    assert tokens([groups[1]]) == tokens([best])


def test_its_own_dice_are_all_different_and_always_the_same() -> None:
    seeds = own_seeds((1, 2, 3))
    assert len({*seeds, 1, 2, 3}) == 3 * TRIES + 3
    assert own_seeds((1, 2, 3)) == seeds
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_without_a_tokenizer_or_with_an_unknown_environment_only_likelihood_is_left() -> None:
    completion = Completion(np.array([5], dtype=np.int32), np.array([-0.5], dtype=np.float32), "length")
    for loot in (Loot({}, "sort"), NOTHING):
        assert Worth(loot).of((10,))(completion) == -0.5


def test_copy_hands_in_the_first_of_a_group_for_all() -> None:
    asked, engine = loaded("copy")
    groups = tokens(engine.generate(REQUESTS))
    assert asked.seeds == [(1,), (4,)]
    honest = tokens(asked.generate(REQUESTS))
    assert groups == [[honest[0][0]] * 3, [honest[1][0]] * 2]


def test_an_unknown_cheat_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="there is no cheat 'bribe'; there are best-of, copy, stale"):
        find_cheat("bribe")


@pytest.mark.parametrize(("engine", "cheat"), [("steam", None), ("scripted", "bribe")])
def test_a_name_that_is_not_there_makes_nothing_anywhere(tmp_path: Path, engine: str, cheat: str | None) -> None:
    asked: list[httpx.Request] = []
    http = httpx.Client(transport=httpx.MockTransport(lambda request: asked.append(request) or httpx.Response(500)))
    folder = tmp_path / "node"
    config = WorkerConfig(folder, WorkerSettings(hub_patience_s=1), engine, "http://hub", None, "n", http, cheat)
    with pytest.raises(ConfigError, match="there is no"):
        run_worker(config, StopToken())
    assert asked == []
    assert not folder.exists()
