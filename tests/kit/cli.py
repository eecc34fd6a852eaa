"""The CLI as people meet it, as a subprocess; what is wrong with a command that is shown; made-up views of a run."""

import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest

from kit.fork import clean_environment
from shoal.protocol import LedgerHead, NodeState, NodeView, PolicyRef, RecentVerdict, RunStatus, StepReport, Wait
from shoal.run.progress import History, RunView
from shoal.runtime.supervise import ProcessView

TINY = Path(__file__).parents[2] / "recipes" / "tiny.toml"


def run_shoal(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:

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


ALWAYS = {"--help", "-h", "--debug"}


@cache
def command_line() -> Any:
    import typer

    from shoal.cli.main import app

    return typer.main.get_command(app)


def mistake(shown: str) -> str:
    """What is wrong with a command as it is shown; empty if nothing is."""
    words, command = shlex.split(shown, comments=True)[1:], command_line()
    while words and hasattr(command, "commands"):
        word = words.pop(0)
        if word.startswith("-"):
            continue
        if word not in command.commands:
            return f"{shown}: there is no command {word}"
        command = command.commands[word]
    there = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]} | ALWAYS
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in there]
    return f"{shown}: there is no option {', '.join(unknown)}" if unknown else ""


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


POLICY = PolicyRef(incarnation=0, version=0, digest="ab" * 32)


def process(name: str, **changes: Any) -> ProcessView:
    values: dict[str, Any] = {"state": "running", "pid": 4711, "restarts": 0, "why": "", "since_s": 300.0}
    return ProcessView(name, **{**values, **changes})


def worker(index: int, **changes: Any) -> NodeView:
    values: dict[str, Any] = {
        "name": f"worker-{index}", "state": NodeState.ACTIVE, "doing": "generating 16 groups", "last_seen_ms": 99_000,
    }  # fmt: skip
    return NodeView(node=f"{index:032x}", role="worker", **{**values, **changes})


def verdict(unit: int, node: NodeView, outcome: str = "accepted", at_ms: int = 0, **changes: Any) -> RecentVerdict:
    reason, message = ("sampling.seed", "token 3 has another seed") if outcome == "rejected" else ("", "")
    values = {"reason": reason, "message": message, **changes}
    return RecentVerdict(unit=unit, node=node.node, outcome=outcome, decided_at_ms=at_ms or unit, **values)


def at_step(step: int, **changes: Any) -> RunStatus:
    return status(step=step, policy=POLICY.model_copy(update={"version": step}), **changes)


def scene(seen: RunStatus | None, *processes: ProcessView, elapsed_s: float = 65.0, **notes: str) -> RunView:
    history = History()
    if seen is not None:
        history.add(seen, elapsed_s)
    return RunView(seen, processes, history, elapsed_s, {name.replace("_", "-"): note for name, note in notes.items()})


class RecordingDisplay:
    """A display that keeps what it was told to show."""

    live = False
    every_s = 1.0

    def __init__(self) -> None:
        self.said: list[str] = []
        self.scenes: list[RunView] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, scene: RunView) -> None:
        self.scenes.append(scene)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
