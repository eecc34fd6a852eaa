"""One training step: groups in, changed weights and numbers out. No hub, no files, no clock, no algorithm.

    groups ─prepare─► samples by group ─minibatches─► shares of micro-batches ─► one `Update` per minibatch
                                                          └ log-probabilities of the step's beginning, if the loss asks

Normalisation: a minibatch's loss is (its tokens' losses, each weighted) × minibatches, and the weights follow from the
counts of the whole step. So a token weighs the same in whatever minibatch, micro-batch or process it stands.

Tokens that the environment gave are read, and carry no loss: none of them is among the tokens that are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.algorithms.packing import micro_batches, minibatches, packs, shares
from shoal.algorithms.registry import NEEDS_RECOMPUTED
from shoal.algorithms.terms import normalised
from shoal.protocol import TrainingGroup
from shoal.trainer.learner import Learner, learning_rate
from shoal.trainer.samples import Prepared, Sample, all_recorded, check_groups, prepare
from shoal.trainer.update import Micro, StepPlan, Stopped, Tally, Update, Veto

__all__ = ["StepPlan", "StepWork", "Stopped", "Veto", "look_back", "mean_loss", "train_samples", "train_step"]


OLDEST_SHOWN = 15  # of the shares of groups by age
HUGE = 1e8  # weights beyond that are broken: the product of five is more than float32 holds


@dataclass(frozen=True)
class StepWork:
    """Everything that determines a step, beside the learner's state."""

    step: int
    groups: Sequence[TrainingGroup]
    temperature: float
    max_staleness: int
    seed: int = 0
    max_new_tokens: int | None = None  # the run's limit, for `normalisation = "constant"`

    @property
    def plan(self) -> StepPlan:
        return StepPlan(self.step, self.temperature, self.seed, max_new_tokens=self.max_new_tokens)


def train_step(
    learner: Learner, work: StepWork, interrupted: Callable[[], bool] = lambda: False,
    veto: Veto = lambda _numbers: None,
) -> dict[str, float]:  # fmt: skip
    """Train on the groups of one step; the same learner and work give the same weights, bit for bit on a CPU. A step
    without any signal changes nothing (not even by weight decay) and says so: `tokens` is 0."""
    vocabulary = learner.model.get_output_embeddings().weight.shape[0]
    check_groups(work.groups, work.step, work.max_staleness, vocabulary)
    prepared = prepare(work.groups, learner.advantage, learner.settings.mask_truncated)
    return {**_batch_metrics(work, prepared), **train_samples(learner, prepared, work.plan, interrupted, veto)}


def look_back(learner: Learner, work: StepWork, interrupted: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """How the policy as it is now sees the groups of a step that it was trained on: forward passes only. `mismatch` and
    `mismatch_kl` as of a step that begins; not finite where weights are not, or might as well not be."""
    update, tally, samples = Update(learner, work.plan, interrupted), Tally(), all_recorded(work.groups)
    for batch in _share(learner, samples, lambda _own: 0.0) if samples else ():
        update.look(batch, tally)
    # Every weight must be a number that can be computed with; a norm turns what overflows into a calm 0.
    own = (each.to_local() if isinstance(each, DTensor) else each for each in learner.trained().values())
    broken = learner.ranks.any(not all(bool((weight.detach().abs() < HUGE).all()) for weight in own))
    return {**(tally.reduced(learner.ranks).means() if samples else {}), "weights": math.nan if broken else 0.0}


def mean_loss(learner: Learner, samples: Sequence[Sample], interrupted: Callable[[], bool]) -> float:
    """What the tokens of these samples cost the policy as it is, in nats each: forward passes only, in one process."""
    update, batches = Update(learner, StepPlan(0, 1.0), interrupted), _share(learner, samples, lambda _own: 0.0)
    total = sum(float(update.logprobs(batch).double().sum()) for batch in batches)
    return -total / sum(sample.trained for sample in samples)


def train_samples(
    learner: Learner, prepared: Prepared, plan: StepPlan, interrupted: Callable[[], bool] = lambda: False,
    veto: Veto = lambda _numbers: None,
) -> dict[str, float]:  # fmt: skip
    """The same for samples that no hub has sent. `veto` is asked before every optimizer step, with its numbers."""
    rate, update, settings = 0.0, Update(learner, plan, interrupted, veto), learner.settings
    groups = [group for each in prepared.groups if (group := [sample for sample in each if sample.trained])]
    split = minibatches(len(groups), settings.minibatches, seed=plan.seed, step=plan.step)
    lengths = [sample.trained for group in groups for sample in group]
    own_weight = normalised(settings.objective.normalisation, lengths, plan.max_new_tokens)
    # The micro-batches of this process, by minibatch; as many as every other process has.
    weight = lambda own: own_weight(own) * len(split)  # noqa: E731
    parts = [_share(learner, [sample for index in part for sample in groups[index]], weight) for part in split]
    # By minibatch and micro-batch, the log-probabilities of the policy that the step begins with, if the loss takes
    # them. Those of the first minibatch come with its own forward pass: nothing is learnt before it.
    recomputed: list[list[Tensor] | None] = [None] * len(parts)
    if settings.loss in NEEDS_RECOMPUTED or settings.objective.ratio_base == "recomputed":
        recomputed[1:] = [[update.logprobs(batch) for batch in batches] for batches in parts[1:]]
    for number, batches in enumerate(parts):
        rate = learning_rate(settings, plan.step, number) * plan.rate_factor
        for parameters in learner.optimizer.param_groups:
            parameters["lr"] = rate
        update.run(batches, recomputed[number], first=number == 0)
    return {"learning_rate": rate, "tokens": float(prepared.tokens), **update.totals.metrics()}


def _share(learner: Learner, samples: Sequence[Sample], weight: Callable[[int], float]) -> list[Micro]:
    """The micro-batches of this process; `weight` of a token, by how many of its sample are trained on."""
    budget, world = learner.settings.micro_batch_tokens, learner.ranks.world
    lengths = [sample.length for sample in samples]
    bins = packs(lengths, budget, learner.cost, world) if learner.packed else micro_batches(lengths, budget, world)
    costs = [sum(learner.cost.of(lengths[index]) for index in rows) for rows in bins]
    own = ([samples[index] for index in rows] for rows in shares(bins, costs, world)[learner.ranks.rank])
    return [Micro(batch, [weight(sample.trained) for sample in batch]) for batch in own]


def _batch_metrics(work: StepWork, prepared: Prepared) -> Mapping[str, float]:
    values = [rollout.reward for group in work.groups for rollout in group.rollouts]
    rewards = np.array([value for value in values if math.isfinite(value)])
    with np.errstate(over="ignore"):  # rewards of 1e200 have no variance
        measured = {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())} if len(rewards) else {}
    ages = np.array([work.step - group.version for group in work.groups], np.int64)
    counts = np.bincount(np.minimum(ages, OLDEST_SHOWN))  # the last one holds all that are older
    return {
        **measured,
        **{f"staleness_{age}": count / len(ages) for age, count in enumerate(counts.tolist())},
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": float(ages.max(initial=0)),
        "groups": float(len(prepared.groups)),
        "dropped_groups": float(prepared.without_signal),
        "no_sample": float(prepared.unscored),
        "truncated_fraction": prepared.truncated / max(1, prepared.rollouts),
    }
