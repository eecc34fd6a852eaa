"""The built-in policy, the demo's task and the algorithm in one file: together they learn, and only from rewards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "one_file_rl.py"


def held_out_scores(*arguments: str) -> list[float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), "--evaluate-every", "8", "--steps", "8", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [float(score) for score in re.findall(r"held-out ([\d.]+)", done.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["0", "2"])
def test_eight_steps_lift_the_greedy_held_out_score_by_fifteen_points(staleness):
    before, after = held_out_scores("--staleness", staleness)
    assert before == pytest.approx(0.309, abs=0.02)
    assert after > before + 0.15


@pytest.mark.slow
def test_shuffled_rewards_lift_nothing():
    before, after = held_out_scores("--shuffle-rewards")
    assert after < before + 0.05
