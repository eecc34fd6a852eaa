"""Measuring limits: honest work of one kind of worker as validators see it, and cheaper work seen the same way.

    policy ─► worker's engine ─► honest groups by several kernels ─► validators' engines ─► bands ─► limits
                     │                                                       │
                     └─ int8, int4, T · 0.9, other seeds ────────────────────┴─► is each caught soon enough?

A validator measures the policy of its run before it judges; `shoal doctor --calibrate` measures a model folder. Work of
untrusted nodes is never measured. Limits under which a cheat passes are refused (`BAR`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shoal.engines import PLAIN, Engine, GenerationRequest
from shoal.engines.asking import Asking
from shoal.engines.groups import submission_of
from shoal.environments import Environment
from shoal.errors import ConfigError, UnusableTask
from shoal.models import TextTokenizer
from shoal.models.quantize import INT4, INT8, Quantization, is_rounded
from shoal.protocol import ProofParameters, SamplingParameters
from shoal.toploc import chunk_rows
from shoal.validator import evidence
from shoal.validator.bands import Bands, limits_from
from shoal.validator.branches import choice_bits
from shoal.validator.case import Case, Ints, Replay, joined, part_of, replay_all, uniforms_of
from shoal.validator.checks import AFTER_PREFILL, run_checks
from shoal.validator.evidence import SEEDS, STRIKE, Measures, Outliers
from shoal.validator.profiles import Measured, Profile
from shoal.validator.verdicts import LeaseTemplate, seeds_of

log = logging.getLogger(__name__)

Progress = Callable[[str], None]
Prompts = Sequence[tuple[int, ...]]

COOLER = 0.9
INT8_NAME, INT4_NAME = "int8 weights", "int4 weights"
COOLER_NAME, SEEDS_NAME = f"temperature {COOLER:g} T", "other seeds"
BAR: Mapping[str, int] = {INT8_NAME: 512, COOLER_NAME: 256, INT4_NAME: 64, SEEDS_NAME: 64}
"""Tokens of a block, by cheat. A share of `CAUGHT` of blocks must be caught, or the limits are refused."""
IN_NATS = frozenset({COOLER_NAME, SEEDS_NAME})  # their blocks need as many nats as tokens
CAUGHT = 0.99
HONEST_FAILING = 0.01  # of honest groups at most, or the limits are refused
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
RESAMPLED = 200  # blocks of each size, drawn from the chunks in several orders
MOST_ORDERS = 32
CHEAT_TOKENS = 32
VARIANT_TOKENS = 16
SMALL_BATCHES = (1, 8, 64)  # measured beside the main series of 256
ENOUGH_TOKENS = 1024  # a kernel with fewer tokens gets no bands of its own; they join the main series
LEAST_SEQUENCES = 32
MOST_SEQUENCES = 512
SHORT_TOKENS = 64  # if completions are shorter, more of them are drawn
LONGEST_PROMPT, PROMPT_HEAD = 512, 32
PROMPTS_TRIED = 128
COMPILING_S = 5.0
DRAW_S = 10.0  # the most time for one series of completions; a slow machine draws fewer
BATCH_GROUPS = 64
PROBE_SEQUENCES = 128
PROBE_ERRORS = 2.5
HALF_MARGIN = 1.125
LEAST_MOVED = {"outside_rate": 1e-3, "exponent_rate": 5e-3, "mantissa_mean": 0.01}  # float32's limits, halved
OPENINGS = (
    "The most surprising thing about the sea is", "Once upon a time, in a small town,", "To bake good bread you need",
    "Question: what is 17 + 25?\nAnswer:", "In physics, energy is", "Dear Sir or Madam,", "def add(a, b):\n",
    "The capital of France is", "My favourite season is", "A short history of mathematics:", "List three fruits:",
    "The doctor looked at the letter and said,", "How do birds find their way?", "First, open the window.",
    "Two trains leave the station at noon.", "It was a dark and stormy night;",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is drawn: `sequences` completions of at most `tokens` tokens, in groups, after these prompts."""

    prompts: Prompts
    eos_token_ids: tuple[int, ...]
    sequences: int = 256
    tokens: int = 96
    group_size: int = 8
    temperature: float = 1.0
    proof: ProofParameters = field(default_factory=ProofParameters)
    model: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        if self.sequences < LEAST_SEQUENCES or self.sequences < 4 * self.group_size:
            least = max(LEAST_SEQUENCES, 4 * self.group_size)
            raise ConfigError(f"a calibration needs at least {least} sequences, not {self.sequences}")

    def rows(self, tokens: int, token_row_s: float) -> int:
        """The number of sequences of so many tokens: more short ones, fewer on a slow machine."""
        wanted = self.sequences * max(1, SHORT_TOKENS // max(1, self.tokens))
        affordable = int(DRAW_S / max(token_row_s * tokens, 1e-9))
        rows = max(LEAST_SEQUENCES, 4 * self.group_size, min(wanted, affordable, MOST_SEQUENCES))
        return rows - rows % self.group_size


@dataclass(frozen=True)
class Catch:
    """The share of blocks of about `tokens` tokens of a cheat that seeds and proofs caught."""

    cheat: str
    validator: str
    tokens: int
    blocks: int
    by_sampling: float
    by_proofs: float
    by_either: float


@dataclass(frozen=True)
class Measurement:
    """The limits of one kind and their basis. By validator: `bands`, `seen` (its honest cases by kernel or batch size)
    and `failures` (reasons for which honest groups would be rejected). `problems`: why the limits must not be used.
    `choices`: the share of tokens with a neighbour that would pass, and bits per token to choose by. `untested`: cheats
    for which there was no block of enough tokens and nats; that refuses nothing, because a policy of so few nats gives
    nearly the same tokens by every seed and temperature. `under` judges the same work by other limits."""

    profile: Profile
    bands: Mapping[str, Bands]
    seen: Mapping[str, Mapping[str, Sequence[Case]]]
    groups: int
    failures: Mapping[str, list[str]]
    catches: tuple[Catch, ...]
    problems: tuple[str, ...]
    untested: tuple[str, ...]
    seconds: float
    choices: Mapping[str, tuple[float, float]]
    under: Callable[[Profile], Measurement]

    @property
    def variants(self) -> dict[tuple[str, str], Bands]:
        return {(name, at): Bands.of(cases) for at, each in self.seen.items() for name, cases in each.items()}


def measure(
    worker: Engine,
    validators: Mapping[str, Engine],
    plan: Plan,
    report: Progress = log.debug,
    sizes: Sequence[int] = (),
) -> Measurement:
    """The worker's engine may be one of the validators'; its weights change while it draws, and are restored. Blocks of
    `sizes` tokens are tried too."""
    began = time.monotonic()
    subject = Subject(worker, plan, report)
    honest = subject.honest()
    cheats = {name: subject.cheating(name) for name in (*ROUNDED, COOLER_NAME)}
    seen: dict[str, dict[str, list[Case]]] = {}
    caught: dict[tuple[str, str], list[Case]] = {}
    for machine, engine in validators.items():
        report(f"{worker.kind}: everything seen by {machine}")
        series = {**honest, **cheats}
        replays = iter(replayed(engine, [case for cases in series.values() for case in cases]))
        found = {name: list(itertools.islice(replays, len(cases))) for name, cases in series.items()}
        seen[machine] = {name: found[name] for name in honest}
        caught |= {(name, machine): found[name] for name in cheats}
        caught[SEEDS_NAME, machine] = other_seeds(seen[machine][MAIN])
    bands = {machine: _bands(each) for machine, each in seen.items()}
    every = {machine: [case for cases in each.values() for case in cases] for machine, each in seen.items()}
    bar = dict(BAR)
    for name in ROUNDED:  # with few tokens, one block of them all
        bar[name] = min(bar[name], _tokens(cheats[name]))
    groups = sum(len(cases) for cases in honest.values())
    choices = {name: choice_bits(cases, 2 * bands[name].outside_distance) for name, cases in every.items()}

    def under(profile: Profile) -> Measurement:
        failures = {machine: failed_checks(cases, profile) for machine, cases in every.items()}
        catches = tuple(
            catch
            for (name, machine), cases in caught.items()
            for catch in catches_of(name, machine, cases, profile, sorted({*sizes, bar[name]}))
        )
        problems = [
            f"{catch.cheat} would be caught in {catch.by_either:.1%} of blocks of {catch.tokens} tokens"
            f"{' and nats' if catch.cheat in IN_NATS else ''} by {catch.validator}, and must be in {CAUGHT:.0%}"
            for catch in catches
            if catch.tokens == bar[catch.cheat] and catch.by_either < CAUGHT
        ]
        problems += [
            f"{len(reasons)} of {groups} honest groups would be rejected by {machine} "
            f"({', '.join(sorted(set(reasons)))})"
            for machine, reasons in failures.items()
            if len(reasons) > HONEST_FAILING * groups
        ]
        tested = {(catch.cheat, catch.validator) for catch in catches if catch.tokens == bar[catch.cheat]}
        untested = tuple(
            f"{name}, {bar[name]} tokens{' and nats' if name in IN_NATS else ''}, by {machine}"
            for name, machine in sorted(caught.keys() - tested)
        )
        return Measurement(
            profile, bands, seen, groups, failures, catches, tuple(problems), untested,
            round(time.monotonic() - began, 1), choices, under,
        )  # fmt: skip

    widest = functools.reduce(Bands.joined, bands.values())
    measured = Measured(
        model=plan.model, tokens=widest.tokens, date=plan.date, validators=tuple(bands), bands=widest.numbers()
    )
    formats = tuple(sorted({machine.rpartition("/")[2] for machine in bands}))
    return under(limits_from(widest, worker.kind).model_copy(update={"measured": measured, "validators": formats}))


def has_moved(worker: Engine, validator: Engine, plan: Plan, limits: Profile) -> bool:
    """Whether honest work has left, or nearly left, the limits: groups fail, or a mean has used half of its margin."""
    tokens = min(VARIANT_TOKENS, plan.tokens)
    cases = replayed(validator, Subject(worker, plan, log.debug).drawn("probe", PROBE_SEQUENCES, tokens))
    if len(failed_checks(cases, limits)) > HONEST_FAILING * len(cases):
        return True
    before = limits.measured.bands if limits.measured is not None else {}
    found = []  # by group, the values named in `LEAST_MOVED`
    for seen in (case.replayed for case in cases):
        values, others = int(seen.comparisons.k.sum()), int(seen.comparisons.exp_mismatches.sum())
        mantissa = float(seen.comparisons.mant_err_sum.sum()) / max(1, values - others)
        found.append((float(seen.outside.mean()), others / max(1, values), mantissa))
    groups = np.array(found)
    errors = groups.std(axis=0, ddof=1) / math.sqrt(len(cases))
    return any(
        mean > max(before[name] * HALF_MARGIN + PROBE_ERRORS * error, least)
        for (name, least), mean, error in zip(LEAST_MOVED.items(), groups.mean(axis=0), errors, strict=True)
        if name in before
    )


def _bands(seen: Mapping[str, Sequence[Case]]) -> Bands:
    """The main series with small batches; other series of enough tokens raise the means. Groups of one row only have to
    pass."""
    large = [cases for name, cases in seen.items() if name != MAIN and _tokens(cases) >= ENOUGH_TOKENS]
    small = [case for cases in seen.values() if cases not in large for case in cases if len(case.lengths) > 1]
    return Bands.of(small, large)


def _tokens(cases: Sequence[Case]) -> int:
    return sum(case.generated for case in cases)


ROUNDED: Mapping[str, Quantization] = {INT8_NAME: INT8, INT4_NAME: INT4}
MAIN = "main"


class Subject:
    """The worker that is measured, with the policy loaded."""

    def __init__(self, worker: Engine, plan: Plan, report: Progress) -> None:
        self._worker, self._plan, self._report = worker, plan, report
        self._token_row_s = 0.0
        self._is_gpu = worker.kind.split("/")[1] == "cuda"
        lengths = [len(prompt) for prompt in plan.prompts]
        usual = max(set(lengths), key=lengths.count)
        self._alike = [prompt for prompt in plan.prompts if len(prompt) == usual]

    def honest(self) -> dict[str, list[Case]]:
        plan, found = self._plan, dict[str, list[Case]]()
        tokens = min(VARIANT_TOKENS, plan.tokens)
        if self._is_gpu:  # the largest first, so that the others fit into its memory
            found[MAIN] = self.drawn(MAIN, plan.rows(plan.tokens, 0.0), plan.tokens)
        else:
            self.drawn("warm-up", 1, 1)
        before_s, before = 0.0, 0
        for rows in SMALL_BATCHES:
            if self._token_row_s * rows * tokens > DRAW_S:
                break
            began = time.monotonic()
            found[f"batch {rows}"] = self.drawn(f"batch {rows}", rows, tokens)
            seconds = time.monotonic() - began
            if seconds < COMPILING_S and not self._is_gpu:  # part of it may have been the compiling of kernels
                began = time.monotonic()
                self.drawn(f"batch {rows}", rows, tokens)
                seconds = min(seconds, time.monotonic() - began)
            if before and not self._is_gpu:  # what one more row costs
                self._token_row_s = max(0.0, (seconds - before_s) / ((rows - before) * tokens))
            before_s, before = seconds, rows
        if MAIN not in found:
            found[MAIN] = self.drawn(MAIN, plan.rows(plan.tokens, self._token_row_s), plan.tokens)
        model, (path, device, _) = getattr(self._worker, "model", None), self._worker.kind.split("/")
        # With pages, and in vLLM, there is only one attention kernel.
        kernels = ("eager", "flash", "efficient", "math") if device == "cuda" else ("eager", "math")
        is_fixed = model is None or (device == "cuda" and path != PLAIN) or model.config._attn_implementation != "sdpa"
        for name in () if is_fixed else kernels:
            try:
                with attention(model, name):
                    rows = plan.rows(tokens, self._token_row_s)
                    found[name] = self.drawn(name, rows, tokens, prompts=self._alike)
            except RuntimeError as error:
                log.debug("attention by %s cannot be measured here: %s", name, error)
        return found

    def cheating(self, name: str) -> list[Case]:
        """At most as many tokens as honest groups."""
        tokens, temperature = min(CHEAT_TOKENS, self._plan.tokens), 1.0 if name in ROUNDED else COOLER
        with rounded(weights_of(self._worker), ROUNDED[name]) if name in ROUNDED else nullcontext():
            return self.drawn(name, self._plan.rows(tokens, self._token_row_s), tokens, temperature)

    def drawn(self, label: str, rows: int, tokens: int, temperature: float = 1.0, prompts: Prompts = ()) -> list[Case]:
        """Groups of so many sequences in all, drawn at `temperature` times that of their leases."""
        plan, prompts = self._plan, prompts or self._plan.prompts
        eos, worker, size = plan.eos_token_ids, self._worker, min(rows, plan.group_size)
        sampling = SamplingParameters(temperature=plan.temperature, max_new_tokens=tokens, eos_token_ids=eos)
        terms = LeaseTemplate(label, size, sampling, plan.proof, worker.kind)
        leases = [terms.lease(n, prompts[n % len(prompts)]) for n in range(rows // size)]
        drawn = sampling.model_copy(update={"temperature": plan.temperature * temperature})
        shape, profile, cases = (worker.vocabulary_size, worker.hidden_size), Profile(key=worker.kind), list[Case]()
        for start in range(0, len(leases), BATCH_GROUPS):
            self._report(f"{worker.kind}: {label}, {start * size} of {rows} sequences")
            part = leases[start : start + BATCH_GROUPS]
            requests = [GenerationRequest(lease.prompt_ids, lease.seed_numbers, drawn) for lease in part]
            for lease, group in zip(part, worker.generate(requests, plan.proof), strict=True):
                cases.append(Case(lease, submission_of(lease, group, worker.name), "", *shape, profile))
        return cases


def weights_of(engine: Engine) -> Mapping[str, Any]:
    """By name, in place; an engine that hides them cannot be measured."""
    from shoal.models.state import policy_state

    if (model := getattr(engine, "model", None)) is not None:
        return policy_state(model)
    weights: Mapping[str, Any] | None = getattr(engine, "weights", None)
    if weights is None:
        raise ConfigError(f"the engine {engine.name} has no weights to measure")
    return weights


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """Compute attention with another kernel, which rounds in another way; `RuntimeError` if it cannot."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    of_torch = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
    before = model.config._attn_implementation
    if name not in of_torch:
        model.set_attn_implementation(name)
    try:
        with sdpa_kernel(getattr(SDPBackend, of_torch[name])) if name in of_torch else nullcontext():
            yield
    finally:
        if name not in of_torch:
            model.set_attn_implementation(before)


@contextmanager
def rounded(weights: Mapping[str, Any], how: Quantization) -> Iterator[None]:
    kept = {name: each.clone() for name, each in weights.items() if is_rounded(name, each.shape)}
    try:
        for name, each in kept.items():
            weights[name].copy_(how.round(each.float()))
        yield
    finally:
        for name, each in kept.items():
            weights[name].copy_(each)


def prompts_of(files: Mapping[str, bytes], environment: Environment, tokens: int) -> Prompts:
    """Prompts of the run's environment, long ones without their middle (without its first token a model may repeat one
    word). If it has none, openings."""
    asking, tasks = Asking(files, environment, tokens), environment.tasks("train")
    found: list[tuple[int, ...]] = []
    for index in range(min(len(tasks), PROMPTS_TRIED)):
        try:
            ids = asking.ids(tasks[index])
        except UnusableTask:
            continue
        is_long = len(ids) > LONGEST_PROMPT
        found.append((*ids[:PROMPT_HEAD], *ids[PROMPT_HEAD - LONGEST_PROMPT :]) if is_long else ids)
    return found or openings(asking.encoder.tokenizer)


def openings(tokenizer: TextTokenizer) -> Prompts:
    return [tuple(tokenizer.encode(text)) for text in OPENINGS]


def replayed(engine: Engine, cases: Sequence[Case]) -> list[Case]:
    found: list[Case] = []
    for start in range(0, len(cases), BATCH_GROUPS):
        part = cases[start : start + BATCH_GROUPS]
        for case, replay in zip(part, replay_all(engine, part), strict=True):
            if isinstance(replay, Exception):
                raise replay
            found.append(replace(case, replay=replay))
    return found


def other_seeds(cases: Sequence[Case]) -> list[Case]:
    """Replayed honest work, with seeds that did not draw it."""
    found = []
    for case in cases:
        seeds = seeds_of("other", case.lease.unit, len(case.seeds))
        moved = replace(case, lease=case.lease.model_copy(update={"seeds": seeds}))
        found.append(replace(moved, replay=replace(case.replayed, uniforms=uniforms_of([moved]))))
    return found


def failed_checks(cases: Sequence[Case], profile: Profile) -> list[str]:
    """Without unsure ones."""
    findings = [run_checks(AFTER_PREFILL, replace(case, profile=profile))[-1] for case in cases]
    return [finding.reason for finding in findings if not finding.passed and not finding.unsure]


def catches_of(
    cheat: str, validator: str, cases: Sequence[Case], profile: Profile, sizes: Sequence[int]
) -> Iterator[Catch]:
    for size in sizes:
        blocks = blocks_of(cases, size, size if cheat in IN_NATS and size == BAR[cheat] else 0)
        answers = [caught(block, lengths, profile) for block, lengths in blocks]
        if answers:
            sampling, proofs = (float(np.mean([answer[i] for answer in answers])) for i in (0, 1))
            either = float(np.mean([any(answer) for answer in answers]))
            yield Catch(cheat, validator, size, len(answers), sampling, proofs, either)


def caught(block: Replay, lengths: Ints, profile: Profile) -> tuple[bool, bool]:
    """Whether the check of seeds and that of proofs would reject these tokens. Each chunk counts as a rollout of its
    own."""
    drawn_T, chunk_of_T = np.ones(int(lengths.sum()), dtype=np.bool_), np.repeat(np.arange(len(lengths)), lengths)
    odd = Outliers.of(block, block.logprobs, drawn_T, chunk_of_T, profile)
    kept = odd.kept(drawn_T, chunk_of_T, profile.accidents)
    measures = Measures.of(block, block.logprobs, np.zeros(1, np.int64), kept, profile.noise)

    series = (odd.unseeded, odd.proofs)
    far, proofs = (evidence.accident_sums(points, np.arange(len(points)), profile.accidents) for points in series)
    seeds = evidence.log_evidence_of_seeds(far, *(measures.sums(name, profile) for name in SEEDS))
    drift = max(evidence.log_evidence(name, measures.sums(name, profile)) for name in ("exponents", "mantissa"))
    return seeds >= STRIKE, max(drift, evidence.log_evidence("accidents", proofs)) >= STRIKE


def blocks_of(cases: Sequence[Case], size: int, nats: float = 0) -> Iterator[tuple[Replay, Ints]]:
    """Blocks of at least `size` tokens and `nats` of entropy, made of whole chunks, with the lengths of these. Chunks
    are combined in several (fixed) orders, because few tokens make few blocks."""
    lengths = np.array(
        [n for case in cases for length in case.lengths for n in chunk_rows(length, case.lease.proof.rows)]
    )
    if lengths.sum() < size:
        return
    starts, replays = np.cumsum(lengths) - lengths, [case.replayed for case in cases]
    names = [each.name for each in dataclasses.fields(Replay) if each.name != "comparisons"]
    columns = {name: np.concatenate([getattr(replay, name) for replay in replays]) for name in names}
    everything = Replay(**columns, comparisons=joined([replay.comparisons for replay in replays]))
    made, random = 0, np.random.default_rng(0)
    for _ in range(MOST_ORDERS):
        order = random.permutation(len(lengths))
        tokens = np.concatenate([np.arange(starts[chunk], starts[chunk] + lengths[chunk]) for chunk in order])
        mixed, first_token, first_chunk = part_of(everything, tokens, order), 0, 0
        before_T = np.concatenate([[0.0], np.cumsum(mixed.entropy)])
        for chunk, token in enumerate(np.cumsum(lengths[order]).tolist()):
            if token - first_token >= size and before_T[token] - before_T[first_token] >= nats:
                chunks = slice(first_chunk, chunk + 1)
                yield part_of(mixed, slice(first_token, token), chunks), lengths[order][chunks]
                first_token, first_chunk, made = token, chunk + 1, made + 1
        if made >= RESAMPLED:
            return
