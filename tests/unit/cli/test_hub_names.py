"""Models, data and judges by their names on the Hugging Face hub: a server on loopback speaks its API."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from kit import Capture, Patch
from kit.cli import TINY, told
from kit.hf import TOKEN, HuggingFace
from shoal.environments.data.locating import hub_data, locate
from shoal.errors import DiskError, EnvironmentSetupError, ModelError, ResourceError, UserError
from shoal.models import model_folder
from shoal.run.folder import RunFolder
from shoal.runtime import hf
from shoal.runtime.hf import HubName

MODEL = model_folder("tiny")
OTHERS = {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "onnx/model.safetensors": b"", "LICENSE": b""}


def rows(*questions: str) -> bytes:
    return "".join(json.dumps({"question": f"{one}=", "answer": "2"}) + "\n" for one in questions).encode()


def parquet(*questions: str) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"question": [f"{one}=" for one in questions], "answer": ["2"] * len(questions)}), sink)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(("text", "meant"), [
    ("org/name", HubName("org/name")), ("org/name@main", HubName("org/name", "main")),
    ("org/name@refs/convert/parquet:a/train", HubName("org/name", "refs/convert/parquet", "a/train")),
    (f"o/n.1@{'a' * 40}#blake3={'b' * 64}", HubName("o/n.1", "a" * 40, "", "b" * 64)),
    *((path, None) for path in ("name", "/org/name", "./org/name", "~/org", "a/b/c", "models/x", "runs/x", "a/b.jsonl",
                                "a/b.parquet", "org/../x", "org/", "a b/c", "aime:a/b", "org/name@")),
])  # fmt: skip
def test_names_of_the_hub_and_paths(text: str, meant: HubName | None) -> None:
    assert hf.parse(text) == meant
    assert meant is None or str(meant) == text


def test_a_path_that_exists_is_no_name(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hf.parse("org/name") is not None
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hf.parse("org/name") is None


def test_a_model_is_downloaded_once_without_pickles_and_code(hf_hub: HuggingFace, monkeypatch: Patch) -> None:
    first = hf_hub.put_folder("org/tiny", MODEL, **OTHERS)
    folder = model_folder("org/tiny")
    assert folder.name == first
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in MODEL.iterdir())
    assert (folder / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    hf_hub.requests.clear()
    assert model_folder("org/tiny") == folder
    assert hf_hub.requests == ["GET /api/models/org/tiny/revision/main"], "is it still the newest?"
    second = hf_hub.put_folder("org/tiny", MODEL, **{"config.json": b"{}"})
    assert model_folder("org/tiny").name == second
    hf_hub.requests.clear()
    assert model_folder(f"org/tiny@{first}") == folder
    assert hf_hub.requests == [], "a commit never changes"
    monkeypatch.setattr(hf, "IS_OFFLINE", True)
    assert model_folder("org/tiny").name == second
    assert hf_hub.requests == []


def test_a_download_that_was_cut_off_is_not_whole(hf_hub: HuggingFace, monkeypatch: Patch) -> None:
    weights = {f"model-0000{n}-of-00002.safetensors": bytes(9) for n in (1, 2)}
    commit = hf_hub.put("org/cut", {"config.json": b"{}", **weights})
    (model_folder("org/cut") / "model-00002-of-00002.safetensors").unlink()
    monkeypatch.setattr(hf, "IS_OFFLINE", True)
    with pytest.raises(ModelError, match=r"is not whole in the cache .*HF_HUB_OFFLINE is set: unset it"):
        model_folder("org/cut")
    monkeypatch.setattr(hf, "IS_OFFLINE", False)
    assert (model_folder(f"org/cut@{commit}") / "model-00002-of-00002.safetensors").is_file()


def save_index(hub: HuggingFace, name: str, files: dict[str, bytes], **changes: object) -> None:
    hub.put(name, {"config.json": b"{}", "tokenizer.json": b"{}", **files}, **changes)


@pytest.mark.parametrize(("name", "sentence"), [
    ("org/none", r"there is no model org/none at http.*, or it is private, and no such path is here: check the name"),
    ("org/bin", r"has no \*.safetensors file \(it has pytorch_model.bin\), and shoal reads no other weights: take"),
    ("org/one@v9", r"the model org/one has no revision 'v9' at http.*: leave it out for the newest, or give a branch"),
    ("org/gated", r"is gated: accept its terms at http.*/org/gated, then log in \(hf auth login\), or set HF_TOKEN"),
    ("org/private", r"or it is private, and no such path is here: .* log in \(hf auth login\), or set HF_TOKEN"),
    ("org/large", r"has a tokenizer.json of 10 GB, and at most 67.1 MB are read"),
    ("org/hostile", r"has a file with the name '.*x.json', which is refused"),
])  # fmt: skip
def test_missing_and_unusable_models_are_refused_with_the_remedy(hf_hub: HuggingFace, name: str, sentence: str) -> None:
    weights = {"model.safetensors": b"w"}
    save_index(hf_hub, "org/one", weights)
    save_index(hf_hub, "org/bin", {"pytorch_model.bin": b""})
    save_index(hf_hub, "org/gated", weights, gated=True)
    save_index(hf_hub, "org/private", weights, private=True)
    save_index(hf_hub, "org/large", weights, declared={"tokenizer.json": 10**10})
    save_index(hf_hub, "org/hostile", {**weights, "\\..\\x.json": b""})
    with pytest.raises(ModelError, match=sentence) as refusal:
        model_folder(name)
    assert "\n" not in str(refusal.value)
    assert not list(hf_hub.cache.rglob("x.json"))


def test_a_token_of_the_environment_opens_what_is_private(hf_hub: HuggingFace, monkeypatch: Patch) -> None:
    save_index(hf_hub, "org/private", {"model.safetensors": b"w"}, private=True, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (model_folder("org/private") / "model.safetensors").read_bytes() == b"w"


def test_no_network_and_no_room_are_said(hf_hub: HuggingFace, monkeypatch: Patch, capsys: Capture) -> None:
    save_index(hf_hub, "org/huge", {"model.safetensors": b""}, declared={"model.safetensors": 10**18})
    with pytest.raises(DiskError, match=r"it takes 1e\+06 TB, and .* free: free some space, or set HF_HOME"):
        model_folder("org/huge")
    save_index(hf_hub, "org/one", {"model.safetensors": b""})
    folder = model_folder("org/one")
    hf_hub.failing = 503
    with pytest.raises(
        ResourceError, match=r"cannot download the model org/two from http.*503.*: try again, or check the"
    ):
        model_folder("org/two")
    capsys.readouterr()
    assert model_folder("org/one") == folder
    assert f"using org/one@{folder.name} of the cache" in capsys.readouterr().err
    monkeypatch.setattr(hf, "IS_OFFLINE", True)
    with pytest.raises(ModelError, match=r"org/two is not in the cache.*and HF_HUB_OFFLINE is set: unset it to downl"):
        model_folder("org/two")


CARD = b"""---
configs:
- config_name: main
  default: true
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: [main/test.parquet]}
- config_name: hard
  data_files: hard/**/*.parquet
---
# A card
"""
CARDED = {"README.md": CARD, "main/train-00000-of-00001.parquet": b"1", "main/test.parquet": b"2",
          "hard/a/b.parquet": b"3", "hard/c.parquet": b"4", "other/x.parquet": b"5"}  # fmt: skip
PLAIN = {"a/train-00000-of-00002.parquet": b"1", "a/train-00001-of-00002.parquet": b"2", "a/test.jsonl": b"3",
         "b/train/0000.parquet": b"4", "b/test/0000.parquet": b"5", "b/train/0000.jsonl": b"6",
         "state.json": b"", ".x/y.parquet": b""}  # fmt: skip
PARTS = [
    (CARDED, "main", "", "1"), (CARDED, "main/test", "", "2"), (CARDED, "main", "test", "2"),
    (CARDED, "hard", "", "34"),
    (CARDED, "other", "", "has no part 'other'; it has hard, main: give org/rows:PART"),
    (CARDED, "", "", "has several parts; it has hard, main: give org/rows:PART"),
    (CARDED, "main/dev", "", "has no split 'dev'; it has test, train: give org/rows:main/SPLIT"),
    (CARDED, "main/test", "train", "names the split 'test', and options.split is 'train': leave one out"),
    (PLAIN, "a", "", "12"), (PLAIN, "a/test", "", "3"), (PLAIN, "b", "", "4"), (PLAIN, "b/test", "", "5"),
    (PLAIN, "", "", "has several parts; it has a, b: give"), ({"data/train.jsonl": b"1"}, "", "", "1"),
    ({"x.csv": b"", "run.py": b""}, "", "", r"has no Parquet or JSON lines file \(it has .csv, .py\): convert them"),
    ({"a/b\\..\\x.parquet": b"", "../y.parquet": b""}, "a", "", "has a file with the name .*x.parquet'"),
    ({**CARDED, "README.md": b"---\nconfigs: [1, {}]\n---"}, "other", "", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "part", "split", "meant"), PARTS)
def test_the_part_of_a_data_set(
    hf_hub: HuggingFace, files: dict[str, bytes], part: str, split: str, meant: str
) -> None:
    commit = hf_hub.put("org/rows", files, "datasets")
    name = Path(f"org/rows:{part}" if part else "org/rows")
    if not meant.isdecimal():
        with pytest.raises(EnvironmentSetupError, match=meant):
            locate(name, split)
        return
    found = locate(name, split)
    assert "".join(path.read_bytes().decode() for path in found) == meant
    hf_hub.requests.clear()
    pinned = hub_data(HubName("org/rows", commit, part), split)
    assert [pinned.folder / file for file in pinned.files if file != "README.md"] == list(found)
    assert hf_hub.requests == []


def test_rows_that_the_hub_converted_are_read(hf_hub: HuggingFace) -> None:
    hf_hub.put("org/old", {"rows.csv": b"", "old.py": b"code"}, "datasets")
    commit = hf_hub.put("org/old", {"default/train/0000.parquet": b"1"}, "datasets", ref="refs/convert/parquet")
    found = hub_data(HubName("org/old"))
    assert str(found.name) == f"org/old@{commit}"
    assert found.files == ("default/train/0000.parquet",)


def prepared(capsys: Capture, run: Path, *settings: str) -> RunFolder:
    told(capsys, 0, "run", TINY, run, "--prepare", *(text for each in settings for text in ("--set", each)))
    return RunFolder.open(run)


def asked(path: str = "org/tiny", data: str = "org/rows") -> Sequence[str]:
    return (f"model.path={path}", "environment.name=dataset", f"environment.data={data}",
            "environment.held_out_size=1", "environment.options={}")  # fmt: skip


def test_a_run_stays_at_the_commits_it_began_with(hf_hub: HuggingFace, tmp_path: Path, capsys: Capture) -> None:
    model = hf_hub.put_folder("org/tiny", MODEL)
    data = hf_hub.put("org/rows", {"train.jsonl": rows("1+1", "2+0", "0+2")}, "datasets")
    run = tmp_path / "run"
    began = prepared(capsys, run, *asked()).recipe
    assert began.model.path.startswith(f"org/tiny@{model}#blake3=")
    assert str(began.environment.data) == f"org/rows@{data}"
    hf_hub.put_folder("org/tiny", MODEL, **{"new.json": b"{}"})
    hf_hub.put("org/rows", {"train.jsonl": rows("7+7")}, "datasets")
    assert prepared(capsys, run, *asked()).recipe == began, "the same command resumes the same run"
    hf_hub.failing = 503
    told(capsys, 0, "run", run, "--prepare")
    assert RunFolder.open(run).recipe == began, "found in the cache"
    hf_hub.failing = 0
    assert prepared(capsys, tmp_path / "later", *asked()).recipe.model.path != began.model.path
    with (model_folder(began.model.path) / "config.json").open("a") as file:
        file.write(" ")
    said = told(capsys, 2, "run", run, "--prepare").err
    assert "are not those that the run began with: remove that folder, and they are downloaded again" in said


def test_a_dry_run_downloads_no_weights_and_admits_what_is_missing(
    hf_hub: HuggingFace, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    hf_hub.put_folder("org/tiny", MODEL)
    said = told(capsys, 0, "run", TINY, "--dry-run", "--set", "model.path=org/tiny")
    assert "are not downloaded yet, and were not checked; a run downloads them" in said.err
    assert 'path = "org/tiny@' in said.out
    assert not any("model.safetensors" in request for request in hf_hub.requests)
    assert "there is no model org/none" in told(capsys, 2, "run", TINY, "--dry-run", "--set", "model.path=org/none").err
    assert "no safetensors" not in told(capsys, 0, "run", TINY, "--prepare", "--set", "model.path=org/tiny").err
    assert "0.2 M weights" in told(capsys, 0, "plan", TINY, "--set", "model.path=org/tiny").out


def test_tasks_and_models_of_commands_are_named(
    hf_hub: HuggingFace, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    hf_hub.put_folder("org/tiny", MODEL)
    files = {"main/train.parquet": parquet("1+1", "2+0"), "main/test.parquet": parquet("0+2"), "b/c.jsonl": b""}
    hf_hub.put("org/rows", files, "datasets")
    assert "2 rows in 1 file" in told(capsys, 0, "data", "check", "org/rows:main").out
    assert "1 row in 1 file" in told(capsys, 0, "data", "check", "dataset:org/rows:main/test").out
    assert "there is no data set org/none at" in told(capsys, 2, "data", "check", "org/none").err
    said = told(capsys, 0, "eval", "org/tiny", "--env", "org/rows:main/test", "--max-new-tokens", "4").out
    assert "tiny (" in said
    assert " on rows (" in said


def test_a_judge_is_named_and_its_content_counts(hf_hub: HuggingFace, tmp_path: Path) -> None:
    from shoal.environments.settings import folder_digest

    (folder := tmp_path / "judge").mkdir()
    save_file({"score.weight": np.zeros((1, 4), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    commit = hf_hub.put_folder("org/judge", folder)
    hf_hub.put_folder("org/judge", folder, **{"config.json": b"{ }"})
    assert folder_digest(Path(f"org/judge@{commit}")) == folder_digest(folder) != folder_digest(Path("org/judge"))


def test_a_model_has_no_parts(hf_hub: HuggingFace, tmp_path: Path, capsys: Capture) -> None:
    said = told(capsys, 2, "run", TINY, tmp_path / "run", "--prepare", "--set", "model.path=org/tiny:main").err
    assert "model.path: org/tiny:main: only data sets have parts (:main); leave it out" in said
    assert UserError.exit_code == 2
