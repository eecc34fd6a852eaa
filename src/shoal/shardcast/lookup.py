"""Finds signed documents (heads, manifests) at the sources, and the cheapest route to a version.

A source without a version may be behind, so it is asked again. When a signed head shows that a version is no longer
kept, the search ends. A relay cannot fake that: only the trainer signs heads.

    local ── delta ──► target                     one step
    local ── delta ── delta ── delta ──► target   a chain, when far behind
    anchor ── delta ── delta ──► target           without a local payload, if the target is no anchor
    target                                        its whole payload

Routes are searched backwards from the target, the cheapest first; the manifest of an intermediate version is requested
only while its route may be the cheapest. The result must have the target's digest.
"""

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import count

from shoal.errors import BroadcastError, ManifestRefused, VersionNotFound
from shoal.protocol import BroadcastHead, Delta, PolicyManifest, PolicyRef
from shoal.runtime import StopToken, count_of
from shoal.shardcast import manifest as manifests
from shoal.shardcast.connection import Connection, Connections, Deadline, Timeouts
from shoal.shardcast.manifest import MAX_HEAD_BYTES, MAX_MANIFEST_BYTES, read_head, read_manifest
from shoal.shardcast.scheduler import SourceScores
from shoal.shardcast.tree import HEAD, manifest_key

PAUSE_S = 0.05
ABSENT = (403, 404, 429, 503)  # a public bucket answers 403 for missing objects
MANIFEST_S = 60.0
HEAD_S = 5.0


def get_document(connection: Connection, target: str, max_bytes: int, deadline: Deadline) -> bytes | None:
    """The body at `target` (a key, perhaps with a query); None if the source does not have it yet."""
    answer = connection.get("/" + target, deadline)
    if answer.status == 200:
        return connection.read(max_bytes, deadline)
    connection.drain(deadline)
    if answer.status not in ABSENT:
        raise BroadcastError(f"{connection.source} answers {answer.status} to a request for {target}")
    return None


def get_head(connection: Connection, known: BroadcastHead | None, wait_s: float, answer_s: float) -> bytes | None:
    after = "" if known is None else f"&after={known.policy.label}"
    return get_document(connection, f"{HEAD}?wait_s={wait_s:g}{after}", MAX_HEAD_BYTES, Deadline(wait_s + answer_s))


SignedHead = tuple[BroadcastHead, bytes]  # a verified head, and its bytes


class Lookup:
    def __init__(
        self, scores: SourceScores, run: str | None, trusted_key: str, stop: StopToken, timeouts: Timeouts
    ) -> None:
        self.run = run  # None: the run that the first head names
        self._scores, self._trusted_key, self._stop = scores, trusted_key, stop
        self._connections = Connections(stop, timeouts)
        self._refusal: ManifestRefused | None = None  # of the last head that was refused
        self.known: BroadcastHead | None = None  # the newest that `newer` has seen

    def manifest(self, ref: PolicyRef, deadline: Deadline) -> tuple[PolicyManifest, bytes]:
        """The manifest of exactly `ref`, and its bytes; asks until it is found, gone, or the deadline has passed."""
        absent: set[str] = set()
        answered = False
        refusal: ManifestRefused | None = None
        while not (deadline.passed() or self._stop.is_set()):
            if (source := self._scores.choose()) is None:
                if refusal is not None and not self._scores.usable():
                    raise refusal
                self._stop.wait(PAUSE_S)
                continue
            try:
                found = self._ask_manifest(source, ref, deadline)
            except ManifestRefused as error:
                refusal = error
                self._scores.drop(source, f"{source}: {error}")
            except BroadcastError as error:
                self._scores.failed(source, str(error))
            else:
                if found is not None:
                    return found
                answered = True
                absent.add(source)
                self._scores.failed(source, f"{source} does not have policy {ref.label}", success=None)
            if self._scores.usable().keys() <= absent:
                self.check_not_gone(ref, self.heads(deadline))
                absent.clear()
        if self._stop.is_set():
            raise BroadcastError(f"stopped ({self._stop.reason}) while looking for policy {ref.label}")
        if refusal is not None:
            raise refusal
        if not answered:
            raise BroadcastError(f"no source could be asked for policy {ref.label}: {self._scores.describe()}")
        raise VersionNotFound(f"no source had policy {ref.label} before the deadline: {self._scores.describe()}")

    def manifest_now(self, ref: PolicyRef, deadline: Deadline) -> PolicyManifest | None:
        for source in sorted(self._scores.usable()):
            try:
                if (found := self._ask_manifest(source, ref, deadline)) is not None:
                    return found[0]
            except BroadcastError as error:
                self._scores.note(source, str(error))
        return None

    def heads(self, deadline: Deadline) -> dict[str, SignedHead]:
        """The valid heads that sources offer now; sources without one are noted."""
        heads: dict[str, SignedHead] = {}
        for source in sorted(self._scores.usable()):
            try:
                data = get_document(self._connections.to(source), HEAD, MAX_HEAD_BYTES, deadline.tighter(HEAD_S))
                if data is not None:
                    heads[source] = self._read_head(data), data
            except BroadcastError as error:
                if isinstance(error, ManifestRefused):
                    self._refusal = error = ManifestRefused(f"{source}: {error}")
                self._scores.note(source, str(error))
        return heads

    def newest(self, known: BroadcastHead | None, deadline: Deadline) -> SignedHead:
        """The newest valid head of all sources, never older than `known`; without any the last refusal is raised."""
        self._refusal = None
        while True:
            if heads := self.heads(deadline).values():
                newest = max(heads, key=lambda found: found[0].policy.place)
                manifests.check_not_rolled_back(newest[0], known)
                return newest
            if deadline.passed() or self._stop.wait(min(1.0, max(0.0, deadline.remaining_s()))):
                if self._refusal is not None:
                    raise self._refusal
                raise VersionNotFound(f"no source offers a head that can be trusted: {self._scores.describe()}")

    def newer(self, wait_s: float) -> PolicyRef | None:
        """A version newer than all before, from one source, which may hold the request for `wait_s`. Without one
        None, perhaps at once."""
        if (source := self._scores.choose()) is None:
            return None
        try:
            data = get_head(self._connections.to(source), self.known, wait_s, HEAD_S)
            found = None if data is None else self._read_head(data)
        except BroadcastError as error:
            self._scores.note(source, str(error))
            return None
        if found is None or (self.known is not None and found.policy.place <= self.known.policy.place):
            return None
        self.known = found
        return found.policy

    def check_not_gone(self, ref: PolicyRef, heads: Mapping[str, SignedHead]) -> None:
        for source, (head, _) in heads.items():
            if head.policy.place >= ref.place and ref.label not in head.versions:
                now = f"{source} is at {head.policy.label} and keeps {', '.join(head.versions)}"
                raise VersionNotFound(f"policy {ref.label} is no longer offered: {now}")

    def close(self) -> None:
        self._connections.close()

    def _ask_manifest(self, source: str, ref: PolicyRef, deadline: Deadline) -> tuple[PolicyManifest, bytes] | None:
        target, connection = manifest_key(ref.place), self._connections.to(source)
        if (data := get_document(connection, target, MAX_MANIFEST_BYTES, deadline.tighter(MANIFEST_S))) is None:
            return None
        manifest = read_manifest(data, self.run, self._trusted_key)
        if manifest.policy != ref:
            found = f"policy {manifest.policy.label} with digest {manifest.policy.digest[:16]}…"
            raise ManifestRefused(f"the manifest is for {found}, not {ref.label} with {ref.digest[:16]}…")
        return manifest, data

    def _read_head(self, data: bytes) -> BroadcastHead:
        head = read_head(data, self.run, self._trusted_key)
        self.run = head.run
        return head


MAX_STEPS = 64  # deltas of a route, whose files are open at the same time; also versions that are searched


@dataclass(frozen=True)
class Step:
    manifest: PolicyManifest
    delta: Delta

    @property
    def name(self) -> str:
        return f"{self.delta.base.digest}-{self.manifest.policy.digest}"


@dataclass(frozen=True)
class Route:
    begin: PolicyRef
    whole: PolicyManifest | None
    steps: tuple[Step, ...]

    @property
    def delta_bytes(self) -> int:
        return sum(step.delta.size_bytes for step in self.steps)

    @property
    def size_bytes(self) -> int:
        return (self.whole.size_bytes if self.whole else 0) + self.delta_bytes

    def manifests(self) -> list[PolicyManifest]:
        return [*([self.whole] if self.whole else []), *(step.manifest for step in self.steps)]

    def describe(self) -> str:
        begin = f"all of policy {self.begin.label}" if self.whole else f"the local policy {self.begin.label}"
        return f"{begin} and {count_of(len(self.steps), 'delta')}" if self.steps else begin


def find_route(
    target: PolicyManifest, held: Collection[str], manifest_of: Callable[[PolicyRef], PolicyManifest | None],
    closed: Collection[str] = (),
) -> Route:  # fmt: skip
    """The cheapest route to `target` from the payloads `held` (by digest), or from an anchor. `closed`: names of steps
    and digests of anchors that have failed."""
    order = count()  # breaks ties
    ahead = 0 if held else target.size_bytes  # without local payloads every route begins with a whole one of this size
    frontier: list[tuple[int, int, PolicyRef, tuple[Step, ...], PolicyManifest | None]] = []
    heapq.heappush(frontier, (ahead, next(order), target.policy, (), None))
    visited: set[PolicyRef] = set()
    while frontier:
        cost, _, ref, steps, whole = heapq.heappop(frontier)
        if whole is not None or ref.digest in held:
            return Route(ref, whole, steps)
        if ref in visited or len(visited) > MAX_STEPS:
            continue
        visited.add(ref)
        manifest = target if ref == target.policy else manifest_of(ref)
        if manifest is None:
            continue
        for index, step in enumerate(steps):
            if step.manifest.policy.digest == ref.digest:  # the same weights under two version numbers
                steps = steps[index + 1 :]
                break
        if manifest.anchor and ref.digest not in closed:
            heapq.heappush(frontier, (cost - ahead + manifest.size_bytes, next(order), ref, steps, manifest))
        for step in (Step(manifest, delta) for delta in manifest.deltas):
            if step.name not in closed:
                further = cost + step.delta.size_bytes
                heapq.heappush(frontier, (further, next(order), step.delta.base, (step, *steps), None))
    raise VersionNotFound(f"there is no route to policy {target.policy.label}: no anchor leads to it any more")
