"""The loop without torch: the real hub, a real origin on loopback, scripted engines, every role in a thread.

trainer (here: publishes numbered weights, takes batches) ─► origin (HTTP) ─► workers, validator
    ▲                                                                             │
    └──────────────────────── hub (ASGI, in process; can be taken down) ◄─────────┘
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from kit import Patch, eventually
from kit.asgi import AppTransport, InProcess
from kit.hub import certificate
from kit.roles import publish, whole_ledger
from shoal import protocol
from shoal.client import ClientOptions, HubClient, Intervals
from shoal.client.trust import run_id
from shoal.client.weights import RefreshingDownloader
from shoal.engines.scripted import ScriptedEngine
from shoal.environments import Score, Task
from shoal.errors import ConfigError, DeadlineExceeded, EnvironmentSetupError, HubRefused
from shoal.hub import EvaluationPlan, HubConfig, HubSettings, RunSettings
from shoal.hub.http.app import App
from shoal.ledger import Account, fold
from shoal.runtime.stop import StopToken
from shoal.shardcast import Origin, Payload, run_origin
from shoal.validator import judge
from shoal.validator.case import Case, Finding, unsure
from shoal.validator.loop import run_validator
from shoal.validator.settings import ValidatorConfig, ValidatorSettings, profile_keys
from shoal.worker.loop import run_worker
from shoal.worker.settings import WorkerConfig, WorkerSettings

DEADLINE_S = 60
PACE = Intervals(poll_s=0.5, heartbeat_s=0.2, patience_s=DEADLINE_S)
EOS = 1
URL = "http://hub"
WORKER = WorkerSettings(units_per_lease=3)


class ParityEnvironment:
    """The reward is whether the completion has an odd length: both rewards are common, so groups teach something."""

    name = "parity"
    digest = "e" * 64

    def tasks(self, split: str) -> list[Task]:
        return [self.task(f"p/{index}") for index in range(50)]

    def task(self, task_id: str) -> Task:
        return Task(task_id, task_id, "")

    def score(self, task: Task, completion: str) -> Score:
        return Score(float(len(completion) % 2), {"task": float(len(completion) % 2)})


def encode(task: Task) -> list[int]:
    return [ord(character) % 90 + 3 for character in task.prompt]


class Switch(httpx2.BaseTransport):
    """The wire to the hub, in this process; behind it is another one after a restart."""

    current: AppTransport

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        return self.current.handle_request(request)


@dataclass
class Run:
    """One run: keys, hub, origin, and threads for its roles. The scripted trainer is this object itself."""

    folder: Path
    settings: RunSettings
    switch: Switch = field(default_factory=Switch)
    stop: StopToken = field(default_factory=StopToken)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=8))
    roles: list[Future[None]] = field(default_factory=list)
    profiles: tuple[str, ...] = profile_keys(ValidatorSettings())
    lease_s: float = 20
    proof: protocol.ProofParameters = field(default_factory=protocol.ProofParameters)
    evaluation: EvaluationPlan | None = None

    def __post_init__(self) -> None:
        self.root, self.hub_key, self.trainer_key, self.validator_key = (
            protocol.SigningKey.from_seed(bytes([number]) * 32) for number in range(1, 5)
        )
        self.fingerprint = protocol.fingerprint(self.root.public_key)
        self.id = run_id(self.settings.name, self.fingerprint)
        keys = {"hub": self.hub_key, "trainer": self.trainer_key, "validator": self.validator_key}
        self.certificates = {role: certificate(key, role, self.id, self.root) for role, key in keys.items()}
        self.http = InProcess(self.switch)
        self.source = self._serve_origin()
        self.origin = Origin(self.folder / "origin", self.id, self.trainer_key)
        self.hub_up()
        self.trainer = self.client(self.trainer_key)
        self.trainer.register("trainer", "trainer", self.certificates["trainer"])

    def _serve_origin(self) -> str:
        ready: Future[str] = Future()
        folder = self.folder / "origin"
        self.threads.submit(run_origin, folder, "127.0.0.1", 0, self.stop, ready.set_result)
        return ready.result(DEADLINE_S)

    def hub_config(self) -> HubConfig:
        return HubConfig(
            folder=self.folder / "hub", run_id=self.id, run=self.settings,
            settings=HubSettings(port=0, lease_s=self.lease_s), environment=ParityEnvironment(),
            encode=encode, audit_s=3,
            eos_token_ids=(EOS,), key=self.hub_key, root_key=self.root.public_key,
            certificates=tuple(self.certificates.values()), sources=(self.source,), profiles=self.profiles,
            proof=self.proof, evaluation=self.evaluation,
        )  # fmt: skip

    def hub_up(self) -> None:
        self.switch.current = AppTransport(App(self.hub_config()))

    def restart_hub(self) -> None:
        self.switch.current.close()
        self.hub_up()

    def close(self) -> None:
        self.stop.set("the test ends")
        for role in self.roles:
            role.exception(DEADLINE_S)
        self.switch.current.close()
        self.threads.shutdown()

    def client(self, key: protocol.SigningKey) -> HubClient:
        options = ClientOptions(patience_s=DEADLINE_S)
        return HubClient(URL, key, self.stop, self.fingerprint, self.http, options=options)

    # Roles

    def worker(self, name: str, engine: str = "scripted", settings: WorkerSettings = WORKER, **more: Any) -> Future:
        given = (self.folder / name, settings, engine, URL, self.fingerprint, name, self.http)
        return self._start(run_worker, WorkerConfig(*given, pace=PACE, **more))

    def validator(self, engine: str = "scripted", settings: ValidatorSettings = ValidatorSettings()) -> Future[None]:
        config = ValidatorConfig(
            folder=self.folder / "validator-0", settings=settings, environment=ParityEnvironment(), engine=engine,
            hub_url=URL, root_fingerprint=self.fingerprint, key=self.validator_key,
            certificate=self.certificates["validator"], http=self.http, pace=PACE,
        )  # fmt: skip
        return self._start(run_validator, config)

    def _start(self, role: Callable[[Any, StopToken], None], config: Any) -> Future[None]:
        future = self.threads.submit(role, config, self.stop)
        self.roles.append(future)
        return future

    # The scripted trainer

    def publish(self, version: int) -> protocol.PolicyRef:
        return publish(self.origin, self.trainer, version)

    def train(self, step: int) -> protocol.Batch:
        """Take the batch of a step as a trainer would, and publish what it "learned"."""
        waits = 0
        while (batch := self.trainer.batch(step, wait_s=1).batch) is None:
            waits += 1
            assert waits < DEADLINE_S, self.status()
        rollouts = self.trainer.rollouts(step)
        assert [group.unit for group in rollouts.groups] == [group.unit for group in batch.groups]
        self.trainer.report(protocol.StepReport(step=step, metrics={"groups": len(batch.groups)}))
        self.publish(step + 1)
        return batch

    # What can be seen from outside

    def status(self) -> protocol.RunStatus:
        return self.trainer.status()

    def nodes(self) -> Mapping[str, protocol.NodeView]:
        return {node.name: node for node in self.status().nodes}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(lease_s: float = 20, evaluation: EvaluationPlan | None = None, **settings: Any) -> Run:
        fields = {"name": "loop", "steps": 4, "groups_per_step": 4, "group_size": 4, "max_new_tokens": 6, **settings}
        runs.append(Run(tmp_path, RunSettings(**fields), lease_s=lease_s, evaluation=evaluation))
        return runs[0]

    yield make
    for run in runs:
        run.close()


def check_accounts(run: Run) -> None:
    """The ledger verifies, credits no submission twice, and gives the very accounts that the hub shows."""
    entries = whole_ledger(run.trainer)
    credits = [entry.body["submission"] for entry in entries if entry.kind == "credit"]
    assert len(credits) == len(set(credits)) > 0
    accounts = fold(entries).by_node
    for view in run.nodes().values():
        if view.role == "worker":
            account = accounts.get(view.node, Account())
            assert (account.credit, account.accepted) == (view.credit, view.accepted)


@pytest.mark.parametrize("staleness", [0, 2])
def test_several_steps_with_honest_workers(start: Callable[..., Run], staleness: int) -> None:
    run = start(max_staleness=staleness)
    run.publish(0)
    roles = [run.worker("worker-0"), run.worker("worker-1"), run.validator()]
    batches = [run.train(step) for step in range(4)]
    for role in roles:
        role.result(DEADLINE_S)  # the run is finished: everybody goes home
    for step, batch in enumerate(batches):
        assert len(batch.groups) == 4
        assert all(0 <= step - group.policy.version <= staleness for group in batch.groups)
        assert [group.unit for group in batch.groups] == sorted(group.unit for group in batch.groups)
        assert all(set(group.rewards) == {0.0, 1.0} for group in batch.groups)
    trained = [group.unit for batch in batches for group in batch.groups]
    assert len(trained) == len(set(trained))
    assert all(node.rejected == node.unsure == node.strikes == 0 for node in run.nodes().values())
    assert run.status().finished
    assert not list(run.folder.glob("*/cache/*.bin")), "nobody needs the weights of a finished run"
    check_accounts(run)


def test_link_slower_than_a_lease_is_paid_not_suspended(start: Callable[..., Run], monkeypatch: Patch) -> None:
    takes_s, fetch = 3.0, RefreshingDownloader.__call__

    def slow(self: RefreshingDownloader, policy: protocol.PolicyRef, deadline_s: float) -> Payload:
        threading.Event().wait(min(takes_s, deadline_s))
        if deadline_s < takes_s:
            raise DeadlineExceeded("the link is slow")
        return fetch(self, policy, deadline_s)

    run = start(lease_s=2.0, steps=1)
    run.publish(0)
    validator = run.validator()
    eventually(lambda: "validator-0" in run.nodes(), DEADLINE_S, run.status)
    monkeypatch.setattr(RefreshingDownloader, "__call__", slow)
    worker = run.worker("worker-0")
    run.train(0)
    for role in (worker, validator):
        role.result(DEADLINE_S)
    view = run.nodes()["worker-0"]
    assert view.accepted >= 4
    assert (view.state, view.suspensions, view.rejected) == (protocol.NodeState.ACTIVE, 0, 0)


def test_validator_that_cannot_judge_the_run_ends(start: Callable[..., Run], monkeypatch: Patch) -> None:
    run = start()
    with monkeypatch.context() as patch:
        patch.setattr(ParityEnvironment, "digest", "f" * 64)
        with pytest.raises(EnvironmentSetupError, match="is not the run's parity"):
            run.validator().result(DEADLINE_S)
    run.profiles = ("torch/cuda/bfloat16",)
    run.restart_hub()
    with pytest.raises(ConfigError, match=r"cannot judge work of torch/cuda/bfloat16.*start it with the run's recipe"):
        run.validator().result(DEADLINE_S)


def test_float32_workers_are_refused_by_a_bfloat16_run(start: Callable[..., Run]) -> None:
    run = start()
    run.profiles = profile_keys(ValidatorSettings(dtype="bfloat16", profiles=(Path("torch/cpu/bfloat16"),)))
    run.restart_hub()
    run.publish(0)
    worker = run.worker("w", "torch", WorkerSettings(dtype="float32", device="cpu"))
    with pytest.raises(ConfigError, match="no validator of the run can judge what this machine computes") as told:
        worker.result(DEADLINE_S)
    assert "--dtype" in str(told.value), "an option that `shoal join` has"
    assert not (run.folder / "w" / "cache").exists()
    stubborn = run.client(protocol.SigningKey.generate())
    stubborn.register("stubborn", "worker", None)
    with pytest.raises(HubRefused, match=r"profile\.unknown"):
        stubborn.lease(protocol.LeaseRequest(request="request-1", max_units=2, profile="torch/cpu/float32"))
    assert sum(count for state, count in run.status().units.items() if state.startswith("void")) == 0


def nobody_can_tell(case: Case) -> Finding:
    return unsure("sampling.accident", "nobody can tell")


def test_always_unsure_workers_stop_no_step_and_void_no_unit(start: Callable[..., Run], monkeypatch: Patch) -> None:
    """Before, four such audits voided a unit, and steps took what was left. Now the validator generates each unit after
    two of them; its groups are those that an honest worker would have drawn."""
    monkeypatch.setattr(judge, "AFTER_PREFILL", (nobody_can_tell,))
    run = start(steps=2, groups_per_step=2)
    run.publish(0)
    run.validator()
    for name in ("one", "two"):
        run.worker(name)
    batches = [run.train(0), run.train(1)]
    assert [len(batch.groups) for batch in batches] == [2, 2]
    status, nodes = run.status(), run.nodes()
    assert status.units["void"] == 0
    assert {(nodes[name].accepted, nodes[name].credit, nodes[name].strikes) for name in ("one", "two")} == {(0, 0, 0)}
    assert nodes["one"].unsure + nodes["two"].unsure >= 8
    assert all(nodes[name].state is protocol.NodeState.ACTIVE for name in ("one", "two"))
    validator = nodes["validator-0"]
    assert (validator.accepted, validator.credit, validator.state) == (
        status.units["trained"] + status.units["dropped"] + status.units["accepted"], 0, protocol.NodeState.ACTIVE,
    )  # fmt: skip
    kinds = {entry.kind for entry in whole_ledger(run.trainer)}
    assert kinds == {"node", "run", "policy", "batch"}, "neither credit nor sanction"


PLAN = EvaluationPlan(every=2, tasks=46)


def greedy_score(version: int) -> float:
    """What a version scores on the first held-out tasks, computed here."""
    engine, environment = ScriptedEngine(), ParityEnvironment()
    tensor = protocol.TensorView("w", "F32", (4,), memoryview(np.full(4, version, dtype="<f4")).cast("B"))
    engine.load_policy(protocol.PolicyRef(incarnation=0, version=version, digest="0" * 64), {"w": tensor})
    tasks = environment.tasks("held_out")[: PLAN.tasks]
    completions = engine.greedy([tuple(encode(task)) for task in tasks], 6, (EOS,))
    texts = ["".join(map(chr, ids.tolist())).removesuffix(chr(EOS)) for ids in completions]
    return float(np.mean([environment.score(task, text).value for task, text in zip(tasks, texts, strict=True)]))


def evaluation_of(run: Run, version: int) -> protocol.Evaluation | None:
    found = run.trainer.evaluations(version).evaluations
    return next((each for each in found if each.policy.version == version), None)


def test_versions_are_evaluated_though_hub_and_validator_died(start: Callable[..., Run]) -> None:
    """A validator was killed with a slice in hand, and the hub has started again since."""
    run = start(steps=2, evaluation=PLAN)
    run.publish(0)
    killed = run.client(run.validator_key)
    killed.register("validator-0", "validator", run.certificates["validator"])
    reply = killed.audits(protocol.AuditRequest(evaluate="now"))
    assert reply.evaluation is not None
    assert killed.open_slice(reply.evaluation).first == 0
    run.restart_hub()
    roles = [run.worker("worker-0"), run.validator()]
    eventually(lambda: (found := evaluation_of(run, 0)) and found.complete, DEADLINE_S, run.status)
    for step in range(2):
        run.train(step)
    for role in roles:
        role.result(DEADLINE_S)  # the validator goes home when the last version is measured, not before
    for version in (0, 2):
        found = evaluation_of(run, version)
        assert (found.complete, found.scored, found.tasks) == (True, PLAN.tasks, PLAN.tasks)
        assert found.mean == pytest.approx(greedy_score(version), abs=1e-12)
    assert evaluation_of(run, 1) is None, "it was not due"
    assert run.status().evaluations[-1] == evaluation_of(run, 2)
    assert len({greedy_score(version) for version in (0, 2)}) == 2, "the test can tell versions apart"
