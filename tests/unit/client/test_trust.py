"""The chain from the root key to the hub: every link broken once."""

from __future__ import annotations

from typing import Any

import pytest
from fake_run import CERTIFICATES, HUB, ROOT, RUN, STRANGER, TRAINER, VALIDATOR, certificate, run_info, signed
from hypothesis import given
from hypothesis import strategies as st

from shoal.client.trust import open_run_info, run_id, split_join_url
from shoal.errors import ConfigError, ProtocolError, SignatureError
from shoal.protocol import SignedDocument, fingerprint


def test_the_whole_chain_gives_the_keys_of_every_role() -> None:
    trusted = open_run_info(signed(run_info()), fingerprint(ROOT.public_key))
    assert trusted.run == RUN
    assert trusted.root_fingerprint == fingerprint(ROOT.public_key)
    assert trusted.hub_keys == {HUB.public_key}
    assert trusted.trainer_key == TRAINER.public_key
    assert trusted.validator_keys == {VALIDATOR.public_key}


def test_without_a_pin_the_first_answer_is_believed_and_its_root_can_be_remembered() -> None:
    assert open_run_info(signed(run_info()), None).root_fingerprint == fingerprint(ROOT.public_key)


def test_another_root_than_the_pinned_one_is_refused() -> None:
    with pytest.raises(SignatureError, match="another run or an impostor"):
        open_run_info(signed(run_info()), fingerprint(STRANGER.public_key))


def test_a_hub_key_without_certificate_is_refused() -> None:
    with pytest.raises(SignatureError, match="not certified"):
        open_run_info(signed(run_info(), STRANGER), None)


def test_a_key_certified_for_another_role_cannot_speak_as_the_hub() -> None:
    with pytest.raises(SignatureError, match="not certified"):
        open_run_info(signed(run_info(), TRAINER), None)


def test_a_certificate_from_another_root_is_refused() -> None:
    forged = (*CERTIFICATES, certificate("hub", STRANGER, root=STRANGER))
    with pytest.raises(SignatureError, match="not trusted"):
        open_run_info(signed(run_info(certificates=forged), STRANGER), None)


def test_a_certificate_of_another_run_is_refused() -> None:
    foreign = (*CERTIFICATES, certificate("validator", STRANGER, run="other-000000000000"))
    with pytest.raises(SignatureError, match="other-000000000000"):
        open_run_info(signed(run_info(certificates=foreign)), None)


def test_a_changed_description_is_refused() -> None:
    honest = signed(run_info())
    changed = SignedDocument(**{**honest.model_dump(), "document": {**honest.document, "sources": ["http://evil"]}})
    with pytest.raises(SignatureError, match="does not match"):
        open_run_info(changed, None)


def test_the_run_id_must_carry_the_root_key() -> None:
    certificates = tuple(certificate(role, holder, run="demo-abc") for role, holder in (("hub", HUB),))
    with pytest.raises(SignatureError, match="calls itself 'demo-abc'"):
        open_run_info(signed(run_info(run="demo-abc", certificates=certificates)), None)


@pytest.mark.parametrize("root_key", ["", "zz" * 32, 7, None])
def test_a_description_without_a_root_key_is_refused(root_key: object) -> None:
    honest = signed(run_info())
    changed = SignedDocument(**{**honest.model_dump(), "document": {**honest.document, "root_key": root_key}})
    with pytest.raises(SignatureError, match="names no root key"):
        open_run_info(changed, None)


def test_another_protocol_version_says_so() -> None:
    with pytest.raises(ProtocolError, match="speaks protocol 99"):
        open_run_info(signed(run_info(protocol_version=99)), None)


def test_two_trainers_cannot_both_sign_policies() -> None:
    two = (*CERTIFICATES, certificate("trainer", STRANGER))
    trusted = open_run_info(signed(run_info(certificates=two)), None)
    with pytest.raises(ProtocolError, match="2 trainer keys"):
        _ = trusted.trainer_key


def test_run_id_rule() -> None:
    assert run_id("demo", "0123456789abcdef" * 3) == "demo-0123456789ab"


def test_join_urls_are_taken_apart() -> None:
    assert split_join_url("http://h:8470/#" + "ab" * 20) == ("http://h:8470", "ab" * 20)
    assert split_join_url("https://h/prefix/") == ("https://h/prefix", None)
    assert split_join_url("http://b\u00fccher.example:1") == ("http://b\u00fccher.example:1", None)
    assert split_join_url("http://[2001:db8::1]:8470/") == ("http://[2001:db8::1]:8470", None)


@pytest.mark.parametrize(
    "url",
    [
        "h:8470", "ftp://h/", "http://", "http://h/#abc", "http://h/#" + "XY" * 20, "http://h:99999", "http://h:port",
        "http://h:0", "http://[::1", "http://h[x]:8", "http://a..b:8470", "http://xn--99999:8470",
        f"http://{'a' * 64}:1",
    ],
)  # fmt: skip
def test_bad_join_urls_are_said_to_be_so(url: str) -> None:
    with pytest.raises(ConfigError):
        split_join_url(url)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(field=st.sampled_from(sorted(run_info().model_dump())), value=JSON)
def test_no_field_can_be_changed_unnoticed(field: str, value: Any) -> None:
    honest = signed(run_info())
    if honest.document[field] == value:
        return
    changed = SignedDocument(**{**honest.model_dump(), "document": {**honest.document, field: value}})
    with pytest.raises((SignatureError, ProtocolError)):
        open_run_info(changed, fingerprint(ROOT.public_key))
