"""What a validator can be told: the [validator] section of a recipe, its tolerances, and what it validates with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import BaseModel, ConfigDict, Field

from shoal.environments import Environment
from shoal.protocol import SignedDocument, SigningKey
from shoal.sampling import SeedTolerance


class Tolerances(BaseModel):
    """What rounding may explain between a worker's engine and this one. The defaults are for float32 on both sides.

    `seed_*` are those of `shoal.sampling.SeedTolerance`. A sampling failure is certain, and not merely likely, when
    `certain_tokens` tokens lie farther than `certain_distance` outside: no rounding does that even once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed_distance: float = Field(
        SeedTolerance.distance, gt=0, description="how far a uniform may lie outside its token's interval"
    )
    seed_floor: float = Field(
        SeedTolerance.floor, ge=0, description="smallest probability of a token that passes only by the tolerance"
    )
    seed_outside_rate: float = Field(
        SeedTolerance.outside_rate, gt=0, lt=1, description="how often an honest token is outside at all"
    )
    seed_significance: float = Field(
        SeedTolerance.significance,
        gt=0,
        description="how unlikely that many outside tokens must be to count as steered",
    )
    certain_distance: float = Field(0.05, gt=0, description="what counts as far outside")
    certain_tokens: int = Field(4, ge=1, description="tokens far outside that make a sampling failure certain")
    logprob_mean: float = Field(1e-4, gt=0, description="largest mean difference of log-probabilities")
    logprob_max: float = Field(2e-3, gt=0, description="largest single difference of log-probabilities")

    @property
    def seed(self) -> SeedTolerance:
        return SeedTolerance(self.seed_distance, self.seed_floor, self.seed_outside_rate, self.seed_significance)


class ValidatorSettings(BaseModel):
    """How a validator works. Its verdicts depend on `tolerances` alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_audits: int = Field(
        32, ge=1, le=256, description="submissions claimed at once; those of one policy share one batched prefill"
    )
    audit_wait_s: float = Field(
        5.0, ge=0, le=60, description="one long poll for audits; also the longest that an idle validator takes to stop"
    )
    held_versions: int = Field(
        3, ge=1, description="policies kept loaded (the memory budget) and on disk; max_staleness + 1 avoids reloads"
    )
    policy_wait_s: float = Field(
        30.0, gt=0, description="how long a policy is fetched before its audits are left for another time"
    )
    heartbeat_s: float = Field(5.0, gt=0, description="time between two heartbeats")
    hub_patience_s: float = Field(600.0, gt=0, description="how long a hub that does not answer is waited for")
    tolerances: Tolerances = Field(Tolerances(), description="what rounding may explain")


@dataclass(frozen=True)
class ValidatorConfig:
    """One validator: its folder (cache of weights), engine, environment, and the certificate that makes it trusted.

    `shuffle_rewards` comes from the [environment] section: the control run that must not learn. `http` is given only
    by tests and one-process runs.
    """

    folder: Path
    settings: ValidatorSettings
    environment: Environment
    engine: str
    hub_url: str
    root_fingerprint: str | None
    key: SigningKey
    certificate: SignedDocument
    shuffle_rewards: bool = False
    http: httpx.Client | None = None
