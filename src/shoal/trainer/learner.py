"""What training changes (weights, moments), and by which rules (advantage, loss, schedule).

    model (bfloat16) ──forward, backward──► gradient of one weight ──added in float32──► master.grad
         ▲                                                                                  │ optimizer, on masters
         └───────────────────────────── rounded once ──────────────────────── master ◄──────┘

A step moves most weights by less than bfloat16 can tell apart; the masters keep what would be rounded away. Gradients
in bfloat16 never exist all at once. Weights that are not trained have no masters: their exact values stay in the host's
memory, and are saved, published and exported.
"""

from __future__ import annotations

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

from shoal.algorithms.advantages import Advantage
from shoal.algorithms.losses import Loss, LossParameters
from shoal.algorithms.packing import Cost
from shoal.algorithms.registry import ADVANTAGES, LOSSES
from shoal.errors import CheckpointError, ConfigError
from shoal.models.load import DTYPES, LoadedModel, adapted, load_model
from shoal.models.lora import AdapterShape
from shoal.models.packed import attends_by_flash, compile_layers, decoder_layers, supports_packing
from shoal.models.state import overwrite, policy_state
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
        # On a CPU the memory that they lay in: `attach` gives the model other.
        self.frozen: Mapping[str, Tensor] = {n: each.to("cpu", torch.float32) for n, each in untrained.items()}
        self._untrained = [weight for weight in model.parameters() if not weight.requires_grad]
        self._weights: list[Tensor] = list(trained.values())
        self._masters: list[Tensor] = list(self.named.values())

    def attach(self, dtype: torch.dtype) -> None:
        """Round the model's weights to `dtype`, and take over their gradients from now on. Buffers keep their type:
        rotary frequencies would lose what tells far positions apart."""
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
        """The model computes with what the masters have become; if they were loaded, `frozen` weights, too."""
        torch._foreach_copy_(self._weights, self._masters)
        for weight, exact in zip(self._untrained, self.frozen.values(), strict=True) if frozen else ():
            weight.copy_(exact)


def recompute_layers(model: Any) -> None:
    """From now on the backward pass computes every decoder layer again. The gradients are the same. transformers' own
    switch works in training mode only, where dropout would be noise in the ratio."""

    def call(forward: Callable[..., Any], *values: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*values, **named)
        return checkpoint(forward, *values, use_reentrant=False, preserve_rng_state=False, **named)

    for layer in decoder_layers(model):
        layer.forward = partial(call, layer.forward)


@dataclass(frozen=True)
class Learner:
    """A model with its optimizer. `state` is always float32, also where the model computes in bfloat16 (`masters`)."""

    model: Any
    optimizer: torch.optim.AdamW
    settings: TrainerSettings
    advantage: Advantage
    loss: Loss
    loss_parameters: LossParameters
    ranks: Ranks = Ranks()  # noqa: RUF009 - it has no state
    masters: Masters | None = None
    reference: Any = None  # the policy that training began with, for a KL term; with adapters `model` itself
    packed: bool = False  # sequences end to end, or in padded rows where the model cannot be computed so
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
        """The policy's weights by name, as `policy_state` gives them, masters where there are any. Not copied."""
        exact = {} if self.masters is None else {**self.masters.named, **self.masters.frozen}
        return {name: exact.get(name, own).detach() for name, own in policy_state(self.model).items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the weights in place; nothing is written unless every name, shape and type is right."""
        overwrite(self.state(), tensors)
        if self.masters is not None:
            self.masters.write_back(frozen=True)

    def moments(self) -> dict[str, Tensor]:
        """What the optimizer remembers, as `weight/slot`; empty before the first update. Not copied."""
        slots = {name: self.optimizer.state.get(weight, {}) for name, weight in self.trained().items()}
        return {f"{name}/{slot}": value for name, values in slots.items() for slot, value in values.items()}

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Let the optimizer remember these and nothing else."""
        trained = self.trained()
        self.optimizer.state.clear()
        for name, value in moments.items():
            weight, _, slot = name.rpartition("/")
            if weight not in trained:
                raise CheckpointError(f"there are moments of weight {weight}, which is not trained here")
            # The count of updates stays where AdamW keeps it; moments live beside their weights.
            count_stays = slot == "step" and not self.optimizer.defaults["fused"]
            self.optimizer.state[trained[weight]][slot] = value if count_stays else value.to(trained[weight].device)


def new_learner(model: Any, settings: TrainerSettings, ranks: Ranks | None = None, reference: Any = None) -> Learner:
    """The model is put in evaluation mode: dropout would be noise in the ratio. One that is spread over the ranks
    already comes in float32 and with its `reference`, if that is another model."""
    model.eval()
    ranks = ranks or Ranks()
    masters = None
    if settings.memory.precision != "float32" and not ranks.sharded:  # FSDP rounds what it gathers by itself
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
        model=model, optimizer=optimizer, settings=settings, advantage=ADVANTAGES[settings.advantage],
        loss=LOSSES[settings.loss], loss_parameters=parameters, ranks=ranks, masters=masters, reference=reference,
        packed=packed, cost=cost_of(model),
    )  # fmt: skip


def cost_of(model: Any) -> Cost:
    """Multiplications of a forward pass, by the model's shape: each weight once per token; queries with keys, and
    weights with values, once per pair of tokens that see each other."""
    shape = model.config.get_text_config()
    heads = getattr(shape, "num_attention_heads", 0)
    size = vars(shape).get("head_dim") or shape.hidden_size // max(1, heads)  # layers of some models differ in it
    weights = sum(weight.numel() for weight in model.parameters())
    return Cost(linear=weights, quadratic=shape.num_hidden_layers * heads * size)


def learning_rate(settings: TrainerSettings, step: int, minibatch: int = 0) -> float:
    """The rate of an optimizer step: a function of its number alone, so that a resume has no schedule to restore."""
    updates = step * settings.minibatches + minibatch + 1
    return settings.learning_rate * min(1.0, updates / max(1, settings.warmup_steps))


def starting_model(name: str, settings: TrainerSettings, device: str | None = None) -> LoadedModel:
    """The model that training starts from, with adapters if it is they that are trained."""
    loaded = load_model(name, device=device or choose_device(settings.device))
    if settings.lora is None:
        return loaded
    return adapted(loaded, AdapterShape(settings.lora.rank, settings.lora.alpha, settings.lora.targets))


def choose_device(wanted: str) -> str:
    found = torch.cuda.is_available()
    if wanted == "cuda" and not found:
        raise ConfigError('trainer.device is "cuda", but torch finds no GPU here; set it to "cpu" or "auto"')
    return "cuda" if found and wanted != "cpu" else "cpu"


def make_deterministic(settings: TrainerSettings) -> None:
    """The same batch must give the same weights after a crash. These switches are the process's, not the learner's."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS when it starts
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
