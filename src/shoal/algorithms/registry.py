"""The words of the recipe: `advantage = "group_mean"`, `loss = "two_sided_clip"`; and what the owner names instead."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms import advantages, losses
from shoal.algorithms.advantages import Advantage, OwnAdvantage, RolloutGroup
from shoal.algorithms.losses import Loss, LossOutput, LossParameters, LossTokens
from shoal.errors import ConfigError, ResourceError
from shoal.runtime.extensions import resolve, unpinned

_ADVANTAGES = (
    advantages.group_mean, advantages.group_mean_std, advantages.group_mean_sample_std, advantages.rloo,
    advantages.dr_grpo, advantages.max_rl,
)  # fmt: skip
_LOSSES = (
    losses.two_sided_clip, losses.ppo_clip, losses.dppo, losses.gspo, losses.cispo, losses.decoupled, losses.tis,
    losses.geometric_mask, losses.plain, losses.cross_entropy,
)  # fmt: skip
ADVANTAGES: dict[str, Advantage] = {each.__name__: each for each in _ADVANTAGES}
LOSSES: dict[str, Loss] = {each.__name__: each for each in _LOSSES}

# Losses that need the trainer's own log-probabilities of the step's beginning, whatever `ratio_base` says.
NEEDS_RECOMPUTED: frozenset[str] = frozenset({"decoupled"})


def advantage_named(word: str) -> Advantage | OwnAdvantage:
    if word in ADVANTAGES:
        return ADVANTAGES[word]
    function = resolve("trainer.advantage", "advantage", word)

    def call(group: RolloutGroup) -> Any:
        with _in_words("trainer.advantage", word, f"on unit {group.unit}"):
            return function(group)

    return OwnAdvantage(call)


def loss_named(word: str) -> Loss:
    if word in LOSSES:
        return LOSSES[word]
    function = resolve("trainer.loss", "loss", word)

    def call(tokens: LossTokens, parameters: LossParameters) -> LossOutput:
        with _in_words("trainer.loss", word, f"on {len(tokens.logprobs_N)} tokens"):
            output = function(tokens, parameters)
            output = output if isinstance(output, LossOutput) else LossOutput(output)
            if not isinstance(output.loss_N, Tensor) or output.loss_N.shape != tokens.logprobs_N.shape:
                found = getattr(output.loss_N, "shape", output.loss_N)
                raise ValueError(f"it gives {str(found)[:80]}, not a tensor with one number for each token")
            return output

    return call


def try_own(advantage: str, loss: str, columns: Mapping[str, Any]) -> None:
    """Call the owner's functions once, before a run starts; `columns` are those of a task."""
    ids, logprobs = np.arange(2), np.full(2, -0.5, np.float32)
    group = RolloutGroup(
        rewards=torch.tensor([1.0, 0.0], dtype=torch.float64), lengths=torch.tensor([2, 2]), tokens=[ids, ids],
        logprobs=[logprobs, logprobs], drawn=[np.ones(2, np.bool_)] * 2, finishes=["eos", "length"], prompt=ids,
        task="", columns=columns,
    )  # fmt: skip
    found = advantage_named(advantage)
    if isinstance(found, OwnAdvantage):
        with _in_words("trainer.advantage", advantage, "on a first group"):
            found.of(group)
    drawn_N = torch.full((4,), -0.5, requires_grad=True)
    known_N = torch.full((4,), -0.6)
    tokens = LossTokens(
        drawn_N, known_N, torch.tensor([0.5, 0.5, -0.5, -0.5]), known_N, known_N, torch.ones(4),
        torch.tensor([0, 0, 1, 1]),
    )  # fmt: skip
    with _in_words("trainer.loss", loss, "on four tokens"):
        loss_named(loss)(tokens, LossParameters()).loss_N.sum().backward()  # type: ignore[no-untyped-call]


@contextmanager
def _in_words(setting: str, word: str, where: str) -> Iterator[None]:
    """What the owner's code raises ends the run with its reason; the last checkpoint is good. Memory that runs out is
    no fault of the code."""
    try:
        yield
    except (ConfigError, ResourceError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"{setting}: {unpinned(word)} {where}: {type(error).__name__}: {error}") from error
