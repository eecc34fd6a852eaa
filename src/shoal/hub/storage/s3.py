"""Submissions in an S3 bucket: `s3://bucket/prefix/blobs/<SHA-256>`.

A put has reached the store's disks when it is answered. The key comes from the environment (`AWS_ACCESS_KEY_ID`,
`AWS_SECRET_ACCESS_KEY`), never from the recipe, which many read; an instance's role works, too.
"""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from shoal.errors import ResourceError
from shoal.hub.storage.blobs import bucket_of, checked
from shoal.protocol import submission_digest

DEFAULT_REGION = "us-east-1"
CONNECT, ATTEMPT, TRY_FOR_S, RETRIES = "5s", "30s", 20, 4


class S3Blobs:
    def __init__(self, url: str, endpoint: str = "", environment: Mapping[str, str] = os.environ) -> None:
        (parts, server), endpoint = bucket_of(url, endpoint), endpoint.rstrip("/")
        self._prefix = parts.path.strip("/")
        self._where = f"s3://{parts.netloc}/{self._prefix}".rstrip("/") + (f" at {endpoint}" if endpoint else "")
        given: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
        if environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
            for name in ("access_key_id", "secret_access_key", "session_token"):
                if value := environment.get(f"AWS_{name.upper()}"):
                    given[name] = value
        self._store = S3Store(
            parts.netloc, checksum_algorithm="SHA256",
            virtual_hosted_style_request=not endpoint,  # other servers expect the bucket in the path
            region=environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or DEFAULT_REGION,
            client_options={"allow_http": server.scheme == "http", "connect_timeout": CONNECT, "timeout": ATTEMPT},
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=TRY_FOR_S)}, **given,
        )  # fmt: skip

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
        return checked(body, name, f"{name} in {self._where}")

    def has(self, name: str) -> bool:
        try:
            obstore.head(self._store, self._key(name))
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as error:
            raise self._explained("look for", error) from error
        return True

    def _key(self, name: str) -> str:
        return f"{self._prefix}/blobs/{name}".lstrip("/")

    def _explained(self, verb: str, error: Exception) -> ResourceError:
        said = " ".join(str(error).split("Debug source:")[0].split())[:300]  # some stores send their whole history
        return ResourceError(
            f"cannot {verb} a submission in {self._where}: {said}; check that the bucket is there, the server "
            "answers, and the key (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION) may read and write in it"
        )
