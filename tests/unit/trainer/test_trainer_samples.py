"""From groups to samples: what is trained on, and that whatever is left out is counted. No model is needed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shoal.algorithms.registry import ADVANTAGES
from shoal.errors import ProtocolError
from shoal.hub.state.audits import has_equal_rewards
from shoal.protocol import RolloutReward, TrainingGroup, TrainingRollout, pack_logprobs, pack_tokens
from shoal.trainer.samples import Prepared, check_groups, prepare


def rollout(
    reward: float, *, tokens: int = 3, finish: str = "eos", logprobs: list[float] | None = None, given: bytes = b""
) -> TrainingRollout:
    recorded = [-0.5] * tokens if logprobs is None else logprobs
    return TrainingRollout(pack_tokens(np.arange(3, 3 + tokens)), pack_logprobs(recorded), finish, reward, given)


def group(*rollouts: TrainingRollout, unit: int = 0, version: int = 0) -> TrainingGroup:
    return TrainingGroup(unit, f"task-{unit}", version, pack_tokens(np.array([7, 8])), list(rollouts))


def of(*groups: TrainingGroup, advantage: str = "group_mean", mask_truncated: bool = False) -> Prepared:
    return prepare(groups, ADVANTAGES[advantage], mask_truncated)


def test_samples_carry_the_advantages_of_their_rollouts() -> None:
    made = of(group(rollout(1.0, tokens=2), rollout(0.0, tokens=5)), group(rollout(0.5), rollout(0.0), unit=1))
    assert [[sample.advantage for sample in samples] for samples in made.groups] == [[0.5, -0.5], [0.25, -0.25]]
    assert (made.tokens, sum(map(len, made.groups)), made.rollouts) == (13, 4, 4)
    assert (made.without_signal, made.truncated, made.unscored) == (0, 0, 0)
    empty = of(group(rollout(1.0, tokens=0), rollout(0.0)))
    assert [[sample.advantage for sample in samples] for samples in empty.groups] == [[-0.5]], "no completion"
    large = of(group(rollout(43691.4765625), rollout(43691.4765625), rollout(43691.48)), advantage="group_mean_std")
    found = [sample.advantage for sample in large.groups[0]]
    assert found == pytest.approx([-0.7069, -0.7069, 1.4138], abs=1e-3), "not rounded into advantages"


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1.0])
def test_a_group_with_a_reward_that_is_nan_or_infinite_or_with_equal_ones_is_counted(reward: float) -> None:
    made = of(group(rollout(1.0), rollout(reward)), group(rollout(1.0), rollout(0.0), unit=1))
    assert (len(made.groups), made.without_signal, made.unscored) == (1, 1, int(reward != 1.0))


def test_a_rollout_whose_log_probability_is_nan_is_unscored_and_counted() -> None:
    broken = rollout(1.0, logprobs=[-0.5, math.nan, -0.5])
    made = of(group(broken, rollout(0.0), rollout(0.0)))
    # its reward is a real outcome, and stays in the mean
    assert [sample.advantage for sample in made.groups[0]] == pytest.approx([-1 / 3, -1 / 3])
    assert (made.unscored, made.without_signal, sum(map(len, made.groups))) == (1, 0, 2)
    assert of(group(broken, rollout(0.0, logprobs=[-math.inf] * 3))).unscored == 2


def test_a_group_that_the_advantage_makes_nothing_of_does_not_dilute_the_step() -> None:
    failures = group(rollout(-0.25), rollout(-0.5))  # nobody solved it; only their lengths differ
    assert of(failures, advantage="max_rl").without_signal == 1
    assert of(failures, advantage="group_mean").without_signal == 0


@pytest.mark.parametrize(
    ("parts", "values", "dropped"),
    [
        ([{"task": 1.0, "judge.style": 0.4}, {"task": 1.0, "judge.style": 0.2}], (0.9, 0.7), False),
        ([{"task": 1.0, "length": -0.1}, {"task": 0.0, "length": -0.2}], (0.9, -0.2), False),
        ([{"task": 1.0, "length": -0.1}, {"task": 1.0, "length": -0.3}], (0.9, 0.7), True),  # never comes here
    ],
)
def test_of_what_the_hub_keeps_all_groups_with_different_rewards_are_trained_on(parts, values, dropped: bool) -> None:
    """Also where only a judge makes the difference: its rule for task rewards is not applied a second time."""
    rewards = [RolloutReward(value=value, parts=part) for value, part in zip(values, parts, strict=True)]
    assert has_equal_rewards(rewards) == dropped
    assert sum(map(len, of(group(*map(rollout, values))).groups)) == 2


def test_truncated_samples_are_masked_if_so_wanted_and_always_counted() -> None:
    cut = group(rollout(1.0), rollout(0.0, finish="length"), rollout(0.5))
    assert (sum(map(len, of(cut).groups)), of(cut).truncated) == (3, 1)
    masked = of(cut, mask_truncated=True)
    assert [sample.advantage for sample in masked.groups[0]] == [0.5, 0.0]  # the mean is still over all three
    assert (masked.truncated, masked.without_signal) == (1, 0)
    wholly = of(group(rollout(1.0, finish="length"), rollout(0.0, finish="length")), mask_truncated=True)
    assert (wholly.groups, wholly.without_signal, wholly.truncated) == ([], 1, 2)


@pytest.mark.parametrize(("version", "fits"), [(2, False), (3, True), (5, True), (6, False)])
def test_groups_that_are_too_old_or_not_yet_possible_are_refused(version: int, fits: bool) -> None:
    groups = [group(rollout(1.0), rollout(0.0), unit=9, version=version)]
    if fits:
        check_groups(groups, 5, 2, 90)
    else:
        with pytest.raises(ProtocolError, match=f"unit 9 of version {version}, outside versions 3…5"):
            check_groups(groups, 5, 2, 90)
