"""Does tolerance buy reward, and how soon is that seen? Honest groups and steered ones, with the seeds' branches.

    python benchmarks/steered_branches.py --model FOLDER --device cuda --dtype bfloat16 --against cuda/float32
    OMP_NUM_THREADS=1 python benchmarks/steered_branches.py --groups 8 --tokens 24      (the tiny model, on a CPU)

A worker's engine draws groups, honestly and with the cheat `branch`: for each number in `--tries`, so many neighbours
of tokens next to an edge are decoded, and the best completion is kept; one token of a rollout is changed at most. The
reward is 1 for completions with a chosen property that about half of the honest ones have, else 0. The validator's
engine replays the groups and decodes the branches of all rollouts; nodes are resampled from what they showed, each with
the share of branches that a hub would ask for after what it has seen of the node (`look_share`), as newcomers and after
1,000 honest groups. (What honest nodes would show is resampled with the signs of all differences drawn anew.)

Reports: tokens that pass only by tolerance per 1,000, bits per token that a worker may choose, the reward bought,
groups rejected by limits measured on honest groups, the differences, tokens spent, and after how many groups the
evidence suffices. Takes about 150 s on an H200 with a model of 135 M weights.
"""

from __future__ import annotations

import argparse
import collections
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal.adversary.steering import Branching
from shoal.engines import Completion, Engine, GenerationRequest, build
from shoal.engines.groups import submission_of
from shoal.environments import EnvironmentSettings
from shoal.environments import build as build_environment
from shoal.errors import ScoringFailure
from shoal.models.load import load_model
from shoal.models.state import policy_views
from shoal.protocol import ProofParameters, RolloutReward, SamplingParameters
from shoal.protocol.verdict import BETS, ENOUGH, MARGIN, RECENT_BET, Branches, look_share
from shoal.sampling.check import distances
from shoal.validator.bands import Bands, limits_from
from shoal.validator.branches import Branch, BranchChecker, by_tolerance, choice_bits
from shoal.validator.calibrate import OPENINGS
from shoal.validator.case import Case, replay_all
from shoal.validator.checks import AFTER_PREFILL, run_all
from shoal.validator.profiles import Profile
from shoal.validator.rewards import Group, Scored, completion_ids
from shoal.validator.verdicts import LeaseTemplate, Machine

GROUPS_AT_ONCE = 16
NODES = 2_000

Property = Callable[[str], float]


def count_of(text: str) -> float:
    """Spread over the whole completion: letters and digits that are vowels, commas or odd."""
    return float(sum(text.count(mark) for mark in "aeio,13579"))


def ending_of(text: str) -> float:
    """Decided by the last few tokens."""
    return float(sum(map(ord, text[-12:])) % 97)


def opening_of(text: str) -> float:
    """Decided by the first tokens."""
    return count_of(text[:24])


PROPERTIES: dict[str, Property] = {"count": count_of, "ending": ending_of, "opening": opening_of}


@dataclass
class Bench:
    """Both engines, the prompts, and what completions are worth once the honest ones are known."""

    worker: Engine
    validator: Engine
    decode: Callable[[Sequence[int]], str]
    terms: LeaseTemplate
    prompts: Sequence[tuple[int, ...]]
    tasks: Property
    threshold: float = 0.0

    def reward(self, token_ids: Sequence[int]) -> float:
        return float(self.tasks(self.decode(token_ids)) > self.threshold)

    def value_of(self, _prompt: tuple[int, ...]) -> Callable[[Completion], float]:
        eos = self.terms.sampling.eos_token_ids
        return lambda each: self.reward([token for token in each.token_ids.tolist() if token not in eos])

    def score(self, groups: Sequence[Group]) -> list[Scored | ScoringFailure]:
        return [Scored(tuple(map(self._rewarded, group.rollouts))) for group in groups]

    def _rewarded(self, rollout: object) -> RolloutReward:
        return RolloutReward(value=self.reward(completion_ids(rollout, self.terms.sampling.eos_token_ids)))

    def cases(self, engine: Engine, count: int) -> list[Case]:
        """What a worker with this engine hands in, as the validator's engine sees it."""
        found: list[Case] = []
        for start in range(0, count, GROUPS_AT_ONCE):
            numbers = range(start, min(start + GROUPS_AT_ONCE, count))
            leases = [self.terms.lease(number, self.prompts[number % len(self.prompts)]) for number in numbers]
            asked = [GenerationRequest(lease.prompt_ids, lease.seed_numbers, lease.sampling) for lease in leases]
            for lease, group in zip(leases, engine.generate(asked, self.terms.proof), strict=True):
                submission = submission_of(lease, group, engine.name)
                sizes = (engine.vocabulary_size, engine.hidden_size)
                found.append(Case(lease, submission, "", *sizes, Profile(key=self.worker.kind)))
        for start in range(0, len(found), GROUPS_AT_ONCE):
            part = found[start : start + GROUPS_AT_ONCE]
            for case, replay in zip(part, replay_all(self.validator, part), strict=True):
                if isinstance(replay, Exception):
                    raise replay
                case.replay = replay
        return found

    def rewards(self, case: Case) -> tuple[RolloutReward, ...]:
        return tuple(map(self._rewarded, case.rollouts))


def looked(bench: Bench, cases: Sequence[Case], seed: int) -> list[Branches]:
    """The branches of all rollouts, as a validator decodes them of nodes that are nearly found out."""
    branch_checker = BranchChecker(time_share=math.inf, rng=random.Random(seed))
    judged = [(case, bench.rewards(case), 1.0) for case in cases]
    parts = [judged[start : start + GROUPS_AT_ONCE] for start in range(0, len(judged), GROUPS_AT_ONCE)]
    return [each for part in parts for each in branch_checker.look(part, bench.validator, bench.score)]


def every_branch(bench: Bench, cases: Sequence[Case]) -> dict[str, list[float]]:
    """The seed's branch at every token that passes only by tolerance: where, how long, and what both are worth."""
    most, eos = bench.terms.sampling.max_new_tokens, bench.terms.sampling.eos_token_ids
    looks = [
        (number, Branch(case, rollout, int(token), most - int(token)))
        for number, case in enumerate(cases)
        for rollout in range(len(case.rollouts))
        for token in np.flatnonzero(by_tolerance(case)[case.starts[rollout] :][: case.lengths[rollout]])
    ]
    found = collections.defaultdict[str, list[float]](list)
    for start in range(0, len(looks), 1024):
        part = looks[start : start + 1024]
        drawn = bench.validator.generate([look.request(look.limit) for _, look in part])
        for (number, look), group in zip(part, drawn, strict=True):
            kept = look.case.rollouts[look.rollout].token_ids
            other = np.concatenate([kept[: look.token], group[0].token_ids])
            columns = {"group": number, "rollout": look.rollout, "token": look.token}
            for name, ids in (("submitted", kept), ("branch", other)):
                text = bench.decode([token for token in ids.tolist() if token not in eos])
                columns |= {f"{name}_length": len(ids)}
                columns |= {f"{name}_{which}": value(text) for which, value in PROPERTIES.items()}
            for name, value in columns.items():
                found[name].append(float(value))
    return found


@dataclass
class Resampled:
    """Nodes resampled from groups: the evidence after each group [nodes, groups], and tokens decoded, by group."""

    evidence: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]


def resampled(
    seen: Sequence[Branches], groups: int, seed: int, honest: Sequence[Branches] = (), past: int = 0
) -> Resampled:
    """Nodes whose branches are decoded by the share that a hub asks for; the same sums as `GainEvidence`. The first
    `past` groups are `honest` ones, in which each difference is as often negative as positive."""
    rng = np.random.default_rng(seed)
    stakes, count, now, recent = np.zeros((NODES, len(BETS))), np.zeros(NODES), np.ones(NODES), np.ones(NODES)
    found = Resampled(np.ones((NODES, groups)), np.zeros((NODES, groups)))
    tables = [(table_of(part), np.array([float(each.tokens) for each in part])) for part in (honest or seen, seen)]
    for group in range(-past, groups):
        is_honest = group < 0 or seen is honest
        table, costs = tables[group >= 0]
        share = np.array([look_share(past + group, each) for each in np.maximum(now, recent)])
        drawn = rng.integers(len(table), size=NODES)
        for difference in table[drawn].T:
            difference = np.where(rng.random(NODES) < share, difference, 0.0)
            difference = difference * rng.choice([-1.0, 1.0], size=NODES) if is_honest else difference
            differs = difference != 0
            count = count + differs
            staked = np.where(differs, 1 / np.maximum(1, count * (count + 1)), 0.0)
            outcome = difference - MARGIN * np.abs(difference)
            stakes = np.minimum((stakes + staked[:, None]) * (1 + np.outer(outcome, BETS)), 1e300)
            recent = np.clip(recent * (1 + RECENT_BET * outcome), 1.0, ENOUGH)
        now = stakes.mean(axis=1) + 1 / (count + 1)
        if group >= 0:
            found.evidence[:, group], found.tokens[:, group] = now, share * costs[drawn]
    return found


def table_of(seen: Sequence[Branches]) -> npt.NDArray[np.float64]:
    most = max(1, max(len(each.differences) for each in seen))
    return np.array([[*each.differences, *[0.0] * (most - len(each.differences))] for each in seen])


def report(
    name: str, bench: Bench, cases: Sequence[Case], options: argparse.Namespace, profile: Profile,
    honest: Sequence[Branches] = (),
) -> tuple[float, list[Branches]]:  # fmt: skip
    """One paragraph about honest or steered groups; returns their mean reward, and what their branches showed."""
    tokens, outside = sum(len(case.tokens) for case in cases), sum(int(by_tolerance(case).sum()) for case in cases)
    rewards = [reward.value for case in cases for reward in bench.rewards(case)]
    outcomes: collections.Counter[str] = collections.Counter()
    for case in cases:
        last = run_all(AFTER_PREFILL, replace(case, profile=profile))[-1]
        outcomes["unsure" if last.unsure else last.reason or "accepted"] += 1
    began_s = time.monotonic()
    seen = looked(bench, cases, options.seed)
    spent_s = time.monotonic() - began_s
    differing = [value for each in seen for value in each.differences]
    plus, looks, decoded = sum(v > 0 for v in differing), sum(each.looked for each in seen), sum(b.tokens for b in seen)
    print(f"\n{name}: {len(cases)} groups, {tokens} tokens, {1000 * outside / tokens:.2f} per 1,000 pass by tolerance")
    print(f"  reward {np.mean(rewards):.4f}; groups {dict(outcomes)}")
    pairs = f"{len(differing)} unequal pairs, {plus} in its favour"
    print(f"  {looks} branches of {decoded} tokens in {spent_s:.1f} s; {pairs}")
    groups, honest = (3 * options.within, honest) if honest else (1000, seen)
    for past in (0, 1000):
        nodes = resampled(seen, groups, options.seed, honest, past)
        reached = nodes.evidence >= ENOUGH
        when = np.where(reached.any(axis=1), reached.argmax(axis=1) + 1.0, np.inf)
        half, most = (float(np.sort(when)[int(share * NODES)]) for share in (0.5, 0.95))
        share = nodes.tokens.mean() * len(seen) / tokens
        print(
            f"  after {past} honest groups: found within {options.within} groups {np.mean(when <= options.within):.4f} "
            f"of {NODES} nodes; half after {half:g}, 95 % after {most:g}; branches take {share:.2%} of the tokens; "
            f"largest evidence {nodes.evidence.max():.3g}",
            flush=True,
        )
    return float(np.mean(rewards)), seen


def main() -> None:
    options, began_s = parse_options(), time.monotonic()
    bench = bench_of(options)
    print(f"{Path(options.model).name}, worker {bench.worker.kind}, validator {options.against}, {options.property}")
    honest = bench.cases(bench.worker, options.groups)
    eos = bench.terms.sampling.eos_token_ids
    texts = [bench.decode(completion_ids(rollout, eos)) for case in honest for rollout in case.rollouts]
    bench.threshold = float(np.median([bench.tasks(text) for text in texts]))
    profile = limits_from(Bands.of(honest), bench.worker.kind)
    found = [distances(case.replayed.uniforms, case.replayed.low, case.replayed.high) for case in honest]
    outside = np.concatenate(found)[np.concatenate([by_tolerance(case) for case in honest])]
    mean = float(outside.mean()) if len(outside) else 1e-6
    print(f"tokens outside are so by {mean:.2g} on average, {outside.max() if len(outside) else 0:.2g} at most")
    for label, reach in (("twice the mean distance", 2 * mean), ("the limit of one token", profile.sampling.distance)):
        share, bits = choice_bits(honest, reach)
        print(f"  within {label} ({reach:.2g}): {share:.4f} of tokens have a neighbour, {bits:.4f} bits a token")
    tables = {"threshold": np.array(bench.threshold)}
    if options.table:
        tables |= {f"honest/{name}": np.array(each) for name, each in every_branch(bench, honest).items()}
    base, shown = report("honest", bench, honest, options, profile)
    for tries in options.tries:
        steered = Branching(bench.worker, bench.value_of, 2 * mean, tries)
        cases = bench.cases(steered, options.groups)  # the same leases
        gained, _ = report(f"steered, {tries} neighbours", bench, cases, options, profile, shown)
        print(f"  bought: {gained - base:+.4f}; {time.monotonic() - began_s:.0f} s so far", flush=True)
        if options.table:
            tables |= {f"{tries}/{name}": np.array(each) for name, each in every_branch(bench, cases).items()}
            np.savez_compressed(options.table, **tables)


def bench_of(options: argparse.Namespace) -> Bench:
    loaded, against = load_model(options.model, options.dtype), Machine.parse(options.against)
    engines = [
        build("torch", loaded.files, options.device, options.dtype),
        build("torch", loaded.files, against.device, against.dtype),
    ]
    for engine in engines:
        engine.load_policy(None, policy_views(loaded.model))
    sampling = SamplingParameters(
        temperature=options.temperature, max_new_tokens=options.tokens, eos_token_ids=loaded.eos_token_ids
    )
    terms = LeaseTemplate(f"branches/{options.seed}", options.group_size, sampling, ProofParameters(), engines[0].kind)
    encode, texts = loaded.tokenizer.encode, OPENINGS
    if options.model == "tiny":
        texts = [task.prompt for task in build_environment(EnvironmentSettings(name="sort")).tasks("train")[:512]]
    prompts = [tuple(encode(text)) for text in texts]
    return Bench(*engines, loaded.tokenizer.decode, terms, prompts, PROPERTIES[options.property])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--against", default="cpu/float32")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tries", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--within", type=int, default=100, help="groups within which steering is to be caught")
    parser.add_argument("--property", choices=PROPERTIES, default="count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path, help="where the branches at all tokens are written (.npz)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
