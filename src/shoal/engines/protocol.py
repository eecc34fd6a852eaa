"""What an engine is: it holds one policy, draws completions from it and recomputes what others drew. Both sides of a
proof come from here: `Completion.proofs` commit to the last hidden states, `Prefill.points` are compared with them. The
hidden state of a token is the one that it was drawn from: at the position before it, after the final norm, cast to
bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from shoal.models.ending import Decode
from shoal.protocol import PolicyRef, ProofParameters, SamplingParameters, Spans, TensorView
from shoal.shardcast import ChangedValues

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shoal.toploc import PointBatch

Finish = Literal["eos", "length"]
TokenIds: TypeAlias = "npt.NDArray[np.int32]"
PLAIN = "torch-plain"
"""In a kind: torch's engine on a GPU without pages and captured steps, which rounds differently."""

Respond = Callable[[list[int]], tuple[int, ...] | None]
"""The tokens of a completion up to the end of a turn, to the tokens that are given after it; None: it is finished."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """The finished chunks of a completion in progress: the first tokens (int32) and proofs of the later `Completion`,
    bit for bit. The last chunk has fewer than `rows` tokens only if the completion is finished."""

    token_ids: npt.NDArray[np.int32]
    proofs: tuple[bytes, ...]


OnChunks = Callable[[Callable[[], dict[int, Chunks]]], None]
"""Told that chunks were finished; gets a function that returns all finished chunks of the group so far, by seed."""


@dataclass(frozen=True)
class GenerationRequest:
    """One group: a prompt, and one 64-bit seed per completion wanted. `on_tokens` is told every few steps, in the
    caller's thread, how many tokens of the group are drawn: a lease on which something happens is renewed. If it
    raises, the call ends, nothing of any group is kept, and the engine is as before. `check` may raise in the same way:
    it is called after every token on a processor, after every window of steps on a GPU. `on_chunks` is told in the same
    way of finished chunks, if proofs are asked for; what it does not ask for within the call is not computed. `respond`
    is asked at every end (`models.ending`) whether the completion is finished; what it gives instead is fed to the
    model, not drawn (`dialogue`). `begun` tokens at the end of the prompt are the first of the completion: the uniforms
    begin at that position. Stop strings need `decode`."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: SamplingParameters
    on_tokens: Callable[[int], None] | None = field(default=None, compare=False, repr=False)
    on_chunks: OnChunks | None = field(default=None, compare=False, repr=False)
    respond: Respond | None = field(default=None, compare=False, repr=False)
    begun: int = 0
    check: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    decode: Decode | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("a prompt has at least one token")


def checks_of(requests: Sequence[GenerationRequest]) -> list[Callable[[], None]]:
    """Each once: the groups of a call often share one."""
    return list(dict.fromkeys(request.check for request in requests if request.check is not None))


@dataclass(frozen=True, eq=False)
class Completion:
    """What one seed gave. `token_ids` (int32) ends with its end (`models.ending`) if `finish` is "eos". `logprobs`
    (float32) are those of softmax(logits / T). `proofs`, if asked for, are its TOPLOC proofs back to back: one for
    every `rows` tokens, the last may be of fewer. `given` are the spans (start, length) that were not drawn: their
    log-probabilities are 0, and the uniforms of their positions are left out. Without any, one that is cut off
    ("length") has no end-of-sequence token."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish: Finish
    proofs: bytes = b""
    given: Spans = ()


Groups = list[list[Completion]]


@dataclass(frozen=True, eq=False)
class PrefillRequest:
    """A prompt and the tokens that somebody claims to have drawn after it."""

    prompt_ids: tuple[int, ...]
    token_ids: npt.NDArray[np.int32]
    temperature: float

    def __post_init__(self) -> None:
        if not self.prompt_ids or len(self.token_ids) == 0:
            raise ValueError("a prefill needs a prompt and at least one token")


@dataclass(frozen=True, eq=False)
class Prefill:
    """What this engine's policy says of a completion's tokens, in order. `entropy` and `varentropy` are mean and
    variance of -log p of the distribution that each was drawn from. `points`, if asked for, compare with proofs."""

    logprobs: npt.NDArray[np.float32]
    cdf_low: npt.NDArray[np.float64]
    cdf_high: npt.NDArray[np.float64]
    entropy: npt.NDArray[np.float32]
    varentropy: npt.NDArray[np.float32]
    points: PointBatch | None = None


@runtime_checkable
class Engine(Protocol):
    """Generates and prefills under the policy last loaded. One caller at a time. Results depend on the request alone:
    batching, order and neighbours change nothing but floating-point noise. Token ids outside the vocabulary are a
    `ValueError`; generating before a policy is loaded is a `PolicyMismatch`."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """What its rounding depends on: `engine path/device/number format`. Final once a policy is loaded."""
        ...

    @property
    def policy(self) -> PolicyRef | None:
        """The policy whose weights are loaded; None before the first `load_policy`, or after one that failed."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def size_bytes(self) -> int:
        """The memory that its weights take on the device."""

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        """Names, shapes and types must be exactly the model's (`ModelError`)."""

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        """One list per request, one completion per seed, both in order; with proofs if `proof` gives their size."""

    def prefill(self, requests: Sequence[PrefillRequest], proof: ProofParameters | None = None) -> list[Prefill]:
        """One result per request, in order; with points if `proof` gives their size."""

    def greedy(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, eos_token_ids: Sequence[int]
    ) -> list[TokenIds]:
        """The most probable token at every step, up to and including one of these: for evaluation."""


@runtime_checkable
class UpdatableEngine(Engine, Protocol):
    """An engine whose weights can be changed in place, instead of being loaded again."""

    def update_policy(self, ref: PolicyRef, changes: Iterable[ChangedValues]) -> None:
        """Turn the loaded policy into `ref` by writing the values that differ, and no others."""


@runtime_checkable
class BoundedEngine(Engine, Protocol):
    """An engine that knows how much fits into memory. `memory_bytes`, weights included; None: as much as is free."""

    memory_bytes: int | None

    def rows_at_once(self, tokens_each: int) -> int:
        """How many completions of so many tokens, prompts included, are drawn together; others are drawn later."""
