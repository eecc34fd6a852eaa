"""What `shoal sft` does: demonstrations are chosen by filters and trained on; RL continues from the result.

FOLDER.work/   .shoal-sft (what was asked for; marks the folder as a warm start's), checkpoints/, metrics.jsonl
FOLDER/        appears whole at the end: a Hugging Face folder with sft.json and metrics.jsonl

The same command resumes from FOLDER.work; any other is told what differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.environments import Environment, build, prompt_settings_of
from shoal.environments.protocol import refuse_tokens
from shoal.environments.settings import PromptSettings
from shoal.errors import ConfigError, EnvironmentSetupError
from shoal.evaluation.records import difference
from shoal.models import model_folder, read_files
from shoal.models.folder import model_digest
from shoal.rewards.classifier import Classifier
from shoal.run.recipe import Recipe
from shoal.run.sources import CommandTasks, ModelSource, scorable, task_source
from shoal.runtime import STOPPED_CODE, FolderLock, StopToken, shoal_command, write_atomically
from shoal.runtime.config import parse_config
from shoal.shardcast.cast import Terminal
from shoal.trainer.demonstrations import selection
from shoal.trainer.demonstrations.reading import Demonstrations, Encoder
from shoal.trainer.demonstrations.selection import Corpus, FilterOptions, FilterReport, Schedule
from shoal.trainer.folder import TrainerProgress, refuse_foreign
from shoal.trainer.record import Tracked, open_trackers, require_trackers

if TYPE_CHECKING:
    from shoal.trainer.demonstrations.training import SftRun

ABOUT, MARK = "sft.json", ".shoal-sft"


@dataclass
class WarmStartRequest:
    out: Path
    env: str | None
    choice: FilterOptions
    schedule: Schedule
    stop: StopToken
    terminal: Terminal
    source: CommandTasks | None = None
    environment: Environment | None = None

    @property
    def work(self) -> Path:
        return self.out.with_name(f"{self.out.name}.work")

    def open(self, data: Sequence[Path], overrides: Sequence[str]) -> None:
        """What can be refused is refused before a model is loaded."""
        theirs = [override for override in overrides if override.strip().startswith("environment.")]
        own = [override for override in overrides if override not in theirs]
        for override in own:
            selection.refuse_unused(override)
        asked = parse_config(f"[trainer]\n{selection.DEFAULTS}", Recipe, "--set", own).trainer
        self.settings = asked.model_copy(update={"loss": selection.LOSS})  # no recipe may name it
        if self.env is None and (theirs or self.choice.verify):
            said = f"--set {theirs[0]}" if theirs else "--verify"
            raise ConfigError(f"{said}: there is no environment here; give one with --env")
        refuse_foreign(self.out)
        self.refuse_foreign_work()
        require_trackers(self.settings.tracking)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise ConfigError("shoal sft trains in one process: start it without torchrun")
        self.demonstrations = Demonstrations(data)
        if self.env is not None:
            self.source = task_source(self.env, theirs)
            self.environment = scorable(self.source) if self.choice.verify else build(self.source.settings)

    def refuse_foreign_work(self) -> None:
        """The work folder is emptied in the end, so that it must be marked, empty, or not there."""
        work = self.work
        own = work.is_dir() and ((work / MARK).is_file() or {path.name for path in work.iterdir()} <= {".lock"})
        if not own and (work.exists() or work.is_symlink()):
            raise ConfigError(f"{work} is there and is not of a warm start: move it away, or choose another --out")

    def about(self, model: ModelSource) -> dict[str, Any]:
        about = {
            "model": model_digest(model.where), "data": self.demonstrations.digest,
            "environment": None if self.environment is None else self.environment.digest,
            "choice": asdict(self.choice), "schedule": asdict(self.schedule),
            "trainer": self.settings.model_dump(mode="json", include=set(selection.USED - selection.HARMLESS)),
        }  # fmt: skip
        return dict(json.loads(json.dumps(about, default=str)))

    def select(self, model: ModelSource) -> tuple[Corpus, FilterReport]:
        choice, data, environment = self.choice, self.demonstrations, self.environment
        manner = PromptSettings() if environment is None else prompt_settings_of(environment)
        manner = manner if choice.chat is None else manner.model_copy(update={"chat": choice.chat})
        encoder = Encoder(read_files(model_folder(model.where)), manner, data.layout)
        with ExitStack() as around:
            pool, judge = None, None
            if choice.verify and environment and self.source:
                refuse_tokens(environment, "shoal sft --verify")
                pool = self.source.scoring(environment, self.stop)
                around.callback(pool.close)
            if choice.rank is not None:
                judge = Classifier(choice.rank, self.settings.device)
                try:
                    judge.prepare()  # what is wrong with it is said before rows are read
                except EnvironmentSetupError as error:
                    raise ConfigError(f"--rank {choice.rank}: {error}") from error
            environment_filters = (
                selection.EnvironmentFilters(environment, pool, choice.min_reward) if environment else None
            )
            progress = around.enter_context(self.terminal.metered("choosing", "rows"))
            return selection.select(data, encoder, choice, environment_filters, judge, progress, self.stop.is_set)

    def train(self, model: ModelSource) -> int:
        out, work, about = self.out, self.work, self.about(model)
        if (out / ABOUT).is_file():
            if (stored := json.loads((out / ABOUT).read_bytes())) != about:
                raise ConfigError(f"{out} is another warm start: {difference(stored, about)}")
            self.terminal.note(f"this is done already: {out}")
            return 0
        with FolderLock(work).acquire(self.stop):
            self.refuse_foreign_work()
            begun = json.loads((work / MARK).read_bytes()) if (work / MARK).is_file() else about
            if begun != about and any((work / "checkpoints").glob("*")):
                raise ConfigError(f"{work} is of another warm start: {difference(begun, about)}")
            write_atomically(work / MARK, json.dumps(about, indent=2).encode())
            corpus, outcome = self.select(model)
            self.terminal.say("\n".join(["demonstrations:", *outcome.lines()]))
            with self.terminal.metered("training", "steps") as report:
                finished = self._warm_start(model, about, corpus).run(report)
            if not finished:
                self.terminal.note(f"stopped; what is done is kept in {work}, and the same command resumes")
                return STOPPED_CODE
            for folder in (work / "checkpoints", *(() if self.settings.tracking else (work,))):
                shutil.rmtree(folder, ignore_errors=True)  # what trackers wrote stays
        self.terminal.say(f"wrote {out}; to measure it: {shoal_command()} eval {out} --env {self.env or '…'}")
        return 0

    def _warm_start(self, model: ModelSource, about: dict[str, Any], corpus: Corpus) -> SftRun:
        from shoal.trainer.demonstrations.training import SftRun  # torch
        from shoal.trainer.export import ModelCard, hub_name
        from shoal.trainer.learner import make_deterministic, new_learner, starting_model

        settings = self.settings
        make_deterministic(settings)
        loaded, text = starting_model(str(model.where), settings), json.dumps(about, indent=2).encode() + b"\n"
        run = f"sft-{hashlib.sha256(text + corpus.as_bytes()).hexdigest()[:12]}"
        card = ModelCard(
            TrainerProgress(run, 0), base_model=hub_name(model.name if model.run else model.where),
            environment=self.source.label if self.source else "", trained_on="demonstrations",
        )  # fmt: skip
        return SftRun(
            folder=self.work, out=self.out, name=run, learner=new_learner(loaded.model, settings), files=loaded.files,
            corpus=corpus, schedule=self.schedule, card=card, stop=self.stop, extra={ABOUT: text},
            trackers=open_trackers(settings.tracking, Tracked(self.work, run, about)),
        )  # fmt: skip
