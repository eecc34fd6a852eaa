"""Leave to make one request of a store, given away as a URL: AWS Signature Version 4, in the query.

    method, path, query, the headers to be sent ─► canonical request ─► SHA-256 ─► HMAC by a key of the day ─► URL

Whatever is among `headers` is signed: who uses the URL has to send exactly these. With `content-length` and
`x-amz-checksum-sha256` among them the URL is good for one object of one size and one content, and for nothing else.
The libraries that talk to stores for us sign a URL, but no headers with it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

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

    The body itself is not in it (nor is it in anybody else's URLs): its hash is, as one of the headers.
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
