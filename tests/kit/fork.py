"""`shoal …` as a process of its own, forked from a server that has imported the commands once, and no torch.

    test ── start, run ──► server (one for all tests of this process) ── fork ──► main([...]), its own pid and streams

What is tested is the same: a process, its exit code, what it writes, how it takes signals. What starts for real costs a
second of imports each time; each command has such tests too. `PRELOADED` may name nothing that loads torch.
"""

import io
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = (
    "pytest", "httpx2", "typer.rich_utils", "shoal.shardcast.cast.fetch", "shoal.shardcast.cast.serve",
    "shoal.run.doctor", "shoal.run.sources", "shoal.run.join", "shoal.cli.main",
    "shoal.run.estimate", "shoal.run.launch", "shoal.run.preflight", "shoal.cli.view",
    "shoal.hub.http.app", "shoal.hub.http.server",
)  # fmt: skip
DEADLINE_S = 60.0

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(list(PRELOADED))


def free_port() -> int:
    """Of loopback; nobody holds it any more."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def clean_environment() -> dict[str, str]:
    """This process's, without what shoal reads, but for the test's own user folder."""
    return {name: value for name, value in os.environ.items() if name == "SHOAL_HOME" or not name.startswith("SHOAL_")}


def started(serve: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, str]:
    """A process that sends by its last argument, a pipe, the address at which it is ready; empty if it died before."""
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=serve, args=(*arguments, sender), daemon=True)
    process.start()
    sender.close()
    with receiver:
        assert receiver.poll(2 * DEADLINE_S), "it did not get ready"
        try:
            return process, receiver.recv()
        except EOFError:
            return process, ""


class Forked:
    """A `shoal …` that runs; called as `subprocess.Popen` is. Its output goes to files that the caller names."""

    def __init__(self, cwd: Path, arguments: tuple[str, ...], output: Path, error: Path | None = None) -> None:
        streams = (str(output), str(error or output))
        self._process: BaseProcess = FORKS.Process(
            target=_main, args=(str(cwd), clean_environment(), arguments, streams), daemon=True
        )
        self._process.start()
        self._error = error or output
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("shoal", timeout_s)
        return self._process.exitcode

    def said(self) -> str:
        """What it complained, or logged."""
        return self._error.read_text(errors="replace") if self._error.exists() else ""

    def until(self, words: str | re.Pattern[str]) -> re.Match[str]:
        """Wait until it has said this."""
        end_s = time.monotonic() + DEADLINE_S
        while (found := re.search(words, self.said())) is None:
            assert self.poll() is None, f"it ended with {self.poll()}: {self.said()}"
            assert time.monotonic() < end_s, f"it never said {words!r}: {self.said()}"
            time.sleep(0.02)  # polling with a deadline: the other side is another process
        return found

    def end(self, number: int = signal.SIGTERM) -> int:
        self.send_signal(number)
        return self.wait()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def run(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    with tempfile.TemporaryDirectory() as folder:
        output, error = Path(folder) / "output", Path(folder) / "error"
        process = Forked(cwd, arguments, output, error)
        try:
            code = process.wait()
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, code, output.read_text(), error.read_text())


def _main(cwd: str, environment: Mapping[str, str], arguments: tuple[str, ...], streams: tuple[str, str]) -> None:
    """What the forked process does."""
    for number, path in enumerate(streams, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(number, "wb", 0), write_through=True) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    from shoal.cli import __file__ as package
    from shoal.cli.main import main

    sys.argv = [str(Path(package).with_name("__main__.py")), *arguments]
    code = main()
    assert "torch" not in sys.modules, "torch was loaded"
    sys.exit(code)
