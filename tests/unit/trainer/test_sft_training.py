"""The warm start: its schedule, the loss it lowers, exact resume, divergence, the model that comes of it."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_stubs import same, tiny_model, weights

from kit import Patch
from kit.sft import chosen, sort_files, sort_rows
from shoal.errors import CheckpointError, TrainingDiverged
from shoal.models.load import load_model
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.stop import StopToken
from shoal.trainer.checkpoint import CheckpointStore
from shoal.trainer.demonstrations.selection import Corpus, Schedule
from shoal.trainer.demonstrations.training import LAST_BATCH, VALIDATION, SftRun
from shoal.trainer.export import ModelCard
from shoal.trainer.folder import TrainerProgress
from shoal.trainer.learner import Learner, new_learner
from shoal.trainer.settings import TrainerSettings


def table(schedule: Schedule, questions: Iterable[int]) -> tuple[list[list[int]], list[int]]:
    """The batches, and what is kept for validation."""
    found, aside = schedule.batches_of(np.array([*questions], np.int64))
    return [batch.tolist() for batch in found], aside.tolist()


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), st.integers(0, 5))
def test_every_epoch_has_every_sequence_once(count: int, size: int, epochs: int, seed: int) -> None:
    found = table(Schedule(epochs=epochs, batch=size, seed=seed, validation=0), range(count))[0]
    per_epoch = -(-count // size)
    assert len(found) == epochs * per_epoch
    for epoch in range(epochs):
        seen = [number for batch in found[epoch * per_epoch : (epoch + 1) * per_epoch] for number in batch]
        assert sorted(seen) == list(range(count))
    sizes = [len(batch) for batch in found]
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1


def test_order_follows_seed_and_epoch_and_steps_set_the_end() -> None:
    schedule = Schedule(epochs=2, batch=4, validation=0)
    first, again, other, short, longer = (
        table(replace(schedule, **change), range(8))[0] for change in ({}, {}, {"seed": 1}, {"steps": 1}, {"steps": 5})
    )
    assert first == again != other
    assert first[:2] != first[2:]
    assert first[0] == [0, 2, 1, 5]  # the same on every machine and in every version
    assert (short, len(longer), longer[:4]) == (first[:1], 5, first)
    assert [round(Schedule().rate_factor(step, 6, 2), 4) for step in range(6)] == [1, 1, 1, 0.8536, 0.5, 0.1464]
    assert Schedule().rate_factor(0, 1, 5) == 1


def test_validation_takes_whole_questions_and_is_never_trained_on() -> None:
    questions = [5, 1, 5, 2, 1, 9, 9, 7]
    assert table(Schedule(validation=2), questions)[1] == [1, 4]
    found, aside = table(Schedule(validation=4), questions)
    assert aside == [0, 1, 2, 3, 4]  # five: both answers to question 5
    assert {number for batch in found for number in batch} == {5, 6, 7}
    assert [len(table(Schedule(), list(range(count)))[1]) for count in (100, 10_000, 19)] == [5, 256, 0]


SETTINGS = TrainerSettings(
    learning_rate=3e-3, minibatches=1, grad_clip=1.0, warmup_steps=2, checkpoint_every=2, evaluate_every=3,
    device="cpu", loss="cross_entropy",
)  # fmt: skip
COURSE = Schedule(epochs=2, batch=8, validation=4)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return chosen(tmp_path, sort_rows(28))[0]


def warm(tmp: Path, corpus: Corpus, name: str = "work", **changes: Any) -> SftRun:
    """A warm start as a new process would make it."""
    settings = changes.pop("settings", SETTINGS)
    values: dict[str, Any] = {
        "folder": tmp / name, "out": tmp / f"{name}.model", "name": "sft-test", "files": sort_files(),
        "corpus": corpus, "learner": new_learner(tiny_model(), settings), "schedule": COURSE,
        "card": ModelCard(TrainerProgress("sft-test", 0)),
    }  # fmt: skip
    (tmp / name).mkdir(exist_ok=True)
    return SftRun(**{**values, **changes})


def mean_loss(learner: Learner, corpus: Corpus, numbers: list[int]) -> float:
    """Cross-entropy by hand: every learnt token, one sequence at a time, by the model's own logits."""
    total, count = 0.0, 0
    for number in numbers:
        sample = corpus.sample(number)
        assert bool(sample.drawn[0]), "a prompt is what comes before the first token that is trained on"
        assert sample.advantage == 1.0
        ids = np.concatenate([sample.prompt_ids, sample.token_ids])
        with torch.no_grad():
            logits = learner.model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
        for place in np.flatnonzero(sample.drawn) + len(sample.prompt_ids):
            total -= float(logits[place - 1, ids[place]])
            count += 1
    return total / count


def rows(tmp: Path, name: str = "work") -> list[dict[str, float]]:
    return MetricsLog(tmp / name / "metrics.jsonl").rows()


def test_it_learns_and_its_numbers_are_those_by_hand(tmp_path: Path, corpus: Corpus) -> None:
    run = warm(tmp_path, corpus, extra={"sft.json": b"{}"})
    validation = run.validation.tolist()
    expected = [mean_loss(run.learner, corpus, numbers) for numbers in (run.batches[0].tolist(), validation)]
    told: list[tuple[int, int]] = []
    assert run.run(lambda done, steps, _note: told.append((done, steps)))
    assert told == [(done, 6) for done in range(7)]
    found = rows(tmp_path)
    assert [found[0]["loss"], found[0][VALIDATION]] == pytest.approx(expected, rel=1e-4)
    assert found[-1][VALIDATION] == pytest.approx(mean_loss(run.learner, corpus, validation), rel=1e-4)
    assert found[-1][VALIDATION] < 0.95 * found[0][VALIDATION]
    assert [row["step"] for row in found] == list(range(7))
    assert [row["step"] for row in found if VALIDATION in row] == [0, 3, 6]
    rates = [row["learning_rate"] / 3e-3 for row in found[:6]]
    assert rates == pytest.approx([0.5, 1, 1, 0.8536, 0.5, 0.1464], abs=1e-4)
    assert not {"mismatch", "mismatch_kl", "effective_samples"} & found[0].keys(), "nothing was recorded"
    # What is exported is the model that was trained.
    assert same(dict(load_model(run.out).model.named_parameters()), weights(run.learner))
    assert (run.out / "sft.json").read_bytes() == b"{}"
    assert (run.out / "metrics.jsonl").read_bytes() == (run.folder / "metrics.jsonl").read_bytes()
    card = json.loads((run.out / "shoal.json").read_bytes())
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


@pytest.mark.parametrize("looks", [0, 2, 4, None])
def test_stopped_or_killed_warm_start_resumes_bit_for_bit(tmp_path: Path, corpus: Corpus, looks: int | None) -> None:
    whole = warm(tmp_path, corpus, "whole")
    assert whole.run()
    if looks is None:  # killed: the checkpoint is of version 2; the row of step 2 is written, and its weights are lost
        run = warm(tmp_path, corpus, "stopped")
        run._resume()
        for _ in range(3):
            run._advance()
    else:
        run = warm(tmp_path, corpus, "stopped", stop=Stopping(looks))
        assert not run.run()
    assert run.version < 6
    assert not run.out.exists()
    resumed = warm(tmp_path, corpus, "stopped")
    assert resumed.run()
    assert same(weights(resumed.learner), weights(whole.learner))
    kept = ("step", "loss", VALIDATION, "grad_norm", "learning_rate")
    both = [[[row.get(each) for each in kept] for row in rows(tmp_path, name)] for name in ("stopped", "whole")]
    assert both[0] == both[1]


def test_checkpoints_of_another_warm_start_are_refused(tmp_path: Path, corpus: Corpus) -> None:
    assert not warm(tmp_path, corpus, stop=Stopping(3)).run()
    with pytest.raises(CheckpointError, match="are of another warm start"):
        replace(warm(tmp_path, corpus), name="sft-other").run()


def settings(**values: Any) -> TrainerSettings:
    common = {"minibatches": 1, "warmup_steps": 0, "checkpoint_every": 1, "evaluate_every": 0, "device": "cpu"}
    return TrainerSettings.model_validate({**common, "loss": "cross_entropy", **values})


def warm_start(tmp: Path, corpus: Corpus, with_: TrainerSettings, steps: int) -> SftRun:
    schedule = Schedule(batch=8, validation=0, steps=steps)
    return warm(tmp, corpus, settings=with_, schedule=schedule, out=tmp / "out")


def saved(tmp: Path) -> list[int]:
    return sorted(version for version, _ in CheckpointStore(tmp / "work" / "checkpoints", 2).places())


def diverges(tmp: Path, run: SftRun) -> str:
    with pytest.raises(TrainingDiverged) as caught:
        run.run()
    assert caught.value.exit_code == 5
    assert not (tmp / "out").exists()
    return str(caught.value)


def ruin_at(run: SftRun, monkeypatch: Patch, step: int, rate: float) -> None:
    """Only that step has the rate: the others are as they should be."""
    train = run._train
    factor = rate / run._settings.learning_rate

    def training(at: int) -> dict[str, float]:
        with monkeypatch.context() as patch:
            patch.setattr(Schedule, "rate_factor", lambda *_: factor if at == step else 1.0)
            return train(at)

    monkeypatch.setattr(run, "_train", training)


@pytest.mark.parametrize(
    ("rate", "said"), [(10.0, "nats per token higher than that of the first step"), (1e30, "are NaN, infinite or huge")]
)
def test_an_only_step_that_destroys_the_model_is_no_success(tmp_path, corpus, rate, said):
    message = diverges(tmp_path, warm_start(tmp_path, corpus, settings(learning_rate=rate), steps=1))
    assert message.startswith("after step 0, the last: ")
    assert said in message
    assert "lower trainer.learning_rate" in message
    assert saved(tmp_path) == []
    assert any(name.startswith("alarm_") for name in rows(tmp_path)[0])
    again = warm_start(tmp_path, corpus, settings(learning_rate=rate), steps=1)
    assert diverges(tmp_path, again) == message, "and so it is when it is started again"


def test_destructive_last_step_leaves_the_earlier_checkpoint(tmp_path, corpus, monkeypatch):
    run = warm_start(tmp_path, corpus, settings(learning_rate=1e-3), steps=3)
    ruin_at(run, monkeypatch, 2, 10.0)
    assert "after step 2, the last: " in diverges(tmp_path, run)
    assert saved(tmp_path) == [1, 2]
    assert rows(tmp_path)[2]["alarm_divergence"] > 3


def test_damage_of_an_earlier_step_is_found_at_the_end(tmp_path: Path, corpus: Corpus, monkeypatch: Patch) -> None:
    """The last step did no harm: only the model that it began with tells."""
    run = warm_start(tmp_path, corpus, settings(learning_rate=1e-6), steps=3)
    ruin_at(run, monkeypatch, 0, 10.0)
    assert "There is no checkpoint from before it began" in diverges(tmp_path, run), "nobody knows which one is good"


@pytest.mark.parametrize("action", ["warn", "off", ""])
def test_a_guard_that_does_not_stop_lets_it_out_and_a_sound_end_is_in_the_rows(tmp_path, corpus, action):
    ruined = {"learning_rate": 10.0, "guards": {"divergence": {"action": action}}}
    guarded = ruined if action else {"learning_rate": 1e-3}
    assert warm_start(tmp_path, corpus, settings(**guarded), steps=2).run()
    assert (tmp_path / "out").exists()
    first, last_step, end = rows(tmp_path)
    assert ("alarm_divergence" in last_step) == (action == "warn")
    assert (end["step"], saved(tmp_path)) == (2, [1, 2])
    if not action:
        assert end[LAST_BATCH] < last_step["loss"] < first["loss"]
        assert not any(name.startswith("alarm_") for name in end)


def test_a_version_that_was_saved_unjudged_is_judged_by_a_resume(tmp_path: Path, corpus: Corpus) -> None:
    """Told to stop while it looks, it saves where it stands."""
    stopped = warm_start(tmp_path, corpus, settings(learning_rate=10.0), steps=1)
    stopped._resume()
    stopped._advance()
    stopped.stop.set("test")
    assert not stopped.run()
    assert saved(tmp_path) == [1]
    message = diverges(tmp_path, warm_start(tmp_path, corpus, settings(learning_rate=10.0), steps=1))
    assert "higher than that of the first step" in message
    assert "There is no checkpoint from before it began" in message, "version 1 is the one that is refused"
