"""Every blob store keeps the same promises: a folder, and a bucket behind a real S3 server."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kit import Request
from kit.s3 import KEYS, Shop
from shoal.errors import ConfigError, ResourceError
from shoal.hub.storage.blobs import LEFT_OVER_S, BlobFolder, Blobs, open_blobs
from shoal.hub.storage.s3 import S3Blobs
from shoal.protocol import submission_digest

Spoil = Callable[[str, bytes], object]


@pytest.fixture(params=["folder", "bucket"])
def place(request: Request, tmp_path: Path) -> tuple[Blobs, Spoil]:
    """A store, and a way to put something else in the place of a blob behind its back."""
    if request.param == "folder":
        return BlobFolder(tmp_path / "blobs"), lambda name, body: (tmp_path / "blobs" / name).write_bytes(body)
    shop: Shop = request.getfixturevalue("shop")
    prefix = submission_digest(str(tmp_path).encode())[:12]  # of its own, for the bucket is shared
    blobs = S3Blobs(f"s3://{shop.bucket}/{prefix}", shop.endpoint, KEYS)
    return blobs, lambda name, body: shop.put(f"{prefix}/blobs/{name}", body)


def test_blob_is_found_by_its_hash_and_can_be_put_again(place: tuple[Blobs, Spoil]) -> None:
    blobs, _ = place
    name = blobs.put(b"bytes")
    assert name == submission_digest(b"bytes")
    assert blobs.put(b"bytes") == name
    assert blobs.get(name) == b"bytes"
    other = blobs.put(b"\0" * 3_000_000)
    assert blobs.get(other) == b"\0" * 3_000_000
    assert blobs.has(name)
    assert not blobs.has("0" * 64)


def test_damaged_or_lost_blob_is_an_error(place: tuple[Blobs, Spoil]) -> None:
    blobs, spoil = place
    name = blobs.put(b"bytes")
    spoil(name, b"other")
    with pytest.raises(ResourceError, match="damaged"):
        blobs.get(name)
    with pytest.raises(ResourceError, match="cannot read"):
        blobs.get("0" * 64)


def test_old_leftovers_are_removed_and_young_ones_kept(tmp_path: Path) -> None:
    folder = tmp_path / "blobs"
    folder.mkdir()
    old, young = folder / ".left-over", folder / ".being-written"
    old.write_bytes(b"of a process that was killed")
    young.write_bytes(b"of another hub")
    before_s = old.stat().st_mtime - LEFT_OVER_S - 60
    os.utime(old, (before_s, before_s))
    blobs = open_blobs("", "", folder)  # as a run gets it that names no bucket
    assert isinstance(blobs, BlobFolder)
    assert not old.exists()
    assert young.exists()
    assert blobs.get(blobs.put(b"bytes")) == b"bytes"


@pytest.mark.parametrize(("url", "endpoint", "said"), [
    *((url, "", r"hub\.storage = .* write s3://BUCKET/PREFIX")
      for url in ("http://bucket", "s3:///prefix", "bucket", "s3://bucket?x=1")),
    ("s3://bucket", "127.0.0.1:9000", r"hub\.storage_endpoint"),
])  # fmt: skip
def test_wrong_bucket_or_endpoint_is_named(url: str, endpoint: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        S3Blobs(url, endpoint, KEYS)


def test_missing_bucket_is_named(shop: Shop) -> None:
    blobs = S3Blobs("s3://no-such-bucket", shop.endpoint, KEYS)
    with pytest.raises(ResourceError, match=r"cannot write a submission in s3://no-such-bucket.*check that the bu"):
        blobs.put(b"bytes")
