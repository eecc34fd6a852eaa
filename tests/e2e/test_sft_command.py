"""`shoal sft` as processes: it learns, survives what may happen to it, and what it writes is measured."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.cli.main import main

pytestmark = pytest.mark.slow
DEADLINE_S = 280.0
RATE = ["--set", "trainer.learning_rate=1e-3", "--set", "trainer.device=cpu"]


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    path = tmp_path / "demos.jsonl"
    assert main(["data", "demos", "sort", "--out", str(path), "--count", "1600"]) == 0
    return path


def command(demos: Path, out: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "shoal.cli", "sft", "tiny", "--data", str(demos), "--env", "sort", "--out", str(out),
        "--set", "trainer.checkpoint_every=5", *RATE, *more,
    ]  # fmt: skip


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE_S)


def score(model: Path | str, out: Path) -> float:
    ran = ["eval", str(model), "--env", "sort", "--tasks", "64", "--max-new-tokens", "10", "--device", "cpu"]
    assert main([*ran, "--out", str(out)]) == 0
    found: float = json.loads((out / "summary.json").read_text())["avg_at_k"]["value"]
    return found


def test_warm_start_improves_the_score_of_eval(demos: Path, tmp_path: Path) -> None:
    ran = run(command(demos, tmp_path / "begun"))
    assert ran.returncode == 0, ran.stderr
    assert "wrote " in ran.stdout
    rows = [json.loads(line) for line in (tmp_path / "begun" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert losses[-1] < losses[0] / 3
    assert json.loads((tmp_path / "begun" / "shoal.json").read_text())["trained_on"] == "demonstrations"
    assert "reinforcement" not in (tmp_path / "begun" / "README.md").read_text()
    assert score(tmp_path / "begun", tmp_path / "after") > score("tiny", tmp_path / "before") + 0.2
    assert not (tmp_path / "begun.work").exists()
    again = run(command(demos, tmp_path / "begun"))
    assert again.returncode == 0
    assert "this is done already" in again.stderr
    other = run(command(demos, tmp_path / "begun", "--seed", "1"))
    assert other.returncode == 2
    assert "is another warm start: its course.seed is 0, here it would be 1" in other.stderr


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks at a process by /proc")
def test_stop_while_loading_ends_in_good_order(demos: Path, tmp_path: Path) -> None:
    """The handler is there before anything large is imported: torch is not loaded yet."""
    process = subprocess.Popen(command(demos, tmp_path / "begun"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    own, until_s = Path(f"/proc/{process.pid}"), time.monotonic() + DEADLINE_S
    while not catches_sigterm(own):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s, "no handler in time"
        time.sleep(0.001)
    mapped = (own / "maps").read_text()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, said
    assert b"Traceback" not in said
    assert "libtorch" not in mapped
    assert not (tmp_path / "begun").exists()


def catches_sigterm(process: Path) -> bool:
    caught = next(line for line in (process / "status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
