"""What a hub, or whoever answers in its place, can do to a contributor's machine: nothing beyond giving it work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hostilekit import Answer, Asked, HostileHub, hostile_hub

from shoal.cli.main import main
from shoal.client import ClientOptions, HubClient
from shoal.errors import HubRefused
from shoal.protocol import HubClock, Problem, SigningKey, sign_document
from shoal.runtime.clock import SystemClock
from shoal.runtime.stop import StopToken


@pytest.fixture
def hub() -> Iterator[HostileHub]:
    with hostile_hub() as served:
        yield served


# ── known hubs ───────────────────────────────────────────────────────────────────────────────────────────────────

COMMANDS = [
    ["join", "URL", "--engine", "scripted", "--no-check"],
    ["relay", "--run-info", "URL", "--port", "0"],
    ["status", "URL"],
    ["why", "0", "URL"],
    ["ledger", "verify", "URL"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_known_address_with_another_root_key_is_refused_by_every_command(
    hub: HostileHub, command: list[str], own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of the new run decides nothing: the address is what is remembered."""
    assert main(["join", hub.url, "--engine", "scripted", "--no-check"]) == 4  # met, remembered; it gives no work
    known = hub.fingerprint
    assert known in (own_home / "known_hubs.json").read_text()
    hub.become("impostor")
    hub.requests.clear()
    capsys.readouterr()
    assert main([hub.url if word == "URL" else word for word in command]) == 1
    said = capsys.readouterr().err
    assert known in said
    assert hub.fingerprint in said
    assert "ask the run's owner" in said
    assert {asked.path for asked in hub.requests} == {"/run"}, "nothing else was asked, and nothing signed was sent"
    assert known in (own_home / "known_hubs.json").read_text()
    assert not (own_home / hub.run).exists()


def test_the_fingerprint_in_a_new_join_url_replaces_what_is_remembered(hub: HostileHub, own_home: Path) -> None:
    assert main(["join", hub.url, "--engine", "scripted", "--no-check"]) == 4
    hub.become("successor")
    assert main(["join", f"{hub.url}/#{hub.fingerprint}", "--engine", "scripted", "--no-check"]) == 4
    assert hub.fingerprint in (own_home / "known_hubs.json").read_text()
    assert main(["join", hub.url, "--engine", "scripted", "--no-check"]) == 4


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

DAY_MS = 24 * 3_600_000


def clock_of(hub: HostileHub, asked: Asked, by_ms: int, signer: SigningKey | None = None) -> Answer:
    """A refusal that says that it is `by_ms` later than the request says; unsigned if nobody signs it."""
    now_ms = int(asked.headers["shoal-time"]) + by_ms
    document = HubClock(
        run=hub.run, node=asked.headers["shoal-node"], nonce=asked.headers["shoal-nonce"], now_ms=now_ms
    )
    clock = sign_document(document, signer) if signer is not None else None
    problem = Problem(code="auth.skew", message="your clock is wrong", clock=clock)
    return 401, {"shoal-time": str(now_ms)}, problem.model_dump_json().encode()


@pytest.mark.parametrize("who", ["nobody", "a stranger", "the hub"])
def test_no_request_is_signed_for_next_week(hub: HostileHub, who: str) -> None:
    """The hub, or whoever answers in its place, says that it is next week, and waits for requests of that date."""
    signer = {"nobody": None, "a stranger": SigningKey.generate(), "the hub": hub.key}[who]
    hub.answers["/nodes"] = lambda asked: clock_of(hub, asked, 7 * DAY_MS, signer)
    with closing(HubClient(hub.url, SigningKey.generate(), StopToken(), options=ClientOptions(patience_s=5))) as client:
        before_ms = SystemClock().now_ms()
        with pytest.raises(HubRefused):
            client.register("n", "worker", None)
    dated = [int(asked.headers["shoal-time"]) for asked in hub.requests if "shoal-time" in asked.headers]
    assert dated
    assert max(dated) <= before_ms + 60_000


def test_an_old_answer_about_the_time_is_not_believed_again(hub: HostileHub) -> None:
    """Recorded when the machine's clock was wrong, and played again to a later request."""
    recorded: list[Answer] = []

    def record(asked: Asked) -> Answer:
        recorded.append(recorded[0] if recorded else clock_of(hub, asked, 3_600_000, hub.key))
        return recorded[-1]

    hub.answers["/nodes"] = record
    with closing(HubClient(hub.url, SigningKey.generate(), StopToken(), options=ClientOptions(patience_s=5))) as client:
        with pytest.raises(HubRefused, match="your clock is wrong"):
            client.register("n", "worker", None)
        with pytest.raises(HubRefused, match="your clock is wrong"):
            client.register("n", "worker", None)
    assert len(recorded) == 3, "believed once, in answer to the request that it names"
