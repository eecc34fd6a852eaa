"""Batches: which groups a training step consists of, written down before the step starts; and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from pydantic import Field, FiniteFloat, StringConstraints

from shoal.protocol.policy import PolicyRef
from shoal.protocol.signing import Message, Milliseconds
from shoal.protocol.submission import Completed, PackedTokens, unpack_tokens
from shoal.protocol.verdict import Depth

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

AlarmCode = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_.]{1,64}$")]
AlarmText = Annotated[str, StringConstraints(max_length=2000)]


class BatchGroup(Message):
    """`audit`: whether the group was checked fully, or lightly: then its node is believed that it computed it."""

    unit: int
    submission: str
    node: str
    policy: PolicyRef
    rewards: tuple[float, ...]
    audit: Depth = "full"


class Batch(Message):
    """The groups of step `step` in order of unit; it never changes. `groups`: those whose rewards differ;
    `dropped_groups`: how many were dropped for equal rewards since the previous batch. `sampled_reward`: the mean over
    the rollouts of both, None without rollouts."""

    step: int
    groups: tuple[BatchGroup, ...]
    dropped_groups: int = 0
    sampled_reward: FiniteFloat | None = None
    written_at_ms: Milliseconds


class BatchRequest(Message):
    wait_s: float = Field(default=0, ge=0, le=60)


class BatchReply(Message):
    """Without a batch: what it waits for, and the number of groups that are `accepted` so far."""

    batch: Batch | None = None
    waiting: str = ""
    accepted: int = Field(default=0, ge=0)


class TrainingRollout(Completed, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A verified rollout with the validator's reward and its parts, ready to train on; `given` as in `Rollout`."""

    reward: float
    given: PackedTokens = b""
    parts: dict[str, float] = msgspec.field(default_factory=dict)


class TrainingGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of a batch; `columns` are those of its task's row, for an advantage of the owner's."""

    unit: int
    task: str
    version: int
    prompt: bytes
    rollouts: Annotated[list[TrainingRollout], msgspec.Meta(min_length=1)]
    columns: dict[str, Any] = {}

    @property
    def prompt_ids(self) -> npt.NDArray[np.int64]:
        return unpack_tokens(self.prompt)


class TrainingBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bulk form of a `Batch`, hub to trainer."""

    step: int
    groups: list[TrainingGroup]


class StepReport(Message):
    """What the trainer measured in a step, e.g. reward_mean, held_out, loss, grad_norm. `alarms` are what the run's
    owner should look at, code → sentence, e.g. guard.entropy_rise."""

    step: int = Field(ge=0, le=2**31)
    metrics: dict[str, FiniteFloat] = Field(max_length=128)
    alarms: dict[AlarmCode, AlarmText] = Field(default={}, max_length=32)
