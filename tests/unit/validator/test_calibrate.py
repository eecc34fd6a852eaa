"""A profile: a file that loads to what was written, mistakes told with the remedy; measured on honest work, it passes
honest work and catches what it says it catches."""

import dataclasses
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from honest import LengthEnvironment, audit_job, lease, loaded
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import Patch
from shoal.engines import Engine, build
from shoal.engines.torch import TorchEngine
from shoal.environments import EnvironmentSettings
from shoal.environments import build as build_environment
from shoal.errors import ConfigError
from shoal.models.load import load_model
from shoal.models.state import policy_views
from shoal.protocol import Outcome, Submission
from shoal.runtime.config import parse_config
from shoal.sampling import SeedTolerance
from shoal.toploc import ProofTolerance
from shoal.validator import bands as bands_module
from shoal.validator import calibrate as calibrate_module
from shoal.validator import profiles
from shoal.validator.bands import Bands, limits_from
from shoal.validator.calibrate import Catch, Measurement, Plan, Subject, measure, prompts_of, replayed, weights_of
from shoal.validator.canary import SelfTest, Trial
from shoal.validator.case import Case, Replay, failed, unsure
from shoal.validator.judge import Judge
from shoal.validator.limits import measured_kind
from shoal.validator.profiles import (
    BUILT_IN,
    ChannelLimits,
    LogprobLimits,
    Measured,
    NoiseLimits,
    Profile,
    load_profiles,
)
from shoal.validator.settings import ValidatorSettings, profile_keys
from shoal.validator.verdicts import Machine

MEASURED = Measured(model="tiny", tokens=1000, date="2026-11-15", validators=("cpu/float32",), bands={"distance": 1e-5})


def test_wide_limits_must_be_named_and_a_bfloat16_validator_takes_no_float32_work() -> None:
    """In bfloat16 more may pass, and such a validator cannot tell float32 rounding from cheating (144 of 144)."""
    assert not any("bfloat16" in key for key in BUILT_IN)
    found = load_profiles([Path("torch/cuda/bfloat16")])
    assert found == {**BUILT_IN, "torch/cuda/bfloat16": profiles.ON_REQUEST["torch/cuda/bfloat16"]}
    assert profile_keys(ValidatorSettings(dtype="bfloat16")) == ()
    named = (Path("torch/cuda/bfloat16"),)
    assert profile_keys(ValidatorSettings(dtype="bfloat16", profiles=named)) == ("torch/cuda/bfloat16",)
    assert profile_keys(ValidatorSettings(profiles=named)) == tuple(sorted((*BUILT_IN, "torch/cuda/bfloat16")))


def test_a_validator_that_rounds_more_coarsely_than_the_profile_allows_cannot_tell() -> None:
    key = "scripted/cpu/float32"
    narrow = BUILT_IN[key].model_copy(update={"validators": ("float64",)})
    [verdict] = Judge(LengthEnvironment(), {key: narrow}).verdicts([audit_job(lease())], loaded())
    assert (verdict.outcome, verdict.reason) == (Outcome.UNSURE, "machinery.profile")
    assert "scripted/cpu/float32" in verdict.message


@pytest.mark.parametrize("value", [profiles.LEAST, profiles.MOST])
@pytest.mark.parametrize("rate", [profiles.LEAST, profiles.MOST_BY_NAT])
@pytest.mark.parametrize("unit", [profiles.LEAST, profiles.MOST_BY_NAT])
def test_the_widest_and_narrowest_limits_that_can_be_signed_break_no_validator(value, rate, unit):
    of, channel = lease(), ChannelLimits(rate=rate, curve=rate, unit=unit, shared=value)
    noise = NoiseLimits(**dict.fromkeys(NoiseLimits.model_fields, channel))
    logprobs = LogprobLimits(spread=value, lean=value, drift=value)
    profile = Profile(key=of.profile, noise=noise, logprobs=logprobs)
    [verdict] = Judge(LengthEnvironment(), {of.profile: profile}).verdicts([audit_job(of)], loaded())
    assert verdict.model_dump_json()


small = st.floats(1e-12, 1.0)


@settings(deadline=None)
@given(small, small, small, st.integers(0, 10), st.booleans())
def test_a_profile_survives_its_file(a: float, b: float, c: float, n: int, measured: bool) -> None:
    written = Profile(
        key="torch/cuda/bfloat16", sampling=SeedTolerance(distance=a, floor=b),
        proofs=ProofTolerance(exponents=c, boundary=n), logprobs=LogprobLimits(spread=b, largest=c),
        measured=MEASURED if measured else None,
    )  # fmt: skip
    assert parse_config(profiles.to_toml(written), Profile, "it") == written


def test_a_file_is_added_and_takes_the_place_of_a_built_in_one(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.toml", tmp_path / "other.toml"
    mine.write_text('key = "torch/cpu/float32"\n[logprobs]\nlargest = 0.5\n[measured]\nmodel = "m"\ntokens = 5\n'
                    'date = 2026-11-15\nvalidators = ["cpu/float32"]\nbands = {distance = 1e-3}\n')  # fmt: skip
    other.write_text('key = "vllm/cuda/float16"\n')
    found = load_profiles([mine, other])
    assert found["torch/cpu/float32"].logprobs.largest == 0.5
    assert found["torch/cpu/float32"].sampling == BUILT_IN["torch/cpu/float32"].sampling
    assert found["torch/cpu/float32"].measured == Measured(
        model="m", tokens=5, date="2026-11-15", validators=("cpu/float32",), bands={"distance": 1e-3}
    )
    assert set(found) == {*BUILT_IN, "vllm/cuda/float16"}
    assert profile_keys(ValidatorSettings(profiles=(mine, other))) == tuple(sorted(found))
    assert load_profiles() == BUILT_IN


@pytest.mark.parametrize(("text", "message"), [
    ("", r"p\.toml: \[key\] is missing"),
    ("key = 'torch'", r"p\.toml: \[key\] = \"torch\": string should match pattern"),
    ("key = 'a/b/c'\nkay = 1", r"p\.toml: there is no section \[kay\]; did you mean \[key\]"),
    ("key = 'a/b/c'\n[sampling]\ndistanze = 1.0", r"\[sampling\] has no key 'distanze'; did you mean 'distance'"),
    ("key = 'a/b/c'\n[proofs]\nwidth = 1.0", r"\[proofs\] has no key 'width'; it may have: exponents"),
    ("key = 'a/b/c'\n[sampling]\ndistance = -1.0", "distance must be a number of at least 0, not -1.0"),
    ("key = 'a/b/c'\n[sampling]\nfloor = nan", "floor must be a number of at least 0, not nan"),
    ("key = 'a/b/c'\n[proofs]\nsigns = inf", "signs must be a number of at least 0, not inf"),
    ("key = 'a/b/c'\n[logprobs]\nspread = inf", "spread"), ("key = 'a/b/c'\n[noise.bias]\nrate = 1.0", "unit"),
    ("key = 'a/b/c'\n[noise.outside]\nrate = nan\nunit = 1.0", "rate"),
    ("key = 'a/b/c'\n[noise.outside]\nrate = 1e300\nunit = 1.0", "rate"),
    ("key = 'a/b/c'\n[noise.outside]\nrate = 1.0\nunit = 1e-300", "unit"),
    ("key = 'a/b/c'\n[noise.outside]\nrate = 1.0\nunit = 1.0\nshared = 1e200", "shared"),
    ("key = 'a/b/c'\nvalidators = []", "validators"),
    ("key = 'a/b/c'\n[sampling]\ndistance = 'far'", r"sampling.*distance"),
    ("key = 'a/b/c'\n[logprobs]\nmean = 0", "mean"),
    ("key = 'a/b/c'\n[measured]\nmodel = 'm'", r"\[measured\] tokens is missing"), ("key = ", "not valid TOML"),
])  # fmt: skip
def test_mistakes_are_told_with_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_profiles([path])


def test_a_file_that_cannot_be_read_or_comes_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the profile .*absent\.toml: No such file"):
        load_profiles([tmp_path / "absent.toml"])
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="byte 0 is not UTF-8"):
        load_profiles([tmp_path / "bytes.toml"])
    (tmp_path / "huge.toml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(ConfigError, match="that is no profile"):
        load_profiles([tmp_path / "huge.toml"])
    for name in ("a.toml", "b.toml"):
        (tmp_path / name).write_text("key = 'a/b/c'")
    with pytest.raises(ConfigError, match=r"two files .* are for a/b/c, one of them is .*b\.toml"):
        load_profiles([tmp_path / "a.toml", tmp_path / "b.toml"])


CPU = Machine("cpu", "float32")
LOOSE = {
    "sampling": SeedTolerance(distance=1.0, floor=0.0),
    "noise": NoiseLimits(**{name: ChannelLimits(rate=1e9, unit=1e9) for name in NoiseLimits.model_fields}),
}


def engines(worker: str, validator: str, tokens: int = 12, **plan: Any) -> tuple[Engine, dict[str, Engine], Plan]:
    """The tiny policy as a worker computes it, and as a validator does; how it is measured."""
    weights = "float32" if (worker, validator) == ("float32", "float32") else "bfloat16"
    loaded = load_model("tiny", weights)
    engine = build("torch", loaded.files, "cpu", validator)
    engine.load_policy(None, policy_views(loaded.model))
    assert isinstance(engine, TorchEngine)
    prompts = prompts_of(loaded.files, build_environment(EnvironmentSettings(name="sort")), tokens)
    found = Plan(prompts, loaded.eos_token_ids, tokens=tokens, model="tiny", date="2026-11-15", **plan)
    return engine.copied(loaded.files, worker), {f"cpu/{validator}": engine}, found


@pytest.fixture(scope="module")
def measured() -> Measurement:
    return measure(*engines("float32", "float32"), lambda _text: None, (64, 1024))


def test_float32_limits_pass_honest_groups_of_every_batch_size_and_kernel(measured: Measurement) -> None:
    assert measured.failures == {"cpu/float32": []}
    assert (measured.problems, measured.untested) == ((), ())
    assert measured.groups > 150
    assert measured.bands["cpu/float32"].tokens > 2000
    assert [name for name, _ in measured.variants] == ["batch 1", "batch 8", "batch 64", "main", "eager", "math"]
    # Limits that are joined with those of another machine may be too wide to catch anything.
    loose = measured.under(measured.profile.model_copy(update=LOOSE))
    assert loose.profile.sampling.distance == 1.0
    named = [problem.partition(" would")[0] for problem in loose.problems]
    assert "other seeds" in named
    assert measured.under(measured.profile).catches == measured.catches


def test_in_bfloat16_another_kernel_widens_the_limits_and_limits_that_hide_int8_weights_are_refused() -> None:
    """Written-out attention differs more from a validator's than its own kernel does; the tiny model's noise hides
    int8 weights, and a cooler temperature."""
    measurement = measure(*engines("bfloat16", "bfloat16"))
    of = {name: bands for (name, _), bands in measurement.variants.items()}
    assert of["eager"].exponent_rate > 1.5 * of["main"].exponent_rate
    raised, own = (each.limits.noise for each in (measurement.bands["cpu/bfloat16"], of["main"]))
    assert raised.mantissa.rate > 1.5 * own.mantissa.rate
    named = [problem.partition(" would")[0] for problem in measurement.problems]
    assert named[:2] == ["int8 weights", "temperature 0.9 T"]  # a busy machine draws less, and other seeds may hide too
    assert "of blocks of 512 tokens by cpu/bfloat16, and must be in 99%" in measurement.problems[0]


def test_another_kernel_raises_means_and_leaves_the_spread_to_the_main_series() -> None:
    """On an H200 series of 4,096 tokens estimated the spread so wide that int8 weights passed with SmolLM2-135M, and
    every run refused bfloat16 workers."""
    worker, validators, plan = engines("bfloat16", "float32", 12)
    ((_, validator),) = validators.items()
    subject = Subject(worker, plan, lambda _text: None)
    main, other = (replayed(validator, subject.drawn(label, rows, 12)) for label, rows in (("main", 64), ("other", 16)))
    for case in other:  # four times as far off in the mantissas
        seen = case.replayed.comparisons
        worse = replace(seen, mant_err_sum=4 * seen.mant_err_sum)
        case.replay = replace(case.replayed, comparisons=worse)
    alone, both = Bands.of(main), Bands.of(main, [other])
    ours, theirs = both.limits.noise.mantissa, alone.limits.noise.mantissa
    assert ours.rate > 1.5 * theirs.rate
    assert ours.unit / ours.rate == pytest.approx(theirs.unit / theirs.rate)
    assert ours.shared == theirs.shared


def test_a_machine_too_slow_for_a_whole_block_of_cheaper_weights_tries_what_it_has(monkeypatch: Patch) -> None:
    monkeypatch.setattr(calibrate_module, "DRAW_S", 0.0)
    measurement = measure(*engines("bfloat16", "float32", 4))
    (int8,) = [catch for catch in measurement.catches if catch.cheat == calibrate_module.INT8_NAME]
    assert (int8.tokens, int8.blocks > 0) == (4 * 32, True)


def test_limits_that_honest_groups_do_not_keep_are_refused(monkeypatch: Patch) -> None:
    narrow = ProofTolerance(exponents=0.0, boundary=0, mantissa_median=0.0, mantissa_mean=0.0)
    changes = {"proofs": narrow, "logprobs": LogprobLimits(largest=1e-12)}
    too_narrow = BUILT_IN["torch/cpu/float32"].model_copy(update=changes)
    monkeypatch.setattr(calibrate_module, "limits_from", lambda _bands, _key: too_narrow)
    measurement = measure(*engines("float32", "float32", 10, sequences=32))
    assert set(measurement.failures["cpu/float32"]) == {"logprobs.mismatch"}
    assert "honest groups would be rejected by cpu/float32 (logprobs.mismatch)" in measurement.problems[-1]


def test_a_worker_is_measured_without_changing_the_validators_weights() -> None:
    worker, validators, plan = engines("float32", "float32", sequences=32)
    before = {name: each.clone() for name, each in weights_of(validators["cpu/float32"]).items()}
    measure(worker, validators, plan)
    for engine in (validators["cpu/float32"], worker):
        assert all(torch.equal(before[name], each) for name, each in weights_of(engine).items())


def test_long_prompts_are_measured_with_their_first_tokens(monkeypatch: Patch) -> None:
    """Gemma without <bos> repeats one word: limits measured so are refused, and nobody could work in bfloat16."""
    long = tuple(range(2000))
    monkeypatch.setattr(calibrate_module.Asking, "ids", lambda *_: long)
    environment = build_environment(EnvironmentSettings(name="sort"))
    found = prompts_of(load_model("tiny").files, environment, 12)[0]
    assert (len(found), found[:32], found[32:]) == (512, long[:32], long[-480:])


@pytest.mark.parametrize("number_format", ["float32", "bfloat16"])
def test_a_policy_that_leaves_no_choice_has_limits_that_its_honest_work_keeps(number_format: str) -> None:
    """No token was outside, so that bfloat16 had float32's limits: 3 of 8 honest groups failed, and it was refused."""
    worker, validators, plan = engines(number_format, "float32", sequences=64)
    drawn = replayed(validators["cpu/float32"], Subject(worker, plan, print).drawn("main", 64, 12))
    cases = [replace(case, submission=certain_of(case), replay=without_choice(case.replayed)) for case in drawn]
    limits = limits_from(Bands.of(cases), f"torch/cpu/{number_format}")
    assert calibrate_module.failed_checks(cases, limits) == []
    is_coarse = number_format != "float32"
    assert ((limits.accidents.first > 0), limits.sampling.distance > 0.1) == (is_coarse, is_coarse)


@pytest.mark.parametrize(("number_format", "temperature"), [("float32", 1e-7), ("bfloat16", 3e-3)])
def test_a_temperature_that_leaves_no_nat_ends_no_validator(number_format: str, temperature: float) -> None:
    """There are no blocks of 64 nats to try other seeds with; nobody gains by them, but it is said."""
    found = measure(*engines(number_format, "float32", 10, sequences=32, temperature=temperature))
    assert all(math.isfinite(getattr(found.profile.noise, name).rate) for name in NoiseLimits.model_fields)
    blocks = ("other seeds, 64 tokens", "temperature 0.9 T, 256 tokens")
    untried = tuple(f"{block} and nats, by cpu/float32" for block in blocks)
    assert found.untested == untried
    assert not [problem for problem in found.problems if problem.startswith(("other seeds", "temperature"))]
    assert measured_kind(found).untested == untried


def certain_of(case: Case) -> Submission:
    rollouts = [msgspec.structs.replace(each, logprobs=bytes(len(each.tokens))) for each in case.rollouts]
    return msgspec.structs.replace(case.claim, rollouts=rollouts)


def without_choice(seen: Replay) -> Replay:
    nothing = np.zeros_like(seen.low)
    return replace(seen, low=nothing, high=nothing + 1, logprobs=nothing, entropy=nothing, varentropy=nothing)


def test_it_catches_cheats_and_its_profile_names_what_was_measured_and_survives_its_file(measured, tmp_path: Path):
    profile = measured.profile
    assert (profile.measured.model, profile.measured.validators) == ("tiny", ("cpu/float32",))
    (tmp_path / "p.toml").write_text(profiles.to_toml(profile))
    assert load_profiles([tmp_path / "p.toml"])["torch/cpu/float32"] == profile

    def share(cheat: str, tokens: int) -> Catch:
        [found] = [each for each in measured.catches if (each.cheat, each.tokens) == (cheat, tokens)]
        return found

    assert share("int4 weights", 64).by_proofs == 1.0
    assert share("int8 weights", 512).by_either == 1.0
    assert share("other seeds", 1024).by_sampling == 1.0
    assert share("other seeds", 1024).by_proofs == 0.0  # the weights are right
    assert share("temperature 0.9 T", 1024).by_sampling > 0.95


def test_limits_have_room_above_what_was_seen_and_are_never_tighter_than_those_of_float32(measured):
    quiet = measured.bands["cpu/float32"]
    narrow = limits_from(quiet, "torch/cpu/float32")
    assert (narrow.proofs, narrow.sampling.distance) == (ProofTolerance(), SeedTolerance().distance)
    usual = NoiseLimits()
    assert all(getattr(narrow.noise, name).rate >= getattr(usual, name).rate for name in NoiseLimits.model_fields)
    noisy = usual.model_copy(update={"mantissa": ChannelLimits(rate=1.2, unit=2.0, shared=0.03),
                                     "distance": ChannelLimits(rate=1e-4, curve=2e-5, unit=0.005),
                                     "exponents": ChannelLimits(rate=0.02, unit=1.5)})  # fmt: skip
    wide = dataclasses.replace(quiet, limits=quiet.limits.model_copy(update={"noise": noisy}))
    broad = limits_from(wide, "torch/cuda/bfloat16").noise
    assert broad.mantissa == ChannelLimits(rate=1.5, unit=2.0, shared=0.03)  # int8 weights show 2.4
    assert (broad.distance, broad.exponents.rate) == (ChannelLimits(rate=1.25e-4, curve=2.5e-5, unit=0.005), 0.03)


def test_bands_of_two_validators_are_joined_to_the_wider(measured: Measurement) -> None:
    one = measured.bands["cpu/float32"]
    far = one.limits.model_copy(update={"sampling": SeedTolerance(distance=0.3, floor=1e-18)})
    other = dataclasses.replace(one, distance_max=0.5, tokens=one.tokens - 1, limits=far)
    both = one.joined(other)
    assert both.limits.sampling == SeedTolerance(distance=0.3, floor=1e-18)
    assert (both.distance_max, both.tokens) == (0.5, one.tokens - 1)
    assert other.joined(one) == both


def test_limits_are_rounded_up_to_three_digits_and_too_few_sequences_are_refused() -> None:
    for value, rounded in ((0.0, 0.0), (1.0, 1.0), (0.012341, 0.0124), (99.91, 100.0)):
        limits = Profile(key="torch/cpu/float32", logprobs=LogprobLimits(lean=value))
        assert bands_module._rounded(limits).logprobs.lean == pytest.approx(rounded)
    with pytest.raises(ConfigError, match="at least 32 sequences"):
        Plan([(3,)], 1, sequences=8)


def self_test(profiles: dict[str, object] | None = None) -> dict[str, Trial]:
    loaded = load_model("tiny")
    test = SelfTest(loaded.files, policy_views(loaded.model), CPU, CPU, profiles or BUILT_IN)  # type: ignore[arg-type]
    return {trial.name: trial for trial in test.run()}


def test_a_sound_machine_passes_its_self_test() -> None:
    trials = self_test()
    assert all(trial.ok for trial in trials.values())
    assert "8 of 8 groups accepted" in trials["honest work"].text
    assert "caught: proofs.forged" in trials["proofs that are constants"].text


def test_a_profile_that_lets_everything_pass_fails_the_self_test() -> None:
    key = "torch/cpu/float32"
    wide = BUILT_IN[key].model_copy(
        update={
            **LOOSE,
            "likelihood": BUILT_IN[key].likelihood.model_copy(update={"deviations": 1e9}),
            "logprobs": BUILT_IN[key].logprobs.model_copy(update={"largest": 1000.0}),
            "proofs": ProofTolerance(exponents=1.0, signs=1.0, mantissa_mean=1e30, mantissa_median=1e30),
        }
    )
    trials = self_test({key: wide})
    assert trials["honest work"].ok
    assert not trials["edited tokens"].ok
    assert "NOT caught" in trials["edited tokens"].text


def test_rows_that_cost_nothing_are_all_drawn(monkeypatch: Patch) -> None:
    """On a GPU a batch takes as long with one row as with many. Before, 32 sequences were drawn there, not 256."""
    now_s, drawn = [0.0], dict[str, int]()

    def draw(_subject: object, label: str, rows: int, *_arguments: object, **_options: object) -> list[Any]:
        now_s[0] += 2.0
        drawn[label] = rows
        return []

    monkeypatch.setattr(calibrate_module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(calibrate_module.Subject, "drawn", draw)
    worker: Any = SimpleNamespace(kind="torch/cuda/bfloat16", model=object())
    calibrate_module.Subject(worker, Plan([(1, 2)], 0), lambda _text: None).honest()
    assert list(drawn.items()) == [("main", 256), ("batch 1", 1), ("batch 8", 8), ("batch 64", 64)]


def test_a_group_that_is_only_unsure_does_not_count_as_rejected(monkeypatch: Patch) -> None:
    """Two accidents in 139 honest groups would have refused the limits that they were measured for."""
    findings = iter([unsure("sampling.accident", "far off"), failed("sampling.seed", "other tokens")])
    monkeypatch.setattr(calibrate_module, "run_checks", lambda _checks, _case: [next(findings)])
    worker, _, plan = engines("float32", "float32", sequences=32)
    case = calibrate_module.Subject(worker, plan, lambda _text: None).drawn("two", 8, 4)[0]
    assert calibrate_module.failed_checks([case, case], BUILT_IN["torch/cpu/float32"]) == ["sampling.seed"]
