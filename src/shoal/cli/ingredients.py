"""Before anything is made or started: can the model, the environment and the engines of a recipe be had, and fit they?

What is wrong with them is said here in one line, not in six log files a minute later. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shoal.cli.recipe import Recipe
from shoal.engines import ENGINES, check_engine
from shoal.environments import Environment, Task, build
from shoal.errors import ConfigError, EnvironmentSetupError, ModelError, ScoringFailure
from shoal.hub.limits import Addresses
from shoal.models import TextTokenizer, model_folder, read_files
from shoal.models.folder import read_config
from shoal.models.weights import check_weights
from shoal.validator.profiles import load_profiles

PROMPTS_TRIED = 1000
GPU_FILES = ("nvidiactl", "nvidia0", "dxg", "kfd")
"""What a driver leaves in /dev: NVIDIA's, that of a Windows host, AMD's."""


def check_ingredients(recipe: Recipe) -> None:
    """Raise a `UserError` for the first thing that would end the run."""
    check_engines(recipe)
    Addresses(recipe.hub.trusted_proxies)
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


def check_engines(recipe: Recipe) -> None:
    """Names, number formats and profiles: a worker that nobody can judge, or a validator that cannot judge its workers,
    would be found out when the first unit is asked for, or never."""
    for section, settings in (("worker", recipe.worker), ("validator", recipe.validator)):
        if settings.engine not in ENGINES:
            known = ", ".join(sorted(ENGINES))
            raise ConfigError(f"[{section}] engine = {settings.engine!r}: there is no such engine; there are {known}")
        try:
            check_engine(settings.engine, settings.device, settings.dtype)
        except ConfigError as error:
            raise ConfigError(f"[{section}] {error}") from error
    profiles = load_profiles(recipe.validator.profiles)
    kinds = possible_kinds(recipe.worker.engine, recipe.worker.device, recipe.worker.dtype)
    if recipe.worker.count == 0:
        return
    if not kinds & profiles.keys():
        raise ConfigError(
            f"[worker] computes as {' or '.join(sorted(kinds))}, and this run has no profile for that, so nobody could "
            f"check it: name the profile in validator.profiles, or compute as one of {', '.join(sorted(profiles))}"
        )
    fitting = {dtype for kind in kinds & profiles.keys() for dtype in profiles[kind].validators}
    if recipe.validator.dtype not in fitting:
        raise ConfigError(
            f'[validator] dtype = "{recipe.validator.dtype}" is too coarse to judge workers that compute as '
            f"{' or '.join(sorted(kinds & profiles.keys()))}: set it to {' or '.join(sorted(fitting))}"
        )


def possible_kinds(engine: str, device: str, dtype: str) -> set[str]:
    """What a worker may turn out to be, before torch has said whether there is a GPU.

    >>> sorted(possible_kinds("torch", "auto", "float32"))
    ['torch/cpu/float32', 'torch/cuda/float32']
    """
    devices = ["cpu"] if engine == "scripted" else ["cpu", "cuda"] if device == "auto" else [device]
    return {f"{ENGINES[engine].profile}/{each}/{dtype}" for each in devices}


def check_machine(recipe: Recipe, devices: Path = Path("/dev")) -> None:
    """What is wrong with starting it all here: a GPU that is asked for and cannot be there, seen without torch."""
    asked = {
        "trainer.device": recipe.trainer.device,
        "validator.device": recipe.validator.device,
        "worker.device": recipe.worker.device if recipe.worker.count else "auto",
    }
    wanted = [name for name, device in asked.items() if device == "cuda"]
    if wanted and not any((devices / name).exists() for name in GPU_FILES):
        raise ConfigError(
            f'{" and ".join(wanted)} is "cuda", but this machine has no GPU, or no driver for it: set it to "cpu" or '
            '"auto" (--set), or run that role where there is one'
        )


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
