"""Guards on rows: silent on a healthy run, loud on each shape of collapse, the same after a resume."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import TrainingDiverged
from shoal.trainer.folder import Retention
from shoal.trainer.guards import LOOKBACK, RULES, GuardMonitor, GuardSettings

DATA = Path(__file__).parents[2] / "data" / "metrics"
DEFAULT = GuardSettings()
Rows = list[dict[str, float]]


def rows_of(name: str) -> Rows:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def with_rule(name: str, action: str, **more: Any) -> GuardSettings:
    return GuardSettings.model_validate({name: {"action": action, **more}})


def alarms(rows: Rows, given: GuardSettings = DEFAULT) -> dict[str, list[int]]:
    """Guard → the steps at which it fires, as in a run: each row judged by those before it."""
    found: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        watch = GuardMonitor(given, rows[:index])
        watch.begin(int(row["step"]))
        for alarm in watch.judge(row).alarms:
            found.setdefault(alarm.name, []).append(int(row["step"]))
    return found


def steady(count: int) -> Rows:
    """A run in which nothing happens, with every number that a guard looks at."""
    return [
        {
            "step": step, "grad_norm": 1.0 + 0.2 * (step % 3), "grad_norm_max": 2.0, "entropy": 1.0,
            "clip_fraction": 0.02, "effective_samples": 0.9, "mismatch_kl": 0.01, "mismatch": 0.1,
            "truncated_fraction": 0.1, "staleness_mean": 1.0, "sampled_reward": 0.5, "reward_std": 0.4,
        }
        for step in range(count)
    ]  # fmt: skip


def bent(name: str, shape: Callable[[int], float], count: int = 60, begin: int = 30) -> Rows:
    """A steady run whose number `name` follows `shape` (of the steps since then) from step `begin` on."""
    rows = steady(count)
    for row in rows[begin:]:
        row[name] = shape(int(row["step"]) - begin)
    return rows


def test_runs_that_learn_are_silent_and_one_that_a_high_rate_destroyed_is_stopped_within_seven_steps() -> None:
    """Rows of real runs of recipes/tiny.toml; in one (rate 3e-3) no rollout earned anything after two steps."""
    assert alarms(rows_of("healthy")) == alarms(rows_of("healthy_async")) == alarms(steady(60)) == {}
    found = alarms(rows_of("collapsed"))
    assert [found[name][0] for name in ("clip_fraction", "divergence")] == [1, 1]
    assert found["reward_collapse"][0] <= 7


COLLAPSES = [
    ("gradient_spike", "grad_norm_max", lambda after: 50.0 if after == 0 else 2.0, 0),
    ("gradient_slope", "grad_norm", lambda after: 1.25**after, 18),
    ("clip_fraction", "clip_fraction", lambda after: min(1.0, 0.05 * after), 7),
    ("effective_samples", "effective_samples", lambda after: 0.9 * 0.7**after, 13),
    ("mismatch_kl", "mismatch_kl", lambda after: 0.01 * 2**after, 8),
    ("divergence", "mismatch", lambda after: 0.1 * 2**after, 6),
    ("truncation", "truncated_fraction", lambda after: min(1.0, 0.1 + 0.1 * after), 8),
    ("no_signal", "tokens", lambda after: 0.0, 3),
    ("reward_collapse", "sampled_reward", lambda after: 0.5 * 0.5**after, 9),
    ("reward_collapse", "sampled_reward", lambda after: max(-1.0, 0.5 - 0.2 * after), 12),
]


@pytest.mark.parametrize(("guard", "number", "shape", "within"), COLLAPSES)
def test_each_shape_of_collapse_is_noticed(guard: str, number: str, shape: Callable[[int], float], within: int) -> None:
    found = alarms(bent(number, shape))
    assert set(found) == {guard}, "each collapse has one cause"
    assert 30 <= found[guard][0] <= 30 + within


def falling_then(rising: float) -> Rows:
    """Entropy from 1.0 down to 0.2 over 80 steps, then up by `rising` a step."""
    rows = steady(140)
    for step, row in enumerate(rows):
        row["entropy"] = 1.0 - 0.01 * min(step, 80) + rising * max(0, step - 80)
    return rows


def test_entropy_that_falls_and_rises_again_is_noticed() -> None:
    assert alarms(falling_then(rising=0.0)) == {}
    found = alarms(falling_then(rising=0.01))
    assert set(found) == {"entropy_rise"}
    assert 80 < found["entropy_rise"][0] <= 80 + 40 + 5, "half of the fall of 0.8, at 0.01 a step"
    immense = bent("grad_norm", lambda after: 10.0 ** (40 * after - 300), count=46)
    assert alarms(immense)["gradient_slope"][-1] == 45, "a gradient beyond all measure is measured"


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (lambda after: 1.0 + 0.1 * math.sin(after), 60), (lambda after: 1.0 + 0.05 * after, 60),
        (lambda after: 0.9 + 0.01 * abs(after - 10), 51),  # a tenth is no fall
        # 0.6 of the fall, but less than four times what one row differs from the next
        (lambda after: (2.0, 1.0, 1.6)[after // 20] + 0.1 * (-1) ** after, 60),
    ],
)  # fmt: skip
def test_entropy_that_wavers_or_only_rises_is_no_rise_again(shape: Callable[[int], float], count: int) -> None:
    assert alarms(bent("entropy", shape, count, 0 if shape(0) > 1.5 else 30)) == {}


@pytest.mark.parametrize("rate", [0.03, 0.3])
def test_chance_alone_is_no_collapse(rate: float) -> None:
    """Sixteen rollouts a step and nothing learnt: rewards and entropy reach extremes, and leave them again."""
    random = np.random.default_rng(0)
    rows = steady(200)
    for row in rows:
        row["sampled_reward"] = random.binomial(16, rate) / 16
        row["entropy"] = float(random.normal(1.0, 0.15))
    assert alarms(rows) == {}


def test_a_guard_that_is_off_says_nothing_and_limits_are_the_recipe_s() -> None:
    rows = bent("clip_fraction", lambda after: 0.4)
    assert alarms(rows, with_rule("clip_fraction", "off")) == {}
    assert alarms(rows, with_rule("clip_fraction", "warn", limit=0.5)) == {}
    assert alarms(rows, with_rule("clip_fraction", "warn", limit=0.35)) == {"clip_fraction": list(range(30, 60))}


def replayed(rows: Rows, given: GuardSettings, resumed_at: int | None = None) -> tuple[Rows, list[tuple[int, str]]]:
    """The rows as a run would write them, and what people hear of; at a resume the watch is a new one."""
    watch, written, news = GuardMonitor(given), [], []
    for row in rows:
        if row["step"] == resumed_at:
            watch = GuardMonitor(given, list(written))
        watch.begin(int(row["step"]))
        judged = watch.judge(row)
        written.append({**row, **judged.numbers})
        watch.rows.append(written[-1])
        news += [(int(row["step"]), code) for code in judged.news()]
    return written, news


def test_each_episode_is_said_once() -> None:
    """Two episodes: the alarm is in every row, the sentence is said when it begins."""
    rows = bent("clip_fraction", lambda after: 0.9 if after < 8 or 20 <= after < 25 else 0.02)
    written, news = replayed(rows, DEFAULT)
    assert news == [(30, "guard.clip_fraction"), (50, "guard.clip_fraction")]
    assert [row["step"] for row in written if "alarm_clip_fraction" in row] == [*range(30, 38), *range(50, 55)]
    assert written[30]["alarm_clip_fraction"] == 0.9


@pytest.mark.parametrize("action", ["warn", "skip", "stop"])
def test_an_update_may_be_refused_before_it_is_made_and_end_the_run(action: str) -> None:
    watch = GuardMonitor(with_rule("gradient_spike", action, limit=10), steady(20))
    watch.begin(20)
    norms = (5.0, 50.0, 5.0)
    seen = {"loss": 0.1, "clip_fraction": 1.0, "mismatch_kl": 99.0}
    refused = [watch.veto({**seen, "grad_norm": norm}) for norm in norms]
    assert [bool(each) for each in refused] == [False, action != "warn", action == "stop"], "skip judges each by itself"
    assert action == "warn" or "times the median" in (refused[1] or "")
    judged = watch.judge({"step": 20})  # nothing was updated, so nothing else was measured
    assert judged.numbers == ({} if action == "warn" else {"alarm_gradient_spike": pytest.approx(50 / 1.2)})
    if action == "stop":
        with pytest.raises(TrainingDiverged, match=r"gradient norm.*last good checkpoint.*version 20 in checkpoints"):
            judged.refuse(Path("checkpoints"), [0, 19, 20])
    else:
        judged.refuse(Path("checkpoints"), [20])  # ends nothing


def test_a_trend_goes_back_to_a_checkpoint_from_before_it_began() -> None:
    rows = bent("sampled_reward", lambda after: 0.0)
    step = alarms(rows)["reward_collapse"][0]
    watch = GuardMonitor(DEFAULT, rows[:step])
    watch.begin(step)
    judged = watch.judge(rows[step])
    kept = Retention(2, lookback=LOOKBACK).kept([(version, 0) for version in range(step + 1)], {})
    with pytest.raises(TrainingDiverged, match="from before it began, is version 20 in") as caught:
        judged.refuse(Path("checkpoints"), [version for version, _ in kept])
    assert caught.value.exit_code == 5
    with pytest.raises(TrainingDiverged, match=r"no checkpoint.*there are versions \[34, 35\]"):
        judged.refuse(Path("checkpoints"), [34, 35])
    with pytest.raises(TrainingDiverged, match="no checkpoint"):
        judged.refuse(Path("checkpoints"), [])


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 7))
def test_one_from_before_the_lookback_is_always_kept_and_few_are(newest: int, keep: int, every: int) -> None:
    rule, kept = Retention(keep, lookback=LOOKBACK), {(0, 0)}
    for version in range(every, newest + 1, every):
        kept = rule.kept([*kept, (version, 0)], {})
        assert len(kept) <= keep + 3
        assert any(place <= max(0, version - LOOKBACK) for place, _ in kept)
    calm = {"reward_collapse": {"action": "warn"}, "divergence": {"action": "warn"}}
    reacting = ({"clip_fraction": {"action": "stop"}}, {"gradient_slope": {"action": "stop"}})
    found = [GuardSettings.model_validate(given).lookback for given in ({}, calm, *({**calm, **r} for r in reacting))]
    assert [bool(each) for each in found] == [True, False, False, True], "for a guard that stops on a trend"


def test_nan_update_stops_or_is_skipped_a_few_times_in_a_row() -> None:
    broken, whole = {"loss": math.nan, "grad_norm": math.inf}, {"loss": 0.1, "grad_norm": 1.0}
    watch = GuardMonitor(DEFAULT)
    watch.begin(0)
    assert "NaN or infinite" in (watch.veto(broken) or "")
    with pytest.raises(TrainingDiverged, match="step 0"):
        watch.judge({}).refuse(Path("c"), [0])
    watch = GuardMonitor(with_rule("not_finite", "skip", limit=3))
    watch.begin(0)
    assert [bool(watch.veto(numbers)) for numbers in (broken, whole, broken)] == [True, False, True]
    judged = watch.judge({"step": 0})
    judged.refuse(Path("c"), [0])
    assert judged.numbers["not_finite_updates"] == 1
    watch.rows.append({"step": 0, **judged.numbers})
    watch.begin(1)
    assert watch.veto(broken)
    assert watch.veto(broken), "the third in a row, counted over two steps"
    assert watch.veto(whole), "and nothing is trained after it"
    with pytest.raises(TrainingDiverged, match="3 in a row"):
        watch.judge({}).refuse(Path("c"), [1])


NAMES = sorted({*steady(1)[0], "reward_mean", "not_finite_updates", *(f"alarm_{name}" for name in RULES)} - {"step"})
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, 1.0, -1.0, 1e308, -1e308, 5e-324])
ANY_ROWS = st.lists(st.dictionaries(st.sampled_from(NAMES), NUMBERS), min_size=1, max_size=40)
REACTIONS = st.sampled_from(["off", "warn", "stop"])
JUDGED = sorted(set(RULES) - {"not_finite"})


@settings(max_examples=60, deadline=None)
@given(ANY_ROWS, st.dictionaries(st.sampled_from(JUDGED), REACTIONS), st.integers(0, 39))
def test_guards_never_fail_and_always_decide_the_same(rows: Rows, actions: dict[str, str], cut: int) -> None:
    given = GuardSettings.model_validate({name: {"action": action} for name, action in actions.items()})
    numbered: Rows = [{**row, "step": step} for step, row in enumerate(rows)]
    written, news = replayed(numbered, given)
    assert (written, news) == replayed(numbered, given, resumed_at=cut)
    assert json.dumps(written, allow_nan=False)
    watch = GuardMonitor(given, written)
    watch.begin(len(written))
    watch.veto(rows[-1])
