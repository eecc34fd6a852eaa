"""`shoal doctor --bench`: how many tokens a second this machine draws and checks, beside `transformers.generate`, and
what a run would get of that. Needs torch.

    small calls, each larger ──► a call of about `CALL_S` ──► rounds of four measurements; the best of each counts
    with a run: its newest policy and its lengths; how fast it verifies tokens is seen meanwhile
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shoal.client import HubClient
from shoal.engines import BoundedEngine, Engine, GenerationRequest, Groups, PrefillRequest, build, choose, resolved
from shoal.models import read_config
from shoal.protocol import ProofParameters, RunStatus, SamplingParameters
from shoal.run.folder import hub_address
from shoal.run.progress import tokens_credited
from shoal.run.trials import HUB_S, TrialOptions, policy_of_folder, policy_of_run
from shoal.runtime import StopToken

if TYPE_CHECKING:
    from shoal.engines.torch import TorchEngine

log = logging.getLogger(__name__)
GROUP, MOST_ROWS = 16, 256
PROMPT_TOKENS, FIRST_TOKENS = 32, 8
CALL_S, BUDGET_S = 2.5, 36.0
MOST_ROUNDS = 12
UNBOUND = 1 << 20
TRANSFORMERS = "transformers.generate"
LABELS = {
    "generate": "generate", "worker": "generate with proofs", "prefill": "prefill with checks",
    "transformers": TRANSFORMERS,
}  # fmt: skip

Report = Callable[[int, int, str], None]


@dataclass(frozen=True)
class RunShare:
    """How fast a run verified tokens in the last `seconds`; the part of its work that this machine would do beside."""

    run: str
    tokens_s: float
    seconds: float
    share: float


@dataclass(frozen=True)
class Benchmark:
    """Tokens a second, the best of `rounds`. `worker`: generated with proofs, which is what a worker does; `prefill`:
    completions recomputed with all that a validator compares. `transformers` is None where it cannot compute this.
    `busy_cores`: how many other programs kept busy when it began."""

    kind: str
    parameters: int
    rows: int
    prompt_tokens: int
    new_tokens: int
    rounds: int
    generate: float
    worker: float
    prefill: float
    transformers: float | None
    verified_tokens_per_hour: int
    busy_cores: float
    run: RunShare | None

    def lines(self) -> Iterator[str]:
        size = f"{self.rows} completions of {self.prompt_tokens} + {self.new_tokens} tokens"
        yield f"{self.kind}, {self.parameters:,} weights, {size}, best of {self.rounds} rounds, in tokens/s:"
        beside = "" if self.transformers is None else f"  {self.generate / self.transformers:.2f} x {TRANSFORMERS}"
        yield f"  generate               {self.generate:10,.0f}{beside}"
        cost = max(0.0, 1 - self.worker / self.generate)
        yield f"  generate with proofs   {self.worker:10,.0f}  the work of a worker; proofs cost {cost:.0%}"
        yield f"  prefill with checks    {self.prefill:10,.0f}  the work of a validator"
        theirs = "  cannot compute it" if self.transformers is None else f"{self.transformers:10,.0f}"
        yield f"  {TRANSFORMERS}  {theirs}"
        yield f"a run that always has work for it gets {self.verified_tokens_per_hour:,} verified tokens an hour of it"
        if self.busy_cores > 0.5:
            yield f"other programs kept {self.busy_cores:.1f} cores busy when this began: a quiet machine does more"
        if self.run is not None:
            seen = f"run {self.run.run} verified {self.run.tokens_s:,.0f} tokens/s in the last {self.run.seconds:.0f} s"
            yield f"{seen}: this machine would do {self.run.share:.0%} of its work"


@dataclass(frozen=True)
class Workload:
    """Groups of completions that all run to their full length: the end token is one that is never drawn."""

    rows: int
    prompt_tokens: int
    new_tokens: int

    def requests(self, vocabulary: int, temperature: float) -> list[GenerationRequest]:
        random, group = np.random.default_rng(0), min(GROUP, self.rows)
        sampling = SamplingParameters(
            temperature=temperature, max_new_tokens=self.new_tokens, eos_token_ids=(vocabulary,)
        )
        prompts = random.integers(0, vocabulary, (self.rows // group, self.prompt_tokens)).tolist()
        return [
            GenerationRequest(tuple(prompt), tuple(range(place * group, (place + 1) * group)), sampling)
            for place, prompt in enumerate(prompts)
        ]

    def larger(self, most_rows: int, most_tokens: int) -> Workload | None:
        """Four times the rows, or else twice the tokens; None if that is more than is wanted."""
        if 4 * self.rows <= most_rows:
            return replace(self, rows=4 * self.rows)
        tokens = min(2 * self.new_tokens, most_tokens)
        return replace(self, new_tokens=tokens) if tokens > self.new_tokens else None


class Bench:
    """`plain` is torch's engine with the same weights, whose model transformers computes with."""

    def __init__(
        self, engine: Engine, plain: TorchEngine, positions: int, new_tokens: int, temperature: float,
        proof: ProofParameters, report: Report, now_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._engine, self._plain, self._temperature, self._proof = engine, plain, temperature, proof
        self._report, self._now_s, self._began_s = report, now_s, now_s()
        prompt = max(1, min(PROMPT_TOKENS, positions // 2))
        self._most_tokens = max(1, min(new_tokens, positions - prompt))
        self.workload = Workload(4, prompt, min(FIRST_TOKENS, self._most_tokens))
        self.rounds = 0
        self.best: dict[str, float] = {}

    def run(self) -> None:
        def took_s() -> float:
            return self._timed("worker", lambda: self._drawn(self._proof))

        engine, longest = self._engine, self.workload.prompt_tokens + self._most_tokens
        most_rows = min(MOST_ROWS, engine.rows_at_once(longest)) if isinstance(engine, BoundedEngine) else MOST_ROWS
        while took_s() < CALL_S / 4 or took_s() < CALL_S / 4:  # the first call of a size may load kernels
            if (larger := self.workload.larger(most_rows, self._most_tokens)) is None:
                break
            self.workload = larger
        self.best.clear()
        began_s = self._spent_s()
        while self.rounds < MOST_ROUNDS:
            self._round()
            self.rounds += 1
            if self._spent_s() + (self._spent_s() - began_s) / self.rounds > BUDGET_S:  # another round is too long
                break

    def _round(self) -> None:
        groups: list[Groups] = []
        self._timed("generate", lambda: self._drawn(None))
        self._timed("worker", lambda: groups.append(self._drawn(self._proof)))
        given = [
            PrefillRequest(request.prompt_ids, each.token_ids, self._temperature)
            for request, group in zip(self._requests(), groups[0], strict=True)
            for each in group
        ]
        self._timed("prefill", lambda: self._engine.prefill(given, self._proof))
        try:
            self._timed("transformers", self._by_transformers)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # another library, any model
            log.warning("%s does not compute this model: %s", TRANSFORMERS, error)

    def _timed(self, name: str, call: Callable[[], object]) -> float:
        self._report(min(int(self._spent_s()), int(BUDGET_S)), int(BUDGET_S), LABELS[name])
        began_s = self._now_s()
        call()
        if self._plain.model.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        took_s = max(self._now_s() - began_s, 1e-6)
        self.best[name] = max(self.best.get(name, 0.0), self.workload.rows * self.workload.new_tokens / took_s)
        return took_s

    def _requests(self) -> list[GenerationRequest]:
        return self.workload.requests(self._engine.vocabulary_size, self._temperature)

    def _drawn(self, proof: ProofParameters | None) -> Groups:
        return self._engine.generate(self._requests(), proof)

    def _by_transformers(self) -> None:
        import torch

        model, requests = self._plain.model, self._requests()
        ids = torch.tensor([request.prompt_ids for request in requests], device=model.device)
        tokens = self.workload.new_tokens
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, num_return_sequences=len(requests[0].seeds),
            max_new_tokens=tokens, min_new_tokens=tokens, top_k=0, temperature=self._temperature, pad_token_id=0,
        )  # fmt: skip

    def _spent_s(self) -> float:
        return self._now_s() - self._began_s


def run_bench(options: TrialOptions, stop: StopToken, report: Report) -> Benchmark:
    from shoal.engines.torch import TorchEngine

    device, dtype, tokens, proof, before = options.device, options.dtype, options.tokens, ProofParameters(), None
    report(0, int(BUDGET_S), "loading")
    busy_cores = os.getloadavg()[0]
    if options.url is not None:
        files, tensors, info = policy_of_run(options.url, stop)
        device, dtype = choose(options.engine, device, dtype, info.profiles)
        proof, tokens, before = info.proof, info.sampling.max_new_tokens, status_of(options.url, stop)
    else:
        device, dtype = resolved(options.engine, device, dtype)
        files, tensors = policy_of_folder(options.model, dtype)
    engine = build(options.engine, files, device, dtype)
    engine.load_policy(None, tensors)
    plain = engine if isinstance(engine, TorchEngine) else TorchEngine(files, dtype, device)
    if plain is not engine:
        plain.load_policy(None, tensors)
    positions = int(read_config(files).get("max_position_embeddings") or UNBOUND)
    bench = Bench(engine, plain, positions, tokens, options.temperature, proof, report)
    bench.run()
    after = None if options.url is None else status_of(options.url, stop)
    size, best = bench.workload, bench.best
    return Benchmark(
        kind=engine.kind, parameters=sum(parameter.numel() for parameter in plain.model.parameters()), rows=size.rows,
        prompt_tokens=size.prompt_tokens, new_tokens=size.new_tokens, rounds=bench.rounds, generate=best["generate"],
        worker=best["worker"], prefill=best["prefill"], transformers=best.get("transformers"),
        verified_tokens_per_hour=int(3600 * best["worker"]), busy_cores=busy_cores,
        run=share_of(before, after, best["worker"]),
    )  # fmt: skip


def status_of(url: str, stop: StopToken) -> RunStatus:
    with closing(HubClient.of_a_person(*hub_address(url, HUB_S), stop)) as hub:
        return hub.status()


def share_of(before: RunStatus | None, after: RunStatus | None, worker: float) -> RunShare | None:
    if before is None or after is None:
        return None
    seconds = max((after.now_ms - before.now_ms) / 1000, 0.001)
    tokens_s = max(0, tokens_credited(after) - tokens_credited(before)) / seconds
    return RunShare(after.run, tokens_s, seconds, worker / (tokens_s + worker))
