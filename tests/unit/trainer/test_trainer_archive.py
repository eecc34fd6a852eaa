"""The rollouts of every step as Parquet: what is in a file, that it is there, and that a replay gives it again."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
from trainer_stubs import FakeHub, tiny_files, tiny_model, training_run

from shoal.errors import ResourceError, TrainingDiverged
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import (
    Batch,
    BatchGroup,
    PolicyRef,
    TrainingBatch,
    TrainingGroup,
    TrainingRollout,
    pack_logprobs,
    pack_tokens,
)
from shoal.protocol.submission import pack_spans
from shoal.trainer.archive import SCHEMA, RolloutArchive
from shoal.trainer.shards import Actions

TOKENIZER = TextTokenizer(tiny_files(tiny_model()))
EOS = TOKENIZER.eos_token_id


def group(unit: int, version: int, prompt: str, *completions: tuple[str, str, float]) -> TrainingGroup:
    rollouts = []
    for text, finish, reward in completions:
        ids = [*TOKENIZER.encode(text), *([EOS] if finish == "eos" else [])]
        logprobs = pack_logprobs([-0.5 * (index + 1) for index in range(len(ids))])
        rollouts.append(TrainingRollout(pack_tokens(ids), logprobs, finish, reward, pack_spans([(0, 1)])))  # type: ignore[arg-type]
    return TrainingGroup(unit, f"sort/{unit}", version, pack_tokens(TOKENIZER.encode(prompt)), rollouts)


def written_down(step: int, *groups: TrainingGroup) -> tuple[Batch, TrainingBatch]:
    written = tuple(
        BatchGroup(
            unit=group.unit, submission="", node=f"node-{group.unit}",
            policy=PolicyRef(incarnation=0, version=group.version, digest="00" * 32),
            rewards=tuple(rollout.reward for rollout in group.rollouts),
        )
        for group in groups
    )  # fmt: skip
    return Batch(step=step, groups=written, written_at_ms=0), TrainingBatch(step=step, groups=list(groups))


STEP_7 = written_down(
    7, group(40, 6, "31=", ("13", "eos", 1.0), ("", "eos", 0.0)), group(41, 7, "2 0=", ("0 2 ", "length", 0.25))
)


@pytest.fixture
def archive(tmp_path: Path) -> RolloutArchive:
    archive = RolloutArchive(tmp_path / "rollouts", TOKENIZER.decode)
    archive.open()
    return archive


def test_a_row_is_a_rollout_with_its_texts_tokens_and_reward(archive: RolloutArchive) -> None:
    path = archive.write(*STEP_7)
    assert path.name == "step-00007.parquet"
    table, chunks = pq.read_table(path), pq.ParquetFile(path).metadata.row_group(0)
    assert table.schema.equals(SCHEMA)
    assert {chunks.column(index).compression for index in range(chunks.num_columns)} == {"ZSTD"}
    rows = table.to_pylist()
    assert rows[0] == {
        "step": 7, "unit": 40, "sample": 0, "task": "sort/40", "node": "node-40", "version": 6, "staleness": 1,
        "prompt": "31=", "completion": "13", "prompt_ids": list(TOKENIZER.encode("31=")),
        "token_ids": [*TOKENIZER.encode("13"), EOS], "logprobs": [-0.5, -1.0, -1.5], "given": [0, 1], "finish": "eos",
        "reward": 1.0,
    }  # fmt: skip
    seen = [(row["unit"], row["sample"], row["node"], row["staleness"], row["completion"]) for row in rows[1:]]
    assert seen == [(40, 1, "node-40", 1, ""), (41, 0, "node-41", 0, "0 2 ")]
    assert (rows[1]["token_ids"], rows[2]["logprobs"]) == ([EOS], [-0.5, -1.0, -1.5, -2.0])
    assert (rows[2]["prompt"], rows[2]["finish"], rows[2]["reward"]) == ("2 0=", "length", 0.25)


def test_a_step_without_a_group_is_a_file_without_rows_of_the_same_schema(archive: RolloutArchive) -> None:
    empty = archive.write(*written_down(8))
    archive.write(*STEP_7)
    assert pq.read_table(empty).num_rows == 0
    whole = pq.read_table(archive.folder)  # all steps together, as a reader of a run does it
    assert (whole.num_rows, whole.schema.names) == (3, SCHEMA.names)


def test_the_same_batch_gives_the_same_bytes_and_replaces_what_a_kill_left_there(archive: RolloutArchive) -> None:
    before = archive.write(*STEP_7).read_bytes()
    (archive.folder / "step-00007.parquet").write_bytes(b"half of a fi")
    (archive.folder / ".step-00008.parquet.123.ab").write_bytes(b"PAR1")
    archive.open()
    assert archive.write(*STEP_7).read_bytes() == before
    assert [path.name for path in archive.folder.iterdir()] == ["step-00007.parquet"]


def test_every_step_of_a_run_has_its_file(tmp_path: Path) -> None:
    hub, folder = FakeHub(3), tmp_path / "trainer" / "rollouts"
    training_run(tmp_path, hub)[0].run()
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:05d}.parquet" for step in range(3)]
    for step in range(3):
        groups, rows = hub.rollouts(step).groups, pq.read_table(folder / f"step-{step:05d}.parquet").to_pylist()
        expected = [(group.unit, rollout.reward) for group in groups for rollout in group.rollouts]
        assert [(row["unit"], row["reward"]) for row in rows] == expected
        assert {row["node"] for row in rows} == {f"{group.unit:032x}" for group in groups}


def test_the_batch_of_a_step_that_diverges_can_be_looked_at(tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged):
        training_run(tmp_path, FakeHub(1), actions=Actions(train=Mock(side_effect=TrainingDiverged("step 0"))))[0].run()
    assert pq.read_table(tmp_path / "trainer" / "rollouts" / "step-00000.parquet").num_rows == 12


def test_a_batch_that_cannot_be_put_down_ends_the_run_before_its_row_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RolloutArchive, "write", Mock(side_effect=ResourceError("cannot write: the disk is full")))
    with pytest.raises(ResourceError, match="disk is full"):
        training_run(tmp_path, FakeHub(1))[0].run()
    assert not (tmp_path / "trainer" / "metrics.jsonl").exists()
