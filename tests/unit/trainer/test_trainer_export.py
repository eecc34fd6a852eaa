"""Exports: loadable by plain transformers, whole or not there, nobody else's folder touched."""

import errno
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import ModelCard as HubCard
from trainer_stubs import RUN, learner, tiny_files
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit import Capture, Patch
from kit.cli import told
from kit.hf import TOKEN, HuggingFace
from shoal.environments.data.locating import locate
from shoal.errors import ConfigError, ResourceError
from shoal.models.state import policy_state
from shoal.protocol import LedgerHead
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe
from shoal.runtime.metrics import MetricsLog
from shoal.trainer.checkpoint import CheckpointStore
from shoal.trainer.export import ModelCard, export_checkpoint, export_policy, write_card
from shoal.trainer.folder import HIDDEN, Retention, TrainerProgress
from shoal.trainer.learner import Learner
from shoal.trainer.record import latest_metrics

CARD = ModelCard(
    TrainerProgress(RUN, 12, 1), base_model="tiny", environment="sort", digest="cd" * 32,
    ledger_head=LedgerHead(run=RUN, index=99, hash="ef" * 32), metrics={"held_out": 0.875},
)  # fmt: skip
IDS = torch.tensor([[5, 9, 30, 41]])


def export(made: Learner, destination: Path, dtype: str = "float32") -> Path:
    return export_policy(destination, policy_state(made.model), tiny_files(made.model), CARD, dtype)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_it_and_gets_the_same_logits(tmp_path: Path, tied: bool) -> None:
    made = learner(tie_word_embeddings=tied)
    folder = export(made, tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded(IDS).logits, made.model(IDS).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("3142=")["input_ids"]) == "3142="


def test_the_card_says_where_the_model_came_from_as_the_hugging_face_hub_reads_it(tmp_path: Path) -> None:
    folder = export(learner(), tmp_path / "export")
    card = (folder / "README.md").read_text()
    for fact in (RUN, "12 (incarnation 1)", "tiny", "sort", "cd" * 32, "99 / `" + "ef" * 32, "| held_out | 0.875 |"):
        assert fact in card
    read = HubCard.load(folder / "README.md").data
    assert (read.library_name, read.pipeline_tag) == ("transformers", "text-generation")
    assert read.base_model is None, "what the hub does not know"
    (tmp_path / "card.md").write_text(ModelCard(TrainerProgress(RUN, 12), "Qwen/Qwen3-0.6B").as_readme("float32"))
    assert HubCard.load(tmp_path / "card.md").data.base_model == "Qwen/Qwen3-0.6B"
    facts = json.loads((folder / "shoal.json").read_text())
    assert (facts["ledger_head"]["index"], facts["progress"]) == (99, {"run": RUN, "version": 12, "incarnation": 1})


def test_an_older_export_is_replaced_and_what_others_put_there_is_kept(tmp_path: Path) -> None:
    older = learner(seed=0)
    files = {**tiny_files(older.model), "left-over.json": b"{}"}
    export_policy(tmp_path / "export", policy_state(older.model), files, CARD)
    (tmp_path / "export" / "LICENSE").write_text("mine")
    (tmp_path / "export" / ".git").mkdir()
    (tmp_path / "export" / ".git" / "HEAD").write_text("ref: refs/heads/main")
    newer = learner(seed=1)
    export(newer, tmp_path / "export")
    names = {*tiny_files(newer.model), "README.md", "shoal.json", "model.safetensors", "LICENSE", ".git"}
    assert {path.name for path in (tmp_path / "export").iterdir()} == names, "what only the older export had is gone"
    assert (tmp_path / "export" / "LICENSE").read_text() == "mine"
    assert (tmp_path / "export" / ".git" / "HEAD").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(loaded.lm_head.weight, newer.model.lm_head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (tmp_path / "export" / "model.safetensors").stat().st_mode & 0o777 == 0o644, "a model is there to be read"


@pytest.mark.parametrize("there", ["nothing", "export"])
def test_the_folder_that_one_is_in_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str) -> None:
    """It stays the same folder: a shell that is in it, or what is mounted there, sees the files."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    if there == "export":
        export(learner(seed=1), Path())
    made, inode = learner(), here.stat().st_ino
    assert export(made, Path()) == here
    assert torch.equal(AutoModelForCausalLM.from_pretrained(here)(IDS).logits, made.model(IDS).logits)
    assert (here.stat().st_ino, [path.name for path in tmp_path.iterdir()]) == (inode, ["here"])
    assert not [path for path in here.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("there", [False, True])
def test_an_export_that_fails_leaves_no_hidden_folder_and_the_older_one(tmp_path, monkeypatch, there):
    before = sorted(export(learner(), tmp_path / "out").iterdir()) if there else []
    monkeypatch.setattr("shoal.trainer.export.save_tensors", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(ResourceError, match="the disk is full"):
        export(learner(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if there else [])
    assert sorted(tmp_path.glob("out/*")) == before


def test_a_list_of_files_that_somebody_edited_removes_nothing_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "out" / HIDDEN).mkdir(parents=True)
    (tmp_path / "out" / HIDDEN / "model.safetensors").write_text("half")  # by a kill
    folder = export(learner(), tmp_path / "out")
    (tmp_path / "precious.txt").write_text("mine")
    facts = json.loads((folder / "shoal.json").read_text())
    assert sorted(facts["files"]) == sorted(path.name for path in folder.iterdir()), "what was half-written is gone"
    write_card(folder, CARD)
    assert json.loads((folder / "shoal.json").read_text())["files"] == facts["files"]
    for files in (["../precious.txt", "", ".", "..", 3, str(tmp_path / "precious.txt")], None, "text"):
        (folder / "shoal.json").write_text(json.dumps({**facts, "files": files}))
        export(learner(), folder)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_checkpoint_can_be_exported_at_any_time_without_a_hub(tmp_path: Path) -> None:
    made = learner()
    CheckpointStore(tmp_path / "checkpoints", 1).save(made, TrainerProgress(RUN, 3), tiny_files(made.model))
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    metrics.append(2, {"reward_mean": 0.5, "held_out": 0.25})
    metrics.append(3, {"held_out": 0.75})
    metrics.append(4, {"held_out": 0.1})  # of a later version
    folder = export_checkpoint(tmp_path, tmp_path / "out", ModelCard(TrainerProgress("", 0), base_model="tiny"))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(IDS).logits, made.model(IDS).logits)
    facts = json.loads((folder / "shoal.json").read_text())
    assert facts["progress"]["version"] == 3
    assert facts["metrics"] == latest_metrics(metrics, 3) == {"reward_mean": 0.5, "held_out": 0.75}
    assert facts["base_model"] == "tiny"
    assert export_checkpoint(tmp_path, tmp_path / "bare").is_dir()


SCORES = {0: 0.1, 2: 0.8, 4: 0.3, 6: 0.9}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trainer's folder: versions 0, 2, 4 and 5 are kept, 6 has the best score and is gone."""
    folder = tmp_path_factory.mktemp("trained")
    store = CheckpointStore(folder / "checkpoints", Retention(keep=9))
    for version in (0, 2, 4, 5):
        made = learner(seed=version)
        store.save(made, TrainerProgress(RUN, version), tiny_files(made.model))
    metrics = MetricsLog(folder / "metrics.jsonl")
    for version in range(7):
        metrics.append(version, {"loss": version, **({"held_out": SCORES[version]} if version in SCORES else {})})
    return folder


@pytest.mark.parametrize(("which", "version", "why"), [
    ("newest", 5, "the newest that was saved (not measured itself; the run's best is 0.9, of version 6)"),
    ("best", 2, "the best of 3 kept, by held-out score (held-out score 0.8; the run's best is 0.9, of version 6)"),
    (4, 4, "the one that was asked for (held-out score 0.3; the run's best is 0.9, of version 6)"),
])  # fmt: skip
def test_the_newest_the_best_or_any_version_and_the_card_says_why(trained, tmp_path, which, version, why, caplog):
    folder = export_checkpoint(trained, tmp_path / "out", which=which)
    facts = json.loads((folder / "shoal.json").read_text())
    assert (facts["progress"]["version"], facts["chosen"]) == (version, why)
    assert f"| this version is | {why} |" in (folder / "README.md").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.lm_head.weight, learner(seed=version).model.lm_head.weight)
    assert ("not of the run" in caplog.text) == (which == "best")


@pytest.mark.parametrize(
    "mark", ["hi", "[]", "{}", '{"progress": 3}', '{"progress": {"run": "r", "version": true, "incarnation": 0}}', None]
)
def test_a_folder_without_a_whole_mark_is_never_overwritten(tmp_path: Path, mark: str | None) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("mine")
    if mark is not None:
        (tmp_path / "mine" / "shoal.json").write_text(mark)
    for target in (tmp_path / "mine", tmp_path / "mine" / "precious.txt"):
        with pytest.raises(ConfigError, match="is not an export of shoal; choose another folder"):
            export(learner(), target)
    assert (tmp_path / "mine" / "precious.txt").read_text() == "mine"


def test_without_a_checkpoint_a_score_or_that_version_it_says_so(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint in"):
        export_checkpoint(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"no checkpoint of version 6 in .*; those kept are 0, 2, 4, 5"):
        export_checkpoint(trained, tmp_path / "out", which=6)
    made = learner()
    CheckpointStore(tmp_path / "checkpoints", 1).save(made, TrainerProgress(RUN, 3), tiny_files(made.model))
    with pytest.raises(ConfigError, match=r"has a held-out score yet .* leaving out --best"):
        export_checkpoint(tmp_path, tmp_path / "out", which="best")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("card", "said", "unsaid"), [
    pytest.param({"trained_on": "demonstrations"}, "imitate demonstrations", ("reinforcement", "ledger"), id="sft"),
    pytest.param({}, "not trained yet", ("reinforcement", "Trained by"), id="untrained"),
    pytest.param({"base_model": "begun"}, "begun (a local model)", ("\nbase_model:",), id="local base"),
])  # fmt: skip
def test_a_card_claims_no_more_than_there_is(card: dict[str, Any], said: str, unsaid: tuple[str, ...]) -> None:
    made = ModelCard(TrainerProgress(RUN, 1 if card else 0), **card)
    text = made.as_readme("float32")
    assert said in text
    assert not [claim for claim in unsaid if claim in text]


def test_an_export_is_pushed_with_metrics_ledger_and_rollouts(
    hf_hub: HuggingFace, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    run, out, made = tmp_path / "run", tmp_path / "out", learner()
    RunFolder.prepare(run, Recipe.model_validate({"model": {"path": f"org/base@{'a' * 40}#blake3={'b' * 64}"}}))
    CheckpointStore(run / "trainer" / "checkpoints", 1).save(made, TrainerProgress(RUN, 3), tiny_files(made.model))
    MetricsLog(run / "trainer" / "metrics.jsonl").append(3, {"held_out": 0.75})
    (run / "ledger.jsonl").write_text("{}\n")
    (run / "trainer" / "rollouts").mkdir()
    pq.write_table(pa.table({"reward": [1.0]}), run / "trainer" / "rollouts" / "step-000000.parquet")
    pushed = ("export", run, out, "--push", "org/made")
    for name, sentence in (("made", "give the name of a repository"), ("org/x@main", "give the name of a repository")):
        assert sentence in told(capsys, 2, "export", run, out, "--push", name).err
    assert "which does not know you: log in (hf auth login), or set HF_TOKEN" in told(capsys, 2, *pushed).err
    assert not out.exists(), "that is asked before the export"
    assert "--private goes with --push" in told(capsys, 2, "export", run, out, "--private").err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    said = told(capsys, 0, *pushed, "--private", "--rollouts").out
    (out / "mine.txt").write_text("not of the export")
    assert f"to {hf_hub.url}/org/made\n" in said
    repository = hf_hub.repositories["models", "org/made"]
    files = repository.commits[repository.refs["main"]]
    listed = json.loads((out / "shoal.json").read_text())["files"]
    assert set(files) == {*listed, "metrics.jsonl", "ledger.jsonl", ".gitattributes"}
    assert files["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert b'from_pretrained("org/made")' in files["README.md"]
    assert b"\nbase_model: org/base\n" in files["README.md"]
    assert f"| trained from | org/base@{'a' * 40} |".encode() in files["README.md"]
    assert repository.private
    rollouts = hf_hub.repositories["datasets", "org/made-rollouts"]
    assert rollouts.private
    (row,) = pq.read_table(*locate(Path("org/made-rollouts"))).to_pylist()
    assert row == {"reward": 1.0}
    told(capsys, 0, *pushed)
    assert "mine.txt" not in repository.commits[repository.refs["main"]]
    repository.private = False
    assert "is there already, and public: make it private" in told(capsys, 2, *pushed, "--private").err
    hf_hub.failing = 403
    assert "does not allow this for the model org/made (HTTP 403)" in told(capsys, 2, *pushed).err
