"""What is in a trainer's folder, without torch: where a run stands, which checkpoints are kept, where an export may go.

Which checkpoints are kept is a function of their numbers and of the scores known, so that a resume decides the same:

    newest `keep`                  what a resume needs, and one more should it be damaged
    best `keep_best`               by held-out score; of equal ones the newer, which was trained on more
    newest `AWAITED` of those      that are measured but have no score yet: one of them may turn out to be the best
    first of every block           of `lookback` versions, back to one that is that old: whatever a guard stops the run
                                   for, there is a checkpoint from before it began

A version that was trained twice (two incarnations) counts as the newer one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.runtime.metrics import MetricsLog

Place = tuple[int, int]
"""Version and incarnation: newer ones are greater."""

AWAITED = 2
"""The hub never has more versions than that measured at a time."""

MARK = "shoal.json"
"""Marks an export, by what is in it. A folder without it is somebody's and is never overwritten."""

HIDDEN = ".exporting"
"""Where an export into a folder that is there is written first."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands: `version` steps are done."""

    run: str
    version: int
    incarnation: int = 0

    @property
    def name(self) -> str:
        return f"{self.version}.{self.incarnation}"


@dataclass(frozen=True)
class Retention:
    """`is_measured` tells which versions get a held-out score sooner or later.

    >>> rule = Retention(keep=1, keep_best=1, is_measured=lambda version: version % 2 == 0)
    >>> sorted(rule.kept([(version, 0) for version in range(10)], {0: 0.1, 2: 0.7, 4: 0.3}))
    [(2, 0), (6, 0), (8, 0), (9, 0)]
    """

    keep: int
    keep_best: int = 0
    is_measured: Callable[[int], bool] = lambda _version: False
    lookback: int = 0

    def kept(self, places: Sequence[Place], scores: Mapping[int, float]) -> set[Place]:
        kept, lives = set(sorted(places, reverse=True)[: self.keep]), _last_lives(places)
        if self.lookback:  # while version n is the newest, one is at least that old (or the first that there was)
            # Newest first, so that the oldest of a block is the one that stays.
            first = sorted({place[0] // self.lookback: place for place in lives}.values())
            old = [place for place in first if place[0] <= max(places)[0] - self.lookback]
            kept |= set(first[max(0, len(old) - 1) :])
        if self.keep_best:
            awaited = [place for place in lives if self.is_measured(place[0]) and place[0] not in scores]
            kept |= {*ranked(places, scores)[: self.keep_best], *awaited[:AWAITED]}
        return kept


def ranked(places: Sequence[Place], scores: Mapping[int, float]) -> list[Place]:
    """Those that have a score, the best first; of equal ones the newer."""
    scored = [place for place in _last_lives(places) if place[0] in scores]
    return sorted(scored, key=lambda place: (scores[place[0]], place), reverse=True)


def _last_lives(places: Sequence[Place]) -> list[Place]:
    """The newest incarnation of every version, newest first: scores are of that one."""
    return sorted(dict(sorted(places)).items(), reverse=True)


def scores_of(metrics: MetricsLog) -> dict[int, float]:
    """The held-out score of every version that has one."""
    return {int(row["step"]): row["held_out"] for row in metrics.rows() if "held_out" in row}


def refuse_foreign(destination: Path) -> None:
    """Whatever is at the destination must be an export, an empty folder, or nothing."""
    if not destination.exists() and not destination.is_symlink():
        return
    if destination.is_dir() and ({entry.name for entry in destination.iterdir()} <= {HIDDEN} or _facts(destination)):
        return
    raise ConfigError(f"{destination} exists and is not an export of shoal; choose another folder, or move it away")


def written_files(folder: Path) -> tuple[str, ...]:
    """The files that the export in a folder consists of, as it says itself; none if it does not say so."""
    listed = _facts(folder).get("files")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return tuple(name for name in names if name not in ("", ".", "..") and Path(name).name == name)


def _facts(folder: Path) -> dict[str, Any]:
    """What the mark of an export says; nothing if there is none, or a file of that name that no export wrote."""
    try:
        facts: dict[str, Any] = json.loads((folder / MARK).read_bytes())
        types = [type(facts["progress"][name]) for name in ("run", "version", "incarnation")]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return facts if types == [str, int, int] else {}
