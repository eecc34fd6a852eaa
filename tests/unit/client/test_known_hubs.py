"""The memory of hubs: by address, in the user's own folder, private."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.client.known_hubs import known_root, remember_root
from shoal.errors import ConfigError


def test_a_hub_is_believed_once_and_then_held_to_it(own_home: Path) -> None:
    assert known_root(["http://a"], None) is None
    remember_root("http://a", "1" * 40)
    remember_root("http://b", "2" * 40)
    assert known_root(["http://a"], None) == "1" * 40
    assert known_root(["http://b"], None) == "2" * 40
    assert (own_home / "known_hubs.json").stat().st_mode & 0o777 == 0o600
    assert own_home.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("spelling", ["http://hub.example/", "HTTP://Hub.Example:80", "http://hub.example.:80/"])
def test_one_address_in_another_spelling_is_the_same_hub(spelling: str) -> None:
    remember_root("http://hub.example", "1" * 40)
    assert known_root([spelling], None) == "1" * 40


def test_another_port_path_or_scheme_is_another_hub() -> None:
    remember_root("http://hub.example", "1" * 40)
    others = ["http://hub.example:81", "http://hub.example/b", "https://hub.example"]
    assert [known_root([other], None) for other in others] == [None] * 3


def test_a_fingerprint_from_the_join_url_goes_before_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    remember_root("http://a", "1" * 40)
    assert known_root(["http://a"], "3" * 40) == "3" * 40
    remember_root("http://a", "3" * 40)
    assert known_root(["http://a"], None) == "3" * 40
    assert "1" * 40 in caplog.text
    assert "3" * 40 in caplog.text


def test_addresses_of_different_runs_are_refused_together() -> None:
    remember_root("http://a", "1" * 40)
    remember_root("http://b", "2" * 40)
    with pytest.raises(ConfigError, match="hubs of different runs"):
        known_root(["http://a", "http://b"], None)


@pytest.mark.parametrize("text", ["{", "[]", '{"http://a": 1}'])
def test_a_damaged_memory_says_what_to_do(own_home: Path, text: str) -> None:
    own_home.mkdir()
    (own_home / "known_hubs.json").write_text(text)
    with pytest.raises(ConfigError, match="remove it"):
        known_root(["http://a"], None)
