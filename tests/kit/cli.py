"""The CLI as people meet it, a subprocess; and made-up statuses of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.protocol import LedgerHead, NodeState, NodeView, RunStatus, StepReport, Wait

TINY = Path(__file__).parents[2] / "recipes" / "tiny.toml"


def run_shoal(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    from kit.fork import clean_environment  # not where tests are imported by a script without its folder

    command = [sys.executable, "-m", "shoal.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, env=clean_environment())


def told(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> Any:
    """What a command in this process says (`out`, `err`), which ends with `code`."""
    from shoal.cli.main import main

    ended, said = main([str(each) for each in arguments]), capsys.readouterr()
    assert ended == code, said
    return said


def one_line(ran: subprocess.CompletedProcess[str], code: int) -> str:
    """The single line of complaint of a command that ended with `code`."""
    assert ran.returncode == code, ran.stderr
    assert "Traceback" not in ran.stderr + ran.stdout
    lines = [line for line in ran.stderr.splitlines() if line.startswith("shoal: ")]
    assert len(lines) == 1, ran.stderr
    assert ran.stderr.rstrip().endswith(lines[0]), ran.stderr
    return lines[0].removeprefix("shoal: ")


NODE = NodeView(node="ab" * 16, name="w", role="worker", state=NodeState.ACTIVE, credit=100)


def status(**changes: Any) -> RunStatus:
    values: dict[str, Any] = {
        "run": "demo-1", "name": "demo", "now_ms": 100_000, "finished": False, "steps": 9, "step": 2, "policy": None,
        "max_staleness": 1, "units": {"open": 3}, "submissions": {"accepted": 5, "rejected": 1}, "nodes": (NODE,),
        "waits": (), "verdicts": (), "reports": (), "alarms": (),
        "ledger": LedgerHead(run="demo-1", index=4, hash="ab" * 32),
    }  # fmt: skip
    return RunStatus(**{**values, **changes})


def report(step: int, **metrics: float) -> StepReport:
    return StepReport(step=step, metrics=metrics)


def wait(who: str, what: str, seconds: float) -> Wait:
    return Wait(who=who, what=what, since_ms=int(100_000 - seconds * 1000))
