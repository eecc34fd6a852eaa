"""`shoal export`: the newest checkpoint of a run as a Hugging Face folder; needs no running process."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.folder import RunFolder
from shoal.errors import CheckpointError
from shoal.protocol import PolicyManifest
from shoal.runtime.files import ensure_folder
from shoal.shardcast.manifest import read_manifest
from shoal.shardcast.tree import Tree, manifest_key
from shoal.trainer.destination import refuse_foreign


def export_run(directory: Path, out: Path) -> Path:
    """Write the export to `out`. What can be refused is refused before torch is loaded, which takes a while."""
    folder = RunFolder.open(directory)
    checkpoints = folder.path / "trainer" / "checkpoints"
    if not checkpoints.is_dir() or not any(checkpoints.iterdir()):
        raise CheckpointError(f"there is no checkpoint in {checkpoints} yet; has the trainer started?")
    refuse_foreign(out)
    ensure_folder(out.absolute().parent)
    from shoal.trainer.checkpoint import Progress
    from shoal.trainer.export import ModelCard, export_checkpoint

    recipe = folder.recipe
    unknown = Progress(folder.run_id, 0, 0)  # which version it is, the checkpoint says
    card = ModelCard(unknown, base_model=Path(recipe.model.path).name, environment=recipe.environment.name)

    def manifest_of(progress: Progress) -> PolicyManifest | None:
        data = Tree(folder.path / "origin").read(manifest_key((progress.incarnation, progress.version)))
        return None if data is None else read_manifest(data, folder.run_id, folder.key("trainer").public_key)

    return export_checkpoint(folder.path / "trainer", out, card, recipe.trainer.publish_dtype, manifest_of)
