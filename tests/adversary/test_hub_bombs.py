"""Bombs: little that would become much. Each is refused by name, and the hub's memory is measured while it is.

The hub is a process of its own here; the system says what the most was that it held (`VmHWM`, set back before each).
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest
import zstandard

from kit import TempPaths
from kit.door import RECIPE, Hub, begun, ok, packed, refusal, submission
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe

MIB = 2**20
ANYONES_MIB, TRUSTED_MIB = 48, 384
"""Generous: what anyone may send has one megabyte at the most in this run, what a validator may send has sixteen."""


@dataclass(frozen=True)
class Watched:
    """A hub in a process, and what it holds."""

    hub: Hub
    pid: int

    def peak_mib(self) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

    def forget_peak(self) -> float:
        """Measure anew from here; what it holds now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return self.peak_mib()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: TempPaths) -> Iterator[Watched]:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not say how much memory a process has had")
    recipe = {**RECIPE, "hub": {**RECIPE["hub"], "requests_per_key_s": 0}}
    run = RunFolder.prepare(tmp_path_factory.mktemp("bombs") / "run", Recipe.model_validate(recipe))
    url = run.assign_endpoints().hub
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.cli", "hub", "--dir", str(run.path)],
        stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        with httpx.Client(base_url=url, timeout=60) as http:
            hub = begun(run, http, lambda: process.poll() is not None)
            hub.trusted("validator-0", "validator")
            yield Watched(hub, process.pid)
    finally:
        process.kill()
        process.wait(30)


def zstd_bomb() -> bytes:
    """A gigabyte of zeros, said to be one."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=1024 * MIB)
    return b"".join(compressor.compress(bytes(MIB)) for _ in range(1024)) + compressor.flush()


def liar_bomb() -> bytes:
    """The same, but its header says that it is a kilobyte."""
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(256 * MIB))
    header = zstandard.frame_header_size(frame)
    return b"\x28\xb5\x2f\xfd\x60" + struct.pack("<H", 1024 - 256) + frame[header:]


def unsized_bomb() -> bytes:
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    return b"".join(compressor.compress(bytes(MIB)) for _ in range(512)) + compressor.flush()


def window_bomb() -> bytes:
    """A frame that wants a window of gigabytes."""
    return b"\x28\xb5\x2f\xfd\x80" + bytes([31 << 3 & 0xFF]) + struct.pack("<I", 1024) + b"\x01\x00\x00"


def framed(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(raw)


BULK_BOMBS: dict[str, Callable[[], bytes]] = {
    "a gigabyte of zeros": zstd_bomb,
    "a frame that lies about its size": liar_bomb,
    "a frame without a size": unsized_bomb,
    "a frame that wants a huge window": window_bomb,
    "frames upon frames": lambda: framed(b"") * 60_000,
    "four billion elements": lambda: framed(b"\xdd\xff\xff\xff\xff" + bytes(1000)),
    "four billion keys": lambda: framed(b"\xdf\xff\xff\xff\xff" + bytes(1000)),
    "four billion bytes": lambda: framed(b"\xc6\xff\xff\xff\xff" + bytes(1000)),
    "nested lists": lambda: framed(b"\x91" * 900_000),
    "nested maps": lambda: framed(b"\x81\xa1a" * 300_000),
    "nested in a field": lambda: framed(b"\x81\xa8rollouts" + b"\x91" * 900_000),
    "a million rollouts": lambda: framed(b"\x81\xa8rollouts\xdd\x00\x0f\x42\x40" + b"\x80" * 1_000_000),
    "many empty lists": lambda: framed(b"\x81\xa6engine\xdd\x00\x0f\x42\x40" + b"\x90" * 1_000_000),
}

JSON_BOMBS: dict[str, bytes] = {
    "nested lists": b'{"held":' + b"[" * 60_000,
    "nested maps": b'{"held":' + b'{"a":' * 12_000,
    "digits": b'{"max_units":' + b"9" * 60_000 + b"}",
    "an exponent": b'{"wait_s":1e999999999}',
    "many names": b'{"held":[' + b'"u0a0",' * 9_000 + b'"u0a0"]}',
    "one name for ever": b'{"request":"' + b"x" * 60_000 + b'"}',
    "many unknown fields": b"{" + b",".join(b'"f%d":1' % number for number in range(6_000)) + b"}",
}


def test_bombs_refused_in_bounded_memory(watched: Watched, record_property: Callable[[str, object], None]) -> None:
    hub, lines = watched.hub, []
    worker = hub.worker()
    [lease] = worker.lease()
    ok(worker.submit(lease, packed(submission(lease))))  # what an honest one costs is there already
    worker = hub.worker()
    [lease] = worker.lease()
    leases = partial(worker.call, "POST", "/leases")
    verdicts = partial(hub.caller(hub.folder.key("validator-0")).call, "POST", "/verdicts")
    thrown: list[tuple[str, Callable[[], httpx.Response], tuple[int, ...]]] = [
        *((f"bulk: {name}", partial(worker.submit, lease, make()), (413, 422)) for name, make in BULK_BOMBS.items()),
        *((f"json: {name}", partial(leases, body), (422,)) for name, body in JSON_BOMBS.items()),
        ("trusted: 15 MiB of verdicts", partial(verdicts, b'{"verdicts":[' + b"{}," * 5 * MIB), (422,)),
        ("trusted: 15 MiB nested", partial(verdicts, b'{"verdicts":' + b"[" * 15 * MIB), (422,)),
        ("a head of 2 MiB", partial(_head_bomb, hub), (400,)),
    ]
    most_mib = {"anyone": 0.0, "trusted": 0.0}
    for name, throw, expected in thrown:
        before_mib = watched.forget_peak()
        answer = throw()
        grown_mib = watched.peak_mib() - before_mib
        who = "trusted" if name.startswith("trusted") else "anyone"
        most_mib[who] = max(most_mib[who], grown_mib)
        lines.append(f"  {name:<40} {answer.status_code}  {grown_mib:6.1f} MiB")
        assert answer.status_code in expected, (name, answer.text)
    ok(worker.submit(lease, packed(submission(lease))))  # the very lease is still good
    record_property("table", "\n".join(["bombs: answer, and what the hub's memory grew by meanwhile", *lines]))
    assert most_mib["anyone"] < ANYONES_MIB
    assert most_mib["trusted"] < TRUSTED_MIB


def _head_bomb(hub: Hub) -> httpx.Response:
    """The hub answers and hangs up before the head is through: either is seen as a refusal."""
    try:
        return hub.http.get("/health", headers={"x": "y" * 2 * MIB})
    except httpx.TransportError:
        return httpx.Response(400)


def test_many_large_bodies_at_once_are_not_all_held(watched: Watched) -> None:
    """What is being received counts until it is answered; refusals say to come again."""
    worker = watched.hub.worker()
    answers = [worker.call("POST", "/heartbeat", b" " * (64 * 1024)) for _ in range(20)]
    assert {refusal(answer)[0] for answer in answers if answer.status_code >= 400} <= {413, 422, 429}
    metrics = watched.hub.http.get("/metrics").text
    assert "shoal_hub_bodies_held_bytes 0.0" in metrics
