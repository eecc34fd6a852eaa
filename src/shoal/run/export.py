"""`shoal export`: a checkpoint of a run as a Hugging Face folder; needs no running process, and disturbs none."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import CheckpointError, ConfigError
from shoal.protocol import PolicyManifest
from shoal.run.folder import RunFolder
from shoal.runtime.files import ensure_folder
from shoal.shardcast.manifest import read_manifest
from shoal.shardcast.tree import Tree, manifest_key
from shoal.trainer.folder import refuse_foreign


def export_run(directory: Path, out: Path, best: bool = False, version: int | None = None) -> Path:
    """Write the export to `out`: of the newest checkpoint, the best, or that of a version.

    What can be refused is refused before torch is loaded, which takes a while.
    """
    if best and version is not None:
        raise ConfigError("--best and --version name two checkpoints; give one of them")
    folder = RunFolder.open(directory)
    checkpoints = folder.path / "trainer" / "checkpoints"
    if not checkpoints.is_dir() or not any(checkpoints.iterdir()):
        raise CheckpointError(f"there is no checkpoint in {checkpoints} yet; has the trainer started?")
    refuse_foreign(out)
    place = out.resolve()
    ensure_folder(place if place.is_dir() else place.parent)
    from shoal.trainer.export import ModelCard, Which, export_checkpoint, hub_name, training_facts
    from shoal.trainer.folder import Progress

    recipe = folder.recipe
    unknown = Progress(folder.run_id, 0, 0)  # which version it is, the checkpoint says
    run = recipe.run.model_dump(include={"group_size", "groups_per_step", "max_staleness", "temperature"})
    card = ModelCard(
        unknown,
        base_model=hub_name(recipe.model.path),
        environment=recipe.environment.name,
        datasets=tuple(hub_name(data) for data in (recipe.environment.data,) if data is not None),
        training=training_facts(recipe.trainer, **run),
    )

    def manifest_of(progress: Progress) -> PolicyManifest | None:
        data = Tree(folder.path / "origin").read(manifest_key((progress.incarnation, progress.version)))
        return None if data is None else read_manifest(data, folder.run_id, folder.key("trainer").public_key)

    which: Which = "best" if best else "newest" if version is None else version
    return export_checkpoint(folder.path / "trainer", out, card, recipe.trainer.publish_dtype, manifest_of, which)
