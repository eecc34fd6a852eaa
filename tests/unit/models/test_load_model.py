"""Loading a model: the built-in one, folders that are wrong, and models that only their files describe."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.errors import ModelError
from shoal.models import model_folder
from shoal.models.load import load_model, model_from_files
from shoal.models.state import apply_state, policy_state

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
    assert loaded.eos_token_id == loaded.config.eos_token_id == 1
    assert not loaded.model.training


def test_files_and_weights_make_the_same_model_as_the_folder():
    loaded = load_model("tiny")
    rebuilt = model_from_files(loaded.files)
    apply_state(rebuilt, policy_state(loaded.model))
    ids = torch.tensor([loaded.tokenizer.encode("314159=")])
    assert torch.equal(rebuilt(ids).logits, loaded.model(ids).logits)


def test_a_number_type_can_be_chosen():
    assert load_model("tiny", dtype="bfloat16").model.dtype == torch.bfloat16
    with pytest.raises(ModelError, match="unknown number type 'int3'; there are float32"):
        load_model("tiny", dtype="int3")


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
