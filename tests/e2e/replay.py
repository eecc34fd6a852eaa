"""Train again, in this process and without a pause, on the batches that a run wrote down."""

import json
from pathlib import Path

from kit.run import rows
from shoal.models.load import load_model
from shoal.models.state import policy_views
from shoal.protocol import Batch, BodyLimits, Submission, TrainingGroup, TrainingRollout, unpack
from shoal.run.folder import RunFolder
from shoal.shardcast import digest_of
from shoal.trainer.learner import make_deterministic, new_learner
from shoal.trainer.step import StepWork, train_step


def announced_digests(folder: Path) -> list[str]:
    """The digest of every version, from the ledger."""
    bodies = [
        json.loads(body) for (body,) in rows(folder, "SELECT body FROM ledger WHERE kind = 'policy' ORDER BY \"index\"")
    ]
    return [body["digest"] for body in bodies]


def replayed_digests(folder: RunFolder) -> list[str]:
    """The digest of every version as one trainer that nobody ever killed computes it from the same batches."""
    settings = folder.recipe.run
    make_deterministic(folder.recipe.trainer)
    loaded = load_model(folder.recipe.model.path)
    learner = new_learner(loaded.model, folder.recipe.trainer)

    def digest() -> str:
        return digest_of(loaded.files, list(policy_views(loaded.model).values()))

    digests = [digest()]
    for batch in batches(folder.path):
        groups = [training_group(folder.path, batch, index) for index in range(len(batch.groups))]
        train_step(learner, StepWork(batch.step, groups, settings.temperature, settings.max_staleness, settings.seed))
        digests.append(digest())
    return digests


def batches(folder: Path) -> list[Batch]:
    documents = rows(folder, "SELECT document FROM batches ORDER BY step")
    return [Batch.model_validate_json(document) for (document,) in documents]


def training_group(folder: Path, batch: Batch, index: int) -> TrainingGroup:
    group = batch.groups[index]
    submission = unpack((folder / "hub" / "blobs" / group.submission).read_bytes(), Submission, BodyLimits())
    rollouts = [
        TrainingRollout(tokens=rollout.tokens, logprobs=rollout.logprobs, finish=rollout.finish, reward=reward)
        for rollout, reward in zip(submission.rollouts, group.rewards, strict=True)
    ]
    return TrainingGroup(
        unit=group.unit, task="", version=group.policy.version, prompt=submission.prompt, rollouts=rollouts
    )
