"""What a worker computes in: the fastest that its machine has and that the run takes work of."""

from __future__ import annotations

import pytest
import torch

from shoal.engines import choose, kind_of
from shoal.errors import ConfigError

FLOAT32 = ("torch/cpu/float32", "torch/cuda/float32")
BFLOAT16 = ("torch/cpu/bfloat16", "torch/cuda/bfloat16")


def gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: capability >= (8, 0))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("taken", "found"),
    [(FLOAT32, ("cpu", "float32")), (BFLOAT16, ("cpu", "bfloat16")), ((*BFLOAT16, *FLOAT32), ("cpu", "float32"))],
    ids=["float32", "bfloat16", "both"],
)
@pytest.mark.usefixtures("no_gpu")
def test_a_processor_follows_the_run(taken: tuple[str, ...], found: tuple[str, str]) -> None:
    assert choose("torch", "auto", "auto", taken) == found


@pytest.mark.parametrize(
    ("taken", "found"),
    [
        (FLOAT32, ("cuda", "float32")),
        (BFLOAT16, ("cuda", "bfloat16")),
        ((*FLOAT32, *BFLOAT16), ("cuda", "bfloat16")),
        (("torch/cpu/float32",), ("cpu", "float32")),
    ],
    ids=["float32", "bfloat16", "both", "processors-only"],
)
def test_a_gpu_follows_the_run(monkeypatch: pytest.MonkeyPatch, taken: tuple[str, ...], found: tuple[str, str]) -> None:
    gpu(monkeypatch, "NVIDIA A100", (8, 0))
    assert choose("torch", "auto", "auto", taken) == found


def test_a_gpu_without_bfloat16_computes_in_float32_where_the_run_takes_that(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "Tesla T4", (7, 5))
    assert choose("torch", "auto", "auto", (*FLOAT32, *BFLOAT16)) == ("cuda", "float32")
    assert kind_of("torch", "cuda", "auto") == "torch/cuda/float32"


def test_a_gpu_without_bfloat16_is_refused_in_words_where_the_run_takes_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu(monkeypatch, "Tesla T4", (7, 5))
    with pytest.raises(ConfigError, match=r"the GPU Tesla T4 \(compute capability 7.5; bfloat16 needs 8.0\)") as told:
        choose("torch", "cuda", "auto", BFLOAT16)
    for word in (*BFLOAT16, "torch/cuda/float32", "--device", "--dtype", "doctor --calibrate"):
        assert word in str(told.value)
    with pytest.raises(ConfigError, match=r"Tesla T4 .* does not compute in bfloat16: choose float32, or the device"):
        kind_of("torch", "cuda", "bfloat16")


@pytest.mark.usefixtures("no_gpu")
def test_what_was_asked_for_is_never_replaced() -> None:
    with pytest.raises(ConfigError, match="no validator of the run can judge what this machine computes"):
        choose("torch", "cpu", "float32", BFLOAT16)
    with pytest.raises(ConfigError, match="the engine torch does not compute in 'int8'"):
        choose("torch", "cpu", "int8", BFLOAT16)
