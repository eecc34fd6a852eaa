"""A model spread over the processes of a crew: each holds a share of the rows of every weight (FSDP2).

    rank 0: the whole model, on the CPU ──weight by weight──► every rank: its rows, on its device

A layer's weights are gathered when it computes and dropped afterwards; gradients are summed over the ranks and arrive
as rows again. Only rank 0 ever holds a whole model, in the memory of its host; the others need nothing but config.json.

Legend: no tensor here has a fixed meaning of its dimensions but the first, which is the one that is shared out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from shoal.models.compiled import decoder_layers
from shoal.models.load import DTYPES, model_from_files
from shoal.trainer.together import RUN_METHOD, Together


def spread(whole: nn.Module | None, files: Mapping[str, bytes], precision: str, crew: Together) -> Any:
    """The model of `files` with the weights of rank 0's `whole` (None elsewhere), in shares. Collective.

    Weights stay in float32: they are what learns. With `precision` "bfloat16" they are rounded when they are gathered.
    """
    with torch.device("meta"):
        model = model_from_files(files, device="meta")
    shard(model, precision, crew)
    model.to_empty(device=crew.device)
    model.tie_weights()  # two names of one weight were given memory each
    _send_weights(whole, model, crew)
    return model


def shard(model: Any, precision: str, crew: Together) -> None:
    """Make the model's weights shares, layer by layer; gradients become sums over the ranks, not means."""
    mesh = init_device_mesh(crew.device.type, (crew.world,))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
    for part in [*decoder_layers(model), model]:
        sharded = fully_shard(part, mesh=mesh, mp_policy=policy)
        # A step's loss is divided by its count of tokens over all ranks, so gradients only have to be added.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    setattr(model, RUN_METHOD, MethodType(_call, model))
    register_fsdp_forward_method(model, RUN_METHOD)


def rows_of(count: int, rank: int, world: int) -> slice:
    """Which of `count` rows a rank holds: equal shares, the last ones smaller or empty.

    >>> [(rows_of(5, rank, 4).start, rows_of(5, rank, 4).stop) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    share = -(-count // world)
    return slice(min(count, rank * share), min(count, (rank + 1) * share))


def own_rows(tensor: Tensor, crew: Together) -> tuple[Tensor, slice]:
    """The rows of a shared tensor that lie here, and which they are."""
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local()
    rows = rows_of(tensor.shape[0], crew.rank, crew.world)
    assert local.shape[0] == rows.stop - rows.start, "FSDP shares rows out in another way than `rows_of`"
    return local, rows


def _call(_model: nn.Module, call: Any) -> Any:
    """What FSDP wraps. It hooks into the results, which a view of something else would not let it do safely."""
    return tree_map_only(Tensor, Tensor.clone, call())


@torch.no_grad()
def _send_weights(whole: nn.Module | None, model: FSDPModule, crew: Together) -> None:
    """One tensor at a time, so that no device ever holds more than its share and the largest of them."""
    assert isinstance(model, nn.Module)
    theirs = dict([*whole.named_parameters(), *whole.named_buffers()]) if whole is not None else {}
    for name, own in [*model.named_parameters(), *model.named_buffers()]:
        if whole is None:
            values = torch.empty(own.shape, dtype=own.dtype, device=crew.device)
        else:
            values = theirs[name].detach().to(crew.device, own.dtype, copy=True).contiguous()
        crew.broadcast(values)
        if isinstance(own, DTensor):
            local, rows = own_rows(own, crew)
            local.copy_(values[rows])
        else:
            own.copy_(values)
