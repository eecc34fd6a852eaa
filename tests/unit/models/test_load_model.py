"""Loading models, and adapters on them: what is refused before it takes memory, what learns, travels and is merged."""

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
from shoal.models import model_folder, read_files
from shoal.models.folder import model_size
from shoal.models.load import adapted, check_policy, load_model, model_from_files
from shoal.models.lora import ADAPTER_FILE, AdapterShape, adapter_shape, add_adapters, merged, without_adapters
from shoal.models.state import TYPE_NAMES, apply_state, policy_state, policy_views
from shoal.models.tiny import build_tiny
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


# Adapters: the function is unchanged at first, only they learn, and merging them changes nothing

IDS = torch.arange(10)[None]


def with_adapters(seed: int = 0):
    model = build_tiny(seed)
    add_adapters(model, SHAPE)
    return model


def trained(model, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("lora_a", "lora_b")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def test_at_first_the_model_computes_what_it_did_and_only_adapters_get_a_gradient():
    model = with_adapters()
    assert torch.equal(model(IDS).logits, build_tiny(0)(IDS).logits)
    model(IDS).logits.sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name in policy_state(model) if name.endswith(("lora_a", "lora_b"))}
    with pytest.raises(ModelError, match="already"):
        add_adapters(model, SHAPE)


def test_every_start_begins_with_the_same_adapters():
    first, second = policy_state(with_adapters(0)), policy_state(with_adapters(1))
    downs = [name for name in first if name.endswith("lora_a")]
    assert len(downs) == 2 * 3
    assert all(torch.equal(first[name], second[name]) for name in downs)
    assert len({float(first[name].sum()) for name in downs}) == len(downs)


def test_the_base_is_there_for_as_long_as_the_context_lasts():
    model = trained(with_adapters())
    expected = build_tiny(0)(IDS).logits
    with without_adapters(model):
        assert torch.equal(model(IDS).logits, expected)
    assert not torch.allclose(model(IDS).logits, expected)


def test_merged_is_an_ordinary_model_that_computes_the_same():
    source = trained(with_adapters())
    tensors, files = merged(policy_state(source), {**read_files(TINY), ADAPTER_FILE: SHAPE.as_file()})
    plain = build_tiny(5)
    assert ADAPTER_FILE not in files
    apply_state(plain, tensors)
    torch.testing.assert_close(plain(IDS).logits, source(IDS).logits, atol=2e-5, rtol=1e-5)
    assert not torch.allclose(plain(IDS).logits, build_tiny(0)(IDS).logits)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"rank": "many", "alpha": 1, "targets": ["q_proj"]}',
     b'{"rank": 0, "alpha": 1, "targets": ["a"]}', b'{"rank": 4, "alpha": -1, "targets": ["a"]}',
     b'{"rank": 4, "alpha": 1, "targets": []}',
     b'{"rank": 99999999, "alpha": 1, "targets": ["q_proj"]}'],
)  # fmt: skip
def test_an_unusable_file_is_refused(data: bytes):
    with pytest.raises(ModelError, match=r"adapter\.json"):
        adapter_shape({ADAPTER_FILE: data})


@pytest.mark.parametrize("target", ["lm_head", "query", "embed_tokens"])
def test_a_layer_that_cannot_have_one_is_named_with_those_that_can(target: str):
    with pytest.raises(ModelError, match=rf"'{target}'.*q_proj"):
        add_adapters(build_tiny(0), AdapterShape(4, 8.0, (target,)))


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
