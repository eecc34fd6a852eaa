"""Before anything is started: are the model, the environment and the engines of a recipe here, and do they fit?

Mistakes are reported here in one line, not later in six log files. Needs torch only to try a loss of the owner's.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from shoal.engines import ENGINES, check_engine
from shoal.engines.asking import Asking
from shoal.environments import Environment, Task, build, columns_of, prompt_settings_of, require_scoring, runs_own_code
from shoal.environments.dataset import DatasetEnvironment
from shoal.environments.graders import OPENING
from shoal.environments.mix import MixedEnvironment, part_of
from shoal.environments.protocol import SPLITS
from shoal.environments.settings import inner_of
from shoal.errors import ConfigError, EnvironmentSetupError, ModelError, ScoringFailure, UnusableTask
from shoal.hub.http.limits import Addresses
from shoal.hub.storage import check_places
from shoal.models import TextTokenizer, model_folder, read_config, read_files
from shoal.models.folder import adapter_of, check_targets, check_weights, is_known, is_whole
from shoal.rewards.chat import check_address
from shoal.run.doctor import GPU_FILES
from shoal.run.estimate import announced_size, run_size
from shoal.run.recipe import Recipe
from shoal.runtime import SystemClock, count_of, hf
from shoal.runtime.sizing import Speeds, validators_needed
from shoal.trainer.settings import OWN_CODE
from shoal.validator.settings import measurable_kinds, profile_keys

log = logging.getLogger(__name__)
PROMPTS_TRIED, KINDS_TRIED = 1000, 16
SECONDS_TRIED, TRIAL_S = 4.0, 30.0
MOST_UNUSABLE = 0.5  # of a data set's first rows
TRIAL_COMPLETIONS = ("", "```python\npass\n```", "\\boxed{1}")
Say = Callable[[str], None]


def check_ingredients(recipe: Recipe, say: Say | None = None) -> Environment:
    """Raise a `UserError` for the first thing that would end the run; returns the environment. In a dry run `say` gets
    the checked tasks, and a missing model or sandbox stops no other check."""
    check_engines(recipe)
    Addresses(recipe.hub.trusted_proxies)
    check_places(recipe.hub.database, recipe.hub.storage, recipe.hub.storage_endpoint)
    files = None if say is not None and not is_known(recipe.model.path) else _check_model(recipe, say is None)
    length, most = recipe.environment.length, recipe.run.max_new_tokens
    if length is not None and max(length.targets) > most:
        why = f"environment.length.targets has {max(length.targets)}, but run.max_new_tokens is {most}"
        raise ConfigError(f"{why}: no completion can be that long; raise the one or lower the other")
    for judge in recipe.environment.judges:
        if judge.kind == "openai":
            check_address(judge)
        if judge.path is not None and not hf.model_folder(judge.path).is_dir():
            raise ConfigError(f"environment.judges: the path of {judge.label} is no folder: {judge.path}")
    environment = build(recipe.environment)
    asking = None if files is None else Asking(files, environment, most)
    if asking is not None and asking.encoder.opens_thinking and not prompt_settings_of(environment).thinking:
        log.warning(
            "the model's chat template begins every answer with %s, and environment.prompt.thinking does not say so: a "
            "completion that never closes it is graded as an answer. Set it to %r to make such completions worth 0",
            OPENING, f"{OPENING}\n",
        )  # fmt: skip
    tasks = _check_tasks(environment, asking, say or log.debug)
    if say is not None and asking is not None and tasks:
        say(asking.rendered(tasks[0]))
    try:
        require_scoring(environment)
    except EnvironmentSetupError as error:
        if say is None:
            raise
        say(f"no task was scored, and a run is refused here: {error}")
    else:
        from shoal.rewards import DirectScorer, Job, ScoringPatience, ScoringPool

        # Scoring that fails here would fail on every group. A user's own reward runs in a process: it may hang.
        settings, is_own = recipe.environment, runs_own_code(recipe.environment)
        patience = ScoringPatience(start_s=TRIAL_S, job_s=TRIAL_S, all_s=4 * TRIAL_S)
        scorer = ScoringPool(settings, environment, patience=patience) if is_own else DirectScorer(environment)
        with closing(scorer):
            jobs = [
                Job(task.id, completion, tuple(completion.encode()))
                for task in tasks
                for completion in TRIAL_COMPLETIONS
            ]
            for result in scorer.scores(jobs):
                if isinstance(result, ScoringFailure):
                    raise EnvironmentSetupError(f"the reward function does not work: {result}")
    advantage, loss = recipe.trainer.advantage, recipe.trainer.loss
    if advantage not in OWN_CODE["advantage"][1] or loss not in OWN_CODE["loss"][1]:
        from shoal.algorithms.registry import try_own

        try_own(advantage, loss, columns_of(environment, tasks[0].id) if tasks else {})
    return environment


def _check_model(recipe: Recipe, downloads: bool) -> dict[str, bytes]:
    """The files that describe the model; its weights are checked if they are here, or to be downloaded. A token without
    an embedding would end a process in the middle of a step."""
    folder = model_folder(recipe.model.path, weights=downloads)
    files = read_files(folder)
    tokenizer, embedded = TextTokenizer(files), read_config(files).get("vocab_size")
    if is_whole(recipe.model.path):
        check_weights(folder)
        if recipe.trainer.lora is not None:
            check_targets(folder, recipe.trainer.lora.targets)
        if (adapter := adapter_of(recipe.model.path)) is not None:
            adapter.layers()
            if (lora := recipe.trainer.lora) is not None:
                adapter.require(lora.rank, lora.alpha, lora.targets, recipe.trainer.objective.kl)
    if not isinstance(embedded, int):
        return files
    if tokenizer.vocabulary_size > embedded:
        why = f"the tokenizer in {folder} knows {tokenizer.vocabulary_size} tokens, but the model has embeddings for"
        remedy = "use the tokenizer that belongs to the model, or enlarge the model (resize_token_embeddings)"
        raise ModelError(f"{why} {embedded}: {remedy}")
    if (last := max(tokenizer.eos_token_ids)) >= embedded:
        why = f"an end-of-sequence token of the model in {folder} is {last}, beyond the {embedded}"
        remedy = "correct eos_token_id in generation_config.json or config.json"
        raise ModelError(f"{why} tokens that it has embeddings for: {remedy}")
    return files


def check_engines(recipe: Recipe) -> None:
    worker, validator, dtype = recipe.worker, recipe.validator, recipe.trainer.publish_dtype
    for section, engine, settings in (
        ("worker", worker.engine, worker), ("validator", worker.checked_with, validator),
    ):  # fmt: skip
        try:
            check_engine(engine, settings.device, settings.dtype)
        except ConfigError as error:
            raise ConfigError(f"[{section}] {error}") from error
    measured = worker.checked_with == "torch"
    taken = {*profile_keys(validator), *(measurable_kinds(validator, dtype) if measured else ())}
    kinds = possible_kinds(worker.engine, worker.device, worker.dtype)
    if worker.count == 0 or kinds & taken:
        return
    coarse = "" if dtype == "bfloat16" else "; bfloat16 needs trainer.publish_dtype = 'bfloat16'"
    why = f"[worker] computes as {' or '.join(sorted(kinds))}, and no validator of this recipe can judge that"
    remedy = f"compute as one of {', '.join(sorted(taken))} (worker.device, worker.dtype){coarse}"
    raise ConfigError(f"{why}: {remedy}")


def possible_kinds(engine: str, device: str, dtype: str) -> set[str]:
    """Without knowing whether there is a GPU.

    >>> sorted(possible_kinds("torch", "auto", "float32"))
    ['torch/cpu/float32', 'torch/cuda/float32']
    """
    devices = ["cpu"] if engine == "scripted" else ["cpu", "cuda"] if device == "auto" else [device]
    formats = ENGINES[engine].dtypes if dtype == "auto" else (dtype,)
    return {f"{ENGINES[engine].profile}/{each}/{one}" for each in devices for one in formats}


def check_machine(recipe: Recipe, devices: Path = Path("/dev")) -> None:
    from shoal.trainer.record import require_trackers

    require_trackers(recipe.trainer.tracking)
    asked: dict[str, str] = {"trainer": recipe.trainer.device}
    asked |= {"validator": recipe.validator.device} if recipe.validator.count else {}
    asked |= {"worker": recipe.worker.device} if recipe.worker.count else {}
    wanted = [f"{name}.device" for name, device in asked.items() if device == "cuda"]
    if wanted and not any((devices / name).exists() for name in GPU_FILES):
        why = f'{" and ".join(wanted)} is "cuda", but this machine has no GPU, or no driver for it'
        raise ConfigError(f'{why}: set it to "cpu" or "auto" (--set), or run that role where there is one')


def _check_tasks(environment: Environment, asking: Asking | None, say: Say = log.debug) -> list[Task]:
    """Check some tasks of each split (without a model: read them); returns one of each kind. A row of data that cannot
    be asked is skipped when it is drawn, so only many of them are a mistake; in a generating environment one is."""
    trials, clock, inner = dict[str, Task](), SystemClock(), inner_of(environment)
    for data in [part.environment for part in inner.parts] if isinstance(inner, MixedEnvironment) else [inner]:
        if isinstance(data, DatasetEnvironment):
            say(data.description)
    for split in SPLITS:
        tasks, tried, ends_s = environment.tasks(split), 0, clock.monotonic_s() + SECONDS_TRIED
        problems, kinds = list[UnusableTask](), Counter[str]()
        for index in range(min(PROMPTS_TRIED, len(tasks))):
            if tried and clock.monotonic_s() > ends_s:  # some generators take seconds for each task
                break
            tried += 1
            try:
                task = tasks[index]
                if asking is not None:
                    asking.check(task)
            except UnusableTask as error:
                problems.append(error)
            else:
                kind = f"{part_of(environment, task.id)}/{task.kind}".strip("/")
                kinds[kind] += 1
                trials.setdefault(kind, task)
        how = "read, without a tokenizer" if asking is None else "read, with the model's tokenizer"
        of_kinds = [f"{count:,} of {kind or environment.name}" for kind, count in kinds.most_common()]
        of_kinds += [f"{len(problems):,} that cannot be asked"] if problems else []
        looked = f", {tried:,} {how}: {', '.join(of_kinds)}" if tried else ""
        say(f"{split.replace('_', ' ')}: {count_of(len(tasks), 'task')}{looked}")
        if problems and (not getattr(environment, "data_digest", "") or len(problems) > tried * MOST_UNUSABLE):
            raise problems[0]
        if problems:
            among = f"the first {tried}" if tried < len(tasks) else f"all {tried}"
            log.warning("%d of %s %s tasks cannot be asked: %s", len(problems), among, split, problems[0])
    return list(trials.values())[:KINDS_TRIED]


def advice(recipe: Recipe, environment: Environment, solo: bool = False) -> Iterator[str]:
    if not is_whole(recipe.model.path):
        yield f"the weights of {recipe.model.path} are not downloaded yet, and were not checked; a run downloads them"
    if not is_known(recipe.model.path):
        unchecked = "weights, tokenizer, chat template, and whether prompts fit the model's context"
        yield f"there is no model folder {recipe.model.path}: what needs it was not checked ({unchecked}); all else was"
    tasks, wanted = len(environment.tasks("held_out")), recipe.trainer.evaluate_tasks
    if recipe.trainer.evaluate_every and not tasks:
        yield "no task is held out, so there will be no held-out score: give more tasks, or name the split of some"
    elif recipe.trainer.evaluate_every and tasks < wanted:
        yield f"held out: only {count_of(tasks, 'task')}; trainer.evaluate_tasks is {wanted}: scores will be rough"
    if solo:
        return
    tokens = (run := recipe.run).groups_per_step * run.group_size * run.max_new_tokens * Speeds().length_share
    needed = validators_needed(run_size(recipe, announced_size(recipe)), tokens, run.steps, recipe.trainer.processes)
    if not recipe.validator.count:
        why = "validator.count is 0: no group is accepted until a validator runs elsewhere"
        yield f"{why} (`shoal admin add-validator` certifies one, `shoal plan` says how many keep up)"
    elif needed > recipe.validator.count:
        why = f"validator.count is {recipe.validator.count}, and about {needed} validators keep up with the trainer"
        remedy = "raise it, start others (shoal validator), or every step waits for audits"
        processes = f"(trainer.processes is {recipe.trainer.processes})"
        yield f"{why} {processes}: {remedy} (`shoal plan` says how this is computed)"
