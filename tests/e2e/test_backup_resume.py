"""A real `shoal run`, backed up while it trains, restored elsewhere, and resumed: it comes to the very same weights.

Synchronous (staleness 0), so that batches do not depend on who was fast; one unit at a time, so that the rounding of a
group's log-probabilities does not depend on which others it was generated with. Then, on a CPU, the same batches give
the same weights bit for bit. The run that was backed up continues to its end, and so does the restored one.
"""

from pathlib import Path

import pytest
from replay import batches

from kit.run import glimpse, ledger, rows, start_run
from shoal.ledger import fold, verify
from shoal.run.backup import backup_run, restore_run

STEPS = 5
OVERRIDES = (
    "run.max_staleness=0", f"run.steps={STEPS}", "run.groups_per_step=4", "run.group_size=8",
    "trainer.evaluate_every=0", "worker.units_per_lease=1", "hub.refill_cap=100",
)  # fmt: skip
POLICIES = "SELECT incarnation, version, digest FROM policies ORDER BY version"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def trained_on(path: Path) -> list[list[tuple[int, tuple[float, ...]]]]:
    """Units and rewards of every step; leases, and so the names of submissions, are others after a restore."""
    return [[(group.unit, tuple(group.rewards)) for group in batch.groups] for batch in batches(path)]


def test_restored_run_reaches_the_same_weights(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with start_run(first, OVERRIDES) as run:
        run.wait_until("version 2", lambda: any(row[1] >= 2 for row in glimpse(first, POLICIES)))
        summary = backup_run(first, tmp_path / "run.tar", lambda _line: None)
        assert run.wait() == 0, run.said()
    assert summary.version is not None
    assert 2 <= summary.version < STEPS
    restore_run(tmp_path / "run.tar", second)
    assert len(rows(second, POLICIES)) == summary.version + 1
    with start_run(second, recipe=None) as run:
        assert run.wait() == 0, run.said()
    assert rows(second, POLICIES) == rows(first, POLICIES)
    assert len(rows(second, POLICIES)) == STEPS + 1
    assert trained_on(second) == trained_on(first)
    for path in (first, second):
        entries = ledger(path)
        verify(entries)
        credits = {name: account.credit for name, account in fold(entries).by_node.items()}
        assert credits == dict(rows(path, "SELECT node, credit FROM nodes"))
        assert sum(credits.values()) > 0
    exported = [next((path / "trainer" / "export").glob("*.safetensors")).read_bytes() for path in (first, second)]
    assert exported[0] == exported[1]
