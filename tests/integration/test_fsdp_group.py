"""A trainer of two processes as `shoal run` starts it: real processes, real signals, real exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[2] / "recipes" / "tiny.toml"
LIMIT_S = 280.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def wait_for(what: str, condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, f"it ended while waiting for {what}"
        assert time.monotonic() < end_s, f"no {what} within {LIMIT_S:.0f} s"
        time.sleep(0.05)  # polling with a deadline: the other side is another process


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_shoal_run_with_two_trainer_processes(tmp_path: Path) -> None:
    """It trains; a killed rank is started again; SIGTERM leaves no process; the run goes on to its end."""
    run = tmp_path / "run"
    sets = ["trainer.processes=2", "run.steps=4", "run.groups_per_step=8", "trainer.evaluate_every=0"]
    command = [sys.executable, "-m", "shoal.cli", "run", str(TINY), "--dir", str(run)]
    command += [part for each in sets for part in ("--set", each)]
    trainer_log = run / "logs" / "trainer.log"

    def said(text: str) -> bool:
        return trainer_log.is_file() and text in trainer_log.read_text(errors="replace")

    with (tmp_path / "output").open("wb") as output:
        first = subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=output)
        try:
            wait_for("the first step", lambda: said("step 0: "), first)
            agent = int(json.loads((run / "processes.json").read_text())["trainer"])
            ranks = children(agent)
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            wait_for("a restart", lambda: said("resuming at version"), first)
            ranks = children(agent)
            first.send_signal(signal.SIGTERM)
            assert first.wait(60) == 130
            assert not any(Path(f"/proc/{pid}").exists() for pid in (agent, *ranks))
        finally:
            first.kill()
        second = subprocess.run(
            [*command[:4], "--dir", str(run)], env=ENVIRONMENT, stdout=output, stderr=output, timeout=LIMIT_S
        )
    assert second.returncode == 0, (tmp_path / "output").read_text()[-3000:] + trainer_log.read_text()[-3000:]
    assert (run / "trainer" / "export" / "model.safetensors").is_file()
