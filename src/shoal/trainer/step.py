"""One training step: groups in, changed weights and metrics out. No hub, no files, no clock.

    groups ─prepare─► samples by group ─minibatches─► micro-batches of each process ─► one `Update` per minibatch
    update: for each micro-batch: forward, loss, backward (summed) ─► norm ─► numbers, the same in every process
        veto(numbers) gives a reason? ─► skipped, counted
        not finite?                   ─► TrainingDiverged, the weights stay
        else                          ─► clip, optimizer step

The loss of a minibatch is the weighted sum of its tokens' losses, times the number of minibatches. Weights follow from
the counts of the whole step, so a token weighs the same in every minibatch, micro-batch and process. A process with
fewer micro-batches than the others computes dummies, which add zero.

Legend: N completion tokens that the model drew (flat).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.algorithms.losses import LossOutput, LossTokens
from shoal.algorithms.packing import micro_batches, minibatches, packs, shares
from shoal.algorithms.registry import NEEDS_RECOMPUTED
from shoal.algorithms.terms import divergence, effective_share, normalised, ratio_sums, with_terms
from shoal.errors import TrainingDiverged
from shoal.models.logprobs import TokenLogprobs
from shoal.models.lora import without_adapters
from shoal.protocol import TrainingGroup
from shoal.trainer.learner import Learner, learning_rate
from shoal.trainer.ranks import Ranks
from shoal.trainer.samples import Prepared, Sample, TensorBatch, all_recorded, check_groups, prepare, score, to_tensors

log = logging.getLogger(__name__)

OLDEST_SHOWN = 15  # staleness with a column of its own
HUGE = 1e8  # larger weights are broken: products of five overflow float32


# Sums that do not become a mean over tokens.
TOKENS, POSITIONS, INPUTS = "_tokens", "_positions", "_inputs"
RATIO, RATIO_SQUARED = "_ratio", "_ratio_squared"


@dataclass
class StepSums:
    """Over all processes, of one update or several. `tokens` counts the tokens behind each sum, so an update that did
    not measure something does not enter its mean."""

    sums: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)

    def add(self, other: StepSums) -> None:
        for mine, theirs in ((self.sums, other.sums), (self.tokens, other.tokens)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0.0) + value
        for name, value in other.peaks.items():
            self.peaks[name] = max(self.peaks.get(name, value), value)

    def means(self) -> dict[str, float]:
        """For example `{"loss": 0.2, "effective_samples": 0.98, "ratio_max": 1.4, …}`."""
        means = {name: total / self.tokens[name] for name, total in self.sums.items() if not name.startswith("_")}
        if INPUTS in self.sums:
            means["padding_fraction"] = 1 - self.sums[INPUTS] / self.sums[POSITIONS]
        if RATIO in self.sums:
            share = effective_share(self.sums[RATIO], self.sums[RATIO_SQUARED], int(self.tokens[RATIO]))
            means["effective_samples"] = share
        return means | self.peaks


@dataclass
class UpdateSums:
    """The sums of one update in this process. Every process adds the same names in the same order."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)

    def add(self, values: Mapping[str, Tensor], peaks: Mapping[str, Tensor], *, counted: bool = True) -> None:
        """Sum per-token values and keep the largest of `peaks`. A dummy (`counted=False`) adds only the names."""
        for name, values_N in values.items():
            values_N = values_N.detach().double()
            total = values_N.sum() if counted else values_N.new_zeros(())
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        for name, values_N in peaks.items():
            values_N = values_N.detach().double()
            peak = values_N.max() if counted else values_N.new_full((), -torch.inf)
            self.peaks[name] = torch.maximum(self.peaks[name], peak) if name in self.peaks else peak

    def reduced(self, ranks: Ranks) -> StepSums:
        """Over all processes. The only wait for the GPU in an update."""
        sums = dict(zip(self.sums, ranks.total(torch.stack(list(self.sums.values()))).tolist(), strict=True))
        peaks = ranks.peak(torch.stack(list(self.peaks.values()))).tolist() if self.peaks else []
        return StepSums(sums, dict.fromkeys(sums, sums[TOKENS]), dict(zip(self.peaks, peaks, strict=True)))


@dataclass
class StepTotals:
    """`grad_norm` is the mean over applied updates, if there is one; `grad_norm_max` is over all."""

    numbers: StepSums = field(default_factory=StepSums)
    grad_norms: list[float] = field(default_factory=list)
    made_norms: list[float] = field(default_factory=list)
    skipped: int = 0

    def metrics(self) -> dict[str, float]:
        skipped = {"skipped_updates": float(self.skipped)}
        if not self.grad_norms:
            return skipped
        norms = {"grad_norm": float(np.mean(self.made_norms or self.grad_norms)), "grad_norm_max": max(self.grad_norms)}
        return {**self.numbers.means(), **norms, **skipped}


Veto = Callable[[Mapping[str, float]], str | None]


class Stopped(Exception):
    """The process was told to stop: memory is dropped, and the last checkpoint is good."""


@dataclass(frozen=True)
class StepWork:
    """Everything that determines a step except the state of the learner. A warm start passes samples instead."""

    step: int
    groups: Sequence[TrainingGroup] = ()
    temperature: float = 1.0
    max_staleness: int = 0
    seed: int = 0
    max_new_tokens: int | None = None  # the run's limit, for `normalisation = "constant"`
    rate_factor: float = 1.0  # of the learning rate, in a warm start
    recorded: bool = True  # whether samples have log-probabilities


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass and the loss weight of their tokens; without samples it is a dummy."""

    samples: Sequence[Sample]
    weights: Sequence[float]


DUMMY = Sample(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.float32), 0.0, np.ones(1, np.bool_))


@dataclass(frozen=True)
class Update:
    learner: Learner
    work: StepWork
    interrupted: Callable[[], bool]
    veto: Veto = lambda _numbers: None
    totals: StepTotals = field(default_factory=StepTotals)

    def run(self, batches: Sequence[MicroBatch], recomputed: Sequence[Tensor] | None, *, first: bool) -> None:
        """`recomputed`: log-probabilities of the starting policy by micro-batch, if needed. The `first` update trains
        on that policy."""
        learner, tally = self.learner, UpdateSums()
        learner.optimizer.zero_grad(set_to_none=True)
        for number, batch in enumerate(batches):
            self._check_stop()
            recomputed_N = recomputed[number] if recomputed else None
            learner, laid, reference_N = self.learner, self._to_tensors(batch), None
            if learner.reference is not None:
                begun = without_adapters(learner.model) if learner.reference is learner.model else nullcontext()
                with torch.no_grad(), begun:
                    reference_N = self._score(learner.reference, laid).logprobs
            scored = self._score(learner.model, laid)
            if recomputed_N is None and first:
                recomputed_N = scored.logprobs.detach()
            tokens = LossTokens(
                logprobs_N=scored.logprobs, behaviour_N=laid.behaviour_N, advantages_N=laid.advantages_N,
                recomputed_N=recomputed_N, reference_N=reference_N, entropy_N=scored.entropy,
                sequence_N=laid.sequence_N,
            )  # fmt: skip
            objective, parameters = learner.settings.objective, learner.loss_parameters
            output = learner.loss(tokens, parameters)
            output = with_terms(output, tokens, parameters, kl=objective.kl, entropy=objective.entropy)
            weights = torch.tensor(batch.weights or [0.0], dtype=torch.float32, device=laid.sequence_N.device)
            torch.autograd.backward((output.loss_N * weights.index_select(0, laid.sequence_N)).sum())
            self._tally(tally, laid, tokens, output, counted=bool(batch.samples))
        gradients = [weight.grad for weight in learner.trained().values() if weight.grad is not None]
        self._finish(tally.reduced(learner.ranks), learner.ranks.norm(gradients))
        learner.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        self._check_stop()
        return self._score(self.learner.model, self._to_tensors(batch)).logprobs

    @torch.no_grad()
    def measure_mismatch(self, batch: MicroBatch, tally: UpdateSums) -> None:
        self._check_stop()
        laid = self._to_tensors(batch)
        difference_N = self._score(self.learner.model, laid).logprobs - laid.behaviour_N
        values = {"mismatch": difference_N.abs(), "mismatch_kl": divergence(difference_N)}
        tally.add({TOKENS: torch.ones_like(difference_N), **values}, {}, counted=bool(batch.samples))

    def _check_stop(self) -> None:
        if self.learner.ranks.any(self.interrupted()):
            raise Stopped

    def _to_tensors(self, batch: MicroBatch) -> TensorBatch:
        return to_tensors(batch.samples or [DUMMY], self.learner.device, packed=self.learner.packed)

    def _score(self, model: object, laid: TensorBatch) -> TokenLogprobs:
        return self.learner.ranks.run(model, lambda: score(model, laid, self.work.temperature))

    @torch.no_grad()
    def _tally(
        self, tally: UpdateSums, laid: TensorBatch, tokens: LossTokens, output: LossOutput, *, counted: bool
    ) -> None:
        ones_N = torch.ones_like(tokens.logprobs_N)
        assert tokens.entropy_N is not None
        values = {TOKENS: ones_N, "loss": output.loss_N, "entropy": tokens.entropy_N, **output.mean}
        peaks = dict(output.peak)
        if self.work.recorded:
            values[RATIO], values[RATIO_SQUARED] = ratio_sums(tokens.logprobs_N - laid.behaviour_N)
        if self.work.recorded and tokens.recomputed_N is not None:
            difference_N = tokens.recomputed_N - laid.behaviour_N
            peaks["mismatch_max"] = values["mismatch"] = difference_N.abs()
            values["mismatch_kl"] = divergence(difference_N)
        values[POSITIONS] = ones_N.new_full((), laid.ids.numel())
        values[INPUTS] = ones_N.new_full((), laid.inputs)
        tally.add(values, peaks, counted=counted)

    def _finish(self, numbers: StepSums, norm: Tensor) -> None:
        """Apply the gradient, skip it, or raise: the same in every process."""
        learner, totals = self.learner, self.totals
        seen = {**numbers.means(), "grad_norm": float(norm)}
        finite = math.isfinite(seen["grad_norm"]) and math.isfinite(seen["loss"])
        reason = self.veto(seen)
        refused = learner.ranks.any(reason is not None)
        if finite:
            totals.numbers.add(numbers)
            totals.grad_norms.append(seen["grad_norm"])
            totals.made_norms += [] if refused else [seen["grad_norm"]]
        if refused:
            totals.skipped += 1
            log.warning("an update of step %d was skipped: %s", self.work.step, reason or "another process refused it")
        elif not finite:
            values = f"loss {seen['loss']}, gradient norm {seen['grad_norm']}"
            advice = "the last checkpoint is good; lower learning_rate, or look at the batch"
            raise TrainingDiverged(f"step {self.work.step} diverged ({values}): {advice}")
        else:
            torch.nn.utils.clip_grads_with_norm_(learner.trained().values(), learner.settings.grad_clip, norm)
            learner.optimizer.step()
            if learner.masters is not None:
                learner.masters.write_back()


def train_step(
    learner: Learner, work: StepWork, interrupted: Callable[[], bool] = lambda: False,
    veto: Veto = lambda _numbers: None,
) -> dict[str, float]:  # fmt: skip
    """The same learner and work give the same weights, bit for bit on a CPU. A step in which no token carries loss
    changes nothing, also not by weight decay: `tokens` is 0."""
    vocabulary = learner.model.get_output_embeddings().weight.shape[0]
    check_groups(work.groups, work.step, work.max_staleness, vocabulary)
    prepared = prepare(work.groups, learner.advantage, learner.settings.mask_truncated)
    values = [rollout.reward for group in work.groups for rollout in group.rollouts]
    rewards = np.array([value for value in values if math.isfinite(value)])
    with np.errstate(over="ignore"):  # rewards of 1e200 have no variance
        measured = {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())} if len(rewards) else {}
    ages = np.array([work.step - group.version for group in work.groups], np.int64)
    counts = np.bincount(np.minimum(ages, OLDEST_SHOWN))  # the last one holds all older ones
    metrics = {
        **measured,
        **{f"staleness_{age}": count / len(ages) for age, count in enumerate(counts.tolist())},
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": float(ages.max(initial=0)),
        "groups": float(len(prepared.groups)),
        "dropped_groups": float(prepared.without_signal),
        "unscored": float(prepared.unscored),
        "truncated_fraction": prepared.truncated / max(1, prepared.rollouts),
    }
    return {**metrics, **train_samples(learner, prepared, work, interrupted, veto)}


def check_policy(learner: Learner, work: StepWork, interrupted: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """Measure the policy on groups that it was trained on, with forward passes only. `weights` is NaN if a weight is
    not finite or huge."""
    update, tally, samples = Update(learner, work, interrupted), UpdateSums(), all_recorded(work.groups)
    for batch in _share(learner, samples, lambda _own: 0.0) if samples else ():
        update.measure_mismatch(batch, tally)
    # Each weight is checked by itself: a norm layer can turn overflowing values into zeros.
    own = (each.to_local() if isinstance(each, DTensor) else each for each in learner.trained().values())
    broken = learner.ranks.any(not all(bool((weight.detach().abs() < HUGE).all()) for weight in own))
    return {**(tally.reduced(learner.ranks).means() if samples else {}), "weights": math.nan if broken else 0.0}


def mean_loss(learner: Learner, samples: Sequence[Sample], interrupted: Callable[[], bool]) -> float:
    """In nats per token: forward passes in one process."""
    update, batches = Update(learner, StepWork(0), interrupted), _share(learner, samples, lambda _own: 0.0)
    total = sum(float(update.logprobs(batch).double().sum()) for batch in batches)
    return -total / sum(sample.trained for sample in samples)


def train_samples(
    learner: Learner, prepared: Prepared, work: StepWork, interrupted: Callable[[], bool] = lambda: False,
    veto: Veto = lambda _numbers: None,
) -> dict[str, float]:  # fmt: skip
    """As `train_step`, for samples that are prepared already. `veto` is asked before every optimizer step."""
    rate, update, settings = 0.0, Update(learner, work, interrupted, veto), learner.settings
    groups = [group for each in prepared.groups if (group := [sample for sample in each if sample.trained])]
    split = minibatches(len(groups), settings.minibatches, seed=work.seed, step=work.step)
    lengths = [sample.trained for group in groups for sample in group]
    own_weight = normalised(settings.objective.normalisation, lengths, work.max_new_tokens)
    # The micro-batches of this process by minibatch; every process has equally many.
    weight = lambda own: own_weight(own) * len(split)  # noqa: E731
    parts = [_share(learner, [sample for index in part for sample in groups[index]], weight) for part in split]
    # Log-probabilities of the starting policy by minibatch and micro-batch, if the loss needs them. The first minibatch
    # gets them from its own forward pass.
    recomputed: list[list[Tensor] | None] = [None] * len(parts)
    if settings.loss in NEEDS_RECOMPUTED or settings.objective.ratio_base == "recomputed":
        recomputed[1:] = [[update.logprobs(batch) for batch in batches] for batches in parts[1:]]
    for number, batches in enumerate(parts):
        rate = learning_rate(settings, work.step, number) * work.rate_factor
        for parameters in learner.optimizer.param_groups:
            parameters["lr"] = rate
        update.run(batches, recomputed[number], first=number == 0)
    return {"learning_rate": rate, "tokens": float(prepared.tokens), **update.totals.metrics()}


def _share(learner: Learner, samples: Sequence[Sample], weight: Callable[[int], float]) -> list[MicroBatch]:
    """The micro-batches of this process. `weight`: of a token, by the number of trained tokens of its sample."""
    budget, world = learner.settings.micro_batch_tokens, learner.ranks.world
    lengths = [sample.length for sample in samples]
    bins = packs(lengths, budget, learner.cost, world) if learner.packed else micro_batches(lengths, budget, world)
    costs = [sum(learner.cost.of(lengths[index]) for index in rows) for rows in bins]
    own = ([samples[index] for index in rows] for rows in shares(bins, costs, world)[learner.ranks.rank])
    return [MicroBatch(batch, [weight(sample.trained) for sample in batch]) for batch in own]
