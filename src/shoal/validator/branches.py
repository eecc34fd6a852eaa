"""Branches: at tokens that pass only by the tolerance, what the seed gives is decoded, scored, and compared.

    accepted so far ─► which rollouts, where (`branch_of`) ─► engine.generate from there ─► scored ─► differences

A worker that knows the tolerance may submit the neighbour of a token whose uniform is near an edge, draw honestly after
it, and keep whichever branch pays: every token passes. But of two branches that only rounding separates, honest work
has the better one half of the time (`protocol.verdict` makes evidence of it).

The place of a branch must not depend on how the submission continues, or short completions, for example, would look
chosen. The first token that passes only by the tolerance is such a place. Completions of more than `LONGEST` tokens are
cut into blocks of that size from a random place on: the first such token of the block in which the rollout ends is
taken, and a branch counts only if it ends in the same block.

The hub says which share of a node's tokens is decoded again (`Audit.look_share`): a little of everybody's, more at
first and where the evidence grows. This takes at most `TIME_SHARE` of this validator's time. What there is no time for
is owed: later groups of the node are looked at so much more. One call for many branches costs hardly more than for few.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shoal.engines import Engine, Finish, GenerationRequest
from shoal.errors import ScoringFailure
from shoal.protocol import Branches, Rollout, RolloutReward, pack_logprobs, pack_tokens
from shoal.runtime.clock import Clock, SystemClock
from shoal.validator.case import ENGINE_ERRORS, Case
from shoal.validator.rewards import Group, Scored
from shoal.validator.verdicts import NO_BRANCHES

log = logging.getLogger(__name__)

TIME_SHARE = 0.1
LONGEST = 512  # a block of so many steps of decoding takes up to 15 s
FIRST_S = 12.0  # counted as spent at first, so that the first verdicts come soon
MOST_NODES, MOST_OWED = 10_000, 8.0  # nodes that looks are owed to, and how many groups' each
REPAID = 0.25  # of a group's tokens at first; doubled after quick calls, halved after slow ones
QUICK_S, SLOW_S = 2.0, 10.0

Score = Callable[[Sequence[Group]], Sequence[Scored | ScoringFailure]]
JudgedCase = tuple[Case, Sequence[RolloutReward] | None, float]
"""What was accepted so far, its rewards if it was scored, and of which share of its tokens branches are decoded."""


def by_tolerance(case: Case) -> npt.NDArray[np.bool_]:
    """Which tokens pass only by the tolerance: u is outside the interval that this validator computes."""
    return case.drawn & case.replayed.outside


def block_around(position: int, size: int, phase: int) -> tuple[int, int]:
    """Positions are cut into blocks of `size`, the first of which ends at `phase`: the bounds of the block of this
    position.

    >>> block_around(2, size=8, phase=3), block_around(11, size=8, phase=3)
    ((0, 3), (11, 19))
    """
    if position < phase:
        return 0, phase
    begin = position - (position - phase) % size
    return begin, begin + size


@dataclass(frozen=True, eq=False)
class Branch:
    """A rollout drawn again from `token` on; it must end within `limit` tokens."""

    case: Case
    rollout: int
    token: int
    limit: int

    def request(self, steps: int) -> GenerationRequest:
        """All branches of one call ask for equally many steps, to be decoded together, but not more than their leases
        allow: the context of the model may end there."""
        lease, kept = self.case.lease, self.case.rollouts[self.rollout].token_ids[: self.token]
        steps = min(steps, lease.sampling.max_new_tokens - self.token)
        sampling = lease.sampling.model_copy(update={"max_new_tokens": steps})
        prompt = (*lease.prompt_ids, *kept.tolist())
        seeds, decode = (lease.seed_numbers[self.rollout],), self.case.decode
        return GenerationRequest(prompt, seeds, sampling, begun=self.token, decode=decode)

    def ended(self, tokens: npt.NDArray[np.int32]) -> Rollout | None:
        """The whole completion with these tokens; None if it does not end in time."""
        sampling = self.case.lease.sampling
        tokens = tokens[: self.limit]
        ids = np.concatenate([self.case.rollouts[self.rollout].token_ids[: self.token], tokens])
        is_end = self.case.ending.first(ids.tolist()) is not None
        if not is_end and len(ids) < sampling.max_new_tokens:
            return None
        finish: Finish = "eos" if is_end else "length"
        return Rollout(tokens=pack_tokens(ids), logprobs=pack_logprobs(np.zeros(len(ids))), finish=finish)


def branch_of(case: Case, rollout: int, size: int, phase: int) -> Branch | None:
    """None if no token in its last block passes by the tolerance."""
    start, length = int(case.starts[rollout]), case.lengths[rollout]
    begin, end = block_around(length - 1, size, phase)
    found = np.flatnonzero(by_tolerance(case)[start + begin : start + length])
    if len(found) == 0:
        return None
    token = begin + int(found[0])
    return Branch(case, rollout, token, min(end, case.lease.sampling.max_new_tokens) - token)


def differences(rewards: Sequence[float], branches: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """Reward(submitted) - reward(branch) of each (rollout, reward), if they differ, as a share of the range of all
    rewards.

    The range does not depend on which of the two was submitted.

    >>> differences([0.0, 1.0, 0.5], [(1, 0.5), (2, 2.0), (0, 0.0)])
    (0.25, -0.75)
    """
    everything = [*rewards, *(reward for _, reward in branches)]
    span = max(everything) - min(everything)
    found = [rewards[rollout] - reward for rollout, reward in branches]
    return tuple(each / span for each in found if each != 0.0)


@dataclass
class BranchChecker:
    """`rng` is this validator's secret."""

    time_share: float = TIME_SHARE
    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random = field(default_factory=random.SystemRandom, repr=False)

    def __post_init__(self) -> None:
        self._began_s, self._spent_s = self.clock.monotonic_s(), FIRST_S
        self._owed, self._repaid = dict[str, float](), REPAID  # by node, in groups

    def look(self, judged: Sequence[JudgedCase], engine: Engine, score: Score) -> list[Branches]:
        """Dialogues are left out: the tool would answer otherwise."""
        began_s, nothing = self.clock.monotonic_s(), [NO_BRANCHES] * len(judged)
        able = [(case, share) for case, rewards, share in judged if rewards is not None and case.replay is not None]
        able = [(case, share) for case, share in able if not case.dialogue]
        if self._spent_s > self.time_share * (began_s - self._began_s):
            self._owe(able)
            return nothing
        due = [(case, self._due(case.lease.node, share)) for case, share in able]
        looks = [look for case, share in due for look in self._chosen(case, share)]
        if not looks:
            return nothing
        try:
            drawn = engine.generate([look.request(max(each.limit for each in looks)) for look in looks])
        except ENGINE_ERRORS as error:
            log.warning("%d branches could not be decoded: %s", len(looks), error)
            self._owe(due)
            return nothing
        found, decoded = [], [(look, group[0].token_ids) for look, group in zip(looks, drawn, strict=True)]
        for case, rewards, _ in judged:
            mine = [(look, tokens) for look, tokens in decoded if look.case is case]
            ended = [(look.rollout, whole) for look, tokens in mine if (whole := look.ended(tokens)) is not None]
            shown = Branches(looked=len(mine), tokens=sum(min(look.limit, len(tokens)) for look, tokens in mine))
            scored = score([Group(case.lease, [whole for _, whole in ended])])[0] if ended else None
            if rewards is not None and isinstance(scored, Scored):
                pairs = [(rollout, reward.value) for (rollout, _), reward in zip(ended, scored.rewards, strict=True)]
                gained = differences([each.value for each in rewards], pairs)
                shown = shown.model_copy(update={"differences": gained})
            found.append(shown)
        took_s = self.clock.monotonic_s() - began_s
        self._repaid = min(1.0, self._repaid * (2.0 if took_s < QUICK_S else 0.5 if took_s > SLOW_S else 1.0))
        self._spent_s += took_s
        return found

    def _due(self, node: str, share: float) -> float:
        wanted = share + self._owed.pop(node, 0.0)
        given = min(wanted, max(share, self._repaid))
        if given < wanted:
            self._owed[node] = wanted - given
        return given

    def _owe(self, cases: Sequence[tuple[Case, float]]) -> None:
        for case, share in cases:
            self._owed[case.lease.node] = min(MOST_OWED, self._owed.pop(case.lease.node, 0.0) + share)
        while len(self._owed) > MOST_NODES:
            del self._owed[next(iter(self._owed))]

    def _chosen(self, case: Case, share: float) -> Iterator[Branch]:
        """At most one branch per rollout; in all about `share` of the tokens of the case. Of rollouts that are equal up
        to there only one: rounding moves them all in the same direction."""
        longest, begun = case.lease.sampling.max_new_tokens, set[bytes]()
        for rollout in self.rng.sample(range(len(case.lengths)), len(case.lengths)):
            whole = longest <= LONGEST
            size, phase = (longest, longest) if whole else (LONGEST, self.rng.randrange(LONGEST))
            if self.rng.random() < (share if whole else min(1.0, share * case.lengths[rollout] / LONGEST)):
                look = branch_of(case, rollout, size, phase)
                kept = b"" if look is None else case.rollouts[rollout].tokens[: 4 * look.token]
                if look is not None and kept not in begun:
                    begun.add(kept)
                    yield look


def choice_bits(cases: Sequence[Case], reach: float) -> tuple[float, float]:
    """What a worker could choose within `reach` of u: the share of tokens with a neighbour that near, and bits per
    token (1 with one neighbour, log2 3 with one on either side)."""
    found = []
    for case in cases:
        seen = case.replayed
        near_T = (seen.uniforms - seen.low < reach).astype(int) + (seen.high - seen.uniforms < reach)
        found.append(near_T[case.drawn])
    edges = np.concatenate(found)
    return float((edges > 0).mean()), float(np.log2(1 + edges).mean())
