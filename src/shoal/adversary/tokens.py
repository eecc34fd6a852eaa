"""Cheats that rewrite completions. The right policy vouches for what came of it, so that only the seeds can tell."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shoal.adversary.base import OTHER_TOKENS, OTHER_WEIGHTS, Cheat, Disguise, Loot, Rewriter, Worth, cheating, vouched
from shoal.engines import Completion, Engine, GenerationRequest
from shoal.engines.protocol import Groups
from shoal.protocol import ProofParameters

Tokens = npt.NDArray[np.int32]


class Editing(Rewriter):
    def rewrite(self, request: GenerationRequest, group: list[Completion], /) -> list[Completion]:
        eos, count = request.sampling.eos_token_id, self.vocabulary_size
        edited = [each.token_ids.copy() for each in group]
        for tokens in edited:
            at = len(tokens) // 2
            if tokens[at] != eos:
                following = ((int(tokens[at]) + step) % count for step in range(1, count))
                tokens[at] = next(token for token in following if token != eos)
        return [replace(each, token_ids=tokens) for each, tokens in zip(group, edited, strict=True)]


class Answering(Rewriter):
    def __init__(self, engine: Engine, loot: Loot) -> None:
        super().__init__(engine)
        self._worth = Worth(loot)

    def rewrite(self, request: GenerationRequest, group: list[Completion], /) -> list[Completion]:
        task, sampling = self._worth.task(request.prompt_ids), request.sampling
        ids = [] if task is None else list(self._worth.tokenizer.encode(task.answer))
        if not ids or len(ids) >= sampling.max_new_tokens:
            return group
        tokens = np.array([*ids, sampling.eos_token_id], dtype=np.int32)
        return [replace(each, token_ids=tokens, finish="eos") for each in group]


class CuttingShort(Rewriter):
    def rewrite(self, _request: GenerationRequest, group: list[Completion], /) -> list[Completion]:
        return [
            replace(each, token_ids=each.token_ids[: max(1, len(each.token_ids) // 2)], finish="length")
            for each in group
        ]


class EndingEarly(Rewriter):
    def rewrite(self, request: GenerationRequest, group: list[Completion], /) -> list[Completion]:
        halves = [each.token_ids[: len(each.token_ids) // 2] for each in group]
        ended = [np.append(half, np.int32(request.sampling.eos_token_id)) for half in halves]
        return [replace(each, token_ids=tokens, finish="eos") for each, tokens in zip(group, ended, strict=True)]


class Padding(Rewriter):
    def rewrite(self, request: GenerationRequest, group: list[Completion], /) -> list[Completion]:
        sampling = request.sampling
        kept = [self.kept(each) for each in group]
        more = self._engine.greedy(
            [(*request.prompt_ids, *each.tolist()) for each in kept], sampling.max_new_tokens, -1
        )
        return [
            _filled(each, tokens, filling, request) for each, tokens, filling in zip(group, kept, more, strict=True)
        ]

    def kept(self, completion: Completion) -> Tokens:
        """What is kept of a completion, to be filled up."""
        return completion.token_ids


def _filled(completion: Completion, kept: Tokens, filling: Tokens, request: GenerationRequest) -> Completion:
    """As many of the likeliest tokens behind it as there is room for, none of them an end."""
    sampling = request.sampling
    added = filling[: sampling.max_new_tokens - len(kept)]
    if len(added) == 0:
        return completion
    added = np.where(added == sampling.eos_token_id, added + 1, added)
    return replace(completion, token_ids=np.append(kept, added).astype(np.int32), finish="length")


class RunningOn(Padding):
    def kept(self, completion: Completion) -> Tokens:
        return completion.token_ids[:-1] if completion.finish == "eos" else completion.token_ids


class Swapping(Disguise):
    """Proofs and log-probabilities are those of the prompt that it answered."""

    _prompt: tuple[int, ...] = ()

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        self._prompt = self._prompt or requests[0].prompt_ids
        return self._engine.generate([replace(request, prompt_ids=self._prompt) for request in requests], proof)


TRIES = 4  # completions from which best-of and grind choose one
COLD = 0.7


class OwnSeeds(Disguise):
    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        asked = [replace(request, seeds=own_seeds(request.seeds, 1)) for request in requests]
        return self._engine.generate(asked, proof)


class ChoosingEngine(Disguise):
    """Draws by seeds of its own, several times for every rollout, and submits the completion that is worth most."""

    def __init__(self, engine: Engine, loot: Loot) -> None:
        super().__init__(engine)
        self._worth = Worth(loot)

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        asked = [replace(request, seeds=own_seeds(request.seeds)) for request in requests]
        drawn = self._engine.generate(asked, proof)
        return [list(self._best(request, group)) for request, group in zip(requests, drawn, strict=True)]

    def _best(self, request: GenerationRequest, group: list[Completion]) -> Iterator[Completion]:
        worth = self._worth.of(request.prompt_ids)
        for start in range(0, len(group), TRIES):
            yield max(group[start : start + TRIES], key=worth)


def own_seeds(seeds: Sequence[int], tries: int = TRIES) -> tuple[int, ...]:
    """`tries` other seeds for each; the same ones every time, so that an attack can be repeated."""
    named = (f"best-of/{seed}/{number}" for seed in seeds for number in range(tries))
    return tuple(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") for name in named)


class Grinding(ChoosingEngine):
    """Every completion is one that some seed of the very lease gives, under the right policy: but not this seed."""

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        drawn = self._engine.generate(requests, proof)
        return [
            [best for best in self._best(request, group) for _ in range(TRIES)][: len(group)]
            for request, group in zip(requests, drawn, strict=True)
        ]


class TakingTheLikeliest(Disguise):
    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        groups = [self._likeliest(request) for request in requests]
        return vouched(self._engine, requests, groups, proof)

    def _likeliest(self, request: GenerationRequest) -> list[Completion]:
        [drawn] = self._engine.generate([replace(request, seeds=request.seeds[:1])], None)
        sampling = request.sampling
        [tokens] = self._engine.greedy([request.prompt_ids], sampling.max_new_tokens, sampling.eos_token_id)
        ended = int(tokens[-1]) == sampling.eos_token_id
        return [replace(drawn[0], token_ids=tokens, finish="eos" if ended else "length")] * len(request.seeds)


class Cooled(Disguise):
    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        cooled = [
            each.sampling.model_copy(update={"temperature": COLD * each.sampling.temperature}) for each in requests
        ]
        asked = [replace(request, sampling=cold) for request, cold in zip(requests, cooled, strict=True)]
        return vouched(self._engine, requests, self._engine.generate(asked, None), proof)


class Loose(Cheat):
    name = "loose"
    what = (
        f"says that it computes in bfloat16, so that more is forgiven it, and samples at {COLD} times the temperature"
    )
    reasons = OTHER_TOKENS
    disguise = Cooled

    def profile(self, profile: str, known: Sequence[str], /) -> str:
        engine, device, _ = profile.split("/")
        claimed = f"{engine}/{device}/bfloat16"
        return claimed if claimed in known else profile


COPIES = {"duplicate.rollout", "duplicate.proof"}
CHEATS = (
    cheating(
        "best-of", f"samples {TRIES} completions for every rollout, by seeds of its own, and submits the best",
        OTHER_TOKENS, disguise=ChoosingEngine,
    ),
    cheating(
        "own-dice", "ignores the seeds of its leases and draws by seeds of its own", OTHER_TOKENS, disguise=OwnSeeds
    ),
    cheating(
        "grind", f"draws by the seeds it was given, and submits the best of every {TRIES} for all {TRIES} of them",
        OTHER_TOKENS | COPIES, disguise=Grinding,
    ),
    cheating(
        "greedy", "takes the likeliest token at every step instead of drawing one", OTHER_TOKENS | COPIES,
        disguise=TakingTheLikeliest,
    ),
    cheating("cold", f"samples at {COLD} times the temperature of the lease", OTHER_TOKENS, disguise=Cooled),
    Loose,
    cheating("edit", "changes one token in the middle of every completion", OTHER_TOKENS, disguise=Editing),
    cheating(
        "answer", "writes the right answer, which everybody can look up, instead of what was drawn",
        OTHER_TOKENS | COPIES, disguise=Answering,
    ),
    cheating(
        "early-end", "ends every completion halfway by writing the end-of-sequence token", OTHER_TOKENS,
        disguise=EndingEarly,
    ),
    cheating(
        "cut-short", "stops halfway and says that the length limit was reached", {"termination.early"},
        disguise=CuttingShort,
    ),
    cheating(
        "pad", "continues after the end-of-sequence token until the length limit, to be paid for more tokens",
        {"termination.past_eos"}, disguise=Padding,
    ),
    cheating(
        "run-on", "never ends a completion: it writes on until the length limit instead, to be paid for more tokens",
        OTHER_TOKENS | {"duplicate.rollout"}, disguise=RunningOn,
    ),
    cheating(
        "swap-prompt", "answers the first prompt that it was given again and again, whatever its leases ask",
        OTHER_WEIGHTS | COPIES, disguise=Swapping,
    ),
)  # fmt: skip
