"""Profiles: a file that loads to what was written, mistakes told with the remedy, and no torch on the hub's road."""

from __future__ import annotations

from pathlib import Path

import pytest
from honest import LengthEnvironment, docket, lease, loaded
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.protocol import Outcome
from shoal.runtime.config import parse_config
from shoal.sampling import SeedTolerance
from shoal.toploc import ProofTolerance
from shoal.validator import Judge, Profile, ValidatorSettings, load_profiles, profile_keys
from shoal.validator.profiles import (
    BUILT_IN,
    LEAST,
    MOST,
    MOST_BY_NAT,
    ON_REQUEST,
    ChannelLimits,
    LogprobLimits,
    Measured,
    NoiseLimits,
    read_profile,
    to_toml,
)

MEASURED = Measured(model="tiny", tokens=1000, date="2026-11-15", validators=("cpu/float32",), bands={"distance": 1e-5})


def test_wide_limits_are_there_only_for_who_names_them() -> None:
    """In bfloat16 more may pass: a run that nobody runs in bfloat16 must not offer that to cheaters."""
    assert not any("bfloat16" in key for key in BUILT_IN)
    found = load_profiles([Path("torch/cuda/bfloat16")])
    assert found == {**BUILT_IN, "torch/cuda/bfloat16": ON_REQUEST["torch/cuda/bfloat16"]}


def test_a_bfloat16_validator_takes_no_float32_work() -> None:
    """It could not tell float32 rounding from cheating, so the hub must not lease that work (issue: 144 of 144)."""
    assert profile_keys(ValidatorSettings(dtype="bfloat16")) == ()
    named = (Path("torch/cuda/bfloat16"),)
    assert profile_keys(ValidatorSettings(dtype="bfloat16", profiles=named)) == ("torch/cuda/bfloat16",)
    assert profile_keys(ValidatorSettings(profiles=named)) == tuple(sorted((*BUILT_IN, "torch/cuda/bfloat16")))


def test_a_validator_that_rounds_more_coarsely_than_the_profile_allows_cannot_tell() -> None:
    key = "scripted/cpu/float32"
    narrow = BUILT_IN[key].model_copy(update={"validators": ("float64",)})
    [verdict] = Judge(LengthEnvironment(), {key: narrow}).verdicts([docket(lease())], loaded())
    assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "machinery.profile")
    assert "scripted/cpu/float32" in verdict.message


@pytest.mark.parametrize("value", [LEAST, MOST])
@pytest.mark.parametrize("rate", [LEAST, MOST_BY_NAT])
@pytest.mark.parametrize("unit", [LEAST, MOST_BY_NAT])
def test_the_widest_and_narrowest_limits_that_can_be_signed_break_no_validator(
    value: float, rate: float, unit: float
) -> None:
    of, channel = lease(), ChannelLimits(rate=rate, curve=rate, unit=unit, shared=value)
    noise = NoiseLimits(**dict.fromkeys(NoiseLimits.model_fields, channel))
    logprobs = LogprobLimits(spread=value, lean=value, drift=value)
    profile = Profile(key=of.profile, noise=noise, logprobs=logprobs)
    [verdict] = Judge(LengthEnvironment(), {of.profile: profile}).verdicts([docket(of)], loaded())
    assert verdict.model_dump_json()


small = st.floats(1e-12, 1.0)


@settings(deadline=None)
@given(small, small, small, st.integers(0, 10), st.booleans())
def test_a_profile_survives_its_file(a: float, b: float, c: float, n: int, measured: bool) -> None:
    written = Profile(
        key="torch/cuda/bfloat16",
        sampling=SeedTolerance(distance=a, floor=b),
        proofs=ProofTolerance(exponents=c, boundary=n),
        logprobs=LogprobLimits(spread=b, largest=c),
        measured=MEASURED if measured else None,
    )
    assert parse_config(to_toml(written), Profile, "it") == written


def test_a_file_is_added_and_takes_the_place_of_a_built_in_one(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.toml", tmp_path / "other.toml"
    mine.write_text('key = "torch/cpu/float32"\n[logprobs]\nlargest = 0.5\n[measured]\nmodel = "m"\ntokens = 5\n'
                    'date = 2026-11-15\nvalidators = ["cpu/float32"]\nbands = {distance = 1e-3}\n')  # fmt: skip
    other.write_text('key = "vllm/cuda/float16"\n')
    found = load_profiles([mine, other])
    assert found["torch/cpu/float32"].logprobs.largest == 0.5
    assert found["torch/cpu/float32"].sampling == BUILT_IN["torch/cpu/float32"].sampling
    assert found["torch/cpu/float32"].measured == Measured(
        model="m", tokens=5, date="2026-11-15", validators=("cpu/float32",), bands={"distance": 1e-3}
    )
    assert set(found) == {*BUILT_IN, "vllm/cuda/float16"}
    assert profile_keys(ValidatorSettings(profiles=(mine, other))) == tuple(sorted(found))
    assert load_profiles() == BUILT_IN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"p\.toml: \[key\] is missing"),
        ("key = 'torch'", r"p\.toml: \[key\] = \"torch\": string should match pattern"),
        ("key = 'a/b/c'\nkay = 1", r"p\.toml: there is no section \[kay\]; did you mean \[key\]"),
        ("key = 'a/b/c'\n[sampling]\ndistanze = 1.0", "there is no key 'distanze'; there are distance"),
        ("key = 'a/b/c'\n[proofs]\nwidth = 1.0", "there is no key 'width'; there are exponents"),
        ("key = 'a/b/c'\n[sampling]\ndistance = -1.0", "distance must be a number of at least 0, not -1.0"),
        ("key = 'a/b/c'\n[sampling]\nfloor = nan", "floor must be a number of at least 0, not nan"),
        ("key = 'a/b/c'\n[proofs]\nsigns = inf", "signs must be a number of at least 0, not inf"),
        ("key = 'a/b/c'\n[logprobs]\nspread = inf", "spread"),
        ("key = 'a/b/c'\n[noise.bias]\nrate = 1.0", "unit"),
        ("key = 'a/b/c'\n[noise.outside]\nrate = nan\nunit = 1.0", "rate"),
        ("key = 'a/b/c'\n[noise.outside]\nrate = 1e300\nunit = 1.0", "rate"),
        ("key = 'a/b/c'\n[noise.outside]\nrate = 1.0\nunit = 1e-300", "unit"),
        ("key = 'a/b/c'\n[noise.outside]\nrate = 1.0\nunit = 1.0\nshared = 1e200", "shared"),
        ("key = 'a/b/c'\nvalidators = []", "validators"),
        ("key = 'a/b/c'\n[sampling]\ndistance = 'far'", r"sampling.*distance"),
        ("key = 'a/b/c'\n[logprobs]\nmean = 0", "mean"),
        ("key = 'a/b/c'\n[measured]\nmodel = 'm'", r"\[measured\] tokens is missing"),
        ("key = ", "not valid TOML"),
    ],
)
def test_mistakes_are_told_with_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_profile(path)


def test_a_file_that_cannot_be_read_or_comes_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the profile .*absent\.toml: No such file"):
        load_profiles([tmp_path / "absent.toml"])
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="byte 0 is not UTF-8"):
        load_profiles([tmp_path / "bytes.toml"])
    (tmp_path / "huge.toml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(ConfigError, match="that is no profile"):
        load_profiles([tmp_path / "huge.toml"])
    for name in ("a.toml", "b.toml"):
        (tmp_path / name).write_text("key = 'a/b/c'")
    with pytest.raises(ConfigError, match=r"two files .* are for a/b/c, one of them is .*b\.toml"):
        load_profiles([tmp_path / "a.toml", tmp_path / "b.toml"])
