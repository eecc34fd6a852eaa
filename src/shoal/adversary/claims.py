"""Cheats that lie on paper: what they generate is honest, what they say of it is not.

Some lie about the progress that they show on probation: to keep a lease longer than their work deserves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from shoal.adversary.base import OTHER_TOKENS, OTHER_WEIGHTS, Cheat, Disguise, Groups, Loot
from shoal.adversary.tokens import ChoosingEngine, OwnDice
from shoal.engines import Engine, GenerationRequest
from shoal.protocol import Lease, ProofParameters, Rollout, Submission, pack_logprobs, pack_tokens, unpack_tokens
from shoal.protocol.submission import ShownChunks, ShownProgress, pack_spans

NUDGE = 0.05
FAR_TOKEN = 2**31

Change = Callable[[Rollout], Rollout]


class Logprobs(Cheat):
    name = "logprobs"
    what = f"reports log-probabilities that are {NUDGE} too low, so that training trusts its tokens more"
    reasons = frozenset({"logprobs.mismatch"})

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        return each_rollout(submission, lambda rollout: with_logprobs(rollout, rollout.logprob_values - NUDGE))


class NotANumber(Cheat):
    name = "nan"
    what = "reports log-probabilities that are no numbers, to spoil the weights for everybody"
    reasons = frozenset({"shape.logprobs"})

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        return each_rollout(submission, lambda rollout: with_logprobs(rollout, rollout.logprob_values * np.nan))


class Vocabulary(Cheat):
    name = "vocabulary"
    what = "submits tokens that the policy does not have"
    reasons = frozenset({"shape.vocabulary"})

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        def far(rollout: Rollout) -> Rollout:
            return replace(rollout, tokens=pack_tokens(np.full_like(rollout.token_ids, FAR_TOKEN)))

        return each_rollout(submission, far)


class ClaimPrompt(Cheat):
    name = "claim-prompt"
    what = "submits another prompt than its lease gave"
    reasons = frozenset({"prompt.mismatch"})

    def submission(self, submission: Submission, lease: Lease, /) -> Submission:
        return replace(submission, prompt=pack_tokens(lease.prompt_ids[::-1] + lease.prompt_ids[:1]))


class ClaimPolicy(Cheat):
    name = "claim-policy"
    what = "says openly that another version of the policy generated it"
    reasons = frozenset({"submission.mismatch", "policy.mismatch"})

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        return replace(submission, version=submission.version + 1, policy_digest="f" * 64)


class ClaimNode(Cheat):
    name = "claim-node"
    what = "submits its work in the name of another node"
    reasons = frozenset({"submission.mismatch", "lease.mismatch"})

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        return replace(submission, node="0" * len(submission.node))


class FewRollouts(Cheat):
    name = "few"
    what = "submits only half of every group"
    reasons = frozenset({"submission.group", "shape.rollouts"})

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        return replace(submission, rollouts=submission.rollouts[: max(1, len(submission.rollouts) // 2)])


class ClaimGiven(OwnDice):
    name = "claim-given"
    what = "draws by seeds of its own, and says that the environment gave the tokens, so that no seeds are looked at"
    reasons = OTHER_TOKENS | {"dialogue.forged"}

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        return each_rollout(submission, _given)


def _given(rollout: Rollout) -> Rollout:
    """All but the first token and the last: those cannot be given."""
    middle = len(rollout.token_ids) - 2
    if middle < 1:
        return rollout
    logprobs = rollout.logprob_values
    logprobs[1:-1] = 0.0
    return replace(with_logprobs(rollout, logprobs), given=pack_spans([(1, middle)]))


def each_rollout(submission: Submission, change: Change) -> Submission:
    return replace(submission, rollouts=[change(rollout) for rollout in submission.rollouts])


def with_logprobs(rollout: Rollout, values: npt.NDArray[np.float32]) -> Rollout:
    return replace(rollout, logprobs=pack_logprobs(values))


LIES = frozenset({"progress.seed", "progress.prefix"})


class ShowRandom(Cheat):
    name = "show-random"
    what = "shows made-up tokens of the groups that it is generating, to keep their leases"
    reasons = LIES

    def shown(self, progress: ShownProgress, _lease: Lease, /) -> ShownProgress:
        return ShownProgress([_made_up(chunks) for chunks in progress.chunks])


def _made_up(chunks: ShownChunks) -> ShownChunks:
    tokens = unpack_tokens(chunks.tokens)
    shift = np.random.default_rng(chunks.start).integers(1, 9, len(tokens))
    return replace(chunks, tokens=pack_tokens((tokens + shift) % 16))


class ShowOther(Cheat):
    name = "show-other"
    what = "shows the chunks of one rollout as those of the next, which has another seed"
    reasons = LIES

    def shown(self, progress: ShownProgress, lease: Lease, /) -> ShownProgress:
        count = len(lease.seeds)
        return ShownProgress([replace(each, rollout=(each.rollout + 1) % count) for each in progress.chunks])


class ShowAndSwap(Cheat):
    name = "show-swap"
    what = "shows the groups that it generates, and submits them with their rollouts in another order"
    reasons = LIES | OTHER_TOKENS

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        return replace(submission, rollouts=submission.rollouts[::-1])


COPIED = frozenset({"duplicate.rollout", "duplicate.proof", "proofs.malformed"})


class Copying(Disguise):
    """Generates for the first seed of a group and submits that for all of them."""

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        asked = [dataclasses.replace(request, seeds=request.seeds[:1]) for request in requests]
        drawn = self._engine.generate(asked, proof)
        return [group * len(request.seeds) for request, group in zip(requests, drawn, strict=True)]


class CopyOne(Cheat):
    name = "copy"
    what = "generates one completion of every group and submits it for all of them"
    reasons = OTHER_TOKENS | COPIED
    disguise = Copying


class ReplayFirst(Cheat):
    name = "replay"
    what = "generates for its first lease and submits that for every later one"
    reasons = OTHER_WEIGHTS | COPIED

    def __init__(self) -> None:
        self._first: list[Rollout] = []

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        self._first = self._first or submission.rollouts
        return replace(submission, rollouts=self._first)


class Steal(Cheat):
    name = "steal"
    what = "submits what another node made, if it can get at it"
    reasons = OTHER_WEIGHTS | COPIED

    library: ClassVar[list[Submission]] = []
    """Others' submissions. No honest party gives them away: whoever tests the worst case lays them in here."""

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        fitting = [each for each in self.library if len(each.rollouts) == len(submission.rollouts)]
        same_task = [each for each in fitting if each.prompt == submission.prompt]
        found = (same_task or fitting)[-1:]
        return replace(submission, rollouts=found[0].rollouts) if found else submission


HONEST_UNITS = 12


class Sleeper(Cheat):
    name = "sleeper"
    what = f"is honest for {HONEST_UNITS} groups, and from then on does what best-of does"
    reasons = OTHER_TOKENS

    def __init__(self, honest_units: int = HONEST_UNITS) -> None:
        self._honest_units = honest_units

    def engine(self, engine: Engine, loot: Loot, /) -> Engine:
        return Sleeping(engine, ChoosingEngine(engine, loot), self._honest_units)


class Sleeping(Disguise):
    """One engine until it has answered `honest_units` requests, another from then on."""

    def __init__(self, engine: Engine, awake: Engine, honest_units: int) -> None:
        super().__init__(engine)
        self._awake = awake
        self._honest_left = honest_units

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        honest, rest = requests[: self._honest_left], requests[self._honest_left :]
        self._honest_left -= len(honest)
        return [
            *(self._engine.generate(honest, proof) if honest else ()),
            *(self._awake.generate(rest, proof) if rest else ()),
        ]
