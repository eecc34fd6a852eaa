"""`shoal data`: look at a data set before training on it; write right answers of its tasks as demonstrations."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Typer, echo

from shoal.cli import options
from shoal.cli.help import CONTEXT, Command, CommandGroup
from shoal.errors import ConfigError, EnvironmentSetupError, ScoringFailure, UnusableTask, UserError
from shoal.runtime.extras import require
from shoal.runtime.text import count_of

if TYPE_CHECKING:
    from shoal.environments import Environment, EnvironmentSettings
    from shoal.environments.dataset import DatasetEnvironment
    from shoal.run.sources import CommandTasks

PLACE, RIGHT = "{answer}", 1.0 - 1e-9

data = Typer(
    help="Check a data set before training on it; write right answers of tasks as demonstrations.",
    name="data", cls=CommandGroup, epilog="Schemas, options and a first try: docs/guides/data.md.",
    context_settings=CONTEXT,
)  # fmt: skip
WHERE = "A data file or folder, ORG/NAME[:PART], FORMAT:FILE, a recipe, or a run's folder."
SET = "Change an option of the data set, for example format=aime. Repeatable."
ORDER = "Show the tasks of this many units of a run instead: unit, row and id."
RUN_SEED = "With --order: the run's seed. (default: the recipe's, or 0)"
FORM = "How to write the answer, for example <answer>{answer}</answer>."
SPEC = "The tasks: an environment's name, a recipe, or a data file."
Settings = Annotated[list[str] | None, options.value("--set", "OPTION=VALUE", SET)]
SHOWN = 20  # reasons, and rows by their number


@data.command(cls=Command, epilog="Example: shoal data check problems.jsonl --set format=aime")
def check(
    where: Annotated[str, Argument(metavar="DATA", help=WHERE)],
    settings: Settings = None,
    units: Annotated[int | None, options.whole("--order", ORDER, 1, 10_000_000)] = None,
    seed: Annotated[int | None, options.whole("--seed", RUN_SEED)] = None,
    start: Annotated[int, options.whole("--from", "With --order: the first unit to show.", metavar="UNIT")] = 0,
) -> None:
    """Read every row and answer, and list those that cannot be used; exit with 2 unless they are to be skipped. With
    --order, anyone who has the data and the seed can check which task a run's lease is about."""
    require("data", "shoal data check")
    if units is not None:
        return _show_order(where, settings or (), seed, range(start, start + units))
    if seed is not None or start:
        raise UserError("--seed and --from go with --order N, which shows the tasks of N units")
    source, opening = source_at(where, settings or ()), logging.getLogger("shoal.environments.rows")
    before = opening.level
    opening.setLevel(logging.ERROR)  # opening a data set warns of bad rows; this command lists all of them at the end
    try:
        found = list(_data_sets(source.settings))
    finally:
        opening.setLevel(before)
    if not found:
        named = "a mixture" if source.settings.mix else source.settings.file or source.settings.name
        why = f"{where} trains on no data set: its environment is {named}"
        raise UserError(f"{why}; give a data file or FORMAT:FILE")
    raise Exit(max(_check(data, bad_rows) for data, bad_rows in found))


def _show_order(where: str, settings: Sequence[str], seed: int | None, units: range) -> None:
    from shoal.environments import build, identity_of

    source = source_at(where, settings)
    environment = build(source.settings)
    if source.settings.retire_after is not None:
        echo("difficulty pools are on: a run may take a later candidate of a unit than the one shown", err=True)
    tasks = len(environment.tasks("train"))
    chosen = seed if seed is not None else source.recipe.run.seed if source.recipe else 0
    identity = identity_of(environment)
    data = f", data digest {identity.data_digest}" if identity.data_digest else ""
    echo(f"# {tasks} tasks, seed {chosen}, environment digest {identity.digest}{data}\nunit\trow\tid")
    for unit in units:
        echo(f"{unit}\t{_drawn(environment, chosen, unit, tasks)}")


@data.command(cls=Command, epilog="Example: shoal data demos sort --count 1000 --out demos.jsonl")
def demos(
    spec: Annotated[str, Argument(metavar="SPEC", help=SPEC)],
    out: Annotated[Path, options.value("--out", "FILE.jsonl", "The file of demonstrations to write.")],
    count: Annotated[int, options.whole("--count", "How many demonstrations to write.", 1, 10_000_000)] = 1000,
    form: Annotated[str, options.value("--form", "TEXT", FORM)] = "{answer}",
    settings: options.EnvironmentSettings = None,
) -> None:
    """Write right answers of training tasks as demonstrations for `shoal sft`. Each is scored first."""
    require("data", "shoal data demos")
    from shoal.environments.protocol import refuse_tokens
    from shoal.run.sources import scorable, task_source
    from shoal.runtime.files import ensure_folder, write_atomically

    if out.suffix != ".jsonl" or out.exists():
        raise ConfigError(f"--out {out}: give a file that is not there yet, and whose name ends in .jsonl")
    if PLACE not in form:
        raise ConfigError(f"--form {form}: say with {PLACE} where the answer goes")
    environment = scorable(task_source(spec, settings or ()))
    refuse_tokens(environment, "shoal data demos")
    tasks, rows, tried, example = environment.tasks("train"), list[bytes](), 0, "none could be scored"
    while tried < len(tasks) and len(rows) < count:
        tried += 1
        try:
            task = tasks[tried - 1]
            completion = form.replace(PLACE, task.answer)
            value = environment.score(task, completion).value
        except (EnvironmentSetupError, ScoringFailure):
            continue
        if value < RIGHT:
            example = f"for example {task.id}: {completion[:60]!r} is worth {value:g}"
            continue
        said = [{"role": role, "content": text} for role, text in (*task.history, ("user", task.prompt))]
        row = {"task": task.id, "prompt": said if task.history else task.prompt, "completion": completion}
        rows.append(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    if not rows:
        why = f"none of the {len(tasks):,} tasks has an answer that, written as {form!r}, is right ({example})"
        raise ConfigError(f"{why}: give another --form")
    ensure_folder(out.absolute().parent)
    write_atomically(out, b"".join(rows))
    echo(f"wrote {out}: {len(rows):,} demonstrations of {environment.name}")
    if left_out := tried - len(rows):
        echo(f"left out: {left_out:,} whose answer is not right so, or that cannot be scored ({example})")


def source_at(spec: str, overrides: Sequence[str]) -> CommandTasks:
    """An override is of an option of the data set (`keep_solve_rate=[0.1, 0.5]`), or has its whole name."""
    from shoal.run.sources import task_source

    for override in overrides:
        if "=" not in override:
            raise UserError(f"expected OPTION=VALUE, not {override!r}; for example: --set format=aime")
    given = [override.strip() for override in overrides]
    return task_source(spec, [one if one.startswith("environment.") else f"environment.options.{one}" for one in given])


def _data_sets(settings: EnvironmentSettings) -> Iterator[tuple[DatasetEnvironment, str]]:
    """The data set of a recipe, or those of its mixture, opened whatever its rows are; with the `bad_rows` it says."""
    from shoal.environments.dataset import DatasetEnvironment
    from shoal.environments.registry import build_ingredient

    for part in settings.mix or (settings,):
        if part.name == "dataset" and part.file is None:
            if (bad_rows := str(part.options.get("bad_rows", ""))) not in ("", "skip", "refuse"):
                raise ConfigError(f"environment.options.bad_rows is {bad_rows!r}: it is '', 'skip' or 'refuse'")
            skipping = part.model_copy(update={"options": {**part.options, "bad_rows": "skip"}})
            environment = build_ingredient(skipping)
            assert isinstance(environment, DatasetEnvironment)
            yield environment, bad_rows


def _check(data: DatasetEnvironment, bad_rows: str) -> int:
    from rich.console import Console

    from shoal.cli.printing import counted

    with counted("checking answers", Console(stderr=True), unit="rows") as report:
        report(0, 0)  # the clock starts here; the number of rows is known after the first batch
        findings = data.check(report)
    echo("\n  ".join([data.description, *data.kinds()]))
    for found in findings:
        first = sorted(found.problems.first)[:SHOWN]
        for reason, count in found.problems.reasons.most_common(SHOWN):
            rows = [f"row {row} ({found.where(row)})" for row, said in first if said == reason]
            rows += [f"{count - len(rows):,} more"] if count > len(rows) else []
            echo(f"{count_of(count, 'row')}: {reason}: {', '.join(rows)}")
    bad = sum(found.problems.count for found in findings)
    if not bad:
        echo("every row can be used")
        return 0
    kinds = "; ".join(unusable for _, unusable in data.useless_kinds())  # those without a good row
    them = "it" if bad == 1 else "them"
    outcome, without = f"a run leaves {them} out", f"; to run without {them}: --set environment.options.bad_rows=skip"
    if bad_rows == "refuse":
        outcome = f'a run refuses this data, as bad_rows = "refuse" says{without}'
    elif kinds and not bad_rows:
        outcome = f"a run refuses this data, because no row can be used of {kinds}{without}"
    echo(f"{count_of(bad, 'row')} cannot be used: {outcome}", err=True)
    return 0 if bad_rows == "skip" else UserError.exit_code


def _drawn(environment: Environment, seed: int, unit: int, count: int) -> str:
    from shoal.environments.dataset import DatasetEnvironment
    from shoal.environments.settings import inner_of
    from shoal.hub.state.draws import candidates

    inner, tasks = inner_of(environment), environment.tasks("train")
    for position in candidates(count, seed, unit):
        try:
            task = tasks[position]
        except UnusableTask:
            continue
        row = inner.row_at("train", position) if isinstance(inner, DatasetEnvironment) else position
        return f"{row}\t{task.id}"
    raise EnvironmentSetupError(f"unit {unit} has no usable candidate task: run shoal data check")
