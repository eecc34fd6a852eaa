"""Which engines there are. The torch engine is imported when it is first asked for, or warmed up: it takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.engines.protocol import Engine
from shoal.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16")

Files = Mapping[str, bytes]


def _import_torch() -> None:
    import transformers.modeling_utils  # noqa: F401  what every model of theirs is built on

    import shoal.engines.torch  # noqa: F401


def _torch(files: Files, device: str, dtype: str) -> Engine:
    from shoal.engines.torch import TorchEngine

    return TorchEngine(files, dtype, device)


def _torch_device(device: str) -> str:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('the device is "cuda", but torch finds no GPU here; set it to "cpu" or "auto"')
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _scripted(files: Files, _device: str, _dtype: str) -> Engine:
    from shoal.engines.scripted import ScriptedEngine

    return ScriptedEngine(files)


def _only_cpu(device: str) -> str:
    if device == "cuda":
        raise ConfigError('the scripted engine has no device but "cpu"')
    return "cpu"


@dataclass(frozen=True)
class EngineEntry:
    """How an engine is made, which device it takes when asked for one (or for "auto"), and its number formats.

    `profile` is the name in its `kind`: an engine that computes as another does may go by the other's.
    """

    profile: str
    make: Callable[[Files, str, str], Engine]
    device: Callable[[str], str]
    dtypes: tuple[str, ...] = DTYPES
    slow_import: Callable[[], None] = lambda: None


ENGINES: dict[str, EngineEntry] = {
    "torch": EngineEntry("torch", _torch, _torch_device, slow_import=_import_torch),
    "scripted": EngineEntry("scripted", _scripted, _only_cpu, ("float32",)),
}


def check_engine(name: str, device: str = "auto", dtype: str = "float32") -> None:
    """Raise `ConfigError` for a name that is not there. Needs no torch; whether there is a GPU is seen later."""
    if name not in ENGINES:
        raise ConfigError(f"there is no engine {name!r}; there are {', '.join(sorted(ENGINES))}")
    if device not in DEVICES:
        raise ConfigError(f"there is no device {device!r}; there are {', '.join(DEVICES)}")
    if dtype not in ENGINES[name].dtypes:
        known = ", ".join(ENGINES[name].dtypes)
        raise ConfigError(f"the engine {name} does not compute in {dtype!r}; it knows {known}")


def warm_up(name: str) -> None:
    """Import what the engine needs before there is work for it: a lease held meanwhile would keep others waiting."""
    if name in ENGINES:
        ENGINES[name].slow_import()


def kind_of(name: str, device: str = "cpu", dtype: str = "float32") -> str:
    """The `kind` that `build` with these arguments will have, before there is a model to build.

    >>> kind_of("scripted", "auto")
    'scripted/cpu/float32'
    """
    check_engine(name, device, dtype)
    return f"{ENGINES[name].profile}/{ENGINES[name].device(device)}/{dtype}"


def build(name: str, files: Files, device: str = "cpu", dtype: str = "float32") -> Engine:
    """The engine of that name for the model that the files describe; it has no policy yet.

    `device` "auto" is a GPU if there is one. `dtype` is what it computes in: policies travel in bf16 either way.
    """
    check_engine(name, device, dtype)
    entry = ENGINES[name]
    return entry.make(files, entry.device(device), dtype)
