"""What the person at the terminal sees of a run: a line when something happened, an alarm when nothing does.

    hub /status ──every few seconds──► Progress ─► "step 7/40  reward 0.62  held out 0.71  …"
                                          │
                                          └─► Watchdog: nothing new for too long ─► the run ends, naming who waits

The hub being away is no error here: it may be on its way back up. The watchdog decides when it has been too long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from pydantic import ValidationError

from shoal.protocol import RunStatus, StepReport
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.supervise import Ending

TIMEOUT_S = 5.0
SILENCE_S = 10.0


def fetch_status(url: str, http: httpx.Client) -> RunStatus | None:
    """The run's status; None while the hub does not answer."""
    try:
        answer = http.get(f"{url}/status", timeout=TIMEOUT_S)
        return RunStatus.model_validate_json(answer.content) if answer.status_code == httpx.codes.OK else None
    except (httpx.HTTPError, ValidationError):
        return None


def latest(reports: Sequence[StepReport], name: str) -> float | None:
    """The newest report's value of a metric that not every step measures."""
    return next((report.metrics[name] for report in reversed(reports) if name in report.metrics), None)


def in_order(status: RunStatus) -> list[StepReport]:
    return sorted(status.reports, key=lambda report: report.step)


def waits_line(status: RunStatus, least_s: float = 0.0, most: int = 4) -> str:
    """Who waits for what, longest first: `trainer waits for 3 more groups (12 s)`."""
    waits = [(wait, (status.now_ms - wait.since_ms) / 1000) for wait in status.waits]
    long = sorted((pair for pair in waits if pair[1] >= least_s), key=lambda pair: -pair[1])
    shown = [f"{wait.who} {_verb(wait.who)} for {wait.what} ({since_s:.0f} s)" for wait, since_s in long[:most]]
    return "; ".join([*shown, *([f"and {len(long) - most} more"] if len(long) > most else [])])


def _verb(who: str) -> str:
    return "wait" if who.startswith(("units ", "submissions ")) else "waits"


def tokens_credited(status: RunStatus) -> int:
    return sum(node.credit for node in status.nodes)


@dataclass
class Progress:
    """Turns one status after another into lines. The same line is said again only to break a long silence."""

    started_s: float
    _last: str = ""
    _said_s: float = -SILENCE_S
    _tokens: tuple[float, int] | None = None

    def line(self, status: RunStatus, now_s: float) -> str | None:
        reports = in_order(status)
        numbers = {
            "reward": latest(reports, "reward_mean"),
            "held out": latest(reports, "held_out"),
            "staleness": latest(reports, "staleness_mean"),
        }
        parts = [f"step {status.step}/{status.steps}"]
        parts += [f"{name} {value:.2f}" for name, value in numbers.items() if value is not None]
        accepted, rejected = status.submissions.get("accepted", 0), status.submissions.get("rejected", 0)
        unsure = status.submissions.get("inconclusive", 0)
        groups = f"groups {accepted} accepted, {rejected} rejected" + (f", {unsure} inconclusive" if unsure else "")
        text = "  ".join([*parts, groups])
        rate = self._rate(tokens_credited(status), now_s)
        if text == self._last and now_s - self._said_s < SILENCE_S:
            return None
        self._last, self._said_s = text, now_s
        waits = waits_line(status, least_s=10, most=1)  # shorter ones are the ordinary course of things
        minutes, seconds = divmod(int(now_s - self.started_s), 60)
        return f"{minutes:3d}:{seconds:02d}  {text}  {rate:,.0f} tokens/s" + (f"  ({waits})" if waits else "")

    def _rate(self, tokens: int, now_s: float) -> float:
        """Verified tokens per second since the status before."""
        before, self._tokens = self._tokens, (now_s, tokens)
        if before is None or now_s <= before[0]:
            return 0.0
        return max(0.0, (tokens - before[1]) / (now_s - before[0]))


@dataclass
class Watchdog:
    """Ends a run in which nothing happens: no step, no verdict, no submission, not even a ledger entry."""

    patience_s: float
    _seen: tuple[object, ...] = ()
    _since_s: float | None = None

    def look(self, status: RunStatus | None, now_s: float) -> Ending | None:
        mark = self._mark(status)
        if self._since_s is None or (mark is not None and mark != self._seen):
            self._since_s, self._seen = now_s, mark or self._seen
            return None
        silent_s = now_s - self._since_s
        if silent_s < self.patience_s:
            return None
        return Ending(1, f"no progress for {silent_s / 60:.0f} min: {self._blame(status)}")

    def _mark(self, status: RunStatus | None) -> tuple[object, ...] | None:
        if status is None:
            return None
        counts = tuple(sorted(status.submissions.items()))
        return (status.step, status.policy and status.policy.label, counts, status.ledger.index, len(status.reports))

    def _blame(self, status: RunStatus | None) -> str:
        if status is None:
            return "the hub does not answer (see logs/hub.log)"
        alarms = f"; alarms: {'; '.join(status.alarms)}" if status.alarms else ""
        return (waits_line(status) or "and nobody says that they wait for anything") + alarms


@dataclass
class Reporter:
    """Called ten times a second by whoever runs the roles; asks the hub every `every_s` and says what changed."""

    url: str
    say: Callable[[str], None]
    watchdog: Watchdog
    every_s: float = 3.0
    clock: Clock = field(default_factory=SystemClock)
    http: httpx.Client = field(default_factory=httpx.Client)
    status: RunStatus | None = None

    def __post_init__(self) -> None:
        self._progress = Progress(self.clock.monotonic_s())
        self._next_s = 0.0
        self._alarms: set[str] = set()

    def tick(self) -> Ending | None:
        now_s = self.clock.monotonic_s()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + self.every_s
        status = fetch_status(self.url, self.http)
        if status is not None:
            self.status = status
            self._tell(status, now_s)
        return self.watchdog.look(status, now_s)

    def last_look(self) -> None:
        """Before the hub is stopped: what it has to say at the end."""
        self._next_s = 0.0
        self.tick()

    def _tell(self, status: RunStatus, now_s: float) -> None:
        line = self._progress.line(status, now_s)
        if line is not None:
            self.say(line)
        for alarm in status.alarms:
            if alarm not in self._alarms:
                self._alarms.add(alarm)
                self.say(f"alarm: {alarm}")


def summary(metrics_file: Path, status: RunStatus | None, elapsed_s: float) -> list[str]:
    """What the run came to, from the trainer's own numbers (the hub may have died, they are on disk)."""
    rows = MetricsLog(metrics_file).rows()
    lines = [f"{_steps_done(rows, status)} in {elapsed_s:.0f} s"]
    for name, label in (("held_out", "held-out score"), ("reward_mean", "reward")):
        values = [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]
        if values:
            lines.append(f"{label} {values[0]:.3f} → {values[-1]:.3f}")
    if status is not None:
        counts = ", ".join(f"{count} {state}" for state, count in sorted(status.submissions.items()) if count)
        lines.append(f"submissions: {counts or 'none'}; {tokens_credited(status):,} verified tokens")
    return lines


def _steps_done(rows: Sequence[Mapping[str, object]], status: RunStatus | None) -> str:
    done = status.step if status is not None else len(rows)
    return f"{done} of {status.steps} steps" if status is not None else f"{done} steps"
