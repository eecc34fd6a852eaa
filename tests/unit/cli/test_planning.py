"""The figures of `shoal plan` by hand: 32 B weights in bfloat16, eight trainer processes; what the command prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kit.cli import TINY
from shoal.cli.main import main
from shoal.models.load import model_from_files
from shoal.run.estimate import Planning, usual_config
from shoal.run.recipe import Recipe
from shoal.runtime.config import parse_config
from shoal.runtime.sizing import Speeds
from shoal.trainer.memory import GIB, Shape, plan

WEIGHTS = 32 * 10**9
SHAPE = Shape("Any", WEIGHTS, WEIGHTS, 64, 10**8, 10**9, 5120, 150_000, 10**6, torch.bfloat16, cached_bytes=500_000)
LARGE = """
[run]
steps = 400
groups_per_step = 256
group_size = 16
max_staleness = 2
max_new_tokens = 32768
[trainer]
publish_dtype = "bfloat16"
[trainer.memory]
precision = "bfloat16"
recompute = true
[validator]
dtype = "bfloat16"
"""


def planning(text: str = LARGE, speeds: Speeds = Speeds(), processes: int = 8) -> Planning:
    recipe = parse_config(text, Recipe, "test")
    planned = plan(SHAPE, recipe.trainer, processes, recipe.run.max_new_tokens)
    return Planning(recipe, SHAPE, planned, processes, "cuda", 131 * GIB, speeds)


def test_of_eight_ranks_the_first_holds_the_state_and_what_is_published() -> None:
    """2 bytes a weight as it is published, 12 of the state, all gathered by the first: 14."""
    found = {name: host for name, _, host, _ in planning().memory()}
    assert found["trainer, 8 on one host"] == 14 * WEIGHTS + 8 * GIB
    assert found["trainer, first process"] == 14 * WEIGHTS + GIB
    assert found["trainer, each other process"] == GIB


def test_a_validator_loads_one_policy_of_64_gb() -> None:
    found = {name: device for name, device, _, _ in planning().memory()}
    assert found["validator"] == 2 * 64 * 10**9 + GIB, "and one for second looks in another number format"


def test_disk_of_every_role() -> None:
    """Checkpoints have 384 GB. Kept: 1 newest, 1 best, 2 that wait for scores, 2 from before, 1 being written."""
    found = {one.name: (one.running / 1e9, one.finished / 1e9) for one in planning().disk()}
    assert found["trainer: checkpoints"] == (7 * 384, 2 * 384)
    assert found["trainer: export"] == (64, 64)
    deltas = (32 + 16 + 8 + 4) * 0.064  # of 32 versions, to one 1, 2, 4 and 8 back
    assert found["origin"] == pytest.approx((2 * 64 + deltas, 2 * 64 + deltas))
    assert found["each relay"] == pytest.approx((2 * 64 + deltas, 0))
    assert found["each validator"] == pytest.approx((4 * 64 + 4 * 0.064, 0))
    assert found["each worker"] == pytest.approx((3 * 64 + 3 * 0.064, 0))
    tokens = 256 * 16 * 8192 * 400
    assert found["hub"][1] == pytest.approx((tokens * 14 + 256 * 400 * 10_000 + 300_000) / 1e9)


def test_in_float32_versions_are_whole() -> None:
    found = planning(LARGE.replace('"bfloat16"\n[trainer.memory]', '"float32"\n[trainer.memory]'))
    assert {name: delta for name, delta, _ in found.links()}["origin to each relay"] == 128e9
    assert {one.name: one.running / 1e9 for one in found.disk()}["origin"] == 6 * 128


def test_time_machines_and_money() -> None:
    """33,554,432 tokens. Training: x 6 x 32e9 / (8 x 266e12) = 3,027.5 s. Audits: 2,500 tokens/s, 13,422 s: 5 of them.

    A worker has room for int(0.8 x (131 GiB - 64 GB) / (500,000 x 32,768)) = 3 sequences, 64 / 1500 s a token: 70.3
    tokens/s; 477,219 s of one, 158 of them. In all 171 GPUs for 400 x 3,027.5 s at 2 an hour.
    """
    found = planning()
    stages = {one.name: one.seconds for one in found.stages()}
    assert stages["train"] == found.step_s == pytest.approx(3027.5, abs=0.1)
    assert (found.workers, found.validators) == (158, 5)
    assert stages["publish"] == pytest.approx(64 / 0.75)
    assert stages["transfer"] == pytest.approx(11 * 64e6 * 1.2 / 125e6)
    assert stages["apply"] == 64
    assert stages["save"] == pytest.approx(384 / 7)
    assert found.cost(2.0) == pytest.approx(171 * 2 * 400 * found.step_s / 3600)


def test_a_speed_that_is_given_changes_what_follows_from_it() -> None:
    found = planning(speeds=Speeds(worker_tokens_s=1000, link_mbit=100))
    assert found.workers == 12
    assert found.chosen.policy_wait_s > planning().chosen.policy_wait_s


@pytest.mark.parametrize("parameters", [2e7, 1.35e8, 6e8, 8e9, 3.28e10])
def test_a_usual_shape_has_the_size_that_was_asked_for(parameters: float) -> None:
    with torch.device("meta"):
        model = model_from_files({"config.json": json.dumps(usual_config(parameters)).encode()}, device="meta")
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(parameters, rel=0.05)


def test_a_missing_model_can_be_given_by_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(TINY), "--set", f"model.path={tmp_path / 'missing'}", "--memory", "80"]
    assert main(arguments) == 2
    assert "--parameters 32e9" in capsys.readouterr().err
    assert main([*arguments, "--parameters", "6e8", "--gpu-hour-price", "2", "--assume", "link_mbit=200"]) == 0
    said = capsys.readouterr().out
    for part in ("memory, GiB", "disk, GB", "bytes of a version", "time of a step", "machines needed", "money: "):
        assert part in said
    assert any(line.split()[:2] == ["link_mbit", "200"] for line in said.splitlines())
    assert any(line.split() == ["hub.lease_s", "60", "derived"] for line in said.splitlines())


@pytest.mark.parametrize("given", ["speed=3", "link_mbit", "link_mbit=fast"])
def test_an_assumption_that_is_none_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(TINY), "--assume", given]) == 2
    assert f"--assume {given}: " in capsys.readouterr().err
