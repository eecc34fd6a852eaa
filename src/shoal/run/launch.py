"""All roles of a run on this machine, supervised, until the trainer is done: `shoal run` and `shoal demo`.

run folder ─► endpoints ─► hub, origin, relays, trainer, validators, workers: restarted when they die
trainer exits 0 ─► success; exit 2, 3 or 5, a crash loop or no progress ─► the run ends, and says why
"""

import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.client import HubClient
from shoal.errors import ConfigError, HubUnreachable, ShoalError
from shoal.protocol import RunStatus, fingerprint
from shoal.run.folder import RunFolder, hub_address
from shoal.run.progress import Display, Reporter, StatusPoller, Watchdog, reward_of, tokens_credited
from shoal.run.roles import command_of, role_names
from shoal.runtime import FolderLock, StopToken, logs, shoal_command, show_bytes
from shoal.runtime.limits import folder_bytes
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.sizing import kept_when_finished
from shoal.runtime.supervise import Ending, ProcessSpec, Supervisor
from shoal.shardcast import Origin
from shoal.shardcast.tree import HEAD
from shoal.trainer.folder import scores_of
from shoal.trainer.record import open_alarms

log = logging.getLogger(__name__)
METRICS = Path("trainer") / "metrics.jsonl"
NOTHING_TRAINED = "nothing was trained on"
LOCK_WAIT_S = 15.0  # a supervisor that was killed leaves children that need a moment to end
# Many processes share these cores, and perhaps one GPU, where fragmented memory is lost to the others.
SHARED_MACHINE = {"OMP_NUM_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Launched:
    ending: Ending
    status: RunStatus | None
    elapsed_s: float


def launch(
    folder: RunFolder, patience_s: float, stop: StopToken, display: Display, extra: Sequence[ProcessSpec] = (),
    notes: Mapping[str, str] | None = None,
) -> Launched:  # fmt: skip
    """The caller enters and leaves `display`; `notes` are remarks on workers. Leaves no process, also if it raises."""
    with FolderLock(folder.path).acquire(stop, LOCK_WAIT_S):
        logs.setup("run", folder.path / "logs" / "run.log", stderr=False)  # the display says it in the terminal
        if RunFolder.open(folder.path).recipe != folder.recipe:
            raise ConfigError(f"another start has just made another run in {folder.path}; choose another folder")
        for name in [*role_names(folder), *(spec.name for spec in extra)]:
            if (folder.path / name / ".lock").exists():  # of an earlier start whose supervisor was killed
                FolderLock(folder.path / name).acquire(stop, LOCK_WAIT_S).release()
        endpoints = folder.assign_endpoints()
        display.say(f"run {endpoints.run} in {folder.path}, hub at {endpoints.hub}, logs in {folder.path / 'logs'}")
        display.say(f"to contribute: {shoal_command()} join {endpoints.join}")
        client = HubClient.of_a_person(endpoints.hub, 0.0, fingerprint(endpoints.root_key))
        with StatusPoller(client) as source:
            reporter = Reporter(source, display, Watchdog(patience_s), notes or {})
            specs = [*(process_spec(folder.path, name) for name in role_names(folder)), *extra]
            supervisor = Supervisor(specs, stop, folder.path / "processes.json")
            reporter.processes = supervisor.processes

            def last_look() -> None:
                if stop.is_set():
                    display.say(f"stopping ({stop.reason}); a second time, what does not end at once is killed")
                reporter.last_look()

            ending = supervisor.run(reporter.tick, on_end=last_look)
        if ending.exit_code == 0:
            remove_caches(folder)
    return Launched(ending, reporter.status, reporter.elapsed_s)


def remove_caches(folder: RunFolder) -> None:
    """What only a running run needs: weights fetched and mirrored, and at the origin what is older than the groups of
    the last step, which can be checked again (`shoal ledger verify --recheck`)."""
    for cache in (*folder.path.glob("worker-*/cache"), *folder.path.glob("validator-*/cache")):
        shutil.rmtree(cache, ignore_errors=True)
    for relay in folder.path.glob("relay-*"):
        for name in ("chunks", "manifests"):
            shutil.rmtree(relay / name, ignore_errors=True)
        (relay / HEAD).unlink(missing_ok=True)
    if not (folder.path / "origin").is_dir():
        return
    try:
        origin = Origin(folder.path / "origin", folder.run_id, folder.key("trainer"))
        origin.keep_newest(kept_when_finished(folder.recipe.run.max_staleness))
    except ShoalError as error:  # its key may be elsewhere
        log.warning("old versions at the origin were not removed: %s", error)


def process_spec(path: Path, name: str, cheat: str | None = None) -> ProcessSpec:
    """The trainer's end is the run's; the run continues without a worker or a relay."""
    role = name.partition("-")[0]
    when_done: dict[str, Literal["restart", "rest", "end"]] = {"trainer": "end", "validator": "rest", "worker": "rest"}
    return ProcessSpec(
        name=name, argv=(sys.executable, "-m", "shoal.cli", *command_of(path, name, cheat)),
        log=path / "logs" / f"{name}.log", essential=role not in ("worker", "relay"),
        when_done=when_done.get(role, "restart"),
        env={name: os.environ.get(name, value) for name, value in SHARED_MACHINE.items()},
    )  # fmt: skip


def ledger_line(path: Path) -> str:
    """Leaves the ledger as a file; that it could not be written makes no failure of a run that went well."""
    from shoal.run.ledger.check import export_ledger

    try:
        rows = export_ledger(str(path), path / "ledger.jsonl")
    except ShoalError as error:
        return f"the ledger could not be written out: {error}"
    check = f"{shoal_command()} ledger verify {path}"
    return f"the ledger is in {path / 'ledger.jsonl'}: {rows:,} entries; to check it: {check}"


def kept_line(path: Path) -> str:
    sizes = {one.name: folder_bytes(one) for one in path.iterdir() if one.is_dir()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {show_bytes(size)}" for name, size in largest)
    return f"{path} keeps {show_bytes(sum(sizes.values()))}: {named}, …"


def conclusion(path: Path, launched: Launched, before: int = 0) -> list[str]:
    """The result of a run, and what to do next. `before`: steps that were done when it was started."""
    lines, code = summary(path / METRICS, launched.status, launched.elapsed_s, before), launched.ending.exit_code
    if code == 130:
        lines.append(f"to resume: {shoal_command()} run {path}")
    if code != 0:
        return lines
    metrics, take = MetricsLog(path / METRICS), f"{shoal_command()} export {path} OUT"
    untrained, scores = any(line.startswith(NOTHING_TRAINED) for line in lines), scores_of(metrics)
    where = f"the {'unchanged' if untrained else 'trained'} model is in {path / 'trainer' / 'export'}"
    alarms = [
        f"ALARM {name}, since step {since}: {seen}" for name, (since, seen) in open_alarms(metrics.rows()).items()
    ]
    if alarms:
        which = f"the best by held-out score: {take} --best" if scores else f"an earlier one: {take} --version N"
        return [*lines, *alarms, f"{where}, BUT ALARMS STAND: look at it before you use it; {which}"]
    lines.append(where)
    last, best = scores[max(scores)] if scores else 0.0, max(scores.values(), default=0.0)
    if last < best:
        version = max(version for version, score in scores.items() if score == best)
        better = f"version {version} has the best held-out score, {best:.3f} (last {last:.3f})"
        lines.append(f"{better}; to take it: {take} --best")
    return lines


def summary(metrics_file: Path, status: RunStatus | None, elapsed_s: float, before: int = 0) -> list[str]:
    """From the trainer's rows on disk, because the hub may have died."""
    rows = (metrics := MetricsLog(metrics_file)).rows()
    done, total = (status.step, f" of {status.steps}") if status is not None else (steps_in(metrics_file), "")
    lines = [f"{done}{total} steps{f', {max(0, done - before)} of them' if before else ''} in {elapsed_s:.0f} s"]
    if scores := scores_of(metrics):
        last = f" → {scores[max(scores)]:.3f}" if len(scores) > 1 else f" (version {min(scores)}, no other)"
        lines.append(f"held-out score {scores[min(scores)]:.3f}{last}")
    if rewards := [reward for row in rows if (reward := reward_of(row)) is not None]:
        lines.append(f"reward {rewards[0]:.3f} → {rewards[-1]:.3f}")
    if status is not None:
        counts = ", ".join(f"{count} {state}" for state, count in sorted(status.submissions.items()) if count)
        lines.append(f"submissions: {counts or 'none'}; {tokens_credited(status):,} verified tokens")
    trained = [row for row in rows if "groups" in row]
    if trained and not any(row["groups"] for row in trained):
        dropped = sum(int(row.get("dropped_groups", 0)) for row in trained)
        unsure = status.submissions.get("unsure", 0) if status is not None else 0
        why = f"all {dropped} groups had equal rewards; the tasks are too easy or too hard, or the reward is constant"
        if unsure > dropped:
            why = f"{unsure} submissions could not be judged; logs/validator-0.log says why"
        lines.append(f"{NOTHING_TRAINED}: {why if unsure or dropped else 'no group was accepted'}")
    return lines


def steps_in(metrics_file: Path) -> int:
    """The steps that the trainer has written down. The last row of a finished run is of its last version only."""
    return max((int(row["step"]) + ("groups" in row) for row in MetricsLog(metrics_file).rows()), default=0)


@contextmanager
def asking_hub(place: str, wait_s: float) -> Iterator[HubClient]:
    """For a person who waits. If the hub of a run's folder is silent, the error says how the run stands."""
    with closing(HubClient.of_a_person(*hub_address(place, wait_s))) as client:
        try:
            yield client
        except HubUnreachable as error:
            if "://" in place:
                raise
            raise HubUnreachable(f"{when_stopped(Path(place))[1]} ({error})") from error


def when_stopped(path: Path) -> tuple[bool, str]:
    steps, metrics = RunFolder.open(path).recipe.run.steps, MetricsLog(path / METRICS)
    done, scores = steps_in(path / METRICS), scores_of(metrics)
    score = f", held-out score {scores[min(scores)]:.3f} → {scores[max(scores)]:.3f}" if scores else ""
    if done >= steps:
        export, measure = path / "trainer" / "export", f"to measure it: {shoal_command()} eval {path} --env SPEC"
        return True, f"the run in {path} is finished: {steps} steps{score}; its model is in {export}; {measure}"
    resume = f"{shoal_command()} run {path}"
    return False, f"the run in {path} is not running: {done} of {steps} steps{score}; resume it with: {resume}"
