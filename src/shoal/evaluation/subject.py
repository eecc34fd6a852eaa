"""The model under evaluation: its weights in an engine, its name, and a digest of all its files."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.engines import Engine, build, check_engine, is_out_of_memory, resolved
from shoal.errors import ResourceError
from shoal.models.folder import check_weights, model_digest, model_folder, read_files
from shoal.protocol import TensorView

NAME_LENGTH = 48


@dataclass(frozen=True)
class EvaluatedModel:
    name: str
    digest: str
    files: Mapping[str, bytes]
    engine: Engine


@dataclass(frozen=True)
class EngineChoice:
    engine: str = "torch"
    device: str = "auto"
    dtype: str = "float32"


def open_subject(name: str, where: str | Path, machine: EngineChoice, rows: int) -> EvaluatedModel:
    """An engine that decodes at most `rows` at a time."""
    check_engine(machine.engine, machine.device, machine.dtype)
    files = read_files(folder := model_folder(where))
    check_weights(folder)
    with memory_errors("load the model"):
        device, dtype = resolved(machine.engine, machine.device, machine.dtype)
        if machine.engine == "torch":
            from shoal.engines.torch import TorchEngine
            from shoal.models.load import load_model

            engine: Engine = TorchEngine.wrap(load_model(where, dtype, device).model, max_rows=rows)
        else:
            engine, weights = build(machine.engine, files, device, dtype), dict[str, TensorView]()
            if machine.engine != "scripted":
                from shoal.models.load import load_model
                from shoal.models.state import policy_views

                weights = policy_views(load_model(where, dtype).model)
            engine.load_policy(None, weights)
    return EvaluatedModel(name, model_digest(where), files, engine)


def plain_name(text: str) -> str:
    last = text.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.")[:NAME_LENGTH] or "model"


@contextmanager
def memory_errors(action: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        less = "lower --batch-rows or --max-new-tokens, or compute in --dtype bfloat16"
        raise ResourceError(f"there is not enough memory to {action}: {less}") from error
