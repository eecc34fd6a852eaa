"""A hub that keeps submissions in a bucket; and how many of them are stored at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.hub import HUB, Bench, code_of, ok, submission_body
from kit.s3 import KEYS, Shop, s3_server
from shoal.errors import ResourceError
from shoal.protocol import Receipt, SignedDocument, open_document, submission_digest


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


def test_submissions_are_kept_in_the_bucket_judged_and_trained_on(bench: Bench) -> None:
    for lease in bench.alice.lease("request-1", 2):
        body = submission_body(lease)
        signed = SignedDocument.model_validate_json(ok(bench.alice.submit(lease, body)).content)
        receipt = open_document(signed, Receipt, HUB.public_key)
        assert bench.hub.context.blobs.get(receipt.submission) == body
    assert not (bench.folder / "blobs").exists()
    for audit in bench.audits():
        ok(bench.judge(audit))
    batch = bench.batch(0)
    assert batch is not None
    assert len(batch.groups) == 2


def test_a_store_that_is_gone_is_no_promise_and_no_end_of_the_hub(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    [lease] = bench.alice.lease("request-1")

    def gone(_body: bytes) -> str:
        raise ResourceError("cannot write a submission in s3://…: connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(bench.hub.context.blobs, "put", gone)
        assert code_of(bench.alice.submit(lease)) == (503, "hub.resource")
    assert bench.hub.context.failure is None
    assert bench.alice.submit(lease).status_code == 201


def test_nobody_waits_for_ever_while_others_are_stored(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.hub.http.routes.UPLOAD_WAIT_S", 0.05)
    [lease] = bench.alice.lease("request-1")
    edge = bench.app.state.edge
    before, edge.uploads = edge.uploads, asyncio.Semaphore(0)
    answer = bench.alice.submit(lease)
    assert code_of(answer) == (503, "hub.busy")
    assert answer.headers["retry-after"] == "2"
    edge.uploads = before
    assert bench.alice.submit(lease).status_code == 201
