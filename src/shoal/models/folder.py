"""Model folders in Hugging Face format: where they are, and the small files that describe a model.

A published policy carries these files beside its weights, so that a worker needs nothing but the policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ModelError
from shoal.protocol import Entry

BUILTIN = ("tiny",)
DESCRIPTION_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_FILES = 16
MAX_CONFIG_BYTES = 1024 * 1024  # config.json, generation_config.json


def model_folder(name: str | Path) -> Path:
    """The folder of a built-in model by its name, or the given folder; it holds at least a config.json."""
    if str(name) in BUILTIN:
        return Path(__file__).parent / "data" / str(name)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ModelError(
            f"there is no model folder {folder}; give a Hugging Face folder or a built-in name ({', '.join(BUILTIN)})"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"the model folder {folder} has no config.json; is it a Hugging Face folder?")
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    """The files that describe the model (configuration, tokenizer), by name: all that a policy needs but weights."""
    files = {}
    for name in DESCRIPTION_FILES:
        path = folder / name
        if not path.is_file():
            continue
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        files[name] = path.read_bytes()
    for name in ("config.json", "tokenizer.json"):
        if name not in files:
            raise ModelError(f"the model folder {folder} has no {name}")
    return files


def check_files(entries: Iterable[Entry]) -> None:
    """Raise `ModelError` if a policy's files are more than the few small ones that describe a model."""
    files = [entry for entry in entries if entry.type == "file"]
    largest = max(files, key=lambda entry: entry.size_bytes, default=None)
    if len(files) > MAX_FILES or (largest is not None and largest.size_bytes > MAX_FILE_BYTES):
        raise ModelError(
            f"the policy has {len(files)} files, the largest of {largest.size_bytes if largest else 0} bytes; "
            f"at most {MAX_FILES} of {MAX_FILE_BYTES} bytes each are allowed"
        )


def read_config(files: Mapping[str, bytes], name: str = "config.json") -> dict[str, Any]:
    """One of the JSON files as a mapping; what is no JSON object is a `ModelError`."""
    if name not in files:
        raise ModelError(f"the model has no {name}")
    most = MAX_CONFIG_BYTES if name in ("config.json", "generation_config.json") else MAX_FILE_BYTES
    if len(files[name]) > most:
        raise ModelError(f"the model's {name} has {len(files[name])} bytes; at most {most} are allowed")
    try:
        value = json.loads(files[name], object_hook=_number)
    except RecursionError:
        raise ModelError(f"the model's {name} is nested too deep") from None
    except ValueError as error:
        raise ModelError(f"the model's {name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"the model's {name} is no JSON object")
    return value


def _number(value: dict[str, Any]) -> Any:
    """JSON has no infinity: transformers writes {"__float__": "Infinity"}, the state space models' configurations do.

    >>> _number({"__float__": "-Infinity"})
    -inf
    """
    tag = value.get("__float__") if len(value) == 1 else None
    return float(tag) if tag in ("Infinity", "-Infinity", "NaN") else value


def eos_token_id(files: Mapping[str, bytes]) -> int:
    """The id of the end-of-sequence token: the generation configuration's if there is one, else the model's."""
    for name in ("generation_config.json", "config.json"):
        value = read_config(files, name).get("eos_token_id") if name in files else None
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int) and first >= 0:
            return first
    raise ModelError("the model names no end-of-sequence token (eos_token_id in config.json)")
