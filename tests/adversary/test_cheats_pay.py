"""Why anyone would cheat: what each cheat gains while nobody looks, on the real engine with the tiny policy.

`benchmarks/cheats.py` measures the same on more groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kit.attack import Counting
from shoal.adversary import Loot, find_cheat
from shoal.adversary.tokens import TRIES
from shoal.engines import Completion, Engine, GenerationRequest
from shoal.engines.torch import TorchEngine
from shoal.environments import EnvironmentSettings, Task, build
from shoal.models.load import LoadedModel, load_model
from shoal.protocol import PolicyManifest, PolicyRef, SamplingParameters
from shoal.shardcast import Payload

GROUPS, GROUP_SIZE = 24, 16
ENVIRONMENT = build(EnvironmentSettings(name="sort"))
TASKS = ENVIRONMENT.tasks("train")[:GROUPS]


@pytest.fixture(scope="module")
def policy() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture
def counting(policy: LoadedModel) -> Counting:
    return Counting(TorchEngine.wrap(policy.model))


def requests(policy: LoadedModel) -> list[GenerationRequest]:
    sampling = SamplingParameters(temperature=1.0, max_new_tokens=10, eos_token_id=policy.tokenizer.eos_token_id)
    return [
        GenerationRequest(policy.tokenizer.encode(task.prompt), tuple(range(start, start + GROUP_SIZE)), sampling)
        for start, task in zip(range(0, 10**6, 1000), TASKS, strict=False)
    ]


def cheating(name: str, engine: Engine, policy: LoadedModel, environment: str = "sort") -> Engine:
    return find_cheat(name).engine(engine, Loot(policy.files, environment, TorchEngine))


def mean_reward(policy: LoadedModel, groups: Sequence[Sequence[Completion]]) -> float:
    def reward(task: Task, completion: Completion) -> float:
        return ENVIRONMENT.score(task, policy.tokenizer.decode(completion.token_ids.tolist())).value

    rewards = [reward(task, each) for task, group in zip(TASKS, groups, strict=True) for each in group]
    return sum(rewards) / len(rewards)


def test_best_of_earns_a_better_reward_for_more_work(policy: LoadedModel, counting: Counting) -> None:
    honest = mean_reward(policy, TorchEngine.wrap(policy.model).generate(requests(policy)))
    chosen = mean_reward(policy, cheating("best-of", counting, policy).generate(requests(policy)))
    assert chosen > honest + 0.03
    assert counting.completions == GROUPS * GROUP_SIZE * TRIES


def test_answer_earns_nearly_the_whole_reward(policy: LoadedModel, counting: Counting) -> None:
    assert mean_reward(policy, cheating("answer", counting, policy).generate(requests(policy))) == 1.0


def test_run_on_is_paid_for_more_tokens(policy: LoadedModel, counting: Counting) -> None:
    def tokens(groups: Sequence[Sequence[Completion]]) -> int:
        return sum(len(each.token_ids) for group in groups for each in group)

    honest = TorchEngine.wrap(policy.model).generate(requests(policy))
    assert tokens(cheating("run-on", counting, policy).generate(requests(policy))) == GROUPS * GROUP_SIZE * 10
    assert tokens(honest) < 0.8 * GROUPS * GROUP_SIZE * 10


def test_stale_downloads_once_and_generates_by_what_it_has(policy: LoadedModel) -> None:
    fetched: list[PolicyRef] = []

    def fetch(ref: PolicyRef, _deadline_s: float) -> Payload:
        fetched.append(ref)
        fields: dict[str, Any] = {"run": "r", "entries": (), "chunk_size_bytes": 1, "chunks": (), "size_bytes": 0}
        return Payload(PolicyManifest(policy=ref, created_at_ms=0, **fields), dict(policy.files), [])

    first = PolicyRef(incarnation=0, version=0, digest="a" * 64)
    later = PolicyRef(incarnation=0, version=7, digest="b" * 64)
    pretend = find_cheat("stale").fetch(fetch)
    assert pretend(first, 1.0).manifest.policy == first
    payload = pretend(later, 1.0)
    assert payload.manifest.policy == later
    assert fetched == [first]
    assert replace(payload, manifest=pretend(first, 1.0).manifest) == pretend(first, 1.0)
