"""The run calibrates itself: the real hub, a real origin, a validator and a worker that compute with torch in bfloat16.

The model has random weights and is wider than the built-in one, whose noise in bfloat16 would hide int8 weights.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_loop_scripted import DEADLINE_S, Run

from kit import Patch, eventually
from kit.roles import publish
from kit.tiny import build_tiny
from shoal.errors import HubRefused
from shoal.hub import HubConfig, RunSettings
from shoal.models.load import load_model
from shoal.models.state import policy_views
from shoal.protocol import AuditRequest, Calibration, LeaseRequest, MeasuredKind, PolicyRef, SignedDocument, SigningKey
from shoal.protocol.signing import document_hash, sign_document
from shoal.shardcast import Content
from shoal.validator import calibrate
from shoal.validator import limits as limits_module
from shoal.validator.settings import ValidatorSettings
from shoal.worker.settings import WorkerSettings

KIND = "torch/cpu/bfloat16"
WAIT_S = 240
FLOAT32 = ValidatorSettings(device="cpu", dtype="float32")


class SelfCalibrating(Run):
    """A run that publishes in bfloat16 and takes work in it once that is measured."""

    width = 256

    def __post_init__(self) -> None:
        width, heads = self.width, self.width // 32
        self.model = build_tiny(
            hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2, num_attention_heads=heads,
            num_key_value_heads=heads,
        ).bfloat16()  # fmt: skip
        self.files = dict(load_model("tiny").files)
        self.files["config.json"] = self.model.config.to_json_string(use_diff=False).encode()
        super().__post_init__()

    def hub_config(self) -> HubConfig:
        return replace(super().hub_config(), measurable=("torch/cpu/bfloat16", "torch/cuda/bfloat16"))

    def publish(self, version: int) -> PolicyRef:
        content = Content.of(self.files, list(policy_views(self.model).values()))
        return publish(self.origin, self.trainer, version, content)

    def in_force(self) -> str:
        """The digest of the calibration that a lease would name now."""
        client = self.client(self.validator_key)
        client.register("validator-0", "validator", self.certificates["validator"])
        return client.audits(AuditRequest(evaluate="only", wait_s=0.5)).calibration


@pytest.fixture
def start(tmp_path: Path, monkeypatch: Patch) -> Iterator[Callable[..., SelfCalibrating]]:
    monkeypatch.setattr(calibrate, "DRAW_S", 1000.0)  # as many rows, however busy the machine is
    runs: list[SelfCalibrating] = []

    def make(kind: type[SelfCalibrating] = SelfCalibrating) -> SelfCalibrating:
        settings = RunSettings(name="loop", steps=3, groups_per_step=2, group_size=4, max_new_tokens=16)
        runs.append(kind(tmp_path, settings, lease_s=60))
        return runs[0]

    yield make
    for run in runs:
        run.close()


def waits(run: Run) -> str:
    return "; ".join(wait.what for wait in run.status().waits)


@pytest.mark.slow  # measuring: unit/validator/test_calibrate; when: test_calibrator; in a run: the next test
@pytest.mark.timeout(900)
def test_bfloat16_measured_first_and_again_when_weights_moved(start, monkeypatch):
    """The next version has far larger weights in its layers: honest rounding is several times as large as before."""
    monkeypatch.setattr(limits_module, "PROBE_SHARE", 1e9)
    run = start()
    run.publish(0)
    run.worker("w", "torch", WorkerSettings(units_per_lease=2, device="cpu", dtype="bfloat16"))
    eventually(lambda: "have not measured work in bfloat16 yet" in waits(run), DEADLINE_S, run.status)
    assert run.status().units.get("leased", 0) == 0
    run.validator("torch", FLOAT32)
    eventually_measured(run, lambda digest: KIND in run.trainer.calibration(digest).kinds)
    first = run.in_force()
    made = run.trainer.calibration(first)
    assert made.machines == ("cpu/float32",)
    assert made.kinds[KIND].limits["validators"] == ["bfloat16", "float32"], "second looks are in the worker's format"
    assert min(made.kinds[KIND].caught.values()) >= 0.99
    with torch.no_grad():
        for name, weight in run.model.named_parameters():
            if "proj" in name:
                weight.mul_(4.0)
    run.train(0)  # publishes them
    worker = run.nodes()["w"]
    assert worker.accepted >= 2
    assert (worker.rejected, worker.unsure) == (0, 0)
    for unit in (0, 1):
        [submission] = run.trainer.unit(unit).submissions
        assert submission.verdict.document["outcome"] == "accepted"
        assert KIND in run.trainer.calibration(submission.verdict.document["calibration"]).kinds
    eventually_measured(run, lambda digest: run.trainer.calibration(digest).policy.version == 1)
    assert run.trainer.calibration(first) == made, "verdicts that name it can still be judged by it"


def eventually_measured(run: SelfCalibrating, is_right: Callable[[str], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        digest = run.in_force()
        if digest and is_right(digest):
            return
        for role in run.roles:
            assert not role.done(), role.exception()
    raise AssertionError(run.status())


class Narrow(SelfCalibrating):
    width = 64


def test_limits_that_pass_int8_weights_refused_and_nobody_works(start, monkeypatch):
    monkeypatch.setattr(calibrate, "MOST_SEQUENCES", 64)  # in a fraction of the time
    run = start(Narrow)
    with torch.no_grad():  # the built-in policy: its noise in bfloat16 hides int8 weights
        run.model = load_model("tiny", "bfloat16").model
    run.files = dict(load_model("tiny").files)
    run.publish(0)
    run.validator("torch", FLOAT32)
    asking = run.client(SigningKey.generate())
    asking.register("asks", "worker", None)
    assert asking.lease(LeaseRequest(request="request-1", profile=KIND)).leases == ()
    eventually_measured(run, lambda digest: KIND in run.trainer.calibration(digest).refused)
    reply = asking.lease(LeaseRequest(request="request-2", profile=KIND))
    assert reply.leases == ()
    assert "int8 weights would be caught" in reply.waiting
    assert any("torch/cpu/bfloat16" in alarm for alarm in run.status().alarms)
    assert asking.refreshed_run().info.profiles == run.profiles
    assert len(asking.lease(LeaseRequest(request="request-3", profile="torch/cpu/float32")).leases) == 1


def calibration(of: Run, policy: PolicyRef, replaces: str = "", **changes: object) -> Calibration:
    values = {"run": of.id, "policy": policy, "replaces": replaces, "made_at_ms": 1, "machines": ("cpu/float32",)}
    kinds = {KIND: MeasuredKind(limits={"key": KIND})}
    return Calibration.model_validate({**values, "kinds": kinds, **changes})


def refusal(run: Run, signed: SignedDocument) -> str:
    with pytest.raises(HubRefused) as refused:
        run.trainer.publish_calibration(signed)
    return str(refused.value.code)


def test_only_validators_and_owner_put_limits_over_known_ones(start: Callable[..., SelfCalibrating]) -> None:
    run = start(Narrow)
    policy = run.publish(0)
    made = calibration(run, policy)
    for stranger in (SigningKey.generate(), run.trainer_key, run.hub_key):
        assert refusal(run, sign_document(made, stranger)) == "calibration.signature"
    changed = sign_document(made, run.validator_key)
    changed = changed.model_copy(update={"document": {**changed.document, "seconds": 1.0}})
    assert refusal(run, changed) == "calibration.signature"
    other = calibration(run, policy, run="another")
    assert refusal(run, sign_document(other, run.validator_key)) == "calibration.run"
    later = calibration(run, policy.model_copy(update={"incarnation": 1}))
    assert refusal(run, sign_document(later, run.validator_key)) == "calibration.policy"
    first = sign_document(made, run.validator_key)
    run.trainer.publish_calibration(first)
    again = calibration(run, policy, machines=())
    assert refusal(run, sign_document(again, run.validator_key)) == "calibration.outdated"
    second = sign_document(calibration(run, policy, document_hash(first), kinds={}), run.validator_key)
    run.trainer.publish_calibration(second)
    assert refusal(run, first) == "calibration.outdated", "an old one that is delivered again"
    assert run.trainer.calibration(document_hash(first)) == made


def test_lease_keeps_its_calibration_and_later_ones_name_the_newer(start: Callable[..., SelfCalibrating]) -> None:
    run = start(Narrow)
    policy = run.publish(0)
    worker = run.client(SigningKey.generate())
    worker.register("w", "worker", None)
    first = sign_document(calibration(run, policy), run.validator_key)
    run.trainer.publish_calibration(first)
    [(lease, _)] = worker.open_leases(worker.lease(LeaseRequest(request="request-1", profile=KIND)))
    second = sign_document(calibration(run, policy, document_hash(first), seconds=2.0), run.validator_key)
    run.trainer.publish_calibration(second)
    [(again, _)] = worker.open_leases(worker.lease(LeaseRequest(request="request-1", profile=KIND)))
    assert lease.calibration == again.calibration == document_hash(first)
    other = run.client(SigningKey.generate())
    other.register("other", "worker", None)
    [(newer, _)] = other.open_leases(other.lease(LeaseRequest(request="request-2", profile=KIND)))
    assert newer.calibration == document_hash(second)


def test_owners_calibration_opens_a_kind_and_an_old_one_is_refused(start: Callable[..., SelfCalibrating]) -> None:
    """The hub tells it to anyone, and the call is not signed: else any worker could have wider limits back."""
    run, kind = start(Narrow), "vllm/cuda/bfloat16"
    policy = run.publish(0)
    worker = run.client(SigningKey.generate())
    worker.register("w", "worker", None)
    with pytest.raises(HubRefused, match=r"profile\.unknown"):
        worker.lease(LeaseRequest(request="request-1", profile=kind))
    wide, tight = (
        calibration(run, policy, kinds={kind: MeasuredKind(limits={"key": kind, "n": at_ms})}, made_at_ms=at_ms)
        for at_ms in (1000, 2000)
    )
    wide, tight = sign_document(wide, run.root), sign_document(tight, run.root)
    for signed in (wide, tight, tight):  # the same again, after an answer that was lost, is harmless
        worker.publish_calibration(signed)
    assert kind in worker.refreshed_run().info.profiles
    with pytest.raises(HubRefused, match=r"calibration\.outdated"):
        worker.publish_calibration(wide)
    [(lease, _)] = worker.open_leases(worker.lease(LeaseRequest(request="request-2", profile=kind)))
    assert lease.calibration == document_hash(tight)
