"""A run that trains adapters: the base stays, only adapters travel, and what is exported is an ordinary model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import trainer_stubs as stubs
from trainer_stubs import SETTINGS, FakeHub, same, tiny_loaded, tiny_model, training_run
from transformers import AutoModelForCausalLM

from shoal.engines.torch import TorchEngine
from shoal.models.lora import ADAPTER_FILE, AdapterShape
from shoal.runtime.stop import StopToken
from shoal.shardcast.origin import Origin, OriginSettings
from shoal.trainer import shards
from shoal.trainer.checkpoint import Copies
from shoal.trainer.learner import Learner, new_learner
from shoal.trainer.publisher import views_of
from shoal.trainer.ranks import Ranks
from shoal.trainer.settings import LoraSettings, MemorySettings, ObjectiveSettings, TrainerSettings
from shoal.trainer.step import StepWork, train_step

STEPS = 3
SHAPE = AdapterShape(rank=2, alpha=4.0, targets=("q_proj", "up_proj"))
LORA = SETTINGS.model_copy(update={"lora": LoraSettings(rank=2, alpha=4.0, targets=SHAPE.targets)})
ROUNDED = LORA.model_copy(update={"memory": MemorySettings(precision="bfloat16")})


def with_adapters(settings: TrainerSettings = LORA) -> tuple[Learner, dict[str, bytes]]:
    loaded = tiny_loaded(settings)
    return new_learner(loaded.model, settings), dict(loaded.files)


def state_of(made: Learner) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in made.state().items()}


def run_of(folder: Path, hub: FakeHub, stop: StopToken | None = None) -> Learner:
    """A run in a process of its own, as far as the folder and the hub can tell."""
    made, files = with_adapters()
    origin = Origin(folder / "origin", stubs.RUN, stubs.KEY, settings=OriginSettings(delta_from_bytes=0))
    training_run(folder, hub, LORA, stop, learner=made, files=files, origin=origin)[0].run()
    return made


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Learner]:
    folder = tmp_path_factory.mktemp("lora")
    return folder, run_of(folder, FakeHub(STEPS))


def test_only_adapters_change_and_only_they_travel(finished) -> None:
    folder, made = finished
    before, after = state_of(with_adapters()[0]), state_of(made)
    adapters = {name for name in before if name.endswith(("lora_a", "lora_b"))}
    assert {name for name in before if not torch.equal(before[name], after[name])} == adapters
    origin = Origin(folder / "origin", stubs.RUN, stubs.KEY, settings=OriginSettings(delta_from_bytes=0))
    published = origin._published((0, STEPS))
    assert published is not None
    smallest = min(delta.size_bytes for delta in published.deltas)
    assert smallest < sum(after[name].nbytes for name in adapters) + 2048  # positions and headers
    assert smallest < published.size_bytes / 4


@torch.no_grad()
def test_whoever_has_the_policy_computes_what_the_trainer_does_and_an_export_is_an_ordinary_model(finished) -> None:
    folder, made = finished
    ids, engine = torch.arange(5, 25)[None], TorchEngine(with_adapters()[1])
    engine.load_policy(None, {view.name: view for view in views_of(made.state(), "float32")})
    assert torch.equal(engine._model(ids).logits, made.model(ids).logits)
    exported = folder / "trainer" / "export"
    assert not (exported / ADAPTER_FILE).exists()
    plain = AutoModelForCausalLM.from_pretrained(exported)
    torch.testing.assert_close(plain(ids).logits, made.model(ids).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain(ids).logits, tiny_model()(ids).logits, atol=1e-5)


def test_a_resumed_run_ends_with_the_same_adapters(finished, tmp_path: Path) -> None:
    hub, stop = FakeHub(STEPS), StopToken()
    hub.before["batch"] = lambda step: stop.set("the test") if step == 2 else None
    run_of(tmp_path, hub, stop)
    hub.before.clear()
    assert same(state_of(run_of(tmp_path, hub)), state_of(finished[1]))


def test_in_bfloat16_the_base_is_saved_and_published_as_it_was() -> None:
    """The model computes with it rounded; adapters are learnt in float32 as all weights would be."""
    made, copies = with_adapters(ROUNDED)[0], Copies()
    train_step(made, StepWork(0, [stubs.make_group(unit, 0, tiny_model()) for unit in range(3)], 1.0, max_staleness=0))
    base = tiny_model().state_dict()
    for state in (made.state(), copies.take(made, with_training=True).weights, copies.take(made, False).weights):
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert all(torch.equal(state[name], value) for name, value in base.items())
    saved = {name: value + 0.25 for name, value in state_of(made).items()}  # as several processes save it
    made.load_state(saved)
    assert same(state_of(made), saved)
    assert all(torch.equal(made.model.state_dict()[name], value.to(torch.bfloat16)) for name, value in saved.items())


@pytest.mark.parametrize(("settings", "models"), [(LORA, 1), (SETTINGS, 2)])
def test_several_processes_spread_a_second_model_only_without_adapters(
    monkeypatch: pytest.MonkeyPatch, settings: TrainerSettings, models: int
) -> None:
    held = settings.model_copy(update={"objective": ObjectiveSettings(kl=0.5)})
    made: list[Any] = []
    monkeypatch.setattr(shards, "spread", lambda *_given: made.append(tiny_loaded(settings).model) or made[-1])
    found = shards._learner(None, held, {}, cast(Any, Ranks()))
    assert len(made) == models
    assert (found.reference is found.model) == (models == 1)
