"""Mismatch: how far the trainer's probabilities are from those that the tokens were drawn with, and what that costs.

Per token, so that a step adds them up over micro-batches and processes; none carries a gradient.

    d = trainer's log-probability − recorded log-probability      of a token that was drawn by the recorded policy

Legend: N tokens, laid out flat.
"""

from __future__ import annotations

from torch import Tensor

from shoal.algorithms.losses import bounded_exp


def absolute_difference(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """|d|; its mean is what engines and trainers are compared by."""
    return (logprobs_N - behaviour_N).detach().abs()


def divergence(logprobs_N: Tensor, behaviour_N: Tensor) -> Tensor:
    """`e^d − 1 − d`, never negative; its mean estimates KL(recorded ‖ trainer) without bias.

    The estimate −d is unbiased, too, but half of its values are negative and it varies far more. With probabilities 0.5
    (recorded) and 0.25 (trainer): 0.5 − 1 + 0.693 = 0.193.
    """
    difference_N = (logprobs_N - behaviour_N).detach()
    return bounded_exp(difference_N) - 1 - difference_N


def ratio_sums(logprobs_N: Tensor, behaviour_N: Tensor) -> tuple[Tensor, Tensor]:
    """Σr and Σr² in double precision: what `effective_share` is made of, to be summed over a whole step."""
    ratio_N = bounded_exp((logprobs_N - behaviour_N).detach().double())
    return ratio_N.sum(), ratio_N.square().sum()


def effective_share(total: float, squares: float, count: int) -> float:
    """(Σr)² / (N·Σr²): which share of N weighted samples is as good as unweighted ones; between 1/N and 1.

    Ratios 1, 1, 1, 1 give 1; ratios 4, 0, 0, 0 give 1/4: one token decides for all. Without any token it is 1.

    >>> effective_share(total=1 + 3, squares=1 + 9, count=2)
    0.8
    """
    return total**2 / (count * squares) if count and squares else 1.0
