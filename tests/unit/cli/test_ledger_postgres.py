"""The ledger of a run whose hub keeps it in PostgreSQL is verified from the run's folder like any other."""

from __future__ import annotations

from pathlib import Path

from hubrun import batch, earn, hub_config, join, join_validator, make_folder, publish, record

from shoal.cli.main import main
from shoal.hub.service import Hub
from shoal.protocol import SigningKey
from shoal.run.ledger.check import check_ledger
from shoal.runtime.clock import ManualClock


def test_a_ledger_in_postgresql(tmp_path: Path, database_url: str) -> None:
    folder = make_folder(tmp_path / "run", f'hub.database="{database_url}"')
    hub = Hub(hub_config(folder), ManualClock())
    try:
        alice = join(hub, SigningKey.from_seed(b"\1" * 32), "alice")
        assert hub.context.lead()
        join_validator(hub, folder)
        earn(hub, folder, alice, 0, 30)
        record(hub, batch(0))
        publish(folder, hub, 1)
        earn(hub, folder, alice, 1, 12)
        assert [entry.kind for entry in hub.stories.node(alice).ledger] == ["node"]
    finally:
        hub.close()
    checked = check_ledger(str(folder.path))
    assert checked.compared
    assert checked.accounts.by_node[alice].credit == 42
    assert checked.pins[0].source == "the manifest of policy 0.1"
    assert main(["ledger", "export", str(folder.path), str(tmp_path / "out.jsonl")]) == 0
    assert check_ledger(str(tmp_path / "out.jsonl")).accounts.total_credit == 42
