"""How a run goes: its `History`, the status in words, who waits for whom, and an end if nothing happens.

    hub /status ──every second──► Reporter ─► History ─► RunView ─► Display
                                      └─────► Watchdog: ends a run without progress, and says why

Reasons for no progress (`standstill_reasons`): the hub knows who waits for whom. Causes are seen in processes of the
supervisor, nodes without a heartbeat, a silent hub, orders of the owner, and ledger entries that are not appended.
"""

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from shoal.client import HubClient
from shoal.errors import HubError, ProtocolError
from shoal.protocol import NodeView, RecentVerdict, RunStatus
from shoal.runtime import Clock, SystemClock, duration, printable
from shoal.runtime.supervise import Ending, ProcessView

RATE_WINDOW_S = 20.0  # credit comes in lumps, a batch of verdicts at a time
PACE_STEPS = 8
LAG_MS = 15_000  # the leader appends every second; another takes over within a few
BLOCKS = "▁▂▃▄▅▆▇█"
QUIET_S = 30.0  # six heartbeats
LOADING_S = 90.0  # torch from a cold disk, on a busy machine
SILENT_S = 10.0
POLL_S, END_S = 1.0, 6.0
SUSPENDED_S = 5.0  # ticks come ten times a second


@dataclass
class History:
    rewards: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    staleness: float | None = None
    rejections: dict[tuple[int, str, int], RecentVerdict] = field(default_factory=dict)
    answered_s: float = 0.0
    _tokens: deque[tuple[float, int]] = field(default_factory=deque)
    _paces: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE_STEPS + 2))
    _steps: int = 0

    def add(self, status: RunStatus, elapsed_s: float) -> None:
        self.answered_s, self._steps = elapsed_s, status.steps
        for report in sorted(status.reports, key=lambda report: report.step):
            if (reward := reward_of(report.metrics)) is not None:
                self.rewards[report.step] = reward
            if "held_out" in report.metrics:
                self.held_out[report.step] = report.metrics["held_out"]
            self.staleness = report.metrics.get("staleness_mean", self.staleness)
        self.rewards, self.held_out = (dict(sorted(values.items())) for values in (self.rewards, self.held_out))
        for verdict in sorted(status.verdicts, key=lambda verdict: verdict.decided_at_ms):
            if verdict.outcome == "rejected":
                self.rejections.setdefault((verdict.unit, verdict.node, verdict.decided_at_ms), verdict)
        self._tokens.append((elapsed_s, tokens_credited(status)))
        while elapsed_s - self._tokens[0][0] > RATE_WINDOW_S:
            self._tokens.popleft()
        if self._paces and status.step < self._paces[-1][1]:  # another incarnation
            self._paces.clear()
        if status.policy is not None and (not self._paces or status.step > self._paces[-1][1]):
            self._paces.append((elapsed_s, status.step))

    def tokens_per_s(self) -> float:
        if not self._tokens:
            return 0.0
        (began_s, before), (ended_s, after) = self._tokens[0], self._tokens[-1]
        return max(0.0, (after - before) / (ended_s - began_s)) if ended_s > began_s else 0.0

    def left_s(self, elapsed_s: float) -> float | None:
        """The remaining time at the pace of the last steps; None before two of them. The first step does not count."""
        if len(self._paces) < 3:
            return None
        (began_s, first), (ended_s, last) = self._paces[1], self._paces[-1]
        pace_s = (ended_s - began_s) / (last - first)
        return max(0.0, (self._steps - last) * pace_s - min(pace_s, max(0.0, elapsed_s - ended_s)))


@dataclass(frozen=True)
class RunView:
    """`status` is the hub's last answer, `notes` are remarks on workers."""

    status: RunStatus | None
    processes: Sequence[ProcessView]
    history: History
    elapsed_s: float
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def silent_s(self) -> float:
        return self.elapsed_s - self.history.answered_s


class Display(Protocol):
    """Shows scenes, one every `every_s`, between `__enter__` and `__exit__`; `say` works outside of that, too. While a
    `live` display has the terminal, nobody else may write to it."""

    live: bool
    every_s: float

    # fmt: off
    def say(self, text: str) -> None: ...
    def show(self, scene: RunView) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    # fmt: on


def reward_of(metrics: Mapping[str, float]) -> float | None:
    """The mean reward of everything sampled, else of the groups trained on."""
    return metrics.get("sampled_reward", metrics.get("reward_mean"))


def tokens_credited(status: RunStatus) -> int:
    return sum(node.credit + node.pending for node in status.nodes)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """
    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    shown = values[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale + 0.5)] for value in shown)


def labels(nodes: Iterable[NodeView]) -> dict[str, str]:
    """Node id → name; a name that two nodes share gets a part of the id."""
    given = {node.node: printable(node.name) or node.role for node in nodes}
    count = Counter(given.values())
    return {node: name if count[name] == 1 else f"{name} ({node[:8]})" for node, name in given.items()}


def verdict_line(verdict: RecentVerdict, names: Mapping[str, str]) -> str:
    """`worker-2, unit 17: rejected, sampling.seed: token 3 of sample 0 was not drawn with its seed`."""
    who = names.get(verdict.node, verdict.node[:8])
    why = ": ".join(printable(part) for part in (verdict.reason, verdict.message) if part)
    return f"{who}, unit {verdict.unit}: {verdict.outcome}" + (f", {why}" if why else "")


def waits_line(status: RunStatus, least_s: float = 0.0, most: int = 4) -> str:
    """Who waits for what, longest first: `trainer waits for 3 more groups (12 s)`."""
    waits = [((status.now_ms - wait.since_ms) / 1000, wait) for wait in status.waits]
    long = sorted((pair for pair in waits if pair[0] >= least_s), key=lambda pair: -pair[0])
    shown = []
    for since_s, wait in long[:most]:
        verb = "wait" if wait.who.startswith(("units ", "submissions ")) else "waits"
        shown.append(printable(f"{wait.who} {verb} for {wait.what} ({duration(since_s)})"))
    return "; ".join([*shown, *([f"and {len(long) - most} more"] if len(long) > most else [])])


def notices(status: RunStatus) -> list[tuple[str, str]]:
    """Unusual states as (label, sentence); alarms newest first."""
    found = [("standstill", sentence) for sentence in status.standstill]
    standing, lag_ms = status.standing, status.now_ms - (status.outbox_since_ms or status.now_ms)
    if standing.conduct != "running":
        state = "drained" if standing.drained else standing.conduct
        why = f": {standing.reason}" if standing.reason else ""
        since = duration(max(0, status.now_ms - standing.since_ms) / 1000)
        found.append(("owner", f"{state} by its owner, {since} ago{why}; to continue: shoal admin resume"))
    if lag_ms >= LAG_MS:
        entries = f"{status.outbox} ledger entries wait to be appended, for {duration(lag_ms / 1000)}"
        found.append(("ledger", f"{entries}: no hub leads (see logs/hub.log)"))
    found += [("alarm", alarm) for alarm in status.alarms]
    return [(label, printable(sentence)) for label, sentence in found]


@dataclass
class Watchdog:
    """Ends a run without progress: no step, no verdict, no submission, no ledger entry, no pass of a training step that
    was not seen before."""

    patience_s: float
    _passes: set[str] = field(default_factory=set)  # since the last progress of another kind
    _seen: tuple[object, ...] = ()
    since_s: float | None = None

    def look(
        self, status: RunStatus | None, now_s: float, processes: Sequence[ProcessView] = (), silent_s: float = 0.0
    ) -> Ending | None:
        """The hub has not answered since `status`, for `silent_s`. A run that is paused or drained has no deadline."""
        mark, passes, halted = tuple[object, ...](), set[str](), False
        if status is not None:
            counts, policy = tuple(sorted(status.submissions.items())), status.policy and status.policy.label
            mark = (status.step, policy, counts, status.ledger.index, len(status.reports))
            passes = {node.doing for node in status.nodes if node.role == "trainer" and node.doing}
            halted = status.standing.conduct == "paused" or status.standing.drained
        if self.since_s is None or mark != self._seen or halted:
            self.since_s, self._seen, self._passes = now_s, mark, passes
            return None
        if not passes <= self._passes:
            self.since_s, self._passes = now_s, self._passes | passes
            return None
        if (still_s := now_s - self.since_s) < self.patience_s:
            return None
        return Ending(1, f"no progress for {duration(still_s)}: {standstill_reasons(status, processes, silent_s)}")


def standstill_reasons(status: RunStatus | None, processes: Sequence[ProcessView], silent_s: float) -> str:
    found = list(process_problems(status, processes, silent_s).values())
    if status is None or silent_s >= SILENT_S:
        return "; ".join(found or ["the hub does not answer (see logs/hub.log)"])
    message = [*(sentence for _, sentence in notices(status)), waits_line(status), *found]
    return "; ".join(line for line in message if line) or "and nobody says that they wait for anything"


def process_problems(status: RunStatus | None, processes: Sequence[ProcessView], silent_s: float) -> dict[str, str]:
    heard_s = min((process.since_s for process in processes if process.name == "hub"), default=0.0)
    found = {}
    for process in processes:
        sentence, who = _exited(process), process.name
        who += "" if process.pid is None else f" (pid {process.pid})"
        if not sentence and process.name == "hub":  # a hub that just started gets more time
            answered = silent_s < process.since_s
            since_s = silent_s if answered else process.since_s
            if since_s >= (SILENT_S if answered else QUIET_S):
                sentence = f"{who} has not answered for {duration(since_s)}: is it stuck? (see logs/hub.log)"
        elif not sentence and status is not None and silent_s < SILENT_S and heard_s >= QUIET_S:
            sentence = _quiet(process, who, status)
        if sentence:
            found[process.name] = sentence
    return found


def _exited(process: ProcessView) -> str:
    name, (exit_, _, message) = process.name, process.why.partition(": ")
    message, ago = f": {printable(message)}" if message else "", f"{duration(process.since_s)} ago"
    if process.state == "restarting" and process.why:
        return f"{name} {exit_}, {ago}, and is being restarted (#{process.restarts + 1}){message}"
    if process.state == "given up":
        return f"{name} was given up after it {exit_}{message}"
    if process.state == "resting" and process.why != "is done":
        return f"{name} {exit_} and is not started again{message}"
    if process.state == "running" and process.restarts > 1 and process.since_s < QUIET_S:
        return f"{name} was restarted {process.restarts} times, {ago} after it {exit_}{message}"
    return ""


def _quiet(process: ProcessView, who: str, status: RunStatus) -> str:
    role, loading = process.name.partition("-")[0], process.since_s < LOADING_S
    if role not in ("trainer", "validator", "worker") or process.state != "running" or status.finished or loading:
        return ""
    seen_ms = [node.last_seen_ms for node in status.nodes if node.role == role and node.name == process.name]
    if not seen_ms:
        return f"{who} has not reached the hub in the {duration(process.since_s)} since it started"
    quiet_s = (status.now_ms - max(seen_ms)) / 1000
    return f"{who} has said nothing for {duration(quiet_s)}: is it stuck?" if quiet_s >= QUIET_S else ""


class StatusPoller:
    """`client` has no patience: the next question is asked soon."""

    def __init__(self, client: HubClient, every_s: float = POLL_S) -> None:
        self._client, self._every_s = client, every_s
        self._ended, self._newest = threading.Event(), deque[RunStatus](maxlen=1)
        self._thread = threading.Thread(target=self._poll, name="status", daemon=True)

    def take(self) -> RunStatus | None:
        return self._newest.pop() if self._newest else None

    def ask(self) -> RunStatus | None:
        with contextlib.suppress(HubError, ProtocolError):
            return self._client.status()
        return None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """The hub has ended by now, so an open request fails at once."""
        self._ended.set()
        self._thread.join(END_S)
        self._client.close()

    def _poll(self) -> None:
        while not self._ended.wait(self._every_s):
            if (status := self.ask()) is not None:
                self._newest.append(status)


@dataclass
class Reporter:
    """What `launch` calls ten times a second."""

    source: StatusPoller
    display: Display
    watchdog: Watchdog
    notes: Mapping[str, str] = field(default_factory=dict)
    clock: Clock = field(default_factory=SystemClock)
    processes: Callable[[], Sequence[ProcessView]] = tuple
    status: RunStatus | None = None
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        self._started_s = self._next_s = self._ticked_s = self.clock.monotonic_s()

    @property
    def elapsed_s(self) -> float:
        return self.clock.monotonic_s() - self._started_s

    def tick(self) -> Ending | None:
        self._take_in(self.source.take())
        processes, now_s = self.processes(), self.clock.monotonic_s()
        if now_s - self._ticked_s > SUSPENDED_S:  # this process was suspended
            self.watchdog.since_s = now_s
            self.history.answered_s = self.elapsed_s
        self._ticked_s = now_s
        if now_s >= self._next_s:
            self._next_s = now_s + self.display.every_s
            self._show(processes)
        return self.watchdog.look(self.status, now_s, processes, self.elapsed_s - self.history.answered_s)

    def last_look(self) -> None:
        self._take_in(self.source.ask())
        self._show(self.processes())

    def _take_in(self, status: RunStatus | None) -> None:
        if status is not None:
            self.status = status
            self.history.add(status, self.elapsed_s)

    def _show(self, processes: Sequence[ProcessView]) -> None:
        self.display.show(RunView(self.status, processes, self.history, self.elapsed_s, self.notes))
