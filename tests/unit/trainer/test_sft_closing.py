"""The end of a warm start: what its steps have destroyed is no model, and is neither saved nor exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trainer_stubs import tiny_model

from kit.sft import chosen, sort_files, sort_rows
from shoal.errors import TrainingDiverged
from shoal.runtime.stop import StopToken
from shoal.trainer.checkpoint import CheckpointStore
from shoal.trainer.demonstrations.choosing import Corpus
from shoal.trainer.demonstrations.course import Course
from shoal.trainer.demonstrations.training import LAST_BATCH, WarmStart, WarmStartParts
from shoal.trainer.export import ModelCard
from shoal.trainer.folder import Progress
from shoal.trainer.guards import GuardSettings, Watch
from shoal.trainer.learner import new_learner
from shoal.trainer.settings import TrainerSettings


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return chosen(tmp_path, sort_rows(16))[0]


def settings(**values: Any) -> TrainerSettings:
    common = {"minibatches": 1, "warmup_steps": 0, "checkpoint_every": 1, "evaluate_every": 0, "device": "cpu"}
    return TrainerSettings.model_validate({**common, "loss": "cross_entropy", **values})


def warm_start(tmp: Path, corpus: Corpus, with_: TrainerSettings, **course: Any) -> WarmStart:
    (tmp / "work").mkdir(exist_ok=True)
    parts = WarmStartParts(
        folder=tmp / "work", out=tmp / "out", run="sft-test", learner=new_learner(tiny_model(), with_),
        files=sort_files(), corpus=corpus, course=Course(**{"batch": 8, "validation": 0, "decay": "none", **course}),
        card=ModelCard(Progress("sft-test", 0)),
    )  # fmt: skip
    return WarmStart(parts, StopToken())


def rows(tmp: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (tmp / "work" / "metrics.jsonl").read_text().splitlines()]


def saved(tmp: Path) -> list[int]:
    return sorted(version for version, _ in CheckpointStore(tmp / "work" / "checkpoints", 2).places())


def diverges(tmp: Path, run: WarmStart) -> str:
    with pytest.raises(TrainingDiverged) as caught:
        run.run()
    assert caught.value.exit_code == 5
    assert not (tmp / "out").exists()
    return str(caught.value)


def ruin_at(run: WarmStart, monkeypatch: pytest.MonkeyPatch, step: int, rate: float) -> None:
    """Only that step has the rate: the others are as they should be."""
    train = run._train
    factor = rate / run._settings.learning_rate

    def training(at: int) -> dict[str, float]:
        with monkeypatch.context() as patch:
            patch.setattr(run._watch, "begin", lambda _step: factor if at == step else 1.0)
            return train(at)

    monkeypatch.setattr(run, "_train", training)


@pytest.mark.parametrize(
    ("rate", "said"), [(10.0, "nats per token higher than before it"), (1e30, "are NaN, infinite or huge")]
)
def test_an_only_step_that_destroys_the_model_is_no_success(
    tmp_path: Path, corpus: Corpus, rate: float, said: str
) -> None:
    message = diverges(tmp_path, warm_start(tmp_path, corpus, settings(learning_rate=rate), steps=1))
    assert message.startswith("after step 0, the last: ")
    assert said in message
    assert "lower trainer.learning_rate" in message
    assert saved(tmp_path) == []
    assert any(name.startswith("alarm_") for name in rows(tmp_path)[0])
    again = warm_start(tmp_path, corpus, settings(learning_rate=rate), steps=1)
    assert diverges(tmp_path, again) == message, "and so it is when it is started again"


def test_a_last_step_that_destroys_what_was_learnt_leaves_the_checkpoint_before_it(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = warm_start(tmp_path, corpus, settings(learning_rate=1e-3), steps=3)
    ruin_at(run, monkeypatch, 2, 10.0)
    message = diverges(tmp_path, run)
    assert "after step 2, the last: " in message
    assert f"from before it began, is version 2 in {tmp_path / 'work' / 'checkpoints'}" in message
    assert saved(tmp_path) == [1, 2]
    assert rows(tmp_path)[2]["alarm_divergence"] > 3


def test_what_an_earlier_step_destroyed_is_seen_as_well(
    tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step did no harm: only the model that it began with tells."""
    run = warm_start(tmp_path, corpus, settings(learning_rate=1e-6), steps=3)
    ruin_at(run, monkeypatch, 0, 10.0)
    message = diverges(tmp_path, run)
    assert "higher than at the beginning" in message
    assert "Earlier steps have destroyed" in message
    assert "There is no checkpoint from before it began" in message, "nobody knows which checkpoint is good"


@pytest.mark.parametrize("react", ["warn", "off"])
def test_a_guard_that_does_not_stop_lets_it_out(tmp_path: Path, corpus: Corpus, react: str) -> None:
    with_ = settings(learning_rate=10.0, guards={"divergence": {"react": react}})
    assert warm_start(tmp_path, corpus, with_, steps=1).run()
    assert (tmp_path / "out").exists()
    assert ("alarm_divergence" in rows(tmp_path)[0]) == (react == "warn")


def test_a_version_that_was_saved_unjudged_is_judged_by_a_resume(tmp_path: Path, corpus: Corpus) -> None:
    """Told to stop while it looks, it saves where it stands."""
    stopped = warm_start(tmp_path, corpus, settings(learning_rate=10.0), steps=1)
    stopped._resume()
    stopped._advance()
    stopped._stop.set("test")
    assert not stopped.run()
    assert saved(tmp_path) == [1]
    message = diverges(tmp_path, warm_start(tmp_path, corpus, settings(learning_rate=10.0), steps=1))
    assert "higher than before it" in message
    assert "There is no checkpoint from before it began" in message, "version 1 is the one that is refused"


def test_a_sound_end_is_in_the_rows_and_in_a_checkpoint(tmp_path: Path, corpus: Corpus) -> None:
    assert warm_start(tmp_path, corpus, settings(learning_rate=1e-3), steps=2).run()
    first, last_step, end = rows(tmp_path)
    assert end["step"] == 2
    assert end[LAST_BATCH] < last_step["loss"] < first[LAST_BATCH]
    assert not any(name.startswith("alarm_") for name in end)
    assert saved(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("by_step", "by_run", "value"),
    [(2.9, 2.9, None), (3.1, 1.6, 3.1), (0.6, 3.1, 3.1), (5.0, 9.0, 5.0), (-6.0, -7.0, None), (None, 3.1, 3.1)],
)
def test_what_is_judged(by_step: float | None, by_run: float, value: float | None) -> None:
    seen = {"rise_by_run": by_run, **({} if by_step is None else {"rise_by_step": by_step})}
    judged = Watch(GuardSettings()).conclude(7, seen)
    assert judged.stops == (value is not None)
    assert judged.numbers == ({} if value is None else {"alarm_divergence": value})
