"""The exported model, scored again from its files alone, by a process of its own with plain `transformers`.

Its score equals that of the trainer only if what was exported is what was trained.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shoal.environments import build
from shoal.errors import DeadlineExceeded, ModelError, ShoalError
from shoal.run.recipe import Recipe
from shoal.runtime import SUPERVISED, StopToken, SystemClock
from shoal.runtime.supervise import describe_exit, follow_supervisor

POLL_S, PROMPTS_AT_ONCE = 0.05, 64
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", SUPERVISED: "1"}


class Recount(BaseModel):
    score: float
    tasks: int


def recount(export: Path, recipe: Recipe, timeout_s: float, stop: StopToken) -> Recount:
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.run.demo.recount", str(export.absolute()), recipe.model_dump_json()],
        stdin=subprocess.PIPE,  # closed when this process is gone, which ends the child
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **QUIET},
        start_new_session=True,  # Ctrl-C in the terminal reaches this process alone
    )
    clock = SystemClock()
    end_s = clock.monotonic_s() + timeout_s
    try:
        while process.poll() is None:
            if stop.wait(POLL_S):
                raise DeadlineExceeded(f"stopped ({stop.reason}) before {export} was scored")
            if clock.monotonic_s() > end_s:
                raise DeadlineExceeded(f"{export} was not scored within {timeout_s:.0f} s")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
        message, complained = (text.decode(errors="replace").strip() for text in process.communicate())
    with suppress(ValidationError):
        return Recount.model_validate_json(message.rpartition("\n")[2])
    why = complained.rpartition("\n")[2] or describe_exit(process.returncode)
    raise ShoalError(f"the export could not be scored: {why}")


def score(export: Path, recipe: Recipe, stop: StopToken) -> Recount:
    """By greedy completions. Of the model's own generation settings only the end tokens are used."""
    import torch
    from transformers import GenerationConfig

    environment, values = build(recipe.environment), list[float]()
    split = environment.tasks("held_out")
    tasks = [split[index] for index in range(min(recipe.trainer.evaluate_tasks, len(split)))]
    torch.set_num_threads(recipe.trainer.threads)
    model, tokenizer = _load(export)
    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    tokenizer.padding_side = "left"  # a completion follows the last column
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=recipe.run.max_new_tokens,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    )
    for start in range(0, len(tasks), PROMPTS_AT_ONCE):
        if stop.is_set():
            raise DeadlineExceeded(f"stopped ({stop.reason})")
        some = tasks[start : start + PROMPTS_AT_ONCE]
        encoded = tokenizer([task.prompt for task in some], add_special_tokens=False, padding=True, return_tensors="pt")
        output = model.generate(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"])
        for task, row in zip(some, output[:, encoded["input_ids"].shape[1] :].tolist(), strict=True):
            ids = row[: next((place for place, token in enumerate(row) if token in ends), len(row))]
            values.append(environment.score(task, tokenizer.decode(ids, clean_up_tokenization_spaces=False)).value)
    return Recount(score=sum(values) / len(values), tasks=len(values))


def _load(export: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(export, local_files_only=True, use_safetensors=True)
        return model.eval(), AutoTokenizer.from_pretrained(export, local_files_only=True)
    except Exception as error:  # the loaders raise many types
        message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ModelError(f"the export {export} does not load with transformers: {message}") from error


if __name__ == "__main__":
    stop = StopToken()
    follow_supervisor(stop)
    try:
        found = score(Path(sys.argv[1]), Recipe.model_validate_json(sys.argv[2]), stop)
        sys.stdout.write(f"{found.model_dump_json()}\n")
    except ShoalError as error:
        sys.exit(str(error))
