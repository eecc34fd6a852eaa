"""The processes that train together: one by default, several under `torchrun`.

Everything a step needs of the others is here, so that the step itself reads the same on one CPU and on many GPUs.

    Alone     one process: every answer is its own
    Together  `together.py`: all processes of a `torchrun` group, each with a share of every weight
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Crew(Protocol):
    """The trainer's processes. All of them call the collective methods in the same order.

    Rank 0 leads: it alone talks to the hub, and `tell`s the others what to do next (`follower.py`).
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same in each."""
        ...

    def peak(self, values: Tensor) -> Tensor:
        """The largest over all processes, the same in each."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether it is true in any of them; the same answer in each."""
        ...

    def run(self, model: Any, call: Callable[[], T]) -> T:
        """`call()` with the model's weights whole: every use of a model, or of its head, happens inside one."""
        ...

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of a gradient of which each process may hold a share; the same in each."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor with all its rows, where each process may hold a share of them."""
        ...

    def tell(self, command: bytes) -> None:
        """Rank 0: what the others do next. Nothing, if there are none."""
        ...


class Alone:
    """Implements `Crew`: a process by itself."""

    rank = 0
    world = 1

    def total(self, values: Tensor) -> Tensor:
        return values

    def peak(self, values: Tensor) -> Tensor:
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def run(self, model: Any, call: Callable[[], T]) -> T:  # noqa: ARG002
        return call()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def tell(self, command: bytes) -> None:  # noqa: ARG002
        return None
