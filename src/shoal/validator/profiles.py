"""Profiles: what honest rounding may explain, by the kind of a worker (`engine/device/number format`).

    built in ─┐
              ├─► load_profiles ─► hub: leases work only to these kinds        validator: checks by these limits
    *.toml ───┘

The run's owner adds files to `validator.profiles`; `to_toml` writes one, with the origin of its numbers in
`[measured]`. A file for a built-in kind replaces the built-in profile. Needs no torch.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, with_config

from shoal.errors import ConfigError
from shoal.protocol.lease import PROFILE, format_of
from shoal.runtime.config import dump_config, parse_config
from shoal.sampling import SeedTolerance
from shoal.toploc import ProofTolerance
from shoal.validator.settings import KINDS_ON_REQUEST

MAX_PROFILE_BYTES = 1_000_000
SMALLER_IS_WIDER = frozenset({"floor", "significance"})
LEAST, MOST = 1e-12, 1e12  # of limits, so that no calibration makes a validator compute with infinity
MOST_BY_NAT = 1e100  # a policy that is certain has next to no nats


class _Table(BaseModel, frozen=True, extra="forbid"):
    """A TOML table that refuses unknown keys."""


class CertainLimits(_Table):
    """When a sampling failure is certain: rounding never does that."""

    distance: float = Field(0.05, gt=0, allow_inf_nan=False, description="what counts as far outside")
    tokens: int = Field(4, ge=1, description="tokens far outside that make a sampling failure certain")


class LogprobLimits(_Table):
    """How reported log-probabilities may differ from the validator's, in units of w = 1 - p + 0.03 of their token
    (rounding moves a token of probability p in proportion to 1 - p)."""

    largest: float = Field(2e-3, gt=0, allow_inf_nan=False, description="largest difference of one token")
    spread: float = Field(1e-4, ge=LEAST, le=MOST, description="standard deviation of one token")
    lean: float = Field(0.0, ge=-MOST, le=MOST, description="mean: drawn tokens are likelier to who drew them")
    drift: float = Field(1e-5, ge=0, le=MOST, description="standard deviation that a rollout shares")


class AccidentLimits(_Table):
    """How often coarse arithmetic gets something far wrong, per part of a rollout (the tokens of one proof); 0 in
    float32, where it never does."""

    first: float = Field(0.0, ge=0, lt=1, description="of first parts, next to the prompt")
    later: float = Field(0.0, ge=0, lt=1, description="of the others")


class ChannelLimits(_Table):
    """The most that honest work shows in one channel: see `shoal.validator.evidence`."""

    rate: float = Field(gt=0, le=MOST_BY_NAT, description="mean per nat, value, token or rollout")
    curve: float = Field(0.0, ge=0, le=MOST_BY_NAT, description="the same per square nat, added to it")
    unit: float = Field(ge=LEAST, le=MOST_BY_NAT, description="the lumps that it varies in")
    shared: float = Field(0.0, ge=0, le=MOST, description="relative error that a submission shares")
    most: float = Field(1e9, gt=0, allow_inf_nan=False, description="what a token, or a proof's value, counts for")


class NoiseLimits(_Table):
    """The channels that are summed over a submission, and over a node's record."""

    outside: ChannelLimits = ChannelLimits(rate=4e-3, unit=1.0)
    distance: ChannelLimits = ChannelLimits(rate=4e-9, unit=1e-6)
    exponents: ChannelLimits = ChannelLimits(rate=0.01, unit=1.0)
    mantissa: ChannelLimits = ChannelLimits(rate=0.02, unit=1.0)
    logprobs: ChannelLimits = ChannelLimits(rate=1e-4, unit=1e-4)
    bias: ChannelLimits = ChannelLimits(rate=1.0, unit=2.0)


CHANNELS = (*NoiseLimits.model_fields, "accidents")


class LikelihoodLimits(_Table):
    """How far the sum of log-probabilities may be from the expected sum, in standard deviations. Too few tokens, or
    tokens without a choice, are not checked, because their sum is not normally distributed."""

    deviations: float = Field(8.0, gt=0, allow_inf_nan=False, description="largest distance from the expected sum")
    tokens: int = Field(64, ge=1, description="fewest tokens that the check needs")
    variance: float = Field(16.0, gt=0, allow_inf_nan=False, description="smallest variance that it needs, in nats²")


class Measured(_Table):
    """The origin of the numbers: honest work of that model, and its bands."""

    model: str
    tokens: int = Field(ge=0)
    date: str
    validators: tuple[str, ...] = Field(default=(), description="what the validators computed with: device/format")
    bands: dict[str, float] = {}


for _tolerance in (SeedTolerance, ProofTolerance):
    with_config(_Table.model_config)(_tolerance)


class Profile(_Table):
    """The limits for one kind of worker; the defaults are for float32 on both sides."""

    key: str = Field(pattern=PROFILE, description="engine/device/number format of the worker")
    sampling: SeedTolerance = SeedTolerance()
    certain: CertainLimits = CertainLimits()
    proofs: ProofTolerance = ProofTolerance()
    logprobs: LogprobLimits = LogprobLimits()
    noise: NoiseLimits = NoiseLimits()
    accidents: AccidentLimits = AccidentLimits()
    likelihood: LikelihoodLimits = LikelihoodLimits()
    validators: tuple[str, ...] = Field(("float32",), min_length=1, description="what a validator may compute in")
    measured: Measured | None = None


Profiles = Mapping[str, Profile]


BUILT_IN: Profiles = {
    key: Profile(key=key)
    for key in (
        "torch/cpu/float32", "torch/cuda/float32", "torch-plain/cuda/float32", "vllm/cpu/float32",
        "scripted/cpu/float32",
    )
}  # fmt: skip

# SmolLM2-135M on an H200, 128 groups of 16 × 128 tokens, seen in float32 and bfloat16 (benchmarks/results).
_BFLOAT16: dict[str, Any] = {
    "sampling": SeedTolerance(distance=0.19, floor=1e-12),
    "certain": CertainLimits(distance=0.38, tokens=4),
    "proofs": ProofTolerance(exponents=0.15, signs=0.03, boundary=3, mantissa_mean=4.1, mantissa_median=5.0),
    "logprobs": LogprobLimits(largest=1.4, spread=0.053, lean=9e-4, drift=1e-3),
    "noise": NoiseLimits(
        outside=ChannelLimits(rate=0.0461, curve=0.0158, unit=1.0, shared=0.03),
        distance=ChannelLimits(rate=2.2e-4, curve=8.6e-5, unit=0.005, shared=0.05, most=0.038),
        exponents=ChannelLimits(rate=0.015, unit=1.8, shared=0.13),
        mantissa=ChannelLimits(rate=1.55, unit=1.8, shared=0.04, most=4.8),
        logprobs=ChannelLimits(rate=0.046, unit=0.022, shared=0.03, most=0.58),
        bias=ChannelLimits(rate=1.3, unit=2.0, shared=0.3),
    ),
    "accidents": AccidentLimits(first=2e-3, later=1e-4),
    "validators": ("float32", "bfloat16"),
    "measured": Measured(
        model="SmolLM2-135M", tokens=169_523, date="2026-11-16", validators=("cuda/float32", "cuda/bfloat16"),
        bands={
            "outside_rate": 0.2547, "distance_max": 0.07314, "logprob_mean": 0.02664, "logprob_max": 0.9949,
            "exponent_rate": 0.01447, "mantissa_mean": 1.124, "accidents": 0.0,
        },
    ),
}  # fmt: skip

# Bands in bfloat16 depend on the model, and wide limits help cheats: a run takes these only if its owner names them in
# `validator.profiles`.
ON_REQUEST: Profiles = {key: Profile(key=key, **_BFLOAT16) for key in KINDS_ON_REQUEST}


def widest(one: Profile, other: Profile) -> Profile:
    """The wider of two limits of one kind, number by number: what either machine calls honest is honest."""

    def wider(mine: Any, theirs: Any, name: str) -> Any:
        if isinstance(mine, Mapping):
            return {key: wider(value, theirs[key], key) for key, value in mine.items()}
        if isinstance(mine, int | float):
            return (min if name in SMALLER_IS_WIDER else max)(mine, theirs)
        return mine

    both = wider(one.model_dump(exclude={"measured", "validators"}), other.model_dump(exclude={"measured"}), "")
    formats = tuple(sorted({*one.validators, *other.validators}))
    measured = one.measured or other.measured
    if one.measured is not None and other.measured is not None:
        machines = tuple(sorted({*one.measured.validators, *other.measured.validators}))
        bands = {name: max(value, other.measured.bands.get(name, value)) for name, value in one.measured.bands.items()}
        measured = one.measured.model_copy(update={"validators": machines, "bands": bands})
    return Profile.model_validate({**both, "validators": formats, "measured": measured})


def limits_for(kind: str, number_format: str, measured: Profiles, known: Profiles) -> tuple[Profile, bool] | None:
    """The limits for a kind of worker, for a validator that computes in `number_format`, and whether they are of that
    very kind. Otherwise they are the widest that were measured for the worker's number format."""
    if kind in measured:
        return measured[kind], True
    if kind in known and number_format in known[kind].validators:
        return known[kind], True
    alike = [profile for each, profile in measured.items() if format_of(each) == format_of(kind)]
    return (functools.reduce(widest, alike).model_copy(update={"key": kind}), False) if alike else None


def load_profiles(paths: Iterable[Path] = ()) -> Profiles:
    """The built-in profiles and those of the files, by key. Instead of a file, the key of a profile in `ON_REQUEST` may
    be given."""
    added: dict[str, Profile] = {}
    for path in paths:
        profile = ON_REQUEST.get(path.as_posix()) or read_profile(path)
        if profile.key in added:
            raise ConfigError(f"two files of validator.profiles are for {profile.key}, one of them is {path}: keep one")
        added[profile.key] = profile
    return {**BUILT_IN, **added}


def read_profile(path: Path) -> Profile:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PROFILE_BYTES + 1)
        if len(data) > MAX_PROFILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_PROFILE_BYTES} bytes: that is no profile")
        return parse_config(data.decode(), Profile, path.name)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}; see validator.profiles") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the profile {path} is no text: byte {error.start} is not UTF-8") from error


def to_toml(profile: Profile) -> str:
    """TOML that `read_profile` reads as the same profile."""
    return dump_config(profile)
