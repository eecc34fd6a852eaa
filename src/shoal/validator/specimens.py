"""Specimens: leases and submissions of no run, to try checks on and to measure with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.engines import Completion, Engine
from shoal.engines.groups import submission_of
from shoal.errors import ConfigError
from shoal.protocol import (
    Audit,
    Lease,
    PolicyRef,
    ProofParameters,
    SamplingParameters,
    SigningKey,
    pack,
    sign_document,
    submission_digest,
)
from shoal.validator.verdicts import Docket

POLICY = PolicyRef(incarnation=0, version=0, digest="0" * 64)


@dataclass(frozen=True)
class Machine:
    """What computes: a device and a number format."""

    device: str = "cpu"
    dtype: str = "float32"

    @classmethod
    def parse(cls, text: str) -> Machine:
        device, separator, dtype = text.partition("/")
        if not separator or not device or not dtype:
            raise ConfigError(f"{text!r} is no machine: write device/format, for example cuda/bfloat16")
        return cls(device, dtype)

    def __str__(self) -> str:
        return f"{self.device}/{self.dtype}"


@dataclass(frozen=True)
class Terms:
    """What all leases of a series have in common."""

    label: str
    group_size: int
    sampling: SamplingParameters
    proof: ProofParameters
    profile: str
    environment_digest: str = "0" * 64

    def lease(self, number: int, prompt_ids: Sequence[int], task: str = "none") -> Lease:
        return Lease(
            run="specimen", lease=str(number), node="0" * 16, unit=number, attempt=0, policy=POLICY, task=task,
            prompt_ids=tuple(prompt_ids), seeds=seeds_of(self.label, number, self.group_size), sampling=self.sampling,
            proof=self.proof, profile=self.profile, environment_digest=self.environment_digest, issued_at_ms=0,
            deadline_ms=0,
        )  # fmt: skip


def seeds_of(label: str, number: int, count: int) -> tuple[str, ...]:
    """The dice of one lease; the same every time, so that a measurement can be repeated."""
    names = (f"shoal/specimen/v1/{label}/{number}/{rollout}" for rollout in range(count))
    return tuple(hashlib.sha256(name.encode()).hexdigest()[:16] for name in names)


def docket_of(lease: Lease, group: Sequence[Completion], engine: Engine, key: SigningKey) -> Docket:
    """The same as a validator gets it on the table."""
    body, signed = pack(submission_of(lease, group, engine.name)), sign_document(lease, key)
    name, size = submission_digest(body), len(body)
    return Docket(Audit(submission=name, size_bytes=size, lease=signed, received_at_ms=0, deadline_ms=0), lease, body)
