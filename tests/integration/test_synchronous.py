"""Staleness 0 is ordinary synchronous reinforcement learning, number for number.

The same run twice: once through hub, origin, workers, validator and trainer (a thread each, real HTTP), once as the
plain loop below, which knows no lease and no hub. Every version's weights must be the same, bit for bit: the digests
are compared. And `--solo`, which has no hub either, draws the same tokens and writes down the same batches.
"""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from kit import Patch, TempPaths
from kit.roles import Sections, prepared, running_roles
from kit.run import rows
from kit.solo import solo_digests, solo_twin
from shoal.engines import GenerationRequest
from shoal.engines.groups import generate
from shoal.engines.torch import TorchEngine
from shoal.environments import Environment, build
from shoal.hub.state.draws import task_index, unit_seeds
from shoal.models import TextTokenizer
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import policy_views
from shoal.protocol import SamplingParameters, TrainingGroup, TrainingRollout, pack_logprobs, pack_tokens
from shoal.run.folder import RunFolder
from shoal.run.solo import run_solo
from shoal.runtime.stop import StopToken
from shoal.shardcast import digest_of
from shoal.trainer.learner import new_learner
from shoal.trainer.step import StepWork, train_step

STEPS = 3
DEADLINE_S = 240


@pytest.fixture(scope="module")
def run(tmp_path_factory: TempPaths) -> RunFolder:
    recipe: Sections = {
        "run": {"steps": STEPS, "groups_per_step": 4, "group_size": 8, "max_staleness": 0, "max_new_tokens": 10},
        "trainer": {"learning_rate": 1e-4, "minibatches": 2, "evaluate_every": 0},
        "worker": {"count": 2, "units_per_lease": 1},  # two that race: a batch must not depend on who is first
        "hub": {"port": 0, "refill_cap": 50},  # no step may end short: the loop below never does
        "relay": {"count": 0},
    }
    folder = prepared(tmp_path_factory.mktemp("run") / "sync", recipe)
    with running_roles(folder, "hub", "origin", "trainer", "validator-0", "worker-0", "worker-1") as roles:
        roles["trainer"].result(DEADLINE_S)
    return folder


def published_digests(folder: RunFolder) -> list[str]:
    """The digest of every version, as the trainer signed and announced it; a finished run's origin keeps the last."""
    return [digest for (digest,) in rows(folder.path, "SELECT digest FROM policies ORDER BY version")]


def synchronous_digests(folder: RunFolder) -> list[str]:
    """Generate with the newest weights, score, train; again and again. Equal rewards: take the next task."""
    recipe = folder.recipe
    loaded = load_model(recipe.model.path)
    learner = new_learner(loaded.model, recipe.trainer)
    engine = TorchEngine.wrap(loaded.model, pages=True)  # as the worker decodes
    environment = build(recipe.environment)
    digests = [digest(loaded)]
    unit = 0
    for step in range(STEPS):
        groups: list[TrainingGroup] = []
        while len(groups) < recipe.run.groups_per_step:
            group = generate_and_score(engine, loaded.tokenizer, environment, folder, unit, step)
            unit += 1
            if len({rollout.reward for rollout in group.rollouts}) > 1:
                groups.append(group)
        train_step(learner, StepWork(step, groups, recipe.run.temperature, 0, recipe.run.seed))
        digests.append(digest(loaded))
    return digests


def digest(loaded: LoadedModel) -> str:
    return digest_of(loaded.files, list(policy_views(loaded.model).values()))


def generate_and_score(
    engine: TorchEngine, tokenizer: TextTokenizer, environment: Environment, folder: RunFolder, unit: int, version: int
) -> TrainingGroup:
    secret = bytes.fromhex((folder.path / "hub" / "secret").read_text())
    settings = folder.recipe.run
    tasks = environment.tasks("train")
    task = tasks[task_index(len(tasks), settings.seed, unit)]
    prompt = tokenizer.encode(task.prompt)
    seeds = tuple(int(seed, 16) for seed in unit_seeds(secret, folder.run_id, unit, settings.group_size))
    sampling = SamplingParameters(
        temperature=settings.temperature, max_new_tokens=settings.max_new_tokens, eos_token_ids=tokenizer.eos_token_ids
    )
    [completions] = engine.generate([GenerationRequest(prompt, seeds, sampling)])
    rollouts = []
    for each in completions:
        reward = environment.score(task, tokenizer.decode(each.token_ids.tolist())).value
        tokens, logprobs = pack_tokens(each.token_ids), pack_logprobs(each.logprobs)
        rollouts.append(TrainingRollout(tokens, logprobs, each.finish, reward))
    return TrainingGroup(unit, task.id, version, pack_tokens(np.array(prompt)), rollouts)


def test_every_version_equals_the_plain_loop(run: RunFolder) -> None:
    digests = synchronous_digests(run)
    assert len(set(digests)) == STEPS + 1, "the loop did not train: the comparison would be vacuous"
    assert published_digests(run) == digests


def test_solo_has_the_same_tokens_batches_and_weights(run: RunFolder, tmp_path: Path, monkeypatch: Patch) -> None:
    """Group by group, as those workers: how many rows are computed together changes the last bits."""
    alone = lambda loaded, leases, **named: [generate(loaded, [lease], **named)[0] for lease in leases]  # noqa: E731
    monkeypatch.setattr("shoal.run.solo.generate", alone)
    solo = solo_twin(run, tmp_path / "solo")
    run_solo(solo, StopToken(), lambda _: None)
    theirs, own = (pq.read_table(each.path / "trainer" / "rollouts").drop(["node"]) for each in (run, solo))
    assert len(own) == STEPS * 4 * 8
    assert own.equals(theirs)
    assert solo_digests(solo) == published_digests(run)
