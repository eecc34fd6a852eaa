"""Loading models: from folders, from the files of a policy, and what is refused before it takes memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
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
from shoal.models.state import TYPE_NAMES, apply_state, policy_state, policy_views
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


def test_the_built_in_policy_is_what_its_provenance_says():
    provenance = json.loads((TINY / "provenance.json").read_text())
    assert hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest() == provenance["sha256"]
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 2_000_000
    loaded = load_model("tiny")
    assert sum(p.numel() for p in loaded.model.parameters()) == provenance["weights"]
    assert loaded.eos_token_id == loaded.model.config.eos_token_id == 1
    assert not loaded.model.training


def test_files_and_weights_make_the_same_model_as_the_folder():
    loaded = load_model("tiny")
    rebuilt = model_from_files(loaded.files)
    apply_state(rebuilt, policy_state(loaded.model))
    ids = torch.tensor([loaded.tokenizer.encode("314159=")])
    assert torch.equal(rebuilt(ids).logits, loaded.model(ids).logits)


def test_loading_draws_nothing_on_the_terminal(capfd):
    load_model("tiny")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_weights_cut_short_do_not_load(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model folder .* does not load"):
        load_model(copy)


def test_a_missing_weight_is_an_error_not_a_random_one(copy):
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"do not fit its config\.json.*norm"):
        load_model(copy)


def test_weights_of_another_size_do_not_load(copy):
    edit_config(copy, intermediate_size=100)
    with pytest.raises(ModelError, match=r"does not load|do not fit"):
        load_model(copy)


def test_a_pickle_is_not_an_alternative_to_safetensors(copy):
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="does not load"):
        load_model(copy)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "clip"}, "no known causal language model"),
        ({"model_type": "unheard-of"}, "no known causal language model .model_type 'unheard-of'"),
        ({"model_type": None}, "no known causal language model"),
        ({"model_type": ["qwen3"]}, "no known causal language model"),
        ({"num_attention_heads": "many"}, "config.json"),
        ({"hidden_size": -1}, "config.json"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(copy, changes, said):
    edit_config(copy, **changes)
    files = {name: (copy / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    with pytest.raises(ModelError, match=said):
        model_from_files(files)


def test_a_rescaling_that_transformers_does_not_know_of_is_refused_rather_than_left_out(copy):
    edit_config(copy, final_logit_softcapping=30.0)
    with pytest.raises(
        ModelError, match="final_logit_softcapping, which transformers does not look at in a model of type"
    ):
        load_model(copy)


def test_adapters_of_another_library_in_a_folder_are_refused(copy):
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "somewhere/else", "peft_type": "LORA"}')
    with pytest.raises(ModelError, match=r"holds adapters \(adapter_config\.json\): merge them"):
        load_model(copy)


def test_code_that_a_folder_names_is_left_aside(copy):
    (copy / "modeling_own.py").write_text("raise SystemExit('this was run')\n")
    edit_config(copy, auto_map={"AutoModelForCausalLM": "modeling_own.Model", "AutoConfig": "modeling_own.Config"})
    assert type(load_model(copy).model).__module__ == "transformers.models.qwen3.modeling_qwen3"


SHAPE = AdapterShape(4, 8.0, ("q_proj", "down_proj"))
KINDS = (
    "bloom", "falcon_mamba", "gemma3_text", "gpt2", "mamba2", "mixtral", "mpt", "nanochat", "opt", "phi3", "rwkv",
    "zamba2",
)  # fmt: skip


def entries_of(model: nn.Module, **changed: str) -> list[Entry]:
    state = policy_state(model)
    return [
        Entry(
            name=name, type="tensor", offset=0, size_bytes=tensor.nbytes, shape=tuple(tensor.shape),
            dtype=changed.get("dtype") or TYPE_NAMES[tensor.dtype],
        )
        for name, tensor in state.items()
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


def test_tied_weights_travel_once_and_pass():
    config = {**json.loads((TINY / "config.json").read_text()), "tie_word_embeddings": True}
    files = {"config.json": json.dumps(config).encode()}
    model = model_from_files(files)
    assert "lm_head.weight" not in policy_state(model)
    check(files, entries_of(model))


def test_weights_travel_in_what_the_model_can_hold():
    loaded = load_model("tiny")
    check(loaded.files, entries_of(loaded.model, dtype="BF16"), "float32")
    check(loaded.files, entries_of(loaded.model, dtype="BF16"), "bfloat16")
    with pytest.raises(ModelError, match=r"weights are never rounded on the way"):
        check(loaded.files, entries_of(loaded.model), "bfloat16")


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
@pytest.mark.parametrize("staleness", ["0", "2"])
def test_eight_steps_lift_the_greedy_held_out_score_by_fifteen_points(staleness):
    before, after = held_out_scores("--staleness", staleness)
    assert before == pytest.approx(0.309, abs=0.02)
    assert after > before + 0.15


@pytest.mark.slow
def test_shuffled_rewards_lift_nothing():
    before, after = held_out_scores("--shuffle-rewards")
    assert after < before + 0.05
