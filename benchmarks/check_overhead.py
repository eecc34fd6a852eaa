"""What do all checks cost, against the prefill that they need anyway?

    OMP_NUM_THREADS=1 python benchmarks/check_overhead.py [--model tiny] [--groups 64] [--group 16] [--tokens 16]
    python benchmarks/check_overhead.py --device cuda --dtype bfloat16 --shape 0.6b --groups 8 --group 16 --tokens 512
    … --all     also with all that a run's validator does, in the same alternating runs

Honest groups are generated with proofs, packed as a worker hands them in, and then judged in one call: decoding, every
check, the reward, the verdict. The bare prefill is the least that a validator could do with the same tokens: the
forward pass, the head, and the log-probability of every token; no intervals, no entropies, no points, no objects.

Runs alternate; the best of several counts, and the median of the pairs is said beside it: on a busy machine that is the
more honest number. On a CPU time is the processor time of this process, on a GPU the time on the wall.

What a row includes: `Judge.verdicts` has every check by built-in limits, without branches and canaries. `everything`
has limits that were calibrated here, branches for the share of tokens that a hub asks for of an honest node in the long
run (without their bound on time, so that all are decoded), and a canary after every 64 audits. Few calls have a branch
or a canary, so its means count, over runs of at least 64 audits. A calibration itself is not included.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from shoal.engines import GenerationRequest, kind_of
from shoal.engines.groups import submission_of
from shoal.engines.shelf import LoadedPolicy
from shoal.engines.torch import TorchEngine
from shoal.environments import Score, Task
from shoal.models.load import LoadedModel, load_model, model_from_files
from shoal.models.logprobs import Head, hidden_states
from shoal.protocol import (
    Audit,
    Lease,
    Outcome,
    PolicyRef,
    ProofParameters,
    SamplingParameters,
    SigningKey,
    Verdict,
    pack,
    sign_document,
    submission_digest,
)
from shoal.validator.branches import BranchChecker
from shoal.validator.calibrate import Plan, measure
from shoal.validator.canary import Canary
from shoal.validator.judge import Judge
from shoal.validator.loop import CANARY_EVERY
from shoal.validator.profiles import BUILT_IN, ON_REQUEST
from shoal.validator.verdicts import AuditJob

POLICY = PolicyRef(incarnation=0, version=1, digest="d" * 64)
HUB = SigningKey.from_seed(b"h" * 32)
STEADY_SHARE = 0.026  # of an honest node's tokens, on average over what its evidence does (tests of GainEvidence)
TABLE_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
SHAPES = {
    "0.6b": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40_960, "tie_word_embeddings": True, "eos_token_id": 151_645,
    },
}  # fmt: skip


class LengthEnvironment:
    """The reward is the length of the text: the cheapest that an environment can be."""

    name = "length"
    digest = "e" * 64

    def tasks(self, _split: str) -> list[Task]:
        return []

    def task(self, task_id: str) -> Task:
        return Task(task_id, "", "")

    def score(self, _task: Task, completion: str) -> Score:
        return Score(float(len(completion)))


@dataclass(frozen=True)
class Bench:
    engine: TorchEngine
    loaded: LoadedPolicy
    audit_jobs: list[AuditJob]
    model: torch.nn.Module
    sequences: list[tuple[list[int], int]]  # token ids, and how many of them are the prompt's
    tokens: int


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    bench = prepare(options)
    judge = Judge(LengthEnvironment(), {**BUILT_IN, **ON_REQUEST})
    verdicts = judge.verdicts(bench.audit_jobs, bench.loaded)
    report_outcomes(verdicts)
    if options.profile:
        profile(lambda: judge.verdicts(bench.audit_jobs, bench.loaded))
    budget = bench.engine._max_prefill_tokens
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    everything = Everything.of(bench, judge, options) if options.all else None
    repeat = max(options.repeat, -(-CANARY_EVERY // options.groups)) if options.all else options.repeat
    pairs = timed(
        repeat, clock, lambda: bare_prefill(bench, budget), lambda: judge.verdicts(bench.audit_jobs, bench.loaded),
        *(() if everything is None else (everything.once,)),
    )  # fmt: skip
    bare, judged, *_ = (min(column) for column in zip(*pairs, strict=True))
    typical = statistics.median(times[0] / times[1] for times in pairs)
    weights = sum(parameter.numel() for parameter in bench.model.parameters())
    print(
        f"{weights:,} weights, {bench.engine.kind}, {len(bench.audit_jobs)} groups of {options.group}, "
        f"{bench.tokens / len(bench.audit_jobs) / options.group:.1f} tokens each, {bench.tokens} tokens"
    )
    print(f"bare prefill    {bench.tokens / bare:12,.0f} tokens/s")
    print(f"Judge.verdicts  {bench.tokens / judged:12,.0f} tokens/s   {bare / judged:.1%} of the bare prefill")
    print(f"                {'':12}            {typical:.1%} in the median of {len(pairs)} alternating pairs")
    print(f"checks          {1e6 * (judged - bare) / len(bench.audit_jobs):12,.0f} µs per group")
    if everything is not None:
        bare, _, judged = (statistics.fmean(column) for column in zip(*pairs, strict=True))
        print(
            f"everything      {bench.tokens / judged:12,.0f} tokens/s   {bare / judged:.1%} of the bare prefill (means)"
        )
        print(f"                {everything.told(len(pairs))}")


@dataclass
class Everything:
    """All that a run's validator does with an audit."""

    bench: Bench
    judge: Judge
    canary: Canary
    limits: str
    tokens: int = 0
    canaries: int = 0

    @classmethod
    def of(cls, bench: Bench, judge: Judge, options: argparse.Namespace) -> Everything:
        prompts = [audit_job.lease.prompt_ids for audit_job in bench.audit_jobs]
        plan = Plan(
            prompts, bench.engine.vocabulary_size, tokens=min(Plan.tokens, options.tokens), sequences=options.sequences
        )
        measured = measure(bench.engine, {f"{options.device}/{options.dtype}": bench.engine}, plan)
        with_branches = replace(
            judge, profiles={measured.profile.key: measured.profile}, branch_checker=BranchChecker(time_share=math.inf)
        )
        canary = Canary(replace(with_branches, branch_checker=None), CANARY_EVERY, CANARY_EVERY)
        return cls(bench, with_branches, canary, "; ".join(measured.problems) or "accepted")

    def once(self) -> None:
        asked = [
            replace(each, audit=each.audit.model_copy(update={"look_share": STEADY_SHARE}))
            for each in self.bench.audit_jobs
        ]
        verdicts = self.judge.verdicts(asked, self.bench.loaded)
        self.tokens += sum(verdict.branches.tokens for verdict in verdicts)
        self.canaries += self.canary.check(asked, verdicts, self.bench.loaded) is not None

    def told(self, runs: int) -> str:
        share = self.tokens / (runs * self.bench.tokens)
        return (
            f"{share:.2%} of the tokens decoded as branches, {self.canaries} canaries; calibrated limits {self.limits}"
        )


def prepare(options: argparse.Namespace) -> Bench:
    files, model = make_model(options)
    engine = TorchEngine.wrap(model)
    leases = list(make_leases(options, engine))
    requests = [GenerationRequest(lease.prompt_ids, lease.seed_numbers, lease.sampling) for lease in leases]
    groups = engine.generate(requests, leases[0].proof)
    audit_jobs, sequences = [], []
    for lease, group in zip(leases, groups, strict=True):
        body = pack(submission_of(lease, group, engine.name))
        audit = Audit(
            submission=submission_digest(body), size_bytes=len(body), lease=sign_document(lease, HUB),
            received_at_ms=1, deadline_ms=2,
        )  # fmt: skip
        audit_jobs.append(AuditJob(audit, lease, body))
        sequences += [([*lease.prompt_ids, *each.token_ids.tolist()], len(lease.prompt_ids)) for each in group]
    tokens = sum(len(ids) - prompt for ids, prompt in sequences)
    return Bench(engine, LoadedPolicy(POLICY, engine, files), audit_jobs, model, sequences, tokens)


def make_model(options: argparse.Namespace) -> tuple[dict[str, bytes], torch.nn.Module]:
    """A model of a folder, or one of random weights; spread so that its distributions are neither flat nor certain."""
    if options.shape is None:
        loaded: LoadedModel = load_model(options.model, options.dtype, options.device)
        return dict(loaded.files), loaded.model
    files = {"config.json": json.dumps(SHAPES[options.shape]).encode()}
    torch.manual_seed(0)
    return {}, model_from_files(files, options.dtype, options.device)


def make_leases(options: argparse.Namespace, engine: TorchEngine) -> Iterator[Lease]:
    """Completions run to their full length: the end token is one that is never drawn."""
    sampling = SamplingParameters(
        temperature=1.0, max_new_tokens=options.tokens, eos_token_ids=(engine.vocabulary_size,)
    )
    rng = np.random.default_rng(0)
    for unit in range(options.groups):
        yield Lease(
            run="bench-000000000000", lease=f"lease-{unit}", node="n" * 32, unit=unit, attempt=0, policy=POLICY,
            task=f"t/{unit}", prompt_ids=tuple(int(token) for token in rng.integers(5, 90, options.prompt)),
            seeds=tuple(f"{seed:016x}" for seed in rng.integers(0, 2**63, options.group)), sampling=sampling,
            proof=ProofParameters(), profile=kind_of("torch", options.device, options.dtype),
            environment_digest="e" * 64, issued_at_ms=0, deadline_ms=60_000,
        )  # fmt: skip


@torch.inference_mode()
def bare_prefill(bench: Bench, budget: int) -> float:
    """Forward pass, head and log-probabilities, in batches of the engine's size; the sum, so that all is waited for."""
    head, device, total = Head.of(bench.model), next(bench.model.parameters()).device, 0.0
    longest = max(len(ids) for ids, _ in bench.sequences)
    rows = max(1, budget // longest)
    for start in range(0, len(bench.sequences), rows):
        part = bench.sequences[start : start + rows]
        ids_BL = torch.zeros(len(part), max(len(ids) for ids, _ in part), dtype=torch.long)
        wanted_BL = torch.zeros_like(ids_BL, dtype=torch.bool)
        for row, (ids, prompt) in enumerate(part):
            ids_BL[row, : len(ids)] = torch.tensor(ids)
            wanted_BL[row, prompt : len(ids)] = True
        ids_BL, wanted_BL = ids_BL.to(device), wanted_BL.to(device)
        hidden_NH = hidden_states(bench.model, ids_BL[:, :-1])[wanted_BL[:, 1:]]
        rows_of_table = max(1, TABLE_ELEMENTS[device.type] // head.weight.shape[0])
        for hidden, targets in zip(hidden_NH.split(rows_of_table), ids_BL[wanted_BL].split(rows_of_table), strict=True):
            logprobs_NV = torch.log_softmax(head.logits(hidden), dim=-1)
            total += float(logprobs_NV.gather(1, targets[:, None]).sum())
    return total


def report_outcomes(verdicts: list[Verdict]) -> None:
    accepted = sum(verdict.outcome is Outcome.ACCEPTED for verdict in verdicts)
    print(f"{accepted} of {len(verdicts)} honest groups accepted")
    for verdict in verdicts:
        if verdict.outcome is not Outcome.ACCEPTED:
            print(f"  unit {verdict.unit}: {verdict.reason}: {verdict.message}")


def profile(call: Callable[[], object]) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(call)
    pstats.Stats(profiler).sort_stats("cumulative").print_stats("shoal", 40)


def timed(repeat: int, clock: Callable[[], float], *calls: Callable[[], object]) -> list[tuple[float, ...]]:
    """Seconds of each call, in `repeat` alternating runs."""
    rounds = []
    for _ in range(repeat):
        seconds = []
        for call in calls:
            started = clock()
            call()
            seconds.append(clock() - started)
        rounds.append(tuple(seconds))
    return rounds


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Throughput of all checks against the bare prefill.")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape instead of a model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="also calibrated limits, branches and canaries")
    parser.add_argument("--sequences", type=int, default=64, help="that the calibration draws")
    parser.add_argument("--profile", action="store_true", help="also where the time goes, by function")
    return parser.parse_args()


if __name__ == "__main__":
    main()
