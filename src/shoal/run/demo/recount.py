"""The exported model, scored again: by a process of its own, with nothing of shoal between it and `transformers`.

    recount ──question (argument)──► python -m shoal.run.demo.recount
       │                               load the folder ─► greedy completions ─► the environment's scores
       │ waits, up to a deadline,        │
       │ and kills it when told to stop  │
       └──◄──answer (one line of JSON)───┘   a closed stdin: whoever asked is gone, and so is this process

The trainer's score comes from its own engine and the weights in its memory, this one from the files alone. The two
agree only if what was exported is what was trained, and anybody else gets it to do the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.environments import EnvironmentSettings, Task, build
from shoal.errors import DeadlineExceeded, EnvironmentSetupError, ModelError, ScoringFailure, ShoalError
from shoal.run.recipe import Recipe
from shoal.runtime.clock import SystemClock
from shoal.runtime.files import resource_error
from shoal.runtime.stop import SUPERVISED, StopToken
from shoal.runtime.supervise import describe_exit, follow_supervisor

POLL_S = 0.05
PROMPTS_AT_ONCE = 64
ERRORS: dict[str, type[ShoalError]] = {
    error.__name__: error for error in (ModelError, EnvironmentSetupError, ScoringFailure)
}
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


@dataclass(frozen=True)
class Recount:
    """The mean score, over how many tasks."""

    score: float
    tasks: int


class Question(BaseModel):
    """All that the other process is told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    export: Path
    environment: EnvironmentSettings
    tasks: int
    max_new_tokens: int
    threads: int


class Answer(BaseModel):
    """What it says: a score, or what went wrong and the name of that error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    score: float = 0.0
    tasks: int = 0
    error: str = ""
    kind: str = ""


def recount(export: Path, recipe: Recipe, timeout_s: float, stop: StopToken) -> Recount:
    """Score the model in `export` on the recipe's held-out tasks, as many as the trainer uses."""
    question = Question(
        export=export.absolute(),
        environment=recipe.environment,
        tasks=recipe.trainer.evaluate_tasks,
        max_new_tokens=recipe.run.max_new_tokens,
        threads=recipe.trainer.threads,
    )
    answer = _ask(question, timeout_s, stop)
    if answer.error:
        raise ERRORS.get(answer.kind, ShoalError)(answer.error)
    return Recount(answer.score, answer.tasks)


# ── the process that asks ────────────────────────────────────────────────────────────────────────────────────────


def _ask(question: Question, timeout_s: float, stop: StopToken) -> Answer:
    argv = [sys.executable, "-m", "shoal.run.demo.recount", question.model_dump_json()]
    try:
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=complained,
                env={**os.environ, **QUIET, SUPERVISED: "1"},
                start_new_session=True,  # Ctrl-C in the terminal reaches this process alone
            )
            _await(process, question, timeout_s, stop)
            return _answer(process.returncode, _last_line(said), _last_line(complained))
    except OSError as error:
        raise resource_error("score the export in a process of its own, started from", Path.cwd(), error) from error


def _await(process: subprocess.Popen[bytes], question: Question, timeout_s: float, stop: StopToken) -> None:
    """Until it ends by itself. However this returns or raises, it has ended."""
    clock = SystemClock()
    end_s = clock.monotonic_s() + timeout_s
    try:
        while process.poll() is None:
            if stop.wait(POLL_S):
                raise DeadlineExceeded(f"stopped ({stop.reason}) before {question.export} was scored")
            if clock.monotonic_s() > end_s:
                raise DeadlineExceeded(
                    f"{question.tasks} held-out tasks of {question.export} were not scored within {timeout_s:.0f} s"
                )
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _answer(code: int, said: str, complained: str) -> Answer:
    try:
        return Answer.model_validate_json(said)
    except ValidationError:
        raise ShoalError(
            f"the process that scores the export {describe_exit(code)} without an answer: {complained or 'no message'}"
        ) from None


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


# ── the process that answers ─────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str]) -> int:
    stop = StopToken()
    follow_supervisor(stop)
    out = _own_stdout()
    try:
        question = Question.model_validate_json(arguments[0])
        answer = Answer(**vars(score(question, stop)))
    except ShoalError as error:
        answer = Answer(error=str(error), kind=type(error).__name__)
    with out:
        out.write(answer.model_dump_json() + "\n")
    return 1 if answer.error else 0


def _own_stdout() -> IO[str]:
    """Standard output for the answer alone: what a library or a reward function prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def score(question: Question, stop: StopToken) -> Recount:
    """Complete and score; like in training, a failure of the machinery is no sample, never 0."""
    environment = build(question.environment)
    split = environment.tasks("held_out")
    tasks = [split[index] for index in range(min(question.tasks, len(split)))]
    values: list[float] = []
    failures: list[ScoringFailure] = []
    for task, completion in _completions(question, tasks, stop):
        try:
            values.append(environment.score(task, completion).value)
        except ScoringFailure as failure:
            failures.append(failure)
    if not values:
        why = str(failures[0]) if failures else f"environment {environment.name} has none"
        raise ScoringFailure(f"no held-out task could be scored: {why}")
    return Recount(sum(values) / len(values), len(values))


def _completions(question: Question, tasks: Sequence[Task], stop: StopToken) -> Iterator[tuple[Task, str]]:
    """Greedy completions as texts. What the model's own generation settings say beside the end token does not count."""
    import torch
    from transformers import GenerationConfig

    torch.set_num_threads(question.threads)
    model, tokenizer = _load(question.export)
    end = model.generation_config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    tokenizer.padding_side = "left"  # a completion follows the last column
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=question.max_new_tokens, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
    )
    for start in range(0, len(tasks), PROMPTS_AT_ONCE):
        if stop.is_set():
            raise DeadlineExceeded(f"stopped ({stop.reason})")
        some = tasks[start : start + PROMPTS_AT_ONCE]
        prompts = [task.prompt for task in some]
        encoded = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
        output = model.generate(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"])
        rows = output[:, encoded["input_ids"].shape[1] :].tolist()
        for task, row in zip(some, rows, strict=True):
            yield task, tokenizer.decode(until(row, end), clean_up_tokenization_spaces=False)


def _load(export: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    if not export.is_dir():
        raise ModelError(f"there is no export {export}; a run exports its model when its last step is done")
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(export, local_files_only=True, use_safetensors=True)
        return model.eval(), AutoTokenizer.from_pretrained(export, local_files_only=True)
    except Exception as error:  # the loaders raise many types, all of which mean: this folder does not load
        said = str(error).strip().splitlines() or [""]
        raise ModelError(
            f"the export {export} does not load with transformers: {type(error).__name__}: {said[0]}"
        ) from error


def until(token_ids: Sequence[int], end: int) -> list[int]:
    """A completion without its end token and the padding after it.

    >>> until([5, 6, 1, 0, 0], end=1)
    [5, 6]
    """
    ids = list(token_ids)
    return ids[: ids.index(end)] if end in ids else ids


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
