"""`shoal plan`: memory before anything is loaded, and what a trainer says when it cannot fit or runs out of it."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from kit import Capture
from kit.cli import TINY, told
from shoal.cli.main import main
from shoal.errors import ResourceError
from shoal.models.load import load_model, model_from_files
from shoal.run.estimate import Planning, usual_config
from shoal.run.recipe import Recipe
from shoal.runtime.config import parse_config
from shoal.runtime.sizing import Speeds
from shoal.trainer import memory
from shoal.trainer.memory import GIB, Shape, alternatives, plan, shape_of
from shoal.trainer.settings import TrainerSettings

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936,
    "tie_word_embeddings": True,
}  # fmt: skip


def settings(**values: object) -> TrainerSettings:
    return TrainerSettings.model_validate(values)


BFLOAT16 = settings(memory={"precision": "bfloat16"})


@pytest.fixture(scope="module")
def files() -> Mapping[str, bytes]:
    return {"config.json": json.dumps({**QWEN3, "num_hidden_layers": 4}).encode()}


def test_certain_sizes_are_exact(files: Mapping[str, bytes]) -> None:
    """bfloat16 weights, float32 masters, gradients and two moments: 2 + 4 + 4 + 8 bytes for each weight."""
    shape = shape_of(files, BFLOAT16)
    layer = 3072 * 1024 * 3 + 1024 * 2048 * 2 + 1024 * 1024 * 2 + 2 * 1024 + 2 * 128
    assert shape.weights == 151_936 * 1024 + 1024 + 4 * layer
    fixed = plan(shape, BFLOAT16, processes=1).device
    bytes_each = {"weights": 2, "masters": 4, "gradients": 4, "moments": 8}
    assert {name: fixed[name] for name in bytes_each} == {n: b * shape.weights for n, b in bytes_each.items()}
    assert "reference" not in fixed
    held = plan(shape, settings(memory={"precision": "bfloat16"}, objective={"kl": 0.1}), processes=1).device
    assert held["reference"] == 2 * shape.weights


@pytest.mark.parametrize("processes", [1, 2])
def test_adapters_need_no_second_model_to_be_held_near_the_first(files: Mapping[str, bytes], processes: int) -> None:
    free, held = (settings(lora={"rank": 4}, objective={"kl": kl}) for kl in (0.0, 0.1))
    shape = shape_of(files, free)
    assert plan(shape, held, processes).certain == plan(shape, free, processes).certain


def test_processes_share_what_is_fixed_and_nothing_else(files: Mapping[str, bytes]) -> None:
    shape = shape_of(files, BFLOAT16)
    one, four = plan(shape, BFLOAT16, 1).device, plan(shape, BFLOAT16, 4).device
    assert four["weights"] == shape.weights  # float32, a quarter of them
    assert four["moments"] == one["moments"] // 4
    assert four["activations"] == one["activations"]
    assert four["gathered"] > 2 * 151_936 * 1024, "embeddings and head are whole while they compute"


def test_activations_are_what_a_real_forward_pass_keeps() -> None:
    """The same count on real tensors, with torch's own attention: within a tenth."""
    loaded, tokens = load_model("tiny"), memory.PROBE_TOKENS
    weights = {weight.untyped_storage().data_ptr() for weight in loaded.model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loaded.model.base_model(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
    found = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in weights) / tokens
    assert shape_of(loaded.files, settings()).activation_bytes == pytest.approx(found, rel=0.1)


def test_a_cpu_holds_the_copy_that_is_saved_and_what_is_not_given_back(files: Mapping[str, bytes]) -> None:
    """Tensors of 32 MiB are given back: 8192 tokens of 1024 numbers. Recomputing makes as many holes as keeping."""
    short, recomputed = settings(micro_batch_tokens=8191), settings(micro_batch_tokens=8191, memory={"recompute": True})
    shape = shape_of(files, short)
    on_cpu = plan(shape, short, 1, kind="cpu")
    assert on_cpu.device["copy of the state"] == 12 * shape.weights
    assert on_cpu.device["holes"] == int(memory.HOLES * 8191 * shape.activation_bytes)
    assert plan(shape, recomputed, 1, kind="cpu").device["holes"] == on_cpu.device["holes"]
    assert "holes" not in plan(shape, settings(micro_batch_tokens=8192), 1, kind="cpu").device
    assert not on_cpu.host
    on_gpu = plan(shape, short, 1, kind="cuda")
    assert not {"holes", "copy of the state"} & set(on_gpu.device)
    assert on_gpu.host == {"copy of the state": 12 * shape.weights}


def test_settings_that_save_memory_are_offered_with_what_they_save(files: Mapping[str, bytes]) -> None:
    given = settings(micro_batch_tokens=65_536)
    shape = shape_of(files, given)
    now, offered = plan(shape, given, 1), alternatives(shape, given, 1)
    assert offered["trainer.memory.recompute=true"].device["activations"] < 0.4 * now.device["activations"]
    assert offered["trainer.micro_batch_tokens=16384"].device["activations"] == now.device["activations"] // 4
    assert all(other.total < now.total for other in offered.values())
    assert "trainer.memory.compile=true" not in offered, "in float32 packs are not compiled"
    assert "trainer.memory.compile=true" in alternatives(shape_of(files, BFLOAT16), BFLOAT16, 1)
    assert "trainer.memory.recompute=true" not in alternatives(shape, settings(memory={"recompute": True}), 1)


@pytest.mark.parametrize(("arguments", "code", "words"), [
    ("tiny.toml --memory 4", 0, ["Qwen3ForCausalLM: 0.2 M weights, 3 layers", "of 4.00: fits (activations are an",
     "machines needed: 1 to train, 1 worker, 1 validator; without a GPU 1 relay, 1 hub\nsettings"]),  # a toy
    ("tiny.toml --memory 8 --parameters 1e7", 0, ["a guessed shape for --parameters 1e+07: "]),
    ("tiny.toml --memory 1.2 --devices 2 --set trainer.objective.kl=0.1", 3,
     ["by 2 processes on cuda", "of 1.20: does not fit", "reference", "recompute=true"]),
    ("one-gpu.toml --parameters 1e9 --memory 24", 3, ["of 10.80: does not fit", "fit into 6.0 GiB; 1 loaded",
     "\n  a validator does not fit into 6.0 GiB. It takes one of these: 1 device of at least 33.9 GiB, of which it "
     "has 25%; a device of its own, of 8.5 GiB (--set validator.memory_share=1); --set validator.dtype=bfloat16"]),
    ("intellect2.toml --parameters 32.8e9 --memory 80", 3,
     ["a validator does not fit into 80.0 GiB. It takes one of these: 6 devices of at least 123.2 GiB\n"]),
    ("intellect2.toml --parameters 32.8e9 --memory 131", 0,
     ["1 loaded, 1 for second looks; in float32 they take 184.3 GiB; ", "starts 0 of the 6 validators",
      "patience_s                           24030   derived"]),
    ("intellect2.toml --parameters 32.8e9 --memory 131 --set validator.count=1", 0,
     ["starts a validator on the trainer's first GPU, which has no room for them (GiB: trainer 127.5, validator 123.2)"
      ": set validator.memory_share, or validator.count=0 and start others elsewhere"]),
    ("tiny.toml --parameters 32.8e9 --memory 80", 3, ["a worker does not fit into 80.0 GiB. It takes one of these: "
     "1 device of at least 123.2 GiB; --set worker.dtype=bfloat16: 62.1 GiB, fits; "]),
    ("tiny.toml --memory 80 --parameters 6e8 --set model.path=missing --gpu-hour-price 2 --assume token_s=0.2 "
     "--set hub.link_mbit=200", 0,
     ["memory, GiB", "disk, GB", "bytes of a version", "time of a step", "machines needed", "money: ",
      "token_s                    0.2", "out of a relay of 200 Mbit/s",
      "hub.lease_s                             60   derived"]),
])  # fmt: skip
def test_the_command_says_what_fits_and_what_would(arguments, code, words, capsys):
    recipe, *options = arguments.split()
    assert main(["plan", str(TINY.parent / recipe), *options]) == code
    said = capsys.readouterr().out
    assert [each for each in words if each not in said] == []
    assert ("guessed" in said) == ("--parameters" in options)


@pytest.mark.parametrize(("where", "advised"), [(["--set", "trainer.device=cpu"], False), (["--memory", "8"], True)])
def test_advice_of_more_validators_is_for_gpus_only(where: list[str], advised: bool, capsys: Capture) -> None:
    """By the speeds of a GPU 300 steps of a toy need four; of a processor's trainer these speeds say nothing."""
    assert main(["plan", str(TINY), "--set", "run.steps=300", *where]) == 0
    assert ("raise validator.count" in capsys.readouterr().out) == advised


@pytest.mark.parametrize(("layer", "bytes_each"), [(10**8, 12), (10**7, 24)])
def test_on_a_cpu_only_the_first_process_holds_copies_and_more_processes_save_nothing(layer, bytes_each) -> None:
    """Matrices of small layers, once gathered, leave holes as large as the copies."""
    recipe, given = parse_config(LARGE, Recipe, "test"), settings(objective={"kl": 0.1})
    shape = replace(SHAPE, largest_layer=layer)
    found = Planning(recipe, shape, plan(shape, given, 2, kind="cpu"), 2, "cpu", GIB)
    first, other = (found.device_bytes(f"trainer, {which} process") for which in ("first", "each other"))
    assert first - other == bytes_each * WEIGHTS
    assert {name: host for name, _, host, _ in found.memory()}["trainer, 2 on one host"] == first + other
    assert not any("processes" in words for words in alternatives(SHAPE, given, 2, kind="cpu"))


def test_help_and_mistakes_need_no_torch() -> None:
    calls = "[main(['plan', '--help']), main(['plan', 'nowhere.toml'])]"
    without = f"import sys; sys.modules['torch'] = None; from shoal.cli.main import main; assert {calls} == [0, 2]"
    ran = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_missing_memory_is_refused_warned_of_and_named_when_it_runs_out(files, monkeypatch, caplog):
    monkeypatch.setattr(memory, "available", lambda *_: ("cuda", 2 * GIB))
    with pytest.raises(ResourceError, match=r"takes about .* GiB on each device \(weights 0.8.*moments .*2.0 GiB") as e:
        memory.within_memory(settings(), files, 1, weight_bytes=GIB).__enter__()
    assert e.value.exit_code == 3
    memory.within_memory(settings(), files, 1, weight_bytes=1000).__enter__()  # small on disk: not looked at
    monkeypatch.setattr(memory, "available", lambda *_: ("cuda", 6 * GIB))
    memory.within_memory(settings(), files, 1, weight_bytes=GIB).__enter__()
    assert "training may run out of memory" in caplog.text
    said = r"out of memory \(CUDA out of memory.*training takes about"
    with pytest.raises(ResourceError, match=said), memory.within_memory(settings(), files, processes=1):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


def test_a_folder_without_weights_is_enough(tmp_path: Path, capsys: Capture) -> None:
    """Only what describes the model is read."""
    for name, data in load_model("tiny").files.items():
        (tmp_path / name).write_bytes(data)
    assert "fits" in told(capsys, 0, "plan", TINY, "--set", f"model.path={tmp_path}", "--memory", "8").out


WEIGHTS = 32 * 10**9
SHAPE = Shape("Any", WEIGHTS, WEIGHTS, 64, 10**8, 10**9, 5120, 150_000, 10**6, torch.bfloat16, cached_bytes=500_000)
LARGE = """
[run]
steps = 400
groups_per_step = 256
group_size = 16
max_staleness = 2
max_new_tokens = 32768
[trainer]
publish_dtype = "bfloat16"
[trainer.memory]
precision = "bfloat16"
recompute = true
[validator]
dtype = "bfloat16"
"""


def planning(text: str = LARGE, speeds: Speeds = Speeds(), processes: int = 8) -> Planning:
    recipe = parse_config(text, Recipe, "test")
    planned = plan(SHAPE, recipe.trainer, processes, recipe.run.max_new_tokens)
    return Planning(recipe, SHAPE, planned, processes, "cuda", 131 * GIB, speeds)


def test_memory_of_every_role_and_of_one_sequence() -> None:
    """The first of eight ranks: 2 bytes a weight as it is published, 12 of the state, all gathered by it: 14."""
    found = {name: host for name, _, host, _ in planning().memory()}
    assert found["trainer, 8 on one host"] == 14 * WEIGHTS + 8 * GIB
    assert found["trainer, first process"] == 14 * WEIGHTS + GIB
    assert found["trainer, each other process"] == GIB
    policies = 2 * 64 * 10**9  # one, and one for second looks in another number format
    assert planning().device_bytes("validator") == policies + GIB
    # half of 500,000 bytes for each of 32,768 tokens beside 64 GB of weights; a worker without it finishes none
    assert planning().device_bytes("worker") == 64 * 10**9 + GIB + 250_000 * 32_768
    # where there is room, second looks of bfloat16 by bfloat16 are in float32
    assert replace(planning(), memory_bytes=190 * GIB).device_bytes("validator") == (64 + 128) * 10**9 + GIB


def test_disk_of_every_role_and_of_a_short_run() -> None:
    """Checkpoints have 384 GB. Kept: 1 newest, 1 best, 2 from before, 1 being written."""
    found = {name: (running / 1e9, finished / 1e9) for name, running, finished, _ in planning().disk()}
    assert found["trainer: checkpoints"] == (5 * 384, 2 * 384)
    assert found["trainer: export"] == (64, 64)
    # 6, 4 and 3 versions, back to a whole one of every 16; deltas from the version 1, 2, 4 and 8 before
    delta = 0.096 * 4**0.83  # 0.15 % of it by each of 4 optimizer steps, which change some values twice
    deltas = [(n + n // 2 + n // 4 + n // 8) * delta for n in (20, 18, 17)]
    assert found["origin"] == pytest.approx((2 * 64 + deltas[0], 2 * 64 + deltas[1]))
    assert found["each relay"] == pytest.approx((2 * 64 + deltas[2], 0))
    assert found["each validator"] == pytest.approx((4 * 64 + 4 * delta, 0))
    assert found["each worker"] == pytest.approx((3 * 64 + 3 * delta, 0))
    submitted = 256 * 16 * (8192 * 14 + 16 * 8)  # the last proof of a rollout is for half as much, on average
    assert found["hub"][1] == pytest.approx((400 * (submitted + 256 * 10_000) + 300_000) / 1e9)
    trained = 256 * 16 * 8192 * 6  # without proofs
    links = {"workers to hub": submitted, "hub to validators": submitted, "hub to trainer": trained}
    assert planning().hub_links() == pytest.approx(links)
    # 14 steps, 384 GB each: 1 newest, 1 best, 1 being written, and version 0
    short = LARGE.replace("steps = 400", "steps = 14").replace("[trainer]", "[trainer]\ncheckpoint_every = 1")
    _, running, *_ = next(planning(short).disk())
    assert running == 3 * 12 * WEIGHTS + 4 * WEIGHTS


@pytest.mark.parametrize(("rate", "share", "origin"), [
    pytest.param(1e-6, 0.41, 3 + (8 + 4 + 2) * 0.41, id="a delta pays, and four follow a whole version"),
    pytest.param(1e-5, 0.514, 3 + (7 + 3) * 0.514, id="ten times the rate changes 3.3 bits more"),
    pytest.param(1e-3, 1.0, 6, id="no delta pays"),
])  # fmt: skip
def test_in_float32_deltas_are_large_or_none(rate: float, share: float, origin: float) -> None:
    text = LARGE.replace('"bfloat16"\n[trainer.memory]', f'"float32"\nlearning_rate = {rate}\n[trainer.memory]')
    found = planning(text)
    assert found.delta == pytest.approx(share * 128e9, 0.01)
    disk = {name: running / 128e9 for name, running, *_ in found.disk()}
    assert disk["origin"] == pytest.approx(origin, 0.01)
    assert disk["each worker"] == pytest.approx(3 * (1 + share if share < 1 else 1), 0.01)


LONGEST = 8192 * (1 + math.log(3))


def test_time_machines_and_money_follow_from_the_speeds() -> None:
    """33,554,432 tokens. Training: x 6 x 32e9 / (8 x 127e12) = 6,341.0 s, and 1. Audits, of a group of 131,072
    tokens: 52.4 s by 160 TFLOP/s, 0.052 s, and for 0.464 of them a branch of 8,192 tokens of 45.7 ms each: 580
    tokens/s, so 10 validators.

    A worker has room for int(0.8 x (131 GiB - 64 GB) / (500,000 x 32,768)) = 3 sequences of the 128 of a lease. They
    take 8,192 x (128 / 3 - 1) tokens, and the longest of the last three 8,192 x (1 + ln 3), of 1.5 ms and 64 / 1500 s
    each: 15,835 s. With 128 x 8,192² / 2 x 500,000 bytes at 3.3e12, and 0.25 s, 63.6 tokens/s: 84 workers.
    """
    found = planning()
    stages = {name: seconds for name, seconds, _ in found.stages()}
    assert stages["train"] == found.step_s == pytest.approx(6342.0, abs=0.1)
    assert found.worker_tokens_s == pytest.approx(63.60, abs=0.01)
    assert found.audit_tokens_s == pytest.approx(579.8, abs=0.5)
    assert (found.workers, found.validators, found.relays) == (84, 10, 10)
    assert stages["publish"] == pytest.approx(0.08 + 64 / 1.75)
    assert stages["transfer"] == pytest.approx(11 * 96e6 * 4**0.83 * 1.2 / 125e6)
    assert stages["apply"] == pytest.approx(64 / 1.2)
    assert stages["save"] == pytest.approx(384 / 7)
    assert found.cost(2.0) == pytest.approx(102 * 2 * 400 * found.step_s / 3600)
    patient = planning(speeds=Speeds(decode_s=3.0))  # a completion may be 3 steps old
    assert patient.step_s == pytest.approx((0.25 + LONGEST * 3.0426667 + 15.252) / 3, rel=1e-5)
    found = planning(LARGE + "[hub]\nlink_mbit = 50", Speeds(worker_tokens_s=1000))
    assert (found.workers, found.relays) == (6, 2)
    assert found.chosen.policy_wait_s == pytest.approx(20 * planning().chosen.policy_wait_s, rel=0.05)
    slow = planning(LARGE + "[hub]\nlink_mbit = 1")
    assert slow.step_s == {name: seconds for name, seconds, _ in slow.stages()}["transfer"] > 10_000
    compiled = planning(LARGE.replace("recompute = true", "recompute = true\ncompile = true"))
    assert compiled.train_s == pytest.approx(3027.5 + 0.9, abs=0.1)


def test_with_staleness_0_a_step_is_the_sum_of_its_stages() -> None:
    """Generating and checking take what they are said to take by so many machines: about as long as training each."""
    found = planning(LARGE.replace("max_staleness = 2", "max_staleness = 0"))
    named = {name: seconds for name, seconds, _ in found.stages()}
    assert found.step_s == pytest.approx(sum(named.values())) == pytest.approx(19_000, rel=0.05)
    assert (found.workers, found.validators) == (84, 10)
    assert named["generate"] == pytest.approx(found.tokens / (84 * found.worker_tokens_s))


def test_roles_that_share_a_gpu_have_their_parts_of_it() -> None:
    shared = LARGE.replace("[validator]", "[worker]\nmemory_share = 0.3\n[validator]\nmemory_share = 0.25")
    found = planning(shared, processes=1)
    rooms = {role: found.room(role) / (131 * GIB) for role in ("trainer", "validator", "worker")}
    assert rooms == pytest.approx({"trainer": 0.45, "validator": 0.25, "worker": 0.3})
    assert planning().room("worker") == planning().room("trainer, first process") == 131 * GIB


@pytest.mark.parametrize("parameters", [2e7, 1.35e8, 6e8, 8e9, 3.28e10])
def test_a_usual_shape_has_the_size_that_was_asked_for(parameters: float) -> None:
    with torch.device("meta"):
        model = model_from_files({"config.json": json.dumps(usual_config(parameters)).encode()}, device="meta")
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(parameters, rel=0.05)
