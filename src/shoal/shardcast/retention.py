"""Which versions stay: the newest few, and behind them what they are reached from.

anchor 8 ── 9 ── 10 ── 11 ── anchor 12 ── 13        newest three: 11, 12, 13; kept: 8 … 13
└────── 11 is reached from 8 ──────┘
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.shardcast.manifest import Place


def kept_places(anchors: Mapping[Place, bool], count: int) -> set[Place]:
    """Of the versions known (and whether each is an anchor): the newest `count`, back to an anchor.

    >>> sorted(kept_places({(0, 1): True, (0, 2): True, (0, 3): False, (0, 4): False}, count=1))
    [(0, 2), (0, 3), (0, 4)]
    """
    places = sorted(anchors, reverse=True)
    kept = set(places[:count])
    for place in places[max(0, min(count, len(places)) - 1) :]:
        kept.add(place)
        if anchors[place]:
            break
    return kept
