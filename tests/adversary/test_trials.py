"""Rates: how many tokens it takes to catch what differs from honest work in few of them, and what it gains until then.

`benchmarks/cheats.py` shows the same for every cheat, and `benchmarks/seeded_sampling.py` on a real model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit import Patch
from kit.attack import HONEST, Attacked, results
from kit.trial import PROFILES, Harness, Trial
from shoal.adversary import CHEATS, Cheat, EngineWrapper, find_cheat
from shoal.adversary.steering import steer
from shoal.adversary.tokens import TRIES, Sleeper
from shoal.engines import Engine, GenerationRequest
from shoal.engines.protocol import Groups
from shoal.protocol import Lease, Outcome, PolicyManifest, PolicyRef, ProofParameters, Severity, Submission
from shoal.shardcast import Payload

FLOAT32, BFLOAT16 = "torch/cpu/float32", "torch/cpu/bfloat16"


def test_steering_inside_the_tolerance_is_caught_by_sums() -> None:
    """No token of it is farther off than the tolerance; a few of them together are more than rounding explains."""
    harness = Harness(profile=FLOAT32)
    trial = harness.tried(steer(PROFILES[FLOAT32].sampling)(), range(100), stop_when_banned=True)
    assert trial.until_banned() is not None
    assert {each.verdict.reason for each in trial.rejected} <= CHEATS["steer"].reasons
    for each in trial.rejected:
        seen = [check.evidence for check in each.verdict.checks if check.check == "sampling"]
        distances = [float(evidence["max_distance"]) for evidence in seen if "max_distance" in evidence]
        assert max(distances) < PROFILES[FLOAT32].sampling.distance


def test_claim_of_the_widest_profile_is_caught_by_sums() -> None:
    """At 0.7 times the temperature, as bfloat16: every group may pass by itself, 1,600 tokens together do not."""
    trial = Harness(profile=BFLOAT16).tried(find_cheat("loose"), range(40), stop_when_banned=True)
    assert trial.until_banned() is not None
    assert {each.verdict.reason for each in trial.rejected} <= CHEATS["loose"].reasons


@pytest.mark.parametrize(("cheat", "reason"), [
    ("cut-short", "termination.early"), ("pad", "termination.past_eos"), ("run-on", "termination.past_eos"),
    ("early-end", "sampling.seed"),
])  # fmt: skip
def test_ending_before_a_stop_string_or_running_past_it_is_caught_for_certain(cheat: str, reason: str) -> None:
    """Digits that most answers have; honest groups end there and are accepted."""
    harness = Harness(group_size=8, max_new_tokens=24, temperature=3.0, stop=("3", "47", "8<"))
    honest, caught = harness.tried(Cheat(), range(3)), harness.tried(find_cheat(cheat), range(3))
    ended = [rollout for each in honest.judged for rollout in each.submission.rollouts if rollout.finish == "eos"]
    assert any(rollout.token_ids[-1] not in harness.sampling.eos_token_ids for rollout in ended)
    assert not honest.rejected
    assert {(each.verdict.reason, each.verdict.severity) for each in caught.judged} == {(reason, Severity.CERTAIN)}


@pytest.mark.slow
def test_steering_under_a_wide_profile_is_caught() -> None:
    harness = Harness(profile=BFLOAT16)
    trial = harness.tried(steer(PROFILES[BFLOAT16].sampling)(), range(100), stop_when_banned=True)
    assert trial.until_banned() is not None


def trials(name: str, count: int, units: int, group_size: int = 4) -> list[Trial]:
    """The same cheat, begun at so many different units: what so many nodes would do."""
    harness = Harness(group_size=group_size)
    return [harness.tried(find_cheat(name), range(start, start + units)) for start in range(0, count * units, units)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens", "share"), [("int8", 2048, 0.9), ("int4", 64, 0.9), ("own-seeds", 2 * 32, 0.9)]
)
def test_most_cheats_are_caught_within_their_tokens(name: str, tokens: int, share: float) -> None:
    """Groups of about 28 tokens; of the tiny policy's few are of ordinary entropy, hence twice 32 for other seeds."""
    lasted = [trial.until_caught() for trial in trials(name, count=30, units=16)]
    soon = [each for each in lasted if each is not None and each[1] <= tokens]
    assert len(soon) >= share * len(lasted)


@pytest.mark.slow
@pytest.mark.parametrize("profile", [FLOAT32, BFLOAT16])
def test_honest_work_is_never_rejected(profile: str) -> None:
    trial = Harness(profile=profile).tried(Cheat(), range(1000))
    assert {each.verdict.outcome for each in trial.judged} == {Outcome.ACCEPTED}


@pytest.mark.slow
def test_sleeper_in_a_real_run_with_audits_by_reputation_is_banned(tmp_path: Path, monkeypatch: Patch) -> None:
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


# ── why anyone would cheat: what each gains while nobody looks ────────────────────────────────────────────────────────

GROUPS, GROUP_SIZE, LENGTH = 12, 8, 10


class Counting(EngineWrapper):
    """Counts the completions that the engine behind a cheat is asked for."""

    completions = 0

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        self.completions += sum(len(request.seeds) for request in requests)
        return super().generate(requests, proof)


class Counted(Harness):
    def build(self, files: Mapping[str, bytes]) -> Engine:
        self.engine_behind = Counting(super().build(files))
        return self.engine_behind

    def drawn(self, cheat: Cheat) -> list[tuple[Lease, Submission]]:
        return list(self.groups(cheat, [self.lease(unit) for unit in range(GROUPS)]))

    def mean_reward(self, cheat: Cheat) -> float:
        rewards = [self.rewards(lease.unit, submission) for lease, submission in self.drawn(cheat)]
        return sum(map(sum, rewards)) / (GROUPS * GROUP_SIZE)

    def tokens(self, cheat: Cheat) -> int:
        return sum(len(rollout.token_ids) for _, submission in self.drawn(cheat) for rollout in submission.rollouts)


@pytest.fixture
def harness() -> Counted:
    return Counted(group_size=GROUP_SIZE, max_new_tokens=LENGTH)


def test_best_of_answer_and_run_on_pay_while_nobody_checks(harness: Counted) -> None:
    honest = harness.mean_reward(Cheat())
    assert harness.mean_reward(find_cheat("best-of")) > honest + 0.03
    assert harness.engine_behind.completions == GROUPS * GROUP_SIZE * TRIES
    assert harness.mean_reward(find_cheat("answer")) == 1.0
    assert harness.tokens(find_cheat("run-on")) == GROUPS * GROUP_SIZE * LENGTH
    assert harness.tokens(Cheat()) < 0.8 * GROUPS * GROUP_SIZE * LENGTH


def test_stale_downloads_once_and_generates_by_what_it_has() -> None:
    fetched: list[PolicyRef] = []

    def fetch(ref: PolicyRef, _deadline_s: float) -> Payload:
        fetched.append(ref)
        fields: dict[str, Any] = {"run": "r", "entries": (), "chunk_size_bytes": 1, "chunks": (), "size_bytes": 0}
        return Payload(PolicyManifest(policy=ref, created_at_ms=0, **fields), {}, [])

    first = PolicyRef(incarnation=0, version=0, digest="a" * 64)
    later = PolicyRef(incarnation=0, version=7, digest="b" * 64)
    pretend = find_cheat("stale").fetch(fetch)
    assert pretend(first, 1.0).manifest.policy == first
    payload = pretend(later, 1.0)
    assert payload.manifest.policy == later
    assert fetched == [first]
    assert replace(payload, manifest=pretend(first, 1.0).manifest) == pretend(first, 1.0)
