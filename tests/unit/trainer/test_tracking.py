"""What people see of a run: rows in TensorBoard and Weights & Biases, rollouts of every step as Parquet.

The real libraries are used, and what they wrote is read back by them. Nothing goes over a network.
"""

import logging
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
from trainer_stubs import RUN, FakeHub, rows_of, tiny_files, tiny_model, training_run, written_batch

from kit import Logs, Patch
from shoal.errors import ConfigError, ResourceError, TrainingDiverged
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import Batch, TrainingBatch, TrainingGroup, TrainingRollout, pack_logprobs, pack_spans, pack_tokens
from shoal.run.preflight import check_machine
from shoal.run.recipe import Recipe
from shoal.trainer import record
from shoal.trainer.archive import SCHEMA, RolloutArchive
from shoal.trainer.record import Row, Tracked, Trackers, open_trackers, require_trackers
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.shards import Actions


def row(step: int, loss: float) -> dict[str, float]:
    return {"step": step, "loss": loss, "at_ms": 1000.0 * step}


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag → (step, value) as TensorBoard shows it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    shown.Reload()
    return {
        tag: sorted((event.step, round(event.value, 4)) for event in shown.Scalars(tag))
        for tag in shown.Tags()["scalars"]
    }


def tensorboard(folder: Path, rows: Sequence[Row] = ()) -> Trackers:
    trackers = open_trackers(["tensorboard"], Tracked(folder, RUN))
    trackers.begin(rows)
    return trackers


def test_resume_repeats_no_step(tmp_path: Path) -> None:
    """Rows 0 to 3 were tracked, the checkpoint is of version 2: steps 2 and 3 are trained again. No close: a kill."""
    first = tensorboard(tmp_path)
    for step in range(4):
        first.write(row(step, 1.0 + step))
    first.amend(1, {"held_out": 0.75})
    again = tensorboard(tmp_path, [row(0, 1.0), {**row(1, 2.0), "held_out": 0.75}])
    for step in range(2, 5):
        again.write(row(step, 10.0 + step))
    again.close()
    assert board(tmp_path)["loss"] == [(0, 1.0), (1, 2.0), (2, 12.0), (3, 13.0), (4, 14.0)]
    assert board(tmp_path)["held_out"] == [(1, 0.75)]


@pytest.mark.parametrize("works", range(5))
def test_a_tracker_that_fails_is_warned_about_once_and_holds_up_nobody(works: int, caplog: Logs) -> None:
    failing, other = Mock(), Mock()
    calls = [failing.begin, *[failing.write] * 4, failing.amend, failing.close]
    calls[works].side_effect = [*[None] * calls[:works].count(calls[works]), OSError(28, "No space left on device")]
    trackers = Trackers({"failing": failing, "other": other})
    trackers.begin([])
    for step in range(4):
        trackers.write(row(step, 1.0))
    trackers.amend(0, {"held_out": 1.0})
    trackers.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "failing gets no more metrics" in warning
    assert "No space left on device" in warning
    assert (len(failing.mock_calls), len(other.mock_calls)) == (works + 1, 7)
    assert set(TrainerSettings.model_validate({"tracking": list(record.TRACKERS)}).tracking) == set(record.TRACKERS)


def test_a_run_is_tracked_step_by_step_with_late_scores(tmp_path: Path) -> None:
    """What TensorBoard shows equals metrics.jsonl, number for number; the last row is the last version's score."""
    hub = FakeHub(4)
    scores = {2: (0, 0.5), 3: (4, 0.9)}
    hub.before["batch"] = lambda step: hub.measure(*scores[step]) if step in scores else None
    hub.score = lambda _version: None
    trackers = open_trackers(["tensorboard"], Tracked(tmp_path / "trainer", RUN))
    training_run(tmp_path, hub, trackers=trackers)[0].run()
    shown, written = board(tmp_path / "trainer"), defaultdict(list)
    for each in rows_of(tmp_path):
        for name in each.keys() - {"step", "at_ms"}:
            written[name].append((each["step"], each[name]))
    assert shown.keys() == written.keys()
    for name, values in written.items():
        assert [step for step, _ in shown[name]] == [step for step, _ in values]
        assert [value for _, value in shown[name]] == pytest.approx([value for _, value in values], rel=1e-3, abs=1e-4)
    assert shown["held_out"] == [(0, 0.5), (4, 0.9)]


@pytest.mark.parametrize("word", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_before_anything_starts(word: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(record, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=rf"with: \S*python -m pip install {word}, or"):
        require_trackers([word])
    recipe = Recipe.model_validate({"trainer": {"tracking": [word]}})
    with pytest.raises(ConfigError, match=f'"{word}"'):
        check_machine(recipe)


@pytest.mark.parametrize(("wanted", "key", "mode"), [
    ("", None, "offline"), ("", "k", "online"), ("offline", "k", "offline"), ("disabled", "k", "disabled"),
    ("online", None, "offline"),
])  # fmt: skip
def test_no_key_means_no_network_and_no_question(tmp_path, wanted, key, mode, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", wanted)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "unset")
    wandb = SimpleNamespace(api=SimpleNamespace(api_key=key), Settings=dict, init=lambda **given: given["mode"])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert record.start_wandb(Tracked(tmp_path, RUN)) == mode


def test_wandb_gets_each_step_once_and_its_own_count_only_rises(tmp_path: Path, monkeypatch: Patch) -> None:
    run = Mock()
    monkeypatch.setattr(record, "start_wandb", lambda _tracked: run)
    for at, rows in ((0, []), (2, [row(0, 0.0), row(1, 1.0)])):
        trackers = open_trackers(["wandb"], Tracked(tmp_path, RUN))
        trackers.begin(rows)
        for step in range(at, at + 3):
            trackers.write(row(step, float(step)))
        trackers.amend(1, {"held_out": 0.5})
    logged = [call.args[0] for call in run.log.call_args_list]
    assert [call.kwargs["step"] for call in run.log.call_args_list] == list(range(len(logged)))
    assert [numbers["step"] for numbers in logged if "loss" in numbers] == [0, 1, 2, 3, 4]
    assert {"step": 1, "held_out": 0.5} in logged


WANDB = """
import sys, socket
from pathlib import Path
def refused(self, address, *rest):
    assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "localhost", "::1"), address
    return connect(self, address, *rest)
connect, socket.socket.connect = socket.socket.connect, refused
from shoal.trainer.record import Tracked, open_trackers
trackers = open_trackers(["wandb"], Tracked(Path(sys.argv[1]), "tiny-0123", {"learning_rate": 1e-4}))
first = int(sys.argv[2])
trackers.begin([])
for step in range(first, first + 3):
    trackers.write({"step": step, "loss": 0.5, "at_ms": 0.0})
trackers.amend(first, {"held_out": 0.75})
trackers.close()
"""


@pytest.mark.slow
def test_wandb_offline_writes_one_run_over_two_starts(tmp_path: Path, monkeypatch: Patch) -> None:
    """Without a key and without a terminal: nothing is asked, nothing leaves the machine, the rows are in the file."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no login of whoever runs this test
    for first in (0, 2):
        done = subprocess.run(
            [sys.executable, "-c", WANDB, str(tmp_path), str(first)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "no more metrics" not in done.stderr
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/run-tiny-0123.wandb"))
    for file, rows in ((first, 3), (second, 2)):  # step 2 was logged by the first
        content = file.read_bytes()
        assert (content.count(b"held_out") > 0, content.count(b"loss") >= rows) == (True, True)


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
    return written_batch(step, groups), TrainingBatch(step=step, groups=list(groups))


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
        "reward": 1.0, "parts": [], "audit": "full",
    }  # fmt: skip
    seen = [(row["unit"], row["sample"], row["node"], row["staleness"], row["completion"]) for row in rows[1:]]
    assert seen == [(40, 1, "node-40", 1, ""), (41, 0, "node-41", 0, "0 2 ")]
    assert (rows[1]["token_ids"], rows[2]["logprobs"]) == ([EOS], [-0.5, -1.0, -1.5, -2.0])
    assert (rows[2]["prompt"], rows[2]["finish"], rows[2]["reward"]) == ("2 0=", "length", 0.25)


def test_row_says_whether_its_group_was_checked_fully(archive: RolloutArchive) -> None:
    groups = [STEP_7[0].groups[0].model_copy(update={"audit": "light"}), STEP_7[0].groups[1]]
    table = pq.read_table(archive.write(STEP_7[0].model_copy(update={"groups": tuple(groups)}), STEP_7[1]))
    assert table["audit"].to_pylist() == ["light", "light", "full"]


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


def test_the_batch_of_a_step_that_diverges_can_be_looked_at(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Actions, "train", Mock(side_effect=TrainingDiverged("step 0")))
    with pytest.raises(TrainingDiverged):
        training_run(tmp_path, FakeHub(1))[0].run()
    assert pq.read_table(tmp_path / "trainer" / "rollouts" / "step-00000.parquet").num_rows == 12


def test_a_batch_that_cannot_be_put_down_ends_the_run_before_its_row_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(RolloutArchive, "write", Mock(side_effect=ResourceError("cannot write: the disk is full")))
    with pytest.raises(ResourceError, match="disk is full"):
        training_run(tmp_path, FakeHub(1))[0].run()
    assert not (tmp_path / "trainer" / "metrics.jsonl").exists()
