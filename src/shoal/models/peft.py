"""Adapters as `peft` saves them, without torch: a folder with adapter_config.json and adapter_model.safetensors.

    base_model.model.LAYER.lora_A.weight   A: [rank, in]      LAYER.lora_a of a run with adapters
    base_model.model.LAYER.lora_B.weight   B: [out, rank]     LAYER.lora_b

Their base is the model that the configuration names, or another: `ADAPTERS+BASE`. Whatever would make them compute
something else than B·A·alpha/rank is refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ModelError
from shoal.runtime import hf

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
OTHER_SUMS = (
    "use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "fan_in_fan_out",
    "layer_replication", "megatron_config", "use_qalora", "target_parameters", "trainable_token_indices",
    "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "velora_config",
)  # fmt: skip
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")  # the others change the base's weights, too
REMEDY = "merge them with peft (merge_and_unload), and give that model"


def parts(name: str | Path) -> tuple[str, str]:
    """`ADAPTERS+BASE` as two; a path that exists, and any other name, has no second."""
    text = str(name)
    path, plus, base = text.rpartition("+")
    return (text, "") if not plus or Path(text).expanduser().exists() else (path, base)


@dataclass(frozen=True)
class PeftAdapter:
    folder: Path
    rank: int
    alpha: float
    base: str

    def layers(self) -> tuple[str, ...]:
        """The layers that have an adapter, by the headers of the file; `ModelError` if it is not whole."""
        from safetensors import SafetensorError, safe_open

        path, found = self.folder / WEIGHTS, dict[str, list[int]]()
        try:
            with safe_open(path, framework="np") as opened:
                found = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelError(f"the adapters {path} cannot be read: {error}") from error
        names = {name.removeprefix(PREFIX).removesuffix(end) for name in found for end in (DOWN, UP) if end in name}
        wanted = {f"{PREFIX}{name}{end}" for name in names for end in (DOWN, UP)}
        if odd := sorted(found.keys() ^ wanted):
            raise ModelError(
                f"the adapters {path} have {odd[0]} where a pair of {DOWN[1:]} and {UP[1:]} belongs: {REMEDY}"
            )
        for name in names:
            down, up = found[f"{PREFIX}{name}{DOWN}"], found[f"{PREFIX}{name}{UP}"]
            if len(down) != 2 or len(up) != 2 or down[0] != self.rank or up[1] != self.rank:
                raise ModelError(f"the adapters {path} have shapes {down} and {up} at {name}, not of rank {self.rank}")
        return tuple(sorted(names))

    def require(self, rank: int, alpha: float, targets: Collection[str], kl: float) -> None:
        """Raise `ModelError` unless such settings train these adapters further."""
        if kl > 0:
            why = f"its reference would be the base, and not what the run starts from, the adapters in {self.folder}"
            raise ModelError(f"trainer.objective.kl: {why}: leave [trainer.lora] out to merge them, or set kl to 0")
        own = sorted({name.rpartition(".")[2] for name in self.layers()})
        if (rank, alpha, sorted(targets)) != (self.rank, self.alpha, own):
            theirs = f"rank = {self.rank}, alpha = {self.alpha:g}, targets = {json.dumps(own)}"
            remedy = (
                "set these to train them further, or leave [trainer.lora] out to train the model that has them merged"
            )
            raise ModelError(f"trainer.lora differs from the adapters in {self.folder} ({theirs}): {remedy}")


def read_adapter(folder: Path) -> PeftAdapter | None:
    """The adapters in a folder; None if it has none. What they cannot be merged by is refused."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        kind, rank, alpha = values["peft_type"], int(values["r"]), float(values["lora_alpha"])
        base, revision = str(values.get("base_model_name_or_path") or ""), str(values.get("revision") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is no configuration of LoRA adapters: {error!r}") from error
    odd = [name for name in OTHER_SUMS if values.get(name)]
    odd += [f"bias = {values['bias']!r}"] if values.get("bias", "none") != "none" else []
    odd += [f"peft_type = {kind!r}"] if kind != "LORA" else []
    start = values.get("init_lora_weights")
    odd += [] if start in PLAIN_STARTS else [f"init_lora_weights = {start!r}"]
    if odd or not (0 < rank <= 65_536 and alpha > 0):
        raise ModelError(f"{path} has {odd[0] if odd else f'r = {rank}'}, and only plain LoRA is read: {REMEDY}")
    named = hf.parse(base)
    return PeftAdapter(folder, rank, alpha, f"{base}@{revision}" if named and revision and not named.revision else base)


def config_file(rank: int, alpha: float, targets: Collection[str], base: str) -> bytes:
    """adapter_config.json. A base of the hub has its commit in a key of its own."""
    name = hf.parse(base)
    values: Mapping[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": name.repo if name else base,
        "revision": (name.revision or None) if name else None, "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0,
        "target_modules": sorted(targets), "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "use_dora": False, "use_rslora": False, "modules_to_save": None,
        "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    return json.dumps(values, indent=2).encode() + b"\n"
