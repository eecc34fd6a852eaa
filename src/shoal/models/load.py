"""Loads a causal language model from a folder, or builds one without weights from the files that describe it.

Weights are read from safetensors only, and code of a model folder or a policy is never run (`locked`). A configuration
is checked before a model is built:

    config.json ─► small, shallow, counts bounded ─► one text model ─► keys that load or fetch something are removed

A configuration inside another one (`text_config`, `vision_config`) is refused: transformers would build inner models
from any class, code or file that it names.
"""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from shoal.errors import ModelError, ResourceError
from shoal.models import locked
from shoal.models.folder import adapter_of, model_folder, read_config, read_files
from shoal.models.logprobs import Head
from shoal.models.lora import ADAPTER_FILE, AdapterShape, adapter_shape, add_adapters, merge_adapter
from shoal.models.state import check_fit, policy_state
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import Entry
from shoal.runtime.limits import show_bytes

locked.lock()  # again, for modules that were imported since

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PARTS_PER_WEIGHT, MORE_PARTS = 8, 1000  # transformers' models have at most 5 modules and weights for each weight
RANDOM_FILLS = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_",
)  # fmt: skip
# Models from before attention could be chosen. Only those that were tested; older ones do not decode here.
WRITTEN_OUT = frozenset({"bloom", "codegen", "gpt_neo", "gptj", "mpt", "xglm"})

MAX_DEPTH, MAX_VALUES, MAX_PARTS = 16, 100_000, 1 << 16
MAX_COUNT = 1 << 20  # sizes, and whatever has another name
MAX_SPAN = 1 << 25  # positions, tokens
MAX_TABLE = 1 << 12  # positions of xglm, whose table takes four times its memory while it is computed
PARTS = ("layer", "block", "expert", "head", "label")
SPANS = ("position", "length", "seq", "context", "window", "ctx", "vocab", "token", "max_")
UNBOUNDED = ("theta", "base")  # of rotary positions: a frequency, not a count

# These keys make transformers import a file, fetch something, or choose an implementation by name.
LOADING_KEYS = frozenset({
    "auto_map", "name_or_path", "_name_or_path", "custom_pipelines", "custom_generate", "trust_remote_code",
    "attn_implementation", "experts_implementation", "base_model_name_or_path", "auto_mapping", "configuration_files",
    "code_revision", "dtype", "torch_dtype", "sub_configs", "sub_configs_defaults", "attribute_map",
})  # fmt: skip
# Tables inside a configuration that are no models, although transformers declares them as configurations.
PLAIN_TABLES = {"mpt": {"attn_config"}, "dbrx": {"attn_config", "ffn_config"}}
# These compute a table of positions in Python, value by value, on every device, or take several times its memory.
SLOW_TABLES = frozenset({"ctrl", "flaubert", "informer", "marian", "pegasus", "roformer", "xlm"})


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for use. `files` must travel with its weights (configuration and tokenizer)."""

    model: Any
    tokenizer: TextTokenizer
    files: Mapping[str, bytes]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.tokenizer.eos_token_ids


def load_model(name: str | Path, dtype: str = "float32", device: str = "cpu", merges: bool = True) -> LoadedModel:
    """A built-in model by name ("tiny"), or any causal language model from a Hugging Face folder. Adapters in PEFT's
    format are merged into their base; without `merges` they are left out."""
    folder, adapter = model_folder(name), adapter_of(name)
    files = read_files(folder)
    tokenizer, config = TextTokenizer(files), read_model_config(files)
    disable_progress_bar()  # it would disturb other output on the terminal
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=_dtype(dtype), local_files_only=True, trust_remote_code=False,
            use_safetensors=True, attn_implementation=_attention(config), output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # the loader raises many types
        raise ModelError(f"the model folder {folder} does not load: {_first_line(error)}") from error
    missing = sorted(str(key) for key in report["missing_keys"])
    mismatched = sorted(str(key) for key in report.get("mismatched_keys", ()))
    if missing or mismatched:
        raise ModelError(f"the weights in {folder} do not fit its config.json: {(missing + mismatched)[:3]}")
    # Copy from the mapped file into aligned memory: on a CPU the rounding of a matrix product depends on the alignment.
    # In a mapped file it follows from the length of the header, so results could change after a resume.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    if adapter is not None and merges:
        merge_adapter(model, adapter)
    return LoadedModel(_ready(model, device), tokenizer, files)


def adapted(loaded: LoadedModel, shape: AdapterShape) -> LoadedModel:
    """The same model, frozen, with adapters, and with the file that describes them."""
    add_adapters(loaded.model, shape)
    return LoadedModel(loaded.model, loaded.tokenizer, {**loaded.files, ADAPTER_FILE: shape.as_file()})


def model_from_files(
    files: Mapping[str, bytes], dtype: str = "float32", device: str = "cpu", filled: bool = True
) -> Any:
    """The model that the files describe, with random weights, or with uninitialised ones (not `filled`)."""
    config = read_model_config(files)
    try:
        with nullcontext() if filled else _WithoutRandomFill():
            attention = _attention(config)
            model = AutoModelForCausalLM.from_config(config, dtype=_dtype(dtype), attn_implementation=attention)
    except Exception as error:  # each architecture may raise anything for a wrong configuration
        raise ModelError(f"the model's config.json describes no usable model: {_first_line(error)}") from error
    if (adapters := adapter_shape(files)) is not None:
        add_adapters(model, adapters)
    if not filled:  # only buffers that transformers has computed are copied to the device
        for parameter in model.parameters():
            parameter.data = torch.empty_like(parameter, device=device)
    return _ready(model, device)


def check_policy(files: Mapping[str, bytes], entries: Sequence[Entry], dtype: str, memory_bytes: int) -> None:
    """Build the model on no device. `ModelError` unless the entries are its weights, `ResourceError` if too large."""
    tensors = {entry.name: entry for entry in entries if entry.type == "tensor"}
    with _bounded(len(tensors)), torch.device("meta"):
        model = model_from_files(files, dtype, "meta", filled=False)
    check_fit(policy_state(model), tensors)
    needed = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    if needed > memory_bytes:
        count = sum(parameter.numel() for parameter in model.parameters())
        takes = f"{count:,} weights, which take {show_bytes(needed)} in {dtype}"
        detail = f"{show_bytes(memory_bytes)} of memory may be used: allow more (--max-memory), or use another machine"
        raise ResourceError(f"the policy is a model of {takes}, and {detail}")


class _WithoutRandomFill(TorchFunctionMode):
    """In this thread weights are not drawn at random: for 0.6 billion weights that took 30 of 38 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in RANDOM_FILLS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def _bounded(weights: int) -> Iterator[None]:
    """In this context and thread, building a model with far more parts than weights ends with `ModelError`."""
    builder, made, most = threading.get_ident(), 0, PARTS_PER_WEIGHT * weights + MORE_PARTS

    def count(*_registered: object) -> None:
        nonlocal made
        made += threading.get_ident() == builder
        if made > most:
            raise ModelError(f"the model's config.json describes far more than the {weights} weights that come with it")

    hooks = (register_module_module_registration_hook(count), register_module_parameter_registration_hook(count))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def read_model_config(files: Mapping[str, bytes]) -> Any:
    """The configuration object of config.json, for a text model among transformers' own causal language models."""
    values = read_config(files)
    kind = values.pop("model_type", None)
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"config.json names no known causal language model (model_type {str(kind)[:80]!r})")
    made = CONFIG_MAPPING[kind]
    inside = set(made.sub_configs) - PLAIN_TABLES.get(kind, set())
    if inside:  # an architecture that has others inside it
        raise _composite_error(kind, ", ".join(sorted(inside)))
    for count, (path, value) in enumerate(_walk(values, ())):
        if count >= MAX_VALUES or len(path) > MAX_DEPTH:
            raise ModelError(f"the model's config.json has more than {MAX_VALUES} values or {MAX_DEPTH} levels")
        inner = isinstance(value, dict) and path
        if inner and value.get("model_type"):
            raise _composite_error(kind, ".".join(path))
        if path and path[-1] in ("quantization_config", "compression_config") and value:
            raise ModelError(f"config.json has {path[-1]}: quantized models are not supported; use the unquantized one")
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
    try:
        return made.from_dict(without_loading_keys(values, {field.name for field in fields(made)}))
    except Exception as error:
        raise ModelError(f"config.json is not a valid {kind} configuration: {_first_line(error)}") from error


def _attention(config: Any) -> str:
    """torch's own attention, or the eager one if that lacks something (soft caps, sinks)."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    known = config.model_type in WRITTEN_OUT or kind._supports_attention_backend or kind._is_stateful
    return "eager" if known and not kind._supports_sdpa else "sdpa"


def _ready(model: Any, device: str) -> Any:
    Head.of(model)
    if model.base_model is model:  # transformers does not find the layers below the head
        raise ModelError(f"{type(model).__name__} does not separate its layers from its head: it cannot be used")
    return model.to(device).eval()


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"unknown number type {name!r}; there are {', '.join(DTYPES)}")
    return DTYPES[name]


def _first_line(error: Exception) -> str:
    """Without control characters: an error may quote the policy's files."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {''.join(each if each.isprintable() else '?' for each in line)}"


def without_loading_keys(values: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """The values without keys that load something, at every level, and without unknown private keys or inner models."""

    def inner(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: each for key, each in without_loading_keys(value).items() if key != "model_type"}
        return [inner(each) for each in value] if isinstance(value, list) else value

    stays = [key for key in values if key not in LOADING_KEYS and (not key.startswith("_") or key in known)]
    return {key: inner(values[key]) for key in stays}


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value with the path of its keys. An item of a list has its list's path, one level deeper."""
    yield path, value
    if len(path) > MAX_DEPTH:
        return
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _walk(each, (*path, str(key)))
    elif isinstance(value, list):
        for each in value:
            yield from _walk(each, (*path, path[-1] if path else ""))


def _composite_error(kind: str, inner: str) -> ModelError:
    return ModelError(
        f"a model of type {kind[:80]!r} is a composite ({inner[:200]} describes a model inside it): only models of "
        "text alone are supported; if it has a text model, use that one's own config.json (for example gemma3_text)"
    )
