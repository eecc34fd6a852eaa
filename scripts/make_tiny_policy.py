"""Make the built-in tiny policy: train it on demonstrations of short lists only, stop, and write a model folder.

    OMP_NUM_THREADS=1 python scripts/make_tiny_policy.py [--out src/shoal/models/data/tiny]

The demonstrations are clean and at most five digits long; the demo's tasks have six to eight. So the policy starts
as one that knows what sorting is and fails at lists longer than any it was shown, and whatever it gains afterwards
it gains from rewards. The same seed gives the same bytes on the same machine and torch version (one thread).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit.tiny import EOS, PAD, build_tiny, build_tokenizer, tokenizer_config
from shoal.engines.protocol import GenerationRequest
from shoal.engines.torch import TorchEngine
from shoal.environments import Environment, EnvironmentSettings, Task, build
from shoal.models.state import policy_state
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import SamplingParameters

DEMONSTRATIONS = EnvironmentSettings(options={"min_digits": 2, "max_digits": 5})
JUDGED_ON = EnvironmentSettings(options={"min_digits": 6, "max_digits": 8})
MAX_NEW_TOKENS = 10
IGNORED = -100


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = build_tiny(arguments.seed)
    write_description(model, arguments.out)
    tokenizer = TextTokenizer({name: (arguments.out / name).read_bytes() for name in ("tokenizer.json", "config.json")})
    train(model, tokenizer, arguments)
    weights = arguments.out / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in policy_state(model).items()}, weights, {"format": "pt"})
    weights.chmod(0o644)
    provenance = {
        "made_by": "scripts/make_tiny_policy.py", "seed": arguments.seed, "steps": arguments.steps,
        "batch": arguments.batch, "learning_rate": arguments.lr, "weights": sum(p.numel() for p in model.parameters()),
        "demonstrations": DEMONSTRATIONS.options, "judged_on": JUDGED_ON.options,
        "scores": scores(model, tokenizer, build(JUDGED_ON)),
        "scores_on_demonstrated_lengths": scores(model, tokenizer, build(DEMONSTRATIONS)),
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "torch": torch.__version__, "machine": platform.machine(),
    }  # fmt: skip
    (arguments.out / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    print(json.dumps(provenance, indent=2))  # noqa: T201


def train(model: Any, tokenizer: TextTokenizer, arguments: argparse.Namespace) -> None:
    """Cross-entropy on the answers, each demonstration seen once; the learning rate rises, then falls to a tenth."""
    tasks = build(DEMONSTRATIONS).tasks("train")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.01)
    model.train()
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * min((step + 1) / 20, 1.0 - 0.9 * step / arguments.steps)
        first = step * arguments.batch
        ids, labels = demonstrations(tasks[first : first + arguments.batch], tokenizer)
        logits = model(input_ids=ids).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def demonstrations(tasks: Sequence[Task], tokenizer: TextTokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt + answer + end, right-padded; only the answer and the end are learned."""
    pairs = [(tokenizer.encode(task.prompt), (*tokenizer.encode(task.answer), EOS)) for task in tasks]
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(tasks), longest), PAD)
    labels = torch.full((len(tasks), longest), IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def scores(model: Any, tokenizer: TextTokenizer, environment: Environment) -> dict[str, float]:
    """Mean held-out score, greedy and sampled at temperature 1."""
    tasks = environment.tasks("held_out")
    prompts = [tokenizer.encode(task.prompt) for task in tasks]
    engine = TorchEngine.wrap(model)
    sampling = SamplingParameters(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, eos_token_ids=(EOS,))
    requests = [GenerationRequest(prompt, (seed,), sampling) for seed, prompt in enumerate(prompts)]
    sampled = [group[0].token_ids for group in engine.generate(requests)]

    def mean(completions: Sequence[Any]) -> float:
        pairs = zip(tasks, completions, strict=True)
        return float(np.mean([environment.score(task, tokenizer.decode(ids)).value for task, ids in pairs]))

    return {"greedy": mean(engine.greedy(prompts, MAX_NEW_TOKENS, EOS)), "sampled": mean(sampled)}


def write_description(model: Any, folder: Path) -> None:
    """Everything of a Hugging Face folder but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(tokenizer_config())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("src/shoal/models/data/tiny"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
