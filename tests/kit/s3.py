"""A server that speaks S3, for tests: moto's, as a real HTTP server on loopback, with a bucket of its own."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@dataclass(frozen=True)
class Shop:
    """Where the bucket is, and a client of somebody else's to look into it."""

    endpoint: str
    bucket: str
    client: Any

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/runs/one"

    def keys(self) -> list[str]:
        listed = self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        return sorted(item["Key"] for item in listed)

    def put(self, key: str, body: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=body)


@contextmanager
def s3_server() -> Iterator[Shop]:
    reason = "an S3 server is not installed: pip install 'moto[s3]' flask flask-cors, or .[dev], to run this test"
    moto = pytest.importorskip("moto.server", reason=reason)
    boto3 = pytest.importorskip("boto3", reason=reason)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client(
            "s3", endpoint_url=endpoint, aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"], region_name=KEYS["AWS_REGION"],
        )  # fmt: skip
        bucket = f"shoal-{secrets.token_hex(4)}"  # the server's memory outlives the server
        client.create_bucket(Bucket=bucket)
        yield Shop(endpoint, bucket, client)
        client.close()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with s3_server() as found:
        yield found


@pytest.fixture
def shop_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a hub looks for them."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
