"""What a run is, how its hub behaves, and what the hub is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shoal.environments import Environment
from shoal.hub.state.rows import Rules
from shoal.protocol import Limits, SamplingParameters, SignedDocument, SigningKey
from shoal.protocol.lease import MAX_GROUP, MAX_NEW_TOKENS

MIB = 1024 * 1024
SUBMISSION_BASE_BYTES = MIB  # the prompt and what frames the rollouts
BYTES_PER_TOKEN = 32  # a token id, its log-probability, and room for proofs


class RunSettings(BaseModel):
    """What is being trained. The same for everybody who takes part; it never changes during a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}$", description="name of the run")
    seed: int = Field(0, ge=0, lt=2**63, description="decides the order of the tasks")
    steps: int = Field(20, ge=1, le=10**9, description="training steps; the run is finished when that version is out")
    groups_per_step: int = Field(16, ge=1, le=65_536, description="groups in one training step")
    group_size: int = Field(16, ge=1, le=MAX_GROUP, description="rollouts of one task in a group")
    max_staleness: int = Field(1, ge=0, le=64, description="how many versions old a group may be; 0 is synchronous")
    temperature: float = Field(1.0, gt=0, le=10, description="sampling temperature")
    max_new_tokens: int = Field(16, ge=1, le=MAX_NEW_TOKENS, description="longest completion, in tokens")


class HubSettings(BaseModel):
    """How the hub behaves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(8470, ge=0, le=65_535, description="port to listen on; 0 takes any free one")
    lease_s: float = Field(60, gt=0, description="time a worker has for one lease")
    audit_s: float = Field(60, gt=0, description="time a validator has for one audit")
    max_attempts: int = Field(4, ge=1, description="inconclusive audits after which a unit is given up")
    refill_cap: int = Field(4, ge=0, description="lost groups refilled per step, in multiples of groups_per_step")
    leases_per_node: int = Field(64, ge=1, description="leases that one node may hold at a time")
    max_submission_bytes: int = Field(16 * MIB, ge=1024, description="largest submission, as sent")
    max_inflated_bytes: int = Field(64 * MIB, ge=1024, description="largest submission, decompressed")
    concurrent_uploads: int = Field(16, ge=1, description="submissions stored at the same time; others wait")


@dataclass(frozen=True)
class HubConfig:
    """What a hub is made of: its folder, its run, and how prompts become token ids.

    `certificates` are the role certificates that `GET /run` hands out; `sources` where the weights are.
    """

    folder: Path
    run_id: str
    run: RunSettings
    settings: HubSettings
    environment: Environment
    encode: Callable[[str], Sequence[int]]
    eos_token_id: int
    key: SigningKey
    root_key: str
    certificates: tuple[SignedDocument, ...] = ()
    sources: tuple[str, ...] = ()
    last_resort: tuple[str, ...] = ()

    @property
    def rules(self) -> Rules:
        run, settings = self.run, self.settings
        return Rules(
            steps=run.steps,
            groups_per_step=run.groups_per_step,
            group_size=run.group_size,
            max_staleness=run.max_staleness,
            max_new_tokens=run.max_new_tokens,
            max_attempts=settings.max_attempts,
            refill_cap=settings.refill_cap,
            leases_per_node=settings.leases_per_node,
            lease_ms=round(settings.lease_s * 1000),
            audit_ms=round(settings.audit_s * 1000),
        )

    @property
    def submission_limits(self) -> Limits:
        """Caps on a submission: what a group of this run can need, and never more than the settings allow."""
        needed = SUBMISSION_BASE_BYTES + BYTES_PER_TOKEN * self.run.group_size * self.run.max_new_tokens
        settings = self.settings
        return Limits(min(settings.max_submission_bytes, needed), min(settings.max_inflated_bytes, needed))

    @property
    def sampling(self) -> SamplingParameters:
        return SamplingParameters(
            temperature=self.run.temperature,
            max_new_tokens=self.run.max_new_tokens,
            eos_token_id=self.eos_token_id,
        )
