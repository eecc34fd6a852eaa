"""Load a causal language model: from a folder with its weights, or from the files that describe it without them.

Weights are read from safetensors only and no code of a model folder or a policy is ever run: `locked` takes away the
ways to import it, `rules` says what a configuration may hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from shoal.errors import ModelError
from shoal.models import locked
from shoal.models.folder import model_folder, read_config, read_files
from shoal.models.logprobs import Head
from shoal.models.lora import ADAPTER_FILE, AdapterShape, adapter_shape, add_adapters
from shoal.models.rules import check_kind, check_values, without_loading_keys
from shoal.models.tokenizer import TextTokenizer

locked.lock()  # also what has been imported since

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of before attention could be chosen: theirs is part of the model. Tried; older ones of that kind do not decode here.
WRITTEN_OUT = frozenset({"bloom", "codegen", "gpt_neo", "gptj", "mpt", "xglm"})


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for use. `files` are what has to travel beside its weights (configuration and tokenizer)."""

    model: Any
    tokenizer: TextTokenizer
    files: Mapping[str, bytes]

    @property
    def config(self) -> Any:
        return self.model.config

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
    return LoadedModel(_ready(model, device), tokenizer, files)


def adapted(loaded: LoadedModel, shape: AdapterShape) -> LoadedModel:
    """The same model, frozen, with adapters on it, and a file beside it that tells whoever computes with it."""
    add_adapters(loaded.model, shape)
    return LoadedModel(loaded.model, loaded.tokenizer, {**loaded.files, ADAPTER_FILE: shape.as_file()})


def model_from_files(files: Mapping[str, bytes], dtype: str = "float32", device: str = "cpu") -> Any:
    """The model that the files describe, its weights still arbitrary: `apply_state` is expected to follow."""
    config = read_model_config(files)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=_dtype(dtype), attn_implementation=_attention(config))
    except Exception as error:  # a configuration can be wrong in as many ways as there are architectures
        raise ModelError(f"the model's config.json describes no usable model: {_first_line(error)}") from error
    if (adapters := adapter_shape(files)) is not None:
        add_adapters(model, adapters)
    return _ready(model, device)


def read_model_config(files: Mapping[str, bytes]) -> Any:
    """The configuration object of config.json: of one of transformers' own causal language models, of text alone."""
    values = read_config(files)
    kind = values.pop("model_type", None)
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"the model's config.json names no known causal language model (model_type {kind!r})")
    made = CONFIG_MAPPING[kind]
    check_kind(kind, made.sub_configs)
    check_values(values, kind)
    try:
        return made.from_dict(without_loading_keys(values, {field.name for field in fields(made)}))
    except Exception as error:  # anything may be wrong with the values
        raise ModelError(f"the model's config.json is not a valid {kind} configuration: {error}") from error


def _attention(config: Any) -> str:
    """torch's own attention, or the written-out one where that lacks something (soft caps, sinks).

    What has neither, nor a recurrent state, is asked for the first, and refused by transformers in words.
    """
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    known = config.model_type in WRITTEN_OUT or kind._supports_attention_backend or kind._is_stateful
    return "eager" if known and not kind._supports_sdpa else "sdpa"


def _ready(model: Any, device: str) -> Any:
    Head.of(model)
    if model.base_model is model:  # as transformers says where it does not find the layers below the head
        raise ModelError(f"{type(model).__name__} does not tell its layers from its head: it cannot be computed with")
    _own_memory(model)
    return model.to(device).eval()


def _own_memory(model: Any) -> None:
    """Move weights from a mapped file into memory of the allocator's alignment.

    On a CPU the rounding of a matrix product depends on where its operands lie. In a mapped file that follows from the
    length of its header, so the same weights would give other last digits after a resume than before.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ModelError(f"unknown number type {name!r}; there are {', '.join(DTYPES)}")
    return DTYPES[name]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
