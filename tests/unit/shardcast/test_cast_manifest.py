"""Layout, digest and signatures of manifests and heads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.cast import CHUNK, KEY, RUN, Lab, content
from kit.forged import manifest_of, write_tree
from shoal.errors import BroadcastError, ManifestRefused
from shoal.protocol import PolicyManifest, TensorView, content_digest
from shoal.shardcast.content import Content, digest_of
from shoal.shardcast.manifest import encode, read_manifest
from shoal.shardcast.payload import open_payload

names = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_.\-]{0,20}\Z")
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


def build(files: dict[str, bytes], tensors: list[TensorView], chunk_size: int = CHUNK) -> PolicyManifest:
    content = Content.of(files, tensors)
    payload = b"".join(content.chunks(chunk_size, bytes))
    return manifest_of(3, content.entries, payload, chunk_size=chunk_size)[0]


def redigested(manifest: PolicyManifest, **changes: Any) -> PolicyManifest:
    """The manifest with other fields and the digest that belongs to them, as a careless trainer would sign it."""
    changed = manifest.model_copy(update=changes)
    digest = content_digest(changed.entries, changed.chunk_size_bytes, changed.chunks)
    return changed.model_copy(update={"policy": changed.policy.model_copy(update={"digest": digest})})


@st.composite
def tensors(draw: st.DrawFn) -> TensorView:
    shape = draw(shapes)
    data = draw(st.binary(min_size=4 * int(np.prod(shape)), max_size=4 * int(np.prod(shape))))
    return TensorView(draw(names), "F32", shape, memoryview(data))


@given(
    files=st.dictionaries(names, st.binary(max_size=100), max_size=4),
    parts=st.lists(tensors(), max_size=5, unique_by=lambda tensor: tensor.name),
    chunk_size=st.integers(1, 300),
)
def test_any_content_survives_layout_cutting_signing_and_opening(files, parts, chunk_size):
    manifest = build(files, parts, chunk_size)
    assert read_manifest(encode(manifest, KEY), RUN, KEY.public_key) == manifest
    assert manifest.policy.digest == digest_of(files, parts, chunk_size)
    whole = b"".join(Content.of(files, parts).chunks(chunk_size, bytes))
    payload = open_payload(manifest, memoryview(whole))
    assert payload.files == files
    assert [(t.name, t.shape, bytes(t.data)) for t in payload.tensors] == [
        (t.name, t.shape, bytes(t.data)) for t in parts
    ]


def test_the_digest_depends_on_every_byte_name_and_shape() -> None:
    def digest(name: str = "w", shape: tuple[int, ...] = (2, 3), value: float = 1.0, config: bytes = b"{}") -> str:
        data = np.full(6, value, dtype="<f4")
        return digest_of({"config.json": config}, [TensorView(name, "F32", shape, memoryview(data.tobytes()))])

    digests = [digest(), digest(name="v"), digest(shape=(3, 2)), digest(value=2.0), digest(config=b"[]")]
    assert len(set(digests)) == len(digests)
    assert digest() == digests[0]


def test_views_are_taken_as_bytes_and_refused_unless_contiguous() -> None:
    matrix, scalar = np.arange(6, dtype="<f4").reshape(2, 3), np.array(7, dtype="<i8")
    views = [TensorView("m", "F32", (2, 3), memoryview(matrix)), TensorView("s", "I64", (), memoryview(scalar))]
    assert b"".join(Content.of({}, views).chunks(5, bytes)) == matrix.tobytes() + scalar.tobytes()
    every_other = memoryview(np.arange(8, dtype="<f4")[::2])
    with pytest.raises(BroadcastError, match="w is not contiguous"):
        Content.of({}, [TensorView("w", "F32", (4,), every_other)])


def test_a_manifest_of_another_run_is_refused() -> None:
    """Forged ones: adversary/test_cast_documents."""
    with pytest.raises(ManifestRefused, match="belongs to run"):
        read_manifest(encode(build(*content()), KEY), "another-run", KEY.public_key)


def moved(index: int, **changes: Any) -> Callable[[PolicyManifest], PolicyManifest]:
    """With another entry."""

    def change(manifest: PolicyManifest) -> PolicyManifest:
        entries = list(manifest.entries)
        entries[index] = entries[index].model_copy(update=changes)
        return redigested(manifest, entries=tuple(entries))

    return change


UNSOUND: dict[str, Callable[[PolicyManifest], PolicyManifest]] = {
    "wrong digest": lambda m: m.model_copy(update={"policy": m.policy.model_copy(update={"digest": "0" * 64})}),
    "neither anchor nor delta": lambda m: redigested(m, anchor=False),
    "gap": moved(1, offset=1401),
    "overlap": moved(1, offset=0),
    "entry beyond the end": moved(-1, size_bytes=1 << 40),
    "shape too large": moved(2, shape=(10**6,)),
    "negative shape": moved(2, shape=(-1, -31)),
    "unknown type": moved(2, dtype="F7"),
    "file with shape": moved(-1, shape=(80,)),
    "file in a file": moved(-1, name="config.json/b"),
    "same name twice": moved(1, name="layer.0.weight"),
    "chunk missing": lambda m: redigested(m, chunks=m.chunks[:-1]),
    "chunk resized": lambda m: redigested(m, chunks=(m.chunks[0].model_copy(update={"size_bytes": 1}), *m.chunks[1:])),
    "more bytes than entries": lambda m: redigested(m, size_bytes=m.size_bytes - 1),
    "giant chunks": lambda m: redigested(m, chunk_size_bytes=1 << 40),
    "giant payload": lambda m: redigested(m, size_bytes=1 << 60),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSOUND)
def test_a_signed_manifest_that_is_unsound_in_itself_is_refused(lab: Lab, name: str) -> None:
    """An evil origin: its signature is right, its arithmetic is not. No chunk of it is asked for."""
    good = build(*content())
    bad = UNSOUND[name](good)
    assert read_manifest(encode(good, KEY), RUN, KEY.public_key) == good != bad
    write_tree(lab.www, bad, b"")
    source = lab.source()
    with pytest.raises(ManifestRefused):
        lab.client(source.url).fetch(bad.policy, 5)
    assert source.asked("/chunks/") == []
