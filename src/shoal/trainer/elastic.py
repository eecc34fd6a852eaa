"""A trainer of several processes on this machine, started again when one dies, with exit codes that mean something.

    run_group ─► rank 0, rank 1, … (stdin: a pipe that only this process holds open)
        │ one dies ─► the others are stopped, all are started again: they resume from the last checkpoint
        │ one ends with 2, 3 or 5 ─► starting again cannot help: the group ends with that code and message
        └ this process is gone, even by kill -9 ─► the pipes close ─► every rank stops

The ranks meet at a store of this process, on the loopback address, by the variables that `torchrun` sets: by hand,
`torchrun … -m shoal.cli trainer --dir RUN` does the same, also over several machines.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shoal.errors import ShoalError
from shoal.runtime.stop import SUPERVISED, StopToken
from shoal.runtime.supervise import HOPELESS_CODES, describe_exit
from shoal.trainer.settings import ERROR_FILE

log = logging.getLogger(__name__)

RESTARTS = 3
LOOK_S = 0.1
LAST_WORDS_S = 1.0  # the others mostly end, too, with a collective that nobody answers: the cause is among the first
SHUT_DOWN_S = 8  # less than the grace period of a supervisor


def run_group(arguments: Sequence[str], processes: int, stop: StopToken, restarts: int = RESTARTS) -> None:
    """Run `python -m shoal.cli ARGUMENTS` in so many processes until all are done, or `stop` is set, or they fail."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "shoal.cli", *arguments]
    with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder:
        for life in range(restarts + 1):
            told = [Path(folder) / f"{life}-{rank}.json" for rank in range(processes)]
            shared = {**os.environ, SUPERVISED: "1", "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
            shared |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            shared |= {"TORCHELASTIC_RESTART_COUNT": str(life)}
            ranks = [
                subprocess.Popen(
                    command, stdin=subprocess.PIPE,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE: str(path)},
                )
                for rank, path in enumerate(told)
            ]  # fmt: skip
            try:
                failed = _watch(ranks, stop)
            finally:
                _end(ranks)
            if stop.is_set() or not failed:
                return
            error = group_error({rank: (code, _message(told[rank])) for rank, code in failed.items()})
            if error.exit_code in HOPELESS_CODES:
                break
    raise error


def _watch(ranks: Sequence[subprocess.Popen[bytes]], stop: StopToken) -> dict[int, int]:
    """The codes of those that have failed; nothing once all are done, or `stop` is set."""
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
    """End those that still run, in good order if they can."""
    for rank in ranks:
        rank.terminate()
    until_s = time.monotonic() + SHUT_DOWN_S
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, until_s - time.monotonic()))
        rank.kill()
        rank.communicate()


def _message(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def group_error(failures: Mapping[int, tuple[int, str]]) -> ShoalError:
    """Why a group has failed, by code and message of each: the rank that starting again cannot help, else the first."""
    rank, (code, told) = min(failures.items(), key=lambda item: item[1][0] not in HOPELESS_CODES)
    hopeless = code in HOPELESS_CODES
    named = f"rank {rank} of the trainer {describe_exit(code)}"
    error = ShoalError(told if hopeless and told else ": ".join(filter(None, (named, told))))
    error.exit_code = code if hopeless else 1
    return error
