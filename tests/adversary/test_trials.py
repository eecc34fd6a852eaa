"""Rates: how many tokens it takes to catch what differs from honest work in few of them. The tiny policy, float32.

`benchmarks/cheats.py` shows the same for every cheat, and `benchmarks/seeded_sampling.py` on a real model.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kit import Patch
from kit.attack import HONEST, Attacked, results
from kit.trial import PROFILES, Court, Judged, Trial
from shoal.adversary import CHEATS, Cheat, find_cheat
from shoal.adversary.steering import steer
from shoal.adversary.tokens import Sleeper
from shoal.protocol import Outcome

FLOAT32, BFLOAT16 = "torch/cpu/float32", "torch/cpu/bfloat16"


def test_steering_inside_the_tolerance_is_caught_by_its_sums() -> None:
    """No token of it is farther off than the tolerance; a few of them together are more than rounding explains."""
    court = Court(profile=FLOAT32)
    trial = court.tried(steer(PROFILES[FLOAT32].sampling)(), range(100), stop_when_banned=True)
    assert trial.until_banned() is not None
    assert {each.verdict.reason for each in trial.rejected} <= CHEATS["steer"].reasons
    assert all(worst_distance(each) < PROFILES[FLOAT32].sampling.distance for each in trial.rejected)


def worst_distance(judged: Judged) -> float:
    seen = [check.evidence for check in judged.verdict.checks if check.check == "sampling"]
    return max(float(evidence["max_distance"]) for evidence in seen if "max_distance" in evidence)


def test_who_claims_the_profile_that_forgives_most_is_caught_by_its_sums() -> None:
    """At 0.7 times the temperature, as bfloat16: every group may pass by itself, 1,600 tokens together do not."""
    trial = Court(profile=BFLOAT16).tried(find_cheat("loose"), range(40), stop_when_banned=True)
    assert trial.until_banned() is not None
    assert {each.verdict.reason for each in trial.rejected} <= CHEATS["loose"].reasons


@pytest.mark.slow
def test_steering_where_more_is_forgiven_is_caught_too() -> None:
    court = Court(profile=BFLOAT16)
    trial = court.tried(steer(PROFILES[BFLOAT16].sampling)(), range(100), stop_when_banned=True)
    assert trial.until_banned() is not None


def trials(name: str, count: int, units: int, group_size: int = 4) -> list[Trial]:
    """The same cheat, begun at so many different units: what so many nodes would do."""
    court = Court(group_size=group_size)
    return [court.tried(find_cheat(name), range(start, start + units)) for start in range(0, count * units, units)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens", "share"), [("int8", 2048, 0.9), ("int4", 64, 0.9), ("own-dice", 2 * 32, 0.9)]
)
def test_tokens_until_it_is_caught(name: str, tokens: int, share: float) -> None:
    """Groups of about 28 tokens; of the tiny policy's few are of ordinary entropy, hence twice 32 for other dice."""
    lasted = [trial.until_caught() for trial in trials(name, count=30, units=16)]
    soon = [each for each in lasted if each is not None and each[1] <= tokens]
    assert len(soon) >= share * len(lasted)


@pytest.mark.slow
@pytest.mark.parametrize("profile", [FLOAT32, BFLOAT16])
def test_honest_work_is_never_rejected(profile: str) -> None:
    trial = Court(profile=profile).tried(Cheat(), range(1000))
    assert {each.verdict.outcome for each in trial.judged} == {Outcome.ACCEPTED}


@pytest.mark.slow
def test_a_sleeper_in_a_real_run_that_audits_by_reputation(tmp_path: Path, monkeypatch: Patch) -> None:
    """Honest for 40 groups, so that only every second or so is looked at closely by then."""

    class Patient(Sleeper):
        def __init__(self) -> None:
            super().__init__(honest_units=40)

    monkeypatch.setitem(CHEATS, "sleeper", Patient)  # type: ignore[misc]
    with Attacked.running(tmp_path / "run", hub={"audit": "reputation"}) as run:
        run.attack(["sleeper"])
        result, honest = results(run)["sleeper"], run.nodes()[HONEST]
        node, entries = run.nodes()[run.attacks[0].name], run.ledger()
    assert result.banned
    assert result.reason == "sampling.seed"
    assert node.pending == 0
    assert (honest.rejected, honest.strikes) == (0, 0)
    assert any(entry.kind == "void" and entry.body["node"] == node.node for entry in entries)
