"""Loading models: from folders, from the files of a policy, and what is refused before it takes memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shoal.errors import ModelError
from shoal.models import model_folder
from shoal.models.folder import model_size
from shoal.models.load import adapted, check_policy, load_model, model_from_files
from shoal.models.lora import ADAPTER_FILE, AdapterShape
from shoal.models.state import TYPE_NAMES, policy_state, policy_views
from shoal.protocol import Entry, TensorView
from shoal.runtime.limits import UNLIMITED_BYTES
from shoal.shardcast import Content

TINY = model_folder("tiny")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_built_in_policy_is_what_its_provenance_says(capfd):
    provenance = json.loads((TINY / "provenance.json").read_text())
    assert hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest() == provenance["sha256"]
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 2_000_000
    loaded = load_model("tiny")
    assert capfd.readouterr() == ("", ""), "nothing is drawn on the terminal"
    assert sum(p.numel() for p in loaded.model.parameters()) == provenance["weights"]
    assert loaded.eos_token_id == loaded.model.config.eos_token_id == 1
    assert not loaded.model.training


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 1000), r"model folder .* does not load"),
        (lambda folder: rewritten(folder, lambda tensors: tensors.pop("model.norm.weight")),
         r"do not fit its config\.json.*norm"),  # an error, not a random one
        (lambda folder: edit_config(folder, intermediate_size=100), r"does not load|do not fit"),
        (as_pickle, "does not load"),
        (lambda folder: edit_config(folder, final_logit_softcapping=30.0),
         "final_logit_softcapping, which transformers does not look at in a model of type"),
        (lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
         r"holds adapters \(adapter_config\.json\): merge them"),
    ],
    ids=["cut short", "a weight missing", "of another size", "a pickle", "an unknown rescaling", "other adapters"],
)  # fmt: skip
def test_what_would_not_be_the_model_does_not_load(copy, spoil, said):
    spoil(copy)
    with pytest.raises(ModelError, match=said):
        load_model(copy)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"model_type": kind}, "no known causal language model") for kind in ("clip", None, ["qwen3"])),
        ({"model_type": "unheard-of"}, "no known causal language model .model_type 'unheard-of'"),
        ({"num_attention_heads": "many"}, "config.json"), ({"hidden_size": -1}, "config.json"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_used_is_refused(copy, changes, said):
    edit_config(copy, **changes)
    with pytest.raises(ModelError, match=said):
        model_from_files({name: (copy / name).read_bytes() for name in ("config.json", "tokenizer.json")})


SHAPE = AdapterShape(4, 8.0, ("q_proj", "down_proj"))
KINDS = (
    "bloom", "falcon_mamba", "gemma3_text", "gpt2", "mamba2", "mixtral", "mpt", "nanochat", "opt", "phi3", "rwkv",
    "zamba2",
)  # fmt: skip


def entries_of(model: nn.Module, dtype: str = "") -> list[Entry]:
    return [
        Entry(
            name=name, type="tensor", offset=0, size_bytes=tensor.nbytes, shape=tuple(tensor.shape),
            dtype=dtype or TYPE_NAMES[tensor.dtype],
        )
        for name, tensor in policy_state(model).items()
    ]  # fmt: skip


def check(files: Mapping[str, bytes], entries: list[Entry], dtype: str = "float32") -> None:
    check_policy(files, entries, dtype, UNLIMITED_BYTES)


@pytest.mark.parametrize("kind", KINDS)
def test_published_model_passes(kind):
    files = {"config.json": json.dumps({"model_type": kind}).encode()}
    with torch.device("meta"):
        model = model_from_files(files, device="meta")
    check(files, entries_of(model))
    with pytest.raises(ModelError, match="these weights are for another model: missing"):
        check(files, entries_of(model)[1:])


def test_weights_travel_in_what_the_model_can_hold_and_tied_ones_once():
    loaded = load_model("tiny")
    check(loaded.files, entries_of(loaded.model, dtype="BF16"), "float32")
    check(loaded.files, entries_of(loaded.model, dtype="BF16"), "bfloat16")
    with pytest.raises(ModelError, match=r"weights are never rounded on the way"):
        check(loaded.files, entries_of(loaded.model), "bfloat16")
    config = {**json.loads((TINY / "config.json").read_text()), "tie_word_embeddings": True}
    files = {"config.json": json.dumps(config).encode()}
    tied = model_from_files(files)
    assert "lm_head.weight" not in policy_state(tied)
    check(files, entries_of(tied))


def test_adapters_pass_and_those_of_another_rank_do_not():
    loaded = adapted(load_model("tiny"), SHAPE)
    check(loaded.files, entries_of(loaded.model))
    other = {**loaded.files, ADAPTER_FILE: AdapterShape(8, 8.0, SHAPE.targets).as_file()}
    with pytest.raises(ModelError, match=r"weight .*lora_a is torch\.float32\[4, "):
        check(other, entries_of(loaded.model))


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("shape", [None, SHAPE], ids=["plain", "adapters"])
def test_announced_size_holds_every_version(dtype, bytes_each, shape):
    loaded = load_model("tiny", dtype) if shape is None else adapted(load_model("tiny", dtype), shape)
    views: list[TensorView] = list(policy_views(loaded.model).values())
    published = Content.of(loaded.files, views).size_bytes
    announced = model_size(TINY, dtype, *((shape.rank, shape.targets) if shape else ()))
    weights = sum(tensor.numel() for name, tensor in policy_state(loaded.model).items() if "lora" not in name)
    assert announced.parameters == weights
    assert weights * bytes_each < published <= announced.payload_bytes < published + 20 * 2**20


EXAMPLE = Path(__file__).parents[3] / "examples" / "one_file_rl.py"


def held_out_scores(*arguments: str) -> list[float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), "--evaluate-every", "8", "--steps", "8", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [float(score) for score in re.findall(r"held-out ([\d.]+)", done.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--staleness", "0"], ["--staleness", "2"], ["--shuffle-rewards"]])
def test_eight_steps_lift_the_greedy_held_out_score_by_fifteen_points_unless_rewards_are_shuffled(how):
    before, after = held_out_scores(*how)
    assert before == pytest.approx(0.309, abs=0.02)
    assert after < before + 0.05 if how == ["--shuffle-rewards"] else after > before + 0.15
