"""A learner spread over ranks: each holds a shard of the rows of every weight (FSDP2), and does what rank 0 commands.

    rank 0 (`loop`)                       the others (`follow`)
    Begin(settings, config, folder) ────► build the model, take their rows
    Train(work, look back?) ────────────► the same `train_step` or `look_back`, on their part of it
    Copy(with training) ────────────────► send their rows
    Restore(folder) ────────────────────► read their rows of a checkpoint
    (over) ─────────────────────────────► end

Commands are msgpack of known structures, never pickles. Rank 0 alone talks to the hub, writes checkpoints, and ever
holds a whole model, in the memory of its host; the others need config.json, and the same folder of checkpoints (on
several machines: a shared file system). A layer's weights are gathered when it computes and dropped afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from shoal.errors import CheckpointError
from shoal.models.load import DTYPES, LoadedModel, model_from_files
from shoal.models.packed import decoder_layers
from shoal.runtime.stop import StopToken
from shoal.trainer import checkpoint
from shoal.trainer.checkpoint import MODEL, MOMENTS, TRAINING, Copied, Copies, StoredCheckpoint
from shoal.trainer.learner import Learner, choose_device, make_deterministic, new_learner
from shoal.trainer.memory import within_memory
from shoal.trainer.ranks import COLLECTIVE_S, RUN_METHOD, RankGroup, Ranks, join_ranks, lost_peers
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.step import StepWork, Stopped, look_back, train_step

log = logging.getLogger(__name__)

WAITS = 4  # rank 0 waits for a batch, for a publication, for the hub: each at most `batch_deadline_s`


class Begin(msgspec.Struct, frozen=True, tag=True):
    settings: str
    files: dict[str, bytes]


class Train(msgspec.Struct, frozen=True, tag=True):
    work: StepWork
    look_back: bool = False


class Copy(msgspec.Struct, frozen=True, tag=True):
    with_training: bool


class Restore(msgspec.Struct, frozen=True, tag=True):
    folder: str


def _send(ranks: Ranks, command: Begin | Train | Copy | Restore) -> None:
    """Rank 0: let the others do the same next. Costs nothing if there are none."""
    if ranks.world > 1:
        ranks.send(msgspec.msgpack.encode(command))


class Actions:
    """What a run does with its learner. Other ranks, if there are any, are told before, and do the same."""

    def __init__(self) -> None:
        self._copies = Copies()

    def train(self, learner: Learner, work: StepWork, *arguments: Any) -> dict[str, float]:
        _send(learner.ranks, Train(work))
        return train_step(learner, work, *arguments)

    def look_back(self, learner: Learner, work: StepWork, *arguments: Any) -> dict[str, float]:
        _send(learner.ranks, Train(work, look_back=True))
        return look_back(learner, work, *arguments)

    def restore(self, learner: Learner, stored: StoredCheckpoint) -> None:
        _send(learner.ranks, Restore(str(stored.folder)))
        if isinstance(learner.ranks, RankGroup):
            restore_shard(learner, stored.folder, learner.ranks)
        else:
            checkpoint.restore(learner, stored)

    def copy(self, learner: Learner, with_training: bool) -> Copied:
        _send(learner.ranks, Copy(with_training))
        return self._copies.take(learner, with_training)


def lead(loaded: LoadedModel, settings: TrainerSettings, ranks: RankGroup) -> Learner:
    """Rank 0: a learner whose weights, those of `loaded`, are spread over the ranks."""
    ranks.use(choose_device(settings.device))
    _send(ranks, Begin(settings.model_dump_json(), dict(loaded.files)))
    return _learner(loaded.model, settings, loaded.files, ranks)


def run_rank(stop: StopToken) -> None:
    """Be one of the other ranks, until rank 0 says that it is over, or `stop` is set."""
    ranks = join_ranks()
    try:
        with lost_peers(ranks):
            follow(ranks, stop)
            ranks.leave()
    except Stopped:
        log.info("rank %d stopped (%s)", ranks.rank, stop.reason or "told by another")


def follow(ranks: RankGroup, stop: StopToken) -> None:
    """Do what rank 0 commands, to the end."""
    if (message := ranks.receive(stop, COLLECTIVE_S)) is None:
        return
    begin = msgspec.msgpack.decode(message, type=Begin)
    settings = TrainerSettings.model_validate_json(begin.settings)
    make_deterministic(settings)
    ranks.use(choose_device(settings.device))
    with within_memory(settings, begin.files, ranks.world):
        learner = _learner(None, settings, begin.files, ranks)
        while (message := ranks.receive(stop, WAITS * settings.batch_deadline_s)) is not None:
            match msgspec.msgpack.decode(message, type=Train | Copy | Restore):
                case Train(work=work, look_back=look):
                    (look_back if look else train_step)(learner, work, stop.is_set)
                case Copy(with_training=with_training):
                    _send_rows(learner, with_training)
                case Restore(folder=folder):
                    restore_shard(learner, Path(folder), ranks)


def _learner(whole: Any, settings: TrainerSettings, files: Mapping[str, bytes], ranks: RankGroup) -> Learner:
    precision, reference = settings.memory.precision, None
    model = spread(whole, files, precision, ranks)
    if settings.objective.kl > 0 and settings.lora is None:  # else it is the model without its adapters
        reference = spread(whole, files, precision, ranks).requires_grad_(False)
    return new_learner(model, settings, ranks, reference)


def spread(whole: nn.Module | None, files: Mapping[str, bytes], precision: str, ranks: RankGroup) -> Any:
    """The model of `files` with the weights of rank 0's `whole` (None elsewhere), in shards. Collective. Weights stay
    in float32; with `precision` "bfloat16" they are rounded when they are gathered."""
    with torch.device("meta"):
        model = model_from_files(files, device="meta")
    shard(model, precision, ranks)
    model.to_empty(device=ranks.device)
    model.tie_weights()  # two names of one weight were given memory each
    _send_weights(whole, model, ranks)
    return model


def shard(model: Any, precision: str, ranks: RankGroup) -> None:
    """Make shards of the model's weights, layer by layer; gradients become sums over the ranks, not means."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
    for part in [*decoder_layers(model), model]:
        sharded = fully_shard(part, mesh=mesh, mp_policy=policy)
        # A step's loss is divided by its count of tokens over all ranks, so gradients only have to be added.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)

    def run(_model: nn.Module, call: Any) -> Any:
        """What FSDP wraps. It hooks into the results, which a view of something else would not let it do safely."""
        return tree_map_only(Tensor, Tensor.clone, call())

    setattr(model, RUN_METHOD, MethodType(run, model))
    register_fsdp_forward_method(model, RUN_METHOD)


def rows_of(count: int, rank: int, world: int) -> slice:
    """Which of `count` rows a rank holds: equal shards, the last ones smaller or empty. Of 5 in 4 ranks: 2, 2, 1, 0."""
    size = -(-count // world)
    return slice(min(count, rank * size), min(count, (rank + 1) * size))


def own_rows(tensor: Tensor, ranks: RankGroup) -> tuple[Tensor, slice]:
    """The rows of a sharded tensor that lie here, and which they are."""
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local()
    rows = rows_of(tensor.shape[0], ranks.rank, ranks.world)
    assert local.shape[0] == rows.stop - rows.start, "FSDP shards rows in another way than `rows_of`"
    return local, rows


@torch.no_grad()
def _send_weights(whole: nn.Module | None, model: nn.Module, ranks: RankGroup) -> None:
    """One tensor at a time, so that no device ever holds more than its shard and the largest of them."""
    theirs = dict([*whole.named_parameters(), *whole.named_buffers()]) if whole is not None else {}
    for name, own in [*model.named_parameters(), *model.named_buffers()]:
        if whole is None:
            values = torch.empty(own.shape, dtype=own.dtype, device=ranks.device)
        else:
            values = theirs[name].detach().to(ranks.device, own.dtype, copy=True).contiguous()
        ranks.broadcast(values)
        if isinstance(own, DTensor):
            local, rows = own_rows(own, ranks)
            local.copy_(values[rows])
        else:
            own.copy_(values)


def _send_rows(learner: Learner, with_training: bool) -> None:
    """The other side of `Copies.take`: the same tensors in the same order."""
    training = checkpoint.training_state(learner) if with_training else {}
    for value in [*learner.state().values(), *training.values()]:
        learner.ranks.whole(value)


def restore_shard(learner: Learner, folder: Path, ranks: RankGroup) -> None:
    """Read this rank's rows of a checkpoint, however many processes trained it. Collective."""
    state, trained = learner.state(), learner.trained()
    stored = {name: shape for name, shape, _read in checkpoint.read_tensors(folder, MODEL)}
    if stored.keys() != state.keys():
        raise CheckpointError(f"the weights in {folder} are for another model than the one that is trained here")
    for name, shape, read in checkpoint.read_tensors(folder, MODEL):
        target = state[name]
        if shape != tuple(target.shape):
            raise CheckpointError(f"weight {name} is {list(shape)} in the checkpoint, here {list(target.shape)}")
        local, rows = own_rows(target, ranks) if isinstance(target, DTensor) else (target, None)
        with torch.no_grad():
            local.copy_(read(rows))
    moments, generators = dict[str, Tensor](), dict[str, Tensor]()
    for name, shape, read in checkpoint.read_tensors(folder, TRAINING):
        weight = trained.get(name.removeprefix(MOMENTS).rpartition("/")[0])
        if not name.startswith(MOMENTS):
            generators[name] = read()
        elif isinstance(weight, DTensor) and shape == tuple(weight.shape):
            local, rows = own_rows(weight, ranks)
            shaped: dict[str, Any] = {"shape": weight.shape, "stride": weight.stride(), "run_check": False}
            values = read(rows).to(local.device)
            moments[name[len(MOMENTS) :]] = DTensor.from_local(values, weight.device_mesh, weight.placements, **shaped)
        else:  # a count that every rank has
            moments[name.removeprefix(MOMENTS)] = read()
    learner.load_moments(moments)
    checkpoint.restore_generators(generators)
