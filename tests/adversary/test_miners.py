"""What miners of live networks did: each is caught, or submits what the seeds give, token by token."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from kit.trial import PROFILES, Harness, Judged, Trial, audit_job, farthest
from shoal import protocol
from shoal.adversary import Cheat, CheatContext
from shoal.adversary.base import EngineWrapper, rewriting, with_honest_proofs
from shoal.engines import Completion, Engine, GenerationRequest, Groups, LoadedPolicy, PrefillRequest
from shoal.engines.cache import GrowingLayer
from shoal.engines.torch import TorchEngine
from shoal.models.load import load_model
from shoal.sampling import uniforms
from shoal.validator.calibrate import Measurement, Plan, measure
from shoal.validator.canary import CANARY_CHEATS, original_of
from shoal.validator.case import SeenWork
from shoal.validator.judge import Judge
from shoal.validator.profiles import NoiseLimits
from shoal.validator.verdicts import AuditJob

BFLOAT16 = "torch/cpu/bfloat16"
NEVER = 96  # beyond the vocabulary of the tiny policy: rollouts that would end with it have the full length


class Formats(Harness):
    """A harness in which worker and validator may compute in different number formats, under limits as measured."""

    measurement: Measurement | None = None

    def __init__(
        self, worker: str = "float32", validator: str = "float32", long: bool = False, **settings: Any
    ) -> None:
        super().__init__(profile=f"torch/cpu/{worker}", **settings)
        self.worker = worker
        if worker != "float32":
            self.loaded = load_model("tiny", worker)
        if long:
            self.sampling = self.sampling.model_copy(update={"eos_token_ids": (NEVER,)})
            config = self.loaded.model.config  # more positions than it was trained for
            config.max_position_embeddings = 2 * self.sampling.max_new_tokens
            config_json = {"config.json": config.to_json_string(use_diff=False).encode()}
            self.loaded = replace(self.loaded, files={**self.loaded.files, **config_json})
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
            prompts, sampling.eos_token_ids, tokens=sampling.max_new_tokens, temperature=sampling.temperature,
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

    def __init__(self, make: Callable[[Engine, CheatContext], Engine]) -> None:
        self._make = make

    def engine(self, engine: Engine, loot: CheatContext, /) -> Engine:
        return self._make(engine, loot)


def rewritten(engine: Engine, change: Callable[[Any, GenerationRequest], Any], most: int = 10**6) -> Engine:
    """`change` gives other tokens for a completion, or None: it stays as it is. At most `most` of each group."""

    def rewrite(_engine: Engine, request: GenerationRequest, group: list[Completion]) -> list[Completion]:
        found, left = list(group), most
        for index, each in enumerate(group):
            tokens = change(each.token_ids, request) if left else None
            if tokens is not None:
                found[index], left = finished(each, tokens, request), left - 1
        return found

    return EngineWrapper(engine, rewriting(rewrite))


def finished(completion: Completion, tokens: Any, request: GenerationRequest) -> Completion:
    """The same with other tokens, which say how they ended."""
    sampling, ids = request.sampling, np.asarray(tokens, dtype=np.int32)[: request.sampling.max_new_tokens]
    finish = "eos" if ids[-1] in sampling.eos_token_ids else "length"
    return replace(completion, token_ids=ids, logprobs=np.zeros(len(ids), np.float32), finish=finish)


def repeated_ends(tokens: Any, request: GenerationRequest) -> Any:
    """The end-of-sequence token again and again, up to the length limit."""
    sampling = request.sampling
    return [*tokens, *sampling.eos_token_ids[:1] * (sampling.max_new_tokens - len(tokens))]


def early_end(tokens: Any, request: GenerationRequest) -> Any:
    """Ended after half of its tokens."""
    return [*tokens[: len(tokens) // 2], request.sampling.eos_token_ids[0]] if len(tokens) > 2 else None


def no_end(engine: Engine, filler: int) -> Callable[[Any, GenerationRequest], Any]:
    """The end is replaced by another token, and what follows is drawn by the seed, as if the end had never come."""

    def change(tokens: Any, request: GenerationRequest) -> Any:
        sampling = request.sampling
        if tokens[-1] not in sampling.eos_token_ids:
            return None
        begun = (*tokens[:-1].tolist(), filler)
        free = sampling.model_copy(update={"eos_token_ids": (NEVER,), "max_new_tokens": sampling.max_new_tokens})
        asked = replace(request, prompt_ids=(*request.prompt_ids, *begun), seeds=request.seeds[:1], sampling=free)
        more = engine.generate([replace(asked, begun=len(begun))])[0][0].token_ids
        return [*begun, *np.where(np.isin(more, sampling.eos_token_ids), filler, more)]

    return change


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


class CoarseCache(EngineWrapper):
    """Keys and values are rounded as they are kept. With `vouching` proofs and log-probabilities are of the right
    policy; without, of the states that it computed."""

    def __init__(self, engine: Engine, how: Callable[[Tensor], Tensor], vouching: bool = False) -> None:
        super().__init__(plain(engine))
        self._how, self._vouching = how, vouching

    def load_policy(self, ref: protocol.PolicyRef | None, tensors: Mapping[str, protocol.TensorView]) -> None:
        super().load_policy(ref, tensors)
        self._engine.rows_at_once(1)  # while the cache is right: the engine tries it once

    def generate(self, requests: Sequence[GenerationRequest], proof: protocol.ProofParameters | None = None) -> Groups:
        honest, how = GrowingLayer.update, self._how

        def update(layer: Any, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> Any:
            return honest(layer, how(keys), how(values), *rest, **options)

        with patch.object(GrowingLayer, "update", update):
            drawn = self._engine.generate(requests, None if self._vouching else proof)
        return with_honest_proofs(self._engine, requests, drawn, proof) if self._vouching else drawn


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


class EarlyExit(EngineWrapper):
    """Decodes without the last layers, and has the whole policy vouch for it in one prefill."""

    def __init__(self, engine: Engine, layers: int = 1) -> None:
        super().__init__(plain(engine))
        self._layers = layers

    def drafted(self, requests: Sequence[GenerationRequest]) -> Groups:
        assert isinstance(self._engine, TorchEngine)
        with without_last_layers(self._engine.model, self._layers):
            return self._engine.generate(requests)

    def generate(self, requests: Sequence[GenerationRequest], proof: protocol.ProofParameters | None = None) -> Groups:
        return with_honest_proofs(self._engine, requests, self.drafted(requests), proof)


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

    def generate(self, requests: Sequence[GenerationRequest], proof: protocol.ProofParameters | None = None) -> Groups:
        rows = [(request, seed, list[int]()) for request in requests for seed in request.seeds]
        while waiting := [row for row in rows if not _ended(*row)]:
            self._round(waiting)
        done = iter([_completion(request, tokens) for request, _, tokens in rows])
        return with_honest_proofs(
            self._engine, requests, [[next(done) for _ in request.seeds] for request in requests], proof
        )

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
    ends = [place for place, token in enumerate(tokens) if token in request.sampling.eos_token_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def _ended(request: GenerationRequest, _seed: int, tokens: list[int]) -> bool:
    sampling = request.sampling
    return bool(tokens) and (tokens[-1] in sampling.eos_token_ids or len(tokens) >= sampling.max_new_tokens)


def _completion(request: GenerationRequest, tokens: list[int]) -> Completion:
    return finished(Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "eos"), tokens, request)


FILLER, SPACE = 5, 4  # the digit 0, and " "
GROUPS = 16
BANNED_BY = {  # groups that it takes at most; 2 statistical failures, or 1 that is certain
    "repeated-ends": (lambda e: rewritten(e, repeated_ends), 1, {"termination.past_eos"}),
    "early-ends": (lambda e: rewritten(e, early_end), 1, {"sampling.seed"}),
    "one-early-end-in-each-group": (lambda e: rewritten(e, early_end, most=1), 2, {"sampling.seed"}),
    "one-end-suppressed-in-each-group": (lambda e: rewritten(e, no_end(e, FILLER), most=1), 2, {"sampling.seed"}),
    "int8-cache": (lambda e: CoarseCache(e, int8), 3, {"proofs.drift", "proofs.mismatch"}),
    "fp8-cache": (lambda e: CoarseCache(e, fp8), 2, {"proofs.drift", "proofs.mismatch"}),
    "int8-cache-with_honest_proofs-for": (lambda e: CoarseCache(e, int8, vouching=True), GROUPS, {"sampling.seed"}),
    "fp8-cache-with_honest_proofs-for": (lambda e: CoarseCache(e, fp8, vouching=True), 8, {"sampling.seed"}),
    "early-exit": (lambda e: EarlyExit(e), 2, {"sampling.seed"}),
    "speculative-above-0.3": (lambda e: Speculative(e, above(0.3)), 8, {"sampling.seed"}),
    "speculative-typical": (lambda e: Speculative(e, typical()), 8, {"sampling.seed"}),
}


@pytest.fixture(scope="module")
def harness() -> Formats:
    return Formats()


@pytest.fixture(scope="module")
def honest(harness: Formats) -> Trial:
    """Groups of the same units, as they should be."""
    return harness.tried(Cheat(), range(GROUPS))


def tried(harness: Formats, make: Callable[[Engine], Engine]) -> Trial:
    return harness.tried(Miner(lambda engine, _context: make(engine)), range(GROUPS), stop_when_banned=True)


def tokens_of(judged: Judged) -> list[bytes]:
    return [rollout.tokens for rollout in judged.submission.rollouts]


@pytest.mark.parametrize("name", BANNED_BY)
def test_miner_is_banned_and_what_passed_equals_honest_work(name: str, harness: Formats, honest: Trial) -> None:
    make, groups, reasons = BANNED_BY[name]
    trial = tried(harness, make)
    banned = trial.until_banned()
    assert banned[0] <= groups
    assert {each.verdict.reason for each in trial.rejected} <= reasons
    for mined, asked in zip(trial.judged, honest.judged, strict=False):
        assert mined.verdict.outcome is protocol.Outcome.REJECTED or tokens_of(mined) == tokens_of(asked)


@pytest.mark.parametrize("accepts", [exact, above(0.9)])
def test_speculative_decoding_of_the_seeds_tokens_is_accepted(accepts: Any, harness: Formats, honest: Trial) -> None:
    """Drafts are not forbidden: a worker with the tokens that the seeds give has done what was asked, faster."""
    made: list[Speculative] = []

    def make(engine: Engine) -> Engine:
        made.append(Speculative(engine, accepts))
        return made[0]

    trial = tried(harness, make)
    assert [tokens_of(each) for each in trial.judged] == [tokens_of(each) for each in honest.judged]
    assert {each.verdict.outcome for each in trial.judged} == {protocol.Outcome.ACCEPTED}
    assert made[0].taken > 0.5 * made[0].drafts


def judged(harness: Formats, each: Judged, submission: protocol.Submission) -> protocol.Verdict:
    return verdict_on(harness, audit_job(each.lease, submission))


def verdict_on(harness: Formats, on_table: AuditJob) -> protocol.Verdict:
    truth = LoadedPolicy(on_table.lease.policy, harness.engine(), harness.files)
    [verdict] = replace(harness.judge, seen=SeenWork()).verdicts([on_table], truth)
    return verdict


def with_first(submission: protocol.Submission, **changes: Any) -> protocol.Submission:
    first, *others = submission.rollouts
    return msgspec.structs.replace(submission, rollouts=[msgspec.structs.replace(first, **changes), *others])


def spans(*pairs: int) -> bytes:
    return protocol.pack_tokens(np.array(pairs))


ROLLOUT_FIELDS: dict[str, tuple[Callable[[protocol.Rollout], object], str]] = {
    "tokens": (lambda r: protocol.pack_tokens(np.roll(r.token_ids, 1)), "termination.past_eos"),
    "logprobs": (lambda r: protocol.pack_logprobs(r.logprob_values - np.float32(0.05)), "logprobs.mismatch"),
    "finish": (lambda r: {"eos": "length", "length": "eos"}[r.finish], "termination.finish"),
    "proofs": (lambda r: r.proofs[:-2], "proofs.malformed"),
    "given": (lambda _: spans(1, 2), "dialogue.forged"),
}
SUBMISSION_FIELDS: dict[str, tuple[object, str]] = {
    "format": (2, "envelope.format"),
    "run": ("another", "lease.mismatch"),
    "node": ("another", "lease.mismatch"),
    "lease": ("another", "lease.mismatch"),
    "unit": (10**6, "lease.mismatch"),
    "incarnation": (1, "policy.mismatch"),
    "version": (1, "policy.mismatch"),
    "policy_digest": ("f" * 64, "policy.mismatch"),
    "prompt": (protocol.pack_tokens(np.array([7, 8, 9])), "prompt.mismatch"),
    "engine": ("a faster one", ""),  # nobody reads it but people
}


def test_every_declared_field_is_checked_or_unused(harness: Formats, honest: Trial) -> None:
    """No field of a submission says what is trained on: a mask, an end or a length that is not so is rejected for
    certain, but for log-probabilities, which rounding moves. A field that is added must be added here."""
    each = honest.judged[0]
    assert {field.name for field in msgspec.structs.fields(protocol.Rollout)} == set(ROLLOUT_FIELDS)
    assert {field.name for field in msgspec.structs.fields(protocol.Submission)} == {*SUBMISSION_FIELDS, "rollouts"}
    for name, (change, reason) in ROLLOUT_FIELDS.items():
        lie = with_first(each.submission, **{name: change(each.submission.rollouts[0])})
        verdict = judged(harness, each, lie)
        assert (name, verdict.outcome, verdict.reason) == (name, protocol.Outcome.REJECTED, reason)
        assert verdict.severity is (protocol.Severity.STATISTICAL if name == "logprobs" else protocol.Severity.CERTAIN)
    for name, (value, reason) in SUBMISSION_FIELDS.items():
        verdict = judged(harness, each, msgspec.structs.replace(each.submission, **{name: value}))
        assert (name, verdict.reason) == (name, reason)
    few = msgspec.structs.replace(each.submission, rollouts=each.submission.rollouts[1:])
    assert judged(harness, each, few).reason == "shape.rollouts"


@pytest.mark.parametrize(("given", "reason"), [
    (spans(1, 1), "dialogue.forged"),  # the second token is not to be trained on
    (spans(0, 1), "dialogue.malformed"),  # nor the first: no dialogue begins with the tool
    (spans(0, 0), "dialogue.malformed"),
    (spans(0, 10**6), "dialogue.malformed"),
    (spans(0), "dialogue.malformed"),
    (spans(1, 1, 0, 1), "dialogue.malformed"),
])  # fmt: skip
def test_loss_mask_by_tool_spans_without_tool_refused(given, reason, harness, honest):
    each = honest.judged[1]
    verdict = judged(harness, each, with_first(each.submission, given=given))
    assert (verdict.reason, verdict.severity) == (reason, protocol.Severity.CERTAIN)


def test_same_text_in_more_tokens_is_rejected(harness: Formats, honest: Trial) -> None:
    """The tiny policy has one token for each character, so a space stands for a token that was split: a grader that
    reads over it sees the same text, and more tokens would be paid."""

    def split(tokens: Any, request: GenerationRequest) -> Any:
        fits = 1 < len(tokens) < request.sampling.max_new_tokens
        return [*tokens[:1], SPACE, *tokens[1:]] if fits else None

    def text(each: Judged) -> list[str]:
        ids = [rollout.token_ids.tolist() for rollout in each.submission.rollouts]
        return [harness.loaded.tokenizer.decode(tokens).replace(" ", "") for tokens in ids]

    first = tried(harness, lambda engine: rewritten(engine, split)).judged[0]
    assert text(first) == text(honest.judged[0])
    assert first.tokens > honest.judged[0].tokens
    assert (first.verdict.reason, first.verdict.severity) == ("sampling.seed", protocol.Severity.CERTAIN)


# ── where rounding is coarse: bfloat16 workers, limits as measured, float32 and bfloat16 looks ───────────────────────
#
# The tiny policy's own noise hides more than a real model's (a run would refuse these limits). Single tokens, declared
# log-probabilities, proofs and canaries are held here all the same.


@pytest.fixture(scope="module")
def coarse() -> Formats:
    return Formats("bfloat16", "float32", group_size=8)


@pytest.fixture(scope="module")
def long() -> Formats:
    """Rollouts of three whole chunks, which no end cuts short."""
    return Formats("bfloat16", "float32", long=True, group_size=4, max_new_tokens=96, temperature=2.0)


@pytest.fixture(scope="module")
def honest_long(long: Formats) -> Trial:
    trial = long.tried(Cheat(), range(12))
    assert {each.verdict.outcome for each in trial.judged} == {protocol.Outcome.ACCEPTED}
    return trial


@pytest.mark.parametrize("name", ["an early end", "a suppressed end"])
def test_group_with_one_wrong_end_is_not_accepted(name: str, coarse: Formats) -> None:
    """Not trained on, not paid, and struck when their number shows: what a far token would have to pass for, an
    accident of the arithmetic, is rare."""

    def make(engine: Engine, _context: object) -> Engine:
        change = early_end if name == "an early end" else no_end(engine, FILLER)
        return rewritten(engine, change, most=1)

    trial = coarse.tried(Miner(make), range(24))
    limit = coarse.judge.profiles[coarse.profile].sampling.distance
    accepted = [each for each in trial.judged if each.verdict.outcome is protocol.Outcome.ACCEPTED]
    for each in accepted:
        assert min(farthest(engine, each.lease, each.submission) for engine in coarse.engines.values()) <= limit
    assert len(accepted) < len(trial.judged) / 2
    assert trial.until_caught() is not None


def test_one_wrong_log_probability_is_not_accepted(coarse: Formats) -> None:
    """A ratio of e¹⁰⁰⁰ would be trained on; and of what was accepted so, a canary would be made that passes."""
    for lease, submission in coarse.groups(Cheat(), [coarse.lease(unit) for unit in range(4)]):
        values = submission.rollouts[0].logprob_values.copy()
        values[0] = -1000.0
        verdict = verdict_on(coarse, audit_job(lease, with_first(submission, logprobs=protocol.pack_logprobs(values))))
        assert (verdict.outcome, verdict.reason) == (protocol.Outcome.UNSURE, "sampling.accident")


@pytest.mark.parametrize("name", ["fp8-cache", "fp8-cache-with_honest_proofs-for", "early-exit"])
def test_shortcuts_coarser_than_bfloat16_are_banned(name: str, long: Formats) -> None:
    make, _, reasons = BANNED_BY[name]
    trial = tried(long, make)
    assert trial.until_banned() is not None
    also = {"sampling.drift", "logprobs.mismatch", "likelihood.unlikely"}
    assert {each.verdict.reason for each in trial.rejected} <= reasons | also


def test_wrong_acceptance_of_a_bfloat16_worker_is_banned_or_passes_only_within_the_tolerance(
    long: Formats, honest_long: Trial
) -> None:
    """The rule for typical tokens is banned. That above a probability of 0.3 is not where noise is as wide as this
    policy's: a bound (docs/guides/attack-your-run.md). Of what passes no token is farther off than one honest token may
    be, and a run refuses these limits."""
    trial = tried(long, lambda engine: Speculative(engine, typical()))
    assert trial.until_banned() is not None
    assert {each.verdict.reason for each in trial.rejected} <= {"sampling.seed", "sampling.drift"}
    few = long.tried(Miner(lambda engine, _context: Speculative(engine, above(0.3))), range(6))
    limit, looks = long.judge.profiles[long.profile].sampling.distance, long.engines.values()
    accepted = [each for each in few.judged if each.verdict.outcome is protocol.Outcome.ACCEPTED]
    assert all(min(farthest(engine, each.lease, each.submission) for engine in looks) <= limit for each in accepted)
    pairs = zip(few.judged, honest_long.judged, strict=False)
    assert any(tokens_of(mined) != tokens_of(asked) for mined, asked in pairs if mined in accepted)
    assert long.measurement is not None
    assert long.measurement.problems


def test_int8_cache_of_a_bfloat16_worker_passes(long: Formats) -> None:
    """A bound, not a guard (docs/guides/attack-your-run.md): in float32 it is banned, see above."""
    trial = tried(long, lambda engine: CoarseCache(engine, int8))
    assert not trial.rejected
    sums = reduce(protocol.Tally.plus, [each.verdict.tally for each in trial.judged])
    assert all(sums.of(name).seen < sums.of(name).expected for name in NoiseLimits.model_fields)


@pytest.fixture(scope="module")
def very_long() -> Formats:
    return Formats("bfloat16", "float32", long=True, group_size=4, max_new_tokens=512, temperature=2.0)


@pytest.mark.parametrize(("fixture", "groups"), [("long", 12), pytest.param("very_long", 6, marks=pytest.mark.slow)])
def test_no_canary_of_long_rollouts_is_accepted(fixture, groups, request):
    long, found = request.getfixturevalue(fixture), Counter[tuple[str, protocol.Outcome]]()
    honest = long.tried(Cheat(), range(groups)).judged
    assert {each.verdict.outcome for each in honest} == {protocol.Outcome.ACCEPTED}
    for each in honest:
        original = original_of(audit_job(each.lease, each.submission), long.judge, long.engine())
        for name, spoil in CANARY_CHEATS.items():
            if (twin := spoil(original)) is not None:
                found[name, verdict_on(long, twin).outcome] += 1
    assert {name for name, _ in found} == set(CANARY_CHEATS)
    assert not any(found[name, protocol.Outcome.ACCEPTED] for name in CANARY_CHEATS)
    assert all(
        found[name, protocol.Outcome.REJECTED] > 3 * found[name, protocol.Outcome.UNSURE] for name in CANARY_CHEATS
    )


def chunks(rollout: protocol.Rollout) -> list[bytes]:
    size = len(rollout.proofs) // 3
    return [rollout.proofs[start : start + size] for start in range(0, 3 * size, size)]


FORGERIES: dict[str, tuple[Callable[[list[list[bytes]]], list[list[bytes]]], set[str]]] = {
    "first chunk of another": (
        lambda own: [[own[0][0], *each[1:]] for each in own], {"duplicate.proof", "proofs.mismatch"}
    ),
    "swapped": (lambda own: [[each[1], each[0], *each[2:]] for each in own], {"duplicate.proof", "proofs.mismatch"}),
    "first chunks only": (lambda own: [each[:1] for each in own], {"proofs.malformed"}),
    "one repeated": (lambda own: [[each[0]] * 3 for each in own], {"duplicate.proof", "proofs.mismatch"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_proofs_of_other_chunks_are_rejected(name: str, long: Formats, honest_long: Trial) -> None:
    forge, reasons = FORGERIES[name]
    for each in honest_long.judged[:6]:
        rollouts = each.submission.rollouts
        proofs = forge([chunks(rollout) for rollout in rollouts])
        forged = [msgspec.structs.replace(one, proofs=b"".join(own)) for one, own in zip(rollouts, proofs, strict=True)]
        verdict = judged(long, each, msgspec.structs.replace(each.submission, rollouts=forged))
        assert (verdict.outcome, verdict.reason in reasons) == (protocol.Outcome.REJECTED, True)


def test_equal_rollouts_may_have_equal_proofs(long: Formats, honest_long: Trial) -> None:
    """Two seeds that give the same tokens have the same proof: copying it is no cheat, and no `duplicate.proof`."""
    each = honest_long.judged[0]
    lease = each.lease.model_copy(update={"seeds": (each.lease.seeds[0],) * len(each.lease.seeds)})
    same = msgspec.structs.replace(each.submission, rollouts=[each.submission.rollouts[0]] * len(lease.seeds))
    verdict = verdict_on(long, audit_job(lease, same))
    assert (verdict.outcome, verdict.reason) == (protocol.Outcome.ACCEPTED, "")
