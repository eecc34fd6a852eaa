"""What a policy's configuration may say. Its files come from the network, so this is decided before a model is built.

    config.json ─► small, shallow, counts bounded ─► one text model ─► keys that load or fetch something are removed

A configuration inside another one (`text_config`, `vision_config`) is refused: transformers builds inner models with
whatever class, code or file the inner configuration names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from shoal.errors import ModelError

MAX_DEPTH = 16
MAX_VALUES = 100_000
MAX_PARTS = 1 << 16
MAX_COUNT = 1 << 20  # sizes, and whatever has another name
MAX_SPAN = 1 << 25  # positions, tokens
MAX_TABLE = 1 << 12  # positions of xglm, whose table takes four times its memory while it is computed
PARTS = ("layer", "block", "expert", "head", "label")
SPANS = ("position", "length", "seq", "context", "window", "ctx", "vocab", "token", "max_")
UNBOUNDED = ("theta", "base")  # of rotary positions: a frequency, not a count

# Each makes transformers import a file, fetch something, or choose an implementation by name.
LOADING_KEYS = frozenset({
    "auto_map", "name_or_path", "_name_or_path", "custom_pipelines", "custom_generate", "trust_remote_code",
    "attn_implementation", "experts_implementation", "base_model_name_or_path", "auto_mapping", "configuration_files",
    "code_revision", "dtype", "torch_dtype", "sub_configs", "sub_configs_defaults", "attribute_map",
})  # fmt: skip
# Tables inside a configuration that are no models, though transformers declares them as configurations.
PLAIN_TABLES = {"mpt": {"attn_config"}, "dbrx": {"attn_config", "ffn_config"}}
# These compute a table of positions in Python, value by value, whatever the device, or take several times its memory.
SLOW_TABLES = frozenset({"ctrl", "flaubert", "informer", "marian", "pegasus", "roformer", "xlm"})


def check_values(values: Mapping[str, Any], kind: str) -> None:
    """Raise `ModelError` for what is too large, too deep, quantized, or a model inside the model."""
    for count, (path, value) in enumerate(_walk(values, ())):
        if count >= MAX_VALUES or len(path) > MAX_DEPTH:
            raise ModelError(f"the model's config.json has more than {MAX_VALUES} values or {MAX_DEPTH} levels")
        inner = isinstance(value, dict) and path
        if inner and value.get("model_type"):
            raise _composite(kind, ".".join(path))
        if path and path[-1] in ("quantization_config", "compression_config") and value:
            raise ModelError(
                f"the model's config.json has {path[-1]}: quantized models are not supported; use the unquantized one"
            )
        if isinstance(value, int) and not isinstance(value, bool):
            key = path[-1] if path else ""
            most = MAX_SPAN if any(word in key for word in SPANS) else MAX_COUNT
            most = MAX_PARTS if any(word in key for word in PARTS) else most
            if abs(value) > most and not any(word in key for word in UNBOUNDED):
                name = ".".join(path)
                raise ModelError(f"{name} in the model's config.json is {str(value)[:40]}; at most {most} is allowed")
    if kind in SLOW_TABLES:
        raise ModelError(f"models of type {kind} are not supported: building one takes time or memory without bound")
    positions = values.get("max_position_embeddings", 0)
    if kind == "xglm" and isinstance(positions, int) and positions > MAX_TABLE:
        raise ModelError(f"models of type {kind} have at most {MAX_TABLE} positions here, not {positions}")


def check_kind(kind: str, sub_configs: Mapping[str, Any]) -> None:
    """Raise `ModelError` for an architecture that has others inside it."""
    inside = set(sub_configs) - PLAIN_TABLES.get(kind, set())
    if inside:
        raise _composite(kind, ", ".join(sorted(inside)))


def without_loading_keys(values: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """The values without the keys that load something, at every level; of private ones only those that are `known`."""
    return {key: _cleaned(value) for key, value in values.items() if _stays(key, known)}


def _stays(key: str, known: Collection[str] = ()) -> bool:
    return key not in LOADING_KEYS and (not key.startswith("_") or key in known)


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cleaned(each) for key, each in value.items() if _stays(key) and key != "model_type"}
    return [_cleaned(each) for each in value] if isinstance(value, list) else value


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value with the keys that lead to it. An item of a list has its list's path, one level deeper."""
    yield path, value
    if len(path) > MAX_DEPTH:
        return
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _walk(each, (*path, str(key)))
    elif isinstance(value, list):
        for each in value:
            yield from _walk(each, (*path, path[-1] if path else ""))


def _composite(kind: str, inner: str) -> ModelError:
    return ModelError(
        f"a model of type {kind[:80]!r} is a composite ({inner[:200]} describes a model inside it): only models of "
        "text alone are supported; if it has a text model, use that one's own config.json (for example gemma3_text)"
    )
