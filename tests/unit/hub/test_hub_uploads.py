"""Submissions by way of a store: the ticket, the upload, the commit; refused like any submission, promised once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.hub import HUB, Actor, Bench, code_of, ok, submission_body
from kit.s3 import KEYS, Shop, s3_server
from shoal.errors import ResourceError
from shoal.hub.http.calls import UploadSlots
from shoal.hub.service.uploads import SWEEP_EVERY_MS
from shoal.protocol import Lease, Receipt, RunInfo, SignedDocument, open_document, submission_digest
from shoal.protocol.submission import UploadTicket


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with s3_server() as found:
        yield found


@pytest.fixture
def bench(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A hub that keeps submissions in the bucket, under a prefix of the test's own."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{shop.bucket}/{submission_digest(str(tmp_path).encode())[:12]}"
    made = Bench(tmp_path / "hub", settings={"storage": url, "storage_endpoint": shop.endpoint})
    ok(made.announce(0))
    yield made
    made.close()


def ask(actor: Actor, lease: str, body: bytes, **changes: Any) -> httpx.Response:
    message = {"submission": submission_digest(body), "size_bytes": len(body), **changes}
    return actor.call("POST", f"/submissions/{lease}/upload", message)


def ticket(actor: Actor, lease: Lease, body: bytes) -> UploadTicket:
    signed = SignedDocument.model_validate_json(ok(ask(actor, lease.lease, body)).content)
    return open_document(signed, UploadTicket, HUB.public_key)


def commit(actor: Actor, lease: Lease, body: bytes) -> httpx.Response:
    return actor.call("POST", f"/submissions/{lease.lease}/commit", {"submission": submission_digest(body)})


def upload(leave: UploadTicket, body: bytes) -> None:
    assert httpx.put(leave.url, content=body, headers={**leave.headers, "content-length": str(len(body))}).is_success


def receipt_in(response: httpx.Response) -> Receipt:
    return open_document(SignedDocument.model_validate_json(response.content), Receipt, HUB.public_key)


def blobs_of(bench: Bench) -> Any:
    return bench.app.state.hub.context.blobs


def test_what_is_uploaded_is_promised_judged_and_trained_on(bench: Bench) -> None:
    info = open_document(SignedDocument.model_validate_json(bench.http.get("/run").content), RunInfo, HUB.public_key)
    assert info.uploads == "store"
    for lease in bench.alice.lease("request-1", 2):
        body = submission_body(lease)
        leave = ticket(bench.alice, lease, body)
        assert (leave.lease, leave.node, leave.size_bytes, leave.needed) == (lease.lease, lease.node, len(body), True)
        upload(leave, body)
        response = commit(bench.alice, lease, body)
        assert response.status_code == 201
        receipt = receipt_in(response)
        assert (receipt.submission, receipt.size_bytes) == (submission_digest(body), len(body))
        assert blobs_of(bench).get(receipt.submission) == body
        assert blobs_of(bench).inbox.take(lease.lease, 10**6) is None  # the inbox is empty again
    for audit in bench.audits():
        ok(bench.judge(audit))
    batch = bench.batch(0)
    assert batch is not None
    assert len(batch.groups) == 2


def test_the_same_again_is_harmless_on_either_road(bench: Bench) -> None:
    [lease] = bench.alice.lease("request-1")
    body = submission_body(lease)
    upload(ticket(bench.alice, lease, body), body)
    first = commit(bench.alice, lease, body)
    assert not ticket(bench.alice, lease, body).needed
    for again in (commit(bench.alice, lease, body), bench.alice.submit(lease, body)):
        assert (again.status_code, again.content) == (200, first.content)


def test_by_way_of_the_hub_it_goes_into_the_same_store(bench: Bench) -> None:
    [lease] = bench.alice.lease("request-1")
    body = submission_body(lease)
    receipt = receipt_in(ok(bench.alice.submit(lease, body)))
    assert blobs_of(bench).get(receipt.submission) == body
    assert not (bench.folder / "blobs").exists()


def test_a_ticket_and_a_commit_are_refused_like_the_submission_would_be(bench: Bench) -> None:
    [lease] = bench.alice.lease("request-1")
    body = submission_body(lease)
    limit = bench.app.state.hub.context.config.submission_limits.compressed_bytes
    assert code_of(ask(bench.bob, lease.lease, body)) == (403, "lease.not_yours")
    assert code_of(commit(bench.bob, lease, body)) == (403, "lease.not_yours")
    assert code_of(ask(bench.alice, "u9a9", body)) == (404, "lease.unknown")
    assert code_of(ask(bench.alice, lease.lease, body, size_bytes=limit + 1)) == (413, "body.too_big")
    assert code_of(ask(bench.alice, lease.lease, body, size_bytes=0)) == (422, "body.malformed")
    assert code_of(ask(bench.trainer, lease.lease, body)) == (403, "auth.role")
    ok(bench.alice.submit(lease, body))
    assert code_of(ask(bench.alice, lease.lease, b"another body")) == (409, "submission.other_body")
    assert code_of(commit(bench.alice, lease, b"another body")) == (409, "submission.other_body")


def test_what_was_given_back_is_refused_before_anything_is_uploaded(bench: Bench) -> None:
    [lease] = bench.alice.lease("request-1")
    ok(bench.alice.call("POST", "/leases/release", {"leases": [lease.lease]}))
    assert code_of(ask(bench.alice, lease.lease, submission_body(lease))) == (410, "lease.released")


def test_nothing_other_bytes_and_nonsense_are_not_taken_in(bench: Bench) -> None:
    [lease] = bench.alice.lease("request-1")
    body, other = submission_body(lease), submission_body(lease, engine="another")
    assert code_of(commit(bench.alice, lease, body)) == (409, "upload.missing")
    upload(ticket(bench.alice, lease, body), other)  # at a store that does not check what it was signed for
    assert code_of(commit(bench.alice, lease, body)) == (422, "upload.other_bytes")
    assert code_of(commit(bench.alice, lease, body)) == (409, "upload.missing"), "read once, and removed"
    upload(ticket(bench.alice, lease, b"garbage"), b"garbage")
    assert code_of(commit(bench.alice, lease, b"garbage")) == (422, "submission.malformed")
    foreign = submission_body(lease, unit=lease.unit + 1)
    upload(ticket(bench.alice, lease, foreign), foreign)
    assert code_of(commit(bench.alice, lease, foreign)) == (422, "submission.mismatch")
    assert code_of(commit(bench.alice, lease, foreign)) == (409, "upload.missing")
    assert not any(blobs_of(bench).has(submission_digest(each)) for each in (other, b"garbage", foreign))
    upload(ticket(bench.alice, lease, body), body)
    assert commit(bench.alice, lease, body).status_code == 201


def test_a_ticket_used_again_after_the_receipt_changes_nothing_that_was_promised(bench: Bench) -> None:
    [lease] = bench.alice.lease("request-1")
    body = submission_body(lease)
    leave = ticket(bench.alice, lease, body)
    upload(leave, body)
    receipt = receipt_in(ok(commit(bench.alice, lease, body)))
    upload(leave, b"something else")
    assert receipt_in(commit(bench.alice, lease, body)) == receipt
    assert blobs_of(bench).get(receipt.submission) == body


def test_what_nobody_commits_is_swept_once_in_a_while(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[float] = []
    monkeypatch.setattr(blobs_of(bench).inbox, "sweep", lambda age_s: swept.append(age_s) or 0)
    [lease] = bench.alice.lease("request-1")
    for _ in range(3):
        ticket(bench.alice, lease, submission_body(lease))
    uploads = bench.app.state.hub.uploads
    uploads._sweeping.acquire(timeout=20)  # the sweep beside the call has ended
    uploads._sweeping.release()
    assert len(swept) == 1
    uploads._sweep_once_in_a_while(blobs_of(bench).inbox, bench.clock.now_ms() + SWEEP_EVERY_MS)
    uploads._sweeping.acquire(timeout=20)
    assert len(swept) == 2


def test_a_hub_with_a_folder_says_that_it_takes_them_itself(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "hub")
    ok(bench.announce(0))
    [lease] = bench.alice.lease("request-1")
    assert code_of(ask(bench.alice, lease.lease, b"body")) == (409, "upload.by_hub")
    assert code_of(commit(bench.alice, lease, b"body")) == (409, "upload.by_hub")
    info = open_document(SignedDocument.model_validate_json(bench.http.get("/run").content), RunInfo, HUB.public_key)
    assert info.uploads == "hub"
    bench.close()


def test_a_store_that_is_gone_is_no_promise_and_no_end_of_the_hub(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    [lease] = bench.alice.lease("request-1")

    def gone(_body: bytes) -> str:
        raise ResourceError("cannot write a submission in s3://…: connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(blobs_of(bench), "put", gone)
        assert code_of(bench.alice.submit(lease)) == (503, "hub.resource")
    assert bench.app.state.hub.context.failure is None
    assert bench.alice.submit(lease).status_code == 201


def test_what_cannot_be_removed_keeps_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []

    def delete(_store: object, key: str) -> None:
        if key in ("a", "b"):
            raise FileNotFoundError(key) if key == "a" else OSError("the store says no")
        gone.append(key)

    monkeypatch.setattr("shoal.hub.storage.s3.obstore.delete", delete)
    blobs_of(bench).inbox._remove(["a", "b", "c"])
    assert gone == ["c"]


def test_one_commit_of_a_key_at_a_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    [first, second] = bench.alice.lease("request-1", 2)
    for lease in (first, second):
        upload(ticket(bench.alice, lease, submission_body(lease)), submission_body(lease))
    inbox = blobs_of(bench).inbox
    honest, meanwhile = inbox.take, list[httpx.Response]()

    def take(name: str, max_bytes: int) -> bytes | None:
        if not meanwhile:
            meanwhile.append(httpx.Response(0))
            meanwhile[0] = commit(bench.alice, second, submission_body(second))
        taken: bytes | None = honest(name, max_bytes)
        return taken

    monkeypatch.setattr(inbox, "take", take)
    assert commit(bench.alice, first, submission_body(first)).status_code == 201
    assert code_of(meanwhile[0]) == (429, "rate.uploads")
    assert meanwhile[0].headers["retry-after"] == "1"
    assert commit(bench.alice, second, submission_body(second)).status_code == 201


def test_nobody_waits_for_ever_while_others_are_stored(bench: Bench) -> None:
    [lease] = bench.alice.lease("request-1")
    body = submission_body(lease)
    upload(ticket(bench.alice, lease, body), body)
    before, bench.app.state.uploads = bench.app.state.uploads, UploadSlots(0, wait_s=0.05)
    for answer in (bench.alice.submit(lease, body), commit(bench.alice, lease, body)):
        assert code_of(answer) == (503, "hub.busy")
        assert answer.headers["retry-after"] == "2"
    bench.app.state.uploads = before
    assert commit(bench.alice, lease, body).status_code == 201
