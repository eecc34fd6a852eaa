"""From the hub's groups to samples, and from samples to log-probabilities. Knows no loss.

    TrainingGroup ─► a reward missing? ─► equal? ─► advantage per rollout ─► truncated and masked? ─► Sample
                       └ counted: unscored   └ counted: without_signal         └ counted: truncated

Samples are packed end to end if the model supports it (`models.packed`), else they are padded rows; the numbers are the
same up to rounding.

Legend: T tokens end to end, B rows, L positions, N completion tokens that the model drew (flat), H hidden size.
"""
# ruff: noqa: N815 - dimension suffixes on fields

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.algorithms.advantages import Advantage, OwnAdvantage, RolloutGroup, carries_signal
from shoal.algorithms.packing import flatten, pad
from shoal.errors import ProtocolError
from shoal.models.logprobs import Head, TokenLogprobs, hidden_states, token_logprobs
from shoal.models.packed import Packed, packed_states
from shoal.protocol import TrainingGroup, TrainingRollout, drawn_mask


@dataclass(frozen=True)
class Sample:
    """One completion to train on. `behaviour`: log-probability of each token when it was drawn. `drawn`: whether the
    model drew it; tool tokens are read but carry no loss."""

    prompt_ids: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    behaviour: npt.NDArray[np.float32]
    advantage: float
    drawn: npt.NDArray[np.bool_]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def trained(self) -> int:
        return int(self.drawn.sum())

    @property
    def is_recorded(self) -> bool:
        return bool(np.isfinite(self.behaviour[self.drawn]).all())


@dataclass(frozen=True)
class Prepared:
    """The groups that are trained on, and counts of the rest. `unscored` rollouts lack the reward, or the
    log-probability of a drawn token."""

    groups: list[list[Sample]]
    without_signal: int
    rollouts: int
    truncated: int
    unscored: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that carry loss, over the whole step: the loss is normalised by this count."""
        return sum(sample.trained for group in self.groups for sample in group)


def prepare(
    groups: Sequence[TrainingGroup], advantage: Advantage | OwnAdvantage, mask_truncated: bool
) -> Prepared:  # fmt: skip
    kept, unrecorded = [], 0
    for group in groups:
        rewards = [rollout.reward for rollout in group.rollouts]
        # float64: with large rewards, float32 would round the mean, and a tiny deviation would amplify that.
        rewards_G = torch.tensor(rewards, dtype=torch.float64)
        advantages = list[float]()
        if isinstance(advantage, OwnAdvantage):  # it may find a signal in other things than rewards
            advantages = advantage.of(_seen(group, rewards_G)) if all(map(isfinite, rewards)) else []
        elif carries_signal(rewards):
            advantages = advantage(rewards_G).tolist()
        samples = [
            _sample(group, rollout, value)
            for rollout, value in zip(group.rollouts, advantages, strict=False)
            if any(advantages) and rollout.tokens and not (mask_truncated and rollout.finish == "length")
        ]
        kept.append([sample for sample in samples if sample.is_recorded])
        unrecorded += len(samples) - len(kept[-1])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return Prepared(
        groups=[samples for samples in kept if samples], without_signal=sum(not samples for samples in kept),
        rollouts=len(rollouts), truncated=sum(rollout.finish == "length" for rollout in rollouts),
        unscored=sum(not isfinite(rollout.reward) for rollout in rollouts) + unrecorded,
    )  # fmt: skip


def _seen(group: TrainingGroup, rewards_G: Tensor) -> RolloutGroup:
    drawn = [drawn_mask(each.given, len(each.token_ids)) for each in group.rollouts]
    return RolloutGroup(
        rewards=rewards_G, lengths=torch.tensor([int(mask.sum()) for mask in drawn]), drawn=drawn,
        tokens=[each.token_ids for each in group.rollouts], logprobs=[each.logprob_values for each in group.rollouts],
        finishes=[each.finish for each in group.rollouts], prompt=group.prompt_ids, task=group.task, unit=group.unit,
        version=group.version, columns=group.columns,
    )  # fmt: skip


def all_recorded(groups: Sequence[TrainingGroup]) -> list[Sample]:
    """Every completion with known log-probabilities, with an advantage of 0."""
    made = [_sample(group, rollout, 0.0) for group in groups for rollout in group.rollouts if rollout.tokens]
    return [sample for sample in made if sample.trained and sample.is_recorded]


def check_groups(groups: Sequence[TrainingGroup], step: int, max_staleness: int, vocabulary: int) -> None:
    """Refuse a batch that breaks the staleness bound or holds a token that the model does not have (on a GPU such a
    token ends the process later, without a reason)."""
    for group in groups:
        if not 0 <= step - group.version <= max_staleness:
            versions = f"versions {max(0, step - max_staleness)}…{step} that max_staleness = {max_staleness} allows"
            details = f"unit {group.unit} of version {group.version}, outside {versions}"
            raise ProtocolError(f"the hub's batch for step {step} holds {details}")
        if not group.prompt:
            raise ProtocolError(f"unit {group.unit} has an empty prompt: nothing predicts the first token after it")
        read = (group.prompt_ids, *(rollout.token_ids for rollout in group.rollouts))
        largest = max(int(ids.max(initial=0)) for ids in read)
        if largest >= vocabulary:
            raise ProtocolError(f"unit {group.unit} holds token {largest}; the policy knows {vocabulary} tokens")


def _sample(group: TrainingGroup, rollout: TrainingRollout, advantage: float) -> Sample:
    token_ids, behaviour = rollout.token_ids, rollout.logprob_values
    if len(token_ids) != len(behaviour):
        raise ProtocolError(f"unit {group.unit}: a rollout has {len(token_ids)} tokens but {len(behaviour)} logprobs")
    try:
        drawn = drawn_mask(rollout.given, len(token_ids))
    except ProtocolError as error:
        raise ProtocolError(f"unit {group.unit}: the spans of a rollout cannot be read: {error}") from error
    return Sample(group.prompt_ids, token_ids, behaviour, advantage, drawn)


@dataclass(frozen=True)
class TensorBatch:
    """`places_N` are the positions, counted through all rows, that predict the drawn tokens."""

    ids: Tensor
    positions_T: Tensor | None  # None: padded rows; else `ids` are end to end
    bounds: tuple[int, ...]
    places_N: Tensor
    targets_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    inputs: int  # input tokens, of `ids.numel()` positions


def to_tensors(samples: Sequence[Sample], device: torch.device, *, packed: bool) -> TensorBatch:
    """Tool tokens are input only; they are not among the N scored tokens."""
    sequences = [(sample.prompt_ids, sample.token_ids) for sample in samples]
    batch = flatten(sequences) if packed else pad(sequences)
    drawn_N = torch.from_numpy(np.concatenate([sample.drawn for sample in samples]))
    counts = torch.tensor([sample.trained for sample in samples])
    behaviour_N = torch.from_numpy(np.concatenate([sample.behaviour[sample.drawn] for sample in samples]))
    advantages_N = torch.tensor([sample.advantage for sample in samples]).repeat_interleave(counts)
    sequence_N = torch.arange(len(samples)).repeat_interleave(counts)
    inputs = sum(sample.length for sample in samples) - (len(samples) if packed else 0)
    return TensorBatch(
        ids=batch.ids.to(device), positions_T=None if batch.positions_T is None else batch.positions_T.to(device),
        bounds=batch.bounds, places_N=batch.places_N[drawn_N].to(device), targets_N=batch.targets_N[drawn_N].to(device),
        behaviour_N=behaviour_N.to(device), advantages_N=advantages_N.to(device), sequence_N=sequence_N.to(device),
        inputs=inputs,
    )  # fmt: skip


def score(model: Any, laid: TensorBatch, temperature: float) -> TokenLogprobs:
    """Log-probability and entropy of every drawn token, [N]. Differentiable."""
    if laid.positions_T is None:
        hidden_TH = hidden_states(model, laid.ids).flatten(0, 1)
    else:
        hidden_TH = packed_states(model, Packed(laid.ids, laid.positions_T, laid.bounds))
    # index_select adds rows in a fixed order in the backward pass; indexing does not.
    hidden_NH = hidden_TH.index_select(0, laid.places_N)
    return token_logprobs(hidden_NH, Head.of(model), laid.targets_N, temperature)
