"""The worker: leases groups, generates them under the lease's policy and seeds, and submits them.

    newest policy ──► loaded, then
    hub ── leases ──► worker ── one engine call per policy ──► outbox (fsync) ──► uploader ── submissions ──► hub
     ▲                  │ ▲                                       │
     └─ heartbeat ──────┘ └── pauses while the outbox is full ◄───┘
     └─ finished chunks, on probation (`showing`)

Back-pressure: the worker asks for leases only when it is about to generate, for as many groups as its measured speed
allows within the time of a lease, and only while the outbox has room. If the hub is away, it waits for
`Intervals.patience_s`. Finished work stays on disk; unfinished leases are released when the worker stops.

Weights come before leases, so that the time of a lease is for generating only. A newer policy is fetched for
`FOLLOW_S`, then in the background (`Prefetch`) while the hub gives out leases under the old one. If the newer policy
makes the work in progress too old to be trained on, generation stops at the next token (on a GPU, after the next window
of steps): `Prefetch` sees the policy at the sources, and the hub is asked at once.

While the machine's owner allows no work (`allowance`), generation stops in the same way, the engine is given up, and
only heartbeats and finished groups are sent.
"""

import logging
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shoal.adversary import Cheat, CheatContext, find_cheat
from shoal.client import Activity, ClientOptions, HubClient, Intervals, RegularHeartbeat
from shoal.client.weights import RefreshingDownloader, downloader_of
from shoal.engines import BoundedEngine, Engine, build, check_policy, keep_to_share, kind_of, warm_up
from shoal.engines.groups import generate, is_finite, submission_of
from shoal.engines.shelf import EngineShelf, Fetch, LoadedPolicy
from shoal.errors import BroadcastError, ConfigError, DeadlineExceeded, HubError, HubRefused, ResourceError
from shoal.protocol import HeartbeatReply, Lease, LeaseRelease, LeaseReply, LeaseRequest, PolicyRef, Role
from shoal.protocol.lease import DEFAULT_PROFILE, MAX_HELD, MAX_LEASES_PER_REQUEST
from shoal.runtime import Clock, FolderLock, StopToken, SystemClock, count_of, point
from shoal.runtime.limits import Allowance, OtherLoad
from shoal.shardcast import Prefetch
from shoal.worker import settings as worker_settings
from shoal.worker.earnings import Earnings, shut_out
from shoal.worker.outbox import KeptHeads, Outbox, Parcel, Uploader
from shoal.worker.settings import WorkerConfig, WorkerSettings, check_choices, fitted, identity, units_that_fit
from shoal.worker.showing import ProgressSender

log = logging.getLogger(__name__)

LOCK_WAIT_S = 5.0
RELEASE_PATIENCE_S = 5.0
OUTBOX_LIMIT = 64  # finished groups that may wait for the hub; with more, work pauses
STOP_GENERATION_S = 5.0  # a stopping worker still generates for so long; without its supervisor it has 10 s in all
STOP_FLUSH_S = 5.0  # a stopping worker still sends finished groups for so long
CACHED_POLICIES = 2  # on disk: the current one, and the next
LOADED_POLICIES = 1  # leases name the newest policy: a second copy of the weights would hardly ever be used
PROFILE_UNKNOWN = "profile.unknown"  # the hub's code for a kind of worker that the run has not measured
BROKEN_CALLS = 3  # consecutive engine calls with NaN or infinite log-probabilities, after which the worker ends
FETCH_S = 3600.0  # what has arrived by then stays on disk, and the next attempt resumes there
FOLLOW_S = 5.0
PAUSE_S = 1.0  # before the next attempt if a policy could not be fetched, or if the run has none yet
ASK_AGAIN_S, QUESTIONS = 0.25, 20  # for a policy that sources have and the hub has not announced yet
SURE = 0.75  # the share of a lease's time that is planned for: the next groups may be longer than the last


def run_worker(config: WorkerConfig, stop: StopToken) -> None:
    """Work until the run is finished, the process is told to stop, or the hub bans this node (`ShutOut`).
    `ConfigError`: the run takes no work of this machine's kind. A suspension is waited for."""
    check_choices(config.engine, config.cheat, config.settings)
    conduct = Cheat() if config.cheat is None else find_cheat(config.cheat)  # the base class is honest
    if config.cheat is not None:
        log.warning("this worker cheats (%s): it %s", config.cheat, conduct.what)
    urls, options = (config.hub_url, *config.further_hubs), ClientOptions(patience_s=config.pace.patience_s)
    with ending_quietly(stop), FolderLock(config.folder).acquire(stop, LOCK_WAIT_S):
        client = HubClient(urls, identity(config.folder), stop, config.root_fingerprint, config.http, options=options)
        client.on_receipt = KeptHeads(config.folder).keep
        with closing(client):
            _work_for_run(config, client, conduct, stop)


def _work_for_run(config: WorkerConfig, client: HubClient, conduct: Cheat, stop: StopToken) -> None:
    run = client.run_info()
    worker_settings.refuse_too_little_disk(run, config.folder, config.limits)
    warm_up(config.engine, config.settings.device)
    fit = _fit(config, client)
    role: Role = "worker" if config.certificate is None else "trusted"
    view = client.register(config.name, role, config.certificate, config.vouch)  # only a fitting machine registers
    refusal = shut_out(view)
    allowance = Allowance(config.folder, config.hours, OtherLoad() if config.idle else None)
    if refusal is not None:
        raise refusal
    log.info("node %s works for run %s; its page: %s/#/node/%s", client.key.node, run.run, client.url, client.key.node)
    outbox = Outbox(config.folder / "outbox")
    weights = downloader_of(client.trusted_run(), config.folder / "cache", stop, CACHED_POLICIES, config.limits)
    working: list[Worker] = []  # the current worker, once there is one

    def hear_published(policy: PolicyRef) -> None:
        for worker in working:
            worker.hear_published(policy)

    with closing(weights) as downloader, Prefetch(downloader, stop, hear_published):
        fetch, closed, chosen = RefreshingDownloader(client, downloader), set[str](), config.settings.dtype == "auto"
        while True:
            shelf = _shelf(fit, conduct, fetch, run.environment)
            worker = Worker(
                client, shelf, outbox, fit.settings, stop, conduct=conduct, chosen=chosen, pace=config.pace,
                folder=config.folder, allowance=allowance,
            )  # fmt: skip
            working[:] = [worker]
            try:
                worker.run()
                break
            except NotTaken as refused:
                log.warning("the run takes no work of %s any more: another number format is chosen", refused)
                closed.add(f"{fit.settings.device}/{fit.settings.dtype}")
                fit = _fit(config, client, closed)
    if worker.finished:
        weights.forget()


class Interrupted(Exception):
    """Generation stops, and the leases are given back with this reason."""


class NotTaken(Exception):
    """Validators cannot judge work of this kind in this run; this machine may compute in another format."""


def _fit(config: WorkerConfig, client: HubClient, closed: Collection[str] = ()) -> WorkerConfig:
    run = client.run_info()
    settings = fitted(config.settings, config.engine, run, closed)
    worker_settings.refuse_too_large(run, settings.device, settings.dtype, config.limits)
    keep_to_share(kind_of(config.engine, settings.device, settings.dtype), settings.memory_share)
    return replace(config, settings=settings)


@contextmanager
def ending_quietly(stop: StopToken) -> Iterator[None]:
    """A wait that ends because the process was told to stop is no failure."""
    try:
        yield
    except DeadlineExceeded:
        if not stop.is_set():
            raise
        log.info("stopped (%s)", stop.reason)


def _shelf(config: WorkerConfig, conduct: Cheat, fetch: Fetch, environment: str) -> EngineShelf:
    """The engines: honest ones, or what a cheat makes of them."""
    device, dtype = config.settings.device, config.settings.dtype

    def make(files: Mapping[str, bytes]) -> Engine:
        engine = build(config.engine, files, device, dtype)
        if isinstance(engine, BoundedEngine):
            engine.memory_bytes = config.limits.memory_bytes
        return engine

    return EngineShelf(
        conduct.fetch(fetch), lambda files: conduct.engine(make(files), CheatContext(files, environment, make)),
        LOADED_POLICIES,
        check=lambda files, entries: check_policy(config.engine, files, entries, device, dtype, config.limits.memory()),
    )  # fmt: skip


@dataclass(frozen=True)
class Held:
    """A lease, and its end by this machine's own clock (the hub's may differ by minutes)."""

    lease: Lease
    ends_at_s: float


class Worker:
    def __init__(
        self, client: HubClient, shelf: EngineShelf, outbox: Outbox, settings: WorkerSettings, stop: StopToken,
        clock: Clock = SystemClock(), conduct: Cheat = Cheat(), chosen: bool = False, pace: Intervals = Intervals(),
        folder: Path | None = None, allowance: Allowance = Allowance(),
    ) -> None:  # fmt: skip
        """`chosen`: the number format was chosen automatically, so another may be chosen before the first lease.
        `folder`: where the `Standing` is written."""
        self._client, self._shelf, self._outbox, self._settings = client, shelf, outbox, settings
        self._stop, self._clock, self._conduct, self._pace = stop, clock, conduct, pace
        self._why_not = allowance.why_not
        run = client.run_info()
        self._may_choose, self._run, self._max_staleness = chosen, run.run, run.max_staleness
        self._hand: dict[str, Held] = {}
        self._deadlines_ms: dict[str, int] = {}
        self._broken_calls = self._submitted = 0
        self._units = 1  # of the next request: one, until the speed is known
        self._newest: PolicyRef | None = None
        self._loaded: PolicyRef | None = None
        self._at_work: PolicyRef | None = None  # the policy of the groups in progress
        self._published: PolicyRef | None = None  # at the sources, perhaps not announced by the hub yet
        self._stop_seen_s: float | None = None
        self._questions = 0  # how often the hub may still be asked for it between regular heartbeats
        self._kind = DEFAULT_PROFILE  # of the engine with the loaded policy
        self._outdated = True  # the hub gives out no leases under the loaded policy
        self._waiting = ""  # why the hub had no work at the last request
        self._is_over = self.finished = False  # the run, as the hub says; and all work of this worker
        self._earnings, self.activity = Earnings(client, folder), Activity(clock)
        self._uploader = Uploader(client, outbox, self._on_sent, clock)
        self._showing = ProgressSender(client, self._deadlines_ms.__setitem__, conduct, clock)
        self._heartbeat = RegularHeartbeat(client, pace.heartbeat_s, self.activity, self._hear)

    def run(self) -> None:
        if waiting := len(self._outbox.waiting(self._run)):
            log.info("sending first what an earlier start finished: %s", count_of(waiting, "group"))
        try:
            with self._uploader, self._heartbeat, self._showing:
                try:
                    with ending_quietly(self._stop):
                        while not self._stop.is_set() and not self.finished:
                            self._raise_failure()
                            if why := self._why_not():
                                self._rest(why)
                            elif not self._outbox.wait_until_below(self._run, OUTBOX_LIMIT, 0):
                                with self.activity.waiting(f"the hub to take {OUTBOX_LIMIT} finished groups"):
                                    self._outbox.wait_until_below(self._run, OUTBOX_LIMIT, self._pace.heartbeat_s)
                            elif self._follow():
                                self._lease()
                                self._work()
                            else:
                                self.finished = self._is_over
                finally:
                    self._leave()
        finally:
            self._heartbeat.once()
            what = "the run is finished" if self.finished else "this start"
            log.info("%s: %s", what, self._earnings.summary(self._submitted))
            kept = len(self._outbox.waiting(self._run))
            if kept and self._earnings.shut_out is None:
                log.info("the outbox keeps %s for the next start", count_of(kept, "finished group"))
        self._raise_failure()

    def _rest(self, why: str) -> None:
        """Until work is allowed again, or the run is over: no leases, no weights, no engine in memory."""
        log.info("%s", why)
        self._shelf.clear()
        self._loaded, self._outdated = None, True
        while why and not self._is_over:
            self._raise_failure()
            self.activity.paused = why
            if self._stop.wait(PAUSE_S):
                break
            why = self._why_not()
        self.activity.paused, self.finished = "", self._is_over

    def _hear(self, reply: HeartbeatReply) -> None:
        """Runs in the heartbeat's thread."""
        now = self.activity.heartbeat()
        doing = now.doing or (f"waits for {now.waiting_for}" if now.waiting_for else "")
        self._earnings.hear(reply, int(now.counters.get("tokens", 0)), doing)
        self._hear_of_policy(reply)
        published, newest = self._published, self._newest
        if published is not None and (newest is None or newest.place < published.place) and self._questions > 0:
            self._questions -= 1
            self._heartbeat.soon(ASK_AGAIN_S)
        self._showing.hear(reply)
        self._deadlines_ms.update((lease, ms) for lease, ms in reply.deadlines.items() if lease in self._hand)

    def hear_published(self, policy: PolicyRef) -> None:
        """Runs in the thread that follows the sources. If the newer policy makes the current work too old, ask the hub
        at once, and again until the hub announces that policy, too."""
        at_work = self._at_work
        if at_work is not None and self._is_too_old(at_work, policy):
            self._published, self._questions = policy, QUESTIONS
            self._heartbeat.soon()
        while self._why_not() and not self._stop.wait(PAUSE_S):
            pass  # the version is fetched when the worker resumes

    def _hear_of_policy(self, reply: HeartbeatReply | LeaseReply) -> None:
        newest, found = self._newest, reply.policy
        if found is not None and (newest is None or found.place >= newest.place):
            self._newest = found
        self._is_over = self._is_over or reply.finished

    @property
    def _behind(self) -> bool:
        return self._loaded != self._newest

    def _follow(self) -> bool:
        """Load the newest policy. Returns whether a policy is loaded, so that leases can be asked for."""
        if self._newest is None:
            with self.activity.waiting("the first policy of the run"):
                self._hear_of_policy(self._client.heartbeat(self.activity.heartbeat()))
                if self._newest is None and not self._is_over:
                    self._stop.wait(PAUSE_S)
        if (newest := self._newest) is None or (self._is_over and self._behind):
            return False
        if not self._behind:
            return True
        loaded = self._load(newest, FETCH_S if self._outdated else FOLLOW_S, loud=self._outdated)
        if loaded is None:
            if self._outdated:
                self._stop.wait(PAUSE_S)
            return not (self._outdated or self._stop.is_set())
        self._kind, self._loaded, self._outdated = loaded.engine.kind, newest, False
        return True

    def _ends_at_s(self, held: Held) -> float:
        """The end of a lease by this machine's clock, moved by as much as the hub has moved its deadline."""
        moved_ms = self._deadlines_ms.get(held.lease.lease, held.lease.deadline_ms) - held.lease.deadline_ms
        return held.ends_at_s + max(0, moved_ms) / 1000

    def _raise_failure(self) -> None:
        """Raise what other threads found: this node is banned, or the hub is gone."""
        for failure in (self._earnings.shut_out, self._heartbeat.refusal, self._uploader.failure):
            if failure is not None:
                raise failure

    def _lease(self) -> None:
        profile = self._conduct.profile(self._kind, self._client.run_info().profiles)
        # Leases in hand, or answered in the outbox. The hub ends others, which an earlier start has lost.
        answered = (parcel.lease for parcel in self._outbox.waiting(self._run))
        known = tuple(dict.fromkeys((*self._hand, *answered)))
        held = known if len(known) <= MAX_HELD else None
        request = LeaseRequest(
            request=uuid.uuid4().hex, max_units=self._units, wait_s=self._pace.poll_s, held=held,
            profile=profile, policy=self._loaded, behind=self._behind,
        )  # fmt: skip
        try:
            with self.activity.waiting("work from the hub"):
                reply = self._client.lease(request)
        except HubRefused as refusal:
            if refusal.code == PROFILE_UNKNOWN:  # the reason is the device or the format, not this node
                raise ConfigError(str(refusal)) from refusal
            raise
        arrived_s = self._clock.monotonic_s()
        for lease, _ in self._client.open_leases(reply):
            self._hand[lease.lease] = Held(lease, arrived_s + (lease.deadline_ms - lease.issued_at_ms) / 1000)
        for name in list(self._deadlines_ms):  # a copy, because the heartbeat's thread may add some
            if name not in self._hand:
                self._deadlines_ms.pop(name, None)
        self._hear_of_policy(reply)
        if reply.leases:
            self._may_choose = False
            point("worker.lease.received")
            return
        self.finished = reply.finished
        self._outdated |= self._behind
        if reply.waiting:
            log.log(logging.DEBUG if reply.waiting == self._waiting else logging.INFO, "no work: %s", reply.waiting)
            self._waiting = reply.waiting
            # validators may have measured since the start that work of this kind cannot be judged
            if self._may_choose and profile not in self._client.refreshed_run().info.profiles:
                raise NotTaken(profile)

    def _work(self) -> None:
        """The oldest policy first: its groups become too old soonest."""
        for policy in sorted({held.lease.policy for held in self._hand.values()}, key=lambda ref: ref.place):
            if self._stop.is_set():
                return
            patience_s = max(map(self._ends_at_s, self._of(policy))) - self._clock.monotonic_s()
            if (loaded := self._load(policy, patience_s)) is not None:
                self._generate(loaded)
            elif not self._stop.is_set():
                self._release([held.lease.lease for held in self._of(policy)], f"policy {policy.label} not available")
                self._stop.wait(PAUSE_S)

    def _of(self, policy: PolicyRef) -> list[Held]:
        return [held for held in self._hand.values() if held.lease.policy == policy]

    def _load(self, policy: PolicyRef, patience_s: float, loud: bool = True) -> LoadedPolicy | None:
        """None if the policy does not arrive in time, which is logged if `loud`."""
        try:
            with self.activity.waiting(f"policy {policy.label}"):
                return self._shelf.get(policy, max(patience_s, 0.0))
        except (BroadcastError, DeadlineExceeded) as error:
            if loud and not self._stop.is_set():
                log.warning("policy %s could not be fetched: %s", policy.label, error)
            return None

    def _generate(self, loaded: LoadedPolicy) -> None:
        """Generate all groups of one policy in one engine call, and write each to the outbox."""
        now_s = self._clock.monotonic_s()
        late = [held.lease.lease for held in self._of(loaded.ref) if self._ends_at_s(held) <= now_s]
        self._release(late, "the lease ran out before it was begun")
        leases = [held.lease for held in self._of(loaded.ref)]
        if not leases:
            return
        self._at_work = loaded.ref
        try:
            with self.activity.busy(f"generating {count_of(len(leases), 'group')} by policy {loaded.ref.label}"):
                check = partial(self._check, loaded.ref)
                groups = generate(loaded, leases, self.activity.generated, self._showing.of, check)
        except Interrupted as why:
            self._release([lease.lease for lease in leases], str(why))
            return
        finally:
            self._at_work = None
        self._size_up(leases, self._clock.monotonic_s() - now_s, units_that_fit(loaded.engine, leases))
        broken = [lease.lease for lease, group in zip(leases, groups, strict=True) if not is_finite(group)]
        for lease, completions in zip(leases, groups, strict=True):
            if lease.lease in broken:
                continue
            if not self._showing.keeps_word(lease.lease, completions):
                self._release([lease.lease], "generated once more, it is not what was shown of it")
                continue
            submission = submission_of(lease, completions, loaded.engine.name)
            self._outbox.put(self._conduct.submission(submission, lease))
            del self._hand[lease.lease]
            self.activity.count("groups")
            self.activity.count("tokens", sum(len(completion.token_ids) for completion in completions))
        self._broken_calls = self._broken_calls + 1 if broken else 0
        if broken:
            # A failure of this machine: such groups are not submitted.
            log.warning(
                "%d of %d groups have log-probabilities that are NaN or infinite: this machine's arithmetic, or the "
                "policy %s, is broken; they are not submitted",
                len(broken), len(groups), loaded.ref.label,
            )  # fmt: skip
            self._release(broken, "log-probabilities that are NaN or infinite")
            if self._broken_calls >= BROKEN_CALLS:
                raise ResourceError(
                    f"the engine {loaded.engine.name} gave NaN or infinite log-probabilities {BROKEN_CALLS} times in a "
                    "row: try another device or number format (--device, --dtype); `shoal doctor --selftest` "
                    "tells whether it helps"
                )

    def _check(self, policy: PolicyRef) -> None:
        """Called while groups are generated. Interrupts work that the hub would refuse by now or that the machine's
        owner does not allow any more, and work that takes too long after the worker was told to stop."""
        if self._is_too_old(policy, self._newest or policy):
            raise Interrupted(f"policy {policy.label} is too old to be trained on")
        if why := self._why_not():
            raise Interrupted(why)
        if self._stop.is_set():
            now_s = self._clock.monotonic_s()
            self._stop_seen_s = now_s if self._stop_seen_s is None else self._stop_seen_s
            if now_s - self._stop_seen_s >= STOP_GENERATION_S:
                raise Interrupted(self._stop.reason or "the worker is ending")

    def _is_too_old(self, policy: PolicyRef, newest: PolicyRef) -> bool:
        return newest.incarnation != policy.incarnation or newest.version - policy.version > self._max_staleness

    def _size_up(self, leases: Sequence[Lease], took_s: float, most: int = MAX_LEASES_PER_REQUEST) -> None:
        """Set the number of groups to ask for next: as many as one call generates within the time of a lease, at most
        `most`, which fit into memory."""
        allowed_ms = min(max(lease.deadline_ms, lease.hard_deadline_ms) - lease.issued_at_ms for lease in leases)
        doable = int(SURE * allowed_ms / 1000 * len(leases) / max(took_s, 0.001))
        self._units = max(1, min(doable, most, self._settings.units_per_lease))

    def _on_sent(self, parcel: Parcel, taken: bool) -> None:
        self.activity.ended(parcel.lease)
        self.activity.count("submitted" if taken else "refused")
        self._submitted += taken
        log.debug("unit %d %s", parcel.unit, "submitted" if taken else "refused")

    def _release(self, leases: list[str], reason: str) -> None:
        """Give leases back at once, so that others need not wait until they run out."""
        for lease in leases:
            self._hand.pop(lease, None)
            self._showing.forget(lease)
            self.activity.ended(lease)
        if not leases:
            return
        log.info("%s given back: %s", count_of(len(leases), "lease"), reason)
        try:
            self._client.patient(RELEASE_PATIENCE_S).release(LeaseRelease(leases=tuple(leases), reason=reason[:200]))
        except (HubError, DeadlineExceeded) as error:
            log.warning("%s could not be given back and will run out: %s", count_of(len(leases), "lease"), error)

    def _leave(self) -> None:
        self._release(list(self._hand), self._stop.reason or "the worker is ending")
        with self.activity.waiting("the hub to take the last groups"):
            if self.finished:  # there is no other work, so there is time
                self._uploader.flush(self._pace.patience_s, self._stop.is_set)
            else:
                self._uploader.flush(STOP_FLUSH_S, lambda: False)
