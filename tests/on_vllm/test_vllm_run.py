"""A whole run whose workers are vLLM's, checked by a validator on torch: real processes."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kit.run import end, glimpse, ledger, metrics, rows, start_run

KIND = "vllm/cpu/float32"
SMALL = (
    "run.groups_per_step=8", "run.group_size=8", "relay.count=0", "worker.engine=vllm", "worker.device=cpu",
    "worker.dtype=float32", "trainer.evaluate_every=0", "trainer.publish_dtype=bfloat16", "trainer.learning_rate=1e-6",
)  # fmt: skip
DEADLINE_S = 500.0

pytestmark = pytest.mark.timeout(1200)


def verdicts(folder: Path) -> Counter[tuple[str, str]]:
    """Of all submissions: what became of them, and what drew them."""
    found = rows(
        folder,
        "SELECT v.document, l.document FROM verdicts v JOIN submissions s ON s.submission = v.submission "
        "JOIN leases l ON l.lease = s.lease",
    )
    pairs = [tuple(json.loads(text)["document"] for text in pair) for pair in found]
    return Counter((verdict["outcome"], lease["profile"]) for verdict, lease in pairs)


def test_a_run_with_a_vllm_worker_trains_to_its_end(tmp_path: Path) -> None:
    with start_run(tmp_path / "run", ("run.steps=4", *SMALL)) as run:
        assert run.wait(DEADLINE_S) == 0, run.said(6000)
    assert [row["step"] for row in metrics(run.path) if "groups" in row] == [0, 1, 2, 3]
    assert set(verdicts(run.path)) == {("accepted", KIND)}
    assert sum(verdicts(run.path).values()) >= 32
    log = (run.path / "logs" / "worker-0.log").read_text()
    assert "torch/cpu/float32 computes the same" in log, "it was probed before it took work"
    assert "only what changed was written into the engine" in log
    assert {entry.kind for entry in ledger(run.path)}.isdisjoint({"rejected", "banned"})


def test_a_vllm_worker_that_ignores_its_seeds_is_banned_beside_an_honest_one(tmp_path: Path) -> None:
    def nodes() -> dict[str, tuple[str, int, int]]:
        found = glimpse(run.path, "SELECT name, state, accepted, rejected FROM nodes")
        return {name: (state, accepted, rejected) for name, state, accepted, rejected in found}

    with start_run(tmp_path / "run", ("run.steps=10000", *SMALL)) as run:
        run.wait_until("honest work", lambda: nodes().get("worker-0", ("", 0, 0))[1] > 0, DEADLINE_S)
        command = [sys.executable, "-m", "shoal.cli", "join", str(run.path), "--index", "1"]
        with (tmp_path / "cheat.output").open("wb") as output:
            cheat = subprocess.Popen(
                [*command, "--cheat", "own-seeds"], stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=os.environ,
            )  # fmt: skip
        try:
            assert cheat.wait(DEADLINE_S) == 6, (tmp_path / "cheat.output").read_text()[-3000:]
        finally:
            end(cheat, run.path / "nothing")
        state, accepted, rejected = nodes()["worker-0"]
        assert (state, rejected) == ("active", 0)
        assert accepted > 8
        assert nodes()["worker-1"][0] == "banned"
