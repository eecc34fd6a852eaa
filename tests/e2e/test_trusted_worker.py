"""A real run whose groups come from two machines of others: a trusted worker, and one that nobody trusts."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kit.run import end, glimpse, ledger, rows, scripted, start_run
from shoal.run.folder import RunFolder

STEPS = 12


def shoal(*words: object) -> str:
    command = [sys.executable, "-m", "shoal.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.slow
def test_trusted_worker_is_paid_for_samples_only_and_its_other_groups_are_marked(tmp_path: Path) -> None:
    path, box = tmp_path / "run", tmp_path / "box"
    settings = ["run.groups_per_step=8", f"run.steps={STEPS}", "worker.count=0", "hub.trusted_audit=0.2"]
    joined: dict[str, subprocess.Popen[bytes]] = {}

    def join(name: str, *words: object) -> None:
        command = [sys.executable, "-m", "shoal.cli", "join", RunFolder.open(path).endpoints.join, "--name", name]
        command += ["--engine", "scripted", "--folder", str(tmp_path / name), *map(str, words)]
        with (tmp_path / f"{name}.log").open("wb") as log:
            joined[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def worked(name: str) -> bool:
        return bool(glimpse(path, f"SELECT 1 FROM nodes WHERE name = '{name}' AND accepted > 0"))

    with start_run(path, [*scripted(tmp_path), *settings]) as run:
        run.wait_until("a policy", lambda: bool(glimpse(path, "SELECT 1 FROM policies")))
        box.mkdir()
        key = shoal("key", "new", box).split()[-1]
        shoal("admin", "add-worker", path, key, "--out", tmp_path / "box.json")
        try:
            join("stranger")
            run.wait_until("the stranger's first group", lambda: worked("stranger"))
            join("box", "--trusted", tmp_path / "box.json")
            assert run.wait() == 0, run.said()
            for name, process in joined.items():
                assert process.wait(60) == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
        finally:
            for name, process in joined.items():
                end(process, tmp_path / name)
    names = dict(rows(path, "SELECT node, name FROM nodes"))
    depths = Counter((names[node], depth) for node, depth in rows(
        path, "SELECT node, depth FROM submissions WHERE state = 'accepted'"))  # fmt: skip
    assert depths["stranger", "light"] == 0
    assert min(depths["stranger", "full"], depths["box", "light"], depths["box", "full"]) > 0, depths
    entries = ledger(path)
    paid = Counter(names[entry.body["node"]] for entry in entries if entry.kind == "credit")
    assert paid == {name: depths[name, "full"] for name in ("stranger", "box")}
    batches = [json.loads(document) for (document,) in rows(path, "SELECT document FROM batches")]
    marked = {group["unit"] for batch in batches for group in batch["groups"] if group["audit"] == "light"}
    assert marked == {unit for entry in entries for unit in entry.body.get("unaudited", ())}
    table = pq.read_table(path / "trainer" / "rollouts")
    assert {row["unit"] for row in table.select(["unit", "audit"]).to_pylist() if row["audit"] == "light"} == marked
    assert "each unit paid once" in shoal("ledger", "verify", path)
