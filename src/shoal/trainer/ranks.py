"""The ranks that train together: one process by default, several under `torchrun`, or started by `run_group`.

    Ranks       one process: every collective returns its own value
    RankGroup   a `torchrun` group, each with a shard of every weight: gloo between CPUs, NCCL between GPUs

    rank 0 ──send──► the store: "message n, so many bytes" ──► every other rank: receive
           └───────────────── broadcast of its bytes ────────────────┘

While rank 0 waits for rollouts, the others wait at the store and not in a collective, so that Python can interrupt the
wait. A process that dies closes its connections, which ends the collectives of the others at once.

    run_group ─► rank 0, rank 1, … (stdin: a pipe that only this process holds open)
        │ one dies ─► the others are stopped, all are started again and resume from the last checkpoint
        │ one ends with 2, 3 or 5 ─► a restart cannot help: the group ends with that code and message
        └ this process is killed ─► the pipes close ─► every rank stops

The ranks meet at a store of this process on the loopback address, by the variables that `torchrun` sets. By hand,
`torchrun … -m shoal.cli trainer RUN` does the same, also over several machines.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from shoal.errors import DeadlineExceeded, ResourceError, ShoalError
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.stop import SUPERVISED, StopToken
from shoal.runtime.supervise import HOPELESS_CODES, describe_exit
from shoal.trainer.settings import ERROR_FILE

log = logging.getLogger(__name__)

T = TypeVar("T")

COLLECTIVE_S = 600.0  # ranks work in parallel, so none waits for another longer than for one micro-batch
LISTEN_S = 0.02
GRACE_S = 10.0  # for rank 0, which is told to stop as well, to end the others
OVER = "over"
RUN_METHOD = "run_with_weights"
RESTARTS = 3
LOOK_S = 0.1
LAST_WORDS_S = 1.0  # wait for the exit codes of other ranks, which fail a moment later; the cause is among them
SHUT_DOWN_S = 8  # less than the grace period of a supervisor


class Ranks:
    """The processes of a trainer; this class is for a single one. All processes call these methods in the same order.
    Rank 0 talks to the hub and sends commands to the others (`shards`)."""

    rank = 0
    world = 1
    sharded = False

    def total(self, values: Tensor) -> Tensor:
        return values

    def peak(self, values: Tensor) -> Tensor:
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def run(self, model: Any, call: Callable[[], T]) -> T:  # noqa: ARG002
        """Every use of a model or of its head happens inside such a call, with gathered weights."""
        return call()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return self.whole(torch.nn.utils.get_total_norm(gradients))

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor with all its rows, also if it is sharded."""
        return tensor

    def own_rows(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """What this rank holds of a tensor, and which rows these are."""
        return tensor, ...

    def sharded_as(self, target: Tensor, own: Tensor) -> Tensor:  # noqa: ARG002
        """The tensor of which `own` are this rank's rows, sharded like `target`."""
        return own

    def send(self, command: bytes) -> None:
        """Rank 0 sends a command to the others."""


class RankGroup(Ranks):
    """One process of a group. `device` is where its shards are, e.g. `cuda:3`; `use` sets it."""

    sharded = True

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.device = torch.device("cpu")
        self._store = store
        self._messages = 0

    def total(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        reduced = values.detach().clone()
        dist.all_reduce(reduced, operation)
        return reduced

    def peak(self, values: Tensor) -> Tensor:
        return self.total(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        return bool(self.peak(torch.tensor([int(flag)], dtype=torch.int64)).item())

    def run(self, model: Any, call: Callable[[], T]) -> T:
        result: T = getattr(model, RUN_METHOD)(call)
        if not torch.is_grad_enabled():  # a backward pass would release the weights
            model.reshard()
        return result

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def own_rows(self, tensor: Tensor) -> tuple[Tensor, Any]:
        if not isinstance(tensor, DTensor):
            return tensor, ...
        local: Tensor = tensor.to_local()
        rows = rows_of(tensor.shape[0], self.rank, self.world)
        assert local.shape[0] == rows.stop - rows.start, "FSDP shards rows in another way than `rows_of`"
        return local, rows

    def sharded_as(self, target: Tensor, own: Tensor) -> Tensor:
        if not isinstance(target, DTensor):
            return own
        shape: dict[str, Any] = {"shape": target.shape, "stride": target.stride()}
        return DTensor.from_local(own, target.device_mesh, target.placements, run_check=False, **shape)

    def send(self, command: bytes) -> None:
        self._store.set(f"message-{self._messages}", str(len(command)))
        self.broadcast(torch.frombuffer(bytearray(command), dtype=torch.uint8))
        self._messages += 1

    def receive(self, stop: StopToken, silence_s: float, clock: Clock = SystemClock()) -> bytes | None:
        """The next message of rank 0; None if rank 0 has ended, or if this process is told to stop."""
        key, end_s = f"message-{self._messages}", clock.monotonic_s() + silence_s
        while not self._store.check([key]):
            time.sleep(LISTEN_S)
            now_s = clock.monotonic_s()
            if stop.is_set():
                end_s = min(end_s, now_s + GRACE_S)
            if now_s >= end_s and stop.is_set():
                return None
            if now_s >= end_s:
                raise DeadlineExceeded(f"rank {self.rank} has heard nothing of rank 0 for {silence_s:.0f} s")
        size = self._store.get(key).decode()
        if size == OVER:
            return None
        message = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(message)
        self._messages += 1
        return message.numpy().tobytes()

    def end(self) -> None:
        """Not a collective, so it works after one that failed."""
        self._store.set(f"message-{self._messages}", OVER)

    def broadcast(self, tensor: Tensor) -> None:
        if tensor.numel():
            dist.broadcast(tensor, src=0)

    def use(self, kind: str) -> None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if kind != "cuda":
            return
        if local_rank >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            found = f"there are {count} GPUs here, and process {local_rank + 1} needs one of its own"
            raise ResourceError(f"{found}: set trainer.processes (torchrun: --nproc-per-node) to the number of GPUs")
        self.device = torch.device(f"cuda:{local_rank}")
        torch.cuda.set_device(self.device)

    def leave(self) -> None:
        dist.destroy_process_group()


def rows_of(count: int, rank: int, world: int) -> slice:
    """The rows of `count` that a rank holds: equal shards, the last ones smaller or empty. 5 in 4 ranks: 2, 2, 1, 0."""
    size = -(-count // world)
    return slice(min(count, rank * size), min(count, (rank + 1) * size))


def join_ranks(collective_s: float = COLLECTIVE_S) -> RankGroup:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    limit = timedelta(seconds=collective_s)
    store, rank, world = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    # The store outlives the processes, so each restart uses keys of its own.
    life = PrefixStore(f"life-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    group = PrefixStore("group", life)
    dist.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=limit)
    return RankGroup(PrefixStore("shoal", life), rank, world)


@contextmanager
def lost_peers(ranks: RankGroup) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        if not (isinstance(error, dist.DistError) or "gloo" in message or "Connection closed by peer" in message):
            raise
        lost = f"rank {ranks.rank} of the trainer has lost another of its {ranks.world} processes: {error}"
        raise ShoalError(lost) from error


def run_group(arguments: Sequence[str], processes: int, stop: StopToken, restarts: int = RESTARTS) -> None:
    """Run `python -m shoal.cli ARGUMENTS` until all are done, `stop` is set, or they fail."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "shoal.cli", *arguments]
    with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder:
        for life in range(restarts + 1):
            error_files = [Path(folder) / f"{life}-{rank}.json" for rank in range(processes)]
            shared = {**os.environ, SUPERVISED: "1", "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
            shared |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            shared |= {"TORCHELASTIC_RESTART_COUNT": str(life)}
            ranks = [
                subprocess.Popen(
                    command, stdin=subprocess.PIPE,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE: str(path)},
                )
                for rank, path in enumerate(error_files)
            ]  # fmt: skip
            try:
                failed = _watch(ranks, stop)
            finally:
                _end(ranks)
            if stop.is_set() or not failed:
                return
            error = group_error({rank: (code, _message(error_files[rank])) for rank, code in failed.items()})
            if error.exit_code in HOPELESS_CODES:
                break
    raise error


def _watch(ranks: Sequence[subprocess.Popen[bytes]], stop: StopToken) -> dict[int, int]:
    until_s = float("inf")
    while not stop.wait(LOOK_S):
        codes = [rank.poll() for rank in ranks]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if None not in codes or time.monotonic() > until_s:
            for rank, code in failed.items():
                log.warning("rank %d %s", rank, describe_exit(code))
            return failed
        if failed and until_s == float("inf"):
            until_s = time.monotonic() + LAST_WORDS_S
    return {}


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.terminate()
    until_s = time.monotonic() + SHUT_DOWN_S
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, until_s - time.monotonic()))
        rank.kill()
        rank.communicate()


def _message(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def group_error(failures: Mapping[int, tuple[int, str]]) -> ShoalError:
    """Why a group failed: the rank with a code that a restart cannot help, else the first."""
    rank, (code, message) = min(failures.items(), key=lambda item: item[1][0] not in HOPELESS_CODES)
    hopeless = code in HOPELESS_CODES
    named = f"rank {rank} of the trainer {describe_exit(code)}"
    error = ShoalError(message if hopeless and message else ": ".join(filter(None, (named, message))))
    error.exit_code = code if hopeless else 1
    return error
