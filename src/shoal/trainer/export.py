"""Export: a Hugging Face folder that plain `transformers` loads, with a card that tells its origin.

`shoal.json` marks an export and lists its files; a folder without it is never overwritten. An export into an older
export, or into an empty folder, replaces the listed files, the weights last; other files (LICENSE, .git) stay. If it is
killed in between, the folder has no weights and cannot be mistaken for a model.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from torch import Tensor

from shoal.errors import ConfigError
from shoal.models.folder import PEFT_CONFIG, PEFT_WEIGHTS, peft_config, read_config
from shoal.models.load import DTYPES
from shoal.models.lora import adapter_shape, merged, peft_tensors
from shoal.protocol import LedgerHead, PolicyManifest
from shoal.runtime import hf
from shoal.runtime.files import ensure_folder, resource_error, sync_folder, write_atomically
from shoal.runtime.metrics import MetricsLog
from shoal.trainer.checkpoint import MODEL, CheckpointStore, StoredCheckpoint, save_tensors
from shoal.trainer.folder import HIDDEN, MARK, TrainerProgress, ranked, refuse_foreign, scores_of, written_files
from shoal.trainer.publisher import cast
from shoal.trainer.record import latest_metrics

log = logging.getLogger(__name__)

CACHED = re.compile(r"models--([\w.\-]+?)--([\w.\-]+)", re.ASCII)
ON_THE_HUB = re.compile(r"[\w.\-]+/[\w.\-]+", re.ASCII)
KINDS = {
    "rollouts": "Trained by reinforcement learning with shoal on rollouts that were each verified before training.",
    "demonstrations": "Trained with shoal to imitate demonstrations.",
}
USE = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
"""
USE_ADAPTER = """from peft import AutoPeftModelForCausalLM  # the tokenizer is the base's

model = AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder")
"""
README = """---
library_name: {library}
pipeline_tag: text-generation
tags: [shoal]
{base}---

# {title}

{kind}

{facts}
```python
{use}```

## Last measured

{measured}
## Licence

That of the model it was trained from, where nothing else was agreed.
"""
Which = int | Literal["newest", "best"]  # version, newest checkpoint, or best held-out score


@dataclass(frozen=True)
class ModelCard:
    """`metrics`: the newest value of each number; `scores`: held-out scores by version; `chosen`: which version of the
    run this is."""

    progress: TrainerProgress
    base_model: str = ""
    environment: str = ""
    digest: str | None = None
    ledger_head: LedgerHead | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[int, float] = field(default_factory=dict)
    chosen: str = ""
    trained_on: Literal["rollouts", "demonstrations"] = "rollouts"
    files: Sequence[str] = ()
    is_adapter: bool = False

    def as_json(self) -> bytes:
        head = self.ledger_head
        values = {**asdict(self), "ledger_head": head.model_dump(mode="json") if head else None}
        return json.dumps(values, indent=2).encode() + b"\n"

    def as_readme(self, dtype: str) -> str:
        """For people and for the Hugging Face hub, which refuses unknown model names in `base_model`."""
        progress, head, base = self.progress, self.ledger_head, self.base_model or "not recorded"
        named = self.base_model.partition("@")[0]
        on_the_hub = bool(ON_THE_HUB.fullmatch(named))
        facts = {"run": f"`{progress.run}`", "version": f"{progress.version} (incarnation {progress.incarnation})"}
        facts |= {"this version is": self.chosen} if self.chosen else {}
        facts["trained from"] = base if on_the_hub or not self.base_model else f"{base} (a local model)"
        facts |= {"environment": self.environment or "not recorded", "weights": dtype}
        if self.trained_on == "rollouts":  # demonstrations have no published policy and no ledger
            facts["policy digest"] = f"`{self.digest}`" if self.digest else "not recorded"
            facts["ledger head (index / hash)"] = f"{head.index} / `{head.hash}`" if head else "not recorded"
        return README.format(
            base=f"base_model: {named}\n" if on_the_hub else "",
            library="peft" if self.is_adapter else "transformers",
            use=USE_ADAPTER if self.is_adapter else USE,
            title=f"{progress.run}, version {progress.version}",
            kind=KINDS[self.trained_on] if progress.version else "The model that the run began with: not trained yet.",
            facts=_table("fact", facts),
            measured=_table("metric", {name: f"{value:.6g}" for name, value in sorted(self.metrics.items())}),
        )


def _table(title: str, rows: Mapping[str, str]) -> str:
    return "".join(f"| {key} | {value} |\n" for key, value in {title: "value", "---": "---", **rows}.items())


def hub_name(path: str | Path) -> str:
    """A model's name on the Hugging Face hub, with its commit if the path is pinned; else the name of its folder.

    >>> hub_name("/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899d")
    'Qwen/Qwen3-0.6B'
    """
    if (name := hf.parse(path)) is not None:
        return f"{name.repo}@{name.revision}" if name.revision else name.repo
    cached = next((match for part in Path(path).parts if (match := CACHED.fullmatch(part))), None)
    return f"{cached[1]}/{cached[2]}" if cached else Path(path).name


def export_policy(
    destination: Path, tensors: Mapping[str, Tensor], files: Mapping[str, bytes], card: ModelCard,
    dtype: str = "float32", adapters_of: str = "",
) -> Path:  # fmt: skip
    """An older export is replaced; another folder is refused. Adapters are merged into the weights, or alone if
    `adapters_of` names their base: in PEFT's format, and in float32, for they are small."""
    refuse_foreign(destination)
    destination = destination.resolve()
    if not adapters_of:
        tensors, files = merged(tensors, files)
        # With the type of the exported weights, so that a loader does not cast them.
        config = {key: value for key, value in read_config(files).items() if key != "torch_dtype"} | {"dtype": dtype}
        files, large = {**files, "config.json": json.dumps(config, indent=2).encode() + b"\n"}, MODEL
    elif (shape := adapter_shape(files)) is None:
        raise ConfigError("--adapter: this run trains all weights and has no adapters: leave it out")
    else:
        tensors, dtype, large = peft_tensors(tensors), "float32", PEFT_WEIGHTS
        files = {PEFT_CONFIG: peft_config(shape.rank, shape.alpha, shape.targets, adapters_of)}
    there = destination.is_dir()
    ensure_folder(destination if there else destination.parent)
    hidden = destination / HIDDEN if there else destination.parent / f".{destination.name}{HIDDEN}"
    shutil.rmtree(hidden, ignore_errors=True)
    card = replace(card, files=sorted({*files, large, "README.md", MARK}), is_adapter=bool(adapters_of))
    try:
        hidden.mkdir()
        weights = {name: cast(tensor, DTYPES[dtype]) for name, tensor in tensors.items()}
        save_tensors(hidden / large, weights)
        (hidden / large).chmod(0o644)  # the library makes it private
        for name, data in files.items():
            write_atomically(hidden / name, data)
        write_card(hidden, card, dtype)
        sync_folder(hidden)
        if there:  # one after the other; the mark is always there, weights never beside another's configuration
            for name in (MODEL, PEFT_WEIGHTS, *sorted(set(written_files(destination)) - {*card.files})):
                (destination / name).unlink(missing_ok=True)
            sync_folder(destination)
            for name in sorted(card.files, key=lambda name: (name == large, name == MARK)):
                (hidden / name).replace(destination / name)
            sync_folder(destination)
        else:
            hidden.rename(destination)
            sync_folder(destination.parent)
    except (SafetensorError, OSError) as error:
        raise resource_error("write the export", destination, error) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return destination


def write_card(destination: Path, card: ModelCard, dtype: str = "float32") -> None:
    """Write the card of an export, also later, when more is known. The list of files stays."""
    write_atomically(destination / "README.md", card.as_readme(dtype).encode())
    write_atomically(destination / MARK, replace(card, files=card.files or written_files(destination)).as_json())


def export_checkpoint(
    trainer_folder: Path, destination: Path, card: ModelCard | None = None, dtype: str = "float32",
    manifest_of: Callable[[TrainerProgress], PolicyManifest | None] = lambda _progress: None, which: Which = "newest",
    adapters_of: str = "",
) -> Path:  # fmt: skip
    """Export a checkpoint of a trainer's folder at any time, without hub, model folder or trainer. The card is
    completed from the folder and from the manifest of the version."""
    rows = MetricsLog(trainer_folder / "metrics.jsonl")
    scores, store = scores_of(rows), CheckpointStore(trainer_folder / "checkpoints", keep=1)
    stored, chosen = _choose(store, which, scores)
    tensors = stored.tensors()
    version, manifest = stored.progress.version, manifest_of(stored.progress)
    card = replace(card or ModelCard(stored.progress), progress=stored.progress, scores=scores)
    card = replace(card, metrics=latest_metrics(rows, version), chosen=chosen + beside_the_best(version, scores))
    if manifest is not None:
        card = replace(card, digest=manifest.policy.digest, ledger_head=manifest.ledger_head)
    return export_policy(destination, tensors, stored.files, card, dtype, adapters_of)


def _choose(store: CheckpointStore, which: Which, scores: Mapping[int, float]) -> tuple[StoredCheckpoint, str]:
    places = store.places()
    if not places:
        raise ConfigError(f"there is no checkpoint in {store.folder} yet: wait for the trainer's first")
    if which == "newest":
        stored = store.newest()
        assert stored is not None, "there are checkpoints"
        return stored, "the newest that was saved"
    if which == "best":
        best = ranked(places, scores)
        if not best:
            details = "has a held-out score yet (trainer.evaluate_every): export the newest one by leaving out --best"
            raise ConfigError(f"no checkpoint in {store.folder} {details}")
        if scores[best[0][0]] < max(scores.values()):
            log.warning("version %d has the best score of the checkpoints kept, but not of the run", best[0][0])
        return store.at(best[0]), f"the best of {len(best)} kept, by held-out score"
    of_version = [place for place in places if place[0] == which]
    if not of_version:
        there = ", ".join(str(version) for version in sorted({version for version, _ in places}))
        raise ConfigError(f"there is no checkpoint of version {which} in {store.folder}; those kept are {there}")
    return store.at(of_version[0]), "the one that was asked for"


def beside_the_best(version: int, scores: Mapping[int, float]) -> str:
    if not scores:
        return ""
    best = max(scores, key=lambda number: (scores[number], number))
    own = f"held-out score {scores[version]:.4g}" if version in scores else "not measured itself"
    return f" ({own}; the run's best is {scores[best]:.4g}, of version {best})"
