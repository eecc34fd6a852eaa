"""What miners of live networks did, as engines that replace the honest one. Each does the rest as well as it can.

    tokens      after the end, ends forced or suppressed, another spelling of the same text
    shortcuts   key-value caches of 8 bits, the last layers left out, speculative decoding that accepts too much
    proofs      copied over a shared prefix, of some chunks only, swapped

Where tokens were not drawn as asked, the right policy vouches for them (`vouched`): only the seeds can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from kit.trial import PROFILES, Court
from shoal.adversary import Cheat, Loot
from shoal.adversary.base import Disguise, rewriting, vouched
from shoal.engines import Completion, Engine, GenerationRequest, PrefillRequest
from shoal.engines.protocol import Groups
from shoal.engines.rows import GrowingLayer
from shoal.engines.torch import TorchEngine
from shoal.models.load import load_model
from shoal.protocol import PolicyRef, ProofParameters, TensorView
from shoal.sampling import uniforms
from shoal.validator.calibrate import Measurement, Plan, measure
from shoal.validator.judge import Judge

BFLOAT16 = "torch/cpu/bfloat16"
NEVER = 96  # beyond the vocabulary of the tiny policy: rollouts that would end with it have the full length


class Mine(Court):
    """A court in which worker and validator may compute in different number formats, under limits as measured."""

    measurement: Measurement | None = None

    def __init__(
        self, worker: str = "float32", validator: str = "float32", long: bool = False, **settings: Any
    ) -> None:
        super().__init__(profile=f"torch/cpu/{worker}", **settings)
        self.worker = worker
        if worker != "float32":
            self.loaded = load_model("tiny", worker)
        if long:
            self.sampling = self.sampling.model_copy(update={"eos_token_id": NEVER})
        self.engines = {dtype: self._copied(dtype) for dtype in {worker, validator}}
        self._validator = self.engines[validator]
        if worker != "float32":
            self.measurement = self._measured()
            self.judge = Judge(
                self.environment, {**PROFILES, self.profile: self.measurement.profile},
                second_engine=lambda _policy, dtype: self.engines.get(dtype),
            )  # fmt: skip

    def _copied(self, dtype: str) -> TorchEngine:
        return TorchEngine.wrap(self.loaded.model).copied(self.files, dtype)

    def _measured(self) -> Measurement:
        """As the run's validator would measure: in its own format, and in the worker's for second looks."""
        sampling = self.sampling
        prompts = [self.lease(unit).prompt_ids for unit in range(64)]
        plan = Plan(
            prompts, sampling.eos_token_id, tokens=sampling.max_new_tokens, temperature=sampling.temperature,
            group_size=self.group_size, sequences=max(64, 4 * self.group_size),
        )  # fmt: skip
        return measure(self._copied(self.worker), {f"cpu/{d}": each for d, each in self.engines.items()}, plan)

    def engine(self) -> TorchEngine:
        return self._validator

    def build(self, files: Mapping[str, bytes]) -> Engine:
        return TorchEngine(files, self.worker)


class Miner(Cheat):
    """The cheat of one engine."""

    name, what, reasons = "miner", "for tests", frozenset[str]()

    def __init__(self, make: Callable[[Engine, Loot], Engine]) -> None:
        self._make = make

    def engine(self, engine: Engine, loot: Loot, /) -> Engine:
        return self._make(engine, loot)


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────


def rewritten(engine: Engine, change: Callable[[Any, GenerationRequest], Any], most: int = 10**6) -> Engine:
    """`change` gives other tokens for a completion, or None: it stays as it is. At most `most` of each group."""

    def rewrite(_engine: Engine, request: GenerationRequest, group: list[Completion]) -> list[Completion]:
        found, left = list(group), most
        for index, each in enumerate(group):
            tokens = change(each.token_ids, request) if left else None
            if tokens is not None:
                found[index], left = finished(each, tokens, request), left - 1
        return found

    return Disguise(engine, rewriting(rewrite))


def finished(completion: Completion, tokens: Any, request: GenerationRequest) -> Completion:
    """The same with other tokens, which say how they ended."""
    sampling, ids = request.sampling, np.asarray(tokens, dtype=np.int32)[: request.sampling.max_new_tokens]
    finish = "eos" if ids[-1] == sampling.eos_token_id else "length"
    return replace(completion, token_ids=ids, logprobs=np.zeros(len(ids), np.float32), finish=finish)


def repeated_ends(tokens: Any, request: GenerationRequest) -> Any:
    """The end-of-sequence token again and again, up to the length limit."""
    sampling = request.sampling
    return [*tokens, *[sampling.eos_token_id] * (sampling.max_new_tokens - len(tokens))]


def early_end(tokens: Any, request: GenerationRequest) -> Any:
    """Ended after half of its tokens."""
    return [*tokens[: len(tokens) // 2], request.sampling.eos_token_id] if len(tokens) > 2 else None


def no_end(engine: Engine, filler: int) -> Callable[[Any, GenerationRequest], Any]:
    """The end is replaced by another token, and what follows is drawn by the seed, as if the end had never come."""

    def change(tokens: Any, request: GenerationRequest) -> Any:
        sampling = request.sampling
        if tokens[-1] != sampling.eos_token_id:
            return None
        begun = (*tokens[:-1].tolist(), filler)
        free = sampling.model_copy(update={"eos_token_id": NEVER, "max_new_tokens": sampling.max_new_tokens})
        asked = replace(request, prompt_ids=(*request.prompt_ids, *begun), seeds=request.seeds[:1], sampling=free)
        more = engine.generate([replace(asked, begun=len(begun))])[0][0].token_ids
        return [*begun, *np.where(more == sampling.eos_token_id, filler, more)]

    return change


# ── shortcuts ────────────────────────────────────────────────────────────────────────────────────────────────────


def int8(values: Tensor) -> Tensor:
    """One scale for each head of each token, as key-value caches of 8 bits have it."""
    scale = values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return (values / scale).round() * scale


def fp8(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).to(values.dtype)


def plain(engine: Engine) -> Engine:
    """The same without pages: what is changed here is how transformers decodes."""
    assert isinstance(engine, TorchEngine)
    engine._may_page = False
    return engine


class CoarseCache(Disguise):
    """Keys and values are rounded as they are kept. With `vouching` proofs and log-probabilities are of the right
    policy; without, of the states that it computed."""

    def __init__(self, engine: Engine, how: Callable[[Tensor], Tensor], vouching: bool = False) -> None:
        super().__init__(plain(engine))
        self._how, self._vouching = how, vouching

    def load_policy(self, ref: PolicyRef | None, tensors: Mapping[str, TensorView]) -> None:
        super().load_policy(ref, tensors)
        self._engine.rows_at_once(1)  # while the cache is right: the engine tries it once

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        honest, how = GrowingLayer.update, self._how

        def update(layer: Any, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> Any:
            return honest(layer, how(keys), how(values), *rest, **options)

        with patch.object(GrowingLayer, "update", update):
            drawn = self._engine.generate(requests, None if self._vouching else proof)
        return vouched(self._engine, requests, drawn, proof) if self._vouching else drawn


@contextmanager
def without_last_layers(model: Any, count: int) -> Iterator[None]:
    """The last layers are left out; the final norm and the head stay."""
    layers = model.base_model.layers
    kept = (model.base_model.layers, model.config.num_hidden_layers)
    model.base_model.layers, model.config.num_hidden_layers = layers[: len(layers) - count], len(layers) - count
    try:
        yield
    finally:
        model.base_model.layers, model.config.num_hidden_layers = kept


class EarlyExit(Disguise):
    """Decodes without the last layers, and has the whole policy vouch for it in one prefill."""

    def __init__(self, engine: Engine, layers: int = 1) -> None:
        super().__init__(plain(engine))
        self._layers = layers

    def drafted(self, requests: Sequence[GenerationRequest]) -> Groups:
        assert isinstance(self._engine, TorchEngine)
        with without_last_layers(self._engine.model, self._layers):
            return self._engine.generate(requests)

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        return vouched(self._engine, requests, self.drafted(requests), proof)


Accepts = Callable[[Any, Any], Any]
"""Which drafted tokens are taken, by their log-probabilities under the policy and its entropies there."""


def exact(_logprobs: Any, _entropy: Any) -> Any:
    """None by these: a drafted token is taken only if it is the one that the seed gives under the policy."""
    return np.zeros(len(_logprobs), dtype=bool)


def above(threshold: float) -> Accepts:
    return lambda logprobs, _entropy: logprobs > np.log(threshold)


def typical(epsilon: float = 0.3, delta: float = 0.09) -> Accepts:
    """Tokens of typical probability: above the smaller of epsilon and delta · exp(-entropy)."""
    return lambda logprobs, entropy: logprobs > np.log(np.minimum(epsilon, delta * np.exp(-entropy)))


class Speculative(EarlyExit):
    """The policy without its last layers drafts `ahead` tokens by the lease's seed; the policy takes as many as
    `accepts` allows, or those that are its own, and adds one."""

    def __init__(self, engine: Engine, accepts: Accepts, ahead: int = 4) -> None:
        super().__init__(engine)
        self._accepts, self._ahead = accepts, ahead
        self.taken = self.drafts = 0

    def generate(self, requests: Sequence[GenerationRequest], proof: ProofParameters | None = None) -> Groups:
        rows = [(request, seed, list[int]()) for request in requests for seed in request.seeds]
        while waiting := [row for row in rows if not _ended(*row)]:
            self._round(waiting)
        done = iter([_completion(request, tokens) for request, _, tokens in rows])
        return vouched(self._engine, requests, [[next(done) for _ in request.seeds] for request in requests], proof)

    def _round(self, rows: Sequence[tuple[GenerationRequest, int, list[int]]]) -> None:
        asked = [self._asked(*row, self._ahead) for row in rows]
        drafts = [group[0].token_ids for group in self.drafted(asked)]
        seen = self._engine.prefill(
            [PrefillRequest(a.prompt_ids, d, a.sampling.temperature) for a, d in zip(asked, drafts, strict=True)]
        )
        for (request, seed, tokens), draft, prefill in zip(rows, drafts, seen, strict=True):
            u = uniforms(seed, len(tokens), len(draft))
            own = (prefill.cdf_low <= u) & (u < prefill.cdf_high)
            good = own | self._accepts(prefill.logprobs, prefill.entropy)
            count = len(draft) if good.all() else int(np.argmin(good))
            tokens += _until_end(draft[:count].tolist(), request)
            self.taken, self.drafts = self.taken + count, self.drafts + len(draft)
        left = [row for row in rows if not _ended(*row)]
        if left:
            for (_, _, tokens), group in zip(
                left, self._engine.generate([self._asked(*row, 1) for row in left]), strict=True
            ):
                tokens.append(int(group[0].token_ids[0]))

    def _asked(self, request: GenerationRequest, seed: int, tokens: list[int], count: int) -> GenerationRequest:
        sampling = request.sampling.model_copy(update={"max_new_tokens": count})
        return replace(
            request, prompt_ids=(*request.prompt_ids, *tokens), seeds=(seed,), sampling=sampling, begun=len(tokens)
        )


def _until_end(tokens: list[int], request: GenerationRequest) -> list[int]:
    end = request.sampling.eos_token_id
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def _ended(request: GenerationRequest, _seed: int, tokens: list[int]) -> bool:
    sampling = request.sampling
    return bool(tokens) and (tokens[-1] == sampling.eos_token_id or len(tokens) >= sampling.max_new_tokens)


def _completion(request: GenerationRequest, tokens: list[int]) -> Completion:
    return finished(Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "eos"), tokens, request)
