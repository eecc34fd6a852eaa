"""Any causal language model of transformers: it loads from a folder, trains a step, and its policy travels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_stubs import SETTINGS, make_group, tiny_files, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from shoal.engines import GenerationRequest, PrefillRequest
from shoal.engines.torch import TorchEngine
from shoal.errors import ModelError
from shoal.models.load import load_model, model_from_files
from shoal.models.logprobs import Head, hidden_states
from shoal.models.packed import supports_packing
from shoal.models.state import apply_state, policy_state, policy_views
from shoal.protocol import SamplingParameters
from shoal.trainer.learner import new_learner
from shoal.trainer.memory import shape_of
from shoal.trainer.step import StepWork, train_step

COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
SHARED = {**COMMON, "num_key_value_heads": 2}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8
}  # fmt: skip
STATE = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8
}  # fmt: skip
PLAIN = (
    "llama", "qwen2", "qwen3", "gemma", "gemma3_text", "olmo2", "olmo3", "smollm3", "starcoder2", "stablelm",
    "cohere",
)  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(PLAIN, COMMON),
    "mistral": {**COMMON, "sliding_window": None},
    "mistral-window": {**COMMON, "model_type": "mistral", "sliding_window": 4},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "eos_token_id": 1},
    "gpt_neox": SHARED,
    "phi": {**SHARED, "head_dim": 16},
    "phi3": {**COMMON, "original_max_position_embeddings": 64},
    "opt": {**SHARED, "word_embed_proj_dim": 32, "ffn_dim": 48},
    "granite-plain": {**COMMON, "model_type": "granite", "logits_scaling": 1.0},
    # Logits that are scaled or capped; attention that is capped, has sinks, or is written out in the model.
    "granite": {**COMMON, "logits_scaling": 8.0},
    "granitemoe": {**COMMON, "logits_scaling": 6.0},
    "hyperclovax": {**COMMON, "logits_scaling": 3.0},
    "cohere2": {**COMMON, "sliding_window": 4},
    "gemma2": {**COMMON, "sliding_window": 4, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5},
    "vaultgemma": {**COMMON, "sliding_window": 4, "final_logit_softcapping": 0.5},
    "gemma4_text": {**COMMON, "final_logit_softcapping": 0.5, "vocab_size_per_layer_input": 96,
     "hidden_size_per_layer_input": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "nanochat": {**COMMON, "final_logit_softcapping": 0.5},
    "gpt_oss": {**COMMON, "num_local_experts": 4, "sliding_window": 4},
    "mpt": {"vocab_size": 96, "d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64, "logit_scale": 0.5},
    "bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 2},
    "gptj": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "rotary_dim": 8},
    "codegen": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "gpt_neo": {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64,
     "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "xglm": {"vocab_size": 96, "d_model": 32, "num_layers": 2, "attention_heads": 2, "ffn_dim": 48},
    "qwen3_moe": {**COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {**COMMON, "num_local_experts": 4},
    # Layers that keep a state instead of keys and values, alone or beside attention.
    "qwen3_5_text": {**COMMON, **DELTA, "num_hidden_layers": 4},
    "qwen3_next": {**COMMON, **DELTA, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2,
     "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "lfm2": {**COMMON, "layer_types": ["conv", "full_attention"]},
    "falcon_h1": {**COMMON, **STATE, "mamba_d_ssm": 32, "mamba_d_head": 8},
    "bamba": {**COMMON, **STATE, "attn_layer_indices": [1]},
    "granitemoehybrid": {**COMMON, **STATE, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16,
     "num_local_experts": 2, "num_experts_per_tok": 1},
    "jamba": {**COMMON, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
     "use_mamba_kernels": False},
}  # fmt: skip


def config_of(name: str) -> Any:
    values = dict(ARCHITECTURES[name])
    return AutoConfig.for_model(values.pop("model_type", name), **values)


# One of each way of doing things: learned positions, windows, norms in other places, fused projections, experts.
QUICK = (
    "cohere", "gemma2", "gemma3_text", "gpt2", "granite", "llama", "phi3", "qwen3_5_text", "qwen3_moe",
)  # fmt: skip
PADDED = ("gemma2", "vaultgemma", "cohere2", "gemma4_text", "gemma3_text", "gpt_oss", "mistral-window", "bloom", "mpt")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(ARCHITECTURES)]
)
def test_a_random_model_of_this_kind(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config_of(name)).eval()  # with the attention that transformers chooses
    made.save_pretrained(tmp_path)
    for file, data in tiny_files(tiny_model()).items():
        if file != "config.json":
            (tmp_path / file).write_bytes(data)
    loaded = load_model(tmp_path)
    ids = torch.arange(3, 13)[None]
    ours = Head.of(loaded.model).logits(hidden_states(loaded.model, ids)[0])
    torch.testing.assert_close(ours, made(ids).logits[0].float(), atol=1e-5, rtol=1e-4)

    before = {key: value.clone() for key, value in policy_state(loaded.model).items()}
    learner = new_learner(loaded.model, SETTINGS)
    groups = [make_group(unit, 0, loaded.model) for unit in range(3)]
    metrics = train_step(learner, StepWork(step=0, groups=groups, temperature=1.0, max_staleness=0))
    assert metrics["mismatch"] < 1e-4, "what the worker computed is what the trainer computes"
    assert metrics["grad_norm"] > 0
    changed = [key for key, value in policy_state(loaded.model).items() if not torch.equal(value, before[key])]
    assert len(changed) > len(before) // 2

    other = model_from_files(loaded.files)
    apply_state(other, policy_views(loaded.model))
    assert torch.equal(hidden_states(other, ids), hidden_states(loaded.model, ids))
    shape = shape_of(loaded.files, SETTINGS)
    assert shape.weights == sum(weight.numel() for weight in loaded.model.parameters())
    assert shape.activation_bytes > 0
    assert learner.packed == supports_packing(loaded.model)
    assert not (learner.packed and name in PADDED)
    check_decoding(loaded.model)


@torch.no_grad()
def check_decoding(model: Any) -> None:
    """Cached, batched and padded: the log-probabilities that transformers' own logits give."""
    sampling = SamplingParameters(temperature=0.8, max_new_tokens=6, eos_token_ids=(1,))
    requests = [GenerationRequest(tuple(range(5, 5 + length)), (length, 50), sampling) for length in (1, 7, 3)]
    for request, completions in zip(requests, TorchEngine.wrap(model).generate(requests), strict=True):
        for completion in completions:
            ids = torch.tensor([*request.prompt_ids, *completion.token_ids.tolist()])
            start = len(request.prompt_ids)
            logits = model(ids[None]).logits[0, start - 1 : -1].float()
            expected = torch.log_softmax(logits / 0.8, dim=-1).gather(1, ids[start:, None])[:, 0]
            np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-4)


SCALES = {"granite": 1 / 8, "granitemoe": 1 / 6, "hyperclovax": 3.0, "cohere": 1 / 16, "cohere2": 1 / 16, "mpt": 1.0}
CAPS = ("gemma2", "vaultgemma", "gemma4_text", "nanochat")


@pytest.mark.parametrize("name", [*SCALES, *CAPS, "llama"])
def test_logit_transforms_come_from_the_configuration_or_are_refused(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name))
    head = Head.of(model)
    assert (head.scale, head.cap) == (SCALES.get(name, 1.0), 0.5 if name in CAPS else None)
    nonsense = {"gemma2": ("final_logit_softcapping", 0.0), "granite": ("logits_scaling", 0)}
    if name in nonsense:
        setattr(model.config, *nonsense[name])
        with pytest.raises(ModelError, match=f"{nonsense[name][0]} in config.json is .*positive number"):
            Head.of(model)


@pytest.mark.parametrize("name", ["jamba", "qwen3_5_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_completions_of_one_prompt_are_checked_as_if_alone(name: str, dtype: torch.dtype) -> None:
    """Weights large enough that a state which is forgotten between prompt and completion shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name)).eval()
    for weight in model.parameters():
        weight.mul_(6 if weight.ndim > 1 else 1)
    engine, random = TorchEngine.wrap(model.to(dtype)), np.random.default_rng(0)
    prompt = tuple(random.integers(3, 90, size=33).tolist())
    requests = [PrefillRequest(prompt, random.integers(3, 90, size=size).astype(np.int32), 1.0) for size in (1, 4, 7)]
    together = engine.prefill(requests)
    for found, request in zip(together, requests, strict=True):
        alone = engine.prefill([request])[0].logprobs
        np.testing.assert_allclose(found.logprobs, alone, atol=1e-3 if dtype == torch.float32 else 0.05)


FEW = {"num_local_experts": 2, "interleave_moe_layer_step": 1, "no_rope_layers": [1, 0]}
RECURRENT: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {**COMMON, "lru_width": 32, "block_types": ["recurrent", "attention"]},
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "eos_token_id": 1},
    "rwkv": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
}


@pytest.mark.parametrize(("kind", "changes", "said"), [
    ("llama4_text", {**COMMON, **FEW}, "Llama4ForCausalLM does not separate its layers from its head"),
    ("openai-gpt", {"vocab_size": 96, "n_embd": 16, "n_layer": 1, "n_head": 2}, "GPTLMHeadModel does not support"),
    *((kind, changes, "cannot be decoded in batches") for kind, changes in RECURRENT.items()),
])  # fmt: skip
def test_unsupported_models_are_refused_with_a_reason(kind: str, changes: dict[str, Any], said: str) -> None:
    config = AutoConfig.for_model(kind, **changes)
    sampling = SamplingParameters(temperature=1.0, max_new_tokens=3, eos_token_ids=(1,))
    files = {"config.json": config.to_json_string(use_diff=False).encode()}
    with pytest.raises(ModelError, match=said):
        TorchEngine.wrap(model_from_files(files)).generate([GenerationRequest((5, 6), (1, 2), sampling)])
