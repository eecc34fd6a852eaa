"""Sizes and rates as people write them, and what is free on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.runtime import limits
from shoal.runtime.limits import MachineLimits, folder_bytes, free_memory_bytes, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 5 * 10**8), ("8GB", 8 * 10**9), ("8g", 8 * 10**9), ("16 GiB", 2**34), ("0.5kb", 500)]
)
def test_size_is_bytes(text, size):
    assert parse_size(text, "--max-disk") == size


@pytest.mark.parametrize(
    "text", ["", "much", "-1GB", "0", "0GB", "8GBit/s", "8 apples", "50", "1e9", "nan", "iB", f"{10**400}GB"]
)
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"--max-disk '.*' is no amount of bytes: write for example 500MB, 8GB"):
        parse_size(text, "--max-disk")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("20Mbit/s", 2.5e6),
        ("20 mbit", 2.5e6),
        ("2.5MB/s", 2.5e6),
        ("64kbit/s", 8000.0),
        ("1Gbps", None),
        ("1Gbitps", 1.25e8),
    ],
)
def test_rate_is_bytes_per_second(text, rate):
    assert parse_rate(text, "--max-bandwidth") == (1e9 if rate is None else rate)


@pytest.mark.parametrize(
    ("text", "said"), [("fast", "is no bandwidth"), ("20", "is no bandwidth"), ("9kbit/s", "too little")]
)
def test_what_is_no_rate_is_refused_with_an_example(text, said):
    with pytest.raises(ConfigError, match=f"--max-bandwidth '{text}' .*{said}.*(20Mbit/s|64kbit/s)"):
        parse_rate(text, "--max-bandwidth")


def test_without_options_a_share_of_what_is_free_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "free_memory_bytes", lambda: 10**9)
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda _path: type("Usage", (), {"free": 10**9}))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "old").write_bytes(bytes(8192))
    assert MachineLimits().memory() == 8 * 10**8
    assert MachineLimits().disk(tmp_path / "cache") == folder_bytes(tmp_path / "cache") + 8 * 10**8
    assert MachineLimits().disk(tmp_path / "not" / "there") == 8 * 10**8
    assert MachineLimits(5, 6).memory() == 5
    assert MachineLimits(5, 6).disk(Path("anywhere")) == 6


def test_free_memory_is_some_and_not_more_than_there_is():
    assert 0 < free_memory_bytes() < 1 << 50


def test_container_with_less_memory_than_the_machine_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "Path", lambda path: tmp_path if path == "/sys/fs/cgroup" else Path(path))
    monkeypatch.setattr(limits, "_machine_bytes", lambda: 10_000)
    assert free_memory_bytes() == 10_000, "no container"
    said = {"memory.max": "1000", "memory.current": "800", "memory.stat": "anon 500\ninactive_file 300"}
    for name, text in said.items():
        (tmp_path / name).write_text(text)
    assert free_memory_bytes() == 500, "files that are only cached can be given up"


def test_sparse_file_counts_for_what_is_written(tmp_path):
    with (tmp_path / "part").open("wb") as file:
        file.truncate(10**9)
    assert folder_bytes(tmp_path) < 10**6
