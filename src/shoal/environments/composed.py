"""An environment with prompt settings, length budget, judges and scoring limits, and one digest over all of them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from shoal.environments.protocol import Environment, Score, Split, Task, require_scoring
from shoal.environments.settings import EnvironmentSettings as Settings
from shoal.environments.settings import JudgeSettings, LengthSettings, PromptSettings, ScoringSettings
from shoal.errors import EnvironmentSetupError


class Composed:
    """Implements `Environment` around another one. Graders see the whole answer, with its thinking prefix."""

    def __init__(self, inner: Environment, settings: Settings) -> None:
        self.inner, self.name = inner, inner.name
        self.version = int(getattr(inner, "version", 1))
        self.data_digest = str(getattr(inner, "data_digest", ""))
        self.prompt = settings.prompt or PromptSettings()
        self.length = settings.length
        self.judges = settings.judges
        self.scoring = settings.scoring or ScoringSettings()
        self.digest = _digest(inner, settings)

    def tasks(self, split: Split) -> Sequence[Task]:
        return self.inner.tasks(split)

    def task(self, task_id: str) -> Task:
        return self.inner.task(task_id)

    def score(self, task: Task, completion: str) -> Score:
        return self.inner.score(task, self.prompt.thinking + completion)

    def prepare(self) -> None:
        require_scoring(self.inner)


def is_plain(settings: Settings) -> bool:
    """Whether the settings add nothing to the inner environment; tables of defaults add nothing."""
    prompt, scoring = settings.prompt or PromptSettings(), settings.scoring or ScoringSettings()
    return not (settings.length or settings.judges or prompt != PromptSettings() or scoring != ScoringSettings())


def _digest(inner: Environment, settings: Settings) -> str:
    """The inner environment's digest if the settings change no score (the number of processes does not)."""
    limits = (settings.scoring or ScoringSettings()).model_copy(update={"processes": ScoringSettings().processes})
    prompt = None if settings.prompt == PromptSettings() else settings.prompt
    scoring = None if limits == ScoringSettings() else limits
    settings = settings.model_copy(update={"prompt": prompt, "scoring": scoring})
    if is_plain(settings):
        return inner.digest
    added = settings.model_dump(mode="json", include={"length", "prompt", "judges", "scoring"})
    for judge, given in zip(added["judges"], settings.judges, strict=True):
        del judge["timeout_s"]  # changes no score
        judge["path"] = None if given.path is None else folder_digest(given.path)  # the content, not the place
    if added["scoring"] is not None:
        del added["scoring"]["processes"]
    content = {"inner": inner.digest, **added}
    return hashlib.sha256(b"shoal/composed/v1\n" + json.dumps(content, sort_keys=True).encode()).hexdigest()


def folder_digest(folder: Path) -> str:
    """Hex SHA-256 over names and bytes of a model's files, without hidden ones."""
    from shoal.environments.data.cache import file_digest

    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    shown = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    if not shown:
        raise EnvironmentSetupError(f"the classifier's folder {folder} is not there, or empty: check the judge's path")
    return hashlib.sha256("".join(f"{file_digest(folder / name)} {name}\n" for name in shown).encode()).hexdigest()


def inner_of(environment: Environment) -> Environment:
    return environment.inner if isinstance(environment, Composed) else environment


def budget_of(environment: Environment) -> LengthSettings | None:
    return environment.length if isinstance(environment, Composed) else None


def prompt_settings_of(environment: Environment) -> PromptSettings:
    return environment.prompt if isinstance(environment, Composed) else PromptSettings()


def judges_of(environment: Environment) -> tuple[JudgeSettings, ...]:
    return environment.judges if isinstance(environment, Composed) else ()


def scoring_of(environment: Environment) -> ScoringSettings:
    return environment.scoring if isinstance(environment, Composed) else ScoringSettings()
