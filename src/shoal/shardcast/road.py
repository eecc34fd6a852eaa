"""The cheapest way to a version: from what is here, over deltas, or from the start.

    here ── delta ──► target                     one step
    here ── delta ── delta ── delta ──► target   a chain, when far behind
    anchor ── delta ── delta ──► target          nothing here, and the target is no anchor itself
    target                                       its whole payload

Roads are searched backwards from the target, the cheapest so far first; the manifest of a version in between is asked
for only when its road may still be the cheapest. Nothing on a road is trusted: what arrives at its end has the target's
digest or is thrown away.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import count

from shoal.errors import VersionNotFound
from shoal.protocol import Delta, PolicyManifest, PolicyRef

MAX_STEPS = 64  # deltas applied in one go; their files are open at the same time
SEARCH = 0.1  # of the payload's bytes: more manifests are not asked for once there is an anchor to begin with


@dataclass(frozen=True)
class Step:
    """Over one delta, to the version that `manifest` describes."""

    manifest: PolicyManifest
    delta: Delta

    @property
    def name(self) -> str:
        return f"{self.delta.base.digest}-{self.manifest.policy.digest}"


@dataclass(frozen=True)
class Road:
    """Start with `begin` (fetched whole if `whole`, else it is here), then take `steps` in order."""

    begin: PolicyRef
    whole: PolicyManifest | None
    steps: tuple[Step, ...]

    @property
    def size_bytes(self) -> int:
        """What has to be fetched for it."""
        return (self.whole.size_bytes if self.whole else 0) + sum(step.delta.size_bytes for step in self.steps)

    def manifests(self) -> list[PolicyManifest]:
        """Of the versions whose chunks are fetched on it."""
        return [*([self.whole] if self.whole else []), *(step.manifest for step in self.steps)]

    def describe(self) -> str:
        """In words, for a log line."""
        begin = f"all of policy {self.begin.label}" if self.whole else f"policy {self.begin.label}, which is here"
        if not self.steps:
            return begin
        return f"{begin} and {len(self.steps)} delta{'s' if len(self.steps) > 1 else ''}"


def plan(
    target: PolicyManifest,
    held: Collection[str],
    manifest_of: Callable[[PolicyRef], PolicyManifest | None],
    closed: Collection[str] = (),
    manifest_bytes: int = 0,
) -> Road:
    """The cheapest road to `target` from the payloads `held` (by digest), or from an anchor.

    `closed`: the names of steps, and the digests of anchors, that have failed. `manifest_bytes`: what the manifest of a
    version in between costs; of a tiny model it is not much less than a payload. Raises `VersionNotFound` if no road is
    left.
    """
    order = count()  # breaks ties, so that nothing else is ever compared
    ahead = 0 if held else target.size_bytes  # with nothing here, every road begins with a payload as large as this
    frontier: list[tuple[int, int, PolicyRef, tuple[Step, ...], PolicyManifest | None]] = []
    heapq.heappush(frontier, (ahead, next(order), target.policy, (), None))
    visited: set[PolicyRef] = set()
    anchored = False
    while frontier:
        cost, _, ref, steps, whole = heapq.heappop(frontier)
        if whole is not None:
            return Road(ref, whole, steps)
        if ref.digest in held:
            return Road(ref, None, steps)
        if ref in visited or (anchored and len(visited) * manifest_bytes > SEARCH * target.size_bytes):
            continue
        visited.add(ref)
        manifest = target if ref == target.policy else manifest_of(ref)
        if manifest is None:
            continue
        for index, step in enumerate(steps):
            if step.manifest.policy.digest == ref.digest:  # the same weights under two numbers: nothing lies between
                steps = steps[index + 1 :]
                break
        if manifest.anchor and ref.digest not in closed:
            anchored = True
            heapq.heappush(frontier, (cost - ahead + manifest.size_bytes, next(order), ref, steps, manifest))
        for step in (Step(manifest, delta) for delta in manifest.deltas):
            if step.name not in closed and len(steps) < MAX_STEPS:
                total = cost + step.delta.size_bytes + (0 if step.delta.base.digest in held else manifest_bytes)
                heapq.heappush(frontier, (total, next(order), step.delta.base, (step, *steps), None))
    raise VersionNotFound(f"there is no road to policy {target.policy.label}: no anchor leads to it any more")
