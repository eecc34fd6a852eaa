"""A trainer of two processes as `shoal run` starts it: real processes, real signals, real exit codes."""

import os
import signal
from pathlib import Path

import pytest

from kit.run import start_run

SETTINGS = ("trainer.processes=2", "run.steps=4", "run.groups_per_step=8", "trainer.evaluate_every=0")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_shoal_run_with_two_trainer_processes(tmp_path: Path) -> None:
    """It trains; a killed rank is started again; SIGTERM leaves no process; the run continues to its end."""
    path = tmp_path / "run"
    log = path / "logs" / "trainer.log"

    def said(text: str) -> bool:
        return log.is_file() and text in log.read_text(errors="replace")

    with start_run(path, SETTINGS, env=ENVIRONMENT) as run:
        run.wait_until("the first step", lambda: said("step 0: "))
        agent = run.pids()["trainer"]
        ranks = children(agent)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        run.wait_until("a restart", lambda: said("resuming at version"))
        ranks = children(agent)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == 130
        assert not any(Path(f"/proc/{pid}").exists() for pid in (agent, *ranks))
    with start_run(path, env=ENVIRONMENT, recipe=None) as run:
        assert run.wait() == 0, run.said() + log.read_text()[-3000:]
    assert (path / "trainer" / "export" / "model.safetensors").is_file()
