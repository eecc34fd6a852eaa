"""A trainer of several processes on this machine: torch's elastic agent, with exit codes that mean something.

    run_group ─► agent ─► rank 0, rank 1, … (stdin: a pipe that only the agent holds open)
                   │ one dies ─► the others are stopped, all are started again: they resume from the last checkpoint
                   │ one ends with 2, 3 or 5 ─► starting again cannot help: the group ends with that code and message
                   └ the agent is gone, even by kill -9 ─► the pipe closes ─► every rank stops

The ranks meet at a free port of the loopback address. By hand, `torchrun … -m shoal.cli trainer --dir RUN` does the
same, also over several machines.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from shoal.errors import ShoalError
from shoal.runtime.stop import SUPERVISED, StopToken
from shoal.runtime.supervise import HOPELESS_CODES, describe_exit
from shoal.trainer.settings import REPORTER

log = logging.getLogger(__name__)

RESTARTS = 3
SHUT_DOWN_S = 8  # less than the grace period of a supervisor


def run_group(arguments: Sequence[str], processes: int, stop: StopToken, restarts: int = RESTARTS) -> None:
    """Run `python -m shoal.cli ARGUMENTS` in so many processes until all are done, or `stop` is set, or they fail."""
    logs = tempfile.mkdtemp(prefix="shoal-ranks-")
    here = RendezvousParameters(
        backend="c10d", endpoint="127.0.0.1:0", run_id=os.urandom(8).hex(), min_nodes=1, max_nodes=1,
        local_addr="127.0.0.1", is_host=True,
    )  # fmt: skip
    spec = WorkerSpec(
        role="trainer", local_world_size=processes, entrypoint=sys.executable, args=("-m", "shoal.cli", *arguments),
        rdzv_handler=rendezvous.get_rendezvous_handler(here), max_restarts=restarts, monitor_interval=0.1,
        local_addr="127.0.0.1",
    )  # fmt: skip
    agent = _Agent(spec, DefaultLogsSpecs(logs))
    agent._shutdown_timeout = SHUT_DOWN_S
    try:
        with _held_by_a_pipe(), _ended_by(stop):
            result = agent.run()
    except SignalException as ended:
        stop.set(signal.Signals(ended.sigval).name)
        return
    finally:
        spec.rdzv_handler.shutdown()
        shutil.rmtree(logs, ignore_errors=True)
    if result.is_failed():
        raise group_error(result.failures)


def group_error(failures: Mapping[int, ProcessFailure]) -> ShoalError:
    """Why a group has failed: the rank whose end starting again cannot help, or the first that ended. The others mostly
    end because of it, with a collective that nobody answers."""
    ordered = sorted(failures.items(), key=lambda item: (item[1].exitcode not in HOPELESS_CODES, item[1].timestamp))
    rank, failure = ordered[0]
    named = f"rank {rank} of the trainer {describe_exit(failure.exitcode)}"
    told = failure.message if failure.error_file_data.get("by") == REPORTER else ""
    error = ShoalError(told if failure.exitcode in HOPELESS_CODES and told else ": ".join(filter(None, (named, told))))
    error.exit_code = failure.exitcode if failure.exitcode in HOPELESS_CODES else 1
    return error


class _Agent(LocalElasticAgent):
    """Torch's agent, except that it does not start again what would only fail again."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        for rank, failure in result.failures.items():
            log.warning("rank %d %s", rank, describe_exit(failure.exitcode))
            if failure.exitcode in HOPELESS_CODES:
                self._remaining_restarts = 0
        return result


@contextmanager
def _held_by_a_pipe() -> Iterator[None]:
    """Every rank takes this process for its supervisor: it reads a pipe that closes when this process is gone."""
    before, (reading, writing) = os.dup(0), os.pipe()
    os.dup2(reading, 0)
    os.environ[SUPERVISED] = "1"
    try:
        yield
    finally:
        del os.environ[SUPERVISED]
        os.dup2(before, 0)
        for descriptor in (before, reading, writing):
            os.close(descriptor)


@contextmanager
def _ended_by(stop: StopToken) -> Iterator[None]:
    """The agent listens to signals alone; one is sent when this process is to stop for another reason."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            if stop.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch, name="stop-the-group", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
