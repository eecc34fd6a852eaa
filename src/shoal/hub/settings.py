"""The settings of a run and of its hub, and what the hub is made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from shoal.environments import Environment, Task
from shoal.hub.state.rows import EvaluationPlan, PoolRules, Rules
from shoal.protocol import BodyLimits, ModelSize, SignedDocument, SigningKey
from shoal.protocol.lease import (
    DEFAULT_PROFILE,
    MAX_GROUP,
    MAX_NEW_TOKENS,
    ProofParameters,
    SamplingParameters,
    stop_problem,
)
from shoal.protocol.node import LINK_MBIT
from shoal.runtime.sizing import DERIVED, RunSize, settle

MIB = 1024 * 1024
MAX_SUBMISSION_BYTES, MAX_INFLATED_BYTES = 16 * MIB, 64 * MIB  # as sent, and decompressed
CONCURRENT_UPLOADS = 16  # submissions stored at the same time; others wait
SUBMISSION_BASE_BYTES = MIB  # the longest prompt, and what frames it; zstd may add a little to what it cannot shrink
ROLLOUT_BYTES = 256  # what frames one rollout
TOKEN_BYTES = 8  # a token id and its log-probability
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}$"  # of a run
PROFILES = (DEFAULT_PROFILE, "scripted/cpu/float32")


class RunSettings(BaseModel, frozen=True, extra="forbid"):
    """What is being trained. The same for everybody who takes part; it never changes during a run."""

    name: str = Field("run", pattern=NAME, description="name of the run")
    seed: int = Field(0, ge=0, lt=2**63, description="decides the order of the tasks")
    steps: int = Field(20, ge=1, le=10**9, description="training steps; a begun run may be given more, never fewer")
    groups_per_step: int = Field(16, ge=1, le=65_536, description="groups in one training step")
    group_size: int = Field(16, ge=2, le=MAX_GROUP, description="rollouts of one task, compared with each other")
    max_staleness: int = Field(1, ge=0, le=64, description="how many versions old a group may be; 0 is synchronous")
    temperature: float = Field(1.0, gt=0, le=10, description="sampling temperature")
    max_new_tokens: int = Field(16, ge=1, le=MAX_NEW_TOKENS, description="longest completion, in tokens")
    stop: tuple[str, ...] = Field((), description="texts that end a completion, such as </answer>; at most 8")

    @model_validator(mode="before")
    @classmethod
    def _whole_distributions(cls, values: Any) -> Any:
        for key in ("top_p", "top_k", "min_p"):
            if isinstance(values, Mapping) and key in values:
                raise ValueError(
                    f"{key} is not supported: truncated sampling biases the importance ratio that training relies on; "
                    "use run.temperature"
                )
        return values

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, given: Any) -> Any:
        stop = tuple(given) if isinstance(given, list) else given  # strict: behind the validator above, a list is one
        texts = isinstance(stop, tuple) and all(isinstance(each, str) for each in stop)
        if texts and (problem := stop_problem(stop)):
            raise ValueError(problem)
        return stop


class HubSettings(BaseModel, frozen=True, extra="forbid"):
    """How the hub behaves."""

    # fmt: off
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(8470, ge=0, le=65_535, description="port to listen on; 0 takes any free one")
    advertise: tuple[str, ...] = Field(
        (), description="addresses under which others reach this hub, if not its own; the first goes into the join URL")
    trusted_proxies: tuple[str, ...] = Field(
        (), description="addresses of reverse proxies whose X-Forwarded-For is believed")
    database: str = Field("", description="postgresql://… shared by several hubs; empty: SQLite in the run's folder")
    storage: str = Field("", description="s3://bucket/prefix for submissions; empty: a folder of the run's")
    storage_endpoint: str = Field("", description="address of an S3-compatible server, if it is not Amazon's")
    link_mbit: float = Field(
        LINK_MBIT, ge=0.1, le=1e6, description="Mbit/s of the slowest machine: waits for policies follow from it")
    lease_s: float | None = Field(
        None, gt=0, description=f"time a worker has for one lease, from its last sign of progress; {DERIVED} 60")
    lease_hard_s: float | None = Field(
        None, gt=0, description=f"time a worker has for one lease at the most; {DERIVED} 600")
    audit: Literal["all", "reputation"] = Field(
        "all", description="what is checked fully before it is trained on; reputation: long-proven nodes by sample")
    newcomer_share: float = Field(
        0.25, ge=0, le=1, description="most of the units, and of the tokens audited, for nodes on probation together")
    trusted_audit: float = Field(
        0.05, gt=0, le=1, description="part of the trusted workers' groups (`shoal admin add-worker`) that is checked "
        "fully; the rest earns nothing")
    refill_cap: int = Field(4, ge=0, description="lost groups refilled per step, in multiples of groups_per_step")
    drop_equal: Literal["task", "total"] = Field(
        "task", description="rewards that make a group useless if all of it have the same: the task's, or the total")
    records_gb: float = Field(
        10, ge=0, le=1e6, description="disk for records of all rollouts; beyond it texts and tokens of a sample are "
        "kept; 0: none are written")
    leases_per_node: int = Field(64, ge=1, description="leases that one node may hold at a time")
    requests_per_key_s: float = Field(50, ge=0, description="requests a second that one key may make; 0: no limit")
    requests_per_address_s: float = Field(
        200, ge=0, description="requests a second of one address; 2.5 times as many connections, a 200th as many new "
        "keys a second; 0: no limit")
    # fmt: on


@dataclass(frozen=True)
class HubConfig:
    """Work goes to nodes that generate with one of `profiles` (engine/device/number format), whose limits are built in,
    or of `measurable`, once a validator has measured it. `frame` are the tokens before and after what a tool says."""

    folder: Path
    run_id: str
    run: RunSettings
    settings: HubSettings
    environment: Environment
    encode: Callable[[Task], Sequence[int]]
    eos_token_ids: tuple[int, ...]
    key: SigningKey
    root_key: str
    certificates: tuple[SignedDocument, ...] = ()
    sources: tuple[str, ...] = ()
    last_resort: tuple[str, ...] = ()
    profiles: tuple[str, ...] = PROFILES
    measurable: tuple[str, ...] = ()
    frame: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    pools: PoolRules | None = None
    evaluation: EvaluationPlan | None = None
    model: ModelSize = field(default_factory=ModelSize)
    proof: ProofParameters = field(default_factory=ProofParameters)
    texts: Callable[[Sequence[list[int]]], list[str]] | None = None  # of token ids; None: no records are written
    credit_window_s: float = 600.0  # in which audits by reputation can still take credit back
    audit_s: float | None = None  # for one claim of audits; None: by the run's size

    @property
    def records(self) -> bool:
        """Whether records of rollouts are written."""
        return self.texts is not None and self.settings.records_gb > 0

    @property
    def rules(self) -> Rules:
        run, settings = self.run, self.settings
        model, lengths = self.model, (run.group_size, run.max_new_tokens, run.max_staleness)
        chosen = settle(settings, RunSize(model.parameters, model.payload_bytes, *lengths, settings.link_mbit))
        return Rules(
            steps=run.steps, groups_per_step=run.groups_per_step, group_size=run.group_size,
            max_staleness=run.max_staleness, max_new_tokens=run.max_new_tokens, refill_cap=settings.refill_cap,
            leases_per_node=settings.leases_per_node, lease_ms=round(chosen.lease_s * 1000),
            audit_ms=round((self.audit_s or chosen.audit_s) * 1000), audit=settings.audit,
            drop_equal=settings.drop_equal, newcomer_share=settings.newcomer_share,
            trusted_audit=settings.trusted_audit, credit_window_ms=round(self.credit_window_s * 1000),
            lease_hard_ms=round(max(chosen.lease_s, chosen.lease_hard_s) * 1000), proof_rows=self.proof.rows,
            pools=self.pools, evaluation=self.evaluation,
        )  # fmt: skip

    @property
    def submission_limits(self) -> BodyLimits:
        """What a group of this run can need, and never more than anybody may send."""
        run, proof_bytes = self.run, 2 + 2 * self.proof.topk  # a modulus and a coefficient per point, two bytes each
        proofs = -(-run.max_new_tokens // self.proof.rows) * proof_bytes
        needed = SUBMISSION_BASE_BYTES + run.group_size * (ROLLOUT_BYTES + TOKEN_BYTES * run.max_new_tokens + proofs)
        return BodyLimits(min(MAX_SUBMISSION_BYTES, needed), min(MAX_INFLATED_BYTES, needed))

    @property
    def sampling(self) -> SamplingParameters:
        return SamplingParameters(
            temperature=self.run.temperature,
            max_new_tokens=self.run.max_new_tokens,
            eos_token_ids=self.eos_token_ids,
            stop=self.run.stop,
        )
