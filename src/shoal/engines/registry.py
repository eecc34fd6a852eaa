"""Which engines there are. The torch engine is imported when it is first asked for, or warmed up: it takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.engines.protocol import Engine
from shoal.errors import ConfigError


def _import_torch() -> None:
    import transformers.modeling_utils  # noqa: F401  what every model of theirs is built on

    import shoal.engines.torch  # noqa: F401


def _torch(files: Mapping[str, bytes]) -> Engine:
    from shoal.engines.torch import TorchEngine

    return TorchEngine(files)


def _scripted(files: Mapping[str, bytes]) -> Engine:
    from shoal.engines.scripted import ScriptedEngine

    return ScriptedEngine(files)


ENGINES: dict[str, Callable[[Mapping[str, bytes]], Engine]] = {"torch": _torch, "scripted": _scripted}
SLOW_IMPORTS: dict[str, Callable[[], None]] = {"torch": _import_torch}


def warm_up(name: str) -> None:
    """Import what the engine needs before there is work for it: a lease held meanwhile would keep others waiting."""
    SLOW_IMPORTS.get(name, lambda: None)()


def build(name: str, files: Mapping[str, bytes]) -> Engine:
    """The engine of that name for the model that the files describe; it has no policy yet."""
    if name not in ENGINES:
        raise ConfigError(f"there is no engine {name!r}; there are {', '.join(sorted(ENGINES))}")
    return ENGINES[name](files)
