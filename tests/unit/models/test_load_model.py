"""Folders, tokenizers, weights as they travel; loading models, and adapters on them: what is refused before it takes
memory, what learns, travels and is merged.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from kit.tables import table
from kit.tiny import build_tiny
from shoal.errors import ModelError
from shoal.models import TextTokenizer, as_numpy, eos_token_ids, from_numpy, model_folder, read_files
from shoal.models.folder import model_size
from shoal.models.load import adapted, check_policy, load_model, model_from_files
from shoal.models.lora import ADAPTER_FILE, AdapterShape, adapter_shape, add_adapters, merged, without_adapters
from shoal.models.quantize import INT8, Quantization, quantized
from shoal.models.state import TORCH_TYPES, TYPE_NAMES, apply_state, policy_state, policy_views, to_torch, to_view
from shoal.protocol import Entry, TensorView
from shoal.runtime.limits import UNLIMITED_BYTES
from shoal.shardcast import Content

TINY = model_folder("tiny")
FILES = read_files(TINY)
TOKENIZER = TextTokenizer(FILES)
KNOWN = "\n 0123456789abcxyzABCXYZ+-*/=?!.,:;()[]{}<>|@#$%^&_'\""


@given(st.text(alphabet=KNOWN))
def test_text_survives_the_round_trip_one_token_per_character(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_decode_removes_one_final_end_and_transformers_reads_the_same_tokenizer():
    one, two, eos, pad = *TOKENIZER.encode("12"), TOKENIZER.eos_token_id, 0
    said = {(one, two, eos): "12", (one, eos, two, eos): "1<eos>2", (one, pad, two): "1<pad>2", (eos, eos): "<eos>"}
    for ids, text in {**said, (eos,): "", (): ""}.items():
        assert TOKENIZER.decode(ids) == text
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("tiny"), local_files_only=True)
    assert tuple(tokenizer("314= x").input_ids) == TOKENIZER.encode("314= x")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)
    assert tokenizer.decode(TOKENIZER.encode("3 1 . 4")) == "3 1 . 4"


def test_the_end_of_sequence_is_found_where_models_put_it():
    assert eos_token_ids({"config.json": b'{"eos_token_id": 7}'}) == (7,)
    assert eos_token_ids({"config.json": b"{}", "generation_config.json": b'{"eos_token_id": [5, 6, 5]}'}) == (5, 6)
    config, added = json.dumps({"eos_token": {"content": "<e>"}}).encode(), [{"id": 3, "content": "<e>"}]
    named = {"tokenizer_config.json": config, "tokenizer.json": json.dumps({"added_tokens": added}).encode()}
    assert eos_token_ids({"config.json": b'{"eos_token_id": null}', **named}) == (3,)
    with pytest.raises(ModelError, match="17 end-of-sequence tokens; at most 16"):
        eos_token_ids({"config.json": json.dumps({"eos_token_id": [*range(17)]}).encode()})
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        eos_token_ids({"config.json": b'{"eos_token_id": null}'})


@pytest.mark.parametrize("damage", [b"{", b"[]", b"{}", b"\xff\xfe"])
def test_a_damaged_file_is_said_to_be_one(damage):
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        TextTokenizer({**FILES, "tokenizer.json": damage})
    with pytest.raises(ModelError, match=r"config\.json is no JSON|no end-of-sequence token"):
        eos_token_ids({"config.json": damage})


def test_missing_folders_and_files(tmp_path):
    with pytest.raises(ModelError, match=r"no model folder .*nowhere.*built-in name \(tiny\)"):
        model_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        model_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert model_folder(tmp_path) == tmp_path
    for read in (lambda: read_files(tmp_path), lambda: TextTokenizer({"config.json": b"{}"})):
        with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
            read()


@pytest.mark.parametrize("tied", [False, True])
def test_applied_weights_give_equal_outputs_and_tied_weights_are_stored_once(tied):
    source, target = (build_tiny(seed, tie_word_embeddings=tied) for seed in (0, 1))
    views, ids, head = policy_views(source), torch.arange(10)[None], target.get_output_embeddings().weight
    before = head.data_ptr()
    assert not torch.equal(source(ids).logits, target(ids).logits)
    apply_state(target, views)
    assert torch.equal(source(ids).logits, target(ids).logits)
    assert target.get_output_embeddings().weight.data_ptr() == before
    assert ("lm_head.weight" in views) != tied
    assert (before == target.get_input_embeddings().weight.data_ptr()) == tied


@pytest.mark.parametrize(("change", "said"), [
    (lambda views: views.pop("lm_head.weight"), r"missing \['lm_head.weight'\]"),
    (lambda views: views.update(extra=views["lm_head.weight"]), r"unknown \['extra'\]"),
    (lambda views: views.update({"model.norm.weight": from_numpy("x", np.zeros(63, np.float32))}),
     r"model.norm.weight is torch.float32\[63\], the model's is torch.float32\[64\]"),
    (lambda views: views.update({"model.norm.weight": from_numpy("x", np.zeros(64, np.float64))}),
     r"model.norm.weight is torch.float64\[64\]"),
])  # fmt: skip
def test_misfitting_weights_are_refused_without_changes(change, said):
    target, views = build_tiny(1), policy_views(build_tiny(0))
    before = {name: tensor.clone() for name, tensor in policy_state(target).items()}
    change(views)
    with pytest.raises(ModelError, match=said):
        apply_state(target, views)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy_state(target).items())


@given(st.sampled_from(sorted(TORCH_TYPES)), st.lists(st.integers(0, 4), max_size=3))
def test_every_type_and_shape_survives(dtype, shape):
    tensor = (torch.rand(shape) * 3).to(TORCH_TYPES[dtype])
    view = to_view("w", tensor)
    again, array = to_torch(view), as_numpy(view)
    assert (view.dtype, view.shape, again.dtype, array.shape) == (dtype, tuple(shape), tensor.dtype, tuple(shape))
    assert torch.equal(again, tensor)
    assert not array.flags.writeable
    assert bytes(from_numpy("w", array, dtype).data) == bytes(view.data)


def test_transposed_tensors_keep_their_logical_order_and_bfloat16_must_be_named():
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert as_numpy(to_view("w", tensor)).tolist() == tensor.tolist()
    assert as_numpy(from_numpy("w", tensor.numpy())).tolist() == tensor.tolist()
    bits = np.array([0x3F80], dtype=np.uint16)
    assert to_torch(from_numpy("w", bits, "BF16")).item() == 1.0
    with pytest.raises(ValueError, match="does not travel"):
        from_numpy("w", bits)
    with pytest.raises(ValueError, match="does not travel as F32"):
        from_numpy("w", bits, "F32")
    with pytest.raises(ModelError, match="does not travel"):
        to_view("w", torch.zeros(2, dtype=torch.complex64))


MATRIX = np.random.default_rng(0).standard_normal((48, 96)).astype(np.float32)


@pytest.mark.parametrize(("how", "levels"), [(INT8, 255), (Quantization(bits=4), 15)])
def test_a_row_takes_no_more_values_than_the_bits_allow(how: Quantization, levels: int) -> None:
    rounded = how.round(MATRIX)
    assert max(len(np.unique(row)) for row in rounded) <= levels
    steps = np.abs(MATRIX).max(axis=1) / (levels // 2)
    assert (np.abs(rounded - MATRIX) <= steps[:, None] * 0.501).all()


def test_only_linear_layers_are_touched_and_types_stay() -> None:
    bits = (MATRIX.view(np.uint32) >> 16).astype(np.uint16)
    views = [
        from_numpy("model.embed_tokens.weight", MATRIX), from_numpy("model.norm.weight", MATRIX[0]),
        from_numpy("model.layers.0.mlp.up_proj.weight", MATRIX),
        from_numpy("model.layers.0.mlp.down_proj.weight", bits, "BF16"),
    ]  # fmt: skip
    after = quantized({view.name: view for view in views}, INT8)
    same = [np.array_equal(as_numpy(after[view.name]), as_numpy(view)) for view in views]
    assert same == [True, True, False, False]
    assert [(after[view.name].dtype, after[view.name].shape) for view in views] == [(v.dtype, v.shape) for v in views]


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
    assert loaded.eos_token_ids == (loaded.model.config.eos_token_id,) == (1,)
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
         "final_logit_softcapping, which transformers ignores in a model of type"),
        (lambda folder: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
         r"adapter_config\.json is no configuration of LoRA adapters"),
    ],
    ids=["cut short", "a weight missing", "of another size", "a pickle", "an unknown rescaling", "other adapters"],
)  # fmt: skip
def test_folders_with_missing_or_wrong_weights_do_not_load(copy, spoil, said):
    spoil(copy)
    with pytest.raises(ModelError, match=said):
        load_model(copy)


@pytest.mark.parametrize(("changes", "said"), table("models", "unusable configurations"))
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


def test_weights_of_a_narrower_type_are_accepted_and_tied_ones_stored_once():
    loaded = load_model("tiny")
    check(loaded.files, entries_of(loaded.model, dtype="BF16"), "float32")
    check(loaded.files, entries_of(loaded.model, dtype="BF16"), "bfloat16")
    with pytest.raises(ModelError, match=r"weights are never rounded when they are loaded"):
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


def test_new_adapters_are_the_same_at_every_start_change_no_result_and_can_be_left_out():
    model = with_adapters()
    assert torch.equal(model(IDS).logits, build_tiny(0)(IDS).logits)
    model(IDS).logits.sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name in policy_state(model) if name.endswith(("lora_a", "lora_b"))}
    with pytest.raises(ModelError, match="already"):
        add_adapters(model, SHAPE)
    first, second = policy_state(with_adapters(0)), policy_state(with_adapters(1))
    downs = [name for name in first if name.endswith("lora_a")]
    assert len(downs) == 2 * 3
    assert all(torch.equal(first[name], second[name]) for name in downs)
    assert len({float(first[name].sum()) for name in downs}) == len(downs)
    model = trained(with_adapters())
    expected = build_tiny(0)(IDS).logits
    with without_adapters(model):
        assert torch.equal(model(IDS).logits, expected)
    assert not torch.allclose(model(IDS).logits, expected)


def test_merged_is_an_ordinary_model_that_computes_the_same():
    source = trained(with_adapters())
    tensors, files = merged(policy_state(source), {**FILES, ADAPTER_FILE: SHAPE.as_file()})
    plain = build_tiny(5)
    assert ADAPTER_FILE not in files
    apply_state(plain, tensors)
    torch.testing.assert_close(plain(IDS).logits, source(IDS).logits, atol=2e-5, rtol=1e-5)
    assert not torch.allclose(plain(IDS).logits, build_tiny(0)(IDS).logits)


@pytest.mark.parametrize("data", table("models", "unusable adapter files"))
def test_an_unusable_file_is_refused(data: str):
    with pytest.raises(ModelError, match=r"adapter\.json"):
        adapter_shape({ADAPTER_FILE: data.encode()})


@pytest.mark.parametrize("target", ["lm_head", "query", "embed_tokens"])
def test_unknown_adapter_target_is_refused_with_the_known_ones(target: str):
    with pytest.raises(ModelError, match=rf"'{target}'.*q_proj"):
        add_adapters(build_tiny(0), AdapterShape(4, 8.0, (target,)))


EXAMPLE = Path(__file__).parents[3] / "examples" / "one_file_rl.py"


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--staleness", "0"], ["--staleness", "2"], ["--shuffle-rewards"]])
def test_eight_steps_lift_the_greedy_held_out_score_by_fifteen_points_unless_rewards_are_shuffled(how):
    command = [sys.executable, str(EXAMPLE), "--evaluate-every", "8", "--steps", "8", *how]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    before, after = (float(score) for score in re.findall(r"held-out ([\d.]+)", done.stdout))
    assert before == pytest.approx(0.309, abs=0.02)
    assert after < before + 0.05 if how == ["--shuffle-rewards"] else after > before + 0.15
