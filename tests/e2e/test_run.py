"""`shoal run` for real: separate OS processes, real sockets, staleness 2; the trainer is killed within a step.

One run serves all tests here (starting the processes costs more than they do): the held-out score rises, the killed
trainer ends with the weights of one that was never killed, bit for bit, and the ledger adds up.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from replay import announced_digests, batches, replayed_digests, rows

from shoal.cli.folder import RunFolder
from shoal.ledger import fold, verify
from shoal.protocol import LedgerEntry

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.toml"
STEPS = 8
KILLED_IN_STEP = 2
DEADLINE_S = 280.0


def wait_until(what: str, condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, f"the run ended while waiting for {what}"
        assert time.monotonic() < end, f"waited {DEADLINE_S:.0f} s for {what}"
        time.sleep(0.02)  # polling with a deadline: the other side is another process


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose trainer was killed with -9 in the middle of a step."""
    folder = tmp_path_factory.mktemp("e2e") / "tiny"
    overrides = [f"run.steps={STEPS}", "run.max_staleness=2", "worker.count=2", "trainer.evaluate_every=4"]
    arguments = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "shoal.cli", "run", str(RECIPE), "--dir", str(folder), *arguments]
    with (folder.parent / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            kill_trainer_in_step(folder, KILLED_IN_STEP, process)
            assert process.wait(DEADLINE_S) == 0, (folder.parent / "output").read_text()[-3000:]
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(30)
    return folder


def kill_trainer_in_step(folder: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Kill it once the step's batch is written down, before the step is done."""

    def batch_is_written() -> bool:
        if not (folder / "hub" / "hub.db").exists():
            return False
        try:
            return bool(rows(folder, f"SELECT 1 FROM batches WHERE step = {step}"))
        except sqlite3.OperationalError:  # the hub is just creating its tables
            return False

    wait_until("the hub's database", (folder / "hub" / "secret").exists, process)
    wait_until(f"the batch of step {step}", batch_is_written, process)
    pid = json.loads((folder / "processes.json").read_text())["trainer"]
    os.kill(pid, signal.SIGKILL)
    assert not (folder / "trainer" / "checkpoints" / f"{step + 1}.0").exists(), "the step was over: killed too late"


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "trainer" / "metrics.jsonl").read_text().splitlines()]


def test_the_held_out_score_rises(run: Path) -> None:
    scores = [row["held_out"] for row in metrics(run) if "held_out" in row]
    assert scores[-1] > scores[0] + 0.1, scores


def test_the_killed_trainer_has_the_weights_of_one_never_killed(run: Path) -> None:
    announced = announced_digests(run)
    assert len(announced) == STEPS + 1
    assert announced == replayed_digests(RunFolder.open(run))


def test_every_step_is_recorded_once(run: Path) -> None:
    assert [row["step"] for row in metrics(run)] == list(range(STEPS + 1))
    assert [batch.step for batch in batches(run)] == list(range(STEPS))


def test_no_group_is_trained_twice_or_too_late(run: Path) -> None:
    written = batches(run)
    units = [group.unit for batch in written for group in batch.groups]
    assert len(units) == len(set(units)) == STEPS * len(written[0].groups)
    ages = [batch.step - group.policy.version for batch in written for group in batch.groups]
    assert 0 < max(ages) <= 2


def test_the_ledger_verifies_and_pays_for_accepted_work_only(run: Path) -> None:
    columns = 'SELECT "index", kind, body, at_ms, previous, hash FROM ledger ORDER BY "index"'
    names = ("index", "kind", "body", "at_ms", "previous", "hash")
    entries = [
        LedgerEntry(**{**dict(zip(names, row, strict=True)), "body": json.loads(row[2])}) for row in rows(run, columns)
    ]
    verify(entries)
    accounts = fold(entries)
    tokens = rows(run, "SELECT node, SUM(generated_tokens) FROM submissions WHERE state = 'accepted' GROUP BY node")
    assert {node: accounts.by_node[node].credit for node, _ in tokens} == dict(tokens)
    assert len(tokens) == 2, "both workers took part"


def test_the_exported_model_is_the_last_version_and_loads_with_plain_transformers(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    command = [sys.executable, "-m", "shoal.cli", "export", str(run), str(tmp_path / "model")]
    subprocess.run(command, check=True, timeout=120)
    assert json.loads((tmp_path / "model" / "shoal.json").read_text())["digest"] == announced_digests(run)[-1]
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(run / "trainer" / "export").state_dict()
    assert all(ours[name].equal(theirs[name]) for name in ours)
