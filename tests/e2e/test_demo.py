"""`shoal demo`, shortened: stopped once with Ctrl-C, then run in the same folder to its end. One story for all."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit import Capture, TempPaths
from kit.cli import told
from kit.run import metrics, processes_of, start_run
from shoal.protocol import load_key
from shoal.run.folder import RunFolder

pytestmark = pytest.mark.slow  # continuous integration runs the demo itself, at full length

STEPS = 10
TIMEOUT_S = 240.0
COLUMNS = {
    "step", "unit", "sample", "task", "node", "version", "staleness", "prompt", "completion", "prompt_ids", "token_ids",
    "logprobs", "finish", "reward", "given",
}  # fmt: skip


@dataclass(frozen=True)
class Demo:
    folder: Path
    code: int
    said: str

    def node(self, worker: str) -> str:
        return load_key(self.folder / worker / "node.key").node


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: TempPaths) -> Demo:
    """A demo that got Ctrl-C once all of its processes ran."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    with start_run(folder, recipe=None, verb="demo") as run:
        run.wait_until("all processes", lambda: len(run.pids()) == 8)
        os.kill(run.process.pid, signal.SIGINT)
        return Demo(folder, run.wait(60), run.said())


@pytest.fixture(scope="module")
def demo(interrupted: Demo) -> Demo:
    """The demo in the same folder again, to its end."""
    folder = interrupted.folder
    with start_run(folder, (), ("--steps", str(STEPS), "--seed", "1"), recipe=None, verb="demo") as run:
        code = run.wait(TIMEOUT_S)
        assert processes_of(folder) == {}
        return Demo(folder, code, run.said(20_000))


def test_ctrl_c_stops_everything_and_says_how_to_resume(interrupted: Demo) -> None:
    assert interrupted.code == 130
    assert "shoal demo" in interrupted.said
    assert "Traceback" not in interrupted.said
    assert not processes_of(interrupted.folder)


def test_second_start_succeeds_with_its_seed(demo: Demo) -> None:
    assert demo.code == 0, demo.said
    assert demo.said.count("✓") == 5
    summary = json.loads((demo.folder / "summary.json").read_text())
    assert [claim["holds"] for claim in summary["claims"]] == [True] * 5
    assert RunFolder.open(demo.folder).recipe.run.seed == 1
    assert [row["step"] for row in metrics(demo.folder)] == list(range(STEPS + 1))
    for words in (f"step {STEPS}/{STEPS}", "held out", "worker-2 was banned"):
        assert words in demo.said
    assert "\x1b[" not in demo.said, "no colours or cursor movements in a file"


def test_rollouts_are_parquet_without_cheaters_and_units_are_rechecked(demo: Demo, capsys: Capture) -> None:
    from pyarrow.parquet import ParquetDataset

    files = sorted((demo.folder / "trainer" / "rollouts").iterdir())
    assert [file.name for file in files] == [f"step-{step:05d}.parquet" for step in range(STEPS)]
    table = ParquetDataset(files).read()
    assert set(table.column_names) == COLUMNS
    assert len(table) == STEPS * 64 * 16
    assert set(table["node"].to_pylist()) == {demo.node("worker-0"), demo.node("worker-1")}
    right = [row for row in table.select(["prompt", "completion", "reward"]).slice(0, 200).to_pylist() if row["reward"]]
    assert right
    assert all("".join(sorted(row["prompt"].rstrip("="))) == row["completion"] for row in right)
    said = told(capsys, 0, "ledger", "verify", demo.folder, "--recheck", "16", "--seed", "1").out
    assert ": same: accepted" in said
    assert "is no longer kept" in said, "the origin keeps the newest versions only"
    assert " 0 different" in said
