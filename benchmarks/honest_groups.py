"""How often honest work fails a check: every failed check of every group counts.

    OMP_NUM_THREADS=1 python benchmarks/honest_groups.py [--groups 10000] [--group-size 16] [--tokens 10]
    python benchmarks/honest_groups.py --model FOLDER --device cuda --dtype bfloat16 --calibrate --groups 2000
                      --tokens 128 --against cuda/float32 cuda/bfloat16 [--endless] [--nodes 4] [--out FILE.json]
                      [--looks FOLDER]

A worker's engine draws groups by a key-value cache; the engine of each validator, given their bytes, judges them as in
a run: with all checks, with the record of the node that they are from (`--nodes` nodes take turns), and with a second
look in the worker's own number format. Limits are the built-in ones, those of `--profile`, or (`--calibrate`) what a
validator of a run would have measured before the first group. `--endless`: no completion ends before its last token;
the channels are also reported by position. `--looks` keeps the sums of both looks at every group (3 KB), from which
evidence.py resamples nodes. Reports what was rejected and why, what was unsure, and the bytes of proof per token.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from evidence import Looks

from shoal.engines import Engine, GenerationRequest, build
from shoal.engines.memory import keep_to_share
from shoal.engines.shelf import LoadedPolicy
from shoal.engines.torch import TorchEngine
from shoal.environments import EnvironmentSettings
from shoal.environments import build as build_environment
from shoal.hub.state.reputation import recent
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import policy_views
from shoal.protocol import ProofParameters, SamplingParameters, SigningKey, Tally
from shoal.validator import judge as judge_module
from shoal.validator.calibrate import OPENINGS, Plan, measure
from shoal.validator.case import Case, Replay, replay_all
from shoal.validator.evidence import Kept, Measures
from shoal.validator.judge import Judge
from shoal.validator.profiles import NoiseLimits, Profiles, load_profiles
from shoal.validator.verdicts import POLICY, AuditJob, LeaseTemplate, Machine, audit_job_of

POSITIONS = (128, 1024, 8192)


class Prefills:
    """The replays that validators compute, by engine and group: the first look of one is the second of another."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], Replay | Exception] = {}

    def all(self, engine: Engine, cases: Sequence[Case]) -> list[Replay | Exception]:
        """In place of `replay_all` in the judge."""
        found = replay_all(engine, cases)
        for case, replay in zip(cases, found, strict=True):
            self._kept.setdefault((id(engine), case.lease.unit, len(case.tokens)), replay)
        return found

    def of(self, engine: Engine, cases: Sequence[Case]) -> list[Case]:
        keys = [(id(engine), case.lease.unit, len(case.tokens)) for case in cases]
        self.all(engine, [case for key, case in zip(keys, cases, strict=True) if key not in self._kept])
        return [dataclasses.replace(case, replay=self._kept[key]) for key, case in zip(keys, cases, strict=True)]

    def forget(self) -> None:
        self._kept.clear()


class Bench:
    """One validator: its engine, its limits, the records of the nodes, and what it has decided."""

    def __init__(
        self,
        machine: Machine,
        loaded: LoadedModel,
        worker: Engine,
        others: dict[str, Engine],
        options: argparse.Namespace,
    ) -> None:
        self.machine, self.files = machine, loaded.files
        same = str(machine) == f"{options.device}/{options.dtype}"
        self.engine = worker if same else build("torch", loaded.files, machine.device, machine.dtype)
        if not same:
            self.engine.load_policy(None, policy_views(loaded.model))
        others.setdefault(machine.dtype, self.engine)
        self.measured: dict[str, Any] = {}
        profiles = load_profiles(options.profile)
        environment = build_environment(EnvironmentSettings(name="sort"))
        if options.calibrate:
            texts = [options.begin + text for text in OPENINGS]
            if options.model == "tiny":
                texts = [task.prompt for task in environment.tasks("train")[:128]]
            profiles = {**profiles, **self.calibrated(loaded, worker, texts, options.tokens)}
        self.others, self.looks = others, dict[str, Looks]()
        self.folder, self.positions = options.looks, POSITIONS if options.endless else ()
        self.by_position = collections.defaultdict[tuple[int, str], list[float]](lambda: [0.0, 0.0])
        self.judge = Judge(environment, profiles, second_engine=lambda _, dtype: others.get(dtype))
        self.records, self.kept = [Tally()] * options.nodes, options.keep
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.seconds = 0.0

    def calibrated(self, loaded: LoadedModel, worker: Engine, texts: Sequence[str], tokens: int) -> Profiles:
        """What this validator would measure at the start of a run, with prompts as the run has them."""
        assert isinstance(self.engine, TorchEngine)
        copy = self.engine.copied(loaded.files, worker.kind.rpartition("/")[2])
        second = worker.kind.partition("/")[2]
        prompts = [tuple(loaded.tokenizer.encode(text)) for text in texts]
        plan = Plan(prompts, loaded.eos_token_ids, tokens=min(Plan.tokens, tokens))
        found = measure(copy, {second: copy, str(self.machine): self.engine}, plan)
        self.measured = {"seconds": found.seconds, "problems": found.problems, "choices": dict(found.choices)}
        print(f"{self.machine}: limits measured in {found.seconds} s; {found.problems or 'accepted'}", flush=True)
        return {found.profile.key: found.profile}

    def judged(self, start: int, audit_jobs: Sequence[AuditJob]) -> None:
        began_s = time.monotonic()
        places = [(start + index) % len(self.records) for index in range(len(audit_jobs))]
        given = [
            dataclasses.replace(each, audit=each.audit.model_copy(update={"record": self.records[place]}))
            for place, each in zip(places, audit_jobs, strict=True)
        ]
        verdicts = self.judge.verdicts(given, LoadedPolicy(POLICY, self.engine, self.files))
        for audit_job, verdict in zip(given, verdicts, strict=True):
            if verdict.reason and self.kept:
                self.keep(audit_job)
        for place, verdict in zip(places, verdicts, strict=True):
            self.outcomes[f"{verdict.outcome.value} {verdict.reason}".strip()] += 1
            if verdict.reason:
                print(f"  {self.machine}, group {verdict.unit}: {verdict.reason}: {verdict.message}", flush=True)
            self.records[place] = recent(self.records[place].plus(verdict.tally))
        self.seconds += time.monotonic() - began_s

    def look(self, audit_jobs: Sequence[AuditJob], prefills: Prefills) -> None:
        """Both looks at every group, whether or not a second one was needed, as sums."""
        loaded = LoadedPolicy(POLICY, self.engine, self.files)
        opened = [self.judge._open(self.judge.named(each), loaded).case for each in audit_jobs]  # type: ignore[union-attr]
        first = prefills.of(self.engine, opened)
        for case in first:
            self.add_positions(case)
        if not self.folder:
            return
        theirs = audit_jobs[0].lease.profile.rpartition("/")[2]
        second = self.others.get(theirs if self.machine.dtype != theirs else "float32", self.engine)
        for name, cases in (("first", first), ("second", prefills.of(second, opened))):
            seen = Looks.of(cases)
            self.looks[name] = self.looks[name].plus(seen) if name in self.looks else seen
        columns = {f"{name}/{key}": value for name, looks in self.looks.items() for key, value in vars(looks).items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(self.folder / f"{str(self.machine).replace('/', '-')}.npz", **columns)

    def add_positions(self, case: Case) -> None:
        """What the channels saw, and what is expected at most, in the first tokens of every rollout."""
        position_T = np.arange(len(case.tokens)) - np.repeat(case.starts, case.lengths)
        for most in self.positions:
            is_near = case.part < -(-most // case.lease.proof.rows)
            kept = Kept(case.kept.tokens & (position_T < most), case.kept.chunks & is_near)
            measures = Measures.of(case.replayed, case.claimed, case.starts, kept, case.profile.noise)
            for name in NoiseLimits.model_fields:
                sums = self.by_position[most, name]
                sums[0] += float(measures.seen(name, case.profile.logprobs).sum())
                sums[1] += float(measures.expected(name, getattr(case.profile.noise, name)).sum())

    def ratios(self) -> dict[str, dict[str, float]]:
        """By position and channel: seen by expected."""
        return {
            f"first {most} tokens": {
                name: round(self.by_position[most, name][0] / max(self.by_position[most, name][1], 1e-300), 3)
                for name in NoiseLimits.model_fields
            }
            for most in self.positions
        }

    def keep(self, audit_job: AuditJob) -> None:
        """All that the checks look at, for a closer look without this machine."""
        case = self.judge._open(audit_job, LoadedPolicy(POLICY, self.engine, self.files)).case  # type: ignore[union-attr]
        [replay] = replay_all(self.engine, [case])
        columns = {each.name: getattr(replay, each.name) for each in dataclasses.fields(replay)}
        compared = columns.pop("comparisons")
        columns |= {f"proof_{each.name}": getattr(compared, each.name) for each in dataclasses.fields(compared)}
        profile = np.frombuffer(case.profile.model_dump_json().encode(), np.uint8)
        name = f"{str(self.machine).replace('/', '-')}-{audit_job.lease.unit}.npz"
        np.savez_compressed(
            self.kept / name, **columns, claimed=case.claimed, lengths=case.lengths, chunk_of=case.chunk_of,
            part=case.part, profile=profile,
        )  # fmt: skip


def main() -> None:
    options, prefills = parse_options(), Prefills()
    judge_module.replay_all = prefills.all
    keep_to_share(f"torch/{options.device}/{options.dtype}", options.memory_share)
    loaded = load_model(options.model, options.dtype)
    worker = build("torch", loaded.files, options.device, options.dtype)
    worker.load_policy(None, policy_views(loaded.model))
    others = {options.dtype: worker}  # second looks, by number format
    benches = [Bench(Machine.parse(each), loaded, worker, others, options) for each in options.against]
    eos = (worker.vocabulary_size - 1,) if options.endless else loaded.eos_token_ids
    sampling = SamplingParameters(temperature=options.temperature, max_new_tokens=options.tokens, eos_token_ids=eos)
    environment = benches[0].judge.environment
    terms = LeaseTemplate(
        f"honest/{options.seed}", options.group_size, sampling, ProofParameters(), worker.kind, environment.digest
    )
    tasks, encode, key = environment.tasks("train"), loaded.tokenizer.encode, SigningKey.generate()
    tokens = proof_bytes = body_bytes = 0
    drawn_s, started_s = 0.0, time.monotonic()
    for start in range(options.start, options.groups, options.batch):
        leases = []
        for number in range(start, min(start + options.batch, options.groups)):
            task = tasks[number % len(tasks)]
            opening = "" if options.model == "tiny" else OPENINGS[number % len(OPENINGS)]
            text = (
                task.prompt
                if not opening or number % 3 == 0
                else f"{opening} {task.prompt}"
                if number % 3 == 1
                else opening
            )
            leases.append(terms.lease(number, encode(options.begin + text), task.id))
        requests = [GenerationRequest(lease.prompt_ids, lease.seed_numbers, sampling) for lease in leases]
        began_s = time.monotonic()
        groups = worker.generate(requests, terms.proof)
        drawn_s += time.monotonic() - began_s
        audit_jobs = [audit_job_of(lease, group, worker, key) for lease, group in zip(leases, groups, strict=True)]
        for bench in benches:
            bench.judged(start, audit_jobs)
        if options.looks or options.endless:
            for bench in benches:
                bench.look(audit_jobs, prefills)
        prefills.forget()
        tokens += sum(len(completion.token_ids) for group in groups for completion in group)
        proof_bytes += sum(len(completion.proofs) for group in groups for completion in group)
        body_bytes += sum(len(audit_job.body) for audit_job in audit_jobs)
        passed_s = time.monotonic() - started_s
        told = {str(bench.machine): dict(bench.outcomes) for bench in benches}
        print(f"  {start + len(leases)} groups, {tokens} tokens, {passed_s:.0f} s, {told}", flush=True)
        result = {
            "model": Path(options.model).name, "worker": worker.kind, "groups": start + len(leases),
            "group_size": options.group_size, "tokens_each": options.tokens, "endless": options.endless,
            "tokens": tokens, "drawn_s": round(drawn_s, 1), "proof_bytes_a_token": round(proof_bytes / tokens, 2),
            "submission_bytes_a_token": round(body_bytes / tokens, 2),
            "validators": {
                str(bench.machine): {
                    "outcomes": dict(bench.outcomes), "judged_s": round(bench.seconds, 1), "limits": bench.measured,
                    "record": str(bench.records[0]), "seen_by_expected": bench.ratios(),
                }
                for bench in benches
            },
        }  # fmt: skip
        if options.out:
            options.out.write_text(json.dumps(result, indent=2) + "\n")
        if options.limit_s and passed_s > options.limit_s:
            break
    print(json.dumps(result, indent=2))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--start", type=int, default=0, help="begin with this group")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=10)
    parser.add_argument("--endless", action="store_true", help="no completion ends before its last token")
    parser.add_argument("--batch", type=int, default=32, help="groups drawn and judged at a time")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--against", nargs="+", default=["cpu/float32"])
    parser.add_argument("--profile", type=Path, action="append", default=[])
    parser.add_argument("--calibrate", action="store_true", help="measure the limits first, as a run does")
    parser.add_argument("--begin", default="", help="what every prompt begins with; of Gemma, <bos>")
    parser.add_argument("--memory-share", type=float, default=1.0, help="of the GPU, where it is shared with others")
    parser.add_argument("--limit-s", type=float, default=0, help="end after that, with what there is")
    parser.add_argument("--keep", type=Path, help="a folder for all that is known of groups that were not accepted")
    parser.add_argument("--looks", type=Path, help="a folder for the sums of both looks at every group")
    parser.add_argument("--out", type=Path, help="where the figures are written, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
