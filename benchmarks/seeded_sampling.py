"""Which seeded sampling tells a cheat from rounding better: inverse-CDF or Gumbel-max? On a real pretrained model.

    python benchmarks/seeded_sampling.py [FOLDER] [--model PATH] [--device cpu --dtype float32]
        [--sequences 32 --tokens 64] [--few 16 --few-tokens 32] [--provers honest,int8,int4,…] [--report]

Every prover decodes with a key-value cache and its own weights: half of its rows draw by inverse CDF (one uniform per
position), half by Gumbel-max (one uniform per position and token, from the same counter-based stream). The validator
prefills what they said with the right weights. Per token it has, for inverse CDF, the distance of u from the token's
interval in probability, for Gumbel-max the margin by which the token lost against the best, in logits. A prover's
numbers are kept in FOLDER; `--report` prints the tables again from there.

`expected` is the share of tokens outside, integrated over u instead of drawn: the intervals of prover and validator
overlap by 1 - expected. It needs no luck to see a rate of 1e-6. Likewise the mean distance and the largest possible.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from shoal.models.load import load_model
from shoal.models.logprobs import Head
from shoal.sampling import philox4x32, sampler
from shoal.sampling.check import SeedTolerance, distances
from shoal.sampling.inverse import Floats, cumulative, sample

TEXTS = (
    "Once upon a time there was a small fishing village where",
    "The main reason why the sky looks blue during the day is",
    "To solve this equation we first have to write down the",
    "In the summer of 1969 the two brothers decided to leave",
    "def merge_sorted_lists(first, second): # returns one list",
    "Question: What is the capital of Australia? Answer: The",
    "The committee discussed the new budget proposal for the",
    "Here is a simple recipe for bread: take some flour, water",
)
PROMPT_TOKENS = 8
FLOORS = (1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12)
PREFILL_ROWS = 16
EXACT_EVERY = 8  # one token in so many is integrated over u
WRONG_SEED_TOKENS = 512
FALSE_ALARM = 1e-4 / 1024  # per look; looked at after every token
SHUFFLES = 100
LONGEST = 4096
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Steering:
    """The attacker who stays within the tolerance, and picks what it likes there. `preference`: one number per token,
    most wanted highest. Only a share `chance` of positions is steered."""

    preference: Floats
    reach: float
    floor: float
    chance: float = 1.0

    def choose(
        self, logits_BV: npt.NDArray[np.float32], uniforms_B: Floats, temperature: float, rng: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        """The most preferred token within reach, for each row; the honest one where no other is preferred."""
        probabilities_BV, high_BV = cumulative(logits_BV, temperature)
        low_BV = high_BV - probabilities_BV
        honest_B, _ = sample(logits_BV, uniforms_B, temperature)
        u_B1 = uniforms_B[:, None]
        within_BV = (low_BV - self.reach < u_B1) & (u_B1 < high_BV + self.reach) & (probabilities_BV >= self.floor)
        np.put_along_axis(within_BV, honest_B[:, None], True, axis=1)
        wanted_B = np.where(within_BV, self.preference, -np.inf).argmax(axis=1)
        chosen_B: npt.NDArray[np.int64] = np.where(rng.random(len(honest_B)) < self.chance, wanted_B, honest_B)
        return chosen_B


@dataclass(frozen=True)
class NoiseLimits(SeedTolerance):
    """With a statistic that serves both schemes: `outside_rate` of tokens per nat, by `outside_distance` on average."""

    outside_rate: float = 4e-3
    outside_distance: float = 1e-6


def noise_p_value(nats: float, outside: int, distance: float, limits: NoiseLimits) -> float:
    """How likely a Poisson number of exponential distances has so many, or so large a sum (an upper bound)."""
    expected = limits.outside_rate * nats
    excess = math.sqrt(distance / limits.outside_distance) - math.sqrt(expected)
    by_sum = math.exp(-excess * excess) if excess > 0 else 1.0
    by_count = math.exp(outside - expected - outside * math.log(outside / expected)) if outside > expected > 0 else 1.0
    return min(1.0, 2.0 * min(by_count, by_sum))


@dataclass
class Prover:
    """How a provider computes: what it does to the weights, and the temperature that it samples at."""

    change: Callable[[Any], None] = lambda _: None
    temperature: float = 1.0


def int8_weights(model: Any) -> None:
    """Symmetric, one scale per output channel; embedding and head stay."""
    for weight in _linear_weights(model):
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        weight.copy_((weight / scale).round() * scale)


def int4_weights(model: Any) -> None:
    """Symmetric, one scale per 32 weights."""
    for weight in _linear_weights(model):
        groups = weight.reshape(-1, 32)
        scale = groups.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 7
        weight.copy_(((groups / scale).round() * scale).reshape(weight.shape))


def noisy_weights(model: Any) -> None:
    """Another model, near: 1 % noise on every matrix."""
    generator = torch.Generator(device=model.device).manual_seed(0)
    for weight in _linear_weights(model):
        noise = torch.randn(weight.shape, generator=generator, device=weight.device, dtype=torch.float32)
        weight.add_((noise * weight.float().std() * 0.01).to(weight.dtype))


def without_a_layer(model: Any) -> None:
    """Another model, cheaper: one layer of the middle adds nothing."""
    layer = model.base_model.layers[len(model.base_model.layers) // 2]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()


def stale(rate: float) -> Callable[[Any], None]:
    """One first AdamW step away: every weight moves by the learning rate, against its gradient's sign."""

    def change(model: Any) -> None:
        ids = torch.arange(100, 164, device=model.device)[None]
        with torch.enable_grad():
            model.requires_grad_(True)
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
            nn.functional.cross_entropy(logits[0], ids[0, 1:]).backward()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.sub_((rate * parameter.grad.sign()).to(parameter.dtype))
            parameter.grad = None

    return change


PROVERS = {
    "honest": Prover(),
    "int8": Prover(int8_weights),
    "int4": Prover(int4_weights),
    "temperature 0.9": Prover(temperature=0.9),
    "weights + 1 % noise": Prover(noisy_weights),
    "one layer less": Prover(without_a_layer),
    "one step of 1e-6 stale": Prover(stale(1e-6)),
}
MANY = ("honest", "int8")  # provers that must be told apart, so more is drawn of them


@contextmanager
def changed(model: Any, change: Callable[[Any], None]) -> Iterator[None]:
    """The model as a prover has it; afterwards as it was."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    change(model)
    try:
        yield
    finally:
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)


def halves(seeds: Iterable[int], device: Any) -> list[Tensor]:
    """The lower and the upper 32 bits of each seed, [seeds, 1]."""
    return [torch.tensor([[int(seed) >> shift & 2**32 - 1] for seed in seeds], device=device) for shift in (0, 32)]


def uniforms_of(seeds: Iterable[int], count: int, device: Any) -> Tensor:
    return sampler.uniforms_of(torch.arange(count, device=device)[None], *halves(seeds, device))


def gumbel_noise(seeds: Array, positions: Tensor, vocabulary: int) -> Tensor:
    """One Gumbel number per row and token, in float32: rows are (seed, position)."""
    device = positions.device
    zero, one = (torch.full((1, 1), value, dtype=torch.int64, device=device) for value in (0, 1))
    counter = (positions[:, None], zero, torch.arange(vocabulary, device=device)[None], one)
    word0, word1, *_ = philox4x32(counter, halves(seeds, device))
    uniform = (((word0 >> 5) * 2**26 + (word1 >> 6)).double() * 2.0**-53).clamp_(min=2.0**-54)
    return -torch.log(-torch.log(uniform)).float()


@dataclass
class Drawn:
    """What a prover said, [rows, tokens], and the hidden states behind it. The second half of the rows is Gumbel's."""

    tokens: Tensor
    hidden: Tensor
    prompts: Tensor
    seconds: float


def decode(model: Any, prompts_RP: Tensor, tokens: int, temperature: float) -> Drawn:
    rows, vocabulary, half = len(prompts_RP), model.config.vocab_size, len(prompts_RP) // 2
    head, cache = Head.of(model), DynamicCache(config=model.config)
    uniforms = uniforms_of(range(half), tokens, model.device)
    seeds, inputs = np.arange(half), prompts_RP
    said, states, started = [], [], time.process_time()
    for step in range(tokens):
        output = model.base_model(input_ids=inputs, past_key_values=cache, use_cache=True)
        hidden_RH = output.last_hidden_state[:, -1]
        logits_RV = torch.cat([head.logits(part) for part in torch.split(hidden_RH, 256)])
        first = sampler.sample(logits_RV[:half], uniforms[:, step], temperature).tokens
        at = torch.full((half,), step, device=model.device)
        second = (logits_RV[half:] / temperature + gumbel_noise(seeds, at, vocabulary)).argmax(dim=1)
        inputs = torch.cat([first, second])[:, None]
        said.append(inputs)
        states.append(hidden_RH)
        if step % 16 == 15:
            print(
                f"    step {step + 1}, {rows * (step + 1) / (time.process_time() - started):.0f} tokens/s", flush=True
            )
    return Drawn(torch.cat(said, dim=1), torch.stack(states, dim=1), prompts_RP, time.process_time() - started)


def prefill(model: Any, drawn: Drawn) -> Tensor:
    """The validator's hidden states [rows, tokens, H] behind the same tokens."""
    whole = torch.cat([drawn.prompts, drawn.tokens[:, :-1]], dim=1)
    parts = torch.split(whole, PREFILL_ROWS)
    states = [model.base_model(input_ids=part, use_cache=False).last_hidden_state for part in parts]
    return torch.cat(states)[:, drawn.prompts.shape[1] - 1 :]


def compare_inverse(model: Any, drawn: Drawn, hidden: Tensor, prover_head: Head, prover: Prover) -> dict[str, Array]:
    rows, tokens = drawn.tokens.shape[0] // 2, drawn.tokens.shape[1]
    uniforms_N = uniforms_of(range(rows), tokens, model.device).reshape(-1)
    wrong_N = uniforms_of(range(2**40, 2**40 + rows), tokens, model.device).reshape(-1)
    columns: dict[str, list[Array]] = {}
    head, size = Head.of(model), _tile(model)
    tensors = (hidden[:rows].flatten(0, 1), drawn.hidden[:rows].flatten(0, 1), drawn.tokens[:rows].reshape(-1))
    for ours_NH, theirs_NH, said_N, u_N, wrong in zip(
        *(torch.split(t, size) for t in (*tensors, uniforms_N, wrong_N)), strict=True
    ):
        logits_NV = head.logits(ours_NH)
        found = sampler.token_statistics(logits_NV, said_N, 1.0)
        values = {"u": u_N, "low": found.low, "high": found.high, "logprob": found.logprobs, "wrong_u": wrong}
        values["entropy"] = found.entropy
        some = prover_head.logits(theirs_NH[::EXACT_EVERY])
        exact = overlap(logits_NV[::EXACT_EVERY], some, prover.temperature)
        for name, value in (values | exact).items():
            columns.setdefault(name, []).append(value.cpu().numpy())
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    return {name: values.reshape(rows, tokens) if len(values) == rows * tokens else values
            for name, values in joined.items()}  # fmt: skip


def overlap(ours_NV: Tensor, theirs_NV: Tensor, temperature: float) -> dict[str, Tensor]:
    """Of a token drawn at any u: the chance that it is outside, its mean distance and square, the largest possible."""
    ours_p, theirs_p = ours_NV.double().softmax(1), (theirs_NV.double() / temperature).softmax(1)
    ours, theirs = ours_p.cumsum(1), theirs_p.cumsum(1)
    ours_low, theirs_low = ours - ours_p, theirs - theirs_p
    result = {"shift": (ours - theirs).abs().amax(1)}
    # u runs over the prover's interval; what of it lies below ours has distances from `far` down to `near`.
    below = (ours_low - theirs_low).clamp(min=0), (ours_low - theirs).clamp(min=0)
    above = (theirs - ours).clamp(min=0), (theirs_low - ours).clamp(min=0)
    for power, name in ((1, "expected"), (2, "distance"), (3, "square")):
        lost = sum((far**power - near**power) / power for far, near in (below, above))
        result[name] = lost.sum(1)
        if power == 1:
            for floor in FLOORS:
                rare = ours_p < floor
                result[f"mass {floor:g}"] = (theirs_p * rare).sum(1)
                result[f"implausible {floor:g}"] = (lost * rare).sum(1)
    return result


def compare_gumbel(model: Any, drawn: Drawn, hidden: Tensor) -> dict[str, Array]:
    rows, tokens = drawn.tokens.shape[0] // 2, drawn.tokens.shape[1]
    head, size, vocabulary = Head.of(model), _tile(model), model.config.vocab_size
    seeds_N = np.repeat(np.arange(rows), tokens)
    positions_N = torch.arange(tokens, device=model.device).repeat(rows)
    hidden_NH, said_N = hidden[rows:].flatten(0, 1), drawn.tokens[rows:].reshape(-1)
    columns: dict[str, list[Array]] = {"margin": [], "wrong_margin": []}
    for start in range(0, rows * tokens, size):
        part = slice(start, start + size)
        logits_NV = head.logits(hidden_NH[part])
        for name, shift in (("margin", 0), ("wrong_margin", 2**40)):
            if shift and start >= WRONG_SEED_TOKENS:
                continue
            scores_NV = logits_NV + gumbel_noise(seeds_N[part] + shift, positions_N[part], vocabulary)
            margin_N = scores_NV.amax(1) - scores_NV.gather(1, said_N[part, None])[:, 0]
            columns[name].append(margin_N.cpu().numpy())
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def measure(options: argparse.Namespace, loaded: Any, name: str, prover: Prover) -> None:
    model = loaded.model
    many = name in MANY
    rows, tokens = (options.sequences, options.tokens) if many else (options.few, options.few_tokens)
    prompts = [loaded.tokenizer.encode(text)[:PROMPT_TOKENS] for text in TEXTS]
    chosen = torch.tensor([prompts[row % len(prompts)] for row in range(rows)] * 2, device=model.device)
    with changed(model, prover.change):
        head = Head.of(model)
        head = head._replace(weight=head.weight.detach().clone())
        drawn = decode(model, chosen, tokens, prover.temperature)
    hidden = prefill(model, drawn)
    columns = compare_inverse(model, drawn, hidden, head, prover) | compare_gumbel(model, drawn, hidden)
    columns["tokens"] = drawn.tokens[:rows].cpu().numpy()
    columns["live"] = _before_end(columns["tokens"], loaded.eos_token_ids)
    columns["live_gumbel"] = _before_end(drawn.tokens[rows:].cpu().numpy(), loaded.eos_token_ids)
    np.savez_compressed(options.folder / f"{_key(options, name)}.npz", **columns)
    print(f"{name}: {columns['live'].sum()} tokens, {drawn.seconds:.0f} s of decoding", flush=True)


def _before_end(tokens_RT: Array, eos: tuple[int, ...]) -> Array:
    is_end_RT = np.isin(tokens_RT, eos)
    ended = np.cumsum(is_end_RT, axis=1) - is_end_RT
    return ended == 0


@dataclass
class Scores:
    """One prover under one scheme: per token its distance or margin, and whether it differs, row by row."""

    values: Array
    outside: Array
    live: Array
    entropy: Array

    def line(self, label: str, limits: NoiseLimits) -> str:
        values, outside = self.values[self.live], self.outside[self.live]
        caught = tokens_until_caught(self, limits)
        spread = " / ".join(
            "never" if np.isinf(n) else f"{n:.0f}" for n in np.quantile(caught, (0.5, 0.9), method="higher")
        )
        return (
            f"| {label} | {len(values):,} | {100 * (1 - outside.mean()):.2f} % | {values.mean():.2g} |"
            f" {values.max():.2g} | {spread} |"
        )


def inverse_scores(columns: dict[str, Array], u: str = "u") -> Scores:
    distance = distances(columns[u], columns["low"], columns["high"])
    outside = ~((columns["low"] <= columns[u]) & (columns[u] < columns["high"]))
    return Scores(distance, outside, columns["live"], columns["entropy"])


def gumbel_scores(columns: dict[str, Array], margin: str = "margin") -> Scores:
    live = columns["live_gumbel"]
    width = live.shape[1]
    flat = columns[margin].ravel()
    values = flat[: len(flat) // width * width].reshape(-1, width)
    nats = np.full_like(values, columns["entropy"][columns["live"]].mean())  # not kept row by row: the mean serves
    return Scores(values, values > 0, live[: len(values)], nats)


def fitted(honest: Scores) -> NoiseLimits:
    """The same rule for both schemes: what honest tokens showed, with room, so that the two compare fairly."""
    values, outside = honest.values[honest.live], honest.outside[honest.live]
    count = int(outside.sum())
    mean = values[outside].mean() if count else 1e-6
    rate = (count + 2 * np.sqrt(count) + 1) / honest.entropy[honest.live].sum()
    return NoiseLimits(4 * float(values.max()) + 1e-5, 0.0, float(rate), 1.5 * float(mean))


def tokens_until_caught(scores: Scores, limits: NoiseLimits) -> Array:
    """After how many tokens it is caught, over sequences drawn with replacement; inf: not in 4,096 tokens."""
    rng = np.random.default_rng(0)
    caught = []
    for _ in range(SHUFFLES):
        order = rng.integers(0, len(scores.values), math.ceil(LONGEST / scores.live.sum(axis=1).mean()))
        values = np.concatenate([scores.values[row][scores.live[row]] for row in order])
        outside = np.concatenate([scores.outside[row][scores.live[row]] for row in order])
        nats = np.cumsum(np.concatenate([scores.entropy[row][scores.live[row]] for row in order]))
        counts, sums = np.cumsum(outside), np.cumsum(np.minimum(values, 1e6))
        found = np.inf
        for at in np.flatnonzero(outside):  # evidence grows only there
            p_value = noise_p_value(float(nats[at]), int(counts[at]), float(sums[at]), limits)
            if values[at] > limits.distance or p_value < FALSE_ALARM:
                found = at + 1
                break
        caught.append(found)
    return np.array(caught)


def steering_table(honest: dict[str, Array], limits: NoiseLimits, loaded: Any, options: argparse.Namespace) -> None:
    """What is left to an attacker who stays within the tolerance, on the model's own distributions."""
    model, rng = loaded.model, np.random.default_rng(1)
    rows = min(16, len(honest["tokens"]))
    prompts = [loaded.tokenizer.encode(text)[:PROMPT_TOKENS] for text in TEXTS]
    chosen = torch.tensor([prompts[row % len(prompts)] for row in range(rows)], device=model.device)
    tokens = torch.from_numpy(honest["tokens"][:rows]).to(model.device)
    hidden = prefill(model, Drawn(tokens, tokens, chosen, 0.0)).flatten(0, 1)
    preference = rng.random(model.config.vocab_size)
    print(
        "| reach | steered | tokens changed per 1,000 | outside | caught after (median / 90 %) |\n|---|---|---|---|---|"
    )
    for chance in (1.0, 0.3, 0.1, 0.03, 0.01):
        steering = Steering(preference, limits.distance, limits.floor, chance)
        changed_N, outside_N, distance_N, nats_N = steer(model, hidden, steering, rng, options.steer_repeat)
        scores = Scores(distance_N, outside_N, np.ones_like(outside_N), nats_N)
        caught = tokens_until_caught(scores, limits)
        spread = " / ".join(
            "never" if np.isinf(n) else f"{n:.0f}" for n in np.quantile(caught, (0.5, 0.9), method="higher")
        )
        print(
            f"| {limits.distance:g} | {100 * chance:g} % | {1000 * changed_N.mean():.2f} |"
            f" {100 * outside_N.mean():.3f} % | {spread} |"
        )


def steer(model: Any, hidden_NH: Tensor, steering: Steering, rng: np.random.Generator, repeat: int) -> list[Array]:
    """The attack at many u per position: [rows, 64] of changed, outside, distance, entropy."""
    head, parts = Head.of(model), []
    for hidden in torch.split(hidden_NH, 32):
        logits = head.logits(hidden).cpu().numpy()
        for _ in range(repeat):
            u = rng.random(len(logits))
            honest = sampler.sample(torch.from_numpy(logits), torch.from_numpy(u), 1.0).tokens.numpy()
            said = steering.choose(logits, u, 1.0, rng)
            found = sampler.token_statistics(torch.from_numpy(logits), torch.from_numpy(said), 1.0)
            low, high = found.low.numpy(), found.high.numpy()
            parts.append((said != honest, ~((low <= u) & (u < high)), distances(u, low, high), found.entropy.numpy()))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = rng.permutation(len(columns[0]) // 64 * 64)
    return [column[order].reshape(-1, 64) for column in columns]


def cost_table(loaded: Any) -> None:
    """Processor time per token, of drawing and of checking, the head not counted."""
    vocabulary, rows = loaded.model.config.vocab_size, 16
    logits = torch.randn(rows, vocabulary) * 3
    u, said = torch.rand(rows).double(), torch.randint(0, vocabulary, (rows,))
    seeds, at = np.arange(rows), torch.zeros(rows, dtype=torch.int64)
    calls = {
        "inverse CDF, draw": lambda: sampler.sample(logits, u, 1.0),
        "inverse CDF, check (with entropy and varentropy)": lambda: sampler.token_statistics(logits, said, 1.0),
        "log_softmax and gather": lambda: logits.log_softmax(1).gather(1, said[:, None]),
        "Gumbel-max, draw": lambda: (logits + gumbel_noise(seeds, at, vocabulary)).argmax(1),
        "Gumbel-max, check": lambda: (logits + gumbel_noise(seeds, at, vocabulary)).amax(1),
    }
    print(f"\n| µs per token on one core, {vocabulary:,} tokens | |\n|---|---|")
    for name, call in calls.items():
        best = min(_timed(call) for _ in range(4))
        print(f"| {name} | {1e6 * best / rows:.0f} |")


def _timed(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def report(options: argparse.Namespace) -> None:
    found = {name: _load(options, name) for name in PROVERS if (options.folder / f"{_key(options, name)}.npz").exists()}
    honest = found["honest"]
    schemes = {"inverse CDF, distance in probability": inverse_scores, "Gumbel-max, margin in logits": gumbel_scores}
    for title, scores_of in schemes.items():
        limits = fitted(scores_of(honest))
        print(f"\n{title} ({options.dtype} on {options.device}); {limits}\n")
        print("| prover | tokens | match | mean | max | caught after (median / 90 %) |\n|---|---|---|---|---|---|")
        for name, columns in found.items():
            print(scores_of(columns).line(name, limits))
        wrong = "wrong_u" if scores_of is inverse_scores else "wrong_margin"
        print(scores_of(honest, wrong).line("wrong seed", limits))
    limits = profile_limits(options, honest)
    print(f"\ninverse CDF under the profile's own numbers: {limits}\n")
    print("| prover | tokens | match | mean | max | caught after (median / 90 %) |\n|---|---|---|---|---|---|")
    for name, columns in found.items():
        print(inverse_scores(columns).line(name, limits))
    print(inverse_scores(honest, "wrong_u").line("wrong seed", limits))
    print("\n| prover | expected outside | " + " | ".join(f"< {floor:g}: drawn, outside" for floor in FLOORS) + " |")
    print("|---" * (len(FLOORS) + 2) + "|")
    for name, columns in found.items():
        cells = [
            f"{columns[f'mass {floor:g}'].mean():.1e}, {columns[f'implausible {floor:g}'].mean():.1e}"
            for floor in FLOORS
        ]
        print(f"| {name} | {columns['expected'].mean():.2e} | " + " | ".join(cells) + " |")
    profile_table(honest, limits)


def profile_table(columns: dict[str, Array], limits: NoiseLimits) -> None:
    """The honest noise in more detail: what a profile's numbers come from."""
    scores = inverse_scores(columns)
    values = scores.values[scores.live & scores.outside]
    print(json.dumps({
        "least p-value of a sequence, and of all": _p_values(scores, limits),
        "outside": len(values), "tokens": int(columns["live"].sum()),
        "distance quantiles of outside tokens (50, 90, 99, 100 %)": _quantiles(values),
        "expected outside by token (50, 90, 99, 100 %)": _quantiles(columns["expected"]),
        "least probability of an outside token":
            float(np.exp(columns["logprob"][scores.live & scores.outside].min())) if len(values) else None,
        "mean distance of outside tokens, integrated": float(columns["distance"].sum() / columns["expected"].sum()),
        "and its root mean square / sqrt(2)": float(
            np.sqrt(columns["square"].sum() / columns["expected"].sum() / 2)),
        "largest possible distance (50, 90, 99, 100 %)": _quantiles(columns["shift"]),
        "mean entropy": float(columns["entropy"][columns["live"]].mean()),
    }, indent=1))  # fmt: skip


def _p_values(scores: Scores, limits: NoiseLimits) -> list[float]:
    def p_value(values: Array, outside: Array, nats: Array) -> float:
        found = noise_p_value(float(nats.sum()), int(outside.sum()), float(values.sum()), limits)
        return float(f"{found:.3g}")

    rows = zip(scores.values, scores.outside, scores.entropy, scores.live, strict=True)
    least = min(p_value(values[live], outside[live], nats[live]) for values, outside, nats, live in rows)
    live = scores.live
    return [least, p_value(scores.values[live], scores.outside[live], scores.entropy[live])]


def _quantiles(values: Array) -> list[float]:
    return [float(f"{value:.3g}") for value in np.quantile(values, (0.5, 0.9, 0.99, 1.0))] if len(values) else []


def _load(options: argparse.Namespace, name: str) -> dict[str, Array]:
    with np.load(options.folder / f"{_key(options, name)}.npz") as stored:
        return dict(stored)


def _key(options: argparse.Namespace, name: str) -> str:
    words = "".join(letter if letter.isalnum() else "-" for letter in name)
    return f"{options.device}-{options.dtype}-{words}"


def _tile(model: Any) -> int:
    elements = 2**22 if model.device.type == "cpu" else 2**27
    return max(1, elements // int(model.config.vocab_size))


def _linear_weights(model: Any) -> list[Tensor]:
    layers = model.base_model.layers.modules()
    return [layer.weight.data for layer in layers if isinstance(layer, nn.Linear)]


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    if not options.report:
        path = model_folder(options)
        loaded = load_model(path, options.dtype, options.device)
        for name in options.provers.split(",") if options.provers else PROVERS:
            measure(options, loaded, name, PROVERS[name])
    report(options)
    if options.steer_repeat:
        loaded = load_model(model_folder(options), options.dtype, options.device)
        honest = _load(options, "honest")
        print()
        steering_table(honest, profile_limits(options, honest), loaded, options)
        if options.device == "cpu":
            cost_table(loaded)


def model_folder(options: argparse.Namespace) -> Path:
    if options.model is not None:
        return Path(options.model)
    from delta_training import fetch_model  # needs the whole of shoal, and pip

    return fetch_model(options.folder)


def profile_limits(options: argparse.Namespace, honest: dict[str, Array]) -> NoiseLimits:
    """What a profile would hold: the defaults for float32; else fitted to the honest tokens as calibration does."""
    scores = inverse_scores(honest)
    values, outside = scores.values[scores.live], scores.outside[scores.live]
    if options.dtype == "float32" or not outside.any():
        return NoiseLimits()
    rate = 1.25 * (outside.sum() + 2 * np.sqrt(outside.sum())) / scores.entropy[scores.live].sum()
    mean = 1.25 * max(values[outside].mean(), np.sqrt(np.square(values[outside]).mean() / 2))
    return NoiseLimits(2 * float(values.max()), SeedTolerance().floor, float(rate), float(mean))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Inverse-CDF against Gumbel-max sampling on a pretrained model.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(tempfile.gettempdir()) / "shoal-sampling")
    parser.add_argument("--model", type=Path, help="a model folder; without it SmolLM2-135M is fetched into FOLDER")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--sequences", type=int, default=32, help="rows per scheme, of " + " and ".join(MANY).replace("%", "%%")
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--few", type=int, default=8, help="rows per scheme, of the others")
    parser.add_argument("--few-tokens", type=int, default=64)
    parser.add_argument("--provers", help="some of: " + ", ".join(PROVERS).replace("%", "%%"))
    parser.add_argument("--report", action="store_true", help="only print what FOLDER holds")
    parser.add_argument("--steer-repeat", type=int, default=0, help="u drawn per position for the steering attacker")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    main()
