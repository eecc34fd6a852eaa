"""`shoal plan`: how much memory a recipe's training takes on each device, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shoal.cli.recipe import Recipe
    from shoal.trainer.memory import Plan, Shape

GIB = 2**30
ERROR = 0.1  # of the activations; see benchmarks/results/memory_plan.md


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe (TOML).")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, max=1024, help="Trainer processes.  [default: trainer.processes]")
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option("--memory", min=0.001, help="GiB of each device.  [default: what is here]")
    ] = None,
) -> None:
    """Print the memory that training takes on each device, before anything is loaded; exit code 3: does not fit."""
    from shoal.cli.recipe import load_recipe
    from shoal.models.folder import model_folder, read_files

    resolved = load_recipe(recipe, tuple(overrides or ()))
    from shoal.trainer.memory import available, shape_of  # torch: only once the recipe is known to be sound

    settings, processes = resolved.trainer, devices or resolved.trainer.processes
    shape = shape_of(read_files(model_folder(resolved.model.path)), settings)
    kind, here = available(settings, processes)
    if memory_gb is not None:
        kind, here = ("cpu" if settings.device == "cpu" else "cuda"), int(memory_gb * GIB)
    lines = list(plan_lines(resolved, shape, processes, kind, here))
    typer.echo("\n".join(line for line, _ in lines))
    raise typer.Exit(0 if all(fits for _, fits in lines) else 3)


def plan_lines(
    recipe: Recipe, shape: Shape, processes: int, kind: str, memory_bytes: int
) -> Iterator[tuple[str, bool]]:
    """What is printed, line by line, each with whether it fits."""
    from shoal.trainer.memory import alternatives, plan

    settings, longest = recipe.trainer, recipe.run.max_new_tokens
    planned = plan(shape, settings, processes, longest, kind)
    fits = planned.total <= memory_bytes
    trained = "" if shape.trained == shape.weights else f", {shape.trained / 1e6:,.1f} M of them trained"
    yield f"{shape.kind}, {shape.weights / 1e6:,.1f} M weights{trained}, {shape.layers} layers", fits
    yield (
        f"training in {settings.memory.precision} by {processes} process{'es' if processes > 1 else ''} on {kind}",
        fits,
    )
    yield "on each device, GiB:", fits
    tokens = f"{max(settings.micro_batch_tokens, longest):,} tokens" + (
        ", recomputed" if settings.memory.recompute else ""
    )
    for name, size in planned.device.items():
        yield f"  {name:<26}{size / GIB:9.2f}" + (f"   {tokens}" if name == "activations" else ""), fits
    yield f"  {'in all':<26}{planned.total / GIB:9.2f}   of {memory_bytes / GIB:.2f}: {_verdict(planned, fits)}", fits
    if planned.host:
        yield "on the host of the first process, GiB:", fits
    for name, size in planned.host.items():
        yield f"  {name:<26}{size / GIB:9.2f}", fits
    if fits:
        return
    yield "each of these alone would change that to, GiB:", fits
    for words, other in alternatives(shape, settings, processes, longest, kind).items():
        room = "fits" if other.total <= memory_bytes else "does not fit yet"
        yield f"  --set {words:<40}{other.total / GIB:9.2f}   {room}", fits
    if settings.lora is None:
        yield "  a [trainer.lora] table: gradients, masters and moments of adapters only", fits


def _verdict(planned: Plan, fits: bool) -> str:
    if not fits:
        return "does not fit"
    return f"fits (activations are an estimate, ± {ERROR * planned.device['activations'] / GIB:.2f})"
