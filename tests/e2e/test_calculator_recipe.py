"""The calculator recipe with real processes: dialogues are drawn, judged, and trained on without the tool's words."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kit.run import ledger, metrics, start_run
from shoal.environments.tools import TOOLS
from shoal.models import TextTokenizer, model_folder, read_files

RECIPE = Path(__file__).parents[2] / "recipes" / "calculator.toml"
TINY = TextTokenizer(read_files(model_folder("tiny")))


@pytest.mark.slow
def test_the_calculator_recipe_runs_end_to_end(tmp_path: Path) -> None:
    with start_run(tmp_path / "run", ("run.steps=2", "run.groups_per_step=8"), recipe=RECIPE) as run:
        assert run.wait() == 0, run.said()
    kinds = {entry.kind for entry in ledger(tmp_path / "run")}
    assert "credit" in kinds
    assert "rejected" not in kinds
    assert [row["step"] for row in metrics(tmp_path / "run")][:2] == [0, 1]
    rows = pq.read_table(tmp_path / "run" / "trainer" / "rollouts").to_pylist()
    spoken = [row for row in rows if row["given"]]
    assert len(spoken) > 0.5 * len(rows), "the tiny policy writes digits, and digits are answered"
    for row in spoken:
        start, length = row["given"][:2]
        said = TINY.decode(row["token_ids"][start : start + length])
        assert said == f"\n{TOOLS['calculator']([TINY.decode(row['token_ids'][:start])])}\n"
        assert set(row["logprobs"][start : start + length]) == {0.0}
