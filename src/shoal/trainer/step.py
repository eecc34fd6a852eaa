"""One training step: groups in, changed weights and numbers out. No hub, no files, no clock, no algorithm.

    groups ─prepare─► samples by group ─minibatches─► for each: zero gradients
                                                        for each micro-batch: forward, loss, backward (summed)
                                                        finite? ─no─► TrainingDiverged, nothing updated by it
                                                        clip, optimizer step

Normalisation: a minibatch's loss is (its tokens' losses summed) × minibatches / (tokens of the whole step). So every
token of a step weighs the same, in however long a completion, minibatch or micro-batch it stands.

Tokens that the environment gave are read, and carry no loss: none of them is among the tokens that are counted.

Legend: B sequences, L positions, N completion tokens that the model drew (flat), H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms.losses import LossOutput, LossTokens
from shoal.algorithms.packing import micro_batches, minibatches, pad
from shoal.algorithms.staleness import staleness
from shoal.errors import TrainingDiverged
from shoal.models.logprobs import Head, hidden_states, token_logprobs
from shoal.protocol import TrainingGroup
from shoal.trainer.learner import Learner, learning_rate
from shoal.trainer.samples import Prepared, Sample, check_staleness, prepare


class Stopped(Exception):
    """The process was told to stop. Not an error: what is in memory is dropped, the last checkpoint is good."""


@dataclass(frozen=True)
class StepWork:
    """Everything that determines a step, beside the learner's state."""

    step: int
    groups: Sequence[TrainingGroup]
    temperature: float
    max_staleness: int
    seed: int = 0


def train_step(learner: Learner, work: StepWork, interrupted: Callable[[], bool] = lambda: False) -> dict[str, float]:
    """Train on the groups of one step; the same learner and work give the same weights, bit for bit on a CPU.

    A step without any signal changes nothing (not even by weight decay) and says so: `tokens` is 0.
    """
    check_staleness(work.groups, work.step, work.max_staleness)
    prepared = prepare(work.groups, learner.advantage, learner.settings.mask_truncated)
    rate = learning_rate(learner.settings, work.step)
    for parameters in learner.optimizer.param_groups:
        parameters["lr"] = rate
    parts = minibatches(len(prepared.groups), learner.settings.minibatches, seed=work.seed, step=work.step)
    tally = _Tally()
    for number, part in enumerate(parts):
        samples = [sample for index in part for sample in prepared.groups[index]]
        tally.measure_mismatch = number == 0
        _Update(learner, work, tally, len(parts) / prepared.tokens).run(samples, interrupted)
    return {"learning_rate": rate, **_batch_metrics(work, prepared), **tally.metrics()}


@dataclass
class _Tally:
    """Sums over the step's tokens, kept as tensors so that a GPU is not waited for at each micro-batch."""

    tokens: int = 0
    mismatch_tokens: int = 0
    # Only the first minibatch sees the weights that the step began with; later ones differ by what was just learnt.
    measure_mismatch: bool = True
    sums: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)

    def add(self, tokens: LossTokens, output: LossOutput, entropy_N: Tensor) -> None:
        self.tokens += output.loss_N.numel()
        means = {"loss": output.loss_N, "entropy": entropy_N, **output.mean}
        if self.measure_mismatch:
            self.mismatch_tokens += output.loss_N.numel()
            means["mismatch"] = (tokens.logprobs_N - tokens.behaviour_N).abs()
        for name, values_N in means.items():
            total = values_N.detach().double().sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        for name, values_N in output.peak.items():
            peak = values_N.detach().max()
            self.peaks[name] = torch.maximum(self.peaks[name], peak) if name in self.peaks else peak

    def metrics(self) -> dict[str, float]:
        if not self.tokens:
            return {}
        counts = {"mismatch": self.mismatch_tokens}
        means = {name: float(total) / counts.get(name, self.tokens) for name, total in self.sums.items()}
        peaks = {name: float(peak) for name, peak in self.peaks.items()}
        norms = {"grad_norm": float(np.mean(self.grad_norms)), "grad_norm_max": max(self.grad_norms)}
        return {**means, **peaks, **norms}


@dataclass(frozen=True)
class _Update:
    """One optimizer step."""

    learner: Learner
    work: StepWork
    tally: _Tally
    scale: float

    def run(self, samples: Sequence[Sample], interrupted: Callable[[], bool]) -> None:
        learner = self.learner
        learner.optimizer.zero_grad(set_to_none=True)
        lengths = [sample.length for sample in samples]
        losses = []
        for rows in micro_batches(lengths, learner.settings.micro_batch_tokens):
            if interrupted():
                raise Stopped
            losses.append(self._accumulate([samples[row] for row in rows]))
        gradients = [p.grad for p in learner.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._refuse_divergence(math.fsum(float(loss) for loss in losses), float(norm))
        torch.nn.utils.clip_grads_with_norm_(learner.model.parameters(), learner.settings.grad_clip, norm)
        learner.optimizer.step()
        learner.optimizer.zero_grad(set_to_none=True)
        self.tally.grad_norms.append(float(norm))

    def _accumulate(self, samples: Sequence[Sample]) -> Tensor:
        """Forward and backward of one micro-batch; its share of the minibatch's loss."""
        learner = self.learner
        batch = pad([(sample.prompt_ids, sample.token_ids) for sample in samples], learner.device)
        hidden_BLH = hidden_states(learner.model, batch.input_ids_BL)
        drawn_N = torch.from_numpy(np.concatenate([sample.drawn for sample in samples])).to(learner.device)
        hidden_NH = hidden_BLH[batch.rows_N[drawn_N], batch.columns_N[drawn_N]]
        scored = token_logprobs(hidden_NH, Head.of(learner.model), batch.targets_N[drawn_N], self.work.temperature)
        tokens = LossTokens(scored.logprobs, *_recorded(samples, learner.device))
        output = learner.loss(tokens, learner.loss_parameters)
        self.tally.add(tokens, output, scored.entropy)
        loss = output.loss_N.sum() * self.scale
        torch.autograd.backward(loss)
        return loss.detach()

    def _refuse_divergence(self, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingDiverged(
                f"step {self.work.step} diverged: loss {loss}, gradient norm {norm}; this update was refused and the "
                "last checkpoint is good; lower trainer.learning_rate, or look at the rewards and log-probabilities "
                "of its batch"
            )


def _recorded(samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, Tensor]:
    """Behaviour log-probabilities and advantages of the tokens that were drawn, in the order of `pad`."""
    behaviour_N = torch.from_numpy(np.concatenate([sample.behaviour[sample.drawn] for sample in samples]))
    advantages_N = torch.cat([torch.full((sample.trained,), sample.advantage) for sample in samples])
    return behaviour_N.to(device), advantages_N.to(device)


def _batch_metrics(work: StepWork, prepared: Prepared) -> Mapping[str, float]:
    values = [rollout.reward for group in work.groups for rollout in group.rollouts]
    rewards = np.array([value for value in values if math.isfinite(value)])
    measured = {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())} if len(rewards) else {}
    ages = np.array([staleness(work.step, group.version) for group in work.groups] or [0])
    return {
        **measured,
        "staleness_mean": float(ages.mean()),
        "staleness_max": float(ages.max()),
        "groups": float(len(prepared.groups)),
        "dropped_groups": float(prepared.without_signal),
        "truncated_fraction": prepared.truncated / max(1, prepared.rollouts),
        "tokens": float(prepared.tokens),
    }
