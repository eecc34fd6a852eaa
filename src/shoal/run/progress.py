"""How a run has gone so far, gathered from one status after another: `History`; and words for what a status says.

    hub /status ──every second──► History ─► reward and held-out score by step, tokens per second, time left,
                                              every rejection

A status shows the newest reports and verdicts only; a history keeps what mattered. Nothing waits or is drawn here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from shoal.protocol import NodeView, RecentVerdict, RunStatus
from shoal.runtime.supervise import ProcessView
from shoal.runtime.text import printable

RATE_WINDOW_S = 20.0  # credit comes in lumps, a batch of verdicts at a time
PACE_STEPS = 8
LAG_MS = 15_000  # the leader appends every second; another takes over within a few
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass
class History:
    """What statuses have shown, one after another; `elapsed_s` is the time since the run was started here."""

    rewards: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    staleness: float | None = None
    rejections: dict[tuple[int, str, int], RecentVerdict] = field(default_factory=dict)
    answered_s: float = 0.0
    _tokens: deque[tuple[float, int]] = field(default_factory=deque)
    _paces: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE_STEPS + 2))
    _steps: int = 0

    def add(self, status: RunStatus, elapsed_s: float) -> None:
        """Take in what the hub answered at `elapsed_s`."""
        self.answered_s, self._steps = elapsed_s, status.steps
        for report in sorted(status.reports, key=lambda report: report.step):
            if (reward := reward_of(report.metrics)) is not None:
                self.rewards[report.step] = reward
            if "held_out" in report.metrics:
                self.held_out[report.step] = report.metrics["held_out"]
            self.staleness = report.metrics.get("staleness_mean", self.staleness)
        for verdict in sorted(status.verdicts, key=lambda verdict: verdict.decided_at_ms):
            if verdict.outcome == "rejected":
                self.rejections.setdefault((verdict.unit, verdict.node, verdict.decided_at_ms), verdict)
        self._tokens.append((elapsed_s, tokens_credited(status)))
        while elapsed_s - self._tokens[0][0] > RATE_WINDOW_S:
            self._tokens.popleft()
        if self._paces and status.step < self._paces[-1][1]:  # another incarnation, from earlier on
            self._paces.clear()
        if status.policy is not None and (not self._paces or status.step > self._paces[-1][1]):
            self._paces.append((elapsed_s, status.step))

    def tokens_per_s(self) -> float:
        """Verified tokens per second over the last seconds."""
        if not self._tokens:
            return 0.0
        (began_s, before), (ended_s, after) = self._tokens[0], self._tokens[-1]
        return max(0.0, (after - before) / (ended_s - began_s)) if ended_s > began_s else 0.0

    def left_s(self, elapsed_s: float) -> float | None:
        """How long the steps that are left will take at the pace of the last ones; None before two were seen whole.
        The first one does not count: processes were starting."""
        if len(self._paces) < 3:
            return None
        (began_s, first), (ended_s, last) = self._paces[1], self._paces[-1]
        pace_s = (ended_s - began_s) / (last - first)
        within_s = min(pace_s, max(0.0, elapsed_s - ended_s))
        return max(0.0, (self._steps - last) * pace_s - within_s)


@dataclass(frozen=True)
class Scene:
    """A run at a moment, as displays show it: the hub's last answer, the processes here, and what went before.

    `notes` are remarks on workers by name, for those who know more about them than the hub does.
    """

    status: RunStatus | None
    processes: Sequence[ProcessView]
    history: History
    elapsed_s: float
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def silent_s(self) -> float:
        """For how long the hub has not answered."""
        return self.elapsed_s - self.history.answered_s


class Display(Protocol):
    """Shows scenes, one every `every_s`, between `__enter__` and `__exit__`; `say` works outside of that, too.

    While a `live` one has the terminal, nobody else may write to it.
    """

    live: bool
    every_s: float

    def say(self, text: str) -> None: ...

    def show(self, scene: Scene) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────


def reward_of(metrics: Mapping[str, float]) -> float | None:
    """The mean reward of everything that was sampled, or else of the groups trained on (those that disagree)."""
    return metrics.get("sampled_reward", metrics.get("reward_mean"))


def tokens_credited(status: RunStatus) -> int:
    return sum(node.credit + node.pending for node in status.nodes)


def duration(seconds: float) -> str:
    """How long, in the unit that people would use.

    >>> duration(63), duration(150), duration(9000)
    ('63 s', '2.5 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    amount, unit = (seconds / 60, "min") if seconds < 7200 else (seconds / 3600, "h")
    return f"{amount:.1f}".removesuffix(".0") + f" {unit}"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last values as blocks between the lowest and the highest of them.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    shown = values[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale + 0.5)] for value in shown)


def labels(nodes: Iterable[NodeView]) -> dict[str, str]:
    """Node id → name; names that two nodes share get a piece of the id."""
    given = [(node.node, printable(node.name) or node.role) for node in nodes]
    names = [name for _, name in given]
    return {node: name if names.count(name) == 1 else f"{name} ({node[:8]})" for node, name in given}


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
    """What is out of the ordinary, as (label, sentence): who is missing, the owner's orders, a ledger that lags behind,
    alarms (newest first)."""
    found = [("standstill", sentence) for sentence in status.standstill]
    standing, lag_ms = status.standing, status.now_ms - (status.outbox_since_ms or status.now_ms)
    if standing.conduct != "running":
        state = "drained" if standing.drained else standing.conduct
        why = f": {standing.reason}" if standing.reason else ""
        since = duration(max(0, status.now_ms - standing.since_ms) / 1000)
        found.append(("owner", f"{state} by its owner, {since} ago{why}; to go on: shoal admin resume"))
    if lag_ms >= LAG_MS:
        entries = f"{status.outbox} ledger entries wait to be appended, for {duration(lag_ms / 1000)}"
        found.append(("ledger", f"{entries}: no hub leads (see logs/hub.log)"))
    found += [("alarm", alarm) for alarm in status.alarms]
    return [(label, printable(sentence)) for label, sentence in found]
