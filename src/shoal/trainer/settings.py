"""The [trainer] section of a recipe: one declaration per setting. Imports no torch, since the CLI reads it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# The words of algorithms/registry.py, which imports torch and is therefore not asked; a test holds them equal.
AdvantageName = Literal["group_mean", "group_mean_std"]
LossName = Literal["two_sided_clip", "ppo_clip"]


class TrainerSettings(BaseModel):
    """How the policy is trained, kept and published. What the run itself fixes (steps, group size, staleness,
    temperature) comes from the hub: no fact has two homes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float = Field(default=1e-6, gt=0, description="AdamW's rate once warm")
    betas: tuple[float, float] = Field(default=(0.9, 0.99), description="AdamW's decay of its two moments")
    weight_decay: float = Field(default=0.01, ge=0, description="AdamW's decoupled weight decay")
    warmup_steps: int = Field(default=0, ge=0, description="training steps over which the rate rises linearly")
    grad_clip: float = Field(default=0.1, gt=0, description="largest norm of an update's gradient")
    minibatches: int = Field(default=4, ge=1, description="optimizer steps per training step")

    advantage: AdvantageName = Field(default="group_mean", description="how rewards become advantages")
    loss: LossName = Field(default="two_sided_clip", description="how advantages become a loss")
    clip_epsilon: float = Field(default=0.2, gt=0, lt=1, description="ε: how far a ratio may move from 1")
    clip_delta: float = Field(default=4.0, gt=1, description="δ: ceiling of a ratio with negative advantage")
    mask_truncated: bool = Field(default=False, description="do not train on completions cut off by their length limit")

    micro_batch_tokens: int = Field(default=16_384, ge=1, description="tokens, padding included, per forward pass")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where to train; auto: a GPU if there is one"
    )
    threads: int = Field(
        default=1, ge=1, le=256, description="CPU threads; a resume is exact only with the same number"
    )
    publish_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="number type that is published"
    )
    anchor_every: int = Field(
        default=16, ge=1, le=60, description="versions between two that are offered whole; the others are deltas"
    )

    checkpoint_every: int = Field(default=1, ge=1, description="steps between checkpoints; those between are replayed")
    keep_checkpoints: int = Field(
        default=2, ge=1, description="newest checkpoints kept; an older one helps if one breaks"
    )
    evaluate_every: int = Field(default=5, ge=0, description="steps between greedy held-out evaluations; 0: never")
    evaluate_by: Literal["validators", "trainer"] = Field(
        default="validators", description="who evaluates; validators do it beside their audits, and training goes on"
    )
    evaluate_tasks: int = Field(default=128, ge=1, description="held-out tasks per evaluation, the first ones")
    batch_deadline_s: float = Field(
        default=1800, gt=0, description="longest wait for a batch, or for the hub to answer"
    )

    @model_validator(mode="after")
    def _check(self) -> TrainerSettings:
        if self.clip_delta <= 1 + self.clip_epsilon:
            raise ValueError(f"clip_delta ({self.clip_delta}) must be above 1 + clip_epsilon ({1 + self.clip_epsilon})")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must both be in [0, 1)")
        return self
