"""The [trainer] section of a recipe, one declaration per setting; the configuration of one trainer process; its rank in
a group. Imports no torch, because the CLI reads it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from shoal.runtime.extensions import check_word
from shoal.runtime.sizing import DERIVED
from shoal.trainer.guards import LARGEST, GuardSettings, Real

if TYPE_CHECKING:
    from shoal.protocol import SignedDocument, SigningKey

# The names in algorithms/registry.py, which imports torch; a test keeps them equal.
AdvantageName = Literal["group_mean", "group_mean_std", "group_mean_sample_std", "rloo", "dr_grpo", "max_rl"]
LossName = Literal[
    "two_sided_clip", "ppo_clip", "dppo", "gspo", "cispo", "decoupled", "tis", "geometric_mask", "plain",
    "cross_entropy",
]  # fmt: skip
Normalisation = Literal["tokens", "samples", "constant"]
TrackerName = Literal["tensorboard", "wandb"]

# Settings that a loss or an advantage implies unless the recipe sets them; without them it is another algorithm.
CLIP_OF_GSPO = (3e-4, 4e-4)
NORMALISATION_OF: dict[str, Normalisation] = {"gspo": "samples", "dr_grpo": "constant"}


class ObjectiveSettings(BaseModel, frozen=True, extra="forbid"):
    """The [trainer.objective] table: what the loss takes beside its name. Defaults are the authors' own."""

    normalisation: Normalisation = Field("tokens", description="what a token weighs. gspo: samples, dr_grpo: constant")
    ratio_base: Literal["behaviour", "recomputed"] = Field(
        "behaviour", description="ratios are against what the worker recorded, or the trainer's own when a step begins"
    )
    clip_high: Real | None = Field(
        None, gt=0, description="ε above 1, if it is another than clip_epsilon; cispo: its cap is 1 + this. gspo: 4e-4"
    )
    ratio_cap: Real = Field(
        2.0, gt=1, description="importance weights' cap (tis, cispo, decoupled, geometric_mask, kl)"
    )
    kl: Real = Field(0.0, ge=0, description="weight of the divergence from the policy that training began with")
    entropy: Real = Field(0.0, ge=0, description="weight of the entropy that is rewarded")


class MemorySettings(BaseModel, frozen=True, extra="forbid"):
    """The [trainer.memory] table: number types and what is computed twice to save memory."""

    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="type of weights and activations; master weights and moments are always float32"
    )
    recompute: bool = Field(False, description="compute a layer's activations again in the backward pass")
    compile: bool = Field(False, description="compile every layer (GPU, bfloat16); the first steps take minutes")


TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraSettings(BaseModel, frozen=True, extra="forbid"):
    """The [trainer.lora] table: train low-rank adapters instead of all weights."""

    rank: int = Field(16, ge=1, le=1024, description="rank of each adapter")
    alpha: Real = Field(32.0, gt=0, description="an adapter's output is scaled by alpha / rank")
    targets: tuple[str, ...] = Field(TARGETS, min_length=1, description="names of the linear layers that get one")


# Settings that may name code of the owner's: what it is called, and the words that are built in.
OWN_CODE: dict[str, tuple[str, tuple[str, ...]]] = {
    "advantage": ("advantage", get_args(AdvantageName)), "loss": ("loss", get_args(LossName)),
    "tracking": ("tracker", get_args(TrackerName)),
}  # fmt: skip


class TrainerSettings(BaseModel, frozen=True, extra="forbid"):
    """How the policy is trained, kept and published. Steps, group size, staleness and temperature are settings of
    [run], which the trainer gets from the hub."""

    learning_rate: Real = Field(1e-6, gt=0, description="AdamW's rate once warm")
    betas: tuple[Real, Real] = Field((0.9, 0.99), description="AdamW's decay of its two moments")
    weight_decay: Real = Field(0.01, ge=0, description="AdamW's decoupled weight decay, of norms and embeddings, too")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps over which the rate rises linearly")
    grad_clip: Real = Field(0.1, gt=0, description="largest norm of an update's gradient")
    minibatches: int = Field(4, ge=1, description="optimizer steps per training step")

    advantage: str = Field("group_mean", description="how rewards become advantages, or FILE.py:NAME")
    loss: str = Field("two_sided_clip", description="how advantages become a loss, or FILE.py:NAME")
    clip_epsilon: Real = Field(0.2, gt=0, lt=1, description="ε: how far a ratio may move from 1. gspo: 3e-4")
    clip_delta: Real = Field(4.0, gt=1, description="δ: ceiling of a ratio with negative advantage")
    mask_truncated: bool = Field(True, description="do not train on completions cut off by their length limit")

    objective: ObjectiveSettings = Field(default_factory=ObjectiveSettings, description="what the loss takes")
    memory: MemorySettings = Field(default_factory=MemorySettings, description="number types and recomputation")
    guards: GuardSettings = Field(default_factory=GuardSettings, description="what is watched, and what is done then")
    lora: LoraSettings | None = Field(None, description="train adapters instead of all weights")
    processes: int = Field(1, ge=1, le=1024, description="trainer processes that `shoal run` starts")
    tracking: tuple[str, ...] = Field((), description="where metrics go, too: tensorboard, wandb, or FILE.py:NAME")

    micro_batch_tokens: int = Field(16_384, ge=1, description="tokens per forward pass: memory and speed")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to train; auto: a GPU if there is one")
    threads: int = Field(1, ge=1, le=256, description="CPU threads; a resume is exact only with the same number")
    publish_dtype: Literal["float32", "bfloat16"] = Field("float32", description="type that is published and exported")

    checkpoint_every: int | None = Field(None, ge=1, description=f"steps between checkpoints; {DERIVED} 1")
    keep_checkpoints: int | None = Field(None, ge=1, description=f"newest checkpoints that are kept; {DERIVED} 2")
    keep_best: int = Field(1, ge=0, description="checkpoints with the best held-out scores, kept beside those")
    evaluate_every: int = Field(5, ge=0, description="steps between held-out evaluations by validators; 0: never")
    evaluate_tasks: int = Field(128, ge=1, description="held-out tasks per evaluation, the first ones")
    batch_deadline_s: Real | None = Field(
        None, gt=0, le=1e8, description=f"longest wait for a further accepted group, or for the hub; {DERIVED} 1800"
    )

    @field_validator("advantage", "loss", "tracking")
    @classmethod
    def _known(cls, value: str | tuple[str, ...], info: ValidationInfo) -> str | tuple[str, ...]:
        kind, known = OWN_CODE[str(info.field_name)]
        for word in (value,) if isinstance(value, str) else value:
            check_word(kind, word, known)
        return value

    @model_validator(mode="after")
    def _complete(self) -> TrainerSettings:
        """Fill in the settings that a loss or an advantage implies; given values win."""
        objective, brought = self.objective, dict[str, object]()
        if self.loss == "gspo" and "clip_epsilon" not in self.model_fields_set:
            low, brought["clip_high"] = CLIP_OF_GSPO
            object.__setattr__(self, "clip_epsilon", low)
        by_loss, by_advantage = NORMALISATION_OF.get(self.loss), NORMALISATION_OF.get(self.advantage)
        brought["normalisation"] = by_loss or by_advantage or "tokens"
        undecided = "normalisation" not in objective.model_fields_set
        if by_loss and by_advantage and by_loss != by_advantage and undecided:
            details = f'set objective.normalisation to "{by_loss}" or "{by_advantage}"'
            raise ValueError(f"loss and advantage come with two normalisations: {details}")
        brought = {name: value for name, value in brought.items() if name not in objective.model_fields_set}
        object.__setattr__(self, "objective", objective.model_copy(update=brought))
        return self

    @model_validator(mode="after")
    def _check(self) -> TrainerSettings:
        named = "clip_epsilon" if self.objective.clip_high is None else "objective.clip_high"
        highest = 1 + (self.objective.clip_high or self.clip_epsilon)
        if self.loss == "two_sided_clip" and self.clip_delta <= highest:
            raise ValueError(f"clip_delta ({self.clip_delta}) must be above 1 + {named} ({highest})")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must both be in [0, 1)")
        if self.learning_rate / (1 - self.betas[0]) > LARGEST:  # AdamW's first update divides by that
            raise ValueError(f"learning_rate ({self.learning_rate}) / (1 - betas[0]) is more than float32 holds")
        return self


# HARMLESS settings do not change the weights; ROUNDING settings change only the order of computation, so that weights
# differ in the last bits. Guards are the owner's decision. All other settings define the run; also `publish_dtype`,
# because workers generate with published weights, and `evaluate_tasks`, because scores of other tasks do not compare.
ROUNDING = ("device", "threads", "processes", "micro_batch_tokens", "memory.compile", "memory.recompute")
HARMLESS = ("tracking", "batch_deadline_s", "checkpoint_every", "keep_checkpoints", "keep_best", "evaluate_every")


def is_changeable(key: str) -> bool:
    return key in HARMLESS or key in ROUNDING or key.split(".")[0] == "guards"


@dataclass(frozen=True)
class TrainerConfig:
    """`folder` is the trainer's own (checkpoints, metrics, export); `seed` is the run's and orders minibatches."""

    folder: Path
    settings: TrainerSettings
    model: str
    origin_folder: Path
    hub_url: str
    root_fingerprint: str | None
    key: SigningKey
    certificate: SignedDocument
    seed: int = 0


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def own_rank(values: Mapping[str, str] = os.environ) -> int | None:
    """The rank of this process in its group; None if `torchrun` did not start it."""
    return int(values["RANK"]) if "RANK" in values and "WORLD_SIZE" in values else None


def report_to_agent(why: str) -> None:
    """In a rank that fails: write the reason where the agent that started it reads it."""
    if path := os.environ.get(ERROR_FILE):
        with contextlib.suppress(OSError):  # the exit code still tells
            Path(path).write_text(json.dumps({"message": why, "timestamp": 0}))
