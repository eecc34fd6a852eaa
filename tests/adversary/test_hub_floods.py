"""Floods, slow callers and bombs, over real sockets: slowed, cut off or refused, and others are answered meanwhile.

Every caller here has an address of its own (127.0.0.2 and so on): the hub's own machine is 127.0.0.1, and nobody's
flood. The hub's patience is shortened where a test waits for it to end.
"""

import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import httpx2
import pytest
import zstandard

from kit import Patch, TempPaths, eventually
from kit.served_hub import RECIPE, Caller, Hub, begun, ok, packed, refusal, running_hub, submission
from shoal.protocol import Registration
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe

MALLORY, ALICE = "127.0.0.2", "127.0.0.3"
DEADLINE_S = 30.0
SETTINGS = {"requests_per_address_s": 20, "requests_per_key_s": 0}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: TempPaths) -> Iterator[Hub]:
    with running_hub(tmp_path_factory.mktemp("flood") / "run", hub=SETTINGS) as hub:
        yield hub


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: Patch) -> Iterator[Hub]:
    """A hub of its own, for who counts what one address has had: five requests a second, six new keys a minute."""
    monkeypatch.setattr("shoal.hub.http.limits.REGISTRATIONS", 6 / 60 / 5)
    with running_hub(tmp_path / "run", hub={**SETTINGS, "requests_per_address_s": 5}) as hub:
        yield hub


@contextmanager
def calling_from(hub: Hub, address: str) -> Iterator[Hub]:
    """The same hub, seen from another address."""
    transport = httpx2.HTTPTransport(local_address=address)
    with httpx2.Client(base_url=hub.http.base_url, timeout=30, transport=transport) as http:
        yield replace(hub, http=http)


def plug(hub: Hub, address: str = MALLORY, receives_bytes: int | None = None) -> socket.socket:
    """A bare connection."""
    parts, plugged = urlsplit(str(hub.http.base_url)), socket.socket()
    if receives_bytes is not None:
        plugged.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives_bytes)
    plugged.bind((address, 0))
    plugged.connect((parts.hostname, parts.port))
    plugged.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return plugged


def head_of(caller: Caller, path: str, body: bytes) -> bytes:
    """The signed head of a request by hand."""
    headers = {**caller.signed("POST", path, body), "host": "hub", "content-length": str(len(body))}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode()


def is_cut(plugged: socket.socket) -> bool:
    """Whether the other side has ended it, seen without reading what was sent."""
    poller = select.poll()
    poller.register(plugged, select.POLLHUP | select.POLLERR | select.POLLRDHUP)
    return bool(poller.poll(0))


def read_all(plugged: socket.socket) -> bytes:
    """What came until the other side ended it."""
    plugged.settimeout(DEADLINE_S)
    got = b""
    with suppress(ConnectionResetError):
        while part := plugged.recv(65536):
            got += part
    return got


class Heart:
    """Somebody who works: heartbeats, one after the other, each of which has to be answered."""

    def __init__(self, hub: Hub) -> None:
        self._caller = hub.worker()
        self.waits_s: list[float] = []

    def beat(self, times: int = 1) -> None:
        for _ in range(times):
            began_s = time.monotonic()
            ok(self._caller.call("POST", "/heartbeat", b"{}"))
            self.waits_s.append(time.monotonic() - began_s)


# ── slow ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_slow_heads(hub: Hub, monkeypatch: Patch) -> None:
    """Slow loris: a byte of the head now and then, on as many connections as one may have. They are cut off in time,
    those that say nothing at all too, and a worker is answered meanwhile."""
    monkeypatch.setattr("shoal.runtime.http.HEAD_S", 1.0)
    heart = Heart(hub)
    with ExitStack() as stack:
        sockets = [stack.enter_context(plug(hub)) for _ in range(30)]
        for plugged in sockets[:20]:
            plugged.sendall(b"POST /leases HTTP/1.1\r\nhost: hub\r\nx-slow: ")

        def all_cut() -> bool:
            heart.beat()
            for plugged in sockets[:20]:
                try:
                    plugged.sendall(b"x")
                except OSError:
                    continue
            return all(is_cut(plugged) for plugged in sockets)

        eventually(all_cut, DEADLINE_S, "slow heads stay connected")
    assert len(heart.waits_s) > 1


def test_a_slow_head_on_a_connection_that_was_good(hub: Hub, monkeypatch: Patch) -> None:
    monkeypatch.setattr("shoal.runtime.http.HEAD_S", 1.0)
    with plug(hub, ALICE) as plugged:
        plugged.sendall(b"GET /health HTTP/1.1\r\nhost: hub\r\n\r\n")
        got = b""
        while b'{"ok":true}' not in got:
            got += plugged.recv(65536)
        plugged.sendall(b"GET /hea")
        eventually(lambda: is_cut(plugged), DEADLINE_S, "a second head may take for ever")


def test_a_slow_body(hub: Hub, monkeypatch: Patch) -> None:
    """Only who has signed for a body is listened to for long, and not below a floor."""
    monkeypatch.setattr("shoal.runtime.http.BODY_PAUSE_S", 1.0)
    caller, heart = hub.worker(), Heart(hub)
    with plug(hub) as plugged:
        plugged.sendall(head_of(caller, "/heartbeat", b" " * 60_000))

        def is_refused() -> bool:
            heart.beat()
            plugged.sendall(b" ")
            return bool(select.select([plugged], [], [], 0)[0])

        eventually(is_refused, DEADLINE_S, "a slow body is waited for")
        answer = plugged.recv(65536)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"body.slow" in answer


def test_a_reader_that_does_not_read(hub: Hub, monkeypatch: Patch) -> None:
    """It asks for much and takes nothing: what is kept for it is bounded, and so is the time."""
    monkeypatch.setattr("shoal.runtime.http.READ_CHECK_S", 0.5)
    monkeypatch.setattr("shoal.hub.service.reporting.HubMetrics.text", lambda _metrics: bytes(2**20))  # a large page
    heart, ask = Heart(hub), b"GET /metrics HTTP/1.1\r\nhost: hub\r\n\r\n"
    with ExitStack() as stack:
        readers = [stack.enter_context(plug(hub, address, 4096)) for address in ("127.0.0.40", "127.0.0.41")]
        for plugged in readers:
            plugged.sendall(ask * 100)

        def all_cut() -> bool:
            heart.beat()
            return all(is_cut(plugged) for plugged in readers)

        eventually(all_cut, DEADLINE_S, "whoever does not read keeps its connection")


# ── too much ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_too_many_connections(fresh: Hub) -> None:
    heart = Heart(fresh)
    with ExitStack() as stack:
        sockets = [stack.enter_context(plug(fresh)) for _ in range(60)]
        heart.beat()

        def refused() -> list[socket.socket]:
            return [plugged for plugged in sockets if select.select([plugged], [], [], 0)[0]]

        eventually(lambda: len(refused()) >= 20, DEADLINE_S)
        assert len(refused()) == 20
        answer = read_all(refused()[0])
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 2" in answer
        assert b"rate.connections" in answer
        with calling_from(fresh, ALICE) as seen:
            ok(seen.http.get("/health"))
    with calling_from(fresh, MALLORY) as seen:  # they are gone: there is room again

        def is_let_in() -> bool:
            try:
                return seen.http.get("/health").status_code == 200
            except httpx2.TransportError:
                return False

        eventually(is_let_in, DEADLINE_S, "connections that ended are still counted")


def test_a_huge_head(hub: Hub) -> None:
    with plug(hub, ALICE) as plugged:
        with suppress(OSError):  # it may be cut off, as it should be
            plugged.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * 4_000_000)
        assert read_all(plugged)[:13] in (b"HTTP/1.1 431 ", b"")
    Heart(hub).beat()


@pytest.mark.parametrize(
    "junk",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)), b"\x00" * 5000, b"GET\r\n\r\n",
     b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
     b"POST /nodes HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
    ids=["tls", "zeros", "short", "negative", "http2", "chunks"],
)  # fmt: skip
def test_junk(hub: Hub, junk: bytes) -> None:
    with plug(hub, ALICE) as plugged:
        plugged.sendall(junk)
        answer = read_all(plugged)
    assert answer[:10] in (b"", b"HTTP/1.1 4"), answer
    Heart(hub).beat()


def test_requests_ahead_of_their_answers(hub: Hub) -> None:
    """Megabytes of requests behind one that is being answered: the hub reads none of them meanwhile."""
    caller, heart = hub.worker(), Heart(hub)
    taken = [lease for _ in range(20) for lease in caller.lease(16)]
    body = b'{"request":"request-ahead","max_units":1,"wait_s":20}'
    ahead = b"GET /health HTTP/1.1\r\nhost: hub\r\n\r\n" * 2_000
    with plug(hub, ALICE) as plugged:
        plugged.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        plugged.sendall(head_of(caller, "/leases", body) + body)
        plugged.setblocking(False)
        sent_bytes = beats_without_progress = 0
        while beats_without_progress < 20:
            try:
                sent_bytes += plugged.send(ahead)
                beats_without_progress = 0
            except BlockingIOError:
                heart.beat()
                beats_without_progress += 1
            assert sent_bytes < 32 * 2**20, "what is sent ahead is read"
    caller.call("POST", "/leases/release", {"leases": [lease.lease for lease in taken]})


# ── too fast ─────────────────────────────────────────────────────────────────────────────────────────────────────


def flood(hub: Hub, address: str, over: threading.Event, statuses: Counter[int], forwarded: bool = False) -> None:
    """Ask as fast as one can, signed by a stranger."""
    with calling_from(hub, address) as seen:
        stranger = seen.caller()
        while not over.is_set():
            headers = stranger.signed("POST", "/leases", b"{}")
            if forwarded:
                headers["x-forwarded-for"] = f"198.51.100.{sum(statuses.values()) % 250}"
            statuses[seen.http.post("/leases", content=b"{}", headers=headers).status_code] += 1


def test_a_flood_of_one_address(fresh: Hub, record_property: Callable[[str, object], None]) -> None:
    """Eight threads without a pause: they are held and refused, whatever address they claim; a worker is not."""
    with calling_from(fresh, ALICE) as seen:
        heart, over, statuses = Heart(seen), threading.Event(), Counter[int]()
        heart.beat(20)
        calm_s, heart.waits_s = heart.waits_s, []
        threads = [
            threading.Thread(target=flood, args=(fresh, MALLORY, over, statuses, number % 2 == 1), daemon=True)
            for number in range(8)
        ]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: statuses[429] > 8, DEADLINE_S, "the flood is never refused")
            heart.beat(20)
        finally:
            over.set()
            for thread in threads:
                thread.join(DEADLINE_S)
        took_s = time.monotonic() - began_s
    assert set(statuses) <= {401, 429}
    assert statuses[401] <= 5 * (10 + took_s) + 8
    record_property(
        "table",
        f"a flood of one address: {sum(statuses.values()) / took_s:.0f} requests/s answered, {statuses[429]} of "
        f"{sum(statuses.values())} refused; a worker's heartbeat: median {median(calm_s) * 1000:.1f} ms before, "
        f"{median(heart.waits_s) * 1000:.1f} ms meanwhile",
    )


def test_a_proxy_that_is_trusted_speaks_for_others(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("shoal.hub.http.app.HOLD_S", 0.0)
    proxy, settings = "127.0.0.9", {**SETTINGS, "requests_per_address_s": 0.1, "trusted_proxies": ["127.0.0.9"]}
    with running_hub(tmp_path / "run", hub=settings) as hub, calling_from(hub, proxy) as seen:

        def ask(forwarded: str) -> int:
            return seen.http.get("/health", headers={"x-forwarded-for": forwarded}).status_code

        assert [ask("203.0.113.5"), ask("203.0.113.5")] == [200, 429]
        assert ask("203.0.113.6") == 200
        assert ask("198.51.100.1, 203.0.113.6") == 429  # what comes before the proxy's own word is made up
        assert ask("198.51.100.2, 203.0.113.5") == 429


def test_a_key_that_asks_too_fast(tmp_path: Path) -> None:
    with running_hub(tmp_path / "run", hub={"requests_per_key_s": 1}) as hub:
        eager, other = hub.worker(), hub.worker()
        answers = [eager.call("POST", "/heartbeat", b"{}") for _ in range(25)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert refusal(refused[0]) == (429, "rate.key")
        assert int(refused[0].headers["retry-after"]) >= 1
        ok(other.call("POST", "/heartbeat", b"{}"))


def test_fresh_keys_of_one_address(fresh: Hub) -> None:
    """Six a minute; whoever else comes is let in."""
    with calling_from(fresh, MALLORY) as seen:
        codes = Counter(Caller(seen, seen.caller().key).register().status_code for _ in range(20))
    assert codes[200] <= 8
    assert codes[200] + codes[429] == 20
    with calling_from(fresh, ALICE) as seen:
        ok(seen.caller().register())
        key = seen.caller().key
        ok(Caller(seen, key).call("POST", "/nodes", Registration(public_key=key.public_key, name="once more")))


# ── bombs: little that would become much ──────────────────────────────────────────────────────────────────────────────

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
        [sys.executable, "-m", "shoal.cli", "hub", str(run.path)],
        stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        with httpx2.Client(base_url=url, timeout=60) as http:
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
    "a gigabyte of zeros": zstd_bomb, "a frame that lies about its size": liar_bomb,
    "a frame without a size": unsized_bomb, "a frame that wants a huge window": window_bomb,
    "frames upon frames": lambda: framed(b"") * 60_000,
    "four billion elements": lambda: framed(b"\xdd\xff\xff\xff\xff" + bytes(1000)),
    "four billion keys": lambda: framed(b"\xdf\xff\xff\xff\xff" + bytes(1000)),
    "four billion bytes": lambda: framed(b"\xc6\xff\xff\xff\xff" + bytes(1000)),
    "nested lists": lambda: framed(b"\x91" * 900_000), "nested maps": lambda: framed(b"\x81\xa1a" * 300_000),
    "nested in a field": lambda: framed(b"\x81\xa8rollouts" + b"\x91" * 900_000),
    "a million rollouts": lambda: framed(b"\x81\xa8rollouts\xdd\x00\x0f\x42\x40" + b"\x80" * 1_000_000),
    "many empty lists": lambda: framed(b"\x81\xa6engine\xdd\x00\x0f\x42\x40" + b"\x90" * 1_000_000),
}  # fmt: skip

JSON_BOMBS: dict[str, bytes] = {
    "nested lists": b'{"held":' + b"[" * 60_000, "nested maps": b'{"held":' + b'{"a":' * 12_000,
    "digits": b'{"max_units":' + b"9" * 60_000 + b"}", "an exponent": b'{"wait_s":1e999999999}',
    "many names": b'{"held":[' + b'"u0a0",' * 9_000 + b'"u0a0"]}',
    "one name for ever": b'{"request":"' + b"x" * 60_000 + b'"}',
    "many unknown fields": b"{" + b",".join(b'"f%d":1' % number for number in range(6_000)) + b"}",
}  # fmt: skip


def test_bombs_refused_in_bounded_memory(watched: Watched, record_property: Callable[[str, object], None]) -> None:
    hub, lines = watched.hub, []
    worker = hub.worker()
    [lease] = worker.lease()
    ok(worker.submit(lease, packed(submission(lease))))  # what an honest one costs is there already
    worker = hub.worker()
    [lease] = worker.lease()
    leases = partial(worker.call, "POST", "/leases")
    verdicts = partial(hub.caller(hub.folder.key("validator-0")).call, "POST", "/verdicts")
    thrown: list[tuple[str, Callable[[], httpx2.Response], tuple[int, ...]]] = [
        *((f"bulk: {name}", partial(worker.submit, lease, make()), (413, 422)) for name, make in BULK_BOMBS.items()),
        *((f"json: {name}", partial(leases, body), (422,)) for name, body in JSON_BOMBS.items()),
        ("trusted: 15 MiB of verdicts", partial(verdicts, b'{"verdicts":[' + b"{}," * 5 * MIB), (422,)),
        ("trusted: 15 MiB nested", partial(verdicts, b'{"verdicts":' + b"[" * 15 * MIB), (422,)),
        ("a head of 2 MiB", partial(_head_bomb, hub), (431,)),
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


def _head_bomb(hub: Hub) -> httpx2.Response:
    """The hub answers and hangs up before the head is through: either is seen as a refusal."""
    try:
        return hub.http.get("/health", headers={"x": "y" * 2 * MIB})
    except httpx2.TransportError:
        return httpx2.Response(431)


def test_many_large_bodies_at_once_are_not_all_held(watched: Watched) -> None:
    """What is being received counts until it is answered; refusals say to come again."""
    worker = watched.hub.worker()
    answers = [worker.call("POST", "/heartbeat", b" " * (64 * 1024)) for _ in range(20)]
    assert {refusal(answer)[0] for answer in answers if answer.status_code >= 400} <= {413, 422, 429}
    metrics = watched.hub.http.get("/metrics").text
    assert "shoal_hub_bodies_held_bytes 0.0" in metrics
