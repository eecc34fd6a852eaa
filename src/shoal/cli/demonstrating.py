"""What `shoal data demos` does: an environment's own right answers as demonstrations for `shoal sft`.

training tasks in their order ─► answer, in a form of one's choice ─► scored: only what is right is written
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from shoal.errors import ConfigError, EnvironmentSetupError, ScoringFailure

PLACE, RIGHT = "{answer}", 1.0 - 1e-9


def write_demos(spec: str, overrides: Sequence[str], out: Path, count: int, form: str) -> None:
    """Demonstrations of the first `count` training tasks whose answer, so written, is right."""
    from shoal.cli.evaluate import scorable
    from shoal.cli.sft import refuse_taken, write_rows
    from shoal.cli.sources import task_source

    refuse_taken(out)
    if PLACE not in form:
        raise ConfigError(f"--form {form}: say with {PLACE} where the answer goes")
    environment = scorable(task_source(spec, overrides))
    tasks, rows, left_out, example = environment.tasks("train"), [], 0, "none could be scored"
    for index in range(len(tasks)):
        try:
            task = tasks[index]
            completion = form.replace(PLACE, task.answer)
            value = environment.score(task, completion).value
        except (EnvironmentSetupError, ScoringFailure):
            value = None
        if value is not None and value >= RIGHT:
            said = [{"role": role, "content": text} for role, text in (*task.history, ("user", task.prompt))]
            rows.append({"task": task.id, "prompt": said if task.history else task.prompt, "completion": completion})
            if len(rows) == count:
                break
            continue
        left_out += 1
        if value is not None and left_out:
            example = f"for example {task.id}: {completion[:60]!r} is worth {value:g}"
    if not rows:
        raise ConfigError(
            f"none of the {len(tasks):,} tasks has an answer that, written as {form!r}, is right ({example}): give "
            "another --form"
        )
    write_rows(out, rows)
    typer.echo(f"wrote {out}: {len(rows):,} demonstrations of {environment.name}")
    if left_out:
        typer.echo(f"left out: {left_out:,} whose answer is not right so, or that cannot be scored ({example})")
