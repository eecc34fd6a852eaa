"""An honest worker on the scripted engine, and the pieces to build a cheating one from."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from shoal.engines import Completion, GenerationRequest, LoadedPolicy, PrefillRequest
from shoal.engines.groups import submission_of
from shoal.engines.scripted import ScriptedEngine
from shoal.environments import Score, Task
from shoal.errors import EnvironmentSetupError, ScoringFailure
from shoal.models.ending import decoding
from shoal.protocol import PolicyRef, SigningKey, Submission, TensorView, pack, sign_document, submission_digest
from shoal.protocol.lease import Lease, ProofParameters, SamplingParameters
from shoal.protocol.verdict import Audit, Verdict
from shoal.runtime.clock import ManualClock
from shoal.sampling import uniforms
from shoal.toploc import commit
from shoal.validator.case import Case, replay_all
from shoal.validator.judge import Judge
from shoal.validator.profiles import BUILT_IN, Profile
from shoal.validator.verdicts import AuditJob

HUB = SigningKey.from_seed(b"h" * 32)
NODE = SigningKey.from_seed(b"n" * 32).node
RUN = "demo-000000000000"
EOS = 1
POLICY = PolicyRef(incarnation=0, version=3, digest="d" * 64)
SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=12, eos_token_ids=(EOS,))


def weights(value: float) -> list[TensorView]:
    data = np.full(4, value, dtype="<f4")
    return [TensorView("w", "F32", (4,), memoryview(data).cast("B"))]


def engine(value: float = 3.0, ref: PolicyRef = POLICY) -> ScriptedEngine:
    made = ScriptedEngine()
    made.load_policy(ref, {tensor.name: tensor for tensor in weights(value)})
    return made


class Rounding(ScriptedEngine):
    """A worker whose logits are off by noise that depends on where it is, and that knows nothing of rewards."""

    noise = 0.3

    def _step(self, sequence: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        logits_V, hidden_H = super()._step(sequence)
        noise_V = uniforms(hash(tuple(sequence)) % 2**63, 0, len(logits_V)) - 0.5
        return (logits_V + self.noise * noise_V).astype(np.float32), hidden_H


def rounding(noise: float = Rounding.noise) -> Rounding:
    made = Rounding()
    made.load_policy(POLICY, {tensor.name: tensor for tensor in weights(3.0)})
    made.noise = noise
    return made


def cases(leases: Sequence[Lease], worker: ScriptedEngine, profile: Profile) -> list[Case]:
    """What the worker draws for these leases, as a validator that does not round sees it after its prefill."""
    clean = engine()
    asked = [GenerationRequest(each.prompt_ids, each.seed_numbers, each.sampling) for each in leases]
    pairs = zip(leases, worker.generate(asked, leases[0].proof), strict=True)
    submitted = [(of, submission_of(of, group, "scripted")) for of, group in pairs]
    found = [Case(of, what, "", clean.vocabulary_size, clean.hidden_size, profile) for of, what in submitted]
    for case, replay in zip(found, replay_all(clean, found), strict=True):
        assert not isinstance(replay, Exception)
        case.replay = replay
    return found


def loaded(value: float = 3.0) -> LoadedPolicy:
    return LoadedPolicy(POLICY, engine(value), {})


def lease(unit: int = 5, seeds: int = 12, **changes: Any) -> Lease:
    fields: dict[str, Any] = {
        "run": RUN, "lease": f"lease-{unit}", "node": NODE, "unit": unit, "attempt": 0, "policy": POLICY,
        "task": f"t/{unit}", "prompt_ids": (10 + unit, 20, 30), "sampling": SAMPLING,
        "seeds": tuple(f"{1000 * unit + i:016x}" for i in range(seeds)), "environment_digest": "e" * 64,
        "issued_at_ms": 0, "deadline_ms": 60_000, "profile": "scripted/cpu/float32",
    }  # fmt: skip
    return Lease(**{**fields, **changes})


@cache
def long_lease() -> Lease:
    """Four seeds that give rollouts of 64 tokens, in chunks of 8."""
    sampling = SamplingParameters(temperature=1.0, max_new_tokens=64, eos_token_ids=(0,))
    of = lease(5, seeds=24, sampling=sampling, proof=ProofParameters(topk=16, rows=8))
    full = [seed for seed, each in zip(of.seeds, completions(of), strict=True) if len(each.token_ids) == 64]
    return of.model_copy(update={"seeds": tuple(full[:4])})


def completions(of: Lease, by: ScriptedEngine | None = None, seeds: Sequence[int] | None = None) -> list[Completion]:
    wanted = tuple(seeds) if seeds is not None else of.seed_numbers
    asked = GenerationRequest(of.prompt_ids, wanted, of.sampling, decode=decoding(of.sampling, {}))
    return (by or engine()).generate([asked], of.proof)[0]


@cache
def _honest(of: Lease) -> Submission:
    return submission_of(of, completions(of), "scripted")


def submission(of: Lease, group: list[Completion] | None = None) -> Submission:
    return _honest(of) if group is None else submission_of(of, group, "scripted")


def proved(of: Lease, what: Submission, value: float = 3.0) -> Submission:
    """The submission with proofs as a prefill of its tokens gives them: what anyone can make who has the weights."""
    rollouts = []
    for rollout in what.rollouts:
        request = PrefillRequest(of.prompt_ids, rollout.token_ids.astype(np.int32), of.sampling.temperature)
        [prefill] = engine(value).prefill([request], of.proof)
        assert prefill.points is not None
        rollouts.append(msgspec.structs.replace(rollout, proofs=b"".join(commit(prefill.points))))
    return msgspec.structs.replace(what, rollouts=rollouts)


def audit_job(of: Lease, what: Submission | bytes | None = None, **audit_fields: Any) -> AuditJob:
    body = what if isinstance(what, bytes) else pack(what if what is not None else submission(of))
    name, signed = submission_digest(body), sign_document(of, HUB)
    times = {"received_at_ms": 1, "deadline_ms": 2}
    return AuditJob(Audit(submission=name, size_bytes=len(body), lease=signed, **times, **audit_fields), of, body)


KEY = "scripted/cpu/float32"


def judge(environment: Any = None, limits: dict[str, Any] | None = None, **changes: Any) -> Judge:
    """A judge by the built-in profile, with these limits in place of some of its own."""
    profile = BUILT_IN[KEY].model_copy(update=limits or {})
    return Judge(environment or LengthEnvironment(), {KEY: profile}, **{"clock": ManualClock(), **changes})


def judged(of: Lease, what: Submission | bytes | None = None, by: Judge | None = None, **audit: Any) -> Verdict:
    [verdict] = (by or judge()).verdicts([audit_job(of, what, **audit)], loaded())
    return verdict


class LengthEnvironment:
    """The reward is the length of the text; a task that ends in /broken breaks the machinery."""

    name = "length"
    digest = "e" * 64

    def tasks(self, split: str) -> list[Task]:
        return [self.task("t/0")]

    def task(self, task_id: str) -> Task:
        if not task_id.startswith("t/"):
            raise EnvironmentSetupError(f"no task {task_id}")
        return Task(task_id, "prompt", "answer")

    def score(self, task: Task, completion: str) -> Score:
        if task.id.endswith("/broken"):
            raise ScoringFailure("the grader's sandbox did not start")
        value = float("nan") if task.id.endswith("/nan") else float(len(completion))
        return Score(value, {"task": value})
