"""Adapters in PEFT's format, read and written. Where `peft` is installed, it is the judge of both."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit import Capture
from kit.cli import TINY, told
from kit.hf import HuggingFace
from shoal.errors import ConfigError, ModelError
from shoal.models import model_folder
from shoal.models.folder import adapter_of, model_digest
from shoal.models.load import adapted, load_model
from shoal.models.lora import AdapterShape
from shoal.models.state import policy_state
from shoal.run.folder import RunFolder
from shoal.trainer.export import ModelCard, export_policy
from shoal.trainer.folder import TrainerProgress
from shoal.trainer.learner import starting_model
from shoal.trainer.settings import TrainerSettings

BASE = model_folder("tiny")
LAYER, IDS = "model.layers.0.self_attn.q_proj", torch.tensor([[5, 9, 30, 41]])
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
         "base_model_name_or_path": str(BASE)}  # fmt: skip


def pair(layer: str = LAYER, rank: int = 2, rows: int = 64) -> dict[str, torch.Tensor]:
    """A is 1 at [0, 3] and B at [5, 0]: their product has one entry."""
    down, up = torch.zeros(rank, 64), torch.zeros(rows, rank)
    down[0, 3], up[5, 0] = 1.0, 1.0
    return {f"base_model.model.{layer}.lora_A.weight": down, f"base_model.model.{layer}.lora_B.weight": up}


def adapters(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, **changes}))
    save_file(pair() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def test_adapters_are_merged_into_the_base_that_they_name(tmp_path: Path) -> None:
    folder, plain = adapters(tmp_path / "adapters"), load_model("tiny").model.state_dict()
    merged = load_model(folder).model.state_dict()
    change = merged[f"{LAYER}.weight"] - plain[f"{LAYER}.weight"]
    assert change[5, 3].item() == pytest.approx(8 / 2)
    assert [name for name in plain if not torch.equal(plain[name], merged[name])] == [f"{LAYER}.weight"]
    assert change.count_nonzero() == 1
    adapters(tmp_path / "adapters", base_model_name_or_path="/elsewhere")
    assert torch.equal(load_model(f"{folder}+tiny").model.state_dict()[f"{LAYER}.weight"], merged[f"{LAYER}.weight"])
    assert len({model_digest(name) for name in (f"{folder}+tiny", "tiny", f"{adapters(tmp_path / 'b')}+tiny")}) == 3


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"use_dora": True}, "has use_dora, and only plain LoRA is read: merge them with peft"),
    ({"use_rslora": True}, "has use_rslora"), ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
    ({"rank_pattern": {"q_proj": 4}}, "has rank_pattern"), ({"alpha_pattern": {"q_proj": 4}}, "has alpha_pattern"),
    ({"bias": "all"}, "has bias = 'all'"), ({"peft_type": "IA3"}, "has peft_type = 'IA3'"), ({"r": 0}, "has r = 0"),
    ({"init_lora_weights": "pissa"}, "has init_lora_weights = 'pissa'"), ({"r": None}, "is no configuration of LoRA"),
    ({"base_model_name_or_path": None}, r"names no base_model_name_or_path: give it as .*\+BASE"),
    ({"base_model_name_or_path": "/none"}, r"the base of the adapters .*: there is no model folder /none.*; another"),
    ({"r": 4}, r"have shapes \[2, 64\] and \[64, 2\] at .*, not of rank 4"),
    ({"tensors": pair("model.layers.9.q_proj")}, "layers.9.q_proj, no linear layer of this base: give ADAPTERS"),
    ({"tensors": pair("lm_head", rows=96)}, "lm_head, the output layer of this base"),
    ({"tensors": pair(rows=63)}, "map 64 to 63 at .*q_proj, and this base 64 to 64"),
    ({"tensors": {"base_model.model.x.lora_embedding_A": torch.zeros(1)}}, "have base_model.model.x.lora_embedding_A"),
    ({"tensors": {f"base_model.model.{LAYER}.lora_A.weight": torch.zeros(2, 64)}}, "where a pair of lora_A.weight"),
])  # fmt: skip
def test_other_adapters_are_refused_in_words(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_model(adapters(tmp_path / "a", **changes))


def test_no_adapters_have_no_base(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no adapters in PEFT's format .*: leave \+tiny out"):
        load_model(f"{BASE}+tiny")
    inner = adapters(tmp_path / "inner")
    with pytest.raises(ModelError, match="holds adapters itself: merge those first"):
        load_model(f"{adapters(tmp_path / 'outer')}+{inner}")


def full_rank(folder: Path) -> Path:
    """Adapters of every q_proj of the tiny model, with values of their own."""
    layers = {name.removesuffix(".weight") for name in load_model("tiny").model.state_dict() if "q_proj.weight" in name}
    tensors = {key: torch.randn_like(value) for layer in sorted(layers) for key, value in pair(layer).items()}
    return adapters(folder, tensors)


def settings(**changes: Any) -> TrainerSettings:
    lora = {"rank": 2, "alpha": 8.0, "targets": ("q_proj",), **changes.pop("lora", {})}
    return TrainerSettings.model_validate({"lora": lora, "device": "cpu", **changes})


def test_adapters_are_trained_further_if_the_settings_are_theirs(tmp_path: Path) -> None:
    folder = full_rank(tmp_path / "a")
    stored, begun = load_file(folder / "adapter_model.safetensors"), starting_model(str(folder), settings())
    assert torch.equal(begun.model.get_submodule(LAYER).lora_a, stored[f"base_model.model.{LAYER}.lora_A.weight"])
    assert torch.equal(begun.model.get_submodule(LAYER).weight, load_model("tiny").model.get_submodule(LAYER).weight)
    torch.testing.assert_close(begun.model(IDS).logits, load_model(folder).model(IDS).logits)
    for changes in ({"rank": 4}, {"alpha": 4.0}, {"targets": ("q_proj", "v_proj")}):
        with pytest.raises(ModelError, match=r'rank = 2, alpha = 8, targets = \["q_proj"\]\): set these'):
            starting_model(str(folder), settings(lora=changes))
    with pytest.raises(ModelError, match=r"trainer.objective.kl: its reference would be the base"):
        starting_model(str(folder), settings(objective={"kl": 0.1}))
    with pytest.raises(ModelError, match=r"have none for model.layers.1.self_attn.q_proj"):
        starting_model(str(adapters(tmp_path / "few")), settings())


def exported(folder: Path) -> tuple[Any, Path]:
    """A model with adapters that were trained, and their export."""
    loaded = adapted(load_model("tiny"), AdapterShape(2, 8.0, ("q_proj", "down_proj")))
    for name, weight in loaded.model.named_parameters():
        if name.endswith("lora_b"):
            weight.data.copy_(torch.randn_like(weight))
    card = ModelCard(TrainerProgress("run", 1), base_model="tiny")
    return loaded, export_policy(folder, policy_state(loaded.model), loaded.files, card, adapters_of=str(BASE))


def test_exported_adapters_come_back_as_they_were(tmp_path: Path) -> None:
    made, folder = exported(tmp_path / "out")
    names = {"adapter_config.json", "adapter_model.safetensors", "README.md", "shoal.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert "library_name: peft" in (folder / "README.md").read_text()
    wanted = settings(lora={"targets": ("q_proj", "down_proj")})
    again = starting_model(str(folder), wanted).model
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in made.model.state_dict().items())
    plain = export_policy(folder, policy_state(made.model), made.files, ModelCard(TrainerProgress("run", 1)))
    assert not (plain / "adapter_config.json").exists(), "one export replaces the other"
    assert adapter_of(plain) is None
    with pytest.raises(ConfigError, match="--adapter: this run trains all weights"):
        export_policy(tmp_path / "no", policy_state(load_model("tiny").model), load_model("tiny").files,
                      ModelCard(TrainerProgress("run", 1)), adapters_of="x")  # fmt: skip


def test_a_run_pins_adapters_and_their_base(hf_hub: HuggingFace, tmp_path: Path, capsys: Capture) -> None:
    base = hf_hub.put_folder("org/tiny", BASE)
    first = hf_hub.put_folder(
        "org/adapters", adapters(tmp_path / "a", base_model_name_or_path="org/tiny", revision=base)
    )
    hf_hub.put_folder("org/tiny", BASE, **{"new.json": b"{}"})
    lora = [text for each in ("rank=2", "alpha=8", 'targets=["q_proj"]') for text in ("--set", f"trainer.lora.{each}")]
    given = ("run", TINY, tmp_path / "run", "--prepare", "--set", "model.path=org/adapters")
    told(capsys, 0, *given)
    path = RunFolder.open(tmp_path / "run").recipe.model.path
    adapter_part, base_part = path.split("+")
    assert adapter_part.startswith(f"org/adapters@{first}#blake3=")
    assert base_part.startswith(f"org/tiny@{base}#blake3=")
    hf_hub.failing = 503
    told(capsys, 0, *given)
    hf_hub.failing = 0
    assert torch.equal(
        load_model(path).model.state_dict()[f"{LAYER}.weight"],
        load_model(tmp_path / "a").model.state_dict()[f"{LAYER}.weight"],
    )
    told(capsys, 0, "run", TINY, "--dry-run", "--set", "model.path=org/adapters", *lora)
    said = told(capsys, 2, "run", TINY, "--dry-run", "--set", f"model.path={tmp_path / 'a'}", *lora[2:]).err
    assert "trainer.lora differs from the adapters in" in said


def test_peft_agrees_with_what_is_read_and_written(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft, to compare with it")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(BASE)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(base, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(load_model(f"{tmp_path / 'theirs'}+tiny").model(IDS).logits, theirs(IDS).logits)
    made, folder = exported(tmp_path / "ours")
    read = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(read(IDS).logits, made.model(IDS).logits)
    torch.testing.assert_close(read.merge_and_unload()(IDS).logits, load_model(folder).model(IDS).logits)
