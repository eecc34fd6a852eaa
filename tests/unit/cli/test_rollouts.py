"""`shoal rollouts`, `shoal plot` and `shoal why` over the folder of a run whose hub is off."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hubrun import make_folder

from kit import Capture, TempPaths
from kit.cli import told
from kit.hub import Bench, as_texts, ok
from shoal.records.schema import NAMES
from shoal.runtime.metrics import MetricsLog

ROWS = [{"reward_mean": 0.25, "part_right": 0.5}, {"reward_mean": 0.5, "part_right": 1.0, "held_out": 0.75}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: TempPaths) -> Path:
    """Two groups that were accepted, one that was rejected for its seeds."""
    folder = make_folder(tmp_path_factory.mktemp("rollouts") / "run")
    bench = Bench(folder.path / "hub", {"groups_per_step": 8}, changes={"texts": as_texts})
    ok(bench.announce(0))
    bench.accept_groups(2)
    bench.clock.advance(1)
    ok(
        bench.judge(
            bench.audit_of(bench.bob), (), outcome="rejected", reason="sampling.seed", message="another\x1b[2J seed"
        )
    )
    bench.hub.close()
    (folder.path / "trainer").mkdir()
    metrics = MetricsLog(folder.path / "trainer" / "metrics.jsonl")
    for step, row in enumerate(ROWS):
        metrics.append(step, row)
    return folder.path


def test_rollouts_are_shown_with_rewards_reasons_and_texts(run: Path, capsys: Capture) -> None:
    out = told(capsys, 0, "rollouts", run, "--limit", 9).out
    assert "6 rollouts in " in out
    assert "4 accepted, 2 rejected" in out
    assert out.count("answer | ABC") == 6
    assert out.count("prompt | ") == 3, "once a group"
    assert "rejected, unscored\n   3 tokens, ended by eos; sampling.seed: another�[2J seed" in out


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("--order worst", 4), ("--outcome rejected", 2), ("--reason sampling", 2), ("--reason proofs", 0),
        ("--unit 0", 2), ("--step 1", 0), ("--version 0", 6), ("--text BC", 6), ("--text XY", 0), ("--limit 1", 1),
    ],
)  # fmt: skip
def test_rollouts_are_chosen_by(run: Path, capsys: Capture, given: str, count: int) -> None:
    found = json.loads(
        told(
            capsys, 0, "rollouts", run, *(["--limit", 99] if "limit" not in given else []), *given.split(), "--json"
        ).out
    )
    assert len(found) == count


def test_rollouts_are_exported_with_all_columns(run: Path, capsys: Capture, tmp_path: Path) -> None:
    for name in ("all.parquet", "all.jsonl"):
        told(capsys, 0, "rollouts", run, "--limit", 99, "--out", tmp_path / name)
    table = pq.read_table(tmp_path / "all.parquet")
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert tuple(table.schema.names) == NAMES == tuple(lines[0])
    assert table["completion"].to_pylist() == [line["completion"] for line in lines] == ["ABC"] * 6
    assert table["token_ids"].to_pylist()[0] == lines[0]["token_ids"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("rollouts RUN --order bst", "did you mean 'best'?"),
        ("rollouts RUN --outcome lost", "accepted, dropped, rejected"),
        ("rollouts RUN --out all.csv", "must end with .parquet or .jsonl"),
        ("rollouts EMPTY", "is not a run's folder"),
        ("plot EMPTY", "is not a run's folder"),
        ("plot RUN --out all.pdf", "must end with .png or .svg"),
        ("why 999 RUN", "there is no unit 999"),
        ("why nobody RUN", "there is no unit and no node 'nobody'"),
    ],
)
def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: Capture, given: str, said: str) -> None:
    words = [str({"RUN": run, "EMPTY": tmp_path}.get(word, word)) for word in given.split()]
    error = told(capsys, 2, *words).err
    assert said in error
    assert error.count("\n") == 1


def test_figures_are_written_for_several_runs(run: Path, capsys: Capture, tmp_path: Path) -> None:
    for name, start in (("one.png", b"\x89PNG"), ("two.svg", b"<?xml")):
        told(capsys, 0, "plot", run, run, "--out", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    drawn = (tmp_path / "two.svg").read_text()
    assert all(
        f"<!-- {title} -->" in drawn
        for title in ("reward", "parts of the reward", "held-out score", "groups judged while a step was next")
    )
    assert "<!-- entropy -->" not in drawn, "no run has it"


def test_why_tells_of_a_finished_run_with_texts_on_one_screen(run: Path, capsys: Capture) -> None:
    unit = json.loads(told(capsys, 0, "rollouts", run, "--outcome", "rejected", "--limit", 1, "--json").out)[0]["unit"]
    out = told(capsys, 0, "why", unit, run).out
    assert "rejected (sampling.seed: another�[2J seed)" in out
    assert "answer | ABC" in out
    assert out.count("\n") <= 24
    assert "ledger row " not in out
    assert "ledger row " in told(capsys, 0, "why", 0, run, "--all").out
    assert f"unit {unit} rejected: sampling.seed" in told(capsys, 0, "why", "bob", run).out
    assert json.loads(told(capsys, 0, "why", unit, run, "--json").out)["unit"] == unit
