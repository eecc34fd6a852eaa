"""recipes/one-gpu.toml with its real processes and a Hugging Face folder that nobody has seen before, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "one_gpu.py"
LIMIT_S = 240


@pytest.mark.slow
def test_the_one_gpu_recipe_trains_a_folder_of_random_weights(tmp_path: Path) -> None:
    """By the benchmark that measures it on a GPU, so that neither of the two rots."""
    figures = tmp_path / "figures.json"
    devices = [f"{role}.device=cpu" for role in ("trainer", "validator", "worker")]
    command = [
        sys.executable,
        str(BENCHMARK),
        "--small",
        "--steps",
        "2",
        "--keep",
        str(tmp_path),
        "--out",
        str(figures),
    ]
    command += [word for setting in devices for word in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "--limit-s", str(LIMIT_S)], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = json.loads(figures.read_text())
    assert found["steps"] == 2
    assert set(found["submissions"]) <= {"accepted", "submitted", "unsure"}, "an honest worker was rejected"
    assert found["submissions"]["accepted"] >= 8
    assert found["first_verdict_after_it_s"] > 0
    assert (tmp_path / "run" / "trainer" / "export" / "model.safetensors").exists()
