"""A completion in progress, the reports to its caller, and what all engines share that draw so."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.engines.dialogue import Line
from shoal.engines.protocol import Chunks, Completion, GenerationRequest, Groups, TokenIds
from shoal.errors import PolicyMismatch
from shoal.protocol import ProofParameters, SamplingParameters


@dataclass(eq=False)
class DrawnRow:
    """One completion: its tokens with the answers to its turns (`line`), log-probabilities, and proofs of finished
    chunks. `group` is the index of its request in the call; `chosen` is the next token."""

    request: GenerationRequest
    seed: int
    vocabulary: int
    group: int = 0
    greedy: bool = False
    line: Line = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    proofs: list[bytes] = field(default_factory=list)
    chosen: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        self.line = Line.of(self.request, self.vocabulary)

    @property
    def tokens(self) -> list[int]:
        return self.line.tokens

    @property
    def longest(self) -> int:
        """The largest possible number of tokens, its prompt included."""
        return len(self.request.prompt_ids) + self.request.sampling.max_new_tokens

    def choose(self, drawn: int, logprob: float) -> None:
        """Choose the drawn token as the next one, unless the environment forces another."""
        forced = self.line.forced
        self.chosen = drawn if forced is None else forced
        self.logprobs.append(logprob if forced is None else 0.0)

    def take(self) -> None:
        """Add the chosen token to the completion, which may end it."""
        self.ended = not self.line.take(self.chosen)

    def cut(self, proof: ProofParameters | None) -> bool:
        """When memory has run out: keep whole chunks (without proofs, all tokens), so that what was shown stays true.
        Returns whether tokens are left to be drawn."""
        kept = len(self.tokens) if proof is None else min(len(self.tokens), proof.rows * len(self.proofs))
        if self.ended and kept == len(self.tokens):
            return False
        tokens, self.line, self.ended = self.tokens[:kept], Line.of(self.request, self.vocabulary), False
        for token in tokens:
            self.line.take(token)
        self.logprobs = self.logprobs[:kept]
        return True

    def chunks(self, rows: int) -> Chunks:
        return Chunks(np.array(self.tokens[: rows * len(self.proofs)], dtype=np.int32), tuple(self.proofs))

    def completion(self) -> Completion:
        tokens, logprobs = np.array(self.tokens, dtype=np.int32), np.array(self.logprobs, dtype=np.float32)
        return Completion(tokens, logprobs, self.line.finish, b"".join(self.proofs), tuple(self.line.given))


def report(group: Sequence[DrawnRow], proof: ProofParameters | None, has_proved: bool, counts: bool = True) -> None:
    """Report to the caller the number of tokens of a group, if `counts`, and its chunks, if some were finished."""
    request = group[0].request
    if counts and request.on_tokens is not None and (tokens := sum(len(row.tokens) for row in group)):
        request.on_tokens(tokens)
    if proof is not None and has_proved and request.on_chunks is not None:
        size = proof.rows
        request.on_chunks(lambda: {row.seed: row.chunks(size) for row in group if row.proofs})


class DrawingEngine(ABC):
    """Base of engines."""

    vocabulary_size: int
    _loaded = False

    @abstractmethod
    def _drawn(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None, greedy: bool) -> Groups:
        """`Engine.generate`; if `greedy`, the likeliest token each time."""

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        return self._drawn(requests, proof, False)

    def greedy(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, eos_token_ids: Sequence[int]
    ) -> list[TokenIds]:
        sampling = SamplingParameters.model_construct(  # not checked: there may be no end token
            temperature=1.0, max_new_tokens=max_new_tokens, eos_token_ids=tuple(eos_token_ids)
        )
        requests = [GenerationRequest(prompt, (0,), sampling) for prompt in prompts]
        return [group[0].token_ids for group in self._drawn(requests, None, True)]

    def _refuse_unloaded(self) -> None:
        if not self._loaded:
            raise PolicyMismatch("no policy is loaded")

    def _refuse_unknown(self, *token_ids: Sequence[int]) -> None:
        if any(len(ids) and (min(ids) < 0 or max(ids) >= self.vocabulary_size) for ids in token_ids):
            raise ValueError(f"a token is outside the vocabulary of {self.vocabulary_size}")
