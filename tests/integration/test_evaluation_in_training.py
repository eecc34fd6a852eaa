"""Evaluation while training, by a real validator between its audits: real hub, real origin, scripted engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from test_loop_scripted import DEADLINE_S, EOS, ParityEnvironment, Run, encode

from kit import eventually
from shoal.engines.scripted import ScriptedEngine
from shoal.hub import EvaluationPlan, HubConfig, RunSettings
from shoal.protocol import AuditRequest, Evaluation, PolicyRef, TensorView

PLAN = EvaluationPlan(every=2, tasks=46)


@dataclass
class EvaluatedRun(Run):
    """A run whose hub has validators evaluate."""

    def hub_config(self) -> HubConfig:
        return replace(super().hub_config(), evaluation=PLAN)

    def evaluation(self, version: int) -> Evaluation | None:
        found = self.trainer.evaluations(version).evaluations
        return next((each for each in found if each.policy.version == version), None)

    def is_measured(self, version: int) -> bool:
        found = self.evaluation(version)
        return found is not None and found.complete


@pytest.fixture
def run(tmp_path: Path) -> Iterator[EvaluatedRun]:
    run = EvaluatedRun(tmp_path, RunSettings(name="loop", steps=2, groups_per_step=4, group_size=4, max_new_tokens=6))
    yield run
    run.close()


def greedy_score(version: int) -> float:
    """What a version scores on the first held-out tasks, computed here."""
    engine, environment = ScriptedEngine(), ParityEnvironment()
    tensor = TensorView("w", "F32", (4,), memoryview(np.full(4, version, dtype="<f4")).cast("B"))
    engine.load_policy(PolicyRef(incarnation=0, version=version, digest="0" * 64), {"w": tensor})
    tasks = environment.tasks("held_out")[: PLAN.tasks]
    completions = engine.greedy([tuple(encode(task)) for task in tasks], 6, EOS)
    texts = ["".join(map(chr, ids.tolist())).removesuffix(chr(EOS)) for ids in completions]
    return float(np.mean([environment.score(task, text).value for task, text in zip(tasks, texts, strict=True)]))


def test_versions_are_measured_while_the_run_goes_on_whoever_died_before(run: EvaluatedRun) -> None:
    """A validator was killed with a slice in hand, and the hub has started again since."""
    run.publish(0)
    killed = run.client(run.validator_key)
    killed.register("validator-0", "validator", run.certificates["validator"])
    reply = killed.audits(AuditRequest(evaluate="now"))
    assert reply.evaluation is not None
    assert killed.open_slice(reply.evaluation).first == 0
    run.restart_hub()
    roles = [run.worker("worker-0"), run.validator()]
    eventually(lambda: run.is_measured(0), DEADLINE_S, run.status)
    for step in range(2):
        run.train(step)
    for role in roles:
        role.result(DEADLINE_S)  # the validator goes home when the last version is measured, not before
    for version in (0, 2):
        found = run.evaluation(version)
        assert (found.complete, found.scored, found.tasks) == (True, PLAN.tasks, PLAN.tasks)
        assert found.mean == pytest.approx(greedy_score(version), abs=1e-12)
    assert run.evaluation(1) is None, "it was not due"
    assert run.status().evaluations[-1] == run.evaluation(2)
    assert len({greedy_score(version) for version in (0, 2)}) == 2, "the test can tell versions apart"
