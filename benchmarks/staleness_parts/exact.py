"""A training run in one process in which every group of step n comes from version max(0, n − s), exactly.

    version n − s ──generate──► groups ──score──► equal rewards? ─yes─► dropped, further units are drawn
                                                     └no─► train_step ──► version n + 1, kept for s steps

A real run keeps its rollouts as fresh as it can, and s is its bound. Here s is the age of all of them: the worst case
of that bound. Engine, environment, filter, trainer and evaluation are those of a run; hub, network and checks are not
there, so that numbers depend on (recipe, staleness, loss, seed) alone and a run of minutes takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.algorithms.advantages import carries_signal
from shoal.engines.dialogue import greedy_answers
from shoal.engines.protocol import Completion, GenerationRequest
from shoal.engines.torch import TorchEngine
from shoal.environments import EnvironmentSettings, build
from shoal.errors import TrainingDiverged
from shoal.hub.state.draws import task_index
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import policy_views
from shoal.protocol import SamplingParameters
from shoal.protocol.batch import TrainingGroup, TrainingRollout
from shoal.protocol.submission import pack_logprobs, pack_tokens
from shoal.trainer.learner import make_deterministic, new_learner
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.step import StepWork, train_step

HELD_OUT_TASKS = 1024  # four times the recipe's: a score's own noise is then at most ±3 points (95 %)
SPARE = 1.5  # units drawn per group that is still missing: about a third of them has equal rewards
REFILL = 4  # times the wanted groups may be drawn; a policy that cannot fill a batch with them trains on a smaller one


@dataclass(frozen=True)
class Case:
    """Everything that determines a run: `changes` are settings of [trainer] that differ from the recipe's.

    >>> Case("recipes/tiny.toml", loss="plain", staleness=4, seed=1).name
    'tiny-recipe-plain-s4-seed1'
    """

    recipe: str
    loss: str
    staleness: int
    seed: int
    steps: int = 60
    evaluate_every: int = 5
    variant: str = "recipe"
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{Path(self.recipe).stem}-{self.variant}-{self.loss}-s{self.staleness}-seed{self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "task": Path(self.recipe).stem, "variant": self.variant, "method": self.loss, "staleness": self.staleness,
            "seed": self.seed,
        }  # fmt: skip


class Lateness(Exception):
    """The sweep's time is over: the run is given up, and begun again by the next sweep."""


class ExactRun:
    """One run. `rows()` is the whole of it: a row per step, and one with the last version's score."""

    def __init__(self, case: Case, deadline_s: float) -> None:
        recipe = tomllib.loads(Path(case.recipe).read_text())
        self._case, self._deadline_s = case, deadline_s
        self._run = recipe["run"]
        trainer = TrainerSettings.model_validate({**recipe["trainer"], **case.changes, "loss": case.loss})
        make_deterministic(trainer)
        loaded = _model(case.recipe, recipe["model"]["path"])
        self._tokenizer = loaded.tokenizer
        environment = EnvironmentSettings.model_validate({**recipe["environment"], "held_out_size": HELD_OUT_TASKS})
        self._environment = build(environment)
        self._tasks = self._environment.tasks("train")
        self._sampling = SamplingParameters(
            temperature=1.0, max_new_tokens=self._run["max_new_tokens"], eos_token_ids=loaded.eos_token_ids
        )
        self._learner = new_learner(loaded.model, trainer)
        self._engine = TorchEngine(loaded.files)
        self._versions = deque([policy_views(loaded.model)], maxlen=case.staleness + 1)
        self._unit = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """A run that diverges, or finds no group with a signal, ends early: its last score is all that it will have."""
        for step in range(self._case.steps):
            score = self._evaluate() if step % self._case.evaluate_every == 0 else None
            try:
                row = self._step(step)
            except TrainingDiverged as error:
                yield self._named(step, self._evaluate(), {"ended": f"diverged: {error}"[:200]})
                return
            yield self._named(step, score, row)
            if not row["groups"]:
                yield self._named(step + 1, self._evaluate(), {"ended": "no group had a signal"})
                return
        yield self._named(self._case.steps, self._evaluate(), {"ended": "complete"})

    def _evaluate(self) -> float:
        """The mean greedy score of the policy as it is."""
        tasks = list(self._environment.tasks("held_out"))
        prompts = [tuple(self._tokenizer.encode(task.prompt)) for task in tasks]
        answers = greedy_answers(TorchEngine.wrap(self._learner.model), prompts, [None] * len(tasks), self._sampling)
        texts = [self._tokenizer.decode(ids) for ids in answers]
        scores = [self._environment.score(task, text).value for task, text in zip(tasks, texts, strict=True)]
        return sum(scores) / len(scores)

    def _named(self, step: int, score: float | None, row: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._case.identity, "step": step, **({} if score is None else {"held_out": score}), **row}

    def _step(self, step: int) -> dict[str, Any]:
        began_s = time.monotonic()
        groups, drawn = self._groups(step)
        drawn_s = time.monotonic()
        work = StepWork(step, groups, temperature=1.0, max_staleness=self._case.staleness, seed=self._case.seed)
        metrics = train_step(self._learner, work) if groups else {"groups": 0.0}
        self._versions.append(policy_views(self._learner.model))
        times = {"generate_s": drawn_s - began_s, "train_s": time.monotonic() - drawn_s}
        return {name: float(f"{value:.6g}") for name, value in {**metrics, **times, "drawn_groups": drawn}.items()}

    def _groups(self, step: int) -> tuple[list[TrainingGroup], int]:
        """The step's groups, all by the oldest version that is kept, and how many were drawn to have them."""
        version = step - len(self._versions) + 1
        self._engine.load_policy(None, self._versions[0])
        wanted = self._run["groups_per_step"]
        kept: list[TrainingGroup] = []
        drawn = 0
        while len(kept) < wanted and drawn < REFILL * wanted:
            if time.monotonic() > self._deadline_s:
                raise Lateness
            count = min(math.ceil(SPARE * (wanted - len(kept))), REFILL * wanted - drawn)
            new = self._generate(range(self._unit, self._unit + count), version)
            self._unit += count
            drawn += count
            kept += [group for group in new if carries_signal([rollout.reward for rollout in group.rollouts])]
        return kept[:wanted], drawn

    def _generate(self, units: range, version: int) -> list[TrainingGroup]:
        tasks = [self._tasks[task_index(len(self._tasks), self._case.seed, unit)] for unit in units]
        prompts = [self._tokenizer.encode(task.prompt) for task in tasks]
        requests = [
            GenerationRequest(prompt, self._seeds(unit), self._sampling)
            for prompt, unit in zip(prompts, units, strict=True)
        ]
        drawn = self._engine.generate(requests)
        groups = []
        for unit, task, prompt, completions in zip(units, tasks, prompts, drawn, strict=True):
            texts = [self._tokenizer.decode(completion.token_ids) for completion in completions]
            rewards = [self._environment.score(task, text).value for text in texts]
            rollouts = [_rollout(one, reward) for one, reward in zip(completions, rewards, strict=True)]
            groups.append(TrainingGroup(unit, task.id, version, pack_tokens(prompt), rollouts))
        return groups

    def _seeds(self, unit: int) -> tuple[int, ...]:
        names = (f"staleness/{self._case.seed}/{unit}/{index}" for index in range(self._run["group_size"]))
        return tuple(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") for name in names)


def _model(recipe: str, path: str) -> LoadedModel:
    """A built-in model by its name, or a folder, meant from where the recipe lies."""
    folder = Path(recipe).parent / path
    return load_model(folder if folder.is_dir() else path)


def _rollout(completion: Completion, reward: float) -> TrainingRollout:
    return TrainingRollout(
        tokens=pack_tokens(completion.token_ids),
        logprobs=pack_logprobs(completion.logprobs),
        finish=completion.finish,
        reward=reward,
    )


def run_case(case: Case, folder: Path, deadline_s: float) -> str:
    """Run a case into `folder`, unless it is there. A file without ".part" is complete: a sweep can be repeated."""
    path = folder / f"{case.name}.jsonl"
    if path.exists():
        return "there already"
    if time.monotonic() > deadline_s:
        return "not begun: no time left"
    part, began_s = path.with_suffix(".part"), time.monotonic()
    try:
        with part.open("w") as file:
            for row in ExactRun(case, deadline_s).rows():
                file.write(json.dumps(row) + "\n")
                file.flush()
    except Lateness:
        return "given up: no time left"
    part.replace(path)
    return f"{row['ended']}, {row['held_out']:.3f} after {row['step']} steps, {time.monotonic() - began_s:.0f} s"
