"""Load a causal language model: from a folder with its weights, or from the files that describe it without them.

Weights are read from safetensors only and no code of a model folder or a policy is ever run: `locked` takes away the
ways to import it, `rules` says what a configuration may hold.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
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
from shoal.models.folder import model_folder, read_config, read_files
from shoal.models.logprobs import Head
from shoal.models.lora import ADAPTER_FILE, AdapterShape, adapter_shape, add_adapters
from shoal.models.rules import check_kind, check_values, without_loading_keys
from shoal.models.state import check_fit, policy_state
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import Entry
from shoal.runtime.limits import show_bytes

locked.lock()  # also what has been imported since

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PARTS_PER_WEIGHT, MORE_PARTS = 8, 1000  # of transformers' models none has more than 5 modules and weights for each
RANDOM_FILLS = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_",
)  # fmt: skip
# Of before attention could be chosen: theirs is part of the model. Tried; older ones of that kind do not decode here.
WRITTEN_OUT = frozenset({"bloom", "codegen", "gpt_neo", "gptj", "mpt", "xglm"})


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for use. `files` are what has to travel beside its weights (configuration and tokenizer)."""

    model: Any
    tokenizer: TextTokenizer
    files: Mapping[str, bytes]

    @property
    def eos_token_id(self) -> int:
        return self.tokenizer.eos_token_id


def load_model(name: str | Path, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """A built-in model by name ("tiny"), or any causal language model from a Hugging Face folder."""
    folder = model_folder(name)
    files = read_files(folder)
    tokenizer = TextTokenizer(files)
    config = read_model_config(files)
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"the model folder {folder} holds adapters (adapter_config.json): merge them into the model first"
        )
    disable_progress_bar()  # a loader that draws on the terminal garbles whoever else draws there
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=_dtype(dtype), local_files_only=True, trust_remote_code=False,
            use_safetensors=True, attn_implementation=_attention(config), output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # the loader raises many types, all of which mean: this folder does not load
        raise ModelError(f"the model folder {folder} does not load: {_first_line(error)}") from error
    missing = sorted(str(key) for key in report["missing_keys"])
    mismatched = sorted(str(key) for key in report.get("mismatched_keys", ()))
    if missing or mismatched:
        raise ModelError(f"the weights in {folder} do not fit its config.json: {(missing + mismatched)[:3]}")
    # From a mapped file into memory of the allocator's alignment: on a CPU the rounding of a matrix product depends on
    # where its operands lie. In a mapped file that follows from the length of its header, so the same weights would
    # give other last digits after a resume than before.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return LoadedModel(_ready(model, device), tokenizer, files)


def adapted(loaded: LoadedModel, shape: AdapterShape) -> LoadedModel:
    """The same model, frozen, with adapters on it, and a file beside it that tells whoever computes with it."""
    add_adapters(loaded.model, shape)
    return LoadedModel(loaded.model, loaded.tokenizer, {**loaded.files, ADAPTER_FILE: shape.as_file()})


def model_from_files(
    files: Mapping[str, bytes], dtype: str = "float32", device: str = "cpu", filled: bool = True
) -> Any:
    """The model that the files describe, with random weights, or arbitrary ones (not `filled`) if others are loaded."""
    config = read_model_config(files)
    try:
        with nullcontext() if filled else _Unfilled():
            model = AutoModelForCausalLM.from_config(
                config, dtype=_dtype(dtype), attn_implementation=_attention(config)
            )
    except Exception as error:  # a configuration can be wrong in as many ways as there are architectures
        raise ModelError(f"the model's config.json describes no usable model: {_first_line(error)}") from error
    if (adapters := adapter_shape(files)) is not None:
        add_adapters(model, adapters)
    if not filled:  # nothing to be carried to the device but what transformers has computed
        for parameter in model.parameters():
            parameter.data = torch.empty_like(parameter, device=device)
    return _ready(model, device)


def check_policy(files: Mapping[str, bytes], entries: Sequence[Entry], dtype: str, memory_bytes: int) -> None:
    """Build the model that the files describe without memory, and compare it with a manifest's entries. Raises
    `ModelError` unless the entries are its weights, `ResourceError` if it takes more than `memory_bytes`."""
    tensors = {entry.name: entry for entry in entries if entry.type == "tensor"}
    with _bounded(len(tensors)), torch.device("meta"):
        model = model_from_files(files, dtype, "meta", filled=False)
    check_fit(policy_state(model), tensors)
    needed = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    if needed > memory_bytes:
        count = sum(parameter.numel() for parameter in model.parameters())
        raise ResourceError(
            f"the policy is a model of {count:,} weights, which take {show_bytes(needed)} in {dtype}, "
            f"and {show_bytes(memory_bytes)} of memory may be used here: allow more (--max-memory), or use another "
            "machine"
        )


class _Unfilled(TorchFunctionMode):
    """Weights are not drawn at random, by this thread: that took 30 of 38 s for 0.6 billion, for nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in RANDOM_FILLS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def _bounded(weights: int) -> Iterator[None]:
    """A model that is made of far more parts than it has weights is given up in this context, by this thread."""
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
    """The configuration object of config.json: of one of transformers' own causal language models, of text alone."""
    values = read_config(files)
    kind = values.pop("model_type", None)
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"the model's config.json names no known causal language model (model_type {str(kind)[:80]!r})"
        )
    made = CONFIG_MAPPING[kind]
    check_kind(kind, made.sub_configs)
    check_values(values, kind)
    try:
        return made.from_dict(without_loading_keys(values, {field.name for field in fields(made)}))
    except Exception as error:  # anything may be wrong with the values
        raise ModelError(
            f"the model's config.json is not a valid {kind} configuration: {_first_line(error)}"
        ) from error


def _attention(config: Any) -> str:
    """torch's own attention, or the written-out one where that lacks something (soft caps, sinks). What has neither,
    nor a recurrent state, is asked for the first, and refused by transformers in words."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    known = config.model_type in WRITTEN_OUT or kind._supports_attention_backend or kind._is_stateful
    return "eager" if known and not kind._supports_sdpa else "sdpa"


def _ready(model: Any, device: str) -> Any:
    Head.of(model)
    if model.base_model is model:  # as transformers says where it does not find the layers below the head
        raise ModelError(f"{type(model).__name__} does not tell its layers from its head: it cannot be computed with")
    return model.to(device).eval()


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"unknown number type {name!r}; there are {', '.join(DTYPES)}")
    return DTYPES[name]


def _first_line(error: Exception) -> str:
    """Of what is told, without control characters: it may repeat words of the policy."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {''.join(each if each.isprintable() else '?' for each in line)}"
