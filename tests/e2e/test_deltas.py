"""A real run whose policies travel in bfloat16, as deltas: from the trainer's process into the workers' engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.run import metrics, start_run

SETTINGS = (
    "run.steps=4", "run.groups_per_step=8", "trainer.publish_dtype=bfloat16", "trainer.learning_rate=1e-6",
    "trainer.evaluate_every=0", "relay.count=2",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_in_bfloat16_travels_as_deltas_and_is_written_in_place(tmp_path: Path) -> None:
    with start_run(tmp_path / "run", SETTINGS) as run:
        assert run.wait() == 0, run.said(6000)
    assert [row["groups"] for row in metrics(run.path) if "groups" in row] == [8, 8, 8, 8]
    log = (run.path / "logs" / "worker-0.log").read_text()
    assert "which is here and 1 delta" in log
    assert "only what changed was written into the engine" in log
