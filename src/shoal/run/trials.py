"""`shoal doctor --selftest` and `--calibrate`: the validator's checks on this machine's own work. Needs torch."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from shoal.client import HubClient
from shoal.client.weights import downloader_of
from shoal.engines import build, choose, kind_of, resolved
from shoal.environments import EnvironmentSettings
from shoal.environments import build as build_environment
from shoal.errors import ConfigError, HubUnreachable
from shoal.models import BUILTIN, TensorView, TextTokenizer
from shoal.protocol import ProofParameters, RunInfo
from shoal.run.doctor import MachineFinding
from shoal.run.folder import hub_address
from shoal.runtime import StopToken, write_atomically
from shoal.validator.calibrate import BLOCKS, Measurement, Plan, measure, openings, prompts_of
from shoal.validator.canary import SelfTest
from shoal.validator.profiles import load_profiles, to_toml
from shoal.validator.verdicts import Machine

HUB_S, POLICY_PATIENCE_S = 10.0, 600.0


@dataclass(frozen=True)
class TrialOptions:
    url: str | None
    model: str
    device: str
    dtype: str
    against: tuple[str, ...]
    profiles: tuple[Path, ...]
    sequences: int
    tokens: int
    temperature: float
    out: Path | None
    engine: str = "torch"

    @property
    def machines(self) -> tuple[Machine, list[Machine]]:
        """The worker, and the validators that judge it, with "auto" resolved."""
        judges = map(Machine.parse, self.against or ("cpu/float32",))
        worker = Machine(*resolved(self.engine, self.device, self.dtype))
        return worker, [Machine(*resolved("torch", each.device, each.dtype)) for each in judges]


def run_selftest(options: TrialOptions, stop: StopToken) -> Iterator[MachineFinding]:
    worker, validators = options.machines
    if len(validators) > 1:
        raise ConfigError("a self-test is judged by one validator: give --against once")
    profiles, proof = load_profiles(options.profiles), ProofParameters()
    if options.url is not None:
        files, tensors, info = policy_of_run(options.url, stop)
        proof = info.proof
        try:
            worker = Machine(*choose(options.engine, options.device, options.dtype, info.profiles))
        except ConfigError as error:
            yield MachineFinding("run", False, str(error))
            return
        yield MachineFinding("run", True, f"computes as {options.engine}/{worker}")
    else:
        if options.dtype == "auto":
            worker = Machine(*choose(options.engine, options.device, "auto", profiles))
        files, tensors = policy_of_folder(options.model, worker.dtype)
    test = SelfTest(files, tensors, worker, validators[0], profiles, proof, options.engine)
    for trial in test.run():
        yield MachineFinding("selftest", trial.ok, f"{trial.name}: {trial.text}")


def policy_of_folder(model: str, dtype: str) -> tuple[Mapping[str, bytes], Mapping[str, TensorView]]:
    from shoal.models.load import load_model
    from shoal.models.state import policy_views

    loaded = load_model(model, dtype)
    return loaded.files, policy_views(loaded.model)


def policy_of_run(url: str, stop: StopToken) -> tuple[Mapping[str, bytes], Mapping[str, TensorView], RunInfo]:
    with closing(HubClient.of_a_person(*hub_address(url, HUB_S), stop)) as hub:
        trusted, status = hub.trusted_run(), hub.status()
    if status.policy is None:
        raise HubUnreachable(f"the run at {hub.url} has not published a policy yet: try again when it has")
    with tempfile.TemporaryDirectory(prefix="shoal-selftest-") as folder:
        with closing(downloader_of(trusted, Path(folder), stop, 1)) as downloader:
            payload = downloader.fetch(status.policy, POLICY_PATIENCE_S)
            tensors = {  # copied: the payload's bytes are borrowed from a file that is about to go
                view.name: TensorView(view.name, view.dtype, view.shape, memoryview(bytes(view.data)))
                for view in payload.tensors
            }
        return dict(payload.files), tensors, trusted.info


def run_calibration(options: TrialOptions, report: Callable[[str], None]) -> tuple[Measurement, Path]:
    """Measure, and write the profile unless cheats would pass. Nothing is overwritten."""
    if options.url is not None:
        raise ConfigError("a profile is measured on a model folder (--model), not on a run: leave the URL away")
    out = options.out or Path(kind_of(options.engine, options.device, options.dtype).replace("/", "-") + ".toml")
    if out.exists():
        raise ConfigError(f"{out} exists already: remove it, or give another file with --out")
    worker, validators = options.machines
    files, tensors = policy_of_folder(options.model, worker.dtype)
    tokenizer, environment = TextTokenizer(files), build_environment(EnvironmentSettings(name="sort"))
    is_builtin = options.model in BUILTIN  # the built-in model knows its own task only
    plan = Plan(
        prompts=prompts_of(files, environment, options.tokens) if is_builtin else openings(tokenizer),
        eos_token_ids=tokenizer.eos_token_ids, sequences=options.sequences, tokens=options.tokens,
        temperature=options.temperature, model=options.model.rstrip("/").rpartition("/")[2],
        date=datetime.now(UTC).date().isoformat(),
    )  # fmt: skip
    engines = []
    for name, machine in ((options.engine, worker), *(("torch", each) for each in validators)):
        engines.append(build(name, files, machine.device, machine.dtype))
        engines[-1].load_policy(None, tensors)
    measured = measure(engines[0], dict(zip(map(str, validators), engines[1:], strict=True)), plan, report, BLOCKS)
    if not measured.problems:
        write_atomically(out, to_toml(measured.profile).encode())
    return measured, out


def calibration_report(measured: Measurement, out: Path) -> Iterator[str]:
    profile = measured.profile
    for name, bands in measured.bands.items():
        yield f"honest {profile.key}, seen by {name}: {bands.tokens} tokens"
        limit = f"(limit {profile.sampling.distance:g})"
        yield f"  seeds: {bands.outside_rate:.2%} of tokens outside, by {bands.distance_max:.2g} at most {limit}"
        yield f"  proofs: mantissas {bands.mantissa_mean:.2f} off on average (limit {profile.noise.mantissa.rate:g})"
        yield f"  log-probabilities: off by {bands.logprob_max:.2g} at most (limit {profile.logprobs.largest:g})"
        share, bits = measured.choices[name]
        yield f"  choice: {share:.2%} of tokens have a neighbour that passes unseen: {bits:.3f} bits a token"
        failures = measured.failures[name]
        why = f": {', '.join(sorted(set(failures)))}" if failures else ""
        yield f"  {len(failures)} of {measured.groups} honest groups fail{why}"
    yield "what this profile catches, by the number of tokens looked at:"
    for cheat in dict.fromkeys((catch.cheat, catch.validator) for catch in measured.catches):
        mine = [catch for catch in measured.catches if (catch.cheat, catch.validator) == cheat]
        shares = "  ".join(f"{catch.tokens}: {catch.by_either:.0%}" for catch in mine)
        yield f"  {cheat[0]:<18} seen by {cheat[1]:<14}  {shares}"
    yield from (f"  not tested: {each}" for each in measured.untested)
    yield from (f"refused: {problem}" for problem in measured.problems)
    if not measured.problems:
        yield f"written to {out}; the run's owner opens it with `shoal admin calibrate RUN {out}`"
