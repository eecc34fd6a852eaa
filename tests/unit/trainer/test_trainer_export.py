"""Exports: loadable by plain transformers, whole or not there, nobody else's folder touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from trainer_stubs import RUN, learner, tiny_files
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.errors import CheckpointError, ConfigError
from shoal.models.state import policy_state
from shoal.protocol import LedgerHead
from shoal.runtime.metrics import MetricsLog
from shoal.trainer.checkpoint import CheckpointStore, Progress
from shoal.trainer.export import ModelCard, export_checkpoint, export_policy, latest_metrics
from shoal.trainer.learner import Learner

CARD = ModelCard(
    Progress(RUN, 12, 1), base_model="tiny", environment="sort", digest="cd" * 32,
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


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    made = learner()
    loaded = AutoModelForCausalLM.from_pretrained(export(made, tmp_path / "export", "bfloat16"))
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, made.model.lm_head.weight.to(torch.bfloat16))


def test_the_card_says_where_the_model_came_from(tmp_path: Path) -> None:
    folder = export(learner(), tmp_path / "export")
    card = (folder / "README.md").read_text()
    for fact in (RUN, "12 (incarnation 1)", "tiny", "sort", "cd" * 32, "99 / `" + "ef" * 32, "| held_out | 0.875 |"):
        assert fact in card
    assert card.startswith("---\nlibrary_name: transformers")
    facts = json.loads((folder / "shoal.json").read_text())
    assert facts["ledger_head"]["index"] == 99
    assert facts["progress"] == {"run": RUN, "version": 12, "incarnation": 1}


def test_an_older_export_is_replaced_whole(tmp_path: Path) -> None:
    export(learner(seed=0), tmp_path / "export")
    (tmp_path / "export" / "left-over").write_text("old")
    newer = learner(seed=1)
    export(newer, tmp_path / "export")
    assert not (tmp_path / "export" / "left-over").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(loaded.lm_head.weight, newer.model.lm_head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (tmp_path / "export" / "model.safetensors").stat().st_mode & 0o777 == 0o644, "a model is there to be read"


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    assert (export(learner(), tmp_path / "export") / "config.json").is_file()


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_not_an_export_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "mine"
    if kind == "folder":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    else:
        target.write_text("mine")
    with pytest.raises(ConfigError, match="choose another folder"):
        export(learner(), target)
    assert (target / "notes.txt" if kind == "folder" else target).read_text() == "mine"


def test_a_checkpoint_can_be_exported_at_any_time_without_a_hub(tmp_path: Path) -> None:
    made = learner()
    CheckpointStore(tmp_path / "checkpoints", 1).save(made, Progress(RUN, 3), tiny_files(made.model))
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    metrics.append(2, {"reward_mean": 0.5, "held_out": 0.25})
    metrics.append(3, {"held_out": 0.75})
    metrics.append(4, {"held_out": 0.1})  # of a later version
    folder = export_checkpoint(tmp_path, tmp_path / "out", ModelCard(Progress("", 0), base_model="tiny"))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(IDS).logits, made.model(IDS).logits)
    facts = json.loads((folder / "shoal.json").read_text())
    assert facts["progress"]["version"] == 3
    assert facts["metrics"] == latest_metrics(metrics, 3) == {"reward_mean": 0.5, "held_out": 0.75}
    assert facts["base_model"] == "tiny"
    assert export_checkpoint(tmp_path, tmp_path / "bare").is_dir()


def test_without_a_checkpoint_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        export_checkpoint(tmp_path, tmp_path / "out")
