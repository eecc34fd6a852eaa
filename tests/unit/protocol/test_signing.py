"""Nothing signed can be changed, taken for something else, replayed elsewhere, or outlive a trusted key."""

import json
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.errors import ProtocolError, SignatureError
from shoal.protocol import MAX_SKEW_MS, RequestSignature, SignedDocument, canonical_json, sign_document, sign_request
from shoal.protocol.identity import SigningKey
from shoal.protocol.lease import Lease, SamplingParameters
from shoal.protocol.node import RoleCertificate
from shoal.protocol.policy import LedgerHead, PolicyAnnouncement, PolicyRef
from shoal.protocol.signing import Document, open_document, verify_body, verify_request
from shoal.protocol.submission import Receipt
from shoal.protocol.verdict import Verdict

KEY = SigningKey.from_seed(b"k" * 32)
OTHER = SigningKey.from_seed(b"o" * 32)
POLICY = PolicyRef(incarnation=0, version=3, digest="ab" * 32)
LEASE = Lease(
    run="demo-1", lease="l-1", node=KEY.node, unit=7, attempt=0, policy=POLICY, task="sort/train/7",
    prompt_ids=(1, 2, 3), seeds=("00ff00ff00ff00ff",),
    sampling=SamplingParameters(temperature=1.5, max_new_tokens=16, eos_token_ids=(0,)),
    environment_digest="cd" * 32, issued_at_ms=1, deadline_ms=2,
)  # fmt: skip
DOCUMENTS: list[Document] = [
    LEASE,
    LedgerHead(run="demo-1", index=4, hash="ef" * 32),
    PolicyAnnouncement(run="demo-1", policy=POLICY, created_at_ms=5),
    RoleCertificate(run="demo-1", role="hub", public_key=KEY.public_key, issued_at_ms=5),
    Receipt(run="demo-1", node=KEY.node, lease="l-1", unit=7, submission="ab" * 32, size_bytes=9, received_at_ms=8),
    Verdict(run="demo-1", submission="ab" * 32, unit=7, node=KEY.node, outcome="accepted", decided_at_ms=9),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.kind)
def test_a_signed_document_survives_the_wire(document: Document) -> None:
    wire = sign_document(document, KEY).model_dump_json()
    assert open_document(SignedDocument.model_validate_json(wire), type(document), KEY.public_key) == document


@given(st.sampled_from(DOCUMENTS), st.data())
def test_any_bit_flipped_anywhere_is_refused(document: Document, data: st.DataObject) -> None:
    wire = bytearray(sign_document(document, KEY).model_dump_json().encode())
    bit = data.draw(st.integers(0, 8 * len(wire) - 1))
    wire[bit // 8] ^= 1 << bit % 8
    with pytest.raises((ProtocolError, ValidationError)):
        open_document(SignedDocument.model_validate_json(bytes(wire)), type(document), KEY.public_key)


@pytest.mark.parametrize("target", DOCUMENTS, ids=lambda document: document.kind)
@pytest.mark.parametrize("source", DOCUMENTS, ids=lambda document: document.kind)
def test_kinds_do_not_cross(source: Document, target: Document) -> None:
    if source.kind == target.kind:
        return
    signed = sign_document(source, KEY)
    with pytest.raises(SignatureError, match=f"expected a signed {target.kind}"):
        open_document(signed, type(target), KEY.public_key)
    with pytest.raises(SignatureError, match="does not match"):
        open_document(signed.model_copy(update={"kind": target.kind}), type(target), KEY.public_key)


class Old(Document):
    kind: ClassVar[str] = "thing"
    name: str


class New(Document):
    kind: ClassVar[str] = "thing"
    name: str
    colour: str = "grey"


class Nameless(Document):
    kind: ClassVar[str] = "thing"


def test_documents_of_the_past_and_of_the_future_verify_and_what_is_new_is_left_alone() -> None:
    assert open_document(sign_document(Old(name="a"), KEY), New, KEY.public_key) == New(name="a", colour="grey")
    assert open_document(sign_document(New(name="a"), KEY), Old, KEY.public_key) == Old(name="a")
    with pytest.raises(ProtocolError, match="signed but malformed: name"):
        open_document(sign_document(Nameless(), KEY), Old, KEY.public_key)


def test_the_signature_of_today_is_the_signature_of_tomorrow() -> None:
    """If this fails, every document ever signed has become invalid: bump the version inside the signature instead."""
    signed = sign_document(LedgerHead(run="demo-é", index=4, hash="ef" * 32), KEY)
    assert canonical_json(signed.document).decode() == '{"hash":"%s","index":4,"run":"demo-é"}' % ("ef" * 32)
    assert signed.signature == (
        "735001c8eb0dbea284f57a7349a2ed9e31c8a3ef381036d8d31ce2a23639fd7e"
        "280676da653188096ad6e85a70c924a492cf813f81e817aa916bf459626faa02"
    )


def test_only_trusted_keys_count() -> None:
    signed = sign_document(LEASE, KEY)
    assert open_document(signed, Lease, {OTHER.public_key, KEY.public_key}) == LEASE
    for trusted in (OTHER.public_key, {OTHER.public_key}, set[str]()):
        with pytest.raises(SignatureError, match="not trusted"):
            open_document(signed, Lease, trusted)
    claimed = signed.model_copy(update={"signed_by": OTHER.public_key})
    with pytest.raises(SignatureError, match="does not match"):
        open_document(claimed, Lease, OTHER.public_key)


def test_values_outside_json_are_protocol_errors() -> None:
    signed = sign_document(LEASE, KEY)
    for value in (float("nan"), float("inf"), "\ud800"):
        with pytest.raises(ProtocolError, match="JSON cannot carry"):
            open_document(signed.model_copy(update={"document": {"x": value}}), Lease, KEY.public_key)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(
        st.characters(blacklist_categories=("Cs",))),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(blacklist_categories=("Cs",))), inner),
    max_leaves=10,
)  # fmt: skip


@given(json_values)
def test_canonical_json_is_one_byte_string_per_value(value: Any) -> None:
    data = canonical_json(value)
    assert canonical_json(json.loads(data)) == data
    if isinstance(value, dict):
        assert canonical_json(dict(reversed(value.items()))) == data


NOW_MS = 1_700_000_000_000
REQUEST: dict[str, Any] = {"run": "demo-1", "method": "PUT", "target": "/submissions/l-1?x=1", "body": b"abc"}


def headers(at_ms: int = NOW_MS) -> dict[str, str]:
    return sign_request(KEY, REQUEST["run"], REQUEST["method"], REQUEST["target"], REQUEST["body"], at_ms)


def check(sent: dict[str, str], public_key: str = KEY.public_key, now_ms: int = NOW_MS, **changes: Any) -> None:
    parts = {**REQUEST, **changes}
    signature = RequestSignature.from_headers(sent)
    verify_request(public_key, parts["run"], parts["method"], parts["target"], signature, now_ms)
    verify_body(signature, parts["body"])


def test_a_signed_request_verifies_and_every_one_is_new() -> None:
    check(headers())
    assert headers() != headers()


@pytest.mark.parametrize("changes", [
    {"run": "demo-2"}, {"method": "POST"}, {"target": "/submissions/l-2?x=1"}, {"target": "/submissions/l-1?x=2"},
    {"target": "/submissions/l-1"}, {"body": b"abd"}, {"body": b""}, {"public_key": OTHER.public_key},
])  # fmt: skip
def test_no_part_of_a_request_can_be_changed(changes: dict[str, Any]) -> None:
    with pytest.raises(SignatureError):
        check(headers(), **changes)


@given(st.sampled_from(sorted(headers())), st.data())
def test_no_bit_of_a_header_can_be_changed(name: str, data: st.DataObject) -> None:
    sent = headers()
    value = bytearray(sent[name].encode())
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    value[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SignatureError):
        check({**sent, name: value.decode("latin-1")})


@pytest.mark.parametrize("name", sorted(headers()))
def test_a_missing_header_is_named(name: str) -> None:
    sent = headers()
    del sent[name]
    with pytest.raises(SignatureError, match=f"header {name} is missing"):
        check(sent)


@given(st.dictionaries(st.sampled_from(sorted(headers())), st.text(max_size=40)))
def test_nonsense_in_headers_is_a_signature_error(changed: dict[str, str]) -> None:
    sent = {**headers(), **changed}
    if sent != headers() and changed:
        with pytest.raises(SignatureError):
            check(sent)


@pytest.mark.parametrize(("skew_ms", "word"), [(MAX_SKEW_MS + 1, "ahead"), (-MAX_SKEW_MS - 1, "behind")])
def test_a_wrong_clock_is_told_which_way_and_what_to_do(skew_ms: int, word: str) -> None:
    with pytest.raises(SignatureError, match=rf"120 s {word}.*set this machine's clock"):
        check(headers(NOW_MS + skew_ms))
    check(headers(NOW_MS + skew_ms - (1 if skew_ms > 0 else -1)))
