"""The cache of what was found out about data: never believed over the files, never without bound, never in the way."""

from __future__ import annotations

import gzip
import io
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from kit.data import KINDS, described, lines, open_data, own_cache, refused, write_jsonl, write_parquet, written
from shoal.environments.data import cache, readers

__all__ = ["own_cache"]
DAY_S = 24 * 3600


def aged(path: Path, days: float) -> Path:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))
    return path


def packed(folder: Path, count: int = 11) -> Path:
    return KINDS["gzip"](folder, described(count))


def unpacked_in(folder: Path) -> Path:
    (found,) = (path for path in folder.glob("unpacked-*.jsonl"))
    return found


# ── what it says is true ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_that_keeps_size_and_time_is_a_change(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", described(10))
    before, found = open_data(path), path.stat()
    with path.open("r+b") as file:  # the same inode
        content = file.read().replace(b'\\"2\\"', b'\\"9\\"')
        file.seek(0)
        file.write(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (found.st_size, found.st_mtime_ns, found.st_ino)
    after = open_data(path)
    assert after.data_digest != before.data_digest
    assert after.digest != before.digest


@pytest.mark.parametrize("harm", ["emptied", "tampered", "unsigned", "gone"])
def test_unpacked_data_that_is_not_what_was_written_is_unpacked_again(
    harm: str, tmp_path: Path, own_cache: Path
) -> None:
    path = packed(tmp_path)
    digest, target = open_data(path).digest, unpacked_in(own_cache)
    good = target.read_bytes()
    if harm in ("emptied", "tampered"):
        target.write_bytes(b"" if harm == "emptied" else good.replace(b"What is 3", b"What is 4"))
    else:
        target.with_name(target.name + (cache.SUM if harm == "unsigned" else "")).unlink()
    again = open_data(path)
    assert (again.task("3/p3").prompt, again.digest, target.read_bytes()) == ("What is 3 + 3?", digest, good)


def test_a_large_row_group_that_was_deleted_or_changed_in_the_cache_is_unpacked_again(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "PIECE_BYTES", 100)
    rows = described(20)
    path = write_parquet(tmp_path / "a.parquet", rows)
    environment = open_data(path)
    assert environment.task("7/p7").answer == rows[7]["verification_info"]
    for entry in own_cache.iterdir():  # while it is open
        entry.unlink()
    assert environment.task("8/p8").answer == rows[8]["verification_info"]
    for entry in own_cache.glob("rows-*.arrow"):
        entry.write_bytes(b"")
    assert open_data(path).task("9/p9").answer == rows[9]["verification_info"]


def test_what_was_unpacked_is_not_unpacked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path)
    first = open_data(path)
    monkeypatch.setattr(readers, "_unpack", lambda *_: pytest.fail("unpacked again"))
    assert open_data(path).digest == first.digest


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


@pytest.mark.parametrize("payload", [b"no arrays", b"", b"PK\x03\x04 cut", npz(a=[1]), npz(json=np.zeros(3, np.uint8))])
def test_an_entry_with_a_right_hash_that_is_none_costs_time_only(
    payload: bytes, tmp_path: Path, own_cache: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", described(10))
    expected = open_data(path).digest
    entries = [*own_cache.glob("scan-*"), *own_cache.glob("lines-*")]
    assert len(entries) == 2
    for entry in entries:
        entry.write_bytes(blake3(payload).digest() + payload)
    assert open_data(path).digest == expected


# ── it is bounded ────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_nobody_used_for_a_month_goes_when_something_new_is_kept(tmp_path: Path, own_cache: Path) -> None:
    open_data(packed(tmp_path))
    old = [aged(path, 31) for path in own_cache.iterdir() if path.name != cache.TIDIED]
    aged(own_cache / cache.TIDIED, 1)
    kept = [aged(written(own_cache / name, b""), days) for name, days in (("notes.txt", 400), ("digest-recent", 29))]
    scratch = [aged(written(own_cache / f".new-{days}", b"half"), days) for days in (1.1, 0.9)]  # of killed processes
    cache.store("digest-new", b"x")
    assert cache.load("digest-new") == b"x"
    assert [path.name for path in (*old, *kept, *scratch) if path.exists()] == [
        "notes.txt",
        "digest-recent",
        ".new-0.9",
    ]
    aged(own_cache / "digest-recent", 31)
    cache.store("digest-new", b"x")
    assert kept[1].exists()  # the folder is looked through once an hour
    aged(own_cache / cache.TIDIED, 0.1)
    cache.store("digest-new", b"x")
    assert not kept[1].exists()


def test_what_is_used_stays_however_old_it_is(tmp_path: Path, own_cache: Path) -> None:
    path = packed(tmp_path)
    open_data(path)
    data = aged(unpacked_in(own_cache), 31)
    before = {entry.name for entry in own_cache.iterdir() if entry.name.startswith(("lines-", "digest-"))}
    open_data(path)  # its age is of the test's making, so what is known of it was found out again
    kept = [aged(entry, 31) for entry in own_cache.iterdir() if entry != data and entry.name not in before]
    open_data(path)
    aged(own_cache / cache.TIDIED, 1)
    cache.store("digest-new", b"x")
    assert data.stat().st_mtime < time.time() - 30 * DAY_S  # touching it would mean reading it again
    assert len(kept) >= 5
    assert [entry.name for entry in kept if not entry.exists()] == []


def test_a_write_that_fails_leaves_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        cache.store("digest-a", b"x")
    assert [path.name for path in own_cache.iterdir()] == [cache.TIDIED]


def test_an_entry_is_on_the_disk_before_it_has_its_name(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []

    def watched(descriptor: int) -> None:
        assert not (own_cache / "digest-a").exists()
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", watched)
    cache.store("digest-a", b"x")
    assert synced == [(own_cache / "digest-a").stat().st_ino]


# ── what unpacks to too much ─────────────────────────────────────────────────────────────────────────────────────


def test_a_packed_file_that_becomes_far_too_large_is_refused(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "UNPACKS_TO_BYTES", 2**20)
    path = written(tmp_path / "bomb.jsonl.gz", gzip.compress(lines(described(1)) + b" " * (3 * 2**20)))
    message = refused(path)
    assert "bomb.jsonl.gz" in message
    assert "unpacks to more than 1 MB" in message
    monkeypatch.setattr(cache, "SPARE_BYTES", 2**80)
    assert "No space left on device; unpack it yourself" in refused(packed(tmp_path))
    assert not [entry for entry in own_cache.iterdir() if entry.name.startswith((".new-", "unpacked-"))]
