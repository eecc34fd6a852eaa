"""A policy that is larger than it may be: it takes neither disk nor memory, whatever it claims."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from liarkit import KEY, RUN, Lab, head_of, lab_in, sign, tree, write

from shoal.engines import Completion, Engine, GenerationRequest, build, check_policy
from shoal.engines.memory import cached_token_bytes
from shoal.engines.rows import CachedRows
from shoal.engines.shelf import EngineShelf
from shoal.engines.torch import TorchEngine
from shoal.errors import ManifestRefused, ModelError, ResourceError
from shoal.models.folder import check_files
from shoal.models.load import load_model, model_from_files
from shoal.models.state import policy_views
from shoal.protocol import Entry, PolicyManifest, PolicyRef, SamplingParameters, content_digest
from shoal.runtime.limits import MachineLimits, folder_bytes
from shoal.runtime.stop import StopToken
from shoal.shardcast import Content, Downloader, DownloadSettings
from shoal.shardcast.content import chunk_of
from shoal.shardcast.tree import HEAD, chunk_key, manifest_key

MIB = 2**20


@pytest.fixture
def lab(tmp_path: Path):
    with lab_in(tmp_path) as made:
        yield made


def repeating(folder: Path, chunk_bytes: int, times: int) -> PolicyManifest:
    """A published version whose payload is one chunk of zeros, again and again."""
    data = bytes(chunk_bytes)
    chunks = (chunk_of(memoryview(data)),) * times
    size = chunk_bytes * times
    entries = (Entry(name="w", type="tensor", offset=0, size_bytes=size, dtype="U8", shape=(size,)),)
    ref = PolicyRef(incarnation=0, version=0, digest=content_digest(entries, chunk_bytes, chunks))
    manifest = PolicyManifest(
        run=RUN, policy=ref, entries=entries, chunk_size_bytes=chunk_bytes, chunks=chunks, size_bytes=size,
        created_at_ms=1,
    )  # fmt: skip
    signed = sign(manifest)
    write(folder / chunk_key(chunks[0].hash), data)
    write(folder / manifest_key((0, 0)), signed)
    write(folder / HEAD, sign(head_of(manifest, signed)))
    return manifest


def client(lab: Lab, url: str, name: str, **settings: object) -> Downloader:
    return Downloader([url], RUN, KEY.public_key, lab.folder / name, StopToken(), DownloadSettings(**settings))


def test_one_chunk_that_repeats_writes_no_more_than_was_announced(lab):
    manifest = repeating(lab.folder / "www", MIB, 64)
    source = lab.source(tree(lab.folder / "www"))
    client(lab, source.url, "unlimited").fetch(manifest.policy, 30)
    assert folder_bytes(lab.folder / "unlimited") >= 64 * MIB  # by 1 MiB of traffic
    with pytest.raises(ManifestRefused, match=r"announces 67108864 bytes, and .* at most 8388608"):
        client(lab, source.url, "announced", max_payload_bytes=8 * MIB).fetch(manifest.policy, 30)
    with pytest.raises(ResourceError, match=r"policy 0\.0 needs 67\.1 MB of disk .* and 20 MB are allowed"):
        client(lab, source.url, "limited", limits=MachineLimits(disk_bytes=20 * 10**6)).fetch(manifest.policy, 30)
    assert folder_bytes(lab.folder / "announced") + folder_bytes(lab.folder / "limited") < MIB
    assert len(source.asked("chunks/")) == 1


def test_four_terabytes_are_refused_by_default(lab, monkeypatch):
    manifest = repeating(lab.folder / "www", 64 * MIB, 65_536)
    source = lab.source(tree(lab.folder / "www"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10**12))
    with pytest.raises(ResourceError, match="the disk is full"):
        client(lab, source.url, "cache", limits=MachineLimits()).fetch(manifest.policy, 30)
    assert source.asked("chunks/") == []


# ── memory: the model is built without it first, and compared with the manifest ──────────────────────────────────


def policy(lab: Lab, files: int = 0, **config: object) -> tuple[EngineShelf, PolicyRef]:
    """The built-in policy with another config.json and more files; and a worker's shelf that fetches it."""
    loaded = load_model("tiny")
    changed = json.dumps({**json.loads(loaded.files["config.json"]), **config}).encode()
    all_files = {**loaded.files, "config.json": changed, **{f"{number}.json": b"{}" for number in range(files)}}
    manifest = lab.origin(chunk_size_bytes=2**20).publish(
        0, Content.of(all_files, list(policy_views(loaded.model).values()))
    )
    source = lab.source(tree(lab.folder / "www"))
    return EngineShelf(client(lab, source.url, "cache").fetch, built, held=1, check=checked), manifest.policy


def built(files: Mapping[str, bytes]) -> Engine:
    return build("torch", files)


def checked(files: Mapping[str, bytes], entries: Sequence[Entry]) -> None:
    check_policy("torch", files, entries, "cpu", "float32", 10**9)


def peak_growth(act: Callable[[], object]) -> int:
    """By how many bytes this process was larger, at most, than before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_bytes("VmRSS")
    act()
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def test_small_policy_of_a_large_model_takes_no_memory(lab):
    shelf, ref = policy(lab, vocab_size=40_000, hidden_size=512)
    files = shelf._fetch(ref, 10).files
    assert peak_growth(lambda: built(files)) > 100 * 10**6  # what it took before it was compared

    def refused() -> None:
        with pytest.raises(ModelError, match=r"weight .*embed_tokens.* the model's is .*\[40000, 512\]"):
            shelf.get(ref, 10)

    assert peak_growth(refused) < 50 * 10**6


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_hidden_layers": 2000, "layer_types": None}, "far more than the [0-9]+ weights that come with it"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers in the model's config.json is 1000000; at most 65536"),
        ({"num_labels": 10**6}, "num_labels in the model's config.json is 1000000; at most"),
        ({"vocab_size": 10**12}, "vocab_size in the model's config.json is 1000000000000; at most 33554432"),
        ({"layer_types": ["full"] * 120_000}, "more than 100000 values"),
        ({"rope_scaling": {"a": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}}, "or 16 levels"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized models are not supported"),
        ({"model_type": "gptj", "n_positions": 2**20, "n_embd": 64, "n_layer": 1, "n_head": 2}, "another model"),
        ({"model_type": "marian"}, "models of type marian are not supported"),
    ],
)
def test_configuration_with_absurd_counts_is_refused_without_memory(config, said):
    loaded = load_model("tiny")
    changed = json.dumps({**json.loads(loaded.files["config.json"]), **config}).encode()
    entries = Content.of({}, list(policy_views(loaded.model).values())).entries

    def refused() -> None:
        with pytest.raises(ModelError, match=said):
            checked({**loaded.files, "config.json": changed}, entries)

    assert peak_growth(refused) < 200 * 10**6


def test_json_without_end_is_refused():
    with pytest.raises(ModelError, match=r"config\.json is nested too deep"):
        model_from_files({"config.json": b'{"a":' * 100_000 + b"1" + b"}" * 100_000})
    with pytest.raises(ModelError, match=r"config\.json has [0-9]+ bytes; at most 1048576"):
        model_from_files({"config.json": b'{"a": "' + b"x" * 2**20 + b'"}'})


def test_files_of_a_policy_are_few_and_small(lab):
    shelf, ref = policy(lab, files=17)
    with pytest.raises(ModelError, match=r"the policy has 2\d files"):
        shelf.get(ref, 10)
    with pytest.raises(ModelError, match="the largest of 1000000000 bytes"):
        check_files([Entry(name="tokenizer.json", type="file", offset=0, size_bytes=10**9)])


def test_model_that_takes_more_memory_than_it_may_is_refused_and_one_that_does_not_is_built(lab):
    shelf, ref = policy(lab)
    payload = shelf._fetch(ref, 10)
    with pytest.raises(ResourceError, match=r"model of 17\d,\d+ weights, .* in float32, and 1 kB .*--max-memory"):
        check_policy("torch", dict(payload.files), payload.manifest.entries, "cpu", "float32", 1000)
    assert shelf.get(ref, 10).engine.policy == ref


# ── memory of computing: measured, not believed ─────────────────────────────────────────────────────────────────


def hungry_engine(**config: object) -> TorchEngine:
    files = {"config.json": json.dumps({"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 32, **config}).encode()}
    engine = TorchEngine(files)
    for parameter in engine._model.parameters():
        parameter.data.normal_(0, 0.02)
    engine.load_policy(None, policy_views(engine._model))
    engine.memory_bytes = 100 * 10**6
    return engine


def drawn(engine: TorchEngine, prompt: int, seeds: int) -> list[list[Completion]]:
    sampling = SamplingParameters(temperature=1.0, max_new_tokens=3, eos_token_id=31)
    return engine.generate([GenerationRequest((3,) * prompt, tuple(range(seeds)), sampling)])


@pytest.mark.parametrize(("prompt", "seeds"), [(500, 1), (1, 500)])
def test_small_model_with_wide_layers_computes_no_more_tokens_at_once_than_fit(prompt, seeds):
    engine = hungry_engine(
        model_type="llama", intermediate_size=65_536, num_attention_heads=2, num_key_value_heads=1
    )  # 1 MiB a token
    drawn(engine, 1, 1)
    assert peak_growth(lambda: drawn(engine, prompt, seeds)) < 150 * 10**6


def test_cache_larger_than_the_configuration_says_is_measured():
    engine = hungry_engine(
        model_type="deepseek_v3", intermediate_size=8, moe_intermediate_size=8, first_k_dense_replace=1,
        n_routed_experts=8, n_group=1, topk_group=1, num_experts_per_tok=1, num_attention_heads=2,
        num_key_value_heads=2, q_lora_rank=1, kv_lora_rank=1, qk_nope_head_dim=32_768, qk_rope_head_dim=2,
        v_head_dim=32_768,
    )  # fmt: skip
    assert cached_token_bytes(engine._model.config, 4) == 64
    drawn(engine, 1, 1)
    assert engine._token_bytes() >= 4 * 2 * (32_770 + 32_768)
    assert peak_growth(lambda: drawn(engine, 4, 100)) < 150 * 10**6


@pytest.mark.parametrize("longest", [5, 64])
def test_prompts_computed_in_pieces_give_the_same_states(longest):
    model = load_model("tiny").model
    prompts = [tuple(range(3, 3 + length)) for length in (longest, 3, longest // 2)]
    with torch.inference_mode():
        whole = CachedRows.after(model, prompts, torch.tensor([0, 1, 2, 2]))
        pieces = CachedRows.after(model, prompts, torch.tensor([0, 1, 2, 2]), max_tokens=6)
        for state in (whole, pieces):
            state.advance(model, torch.tensor([4, 5, 6, 7]))
    assert torch.allclose(whole.hidden, pieces.hidden, atol=1e-4)
    with pytest.raises(MemoryError, match="3 prompts of up to"):
        CachedRows.after(model, prompts, torch.tensor([0]), max_tokens=2)
