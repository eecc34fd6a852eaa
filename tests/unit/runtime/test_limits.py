"""What a process may take of its machine; settings derived from sizes."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.hub.settings import HubSettings
from shoal.runtime import limits
from shoal.runtime.limits import MachineLimits, folder_bytes, free_memory_bytes, parse_rate, parse_size
from shoal.runtime.sizing import Derived, RunSize, Speeds, derive, open_settings, settle
from shoal.trainer.settings import TrainerSettings
from shoal.validator.settings import ValidatorSettings


def test_size_is_bytes():
    sizes = {"500MB": 5 * 10**8, "8GB": 8 * 10**9, "8g": 8 * 10**9, "16 GiB": 2**34, "0.5kb": 500}
    assert {text: parse_size(text, "--max-disk") for text in sizes} == sizes


@pytest.mark.parametrize(
    "text", ["", "much", "-1GB", "0", "0GB", "8GBit/s", "8 apples", "50", "1e9", "nan", "iB", f"{10**400}GB"]
)
def test_bad_size_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"--max-disk '.*' is no amount of bytes: write for example 500MB, 8GB"):
        parse_size(text, "--max-disk")


def test_rate_is_bytes_per_second():
    rates = {"20Mbit/s": 2.5e6, "20 mbit": 2.5e6, "2.5MB/s": 2.5e6, "64kbit/s": 8e3, "1Gbps": 1e9, "1Gbitps": 1.25e8}
    assert {text: parse_rate(text, "--max-bandwidth") for text in rates} == rates


def test_bad_rate_is_refused_with_an_example():
    for text, said in (("fast", "is no bandwidth"), ("20", "is no bandwidth"), ("9kbit/s", "too little")):
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


LARGE = RunSize(32 * 10**9, 64 * 10**9, group_size=16, max_new_tokens=32_768, max_staleness=2)


@pytest.mark.parametrize(("size", "policy_wait_s", "audit_s"), [
    (RunSize(), 30, 60), (RunSize(172_672, 18_000_000, group_size=16, max_new_tokens=10), 30, 60),
    # 1.5 x (11 x 5.70 + 0.2) = 94.4; 32 groups of 0.216 s
    (RunSize(135 * 10**6, 594 * 10**6, group_size=16, max_new_tokens=8000), 100, 120),
    # 1.5 x (11 x 12.67 + 0.5) = 209.8; 32 groups of 0.49 s
    (RunSize(600 * 10**6, 1_320 * 10**6, group_size=16, max_new_tokens=4096, max_staleness=4), 210, 240),
])  # fmt: skip
def test_small_models_keep_the_built_in_values_but_for_what_a_full_relay_takes(size, policy_wait_s, audit_s) -> None:
    assert derive(size) == Derived(policy_wait_s=policy_wait_s, audit_s=audit_s)


def test_a_large_model_gets_what_its_transfers_and_computations_take() -> None:
    """64 GB over 1 Gbit/s / 1.2 take 614.4 s, eleven copies out of a relay as many times, into the engine at 2.7 GB/s
    23.7 s, by a delta at 1 GB/s 64 s. A group of
    32,768 tokens at 64 GB / 330 GB/s a token takes 6,354.9 s. Its 524,288 tokens of 2 x 32e9 operations take 209.7 s at
    160 TFLOP/s. A checkpoint has 384 GB."""
    assert derive(LARGE) == Derived(
        lease_s=1590.0,  # 6354.9 / 4 = 1588.7, in tens; applying is 1.5 x (64 + 23.7) = 131.6
        lease_hard_s=7950.0,  # 1590 + 6354.9 = 7944.9
        audit_s=10_500.0,  # 10,180 + 1.5 x 209.7 = 10,494.6
        policy_wait_s=10_180.0,  # 1.5 x (11 x 614.4 + 23.7) = 10,173.2
        max_audits=1,  # 20 s do for none
        keep_versions=3,  # max_staleness + 1
        checkpoint_every=7,  # 384 s, 60 of them a step
        keep_checkpoints=1,  # two are 768 GB, above 240
        batch_deadline_s=27_680.0,  # 1.5 x (7950 + 10,500)
        patience_s=27_680.0,
    )


def test_a_slow_link_gets_longer_waits_for_policies_audits_and_batches() -> None:
    """At 50 Mbit/s 64 GB take 12,288 s, and into the engine 23.7."""
    slower = {
        "policy_wait_s": 202_790.0,  # 1.5 x (11 x 12,288 + 23.7)
        "audit_s": 203_110.0,  # and 1.5 x 209.7
        "batch_deadline_s": 316_590.0,  # 1.5 x (7,950 + 203,110)
        "patience_s": 316_590.0,
    }
    assert derive(replace(LARGE, link_mbit=50)) == replace(derive(LARGE), **slower)


def test_with_short_completions_a_lease_covers_applying_a_version_and_given_settings_win() -> None:
    short = RunSize(32 * 10**9, 64 * 10**9, group_size=16, max_new_tokens=256, max_staleness=0)
    assert derive(short).lease_s == 120.0  # 115.6
    assert derive(short).keep_versions == 2  # the one at work, and the next
    assert derive(short).max_audits == 12  # 4,096 tokens take 1.64 s, and 20 s are for one claim
    chosen = settle(HubSettings(lease_s=5), LARGE)
    assert (chosen.lease_s, chosen.audit_s, chosen.lease_hard_s) == (5, 10_500.0, 7950.0)
    assert settle(TrainerSettings(checkpoint_every=1), LARGE).checkpoint_every == 1


def test_every_file_that_a_speed_names_as_its_source_exists() -> None:
    """And branches are looked at as often as today's schedule asks for, by the table of `honest_bands.md`."""
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    named = {name for one in fields(Speeds) for name in re.findall(r"(?<!/)\b\w+\.md", one.metadata["source"])}
    assert "honest_bands.md" in named
    assert [name for name in sorted(named) if not (results / name).exists()] == []
    row = re.search(r"\(today\)\*\* \| ([\d.]+) %", (results / "honest_bands.md").read_text())
    assert row is not None
    assert float(row[1]) / 100 == pytest.approx(Speeds().branch_share)


def test_every_derived_setting_is_one_of_a_recipe() -> None:
    sections = (HubSettings(), ValidatorSettings(), TrainerSettings())
    derived = set(Derived.__dataclass_fields__) - {"policy_wait_s", "audit_s", "patience_s"}  # in no recipe
    assert {name for section in sections for name in open_settings(section)} == derived
    assert "lease_s" not in open_settings(HubSettings(lease_s=60))
