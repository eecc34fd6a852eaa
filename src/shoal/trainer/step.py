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

from shoal.algorithms.filters import staleness
from shoal.algorithms.packing import micro_batches, minibatches, packs, shares
from shoal.algorithms.registry import NEEDS_RECOMPUTED
from shoal.algorithms.terms import StepCount, token_weight
from shoal.errors import ConfigError
from shoal.protocol import TrainingGroup
from shoal.trainer.learner import Learner, learning_rate
from shoal.trainer.samples import Prepared, Sample, all_recorded, check_staleness, check_tokens, prepare
from shoal.trainer.update import Micro, StepPlan, Stopped, Tally, Totals, Update, Veto

__all__ = ["StepPlan", "StepWork", "Stopped", "Veto", "look_back", "mean_loss", "train_samples", "train_step"]


OLDEST_SHOWN = 15  # of the shares of groups by age
HUGE = 1e8  # a weight beyond that is none: the product of five is more than float32 holds


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
    learner: Learner,
    work: StepWork,
    interrupted: Callable[[], bool] = lambda: False,
    veto: Veto = lambda _numbers: None,
) -> dict[str, float]:
    """Train on the groups of one step; the same learner and work give the same weights, bit for bit on a CPU. A step
    without any signal changes nothing (not even by weight decay) and says so: `tokens` is 0."""
    check_staleness(work.groups, work.step, work.max_staleness)
    check_tokens(work.groups, learner.model.get_output_embeddings().weight.shape[0])
    prepared = prepare(work.groups, learner.advantage, learner.settings.mask_truncated)
    return {**_batch_metrics(work, prepared), **train_samples(learner, prepared, work.plan, interrupted, veto)}


def look_back(learner: Learner, work: StepWork, interrupted: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """How the policy as it is now sees the groups of a step that it was trained on: forward passes only. `mismatch` and
    `mismatch_kl` as of a step that begins; not finite where weights are not, or might as well not be."""
    update, tally = Update(learner, work.plan, Totals(), interrupted, lambda _numbers: None), Tally()
    samples = all_recorded(work.groups)
    for batch in _share(learner, samples, lambda _sample: 0.0) if samples else ():
        update.look(batch, tally)
    # Every weight must be a number that can be computed with; a norm turns what overflows into a calm 0.
    own = (each.to_local() if isinstance(each, DTensor) else each for each in learner.trained().values())
    broken = learner.ranks.any(not all(bool((weight.detach().abs() < HUGE).all()) for weight in own))
    return {**(tally.reduced(learner.ranks).means() if samples else {}), "weights": math.nan if broken else 0.0}


def mean_loss(learner: Learner, samples: Sequence[Sample], interrupted: Callable[[], bool]) -> float:
    """What the tokens of these samples cost the policy as it is, in nats each: forward passes only, in one process."""
    update, total = Update(learner, StepPlan(0, 1.0), Totals(), interrupted, lambda _numbers: None), 0.0
    for batch in _share(learner, samples, lambda _sample: 0.0):
        total -= float(update.logprobs(batch).double().sum())
    return total / sum(sample.trained for sample in samples)


def train_samples(
    learner: Learner, prepared: Prepared, plan: StepPlan, interrupted: Callable[[], bool] = lambda: False,
    veto: Veto = lambda _numbers: None,
) -> dict[str, float]:  # fmt: skip
    """The same for samples that no hub has sent. `veto` is asked before every optimizer step, with its numbers."""
    rate, update = 0.0, Update(learner, plan, Totals(), interrupted, veto)
    groups = [group for each in prepared.groups if (group := [sample for sample in each if sample.trained])]
    split = minibatches(len(groups), learner.settings.minibatches, seed=plan.seed, step=plan.step)
    weight = _weights(learner, groups, plan, len(split))
    # The micro-batches of this process, by minibatch; as many as every other process has.
    parts = [_share(learner, [sample for index in part for sample in groups[index]], weight) for part in split]
    recomputed = _recomputed(update, parts)
    for number, batches in enumerate(parts):
        rate = learning_rate(learner.settings, plan.step, number) * plan.rate_factor
        for parameters in learner.optimizer.param_groups:
            parameters["lr"] = rate
        update.run(batches, recomputed[number], first=number == 0)
    return {"learning_rate": rate, "tokens": float(prepared.tokens), **update.totals.metrics()}


def _share(learner: Learner, samples: Sequence[Sample], weight: Callable[[Sample], float]) -> list[Micro]:
    budget, world = learner.settings.micro_batch_tokens, learner.ranks.world
    lengths = [sample.length for sample in samples]
    bins = packs(lengths, budget, learner.cost, world) if learner.packed else micro_batches(lengths, budget, world)
    costs = [sum(learner.cost.of(lengths[index]) for index in rows) for rows in bins]
    own = shares(bins, costs, world)[learner.ranks.rank]
    batches = [[samples[index] for index in rows] for rows in own]
    return [Micro(batch, [weight(sample) for sample in batch]) for batch in batches]


def _weights(
    learner: Learner, groups: Sequence[Sequence[Sample]], plan: StepPlan, parts: int
) -> Callable[[Sample], float]:
    """What each token of a sample weighs in its minibatch's loss."""
    word, lengths = learner.settings.objective.normalisation, [sample.trained for group in groups for sample in group]
    if word == "constant" and plan.max_new_tokens is None:
        raise ConfigError(
            'trainer.objective.normalisation is "constant", but there is no limit to completions here; use "tokens"'
        )
    count = StepCount(sum(lengths), len(lengths), plan.max_new_tokens or 0)
    return lambda sample: token_weight(word, sample.trained, count) * parts


def _recomputed(update: Update, parts: Sequence[Sequence[Micro]]) -> list[list[Tensor] | None]:
    """By minibatch and micro-batch, the log-probabilities of the policy that the step begins with, if the loss takes
    them. Those of the first minibatch come with its own forward pass: nothing is learnt before it."""
    settings = update.learner.settings
    if settings.loss not in NEEDS_RECOMPUTED and settings.objective.ratio_base != "recomputed":
        return [None] * len(parts)
    return [None, *([update.logprobs(batch) for batch in batches] for batches in parts[1:])]


def _batch_metrics(work: StepWork, prepared: Prepared) -> Mapping[str, float]:
    values = [rollout.reward for group in work.groups for rollout in group.rollouts]
    rewards = np.array([value for value in values if math.isfinite(value)])
    with np.errstate(over="ignore"):  # rewards of 1e200 have no variance
        measured = {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())} if len(rewards) else {}
    ages = np.array([staleness(work.step, group.version) for group in work.groups], np.int64)
    counts = np.bincount(np.minimum(ages, OLDEST_SHOWN))  # the last one holds all that are older
    return {
        **measured,
        **{f"staleness_{age}": count / len(ages) for age, count in enumerate(counts.tolist())},
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": float(ages.max(initial=0)),
        "groups": float(len(prepared.groups)),
        "dropped_groups": float(prepared.without_signal),
        "no_sample": float(prepared.no_sample),
        "truncated_fraction": prepared.truncated / max(1, prepared.rollouts),
    }
