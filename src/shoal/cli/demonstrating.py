"""What `shoal data demos` does: an environment's own right answers as demonstrations for `shoal sft`.

training tasks in their order ─► answer, in a form of one's choice ─► scored: only what is right is written
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.errors import ConfigError, EnvironmentSetupError, ScoringFailure

if TYPE_CHECKING:
    from shoal.environments import Environment, Task

PLACE = "{answer}"
RIGHT = 1.0 - 1e-9


@dataclass
class Written:
    """What became of the tasks that were looked at."""

    looked: int = 0
    unusable: int = 0
    wrong: int = 0
    example: str = ""


def write_demos(spec: str, overrides: Sequence[str], out: Path, count: int, form: str) -> None:
    """Demonstrations of the first `count` training tasks whose answer, so written, is right."""
    from shoal.cli.evaluate import scorable
    from shoal.cli.sources import task_source
    from shoal.runtime.files import ensure_folder, write_atomically

    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: demonstrations are JSON lines; let its name end in .jsonl")
    if out.exists():
        raise ConfigError(f"{out} is there already: choose another --out, or move it away")
    if PLACE not in form:
        raise ConfigError(f"--form {form}: say with {PLACE} where the answer goes")
    environment = scorable(task_source(spec, overrides))
    written = Written()
    rows = list(_rows(environment, count, form, written))
    if not rows:
        raise ConfigError(
            f"none of the {written.looked:,} tasks has an answer that, written as {form!r}, is right "
            f"({written.example}): give another --form"
        )
    ensure_folder(out.absolute().parent)
    write_atomically(out, b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    typer.echo(f"wrote {out}: {len(rows):,} demonstrations of {environment.name}")
    if written.wrong or written.unusable:
        typer.echo(
            f"left out: {written.wrong:,} whose answer is not right so ({written.example or 'none'}), "
            f"{written.unusable:,} that cannot be used"
        )


def _rows(environment: Environment, count: int, form: str, written: Written) -> Iterator[dict[str, Any]]:
    tasks, found = environment.tasks("train"), 0
    while found < count and written.looked < len(tasks):
        index, written.looked = written.looked, written.looked + 1
        try:
            task = tasks[index]
            completion = form.replace(PLACE, task.answer)
            value = environment.score(task, completion).value
        except (EnvironmentSetupError, ScoringFailure):
            written.unusable += 1
            continue
        if value < RIGHT:
            written.wrong += 1
            written.example = written.example or f"{task.id}: {completion[:60]!r} is worth {value:g}"
            continue
        found += 1
        yield {"task": task.id, "prompt": _prompt(task), "completion": completion}


def _prompt(task: Task) -> str | list[dict[str, str]]:
    """The prompt, or the conversation that it ends."""
    if not task.history:
        return task.prompt
    return [{"role": role, "content": text} for role, text in (*task.history, ("user", task.prompt))]
