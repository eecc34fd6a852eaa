"""Compiling layer by layer: every layer, each bound to itself, one program for all."""

from __future__ import annotations

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from shoal.errors import ModelError
from shoal.models.compiled import compile_layers, decoder_layers
from shoal.models.logprobs import hidden_states
from shoal.models.tiny import build_tiny


@pytest.fixture
def programs(monkeypatch):
    """What is handed to the compiler, which is replaced by none: compiling takes a minute on a CPU."""
    made = []

    def compile_nothing(function, **options):
        calls = []
        made.append((function, options, calls))
        return lambda layer, *given, **named: (calls.append(layer), function(layer, *given, **named))[1]

    monkeypatch.setattr(torch, "compile", compile_nothing)
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        yield made


def test_one_program_serves_all_layers_and_each_computes_with_its_own_weights(programs):
    model, ids = build_tiny(0), torch.arange(12)[None]
    names, expected = list(model.state_dict()), hidden_states(model, ids)
    compile_layers(model)
    assert torch.equal(hidden_states(model, ids), expected)
    assert list(model.state_dict()) == names
    ((function, options, calls),) = programs
    assert function is type(model.model.layers[0]).forward
    assert options["dynamic"] is True  # other lengths compile nothing anew
    assert calls == list(model.model.layers)
    assert torch._functorch.config.activation_memory_budget < 1


def test_hooks_of_a_layer_stay_outside(programs):
    model, seen = build_tiny(0), []
    compile_layers(model)
    model.model.layers[1].register_forward_hook(lambda layer, *_: seen.append(layer))
    hidden_states(model, torch.arange(4)[None])
    assert seen == [model.model.layers[1]]


def test_layers_are_found_where_an_architecture_nests_them():
    config = OPTConfig(vocab_size=96, hidden_size=32, num_hidden_layers=3, ffn_dim=48, num_attention_heads=4)
    model = OPTForCausalLM(config)
    assert decoder_layers(model) == list(model.model.decoder.layers)


def test_a_model_without_a_list_of_layers_is_refused():
    model = build_tiny(0)
    model.config.num_hidden_layers = 7
    with pytest.raises(ModelError, match="no list of 7 layers"):
        decoder_layers(model)
