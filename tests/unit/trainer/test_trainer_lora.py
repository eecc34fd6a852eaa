"""A run that trains adapters: the base stays, only adapters travel, and what is exported is an ordinary model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from trainer_stubs import (
    KEY,
    RUN,
    SETTINGS,
    FakeHub,
    make_group,
    same,
    tiny_files,
    tiny_loaded,
    tiny_model,
    training_run,
)
from transformers import AutoModelForCausalLM

from shoal.engines.torch import TorchEngine
from shoal.models.load import LoadedModel, adapted
from shoal.models.lora import ADAPTER_FILE, AdapterShape
from shoal.models.tokenizer import TextTokenizer
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
    model = tiny_model()
    files = tiny_files(model)
    loaded = adapted(LoadedModel(model, TextTokenizer(files), files), SHAPE)
    return new_learner(loaded.model, settings), dict(loaded.files)


def run_of(folder: Path, hub: FakeHub, stop: StopToken | None = None) -> Learner:
    """A run in a process of its own, as far as the folder and the hub can tell."""
    made, files = with_adapters()
    origin = Origin(folder / "origin", RUN, KEY, settings=OriginSettings(delta_from_bytes=0))
    training_run(folder, hub, LORA, stop, learner=made, files=files, origin=origin)[0].run()
    return made


def state_of(made: Learner) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in made.state().items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Learner]:
    folder = tmp_path_factory.mktemp("lora")
    return folder, run_of(folder, FakeHub(STEPS))


def test_only_adapters_change(finished) -> None:
    before, after = state_of(with_adapters()[0]), state_of(finished[1])
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith(("lora_a", "lora_b"))}


def test_only_adapters_travel(finished) -> None:
    folder, made = finished
    origin = Origin(folder / "origin", RUN, KEY, settings=OriginSettings(delta_from_bytes=0))
    published = origin._published((0, STEPS))
    assert published is not None
    adapters = sum(tensor.nbytes for name, tensor in made.state().items() if name.endswith(("lora_a", "lora_b")))
    smallest = min(delta.size_bytes for delta in published.deltas)
    assert smallest < adapters + 2048  # positions and headers
    assert smallest < published.size_bytes / 4


def test_whoever_has_the_policy_computes_what_the_trainer_does(finished) -> None:
    _, made = finished
    files = with_adapters()[1]
    engine = TorchEngine(files)
    engine.load_policy(None, {view.name: view for view in views_of(made.state(), "float32")})
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(engine._model(ids).logits, made.model(ids).logits)


def test_what_is_exported_is_an_ordinary_model(finished) -> None:
    folder, made = finished
    exported = folder / "trainer" / "export"
    assert not (exported / ADAPTER_FILE).exists()
    plain = AutoModelForCausalLM.from_pretrained(exported)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
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
    made = with_adapters(ROUNDED)[0]
    train_step(made, StepWork(0, [make_group(unit, 0, tiny_model()) for unit in range(3)], 1.0, max_staleness=0))
    base = tiny_model().state_dict()
    copies = Copies()
    for state in (made.state(), copies.take(made, with_training=True).weights, copies.take(made, False).weights):
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert all(torch.equal(state[name], value) for name, value in base.items())
    computes = made.model.state_dict()
    assert all(torch.equal(computes[name], value.to(torch.bfloat16)) for name, value in made.state().items())


def test_what_float32_has_saved_is_loaded_in_bfloat16_and_computed_with() -> None:
    """So do the checkpoints of several processes, whose weights are float32 whatever they compute in."""
    saved = state_of(with_adapters()[0])
    saved = {name: value + 0.25 for name, value in saved.items()}
    made = with_adapters(ROUNDED)[0]
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
