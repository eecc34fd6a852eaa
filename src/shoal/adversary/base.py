"""A cheat is the honest worker with one part replaced. Hub and validator know nothing of this package.

profile ─► lease ─► fetch ──► shelf ──► engine ──► chunks shown ──► group ──► submission ──► outbox
  │                   │                   │             │                         │
loose               stale         best-of, int8    show-random         forged proofs, copies    the loop is unchanged

`RewardOracle` says how much reward a completion earns, for cheats that choose the best of several.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np
from msgspec.structs import replace as replace_fields

from shoal.engines import Completion, Engine, Fetch, GenerationRequest, Prefill, PrefillRequest
from shoal.engines.protocol import Finish, Groups, TokenIds
from shoal.environments import ENVIRONMENTS, Environment, EnvironmentSettings, Task, build
from shoal.models import TextTokenizer
from shoal.models.ending import EndRule
from shoal.protocol import Lease, PolicyRef, ProofParameters, Rollout, ShownProgress, Submission, TensorView
from shoal.toploc import commit

# Reasons that show tokens which the lease's seeds and policy do not give.
OTHER_TOKENS = frozenset({"sampling.seed", "sampling.drift", "likelihood.unlikely"})
# Reasons that show weights other than the lease's.
OTHER_WEIGHTS = OTHER_TOKENS | {"proofs.mismatch", "proofs.drift", "logprobs.mismatch"}


@dataclass(frozen=True)
class CheatContext:
    """What every participant has: the files of the policy, the name of the environment, and engines."""

    files: Mapping[str, bytes]
    environment: str
    build: Callable[[Mapping[str, bytes]], Engine]


Draw = Callable[[Engine, Sequence[GenerationRequest], ProofParameters | None], Groups]
"""Replaces `generate`, given the honest engine."""
Rewrite = Callable[[Engine, GenerationRequest, list[Completion]], list[Completion]]
"""Replaces the completions drawn for a request."""


class Cheat:
    """One way to cheat: `what` it does, for people, and the `reasons` with which it may be rejected. One object serves
    one worker, so it may keep state. Every hook is honest unless it is overridden."""

    name: ClassVar[str]
    what: ClassVar[str]
    reasons: ClassVar[frozenset[str]]

    def profile(self, profile: str, _known: Sequence[str], /) -> str:
        """The kind that it claims to be; the run takes work of `_known`."""
        return profile

    def fetch(self, fetch: Fetch, /) -> Fetch:
        return fetch

    def engine(self, engine: Engine, _context: CheatContext, /) -> Engine:
        """The engine that generates; `engine` has no policy yet."""
        return engine

    def shown(self, progress: ShownProgress, _lease: Lease, /) -> ShownProgress:
        """What is shown of a group that is being generated."""
        return progress

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        return submission


def cheating(
    name: str, what: str, reasons: Collection[str], draw: Draw | None = None, **hooks: Callable[..., Any]
) -> type[Cheat]:
    """A cheat with one hook: a function in place of one of `Cheat`'s methods, or `draw` in place of the engine's
    `generate`."""
    if draw is not None:
        hooks["engine"] = lambda engine, _context: EngineWrapper(engine, draw)
    own = {key: staticmethod(hook) for key, hook in hooks.items()}
    return type(name, (Cheat,), {"name": name, "what": what, "reasons": frozenset(reasons), **own})


def each_rollout(change: Callable[[Rollout], Rollout]) -> Callable[[Submission, Lease], Submission]:
    return lambda given, _lease: replace_fields(given, rollouts=[change(rollout) for rollout in given.rollouts])


class EngineWrapper:
    """The real engine, except for what `draw` or a subclass replaces."""

    def __init__(self, engine: Engine, draw: Draw | None = None) -> None:
        self._engine, self._draw, self.name = engine, draw, engine.name
        self.vocabulary_size, self.hidden_size = engine.vocabulary_size, engine.hidden_size

    @property
    def kind(self) -> str:
        return self._engine.kind

    @property
    def policy(self) -> PolicyRef | None:
        return self._engine.policy

    @property
    def size_bytes(self) -> int:
        return self._engine.size_bytes

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        self._engine.load_policy(ref, tensors)

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        draw = self._draw
        return self._engine.generate(requests, proof) if draw is None else draw(self._engine, requests, proof)

    def prefill(self, requests: Sequence[PrefillRequest], proof: ProofParameters | None = None) -> list[Prefill]:
        return self._engine.prefill(requests, proof)

    def greedy(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, eos_token_ids: Sequence[int]
    ) -> list[TokenIds]:
        return self._engine.greedy(prompts, max_new_tokens, eos_token_ids)


def rewriting(rewrite: Rewrite) -> Draw:
    """Draw honestly, rewrite the completions, and let the right policy prove them: only the seeds can show it."""

    def draw(engine: Engine, requests: Sequence[GenerationRequest], proof: ProofParameters | None) -> Groups:
        drawn = engine.generate(requests, None)
        groups = [rewrite(engine, request, group) for request, group in zip(requests, drawn, strict=True)]
        return with_honest_proofs(engine, requests, groups, proof)

    return draw


def each_completion(change: Callable[[Engine, GenerationRequest, TokenIds], TokenIds]) -> Draw:
    """As `rewriting`, for functions that change the tokens of one completion."""

    def rewrite(engine: Engine, request: GenerationRequest, group: list[Completion]) -> list[Completion]:
        made = [change(engine, request, each.token_ids).astype(np.int32) for each in group]
        first = EndRule.of(request.sampling, request.decode).first
        ends: list[Finish] = ["length" if first(tokens.tolist()) is None else "eos" for tokens in made]
        return [replace(each, token_ids=ids, finish=end) for each, ids, end in zip(group, made, ends, strict=True)]

    return rewriting(rewrite)


def with_honest_proofs(
    engine: Engine, requests: Sequence[GenerationRequest], groups: Sequence[list[Completion]],
    proof: ProofParameters | None,
) -> Groups:  # fmt: skip
    """The same tokens with the log-probabilities and proofs that `engine` gives them in one prefill."""
    drawn = [(request, each) for request, group in zip(requests, groups, strict=True) for each in group]
    asked = [
        PrefillRequest(request.prompt_ids, each.token_ids, request.sampling.temperature) for request, each in drawn
    ]
    answers = iter(engine.prefill(asked, proof))

    def with_proof(completion: Completion) -> Completion:
        answer = next(answers)
        proofs = b"".join(commit(answer.points)) if answer.points is not None else b""
        logprobs = np.array(answer.logprobs)
        for start, length in completion.given:
            logprobs[start : start + length] = 0.0
        return replace(completion, logprobs=logprobs, proofs=proofs)

    return [[with_proof(each) for each in group] for group in groups]


_listing = threading.Lock()


class RewardOracle:
    """A completion's reward if the task is known (built-in environments are public), else its likelihood."""

    def __init__(self, context: CheatContext) -> None:
        self._context = context

    def of(self, prompt_ids: Sequence[int]) -> Callable[[Completion], float]:
        if (task := self.task(prompt_ids)) is None:
            return likelihood
        environment, tokenizer = _environment(self._context.environment), self.tokenizer

        def reward(completion: Completion) -> float:
            ids: list[int] = completion.token_ids.tolist()
            last = sum(completion.given[-1]) if completion.given else 0  # of a dialogue what the model says last
            return environment.score(task, tokenizer.decode(ids[last:])).value

        return reward

    def task(self, prompt_ids: Sequence[int]) -> Task | None:
        if self._context.environment not in ENVIRONMENTS or "tokenizer.json" not in self._context.files:
            return None
        with _listing:  # listing all training tasks takes seconds, once
            return _listed(self._context.environment).get(self.tokenizer.decode(prompt_ids))

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self._context.files)


@cache
def _environment(name: str) -> Environment:
    return build(EnvironmentSettings(name=name))


@cache
def _listed(name: str) -> Mapping[str, Task]:
    return {task.prompt: task for task in _environment(name).tasks("train")}


def likelihood(completion: Completion) -> float:
    return float(completion.logprobs.sum())
