"""`shoal sft`: begin with imitation. Demonstrations are chosen by filters and trained on; RL goes on from the result.

shoal sft tiny --data demos.jsonl --out models/begun                 train, and write a Hugging Face folder
shoal sft tiny --data demos.jsonl --out chosen.jsonl --select-only   only choose
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.evaluate import SPEC_HELP, Model, Seed

Data = Annotated[
    list[Path],
    typer.Option(
        "--data",
        metavar="FILE",
        help="Demonstrations: JSON lines, Parquet, a folder of them; columns messages, prompt and completion, or text. "
        "May be repeated.",
    ),
]
Env = Annotated[
    str | None,
    typer.Option("--env", metavar="SPEC", help=f"Whose held-out tasks stay out, and who verifies. {SPEC_HELP}"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="trainer.KEY=VALUE", help="Rate, clip, memory, …, or environment.KEY; repeatable."),
]
Require = Annotated[
    list[str] | None,
    typer.Option("--require", metavar="FORM", help="Last words must have: thinking, boxed, answer, or a pattern."),
]


def sft(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The model to write; chosen rows: FILE.jsonl.")],
    env: Env = None,
    settings: Settings = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, max=10_000, help="Passes over all of them.")] = 1,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps, instead of epochs.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Demonstrations per step.")] = 32,
    batch_tokens: Annotated[int | None, typer.Option("--batch-tokens", min=1, help="Tokens per step, instead.")] = None,
    decay: Annotated[str, typer.Option("--decay", help="Of the rate, to its end: none, linear or cosine.")] = "cosine",
    validation: Annotated[
        int | None,
        typer.Option("--validation", min=0, help="Demonstrations not trained on.  [default: a twentieth, at most 256]"),
    ] = None,
    seed: Seed = 0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Ask by the model's chat template.  [default: if it has one]"),
    ] = None,
    min_tokens: Annotated[int, typer.Option("--min-tokens", min=1, help="Leave out what is shorter.")] = 1,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=2, help="Leave out what is longer.  [default: the model's context]"),
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut what is longer off instead.")] = False,
    require: Require = None,
    keep_duplicates: Annotated[bool, typer.Option("--keep-duplicates", help="Train on equal ones, too.")] = False,
    near_duplicates: Annotated[
        float | None,
        typer.Option("--near-duplicates", min=0.5, max=1, metavar="SHARE", help="Leave out what is so like another."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Only what the environment of --env rewards.")] = False,
    min_reward: Annotated[float, typer.Option("--min-reward", help="Least reward, with --verify.")] = 1.0,
    rank: Annotated[
        Path | None, typer.Option("--rank", metavar="FOLDER", help="A sequence classifier that ranks them.")
    ] = None,
    best: Annotated[float | None, typer.Option("--best", min=1e-6, max=1, help="Share to keep, by rank.")] = None,
    best_per_prompt: Annotated[
        int | None, typer.Option("--best-per-prompt", min=1, help="How many of each prompt to keep, by rank.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.parquet", help="What became of every row.")
    ] = None,
    select_only: Annotated[
        bool, typer.Option("--select-only", help="Write the chosen rows to --out FILE.jsonl; train nothing.")
    ] = False,
) -> None:
    """Train a model on demonstrations, chosen by filters, before RL. The same command goes on."""
    from shoal.runtime.stop import stop_on_signals

    stop = stop_on_signals()  # what follows takes a while to load
    from shoal.cli.imitation import Choice, SftRequest
    from shoal.cli.warm_start import run_sft
    from shoal.trainer.demonstrations.settings import Course, named_decay

    choice = Choice(
        min_tokens=min_tokens, max_tokens=max_tokens, truncate=truncate, require=tuple(require or ()),
        duplicates=not keep_duplicates, near_duplicates=near_duplicates, verify=verify, min_reward=min_reward,
        rank=rank, best=best, best_per_prompt=best_per_prompt, chat=chat,
    )  # fmt: skip
    course = Course(epochs, steps, batch, batch_tokens, seed, named_decay(decay), validation)
    request = SftRequest(model, tuple(data), out, env, tuple(settings or ()), choice, course, report, select_only)
    raise typer.Exit(run_sft(request, stop))
