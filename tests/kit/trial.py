"""Cheats on trial without a run: the real engine, the validator's own judge, and the node's record as the hub keeps it.

For what a run would take too long to show: many groups, many tokens, rates.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shoal import protocol
from shoal.adversary import Cheat, CheatContext
from shoal.engines import Engine, GenerationRequest, PrefillRequest
from shoal.engines.groups import submission_of
from shoal.engines.shelf import LoadedPolicy
from shoal.engines.torch import TorchEngine
from shoal.environments import EnvironmentSettings, Task, build
from shoal.hub.state.draws import task_index, unit_seeds
from shoal.hub.state.nodes import CERTAIN_TO_BAN, STATISTICAL_TO_BAN
from shoal.hub.state.reputation import recent
from shoal.models.ending import decoding
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import policy_views
from shoal.sampling import uniforms
from shoal.sampling.check import distances
from shoal.shardcast import Payload
from shoal.validator.judge import Judge, SecondEngines
from shoal.validator.profiles import BUILT_IN, ON_REQUEST
from shoal.validator.verdicts import AuditJob

RUN, SECRET, SEED = "trial-000000000000", b"trial", 0
KEY = protocol.SigningKey.from_seed(b"k" * 32)
AT_ONCE = 4
PROFILES = {**BUILT_IN, **ON_REQUEST}


@dataclass(frozen=True)
class Judged:
    """A submitted group, and what the validator says of it."""

    lease: protocol.Lease
    submission: protocol.Submission
    verdict: protocol.Verdict

    @property
    def tokens(self) -> int:
        return sum(len(rollout.tokens) // 4 for rollout in self.submission.rollouts)


@dataclass
class Trial:
    """What one node submitted, in order. The record is what the hub would have given out with each audit."""

    judged: list[Judged] = field(default_factory=list)
    record: protocol.Tally = field(default_factory=protocol.Tally)

    def add(self, judged: Judged) -> None:
        verdict = judged.verdict
        self.judged.append(judged)
        if verdict.outcome is not protocol.Outcome.REJECTED:
            self.record = recent(self.record.plus(verdict.tally))
        elif verdict.severity is protocol.Severity.STATISTICAL:
            self.record = protocol.Tally()

    @property
    def rejected(self) -> list[Judged]:
        return [each for each in self.judged if each.verdict.outcome is protocol.Outcome.REJECTED]

    def until_caught(self) -> tuple[int, int] | None:
        """Groups and tokens up to and including the first that was rejected."""
        return self._until(lambda seen: len(seen) > 0)

    def until_banned(self) -> tuple[int, int] | None:
        def is_over(seen: Sequence[protocol.Severity | None]) -> bool:
            return (
                seen.count(protocol.Severity.CERTAIN) >= CERTAIN_TO_BAN
                or seen.count(protocol.Severity.STATISTICAL) >= STATISTICAL_TO_BAN
            )

        return self._until(is_over)

    def _until(self, is_over: Callable[[Sequence[protocol.Severity | None]], bool]) -> tuple[int, int] | None:
        tokens, seen = 0, list[protocol.Severity | None]()
        for number, each in enumerate(self.judged, 1):
            tokens += each.tokens
            if each.verdict.outcome is protocol.Outcome.REJECTED:
                seen.append(each.verdict.severity)
                if is_over(seen):
                    return number, tokens
        return None


class Harness:
    """A model, its tasks and a judge; units have the tasks and seeds that a hub would give them."""

    def __init__(
        self, group_size: int = 16, max_new_tokens: int = 10, profile: str = protocol.DEFAULT_PROFILE,
        temperature: float = 1.0, stop: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.loaded: LoadedModel = load_model("tiny")
        self.environment = build(EnvironmentSettings(name="sort"))
        self.judge = Judge(self.environment, PROFILES, second_engine=SecondEngines("torch", "cpu", self.fetch).get)
        self.profile = profile
        self.group_size = group_size
        self.sampling = protocol.SamplingParameters(
            temperature=temperature, max_new_tokens=max_new_tokens, eos_token_ids=self.loaded.eos_token_ids, stop=stop
        )

    @property
    def files(self) -> Mapping[str, bytes]:
        return self.loaded.files

    def engine(self) -> TorchEngine:
        """Shares the model's weights, also while they are trained."""
        return TorchEngine.wrap(self.loaded.model)

    def fetch(self, policy: protocol.PolicyRef, _deadline_s: float) -> Payload:
        """The policy as a run that publishes in bfloat16 has it: for second looks in that format."""
        rounded = copy.deepcopy(self.loaded.model).to(torch.bfloat16)
        manifest = protocol.PolicyManifest(
            run=RUN, policy=policy, created_at_ms=0, entries=(), chunk_size_bytes=1, chunks=(), size_bytes=0
        )
        return Payload(manifest, dict(self.files), list(policy_views(rounded).values()))

    def task(self, unit: int) -> Task:
        tasks = self.environment.tasks("train")
        return tasks[task_index(len(tasks), SEED, unit)]

    def lease(self, unit: int, version: int = 0) -> protocol.Lease:
        task = self.task(unit)
        return protocol.Lease(
            run=RUN, lease=f"u{unit}", node=KEY.node, unit=unit, attempt=0,
            policy=protocol.PolicyRef(incarnation=0, version=version, digest="0" * 64), task=task.id,
            prompt_ids=self.loaded.tokenizer.encode(task.prompt), profile=self.profile,
            proof=protocol.ProofParameters(), seeds=tuple(unit_seeds(SECRET, RUN, unit, self.group_size)),
            sampling=self.sampling, environment_digest=self.environment.digest, issued_at_ms=0, deadline_ms=60_000,
        )  # fmt: skip

    def rewards(self, unit: int, submission: protocol.Submission) -> list[float]:
        """What the environment gives for each rollout."""
        eos, task = self.sampling.eos_token_ids, self.task(unit)
        ids = [[token for token in rollout.token_ids.tolist() if token not in eos] for rollout in submission.rollouts]
        known = [[token for token in each if token < self.loaded.tokenizer.vocabulary_size] for each in ids]
        return [self.environment.score(task, self.loaded.tokenizer.decode(each)).value for each in known]

    def cheating(self, cheat: Cheat) -> Engine:
        """An engine of its own with the policy in place, as a worker's shelf would make it."""
        engine = cheat.engine(self.build(self.files), CheatContext(self.files, self.environment.name, self.build))
        engine.load_policy(self.lease(0).policy, policy_views(self.loaded.model))
        return engine

    def build(self, files: Mapping[str, bytes]) -> Engine:
        return TorchEngine(files)

    def groups(
        self, cheat: Cheat, leases: Sequence[protocol.Lease]
    ) -> Iterator[tuple[protocol.Lease, protocol.Submission]]:
        """What a worker with this cheat would submit; a few leases at a time, as it would."""
        engine = self.cheating(cheat)
        for start in range(0, len(leases), AT_ONCE):
            part = leases[start : start + AT_ONCE]
            decode = decoding(self.sampling, self.files)
            terms = [(each.prompt_ids, each.seed_numbers, each.sampling) for each in part]
            asked = [GenerationRequest(*each, decode=decode) for each in terms]
            for lease, group in zip(part, engine.generate(asked, part[0].proof), strict=True):
                yield lease, cheat.submission(submission_of(lease, group, "torch"), lease)

    def tried(self, cheat: Cheat, units: Sequence[int], stop_when_banned: bool = False) -> Trial:
        """Everything that a cheat submits for these units, judged one after the other."""
        trial, truth = Trial(), LoadedPolicy(self.lease(0).policy, self.engine(), self.files)
        for lease, submission in self.groups(cheat, [self.lease(unit) for unit in units]):
            [verdict] = self.judge.verdicts([audit_job(lease, submission, trial.record)], truth)
            trial.add(Judged(lease, submission, verdict))
            if stop_when_banned and trial.until_banned() is not None:
                break
        return trial


def audit_job(lease: protocol.Lease, submission: protocol.Submission, record: protocol.Tally | None = None) -> AuditJob:
    body = protocol.pack(submission)
    audit = protocol.Audit(
        submission=protocol.submission_digest(body), lease=protocol.sign_document(lease, KEY), size_bytes=len(body),
        received_at_ms=0, deadline_ms=60_000, record=record or protocol.Tally(),
    )  # fmt: skip
    return AuditJob(audit, lease, body)


def farthest(engine: Engine, lease: protocol.Lease, submission: protocol.Submission) -> float:
    """How far a uniform lies outside the interval of its token, at most, as this engine sees it."""
    asked = [
        PrefillRequest(lease.prompt_ids, rollout.token_ids.astype(np.int32), lease.sampling.temperature)
        for rollout in submission.rollouts
    ]
    seen = zip(lease.seed_numbers, engine.prefill(asked), strict=True)
    return max(float(distances(uniforms(s, 0, len(p.cdf_low)), p.cdf_low, p.cdf_high).max()) for s, p in seen)
