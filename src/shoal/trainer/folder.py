"""The files in a trainer's folder, without torch: progress, checkpoint retention, where an export may go.

Which checkpoints are kept depends only on their numbers and the known scores, so a resume decides the same:

    newest `keep`                  what a resume needs, and one more in case it is damaged
    best `keep_best`               by held-out score; of equal ones the newer
    newest `AWAITED` of those      that will be measured but have no score yet: one of them may become the best
    first of every block           of `lookback` versions, back to one that is that old: a guard that stops the run can
                                   name a checkpoint from before the cause

Of a version that was trained twice (two incarnations) the newer one counts.
"""

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
"""The most versions that the hub has measured at a time."""

MARK = "shoal.json"
"""Marks an export. A folder without it is never overwritten."""

HIDDEN = ".exporting"
"""Folder for the files of an unfinished export."""


@dataclass(frozen=True)
class TrainerProgress:
    run: str
    version: int
    incarnation: int = 0

    @property
    def name(self) -> str:
        return f"{self.version}.{self.incarnation}"


@dataclass(frozen=True)
class Retention:
    """`is_measured` tells which versions will get a held-out score.

    >>> rule = Retention(keep=1, keep_best=1, is_measured=lambda version: version % 2 == 0)
    >>> sorted(rule.kept([(version, 0) for version in range(10)], {0: 0.1, 2: 0.7, 4: 0.3}))
    [(2, 0), (6, 0), (8, 0), (9, 0)]
    """

    keep: int
    keep_best: int = 0
    is_measured: Callable[[int], bool] = lambda _version: False
    lookback: int = 0

    def kept(self, places: Sequence[Place], scores: Mapping[int, float]) -> set[Place]:
        kept, lives = set(sorted(places, reverse=True)[: self.keep]), _newest_incarnations(places)
        if self.lookback:
            # Newest first, so that the dictionary keeps the oldest of each block.
            first = sorted({place[0] // self.lookback: place for place in lives}.values())
            old = [place for place in first if place[0] <= max(places)[0] - self.lookback]
            kept |= set(first[max(0, len(old) - 1) :])
        if self.keep_best:
            awaited = [place for place in lives if self.is_measured(place[0]) and place[0] not in scores]
            kept |= {*ranked(places, scores)[: self.keep_best], *awaited[:AWAITED]}
        return kept


def ranked(places: Sequence[Place], scores: Mapping[int, float]) -> list[Place]:
    scored = [place for place in _newest_incarnations(places) if place[0] in scores]
    return sorted(scored, key=lambda place: (scores[place[0]], place), reverse=True)


def _newest_incarnations(places: Sequence[Place]) -> list[Place]:
    return sorted(dict(sorted(places)).items(), reverse=True)


def scores_of(metrics: MetricsLog) -> dict[int, float]:
    return {int(row["step"]): row["held_out"] for row in metrics.rows() if "held_out" in row}


def refuse_foreign(destination: Path) -> None:
    """A destination may be an export, an empty folder, or absent."""
    if not destination.exists() and not destination.is_symlink():
        return
    if destination.is_dir() and ({entry.name for entry in destination.iterdir()} <= {HIDDEN} or _facts(destination)):
        return
    raise ConfigError(f"{destination} exists and is not an export of shoal; choose another folder, or move it away")


def written_files(folder: Path) -> tuple[str, ...]:
    listed = _facts(folder).get("files")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return tuple(name for name in names if name not in ("", ".", "..") and Path(name).name == name)


def _facts(folder: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads((folder / MARK).read_bytes())
        types = [type(facts["progress"][name]) for name in ("run", "version", "incarnation")]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return facts if types == [str, int, int] else {}
