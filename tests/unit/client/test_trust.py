"""The chain from the root key to the hub: every link broken once; and the root keys that are remembered."""

from pathlib import Path
from typing import Any

import pytest
from fake_run import CERTIFICATES, HUB, ROOT, RUN, STRANGER, TRAINER, VALIDATOR, certificate, run_info, signed

from shoal.client.trust import open_run_info, pinned_root, remember_root, split_join_url
from shoal.errors import ConfigError, ProtocolError, SignatureError
from shoal.protocol import SignedDocument, fingerprint


def test_the_whole_chain_gives_the_keys_of_every_role_of_which_the_trainers_is_one() -> None:
    trusted = open_run_info(signed(run_info()), fingerprint(ROOT.public_key))
    assert trusted.run == RUN == f"demo-{fingerprint(ROOT.public_key)[:12]}"
    assert (trusted.root_fingerprint, trusted.hub_keys) == (fingerprint(ROOT.public_key), {HUB.public_key})
    assert (trusted.trainer_key, trusted.validator_keys) == (TRAINER.public_key, {VALIDATOR.public_key})
    two = (*CERTIFICATES, certificate("trainer", STRANGER))
    with pytest.raises(ProtocolError, match="2 trainer keys"):
        _ = open_run_info(signed(run_info(certificates=two)), None).trainer_key


def changed(**fields: Any) -> SignedDocument:
    honest = signed(run_info())
    return SignedDocument(**{**honest.model_dump(), "document": {**honest.document, **fields}})


def certified(*more: SignedDocument, by: Any = HUB) -> SignedDocument:
    return signed(run_info(certificates=(*CERTIFICATES, *more)), by)


def test_without_a_pin_the_first_answer_is_believed_and_its_root_can_be_remembered() -> None:
    assert open_run_info(signed(run_info()), None).root_fingerprint == fingerprint(ROOT.public_key)
    with pytest.raises(SignatureError, match="another run or an impostor"):
        open_run_info(signed(run_info()), fingerprint(STRANGER.public_key))


@pytest.mark.parametrize(("description", "why"), [
    pytest.param(signed(run_info(), STRANGER), "not certified", id="hub without certificate"),
    pytest.param(signed(run_info(), TRAINER), "not certified", id="key of another role"),
    pytest.param(certified(certificate("hub", STRANGER, root=STRANGER), by=STRANGER), "not trusted",
     id="another root's word"),
    pytest.param(certified(certificate("validator", STRANGER, run="other-000000000000")), "other-0000",
     id="another run's word"),
    pytest.param(changed(sources=["http://evil"]), "does not match", id="changed"),
    pytest.param(signed(run_info(run="demo-abc", certificates=(certificate("hub", HUB, run="demo-abc"),))),
     "calls itself 'demo-abc'", id="run id without the root key"),
    *(pytest.param(changed(root_key=key), "names no root key", id=f"root {key!r}") for key in ("", "zz" * 32, 7, None)),
    pytest.param(signed(run_info(protocol_version=99)), "speaks protocol 99", id="another protocol"),
])  # fmt: skip
def test_a_broken_link_is_refused(description: SignedDocument, why: str) -> None:
    with pytest.raises((SignatureError, ProtocolError), match=why):
        open_run_info(description, None)


def test_join_urls_are_taken_apart() -> None:
    assert split_join_url("http://h:8470/#" + "ab" * 20) == ("http://h:8470", "ab" * 20)
    assert split_join_url("https://h/prefix/") == ("https://h/prefix", None)
    assert split_join_url("http://b\u00fccher.example:1") == ("http://b\u00fccher.example:1", None)
    assert split_join_url("http://[2001:db8::1]:8470/") == ("http://[2001:db8::1]:8470", None)


@pytest.mark.parametrize("url", [
    "h:8470", "ftp://h/", "http://", "http://h/#abc", "http://h/#" + "XY" * 20, "http://h:99999", "http://h:port",
    "http://h:0", "http://[::1", "http://h[x]:8", "http://a..b:8470", "http://xn--99999:8470", f"http://{'a' * 64}:1",
])  # fmt: skip
def test_bad_join_urls_are_said_to_be_so(url: str) -> None:
    with pytest.raises(ConfigError):
        split_join_url(url)


def test_a_hub_is_believed_once_and_then_held_to_it(own_home: Path) -> None:
    assert pinned_root(["http://a"], None) is None
    remember_root("http://a", "1" * 40)
    remember_root("http://b", "2" * 40)
    assert pinned_root(["http://a"], None) == "1" * 40
    assert pinned_root(["http://b"], None) == "2" * 40
    with pytest.raises(ConfigError, match="hubs of different runs"):
        pinned_root(["http://a", "http://b"], None)
    assert (own_home / "known_hubs.json").stat().st_mode & 0o777 == 0o600
    assert own_home.stat().st_mode & 0o777 == 0o700


def test_one_address_in_another_spelling_is_the_same_hub_and_another_port_path_or_scheme_is_another() -> None:
    remember_root("http://hub.example", "1" * 40)
    spellings = ["http://hub.example/", "HTTP://Hub.Example:80", "http://hub.example.:80/"]
    assert [pinned_root([spelling], None) for spelling in spellings] == ["1" * 40] * 3
    others = ["http://hub.example:81", "http://hub.example/b", "https://hub.example"]
    assert [pinned_root([other], None) for other in others] == [None] * 3


def test_a_fingerprint_from_the_join_url_goes_before_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    remember_root("http://a", "1" * 40)
    assert pinned_root(["http://a"], "3" * 40) == "3" * 40
    remember_root("http://a", "3" * 40)
    assert pinned_root(["http://a"], None) == "3" * 40
    assert "1" * 40 in caplog.text
    assert "3" * 40 in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"http://a": 1}'])
def test_a_damaged_memory_says_what_to_do(own_home: Path, text: str) -> None:
    own_home.mkdir()
    (own_home / "known_hubs.json").write_text(text)
    with pytest.raises(ConfigError, match="remove it"):
        pinned_root(["http://a"], None)
