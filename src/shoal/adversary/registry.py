"""Which cheats there are."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.adversary import claims, steering, tokens, weights
from shoal.adversary.base import Cheat
from shoal.errors import ConfigError

CHEATS: Mapping[str, type[Cheat]] = {
    cheat.name: cheat
    for cheat in (
        tokens.BestOf, tokens.OwnDice, tokens.Grind, tokens.Greedy, tokens.Cold, tokens.Loose,
        weights.Stale, weights.SmallModel, weights.Int8, weights.Int4, weights.SmallDecodes, weights.Int4Decodes,
        tokens.Edit, tokens.RightAnswer, tokens.EarlyEnd, tokens.CutShort, tokens.Pad, tokens.RunOn, tokens.SwapPrompt,
        steering.Steer, steering.Branch,
        claims.CopyOne, claims.ReplayFirst, claims.Steal,
        claims.Logprobs, claims.NotANumber, claims.Vocabulary, claims.ClaimPrompt, claims.ClaimPolicy,
        claims.ClaimNode, claims.ClaimGiven, claims.FewRollouts,
        *weights.BY_CHUNK, weights.SwappedProofs, weights.ReplayedProofs,
        claims.ShowRandom, claims.ShowOther, claims.ShowAndSwap,
        claims.Sleeper,
    )
}  # fmt: skip


def find_cheat(name: str) -> Cheat:
    """A cheat for one worker."""
    if name not in CHEATS:
        raise ConfigError(f"there is no cheat {name!r}; there are {', '.join(sorted(CHEATS))}")
    return CHEATS[name]()
