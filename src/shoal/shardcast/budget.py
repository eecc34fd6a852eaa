"""Which versions a relay mirrors, given how many it should keep and how much of its disk it may use.

    wanted    the newest `count`, back to an anchor (`retention`)       0.4 0.5 0.6 0.7 0.8 0.9
    mirrored  of them as many as fit, the oldest left out first                 0.6 0.7 0.8 0.9
    road      what the newest one needs to be reached at all                        0.7 0.8 0.9

If not even the road fits, a person has to know; until then whatever fits is mirrored, newest first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.protocol import PolicyManifest
from shoal.shardcast.manifest import Place, offered
from shoal.shardcast.retention import kept_places

Manifests = Mapping[Place, PolicyManifest | None]  # None: not known yet


@dataclass(frozen=True)
class Selection:
    """`wanted`: versions whose manifests are kept; `mirrored`: those of them whose chunks are."""

    wanted: frozenset[Place] = frozenset()
    mirrored: frozenset[Place] = frozenset()
    road_bytes: int = 0
    fits: bool = True


def select_versions(manifests: Manifests, count: int, budget_bytes: int | None) -> Selection:
    """Decide. A manifest that is not known yet counts as a small anchor: when it is here, the choice is made anew."""
    anchors = {place: manifest is None or manifest.anchor for place, manifest in manifests.items()}

    def needed_bytes(versions: int) -> int:
        return size_of(manifests[place] for place in kept_places(anchors, versions))

    wanted = frozenset(kept_places(anchors, count))
    road_bytes = needed_bytes(1)
    if budget_bytes is None:
        return Selection(wanted, wanted, road_bytes)
    fitting = bisect_right(range(1, min(count, len(anchors)) + 1), budget_bytes, key=needed_bytes)
    if fitting or not anchors:
        return Selection(wanted, frozenset(kept_places(anchors, fitting)), road_bytes)
    return Selection(wanted, _as_many_as_fit(manifests, wanted, budget_bytes), road_bytes, fits=False)


def size_of(manifests: Iterable[PolicyManifest | None]) -> int:
    """The bytes that these versions offer together; a chunk that several have lies on the disk once."""
    known = (manifest for manifest in manifests if manifest is not None)
    return sum({chunk.hash: chunk.size_bytes for manifest in known for chunk in offered(manifest)}.values())


def _as_many_as_fit(manifests: Manifests, wanted: frozenset[Place], budget_bytes: int) -> frozenset[Place]:
    chosen: list[Place] = []
    for place in sorted(wanted, reverse=True):
        if size_of(manifests[other] for other in [*chosen, place]) <= budget_bytes:
            chosen.append(place)
    return frozenset(chosen)
