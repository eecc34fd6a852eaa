"""Every kind of file gives the same tasks, read when asked for; the cache is never believed over the files. And the
script that makes synthetic data sets: its tasks are right, its bad rows bad, and one seed gives one data set.
"""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kit import data as kit_data
from shoal.environments import Environment, EnvironmentSettings, build, identity_of
from shoal.environments.data import readers
from shoal.environments.data.readers import DataTable, Pieces
from shoal.environments.protocol import SPLITS
from shoal.errors import EnvironmentSetupError


@pytest.mark.parametrize("kind", kit_data.KINDS)
def test_every_kind_of_file_gives_the_same_tasks(kind: str, tmp_path: Path) -> None:
    rows = kit_data.described(11)
    environment = kit_data.open_data(kit_data.KINDS[kind](tmp_path, rows))
    assert isinstance(environment, Environment)
    assert [len(environment.tasks(split)) for split in SPLITS] == [9, 2]
    for task in kit_data.tasks_of(environment):
        row = rows[int(task.id.partition("/")[0])]
        assert task.id.endswith(f"/{row['problem_id']}")
        assert (task.prompt, task.kind, task.answer) == (row["prompt"], "mathematics", row["verification_info"])
        assert environment.task(task.id) == task
        assert environment.score(task, f"\\boxed{{{json.loads(task.answer)['ground_truth']}}}").value == 1.0
        assert environment.score(task, "\\boxed{-1}").value == 0.0


def test_an_answer_is_not_read_before_somebody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = kit_data.open_data(kit_data.write_parquet(tmp_path / "a.parquet", kit_data.described(20)))
    asked: list[tuple[str, ...]] = []
    read = DataTable.row
    monkeypatch.setattr(DataTable, "row", lambda table, *which: asked.append(which[1]) or read(table, *which))
    task = replace(environment.task("7/p7"), prompt="What is 7 + 7? Think for 10 tokens.")  # as a length budget does
    assert not any("verification_info" in columns for columns in asked)
    assert json.loads(task.answer) == {"ground_truth": "14"}
    assert any("verification_info" in columns for columns in asked)
    count = len(asked)
    assert task.answer
    assert len(asked) == count  # once is enough


def test_ids_are_row_numbers_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    environment = kit_data.open_data(
        kit_data.write_jsonl(tmp_path / "a.jsonl", kit_data.described(10, problem_id={4: "x" * 200, 5: None}))
    )
    assert environment.task("4").prompt == "What is 4 + 4?"
    assert environment.task("5").prompt == "What is 5 + 5?"
    for wrong in ("3", "3/p4", "03/p3", "11/p11", "-1/p1", "p3", "", "held_out/3/p3", "9" * 30):
        with pytest.raises(EnvironmentSetupError, match="has no task"):
            environment.task(wrong)


def test_decoded_row_groups_are_kept_within_a_bound_in_bytes() -> None:
    piece = pa.table({"a": list(range(100))})
    pieces = Pieces(limit_bytes=3 * piece.nbytes)
    for number in range(5):
        pieces.put(piece, number)
        pieces.get(1)  # used all the time
    assert pieces.size_bytes <= 3 * piece.nbytes
    assert [pieces.get(number) is not None for number in (1, 2, 4)] == [True, False, True]


def test_a_row_of_a_large_group_is_decoded_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BATCH_ROWS", 7)
    rows = kit_data.described(50)
    environment = kit_data.open_data(kit_data.write_parquet(tmp_path / "a.parquet", rows))
    for number in (49, 0, 6, 7, 48):
        assert environment.task(f"{number}/p{number}").answer == rows[number]["verification_info"]
    assert max(piece.num_rows for piece in environment._main.table._kept._pieces.values()) == 7


def test_many_shards_need_few_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.environments.data.readers.OPEN_AT_ONCE", 2)
    for number, row in enumerate(kit_data.described(9)):
        kit_data.write_parquet(tmp_path / f"part-{number}.parquet", [row])
    environment = kit_data.open_data(tmp_path, held_out_size=1)
    assert [environment.task(f"{number}/p{number}").prompt for number in (8, 0, 5)]
    assert len(environment._main.table._open) <= 2


def test_the_digest_is_of_the_content_and_the_options(tmp_path: Path) -> None:
    one = kit_data.open_data(kit_data.write_jsonl(tmp_path / "one.jsonl", kit_data.described(20)))
    assert identity_of(one) == identity_of(
        kit_data.open_data(kit_data.write_jsonl(tmp_path / "moved.jsonl", kit_data.described(20)))
    )
    other = kit_data.open_data(
        kit_data.write_jsonl(tmp_path / "other.jsonl", kit_data.described(20, prompt={3: "Another?"}))
    )
    sized = kit_data.open_data(tmp_path / "one.jsonl", held_out_size=3)
    graded = kit_data.open_data(tmp_path / "one.jsonl", grader="exact")
    assert len({one.digest, other.digest, sized.digest, graded.digest}) == 4
    assert one.data_digest == sized.data_digest == graded.data_digest != other.data_digest


def test_damaged_or_missing_cache_costs_time_only(tmp_path, own_cache, monkeypatch):
    path = kit_data.write_jsonl(tmp_path / "a.jsonl", kit_data.described(10))
    expected = kit_data.open_data(path).digest
    for entry in own_cache.iterdir():
        entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    assert kit_data.open_data(path).digest == expected
    with monkeypatch.context() as patched:  # as Python 3.11 does now and then where two threads read a header
        patched.setattr("numpy.load", Mock(side_effect=SystemError("AST constructor recursion depth mismatch")))
        assert kit_data.open_data(path).digest == expected
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kit_data.open_data(path).digest == expected


@pytest.mark.parametrize(("name", "content", "said"), [
    ("cut.parquet", lambda folder: kit_data.KINDS["parquet"](folder, kit_data.described(10)).read_bytes()[:-100],
     "is no Parquet file, or empty, cut off or damaged"),
    ("magic.parquet", b"PK\x03\x04" * 100, "is no Parquet file, or empty, cut off or damaged"),
    ("empty.parquet", b"", "is no Parquet file, or empty"),
    ("lfs.parquet", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ("empty.jsonl", b"", "is no JSON lines file, or empty"),
    ("blank.jsonl", b"\n \n\n", "none of its first lines is a JSON object"),
    ("list.json", b'[{"prompt": "a"}]', "write one object per line"),
    ("binary.jsonl", b"\xff\xfe\x00" * 100, "none of its first lines is a JSON object"),
    ("a.jsonl.gz", b"\x1f\x8b", "unpack or convert it"),
    ("notes.txt", b"hello", "is no .parquet or .jsonl file"),
])  # fmt: skip
def test_files_that_are_not_what_their_names_say(name: str, content: Any, said: str, tmp_path: Path) -> None:
    message = kit_data.refused(kit_data.written(tmp_path / name, content(tmp_path) if callable(content) else content))
    assert said in message
    assert name in message


def test_a_page_that_is_damaged_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = kit_data.write_parquet(tmp_path / "a.parquet", kit_data.described(1000), compression="zstd")
    content = bytearray(path.read_bytes())
    content[len(content) // 8 : len(content) // 4] = bytes(len(content) // 4 - len(content) // 8)
    path.write_bytes(content)
    with pytest.raises(EnvironmentSetupError, match=r"a\.parquet"):
        _ = [task.answer for task in kit_data.open_data(path).tasks("train")]


FOLDERS: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"README.md": b""}, "holds no Parquet or JSON lines file"),
    "several folders": ({"a/x.parquet": 3, "b/x.parquet": 3}, "in several folders (a, b)"),
    "several kinds": ({"x.parquet": 3, "y.jsonl": 3}, "of several kinds (jsonl, parquet)"),
    "other splits": ({"test-00000-of-00001.parquet": 3, "dev-00000-of-00001.parquet": 3},
                     "has no split 'train'; it has dev, test"),
    "other types": ({"a.parquet": 3, "b.parquet": [{**row, "prompt": 7} for row in kit_data.described(3)]},
                    "column prompt is int64 in"),
    "other columns": ({"a.parquet": 3, "b.parquet": [{"prompt": "x"}]}, "there is no column problem_id in"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_are_no_data_set(case: str, tmp_path: Path) -> None:
    files, said = FOLDERS[case]
    for name, content in files.items():
        if isinstance(content, bytes):
            kit_data.written(tmp_path / name, content)
        else:
            kit_data.write_either(tmp_path / name, kit_data.described(content) if isinstance(content, int) else content)
    assert said in kit_data.refused(tmp_path)
    if case == "other splits":
        assert len(kit_data.open_data(tmp_path, split="dev").tasks("train")) == 3


def test_links_that_go_nowhere_or_in_a_circle(tmp_path: Path) -> None:
    for name, target, said in [("loop", "loop", "cannot open the data"), ("dangling", "gone", "there is no data at")]:
        (tmp_path / f"{name}.parquet").symlink_to(tmp_path / f"{target}.parquet")
        assert said in kit_data.refused(tmp_path / f"{name}.parquet")
    folder = kit_data.write_parquet(tmp_path / "folder" / "x.parquet", kit_data.described(10)).parent
    (folder / "again").symlink_to(folder)
    assert len(kit_data.open_data(folder).tasks("train")) == 8


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a", "b"])] * 3, names=["question", "answer", "question"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "a.parquet has more than one column named 'question'" in kit_data.refused(tmp_path / "a.parquet")


def test_paths_and_splits_that_are_not_there_are_refused(tmp_path: Path) -> None:
    path = kit_data.write_jsonl(tmp_path / "a.jsonl", kit_data.described(10))
    named = kit_data.write_jsonl(tmp_path / "test-00000-of-00001.jsonl", kit_data.described(10))
    for data, options, said in [
        (Path("a\0b.jsonl"), {}, "cannot open the data"),
        (path, {"held_out": "a\0b.jsonl"}, "cannot open the data"),
        (Path("some/where/else"), {}, "there is no data at"),
        (tmp_path / "missing.parquet", {}, "there is no data at"),
        (path, {"split": "zz"}, "a.jsonl is one file and has no split 'zz'"),
        (named, {"split": "train"}, "is one file and has no split 'train'"),
    ]:
        assert said in kit_data.refused(data, **options)  # type: ignore[arg-type]
    assert kit_data.open_data(named, split="test")._main.table.rows == 10
    with pytest.raises(EnvironmentSetupError, match="needs data"):
        build(EnvironmentSettings(name="dataset"))
    with pytest.raises(EnvironmentSetupError, match=r'sort reads no data: set environment\.name = "dataset"'):
        build(EnvironmentSettings(data=tmp_path / "forgotten-name.parquet"))


def test_files_without_a_split_in_their_name_come_before_others(tmp_path: Path) -> None:
    kit_data.write_jsonl(tmp_path / "some.jsonl", kit_data.described(10))
    kit_data.write_jsonl(tmp_path / "test.jsonl", kit_data.described(5))
    assert [kit_data.open_data(tmp_path, split=split)._main.table.rows for split in ("", "test")] == [10, 5]


def test_opening_loads_nothing_heavy_before_there_is_data() -> None:
    script = "import sys, shoal.environments; print({'numpy', 'pyarrow', 'tokenizers'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "set()", ran.stdout + ran.stderr


def test_a_change_that_keeps_size_and_time_is_a_change(tmp_path: Path) -> None:
    path = kit_data.write_jsonl(tmp_path / "a.jsonl", kit_data.described(10))
    before, found = kit_data.open_data(path), path.stat()
    assert kit_data.open_data(path).data_digest == before.data_digest
    with path.open("r+b") as file:  # the same inode
        content = file.read().replace(b"What", b"Whut")
        file.seek(0)
        file.write(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (found.st_size, found.st_mtime_ns, found.st_ino)
    after = kit_data.open_data(path)
    assert after.data_digest != before.data_digest
    assert after.digest != before.digest
    assert after.task("3/p3").prompt.startswith("Whut")


@pytest.fixture
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "make_dataset.py")))


def test_its_tasks_are_right(script: SimpleNamespace, tmp_path: Path) -> None:
    plan = script.Plan(tmp_path, tasks=60, shard_gb=0.001, code_share=0.2, tasks_per_shard=20)
    paths = script.make(plan)
    assert [pq.read_metadata(path).num_rows for path in paths] == [20, 20, 8, 12]
    environment = kit_data.open_data(tmp_path)
    assert environment.problems.count == kit_data.checked(environment).count == 0
    task = environment.task("0/math_0")
    numbers = [int(word) for word in task.prompt.replace("?", " ").replace(".", " ").split() if word.isdecimal()][1:4]
    right = sum(numbers[0] + numbers[1] * place for place in range(numbers[2]))
    assert environment.score(task, f"\\boxed{{{right}}}").value == 1.0
    assert environment.score(task, f"\\boxed{{{right + 1}}}").value == 0.0
    info = json.loads(environment.task("59/code_59").answer)
    assert 0.5e6 / 12 < len(json.dumps(info)) < 2e6 / 12
    for case in info["test_cases"]:
        (length, every), given = ([*map(int, line.split())] for line in case["input"].splitlines())
        assert (len(given), str(sum(given[::every]))) == (length, case["output"])


def test_the_same_seed_gives_the_same_rows_and_as_many_bad_ones_as_asked_for(script, tmp_path):
    made = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        script.make(script.Plan(tmp_path / name, tasks=50, shard_gb=0.0001, seed=seed, bad=15))
        made.append(pq.read_table(tmp_path / name).to_pylist())
    assert made[0] == made[1] != made[2]
    assert kit_data.checked(kit_data.open_data(tmp_path / "a")).count == 15
