"""A recipe: every section of a run's configuration in one model. Each setting is declared next to what it configures.

    [run] [hub]      shoal.hub          [environment]  shoal.environments     [trainer]  shoal.trainer
    [validator]      shoal.validator    [worker]       shoal.worker           [relay]    shoal.shardcast
    [model]          here

`count` and `engine` of a section say how `shoal run` starts that role; the rest is the role's own business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from shoal.environments import EnvironmentSettings
from shoal.environments.settings import Ingredient
from shoal.errors import ConfigError
from shoal.hub.settings import HubSettings, RunSettings
from shoal.runtime.config import load_config
from shoal.shardcast import RelaySettings
from shoal.trainer.settings import TrainerSettings, is_changeable
from shoal.validator.profiles import ON_REQUEST
from shoal.validator.settings import ValidatorSettings
from shoal.worker.settings import WorkerSettings

PATH_KEYS = (
    "model.path", "environment.file", "environment.data", "environment.options.held_out", "environment.mix.*.file",
    "environment.mix.*.data", "environment.mix.*.options.held_out", "environment.judges.*.path", "validator.profiles",
)  # fmt: skip
"""Settings that are paths; `*` stands for a number."""
CHANGEABLE_SECTIONS = ("hub", "validator", "worker", "relay")
CHANGEABLE_KEYS = ("run.steps",)


class ModelSettings(BaseModel):
    """The [model] section: where training starts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(
        default="tiny", description="a built-in name, or a Hugging Face folder (from the recipe's folder)"
    )


class ValidatorSection(ValidatorSettings):
    count: int = Field(default=1, ge=1, le=64, description="validators that `shoal run` starts")
    engine: str = Field(default="torch", description="what they check with")


class WorkerSection(WorkerSettings):
    count: int = Field(default=1, ge=0, le=256, description="workers that `shoal run` starts; more may join")
    engine: str = Field(default="torch", description="what they generate with")


class RelaySection(BaseModel):
    """How relays mirror and serve."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(default=1, ge=0, le=64, description="relays that `shoal run` starts beside the origin")
    keep_versions: int = Field(default=3, ge=1, le=1000, description="newest versions kept on disk")
    disk_budget_gb: float | None = Field(
        default=None, gt=0, description="bytes of chunks kept on disk at most; the oldest versions go first"
    )

    @property
    def settings(self) -> RelaySettings:
        return RelaySettings(kept_versions=self.keep_versions, disk_budget_gb=self.disk_budget_gb)


class Recipe(BaseModel):
    """The whole configuration of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunSettings = Field(default_factory=RunSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    environment: EnvironmentSettings = Field(default_factory=EnvironmentSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    hub: HubSettings = Field(default_factory=HubSettings)
    validator: ValidatorSection = Field(default_factory=ValidatorSection)
    worker: WorkerSection = Field(default_factory=WorkerSection)
    relay: RelaySection = Field(default_factory=RelaySection)

    @field_validator("trainer")
    @classmethod
    def _learns_from_rewards(cls, trainer: TrainerSettings) -> TrainerSettings:
        if trainer.loss == "cross_entropy":
            raise ValueError(
                'loss = "cross_entropy" is for demonstrations: it corrects for no staleness and bounds no step. For '
                "imitation there is `shoal sft`, which sets it itself; for RL take another loss, or leave it out"
            )
        return trainer


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe at `path`. Paths in it are meant from where it lies, those in overrides from here."""
    overrides = [_from_here(override) for override in overrides]
    recipe = _anchored(load_config(path, Recipe, overrides), path.expanduser().absolute().parent)
    if recipe.worker.dtype != "bfloat16" or "publish_dtype" in recipe.trainer.model_fields_set:
        return recipe
    # Weights are never rounded on the way: where workers compute in bfloat16, they are published so.
    return recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"publish_dtype": "bfloat16"})})


def settings_of(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting as (`section.key`, value), sections within sections taken apart."""
    for name, value in model:
        if isinstance(value, BaseModel):
            yield from settings_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _from_here(override: str) -> str:
    """`environment.file=my.py` with the path made absolute, also in a list; any other override as it is."""
    from shoal.models import BUILTIN

    key, _, value = override.partition("=")
    if re.sub(r"\.[0-9]+\.", ".*.", key.strip()) not in PATH_KEYS:
        return override
    listed = value.strip().startswith("[")
    texts = [text for part in value.strip().strip("[]").split(",") if (text := part.strip().strip("\"'"))]
    names = (*BUILTIN, *ON_REQUEST)
    paths = [text if text in names else str(Path.cwd() / Path(text).expanduser()) for text in texts]
    if listed:
        return f"{key}={json.dumps(paths)}"
    return f"{key}={json.dumps(paths[0])}" if len(paths) == 1 else override


def _anchored(recipe: Recipe, base: Path) -> Recipe:
    from shoal.models import BUILTIN

    changes: dict[str, BaseModel] = {}
    if recipe.model.path not in BUILTIN:
        path = base / Path(recipe.model.path).expanduser()
        changes["model"] = recipe.model.model_copy(update={"path": str(path)})
    changes["environment"] = _environment_from(recipe.environment, base)
    if recipe.validator.profiles:
        profiles = tuple(  # the key of a built-in profile is no path
            path if path.as_posix() in ON_REQUEST else base / path.expanduser() for path in recipe.validator.profiles
        )
        changes["validator"] = recipe.validator.model_copy(update={"profiles": profiles})
    return recipe.model_copy(update=changes)


def _environment_from(settings: EnvironmentSettings, base: Path) -> EnvironmentSettings:
    parts = tuple(part.model_copy(update=_ingredient_from(part, base)) for part in settings.mix)
    judges = tuple(
        judge if judge.path is None else judge.model_copy(update={"path": base / judge.path.expanduser()})
        for judge in settings.judges
    )
    return settings.model_copy(update={**_ingredient_from(settings, base), "mix": parts, "judges": judges})


def _ingredient_from(given: Ingredient, base: Path) -> dict[str, Any]:
    """The paths of an ingredient, meant from `base`."""
    held_out = given.options.get("held_out")
    options = {"held_out": str(base / Path(held_out).expanduser())} if isinstance(held_out, str) and held_out else {}
    return {
        "file": None if given.file is None else base / given.file.expanduser(),
        "data": None if given.data is None else base / given.data.expanduser(),
        "options": {**given.options, **options},
    }


def paths_of(settings: EnvironmentSettings) -> list[Path]:
    """Every file and folder that the [environment] section names."""
    named: list[Path | None] = [judge.path for judge in settings.judges]
    for given in (settings, *settings.mix):
        held_out = given.options.get("held_out")
        named += [given.file, given.data, Path(held_out) if isinstance(held_out, str) and held_out else None]
    return [path for path in named if path is not None]


def missing_inputs(recipe: Recipe) -> list[str]:
    """What the recipe names by its path and is not here: a backup has the run, not what it was made from."""
    from shoal.models import BUILTIN

    named = [] if recipe.model.path in BUILTIN else [Path(recipe.model.path)]
    named += paths_of(recipe.environment)
    named += [file for file in recipe.validator.profiles if file.as_posix() not in ON_REQUEST]
    return [str(found) for found in named if not found.exists()]


# ── what may differ when a run is resumed: how it is served and by how many, and for how long; never what is trained ──


def refuse_other_recipe(path: Path, stored: Recipe, given: Recipe) -> None:
    """A folder belongs to one recipe: going on with another would mix two runs."""
    before, now = dict(settings_of(stored)), dict(settings_of(given))
    changed = [key for key in _changed(before, now) if not _changeable(key)]
    if changed:
        raise ConfigError(f"the run in {path} was made with another recipe ({_changes(changed, before, now)}); "
                          "choose another folder with --dir, or go on with: shoal run --dir "
                          f"{path}")  # fmt: skip


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return [key for key in dict.fromkeys((*now, *before)) if before.get(key) != now.get(key)]


def _changeable(key: str) -> bool:
    section, _, name = key.partition(".")
    return key in CHANGEABLE_KEYS or section in CHANGEABLE_SECTIONS or (section == "trainer" and is_changeable(name))


def _shown(value: object) -> str:
    return repr(str(value) if isinstance(value, Path) else value)


def _changes(keys: Sequence[str], before: Mapping[str, object], now: Mapping[str, object]) -> str:
    shown = [f"{key} was {_shown(before.get(key))}, is {_shown(now.get(key))}" for key in keys[:3]]
    return "; ".join([*shown, *([f"and {len(keys) - 3} more"] if len(keys) > 3 else [])])
