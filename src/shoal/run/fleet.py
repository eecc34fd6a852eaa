"""Several workers on one machine by one command: one for each GPU, or several on the processor.

    shoal join: meets the hub, plans, supervises ──► worker gpu-0   FOLDER/gpu-0: node.key outbox/ cache/ worker.log
       ▲  standing.json of each: one status line ├─► worker gpu-1   FOLDER/gpu-1: likewise
       └─ passes on SIGTERM, with a deadline     └─► …
    a worker that dies is started again; one that cannot work (exit 2 to 6) is left; when all have ended, this ends

Each has a key, an outbox and a download cache of its own (a cache belongs to one process), and brings a vouch of the
same owner, so that the hub adds up their credit. Without `--owner` that is a key in the folder.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import UserError
from shoal.protocol import load_or_create_key
from shoal.run.doctor import gpu_files, torch_version
from shoal.runtime import Clock, FolderLock, StopToken, SystemClock, count_of, ensure_folder, stop_on_signals
from shoal.runtime.supervise import Ending, ProcessSpec, ProcessView, RestartPolicy, Supervisor
from shoal.worker.earnings import Standing

if TYPE_CHECKING:
    from shoal.run.join import JoinRequest

Show = Callable[[Sequence[tuple[str, str]]], None]
"""Draws rows of a label and a text, in place of the rows before."""
log = logging.getLogger(__name__)
GPU_NAMES = "CUDA_VISIBLE_DEVICES"
COUNT = "import torch; print(torch.cuda.device_count())"
COUNT_S = 120.0
FINAL_CODES = (2, 3, 4, 5, 6)  # see errors.py: the worker has waited, or the same would happen again
POLICY = RestartPolicy(grace_s=60.0)  # a group that is being generated is finished first
LOCK_WAIT_S = 15.0  # workers whose supervisor was killed need a moment to end
STATUS_EVERY_S = RATE_S = 30.0
LONGEST_NAME = 64


@dataclass(frozen=True)
class WorkerPlace:
    name: str
    device: str
    gpu: str | None = None


def plan_workers(
    gpus: Sequence[str], device: str = "auto", wanted: str | None = None, workers: int | None = None
) -> list[WorkerPlace]:
    """The places of this machine's workers; an empty list means one worker that chooses its device. `gpus` names the
    visible GPUs, `wanted` has the numbers of `--gpu`.

    >>> plan_workers(["0", "1", "2"], wanted="0,2")
    [WorkerPlace(name='gpu-0', device='cuda', gpu='0'), WorkerPlace(name='gpu-2', device='cuda', gpu='2')]
    """
    if wanted is not None and (device == "cpu" or workers is not None):
        raise UserError(f"--gpu and {'--device cpu' if device == 'cpu' else '--workers'} exclude each other")
    if wanted is not None:
        numbers = _numbers(wanted, len(gpus))
    elif workers is not None and workers > 1:
        if device == "cuda" or (gpus and device == "auto"):
            raise UserError("--workers is for the processor: add --device cpu; each GPU has one worker (--gpu)")
        return [WorkerPlace(f"cpu-{number}", "cpu") for number in range(workers)]
    else:
        numbers = [] if device == "cpu" or workers is not None else list(range(len(gpus)))
    return [WorkerPlace(f"gpu-{number}", "cuda", gpus[number]) for number in numbers] if len(gpus) > 1 else []


def _numbers(wanted: str, count: int) -> list[int]:
    words = [word.strip() for word in wanted.split(",")]
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise UserError(f"--gpu {wanted!r} is no list of GPUs: write for example 0 or 0,2")
    numbers = sorted(map(int, words))
    if numbers[-1] >= count:
        there = f"GPUs 0 to {count - 1}" if count > 1 else "one GPU, 0" if count else "no GPU"
        raise UserError(f"--gpu {wanted}: torch finds {there} here (shoal doctor says more)")
    return numbers


def visible_gpus() -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` calls the GPUs that torch finds. Another process counts them: torch takes seconds to
    load, and memory for as long as the process lives."""
    if not gpu_files() or "+cpu" in (torch_version() or "+cpu"):
        return []
    try:
        ran = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=COUNT_S, check=True)
        return gpu_names(int(ran.stdout.split()[-1]), os.environ.get(GPU_NAMES))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        log.warning("the GPUs could not be counted, so that one worker is started: %s", error)
        return []


def gpu_names(count: int, visible: str | None) -> list[str]:
    """
    >>> gpu_names(2, None), gpu_names(2, "3, GPU-8f1e")
    (['0', '1'], ['3', 'GPU-8f1e'])
    """
    names = [name.strip() for name in (visible or "").split(",") if name.strip()] or list(map(str, range(count)))
    return names[:count]


def refuse_one_vouch(places: Sequence[WorkerPlace], request: JoinRequest) -> None:
    if request.vouch is not None and len(places) > 1:
        alone = "start each with its own (--gpu 0, --gpu 1, …), or give --owner" if places[0].gpu else "give --owner"
        raise UserError(f"a vouch is for one node, and these are {len(places)} workers: {alone}")
    if request.trusted is not None and len(places) > 1:
        alone = "with its own --folder and certificate (--gpu 0, --gpu 1, …, or --workers 1)"
        raise UserError(f"a certificate is for one node, and these are {len(places)} workers: start each {alone}")


def run_fleet(
    request: JoinRequest, urls: Sequence[str], stop: StopToken, folder: Path, root: str, places: Sequence[WorkerPlace],
    status: FleetStatus,
) -> int:  # fmt: skip
    """The exit code when all workers have ended: 0 if each ended well, else that of the first which did not."""
    stop_on_signals(supervising=True, token=stop)
    with FolderLock(folder).acquire(stop, LOCK_WAIT_S):
        owner = request.owner
        if owner is None and request.vouch is None:
            owner = folder / "owner.key"
            log.info("the owner of all these workers is %s (%s)", load_or_create_key(owner).public_key, owner)
        inside = replace(request, urls=tuple(f"{url}/#{root}" for url in urls), owner=owner, check=False, gpu=None)
        for place in places:
            ensure_folder(folder / place.name)
            FolderLock(folder / place.name).acquire(stop, LOCK_WAIT_S).release()
        specs = [_spec(inside, folder, place, len(places)) for place in places]
        log.info("%s: %s", count_of(len(specs), "worker"), ", ".join(str(spec.log) for spec in specs))
        supervisor = Supervisor(specs, stop, folder / "processes.json", POLICY)

        def look() -> Ending | None:
            processes = supervisor.processes()
            status.look(processes)
            return ending_of(processes)

        ending = supervisor.run(look)
    log.info("all workers have ended; %s", status.line(()))
    return 0 if stop.is_set() else ending.exit_code


def _spec(request: JoinRequest, folder: Path, place: WorkerPlace, count: int) -> ProcessSpec:
    own = (folder / place.name).absolute()
    name = None if request.name is None else f"{request.name[: LONGEST_NAME - len(place.name) - 1]}-{place.name}"
    limits = request.limits.shared_by(count, place.device == "cpu")
    inner = replace(request, folder=own, device=place.device, name=name, limits=limits, workers=1)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))}
    return ProcessSpec(
        name=place.name, argv=inner.command, log=own / "worker.log", essential=False, when_done="rest",
        rests_with=FINAL_CODES, env=threads if place.gpu is None else {**threads, GPU_NAMES: place.gpu},
    )  # fmt: skip


def ending_of(processes: Sequence[ProcessView]) -> Ending | None:
    """None while a worker runs or is to be started. Why one has failed was said when it did."""
    if any(each.state in ("running", "restarting") for each in processes):
        return None
    failed = sorted((each.since_s, each.code or 1) for each in processes if each.code != 0)
    return Ending(max(1, failed[-1][1]) if failed else 0, "")


class FleetStatus:
    """The work of all workers since the start: a line every `STATUS_EVERY_S`, or rows that `show` draws. A restarted
    worker counts its tokens from 0; its credit continues."""

    def __init__(
        self, folder: Path, places: Sequence[WorkerPlace], clock: Clock = SystemClock(), show: Show | None = None
    ) -> None:
        self.folder, self._show = folder, show
        self._folders, self._clock = {place.name: folder / place.name for place in places}, clock
        self._tokens: dict[str, int] = {}  # by the start of a worker
        self._first, self._last = dict[str, Standing](), dict[str, Standing]()
        self._said_s, self._processes = clock.monotonic_s(), tuple[ProcessView, ...]()
        self._past = deque([(self._said_s, 0)])  # how many tokens there were, over `RATE_S`

    def look(self, processes: Sequence[ProcessView]) -> None:
        self._processes = tuple(processes)
        if self._show is None and self._clock.monotonic_s() - self._said_s >= STATUS_EVERY_S:
            self._said_s = self._clock.monotonic_s()
            log.info("%s", self.line(processes))

    def draw(self) -> None:
        """For one thread."""
        if self._show is None:
            return
        totals, last = self._totals(with_rate=True), self._last
        others = {each.name: f"{each.state}, {each.why}" for each in self._processes if each.state != "running"}
        doing = {name: last[name].doing or "ready" if name in last else "starting" for name in self._folders}
        rows = [("worker" if name == "." else name, others.get(name, text)) for name, text in doing.items()]
        reasons = [each.reason for each in last.values() if each.reason]
        self._show([*rows, ("so far", totals), *(("last", reason) for reason in reasons[-1:])])

    def line(self, processes: Sequence[ProcessView]) -> str:
        """`2 of 3 workers run: 12,345 tokens (411/s), 5 groups accepted, credit +900 (80 pending); gpu-1: …`."""
        text = self._totals(with_rate=bool(processes))
        if not processes:
            return text
        running = sum(each.state == "running" for each in processes)
        others = [f"; {each.name}: {each.state}, {each.why}" for each in processes if each.state != "running"]
        return f"{running} of {count_of(len(processes), 'worker')} run: {text}" + "".join(others)

    def _totals(self, with_rate: bool) -> str:
        self._read()
        now_s, tokens = self._clock.monotonic_s(), sum(self._tokens.values())
        self._past.append((now_s, tokens))
        while len(self._past) > 2 and self._past[1][0] <= now_s - RATE_S:
            self._past.popleft()
        began_s, before = self._past[0]
        rate = f" ({(tokens - before) / max(now_s - began_s, 0.001):,.0f}/s)" if with_rate else ""
        spans = [(self._first[name], last) for name, last in self._last.items()]
        accepted = sum(last.accepted - first.accepted_before for first, last in spans)
        credit = sum(last.credit - first.credit_before for first, last in spans)
        pending, rejected, unsure = (
            sum(getattr(each, name) for each in self._last.values()) for name in ("pending", "rejected", "unsure")
        )
        text = f"{tokens:,} tokens{rate}, {count_of(accepted, 'group')} accepted, "
        text += f"{rejected:,} rejected, " if rejected else ""
        text += f"{unsure:,} unsure, " if unsure else ""
        return f"{text}credit +{credit:,}" + (f" ({pending:,} pending)" if pending else "")

    def _read(self) -> None:
        for name, folder in self._folders.items():
            if (found := Standing.read(folder)) is not None:
                self._tokens[found.start] = found.tokens
                self._first.setdefault(name, found)
                self._last[name] = found
