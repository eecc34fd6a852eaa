"""How often honest work fails a check: every failed check of every group counts.

    OMP_NUM_THREADS=1 python benchmarks/honest_groups.py [--groups 10000] [--group-size 16] [--tokens 10]
    OMP_NUM_THREADS=1 python benchmarks/honest_groups.py --model FOLDER --groups 125 --group-size 8 --tokens 64
                      [--device cuda] [--dtype bfloat16] [--against cuda/float32] [--profile FILE.toml] [--nodes 4]

A worker's engine draws groups by a key-value cache; a validator's engine, given their bytes, judges them as in a run,
with all checks and with the record of the node that they are from (`--nodes` nodes take turns). Reports what was
rejected and why, what was unsure, and the bytes of proof per token.
"""

from __future__ import annotations

import argparse
import collections
import time
from pathlib import Path

from shoal.engines import GenerationRequest, build
from shoal.engines.shelf import LoadedPolicy
from shoal.environments import EnvironmentSettings
from shoal.environments import build as build_environment
from shoal.hub.state.reputation import of_late
from shoal.models.load import load_model
from shoal.models.state import policy_views
from shoal.protocol import ProofParameters, SamplingParameters, SigningKey, Tally
from shoal.validator.calibrate import OPENINGS
from shoal.validator.judge import Judge
from shoal.validator.profiles import load_profiles
from shoal.validator.specimens import POLICY, Machine, Terms, docket_of

BATCH = 32


def main() -> None:
    options = parse_options()
    loaded = load_model(options.model, options.dtype)
    tensors = policy_views(loaded.model)
    against = Machine.parse(options.against)
    worker = build("torch", loaded.files, options.device, options.dtype)
    validator = build("torch", loaded.files, against.device, against.dtype)
    for engine in (worker, validator):
        engine.load_policy(None, tensors)
    judge = Judge(build_environment(EnvironmentSettings(name="sort")), load_profiles(options.profile))
    sampling = SamplingParameters(
        temperature=options.temperature, max_new_tokens=options.tokens, eos_token_id=loaded.eos_token_id
    )
    terms = Terms(
        f"honest/{options.seed}", options.group_size, sampling, ProofParameters(), worker.kind, judge.environment.digest
    )
    tasks, encode, key = judge.environment.tasks("train"), loaded.tokenizer.encode, SigningKey.generate()
    texts = None if options.model == "tiny" else OPENINGS
    records = [Tally()] * options.nodes
    outcomes: collections.Counter[str] = collections.Counter()
    tokens = proof_bytes = body_bytes = 0
    started_s = time.monotonic()
    for start in range(options.start, options.groups, BATCH):
        leases = []
        for number in range(start, min(start + BATCH, options.groups)):
            task = tasks[number % len(tasks)]
            leases.append(terms.lease(number, encode(texts[number % len(texts)] if texts else task.prompt), task.id))
        requests = [GenerationRequest(lease.prompt_ids, lease.seed_numbers, sampling) for lease in leases]
        groups = worker.generate(requests, terms.proof)
        dockets = [docket_of(lease, group, worker, key) for lease, group in zip(leases, groups, strict=True)]
        for index, docket in enumerate(dockets):
            record = records[(start + index) % options.nodes]
            object.__setattr__(docket, "audit", docket.audit.model_copy(update={"record": record}))
        for index, verdict in enumerate(judge.verdicts(dockets, LoadedPolicy(POLICY, validator, loaded.files))):
            outcomes[f"{verdict.outcome.value} {verdict.reason}".strip()] += 1
            if verdict.reason:
                print(f"  group {verdict.unit}: {verdict.reason}: {verdict.message}", flush=True)
            node = (start + index) % options.nodes
            records[node] = of_late(records[node].plus(verdict.tally))
        tokens += sum(len(completion.token_ids) for group in groups for completion in group)
        proof_bytes += sum(len(completion.proofs) for group in groups for completion in group)
        body_bytes += sum(len(docket.body) for docket in dockets)
        if start % (BATCH * 16) == 0:
            print(f"  {start + len(leases)} groups, {time.monotonic() - started_s:.0f} s, {dict(outcomes)}", flush=True)
    print(f"\nmodel {Path(options.model).name}, worker {worker.kind}, validator {against}, T {options.temperature:g}")
    print(f"{options.groups} groups of {options.group_size}, {tokens} tokens: {dict(outcomes)}")
    print(f"proof {proof_bytes / tokens:.2f} bytes a token, submission {body_bytes / tokens:.2f}")
    print(f"longest record: {records[0]}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--start", type=int, default=0, help="begin with this group")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=10)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--against", default="cpu/float32")
    parser.add_argument("--profile", type=Path, action="append", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
