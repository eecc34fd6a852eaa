"""What training changes (weights, moments) and by which rules (advantage, loss, schedule).

    model (bfloat16) ──forward, backward──► gradient of one weight ──added in float32──► master.grad
         ▲                                                                                  │ optimizer, on masters
         └───────────────────────────── rounded once ──────────────────────── master ◄──────┘

A step changes most weights by less than bfloat16 can represent; the float32 masters keep these changes. Gradients in
bfloat16 never exist all at once. Frozen weights have no masters: their exact values stay in host memory.
"""

import copy
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.algorithms.advantages import Advantage, OwnAdvantage
from shoal.algorithms.losses import Loss, LossParameters
from shoal.algorithms.packing import Cost
from shoal.algorithms.registry import advantage_named, loss_named
from shoal.errors import CheckpointError, ConfigError
from shoal.models.folder import adapter_of
from shoal.models.load import DTYPES, LoadedModel, adapted, load_model
from shoal.models.lora import AdapterShape, continue_adapter
from shoal.models.packed import attends_by_flash, compile_layers, decoder_layers, supports_packing
from shoal.models.state import check_fit, policy_state
from shoal.trainer.ranks import Ranks
from shoal.trainer.settings import TrainerSettings

log = logging.getLogger(__name__)


class Masters:
    """The float32 weights behind a model's 16-bit ones, by name: `named` are trained, `frozen` are not."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        copied = {name: weight.detach().to(torch.float32, copy=True) for name, weight in trained.items()}
        self.named: Mapping[str, Tensor] = {name: nn.Parameter(weight) for name, weight in copied.items()}
        untrained = {name: weight.detach() for name, weight in model.named_parameters() if not weight.requires_grad}
        # On a CPU this keeps the original memory: `attach` gives the model new tensors.
        self.frozen: Mapping[str, Tensor] = {n: each.to("cpu", torch.float32) for n, each in untrained.items()}
        self._untrained = [weight for weight in model.parameters() if not weight.requires_grad]
        self._weights: list[Tensor] = list(trained.values())
        self._masters: list[Tensor] = list(self.named.values())

    def attach(self, dtype: torch.dtype) -> None:
        """Round the model's weights to `dtype`, and take over their gradients. Buffers keep their type: rotary
        frequencies need float32."""
        for own in self._model.parameters():
            own.data = own.data.to(dtype)

        def hand_over(weight: Tensor, master: Tensor) -> None:
            assert weight.grad is not None
            if master.grad is None:
                master.grad = weight.grad.to(torch.float32)
            else:
                master.grad.add_(weight.grad)
            weight.grad = None

        for weight, master in zip(self._weights, self._masters, strict=True):
            weight.register_post_accumulate_grad_hook(partial(hand_over, master=master))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def write_back(self, frozen: bool = False) -> None:
        torch._foreach_copy_(self._weights, self._masters)
        for weight, exact in zip(self._untrained, self.frozen.values(), strict=True) if frozen else ():
            weight.copy_(exact)


def recompute_layers(model: Any) -> None:
    """transformers' own switch needs training mode, where dropout would disturb the ratio."""

    def call(forward: Callable[..., Any], *values: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*values, **named)
        return checkpoint(forward, *values, use_reentrant=False, preserve_rng_state=False, **named)

    for layer in decoder_layers(model):
        layer.forward = partial(call, layer.forward)


@dataclass(frozen=True)
class Learner:
    """A model with its optimizer. `state` is always float32, also if the model computes in bfloat16 (`masters`)."""

    model: Any
    optimizer: torch.optim.AdamW
    settings: TrainerSettings
    advantage: Advantage | OwnAdvantage
    loss: Loss
    loss_parameters: LossParameters
    ranks: Ranks = Ranks()  # noqa: RUF009 - it has no state
    masters: Masters | None = None
    reference: Any = None  # the starting policy, for a KL term; with adapters `model` itself
    packed: bool = False  # sequences end to end; else in padded rows
    cost: Cost = Cost(linear=1, quadratic=0)  # noqa: RUF009 - it is frozen

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def trained(self) -> dict[str, Tensor]:
        """The tensors that the optimizer changes, by the names of the model's weights."""
        own = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        return own if self.masters is None else {name: self.masters.named[name] for name in own}

    def state(self) -> dict[str, Tensor]:
        """The policy's weights by name as in `policy_state`, from the masters if there are any. Not copied."""
        exact = {} if self.masters is None else {**self.masters.named, **self.masters.frozen}
        return {name: exact.get(name, own).detach() for name, own in policy_state(self.model).items()}

    def load_state(self, tensors: Mapping[str, Any]) -> None:
        """Overwrite the weights in place with this rank's rows of tensors, or of `StoredTensor`s; nothing is written
        unless every name, shape and type fits."""
        state = self.state()
        check_fit(state, tensors)
        with torch.no_grad():
            for name, target in state.items():
                own, rows = self.ranks.own_rows(target)
                own.copy_(tensors[name][rows])
        if self.masters is not None:
            self.masters.write_back(frozen=True)

    def moments(self) -> dict[str, Tensor]:
        """As `weight/slot`; empty before the first update. Not copied."""
        slots = {name: self.optimizer.state.get(weight, {}) for name, weight in self.trained().items()}
        return {f"{name}/{slot}": value for name, values in slots.items() for slot, value in values.items()}

    def load_moments(self, moments: Mapping[str, Any]) -> None:
        trained = self.trained()
        self.optimizer.state.clear()
        for name, value in moments.items():
            weight, _, slot = name.rpartition("/")
            if weight not in trained:
                raise CheckpointError(f"there are moments of weight {weight}, which is not trained here")
            own, rows = self.ranks.own_rows(target := trained[weight])
            if slot != "step":
                loaded = self.ranks.sharded_as(target, value[rows].to(own.device))
            else:  # AdamW keeps the count of updates on the CPU, unless fused
                loaded = value[...].to(own.device) if self.optimizer.defaults["fused"] else value[...]
            self.optimizer.state[target][slot] = loaded


def new_learner(model: Any, settings: TrainerSettings, ranks: Ranks | None = None, reference: Any = None) -> Learner:
    """The model is put in evaluation mode, because dropout would disturb the ratio. A sharded model comes in float32
    and with its `reference`, if that is another model."""
    model.eval()
    ranks = ranks or Ranks()
    masters = None
    if settings.memory.precision != "float32" and not ranks.sharded:  # FSDP rounds gathered weights itself
        masters = Masters(model)
        masters.attach(DTYPES[settings.memory.precision])
    if settings.objective.kl > 0 and reference is None:
        reference = copy.deepcopy(model).requires_grad_(False) if settings.lora is None else model
    with torch.no_grad():
        packed = ranks.run(model, lambda: supports_packing(model))
        one_program = not packed or ranks.run(model, lambda: attends_by_flash(model))
    if settings.memory.compile and one_program:
        compile_layers(model)
    elif settings.memory.compile:
        log.warning("trainer.memory.compile has no effect: packs are compiled on a GPU only, in bfloat16")
    if settings.memory.recompute:
        recompute_layers(model)
    objective, trained = settings.objective, [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        trained if masters is None else masters.named.values(), lr=settings.learning_rate, betas=settings.betas,
        weight_decay=settings.weight_decay, fused=trained[0].is_cuda,
    )  # fmt: skip
    parameters = LossParameters(
        epsilon=settings.clip_epsilon, delta=settings.clip_delta, epsilon_high=objective.clip_high,
        ratio_cap=objective.ratio_cap, recomputed_base=objective.ratio_base == "recomputed",
    )  # fmt: skip
    return Learner(
        model=model, optimizer=optimizer, settings=settings, advantage=advantage_named(settings.advantage),
        loss=loss_named(settings.loss), loss_parameters=parameters, ranks=ranks, masters=masters, reference=reference,
        packed=packed, cost=cost_of(model),
    )  # fmt: skip


def cost_of(model: Any) -> Cost:
    """The multiplications of a forward pass: each weight once per token; attention once per pair of tokens."""
    shape = model.config.get_text_config()
    heads = getattr(shape, "num_attention_heads", 0)
    size = vars(shape).get("head_dim") or shape.hidden_size // max(1, heads)  # may differ between layers
    weights = sum(weight.numel() for weight in model.parameters())
    return Cost(linear=weights, quadratic=shape.num_hidden_layers * heads * size)


def learning_rate(settings: TrainerSettings, step: int, minibatch: int = 0) -> float:
    """From the number of the step alone: a resume has no schedule to restore."""
    updates = step * settings.minibatches + minibatch + 1
    return settings.learning_rate * min(1.0, updates / max(1, settings.warmup_steps))


def starting_model(name: str, settings: TrainerSettings, device: str | None = None) -> LoadedModel:
    """Adapters in PEFT's format are trained further if such are trained, else they are merged."""
    loaded = load_model(name, device=device or choose_device(settings.device), merges=settings.lora is None)
    if settings.lora is None:
        return loaded
    made = adapted(loaded, AdapterShape(settings.lora.rank, settings.lora.alpha, settings.lora.targets))
    if (adapter := adapter_of(name)) is not None:
        adapter.require(settings.lora.rank, settings.lora.alpha, settings.lora.targets, settings.objective.kl)
        continue_adapter(made.model, adapter)
    return made


def choose_device(wanted: str) -> str:
    found = torch.cuda.is_available()
    if wanted == "cuda" and not found:
        raise ConfigError('trainer.device is "cuda", but torch finds no GPU here; set it to "cpu" or "auto"')
    return "cuda" if found and wanted != "cpu" else "cpu"


def make_deterministic(settings: TrainerSettings) -> None:
    """The same batch must give the same weights after a crash. These switches hold for the whole process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
