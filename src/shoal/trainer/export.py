"""Export: a Hugging Face folder that plain `transformers` loads, with a card that says where it came from.

    hidden folder ─► weights, configuration, tokenizer, README.md, shoal.json, all synced ─► rename

`shoal.json` marks an export and lists its files. A folder without it is somebody's and is never overwritten. In one
that is an export already, or empty, files take the places of the older ones, the weights last; whatever else is there
(LICENSE, .git) stays. A kill in between leaves a folder without weights, which nobody takes for a model.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import CheckpointError, ConfigError
from shoal.models.folder import read_config
from shoal.models.load import DTYPES
from shoal.models.lora import merged
from shoal.protocol import PolicyManifest
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically
from shoal.runtime.metrics import MetricsLog
from shoal.trainer.card import ModelCard
from shoal.trainer.checkpoint import CheckpointStore, Progress, StoredCheckpoint
from shoal.trainer.destination import HIDDEN, MARK, refuse_foreign, written_files
from shoal.trainer.publisher import cast
from shoal.trainer.retention import Place, ranked, scores_of

__all__ = [
    "ModelCard", "Which", "beside_the_best", "export_checkpoint", "export_policy", "latest_metrics", "scores_of",
    "write_card",
]  # fmt: skip

log = logging.getLogger(__name__)

MODEL = "model.safetensors"


Which = int | Literal["newest", "best"]
"""A version, the newest checkpoint, or the one with the best held-out score."""

LOOKS = 3
"""A trainer that goes on may remove a checkpoint while it is read; another one is there by then."""


def export_policy(
    destination: Path,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    card: ModelCard,
    dtype: str = "float32",
) -> Path:
    """Write the folder, and return where it is; an older export there is replaced, anything else is left alone.

    Adapters are merged into the weights they sit on: whoever loads the folder needs to know nothing of them.
    """
    refuse_foreign(destination)
    destination = destination.resolve()
    tensors, files = merged(tensors, files)
    there = destination.is_dir()
    ensure_folder(destination if there else destination.parent)
    hidden = destination / HIDDEN if there else destination.parent / f".{destination.name}{HIDDEN}"
    shutil.rmtree(hidden, ignore_errors=True)
    card = replace(card, files=sorted({*files, "config.json", MODEL, "README.md", MARK}))
    try:
        hidden.mkdir()
        weights = {name: cast(tensor, DTYPES[dtype]).contiguous() for name, tensor in tensors.items()}
        save_file(weights, hidden / MODEL, metadata={"format": "pt"})
        (hidden / MODEL).chmod(0o644)  # the library makes it private; a model is there to be read
        with (hidden / MODEL).open("rb") as file:
            os.fsync(file.fileno())
        for name, data in {**files, "config.json": _config(files, dtype)}.items():
            write_atomically(hidden / name, data)
        write_atomically(hidden / "README.md", card.as_readme(dtype).encode())
        write_atomically(hidden / MARK, card.as_json())
        _put_in_place(hidden, destination, card.files)
    except (SafetensorError, OSError) as error:
        raise resource_error("write the export", destination, error) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return destination


def write_card(destination: Path, card: ModelCard, dtype: str = "float32") -> None:
    """Put another card into an export: what became known of its model later."""
    write_atomically(destination / "README.md", card.as_readme(dtype).encode())
    write_atomically(destination / MARK, replace(card, files=written_files(destination)).as_json())


def export_checkpoint(
    trainer_folder: Path,
    destination: Path,
    card: ModelCard | None = None,
    dtype: str = "float32",
    manifest_of: Callable[[Progress], PolicyManifest | None] = lambda _progress: None,
    which: Which = "newest",
) -> Path:
    """Export a checkpoint of a trainer's folder, at any time: no hub, no model folder, no running trainer.

    Of a given card, all that the folder tells is filled in: progress, metrics, scores; digest and ledger head from the
    manifest under which that version was published.
    """
    log_of = MetricsLog(trainer_folder / "metrics.jsonl")
    scores = scores_of(log_of)
    stored, tensors, chosen = _open(CheckpointStore(trainer_folder / "checkpoints", keep=1), which, scores)
    given, version = card or ModelCard(stored.progress), stored.progress.version
    manifest = manifest_of(stored.progress)
    filled = replace(
        given,
        progress=stored.progress,
        digest=manifest.policy.digest if manifest else given.digest,
        ledger_head=manifest.ledger_head if manifest else given.ledger_head,
        metrics=latest_metrics(log_of, version),
        scores=scores,
        chosen=chosen,
    )
    return export_policy(destination, tensors, stored.files, filled, dtype)


def _open(
    store: CheckpointStore, which: Which, scores: Mapping[int, float]
) -> tuple[StoredCheckpoint, dict[str, Tensor], str]:
    """The checkpoint asked for, its weights, and why it is this one."""
    for look in range(LOOKS):
        stored, chosen = _choose(store, which, scores)
        try:
            return stored, stored.tensors(), chosen
        except (OSError, SafetensorError, CheckpointError):
            if stored.folder.is_dir() or look == LOOKS - 1:
                raise
            log.info("the checkpoint %s was removed meanwhile; looking again", stored.folder)
    raise AssertionError("the last look returns or raises")


def _choose(store: CheckpointStore, which: Which, scores: Mapping[int, float]) -> tuple[StoredCheckpoint, str]:
    places = store.places()
    if not places:
        raise CheckpointError(
            f"there is no checkpoint in {store.folder} yet; wait for the trainer's first, then export again"
        )
    if which == "best":
        return _best(store, places, scores)
    if which == "newest":
        stored = store.newest()
        assert stored is not None, "there are checkpoints"
        return stored, "the newest that was saved" + beside_the_best(stored.progress.version, scores)
    of_version = [place for place in places if place[0] == which]
    if not of_version:
        there = ", ".join(str(version) for version in sorted({version for version, _ in places}))
        raise ConfigError(f"there is no checkpoint of version {which} in {store.folder}; those kept are {there}")
    return store.at(of_version[0]), "the one that was asked for" + beside_the_best(which, scores)


def _best(store: CheckpointStore, places: Sequence[Place], scores: Mapping[int, float]) -> tuple[StoredCheckpoint, str]:
    best = ranked(places, scores)
    if not best:
        raise ConfigError(
            f"no checkpoint in {store.folder} has a held-out score yet (trainer.evaluate_every); export the newest one "
            "by leaving out --best, or wait for a score"
        )
    version = best[0][0]
    if scores[version] < max(scores.values()):
        log.warning(
            "version %d has the best score of the checkpoints kept, %.4g, but not of the run%s",
            version, scores[version], beside_the_best(version, scores),
        )  # fmt: skip
    return store.at(best[0]), f"the best of {len(best)} kept, by held-out score" + beside_the_best(version, scores)


def beside_the_best(version: int, scores: Mapping[int, float]) -> str:
    """How a version compares with the best that was measured; nothing where there is nothing to compare."""
    if not scores:
        return ""
    best = max(scores, key=lambda number: (scores[number], number))
    own = f"held-out score {scores[version]:.4g}" if version in scores else "not measured itself"
    return f" ({own}; the run's best is {scores[best]:.4g}, of version {best})"


def latest_metrics(metrics: MetricsLog, version: int) -> dict[str, float]:
    """The newest value of every number measured up to a version; when it was measured is no such number."""
    latest: dict[str, float] = {}
    for row in metrics.rows():
        if row["step"] <= version:
            latest.update(row)
    return {name: value for name, value in latest.items() if name not in ("step", "at_ms")}


def _put_in_place(hidden: Path, destination: Path, names: Sequence[str]) -> None:
    sync_folder(hidden)
    if hidden.parent == destination:
        _replace_files(hidden, destination, names)
    else:
        hidden.rename(destination)
        sync_folder(destination.parent)


def _replace_files(hidden: Path, destination: Path, names: Sequence[str]) -> None:
    """One after the other. The mark is always there; weights are never beside a configuration that is not theirs."""
    earlier = set(written_files(destination)) - {*names}
    for name in (MODEL, *sorted(earlier)):
        (destination / name).unlink(missing_ok=True)
    sync_folder(destination)
    for name in sorted(names, key=lambda name: (name == MODEL, name == MARK)):
        (hidden / name).replace(destination / name)
    sync_folder(destination)


def _config(files: Mapping[str, bytes], dtype: str) -> bytes:
    """config.json with the type of the exported weights, so that a loader does not cast them."""
    config = {key: value for key, value in read_config(files).items() if key != "torch_dtype"}
    return json.dumps({**config, "dtype": dtype}, indent=2).encode() + b"\n"
