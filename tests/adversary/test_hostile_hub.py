"""What a hub, or whoever answers in its place, can do to a contributor's machine: nothing beyond giving it work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hostilekit import HostileHub, hostile_hub

from shoal.cli.main import main


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
