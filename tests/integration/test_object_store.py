"""A run whose submissions are in a bucket: workers upload past the hub, and go by way of it when they cannot.

worker ── ticket, commit ──► hub (ASGI, in process) ──► bucket (a real S3 server) ◄── PUT ── worker

The server is moto's, which checks no signatures. One that does can be named: SHOAL_TEST_S3=http://127.0.0.1:4566 (for
instance LocalStack's, started with S3_SKIP_SIGNATURE_VALIDATION=0), with the keys test/test.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_loop_scripted import DEADLINE_S, Run, check_accounts

from kit import Logs, Patch
from kit.s3 import KEYS, Shop, s3_server
from shoal.hub import HubConfig, RunSettings
from shoal.hub.storage.s3 import TICKET_S, Bucket, S3Blobs, checksum
from shoal.protocol import submission_digest
from shoal.runtime.clock import SystemClock

SETTINGS = RunSettings(name="loop", steps=2, groups_per_step=3, group_size=4, max_new_tokens=6)


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with s3_server() as found:
        yield found


@dataclass
class StoreRun(Run):
    """The scripted run with a bucket in the place of its folder."""

    shop: Shop | None = None

    def hub_config(self) -> HubConfig:
        config, shop = super().hub_config(), self.shop
        changes = {"storage": shop.url, "storage_endpoint": shop.endpoint}
        return replace(config, settings=config.settings.model_copy(update=changes))


@pytest.fixture
def run(shop: Shop, tmp_path: Path, monkeypatch: Patch) -> Iterator[StoreRun]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    own = replace(shop, bucket=f"shoal-{secrets.token_hex(4)}")
    shop.client.create_bucket(Bucket=own.bucket)
    made = StoreRun(tmp_path, SETTINGS, shop=own)
    yield made
    made.close()


def finish(run: StoreRun) -> None:
    """Two steps with one worker, to the end."""
    run.publish(0)
    roles = [run.worker("worker-0"), run.validator()]
    for step in range(SETTINGS.steps):
        assert len(run.train(step).groups) == SETTINGS.groups_per_step
    for role in roles:
        role.result(DEADLINE_S)
    check_accounts(run)


def test_workers_upload_past_the_hub_and_nothing_is_left_in_the_inbox(run: StoreRun, monkeypatch: Patch) -> None:
    put: list[str] = []
    stream = httpx.Client.stream

    def noted(self: httpx.Client, method: str, url: str, **rest: Any) -> Any:
        if method == "PUT" and url.startswith(f"{run.shop.endpoint if run.shop else '-'}/"):
            put.append(url)
        return stream(self, method, url, **rest)

    monkeypatch.setattr(httpx.Client, "stream", noted)
    finish(run)
    keys = run.shop.keys()
    judged = sum(node.accepted + node.rejected for node in run.nodes().values())
    assert len(put) >= judged >= 6
    assert all(url.startswith(f"{run.shop.endpoint}/{run.shop.bucket}/runs/one/uploads/") for url in put)
    assert len(keys) >= judged
    assert all(key.startswith("runs/one/blobs/") for key in keys)


@pytest.mark.slow
def test_unreachable_store_is_said_once_and_bypassed(run: StoreRun, monkeypatch: Patch, caplog: Logs) -> None:
    def unreachable(*_arguments: object, **_more: object) -> httpx.Response:
        raise httpx.ConnectError("no route to host")

    monkeypatch.setattr(httpx.Client, "stream", unreachable)
    with caplog.at_level(logging.WARNING, logger="shoal.client.delivery"):
        finish(run)
    said = [record.getMessage() for record in caplog.records if record.name == "shoal.client.delivery"]
    assert 1 <= len(said) <= 4  # the uploader's threads may find out at the same time
    assert "cannot upload to http://" in said[0]
    assert "by way of the hub" in said[0]
    assert "Signature" not in said[0]  # what is in the query is leave to upload: not for logs


def test_a_server_that_checks_signatures_takes_these_bytes_and_no_others() -> None:
    endpoint = os.environ.get("SHOAL_TEST_S3", "")
    if not endpoint:
        pytest.skip("SHOAL_TEST_S3 names no S3 server that checks signatures; the top of this file says how to")
    boto3 = pytest.importorskip("boto3")
    keys = {name: value for name, value in KEYS.items() if name != "AWS_REGION"}
    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1",
        aws_access_key_id=keys["AWS_ACCESS_KEY_ID"], aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip
    bucket, body, now_ms = f"shoal-{secrets.token_hex(4)}", b"a submission", SystemClock().now_ms()
    client.create_bucket(Bucket=bucket)
    inbox = S3Blobs(Bucket.at(f"s3://{bucket}/runs/one", endpoint, keys), keys).inbox
    leave = inbox.ticket("u1a0", submission_digest(body), len(body), now_ms)
    late = inbox.ticket("u1a0", submission_digest(body), len(body), now_ms - 1000 * (TICKET_S + 60))
    other_hash = {**leave.headers, "x-amz-checksum-sha256": checksum("ab" * 32)}
    other_size = {**leave.headers, "content-length": str(len(body) + 1)}
    wrong = {
        "another size": httpx.put(leave.url, content=body + b"!", headers=other_size),
        "another hash": httpx.put(leave.url, content=body, headers=other_hash),
        "no hash": httpx.put(leave.url, content=body),
        "other bytes": httpx.put(leave.url, content=b"A SUBMISSION", headers=leave.headers),
        "another lease": httpx.put(leave.url.replace("u1a0", "u2a0"), content=body, headers=leave.headers),
        "reading": httpx.get(leave.url),
        "too late": httpx.put(late.url, content=body, headers=late.headers),
    }
    assert {what: answer.status_code for what, answer in wrong.items() if answer.status_code not in (400, 403)} == {}
    assert inbox.take("u1a0", 1000) is None
    assert httpx.put(leave.url, content=body, headers=leave.headers).status_code == 200
    assert inbox.take("u1a0", 1000) == body
