"""`shoal run RECIPE --solo`: one process on one machine, for an owner who needs no proof from anybody.

    trainer/loop ── batch n ──► SoloHub ── tasks, prompts, seeds ──► TorchEngine on the learner's own weights
         ▲                         ▲                                     │
         └── hub/batches/n ◄───────┴── rewards, judges ◄─────────────────┘  equal groups are dropped and refilled

Generation and training alternate, so staleness is 0, and there is no second copy of the weights. Units, seeds and
batches are those of a synchronous run with the same secret. A batch is written down before it is trained on; what a
kill interrupts is drawn again, the same. Nothing is published: the digest of each version goes into
hub/policies.jsonl, and a resume that computes another one begins a new incarnation.
"""

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from shoal import errors
from shoal import protocol as wire
from shoal.client.hub import TRAINING_BATCH_LIMITS
from shoal.engines.groups import generate, is_finite, rollout_of
from shoal.engines.shelf import LoadedPolicy
from shoal.environments import build, columns_of, judges_of, require_scoring
from shoal.errors import ConfigError, EnvironmentSetupError, ScoringFailure
from shoal.hub.service.context import Context, load_or_create_secret
from shoal.hub.service.drawing import HELD_OUT, Drawing
from shoal.hub.settings import HubSettings
from shoal.hub.state import draws, evaluations
from shoal.hub.state.audits import has_equal_rewards
from shoal.hub.state.batches import mean_reward
from shoal.models import TextTokenizer
from shoal.protocol.batch import BatchReply, TrainingBatch, TrainingGroup, TrainingRollout
from shoal.protocol.verdict import EvaluationTask
from shoal.records import FOLDER, Segments
from shoal.records.schema import table_of
from shoal.rewards import NotStarted, ScoringPool
from shoal.rewards.panel import panel_of
from shoal.run.folder import SOLO, RunFolder
from shoal.run.progress import reward_of
from shoal.run.recipe import Recipe, ValidatorSection, WorkerSection
from shoal.run.roles import hub_config
from shoal.runtime import FolderLock, StopToken, SystemClock, ensure_folder, resource_error, write_atomically
from shoal.runtime.metrics import MetricsLog
from shoal.shardcast.content import Content, chunk_of
from shoal.shardcast.manifest import chunk_size_for
from shoal.trainer.record import PublishedPolicy
from shoal.trainer.settings import TrainerConfig
from shoal.validator.rewards import Group, RewardNotes, Scored, Scoring, shuffled
from shoal.validator.side_jobs import answers_to, scores_of

if TYPE_CHECKING:
    from shoal.trainer.loop import TrainingParts

log = logging.getLogger(__name__)

POLICIES, SCORES = "policies.jsonl", "evaluations.jsonl"
HELD_OUT_AT_ONCE = 128  # tasks between two looks at whether to stop
LOCK_WAIT_S = 15.0
UNASKED = NotStarted("it was not asked for yet")
Say = Callable[[str], None]


def solo_recipe(recipe: Recipe, path: Path) -> Recipe:
    """The recipe as it holds for a solo run in `path`: sections of roles that it lacks are at their defaults."""
    if (path / "hub" / "hub.db").exists():
        raise ConfigError(f"the run in {path} has a hub: resume it without --solo, or give another RUN")
    run, trainer, hub, worker = recipe.run, recipe.trainer, recipe.hub, recipe.worker
    for wrong, setting, value, why in (
        (trainer.processes > 1, "trainer.processes", "1", "it trains in one process"),
        (worker.engine != "torch", "worker.engine", "torch", "it generates with the trainer's own weights"),
        (hub.database, "hub.database", "''", "it has no hub"),
        (hub.storage, "hub.storage", "''", "it has no hub"),
        (hub.audit != "all", "hub.audit", "all", "it has no nodes, and nothing to audit"),
        (recipe.environment.retire_after is not None, "environment.retire_after", "None", "it keeps no pools of tasks"),
    ):
        if wrong:
            cure = f"set {setting}={value}" if value != "None" else f"leave {setting} out"
            raise ConfigError(f"{setting} is not for a solo run: {why}; {cure}, or run without --solo")
    kept = HubSettings(**hub.model_dump(include={"refill_cap", "drop_equal", "records_gb"}))
    # What is published elsewhere is what is computed with here.
    computed = trainer.model_copy(update={"publish_dtype": trainer.memory.precision})
    return recipe.model_copy(update={
        "run": run.model_copy(update={"max_staleness": 0}), "trainer": computed, "hub": kept,
        "validator": ValidatorSection(), "worker": WorkerSection(), "relay": type(recipe.relay)(),
    })  # fmt: skip


class WrittenBatch(msgspec.Struct, frozen=True):
    """The batch of a step as it is on the disk; `batch` is JSON. The next step begins with unit `next_unit`."""

    batch: str
    next_unit: int
    rollouts: TrainingBatch


@dataclass(frozen=True)
class DrawnGroup:
    lease: wire.Lease
    rollouts: Sequence[wire.Rollout]
    found: Scored | ScoringFailure

    @property
    def rewards(self) -> tuple[wire.RolloutReward, ...]:
        return self.found.rewards if isinstance(self.found, Scored) else ()

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(reward.value for reward in self.rewards)

    @property
    def name(self) -> str:
        texts = (self.lease.run, self.lease.lease, self.lease.policy.digest)
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()


class SoloHub:
    """Hub, origin, workers and validator of one trainer, in its process. The main thread calls it; the publisher's
    thread calls `report`, `ledger_head`, `publish` and `announce` only."""

    def __init__(self, folder: RunFolder, scoring: Scoring, stop: StopToken, say: Say) -> None:
        self._folder, self._path, self._scoring, self._stop, self._say = folder, folder.path / "hub", scoring, stop, say
        self._environment, self._clock, self._node = scoring.environment, SystemClock(), folder.key("trainer").node
        self._config = config = hub_config(folder, scoring.environment)
        self._rules = config.rules
        parts = SimpleNamespace(config=config, rules=self._rules, tasks=self._environment.tasks("train"))
        self._drawing = Drawing(cast(Context, parts))
        self._policies = {ref.place: ref for ref in self._published()}
        self._newest = max(self._policies.values(), key=lambda ref: ref.place, default=None)
        self._replayed_until = -1 if self._newest is None else self._newest.version
        self._announced, self._heard, self._said = -1, threading.Condition(), set[int]()
        self._secret = load_or_create_secret(self._path / "secret", is_new=self._newest is None)
        self._scores, self._notes = MetricsLog(self._path / SCORES), RewardNotes(self._path)
        budget = round(folder.recipe.hub.records_gb * 1e9)
        self._segments = Segments(self._path / FOLDER, budget) if budget else None
        if self._segments is not None:
            self._segments.open()

    def adopt(self, parts: "TrainingParts") -> None:
        """Generate with the model that is trained."""
        from shoal.engines.torch import TorchEngine

        self._engine, self._files = TorchEngine.wrap(parts.learner.model, pages=True), parts.files
        self._decode = TextTokenizer(parts.files).decode_many

    # As a hub

    def run_info(self) -> wire.RunInfo:
        config, run = self._config, self._config.run
        return wire.RunInfo(
            run=config.run_id, name=run.name, root_key=config.root_key, certificates=(), sources=(),
            environment=config.environment.name, environment_digest=config.environment.digest,
            sampling=config.sampling, group_size=run.group_size, max_staleness=0, steps=run.steps, model=config.model,
        )  # fmt: skip

    def status(self) -> PublishedPolicy:
        return SimpleNamespace(policy=self._newest)

    def batch(self, step: int, wait_s: float) -> BatchReply:
        if not self._file(step).is_file():
            with self._heard:  # the digest comes first: it names what the groups were drawn with
                known = step < self._replayed_until
                if not known and not self._heard.wait_for(lambda: self._announced >= step, wait_s):
                    return BatchReply(waiting=f"the digest of version {step}")
            self._measure(step)
            self._draw(step)
        return BatchReply(batch=wire.Batch.model_validate_json(self._read(step).batch))

    def rollouts(self, step: int) -> TrainingBatch:
        return self._read(step).rollouts

    def report(self, report: wire.StepReport) -> None:
        row, steps = report.metrics, self._rules.steps
        for code, text in report.alarms.items():
            self._say(f"ALARM {code}: {text}")
        if report.step in self._said:  # a score of an earlier version
            return
        self._said.add(report.step)
        reward, parts = reward_of(row), [f"step {min(report.step + 1, steps)}/{steps}"]
        parts += [f"reward {reward:.3f}"] if reward is not None else []
        parts += [f"held out {row['held_out']:.3f} (version {report.step})"] if "held_out" in row else []
        if row.get("step_s"):
            parts += [f"{row['tokens'] / row['step_s']:,.0f} tokens/s", f"{row['step_s']:.1f} s"]
            parts += [f"generated in {row['wait_s']:.1f} s, trained in {row['train_s']:.1f} s"]
        self._say("  ".join(parts))

    def ledger_head(self) -> wire.LedgerHead:
        return wire.LedgerHead(run=self._config.run_id, index=-1, hash="0" * 64)

    def announce(self, signed: wire.SignedDocument) -> None:
        ref = wire.PolicyRef.model_validate(signed.document["policy"])
        known = self._policies.setdefault(ref.place, ref)
        if known.digest != ref.digest:
            was = f"version {ref.label} had the digest {known.digest[:16]}…, not {ref.digest[:16]}…"
            raise errors.PolicyMismatch(f"{was}; it continues under a new incarnation")
        lines = [each.model_dump_json().encode() + b"\n" for _, each in sorted(self._policies.items())]
        write_atomically(self._path / POLICIES, b"".join(lines))
        with self._heard:
            self._newest, self._announced = self._policies[max(self._policies)], ref.version
            self._heard.notify_all()

    def evaluations(self, since: int = 0) -> wire.EvaluationPage:
        if since == self._rules.steps:  # the last version has no batch before which it is measured
            self._measure(since)
        found = []
        for row in self._scores.rows():
            if (version := int(row["step"])) >= since and (ref := self._policy(version)) is not None:
                tasks, scored = int(row["tasks"]), int(row["scored"])
                mean = row["mean"] if scored else None
                found.append(wire.Evaluation(policy=ref, tasks=tasks, scored=scored, mean=mean, complete=True))
        return wire.EvaluationPage(evaluations=tuple(found))

    # As an origin

    def head(self) -> wire.BroadcastHead | None:
        return None

    def publish(
        self, version: int, content: Content, *, incarnation: int = 0, ledger_head: wire.LedgerHead | None = None
    ) -> wire.PolicyManifest:
        """Only the digest is taken, and there is no ledger whose head could be named."""
        del ledger_head
        size = chunk_size_for(content.size_bytes)
        digest = wire.content_digest(content.entries, size, tuple(content.chunks(size, chunk_of)))
        return wire.PolicyManifest(
            run=self._config.run_id, policy=wire.PolicyRef(incarnation=incarnation, version=version, digest=digest),
            entries=(), chunks=(), chunk_size_bytes=size, size_bytes=content.size_bytes,
            created_at_ms=self._clock.now_ms(),
        )  # fmt: skip

    # As workers and a validator

    def _draw(self, step: int) -> None:
        """Draw, score and write down the batch of a step; a lost group is refilled as a hub would refill it."""
        rules, first = self._rules, 0 if step == 0 else self._read(step - 1).next_unit
        policy, unit = self._policy(step), first
        assert policy is not None, "its digest is known"
        chosen, dropped, unscored = list[DrawnGroup](), list[DrawnGroup](), list[DrawnGroup]()

        def missing() -> int:
            lost = len(dropped) + len(unscored) - rules.refill_cap * rules.groups_per_step
            return rules.groups_per_step - max(0, lost) - len(chosen)

        while (count := missing()) > 0:
            for group in self._generated([self._lease(number, policy) for number in range(unit, unit + count)]):
                is_equal = has_equal_rewards(group.rewards, rules.drop_equal)
                (unscored if not group.rewards else dropped if is_equal else chosen).append(group)
            unit += count
        self._engine.release()
        for group in unscored:
            log.warning("unit %d is unscored and not trained on: %s", group.lease.unit, group.found)
        if unscored and not chosen + dropped:
            raise ScoringFailure(f"no group of step {step} could be scored: {unscored[0].found}")
        if len(chosen) < rules.groups_per_step:
            lost = f"{len(dropped)} had equal rewards, {len(unscored)} are unscored"
            log.warning("step %d has %d of %d groups: %s", step, len(chosen), rules.groups_per_step, lost)
        rows = [(group, "accepted") for group in chosen] + [(group, "dropped") for group in dropped]
        self._record(
            step, sorted([*rows, *((group, "unsure") for group in unscored)], key=lambda row: row[0].lease.unit)
        )
        batch = wire.Batch(
            step=step, groups=tuple(self._batch_group(group) for group in chosen), dropped_groups=len(dropped),
            sampled_reward=mean_reward([group.values for group in chosen + dropped]),
            written_at_ms=self._clock.now_ms(),
        )  # fmt: skip
        trained = TrainingBatch(step, [self._training_group(group) for group in chosen])
        write_atomically(self._file(step), wire.pack(WrittenBatch(batch.model_dump_json(), unit, trained)))

    def _lease(self, number: int, policy: wire.PolicyRef) -> wire.Lease:
        """What a worker would be told."""
        if (unit := self._drawing.unit(number)) is None:
            raise EnvironmentSetupError(
                f"none of the tasks drawn for unit {number} can be used: see the log, and fix the data"
            )
        config, prompt, now_ms = self._config, self._drawing.prompt_of(unit), self._clock.now_ms()
        return wire.Lease(
            run=config.run_id, lease=f"{number}", node=self._node, unit=number, attempt=0, policy=policy,
            task=unit.task, prompt_ids=prompt.ids,
            seeds=draws.unit_seeds(self._secret, config.run_id, number, config.run.group_size),
            sampling=config.sampling, environment_digest=config.environment.digest, issued_at_ms=now_ms,
            deadline_ms=now_ms, length_target=prompt.length_target, dialogue=prompt.dialogue,
        )  # fmt: skip

    def _generated(self, leases: Sequence[wire.Lease]) -> list[DrawnGroup]:
        loaded = LoadedPolicy(leases[0].policy, self._engine, self._files)
        completions = generate(loaded, leases, check=self._check_stop, proves=False)
        if not all(map(is_finite, completions)):
            raise errors.TrainingDiverged(f"version {loaded.ref.label} computes NaN or infinite log-probabilities")
        groups = [Group(lease, [*map(rollout_of, each)]) for lease, each in zip(leases, completions, strict=True)]
        found: dict[int, Scored | ScoringFailure] = {}
        while left := [index for index in range(len(groups)) if isinstance(found.get(index, UNASKED), NotStarted)]:
            self._check_stop()
            found.update(zip(left, self._scoring.score([groups[i] for i in left], self._decode), strict=True))
        drawn = []
        for index, group in enumerate(groups):
            lease, scored = group.lease, found[index]
            if isinstance(scored, Scored):
                self._notes.write(lease.unit, lease.task, scored.notes)
                if self._folder.recipe.environment.shuffle_rewards:
                    scored = Scored(shuffled(scored.rewards, lease.run, lease.unit))
            drawn.append(DrawnGroup(lease, group.rollouts, scored))
        return drawn

    def _check_stop(self) -> None:
        from shoal.trainer.step import Stopped

        if self._stop.is_set():
            raise Stopped

    def _batch_group(self, group: DrawnGroup) -> wire.BatchGroup:
        lease = group.lease
        return wire.BatchGroup(
            unit=lease.unit, submission=group.name, node=self._node, policy=lease.policy, rewards=group.values
        )

    def _training_group(self, group: DrawnGroup) -> TrainingGroup:
        lease = group.lease
        rollouts = [
            TrainingRollout(each.tokens, each.logprobs, each.finish, reward.value, each.given, reward.parts)
            for each, reward in zip(group.rollouts, group.rewards, strict=True)
        ]
        columns, prompt = columns_of(self._environment, lease.task), wire.pack_tokens(lease.prompt_ids)
        return TrainingGroup(lease.unit, lease.task, lease.policy.version, prompt, rollouts, columns)

    def _measure(self, version: int) -> None:
        """Answer the held-out tasks greedily, if this version is to be measured and is not yet."""
        plan, tasks = self._rules.evaluation, self._environment.tasks("held_out")
        known = any(row["step"] == version for row in self._scores.rows())
        if plan is None or known or not evaluations.is_due(plan, self._rules.steps, version) or not len(tasks):
            return
        asked, values = list[EvaluationTask](), list[float]()
        for index in range(min(plan.tasks, len(tasks))):
            try:
                ids = self._drawing.prompt(tasks[index], HELD_OUT, index).ids
                asked.append(EvaluationTask(task=tasks[index].id, prompt_ids=ids))
            except (EnvironmentSetupError, errors.ModelError) as error:
                self._drawing.pass_over(HELD_OUT, index, error)
        policy = self._policy(version)
        assert policy is not None, "its digest is known"
        loaded = LoadedPolicy(policy, self._engine, self._files)
        for start in range(0, len(asked), HELD_OUT_AT_ONCE):
            self._check_stop()
            some = asked[start : start + HELD_OUT_AT_ONCE]
            answers = answers_to(some, self._environment, loaded, self._config.sampling)
            found = scores_of(some, answers, self._environment, loaded, self._scoring.scorer)
            values += [score for score in found if score is not None]
        mean = math.fsum(values) / len(values) if values else 0.0
        self._scores.append(version, {"mean": mean, "scored": len(values), "tasks": len(asked)})

    def _record(self, step: int, groups: Sequence[tuple[DrawnGroup, str]]) -> None:
        """For people (`shoal rollouts`). Groups are numbered by unit: what is drawn again replaces the same file."""
        if self._segments is not None:
            rows = [row for group, outcome in groups for row in self._rows(self._segments, step, group, outcome)]
            self._segments.append(table_of(rows), (self._clock.now_ms(), groups[-1][0].name))

    def _rows(self, segments: Segments, step: int, group: DrawnGroup, outcome: str) -> Iterator[dict[str, Any]]:
        lease, now_ms, kept = group.lease, self._clock.now_ms(), segments.keeps(group.name, outcome)
        decode, message = self._decode, "" if group.rewards else str(group.found)
        for sample, each in enumerate(group.rollouts):
            ids, reward = each.token_ids.tolist(), group.rewards[sample] if group.rewards else None
            text = decode([list(lease.prompt_ids), ids]) if kept else [None, None]
            yield {
                "group": lease.unit, "unit": lease.unit, "sample": sample, "submission": group.name, "task": lease.task,
                "node": self._node, "validator": "", "kind": self._engine.kind, "outcome": outcome,
                "reason": "" if reward else "unscored", "severity": "", "message": message, "depth": "none",
                "incarnation": lease.policy.incarnation, "version": lease.policy.version, "step": step,
                "received_at_ms": lease.issued_at_ms, "decided_at_ms": now_ms, "reward": reward and reward.value,
                "tokens": len(ids), "prompt_tokens": len(lease.prompt_ids), "length_target": lease.length_target,
                "finish": each.finish, "parts": list(reward.parts.items()) if reward else [], "kept": kept,
                "checks": None, "prompt": text[0], "completion": text[1],
                "pieces": decode([[token] for token in ids]) if kept else None,
                "prompt_ids": np.array(lease.prompt_ids if kept else [], np.int32),
                "token_ids": np.array(ids if kept else [], np.int32),
                "given": wire.unpack_tokens(each.given if kept else b""),
                "logprobs": each.logprob_values[: None if kept else 0],
                "gaps": np.zeros(0, np.float16), "margins": np.zeros(0, np.float16),
            }  # fmt: skip

    # Files

    def _file(self, step: int) -> Path:
        return self._folder.path / SOLO / f"step-{step:05d}.msgpack.zst"

    def _read(self, step: int) -> WrittenBatch:
        try:
            return wire.unpack(self._file(step).read_bytes(), WrittenBatch, TRAINING_BATCH_LIMITS)
        except OSError as error:
            raise resource_error("read the batch", self._file(step), error) from error

    def _published(self) -> Iterator[wire.PolicyRef]:
        path = self._path / POLICIES
        for line in path.read_text().splitlines() if path.exists() else ():
            yield wire.PolicyRef.model_validate_json(line)

    def _policy(self, version: int) -> wire.PolicyRef | None:
        return max(
            (ref for ref in self._policies.values() if ref.version == version), key=lambda ref: ref.place, default=None
        )


def run_solo(folder: RunFolder, stop: StopToken, say: Say) -> None:
    """Train to the end, or until `stop`. Failures raise `ShoalError`."""
    from shoal.trainer.learner import make_deterministic
    from shoal.trainer.loop import TrainingRun, training_parts

    recipe = folder.recipe
    config = TrainerConfig(
        folder=folder.path / "trainer", settings=recipe.trainer, model=recipe.model.path,
        origin_folder=folder.path, hub_url="", root_fingerprint=None, key=folder.key("trainer"),
        certificate=folder.certificate("trainer"), seed=recipe.run.seed,
    )  # fmt: skip
    make_deterministic(recipe.trainer)
    with ExitStack() as stack:
        for place in (folder.path, ensure_folder(config.folder)):
            stack.enter_context(FolderLock(place).acquire(stop, LOCK_WAIT_S))
        ensure_folder(folder.path / "hub", private=True)
        ensure_folder(folder.path / SOLO)
        environment = build(recipe.environment)
        require_scoring(environment)
        scorer = stack.enter_context(closing(ScoringPool(recipe.environment, environment, stop)))
        scorer.start()
        panel = stack.enter_context(closing(panel_of(judges_of(environment), stop, recipe.trainer.device)))
        panel.prepare()
        try:
            hub = SoloHub(folder, Scoring(environment, scorer, panel), stop, say)
            parts = stack.enter_context(training_parts(config, hub, origin=hub))
            hub.adopt(parts)
            TrainingRun(parts, stop).run()
        except errors.DeadlineExceeded:
            if not stop.is_set():
                raise
