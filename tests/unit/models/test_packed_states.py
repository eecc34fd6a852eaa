"""Sequences end to end: each as if alone; layers compiled one by one."""

import pytest
import torch
import transformers
from torch.utils._pytree import tree_map

from kit.tiny import build_tiny
from shoal.errors import ModelError
from shoal.models.logprobs import hidden_states
from shoal.models.packed import ATTENTION, Packed, compile_layers, decoder_layers, packed_states, supports_packing

LENGTHS = (5, 1, 12, 3, 30, 7)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa",
    ))  # fmt: skip


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_implementation="sdpa",
    ))  # fmt: skip


MODELS = {"qwen3": lambda: build_tiny(1, num_key_value_heads=1), "llama": llama, "gpt2": gpt2}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def sequences(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (length,), generator=generator) for length in lengths]


def gradients(model, states, weights):
    model.zero_grad()
    (states * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_states_and_gradients_are_those_of_the_sequences_alone(model):
    parts = sequences()
    weights = torch.randn(sum(LENGTHS), model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([hidden_states(model, part[None])[0] for part in parts])
    expected = gradients(model, alone, weights)
    together = packed_states(model, Packed.of(parts))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    found = gradients(model, together, weights)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


def test_changing_one_sequence_or_filling_up_changes_no_other(model):
    parts = sequences()
    before = packed_states(model, Packed.of(parts)).split(LENGTHS)
    changed = [*parts[:2], (parts[2] + 1) % 96, *parts[3:]]
    after = packed_states(model, Packed.of(changed)).split(LENGTHS)
    same = [bool(torch.equal(one, other)) for one, other in zip(before, after, strict=True)]
    assert same == [True, True, False, True, True, True]
    packed = Packed.of(sequences())
    filled = packed.filled(16)
    assert filled.bounds[-1] == 64
    assert filled.bounds[:-1] == packed.bounds
    assert packed.filled(58) is packed
    torch.testing.assert_close(packed_states(model, filled)[:58], packed_states(model, packed), rtol=1e-5, atol=1e-5)


def test_a_recomputed_layer_still_sees_the_bounds(model):
    """Layers are computed again in the backward pass, when the call that packed them is long over."""
    packed, weights = Packed.of(sequences()), torch.ones(1)
    expected = gradients(model, packed_states(model, packed), weights)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    found = gradients(model, packed_states(model, packed), weights)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_a_model_once_packed_serves_plain_calls_bit_for_bit_as_before(model):
    ids = torch.stack(sequences((9, 9), seed=2))
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])  # an engine pads its prompts on the left
    with torch.no_grad():
        before = hidden_states(model, ids), model(ids, attention_mask=mask).logits
        packed_states(model, Packed.of(sequences()))
        assert model.config._attn_implementation == ATTENTION
        after = hidden_states(model, ids), model(ids, attention_mask=mask).logits
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_models_with_full_attention_are_packed_even_if_layer_arguments_are_copied(model):
    """As FSDP does it, layer by layer."""
    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(lambda _layer, *given: tree_map(lambda leaf: leaf, given), with_kwargs=True)
    assert supports_packing(model)
    assert model.config._attn_implementation == "sdpa"  # asking changes nothing


NOT_PACKED = {
    "windows": lambda: build_tiny(0, use_sliding_window=True, sliding_window=4, max_window_layers=0),
    "mixed": lambda: build_tiny(0, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "recurrent": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1, state_size=4)
    ),
    "eager": lambda: build_tiny(0, attn_implementation="eager"),
}


@pytest.mark.parametrize("kind", NOT_PACKED)
def test_which_models_are_not(kind, caplog):
    model = NOT_PACKED[kind]().eval()
    before = model.config._attn_implementation
    with caplog.at_level("INFO", "shoal.models.packed"):
        assert not any(supports_packing(model) for _ in range(2))
    assert model.config._attn_implementation == before
    (said,) = caplog.messages
    assert "padded rows" in said


def test_one_long_sequence_does_not_widen_many_short_ones():
    largest = 0

    class GuardMonitor(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    model = build_tiny(0, max_position_embeddings=512)
    lengths = (200, *[2] * 150)
    with torch.no_grad(), GuardMonitor():
        packed_states(model, Packed.of(sequences(lengths)))
    assert 0 < largest <= 2 * sum(lengths) * 192  # neither [S, longest] nor [T, T]: 500 tokens of the widest layer


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
    model, ids, seen = build_tiny(0), torch.arange(12)[None], []
    names, expected = list(model.state_dict()), hidden_states(model, ids)
    compile_layers(model)
    model.model.layers[1].register_forward_hook(lambda layer, *_: seen.append(layer))
    assert torch.equal(hidden_states(model, ids), expected)
    assert seen == [model.model.layers[1]], "hooks of a layer stay outside"
    assert list(model.state_dict()) == names
    ((function, options, calls),) = programs
    assert function is type(model.model.layers[0]).forward
    assert options["dynamic"] is True  # other lengths compile nothing anew
    assert calls == list(model.model.layers)
    assert torch._functorch.config.activation_memory_budget < 1


def test_layers_are_found_where_an_architecture_nests_them_or_refused():
    small = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "ffn_dim": 48, "num_attention_heads": 4}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**small))
    assert decoder_layers(model) == list(model.model.decoder.layers)
    model.config.num_hidden_layers = 7
    with pytest.raises(ModelError, match="no list of 7 layers"):
        decoder_layers(model)
