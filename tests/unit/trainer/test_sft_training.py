"""The warm start itself: the loss it lowers, exact resume, stopping, divergence, and the model that comes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_stubs import same, tiny_model, weights

from kit.sft import chosen, sort_files, sort_rows
from shoal.errors import CheckpointError, TrainingDiverged
from shoal.models.load import load_model
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.stop import StopToken
from shoal.trainer.demonstrations.choosing import Corpus
from shoal.trainer.demonstrations.course import Course
from shoal.trainer.demonstrations.training import VALIDATION, WarmStart, WarmStartParts
from shoal.trainer.export import ModelCard
from shoal.trainer.folder import Progress
from shoal.trainer.learner import Learner, new_learner
from shoal.trainer.settings import TrainerSettings

SETTINGS = TrainerSettings(
    learning_rate=3e-3, minibatches=1, grad_clip=1.0, warmup_steps=2, checkpoint_every=2, evaluate_every=3,
    device="cpu", loss="cross_entropy",
)  # fmt: skip
COURSE = Course(epochs=2, batch=8, validation=4)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return chosen(tmp_path, sort_rows(28))[0]


def parts(tmp: Path, corpus: Corpus, name: str = "work", **changes: Any) -> WarmStartParts:
    settings = changes.pop("settings", SETTINGS)
    values: dict[str, Any] = {
        "folder": tmp / name, "out": tmp / f"{name}.model", "run": "sft-test", "files": sort_files(), "corpus": corpus,
        "learner": new_learner(tiny_model(), settings), "course": COURSE, "card": ModelCard(Progress("sft-test", 0)),
    }  # fmt: skip
    (tmp / name).mkdir(exist_ok=True)
    return WarmStartParts(**{**values, **changes})


def mean_loss(learner: Learner, corpus: Corpus, numbers: list[int]) -> float:
    """Cross-entropy by hand: every learnt token, one sequence at a time, by the model's own logits."""
    total, count = 0.0, 0
    for number in numbers:
        sample = corpus.sample(number)
        ids = np.concatenate([sample.prompt_ids, sample.token_ids])
        with torch.no_grad():
            logits = learner.model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
        for place in np.flatnonzero(sample.drawn) + len(sample.prompt_ids):
            total -= float(logits[place - 1, ids[place]])
            count += 1
    return total / count


def rows(of: WarmStartParts) -> list[dict[str, float]]:
    return MetricsLog(of.folder / "metrics.jsonl").rows()


def test_it_learns_and_its_numbers_are_those_by_hand(tmp_path: Path, corpus: Corpus) -> None:
    given = parts(tmp_path, corpus)
    run = WarmStart(given, StopToken())
    first = run.batches[0].tolist()
    validation = run.validation.tolist()
    expected = [mean_loss(given.learner, corpus, first), mean_loss(given.learner, corpus, validation)]
    told: list[tuple[int, int]] = []
    assert run.run(lambda done, steps, _note: told.append((done, steps)))
    assert told == [(done, 6) for done in range(7)]
    found = rows(given)
    assert [found[0]["loss"], found[0][VALIDATION]] == pytest.approx(expected, rel=1e-4)
    assert found[-1][VALIDATION] == pytest.approx(mean_loss(given.learner, corpus, validation), rel=1e-4)
    assert found[-1][VALIDATION] < 0.95 * found[0][VALIDATION]
    assert [row["step"] for row in found] == list(range(7))
    assert [row["step"] for row in found if VALIDATION in row] == [0, 3, 6]
    rates = [row["learning_rate"] / 3e-3 for row in found[:6]]
    assert rates == pytest.approx([0.5, 1, 1, 0.8536, 0.5, 0.1464], abs=1e-4)


def test_the_export_is_the_model_that_was_trained(tmp_path: Path, corpus: Corpus) -> None:
    given = parts(tmp_path, corpus, extra={"sft.json": b"{}"})
    assert WarmStart(given, StopToken()).run()
    loaded = load_model(given.out)
    assert same(dict(loaded.model.named_parameters()), weights(given.learner))
    assert (given.out / "sft.json").read_bytes() == b"{}"
    assert (given.out / "metrics.jsonl").read_bytes() == (given.folder / "metrics.jsonl").read_bytes()
    card = json.loads((given.out / "shoal.json").read_bytes())
    assert card["progress"]["version"] == 6
    assert VALIDATION in card["metrics"]


class Stopping(StopToken):
    """Set once it has been looked at so many times."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = looks

    def is_set(self) -> bool:
        self._looks -= 1
        if self._looks < 0:
            self.set("test")
        return super().is_set()


@pytest.mark.parametrize("looks", [0, 2, 4])
def test_stopped_it_saves_and_goes_on_bit_for_bit(tmp_path: Path, corpus: Corpus, looks: int) -> None:
    whole = parts(tmp_path, corpus, "whole")
    assert WarmStart(whole, StopToken()).run()
    stopped = parts(tmp_path, corpus, "stopped")
    run = WarmStart(stopped, Stopping(looks))
    assert not run.run()
    assert run.version < 6
    assert not stopped.out.exists()
    resumed = parts(tmp_path, corpus, "stopped")
    assert WarmStart(resumed, StopToken()).run()
    assert same(weights(resumed.learner), weights(whole.learner))
    kept = ("step", "loss", VALIDATION, "grad_norm", "learning_rate")
    assert [[row.get(name) for name in kept] for row in rows(resumed)] == [
        [row.get(name) for name in kept] for row in rows(whole)
    ]


def test_killed_after_any_row_it_goes_on_bit_for_bit(tmp_path: Path, corpus: Corpus) -> None:
    whole = parts(tmp_path, corpus, "whole")
    assert WarmStart(whole, StopToken()).run()
    killed = parts(tmp_path, corpus, "killed")
    run = WarmStart(killed, StopToken())
    run._resume()
    for _ in range(3):  # the checkpoint is of version 2; the row of step 2 is written, and its weights are lost
        run._advance()
    resumed = parts(tmp_path, corpus, "killed")
    assert WarmStart(resumed, StopToken()).run()
    assert same(weights(resumed.learner), weights(whole.learner))
    assert [row["loss"] for row in rows(resumed)[:6]] == [row["loss"] for row in rows(whole)[:6]]


def test_divergence_is_an_error_and_saves_nothing_of_it(tmp_path: Path, corpus: Corpus) -> None:
    given = parts(tmp_path, corpus, settings=SETTINGS.model_copy(update={"learning_rate": 1e30, "warmup_steps": 0}))
    with pytest.raises(TrainingDiverged):
        WarmStart(given, StopToken()).run()
    assert not given.out.exists()
    for checkpoint in (given.folder / "checkpoints").glob("*"):
        loaded = load_model(checkpoint)
        assert all(bool(torch.isfinite(weight).all()) for weight in loaded.model.parameters())


def test_checkpoints_of_another_warm_start_are_refused(tmp_path: Path, corpus: Corpus) -> None:
    assert not WarmStart(parts(tmp_path, corpus), Stopping(3)).run()
    other = replace(parts(tmp_path, corpus), run="sft-other")
    with pytest.raises(CheckpointError, match="are of another warm start"):
        WarmStart(other, StopToken()).run()
