"""Honest groups, and cheats, under limits measured on a few of the honest ones: who is rejected, how fast, how often.

    python benchmarks/evidence.py FOLDER [--model smollm2] [--calibrate 24] [--seed 0]
    python benchmarks/evidence.py --looks LOOKS/cuda-float32.npz …     what honest_groups.py --looks LOOKS has written

FOLDER has recordings, MODEL.SET.VALIDATOR.npz: per token u, low, high, claimed, logprobs, entropy, varentropy; lengths
of rollouts; group_sizes; per proof chunk_k, chunk_exp_mismatches … (what `shoal.validator.case.Replay` has). Limits
come from some honest groups, as many as a calibration draws; all are judged, alone and as nodes with records. Nodes are
made by drawing groups with replacement: 10⁴ nodes of 10³ groups. A node is struck as by the judge: for a group alone
(products, single rollouts, accidents) or with its record, and only if a second look fails, too; then it begins anew.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.hub.state.reputation import recent
from shoal.protocol import (
    SUBMISSION_FORMAT,
    ProofParameters,
    Rollout,
    SamplingParameters,
    Submission,
    Sums,
    Tally,
    pack_logprobs,
)
from shoal.toploc import Comparisons
from shoal.validator.bands import Bands, limits_from
from shoal.validator.calibrate import blocks_of, caught
from shoal.validator.case import NO_RECORD, Case, Replay
from shoal.validator.checks import AFTER_PREFILL, run_all
from shoal.validator.evidence import SEEDS, STRIKE, _log_mean_exp, log_evidence, log_evidences
from shoal.validator.profiles import CHANNELS, Profile
from shoal.validator.verdicts import LeaseTemplate

Array = npt.NDArray[Any]
COLUMNS = {
    "logprobs": "logprobs",
    "low": "low",
    "high": "high",
    "entropy": "entropy",
    "varentropy": "varentropy",
    "uniforms": "u",
}
CHUNKS = ("k", "exp_mismatches", "mant_err_sum", "mant_err_median", "sign_mismatches", "outside_hits", "outside_count")


def recorded(path: Path) -> list[Case]:
    """The groups of one recording, as a validator has them after its prefill."""
    with np.load(path) as archive:
        columns: dict[str, Any] = {name: archive[name] for name in archive.files}
    tokens = {name: columns[source].astype(np.float64) for name, source in COLUMNS.items()}
    claimed, lengths = columns["claimed"], columns["lengths"]
    ends, chunk_ends = np.cumsum(lengths), np.cumsum(-(-lengths // ProofParameters().rows))
    cases, first = [], 0
    for number, size in enumerate(columns["group_sizes"].tolist()):
        last, begin = first + size - 1, 0 if first == 0 else chunk_ends[first - 1]
        span, chunks = slice(ends[first] - lengths[first], ends[last]), slice(begin, chunk_ends[last])
        parts = {name: columns[f"chunk_{name}"][chunks] for name in CHUNKS}
        nothing = np.zeros(len(parts["k"]), dtype=np.bool_)
        compared = Comparisons(**parts, constant=nothing, malformed=[None] * len(nothing))
        replay = Replay(**{name: values[span] for name, values in tokens.items()}, comparisons=compared)
        cases.append(case_of(number, replay, claimed[span], lengths[first : last + 1]))
        first = last + 1
    return cases


def case_of(number: int, replay: Replay, claimed_T: Array, lengths: Array) -> Case:
    sampling = SamplingParameters(temperature=1.0, max_new_tokens=8192, eos_token_ids=(0,))
    lease = LeaseTemplate("recorded", 1, sampling, ProofParameters(), "torch/cuda/bfloat16").lease(number, (1,))
    rollouts = [
        Rollout(tokens=bytes(4 * len(part)), logprobs=pack_logprobs(part), finish="length")
        for part in np.split(claimed_T, np.cumsum(lengths)[:-1])
    ]
    submission = Submission(SUBMISSION_FORMAT, "", "", "", number, 0, 0, "", b"", rollouts)
    return Case(lease, submission, "", 1, 1, Profile(key="torch/cuda/bfloat16"), replay=replay)


def with_logprobs(case: Case, profile: Profile, change: Callable[[Array, int], Array]) -> Case:
    """The same with other reported log-probabilities: `change` has those of a rollout, and its number."""
    parts = np.split(case.claimed, np.cumsum(case.lengths)[:-1])
    claimed_T = np.concatenate([change(part, index) for index, part in enumerate(parts)])
    changed = case_of(case.lease.unit, case.replayed, np.minimum(claimed_T, 0.0), np.array(case.lengths))
    return replace(changed, profile=profile)


def judged(cases: Sequence[Case], profile: Profile) -> Counter[str]:
    """What each group alone would be: accepted, unsure, or rejected, and why."""
    found: Counter[str] = Counter()
    for case in cases:
        finding = run_all(AFTER_PREFILL, replace(case, profile=profile))[-1]
        found["accepted" if finding.passed else finding.reason] += 1
    return found


ODD = ("unseeded", "proofs", "logprobs")  # what may be far off


@dataclass(frozen=True)
class Looks:
    """What one look at each of many groups showed. `sums` (seen, expected, shared) by channel; `rollouts`: those of
    each rollout for `SEEDS`; `accidents`: those of what was `ODD`; `rejected`: alone, whatever the reason."""

    sums: Array  # [groups, channels, 3]
    rollouts: Array  # [groups, 2, 3, rollouts]
    accidents: Array  # [groups, 3, 3]
    rejected: Array  # [groups]

    @classmethod
    def of(cls, cases: Sequence[Case]) -> Looks:
        sums, rollouts, accidents, rejected = [], [], [], []
        for case in cases:
            sums.append([columns_of(case.tally.of(name)) for name in CHANNELS])
            accidents.append([columns_of(case.accidents(getattr(case.outliers, name))) for name in ODD])
            by_rollout = []
            for name in SEEDS:
                limits = getattr(case.profile.noise, name)
                mean_R = case.measures.expected(name, limits) / limits.unit
                seen_R = case.measures.seen(name, case.profile.logprobs) / limits.unit
                by_rollout.append([seen_R, mean_R, (limits.shared * mean_R) ** 2])
            rollouts.append(by_rollout)
            finding = run_all(AFTER_PREFILL, replace(case, record=NO_RECORD))[-1]
            rejected.append(not finding.passed and not finding.unsure and finding.severity is not None)
        return cls(np.array(sums), np.array(rollouts), np.array(accidents), np.array(rejected))

    def plus(self, other: Looks) -> Looks:
        return Looks(**{name: np.concatenate([mine, getattr(other, name)]) for name, mine in vars(self).items()})

    def scaled(self, scale: float) -> Looks:
        """With so many times the noise."""
        factors = np.array([scale, 1.0, 1.0])
        rollouts = self.rollouts * factors[:, None]
        return replace(self, sums=self.sums * factors, rollouts=rollouts, accidents=self.accidents * factors)

    @property
    def alone(self) -> Array:
        """The strongest log-evidence of each group by itself."""
        by_name = {name: log_evidences(name, *self.sums[:, n].T) for n, name in enumerate(CHANNELS[:-1])}
        odd = {name: log_evidences("accidents", *self.accidents[:, n].T) for n, name in enumerate(ODD)}
        within = np.stack([by_name[name] for name in SEEDS], axis=1)
        single = []
        for n, name in enumerate(SEEDS):
            columns = self.rollouts[:, n].transpose(1, 0, 2)
            evidence = log_evidences(name, *columns.reshape(3, -1)).reshape(columns.shape[1:])
            single.append(_log_mean_exp(evidence))
        return np.max([*by_name.values(), *odd.values(), odd["unseeded"] + _log_mean_exp(within), *single], axis=0)


def columns_of(sums: Sums) -> tuple[float, float, float]:
    return sums.seen, sums.expected, sums.shared


@dataclass
class Resampled:
    strikes: Array  # by node
    largest: float = -np.inf  # log-evidence of any record


def resampled(first: Looks, second: Looks | None, nodes: int, groups: int, random: np.random.Generator) -> Resampled:
    """Nodes that submit groups drawn from these. Without a second look everything that fails is a strike."""
    fails_1 = (first.alone >= STRIKE) | first.rejected
    fails_2 = fails_1 if second is None else (second.alone >= STRIKE) | second.rejected
    again = first if second is None else second
    record, found = np.zeros((nodes, len(CHANNELS), 3)), Resampled(np.zeros(nodes, dtype=np.int64))

    def evidence_of(sums: Array) -> Array:
        return np.max([log_evidences(name, *sums[:, n].T) for n, name in enumerate(CHANNELS)], axis=0)

    for _ in range(groups):
        drawn = random.integers(0, len(fails_1), nodes)
        sums = record + first.sums[drawn]
        evidence = evidence_of(sums)
        found.largest = max(found.largest, float(evidence.max()))
        doubtful = np.flatnonzero((evidence >= STRIKE) | fails_1[drawn])
        confirmed = record[doubtful] + again.sums[drawn[doubtful]]
        struck = doubtful[(evidence_of(confirmed) >= STRIKE) | fails_2[drawn[doubtful]]] if len(doubtful) else doubtful
        sums[doubtful] = confirmed  # what a second look clears joins the record by that look
        sums[sums[..., 0] <= sums[..., 1]] = 0.0
        sums[struck] = 0.0
        found.strikes[struck] += 1
        record = sums
    return found


def report_nodes(first: Looks, second: Looks | None, options: argparse.Namespace, random: np.random.Generator) -> None:
    for scale in options.scales:
        found = resampled(
            first.scaled(scale), None if second is None else second.scaled(scale), options.nodes, options.groups, random
        )
        print(
            f"   noise x {scale:g}: {options.nodes} nodes x {options.groups} groups of {len(first.sums)}: "
            f"{found.strikes.sum()} strikes, {(found.strikes >= 2).sum()} nodes with two; the largest log-evidence of "
            f"a record is {found.largest:.1f}, of a group alone {first.scaled(scale).alone.max():.1f} "
            f"(a strike needs {STRIKE:.1f})",
            flush=True,
        )


def report_looks(path: Path, options: argparse.Namespace, random: np.random.Generator) -> None:
    with np.load(path) as archive:
        looks = [{name: archive[f"{which}/{name}"] for name in Looks.__annotations__} for which in ("first", "second")]
    first, second = (Looks(**columns) for columns in looks)
    both = int((first.rejected & second.rejected).sum())
    print(f"{path.stem}: {len(first.sums)} groups; rejected alone: {first.rejected.sum()}, twice: {both}")
    for name, looks in (("first", first), ("second", second)):
        seen, expected, _ = looks.sums.sum(axis=0).T
        shares = "  ".join(f"{c} {s / e:.2f}" for c, s, e in zip(CHANNELS, seen, expected, strict=True) if e)
        print(f"   seen by expected, {name} look: {shares}")
    report_nodes(first, second, options, random)
    print("   every first look a strike:")
    report_nodes(first, None, options, random)


def until_struck(tallies: Sequence[Tally], random: np.random.Generator, nodes: int = 200, most: int = 200) -> Array:
    """Groups until the first strike, for nodes that draw from these."""
    lasted = np.full(nodes, np.inf)
    for node in range(nodes):
        record = Tally()
        for group in range(1, most + 1):
            record = record.plus(tallies[int(random.integers(len(tallies)))])
            if any(log_evidence(name, record.of(name)) >= STRIKE for name in CHANNELS):
                lasted[node] = group
                break
            record = recent(record)
    return lasted


def report_honest(folder: Path, options: argparse.Namespace, profile: Profile, random: np.random.Generator) -> None:
    looks = dict[str, list[Looks]]()
    for validator in VALIDATORS:
        for name in ("honest128", "honest128-batch16", "honest1024", "honest8192"):
            path = folder / f"{options.model}.{name}.{validator}.npz"
            if not path.exists():
                continue
            cases = [replace(case, profile=profile) for case in recorded(path)]
            print(f"{name:<18} seen by {validator}: {len(cases)} groups, {dict(judged(cases, profile))}")
            worst = {c: max(log_evidence(c, case.tally.of(c)) for case in cases) for c in CHANNELS}
            ratio = {
                c: sum(k.tally.of(c).seen for k in cases) / sum(k.tally.of(c).expected for k in cases) for c in CHANNELS
            }
            print("   largest log-evidence " + "  ".join(f"{c} {worst[c]:.1f}" for c in CHANNELS))
            print("   seen by expected     " + "  ".join(f"{c} {ratio[c]:.2f}" for c in CHANNELS))
            if name.startswith("honest128"):
                looks.setdefault(validator, []).append(Looks.of(cases))
    joined = {validator: functools.reduce(Looks.plus, parts) for validator, parts in looks.items()}
    for validator, other in zip(VALIDATORS, reversed(VALIDATORS), strict=True):  # each the second look of the other
        print(f"seen by {validator}:")
        report_nodes(joined[validator], joined[other], options, random)


def report_cheats(folder: Path, options: argparse.Namespace, profile: Profile, random: np.random.Generator) -> None:
    for validator in VALIDATORS:
        honest = recorded(folder / f"{options.model}.honest128.{validator}.npz")
        shown = {n: recorded(folder / f"{options.model}.{n}.{validator}.npz") for n in CHEATS}
        shuffled = random.permutation(np.concatenate([case.replayed.uniforms for case in honest[:16]]))
        cut = np.cumsum([len(case.replayed.uniforms) for case in honest[:16]])[:-1]
        shown["other seeds"] = [
            replace(case, replay=replace(case.replayed, uniforms=u))
            for case, u in zip(honest[:16], np.split(shuffled, cut), strict=True)
        ]
        for name, cases in shown.items():
            shares = []
            for size in (32, 64, 128, 256, 512, 1024):
                answers = [caught(block, lengths, profile) for block, lengths in blocks_of(cases, size)]
                shares.append(f"{size}: {np.mean([any(answer) for answer in answers]):.1%}")
            print(f"{name:<20} seen by {validator}: caught in blocks of  " + "  ".join(shares), flush=True)
        for name, change in lies_of(random).items():
            lies = [with_logprobs(case, profile, change) for case in honest[:64]]
            alone = judged(lies, profile)
            lasted = np.sort(until_struck([case.tally for case in lies], random))
            print(
                f"log-probabilities {name:<34} seen by {validator}: {alone['accepted']} of {len(lies)} accepted alone; "
                f"a strike after {lasted[len(lasted) // 2]:g} groups (95 %: {lasted[-len(lasted) // 20]:g})",
                flush=True,
            )


def lies_of(random: np.random.Generator) -> dict[str, Callable[[Array, int], Array]]:
    def some(size: float, share: float) -> Callable[[Array, int], Array]:
        return lambda part, _: part - size * (random.random(len(part)) < share)

    def steady(size: float) -> Callable[[Array, int], Array]:
        return lambda part, index: part + size * (-1) ** index

    return {
        "1.4 lower for 5 % of tokens": some(1.4, 0.05),
        "0.5 lower for 5 % of tokens": some(0.5, 0.05),
        "0.2 lower for 5 % of tokens": some(0.2, 0.05),
        **{f"{size:g} off, by rollout up or down": steady(size) for size in (0.05, 0.03, 0.02, 0.01, 0.005, 0.003)},
    }


CHEATS = ("int8-weights", "int4-weights", "temperature-0.9-T")
VALIDATORS = ("cuda-float32", "cuda-bfloat16")


def measured(folder: Path, options: argparse.Namespace, random: np.random.Generator) -> Profile:
    """Limits from a few groups of 8, cut to the tokens that a calibration draws, and as small batches compute."""
    bands: list[Bands] = []
    for validator in VALIDATORS:
        cases = recorded(folder / f"{options.model}.honest128.{validator}.npz")
        chosen = random.permutation(len(cases))[: options.calibrate].tolist()
        bands.append(Bands.of([cases[index] for index in chosen]))
    print(f"calibrated on {bands[0].tokens} tokens in {options.calibrate} groups")
    return limits_from(functools.reduce(Bands.joined, bands), "torch/cuda/bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--looks", type=Path, nargs="+", default=[], help="files by honest_groups.py --looks")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--calibrate", type=int, default=24, help="groups of 16 that set the limits")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=1_000)
    parser.add_argument("--scales", type=float, nargs="*", default=[1.0, 1.1, 1.2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-cheats", action="store_true")
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    for path in options.looks:
        report_looks(path, options, random)
    if options.folder is None:
        return
    profile = measured(options.folder, options, random)
    print(profile.model_dump_json(exclude={"measured", "likelihood", "key", "validators"}))
    report_honest(options.folder, options, profile, random)
    if not options.no_cheats:
        report_cheats(options.folder, options, profile, random)


if __name__ == "__main__":
    main()
