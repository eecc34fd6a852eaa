"""Reinforcement learning of a language model in one file: the algorithm that the whole of shoal distributes.

    OMP_NUM_THREADS=1 python examples/one_file_rl.py --seed 0 --steps 30

One process, one loop, nothing to trust. The built-in policy was shown how to sort up to five digits; here it gets
lists of six to eight, samples sixteen answers to each, and learns from whether each answer is right.

    1. rollouts     64 prompts × 16 samples from the policy (or from one that is `--staleness` steps old)
    2. rewards      1 if exactly right, else 0
    3. advantages   reward − mean of its group; groups with equal rewards teach nothing and are dropped
    4. training     token-level policy gradient with a two-sided clip, a few optimizer steps per batch

Letters at the end of tensor names: B rollouts, T positions, N completion tokens.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from shoal.engines.protocol import Completion, GenerationRequest
from shoal.engines.torch import TorchEngine
from shoal.environments import Environment, EnvironmentSettings, Task, build
from shoal.models.load import LoadedModel, load_model
from shoal.models.logprobs import Head, hidden_states, token_logprobs
from shoal.models.state import apply_state, policy_state
from shoal.protocol import SamplingParameters

PROMPTS, GROUP, MAX_NEW_TOKENS = 64, 16, 10
CLIP, RATIO_CAP = 0.2, 4.0


@dataclass(frozen=True)
class Rollout:
    """One completion of one prompt, and what it is worth relative to its group."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    advantage: float


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    policy = load_model(options.model)
    behaviour = load_model(options.model)
    environment = build(EnvironmentSettings())
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    versions = deque([snapshot(policy)], maxlen=options.staleness + 1)
    rng = np.random.default_rng(options.seed)
    spent_s = 0.0
    print(f"step   0  held-out {evaluate(policy, environment):.3f}")
    for step in range(options.steps):
        started = time.monotonic()
        apply_state(behaviour.model, versions[0])
        rollouts, reward = sample_batch(behaviour, environment, step, options, rng)
        train(policy, optimizer, rollouts, options.minibatches, rng)
        versions.append(snapshot(policy))
        spent_s += time.monotonic() - started
        line = f"step {step + 1:3d}  reward {reward:.3f}  trained on {len(rollouts):4d}  {spent_s:5.1f} s"
        if (step + 1) % options.evaluate_every == 0:
            line += f"  held-out {evaluate(policy, environment):.3f}"
        print(line, flush=True)


def sample_batch(
    behaviour: LoadedModel, environment: Environment, step: int, options: argparse.Namespace, rng: np.random.Generator
) -> tuple[list[Rollout], float]:
    """Steps 1 to 3: rollouts with their advantages, and the mean reward of all that were sampled."""
    train_tasks = environment.tasks("train")
    first = (options.seed * 10_000 + step) * PROMPTS
    tasks = [train_tasks[(first + index) % len(train_tasks)] for index in range(PROMPTS)]
    groups = generate(behaviour, tasks, first_seed=(first << 20))
    rewards = np.array(
        [
            [environment.score(task, behaviour.tokenizer.decode(completion.token_ids)).value for completion in group]
            for task, group in zip(tasks, groups, strict=True)
        ]
    )
    mean = float(rewards.mean())
    if options.shuffle_rewards:  # the control: every group keeps its rewards, in a random order
        rewards = rng.permuted(rewards, axis=1)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    rollouts = [
        Rollout(behaviour.tokenizer.encode(task.prompt), completion, advantage)
        for task, group, row in zip(tasks, groups, advantages, strict=True)
        for completion, advantage in zip(group, row, strict=True)
        if row.any()
    ]
    return rollouts, mean


def generate(behaviour: LoadedModel, tasks: list[Task], first_seed: int) -> list[list[Completion]]:
    """Sixteen seeded samples for every task."""
    sampling = SamplingParameters(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, eos_token_ids=behaviour.eos_token_ids)
    requests = [
        GenerationRequest(
            behaviour.tokenizer.encode(task.prompt),
            tuple(first_seed + index * GROUP + sample for sample in range(GROUP)),
            sampling,
        )
        for index, task in enumerate(tasks)
    ]
    return TorchEngine.wrap(behaviour.model).generate(requests)


def train(
    policy: LoadedModel, optimizer: torch.optim.Optimizer, rollouts: list[Rollout], minibatches: int,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """Step 4: one pass over the rollouts in a random order, one optimizer step per minibatch."""
    policy.model.train()
    for part in np.array_split(rng.permutation(len(rollouts)), minibatches):
        if len(part) == 0:
            continue
        loss = policy_loss(policy, [rollouts[index] for index in part])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()


def policy_loss(policy: LoadedModel, batch: list[Rollout]) -> torch.Tensor:
    """−J, where per token J = min(min(r, δ)·A, clip(r, 1−ε, 1+ε)·A) and r is new over old probability."""
    longest = max(len(rollout.prompt_ids) + len(rollout.completion.token_ids) for rollout in batch)
    ids_BT = torch.zeros(len(batch), longest, dtype=torch.long)
    drawn_BT = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, rollout in enumerate(batch):
        start, tokens = len(rollout.prompt_ids), rollout.completion.token_ids
        ids_BT[row, :start] = torch.tensor(rollout.prompt_ids)
        ids_BT[row, start : start + len(tokens)] = torch.from_numpy(tokens)
        drawn_BT[row, start : start + len(tokens)] = True
    # The state at one position predicts the token at the next; right padding is never looked at.
    states_NH = hidden_states(policy.model, ids_BT)[:, :-1][drawn_BT[:, 1:]]
    new_N = token_logprobs(states_NH, Head.of(policy.model), ids_BT[drawn_BT]).logprobs
    old_N = torch.from_numpy(np.concatenate([rollout.completion.logprobs for rollout in batch]))
    lengths = torch.tensor([len(rollout.completion.token_ids) for rollout in batch])
    advantages_N = torch.tensor([rollout.advantage for rollout in batch]).float().repeat_interleave(lengths)
    ratio_N = torch.exp(new_N - old_N)
    capped_N = ratio_N.clamp(max=RATIO_CAP) * advantages_N
    clipped_N = ratio_N.clamp(1 - CLIP, 1 + CLIP) * advantages_N
    return -torch.minimum(capped_N, clipped_N).mean()


def evaluate(policy: LoadedModel, environment: Environment) -> float:
    """Mean score of greedy answers to tasks that are never trained on."""
    tasks = environment.tasks("held_out")
    prompts = [policy.tokenizer.encode(task.prompt) for task in tasks]
    answers = TorchEngine.wrap(policy.model).greedy(prompts, MAX_NEW_TOKENS, policy.eos_token_ids)
    scores = [
        environment.score(task, policy.tokenizer.decode(answer)).value
        for task, answer in zip(tasks, answers, strict=True)
    ]
    return float(np.mean(scores))


def snapshot(policy: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy_state(policy.model).items()}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Teach a tiny policy to sort, in one file.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--minibatches", type=int, default=4, help="optimizer steps per batch")
    parser.add_argument("--staleness", type=int, default=0, help="how many steps old the sampling policy is")
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control: it must not learn")
    parser.add_argument("--evaluate-every", type=int, default=5)
    parser.add_argument("--model", default="tiny")
    return parser.parse_args()


if __name__ == "__main__":
    main()
