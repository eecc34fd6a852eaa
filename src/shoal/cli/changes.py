"""What may differ when a run is resumed: how it is served and by how many, and for how long; never what is trained.

Of [trainer] that is what `trainer.changeable` names. What has consequences is said before the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shoal.cli.recipe import Recipe, settings_of
from shoal.errors import ConfigError
from shoal.trainer.settings import GUARDS, ROUNDING, is_changeable

CHANGEABLE_SECTIONS = ("hub", "validator", "worker", "relay")
CHANGEABLE_KEYS = ("run.steps",)
DECIDING = ("skip", "slow")


def refuse_other_recipe(path: Path, stored: Recipe, given: Recipe) -> None:
    """A folder belongs to one recipe: going on with another would mix two runs."""
    before, now = dict(settings_of(stored)), dict(settings_of(given))
    changed = [key for key in _changed(before, now) if not _changeable(key)]
    if changed:
        raise ConfigError(f"the run in {path} was made with another recipe ({_changes(changed, before, now)}); "
                          "choose another folder with --dir, or go on with: shoal run --dir "
                          f"{path}")  # fmt: skip


def consequences(stored: Recipe, given: Recipe) -> Iterator[str]:
    """What a run that goes on with the given recipe should be told about its changes."""
    before, now = dict(settings_of(stored)), dict(settings_of(given))
    changed = _changed(before, now)
    if deciding := [key for key in changed if _decides(key, before, now)]:
        yield (
            f"{_changes(deciding, before, now)}: a guard that skips or slows decides what is learnt; it does so from "
            "the newest checkpoint on"
        )
    if rounding := [key for key in changed if key.removeprefix("trainer.") in ROUNDING]:
        yield (
            f"{_changes(rounding, before, now)}: sums may be rounded otherwise, so that the run does not go on bit for "
            "bit; if a version that is out does not come out the same, a new incarnation begins"
        )


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return [key for key in dict.fromkeys((*now, *before)) if before.get(key) != now.get(key)]


def _changeable(key: str) -> bool:
    section, _, name = key.partition(".")
    return key in CHANGEABLE_KEYS or section in CHANGEABLE_SECTIONS or (section == "trainer" and is_changeable(name))


def _decides(key: str, before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Whether the setting is of a guard that skips or slows, or did."""
    prefix = f"trainer.{GUARDS}."
    if not key.startswith(prefix):
        return False
    guard = key.removeprefix(prefix).partition(".")[0]
    if guard == "slow_factor":
        return any(name.startswith(prefix) and value == "slow" for name, value in now.items())
    return any(values.get(f"{prefix}{guard}.react") in DECIDING for values in (before, now))


def _shown(value: object) -> str:
    return repr(str(value) if isinstance(value, Path) else value)


def _changes(keys: Sequence[str], before: Mapping[str, object], now: Mapping[str, object]) -> str:
    shown = [f"{key} was {_shown(before.get(key))}, is {_shown(now.get(key))}" for key in keys[:3]]
    return "; ".join([*shown, *([f"and {len(keys) - 3} more"] if len(keys) > 3 else [])])
