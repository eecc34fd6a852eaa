"""Measuring a profile: one kind of worker at work, seen by the validators of a run, and cheaper work seen the same way.

    model ─► worker's engine ─► honest groups ─► every validator's engine ─► bands ─► profile
                     │                               │                                 │
                     └─ int8, int4, T · 0.9, other dice ───┴──► after how many tokens is each of them caught?

Half of the honest groups set the limits; the other half, never looked at before, must pass every check under them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shoal.engines import Completion, Engine, GenerationRequest, build
from shoal.engines.submission import submission_of
from shoal.environments import EnvironmentSettings
from shoal.environments import build as build_environment
from shoal.errors import ConfigError
from shoal.models import BUILTIN, TensorView, TextTokenizer
from shoal.models.quantize import INT4, INT8, Quantization, quantized
from shoal.protocol import Lease, ProofParameters, SamplingParameters
from shoal.sampling import check_seeded
from shoal.toploc import Comparisons, check_proofs, chunk_rows
from shoal.validator.bands import Bands, limits_from
from shoal.validator.case import Case, Replay
from shoal.validator.checks import AFTER_PREFILL, run_checks
from shoal.validator.profiles import Measured, Profile
from shoal.validator.replay import part_of, replay_all
from shoal.validator.specimens import Machine, Terms, seeds_of

Progress = Callable[[str], None]

COOLER = 0.9
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
LARGEST_SHARE = 8  # a cheat's tokens are cut into at least so many of the largest blocks, if there are enough
BATCH_GROUPS = 16
OPENINGS = (
    "The most surprising thing about the sea is", "Once upon a time, in a small town,", "To bake good bread you need",
    "Question: what is 17 + 25?\nAnswer:", "In physics, energy is", "Dear Sir or Madam,", "def add(a, b):\n",
    "The capital of France is", "My favourite season is", "A short history of mathematics:", "List three fruits:",
    "The doctor looked at the letter and said,", "How do birds find their way?", "First, open the window.",
    "Two trains leave the station at noon.", "It was a dark and stormy night;",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is measured: `sequences` completions of at most `tokens` tokens, in groups."""

    model: str
    worker: Machine
    validators: tuple[Machine, ...]
    sequences: int = 256
    tokens: int = 128
    group_size: int = 8
    temperature: float = 1.0
    proof: ProofParameters = field(default_factory=ProofParameters)

    def __post_init__(self) -> None:
        if self.sequences < 4 * self.group_size:
            raise ConfigError(f"a calibration needs at least {4 * self.group_size} sequences, not {self.sequences}")


@dataclass(frozen=True)
class Catch:
    """Of blocks of about `tokens` tokens of some cheat, the share that the dice and the proofs caught."""

    cheat: str
    validator: str
    tokens: int
    blocks: int
    by_sampling: float
    by_proofs: float
    by_either: float


@dataclass(frozen=True)
class Calibration:
    """The profile, and what it rests on. `failures`: honest held-out groups that a check would reject, by validator."""

    profile: Profile
    bands: Mapping[str, Bands]
    held_out: int
    failures: Mapping[str, list[str]]
    catches: tuple[Catch, ...]


def calibrate(plan: Plan, tell: Progress, date: str) -> Calibration:
    """Measure; `tell` hears how far it is."""
    subject = Subject(plan, tell)
    honest = subject.honest()
    cheats = {name: subject.cheating(cheat) for name, cheat in CHEATS.items()}
    seen: dict[str, list[Case]] = {}
    caught: dict[tuple[str, str], list[Case]] = {}
    for machine in plan.validators:
        tell(f"everything seen by {machine}")
        engine = subject.engine(machine)
        seen[str(machine)] = replayed(engine, honest)
        for name, cases in {**cheats, "other dice": other_dice(honest)}.items():
            caught[name, str(machine)] = replayed(engine, cases)
    bands = {name: Bands.of(cases[::2]) for name, cases in seen.items()}
    profile = _profile(plan, subject.worker.kind, bands, date)
    failures = {name: failed_checks(cases[1::2], profile) for name, cases in seen.items()}
    catches = tuple(
        catch for (name, machine), cases in caught.items() for catch in catches_of(name, machine, cases, profile)
    )
    return Calibration(profile, bands, len(honest[1::2]), failures, catches)


def _profile(plan: Plan, key: str, bands: Mapping[str, Bands], date: str) -> Profile:
    widest = functools.reduce(Bands.joined, bands.values())
    measured = Measured(
        model=plan.model.rstrip("/").rpartition("/")[2],
        tokens=widest.tokens,
        date=date,
        validators=tuple(bands),
        bands=widest.numbers(),
    )
    formats = tuple(sorted({machine.dtype for machine in plan.validators}))
    return limits_from(widest, key).model_copy(update={"measured": measured, "validators": formats})


@dataclass(frozen=True)
class Cheating:
    """Work that is cheaper, or cooler, than what was asked for."""

    weights: Quantization | None = None
    temperature: float = 1.0


CHEATS: Mapping[str, Cheating] = {
    "int8 weights": Cheating(weights=INT8),
    "int4 weights": Cheating(weights=INT4),
    f"temperature {COOLER:g} T": Cheating(temperature=COOLER),
}


class Subject:
    """The worker that is measured: a model's weights, and the engine that draws from them."""

    def __init__(self, plan: Plan, tell: Progress) -> None:
        from shoal.models.load import load_model
        from shoal.models.state import policy_views

        self._plan, self._tell = plan, tell
        loaded = load_model(plan.model, plan.worker.dtype)
        self._files = dict(loaded.files)
        self._tensors: Mapping[str, TensorView] = policy_views(loaded.model)
        self._eos = loaded.eos_token_id
        self._prompts = _prompts(plan.model, loaded.tokenizer)
        self.worker = self.engine(plan.worker)

    def engine(self, machine: Machine) -> Engine:
        """An engine with the policy in place."""
        engine = build("torch", self._files, machine.device, machine.dtype)
        engine.load_policy(None, self._tensors)
        return engine

    def honest(self) -> list[Case]:
        return self._drawn("honest", self._plan.temperature, self._plan.sequences)

    def cheating(self, how: Cheating) -> list[Case]:
        """What a cheat hands in; as many tokens as the largest blocks need, but no more than honest ones."""
        enough = LARGEST_SHARE * max(BLOCKS) // self._plan.tokens
        sequences = min(self._plan.sequences, max(enough, 4 * self._plan.group_size))
        if how.weights is not None:
            self.worker.load_policy(None, quantized(self._tensors, how.weights))
        try:
            label = f"int{how.weights.bits}" if how.weights else f"temperature x {how.temperature:g}"
            return self._drawn(label, self._plan.temperature * how.temperature, sequences)
        finally:
            self.worker.load_policy(None, self._tensors)

    def _drawn(self, label: str, temperature: float, sequences: int) -> list[Case]:
        """Groups of this many sequences in all, drawn at `temperature` whatever their leases say."""
        plan = self._plan
        sampling = SamplingParameters(temperature=plan.temperature, max_new_tokens=plan.tokens, eos_token_id=self._eos)
        terms = Terms(label, plan.group_size, sampling, plan.proof, self.worker.kind)
        leases = [terms.lease(number, self._prompt(number)) for number in range(sequences // plan.group_size)]
        drawn = sampling.model_copy(update={"temperature": temperature})
        cases: list[Case] = []
        for start in range(0, len(leases), BATCH_GROUPS):
            self._tell(f"{label}: {start * plan.group_size} of {sequences} sequences by {self.worker.kind}")
            part = leases[start : start + BATCH_GROUPS]
            requests = [GenerationRequest(lease.prompt_ids, lease.seed_numbers, drawn) for lease in part]
            groups = self.worker.generate(requests, plan.proof)
            cases += [self._case(lease, group) for lease, group in zip(part, groups, strict=True)]
        return cases

    def _prompt(self, number: int) -> tuple[int, ...]:
        """Even groups and odd ones have no prompt in common: the ones set the limits, the others must keep them."""
        side = self._prompts[number % 2 :: 2]
        return side[number // 2 % len(side)]

    def _case(self, lease: Lease, group: Sequence[Completion]) -> Case:
        worker = self.worker
        submission = submission_of(lease, group, worker.name)
        return Case(lease, submission, "", worker.vocabulary_size, worker.hidden_size, Profile(key=worker.kind))


def _prompts(model: str, tokenizer: TextTokenizer) -> list[tuple[int, ...]]:
    """Something to go on from: the built-in model knows its own task only, any other is given openings of all kinds."""
    if model in BUILTIN:
        tasks = build_environment(EnvironmentSettings(name="sort")).tasks("train")
        return [tuple(tokenizer.encode(tasks[index].prompt)) for index in range(512)]
    return [tuple(tokenizer.encode(text)) for text in OPENINGS]


def replayed(engine: Engine, cases: Sequence[Case]) -> list[Case]:
    """The same cases as this validator's engine sees them."""
    found: list[Case] = []
    for start in range(0, len(cases), BATCH_GROUPS):
        part = cases[start : start + BATCH_GROUPS]
        for case, replay in zip(part, replay_all(engine, part), strict=True):
            if isinstance(replay, Exception):
                raise replay
            found.append(replace(case, replay=replay))
    return found


def other_dice(cases: Sequence[Case]) -> list[Case]:
    """Honest work handed in under seeds that did not draw it."""
    return [
        replace(
            case, lease=case.lease.model_copy(update={"seeds": seeds_of("other", case.lease.unit, len(case.seeds))})
        )
        for case in cases
    ]


def failed_checks(cases: Sequence[Case], profile: Profile) -> list[str]:
    """The reasons for which these groups would be rejected."""
    findings = [run_checks(AFTER_PREFILL, replace(case, profile=profile))[-1] for case in cases]
    return [finding.reason for finding in findings if not finding.passed]


def catches_of(cheat: str, validator: str, cases: Sequence[Case], profile: Profile) -> Iterator[Catch]:
    """How much of it is caught, by the number of tokens looked at."""
    for size in BLOCKS:
        answers = [caught(block, profile) for block in blocks_of(cases, size)]
        if answers:
            dice, proofs = (float(np.mean([answer[i] for answer in answers])) for i in (0, 1))
            either = float(np.mean([any(answer) for answer in answers]))
            yield Catch(cheat, validator, size, len(answers), dice, proofs, either)


def caught(parts: Sequence[Replay], profile: Profile) -> tuple[bool, bool]:
    """Whether dice and proofs would each reject these tokens."""
    names = ("uniforms", "low", "high", "logprobs", "entropy")
    uniforms, low, high, logprobs, entropy = (np.concatenate([getattr(p, name) for p in parts]) for name in names)
    dice = check_seeded(uniforms, low, high, logprobs, profile.sampling, entropy_T=entropy)
    return not dice.passed, not check_proofs(joined([part.comparisons for part in parts]), profile.proofs).passed


def blocks_of(cases: Sequence[Case], size: int) -> Iterator[list[Replay]]:
    """Cut what was handed in into blocks of at least `size` tokens, at the borders of proofs; the rest is left out."""
    parts: list[Replay] = []
    count = 0
    for case in cases:
        token, first_token, first_chunk = 0, 0, 0
        rows = [row for length in case.lengths for row in chunk_rows(length, case.lease.proof.rows)]
        for chunk, row in enumerate(rows):
            token, count = token + row, count + row
            if count >= size:
                yield [*parts, part_of(case.replayed, slice(first_token, token), slice(first_chunk, chunk + 1))]
                parts, count, first_token, first_chunk = [], 0, token, chunk + 1
        if first_chunk < len(rows):
            parts.append(part_of(case.replayed, slice(first_token, token), slice(first_chunk, len(rows))))


def joined(comparisons: Sequence[Comparisons]) -> Comparisons:
    """Those of all chunks, one after the other."""
    columns: dict[str, Any] = {}
    for each_field in dataclasses.fields(Comparisons):
        parts = [getattr(each, each_field.name) for each in comparisons]
        is_list = isinstance(parts[0], list)
        columns[each_field.name] = [entry for part in parts for entry in part] if is_list else np.concatenate(parts)
    return Comparisons(**columns)
