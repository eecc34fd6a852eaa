"""Presigned URLs, byte for byte: against the example that Amazon publishes, and against Amazon's own signer."""

from __future__ import annotations

import base64
import datetime
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.hub.storage.s3 import TICKET_S, Bucket, Credentials, S3Inbox, Scope, checksum, presign
from shoal.protocol import submission_digest

PUBLISHED = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
AT = "20130524T000000Z"
BODY = b"a group of rollouts"
BOUND = {"content-length": str(len(BODY)), "x-amz-checksum-sha256": checksum(submission_digest(BODY))}


def test_the_example_that_amazon_publishes() -> None:
    url = presign(
        "GET", "https://examplebucket.s3.amazonaws.com/test.txt", {}, Scope(PUBLISHED, "us-east-1", AT, 86400)
    )
    assert url == (
        "https://examplebucket.s3.amazonaws.com/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256"
        "&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
        "&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
        "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    )


def by_botocore(monkeypatch: pytest.MonkeyPatch, url: str, headers: dict[str, str], scope: Scope) -> set[str]:
    """The same by botocore, as the set of its query fields (it does not sort them) and the address before them."""
    auth = pytest.importorskip("botocore.auth", reason="botocore is not installed: it comes with moto, .[dev]")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials as Theirs

    now = datetime.datetime.strptime(AT, "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.UTC)
    monkeypatch.setattr(auth, "get_current_datetime", lambda *_a, **_k: now)
    key = Theirs(scope.credentials.key_id, scope.credentials.secret, scope.credentials.session_token or None)
    signer: Any = auth.S3SigV4QueryAuth
    request = AWSRequest(method="PUT", url=url, headers=headers)
    signer(key, "s3", scope.region, expires=scope.expires_s).add_auth(request)
    return parts(request.url)


def parts(url: str) -> set[str]:
    address, _, query = url.partition("?")
    return {address, *query.split("&")}


URLS = [
    "http://127.0.0.1:9000/shoal/runs/one/uploads/u17a0",
    "https://shoal.s3.eu-central-1.amazonaws.com/uploads/u17a0",
]
TOKENS = ["", "token/with+signs=="]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("token", TOKENS)
def test_an_upload_bound_to_size_and_hash_is_signed_as_botocore_does(
    monkeypatch: pytest.MonkeyPatch, url: str, token: str
) -> None:
    scope = Scope(Credentials("AKID", "secret/key+", token), "eu-central-1", AT, 900)
    ours = presign("PUT", url, BOUND, scope)
    assert "X-Amz-SignedHeaders=content-length%3Bhost%3Bx-amz-checksum-sha256" in ours
    assert parts(ours) == by_botocore(monkeypatch, url, BOUND, scope)


@pytest.mark.parametrize(
    "changed",
    [
        {"content-length": str(len(BODY) + 1)},
        {"x-amz-checksum-sha256": checksum("ab" * 32)},
        {"x-amz-acl": "public-read"},
    ],
)
def test_another_size_hash_or_header_is_another_signature(changed: dict[str, str]) -> None:
    scope = Scope(PUBLISHED, "us-east-1", AT, 60)
    assert presign("PUT", URLS[0], BOUND, scope)[-64:] != presign("PUT", URLS[0], BOUND | changed, scope)[-64:]


def test_a_ticket_signs_size_and_hash_and_expires() -> None:
    inbox = S3Inbox(Bucket("shoal", "", "", "us-east-1"), SimpleNamespace(), PUBLISHED)  # type: ignore[arg-type]
    leave = inbox.ticket("u1a0", submission_digest(BODY), len(BODY), now_ms=1_369_353_600_000)
    assert leave.headers == BOUND
    assert base64.b64decode(BOUND["x-amz-checksum-sha256"]) == hashlib.sha256(BODY).digest()
    assert leave.expires_at_ms == 1_369_353_600_000 + TICKET_S * 1000
    scope = Scope(PUBLISHED, "us-east-1", AT, TICKET_S)
    assert leave.url == presign("PUT", "https://shoal.s3.us-east-1.amazonaws.com/uploads/u1a0", BOUND, scope)
