"""Before anything is made or started: can the model, the environment and the engines of a recipe be had, and fit they?

What is wrong with them is said here in one line, not in six log files a minute later. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoal.cli.recipe import Recipe
from shoal.engines import ENGINES
from shoal.environments import Environment, Task, build
from shoal.errors import ConfigError, EnvironmentSetupError, ModelError, ScoringFailure
from shoal.models import TextTokenizer, model_folder, read_files
from shoal.models.folder import read_config
from shoal.models.weights import check_weights

PROMPTS_TRIED = 1000


def check_ingredients(recipe: Recipe) -> None:
    """Raise a `UserError` for the first thing that would end the run."""
    for section, engine in (("worker", recipe.worker.engine), ("validator", recipe.validator.engine)):
        if engine not in ENGINES:
            known = ", ".join(sorted(ENGINES))
            raise ConfigError(f"[{section}] engine = {engine!r}: there is no such engine; there are {known}")
    folder = model_folder(recipe.model.path)
    files = read_files(folder)
    tokenizer = TextTokenizer(files)
    check_weights(folder)
    _check_vocabulary(folder, tokenizer, read_config(files).get("vocab_size"))
    environment = build(recipe.environment)
    positions = read_config(files).get("max_position_embeddings")
    room = positions - recipe.run.max_new_tokens if isinstance(positions, int) else None
    for task in _some_tasks(environment):
        _check_prompt(environment, task, tokenizer, room)
    _try_score(environment)


def _check_vocabulary(folder: Path, tokenizer: TextTokenizer, embedded: object) -> None:
    """A token without an embedding would end a process in the middle of a step, with an index error."""
    known = tokenizer.vocabulary_size
    if isinstance(embedded, int) and known > embedded:
        raise ModelError(
            f"the tokenizer in {folder} knows {known} tokens, but the model has embeddings for {embedded}: use the "
            "tokenizer that belongs to the model, or enlarge the model (resize_token_embeddings) and save it again"
        )
    if isinstance(embedded, int) and tokenizer.eos_token_id >= embedded:
        raise ModelError(
            f"the end-of-sequence token of the model in {folder} is {tokenizer.eos_token_id}, beyond the {embedded} "
            "tokens that it has embeddings for: correct eos_token_id in generation_config.json or config.json"
        )


def _some_tasks(environment: Environment) -> Iterator[Task]:
    train, held_out = environment.tasks("train"), environment.tasks("held_out")
    for split in (train, held_out):
        yield from (split[index] for index in range(min(PROMPTS_TRIED, len(split))))


def _check_prompt(environment: Environment, task: Task, tokenizer: TextTokenizer, room: int | None) -> None:
    where = f"the prompt of task {task.id} of environment {environment.name}"
    try:
        ids = tokenizer.encode(task.prompt)
    except UnicodeEncodeError as error:
        raise EnvironmentSetupError(f"{where} is no proper text: {error}") from error
    if not ids:
        raise EnvironmentSetupError(f"{where} has no tokens: a prompt needs at least one")
    if tokenizer.unknown_token_id is not None and tokenizer.unknown_token_id in ids:
        raise EnvironmentSetupError(f"{where} has characters that the model's tokenizer does not know: {task.prompt!r}")
    if room is not None and len(ids) > room:
        raise EnvironmentSetupError(
            f"{where} has {len(ids)} tokens; with run.max_new_tokens the model has room for {max(0, room)}"
        )


def _try_score(environment: Environment) -> None:
    """Score one empty completion: a function that cannot do that would fail on every group, one log line at a time."""
    try:
        environment.score(environment.tasks("train")[0], "")
    except ScoringFailure as error:
        raise EnvironmentSetupError(f"the reward function does not work: {error}") from error
