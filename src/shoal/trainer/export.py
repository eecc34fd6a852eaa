"""Export: a Hugging Face folder that plain `transformers` loads, with a card that says where it came from.

    hidden folder ─► weights, configuration, tokenizer, README.md, shoal.json, all synced ─► rename

`shoal.json` marks an export. A folder without it is somebody's and is never overwritten.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.models.folder import read_config
from shoal.models.load import DTYPES
from shoal.protocol import LedgerHead, PolicyManifest
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically
from shoal.runtime.metrics import MetricsLog
from shoal.trainer.checkpoint import CheckpointStore, Progress
from shoal.trainer.destination import MARK, refuse_foreign
from shoal.trainer.publisher import cast

MODEL = "model.safetensors"


@dataclass(frozen=True)
class ModelCard:
    """What a reader of the exported model wants to know. `metrics` is the last row that measured each number."""

    progress: Progress
    base_model: str = ""
    environment: str = ""
    digest: str | None = None
    ledger_head: LedgerHead | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> bytes:
        head = self.ledger_head
        values = {**asdict(self), "ledger_head": head.model_dump(mode="json") if head else None}
        return json.dumps(values, indent=2).encode() + b"\n"


def export_policy(
    destination: Path,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    card: ModelCard,
    dtype: str = "float32",
) -> Path:
    """Write the folder; an older export at the same place is replaced, anything else there is left alone."""
    refuse_foreign(destination)
    ensure_folder(destination.parent)
    hidden = destination.parent / f".{destination.name}.exporting"
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir()
        weights = {name: cast(tensor, DTYPES[dtype]).contiguous() for name, tensor in tensors.items()}
        save_file(weights, hidden / MODEL, metadata={"format": "pt"})
        (hidden / MODEL).chmod(0o644)  # the library makes it private; a model is there to be read
        with (hidden / MODEL).open("rb") as file:
            os.fsync(file.fileno())
        for name, data in {**files, "config.json": _config(files, dtype)}.items():
            write_atomically(hidden / name, data)
        write_atomically(hidden / "README.md", _readme(card, dtype).encode())
        write_atomically(hidden / MARK, card.as_json())
        _put_in_place(hidden, destination)
    except (SafetensorError, OSError) as error:
        raise resource_error("write the export", destination, error) from error
    return destination


def write_card(destination: Path, card: ModelCard, dtype: str = "float32") -> None:
    """Put another card into an export: what became known of its model later."""
    write_atomically(destination / "README.md", _readme(card, dtype).encode())
    write_atomically(destination / MARK, card.as_json())


def export_checkpoint(
    trainer_folder: Path,
    destination: Path,
    card: ModelCard | None = None,
    dtype: str = "float32",
    manifest_of: Callable[[Progress], PolicyManifest | None] = lambda _progress: None,
) -> Path:
    """Export the newest checkpoint of a trainer's folder, at any time: no hub, no model folder, no running trainer.

    Of a given card, the progress and the metrics are filled in from the folder, digest and ledger head from the
    manifest under which that version was published.
    """
    checkpoints = trainer_folder / "checkpoints"
    stored = CheckpointStore(checkpoints, keep=1).newest()
    if stored is None:
        raise CheckpointError(
            f"there is no checkpoint in {checkpoints} yet; wait for the trainer's first, then export again"
        )
    given = card or ModelCard(stored.progress)
    metrics = latest_metrics(MetricsLog(trainer_folder / "metrics.jsonl"), stored.progress.version)
    manifest = manifest_of(stored.progress)
    digest, head = (manifest.policy.digest, manifest.ledger_head) if manifest else (given.digest, given.ledger_head)
    filled = ModelCard(stored.progress, given.base_model, given.environment, digest, head, metrics)
    return export_policy(destination, stored.tensors(), stored.files, filled, dtype)


def latest_metrics(metrics: MetricsLog, version: int) -> dict[str, float]:
    """The newest value of every number measured up to a version; when it was measured is no such number."""
    latest: dict[str, float] = {}
    for row in metrics.rows():
        if row["step"] <= version:
            latest.update(row)
    return {name: value for name, value in latest.items() if name not in ("step", "at_ms")}


def _put_in_place(hidden: Path, destination: Path) -> None:
    sync_folder(hidden)
    replaced = destination.parent / f".{destination.name}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    if destination.exists():
        destination.rename(replaced)
    hidden.rename(destination)
    sync_folder(destination.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _config(files: Mapping[str, bytes], dtype: str) -> bytes:
    """config.json with the type of the exported weights, so that a loader does not cast them."""
    config = {key: value for key, value in read_config(files).items() if key != "torch_dtype"}
    return json.dumps({**config, "dtype": dtype}, indent=2).encode() + b"\n"


def _readme(card: ModelCard, dtype: str) -> str:
    progress = card.progress
    head = f"{card.ledger_head.index} / `{card.ledger_head.hash}`" if card.ledger_head else "not recorded"
    facts = {
        "run": f"`{progress.run}`",
        "version": f"{progress.version} (incarnation {progress.incarnation})",
        "trained from": card.base_model or "not recorded",
        "environment": card.environment or "not recorded",
        "weights": dtype,
        "policy digest": f"`{card.digest}`" if card.digest else "not recorded",
        "ledger head (index / hash)": head,
    }
    measured = {name: f"{value:.6g}" for name, value in sorted(card.metrics.items())}
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [reinforcement-learning, shoal]\n---\n\n"
        f"# {progress.run}, version {progress.version}\n\n"
        "Trained by reinforcement learning with shoal on rollouts that were each verified before training.\n\n"
        f"{_table(('fact', 'value'), facts)}\n## Last measured\n\n{_table(('metric', 'value'), measured)}\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")\n'
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")\n```\n'
    )


def _table(header: tuple[str, str], rows: Mapping[str, str]) -> str:
    lines = [f"| {header[0]} | {header[1]} |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
    return "\n".join(lines) + "\n"
