"""Submissions in a bucket of Amazon's, or of any server that speaks S3: `s3://bucket/prefix/blobs/<SHA-256>`.

A put has reached the store's disks when it is answered. The key to the bucket comes from the environment
(`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`), never from the recipe, which many read; machines that are lent a key
otherwise (a role of an instance) work, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from shoal.errors import ConfigError, ResourceError
from shoal.hub.storage.blobs import checked
from shoal.protocol import submission_digest

DEFAULT_REGION = "us-east-1"
CONNECT_S, ATTEMPT_S, TRY_FOR_S, RETRIES = 5, 30, 20, 4
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
KEY_VARIABLES = {
    "access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}  # fmt: skip


@dataclass(frozen=True)
class Bucket:
    """Where a bucket is. With an endpoint of its own it is addressed by path, as such servers expect it.

    >>> str(Bucket.at("s3://shoal/runs/one", "http://127.0.0.1:9000"))
    's3://shoal/runs/one at http://127.0.0.1:9000'
    """

    name: str
    prefix: str
    endpoint: str
    region: str

    @classmethod
    def at(cls, url: str, endpoint: str = "", environment: Mapping[str, str] = os.environ) -> Bucket:
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
            raise ConfigError(f"hub.storage = {url!r} is no bucket: write s3://BUCKET/PREFIX, or nothing for a folder")
        server = urlsplit(endpoint)
        if endpoint and (server.scheme not in ("http", "https") or not server.netloc or server.path.strip("/")):
            raise ConfigError(f"hub.storage_endpoint = {endpoint!r} is no server: write for instance http://HOST:9000")
        region = next((environment[name] for name in REGION_VARIABLES if environment.get(name)), DEFAULT_REGION)
        return cls(parts.netloc, parts.path.strip("/"), endpoint.rstrip("/"), region)

    def __str__(self) -> str:
        where = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.name}/{self.prefix}".rstrip("/") + where


class S3Blobs:
    """Implements `blobs.Blobs` in a bucket."""

    def __init__(self, bucket: Bucket, environment: Mapping[str, str] = os.environ) -> None:
        self._bucket = bucket
        given = {name: environment[variable] for name, variable in KEY_VARIABLES.items() if environment.get(variable)}
        if not {"access_key_id", "secret_access_key"} <= given.keys():
            given = {}
        if bucket.endpoint:
            given["endpoint"] = bucket.endpoint
        is_plain = bucket.endpoint.startswith("http://")
        self._store = S3Store(
            bucket.name,
            region=bucket.region,
            virtual_hosted_style_request=not bucket.endpoint,
            checksum_algorithm="SHA256",
            client_options={"allow_http": is_plain, "connect_timeout": f"{CONNECT_S}s", "timeout": f"{ATTEMPT_S}s"},
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=TRY_FOR_S)},
            **given,  # type: ignore[arg-type]  # a dict of keyword arguments, all of them text
        )

    def put(self, body: bytes) -> str:
        name = submission_digest(body)
        try:
            obstore.put(self._store, self._key(name), body, use_multipart=False)
        except (BaseError, OSError) as error:
            raise self._explained("write", error) from error
        return name

    def get(self, name: str) -> bytes:
        try:
            body = bytes(obstore.get(self._store, self._key(name)).bytes())
        except (BaseError, OSError) as error:
            raise self._explained("read", error) from error
        return checked(body, name, f"{name} in {self._bucket}")

    def has(self, name: str) -> bool:
        try:
            obstore.head(self._store, self._key(name))
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as error:
            raise self._explained("look for", error) from error
        return True

    def _key(self, name: str) -> str:
        return f"{self._bucket.prefix}/blobs/{name}".lstrip("/")

    def _explained(self, verb: str, error: Exception) -> ResourceError:
        """What the store said, on one line and short: some put their whole history into it."""
        said = " ".join(str(error).split("Debug source:")[0].split())[:300]
        return ResourceError(
            f"cannot {verb} a submission in {self._bucket}: {said}; check that the bucket is there, the server "
            "answers, and the key (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION) may read and write in it"
        )
