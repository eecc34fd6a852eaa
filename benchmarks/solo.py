"""`shoal run --solo` beside a plain GRPO loop with `transformers.generate`: the same model, tasks and batch sizes.

    OMP_NUM_THREADS=1 python benchmarks/solo.py [--model tiny] [--steps 6] [--groups 16] [--group 16] [--tokens 10]

Both draw the same number of completions for the same tasks in a step (nothing is refilled), score them with the same
function, and train on all groups whose rewards differ, in as many minibatches, with AdamW in float32. The plain loop
does nothing else: no checkpoint, no digest, no held-out score, no record of what it drew. Solo does all of these. The
first step of each is left out; times are by the clock, so compare within one run only.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from shoal.environments import Environment, build
from shoal.models.load import load_model
from shoal.records import open_records
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe
from shoal.run.solo import run_solo, solo_recipe
from shoal.runtime import StopToken
from shoal.runtime.metrics import MetricsLog

MINIBATCHES, RATE = 4, 1e-5
Times = tuple[float, float, float]  # tokens/s, and seconds of a step: drawing with scoring, training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    for name, default in (("steps", 6), ("groups", 16), ("group", 16), ("tokens", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    recipe = Recipe.model_validate({
        "run": {"steps": options.steps, "groups_per_step": options.groups, "group_size": options.group,
                "max_new_tokens": options.tokens},
        "model": {"path": options.model}, "hub": {"refill_cap": 0},
        "trainer": {"learning_rate": RATE, "minibatches": MINIBATCHES, "evaluate_every": 0, "mask_truncated": False},
    })  # fmt: skip
    shown = {"solo": solo(recipe), "transformers": plain(recipe, build(recipe.environment))}
    print(f"{options.groups} groups of {options.group}, at most {options.tokens} tokens, medians; drawn + trained")
    for name, (rate, drawn_s, trained_s) in shown.items():
        step_s = drawn_s + trained_s
        print(f"{name:<13} {rate:9,.0f} tokens/s  {step_s:7.2f} s a step: {drawn_s:.2f} + {trained_s:.2f}")
    print(f"solo is x{shown['solo'][0] / shown['transformers'][0]:.2f}")


def solo(recipe: Recipe) -> Times:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "run"
        folder = RunFolder.prepare(path, solo_recipe(recipe, path))
        run_solo(folder, StopToken(), print)
        rows = [row for row in MetricsLog(path / "trainer" / "metrics.jsonl").rows() if "step_s" in row][1:]
        drawn = open_records(path).table().group_by("step").aggregate([("tokens", "sum")]).sort_by("step")
        tokens = drawn["tokens_sum"].to_pylist()[1:]
        rates = [count / row["step_s"] for count, row in zip(tokens, rows, strict=True)]
        lost_s = [row["step_s"] - row["train_s"] for row in rows]  # drawing, and all that is neither
        return median(rates), median(lost_s), median(row["train_s"] for row in rows)


def plain(recipe: Recipe, environment: Environment) -> Times:
    run, loaded = recipe.run, load_model(recipe.model.path)
    model, tokenizer, tasks = loaded.model, loaded.tokenizer, environment.tasks("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99))
    torch.manual_seed(0)
    found = list[Times]()
    for step in range(run.steps):
        began_s = time.perf_counter()
        asked = [tasks[step * run.groups_per_step + index] for index in range(run.groups_per_step)]
        prompts = [tokenizer.encode(task.prompt) for task in asked for _ in range(run.group_size)]
        longest = max(map(len, prompts))
        ids_BL = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts])
        mask_BL = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        with torch.no_grad():
            whole_BT = model.generate(
                input_ids=ids_BL, attention_mask=mask_BL, do_sample=True, top_k=0, top_p=1.0,
                temperature=run.temperature, max_new_tokens=run.max_new_tokens, pad_token_id=0,
                eos_token_id=list(tokenizer.eos_token_ids),
            )  # fmt: skip
        said_BT = whole_BT[:, longest:]
        ended_BT = torch.isin(said_BT, torch.tensor(tokenizer.eos_token_ids)).long()
        drawn_BT = (ended_BT.cumsum(1) - ended_BT) == 0  # up to the end token
        texts = [tokenizer.decode(ids[keep][~end[keep].bool()].tolist())
                 for ids, keep, end in zip(said_BT, drawn_BT, ended_BT, strict=True)]  # fmt: skip
        rewards_GS = torch.tensor(
            [environment.score(asked[row // run.group_size], text).value for row, text in enumerate(texts)]
        ).view(run.groups_per_step, run.group_size)
        advantage_B = (rewards_GS - rewards_GS.mean(1, keepdim=True)).flatten()
        drawn_s = time.perf_counter() - began_s
        mask_BT = torch.cat([mask_BL, torch.ones_like(said_BT)], 1)
        rows = (advantage_B != 0).view_as(rewards_GS).any(1).repeat_interleave(run.group_size).nonzero()[:, 0]
        for part in rows.chunk(MINIBATCHES):
            train(model, optimizer, whole_BT[part], mask_BT[part], drawn_BT[part], advantage_B[part])
        step_s = time.perf_counter() - began_s
        found.append((int(drawn_BT.sum()) / step_s, drawn_s, step_s - drawn_s))
    return tuple(median(column) for column in zip(*found[1:], strict=True))  # type: ignore[return-value]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids_BT: Tensor, *columns: Tensor) -> None:
    mask_BT, drawn_BT, advantage_B = columns
    length = drawn_BT.shape[1]
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT).logits[:, -length - 1 : -1]
    logprobs_BT = logits_BTV.log_softmax(-1).gather(2, ids_BT[:, -length:, None])[..., 0]
    ratio_BT = torch.exp(logprobs_BT - logprobs_BT.detach())
    loss = -(ratio_BT * advantage_B[:, None])[drawn_BT].mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


if __name__ == "__main__":
    main()
