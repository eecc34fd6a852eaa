"""Any causal language model of transformers: it loads from a folder, trains a step, and its policy travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_stubs import SETTINGS, make_group, tiny_files, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from shoal.errors import ModelError
from shoal.models.load import load_model, model_from_files
from shoal.models.logprobs import Head, hidden_states
from shoal.models.state import apply_state, policy_state, policy_views
from shoal.trainer.learner import new_learner
from shoal.trainer.memory import shape_of
from shoal.trainer.step import StepWork, train_step

COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
SHARED = {**COMMON, "num_key_value_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "mistral": {**COMMON, "sliding_window": None},
    "mistral-window": {**COMMON, "model_type": "mistral", "sliding_window": 4},
    "qwen2": COMMON,
    "qwen3": COMMON,
    "gemma": COMMON,
    "gemma3_text": COMMON,
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "eos_token_id": 1},
    "gpt_neox": SHARED,
    "phi": {**SHARED, "head_dim": 16},
    "phi3": {**COMMON, "original_max_position_embeddings": 64},
    "olmo2": COMMON,
    "olmo3": COMMON,
    "smollm3": COMMON,
    "starcoder2": COMMON,
    "stablelm": COMMON,
    "opt": {**SHARED, "word_embed_proj_dim": 32, "ffn_dim": 48},
    "granite-plain": {**COMMON, "model_type": "granite", "logits_scaling": 1.0},
    "qwen3_moe": {**COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {**COMMON, "num_local_experts": 4},
}


def config_of(name: str) -> Any:
    values = dict(ARCHITECTURES[name])
    return AutoConfig.for_model(values.pop("model_type", name), **values)


# One of each way of doing things: learned positions, windows, norms in other places, fused projections, experts.
QUICK = ("gemma3_text", "gpt2", "llama", "phi3", "qwen3_moe")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(ARCHITECTURES)]
)
def test_a_random_model_of_this_kind(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config_of(name), attn_implementation="sdpa").eval()
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


@pytest.mark.parametrize(
    ("name", "setting"),
    [("gemma2", "final_logit_softcapping"), ("cohere", "logit_scale"), ("granite", "logits_scaling")],
)
def test_logits_that_are_rescaled_are_refused_in_words(name: str, setting: str) -> None:
    config = AutoConfig.for_model(name, **COMMON, **({"logits_scaling": 8.0} if name == "granite" else {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=f"rescale their logits \\({setting}"):
        Head.of(model)
