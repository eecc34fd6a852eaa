"""What an engine is: it holds one policy, draws completions from it and recomputes what others drew.

T: tokens of a completion, H: hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shoal.protocol import PolicyRef, SamplingParameters, TensorView
from shoal.shardcast import ChangedValues

Finish = Literal["eos", "length"]


@dataclass(frozen=True)
class GenerationRequest:
    """One group: a prompt, and one 64-bit seed per completion wanted.

    >>> sampling = SamplingParameters(temperature=1.0, max_new_tokens=8, eos_token_id=1)
    >>> len(GenerationRequest(prompt_ids=(5, 6), seeds=(11, 12, 13), sampling=sampling).seeds)
    3
    """

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: SamplingParameters

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("a prompt has at least one token")


@dataclass(frozen=True, eq=False)
class Completion:
    """What one seed gave. `token_ids` (int32) ends with the end-of-sequence token exactly if `finish` is "eos".

    `logprobs` (float32) are those of softmax(logits / T). `hidden` (float32 [T, H], if asked for) is, per token, the
    last hidden state that it was drawn from: the state at the position before it, after the final norm.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish: Finish
    hidden: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class PrefillRequest:
    """A prompt and the tokens somebody claims to have drawn after it."""

    prompt_ids: tuple[int, ...]
    token_ids: npt.NDArray[np.int32]
    temperature: float

    def __post_init__(self) -> None:
        if not self.prompt_ids or len(self.token_ids) == 0:
            raise ValueError("a prefill needs a prompt and at least one token")


@dataclass(frozen=True, eq=False)
class Prefill:
    """What this engine's policy says of given tokens, aligned with them (`hidden` as in `Completion`)."""

    logprobs: npt.NDArray[np.float32]
    cdf_low: npt.NDArray[np.float64]
    cdf_high: npt.NDArray[np.float64]
    hidden: npt.NDArray[np.float32] | None = None


@runtime_checkable
class Engine(Protocol):
    """Generates and prefills under the policy last loaded. One caller at a time.

    Results depend on the request alone: batching, order and neighbours change nothing but floating-point noise.
    Token ids outside the vocabulary are a `ValueError`; generating before a policy is loaded is a `PolicyMismatch`.
    """

    @property
    def name(self) -> str: ...

    @property
    def policy(self) -> PolicyRef | None:
        """The policy whose weights are in place; None until the first `load_policy`, or after one that failed."""
        ...

    @property
    def vocabulary_size(self) -> int: ...

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        """Put weights in place; names, shapes and types must be exactly the model's (`ModelError`)."""
        ...

    def generate(self, requests: Sequence[GenerationRequest], keep_hidden: bool = False) -> list[list[Completion]]:
        """One list per request, one completion per seed, both in order."""
        ...

    def prefill(self, requests: Sequence[PrefillRequest], keep_hidden: bool = False) -> list[Prefill]:
        """One result per request, in order."""
        ...

    def greedy(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, eos_token_id: int
    ) -> list[npt.NDArray[np.int32]]:
        """The most probable token at every step, up to and including the end-of-sequence token: for evaluation."""
        ...


@runtime_checkable
class UpdatableEngine(Engine, Protocol):
    """An engine whose weights can be changed where they lie, instead of being loaded again."""

    def update_policy(self, ref: PolicyRef, changes: Iterable[ChangedValues]) -> None:
        """Turn the policy in place into `ref` by writing the values that differ, and no others."""
        ...
