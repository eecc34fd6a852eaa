"""Validators of several machines put limits in force together; each measures what it needs to judge by."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
from honest import POLICY, LengthEnvironment, audit_job, completions, lease, loaded, submission

from kit.tiny import build_tiny
from shoal.engines import Engine, LoadedPolicy
from shoal.engines.torch import TorchEngine
from shoal.environments import EnvironmentSettings
from shoal.environments import build as build_environment
from shoal.errors import HubRefused, ModelError, ResourceError, SignatureError
from shoal.hub.state.calibrations import CalibrationTerms, InForce, terms
from shoal.models.load import load_model
from shoal.protocol import Calibration, Lease, MeasuredKind, ModelSize, PolicyRef, SignedDocument, SigningKey
from shoal.protocol.submission import pack_logprobs
from shoal.protocol.verdict import AuditReply, Outcome, Severity
from shoal.runtime.clock import ManualClock
from shoal.sampling import SeedTolerance
from shoal.toploc import ProofTolerance
from shoal.validator import limits as limits_module
from shoal.validator import profiles
from shoal.validator.bands import Bands, limits_from
from shoal.validator.calibrate import Catch, Measurement, Plan, Subject, prompts_of, replayed, weights_of
from shoal.validator.judge import Judge
from shoal.validator.limits import Calibrator, UnpublishedLimits, profiles_of
from shoal.validator.profiles import BUILT_IN, LogprobLimits, Measured, Profile, limits_for, load_profiles, widest
from shoal.validator.verdicts import AuditJob

FLOAT32, BFLOAT16 = "torch/cpu/float32", "torch/cpu/bfloat16"
DIGEST = "c" * 64
SEEN = {"key": FLOAT32, "measured": {"model": "", "tokens": 1, "date": "", "validators": ["cpu/float32"]}}


class Hub:
    """What is in force, and who asks."""

    key = SigningKey.from_seed(b"v" * 32)
    in_force: Calibration | None = None
    is_revoked = False
    weights = 1_000_000

    def run_info(self) -> Any:
        return SimpleNamespace(run="a-run", profiles=(FLOAT32, BFLOAT16), model=ModelSize(parameters=self.weights))

    def publish_calibration(self, signed: SignedDocument) -> None:
        self.in_force = Calibration.model_validate(signed.document)

    def calibration(self, _digest: str) -> Calibration:
        if self.is_revoked or self.in_force is None:
            raise SignatureError("signed by a key that is trusted for nothing")
        return self.in_force


def calibrator(hub: Hub, dtype: Any) -> Calibrator:
    judge: Any = SimpleNamespace(profiles=load_profiles(), plain_kinds=set())
    return Calibrator(hub, None, judge, f"torch/cpu/{dtype}", ManualClock())  # type: ignore[arg-type]


def measurement(profile: Profile, blind_above: float = 1.0) -> Measurement:
    """Of a machine that misses one block in ten of a cheat under limits wider than `blind_above`."""
    share = 1.0 if profile.sampling.distance <= blind_above else 0.9
    problems = () if share == 1.0 else ("int8 weights would be caught in 90.0% of blocks",)
    catch = Catch("int8 weights", "cpu/float32", 512, 200, share, share, share)
    under = partial(measurement, blind_above=blind_above)
    return Measurement(profile, {}, {}, 1, {}, (catch,), problems, (), 0.0, {}, under)


BOTH = ("bfloat16", "float32")


def publish(by: Calibrator, hub: Hub, distance: float, formats: Sequence[str] = BOTH, blind_above: float = 1.0) -> None:
    """What a validator does after it has measured: limits of bfloat16 workers as it sees them."""
    for number_format in formats:
        key = f"torch/cpu/{number_format}"
        measured = profiles.Measured(model="", tokens=1, date="", validators=(by.machine,))
        sampling = SeedTolerance(distance=distance)
        own = (by.machine.rpartition("/")[2],)
        profile = Profile(key=key, validators=own, measured=measured, sampling=sampling)
        found = UnpublishedLimits(POLICY, {key: measurement(profile, blind_above)})
        by._publish(found, hub.in_force, DIGEST if hub.in_force else "")


def is_due(by: Calibrator) -> bool:
    """Whether it has to measure something, once it has tested what others joined."""
    job = due(by)
    if isinstance(job, partial) and job.func == by._test:
        job()
        job = due(by)
    return job is not None


def due(by: Calibrator) -> Callable[[], None] | None:
    by._known.clear()
    return by.due(AuditReply(calibration=DIGEST, wanted=("torch/cpu/bfloat16", "torch/cpu/float32")), POLICY)


def test_new_measurement_of_one_machine_is_repeated_by_the_others() -> None:
    hub = Hub()
    first, second = calibrator(hub, "float32"), calibrator(hub, "bfloat16")
    publish(first, hub, 0.1)
    assert (is_due(first), is_due(second)) == (False, True)
    publish(second, hub, 0.2, ["bfloat16"])
    assert is_due(second), "float32 workers it has not seen yet"
    publish(second, hub, 0.2, ["float32"])
    assert (is_due(first), is_due(second)) == (False, False)
    publish(first, hub, 0.3)  # the policy has moved
    assert (is_due(first), is_due(second)) == (False, True)
    publish(second, hub, 0.2)
    assert (is_due(first), is_due(second)) == (False, False)
    assert hub.in_force is not None
    limits = profiles_of(hub.in_force)[BFLOAT16]
    assert (limits.validators, limits.sampling.distance) == (("bfloat16", "float32"), 0.3)


@pytest.mark.parametrize(
    ("number_format", "machines"), [("bfloat16", {"cpu/bfloat16", "cpu/float32"}), ("float32", {"cpu/float32"})]
)
def test_limits_are_measured_for_second_looks_in_the_workers_own_format_too(number_format, machines, monkeypatch):
    seen: dict[str, Engine] = {}

    monkeypatch.setattr(limits_module, "measure", lambda _worker, validators, _plan: seen.update(validators))
    model = load_model("tiny", "bfloat16")
    engine = TorchEngine.wrap(model.model).copied(model.files, "float32")
    calibrator(Hub(), "float32")._one(LoadedPolicy(POLICY, engine, model.files), f"torch/cpu/{number_format}", None)  # type: ignore[arg-type]
    assert set(seen) == machines
    assert all(each.kind == f"torch/{machine}" for machine, each in seen.items())
    assert seen["cpu/float32"] is engine


def test_refused_kind_is_measured_again_with_a_later_policy() -> None:
    hub = Hub()
    mine = calibrator(hub, "float32")
    clock: Any = mine._clock
    mine._next_refused_s = clock.monotonic_s() + 1000
    found = UnpublishedLimits(POLICY, {FLOAT32: measurement(Profile.model_validate(SEEN))}, {BFLOAT16: "int8 passes"})
    mine._publish(found, None, "")
    later = POLICY.model_copy(update={"version": POLICY.version + 1})

    def missing(policy: PolicyRef) -> list[str]:
        return mine._missing(hub.in_force, policy, (BFLOAT16,))

    assert (missing(POLICY), missing(later)) == ([], [])
    clock.advance(1000)
    assert (missing(POLICY), missing(later)) == ([], [BFLOAT16])


@pytest.fixture(scope="module")
def drawn_by_bfloat16() -> tuple[LoadedPolicy, Plan, Profile]:
    """A random policy as a float32 validator has it, and the limits of bfloat16 workers by honest work alone."""
    model, random = load_model("tiny"), build_tiny(hidden_size=64, intermediate_size=192, num_hidden_layers=2)
    files = {**model.files, "config.json": random.config.to_json_string(use_diff=False).encode()}
    own = TorchEngine.wrap(random.bfloat16()).copied(files, "float32")
    prompts = prompts_of(files, build_environment(EnvironmentSettings(name="sort")), 12)
    plan = Plan(prompts, model.eos_token_ids, sequences=64, tokens=12)
    honest = Subject(own.copied(files, "bfloat16"), plan, print).drawn("main", 256, 12)
    bands = Bands.of(replayed(own, honest))
    seen = Measured(model="", tokens=1, date="", validators=("cpu/float32",), bands=bands.numbers())
    limits = limits_from(bands, BFLOAT16).model_copy(update={"measured": seen, "validators": BOTH})
    return LoadedPolicy(POLICY, own, files), plan, limits


@pytest.mark.parametrize(
    ("factor", "steps", "first"), [(1.0, 2, None), (4.0, 1, {1}), (1.25, 8, {2, 3, 4, 5, 6, 7, 8})]
)
def test_probe_measures_again_what_has_moved_since_the_calibration(
    factor: float, steps: int, first: set[int] | None, drawn_by_bfloat16: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The projections grow by `factor` a step. Little by little is as far in the end: it is the policy of the
    calibration that counts, not the last one that was looked at."""
    loaded, plan, limits = drawn_by_bfloat16
    mine, weights, measured = calibrator(Hub(), "float32"), weights_of(loaded.engine), list[list[str]]()
    made = Calibration(
        run="a-run", policy=POLICY, kinds={BFLOAT16: MeasuredKind(limits=limits.model_dump(mode="json"))}, made_at_ms=0
    )
    monkeypatch.setattr(mine, "_shelf", SimpleNamespace(get=lambda *_: loaded, wait_s=0.0))
    monkeypatch.setattr(mine, "_plan", lambda _loaded: plan)
    monkeypatch.setattr(mine, "_measure", lambda _policy, kinds, _made, _digest: measured.append(kinds))
    before, moved = {name: each.clone() for name, each in weights.items()}, None
    try:
        for step in range(1, steps + 1):
            for name, each in weights.items():
                if "proj" in name:  # published in bfloat16, as a worker has them
                    each.copy_((before[name] * factor**step).bfloat16())
            mine._probe(POLICY.model_copy(update={"version": POLICY.version + step}), made, DIGEST)
            if measured:
                moved = step
                break
    finally:
        for name, each in weights.items():
            each.copy_(before[name])
    assert (moved in first) if first else moved is None
    assert measured == ([[BFLOAT16]] if first else [])


def test_later_version_is_probed_once_and_probes_take_a_small_share_of_the_time(monkeypatch) -> None:
    hub = Hub()
    mine = calibrator(hub, "float32")
    clock: Any = mine._clock
    publish(mine, hub, 0.1)
    asked = AuditReply(calibration=DIGEST, wanted=(FLOAT32, BFLOAT16))
    later, latest = (POLICY.model_copy(update={"version": POLICY.version + step}) for step in (1, 2))
    mine._known.clear()
    assert mine.due(asked, POLICY) is None, "the limits were measured with it"
    job = mine.due(asked, later)
    assert isinstance(job, partial)
    assert (job.func, job.args) == (mine._probe, (later, hub.in_force, DIGEST))

    def take(*_: object) -> bool:
        clock.advance(1.0)
        return False

    monkeypatch.setattr(limits_module, "has_moved", take)
    monkeypatch.setattr(mine, "_shelf", SimpleNamespace(get=lambda *_: Mock(), wait_s=0.0))
    monkeypatch.setattr(mine, "_plan", lambda _loaded: None)
    monkeypatch.setattr(mine, "_own", lambda _loaded: SimpleNamespace(kind=FLOAT32))
    monkeypatch.setattr(mine, "_copy", lambda *_: None)
    job()  # two kinds, a second each
    assert [mine.due(asked, each) for each in (later, latest)] == [None, None]
    clock.advance(2 / limits_module.PROBE_SHARE - 2)
    assert mine.due(asked, later) is None, "it was looked at"
    again = mine.due(asked, latest)
    assert isinstance(again, partial)
    assert again.func == mine._probe


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Calibrator:
    mine = calibrator(Hub(), "float32")
    mine._kind = "torch/cuda/float32"
    formats = property(lambda _self: ("bfloat16", "float32"))
    monkeypatch.setattr(Calibrator, "_formats", formats)
    return mine


def test_order_of_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    mine = calibrator(hub, "float32")
    assert mine._missing(None, POLICY, ()) == [], "float32 has limits already"
    assert mine._missing(None, POLICY, (FLOAT32,)) == [FLOAT32]
    for elsewhere in ("torch/cuda/bfloat16", "vllm/cuda/bfloat16"):
        assert mine._missing(None, POLICY, (elsewhere,)) == [BFLOAT16], "nobody else's format is judged by it"
        publish(mine, hub, 0.1, ["bfloat16"])
        assert mine._missing(hub.in_force, POLICY, (elsewhere,)) == []
        assert terms(InForce(kinds=tuple(hub.in_force.kinds)), elsewhere, ()) == CalibrationTerms(measured=False)
        hub.in_force = None
    assert mine._missing(None, POLICY, ("torch/cuda/float32",)) == [], "built-in limits judge it"
    hub.weights = 135_000_000
    assert mine._missing(None, POLICY, (FLOAT32, BFLOAT16)) == [BFLOAT16], "a large model on a processor takes minutes"
    mine, paged, plain = on_gpu(monkeypatch), "torch/cuda/bfloat16", "torch-plain/cuda/bfloat16"
    assert mine._missing(None, POLICY, ()) == [paged]
    asked = (plain, "torch/cpu/bfloat16", "vllm/cuda/bfloat16")
    assert mine._missing(None, POLICY, asked) == [paged, plain], "each path of a GPU has limits of its own"
    mine._judge.plain_kinds.add(plain)  # a dialogue was judged
    assert mine._missing(None, POLICY, ()) == [paged, plain]


def test_a_model_without_pages_is_measured_once_as_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, paged, plain = on_gpu(monkeypatch), "torch/cuda/bfloat16", "torch-plain/cuda/bfloat16"
    hub: Any = mine._client
    found = measurement(Profile.model_validate({**SEEN, "key": plain}))
    shelf = SimpleNamespace(get=lambda *_: SimpleNamespace(files={}, engine=None), wait_s=0.0)
    monkeypatch.setattr(mine, "_shelf", shelf)
    monkeypatch.setattr(mine, "_plan", lambda _loaded: None)
    monkeypatch.setattr(mine, "_one", lambda *_: found)
    mine._measure(POLICY, mine._missing(None, POLICY, ()), None, "")
    assert set(hub.in_force.kinds) == {plain}
    assert mine._missing(hub.in_force, POLICY, ()) == []
    assert mine._missing(hub.in_force, POLICY, (paged,)) == [], "it cannot be measured here"


@pytest.mark.parametrize(("error", "is_tried_again"), [(ResourceError("no memory"), True), (ModelError("no"), False)])
def test_kind_without_memory_is_measured_later(error, is_tried_again, monkeypatch):
    mine = calibrator(Hub(), "float32")

    monkeypatch.setattr(mine, "_shelf", SimpleNamespace(get=lambda *_: None, wait_s=0.0))
    monkeypatch.setattr(mine, "_plan", lambda _loaded: None)
    monkeypatch.setattr(mine, "_one", Mock(side_effect=error))
    mine.attempt(partial(mine._measure, POLICY, [BFLOAT16], None, ""))
    mine._clock.advance(60)  # type: ignore[attr-defined]
    assert is_due(mine)
    assert (BFLOAT16 in mine._missing(None, POLICY, (BFLOAT16,))) is is_tried_again


@pytest.mark.parametrize(("blind_above", "is_refused"), [(0.2, False), (0.15, True)])
def test_joined_limits_are_tested_again_by_the_machine_that_joins_them(blind_above: float, is_refused: bool) -> None:
    hub = Hub()
    publish(calibrator(hub, "float32"), hub, 0.2, ["bfloat16"])
    publish(calibrator(hub, "bfloat16"), hub, 0.1, ["bfloat16"], blind_above)
    made = hub.in_force
    assert (BFLOAT16 in made.kinds, BFLOAT16 in made.refused) == (not is_refused, is_refused)
    if is_refused:
        assert made.refused[BFLOAT16] == "int8 weights would be caught in 90.0% of blocks"


@pytest.mark.parametrize(("blind_above", "is_refused"), [(0.2, False), (0.15, True)])
def test_limits_that_another_machine_joined_are_tested_once_by_the_first_one(blind_above, is_refused):
    hub = Hub()
    first, second = calibrator(hub, "float32"), calibrator(hub, "bfloat16")
    publish(first, hub, 0.1, blind_above=blind_above)
    assert due(first) is None, "its own limits are tested"
    publish(second, hub, 0.2)
    job = due(first)
    assert isinstance(job, partial)
    assert job.func == first._test
    job()
    assert due(first) is None
    assert set(hub.in_force.refused) == ({BFLOAT16, FLOAT32} if is_refused else set())
    assert set(hub.in_force.kinds) == (set() if is_refused else {BFLOAT16, FLOAT32})


@pytest.mark.parametrize("how", ["its signer was revoked", "its limits mean nothing here"])
def test_unusable_calibration_is_replaced_at_once(how: str) -> None:
    """Before, nobody ever measured again: every group was unsure from then on, and validators generated all units. By
    limits of another release every validator ended, and ended again when it was started."""
    hub = Hub()
    mine = calibrator(hub, "float32")
    publish(mine, hub, 0.1)
    assert hub.in_force is not None
    if how == "its signer was revoked":
        hub.is_revoked = True
    else:
        hub.in_force.kinds[FLOAT32].limits["a-later-limit"] = 1.0
    mine._known.clear()
    assert mine.limits(DIGEST) is None
    audits = AuditReply.model_construct(audits=("one",), calibration=DIGEST, wanted=("torch/cpu/float32",))  # type: ignore[arg-type]
    job = mine.due(audits, POLICY)
    assert isinstance(job, partial)
    assert (job.func, job.args) == (mine._measure, (POLICY, [FLOAT32], None, DIGEST))


def test_a_hub_that_takes_no_calibration_is_not_asked_again_for_a_minute() -> None:
    hub = Hub()
    mine = calibrator(hub, "float32")

    refused = HubRefused(404, "request.unknown", "there is no such route")
    hub.publish_calibration = Mock(side_effect=refused)  # type: ignore[method-assign]
    mine.attempt(lambda: publish(mine, hub, 0.1))
    assert not is_due(mine)
    mine._clock.advance(60)  # type: ignore[attr-defined]
    assert is_due(mine)


OURS, THEIRS = "scripted/cpu/float32", "scripted/gpu/float32"


def by_limits(measured: profiles.Profiles, known: profiles.Profiles | None = None) -> Judge:
    calibrations = {DIGEST: measured}
    return Judge(
        LengthEnvironment(), load_profiles() if known is None else known, clock=ManualClock(),
        calibrations=calibrations.get,
    )  # fmt: skip


def off_by_little(of: Lease) -> AuditJob:
    """An honest group with log-probabilities that only limits of nothing reject."""
    honest, replace = submission(of), msgspec.structs.replace
    rollouts = [replace(each, logprobs=pack_logprobs(each.logprob_values - 1e-6)) for each in honest.rollouts]
    return audit_job(of, replace(honest, rollouts=rollouts))


NOTHING = LogprobLimits(largest=1e-30)


def test_a_verdict_goes_by_the_limits_of_its_leases_calibration_and_names_it() -> None:
    handed_in = off_by_little(lease(calibration=DIGEST))
    narrow = BUILT_IN[OURS].model_copy(update={"logprobs": NOTHING})
    [verdict] = by_limits({OURS: narrow}).verdicts([handed_in], loaded())
    assert (verdict.reason, verdict.calibration, verdict.measured) == ("logprobs.mismatch", DIGEST, True)
    [verdict] = by_limits({OURS: BUILT_IN[OURS]}).verdicts([handed_in], loaded())
    assert (verdict.outcome, verdict.calibration) == (Outcome.ACCEPTED, DIGEST)
    [verdict] = by_limits({}).verdicts([audit_job(lease(calibration="d" * 64))], loaded())
    assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "machinery.profile"), "it cannot be had"


def test_unmeasured_kind_is_unsure_for_statistics_and_rejected_for_certain() -> None:
    of = lease(calibration=DIGEST)
    court = by_limits({THEIRS: Profile(key=THEIRS, logprobs=NOTHING)}, known={})
    other_seeds = submission(of, completions(of, seeds=[seed + 10**6 for seed in of.seed_numbers]))
    unsure, rejected = court.verdicts([off_by_little(of), audit_job(of, other_seeds)], loaded())
    assert (unsure.outcome, unsure.reason, unsure.severity) == (Outcome.UNSURE, "machinery.kind", None)
    assert "no trusted machine has measured scripted/cpu/float32" in unsure.message
    assert (rejected.outcome, rejected.severity) == (Outcome.REJECTED, Severity.CERTAIN)
    [passed] = by_limits({THEIRS: Profile(key=THEIRS)}, known={}).verdicts([audit_job(of)], loaded())
    assert (passed.outcome, passed.measured) == (Outcome.ACCEPTED, False)


def test_two_machines_limits_are_joined_number_by_number_to_the_wider() -> None:
    def seen(machine: str, rate: float) -> Measured:
        return Measured(model="", tokens=1, date="", validators=(machine,), bands={"exponent_rate": rate})

    one = Profile(
        key=OURS, sampling=SeedTolerance(distance=0.1, floor=1e-9), validators=("float32",),
        measured=seen("cpu/bfloat16", 0.01),
    )  # fmt: skip
    tolerance = ProofTolerance(exponents=0.3)
    other = Profile(key=OURS, proofs=tolerance, validators=("bfloat16",), measured=seen("cpu/float32", 0.03))
    joined = widest(one, other)
    assert (joined.sampling.distance, joined.proofs.exponents) == (0.1, 0.3)
    assert joined.sampling.floor == min(1e-9, SeedTolerance().floor)
    assert joined.validators == ("bfloat16", "float32")
    assert joined.measured.bands == {"exponent_rate": 0.03}, "so that neither machine sees the policy move"
    assert joined.measured.validators == ("cpu/bfloat16", "cpu/float32")
    assert widest(other, one).sampling == joined.sampling


def test_built_in_limits_are_for_validators_of_the_formats_that_they_name() -> None:
    measured = {THEIRS: Profile(key=THEIRS, validators=("bfloat16",))}
    assert limits_for(OURS, "float32", {}, BUILT_IN) == (BUILT_IN[OURS], True)
    assert limits_for(OURS, "bfloat16", {}, BUILT_IN) is None
    found = limits_for(OURS, "bfloat16", measured, BUILT_IN)
    assert (found[0].key, found[0].validators, found[1]) == (OURS, ("bfloat16",), False)


def test_a_format_without_built_in_limits_is_measured_first_and_alone_the_others_once_the_validator_is_ready() -> None:
    hub = Hub()
    mine = calibrator(hub, "float32")

    def missing(is_ready: bool) -> list[str]:
        mine._known.clear()
        reply = AuditReply(calibration=DIGEST if hub.in_force else "", wanted=(BFLOAT16, FLOAT32))
        job = mine.due(reply, POLICY, is_ready)
        return list(cast("partial[None]", job).args[1]) if job is not None else []

    assert (missing(is_ready=False), missing(is_ready=True)) == ([BFLOAT16], [BFLOAT16])
    publish(mine, hub, 0.1, ["bfloat16"])
    assert (missing(is_ready=False), missing(is_ready=True)) == ([], [FLOAT32])
