"""Buying reward with tolerance: wherever rounding may have decided, a worker decodes both branches and keeps one.

The worker's engine rounds as coarsely as bfloat16 does: a tenth of its honest tokens lies outside the intervals that
the validator computes. The limits are measured on its honest work. The reward is 1 for half of all completions.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kit.served_hub import Caller, Hub, running_hub
from shoal import protocol
from shoal.adversary.steering import Branching
from shoal.engines import Completion, Engine, GenerationRequest
from shoal.engines.scripted import ScriptedEngine
from shoal.engines.shelf import LoadedPolicy
from shoal.environments import Score, Task
from shoal.hub.state.reputation import NEWER, Suspicion, evidence_groups
from shoal.hub.state.rows import NodeRow
from shoal.protocol.verdict import ENOUGH, Branches, GainEvidence, look_share
from shoal.sampling import uniforms
from shoal.validator.bands import Bands, limits_from
from shoal.validator.branches import BranchChecker
from shoal.validator.case import Case, read_body, replay_all
from shoal.validator.judge import Judge
from shoal.validator.profiles import Profile
from shoal.validator.verdicts import POLICY, AuditJob, LeaseTemplate, audit_job_of

KEY = protocol.SigningKey.from_seed(b"k" * 32)
EOS, TOKENS, GROUP = 1, 16, 16
KIND = "scripted/cpu/float32"
ROUNDING = 0.1
REACH = 0.02
GROUPS = 48


class Half:
    """A completion is right if most of its characters come early in the alphabet."""

    name, digest = "half", "e" * 64

    def tasks(self, _split: str) -> list[Task]:
        return []

    def task(self, task_id: str) -> Task:
        return Task(task_id, "prompt", "answer")

    def score(self, _task: Task, completion: str) -> Score:
        return Score(is_right([ord(character) for character in completion]))


def is_right(token_ids: Sequence[int]) -> float:
    return float(sum(token < 48 for token in token_ids) * 2 > len(token_ids))


class Rounding(ScriptedEngine):
    """Logits that are a little off, by noise that follows from the place and knows nothing of rewards."""

    def _step(self, sequence: Sequence[int]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        logits_V, hidden_H = super()._step(sequence)
        noise_V = uniforms(hash(tuple(sequence)) % 2**63, 0, len(logits_V)) - 0.5
        return (logits_V + ROUNDING * noise_V).astype(np.float32), hidden_H


def ready(engine: ScriptedEngine) -> ScriptedEngine:
    engine.load_policy(POLICY, {})
    return engine


def leases(first: int, count: int) -> list[protocol.Lease]:
    sampling = protocol.SamplingParameters(temperature=1.0, max_new_tokens=TOKENS, eos_token_ids=(EOS,))
    terms = LeaseTemplate("steered", GROUP, sampling, protocol.ProofParameters(), KIND, Half.digest)
    return [terms.lease(n, (10 + n % 80, 20 + n // 80, 30), f"t/{n}") for n in range(first, first + count)]


def submitted(engine: Engine, asked: Sequence[protocol.Lease]) -> list[AuditJob]:
    requests = [GenerationRequest(each.prompt_ids, each.seed_numbers, each.sampling) for each in asked]
    groups: list[list[Completion]] = engine.generate(requests, asked[0].proof)
    return [audit_job_of(lease, group, engine, KEY) for lease, group in zip(asked, groups, strict=True)]


@cache
def profile() -> Profile:
    """Limits as they are measured: on honest groups of the same kind of worker."""
    clean = ready(ScriptedEngine())
    cases = [
        Case(each.lease, read_body(each.body)[0], "", clean.vocabulary_size, clean.hidden_size, Profile(key=KIND))
        for each in submitted(ready(Rounding()), leases(4_000, 24))
    ]
    for case, replay in zip(cases, replay_all(clean, cases), strict=True):
        assert not isinstance(replay, Exception)
        case.replay = replay
    return limits_from(Bands.of(cases), KIND)


@dataclass
class Node:
    """A node as the hub keeps it, as far as branches go."""

    verdicts: list[protocol.Verdict]
    gains: GainEvidence

    @property
    def rewards(self) -> float:
        return float(np.mean([reward.value for verdict in self.verdicts for reward in verdict.rewards]))

    @property
    def first_strike(self) -> int | None:
        struck = [n for n, verdict in enumerate(self.verdicts, 1) if verdict.outcome is protocol.Outcome.REJECTED]
        return struck[0] if struck else None


def node_of(
    engine: Engine, branch_checker: BranchChecker | None, groups: int = GROUPS, looked: float | None = None
) -> Node:
    """Its groups, judged 8 at a time, until it is struck; `looked` is the share of its branches that are decoded."""
    judge = Judge(Half(), {KIND: profile()}, branch_checker=branch_checker)  # type: ignore[arg-type]
    node, truth = Node([], GainEvidence()), LoadedPolicy(POLICY, ready(ScriptedEngine()), {})
    for start in range(0, groups, 8):
        share = look_share(start, max(node.gains.value, node.gains.recent)) if looked is None else looked
        audit_jobs = [
            replace(each, audit=each.audit.model_copy(update={"gains": node.gains, "look_share": share}))
            for each in submitted(engine, leases(start, 8))
        ]
        node.verdicts += judge.verdicts(audit_jobs, truth)
        if node.first_strike is not None:
            break
        for verdict in node.verdicts[start:]:
            node.gains = node.gains.after(verdict.branches.differences)
    return node


def steering(tries: int = 4) -> Engine:
    def value(completion: Completion) -> float:
        return is_right([token for token in completion.token_ids.tolist() if token != EOS])

    return Branching(ready(Rounding()), lambda _prompt: value, REACH, tries)


def looking(seed: int = 0) -> BranchChecker:
    return BranchChecker(time_share=1e9, rng=random.Random(seed))


@pytest.fixture(scope="module")
def steered() -> Node:
    return node_of(steering(), looking())


@pytest.fixture(scope="module")
def honest() -> Node:
    return node_of(ready(Rounding()), looking(1), looked=0.5)


def test_steered_groups_pass_unchecked_and_honest_groups_pass_the_check_of_branches(honest: Node) -> None:
    """And its rewards are much better than honest ones of the same leases: this is what is sold."""
    unseen = node_of(steering(), None, groups=16)
    assert {(verdict.outcome, verdict.reason) for verdict in unseen.verdicts} == {(protocol.Outcome.ACCEPTED, "")}
    assert unseen.rewards > honest.rewards + 0.2
    assert {verdict.outcome for verdict in honest.verdicts} == {protocol.Outcome.ACCEPTED}
    assert honest.gains.differing > 30
    assert honest.gains.value < 100


def test_steering_is_struck_when_branches_are_checked(steered: Node) -> None:
    strike = steered.verdicts[-1] if steered.first_strike is None else steered.verdicts[steered.first_strike - 1]
    assert (strike.outcome, strike.reason) == (protocol.Outcome.REJECTED, "sampling.steered")
    assert strike.severity is protocol.Severity.STATISTICAL
    differences = [value for verdict in steered.verdicts for value in verdict.branches.differences]
    assert sum(value > 0 for value in differences) > 0.8 * len(differences)


def test_evidence_of_fresh_keys_is_added_up(steered: Node) -> None:
    """A key for every group: none has evidence enough of its own, all together do, and then nobody new is trusted."""
    suspicion, alone = Suspicion(), list[float]()
    honest = {"outcome": protocol.Outcome.ACCEPTED, "reason": "", "severity": None}  # of keys that nobody knows yet
    told = [verdict.model_copy(update=honest) for verdict in steered.verdicts]
    for start in range(len(told)):
        row = NodeRow(f"{start:032x}", f"{start:064x}", "worker", f"n{start}", 0)
        assert list(evidence_groups(row)) == [NEWER]
        for verdict in told[start : start + 1]:
            row = replace(row, gains=row.gains.after(verdict.branches.differences))
            suspicion = suspicion.after(verdict)
        alone.append(row.gains.value)
    assert suspicion.distrusted
    assert max(alone) < ENOUGH


@contextmanager
def wide_hub(folder: Path) -> Iterator[Hub]:
    run = {"groups_per_step": 128, "group_size": GROUP, "max_staleness": 1}
    with running_hub(folder / "run", run=run, hub={"newcomer_share": 1.0}) as hub:
        yield hub


def handed_over(worker: Caller, validator: Caller, seen: Iterator[Branches]) -> protocol.Audit:
    """One group at a real hub: the validator has seen of its branches what the judge above saw of a steered one."""
    worker.deliver()
    [audit] = validator.audits()
    shown = next(seen)
    if audit.gains.after(shown.differences).suffices:
        struck = {
            "outcome": protocol.Outcome.REJECTED,
            "reason": "sampling.steered",
            "severity": protocol.Severity.STATISTICAL,
        }
        validator.judge(audit, branches=shown, rewards=(), generated_tokens=0, **struck)
    else:
        rewards = tuple(protocol.RolloutReward(value=float(number % 2)) for number in range(GROUP))
        validator.judge(audit, branches=shown, rewards=rewards)
    return audit


def test_hub_suspends_a_steering_node_by_its_evidence(steered: Node, tmp_path: Path) -> None:
    seen = cycle(verdict.branches for verdict in steered.verdicts)
    with wide_hub(tmp_path) as hub:
        worker, validator = hub.worker("steered"), hub.trusted("validator-0", "validator")
        shares = list[float]()
        while node_view(hub).state is protocol.NodeState.ACTIVE:
            shares.append(handed_over(worker, validator, seen).look_share)
        view = node_view(hub)
    assert (shares[0], shares[-1]) == (0.04, 1.0), "more is looked at as the evidence grows"
    assert view.state is protocol.NodeState.SUSPENDED
    assert view.reason.startswith("sampling.steered")
    assert (view.rejected, view.strikes) == (1, 1)


def node_view(hub: Hub) -> protocol.NodeView:
    return next(node for node in hub.status().nodes if node.name == "steered")


def test_hub_distrusts_newcomers_when_keys_change_every_four_groups(steered: Node, tmp_path: Path) -> None:
    seen = cycle(verdict.branches for verdict in steered.verdicts)
    with wide_hub(tmp_path) as hub:
        validator, audit, keys = hub.trusted("validator-0", "validator"), None, 0
        while audit is None or not audit.distrusted:
            worker, keys = hub.worker(f"key-{keys}"), keys + 1
            for _ in range(4):
                audit = handed_over(worker, validator, seen)
                assert not audit.gains.suffices
            assert keys < 40
        alarms = hub.status().alarms
    assert audit.distrusted == "newcomers"
    assert [alarm for alarm in alarms if "chosen for their reward" in alarm]
