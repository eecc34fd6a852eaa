"""bfloat16 with float32 masters, recomputed activations, the reference that a resume holds on to, the plan; a run that
trains adapters: the base stays, only adapters travel, and what is exported is an ordinary model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trainer_stubs as stubs
from torch import Tensor
from trainer_stubs import SETTINGS, FakeHub, gradients, learner, rows_of, same, tiny_loaded, tiny_model, training_run
from transformers import AutoModelForCausalLM

from shoal.engines.torch import TorchEngine
from shoal.errors import CheckpointError, ModelError
from shoal.models import logprobs
from shoal.models.load import model_from_files
from shoal.models.lora import ADAPTER_FILE, AdapterShape, add_adapters
from shoal.models.state import policy_state
from shoal.protocol import TrainingGroup, TrainingRollout, pack_logprobs, pack_tokens
from shoal.runtime.stop import StopToken
from shoal.shardcast.origin import Origin, OriginSettings
from shoal.trainer import memory, shards
from shoal.trainer.checkpoint import START, Copies, check_start_weights, weights_digest
from shoal.trainer.learner import Learner, new_learner
from shoal.trainer.publisher import cast, views_of
from shoal.trainer.ranks import Ranks
from shoal.trainer.settings import LoraSettings, MemorySettings, ObjectiveSettings, TrainerSettings
from shoal.trainer.step import StepWork, train_step

ROUNDED = SETTINGS.model_copy(update={"memory": MemorySettings(precision="bfloat16"), "micro_batch_tokens": 24})


def train(made: Learner, groups: list[TrainingGroup], step: int = 0) -> dict[str, float]:
    return train_step(made, StepWork(step, groups, temperature=1.0, max_staleness=99))


def first_gradient(made: Learner, groups: list[TrainingGroup]) -> dict[str, Tensor]:
    return gradients(made, StepWork(0, groups, temperature=1.0, max_staleness=99))[0][0]


def test_published_bfloat16_weights_equal_those_computed_with(groups) -> None:
    made = learner(ROUNDED.model_copy(update={"learning_rate": 1e-5}))
    for step in range(3):
        train(made, groups, step)
        computes = policy_state(made.model)
        assert {value.dtype for value in computes.values()} == {torch.bfloat16}
        assert same({name: cast(value, torch.bfloat16) for name, value in made.state().items()}, computes)
    assert {value.dtype for value in [*made.state().values(), *made.moments().values()]} == {torch.float32}
    norm = "model.norm.weight"  # ones, of which bfloat16 sees steps of 1/256: masters keep what would be rounded away
    assert (policy_state(made.model)[norm] == 1).all()
    assert (made.state()[norm] != 1).any()
    frequencies = [model.model.rotary_emb.inv_freq for model in (made.model, tiny_model())]
    assert torch.equal(*frequencies), "positions keep their precision"


def test_gradients_are_summed_in_float32_over_micro_batches(groups) -> None:
    """Each micro-batch's own is rounded by bfloat16; their sum is not rounded again, and close to the exact one."""
    one = {"minibatches": 1, "grad_clip": 1e9}
    made = learner(ROUNDED.model_copy(update=one))
    found, exact = first_gradient(made, groups), first_gradient(learner(SETTINGS.model_copy(update=one)), groups)
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert (value - exact[name]).norm() < 0.05 * exact[name].norm(), name
    total = found["lm_head.weight"]
    assert not torch.equal(total, total.to(torch.bfloat16).to(torch.float32))
    assert all(weight.grad is None for weight in made.model.parameters())  # those in bfloat16 are not kept


def test_moments_and_weights_of_another_model_are_refused(groups) -> None:
    made, other = learner(ROUNDED), learner(ROUNDED, num_hidden_layers=1)
    train(made, groups)
    before = {name: value.clone() for name, value in other.state().items()}
    with pytest.raises(ModelError, match="another model"):
        other.load_state(made.state())
    assert same(before, other.state())
    with pytest.raises(CheckpointError, match=r"moments of weight model\.layers\.1"):
        other.load_moments(made.moments())


def test_recomputing_a_layer_gives_the_same_gradient_bit_for_bit(groups) -> None:
    plain = SETTINGS.model_copy(update={"minibatches": 1})
    made = new_learner(tiny_model(), plain.model_copy(update={"memory": MemorySettings(recompute=True)}))
    seen: list[bool] = []
    made.model.model.layers[1].self_attn.register_forward_hook(lambda _m, _i, out: seen.append(out[0].requires_grad))
    recomputed = first_gradient(made, groups)
    assert seen == [True, True], "computed again in the backward pass"
    assert same(recomputed, first_gradient(learner(plain), groups))
    with torch.no_grad():
        made.model(torch.tensor([[3, 4, 5]]))
    assert seen[2:] == [False], "once where there is no gradient"


def test_the_reference_computes_by_itself(groups) -> None:
    """It shares no weight with the learner, and no layer of it is a wrapped one of the learner's."""
    memory = MemorySettings(precision="bfloat16", recompute=True)
    held = {"memory": memory, "objective": ObjectiveSettings(kl=0.1)}
    made = new_learner(tiny_model(), SETTINGS.model_copy(update=held))
    start = {name: value.clone() for name, value in policy_state(made.reference).items()}
    assert train(made, groups)["reference_kl"] >= 0
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        fresh = learner(ROUNDED).model(ids).logits
        assert torch.equal(made.reference(ids).logits, fresh)
        assert not torch.equal(made.model(ids).logits, fresh)
    assert same(start, policy_state(made.reference))


def test_with_adapters_the_reference_is_the_model_without_them(groups) -> None:
    """No second copy; the adapters are at work again afterwards, and the weights under them never move."""
    lora = LoraSettings(rank=2, targets=("q_proj", "down_proj"))
    settings = ROUNDED.model_copy(update={"lora": lora, "objective": ObjectiveSettings(kl=0.1)})
    model = tiny_model()
    add_adapters(model, AdapterShape(lora.rank, lora.alpha, lora.targets))
    made = new_learner(model, settings)
    assert made.reference is made.model
    base = {name: value.clone() for name, value in made.state().items() if "lora" not in name}
    rows = [train(made, groups, step) for step in range(3)]
    assert rows[-1]["reference_kl"] > 0
    assert same(base, {name: value for name, value in made.state().items() if "lora" not in name})
    assert {name.rpartition(".")[2] for name in made.trained()} == {"lora_a", "lora_b"}
    assert all(value.dtype == torch.float32 for value in made.trained().values())


def test_a_resumed_run_is_held_near_the_same_reference(tmp_path: Path) -> None:
    """Stopped after one step and gone on with: the weights of a run that never stopped; another model is refused."""
    settings = SETTINGS.model_copy(update={"objective": ObjectiveSettings(kl=0.5), "evaluate_every": 0})
    whole, uninterrupted = training_run(tmp_path / "whole", FakeHub(3), settings)
    whole.run()
    hub, stop, broken = FakeHub(3), StopToken(), tmp_path / "broken"
    hub.before["batch"] = lambda step: stop.set("test") if step == 1 else None
    training_run(broken, hub, settings, stop, start=lambda: "first")[0].run()
    hub.before.clear()
    with pytest.raises(CheckpointError, match="measured from the weights that this run began with"):
        training_run(broken, hub, settings, start=lambda: "other")[0].run()
    again, resumed = training_run(broken, hub, settings, start=lambda: "first")
    again.run()
    assert again.version == 3
    assert same(resumed.state(), uninterrupted.state())
    rows = rows_of(broken)
    assert rows[2]["reference_kl"] > rows[0]["reference_kl"]
    check_start_weights(
        broken / "trainer", lambda: "other", begins=False, needed=False
    )  # the weights come from the checkpoint
    (broken / "trainer" / START).unlink()
    with pytest.raises(CheckpointError, match=r"start\.json: unknown"):
        check_start_weights(broken / "trainer", lambda: "first", begins=False, needed=True)


def test_the_digest_of_the_starting_weights_follows_what_they_are_and_not_where(tmp_path: Path) -> None:
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        tiny_model(seed).save_pretrained(tmp_path / folder)
    first, copy, other = (weights_digest(tmp_path / folder) for folder in "abc")
    assert first == copy != other


PLANNED = {
    "model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384, "vocab_size": 2000, "tie_word_embeddings": True,
}  # fmt: skip


def long_group(unit: int) -> TrainingGroup:
    ids = pack_tokens(np.random.default_rng(unit).integers(3, 2000, size=248))
    drawn = [TrainingRollout(ids, pack_logprobs(np.full(248, -8.0, np.float32)), "eos", reward) for reward in (0, 1)]
    return TrainingGroup(unit, f"task/{unit}", 0, pack_tokens(np.arange(3, 11)), drawn)


def most_allocated(work: Any) -> int:
    """The largest sum of bytes that were allocated and not freed again, since `work` began."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    changes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return int(np.cumsum(changes).max())


@pytest.mark.parametrize("changed", [
    {}, {"memory": {"recompute": True}}, {"lora": {"rank": 4}}, {"memory": {"precision": "bfloat16"}},
    {"objective": {"entropy": 0.1}},
], ids=["float32", "recomputed", "adapters", "bfloat16", "entropy"])  # fmt: skip
def test_a_step_on_a_cpu_takes_what_is_planned(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is allocated; what the allocator keeps beside it is measured by benchmarks/memory_plan.py."""
    for module in (logprobs, memory):
        monkeypatch.setattr(module, "TILE_ELEMENTS", 2**19)
    settings = TrainerSettings.model_validate({**changed, "minibatches": 1, "micro_batch_tokens": 1024})
    files = {"config.json": json.dumps(PLANNED).encode()}
    planned = memory.plan(memory.shape_of(files, settings), settings, 1, kind="cpu").device
    model = model_from_files(files)
    if settings.lora is not None:
        add_adapters(model, AdapterShape(settings.lora.rank, settings.lora.alpha, settings.lora.targets))
    made, groups = new_learner(model, settings), [long_group(unit) for unit in range(4)]
    train(made, groups)
    held = sum(planned.get(name, 0) for name in ("weights", "masters", "moments"))
    found = held + most_allocated(lambda: train(made, groups))
    beside = sum(planned[name] for name in ("holes", "copy of the state", "torch itself"))
    assert 0.95 < (sum(planned.values()) - beside) / found < 1.25


STEPS = 3
SHAPE = AdapterShape(rank=2, alpha=4.0, targets=("q_proj", "up_proj"))
LORA = SETTINGS.model_copy(update={"lora": LoraSettings(rank=2, alpha=4.0, targets=SHAPE.targets)})
ROUNDED_LORA = LORA.model_copy(update={"memory": MemorySettings(precision="bfloat16")})


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
    smallest = min(delta.size_bytes for delta in published.deltas)
    assert smallest < sum(after[name].nbytes for name in adapters) + 2048  # positions and headers
    assert smallest < published.size_bytes / 4


@torch.no_grad()
def test_published_adapters_and_export_compute_what_the_trainer_does(finished) -> None:
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
    made, copies = with_adapters(ROUNDED_LORA)[0], Copies()
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
def test_several_processes_spread_a_second_model_only_without_adapters(monkeypatch, settings, models):
    held = settings.model_copy(update={"objective": ObjectiveSettings(kl=0.5)})
    made: list[Any] = []
    monkeypatch.setattr(shards, "shard_model", lambda *_given: made.append(tiny_loaded(settings).model) or made[-1])
    found = shards._learner(None, held, {}, Ranks())  # type: ignore[arg-type]
    assert len(made) == models
    assert (found.reference is found.model) == (models == 1)
