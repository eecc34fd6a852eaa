"""A policy is compared with its manifest without memory: whatever shoal publishes passes, anything else does not."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.models import model_folder
from shoal.models.load import adapted, check_policy, load_model, model_from_files
from shoal.models.lora import ADAPTER_FILE, AdapterShape
from shoal.models.state import TYPE_NAMES, policy_state, policy_views
from shoal.models.weights import model_size
from shoal.protocol import Entry, TensorView
from shoal.runtime.limits import UNLIMITED_BYTES
from shoal.shardcast import Content

TINY = model_folder("tiny")
SHAPE = AdapterShape(4, 8.0, ("q_proj", "down_proj"))
KINDS = (
    "bloom",
    "falcon_mamba",
    "gemma3_text",
    "gpt2",
    "mamba2",
    "mixtral",
    "mpt",
    "nanochat",
    "opt",
    "phi3",
    "rwkv",
    "zamba2",
)


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


def test_check_leaves_no_hooks_behind():
    loaded = load_model("tiny")
    check(loaded.files, entries_of(loaded.model))
    assert not nn.modules.module._global_module_registration_hooks
    assert not nn.modules.module._global_parameter_registration_hooks


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


def test_folder_without_weights_announces_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_size(tmp_path, "float32").payload_bytes == 0
