"""Deltas made to harm: an evil origin signs them, so that every hash on the way is right.

Nothing but the digest at the end of the route can be believed. Where the version is also offered whole, the client ends
with the right bytes; where the bad delta is the only route, with a named error. Either way without the memory that the
delta asks for.
"""

import random
import tracemalloc
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import zstandard

from kit import eventually
from kit.cast import WITHIN_S, Lab, flip, head_version
from kit.forged import chunks_of, tensors_of, write_tree
from shoal.errors import DeltaRefused, ManifestRefused, VersionNotFound
from shoal.protocol import Delta, PolicyManifest, PolicyRef
from shoal.shardcast import Payload
from shoal.shardcast.delta import HEADER, MAGIC, SIZE, blocks_of, encode_block

VALUES = 100_000  # 200 kB of bf16: room for a delta that inflates to gigabytes
CHUNK = 20_000
MIB = 1024 * 1024
MEMORY_BYTES = 24 * MIB  # a block of 2 MiB, its decoding, and what a test costs; a bomb here inflates to 1 GiB


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


@cache
def nested_bomb(declared: bool) -> bytes:
    """One zstd frame of a gigabyte of zeros, with or without saying so."""
    compressor = zstandard.ZstdCompressor(level=19, write_content_size=declared)
    worker = compressor.compressobj(size=1024 * MIB if declared else -1)
    return b"".join(worker.compress(bytes(16 * MIB)) for _ in range(64)) + worker.flush()


@cache
def lying_frame(true_size: int, declared: int) -> bytes:
    """A frame that declares a small size, and holds more."""
    data = bytearray(frame(bytes(true_size)))
    honest = frame(bytes(declared))
    header = zstandard.frame_header_size(honest)
    return honest[:header] + bytes(data[zstandard.frame_header_size(bytes(data)) :])


def block(changes: int, gaps: Sequence[bytes], steps: Sequence[bytes], sizes: Sequence[int] | None = None) -> bytes:
    """A delta block from packed planes, checked by nobody."""
    planes = [*gaps, *steps]
    table = b"".join(SIZE.pack(size) for size in (sizes or [len(plane) for plane in planes]))
    return HEADER.pack(changes, len(gaps), len(steps)) + table + b"".join(planes)


def true_delta(old: bytes, new: bytes, manifest: PolicyManifest) -> bytes:
    parts = [
        encode_block(memoryview(old)[part.offset : part.end], memoryview(new)[part.offset : part.end], part.width)
        for part in blocks_of(manifest.entries)
    ]
    return MAGIC + b"".join(parts)


Make = Callable[[bytes], bytes]  # from the true delta


def evil(changes: int, gaps: Sequence[bytes], steps: Sequence[bytes], sizes: Sequence[int] | None = None) -> Make:
    return lambda _true: MAGIC + block(changes, gaps, steps, sizes)


EVIL: dict[str, Make] = {
    "noise": lambda true: random.Random(3).randbytes(len(true)),
    "noise after the beginning": lambda true: MAGIC + random.Random(3).randbytes(len(true)),
    "another beginning": lambda true: b"SHOALD9\n" + true[len(MAGIC) :],
    "one byte": lambda _true: b"S",
    "cut short": lambda true: true[:-1],
    "only the beginning": lambda _true: MAGIC,
    "something after the end": lambda true: true + b"!",
    "twice": lambda true: true + true[len(MAGIC) :],
    "a flipped bit": lambda true: true[:-3] + bytes([true[-3] ^ 4]) + true[-2:],
    "a bomb that says so": lambda true: evil(VALUES, [nested_bomb(True)], [frame(bytes(VALUES))])(true),
    "a bomb that does not": lambda true: evil(VALUES, [nested_bomb(False)], [frame(bytes(VALUES))])(true),
    "a frame that holds more than it says": lambda true: evil(
        VALUES, [lying_frame(64 * MIB, VALUES)], [frame(bytes(VALUES))]
    )(true),
    "counts without bound": lambda _true: MAGIC + HEADER.pack(2**32 - 1, 255, 255) + SIZE.pack(2**32 - 1) * 510,
    "planes without bound": evil(VALUES, [b""], [b""], sizes=[2**32 - 1, 2**32 - 1]),
    "a change outside": evil(1, [frame(bytes([byte])) for byte in (VALUES + 7).to_bytes(3, "little")], [frame(b"\1")]),
    "a step off the line": evil(1, [frame(b"\0")], [frame(b"\xff")] * 3),  # larger than any two values lie apart
    "no change at all": evil(0, [], []),
    "changes without steps": evil(5, [frame(bytes(5))], []),
}


class Trap:
    """Version 1 as it should be; version 2, with the delta from 1 replaced by whatever the attack made."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.first, self.second = self.publish(1), self.publish(2)
        self.old, self.new = (bytes(tensors_of(version, VALUES)[0].data) for version in (1, 2))
        self.true = true_delta(self.old, self.new, self.second)
        self.source = lab.source()
        self.client = lab.client(self.source.url)
        self.client.fetch(self.first.policy, WITHIN_S)

    def publish(self, version: int) -> PolicyManifest:
        settings = {"chunk_size_bytes": CHUNK, "anchor_every": 1, "delta_from_bytes": 0}
        return self.lab.publish(version, tensors=tensors_of(version, VALUES), **settings)

    def set(self, data: bytes, anchor: bool, **changes: object) -> PolicyManifest:
        """Sign and offer the delta `data`."""
        deltas = (self.delta(self.first.policy, data).model_copy(update=changes),)
        manifest = self.second.model_copy(update={"anchor": anchor, "deltas": deltas})
        write_tree(self.lab.www, manifest, data, CHUNK)
        return manifest

    def delta(self, base: PolicyRef, data: bytes) -> Delta:
        return Delta(base=base, size_bytes=len(data), chunks=chunks_of(data, CHUNK))

    def refused(self, manifest: PolicyManifest) -> None:
        """The delta is the only route, and ends in a named error."""
        with pytest.raises((DeltaRefused, VersionNotFound), match=r"delta|route"):
            self.client.fetch(manifest.policy, 5)
        assert self.tried(manifest)
        assert not list((self.lab.folder / "cache").glob(f"{manifest.policy.digest}.bin"))

    def tried(self, manifest: PolicyManifest) -> bool:
        """Whether the delta was fetched at all: a test of a delta that nobody takes proves nothing."""
        return bool(self.source.asked(manifest.deltas[0].chunks[0].hash))


@pytest.fixture
def trap(lab: Lab) -> Trap:
    return Trap(lab)


def weights(payload: Payload) -> bytes:
    return bytes(payload.tensors[0].data)


def test_the_true_delta_is_taken(trap: Trap) -> None:
    """Or all that follows would prove nothing."""
    manifest = trap.set(trap.true, anchor=False)
    assert weights(trap.client.fetch(manifest.policy, WITHIN_S)) == trap.new
    assert trap.tried(manifest)


@pytest.mark.parametrize("name", EVIL)
def test_evil_delta_is_replaced_by_the_whole_payload(trap: Trap, name: str) -> None:
    manifest = trap.set(EVIL[name](trap.true), anchor=True)
    tracemalloc.start()
    try:
        payload = trap.client.fetch(manifest.policy, WITHIN_S)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert weights(payload) == trap.new
    assert trap.tried(manifest)
    assert peak < MEMORY_BYTES


@pytest.mark.parametrize("name", EVIL)
def test_an_evil_delta_that_is_the_only_route_is_a_named_error(trap: Trap, name: str) -> None:
    trap.refused(trap.set(EVIL[name](trap.true), anchor=False))


def test_a_delta_that_gives_other_weights_is_not_believed(trap: Trap) -> None:
    """A sound delta, to a third set of weights: the route leads somewhere, only not there."""
    other = bytes(tensors_of(3, VALUES)[0].data)
    trap.refused(trap.set(true_delta(trap.old, other, trap.second), anchor=False))


def test_after_a_bad_delta_another_one_is_taken(trap: Trap) -> None:
    """Version 3 by way of 2: the short cut is bad, the long way is right."""
    third = trap.publish(3)
    newest = bytes(tensors_of(3, VALUES)[0].data)
    second = trap.set(trap.true, anchor=False)
    long = true_delta(trap.new, newest, third)
    routes = trap.delta(trap.first.policy, b"S" * 40), trap.delta(second.policy, long)
    manifest = third.model_copy(update={"anchor": False, "deltas": routes})
    for data in (b"S" * 40, long):
        write_tree(trap.lab.www, manifest, data, CHUNK)
    assert weights(trap.client.fetch(manifest.policy, WITHIN_S)) == newest
    assert all(trap.source.asked(route.chunks[0].hash) for route in routes)


BASES: dict[str, Callable[[Trap], PolicyRef]] = {
    "weights that nobody has": lambda trap: PolicyRef(incarnation=0, version=1, digest="ab" * 32),
    "itself": lambda trap: PolicyRef(incarnation=0, version=1, digest=trap.second.policy.digest),
}


@pytest.mark.parametrize("name", BASES)
def test_a_delta_from_nowhere_is_no_route(trap: Trap, name: str) -> None:
    manifest = trap.set(trap.true, anchor=True, base=BASES[name](trap))
    assert weights(trap.client.fetch(manifest.policy, WITHIN_S)) == trap.new
    alone = trap.set(trap.true, anchor=False, base=BASES[name](trap))
    with pytest.raises(VersionNotFound):
        trap.lab.client(trap.source.url, name="other").fetch(alone.policy, 8)


def test_a_manifest_whose_deltas_cannot_be_is_refused(trap: Trap) -> None:
    changes: dict[str, dict[str, object]] = {
        "larger than the whole": {"size_bytes": trap.second.size_bytes + 1},
        "another size than its chunks": {"size_bytes": len(trap.true) - 1},
        "from the future": {"base": trap.second.policy.model_copy(update={"version": 7})},
        "a chunk beyond the end": {"chunks": trap.second.chunks[:1] * 3},
    }
    for name, change in changes.items():
        manifest = trap.set(trap.true, anchor=True, **change)
        fresh = trap.lab.client(trap.source.url, name=name)
        with pytest.raises(ManifestRefused, match="delta"):
            fresh.fetch(manifest.policy, 5)


def test_a_relay_hands_an_evil_delta_on_and_is_not_harmed(trap: Trap) -> None:
    """It cannot know: it checks hashes and inflates nothing. Its clients still end with the right bytes."""
    manifest = trap.set(EVIL["a bomb that says so"](trap.true), anchor=True)
    relay = trap.lab.relay("relay", trap.source.url)
    eventually(lambda: head_version(relay) == "0.2")
    trap.client.set_sources([relay.url])
    assert weights(trap.client.fetch(manifest.policy, WITHIN_S)) == trap.new


def test_a_base_that_rotted_on_this_disk_is_noticed(trap: Trap) -> None:
    """Not an attack by others: the payload that a delta starts from has changed since it was checked."""
    manifest = trap.set(trap.true, anchor=True)
    flip(trap.lab.folder / "cache" / f"{trap.first.policy.digest}.bin")
    payload = trap.lab.client(trap.source.url).fetch(manifest.policy, WITHIN_S)  # a new process
    assert weights(payload) == trap.new
