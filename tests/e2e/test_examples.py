"""The examples, run as their first lines say, only shorter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit.run import RECIPE, metrics

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 200.0


def run_python(*arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow  # tests/unit/rewards/test_scoring.py scores with the same file; test_kills runs all processes
def test_a_reward_of_ones_own_is_one_file(tmp_path: Path) -> None:
    settings = [
        f"environment.file={EXAMPLES / 'custom_reward.py'}", "run.steps=2", "run.groups_per_step=8",
        "trainer.evaluate_every=2", "trainer.evaluate_tasks=32",
    ]  # fmt: skip
    arguments = [part for setting in settings for part in ("--set", setting)]
    run_python("-m", "shoal.cli", "run", str(RECIPE), "--dir", str(tmp_path / "mine"), *arguments)
    rows = metrics(tmp_path / "mine")
    assert [row["step"] for row in rows] == [0, 1, 2]
    # Its reward is graded: right digits count even where the list is not sorted to the end.
    measured = {row["step"]: row["held_out"] for row in rows if "held_out" in row}
    assert {0, 2} == measured.keys(), rows
    assert all(0.4 < score < 1 for score in measured.values()), rows
    assert all(row["groups"] == 8 for row in rows[:2]), rows


@pytest.mark.slow
def test_the_algorithm_in_one_file_runs() -> None:
    said = run_python(str(EXAMPLES / "one_file_rl.py"), "--steps", "3", "--evaluate-every", "3")
    before, after = (float(score) for score in re.findall(r"held-out ([\d.]+)", said))
    assert after > before, said
