"""Submissions in a bucket of Amazon's, or of any server that speaks S3.

    s3://bucket/prefix
      blobs/<SHA-256>      written by the hub alone; a put has reached the store's disks when it is answered
      uploads/<lease>      the inbox: one object per lease, written by its worker with a presigned URL, read by the hub
                           once and removed; what nobody comes back for is swept by age

Why an inbox, and not straight to `blobs/`: a URL stays good for a while after the receipt. Whoever holds it could put
other bytes in the place of those that were promised, at any store that does not check the hash it was signed for (not
all do). So nothing that others can write to is ever promised.

The key to the bucket comes from the environment (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`), never from the recipe,
which many read. Machines that are lent a key otherwise (a role of an instance) work too, but cannot give leave to
upload: then submissions go by way of the hub.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar
from urllib.parse import quote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from shoal.errors import ConfigError, ResourceError
from shoal.hub.storage.blobs import Presigned, checked
from shoal.protocol import submission_digest

ALGORITHM = "AWS4-HMAC-SHA256"
UNSIGNED = "UNSIGNED-PAYLOAD"
SERVICE = "s3"


@dataclass(frozen=True)
class Credentials:
    """A key to a store. `session_token` comes with keys that are lent for a while."""

    key_id: str
    secret: str = field(repr=False)
    session_token: str = field(default="", repr=False)


@dataclass(frozen=True)
class Scope:
    """For whom, where and for how long a URL is good; `at` is the time of signing as `20130524T000000Z`."""

    credentials: Credentials
    region: str
    at: str
    expires_s: int

    @property
    def name(self) -> str:
        return f"{self.at[:8]}/{self.region}/{SERVICE}/aws4_request"


def presign(method: str, url: str, headers: Mapping[str, str], scope: Scope) -> str:
    """`url` (whose path is not encoded yet, and that has no query) with a signature for this method and these headers.

    Whoever uses it has to send exactly these: with `content-length` and `x-amz-checksum-sha256` among them it is good
    for one object of one size and one content (AWS Signature Version 4, in the query). The libraries that talk to
    stores for us sign a URL, but no headers with it.
    """
    parts = urlsplit(url)
    path = quote(parts.path or "/", safe="/~")
    signed = {name.lower(): " ".join(value.split()) for name, value in headers.items()} | {"host": parts.netloc}
    fields = {
        "X-Amz-Algorithm": ALGORITHM, "X-Amz-Credential": f"{scope.credentials.key_id}/{scope.name}",
        "X-Amz-Date": scope.at, "X-Amz-Expires": str(scope.expires_s), "X-Amz-SignedHeaders": ";".join(sorted(signed)),
    }  # fmt: skip
    if scope.credentials.session_token:
        fields["X-Amz-Security-Token"] = scope.credentials.session_token
    query = "&".join(f"{quote(name, safe='~')}={quote(fields[name], safe='~')}" for name in sorted(fields))
    sent = [f"{name}:{signed[name]}" for name in sorted(signed)]
    canonical = "\n".join([method, path, query, *sent, "", ";".join(sorted(signed)), UNSIGNED])
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join([ALGORITHM, scope.at, scope.name, digest])
    key = f"AWS4{scope.credentials.secret}".encode()
    for part in scope.name.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    return f"{parts.scheme}://{parts.netloc}{path}?{query}&X-Amz-Signature={signature}"


def checksum(sha256_hex: str) -> str:
    """A SHA-256 as `x-amz-checksum-sha256` wants it."""
    return base64.b64encode(bytes.fromhex(sha256_hex)).decode()


log = logging.getLogger("shoal.hub")

T = TypeVar("T")

BLOBS, UPLOADS = "blobs", "uploads"
TICKET_S = 900
"""Long enough for the largest submission over a slow line, as `auth.BODY_DEADLINE_S`, and some trouble on the way."""
DEFAULT_REGION = "us-east-1"
CONNECT_S, ATTEMPT_S, TRY_FOR_S, RETRIES = 5, 30, 20, 4
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")


@dataclass(frozen=True)
class Bucket:
    """Where a bucket is. With an endpoint of its own it is addressed by path, as such servers expect it.

    >>> Bucket.at("s3://shoal/runs/one", "http://127.0.0.1:9000").address("blobs/ab")
    'http://127.0.0.1:9000/shoal/runs/one/blobs/ab'
    >>> Bucket.at("s3://shoal").address("blobs/ab")
    'https://shoal.s3.us-east-1.amazonaws.com/blobs/ab'
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

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def address(self, name: str) -> str:
        """The URL of an object, its path not encoded."""
        if self.endpoint:
            return f"{self.endpoint}/{self.name}/{self.key(name)}"
        return f"https://{self.name}.s3.{self.region}.amazonaws.com/{self.key(name)}"

    def __str__(self) -> str:
        where = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.name}/{self.prefix}".rstrip("/") + where


class S3Blobs:
    """Implements `blobs.Blobs` in a bucket."""

    def __init__(self, bucket: Bucket, environment: Mapping[str, str] = os.environ) -> None:
        self._bucket = bucket
        self._store = _store(bucket, environment)
        credentials = credentials_in(environment)
        self.inbox: S3Inbox | None = None
        if credentials is None:
            log.info("no key to %s in the environment: submissions come by way of the hub", bucket)
        else:
            self.inbox = S3Inbox(bucket, self._store, credentials)

    def put(self, body: bytes) -> str:
        name = submission_digest(body)
        self._do("write", lambda: obstore.put(self._store, self._key(name), body, use_multipart=False))
        return name

    def get(self, name: str) -> bytes:
        body = self._do("read", lambda: bytes(obstore.get(self._store, self._key(name)).bytes()))
        return checked(body, name, f"{name} in {self._bucket}")

    def has(self, name: str) -> bool:
        return _size(self._bucket, self._store, self._key(name)) is not None

    def _key(self, name: str) -> str:
        return self._bucket.key(f"{BLOBS}/{name}")

    def _do(self, verb: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except (BaseError, OSError) as error:
            raise store_error(f"{verb} a submission", self._bucket, error) from error


class S3Inbox:
    """Beside the blobs, for workers' own bytes. Nothing in it is believed, or kept for long."""

    def __init__(self, bucket: Bucket, store: S3Store, credentials: Credentials) -> None:
        self._bucket = bucket
        self._store = store
        self._credentials = credentials

    def ticket(self, name: str, submission: str, size_bytes: int, now_ms: int) -> Presigned:
        """Leave to put exactly these bytes (by hash and size) under `name`, for a while."""
        at = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {"content-length": str(size_bytes), "x-amz-checksum-sha256": checksum(submission)}
        scope = Scope(self._credentials, self._bucket.region, at, TICKET_S)
        url = presign("PUT", self._bucket.address(f"{UPLOADS}/{name}"), headers, scope)
        return Presigned(url, headers, now_ms + TICKET_S * 1000)

    def take(self, name: str, max_bytes: int) -> bytes | None:
        """What was put there; None if nothing was, or if it is larger than `max_bytes`."""
        size = _size(self._bucket, self._store, self._key(name))
        if size is None or size > max_bytes:
            return None
        try:  # asked for by its length: what was put there since then cannot be longer
            return bytes(obstore.get_range(self._store, self._key(name), start=0, length=size)) if size else b""
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise store_error("read an upload", self._bucket, error) from error

    def discard(self, name: str) -> None:
        """Best effort: what stays is swept."""
        self._remove([self._key(name)])

    def sweep(self, older_than_s: float) -> int:
        """Remove what nobody has come back for; how many there were."""
        before = datetime.now(UTC) - timedelta(seconds=older_than_s)
        listed = _listed(self._bucket, self._store, self._bucket.key(UPLOADS))
        old = [path for path, modified in listed if modified < before]
        self._remove(old)
        return len(old)

    def _key(self, name: str) -> str:
        return self._bucket.key(f"{UPLOADS}/{name}")

    def _remove(self, keys: list[str]) -> None:
        for key in keys:  # each by itself: one that is gone already, or cannot be removed, keeps no other
            try:
                obstore.delete(self._store, key)
            except FileNotFoundError:
                continue
            except (BaseError, OSError) as error:
                log.warning("%s", store_error("remove an upload", self._bucket, error))


def credentials_in(environment: Mapping[str, str]) -> Credentials | None:
    """The key that the environment names, if it does."""
    key_id, secret = environment.get("AWS_ACCESS_KEY_ID", ""), environment.get("AWS_SECRET_ACCESS_KEY", "")
    return Credentials(key_id, secret, environment.get("AWS_SESSION_TOKEN", "")) if key_id and secret else None


def store_error(action: str, bucket: Bucket, error: Exception) -> ResourceError:
    """What the store said, on one line and short: some put their whole history into it."""
    said = " ".join(str(error).split("Debug source:")[0].split())[:300]
    return ResourceError(
        f"cannot {action} in {bucket}: {said}; check that the bucket is there, the server answers, and the key "
        "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION) may read, write, list and delete in it"
    )


def _store(bucket: Bucket, environment: Mapping[str, str]) -> S3Store:
    credentials = credentials_in(environment)
    given = {}
    if credentials is not None:
        given = {"access_key_id": credentials.key_id, "secret_access_key": credentials.secret}
        if credentials.session_token:
            given["session_token"] = credentials.session_token
    if bucket.endpoint:
        given["endpoint"] = bucket.endpoint
    is_plain = bucket.endpoint.startswith("http://")
    return S3Store(
        bucket.name,
        region=bucket.region,
        virtual_hosted_style_request=not bucket.endpoint,
        checksum_algorithm="SHA256",
        client_options={"allow_http": is_plain, "connect_timeout": f"{CONNECT_S}s", "timeout": f"{ATTEMPT_S}s"},
        retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=TRY_FOR_S)},
        **given,  # type: ignore[arg-type]  # a dict of keyword arguments, all of them text
    )


def _size(bucket: Bucket, store: S3Store, key: str) -> int | None:
    try:
        return int(obstore.head(store, key)["size"])
    except FileNotFoundError:
        return None
    except (BaseError, OSError) as error:
        raise store_error("look for a submission", bucket, error) from error


def _listed(bucket: Bucket, store: S3Store, prefix: str) -> Iterator[tuple[str, datetime]]:
    """Every object below a prefix, with when it was written."""
    try:
        for page in obstore.list(store, prefix=prefix):
            yield from ((item["path"], item["last_modified"]) for item in page)
    except (BaseError, OSError) as error:
        raise store_error("list what is", bucket, error) from error
