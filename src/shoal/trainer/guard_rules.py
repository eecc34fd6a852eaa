"""What each guard measures, as a function of the rows before and the one at hand, and what it says to people.

A measure is None where there is too little to judge by. None of them looks at `held_out`, which may come at another
moment after a resume, or at the clock: the same rows give the same answer. Held-out scores are judged once, when the
run is over (`lost_score`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, float]
Measure = Callable[[Sequence[Row], Row], float | None]

SMOOTH = 5  # rows that are averaged, so that one odd batch is no trend
LEAST = 2
SLOPE_ROWS = 16
HISTORY = 2000  # rows that are looked back upon: what was before that is another chapter
LEAST_FALL = 0.2  # of the entropy's peak: below that it has not fallen, it wavers
LEAST_LOSS = 0.05  # of reward: what is smaller is noise, whatever its share
NOISE = 4.0  # times the mean difference of two rows: small batches reach and lose an extreme by chance
CHANCE = 3.0  # standard errors of a held-out score
MOST_LOG = 50.0  # beyond e^50 a growth needs no digits


@dataclass(frozen=True)
class Rule:
    """`of_step` judges a row, `of_update` one update before it is made; beyond the limit means above it, or `below`.

    `seen` is formatted with `value`. For example "the gradient norm grew 12-fold over 16 steps".
    """

    seen: str
    meaning: str
    advice: str
    of_step: Measure
    of_update: Measure | None = None
    below: bool = False
    rows: int = SMOOTH  # that trouble may be older than the row which shows it
    of_beginning: bool = (
        False  # of the policy that a step begins with: what is refused by it is refused for all updates
    )

    def beyond(self, value: float | None, limit: float) -> bool:
        return value is not None and (value < limit if self.below else value > limit)


# ── measures ─────────────────────────────────────────────────────────────────────────────────────────────────────


def values_of(rows: Sequence[Row], *names: str) -> list[float]:
    """The numbers of this name, or of the next one where a row lacks it; rows without any are left out."""
    found = (next((row[name] for name in names if name in row), None) for row in rows)
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]


def smoothed(values: Sequence[float]) -> list[float]:
    """Means over the last `SMOOTH` values each; the first ones over at least `LEAST`.

    >>> smoothed([1.0, 2.0, 3.0, 4.0])
    [1.5, 2.0, 2.5]
    """
    ends = range(LEAST, len(values) + 1)
    return [_mean(values[max(0, end - SMOOTH) : end]) for end in ends]


def latest(name: str) -> Measure:
    """The number itself."""
    return lambda _rows, row: next(iter(values_of([row], name)), None)


def recent(name: str) -> Measure:
    """Its mean over the last rows."""
    return lambda rows, row: next(iter(smoothed(values_of([*rows[-SMOOTH + 1 :], row], name))[-1:]), None)


def without_tokens(rows: Sequence[Row], row: Row) -> float | None:
    """How many steps in a row, this one included, had no token to learn from.

    >>> without_tokens([{"tokens": 0.0}, {"tokens": 9.0}, {"tokens": 0.0}], {"tokens": 0.0})
    2.0
    """
    newest_first = reversed(values_of([*rows[-HISTORY:], row], "tokens"))
    return float(sum(1 for _ in itertools.takewhile(lambda tokens: tokens == 0, newest_first)))


def spike(name: str) -> Measure:
    """How many times the median of the last rows it is."""

    def measure(rows: Sequence[Row], row: Row) -> float | None:
        before, now = values_of(rows[-SLOPE_ROWS:], "grad_norm"), values_of([row], name)
        if len(before) < SMOOTH or not now:
            return None
        median = statistics.median(before)
        return now[0] / median if median > 0 else None

    return measure


def growth(rows: Sequence[Row], row: Row) -> float | None:
    """The factor that the gradient norm grew by over `SLOPE_ROWS` rows: the exponential that fits best, end to end."""
    norms = [value for value in values_of([*rows[-SLOPE_ROWS + 1 :], row], "grad_norm") if value > 0]
    if len(norms) < SLOPE_ROWS:
        return None
    middle = (SLOPE_ROWS - 1) / 2
    offsets = [index - middle for index in range(SLOPE_ROWS)]
    slope = sum(x * math.log(y) for x, y in zip(offsets, norms, strict=True)) / sum(x * x for x in offsets)
    return math.exp(min(MOST_LOG, slope * (SLOPE_ROWS - 1)))


def rise_again(rows: Sequence[Row], row: Row) -> float | None:
    """Which share of its fall the entropy has regained since its lowest point; None unless it has fallen.

    From 1.0 down to 0.2 and up to 0.6: half of the fall.
    """
    entropies = values_of([*rows[-HISTORY:], row], "entropy")
    curve = smoothed(entropies)
    if not curve:
        return None
    lowest = min(range(len(curve)), key=lambda index: curve[index])
    peak = max(curve[: lowest + 1])
    fall = peak - curve[lowest]
    least = max(LEAST_FALL * abs(peak), NOISE * _waver(entropies))
    if not least < fall < math.inf:
        return None
    rise = curve[-1] - curve[lowest]
    return rise / fall if rise > NOISE * _waver(entropies) else 0.0


def lost(rows: Sequence[Row], row: Row) -> float | None:
    """Which share of the best mean reward is gone, counted from 0, or from the lowest reward if that is below."""
    if not values_of([row], "sampled_reward", "reward_mean"):
        return None
    looked_at = [*rows[-HISTORY:], row]
    rewards = values_of(looked_at, "sampled_reward", "reward_mean")
    curve = smoothed(rewards)
    if not curve or not max(curve) - curve[-1] > max(LEAST_LOSS, NOISE * _waver(rewards)):
        return 0.0
    scale = max(curve) - min(0.0, *rewards)
    if min(rewards) < 0:  # the lowest one seen is no natural zero: the spread of single rewards is a scale, too
        scale = max(scale, _mean(values_of(looked_at, "reward_std") or [0.0]))
    share = (max(curve) - curve[-1]) / scale
    return share if math.isfinite(share) else None


def lost_score(scores: Mapping[int, float], version: int, tasks: int) -> float | None:
    """Which share of the best held-out score a version has lost; 0 where the number of tasks leaves it to chance.

    None without a score of that version, or if scores are negative: then there is no zero to count from.

    >>> lost_score({0: 0.5, 2: 0.8, 4: 0.04}, version=4, tasks=128)
    0.95
    """
    if version not in scores or min(scores.values()) < 0:
        return None
    best, last = max(scores.values()), scores[version]
    spread = math.sqrt(best * (1 - best)) if best <= 1 else best / 2  # no more than that, for scores in [0, 1]
    if not best - last > max(LEAST_LOSS, CHANCE * spread / math.sqrt(max(1, tasks))):
        return 0.0
    return (best - last) / best


def _waver(values: Sequence[float]) -> float:
    """How far one value is from the next on average: noise, but hardly any trend."""
    return _mean([abs(after - before) for before, after in itertools.pairwise(values)] or [0.0])


def _mean(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)  # divided first: the sum of huge ones would be infinite


# ── the list ─────────────────────────────────────────────────────────────────────────────────────────────────────

LOWER_RATE = "lower trainer.learning_rate"

RULES: dict[str, Rule] = {
    "gradient_spike": Rule(
        seen="an update's gradient norm is {value:.3g} times the median of the last steps",
        meaning="one batch pulls far harder than those before it: often a broken reward or a few extreme ratios",
        advice=f'look at the rollouts of the step; lower trainer.grad_clip, set react = "skip", or {LOWER_RATE}',
        of_step=spike("grad_norm_max"),
        of_update=spike("grad_norm"),
        rows=1,
    ),
    "gradient_slope": Rule(
        seen=f"the gradient norm grew {{value:.3g}}-fold over {SLOPE_ROWS} steps",
        meaning="a steady growth precedes collapse by tens of steps",
        advice=f"{LOWER_RATE} or trainer.grad_clip",
        of_step=growth,
        rows=SLOPE_ROWS,
    ),
    "entropy_rise": Rule(
        seen="the entropy rose again by {value:.0%} of its fall",
        meaning="runs that collapsed showed this first, about 150 steps before: the policy becomes random, not curious",
        advice=f"{LOWER_RATE}, lower run.max_staleness, and look at what it writes",
        of_step=rise_again,
        rows=SLOPE_ROWS,
    ),
    "clip_fraction": Rule(
        seen="{value:.0%} of the tokens were clipped",
        meaning="the policy moves further in a step than its data can tell, so most of the batch teaches nothing",
        advice=f"{LOWER_RATE}, trainer.minibatches or run.max_staleness",
        of_step=latest("clip_fraction"),
        of_update=latest("clip_fraction"),
        rows=1,
    ),
    "effective_samples": Rule(
        seen="the weighted tokens are worth {value:.1%} of their number",
        meaning="a few tokens with huge ratios decide the update: the data is too old, or workers compute otherwise",
        advice=f"lower run.max_staleness or trainer.minibatches, {LOWER_RATE}; if mismatch is high, see mismatch_kl",
        of_step=recent("effective_samples"),  # one token can decide a step, and a clipped loss does not mind
        of_update=latest("effective_samples"),
        below=True,
    ),
    "mismatch_kl": Rule(
        seen="trainer and recorded log-probabilities diverge by {value:.3g} nats per token",
        meaning="workers and trainer disagree on the same tokens, or the policy has jumped since they were drawn",
        advice=f"compare number types (trainer.publish_dtype, worker.dtype), lower run.max_staleness, {LOWER_RATE}",
        of_step=latest("mismatch_kl"),
        of_update=latest("mismatch_kl"),
        rows=1,
        of_beginning=True,
    ),
    "divergence": Rule(
        seen="the trainer's log-probabilities are {value:.3g} nats per token away from the recorded ones",
        meaning="the policy that wrote these tokens is gone: an update has destroyed it, or workers run another model",
        advice=f"begin again from an earlier version, {LOWER_RATE} or trainer.grad_clip",
        of_step=latest("mismatch"),
        of_update=latest("mismatch"),
        rows=SLOPE_ROWS,
        of_beginning=True,
    ),
    "truncation": Rule(
        seen="{value:.0%} of the completions were cut off by their length limit",
        meaning="cut-off answers get no reward for what they would have said: the policy learns from the limit",
        advice="raise run.max_new_tokens, or reward shorter answers; trainer.mask_truncated: if they are learnt from",
        of_step=recent("truncated_fraction"),
    ),
    "no_signal": Rule(
        seen="{value:.0f} steps in a row had nothing to learn from",
        meaning="in every group all rewards were equal, or all completions were cut off: the weights stand still",
        advice="look at the rewards in the rollouts; take easier or harder tasks (shoal filter, environment.pools), "
        "larger groups (run.group_size), or raise run.max_new_tokens",
        of_step=without_tokens,
    ),
    "staleness": Rule(
        seen="groups are {value:.2g} versions old on average",
        meaning="above four, even corrected losses learn less from each group",
        advice="lower run.max_staleness, or give the trainer larger steps (run.groups_per_step)",
        of_step=recent("staleness_mean"),
    ),
    "reward_fall": Rule(
        seen="{value:.0%} of the best mean reward was lost",
        meaning="the policy unlearns, unless the tasks became harder meanwhile",
        advice=f"look at the rollouts, {LOWER_RATE}; the best checkpoint by held-out score is kept",
        of_step=lost,
    ),
    "reward_collapse": Rule(
        seen="{value:.0%} of the best mean reward was lost",
        meaning="hardly any rollout earns anything: there is nothing left to learn from",
        advice=f"begin again from an earlier version and {LOWER_RATE}",
        of_step=lost,
    ),
}
