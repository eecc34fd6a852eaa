"""A recipe: every section of a run's configuration in one model. Each setting is declared next to what it configures.

`count` and `engine` of a section say how `shoal run` starts that role; the other settings are the role's own.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, field_validator

from shoal.dashboard import DashboardSettings
from shoal.environments import ENVIRONMENTS, EnvironmentSettings
from shoal.environments.graders import GRADERS, TASK_TYPES
from shoal.errors import ConfigError
from shoal.hub.settings import NAME, HubSettings, RunSettings
from shoal.runtime import ensure_folder, extensions, hf, write_atomically
from shoal.runtime.config import load_config
from shoal.trainer.settings import OWN_CODE, TrainerSettings, is_changeable
from shoal.validator.settings import KINDS_ON_REQUEST, ValidatorSettings
from shoal.worker.settings import WorkerSettings

CHANGEABLE_SECTIONS = ("hub", "validator", "worker", "relay", "dashboard")


class ModelSettings(BaseModel, frozen=True, extra="forbid"):
    path: str = Field(
        "tiny", description="a built-in name, a Hugging Face folder (from the recipe's folder), or ORG/NAME[@REVISION]"
    )


class ValidatorSection(ValidatorSettings):
    count: int = Field(default=1, ge=0, le=64, description="validators that `shoal run` starts; more may join")


class WorkerSection(WorkerSettings):
    count: int = Field(default=1, ge=0, le=256, description="workers that `shoal run` starts; more may join")
    engine: str = Field(default="torch", description="what they generate with")

    @property
    def checked_with(self) -> str:
        """The engine of validators: torch also for work of vLLM."""
        return "scripted" if self.engine == "scripted" else "torch"


class RelaySection(BaseModel, frozen=True, extra="forbid"):
    """Relays that mirror the origin on this machine."""

    count: int = Field(default=1, ge=0, le=64, description="relays that `shoal run` starts beside the origin")


class Recipe(BaseModel, frozen=True, extra="forbid"):
    run: RunSettings = Field(default_factory=RunSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    environment: EnvironmentSettings = Field(default_factory=EnvironmentSettings)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    hub: HubSettings = Field(default_factory=HubSettings)
    validator: ValidatorSection = Field(default_factory=ValidatorSection)
    worker: WorkerSection = Field(default_factory=WorkerSection)
    relay: RelaySection = Field(default_factory=RelaySection)
    dashboard: DashboardSettings = Field(default_factory=DashboardSettings)

    @field_validator("trainer")
    @classmethod
    def _learns_from_rewards(cls, trainer: TrainerSettings) -> TrainerSettings:
        if trainer.loss == "cross_entropy":
            why = 'loss = "cross_entropy" is for demonstrations: it corrects for no staleness and bounds no step'
            remedy = "`shoal sft`, which sets it itself; for RL take another loss, or leave it out"
            raise ValueError(f"{why}. For imitation there is {remedy}")
        return trainer


def shipped(folder: str) -> Path:
    """`recipes` or `examples`, which come with shoal: inside the package, or in the clone that it is used from."""
    package = Path(__file__).parents[1]
    return package / folder if (package / folder).is_dir() else package.parents[1] / folder


def shipped_recipe(name: str | Path) -> Path | None:
    """The recipe that comes with shoal under this name, such as `tiny`, unless a file has this name."""
    found = shipped("recipes") / f"{name}.toml"
    return found if Path(name).name == str(name) and not Path(name).is_file() and found.is_file() else None


def shipped_recipes() -> dict[str, str]:
    """Name → the first sentence of its comment."""
    described = {}
    for path in sorted(shipped("recipes").glob("*.toml")):
        lines = itertools.takewhile(lambda line: line.startswith("# "), path.read_text().splitlines())
        described[path.stem] = re.split(r"\.(?= |$)", " ".join(line[2:] for line in lines))[0]
    return described


def make_project(path: Path) -> list[Path]:
    """Write a recipe, a reward file and a README of one's own into a new folder; returns the files."""
    if not re.fullmatch(NAME, path.name):
        raise ConfigError(f"{str(path)!r}: a run's name has letters, digits, '.', '_' and '-' only: choose another")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} is there and is not an empty folder: choose another name")
    ensure_folder(path)
    written = []
    for source in sorted((shipped("examples") / "project").glob("*.*")):
        text = source.read_text().replace("NAME", path.name)
        written.append(path / (f"{path.name}.toml" if source.suffix == ".toml" else source.name))
        write_atomically(written[-1], text.encode())
    return written


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Paths in a recipe are relative to its folder, those in overrides to the working directory. What a recipe of
    shoal's names and does not bring along, such as a model, is looked for there, too."""
    from shoal.models.folder import parts

    path = shipped_recipe(path) or path
    recipe = load_config(path, Recipe, overrides)
    given, overridden = recipe.model_dump(exclude_unset=True), {each.partition("=")[0].strip() for each in overrides}
    folder = path.expanduser().absolute().parent

    def place_of(setting: str, file: str | Path) -> Path:
        file, beside = Path(file).expanduser(), folder / Path(file).expanduser()
        is_here = any(f"{setting}.".startswith(f"{each}.") for each in overridden)
        is_here = is_here or (folder == shipped("recipes") and not beside.exists())
        return Path.cwd() / file if is_here else beside

    for name, holder, key in _places(given):
        value = str(holder[key])
        several = (value, "") if name != "model.path" or (folder / value).exists() else parts(value)
        placed = (each if _is_hub_name(key, each) and not (folder / each).exists() else str(place_of(name, each))
                  for each in several if each)  # fmt: skip
        holder[key] = "+".join(placed)
    for setting, kind, holder, key in _own_code(given):
        file, _, name = str(holder[key]).rpartition(":")
        if extensions.file_of(holder[key]) is not None:
            holder[key] = f"{place_of(setting, file)}:{name}"
        holder[key] = extensions.pinned(setting, kind, holder[key])
    if recipe.worker.dtype == "bfloat16":  # weights are never rounded on the way: they are published so
        given.setdefault("trainer", {}).setdefault("publish_dtype", "bfloat16")
    return Recipe.model_validate(given)


def pinned(recipe: Recipe, before: Recipe | None = None, weights: bool = True) -> Recipe:
    """The recipe with every name of the Hugging Face hub at its commit, downloaded (the model without `weights` only as
    far as it describes itself). Names that `before`, the run's recipe, has pinned stay at its commits."""
    from shoal.environments.data.locating import hub_data

    given, stored = recipe.model_dump(exclude_unset=True), before.model_dump() if before else {}
    kept = {setting: str(holder[key]) for setting, holder, key in _places(stored)}
    for setting, holder, key in _places(given):
        value, was = str(holder[key]), kept.get(setting, "")
        if setting == "model.path":
            holder[key] = _pinned_model(value, was, weights)
        elif _is_hub_name(key, value) and (name := _same_name(value, was)):
            split = holder.get("options", {}).get("split", "") if key == "data" else ""
            found = hf.model(name) if key == "path" else hub_data(name, str(split))
            holder[key] = str(found.name)
    return Recipe.model_validate(given)


def _pinned_model(value: str, was: str, weights: bool) -> str:
    """A model, or adapters with their base: each with its commit and the digest of its files."""
    from shoal.models.folder import BUILTIN, files_digest, parts, read_adapter

    def one(value: str, was: str) -> str:
        if (name := _same_name(value, was)) is None:
            return value
        if name.part:
            raise ConfigError(f"model.path: {name}: only data sets have parts (:{name.part}); leave it out")
        found = hf.model(name, weights)
        digest = files_digest(found.folder, found.files) if weights else name.digest
        if name.digest and digest != name.digest:
            why = f"the files of {name.repo} in {found.folder} are not those that the run began with"
            raise ConfigError(f"model.path: {why}: remove that folder, and they are downloaded again")
        return str(replace(found.name, digest=digest))

    (path, base), (path_was, base_was) = parts(value), parts(was)
    path = one(path, path_was)
    adapter = read_adapter(hf.model_folder(path, weights))
    base = one(base or (adapter.base if adapter else ""), base_was)
    if base and base not in BUILTIN and hf.parse(base) is None:
        base = str(Path(base).expanduser().absolute())
    return f"{path}+{base}" if base else path


def _same_name(value: str, was: str) -> hf.HubName | None:
    """The name of the hub in `value`, if it has one; at the commit that `was` pins, unless it asks for another."""
    name, old = hf.parse(value), hf.parse(was)
    if name and old and (name.repo, name.part) == (old.repo, old.part) and name.revision in ("", old.revision):
        return old
    return name


def _is_hub_name(key: Any, value: str | Path) -> bool:
    return key in ("path", "data", "held_out") and hf.parse(value) is not None


def _places(given: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Every path in the values of a recipe: its setting, and the table or list with its key."""
    from shoal.models import BUILTIN

    environment, profiles = given.get("environment", {}), list(given.get("validator", {}).get("profiles") or ())
    mix, judges = (
        [(f"environment.{name}.{index}", table) for index, table in enumerate(environment.get(name) or ())]
        for name in ("mix", "judges")
    )
    found: list[tuple[str, Any, Any]] = [("model.path", given.get("model", {}), "path")]
    for name, part in (("environment", environment), *mix):
        found += [(f"{name}.file", part, "file"), (f"{name}.data", part, "data")]
        found.append((f"{name}.options.held_out", part.get("options", {}), "held_out"))
    found += [(f"{name}.path", judge, "path") for name, judge in judges]
    if profiles:
        given["validator"]["profiles"] = profiles
        found += [("validator.profiles", profiles, index) for index in range(len(profiles))]
    for name, holder, key in found:
        value = holder[key] if isinstance(holder, list) else holder.get(key)
        if isinstance(value, str | Path) and str(value) not in ("", *BUILTIN, *KINDS_ON_REQUEST):
            yield name, holder, key


def _own_code(given: dict[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """Every value that names the owner's code: its setting, its kind, and the table or list with its key."""
    trainer, environment = given.get("trainer", {}), given.get("environment", {})
    found: list[tuple[str, str, Any, Any, Iterable[str]]] = [
        (f"trainer.{key}", *OWN_CODE[key][:1], trainer, key, OWN_CODE[key][1]) for key in ("advantage", "loss")
    ]
    if "tracking" in trainer:
        trainer["tracking"] = list(trainer["tracking"])
        kind, words = OWN_CODE["tracking"]
        found += [("trainer.tracking", kind, trainer["tracking"], at, words) for at in range(len(trainer["tracking"]))]
    parts = ((f"environment.mix.{index}", part) for index, part in enumerate(environment.get("mix") or ()))
    for name, part in (("environment", environment), *parts):
        found.append((f"{name}.name", "environment", part, "name", ENVIRONMENTS))
        found.append((f"{name}.options.grader", "grader", part.get("options", {}), "grader", (*GRADERS, *TASK_TYPES)))
    for setting, kind, holder, key, known in found:
        value = holder[key] if isinstance(holder, list) else holder.get(key)
        if isinstance(value, str) and value and value not in known:
            yield setting, kind, holder, key


def missing_inputs(recipe: Recipe) -> list[str]:
    from shoal.models.folder import BUILTIN, parts

    given = recipe.model_dump()
    paths = [Path(holder[key]) for _, holder, key in _places(given)]
    paths += filter(None, (extensions.file_of(holder[key]) for _, _, holder, key in _own_code(given)))
    each = (Path(part) for path in paths for part in parts(path) if part not in ("", *BUILTIN))
    return [str(path) for path in each if not path.exists() and hf.parse(path) is None]


def refuse_other_recipe(path: Path, stored: Recipe, given: Recipe) -> None:
    """A run is resumed with its own recipe; only how it is served, by how many and how long may change."""
    before, now = dict(settings_of(stored)), dict(settings_of(given))
    changed = []
    for key in dict.fromkeys((*now, *before)):
        section, _, name = key.partition(".")
        changeable = section in CHANGEABLE_SECTIONS or (section == "trainer" and is_changeable(name))
        if before.get(key) != now.get(key) and key != "run.steps" and not changeable:
            was, is_ = (str(each) if isinstance(each, Path) else each for each in (before.get(key), now.get(key)))
            changed.append(f"{key} was {was!r}, is {is_!r}")
    if not changed:
        return
    shown, more = "; ".join(changed[:3]), f"; and {len(changed) - 3} more" if len(changed) > 3 else ""
    way = "resume with: shoal run {}" if (path / "hub").exists() else "change it: shoal run {} --set SECTION.KEY=VALUE"
    remedy = f"give another RUN, or {way.format(path)}"
    raise ConfigError(f"the run in {path} was made with another recipe ({shown}{more}); {remedy}")


def settings_of(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in model:
        if isinstance(value, BaseModel):
            yield from settings_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
