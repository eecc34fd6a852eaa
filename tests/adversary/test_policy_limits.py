"""A policy that is larger than it may be: it takes neither disk nor memory, whatever it claims."""

import base64
import gc
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kit.cast import KEY, Lab
from kit.forged import manifest_of, write_tree
from shoal.engines import Completion, Engine, GenerationRequest, build, check_policy
from shoal.engines.cache import Rows
from shoal.engines.memory import cached_token_bytes
from shoal.engines.shelf import EngineShelf
from shoal.engines.torch import TorchEngine
from shoal.errors import ManifestRefused, ModelError, ResourceError, ShoalError
from shoal.models.folder import check_files
from shoal.models.load import load_model, model_from_files
from shoal.models.state import policy_views
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import Entry, PolicyManifest, PolicyRef, SamplingParameters, SignedDocument
from shoal.runtime.files import FolderLock
from shoal.runtime.limits import MachineLimits, folder_bytes
from shoal.shardcast import Content
from shoal.shardcast.cache import PartFiles
from shoal.shardcast.content import chunk_of
from shoal.worker.outbox import KeptHeads

MIB = 2**20


def repeating(lab: Lab, chunk_bytes: int, times: int, version: int = 0, names: int = 0) -> PolicyManifest:
    """A version whose payload is one chunk of zeros, again and again; with so many empty files besides."""
    data, size = bytes(chunk_bytes), chunk_bytes * times
    entries = [Entry(name=f"{number}", type="file", offset=0, size_bytes=0) for number in range(names)]
    entries.append(Entry(name="w", type="tensor", offset=0, size_bytes=size, dtype="U8", shape=(size,)))
    chunks = (chunk_of(memoryview(data)),) * times
    manifest, _ = manifest_of(version, entries, data, chunks, chunk_bytes)
    write_tree(lab.www, manifest, data, chunk_bytes)
    return manifest


def test_repeated_chunk_writes_no_more_than_was_announced(lab):
    manifest = repeating(lab, MIB, 64)
    source = lab.source()
    lab.client(source.url, name="unlimited").fetch(manifest.policy, 30)
    assert folder_bytes(lab.folder / "unlimited") >= 64 * MIB  # by 1 MiB of traffic
    announced = lab.client(source.url, name="announced", download={"max_payload_bytes": 8 * MIB})
    with pytest.raises(ManifestRefused, match=r"announces 67108864 bytes, and .* at most 8388608"):
        announced.fetch(manifest.policy, 30)
    limited = lab.client(source.url, name="limited", download={"limits": MachineLimits(disk_bytes=20 * 10**6)})
    with pytest.raises(ResourceError, match=r"policy 0\.0 needs 67\.1 MB of disk .* and 20 MB are allowed"):
        limited.fetch(manifest.policy, 30)
    assert folder_bytes(lab.folder / "announced") + folder_bytes(lab.folder / "limited") < MIB
    assert len(source.asked("chunks/")) == 1


def test_four_terabytes_are_refused_by_default(lab, monkeypatch):
    manifest = repeating(lab, 64 * MIB, 65_536)
    source = lab.source()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10**12))
    with pytest.raises(ResourceError, match="the disk is full"):
        lab.client(source.url, download={"limits": MachineLimits()}).fetch(manifest.policy, 30)
    assert source.asked("chunks/") == []


@pytest.mark.parametrize("limit", [10**4, 10**8], ids=["too little disk", "chunks that never come"])
def test_manifests_of_missing_policies_leave_nothing_on_disk(lab, limit):
    """Each a hundred kilobytes of entries."""
    manifest = repeating(lab, MIB, 1, names=1000)
    shutil.rmtree(lab.www / "chunks")
    source = lab.source()
    with pytest.raises(ShoalError):
        lab.client(source.url, download={"limits": MachineLimits(disk_bytes=limit)}).fetch(manifest.policy, 3)
    assert len(source.asked("manifests/")) > 0
    assert not list((lab.folder / "cache").glob("*.json"))


def test_link_planted_in_the_workers_folder_is_not_written_through(tmp_path):
    mine = tmp_path / "settings"
    mine.write_text("mine")
    part, heads, lock = tmp_path / f"{'ab' * 32}.part", tmp_path / "heads.jsonl", tmp_path / ".lock"
    for planted in (part, heads, lock):
        planted.symlink_to(mine)
    with pytest.raises(ResourceError, match=r"cannot write .*\.part: it is a link, or no plain file: remove it"):
        PartFiles().add(part, (chunk_of(memoryview(b"evil")),), MIB)
    receipt = {"kind": "x", "document": {"ledger": {"hash": "0"}}, "signed_by": KEY.public_key, "signature": "0" * 128}
    KeptHeads(tmp_path).keep(SignedDocument.model_validate(receipt))
    with pytest.raises(ResourceError, match="it is a link"):
        FolderLock(tmp_path)._try()
    assert mine.read_text() == "mine"


# ── memory: the model is built without it first, and compared with the manifest ──────────────────────────────────


def policy(lab: Lab, files: int = 0, **config: object) -> tuple[EngineShelf, PolicyRef]:
    """The built-in policy with another config.json and more files; and a worker's shelf that fetches it."""
    loaded = load_model("tiny")
    changed = json.dumps({**json.loads(loaded.files["config.json"]), **config}).encode()
    all_files = {**loaded.files, "config.json": changed, **{f"{number}.json": b"{}" for number in range(files)}}
    views = list(policy_views(loaded.model).values())
    manifest = lab.publish(0, files=all_files, tensors=views, chunk_size_bytes=MIB)
    return EngineShelf(lab.client(lab.source().url).fetch, built, held=1, check=checked), manifest.policy


def built(files: Mapping[str, bytes]) -> Engine:
    return build("torch", files)


def checked(files: Mapping[str, bytes], entries: Sequence[Entry]) -> None:
    check_policy("torch", files, entries, "cpu", "float32", 10**9)


def peak_growth(act: Callable[[], object]) -> int:
    """By how many bytes this process was larger, at most, than before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_bytes("VmRSS")
    act()
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def test_small_policy_of_a_large_model_takes_no_memory(lab):
    shelf, ref = policy(lab, vocab_size=40_000, hidden_size=512)
    files = shelf._fetch(ref, 10).files
    assert peak_growth(lambda: model_from_files(files)) > 100 * 10**6  # what such a model takes

    def refused() -> None:
        with pytest.raises(ModelError, match=r"weight .*embed_tokens.* the model's is .*\[40000, 512\]"):
            shelf.get(ref, 10)

    assert peak_growth(refused) < 50 * 10**6


@pytest.mark.parametrize(("config", "said"), [
    ({"num_hidden_layers": 2000, "layer_types": None}, "far more than the [0-9]+ weights that come with it"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers in the model's config.json is 1000000; at most 65536"),
    ({"num_labels": 10**6}, "num_labels in the model's config.json is 1000000; at most"),
    ({"vocab_size": 10**12}, "vocab_size in the model's config.json is 1000000000000; at most 33554432"),
    ({"layer_types": ["full"] * 120_000}, "more than 100000 values"),
    ({"rope_scaling": {"a": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}}, "or 16 levels"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantized models are not supported"),
    ({"model_type": "gptj", "n_positions": 2**20, "n_embd": 64, "n_layer": 1, "n_head": 2}, "another model"),
    ({"model_type": "marian"}, "models of type marian are not supported"),
    ({"model_type": "ctrl"}, "models of type ctrl are not supported"),
    ({"model_type": "xglm", "max_position_embeddings": 10**6}, "xglm have at most 4096 positions here"),
])  # fmt: skip
def test_configuration_with_absurd_counts_is_refused_without_memory(config, said):
    loaded = load_model("tiny")
    changed = json.dumps({**json.loads(loaded.files["config.json"]), **config}).encode()
    entries = Content.of({}, list(policy_views(loaded.model).values())).entries

    def refused() -> None:
        with pytest.raises(ModelError, match=said):
            checked({**loaded.files, "config.json": changed}, entries)

    assert peak_growth(refused) < 200 * 10**6


def test_endless_json_is_refused():
    with pytest.raises(ModelError, match=r"config\.json is nested too deep"):
        model_from_files({"config.json": b'{"a":' * 100_000 + b"1" + b"}" * 100_000})
    with pytest.raises(ModelError, match=r"config\.json has [0-9]+ bytes; at most 1048576"):
        model_from_files({"config.json": b'{"a": "' + b"x" * 2**20 + b'"}'})


def test_policy_with_many_or_large_files_is_refused(lab):
    shelf, ref = policy(lab, files=17)
    with pytest.raises(ModelError, match=r"the policy has 2\d files"):
        shelf.get(ref, 10)
    with pytest.raises(ModelError, match="the largest of 1000000000 bytes"):
        check_files([Entry(name="tokenizer.json", type="file", offset=0, size_bytes=10**9)])


def test_model_above_the_memory_limit_is_refused(lab):
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
    sampling = SamplingParameters(temperature=1.0, max_new_tokens=3, eos_token_ids=(31,))
    return engine.generate([GenerationRequest((3,) * prompt, tuple(range(seeds)), sampling)])


@pytest.mark.parametrize(("prompt", "seeds"), [(500, 1), (1, 500)])
def test_wide_layers_compute_only_as_many_tokens_as_fit(prompt, seeds):
    engine = hungry_engine(
        model_type="llama", intermediate_size=65_536, num_attention_heads=2, num_key_value_heads=1
    )  # 1 MiB a token
    drawn(engine, 1, 1)
    assert peak_growth(lambda: drawn(engine, prompt, seeds)) < 150 * 10**6


def test_cache_larger_than_configured_is_measured():
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
        whole = Rows.after(model, prompts, torch.tensor([0, 1, 2, 2]))
        pieces = Rows.after(model, prompts, torch.tensor([0, 1, 2, 2]), max_tokens=6)
        for state in (whole, pieces):
            state.advance(model, torch.tensor([4, 5, 6, 7]))
    assert torch.allclose(whole.hidden, pieces.hidden, atol=1e-4)
    with pytest.raises(MemoryError, match="3 prompts of up to"):
        Rows.after(model, prompts, torch.tensor([0]), max_tokens=2)


def test_prompts_of_stateful_layers_are_not_computed_in_pieces(monkeypatch):
    model, prompts = load_model("tiny").model, [(3, 4, 5, 6), (3,)]
    monkeypatch.setattr(model, "_is_stateful", True, raising=False)
    with torch.inference_mode():
        Rows.after(model, prompts, torch.tensor([0, 1]), max_tokens=8)
        with pytest.raises(MemoryError, match="2 prompts of up to 4 tokens do not fit"):
            Rows.after(model, prompts, torch.tensor([0, 1]), max_tokens=6)


def tokenizer(vocabulary: Sequence[str] = ("<unk>", "1+1", "2", "e"), **parts: object) -> TextTokenizer:
    vocab = {token: number for number, token in enumerate(vocabulary)}
    described = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}, **parts,
    }  # fmt: skip
    return TextTokenizer({"tokenizer.json": json.dumps(described).encode(), "config.json": b'{"eos_token_id": 3}'})


def nested(depth: int) -> dict[str, object]:
    return {"type": "Sequence", "pretokenizers": [nested(depth - 1)] if depth else []}


def replacing(content: str, **pattern: object) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(*texts: bytes) -> dict[str, object]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + b"\0".join(texts)).decode()}


def test_padding_to_ten_million_tokens_is_ignored():
    padding = {
        "strategy": {"Fixed": 10**7}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "x",
    }  # fmt: skip
    texts = tokenizer(padding=padding)
    assert texts.encode("2") == texts.encode_plain("2") == (2,)


@pytest.mark.parametrize(("parts", "said"), [
    ({"normalizer": replacing("22", String="2")}, "the normalizer replaces something by more than it was"),
    ({"decoder": {"type": "Sequence", "decoders": [replacing("2" * 10, String="2")] * 9}}, "decoder replaces"),
    ({"decoder": replacing("2", String="")}, "decoder replaces"),
    ({"normalizer": replacing("zz", Regex="z")}, "normalizer replaces"),
    ({"normalizer": replacing("z", Regex="(2*)*x")}, "a pattern that can take forever"),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"(2*)\1"}}}, "a pattern that can take forever"),
    ({"decoder": replacing("z", Regex="z")}, "the decoder has a pattern"),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 30}}, "too many steps"),
    ({"normalizer": {"type": "Prepend", "prepend": "x" * 1000}}, "adds more than 64 characters"),
    ({"normalizer": charsmap(b"a", b"x" * 1000)}, "more than 64 bytes of one character"),
    ({"vocabulary": ["<unk>", "x" * 2000]}, "a token of more than 1024 characters"),
    ({"added_tokens": [{"id": 9, "content": "x" * 2000}]}, "a token of more than 1024 characters"),
    ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["x" * 2000, 0.0]]}}, "a token of more than 1024"),
    ({"model": {"type": "WordPiece", "vocab": {}, "unk_token": "x" * 2000}}, "a token of more than 1024"),
    ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 65}}, "normalizer has too many steps"),
    ({"pre_tokenizer": nested(200)}, "its pre_tokenizer has too many steps"),
    ({"normalizer": replacing("z", Regex="z" * 3000)}, "a pattern that can take forever"),
    ({"normalizer": replacing("z", Regex=5)}, "a pattern that can take forever"),
    ({"normalizer": replacing("zz", Regex="z|zzz")}, "normalizer replaces"),
    ({"normalizer": replacing("z", Regex="")}, "normalizer replaces"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": 5}}, "more than 64 bytes of one character"),
])  # fmt: skip
def test_tokenizer_that_multiplies_texts_is_refused(parts, said):
    with pytest.raises(ModelError, match=rf"tokenizer\.json is refused: .*{said}"):
        tokenizer(**parts)


@pytest.mark.parametrize("pattern", [
    r"\s+\s+[xy]", r"\s*\s*\s*\s*[^\s]\d", r"\s{1,}\s{0,99}x", r"\s+(?=\s+x)", r"(?:\s+|y)\s+x",  # n³ and more
    r"\s?" * 22 + r"\s" * 22, "(?:a|a)" * 30 + "x", r"\s{1,9}" * 20 + "x",  # 2 to the length of the pattern
    r"(?x)(\s*) *x", "a{9}{9}{9}x", "(?:a|" + "a|" * 20 + "b)x", "[a-z]+[[a-z]]*[xy]+z",
])  # fmt: skip
def test_tokenizer_with_a_slow_pattern_is_refused(pattern):
    with pytest.raises(ModelError, match="a pattern that can take forever"):
        tokenizer(pre_tokenizer={"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"})


LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KNOWN_PATTERNS = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "GPT-4o": rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}*{LETTERS[1]}+{SHORT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{LETTERS[0]}+{LETTERS[1]}*{SHORT}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "DeepSeek": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    "Kimi": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?|\p{N}{1,3}",
    "BLOOM": r" ?[^(\s|[.,!?…。、।])]+",
    "Falcon": "[0-9][0-9][0-9]",
    "GPT-4": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def split(name: str) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": KNOWN_PATTERNS[name]}, "behavior": "Isolated", "invert": False}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WELL_KNOWN: dict[str, dict[str, object]] = {
    **{name: {"pre_tokenizer": split(name)} for name in KNOWN_PATTERNS},
    "Llama 2, Mistral, Gemma": {
        "normalizer": {
            "type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replacing("▁", String=" ")]
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                replacing(" ", String="▁"), {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    },
    "Llama 3, Qwen": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("GPT-4"), BYTES]},
        "decoder": {**BYTES, "add_prefix_space": True, "use_regex": True},
    },
    "XGLM, T5": {"normalizer": replacing("▁", Regex=" {2,}")},
    "quotes": {"normalizer": replacing('"', String="``")},
}  # fmt: skip


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_well_known_tokenizers_are_allowed(name):
    assert tokenizer(**WELL_KNOWN[name]).vocabulary_size == 4


def test_panic_of_the_tokenizer_library_is_a_model_error(monkeypatch):
    class PanicException(BaseException):  # as the library's own, which cannot be imported
        pass

    class Broken:
        def decode_batch(self, *_tokens: object, **_options: object) -> list[str]:
            raise PanicException("index out of bounds")

    texts = tokenizer()
    texts._tokenizer = Broken()
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot decode tokens: index out of bounds"):
        texts.decode_many([[1]])
