"""Cheats that lie on paper: what they generate is honest, what they say of it is not.

Some lie about the progress that they show on probation: to keep a lease longer than their work deserves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from shoal.adversary.base import OTHER_TOKENS, OTHER_WEIGHTS, Cheat, Disguise, Loot, cheating, each_rollout
from shoal.adversary.tokens import by_own_seeds, choosing
from shoal.engines import Engine, GenerationRequest
from shoal.engines.protocol import Groups
from shoal.protocol import Lease, ProofParameters, Rollout, Submission, pack_logprobs, pack_tokens, unpack_tokens
from shoal.protocol.submission import ShownChunks, ShownProgress, pack_spans

NUDGE = 0.05
FAR_TOKEN = 2**31
HONEST_UNITS = 12
LIES = frozenset({"progress.seed", "progress.prefix"})
COPIED = frozenset({"duplicate.rollout", "duplicate.proof", "proofs.malformed"})


def _with_logprobs(rollout: Rollout, values: npt.NDArray[np.float32]) -> Rollout:
    return replace(rollout, logprobs=pack_logprobs(values))


def _given(rollout: Rollout) -> Rollout:
    """All but the first token and the last: those cannot be given."""
    middle = len(rollout.token_ids) - 2
    if middle < 1:
        return rollout
    logprobs = rollout.logprob_values
    logprobs[1:-1] = 0.0
    return replace(_with_logprobs(rollout, logprobs), given=pack_spans([(1, middle)]))


def _made_up(chunks: ShownChunks) -> ShownChunks:
    tokens = unpack_tokens(chunks.tokens)
    shift = np.random.default_rng(chunks.start).integers(1, 9, len(tokens))
    return replace(chunks, tokens=pack_tokens((tokens + shift) % 16))


def _copied(engine: Engine, requests: Sequence[GenerationRequest], proof: ProofParameters | None) -> Groups:
    """Generates for the first seed of a group only."""
    drawn = engine.generate([dataclasses.replace(request, seeds=request.seeds[:1]) for request in requests], proof)
    return [group * len(request.seeds) for request, group in zip(requests, drawn, strict=True)]


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


class Sleeper(Cheat):
    name = "sleeper"
    what = f"is honest for {HONEST_UNITS} groups, and from then on does what best-of does"
    reasons = OTHER_TOKENS

    def __init__(self, honest_units: int = HONEST_UNITS) -> None:
        self._honest_left = honest_units

    def engine(self, engine: Engine, loot: Loot, /) -> Engine:
        awake = choosing(engine, loot)

        def draw(engine: Engine, requests: Sequence[GenerationRequest], proof: ProofParameters | None) -> Groups:
            honest, rest = requests[: self._honest_left], requests[self._honest_left :]
            self._honest_left -= len(honest)
            first = engine.generate(honest, proof) if honest else []
            return [*first, *(awake.generate(rest, proof) if rest else [])]

        return Disguise(engine, draw)


CHEATS = (
    cheating(
        "copy", "generates one completion of every group and submits it for all of them", OTHER_TOKENS | COPIED,
        draw=_copied,
    ),
    ReplayFirst,
    Steal,
    cheating(
        "logprobs", f"reports log-probabilities that are {NUDGE} too low, so that training trusts its tokens more",
        {"logprobs.mismatch"},
        submission=each_rollout(lambda one: _with_logprobs(one, one.logprob_values - NUDGE)),
    ),
    cheating(
        "nan", "reports log-probabilities that are NaN, to spoil the weights for everybody", {"shape.logprobs"},
        submission=each_rollout(lambda one: _with_logprobs(one, one.logprob_values * np.nan)),
    ),
    cheating(
        "vocabulary", "submits tokens that the policy does not have", {"shape.vocabulary"},
        submission=each_rollout(
            lambda one: replace(one, tokens=pack_tokens(np.full_like(one.token_ids, FAR_TOKEN)))
        ),
    ),
    cheating(
        "claim-prompt", "submits another prompt than its lease gave", {"prompt.mismatch"},
        submission=lambda given, lease: replace(
            given, prompt=pack_tokens(lease.prompt_ids[::-1] + lease.prompt_ids[:1])
        ),
    ),
    cheating(
        "claim-policy", "says openly that another version of the policy generated it",
        {"submission.mismatch", "policy.mismatch"},
        submission=lambda given, _: replace(given, version=given.version + 1, policy_digest="f" * 64),
    ),
    cheating(
        "claim-node", "submits its work in the name of another node", {"submission.mismatch", "lease.mismatch"},
        submission=lambda given, _: replace(given, node="0" * len(given.node)),
    ),
    cheating(
        "claim-given",
        "draws by seeds of its own, and says that the environment gave the tokens, so that no seeds are looked at",
        OTHER_TOKENS | {"dialogue.forged"}, draw=by_own_seeds, submission=each_rollout(_given),
    ),
    cheating(
        "few", "submits only half of every group", {"submission.group", "shape.rollouts"},
        submission=lambda given, _: replace(given, rollouts=given.rollouts[: max(1, len(given.rollouts) // 2)]),
    ),
    cheating(
        "show-random", "shows made-up tokens of the groups that it is generating, to keep their leases", LIES,
        shown=lambda progress, _: ShownProgress([_made_up(chunks) for chunks in progress.chunks]),
    ),
    cheating(
        "show-other", "shows the chunks of one rollout as those of the next, which has another seed", LIES,
        shown=lambda progress, lease: ShownProgress(
            [replace(each, rollout=(each.rollout + 1) % len(lease.seeds)) for each in progress.chunks]
        ),
    ),
    cheating(
        "show-swap", "shows the groups that it generates, and submits them with their rollouts in another order",
        LIES | OTHER_TOKENS, submission=lambda given, _: replace(given, rollouts=given.rollouts[::-1]),
    ),
    Sleeper,
)  # fmt: skip
