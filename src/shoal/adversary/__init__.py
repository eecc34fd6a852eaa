"""Cheats: what a worker could try, for attacking your own run (`shoal join --cheat NAME`).

    base       Cheat and its hooks (profile, fetch, engine, shown, submission); CheatContext, EngineWrapper
    tokens     other seeds than the lease's, rewritten completions, false claims, invented progress, copies, a sleeper
    weights    other weights, also with proofs by the right ones; forged proofs of honest work
    steering   steer, branch: within the tolerance

Each pays if nobody checks: a better reward, less work, or no downloads. Apart from the cheat itself everything is as
honest as possible: tokens that were never drawn come with the right policy's log-probabilities and proofs.
"""

from collections.abc import Mapping

from shoal.adversary import steering, tokens, weights
from shoal.adversary.base import Cheat, CheatContext, EngineWrapper
from shoal.errors import ConfigError

__all__ = ["CHEATS", "Cheat", "CheatContext", "EngineWrapper", "find_cheat"]

CHEATS: Mapping[str, type[Cheat]] = {cheat.name: cheat for cheat in (*tokens.CHEATS, *weights.CHEATS, *steering.CHEATS)}


def find_cheat(name: str) -> Cheat:
    if name not in CHEATS:
        raise ConfigError(f"there is no cheat {name!r}; there are {', '.join(sorted(CHEATS))}")
    return CHEATS[name]()
