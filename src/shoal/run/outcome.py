"""What a run came to, and what to do next: in lines, from what it left in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.errors import ShoalError
from shoal.protocol import RunStatus
from shoal.run.launch import Launched
from shoal.run.progress import reward_of, tokens_credited
from shoal.runtime.limits import folder_bytes, show_bytes
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.text import shoal_command
from shoal.trainer.guards import standing

METRICS = Path("trainer") / "metrics.jsonl"
KEPT_NAMED = 3
NOTHING_TRAINED = "nothing was trained on"


def ledger_line(path: Path) -> str:
    """Leaves the ledger as a file; that it could not be written makes no failure of a run that went well."""
    from shoal.run.ledger.export import leave_ledger

    try:
        rows = leave_ledger(path)
    except ShoalError as error:
        return f"the ledger could not be written out: {error}"
    check = f"{shoal_command()} ledger verify {path}"
    return f"the ledger is in {path / 'ledger.jsonl'}: {rows:,} entries; to check it: {check}"


def kept_line(path: Path) -> str:
    """What a finished run keeps on this disk: caches of its own workers, validators and relays are removed by now."""
    sizes = {one.name: folder_bytes(one) for one in sorted(path.iterdir()) if one.is_dir()}
    parts = sorted(sizes.items(), key=lambda item: -item[1])[:KEPT_NAMED]
    named = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts)
    return f"{path} keeps {show_bytes(sum(sizes.values()))}: {named}"


def conclusion(path: Path, launched: Launched, before: int = 0) -> list[str]:
    """What a run came to, and what to do next. `before`: steps that were done when it was started."""
    lines = summary(path / METRICS, launched.status, launched.elapsed_s, before)
    if launched.ending.exit_code == 130:
        lines.append(f"to go on: {shoal_command()} run --dir {path}")
    if launched.ending.exit_code == 0:
        untrained, alarms = any(line.startswith(NOTHING_TRAINED) for line in lines), alarm_lines(path / METRICS)
        where = f"the {'unchanged' if untrained else 'trained'} model is in {path / 'trainer' / 'export'}"
        lines += [*alarms, f"{where}{_instead(path) if alarms else ''}"]
        lines += best_lines(path) if not alarms else []
    return lines


def best_lines(path: Path) -> list[str]:
    """That an earlier version has the better held-out score, and how to take it; of equal ones the newer is better."""
    scores = {int(row["step"]): row["held_out"] for row in MetricsLog(path / METRICS).rows() if "held_out" in row}
    last, best = max(scores, default=0), max(scores.values(), default=0.0)
    if not scores or scores[last] >= best:
        return []
    version = max(version for version, score in scores.items() if score == best)
    take = f"{shoal_command()} export {path} OUT --best"
    return [
        f"version {version} has the best held-out score, {best:.3f} (the last {scores[last]:.3f}); to take it: {take}"
    ]


def _instead(path: Path) -> str:
    """What to do about a model that alarms stand for."""
    export = f"{shoal_command()} export {path} OUT"
    scored = any("held_out" in row for row in MetricsLog(path / METRICS).rows())
    which = f"the best by held-out score: {export} --best" if scored else f"an earlier one: {export} --version N"
    return f", BUT ALARMS STAND: look at it before you use it; {which}"


def summary(metrics_file: Path, status: RunStatus | None, elapsed_s: float, before: int = 0) -> list[str]:
    """What the run came to, from the trainer's own numbers (the hub may have died, they are on disk).

    `before` is how many steps there were when this start began: a run that is gone on with did not do them now.
    """
    rows = MetricsLog(metrics_file).rows()
    done = status.step if status is not None else steps_in(metrics_file)
    total = f" of {status.steps}" if status is not None else ""
    lines = [f"{done}{total} steps{f', {max(0, done - before)} of them' if before else ''} in {elapsed_s:.0f} s"]
    scores = {int(row["step"]): row["held_out"] for row in rows if "held_out" in row}
    if len(scores) == 1:
        lines += [f"held-out score {score:.3f} (version {version}, no other)" for version, score in scores.items()]
    elif scores:
        lines.append(f"held-out score {scores[min(scores)]:.3f} → {scores[max(scores)]:.3f}")
    rewards = [reward for row in rows if (reward := reward_of(row)) is not None]
    if rewards:
        lines.append(f"reward {rewards[0]:.3f} → {rewards[-1]:.3f}")
    if status is not None:
        counts = ", ".join(f"{count} {state}" for state, count in sorted(status.submissions.items()) if count)
        lines.append(f"submissions: {counts or 'none'}; {tokens_credited(status):,} verified tokens")
    return [*lines, *_no_signal(rows, status.submissions.get("unsure", 0) if status is not None else 0)]


def steps_in(metrics_file: Path) -> int:
    """How many steps the trainer has written down. The last row of a run that is over is of its last version only."""
    return max((int(row["step"]) + ("groups" in row) for row in MetricsLog(metrics_file).rows()), default=0)


def alarm_lines(metrics_file: Path) -> list[str]:
    """The guards' alarms that had not ended when the run did, with since when: `ALARM divergence, since step 3 …`."""
    return [
        f"ALARM {name}, since step {since}: {seen}"
        for name, (since, seen) in standing(MetricsLog(metrics_file).rows()).items()
    ]


def _no_signal(rows: Sequence[Mapping[str, float]], unsure: int) -> list[str]:
    """A run that goes through all its steps and learns nothing must not look like one that learnt."""
    trained = [row for row in rows if "groups" in row]
    if not trained or any(row["groups"] for row in trained):
        return []
    dropped = sum(int(row.get("dropped_groups", 0)) for row in trained)
    if unsure > dropped:
        return [f"{NOTHING_TRAINED}: {unsure} submissions could not be judged; logs/validator-0.log says why"]
    why = f"all {dropped} groups had equal rewards" if dropped else "no group was accepted"
    hint = "; the tasks are too easy or too hard, or the reward is constant" if dropped else ""
    return [f"{NOTHING_TRAINED}: {why}{hint}"]
