"""The [validator] section of a recipe, and the configuration of one validator."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from shoal.client import Intervals
from shoal.engines.registry import DTYPES
from shoal.environments import Environment, EnvironmentSettings
from shoal.protocol import SignedDocument, SigningKey
from shoal.runtime.exchange import HttpClient
from shoal.runtime.sizing import DERIVED

KINDS_ON_REQUEST = ("torch/cpu/bfloat16", "torch/cuda/bfloat16", "torch-plain/cuda/bfloat16")
ENGINE_PATHS = ("torch/cpu", "torch/cuda", "torch-plain/cuda", "vllm/cpu", "vllm/cuda")
MEASURING = "measuring the limits of honest work"
"""Reported to the hub while a validator calibrates; it judges nothing meanwhile."""


class ValidatorSettings(BaseModel, frozen=True, extra="forbid"):
    """How a validator works. It measures by itself how much honest work may deviate."""

    max_audits: int | None = Field(
        None, ge=1, le=256, description=f"submissions claimed at once, for one batched prefill; {DERIVED} 32"
    )
    keep_versions: int | None = Field(
        None, ge=1, description=f"policies on disk, and loaded while half of the free memory holds them; {DERIVED} 3"
    )
    profiles: tuple[Path, ...] = Field(
        (), description="files with limits for kinds of workers that no validator measures (shoal doctor --calibrate)"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to compute; auto: a GPU if there is one")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="what to compute in")
    memory_share: float = Field(
        1.0, gt=0, le=1, description="part of a GPU's memory that it may take (half for weights), beside other roles"
    )


def profile_keys(settings: ValidatorSettings) -> tuple[str, ...]:
    """The kinds of workers that a validator with these settings can judge; the hub leases work to no others."""
    from shoal.validator.profiles import load_profiles  # with numpy: who opens a run's folder need not have it

    known = load_profiles(settings.profiles)
    return tuple(sorted(key for key, profile in known.items() if settings.dtype in profile.validators))


def measurable_kinds(settings: ValidatorSettings, published: str) -> tuple[str, ...]:
    """Further kinds that such a validator can measure, or judge by measurements of their number format, in a run that
    publishes weights in the format `published`: nobody computes in a coarser one."""
    formats = DTYPES if published == "bfloat16" else ("float32",)
    kinds = [f"{path}/{each}" for path in ENGINE_PATHS for each in formats]
    known = profile_keys(settings)
    return tuple(kind for kind in kinds if kind not in known)


@dataclass(frozen=True)
class ValidatorConfig:
    """One validator. `shuffle_rewards`: the control run that must not learn. Completions are scored in processes that
    build the environment from `scored_by`; without it, in this process. `http` and `pace` are set only by tests."""

    folder: Path
    settings: ValidatorSettings
    environment: Environment
    engine: str
    hub_url: str
    root_fingerprint: str | None
    key: SigningKey
    certificate: SignedDocument
    shuffle_rewards: bool = False
    scored_by: EnvironmentSettings | None = None
    http: HttpClient | None = None
    pace: Intervals = field(default_factory=Intervals)
