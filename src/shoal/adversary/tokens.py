"""Cheats that rewrite completions. The right policy vouches for what came of it, so that only the dice can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shoal.adversary.base import OTHER_TOKENS, OTHER_WEIGHTS, Cheat, Disguise, Groups, Loot, Rewriter, Worth
from shoal.engines import Completion, Engine, GenerationRequest
from shoal.protocol import ProofParameters

Tokens = npt.NDArray[np.int32]


class Editing(Rewriter):
    def rewrite(self, request: GenerationRequest, group: list[Completion], /) -> list[Completion]:
        return [self._edited(each, request.sampling.eos_token_id) for each in group]

    def _edited(self, completion: Completion, eos: int) -> Completion:
        tokens = completion.token_ids.copy()
        at = len(tokens) // 2
        if tokens[at] != eos:
            tokens[at] = next(token for token in _after(int(tokens[at]), self.vocabulary_size) if token != eos)
        return replace(completion, token_ids=tokens)


class Edit(Cheat):
    name = "edit"
    what = "changes one token in the middle of every completion"
    reasons = OTHER_TOKENS
    disguise = Editing


def _after(token: int, count: int) -> list[int]:
    return [(token + step) % count for step in range(1, count)]


class RightAnswer(Cheat):
    name = "answer"
    what = "writes the right answer, which everybody can look up, instead of what was drawn"
    reasons = OTHER_TOKENS | {"duplicate.rollout", "duplicate.proof"}

    def engine(self, engine: Engine, loot: Loot, /) -> Engine:
        return Answering(engine, Worth(loot))


class Answering(Rewriter):
    def __init__(self, engine: Engine, worth: Worth) -> None:
        super().__init__(engine)
        self._worth = worth

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


class CutShort(Cheat):
    name = "cut-short"
    what = "stops halfway and says that the length limit was reached"
    reasons = frozenset({"termination.early"})
    disguise = CuttingShort


class EndingEarly(Rewriter):
    def rewrite(self, request: GenerationRequest, group: list[Completion], /) -> list[Completion]:
        return [self._ended(each, request.sampling.eos_token_id) for each in group]

    def _ended(self, completion: Completion, eos: int) -> Completion:
        kept = completion.token_ids[: len(completion.token_ids) // 2]
        return replace(completion, token_ids=np.append(kept, np.int32(eos)), finish="eos")


class EarlyEnd(Cheat):
    name = "early-end"
    what = "ends every completion halfway by writing the end-of-sequence token"
    reasons = OTHER_TOKENS
    disguise = EndingEarly


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


class Pad(Cheat):
    name = "pad"
    what = "goes on after the end-of-sequence token until the length limit, to be paid for more tokens"
    reasons = frozenset({"termination.past_eos"})
    disguise = Padding


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


class RunOn(Cheat):
    name = "run-on"
    what = "never ends a completion: it writes on until the length limit instead, to be paid for more tokens"
    reasons = OTHER_TOKENS | {"duplicate.rollout"}
    disguise = RunningOn


class Swapping(Disguise):
    """Proofs and log-probabilities are those of the prompt that it answered."""

    _prompt: tuple[int, ...] = ()

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        self._prompt = self._prompt or requests[0].prompt_ids
        return self._engine.generate([replace(request, prompt_ids=self._prompt) for request in requests], proof)


class SwapPrompt(Cheat):
    name = "swap-prompt"
    what = "answers the first prompt that it was given again and again, whatever its leases ask"
    reasons = OTHER_WEIGHTS | {"duplicate.rollout", "duplicate.proof"}
    disguise = Swapping
