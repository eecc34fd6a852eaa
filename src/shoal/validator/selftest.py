"""The validator's own checks on this machine's own work: what a contributor can try before joining.

Honest groups must be accepted, and every canary that can be made of them must be caught.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shoal.engines import Engine, GenerationRequest, build
from shoal.engines.protocol import BoundedEngine
from shoal.engines.shelf import LoadedPolicy
from shoal.environments import EnvironmentSettings
from shoal.environments import build as build_environment
from shoal.models import TensorView, TextTokenizer
from shoal.protocol import Outcome, ProofParameters, SamplingParameters, SigningKey, Verdict
from shoal.validator.canary import SPOILERS, original_of
from shoal.validator.judge import Judge
from shoal.validator.profiles import ON_REQUEST, Profiles
from shoal.validator.seen import Seen
from shoal.validator.specimens import POLICY, Machine, Terms, docket_of
from shoal.validator.verdicts import Docket

GROUPS = 8
GROUP_SIZE = 8
MAX_NEW_TOKENS = 32
ROW_TOKENS = 1024  # of the completions that are said to fit


@dataclass(frozen=True)
class Trial:
    """One thing that was tried, and how it went."""

    name: str
    ok: bool
    text: str


@dataclass(frozen=True)
class SelfTest:
    """A policy, what this machine generates with, and what it is to be judged by."""

    files: Mapping[str, bytes]
    tensors: Mapping[str, TensorView]
    worker: Machine
    validator: Machine
    profiles: Profiles
    proof: ProofParameters = field(default_factory=ProofParameters)

    def run(self) -> Iterator[Trial]:
        """Each trial as it ends."""
        worker = self._engine(self.worker)
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
        dockets = self._dockets(worker, judge)
        loaded = LoadedPolicy(POLICY, self._engine(self.validator), self.files)
        verdicts = judge.verdicts(dockets, loaded)
        yield _honest(verdicts, self.validator)
        accepted = [
            docket for docket, verdict in zip(dockets, verdicts, strict=True) if verdict.outcome is Outcome.ACCEPTED
        ]
        for name in SPOILERS if accepted else ():
            yield _caught(name, accepted, judge, loaded)

    def _engine(self, machine: Machine) -> Engine:
        engine = build("torch", self.files, machine.device, machine.dtype)
        engine.load_policy(None, self.tensors)
        return engine

    def _dockets(self, worker: Engine, judge: Judge) -> list[Docket]:
        tokenizer, environment = TextTokenizer(self.files), judge.environment
        tasks = environment.tasks("train")
        sampling = SamplingParameters(
            temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=tokenizer.eos_token_id
        )
        terms = Terms("selftest", GROUP_SIZE, sampling, self.proof, worker.kind, environment.digest)
        leases = [terms.lease(n, tokenizer.encode(tasks[n].prompt), tasks[n].id) for n in range(GROUPS)]
        requests = [GenerationRequest(lease.prompt_ids, lease.seed_numbers, sampling) for lease in leases]
        groups, key = worker.generate(requests, self.proof), SigningKey.generate()
        return [docket_of(lease, group, worker, key) for lease, group in zip(leases, groups, strict=True)]


def _honest(verdicts: list[Verdict], validator: Machine) -> Trial:
    refused = [verdict for verdict in verdicts if verdict.outcome is not Outcome.ACCEPTED]
    tokens = sum(verdict.generated_tokens for verdict in verdicts)
    text = f"{len(verdicts) - len(refused)} of {len(verdicts)} groups accepted by {validator}, {tokens} tokens"
    if refused:
        text += f"; {refused[0].reason}: {refused[0].message}"
    return Trial("honest work", not refused, text)


def _caught(name: str, accepted: list[Docket], judge: Judge, loaded: LoadedPolicy) -> Trial:
    """One way of cheating, tried with the first group that it surely shows with."""
    for docket in accepted:
        twin = SPOILERS[name](original_of(docket, judge, loaded.engine))
        if twin is not None:
            [verdict] = replace(judge, seen=Seen()).verdicts([twin], loaded)
            caught = verdict.outcome is Outcome.REJECTED
            return Trial(name, caught, f"caught: {verdict.reason}" if caught else "NOT caught")
    return Trial(name, True, "skipped: it would not surely show with this policy's completions")
