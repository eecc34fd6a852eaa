"""`shoal plan`: what a recipe takes of memory, disk, links, time and money, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, echo

from shoal.cli import options
from shoal.errors import ConfigError
from shoal.runtime.extras import require
from shoal.runtime.text import count_of

if TYPE_CHECKING:
    from shoal.run.estimate import Planning
    from shoal.run.recipe import Recipe
    from shoal.runtime.sizing import Speeds

GIB = 2**30
ERROR = 0.1  # of the activations; see benchmarks/results/memory_plan.md
DEVICES = "How many trainer processes to plan for. (default: trainer.processes)"
MEMORY = "Memory of each device. (default: what this machine has)"
PARAMETERS = "Plan for a model of this many weights, of a guessed shape, instead of model.path."
ASSUME = "Change one of the assumptions that are printed. Repeatable."
PRICE = "The price of a GPU for an hour, to print what the run costs."


def plan(
    recipe: Annotated[Path, Argument(metavar="RECIPE", help="A recipe (a TOML file).")],
    overrides: options.Settings = None,
    devices: Annotated[int | None, options.whole("--devices", DEVICES, 1, 1024)] = None,
    memory_gb: Annotated[float | None, options.number("--memory", "GIB", MEMORY, 0.001, 1e6)] = None,
    parameters: Annotated[float | None, options.number("--parameters", "N", PARAMETERS, 1e7, 1e13)] = None,
    assumptions: Annotated[list[str] | None, options.value("--assume", "NAME=NUMBER", ASSUME)] = None,
    gpu_hour_price: Annotated[float | None, options.number("--gpu-hour-price", "PRICE", PRICE, 0, 1e6)] = None,
) -> None:
    """Print what a run needs, before anything is loaded: memory of every role, disk, bytes on links, time by stage,
    machines and money. The exit code is 3 if training does not fit."""
    require("trainer", "shoal plan")
    from shoal.run.recipe import load_recipe

    resolved, speeds = load_recipe(recipe, tuple(overrides or ())), _speeds(assumptions or ())
    found = planning(resolved, devices or resolved.trainer.processes, memory_gb, parameters, speeds)
    echo("\n".join([*training_lines(found, parameters), "", *run_lines(found, gpu_hour_price)]))
    raise Exit(0 if found.trainer.total <= found.room("trainer") else 3)


def _speeds(assumptions: list[str] | tuple[str, ...]) -> Speeds:
    from shoal.runtime.sizing import Speeds

    known, given = [one.name for one in fields(Speeds)], {}
    for text in assumptions:
        name, _, value = text.partition("=")
        try:
            given[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"--assume {text}: expected NAME=NUMBER, for example --assume length_share=0.5") from None
        if name.strip() not in known:
            raise ConfigError(f"--assume {text}: there is no such assumption; there are {', '.join(known)}")
        least = 0.0 if name.strip() == "worker_tokens_s" else 1e-6
        most = 1.0 if name.strip().endswith("_share") else 1e9
        if not least <= given[name.strip()] <= most:  # nor is NaN
            raise ConfigError(f"--assume {text}: expected a number from {least:g} to {most:g}")
    return replace(Speeds(), **given)


def planning(
    recipe: Recipe, processes: int, memory_gb: float | None, parameters: float | None, speeds: Speeds
) -> Planning:
    from shoal.run.estimate import Planning
    from shoal.trainer.memory import available, plan, shape_of  # torch: only once the recipe is known to be sound

    shape, (kind, here) = shape_of(_files(recipe, parameters), recipe.trainer), available(recipe.trainer, processes)
    if memory_gb is not None:
        kind, here = ("cpu" if recipe.trainer.device == "cpu" else "cuda"), int(memory_gb * GIB)
    planned = plan(shape, recipe.trainer, processes, recipe.run.max_new_tokens, kind)
    return Planning(recipe, shape, planned, processes, kind, here, speeds)


def _files(recipe: Recipe, parameters: float | None) -> Mapping[str, bytes]:
    from shoal.models.folder import is_known, model_folder
    from shoal.run.estimate import usual_config

    if parameters is not None:
        return {"config.json": json.dumps(usual_config(parameters)).encode()}
    if not is_known(recipe.model.path):
        config = "put the model's config.json there (no weights are needed)"
        size = "say how large it is, and the GiB of each GPU: --parameters 32e9 --memory 141"
        raise ConfigError(f"there is no model folder {recipe.model.path}: {config}, or {size}")
    return {"config.json": (model_folder(recipe.model.path, weights=False) / "config.json").read_bytes()}


def training_lines(found: Planning, guessed_from: float | None = None) -> Iterator[str]:
    from shoal.trainer.memory import alternatives

    shape, planned, recipe = found.shape, found.trainer, found.recipe
    settings, longest, processes = recipe.trainer, recipe.run.max_new_tokens, found.processes
    here = found.room("trainer")
    fits = planned.total <= here
    trained = "" if shape.trained == shape.weights else f", {shape.trained / 1e6:,.1f} M of them trained"
    kind = shape.kind if guessed_from is None else f"a guessed shape for --parameters {guessed_from:g}"
    yield f"{kind}: {shape.weights / 1e6:,.1f} M weights{trained}, {shape.layers} layers of width {shape.hidden:,}"
    if guessed_from is not None:
        yield "  so every figure below is a guess, too; with the model's config.json in model.path its shape is known"
    yield f"training in {settings.memory.precision} by {processes} process{'es'[: 2 * (processes > 1)]} on {found.kind}"
    first = " (copies: the first process only)" if processes > 1 and found.kind == "cpu" else ""
    yield f"on each device, GiB{first}:"
    tokens = f"{max(settings.micro_batch_tokens, longest):,} tokens"
    tokens += ", recomputed" if settings.memory.recompute else ""
    for name, size in planned.device.items():
        yield f"  {name:<26}{size / GIB:9.2f}" + (f"   {tokens}" if name == "activations" else "")
    fit = f"fits (activations are an estimate, ± {ERROR * planned.device['activations'] / GIB:.2f})"
    yield f"  {'in all':<26}{planned.total / GIB:9.2f}   of {here / GIB:.2f}: {fit if fits else 'does not fit'}"
    if planned.host:
        yield "on the host, for the first process, GiB:"
    for name, size in planned.host.items():
        yield f"  {name:<26}{size / GIB:9.2f}"
    if fits:
        return
    yield "each of these alone would change that to, GiB:"
    for words, other in alternatives(shape, settings, processes, longest, found.kind).items():
        room = "fits" if other.total <= here else "does not fit yet"
        yield f"  --set {words:<40}{other.total / GIB:9.2f}   {room}"
    if settings.lora is None:
        yield "  a [trainer.lora] table: gradients, masters and moments of adapters only"


def run_lines(found: Planning, gpu_hour_price: float | None = None) -> Iterator[str]:
    from shoal.runtime.sizing import open_settings

    run = found.recipe.run
    yield f"memory, GiB:{'device':>32}{'host':>10}"
    for name, device, host, what in found.memory():
        here = found.room(name)
        full = f"does not fit into {here / GIB:.1f} GiB; " if device > here else ""
        yield f"  {name:<32}{_cell(device / GIB)}{_cell(host / GIB)}   {full}{what}".rstrip("; ")
    yield f"disk, GB:{'running':>35}{'finished':>10}"
    for name, running, finished, what in found.disk():
        yield f"  {name:<32}{_cell(running / 1e9)}{_cell(finished / 1e9)}   {what}"
    yield f"bytes of a version on each link, MB:{'delta':>8}{'whole':>10}"
    for name, delta, whole in found.links():
        yield f"  {name:<32}{_cell(delta / 1e6)}{_cell(whole / 1e6)}"
    yield f"bytes of the groups of a step of {found.tokens:,.0f} tokens, MB:"
    for name, size in found.hub_links().items():
        yield f"  {name:<32}{_cell(size / 1e6)}"
    yield "time of a step, s, on GPUs of the speeds assumed below, not on this machine:"
    for name, seconds, what in found.stages():
        yield f"  {name:<32}{_cell(seconds)}   {what}"
    what = "training, or what takes longer" if run.max_staleness else "one stage after another"
    yield f"  {'a step':<32}{_cell(found.step_s)}   {what}; times {run.steps}"
    machines = f"{count_of(found.workers, 'worker')}, {count_of(found.validators, 'validator')}"
    others = f"without a GPU {count_of(found.relays, 'relay')}, 1 hub"
    yield f"machines needed: {found.processes} to train, {machines}; {others}"
    yield from _remedy_lines(found)
    if beside := found.crowded:
        took = ", ".join(f"{role} {found.device_bytes(role) / GIB:,.1f}" for role in beside)
        why = f"`shoal run` starts a {' and a '.join(beside)} on the trainer's first GPU, which has no room for them"
        ways = [f"{role}.memory_share, or {role}.count=0 and start others elsewhere" for role in beside]
        yield f"  {why} (GiB: trainer {found.trainer.total / GIB:,.1f}, {took}): set {'; '.join(ways)}"
    for role, needed, else_ in (
        ("validator", found.validators, "start others (shoal admin add-validator), or every step waits for audits"),
        ("relay", found.relays, "start others (shoal relay)"),
    ):
        started = getattr(found.recipe, role).count
        if needed > started and found.kind == "cuda":  # the speeds of GPUs say nothing of a CPU's trainer
            yield f"  the recipe starts {started} of the {needed} {role}s: raise {role}.count, or {else_}"
    if gpu_hour_price is not None:
        yield f"money: {found.cost(gpu_hour_price):,.0f}, at {gpu_hour_price:g} for a GPU and hour"
    yield "settings that depend on the size:"
    for section in ("hub", "validator", "trainer"):
        settings = getattr(found.recipe, section)
        derived = open_settings(settings)
        for name in (name for name in type(settings).model_fields if name in vars(found.chosen)):
            how = "derived" if name in derived else "set by the recipe"
            yield f"  {f'{section}.{name}':<32}{getattr(found.chosen, name):>10g}   {how}"
    waits = {"policy_wait_s": "for a policy, by a validator", "audit_s": "for one claim of audits"}
    for name, what in {**waits, "patience_s": "for progress, by `shoal run`"}.items():
        yield f"  {name:<32}{getattr(found.chosen, name):>10g}   derived: longest wait {what}"
    yield "assumed (change with --assume NAME=NUMBER):"
    for one in fields(found.speeds):
        yield f"  {one.name:<20}{getattr(found.speeds, one.name):>10g}   {one.metadata['source']}"


def _remedy_lines(found: Planning) -> Iterator[str]:
    """For each role that does not fit: the devices on which it does, and the settings that change that."""
    for role, count in {"validator": found.validators, "worker": found.workers}.items():
        needed, here = found.device_bytes(role), found.room(role)
        if needed <= here:
            continue
        share = here / found.memory_bytes
        least = f"{count_of(count, 'device')} of at least {ceil(10 * needed / share / GIB) / 10:,} GiB"
        ways = [f"{least}, of which it has {share:.0%}" if share < 1 else least]
        if share < 1:
            ways.append(f"a device of its own, of {ceil(10 * needed / GIB) / 10:,} GiB (--set {role}.memory_share=1)")
        for setting in ("dtype",) if role == "validator" else ("dtype", "publish_dtype"):
            section = "trainer" if setting == "publish_dtype" else role
            changed = found.changed(section, **{setting: "bfloat16"})
            if changed.device_bytes(role) < needed:
                room = "fits" if changed.device_bytes(role) <= here else "does not fit yet"
                size = changed.device_bytes(role) / GIB
                ways.append(f"--set {section}.{setting}=bfloat16: {size:,.1f} GiB, {room}")
        yield f"  a {role} does not fit into {here / GIB:,.1f} GiB. It takes one of these: {'; '.join(ways)}"


def _cell(number: float) -> str:
    return f"{'-':>10}" if not number else f"{number:>10,.2f}" if number < 1000 else f"{number:>10,.0f}"
