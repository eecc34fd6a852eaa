"""Engines by name and by policy: the scripted one, what a machine computes with, and the shelf: one fetch per policy, a
bounded number of copies, and never other weights than promised."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from kit import Patch
from shoal.engines import EngineShelf, GenerationRequest, choose, kind_of
from shoal.engines.scripted import ScriptedEngine
from shoal.errors import ConfigError, PolicyMismatch, ResourceError, VersionNotFound
from shoal.models import from_numpy
from shoal.protocol import PolicyManifest, PolicyRef, SamplingParameters, TensorView
from shoal.shardcast import Payload

SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=40, eos_token_ids=(1,))
REQUEST = GenerationRequest((5, 6, 7), tuple(range(50)), SAMPLING)


def loaded(*values: float) -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.load_policy(None, {"w": from_numpy("w", np.array(values, np.float32))})
    return engine


def test_one_bit_of_weight_changes_the_logits():
    one, two = loaded(1.0, 2.0), loaded(1.0, np.nextafter(np.float32(2.0), np.float32(3.0)))
    first = [completion.token_ids.tolist() for completion in one.generate([REQUEST])[0]]
    assert first == [completion.token_ids.tolist() for completion in loaded(1.0, 2.0).generate([REQUEST])[0]]
    second = [completion.token_ids.tolist() for completion in two.generate([REQUEST])[0]]
    assert sum(a != b for a, b in zip(first, second, strict=True)) > 40


def test_vocabulary_and_end_come_from_the_config():
    engine = ScriptedEngine({"config.json": b'{"vocab_size": 11, "eos_token_id": 3}'})
    engine.load_policy(None, {})
    assert engine.vocabulary_size == 11
    [completions] = engine.generate([GenerationRequest((5,), tuple(range(60)), SAMPLING)])
    tokens = np.concatenate([completion.token_ids for completion in completions])
    assert tokens.max() == 10
    assert np.bincount(tokens, minlength=11).argmax() == 3


@pytest.mark.slow
def test_warming_up_the_torch_engine_imports_what_building_one_takes():
    code = "import logging, sys; logging.basicConfig(level=20); from shoal import engines; engines.warm_up('torch')"
    wanted = "{'shoal.engines.torch', 'transformers.modeling_utils'}"
    command = [sys.executable, "-c", f"{code}; sys.exit(not {wanted} <= set(sys.modules))"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert re.findall("registry:([^,]+),", done.stderr) == ["loading torch", "torch is loaded"]


FLOAT32 = ("torch/cpu/float32", "torch/cuda/float32")
BFLOAT16 = ("torch/cpu/bfloat16", "torch/cuda/bfloat16")


def gpu(monkeypatch: Patch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: capability >= (8, 0))


A100, T4 = ("NVIDIA A100", (8, 0)), ("Tesla T4", (7, 5))


@pytest.mark.parametrize(
    ("machine", "taken", "found"),
    [
        pytest.param(None, FLOAT32, ("cpu", "float32"), id="a processor, float32"),
        pytest.param(None, BFLOAT16, ("cpu", "bfloat16"), id="a processor, bfloat16"),
        pytest.param(None, (*BFLOAT16, *FLOAT32), ("cpu", "float32"), id="a processor, both"),
        pytest.param(A100, FLOAT32, ("cuda", "float32"), id="a GPU, float32"),
        pytest.param(A100, BFLOAT16, ("cuda", "bfloat16"), id="a GPU, bfloat16"),
        pytest.param(A100, (*FLOAT32, *BFLOAT16), ("cuda", "bfloat16"), id="a GPU, both"),
        pytest.param(A100, FLOAT32[:1], ("cpu", "float32"), id="a GPU, processors only"),
        pytest.param(T4, (*FLOAT32, *BFLOAT16), ("cuda", "float32"), id="a GPU without bfloat16, both"),
    ],
)
def test_a_machine_follows_what_the_run_takes(monkeypatch, machine, taken, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if machine is not None:
        gpu(monkeypatch, *machine)
    assert choose("torch", "auto", "auto", taken) == found
    if machine is T4:
        assert kind_of("torch", "cuda", "auto") == "torch/cuda/float32"


def test_a_gpu_without_bfloat16_is_refused_in_words_where_the_run_takes_nothing_else(monkeypatch: Patch) -> None:
    gpu(monkeypatch, *T4)
    with pytest.raises(ConfigError, match=r"the GPU Tesla T4 \(compute capability 7.5; bfloat16 needs 8.0\)") as told:
        choose("torch", "cuda", "auto", BFLOAT16)
    for word in (*BFLOAT16, "torch/cuda/float32", "--device", "--dtype", "doctor --calibrate"):
        assert word in str(told.value)
    with pytest.raises(ConfigError, match=r"Tesla T4 .* does not compute in bfloat16: choose float32, or the device"):
        kind_of("torch", "cuda", "bfloat16")


def test_requested_device_and_format_are_kept(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no validator of the run can judge what this machine computes"):
        choose("torch", "cpu", "float32", BFLOAT16)
    with pytest.raises(ConfigError, match="the engine torch does not compute in 'int8'"):
        choose("torch", "cpu", "int8", BFLOAT16)


def ref(version: int, digest: str = "a") -> PolicyRef:
    return PolicyRef(incarnation=0, version=version, digest=digest * 64)


class Source:
    """Publishes every version asked for, with `files`; counts fetches and engines built."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.built = 0
        self.files: dict[str, bytes] = {}
        self.publishes: PolicyRef | None = None

    def fetch(self, wanted: PolicyRef, deadline_s: float) -> Payload:
        self.fetched.append(wanted.version)
        if wanted.version > 90:
            raise VersionNotFound("no such version")
        manifest = PolicyManifest(
            run="r", policy=self.publishes or wanted, entries=(), chunk_size_bytes=1, chunks=(), size_bytes=0,
            created_at_ms=0,
        )  # fmt: skip
        data = memoryview(np.full(1, wanted.version, dtype="<f4")).cast("B")
        return Payload(manifest, self.files, [TensorView("w", "F32", (1,), data)])

    def build(self, files: object) -> ScriptedEngine:
        self.built += 1
        return ScriptedEngine()


def shelf_of(held: int) -> tuple[Source, EngineShelf]:
    source = Source()
    return source, EngineShelf(source.fetch, source.build, held)


def test_a_policy_is_fetched_once_and_the_least_lately_used_makes_room_with_its_engine() -> None:
    source, shelf = shelf_of(2)
    one, two = shelf.get(ref(1), 1), shelf.get(ref(2), 1)
    assert shelf.get(ref(1), 1) is one
    assert one.engine.policy == ref(1)
    three = shelf.get(ref(3), 1)
    assert three.engine is two.engine
    assert three.engine.policy == ref(3)
    with pytest.raises(VersionNotFound):
        shelf.get(ref(99), 1)
    assert shelf.get(ref(1), 1) is one, "a failed fetch leaves the shelf as it was"
    shelf.get(ref(2), 1)
    assert (source.fetched, source.built) == ([1, 2, 3, 99, 2], 2)
    source.files = {"config.json": b"{}"}
    assert shelf.get(ref(4), 1).files == {"config.json": b"{}"}
    assert source.built == 3, "another model gets another engine"


@pytest.mark.parametrize("published", [ref(1, "b"), ref(2)])
def test_weights_that_were_not_promised_are_never_loaded(published: PolicyRef) -> None:
    source, shelf = shelf_of(1)
    source.publishes = published
    with pytest.raises(PolicyMismatch, match=r"policy 0\.1 was promised"):
        shelf.get(ref(1), 1)
    assert source.built == 0


def test_where_memory_does_not_suffice_fewer_policies_are_held() -> None:
    source, room = Source(), 2

    def build(files: object) -> ScriptedEngine:
        if source.built == room:
            raise MemoryError
        return source.build(files)

    shelf = EngineShelf(source.fetch, build, held=3)
    first, _second = shelf.get(ref(1), 1), shelf.get(ref(2), 1)
    third = shelf.get(ref(3), 1)
    assert third.engine is first.engine, "the least lately used one made room"
    assert shelf.get(ref(4), 1).engine.policy == ref(4)
    assert source.built == 2


def test_a_policy_that_does_not_fit_alone_is_said_so_and_other_failures_are_passed_on() -> None:
    def full(_files: object) -> ScriptedEngine:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(ResourceError, match=r"policy 0\.1 .* does not fit into the memory .* \(--device\)"):
        EngineShelf(Source().fetch, full, held=3).get(ref(1), 1)

    def broken(_files: object) -> ScriptedEngine:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        EngineShelf(Source().fetch, broken, held=3).get(ref(1), 1)
