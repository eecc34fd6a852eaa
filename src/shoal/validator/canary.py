"""Canaries: now and then a known cheat is judged beside honest work, and must be caught.

    accepted audit ─► a twin that differs in one thing and is surely bad ─► the same judge ─┬─ rejected: caught
                                                                                           ├─ unsure: later
                                                                                           └─ accepted: CanaryMissed

Without them a profile that is far too wide, or a broken check, could let cheats pass unnoticed. A validator that misses
its canary reports nothing of that round and ends. `SelfTest` does the same with this machine's own work.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec
import numpy as np

from shoal.engines import BoundedEngine, Engine, GenerationRequest, LoadedPolicy, build
from shoal.environments import EnvironmentSettings
from shoal.environments import build as build_environment
from shoal.errors import CanaryMissed
from shoal.models import TensorView, TextTokenizer
from shoal.protocol import Outcome, ProofParameters, SamplingParameters, SigningKey, Verdict, pack, unpack
from shoal.protocol.submission import Rollout, Submission, pack_logprobs, pack_tokens, submission_digest
from shoal.validator.case import BODY_LIMITS, IMPROBABLE_NATS, Case, SeenWork
from shoal.validator.judge import Judge
from shoal.validator.profiles import ON_REQUEST, Profiles
from shoal.validator.verdicts import POLICY, AuditJob, LeaseTemplate, Machine, audit_job_of

SURELY = 4  # times what the profile allows
LONG_ENOUGH = 4  # tokens: of fewer, the proofs of two rollouts may be of nearly the same states
ONE = b"\x3f\x80"  # the bits of 1.0


@dataclass(frozen=True)
class Original:
    job: AuditJob
    case: Case

    def twin(self, rollouts: Sequence[Rollout]) -> AuditJob:
        body = pack(msgspec.structs.replace(self.case.claim, rollouts=list(rollouts)))
        changes = {"submission": submission_digest(body), "size_bytes": len(body), "shown": ()}
        return replace(self.job, audit=self.job.audit.model_copy(update=changes), body=body)


def original_of(job: AuditJob, judge: Judge, engine: Engine) -> Original:
    submission, found = unpack(job.body, Submission, BODY_LIMITS), judge.limits(job.lease, engine)
    assert found is not None, "what was accepted was judged by them"
    return Original(job, Case(job.lease, submission, "", engine.vocabulary_size, engine.hidden_size, found[0]))


@dataclass
class Canary:
    """Counts full audits; after every `every` of them a twin of an accepted one is judged. `due_in`: audits until
    then."""

    judge: Judge
    every: int
    due_in: int = 0
    _turn: int = 0

    def check(self, jobs: Sequence[AuditJob], verdicts: Sequence[Verdict], loaded: LoadedPolicy) -> str | None:
        """The name of the canary that was caught, None if none was due; `CanaryMissed` if one passed."""
        self.due_in -= sum(verdict.depth == "full" for verdict in verdicts)
        pairs = zip(jobs, verdicts, strict=True)
        accepted = [job for job, each in pairs if (each.outcome, each.depth) == (Outcome.ACCEPTED, "full")]
        if self.due_in > 0 or not accepted:
            return None
        job = accepted[0]
        name, twin = self._twin(original_of(job, self.judge, loaded.engine))
        [verdict] = replace(self.judge, seen=SeenWork()).verdicts([twin], loaded)
        if verdict.outcome is Outcome.UNSURE:
            return None
        if verdict.outcome is Outcome.ACCEPTED:
            passed = ", ".join(check.check for check in verdict.checks)
            raise CanaryMissed(
                f"a known cheat, unit {job.lease.unit} with {name}, passed every check ({passed}) as "
                f"{job.lease.profile} under policy {job.lease.policy.label}: this validator must not judge; look "
                f"at its profiles (validator.profiles) and its engine, {loaded.engine.kind}"
            )
        self.due_in = self.every
        return name

    def _twin(self, original: Original) -> tuple[str, AuditJob]:
        """The next cheat that surely shows with this submission."""
        names = list(CANARY_CHEATS)
        for turn in range(self._turn, self._turn + len(names)):
            name = names[turn % len(names)]
            twin = CANARY_CHEATS[name](original)
            if twin is not None:
                self._turn = turn + 1
                return name, twin
        raise AssertionError("one of them always shows")


def edited_tokens(original: Original) -> AuditJob | None:
    """The first token of every longer rollout is another one."""
    case, rollouts, edited = original.case, list(original.case.rollouts), 0
    eos, size = case.lease.sampling.eos_token_ids, case.vocabulary_size
    for index, rollout in enumerate(rollouts):
        tokens = rollout.token_ids
        if len(tokens) >= LONG_ENOUGH:
            shifts = (size // 2, size // 2 + 1)
            tokens[0] = next(other for shift in shifts if (other := (tokens[0] + shift) % size) not in eos)
            rollouts[index] = msgspec.structs.replace(rollout, tokens=pack_tokens(tokens))
            edited += 1
    return original.twin(rollouts) if edited > 1 else None


def other_seeds(original: Original) -> AuditJob | None:
    """The lease has other seeds, which would not have given these tokens."""
    case = original.case
    room = 2 * case.profile.sampling.distance
    if np.log(np.minimum(np.exp(case.claimed) + room, 1.0)).sum() > IMPROBABLE_NATS:
        return None
    seeds = tuple(hashlib.sha256(f"canary/{seed}".encode()).hexdigest()[:16] for seed in case.lease.seeds)
    return replace(original.twin(case.rollouts), lease=case.lease.model_copy(update={"seeds": seeds}))


def other_temperature(original: Original) -> AuditJob | None:
    """The log-probabilities are about those of half the temperature."""
    case = original.case
    if float(np.abs(case.claimed).mean()) < SURELY * case.profile.noise.logprobs.rate:
        return None
    halved = [pack_logprobs(2.0 * rollout.logprob_values) for rollout in case.rollouts]
    pairs = zip(case.rollouts, halved, strict=True)
    return original.twin([msgspec.structs.replace(rollout, logprobs=values) for rollout, values in pairs])


def others_proofs(original: Original) -> AuditJob | None:
    """Two rollouts of equal length with different first tokens have each other's proofs."""
    rollouts, firsts = list(original.case.rollouts), dict[int, int]()
    for second, two in enumerate(rollouts):
        first = firsts.setdefault(len(two.tokens), second)
        one = rollouts[first]
        if len(two.tokens) >= 4 * LONG_ENOUGH and one.tokens[:4] != two.tokens[:4]:
            rollouts[first] = msgspec.structs.replace(one, proofs=two.proofs)
            rollouts[second] = msgspec.structs.replace(two, proofs=one.proofs)
            return original.twin(rollouts)
    return None


def constant_proofs(original: Original) -> AuditJob:
    """Every proof is a polynomial of the right size and modulus with the value 1.0 everywhere."""
    case = original.case
    forged = [proof[:2] + ONE + bytes(len(proof) - 2 - len(ONE)) for proof in case.proofs]
    ends = np.cumsum(case.chunks).tolist()
    parts = [b"".join(forged[start:end]) for start, end in pairwise([0, *ends])]
    pairs = zip(case.rollouts, parts, strict=True)
    return original.twin([msgspec.structs.replace(rollout, proofs=part) for rollout, part in pairs])


# Each makes a twin of the original that is surely bad; None if this cheat would not surely show with it.
CANARY_CHEATS: dict[str, Callable[[Original], AuditJob | None]] = {
    "edited tokens": edited_tokens,
    "other seeds": other_seeds,
    "log-probabilities of another temperature": other_temperature,
    "another rollout's proofs": others_proofs,
    "proofs that are constants": constant_proofs,
}


GROUPS = 8
GROUP_SIZE = 8
MAX_NEW_TOKENS = 32
ROW_TOKENS = 1024  # of the completions that are said to fit


@dataclass(frozen=True)
class Trial:
    name: str
    ok: bool
    text: str


@dataclass(frozen=True)
class SelfTest:
    files: Mapping[str, bytes]
    tensors: Mapping[str, TensorView]
    worker: Machine
    validator: Machine
    profiles: Profiles
    proof: ProofParameters = field(default_factory=ProofParameters)
    engine: str = "torch"
    """Of the worker; a validator's is torch's."""

    def run(self) -> Iterator[Trial]:
        worker = self._engine(self.worker, self.engine)
        if worker.kind not in self.profiles:
            known = ", ".join(sorted(self.profiles))
            more = f"; --profile {worker.kind} takes the built-in one" if worker.kind in ON_REQUEST else ""
            yield Trial("profile", False, f"there is no profile for {worker.kind}, only for {known}{more}")
            return
        yield Trial("profile", True, worker.kind)
        if isinstance(worker, BoundedEngine):
            rows = worker.rows_at_once(ROW_TOKENS)
            yield Trial("memory", True, f"{rows} completions of {ROW_TOKENS} tokens, prompts included, fit at once")
        judge = Judge(build_environment(EnvironmentSettings(name="sort")), self.profiles)
        tokenizer, environment = TextTokenizer(self.files), judge.environment
        tasks = environment.tasks("train")
        sampling = SamplingParameters(
            temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, eos_token_ids=tokenizer.eos_token_ids
        )
        terms = LeaseTemplate("selftest", GROUP_SIZE, sampling, self.proof, worker.kind, environment.digest)
        leases = [terms.lease(n, tokenizer.encode(tasks[n].prompt), tasks[n].id) for n in range(GROUPS)]
        requests = [GenerationRequest(lease.prompt_ids, lease.seed_numbers, sampling) for lease in leases]
        groups, key = worker.generate(requests, self.proof), SigningKey.generate()
        jobs = [audit_job_of(lease, group, worker, key) for lease, group in zip(leases, groups, strict=True)]
        loaded = LoadedPolicy(POLICY, self._engine(self.validator), self.files)
        verdicts = judge.verdicts(jobs, loaded)
        refused = [verdict for verdict in verdicts if verdict.outcome is not Outcome.ACCEPTED]
        tokens, held = sum(verdict.generated_tokens for verdict in verdicts), len(verdicts) - len(refused)
        text = f"{held} of {len(verdicts)} groups accepted by {self.validator}, {tokens} tokens"
        if refused:
            text += f"; {refused[0].reason}: {refused[0].message}"
        yield Trial("honest work", not refused, text)
        pairs = zip(jobs, verdicts, strict=True)
        accepted = [job for job, verdict in pairs if verdict.outcome is Outcome.ACCEPTED]
        originals = [original_of(job, judge, loaded.engine) for job in accepted]
        for name, forge in CANARY_CHEATS.items() if originals else ():
            twin = next((twin for original in originals if (twin := forge(original)) is not None), None)
            if twin is None:
                yield Trial(name, True, "skipped: it would not surely show with this policy's completions")
                continue
            [verdict] = replace(judge, seen=SeenWork()).verdicts([twin], loaded)
            caught = verdict.outcome is Outcome.REJECTED
            yield Trial(name, caught, f"caught: {verdict.reason}" if caught else "NOT caught")

    def _engine(self, machine: Machine, name: str = "torch") -> Engine:
        engine = build(name, self.files, machine.device, machine.dtype)
        engine.load_policy(None, self.tensors)
        return engine
