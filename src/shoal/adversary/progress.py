"""Cheats that lie about the progress that they show on probation: to keep a lease longer than their work deserves."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from shoal.adversary.base import OTHER_TOKENS, Cheat
from shoal.protocol import Lease, Submission, pack_tokens, unpack_tokens
from shoal.protocol.progress import ShownChunks, ShownProgress

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
