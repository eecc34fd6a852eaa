"""The engines by name. torch and vLLM are imported when first needed, or by `warm_up`: that takes seconds."""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.engines.protocol import Engine
from shoal.errors import ConfigError
from shoal.protocol import Entry

log = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16")

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class EngineEntry:
    """`profile` is the name in its `kind`: an engine that rounds as another one does may use the other's."""

    profile: str
    dtypes: tuple[str, ...] = ("float32",)

    def make(self, files: Files, _device: str, _dtype: str) -> Engine:
        from shoal.engines.scripted import ScriptedEngine

        return ScriptedEngine(files)

    def device(self, device: str) -> str:
        """The device for the one asked for, or for "auto"."""
        if device == "cuda":
            raise ConfigError(f'the {self.profile} engine has no device but "cpu"')
        return "cpu"

    def formats(self, _device: str) -> tuple[str, ...]:
        """Those of `dtypes` that this device computes in, the fastest first."""
        return self.dtypes

    def require(self) -> None:
        """Raise `ConfigError` if something that it needs is not installed. Needs no torch."""

    def start(self, _device: str) -> None: ...

    def check(self, _files: Files, _entries: Sequence[Entry], _dtype: str, _memory_bytes: int) -> None:
        """Compare a policy's files with its weights, and with the memory that it may take."""


class TorchEntry(EngineEntry):
    def make(self, files: Files, device: str, dtype: str) -> Engine:
        from shoal.engines.torch import TorchEngine

        return TorchEngine(files, dtype, device)

    def device(self, device: str) -> str:
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError('the device is "cuda", but torch finds no GPU here; set it to "cpu" or "auto"')
        return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    def formats(self, device: str) -> tuple[str, ...]:
        """An emulated bfloat16 is slower than float32."""
        import torch

        if device == "cpu":
            return ("float32", "bfloat16")
        return ("bfloat16", "float32") if torch.cuda.is_bf16_supported(including_emulation=False) else ("float32",)

    def start(self, device: str) -> None:
        began_s = time.monotonic()
        log.info("loading torch, which may take a minute")
        import torch
        import transformers.modeling_utils  # noqa: F401  which every model needs

        import shoal.engines.torch  # noqa: F401

        log.info("torch is loaded, after %.1f s", time.monotonic() - began_s)
        if device != "cpu" and torch.cuda.is_available():
            torch.ones(1, device="cuda")  # the first use of a GPU takes seconds

    def check(self, files: Files, entries: Sequence[Entry], dtype: str, memory_bytes: int) -> None:
        from shoal.models.load import check_policy

        check_policy(files, entries, dtype, memory_bytes)


class VllmEntry(TorchEntry):
    def make(self, files: Files, device: str, dtype: str) -> Engine:
        from shoal.engines.vllm.engine import VllmEngine

        return VllmEngine(files, device, dtype)

    def require(self) -> None:
        from shoal.engines.vllm.needs import installed_device

        installed_device()

    def device(self, device: str) -> str:
        from shoal.engines.vllm.needs import installed_device

        own = installed_device()
        if device not in ("auto", own):
            raise ConfigError(
                f'the vLLM that is installed here has no device but "{own}": set it to that, or to "auto"'
            )
        return super().device(own)

    def start(self, device: str) -> None:
        from shoal.engines.vllm.needs import load

        load()
        super().start(device)
        import shoal.engines.vllm.engine  # noqa: F401


ENGINES: dict[str, EngineEntry] = {
    "torch": TorchEntry("torch", DTYPES), "scripted": EngineEntry("scripted"), "vllm": VllmEntry("vllm", DTYPES)
}  # fmt: skip


def check_engine(name: str, device: str = "auto", dtype: str = "auto") -> None:
    """Raise `ConfigError` for an unknown name, or an engine that is not installed. Needs no torch; whether there is a
    GPU is checked later."""
    if name not in ENGINES:
        raise ConfigError(f"there is no engine {name!r}; there are {', '.join(sorted(ENGINES))}")
    if device not in DEVICES:
        raise ConfigError(f"there is no device {device!r}; there are {', '.join(DEVICES)}")
    if dtype not in ("auto", *ENGINES[name].dtypes):
        known = ", ".join(ENGINES[name].dtypes)
        raise ConfigError(f"the engine {name} does not compute in {dtype!r}; it knows {known}")
    ENGINES[name].require()


def check_policy(name: str, files: Files, entries: Sequence[Entry], device: str, dtype: str, memory_bytes: int) -> None:
    """Whether files and entries are of one model (`ModelError`) of at most `memory_bytes` (`ResourceError`)."""
    ENGINES[name].check(files, entries, resolved(name, device, dtype)[1], memory_bytes)


def warm_up(name: str, device: str = "cpu") -> None:
    """Load what the engine needs before there is work: a lease that waits meanwhile would delay others."""
    if name in ENGINES:
        ENGINES[name].start(device)


def kind_of(name: str, device: str = "cpu", dtype: str = "float32") -> str:
    """The `kind` of the engine that `build` makes of these arguments, before there is a model."""
    found = resolved(name, device, dtype)
    return "/".join((ENGINES[name].profile, *found))


def resolved(name: str, device: str, dtype: str) -> tuple[str, str]:
    """Device and number format, the fastest for "auto"; `ConfigError` if the device does not have the format."""
    check_engine(name, device, dtype)
    found = ENGINES[name].device(device)
    formats = ENGINES[name].formats(found)
    if dtype not in ("auto", *formats):
        raise ConfigError(f"{_described(found)} does not compute in {dtype}: choose float32, or the device cpu")
    return found, formats[0] if dtype == "auto" else dtype


def choose(name: str, device: str, dtype: str, taken: Collection[str]) -> tuple[str, str]:
    """The device and the number format to compute in: the fastest of this machine whose kind a run takes work of.

    `device` and `dtype` are wishes, or "auto". A `ConfigError` says why nothing fits.

    >>> choose("scripted", "auto", "auto", ["scripted/cpu/float32", "torch/cuda/bfloat16"])
    ('cpu', 'float32')
    """
    check_engine(name, device, dtype)
    entry = ENGINES[name]
    first = entry.device(device)
    devices = dict.fromkeys((first, "cpu") if device == "auto" else (first,))
    able = [(each, found) for each in devices for found in entry.formats(each) if dtype in ("auto", found)]
    kinds = {f"{entry.profile}/{each}/{found}": (each, found) for each, found in able}
    for kind, found in kinds.items():
        if kind in taken:
            return found
    raise ConfigError(
        f"no validator of the run can judge what this machine computes, so that it would earn nothing: the run takes "
        f"work of {', '.join(taken)}; {_described(first)} computes as {' or '.join(kinds) or f'nothing in {dtype}'}. "
        "Choose another --device or --dtype, or ask the run's owner for a profile of yours (`shoal doctor --calibrate` "
        "measures one)"
    )


def _described(device: str) -> str:
    """Of a GPU its name, and its generation if that is too old for bfloat16."""
    if device == "cpu":
        return "this machine, on its processor,"
    import torch

    name, capability = torch.cuda.get_device_name(), ".".join(map(str, torch.cuda.get_device_capability()))
    is_old = "bfloat16" not in ENGINES["torch"].formats(device)
    return f"the GPU {name}" + (f" (compute capability {capability}; bfloat16 needs 8.0)" if is_old else "")


def build(name: str, files: Files, device: str = "cpu", dtype: str = "float32") -> Engine:
    """For the model that the files describe, without a policy. "auto": a GPU if there is one, and its fastest
    `dtype`."""
    found = resolved(name, device, dtype)
    return ENGINES[name].make(files, *found)
