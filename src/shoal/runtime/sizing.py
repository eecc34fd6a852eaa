"""Settings that depend on the size of the model and on links, unless a recipe sets them.

Every process of a run computes them from the description of the run (`RunSize.of`), so all agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from math import ceil
from typing import Any

from pydantic import BaseModel

from shoal.protocol import RunInfo
from shoal.protocol.node import LINK_MBIT

DERIVED = "if not set, by the model's size (`shoal plan`); of a small one"
MARGIN = 1.5  # above what a transfer or a computation should take
FIRST_LEASE = 4  # a worker has this multiple of `lease_s` for its first group (hub/state/leases.py)
CLAIM_S = 20.0  # what one claim of several audits should take; a single one may take longer
HELD_BYTES = 48 * 10**9  # if more payloads than needed take more than this, a validator keeps only the needed ones
CHECKPOINT_S = 60.0  # of writing checkpoints for every step, on average
LITTLE_S = 600.0  # one machine is enough for work that takes it at most this long in the whole run
TWO_CHECKPOINTS_BYTES = 240 * 10**9


def _from(value: float, source: str) -> Any:
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True)
class Speeds:
    """Assumed speeds of machines and links, each with its source (files are in benchmarks/results). GPU speeds are of
    one H200. `delta_share` is for a policy in bfloat16."""

    delta_share: float = _from(0.0015, "plan_check.md: a step at 1e-6, by run 0.82 to 1.44; by rate^0.86, steps^0.83")
    float32_delta_share: float = _from(0.41, "plan_check.md: at 1e-6; ten times that rate adds 0.1, above 0.6: whole")
    publish_gb_s: float = _from(1.75, "plan_check.md: 1.2 GB; large_shape.md: 2.05 of 16 GB")
    publish_least_s: float = _from(0.08, "plan_check.md: of any version: files, signature, announcement")
    apply_gb_s: float = _from(1.2, "plan_check.md: fetch, apply on disk, verify; swap_in_place.md: 0.9 to 1.0")
    load_gb_s: float = _from(2.7, "swap_in_place.md: a full load into the engine")
    disk_gb_s: float = _from(1.0, "assumed: a checkpoint written and hashed (two cores: 0.2, publish_hidden.md)")
    link_overhead: float = _from(1.2, "cast_links.md: 1.25 to 1.31 times what hub.link_mbit would take")
    audit_tflops: float = _from(160.0, "check_overhead.md: 134,907 tokens/s of 0.6 B weights, 2 operations each")
    audit_group_s: float = _from(0.052, "plan_check.md: of one group beside its prefill: papers, rewards, statistics")
    branch_share: float = _from(0.029, "honest_bands.md: of a node's tokens that are decoded again; in 50 groups 0.093")
    train_tflops: float = _from(266.0, "train_throughput.md: 74,412 tokens/s, recomputed, 6 operations a weight")
    eager_tflops: float = _from(127.0, "train_throughput.md: the same without trainer.memory.compile")
    train_least_s: float = _from(1.0, "plan_check.md: of any step: samples, optimizer, numbers")
    token_s: float = _from(0.03, "assumed: least time for one token of the slowest worker's sequences")
    worker_gb_s: float = _from(330.0, "assumed: weights read a second by the slowest worker, groups in parts")
    generate_gb_s: float = _from(1500.0, "large_shape.md: weights read a second by a worker that plans are made with")
    cache_gb_s: float = _from(3300.0, "gpu_decode.md: keys and values read a second; 256 and 1,024 rows")
    decode_s: float = _from(0.0015, "gpu_decode.md: for one token of all sequences, beside what is read")
    batch_s: float = _from(0.25, "plan_check.md: of a worker's batch beside its tokens: prompts, proofs, upload")
    worker_tokens_s: float = _from(0.0, "0: by the sequences that fit a worker's memory, and what they read")
    workers_per_relay: float = _from(10.0, "assumed: workers that fetch from one relay (docs/concepts/broadcast.md)")
    length_share: float = _from(0.25, "assumed: mean completion, as a part of run.max_new_tokens")
    submission_bytes: float = _from(14.0, "a token as submitted: proof 8 (128 points of 32 tokens), number 4, id 2")
    group_row_bytes: float = _from(10_000.0, "plan_check.md: rows of one group in the hub's database")


@dataclass(frozen=True)
class RunSize:
    """0 means unknown, and counts as small."""

    parameters: int = 0
    payload_bytes: int = 0
    group_size: int = 0
    max_new_tokens: int = 0
    max_staleness: int = 1
    link_mbit: float = LINK_MBIT

    @classmethod
    def of(cls, run: RunInfo) -> RunSize:
        shape = run.model.parameters, run.model.payload_bytes, run.group_size, run.sampling.max_new_tokens
        return cls(*shape, run.max_staleness, run.link_mbit)

    def transfer_s(self, size_bytes: float, speeds: Speeds) -> float:
        return size_bytes * speeds.link_overhead / (self.link_mbit * 125_000)

    @property
    def checkpoint_bytes(self) -> int:
        return 12 * self.parameters


@dataclass(frozen=True)
class Derived:
    """Settings by their names in a recipe; the defaults are for small models."""

    lease_s: float = 60.0
    lease_hard_s: float = 600.0
    audit_s: float = 60.0
    policy_wait_s: float = 30.0
    max_audits: int = 32
    keep_versions: int = 3
    checkpoint_every: int = 1
    keep_checkpoints: int = 2
    batch_deadline_s: float = 1800.0
    patience_s: float = 600.0


def derive(size: RunSize, speeds: Speeds = Speeds()) -> Derived:
    """The settings for a run of that size. `policy_wait_s`: a whole policy out of a relay that all its workers fetch
    from, and into the engine.
    `lease_s`: applying and loading a version; four of them are a worker's first group. `lease_hard_s`: the longest
    group on the slowest worker, and the `lease_s` before its first token. `audit_s`: the policy, then one claim.
    `batch_deadline_s`: from one accepted group to the next, the policy, a group and its audit. `patience_s`: at least
    that, if it is long."""
    small, gb = Derived(), size.payload_bytes / 1e9
    load_s, copies = gb / speeds.load_gb_s, speeds.workers_per_relay + 1
    wait_s = _at_least(small.policy_wait_s, MARGIN * (size.transfer_s(copies * size.payload_bytes, speeds) + load_s))
    group_s = size.max_new_tokens * max(speeds.token_s, gb / speeds.worker_gb_s)
    lease_s = _at_least(small.lease_s, MARGIN * (gb / speeds.apply_gb_s + load_s), group_s / FIRST_LEASE)
    audit_s = 2 * size.parameters * size.group_size * size.max_new_tokens / (speeds.audit_tflops * 1e12)
    audits = max(1, min(small.max_audits, int(CLAIM_S / audit_s))) if audit_s else small.max_audits
    hard_s = _at_least(small.lease_hard_s, lease_s + group_s)
    claim_s = _at_least(small.audit_s, wait_s + MARGIN * audits * audit_s)
    batch_s = _at_least(small.batch_deadline_s, MARGIN * (hard_s + claim_s))  # which begins with the policy
    holds_more = small.keep_versions * size.payload_bytes <= HELD_BYTES
    return Derived(
        lease_s, hard_s, claim_s, policy_wait_s=wait_s, max_audits=audits,
        keep_versions=small.keep_versions if holds_more else max(2, size.max_staleness + 1),
        checkpoint_every=max(1, ceil(size.checkpoint_bytes / 1e9 / speeds.disk_gb_s / CHECKPOINT_S)),
        keep_checkpoints=small.keep_checkpoints if 2 * size.checkpoint_bytes <= TWO_CHECKPOINTS_BYTES else 1,
        batch_deadline_s=batch_s, patience_s=batch_s if batch_s > small.batch_deadline_s else small.patience_s,
    )  # fmt: skip


def validators_needed(size: RunSize, tokens: float, steps: int, processes: int, speeds: Speeds = Speeds()) -> int:
    """Enough validators that checking a step takes no longer than training or publishing it."""
    operations = size.parameters * tokens / 1e12
    train_s = 6 * operations / (processes * speeds.train_tflops)
    step_s = max(train_s, size.payload_bytes / 1e9 / speeds.publish_gb_s)
    return machines_needed(2 * operations / speeds.audit_tflops, step_s, steps)


def machines_needed(alone_s: float, step_s: float, steps: int) -> int:
    """How many machines finish within `step_s` the work of one in `alone_s`; 1 if the run's total is short."""
    return 1 if alone_s * steps <= LITTLE_S else ceil(alone_s / step_s)


def settle(settings: BaseModel, size: RunSize = RunSize()) -> Derived:
    """The settings of a recipe section, with derived values for those that are not set."""
    given = {one.name: getattr(settings, one.name, None) for one in fields(Derived)}
    return replace(derive(size), **{name: value for name, value in given.items() if value is not None})


def open_settings(settings: BaseModel) -> tuple[str, ...]:
    names = (one.name for one in fields(Derived))
    return tuple(name for name in names if name in type(settings).model_fields and getattr(settings, name) is None)


def kept_when_finished(max_staleness: int) -> int:
    """How many versions the origin of a finished run keeps: the last, and all that the last step could use."""
    return max_staleness + 2


def policies_loaded(held: int, model_bytes: int, memory_bytes: int) -> int:
    """How many of the policies on disk are loaded: as many as fit half of the free memory, at least one."""
    return held if not model_bytes else max(1, min(held, memory_bytes // 2 // model_bytes))


def _at_least(least: float, *seconds: float) -> float:
    most = max(seconds)
    return least if most <= least else 10.0 * ceil(most / 10)
