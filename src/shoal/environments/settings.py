"""The [environment] section of a recipe: which tasks, how they are asked, and how completions are scored. `Composed` is
an environment with these settings, and has one digest over all of them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from shoal.environments.protocol import Environment, Score, Split, Task, reads_tokens, require_scoring, score_of
from shoal.errors import EnvironmentSetupError
from shoal.runtime import hf

AT_TARGET = 0.5  # of the reward: what hitting the target is worth in the form max


class Table(BaseModel, frozen=True, extra="forbid"):
    """Base of every table of the section, and of an environment's own options: frozen, unknown names refused."""


class TaskSource(Table):
    """Where tasks come from: a built-in environment by `name` with its `options`, or a Python `file` of your own."""

    name: str = Field(default="sort", description="a built-in environment")
    file: Path | None = Field(default=None, description="a Python file with tasks and score(), instead of a name")
    data: Path | None = Field(
        default=None,
        description="Parquet or JSON lines, a folder of them, or a data set's name: ORG/NAME[@REVISION][:PART[/SPLIT]]",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="of the built-in environment")
    train_size: int | None = Field(
        default=None, ge=1, description="tasks of a generating environment, 100,000 if unset; or positions of a mixture"
    )
    held_out_size: int = Field(default=256, ge=1, description="tasks that are never trained on, for evaluation")


class MixPart(TaskSource):
    """One part of a mixture: tasks of it are drawn in proportion to its weight."""

    label: str = Field(default="", pattern=r"^[a-z0-9_.\-]{0,32}$", description="its name if empty")
    weight: float = Field(default=1.0, gt=0, le=1e6, description="how often, relative to the other parts")


class LengthSettings(Table):
    """Length budgets: the hub draws a target for every unit, the prompt names it, and the reward compares it with l,
    the number of generated tokens (with the end-of-sequence token if `count_eos`).

        exact   r_task − α·|target − l|
        max     r_task · clip(α·(target − l) + 0.5, 0, 1)
        clip    r_task if l ≤ target, else 0
    """

    targets: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        min_length=1, max_length=1024, description="in tokens; one is drawn per unit"
    )
    form: Literal["exact", "max", "clip"] = Field(default="exact", description="how the target counts")
    alpha: float = Field(default=0.0003, ge=0, le=1, description="what a token too many, or too few, costs")
    count_eos: bool = Field(default=False, description="the end-of-sequence token counts as a token of the length")
    text: str = Field(
        default="Think for {target} tokens before giving a response.", pattern=r"\{target\}",
        description="added to the prompt, at its end; {target} is where the number goes",
    )  # fmt: skip

    def target(self, run: str, unit: int) -> int:
        """The target of a unit; each of `targets` is equally likely."""
        digest = hashlib.sha256(f"shoal/length/v1\n{run}\n{unit}".encode()).digest()
        return self.targets[int.from_bytes(digest[:8], "big") % len(self.targets)]

    def ask(self, task: Task, target: int) -> Task:
        return replace(task, prompt=f"{task.prompt} {self.text.replace('{target}', str(target))}")

    def worth(self, score: Score, target: int, tokens: int) -> Score:
        task = score.value
        if self.form == "exact":
            value = task - self.alpha * abs(target - tokens)
        elif self.form == "max":
            value = task * min(1.0, max(0.0, self.alpha * (target - tokens) + AT_TARGET))
        else:
            value = task if tokens <= target else 0.0
        parts = {**score.parts, "task": task, "length": value - task, "target": float(target)}
        return replace(score, value=value, parts=parts)


class PromptSettings(Table):
    """How a task becomes a prompt of the model: its chat template, a system message, how its answer begins."""

    chat: bool | None = Field(default=None, description="use the model's chat template; unset: if it has one")
    system: str = Field(default="", description="the system message, where a task has none of its own")
    thinking: str = Field(default="", description="what the model's answer begins with, e.g. <think>; given, not drawn")


class JudgeSettings(Table):
    """An additional reward: a sequence classifier that the validator runs, or a model behind an address. The answers of
    an address cannot be computed again; verdicts mark them so."""

    label: str = Field(pattern=r"^[a-z0-9_.\-]{1,32}$", description="the part's name in the record")
    weight: float = Field(default=1.0, ge=-1e3, le=1e3, description="added to the reward times this")
    use: Literal["score", "rank"] = Field(default="score", description="its number, or its rank in the group, 0 to 1")
    path: Path | None = Field(
        default=None, description="folder of a classifier in Hugging Face's format, or ORG/NAME[@REVISION] of its hub"
    )
    url: str = Field(default="", description="or an OpenAI-compatible address, up to and including /v1")
    model: str = Field(default="", description="name of the judge's model at that address")
    prompt: str = Field(default="", description="what it is asked, with {prompt}, {completion} and {answer}")

    @property
    def kind(self) -> Literal["classifier", "openai"]:
        return "openai" if self.path is None else "classifier"

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.path is None) == (not self.url) or bool(self.url) != bool(self.model):
            raise ValueError("a judge has either path, the folder of a classifier, or url and model")
        return self


class ScoringSettings(Table):
    """Limits for scoring one completion, in child processes."""

    seconds: float = Field(default=10.0, gt=0, le=3600, description="processor time; what takes longer is worth 0")
    memory_mb: int = Field(default=2048, ge=64, description="memory; what needs more is worth 0")
    processes: int = Field(default=0, ge=0, le=256, description="at the same time; 0: one per core, 8 at most")


class EnvironmentSettings(TaskSource):
    """The [environment] section: one source of tasks, or a `mix` of several; prompts and scoring.

    `shuffle_rewards` is a control experiment: the validator permutes the rewards within each group, so a run that still
    "improves" does not learn from them. It is not part of the environment's digest."""

    mix: tuple[MixPart, ...] = Field(default=(), description="several ingredients with weights, instead of one")
    length: LengthSettings | None = Field(default=None, description="length budgets: targets, form, alpha, …")
    prompt: PromptSettings | None = Field(default=None, description="how a task is asked: chat, system, thinking")
    judges: tuple[JudgeSettings, ...] = Field(default=(), description="reward models beside the task's own reward")
    retire_after: int | None = Field(
        default=None, ge=0,
        description="draw easy and hard tasks less often; solved groups in a row that retire one (0: none); unset: off",
    )  # fmt: skip
    scoring: ScoringSettings | None = Field(default=None, description="limits: seconds, memory_mb, processes")
    shuffle_rewards: bool = Field(default=False, description="the control: rewards permuted within each group")

    @model_validator(mode="after")
    def _labels_differ(self) -> Self:
        if len({judge.label for judge in self.judges}) < len(self.judges):
            raise ValueError("two judges have the same label: give them different ones")
        return self


class Composed:
    """Implements `Environment` around another one. Graders see the whole answer, with its thinking prefix."""

    def __init__(self, inner: Environment, settings: EnvironmentSettings) -> None:
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

    @property
    def reads_tokens(self) -> bool:
        return reads_tokens(self.inner)

    def score(self, task: Task, completion: str, token_ids: Sequence[int] | None = None) -> Score:
        return score_of(self.inner, task, self.prompt.thinking + completion, token_ids)

    def prepare(self) -> None:
        require_scoring(self.inner)


def is_plain(settings: EnvironmentSettings) -> bool:
    """Whether the settings add nothing to the inner environment; tables of defaults add nothing."""
    prompt, scoring = settings.prompt or PromptSettings(), settings.scoring or ScoringSettings()
    return not (settings.length or settings.judges or prompt != PromptSettings() or scoring != ScoringSettings())


def _digest(inner: Environment, settings: EnvironmentSettings) -> str:
    """The inner environment's digest if the settings change no score (the number of processes does not)."""
    limits = (settings.scoring or ScoringSettings()).model_copy(update={"processes": ScoringSettings().processes})
    prompt = None if settings.prompt == PromptSettings() else settings.prompt
    scoring = None if limits == ScoringSettings() else limits
    settings = settings.model_copy(update={"prompt": prompt, "scoring": scoring})
    if is_plain(settings):
        return inner.digest
    added = settings.model_dump(mode="json", include={"length", "prompt", "judges", "scoring"})
    for judge, given in zip(added["judges"], settings.judges, strict=True):
        judge["path"] = None if given.path is None else folder_digest(given.path)  # the content, not the place
    if added["scoring"] is not None:
        del added["scoring"]["processes"]
    content = {"inner": inner.digest, **added}
    return hashlib.sha256(b"shoal/composed/v1\n" + json.dumps(content, sort_keys=True).encode()).hexdigest()


def folder_digest(folder: Path) -> str:
    """Hex SHA-256 over names and bytes of a model's files, without hidden ones."""
    from shoal.environments.data.cache import file_digest

    if (hub := hf.parse(folder)) is not None:
        found = hf.model(hub)
        folder, names = found.folder, sorted(found.files)
    else:
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
