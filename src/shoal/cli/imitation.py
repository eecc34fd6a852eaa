"""What `shoal sft` was asked for, and how demonstrations are chosen by it. What is done with them: `warm_start`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.cli.sources import ModelSource, TaskSource
    from shoal.environments import Environment
    from shoal.environments.settings import PromptSettings
    from shoal.runtime.stop import StopToken
    from shoal.trainer.demonstrations.choosing import Choosing
    from shoal.trainer.demonstrations.encoding import Encoder
    from shoal.trainer.demonstrations.filters import Filter
    from shoal.trainer.demonstrations.reading import Demonstrations
    from shoal.trainer.demonstrations.report import Outcome
    from shoal.trainer.demonstrations.settings import Course
    from shoal.trainer.settings import TrainerSettings


@dataclass(frozen=True)
class Choice:
    """Which demonstrations are wanted, as the command line says it."""

    min_tokens: int = 1
    max_tokens: int | None = None
    truncate: bool = False
    require: tuple[str, ...] = ()
    duplicates: bool = True
    near_duplicates: float | None = None
    verify: bool = False
    min_reward: float = 1.0
    rank: Path | None = None
    best: float | None = None
    best_per_prompt: int | None = None
    chat: bool | None = None

    def refuse_mistakes(self, env: str | None) -> None:
        """What cannot be meant is said before anything is opened."""
        from shoal.trainer.demonstrations.filters import Form

        for each in self.require:
            Form(each)
        if self.verify and env is None:
            raise ConfigError("--verify: give the environment that knows what is right, for example --env recipe.toml")
        wants_rank = self.best is not None or self.best_per_prompt is not None
        if wants_rank and self.rank is None:
            raise ConfigError("--best and --best-per-prompt are by rank: give the classifier's folder with --rank")
        if self.rank is not None and not wants_rank:
            raise ConfigError("--rank: say how many to keep, with --best SHARE or --best-per-prompt K")


@dataclass(frozen=True)
class SftRequest:
    model: str
    data: tuple[Path, ...]
    out: Path
    env: str | None
    overrides: tuple[str, ...]
    choice: Choice
    course: Course
    report: Path | None = None
    select_only: bool = False

    @property
    def work(self) -> Path:
        """Where everything is kept until the model is written."""
        return self.out.with_name(f"{self.out.name}.work")

    @cached_property
    def settings(self) -> TrainerSettings:
        from shoal.cli.recipe import Recipe
        from shoal.runtime.config import parse_config
        from shoal.trainer.demonstrations.settings import DEFAULTS, LOSS, refuse_unused

        own = [override for override in self.overrides if not override.strip().startswith("environment.")]
        for override in own:
            if not override.strip().startswith("trainer."):
                raise ConfigError(f"--set {override}: only settings of [trainer] and [environment] matter here")
            refuse_unused(override)
        asked = parse_config(f"[trainer]\n{DEFAULTS}", Recipe, "--set", own).trainer
        return asked.model_copy(update={"loss": LOSS})  # no recipe may name it

    @cached_property
    def source(self) -> TaskSource | None:
        from shoal.cli.sources import task_source

        theirs = [override for override in self.overrides if override.strip().startswith("environment.")]
        if self.env is None and theirs:
            raise ConfigError(f"--set {theirs[0]}: there is no environment here; give one with --env")
        return None if self.env is None else task_source(self.env, theirs)


# ── choosing ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Prepared:
    """What was asked for, with the data and the environment opened."""

    request: SftRequest
    demonstrations: Demonstrations
    environment: Environment | None

    def encoder(self, model: ModelSource) -> Encoder:
        from shoal.models.folder import model_folder, read_files
        from shoal.trainer.demonstrations.encoding import Encoder

        return Encoder(read_files(model_folder(model.where)), self._manner(), self.demonstrations.layout)

    def _manner(self) -> PromptSettings:
        """How the environment asks; --chat and --no-chat say otherwise."""
        from shoal.environments import prompt_settings_of
        from shoal.environments.settings import PromptSettings

        asked = PromptSettings() if self.environment is None else prompt_settings_of(self.environment)
        chat = self.request.choice.chat
        return asked if chat is None else asked.model_copy(update={"chat": chat})

    @contextmanager
    def choosing(self, encoder: Encoder, stop: StopToken) -> Iterator[Choosing]:
        """Everything that chooses, with a progress bar; scoring processes end with it."""
        from rich.console import Console

        from shoal.cli.counting import counted
        from shoal.trainer.demonstrations.choosing import Choosing
        from shoal.trainer.demonstrations.judged import Ranked, classifier

        choice = self.request.choice
        with ExitStack() as around:
            filters = self._filters(encoder, stop, around.callback)
            ranked = None
            if choice.rank is not None:
                judge = classifier(choice.rank, self.request.settings.device)
                ranked = Ranked(judge, choice.best, choice.best_per_prompt)
            progress = around.enter_context(counted("choosing", Console(stderr=True), unit="rows"))
            cut_at = self._longest(encoder) if choice.truncate else None
            yield Choosing(self.demonstrations, encoder, filters, ranked, cut_at, progress, stop.is_set)

    def _longest(self, encoder: Encoder) -> int | None:
        bounds = [bound for bound in (self.request.choice.max_tokens, encoder.positions) if bound is not None]
        return min(bounds, default=None)

    def _filters(
        self, encoder: Encoder, stop: StopToken, at_end: Callable[[Callable[[], None]], object]
    ) -> list[Filter]:
        """The cheap ones first."""
        from shoal.trainer.demonstrations.filters import Duplicates, Form, Known, Length, NearDuplicates
        from shoal.trainer.demonstrations.judged import HeldOut, Verified

        choice, environment = self.request.choice, self.environment
        found: list[Filter] = [Form(each) for each in choice.require]
        found += [Length(choice.min_tokens, self._longest(encoder)), Known(encoder.tokenizer.unknown_token_id)]
        found += [Duplicates()] if choice.duplicates else []
        found += [NearDuplicates(choice.near_duplicates)] if choice.near_duplicates is not None else []
        found += [HeldOut(environment)] if environment is not None else []
        if choice.verify:
            from shoal.rewards import Patience, ScoringPool

            assert environment is not None
            assert self.request.source is not None
            pool = ScoringPool(self.request.source.settings, environment, stop, Patience(all_s=86_400.0))
            pool.start()
            at_end(pool.close)
            found.append(Verified(environment, pool, choice.min_reward, self.demonstrations.has_tasks))
        return found

    def lines(self, outcome: Outcome) -> list[str]:
        """The table; the report is written on the way."""
        data = self.demonstrations
        if self.request.report is not None:
            outcome.write(self.request.report, data.rows, data.where)
        return outcome.lines(data.rows, data.where)

    def about(self, model: ModelSource) -> dict[str, Any]:
        """All that decides what comes out, for comparison."""
        from shoal.evaluation.subject import model_digest
        from shoal.models.folder import model_folder
        from shoal.trainer.demonstrations.settings import identity

        request, rank = self.request, self.request.choice.rank
        about = {
            "model": model_digest(model_folder(model.where)),
            "data": self.demonstrations.digest,
            "environment": None if self.environment is None else self.environment.digest,
            "choice": {**asdict(request.choice), "rank": None if rank is None else str(rank)},
            "course": asdict(request.course),
            "trainer": identity(request.settings),
        }
        found: dict[str, Any] = json.loads(json.dumps(about))
        return found
