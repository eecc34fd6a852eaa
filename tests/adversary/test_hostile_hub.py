"""What a hub, or a server in its place, can do to a contributor's machine: nothing beyond giving it work."""

import gzip
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kit import Patch, eventually
from kit.cast import ScriptedSource
from kit.hostile import Answer, Asked, HostileHub, hostile_hub, hub
from shoal import protocol
from shoal.cli.main import main
from shoal.client import ClientOptions, HubClient
from shoal.client.weights import downloader_of
from shoal.errors import BroadcastError, CodecError, DeadlineExceeded, HubRefused, HubUnreachable, ProtocolError
from shoal.protocol.submission import ProgressReply
from shoal.run.ledger.sources import FileLedger
from shoal.runtime import StopToken, SystemClock, exchange, targets
from shoal.runtime.targets import Nearness, nearness

__all__ = ["hub"]  # a fixture
KEY = protocol.SigningKey.generate()


@contextmanager
def client_of(hub: HostileHub | str, patience_s: float = 2, stop: StopToken | None = None, **others: Any):
    url, options = hub if isinstance(hub, str) else hub.url, ClientOptions(patience_s=patience_s, **others)
    with closing(HubClient(url, KEY, stop or StopToken(), options=options)) as client:
        yield client


JOIN = ["join", "URL", "--engine", "scripted", "--no-check"]
COMMANDS = [JOIN, ["relay", "URL", "--port", "0"], ["status", "URL"], ["why", "0", "URL"],
            ["ledger", "verify", "URL"]]  # fmt: skip


def told(words: list[str], url: str) -> int:
    return main([url if word == "URL" else word for word in words])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_other_root_key_refused_by_every_command(hub, command, own_home, capsys):
    """The name of the new run decides nothing: the address is what is remembered."""
    assert told(JOIN, hub.url) == 4  # met, remembered; it gives no work
    known = hub.fingerprint
    assert known in (own_home / "known_hubs.json").read_text()
    hub.become("impostor")
    hub.requests.clear()
    capsys.readouterr()
    assert told(command, hub.url) == 1
    said = capsys.readouterr().err
    assert known in said
    assert hub.fingerprint in said
    assert "ask the run's owner" in said
    assert {asked.path for asked in hub.requests} == {"/run"}, "nothing else was asked, and nothing signed was sent"
    assert known in (own_home / "known_hubs.json").read_text()
    assert not (own_home / hub.run).exists()


def test_new_join_url_replaces_remembered_fingerprint(hub: HostileHub, own_home: Path) -> None:
    assert told(JOIN, hub.url) == 4
    hub.become("successor")
    assert told(JOIN, f"{hub.url}/#{hub.fingerprint}") == 4
    assert hub.fingerprint in (own_home / "known_hubs.json").read_text()
    assert told(JOIN, hub.url) == 4


DAY_MS = 24 * 3_600_000


def clock_of(hub: HostileHub, asked: Asked, by_ms: int, signer: protocol.SigningKey | None = None) -> Answer:
    """A refusal that says that it is `by_ms` later than the request says; unsigned if nobody signs it."""
    now_ms = int(asked.headers["shoal-time"]) + by_ms
    document = protocol.HubClock(
        run=hub.run, node=asked.headers["shoal-node"], nonce=asked.headers["shoal-nonce"], now_ms=now_ms
    )
    clock = protocol.sign_document(document, signer) if signer is not None else None
    problem = protocol.Problem(code="auth.skew", message="your clock is wrong", clock=clock)
    return 401, {"shoal-time": str(now_ms)}, problem.model_dump_json().encode()


def latest_ms(hub: HostileHub) -> int:
    """The latest date that was signed for."""
    return max(int(asked.headers["shoal-time"]) for asked in hub.requests if "shoal-time" in asked.headers)


@pytest.mark.parametrize("who", ["nobody", "a stranger", "the hub"])
def test_no_request_is_signed_for_next_week(hub: HostileHub, who: str) -> None:
    """The hub, or a server in its place, says that it is next week, and waits for requests of that date."""
    signer = {"nobody": None, "a stranger": protocol.SigningKey.generate(), "the hub": hub.key}[who]
    hub.answers["/nodes"] = lambda asked: clock_of(hub, asked, 7 * DAY_MS, signer)
    before_ms = SystemClock().now_ms()
    with client_of(hub, 5) as client, pytest.raises(HubRefused):
        client.register("n", "worker", None)
    assert latest_ms(hub) <= before_ms + 60_000


def test_replayed_clock_answer_is_ignored(hub: HostileHub) -> None:
    """Signed by the hub for a request of this very node, and played again to its next start."""
    recorded: list[Answer] = []

    def answered(asked: Asked) -> Answer:
        recorded.append(recorded[0] if recorded else clock_of(hub, asked, 3_600_000, hub.key))
        return recorded[-1]

    hub.answers["/nodes"] = answered
    for _ in range(2):
        hub.requests.clear()
        with client_of(hub, 5) as client, pytest.raises(HubRefused, match="your clock is wrong"):
            client.register("n", "worker", None)
    assert latest_ms(hub) <= SystemClock().now_ms() + 60_000


@pytest.fixture
def public(monkeypatch: Patch) -> Iterator[HostileHub]:
    """A hub at a public address, which 127.0.0.2 stands for; 127.0.0.1 is this machine's own."""
    monkeypatch.setattr(targets, "nearness", lambda text: Nearness.PUBLIC if text == "127.0.0.2" else nearness(text))
    with hostile_hub("127.0.0.2") as served:
        yield served


@pytest.fixture
def inside() -> Iterator[HostileHub]:
    """Something on this machine that listens on loopback, and should never hear from the hub's wishes."""
    with hostile_hub("127.0.0.1") as served:
        yield served


NOT_THERE = "it may not send this machine there"
POLICY = protocol.PolicyRef(incarnation=0, version=0, digest="d" * 64)


def fetch_fails(hub: HostileHub, folder: Path, sentence: str) -> None:
    with (
        client_of(hub) as client,
        closing(downloader_of(client.trusted_run(), folder, StopToken(), 1)) as downloader,
        pytest.raises(BroadcastError, match=sentence),
    ):
        downloader.fetch(POLICY, deadline_s=2.0)


@pytest.mark.parametrize("how", ["named", "redirected"])
def test_public_hub_cannot_name_loopback_sources(public, inside, tmp_path, how):
    public.become("demo", sources=(inside.url if how == "named" else public.url,), last_resort=(inside.url,))
    for path in ("/head.json", "/manifests/0-0.json"):
        public.answers[path] = 307, {"location": f"{inside.url}/head.json"}, b""
    fetch_fails(public, tmp_path, NOT_THERE)
    assert inside.requests == []


def test_public_hub_cannot_name_loopback_hub(public: HostileHub, inside: HostileHub) -> None:
    public.become("demo", hubs=(inside.url,))
    public.answers["/nodes"] = (503, {}, b"{}")
    with client_of(public) as client, pytest.raises(HubUnreachable):
        client.register("n", "worker", None)
    assert inside.requests == []


def test_hub_that_moves_to_loopback_is_not_followed(public: HostileHub, monkeypatch: Patch) -> None:
    """Its name resolves to a public address at first, and to this machine from then on."""
    known, found = socket.getaddrinfo, ["127.0.0.2"]

    def resolved(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        return known(found[0] if name == "hub.example" else host, port, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with client_of(public.url.replace("127.0.0.2", "hub.example"), 1) as client:
        client.trusted_run()
        found[0] = "127.0.0.1"
        with pytest.raises(HubUnreachable, match=NOT_THERE):
            client.status()


def test_loopback_hub_may_name_loopback_sources(hub: HostileHub, inside: HostileHub, tmp_path: Path) -> None:
    hub.become("demo", sources=(inside.url,))
    fetch_fails(hub, tmp_path, "")
    assert inside.requests != []


NASTY = "\x1b]52;c;cm0=\x07\x1b]0;title\x07\x9b2J\u202e\r\nroot@host# "


def nasty_status(hub: HostileHub) -> protocol.RunStatus:
    node = protocol.NodeView(
        node=NASTY, name=NASTY, role="worker", state=protocol.NodeState.BANNED, reason=NASTY, doing=NASTY, owner=NASTY
    )
    words = {"node": NASTY, "outcome": NASTY, "reason": NASTY, "message": NASTY}
    verdict = protocol.RecentVerdict(unit=0, decided_at_ms=0, **words)
    return protocol.RunStatus(
        run=NASTY, name=NASTY, now_ms=1, finished=False, steps=1, step=0, policy=None, max_staleness=0,
        units={NASTY: 1}, submissions={NASTY: 1}, nodes=(node,),
        waits=(protocol.Wait(who=NASTY, what=NASTY, since_ms=0),),
        verdicts=(verdict,), reports=(), alarms=(NASTY,),
        ledger=protocol.LedgerHead(run=hub.run, index=0, hash="0" * 64),
        standing=protocol.OwnerOrders(conduct="paused", reason=NASTY), node_counts={NASTY: 9}, pools={NASTY: 1},
    )  # fmt: skip


def nasty_unit() -> protocol.UnitStory:
    lease = protocol.LeaseStory(
        lease=NASTY, unit=0, attempt=0, node=NASTY, state=NASTY, sentence=NASTY, issued_at_ms=0, deadline_ms=0,
        hard_deadline_ms=0, ended_at_ms=0, policy=protocol.PolicyRef(incarnation=0, version=0, digest="d" * 64),
        progress=1,
    )  # fmt: skip
    return protocol.UnitStory(
        run=NASTY, unit=0, state=NASTY, sentence=NASTY, task=NASTY, failures=0, version=None, step=None, lost_step=None,
        leases=(lease,), submissions=(), ledger=(), seeds=(),
    )  # fmt: skip


PROBLEM = protocol.Problem(code="auth.role", message=NASTY).model_dump_json().encode()
PAGE = (200, {"content-type": "text/html"}, NASTY.encode())
SAYINGS: dict[str, tuple[list[str], str, Answer, int]] = {  # what is called, what is answered there, the exit code
    "status": (["status", "URL"], "/status", (200, {}, b""), 0),
    "status json": (["status", "URL", "--json"], "/status", (200, {}, b""), 0),
    "why": (["why", "0", "URL"], "/units/0", (200, {}, nasty_unit().model_dump_json().encode()), 0),
    "why json": (["why", "0", "URL", "--json"], "/units/0", (200, {}, nasty_unit().model_dump_json().encode()), 0),
    "a refusal": (["why", "0", "URL"], "/units/0", (404, {}, PROBLEM), 2),
    "join refused": (JOIN, "/nodes", (403, {}, PROBLEM), 4),
    "a page": ([*JOIN, "--wait", "1"], "/run", PAGE, 4),
    "doctor": (["doctor", "URL"], "/run", PAGE, 1),
}


@pytest.mark.parametrize("saying", SAYINGS)
def test_terminal_sequences_of_a_hub_are_not_printed(hub, saying, capsys, own_home):
    words, path, answer, code = SAYINGS[saying]
    hub.answers[path] = (200, {}, nasty_status(hub).model_dump_json().encode()) if path == "/status" else answer
    assert told(words, hub.url) == code
    shown = capsys.readouterr()
    assert ("root@host#" in shown.out + shown.err) is not (path == "/run"), "the words are shown, but of a page none"
    for line in (shown.out + shown.err).split("\n"):
        assert line.isprintable(), repr(line)
        assert not line.startswith("root@host#"), "no line of its own"


MIB = 2**20


def compressed(size_bytes: int) -> Answer:
    return 200, {"content-encoding": "gzip"}, gzip.compress(bytes(size_bytes))


def test_compressed_answer_is_not_decompressed(hub: HostileHub, tmp_path: Path) -> None:
    """A few bytes on the wire would be gigabytes in memory before anybody looked at a cap."""
    tracemalloc.start()
    try:
        hub.answers["/run"] = hub.answers["/status"] = hub.answers["/witness"] = compressed(64 * MIB)
        tracemalloc.reset_peak()
        with client_of(hub, 0.1) as client, pytest.raises(HubUnreachable, match="compressed"):
            client.trusted_run()
        with client_of(hub, 0.1) as client, pytest.raises(HubUnreachable, match="compressed"):
            client.status()
        source = FileLedger(tmp_path / "ledger.jsonl")
        assert source.fetch(hub.url, "witness", 1000) == []
        assert "at most 1000" in source.notes[0]
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()
    assert {asked.headers["accept-encoding"] for asked in hub.requests} == {"identity"}


def test_endless_run_info_is_not_read_beyond_its_cap(hub: HostileHub) -> None:
    hub.answers["/run"] = (200, {}, hub.sign(hub.info).model_dump_json().encode() + b" " * 2 * MIB)
    with client_of(hub) as client, pytest.raises(CodecError, match="it was not read"):
        client.trusted_run()


@contextmanager
def sending(head: bytes, again: bytes, pause_s: float = 0.0) -> Iterator[ScriptedSource]:
    """A server that answers anything with `head` and then, for ever, with `again`."""

    def drip(_target: str, to: socket.socket) -> None:
        to.sendall(head)
        while not source.closed.wait(pause_s):
            to.sendall(again)

    with closing(ScriptedSource(drip)) as source:
        yield source


DRIPS = {
    "a head that drips": (b"HTTP/1.1 200 OK\r\nx: ", b"a", 0.02),
    "one 103 after another": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100, 0.0),
    "a chunk whose size drips": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a", 0.02),
}


@pytest.mark.parametrize("drip", DRIPS)
@pytest.mark.timeout(30)
def test_endless_answer_is_left_at_its_deadline(drip: str) -> None:
    with (
        sending(*DRIPS[drip]) as server,
        client_of(server.url, 0.2, connect_timeout_s=0.5, answer_timeout_s=0.5) as client,
        pytest.raises(HubUnreachable, match="too long in all"),
    ):
        client.trusted_run()


@pytest.mark.timeout(30)
def test_endless_answer_is_left_after_a_stop(monkeypatch: Patch) -> None:
    monkeypatch.setattr(exchange, "STOP_GRACE_S", 0.1)
    stop = StopToken()
    with (
        sending(*DRIPS["a head that drips"]) as server,
        client_of(server.url, 600, stop, answer_timeout_s=600) as client,
    ):

        def stop_it() -> None:
            eventually(lambda: server.seen)
            stop.set("asked")

        threading.Thread(target=stop_it, daemon=True).start()
        with pytest.raises(DeadlineExceeded, match="asked"):
            client.trusted_run()


@pytest.mark.parametrize("field", ["hubs", "sources", "last_resort", "certificates", "revoked", "profiles", "name"])
def test_run_info_with_too_many_entries_is_refused(hub: HostileHub, field: str) -> None:
    """Each of these cost time and memory for every one of as many as a hub would name."""
    many: Any = {
        "certificates": hub.info.certificates * 2000, "revoked": ("0" * 64,) * 2000, "profiles": ("a/b/c",) * 2000,
        "name": "n" * 2000,
    }.get(field, tuple(f"http://8.8.8.8:{number + 1}" for number in range(2000)))  # fmt: skip
    signed = protocol.sign_document(hub.info.model_copy(update={field: many}), hub.key)
    hub.answers["/run"] = (200, {}, signed.model_dump_json().encode())
    with client_of(hub) as client, pytest.raises(ProtocolError, match=field):
        client.trusted_run()


@pytest.mark.parametrize("reply", [protocol.HeartbeatReply, protocol.LeaseReply, ProgressReply])
def test_reply_with_too_many_entries_is_refused(hub: HostileHub, reply: type[protocol.Message]) -> None:
    node = protocol.NodeView(node="n", name="n", role="worker", state=protocol.NodeState.ACTIVE).model_dump()
    lease = hub.sign(hub.info).model_dump()
    content: dict[type[protocol.Message], dict[str, Any]] = {
        protocol.HeartbeatReply: {"node": node, "deadlines": {str(number): 1 for number in range(4097)}},
        protocol.LeaseReply: {"leases": [lease] * 257},
        ProgressReply: {"tokens": [0] * 1025, "deadline_ms": 1},
    }
    with pytest.raises(ValidationError, match="too_long"):
        reply.model_validate(content[reply])


@pytest.mark.parametrize("url", ["http://999.1.1.1", f"http://{'a' * 64}.example", "http://a..b", "http://a\x00b"])
def test_named_hub_without_a_valid_address_is_left_out(hub: HostileHub, url: str) -> None:
    hub.become("demo", hubs=(url,))
    hub.answers["/nodes"] = (503, {}, b"{}")
    with client_of(hub, 0.5) as client, pytest.raises(HubUnreachable):
        client.register("n", "worker", None)
