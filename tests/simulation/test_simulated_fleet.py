"""Small simulated fleets with several seeds: the invariants hold, and the same seed gives the same run."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.hub import HubSettings, RunSettings
from shoal.hub.state import Save, SubmissionState
from shoal.protocol import NodeState
from shoal.simulator import Scenario, Simulation, WorkerKind, problems

RUN = RunSettings(steps=6, groups_per_step=8, group_size=2, max_staleness=1)
MIXED = (
    WorkerKind(8, group_s=20, lives_s=200, away_s=30), WorkerKind(2, group_s=90),
    WorkerKind(2, group_s=10, lies=0.4, fresh_keys=True), WorkerKind(2, delivers=False),
)  # fmt: skip


def scenario(seed: int, **changes: object) -> Scenario:
    whole = Scenario(
        workers=MIXED, seed=seed, seconds=1200, run=RUN, hub=HubSettings(lease_s=40), equal=6, trainer_dies=4,
        restarts_s=70, down_s=4,
    )  # fmt: skip
    return replace(whole, **changes)  # type: ignore[arg-type]


VARIANTS: dict[str, dict[str, object]] = {
    "everything audited": {},
    "by reputation": {"hub": HubSettings(lease_s=40, audit="reputation")},
    "synchronous": {"run": RUN.model_copy(update={"max_staleness": 0, "steps": 3}), "seconds": 2400},
    "far ahead": {"run": RUN.model_copy(update={"max_staleness": 4})},
    "validators slow": {"audit_s": 2.0, "claims": 4, "validators": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_invariants_hold_at_the_end(tmp_path: Path, variant: str, seed: int) -> None:
    simulation = Simulation(tmp_path, scenario(seed, **VARIANTS[variant]))
    outcome = simulation.run()
    assert problems(simulation.world) == []
    assert outcome.steps == simulation.world.scenario.run.steps, f"the run stood still: {outcome}"
    assert outcome.counts["restarts"] > 0
    assert outcome.counts["receipts"] > 0


def test_invariants_hold_during_the_run(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, scenario(7))
    found: list[str] = []

    def look() -> bool:
        if simulation.world.events % 50 == 0:
            found.extend(problems(simulation.world))
        return simulation.trainer.finished

    simulation.world.run(look)
    assert found == []


def test_the_same_seed_is_the_same_run_in_another_process(tmp_path: Path) -> None:
    """No set or hash of this process decides anything."""
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from pathlib import Path; from shoal.simulator import *\n"
        "scenario = Scenario(workers=(WorkerKind(6, group_s=9, lies=0.2),), seconds=90, seed=5)\n"
        "print(Simulation(Path(sys.argv[1]), scenario).run().ledger)"
    )
    heads = {
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / seed)], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(heads) == 1


def test_only_honest_workers_earn(tmp_path: Path) -> None:
    workers = (WorkerKind(6, group_s=15), WorkerKind(2, group_s=15, lies=1.0), WorkerKind(2, delivers=False))
    simulation = Simulation(tmp_path, scenario(1, workers=workers, restarts_s=400))
    simulation.run()
    with simulation.world.storage.read() as reader:
        rows = [reader.node(worker.node) for worker in simulation.workers]
    credit = [row.credit if row else 0 for row in rows]
    assert all(amount > 0 for amount in credit[:6])
    assert credit[6:] == [0, 0, 0, 0]
    assert [row.state for row in rows[6:8] if row] == [NodeState.BANNED] * 2


@pytest.fixture
def simulation(tmp_path: Path) -> Simulation:
    simulation = Simulation(tmp_path, scenario(2, seconds=120, workers=(WorkerKind(6, group_s=8),), restarts_s=500))
    simulation.run()
    assert problems(simulation.world) == []
    return simulation


def test_lost_receipt_is_found(simulation: Simulation) -> None:
    name, receipt = next(iter(simulation.world.receipts.items()))
    simulation.world.receipts["f" * 64] = receipt.model_copy(update={"submission": "f" * 64})
    assert any("is not there" in problem for problem in problems(simulation.world))
    del simulation.world.receipts["f" * 64]
    simulation.world.blobs.pop(name)
    assert any("are lost" in problem for problem in problems(simulation.world))


def test_credit_without_verdict_is_found(simulation: Simulation) -> None:
    with simulation.world.storage.write() as transaction:
        row = next(row for row in transaction.nodes() if row.credit)
        transaction.apply([Save(replace(row, credit=row.credit + 1), row.state)])
    found = problems(simulation.world)
    assert any("its verdicts give" in problem for problem in found)
    assert any("in the ledger" in problem for problem in found)


def test_training_on_a_rejected_group_is_found(simulation: Simulation) -> None:
    simulation.world.lies.add(simulation.world.batches[0].groups[0].submission)
    assert any("trained on a lie" in problem for problem in problems(simulation.world))


def test_pending_credit_without_node_is_found(simulation: Simulation) -> None:
    with simulation.world.storage.write() as transaction:
        row = transaction.submissions_in([SubmissionState.ACCEPTED], 1)[0]
        transaction.apply([Save(replace(row, matures_at_ms=1), row.state)])
    assert any("pending" in problem for problem in problems(simulation.world))


@pytest.mark.slow
def test_hundreds_of_workers_for_six_minutes(tmp_path: Path) -> None:
    workers = (
        WorkerKind(320, group_s=60, lives_s=1200), WorkerKind(20, group_s=30, lies=0.3, fresh_keys=True),
        WorkerKind(20, delivers=False), WorkerKind(40, group_s=300),
    )  # fmt: skip
    run = RunSettings(steps=1000, groups_per_step=200, group_size=2, max_staleness=2)
    many = {"workers": workers, "run": run, "validators": 4, "audit_s": 0.02, "claims": 32}
    simulation = Simulation(tmp_path, scenario(11, seconds=360, restarts_s=200, **many))
    simulation.run()
    assert problems(simulation.world) == []
