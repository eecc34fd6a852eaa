"""The [trainer.guards] tables: what is watched, from which number on it is trouble, and what is done then.

    off    nothing          warn   said once per episode (log, row, hub, display)
    skip   this update is not applied          slow   the learning rate × `slow_factor` from the next step on
    stop   the run ends (exit 5) before the step's version is saved or published

Each limit is far from what healthy runs show; `docs/guides/guards.md` has their numbers. Imports no torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.trainer.real import Real

Reaction = Literal["off", "warn", "skip", "slow", "stop"]
REACT = "what is done beyond the limit"


class StepGuard(BaseModel):
    """Of what is known when a step is over."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    react: Literal["off", "warn", "slow", "stop"] = Field(default="warn", description=REACT)


class UpdateGuard(BaseModel):
    """Of what is known before each update of the weights, so that it can be left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    react: Reaction = Field(default="warn", description=REACT)


class NotFinite(BaseModel):
    """The [trainer.guards.not_finite] table: it can't be off, for such an update would destroy the weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: int = Field(default=3, ge=1, description="such updates in a row that end the run, if react is skip")
    react: Literal["skip", "stop"] = Field(default="stop", description=REACT)


class GradientSpike(UpdateGuard):
    """The [trainer.guards.gradient_spike] table."""

    limit: Real = Field(
        default=20.0, gt=1, description="an update's gradient norm, as a multiple of the median of the last 16 steps"
    )


class GradientSlope(StepGuard):
    """The [trainer.guards.gradient_slope] table."""

    limit: Real = Field(
        default=10.0, gt=1, description="growth of the gradient norm over 16 steps, by their fitted exponential trend"
    )


class EntropyRise(StepGuard):
    """The [trainer.guards.entropy_rise] table."""

    limit: Real = Field(
        default=0.5, gt=0, description="share of an earlier fall of the entropy that it has risen again by"
    )


class ClipFraction(UpdateGuard):
    """The [trainer.guards.clip_fraction] table."""

    limit: Real = Field(default=0.3, gt=0, le=1, description="share of tokens whose ratio was clipped")


class EffectiveSamples(UpdateGuard):
    """The [trainer.guards.effective_samples] table."""

    limit: Real = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="least share of the tokens that counts once weighted, over 5 steps",
    )


class MismatchKl(UpdateGuard):
    """The [trainer.guards.mismatch_kl] table."""

    limit: Real = Field(
        default=1.0, gt=0, description="divergence of the trainer from the recorded log-probabilities, per token"
    )


class Divergence(UpdateGuard):
    """The [trainer.guards.divergence] table: as `mismatch_kl`, for what nothing recovers from."""

    limit: Real = Field(
        default=3.0, gt=0, description="mean distance of the trainer's from the recorded log-probabilities, in nats"
    )
    react: Reaction = Field(default="stop", description=REACT)


class Truncation(StepGuard):
    """The [trainer.guards.truncation] table."""

    limit: Real = Field(
        default=0.5, gt=0, le=1, description="share of completions cut off by their length limit, over 5 steps"
    )


class NoSignal(StepGuard):
    """The [trainer.guards.no_signal] table."""

    limit: int = Field(default=2, ge=0, le=1000, description="steps in a row without a token to learn from")


class Staleness(StepGuard):
    """The [trainer.guards.staleness] table."""

    limit: Real = Field(default=4.0, gt=0, description="mean age of a step's groups in versions, over 5 steps")


class RewardFall(StepGuard):
    """The [trainer.guards.reward_fall] table."""

    limit: Real = Field(default=0.5, gt=0, le=1, description="share of the best mean reward of 5 steps that was lost")


class RewardCollapse(StepGuard):
    """The [trainer.guards.reward_collapse] table: as `reward_fall`, for what nothing recovers from."""

    limit: Real = Field(default=0.9, gt=0, le=1, description="share of the best mean reward of 5 steps that was lost")
    react: Literal["off", "warn", "slow", "stop"] = Field(default="stop", description=REACT)


class GuardSettings(BaseModel):
    """The [trainer.guards] table. A guard is a table of its own: `[trainer.guards.entropy_rise]`, `react = "off"`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slow_factor: Real = Field(
        default=0.5, gt=0, lt=1, description="what slow multiplies the learning rate by, at most every 10 steps"
    )
    not_finite: NotFinite = Field(default_factory=NotFinite, description="a loss or gradient that is no number")
    gradient_spike: GradientSpike = Field(default_factory=GradientSpike, description="one update's gradient explodes")
    gradient_slope: GradientSlope = Field(default_factory=GradientSlope, description="gradients grow step by step")
    entropy_rise: EntropyRise = Field(default_factory=EntropyRise, description="entropy fell and rises again")
    clip_fraction: ClipFraction = Field(default_factory=ClipFraction, description="too many ratios are clipped")
    effective_samples: EffectiveSamples = Field(
        default_factory=EffectiveSamples, description="a few tokens decide for all"
    )
    mismatch_kl: MismatchKl = Field(default_factory=MismatchKl, description="trainer and workers disagree")
    divergence: Divergence = Field(default_factory=Divergence, description="the policy that wrote the batch is gone")
    truncation: Truncation = Field(default_factory=Truncation, description="completions are cut off")
    no_signal: NoSignal = Field(default_factory=NoSignal, description="steps have nothing to learn from")
    staleness: Staleness = Field(default_factory=Staleness, description="groups are old")
    reward_fall: RewardFall = Field(default_factory=RewardFall, description="the reward falls")
    reward_collapse: RewardCollapse = Field(default_factory=RewardCollapse, description="the reward is gone")
