"""The vLLM engine against torch's: tokens, proofs, weights written in place, and what vLLM does with many requests."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from kit.cli import told
from shoal.engines import Engine, GenerationRequest, PrefillRequest, build
from shoal.engines.torch import TorchEngine
from shoal.engines.vllm.weights import plain_linear
from shoal.errors import ModelError
from shoal.evaluation.subject import EngineChoice, open_subject
from shoal.models import TensorView, TextTokenizer
from shoal.models.load import model_from_files
from shoal.models.lora import ADAPTER_FILE
from shoal.models.state import policy_state, policy_views, to_view
from shoal.protocol import PolicyRef, ProofParameters, SamplingParameters
from shoal.sampling import check_seeded, uniforms
from shoal.shardcast import ChangedValues
from shoal.toploc import check_proofs, compare, split_proofs
from shoal.validator.profiles import read_profile

VOCABULARY, EOS = 500, 1  # not a multiple of what vLLM pads to
PROOF = ProofParameters(topk=32, rows=16)
REF = PolicyRef(incarnation=0, version=1, digest="ab" * 32)
KINDS = {
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, True),
    "qwen3-untied": (Qwen3Config, Qwen3ForCausalLM, False),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, True),
    "llama-untied": (LlamaConfig, LlamaForCausalLM, False),
}


@dataclass(frozen=True)
class Small:
    """A model of random weights; `policy(0)` are these, later ones are others."""

    files: Mapping[str, bytes]
    model: torch.nn.Module

    @classmethod
    def of(cls, kind: str, positions: int = 512) -> "Small":
        settings, model, tied = KINDS[kind]
        torch.manual_seed(7)
        config = settings(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=positions, tie_word_embeddings=tied,
            bos_token_id=0, eos_token_id=EOS, pad_token_id=0, initializer_range=0.15,
        )  # fmt: skip
        return cls({"config.json": config.to_json_string(use_diff=False).encode()}, model(config).float().eval())

    def policy(self, number: int, share: float = 1.0) -> dict[str, torch.Tensor]:
        """Every weight with noise on a share of its values."""
        random = torch.Generator().manual_seed(number)
        state = {name: weight.clone() for name, weight in policy_state(self.model).items()}
        for weight in state.values() if number else ():
            mask = torch.rand(weight.shape, generator=random) < share
            weight += mask * 0.05 * torch.randn(weight.shape, generator=random)
        return state

    def torch(self, state: Mapping[str, torch.Tensor]) -> TorchEngine:
        engine = TorchEngine(self.files)
        engine.load_policy(None, views(state))
        return engine


def views(state: Mapping[str, torch.Tensor]) -> dict[str, TensorView]:
    return {name: to_view(name, weight) for name, weight in state.items()}


def changes(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> list[ChangedValues]:
    found = []
    for name, weight in new.items():
        bits, before = (each.contiguous().view(-1).view(torch.int32).numpy() for each in (weight, old[name]))
        where = np.flatnonzero(bits != before)
        found.append(ChangedValues(name, "F32", 4, where, bits[where].view(np.uint32)))
    return found


def asked(prompt: int, seeds: int, new: int, temperature: float = 1.0) -> GenerationRequest:
    random = np.random.default_rng(prompt)
    sampling = SamplingParameters(temperature=temperature, max_new_tokens=new, eos_token_ids=(EOS,))
    ids = tuple(random.integers(2, VOCABULARY, prompt).tolist())
    return GenerationRequest(ids, tuple(random.integers(0, 2**63, seeds).tolist()), sampling)


MIXED = [asked(70, 8, 64), asked(3, 3, 20, 0.7), asked(90, 5, 40, 1.3), asked(33, 1, 33), asked(64, 4, 50)]


def differences(engine: Engine, judge: Engine, requests: list[GenerationRequest] = MIXED) -> tuple[list[str], float]:
    """What a validator finds wrong with what an engine draws; and the largest difference of a log-probability."""
    wrong, gap = list[str](), 0.0
    for request, group in zip(requests, engine.generate(requests, PROOF), strict=True):
        given = [PrefillRequest(request.prompt_ids, each.token_ids, request.sampling.temperature) for each in group]
        for seed, each, seen in zip(request.seeds, group, judge.prefill(given, PROOF), strict=True):
            length = len(each.token_ids)
            seeded = check_seeded(uniforms(seed, 0, length), seen.cdf_low, seen.cdf_high, seen.logprobs)
            proofs = split_proofs(each.proofs, length, judge.hidden_size, PROOF.topk, PROOF.rows)
            assert seen.points is not None
            proved = check_proofs(compare(seen.points, proofs))
            wrong += [check.reason for check in (seeded, proved) if not check.passed]
            gap = max(gap, float(np.abs(each.logprobs - seen.logprobs).max()))
    return wrong, gap


@pytest.fixture(scope="module", params=KINDS)
def small(request) -> Small:
    return Small.of(request.param)


@pytest.fixture(scope="module")
def engine(small) -> Engine:
    made = build("vllm", small.files)
    made.load_policy(None, views(small.policy(0)))
    return made


def test_it_draws_and_proves_what_torchs_engine_does(small, engine):
    engine.load_policy(None, views(small.policy(0)))
    judge = small.torch(small.policy(0))
    wrong, gap = differences(engine, judge)
    assert (wrong, gap < 1e-4) == ([], True)
    mine, theirs = (list(chain(*each.generate(MIXED, PROOF))) for each in (engine, judge))
    same = [one.token_ids.tolist() == two.token_ids.tolist() for one, two in zip(mine, theirs, strict=True)]
    assert sum(same) >= len(same) - 1, "rounding decides a token in a million"
    assert sum(one.proofs == two.proofs for one, two in zip(mine, theirs, strict=True)) > len(same) / 2


def test_it_recomputes_what_torchs_engine_drew(small, engine):
    engine.load_policy(None, views(small.policy(0)))
    wrong, gap = differences(small.torch(small.policy(0)), engine)
    assert (wrong, gap < 1e-4) == ([], True)


def test_other_weights_are_written_in_place_and_seen(small, engine):
    engine.load_policy(None, views(small.policy(0)))
    engine.load_policy(REF, views(small.policy(1)))
    assert engine.policy == REF
    wrong, gap = differences(engine, small.torch(small.policy(1)))
    assert (wrong, gap < 1e-4) == ([], True)
    assert len(differences(engine, small.torch(small.policy(0)))[0]) > 20, "and the old ones are gone"


def test_only_what_changed_is_written_and_every_value_is_the_policys(small, engine):
    before, after = small.policy(0), small.policy(2, share=0.01)
    engine.load_policy(None, views(before))
    engine.update_policy(REF, changes(before, after))
    assert engine.policy == REF
    wrong, gap = differences(engine, small.torch(after))
    assert (wrong, gap < 1e-4) == ([], True)
    assert all(torch.equal(engine.weights[name], weight) for name, weight in after.items())
    assert len(differences(engine, small.torch(before))[0]) > 5


def test_weights_of_another_model_are_refused_and_nothing_is_computed(small, engine):
    engine.load_policy(None, views(small.policy(0)))
    with pytest.raises(ModelError, match="another model"):
        engine.load_policy(REF, views({"lm_head.bias": torch.zeros(3)}))
    assert engine.policy is None


class Enough(Exception):
    pass


@pytest.mark.parametrize(
    ("prefill_tokens", "cache_bytes"), [(64, 1 << 30), (4096, 26 * 32 * 1024), (64, 26 * 32 * 1024)]
)
def test_prompts_in_pieces_and_rows_that_lost_their_cache_come_out_the_same(monkeypatch, prefill_tokens, cache_bytes):
    """The cache of the second has 26 blocks of 32 tokens: rows are put back, and computed again."""
    from shoal.engines.vllm import engine as module

    small = Small.of("qwen3-tied", positions=160)
    monkeypatch.setitem(module.PREFILL_TOKENS, "cpu", prefill_tokens)
    monkeypatch.setattr(module, "LEAST_CACHE_BYTES", 1)
    monkeypatch.setattr(module, "MOST_CACHE_BYTES", cache_bytes)
    tight = module.VllmEngine(small.files, "cpu", "float32", max_rows=48)
    tight.load_policy(None, views(small.policy(0)))
    scheduler, lost = tight._vllm.engine_core.engine_core.scheduler, list[str]()
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (lost.append("row"), preempt(*a, **k))[1])
    judge = small.torch(small.policy(0))
    assert differences(tight, judge)[0] == []
    assert differences(judge, tight)[0] == [], "prefills, too"
    assert bool(lost) == (cache_bytes < 1 << 30)


def test_a_call_that_ends_early_leaves_nothing_in_flight(small, engine):
    engine.load_policy(None, views(small.policy(0)))

    def enough(_tokens: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        engine.generate([replace(each, on_tokens=enough) for each in MIXED], PROOF)
    assert (engine._hook.drawn, engine._vllm.has_unfinished_requests()) == ({}, False)
    with pytest.raises(ValueError, match="more than the 512"):
        engine.generate([MIXED[0], asked(500, 1, 20)])
    assert differences(engine, small.torch(small.policy(0)))[0] == []


def test_groups_are_in_flight_together_and_may_be_aborted_after_each_step(small, engine):
    """Five groups of at most 64 tokens take hardly more steps than the longest completion has tokens."""
    engine.load_policy(None, views(small.policy(0)))
    steps = list[None]()
    check = partial(steps.append, None)
    groups = engine.generate([replace(each, check=check) for each in MIXED], PROOF)
    longest = max(len(each.token_ids) for each in chain(*groups))
    assert longest <= len(steps) <= longest + len(MIXED)


def test_a_kind_is_measured_and_a_machine_too(tmp_path, capsys):
    """`shoal doctor --calibrate --engine vllm` is what opens a kind of vLLM's to a run."""
    out = tmp_path / "vllm.toml"
    asked = ["--calibrate", "--samples", "32", "--max-new-tokens", "10", "--out", out]
    told(capsys, 0, "doctor", "--folder", tmp_path, "--engine", "vllm", *asked)
    assert read_profile(out).key == "vllm/cpu/float32"
    asked = ["--bench", "--tokens", "16", "--json"]
    measured = json.loads(told(capsys, 0, "doctor", "--folder", tmp_path, "--engine", "vllm", *asked).out)["bench"]
    assert measured["kind"] == "vllm/cpu/float32"
    assert min(measured[name] for name in ("generate", "worker", "prefill", "transformers")) > 0


@contextmanager
def head_packed() -> Iterator[None]:
    """What vLLM makes of a head on a processor: it keeps the weights, and computes with a packed copy."""
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm
    with plain_linear():
        plain = utils.dispatch_cpu_unquantized_gemm
        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: (plain if remove_weight else packing)(
            layer, remove_weight
        )
        yield


@pytest.mark.parametrize("layers", [nullcontext, head_packed])
@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-untied"])
def test_layers_that_compute_with_packed_copies_are_found_before_any_work(monkeypatch, kind, layers):
    from shoal.engines.vllm import engine as module

    small = Small.of(kind)
    monkeypatch.setattr(module, "plain_linear", layers)
    packed = build("vllm", small.files)
    with pytest.raises(ModelError, match="generate with --engine torch"):
        packed.load_policy(REF, views(small.policy(0)))
    assert packed.policy is None


def test_the_probe_refuses_what_torchs_engine_computes_otherwise(monkeypatch, small):
    """Here torch's engine is given other weights."""
    from shoal.engines.vllm import probe

    build_judge = probe._judge
    monkeypatch.setattr(
        probe, "_judge", lambda engine, files, _tensors: build_judge(engine, files, views(small.policy(1)))
    )
    made = build("vllm", small.files)
    with pytest.raises(ModelError, match=r"does not compute this model as torch/cpu/float32 does \(log-prob.*% of"):
        made.load_policy(REF, views(small.policy(0)))
    assert made.policy is None


def config(kind: str, **changes: object) -> dict[str, bytes]:
    values = json.loads(Small.of("llama-untied").files["config.json"])
    return {"config.json": json.dumps({**values, "model_type": kind, **changes}).encode()}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            config("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
            "vLLM (does not keep|takes no)",
        ),
        (config("gpt2", n_embd=64, n_layer=2, n_head=2), "does not keep weight"),
        (config("mistral", head_dim=16), "vLLM does not compute this model"),
        (config("helium"), "vLLM takes no HeliumForCausalLM"),
    ],
    ids=["experts", "transposed", "unknown shape of attention", "unknown to vLLM"],
)
def test_what_vllm_keeps_or_computes_otherwise_is_refused_in_words(files, message):
    model = model_from_files(files)
    with pytest.raises(ModelError, match=rf"{message}.*generate with --engine torch"):
        build("vllm", files).load_policy(REF, policy_views(model))


def test_a_model_folder_is_evaluated_as_by_torchs_engine():
    mine, theirs = (open_subject("tiny", "tiny", EngineChoice(name, "cpu", "float32"), 8) for name in ("vllm", "torch"))
    prompts = [tuple(TextTokenizer(mine.files).encode(text)) for text in ("31=", "9071348=", "52=")]
    answers = [each.engine.greedy(prompts, 10, (EOS,)) for each in (mine, theirs)]
    assert [each.tolist() for each in answers[0]] == [each.tolist() for each in answers[1]]


def test_adapters_are_refused(small):
    with pytest.raises(ModelError, match="adapters: generate with --engine torch"):
        build("vllm", {**small.files, ADAPTER_FILE: b"{}"})
