"""What `shoal eval`, `shoal filter` and `shoal data` are given: a model, tasks, a run or a recipe."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.environments import ENVIRONMENTS, Environment, EnvironmentSettings, build, require_scoring
from shoal.environments.data.locating import kind_of
from shoal.environments.formats import FORMATS
from shoal.errors import ConfigError, EnvironmentSetupError, ShoalError
from shoal.models import BUILTIN, model_folder
from shoal.models.folder import parts
from shoal.protocol import PolicyManifest
from shoal.rewards import ScoringPatience, ScoringPool
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe, load_recipe, pinned, shipped_recipe
from shoal.runtime import StopToken, ensure_folder, hf, meant
from shoal.runtime.config import parse_config
from shoal.shardcast.manifest import read_manifest
from shoal.shardcast.tree import Tree, manifest_key, parse_label
from shoal.trainer.folder import MARK, refuse_foreign, written_files

ROLLOUTS = """---
tags: [shoal]
configs:
- config_name: default
  data_files: data/*.parquet
---

# What {model} was trained on

The rollouts of the run {run}, one file a step: prompts, completions, tokens, log-probabilities, rewards, and which
node generated them. Each was verified before it was trained on.
"""


def export_run(
    directory: Path, out: Path, best: bool = False, version: int | None = None, adapter: bool = False
) -> Path:
    """Refuses what it can before it loads torch, which takes a while."""
    if best and version is not None:
        raise ConfigError("--best and --version name two checkpoints; give one of them")
    checkpoints = (folder := RunFolder.open(directory)).path / "trainer" / "checkpoints"
    if not checkpoints.is_dir() or not any(checkpoints.iterdir()):
        wait = f"export again once its trainer has written one (shoal status {directory} says how far it is)"
        raise ConfigError(f"there is no checkpoint in {checkpoints} yet: {wait}")
    refuse_foreign(out)
    place = out.resolve()
    ensure_folder(place if place.is_dir() else place.parent)
    from shoal.trainer.export import ModelCard, Which, export_checkpoint, hub_name
    from shoal.trainer.folder import TrainerProgress

    recipe = folder.recipe
    path, base = parts(recipe.model.path)
    adapters_of = base or (path if hf.parse(path) else str(model_folder(path).absolute())) if adapter else ""
    progress = TrainerProgress(folder.run_id, 0, 0)  # the checkpoint says which version it is
    card = ModelCard(
        progress,
        base_model=hub_name(adapters_of or path),
        environment=recipe.environment.file.stem if recipe.environment.file else recipe.environment.name,
    )

    def manifest_of(progress: TrainerProgress) -> PolicyManifest | None:
        data = Tree(folder.path / "origin").read(manifest_key((progress.incarnation, progress.version)))
        return None if data is None else read_manifest(data, folder.run_id, folder.key("trainer").public_key)

    which: Which = "best" if best else "newest" if version is None else version
    return export_checkpoint(folder.path / "trainer", out, card, recipe.trainer.publish_dtype, manifest_of, which,
                             adapters_of)  # fmt: skip


def push_export(directory: Path, out: Path, name: hf.HubName, private: bool, rollouts: bool) -> Iterator[str]:
    """Push what an export wrote, the run's metrics and its ledger; with `rollouts`, a data set of them."""
    from shoal.run.ledger.check import export_ledger

    try:
        export_ledger(str(directory), directory / "ledger.jsonl")
    except ShoalError as error:
        older = "as it was written out before" if (directory / "ledger.jsonl").is_file() else "not at all"
        yield f"the ledger is pushed {older}: {error}"
    files: dict[str, Path | bytes] = {file: out / file for file in written_files(out)}
    files["README.md"] = (out / "README.md").read_bytes().replace(b"path/to/this/folder", name.repo.encode())
    beside = (directory / "trainer" / "metrics.jsonl", *directory.glob("ledger.jsonl*"))
    files |= {path.name: path for path in beside if path.is_file()}
    version = json.loads((out / MARK).read_bytes())["progress"]["version"]
    run = f"{RunFolder.open(directory).run_id}, version {version}"
    yield f"pushed {len(files)} files to {hf.push(name, 'model', files, private, run)}"
    if rollouts:
        steps = {f"data/{path.name}": path for path in sorted((directory / "trainer" / "rollouts").glob("*.parquet"))}
        card = ROLLOUTS.format(model=name.repo, run=run).encode()
        data = hf.HubName(f"{name.repo}-rollouts")
        yield f"pushed {len(steps)} steps to {hf.push(data, 'dataset', {**steps, 'README.md': card}, private, run)}"


@dataclass(frozen=True)
class ModelSource:
    name: str
    where: str | Path
    run: RunFolder | None = None


@contextmanager
def model_source(text: str) -> Iterator[ModelSource]:
    """For a run's folder its newest policy, named after the folder: runs of one recipe have the same `run.name`."""
    path = Path(text).expanduser()
    if (name := hf.parse(text)) is not None:
        found = hf.model(name)
        yield ModelSource(name.repo.partition("/")[2], found.folder)
        return
    if text in BUILTIN or not (path / "recipe.toml").is_file():
        yield ModelSource(Path(parts(text)[0]).name, text)
        return
    run = RunFolder.open(path.absolute())
    if _is_newest(run.path):
        yield ModelSource(run.path.name, run.path / "trainer" / "export", run)
        return
    with tempfile.TemporaryDirectory(prefix="shoal-model-") as folder:
        yield ModelSource(run.path.name, export_run(run.path, Path(folder) / "model"), run)


def _is_newest(run: Path) -> bool:
    places = (parse_label(entry.name) for entry in run.glob("trainer/checkpoints/*"))
    newest = max((place for place in places if place is not None), default=(0, 0))
    try:
        progress = json.loads((run / "trainer" / "export" / MARK).read_bytes())["progress"]
        return (int(progress["version"]), int(progress["incarnation"])) >= newest
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclass(frozen=True)
class CommandTasks:
    """`whole`: all tasks of a file are meant, without a split for training."""

    settings: EnvironmentSettings
    recipe: Recipe | None = None
    run: RunFolder | None = None
    whole: bool = False

    @property
    def label(self) -> str:
        settings = self.settings
        named = settings.file or settings.data
        if named is None or settings.mix:
            return "mix" if settings.mix else settings.name
        hub = hf.parse(named)
        return hub.repo.partition("/")[2] if hub else named.name.partition(".")[0]

    def scoring(self, environment: Environment, stop: StopToken) -> ScoringPool:
        """Started: processes beside this one score, because a reward function or a program may do anything."""
        pool = ScoringPool(self.settings, environment, stop, ScoringPatience(all_s=86_400.0))
        pool.start()
        return pool

    @property
    def skips_rows(self) -> bool:
        parts = self.settings.mix or (self.settings,)
        return all(part.options.get("bad_rows") == "skip" for part in parts if part.name == "dataset")


def scorable(source: CommandTasks) -> Environment:
    environment = build(source.settings)
    require_scoring(environment)
    return environment


def task_source(spec: str, overrides: Sequence[str] = ()) -> CommandTasks:
    """`sort`, `recipe.toml`, a run's folder, `reward.py`, `aime:FILE`, `dataset:FILE`, a data file, or the name of a
    data set of the Hugging Face hub, which is downloaded."""
    found = _task_source(spec, overrides)
    return replace(found, settings=pinned(Recipe(environment=found.settings)).environment)


def _task_source(spec: str, overrides: Sequence[str]) -> CommandTasks:
    path = Path(spec).expanduser()
    name, colon, file = spec.partition(":")
    if (path / "recipe.toml").is_file():
        if overrides:
            raise ConfigError(f"--set {overrides[0]}: a run's environment is what it is; give its recipe instead")
        run = RunFolder.open(path.absolute())
        return CommandTasks(run.recipe.environment, run.recipe, run)
    if colon and (name in FORMATS or name in ENVIRONMENTS):
        return _of_file(name, Path(file).expanduser(), overrides)
    if path.suffix == ".toml" or (spec not in ENVIRONMENTS and shipped_recipe(spec)):
        recipe = load_recipe(path, overrides)
        return CommandTasks(recipe.environment, recipe)
    if spec in ENVIRONMENTS:
        return CommandTasks(_settings(f"name = {json.dumps(spec)}", overrides))
    if path.suffix == ".py":
        return CommandTasks(_settings(f"file = {_quoted(path)}", overrides))
    if path.exists() or hf.parse(spec) or (kind_of(path) is not None and not colon):
        return _of_file("dataset", path, overrides)
    what = f"format {name!r}" if colon else f"environment {spec!r}"
    files = "a run's folder, a reward file (.py), a data file (.parquet or .jsonl: convert others first), ORG/NAME"
    known = f"{', '.join(sorted(ENVIRONMENTS))}, a recipe (.toml), {files}, or FORMAT:FILE with {', '.join(FORMATS)}"
    hint = meant(name, [*ENVIRONMENTS, *FORMATS])
    raise EnvironmentSetupError(f"there is no {what}{hint}; give one of {known}")


def _of_file(name: str, file: Path, overrides: Sequence[str]) -> CommandTasks:
    if not file.exists() and hf.parse(file) is None:
        raise EnvironmentSetupError(f"there is no data at {file}")
    named = f'name = "dataset"\noptions = {{ format = "{name}" }}' if name in FORMATS else f"name = {json.dumps(name)}"
    return CommandTasks(_settings(f"{named}\ndata = {_quoted(file)}", overrides), whole=True)


def _settings(section: str, overrides: Sequence[str]) -> EnvironmentSettings:
    for override in overrides:
        if not override.strip().startswith("environment."):
            message = f"--set {override}: only settings of [environment] matter here, by their whole name"
            raise ConfigError(f"{message}, as in --set environment.options.bad_rows=skip")
    return parse_config(f"[environment]\n{section}\n", Recipe, "--env", overrides).environment


def _quoted(path: Path) -> str:
    return json.dumps(str(path if hf.parse(path) else path.absolute()))
