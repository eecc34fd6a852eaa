"""A learner sharded over ranks: each rank holds some rows of every weight (FSDP2) and does what rank 0 commands.

    rank 0 (`loop`)                       the others (`follow_rank_0`)
    Begin(settings, config, folder) ────► build the model, take their rows
    Train(work, check?) ────────────────► the same `train_step` or `check_policy`, on their part of the work
    Copy(with training) ────────────────► send their rows
    Restore(folder) ────────────────────► read their rows of a checkpoint
    (over) ─────────────────────────────► end

Commands are msgpack of known structures. Only rank 0 talks to the hub, writes checkpoints, and holds a whole model (in
host memory). The others need config.json and the checkpoint folder (a shared file system, if they run on several
machines).
"""

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
from torch.utils._pytree import tree_map_only

from shoal.models.load import DTYPES, LoadedModel, model_from_files
from shoal.models.packed import decoder_layers
from shoal.runtime.sizing import settle
from shoal.runtime.stop import StopToken
from shoal.trainer import checkpoint
from shoal.trainer.checkpoint import Copies, StateCopy, StoredCheckpoint
from shoal.trainer.learner import Learner, choose_device, make_deterministic, new_learner
from shoal.trainer.memory import within_memory
from shoal.trainer.ranks import COLLECTIVE_S, RUN_METHOD, RankGroup, Ranks, join_ranks, lost_peers
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.step import StepWork, Stopped, check_policy, train_step

log = logging.getLogger(__name__)

WAITS = 4  # rank 0 may wait `batch_deadline_s` each for a group of its batch, a publication and the hub


class Begin(msgspec.Struct, frozen=True, tag=True):
    settings: str
    files: dict[str, bytes]


class Train(msgspec.Struct, frozen=True, tag=True):
    work: StepWork
    check_policy: bool = False


class StillWaiting(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 has no batch yet, and groups come in."""


class Copy(msgspec.Struct, frozen=True, tag=True):
    with_training: bool


class Restore(msgspec.Struct, frozen=True, tag=True):
    folder: str


def _send(ranks: Ranks, command: Begin | Train | StillWaiting | Copy | Restore) -> None:
    if ranks.world > 1:
        ranks.send(msgspec.msgpack.encode(command))


class Actions:
    """The other ranks are told first and do the same."""

    def __init__(self) -> None:
        self._copies = Copies()

    def train(self, learner: Learner, work: StepWork, *arguments: Any) -> dict[str, float]:
        _send(learner.ranks, Train(work))
        return train_step(learner, work, *arguments)

    def wait(self, learner: Learner) -> None:
        _send(learner.ranks, StillWaiting())

    def check_policy(self, learner: Learner, work: StepWork, *arguments: Any) -> dict[str, float]:
        _send(learner.ranks, Train(work, check_policy=True))
        return check_policy(learner, work, *arguments)

    def restore(self, learner: Learner, stored: StoredCheckpoint) -> None:
        _send(learner.ranks, Restore(str(stored.folder)))
        checkpoint.restore(learner, stored.folder)

    def copy(self, learner: Learner, with_training: bool) -> StateCopy:
        _send(learner.ranks, Copy(with_training))
        return self._copies.take(learner, with_training)


def lead_ranks(loaded: LoadedModel, settings: TrainerSettings, ranks: RankGroup) -> Learner:
    ranks.use(choose_device(settings.device))
    _send(ranks, Begin(settings.model_dump_json(), dict(loaded.files)))
    return _learner(loaded.model, settings, loaded.files, ranks)


def run_rank(stop: StopToken) -> None:
    ranks = join_ranks()
    try:
        with lost_peers(ranks):
            follow_rank_0(ranks, stop)
            ranks.leave()
    except Stopped:
        log.info("rank %d stopped (%s)", ranks.rank, stop.reason or "told by another")


def follow_rank_0(ranks: RankGroup, stop: StopToken) -> None:
    if (message := ranks.receive(stop, COLLECTIVE_S)) is None:
        return
    begin = msgspec.msgpack.decode(message, type=Begin)
    settings = TrainerSettings.model_validate_json(begin.settings)
    make_deterministic(settings)
    ranks.use(choose_device(settings.device))
    with within_memory(settings, begin.files, ranks.world):
        learner = _learner(None, settings, begin.files, ranks)
        while (message := ranks.receive(stop, WAITS * settle(settings).batch_deadline_s)) is not None:
            match msgspec.msgpack.decode(message, type=Train | StillWaiting | Copy | Restore):
                case StillWaiting():
                    continue
                case Train(work=work, check_policy=is_check):
                    (check_policy if is_check else train_step)(learner, work, stop.is_set)
                case Copy(with_training=with_training):
                    # The counterpart of `Copies.take`: the same tensors in the same order.
                    training = checkpoint.training_state(learner) if with_training else {}
                    for value in [*learner.state().values(), *training.values()]:
                        learner.ranks.whole(value)
                case Restore(folder=folder):
                    checkpoint.restore(learner, Path(folder))


def _learner(whole: Any, settings: TrainerSettings, files: Mapping[str, bytes], ranks: RankGroup) -> Learner:
    precision, reference = settings.memory.precision, None
    model = shard_model(whole, files, precision, ranks)
    if settings.objective.kl > 0 and settings.lora is None:  # with adapters the reference is the model without them
        reference = shard_model(whole, files, precision, ranks).requires_grad_(False)
    return new_learner(model, settings, ranks, reference)


def shard_model(whole: nn.Module | None, files: Mapping[str, bytes], precision: str, ranks: RankGroup) -> Any:
    """The model of `files` in shards, with the weights of `whole` (on rank 0; None elsewhere). Weights are stored in
    float32; with `precision` "bfloat16" they are rounded when they are gathered."""
    with torch.device("meta"):
        model = model_from_files(files, device="meta")
    shard(model, precision, ranks)
    model.to_empty(device=ranks.device)
    model.tie_weights()  # to_empty gave tied weights memory of their own
    _send_weights(whole, model, ranks)
    return model


def shard(model: Any, precision: str, ranks: RankGroup) -> None:
    """Gradients become sums over the ranks, not means."""
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
    for part in [*decoder_layers(model), model]:
        sharded = fully_shard(part, mesh=mesh, mp_policy=policy)
        # The loss is divided by the token count of all ranks, so gradients are only added.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)

    def run(_model: nn.Module, call: Any) -> Any:
        """What FSDP wraps. Its hooks on the results need tensors that are not views."""
        return tree_map_only(Tensor, Tensor.clone, call())

    setattr(model, RUN_METHOD, MethodType(run, model))
    register_fsdp_forward_method(model, RUN_METHOD)


@torch.no_grad()
def _send_weights(whole: nn.Module | None, model: nn.Module, ranks: RankGroup) -> None:
    """One tensor at a time, so a device holds at most its shard and the largest tensor."""
    theirs = dict([*whole.named_parameters(), *whole.named_buffers()]) if whole is not None else {}
    for name, own in [*model.named_parameters(), *model.named_buffers()]:
        if whole is None:
            values = torch.empty(own.shape, dtype=own.dtype, device=ranks.device)
        else:
            values = theirs[name].detach().to(ranks.device, own.dtype, copy=True).contiguous()
        ranks.broadcast(values)
        local, rows = ranks.own_rows(own)
        local.copy_(values[rows])
