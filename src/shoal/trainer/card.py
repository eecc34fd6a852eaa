"""The card of an exported model: README.md for people and for the Hugging Face hub, shoal.json for programs.

front matter   library, task, tags; what it was trained from and on, where the hub has it; its held-out score
facts          run, version, which of the run's versions this is and why, digest, head of the ledger
training       the recipe, as far as it decides what was learnt
results        the held-out score by version, the last value of every number measured
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from shoal.protocol import LedgerHead
from shoal.trainer.changeable import HARMLESS
from shoal.trainer.checkpoint import Progress
from shoal.trainer.settings import TrainerSettings

SHOWN_SCORES = 24
ALWAYS = ("loss", "advantage", "learning_rate", "minibatches", "grad_clip")
CLIPPED = ("two_sided_clip", "ppo_clip", "decoupled", "gspo")
NOT_LEARNT_FROM = {*HARMLESS, "device", "threads", "processes", "micro_batch_tokens", "publish_dtype"}
CACHED = re.compile(r"(?:models|datasets)--([\w.\-]+?)--([\w.\-]+)", re.ASCII)
ON_THE_HUB = re.compile(r"[\w.\-]+/[\w.\-]+", re.ASCII)
KINDS = {
    "rollouts": "Trained by reinforcement learning with shoal on rollouts that were each verified before training.",
    "demonstrations": "Trained with shoal to imitate demonstrations.",
}
UNTRAINED = "The model that the run began with: version 0, before any training."
IMITATION = "cross_entropy"  # the loss of demonstrations, which have no advantages


@dataclass(frozen=True)
class ModelCard:
    """What a reader of the exported model wants to know.

    `metrics` is the last row that measured each number, `scores` the held-out score by version, `chosen` says which of
    the run's versions this is, `training` what it was trained with, `files` which files the export consists of.
    """

    progress: Progress
    base_model: str = ""
    environment: str = ""
    digest: str | None = None
    ledger_head: LedgerHead | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    datasets: Sequence[str] = ()
    scores: Mapping[int, float] = field(default_factory=dict)
    chosen: str = ""
    training: Mapping[str, str] = field(default_factory=dict)
    trained_on: Literal["rollouts", "demonstrations"] = "rollouts"
    files: Sequence[str] = ()

    @property
    def is_trained(self) -> bool:
        return self.progress.version > 0

    def as_json(self) -> bytes:
        head = self.ledger_head
        values = {**asdict(self), "ledger_head": head.model_dump(mode="json") if head else None}
        return json.dumps(values, indent=2).encode() + b"\n"

    def as_readme(self, dtype: str) -> str:
        progress = self.progress
        kind = KINDS[self.trained_on] if self.is_trained else UNTRAINED
        return (
            f"{_front_matter(self)}\n# {progress.run}, version {progress.version}\n\n{kind}\n\n"
            f"{_table(('fact', 'value'), _facts(self, dtype))}\n{_usage()}\n{_training(self)}{_results(self)}"
            "## Licence\n\nThat of the model it was trained from, where nothing else was agreed.\n"
        )


def hub_name(path: str | Path) -> str:
    """What to call a model or data set: as the Hugging Face hub does where the path tells, else as its folder.

    >>> hub_name("/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899d")
    'Qwen/Qwen3-0.6B'
    >>> hub_name("models/my-model")
    'my-model'
    """
    cached = next((match for part in Path(path).parts if (match := CACHED.fullmatch(part))), None)
    return f"{cached[1]}/{cached[2]}" if cached else Path(path).name


def training_facts(settings: TrainerSettings, **run: object) -> dict[str, str]:
    """What decides what was learnt: what the recipe changes, and a few numbers that one always wants to know.

    >>> training_facts(TrainerSettings(learning_rate=1e-5), group_size=16)["learning_rate"]
    '1e-05'
    """
    changed = _flat(settings.model_dump(mode="json", exclude_defaults=True, exclude=NOT_LEARNT_FROM))
    always = {name: getattr(settings, name) for name in ALWAYS if (name, settings.loss) != ("advantage", IMITATION)}
    always["objective.normalisation"] = settings.objective.normalisation
    if settings.loss in CLIPPED:
        always["clip_epsilon"] = settings.clip_epsilon
    return {name: str(value) for name, value in {**run, **always, **changed}.items()}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping | BaseModel):
            flat |= _flat(dict(value), f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _front_matter(card: ModelCard) -> str:
    """What the Hugging Face hub reads. It refuses names that it does not know, so only those that look like its own."""
    method = {"rollouts": "reinforcement-learning", "demonstrations": "sft"}[card.trained_on]
    tags = [method, "shoal"] if card.is_trained else ["shoal"]
    lines = ["library_name: transformers", "pipeline_tag: text-generation", f"tags: [{', '.join(tags)}]"]
    if ON_THE_HUB.fullmatch(card.base_model):
        lines.append(f"base_model: {card.base_model}")
    if datasets := [name for name in card.datasets if ON_THE_HUB.fullmatch(name)]:
        lines.append(f"datasets: [{', '.join(datasets)}]")
    score = card.scores.get(card.progress.version)
    if score is not None:
        name, environment = json.dumps(card.progress.run), json.dumps(card.environment or "held-out tasks")
        lines += [
            "model-index:", f"- name: {name}", "  results:", "  - task: {type: text-generation}",
            f"    dataset: {{name: {environment}, type: {environment}, split: held_out}}",
            f"    metrics: [{{type: held_out, name: greedy held-out score, value: {score:.6g}}}]",
        ]  # fmt: skip
    return "---\n" + "\n".join(lines) + "\n---\n"


def _facts(card: ModelCard, dtype: str) -> dict[str, str]:
    progress = card.progress
    return {
        "run": f"`{progress.run}`",
        "version": f"{progress.version} (incarnation {progress.incarnation})",
        **({"this version is": card.chosen} if card.chosen else {}),
        "trained from": _origin(card.base_model),
        "environment": card.environment or "not recorded",
        **({"data": ", ".join(card.datasets)} if card.datasets else {}),
        "weights": dtype,
        **(_published(card) if card.trained_on == "rollouts" else {}),
    }


def _origin(base_model: str) -> str:
    """What it was trained from; a folder of one's own is no name that the Hugging Face hub could look up."""
    if not base_model or ON_THE_HUB.fullmatch(base_model):
        return base_model or "not recorded"
    return f"{base_model} (a local model, not one of the Hugging Face hub: there is no `base_model` above)"


def _published(card: ModelCard) -> dict[str, str]:
    """Demonstrations are learnt without a hub: nothing is published, and there is no ledger."""
    head = card.ledger_head
    return {
        "policy digest": f"`{card.digest}`" if card.digest else "not recorded",
        "ledger head (index / hash)": f"{head.index} / `{head.hash}`" if head else "not recorded",
    }


def _usage() -> str:
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")\n'
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")\n```\n'
    )


def _training(card: ModelCard) -> str:
    return (
        f"## Training\n\n{_table(('setting', 'value'), card.training)}\n" if card.training and card.is_trained else ""
    )


def _results(card: ModelCard) -> str:
    measured = {name: f"{value:.6g}" for name, value in sorted(card.metrics.items())}
    shown = {str(version): f"{card.scores[version]:.6g}" for version in _some(sorted(card.scores))}
    curve = f"## Held-out score by version\n\n{_table(('version', 'score'), shown)}\n" if shown else ""
    return f"{curve}## Last measured\n\n{_table(('metric', 'value'), measured)}\n"


def _some(versions: Sequence[int]) -> list[int]:
    """So many of them that one sees how it went; the first and the last always.

    >>> _some(range(3)), len(_some(range(1000))), _some(range(1000))[-1]
    ([0, 1, 2], 24, 999)
    """
    if len(versions) <= SHOWN_SCORES:
        return list(versions)
    return [versions[round(place * (len(versions) - 1) / (SHOWN_SCORES - 1))] for place in range(SHOWN_SCORES)]


def _table(header: tuple[str, str], rows: Mapping[str, str]) -> str:
    lines = [f"| {header[0]} | {header[1]} |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
    return "\n".join(lines) + "\n"
