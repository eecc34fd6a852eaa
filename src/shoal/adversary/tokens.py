"""Cheats that choose tokens, and cheats that make false claims.

Tokens: seeds of their own, the best of several, rewritten completions. The right policy proves tokens that were never
drawn, so only the seeds can show it. Claims: the generated work is honest, but what is said about it is not.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace as changed

from shoal.adversary import base
from shoal.adversary.base import OTHER_TOKENS, Cheat, CheatContext, EngineWrapper, RewardOracle, cheating
from shoal.engines import Completion, Engine, GenerationRequest, Groups, TokenIds
from shoal.models.ending import EndRule
from shoal.protocol import Lease, ProofParameters, Rollout, Submission, pack_logprobs, pack_tokens, unpack_tokens
from shoal.protocol.submission import ShownChunks, ShownProgress, pack_spans

Requests = Sequence[GenerationRequest]
TRIES = 4  # completions from which best-of and grind choose one
COLD = 0.7
NUDGE = 0.05
FAR_TOKEN = 2**31
HONEST_UNITS = 12
LIES = frozenset({"progress.seed", "progress.prefix"})
COPIES = frozenset({"duplicate.rollout", "duplicate.proof"})


def edited(_engine: Engine, request: GenerationRequest, tokens: TokenIds) -> TokenIds:
    eos, middle, changed = request.sampling.eos_token_ids, len(tokens) // 2, tokens.copy()
    if tokens[middle] not in eos:
        changed[middle] = next(token for token in tokens[middle] + (-1, 1, 2) if token not in (*eos, -1))
    return changed


def padded(engine: Engine, request: GenerationRequest, tokens: TokenIds) -> TokenIds:
    """Appends the likeliest tokens up to the limit, none of them an end."""
    most, eos = request.sampling.max_new_tokens, request.sampling.eos_token_ids
    [more] = engine.greedy([(*request.prompt_ids, *tokens.tolist())], most, ())
    added = more[: most - len(tokens)]
    harmless = next(token for token in range(len(eos) + 1) if token not in eos)
    return np.append(tokens, np.where(np.isin(added, eos), harmless, added))


def running_on(engine: Engine, request: GenerationRequest, tokens: TokenIds) -> TokenIds:
    return padded(engine, request, tokens[:-1] if tokens[-1] in request.sampling.eos_token_ids else tokens)


def answering(engine: Engine, context: CheatContext) -> Engine:
    oracle = RewardOracle(context)

    def answered(_engine: Engine, request: GenerationRequest, tokens: TokenIds) -> TokenIds:
        task, sampling = oracle.task(request.prompt_ids), request.sampling
        ids = [] if task is None else list(oracle.tokenizer.encode(task.answer))
        return np.array([*ids, sampling.eos_token_ids[0]]) if 0 < len(ids) < sampling.max_new_tokens else tokens

    return EngineWrapper(engine, base.each_completion(answered))


def swapping(engine: Engine, _context: CheatContext) -> Engine:
    """Proofs and log-probabilities are those of the prompt that it answered."""
    first: list[tuple[int, ...]] = []

    def draw(engine: Engine, requests: Requests, proof: ProofParameters | None) -> Groups:
        first.append(requests[0].prompt_ids)
        return engine.generate([replace(request, prompt_ids=first[0]) for request in requests], proof)

    return EngineWrapper(engine, draw)


def own_seeds(seeds: Sequence[int], tries: int = TRIES) -> tuple[int, ...]:
    """`tries` other seeds for each; the same every time, so an attack can be repeated."""
    named = (f"best-of/{seed}/{number}" for seed in seeds for number in range(tries))
    return tuple(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") for name in named)


def by_own_seeds(engine: Engine, requests: Requests, proof: ProofParameters | None) -> Groups:
    return engine.generate([replace(request, seeds=own_seeds(request.seeds, 1)) for request in requests], proof)


def _best(oracle: RewardOracle, request: GenerationRequest, group: list[Completion]) -> list[Completion]:
    value = oracle.of(request.prompt_ids)
    return [max(group[start : start + TRIES], key=value) for start in range(0, len(group), TRIES)]


def choosing(engine: Engine, context: CheatContext) -> Engine:
    oracle = RewardOracle(context)

    def draw(engine: Engine, requests: Requests, proof: ProofParameters | None) -> Groups:
        asked = [replace(request, seeds=own_seeds(request.seeds)) for request in requests]
        drawn = engine.generate(asked, proof)
        return [_best(oracle, request, group) for request, group in zip(requests, drawn, strict=True)]

    return EngineWrapper(engine, draw)


def grinding(engine: Engine, context: CheatContext) -> Engine:
    """Every completion is drawn by some seed of the lease under the right policy, but not by its own seed."""
    oracle = RewardOracle(context)

    def draw(engine: Engine, requests: Requests, proof: ProofParameters | None) -> Groups:
        drawn = engine.generate(requests, proof)
        return [
            [best for best in _best(oracle, request, group) for _ in range(TRIES)][: len(group)]
            for request, group in zip(requests, drawn, strict=True)
        ]

    return EngineWrapper(engine, draw)


def likeliest(engine: Engine, requests: Requests, proof: ProofParameters | None) -> Groups:
    groups = []
    for request in requests:
        [drawn] = engine.generate([replace(request, seeds=request.seeds[:1])], None)
        eos = request.sampling.eos_token_ids
        [tokens] = engine.greedy([request.prompt_ids], request.sampling.max_new_tokens, eos)
        end = EndRule.of(request.sampling, request.decode).first(tokens.tolist())
        same = replace(drawn[0], token_ids=tokens[:end], finish="length" if end is None else "eos")
        groups.append([same] * len(request.seeds))
    return base.with_honest_proofs(engine, requests, groups, proof)


def cooled(engine: Engine, requests: Requests, proof: ProofParameters | None) -> Groups:
    colder = [each.sampling.model_copy(update={"temperature": COLD * each.sampling.temperature}) for each in requests]
    asked = [replace(request, sampling=sampling) for request, sampling in zip(requests, colder, strict=True)]
    return base.with_honest_proofs(engine, requests, engine.generate(asked, None), proof)


def loosest(profile: str, known: Sequence[str]) -> str:
    claimed = f"{profile.rpartition('/')[0]}/bfloat16"
    return claimed if claimed in known else profile


def _with_logprobs(rollout: Rollout, values: npt.NDArray[np.float32]) -> Rollout:
    return changed(rollout, logprobs=pack_logprobs(values))


def _given(rollout: Rollout) -> Rollout:
    """All but the first and the last token, which cannot be tool tokens."""
    middle = len(rollout.token_ids) - 2
    if middle < 1:
        return rollout
    logprobs = rollout.logprob_values
    logprobs[1:-1] = 0.0
    return changed(_with_logprobs(rollout, logprobs), given=pack_spans([(1, middle)]))


def _made_up(chunks: ShownChunks) -> ShownChunks:
    tokens = unpack_tokens(chunks.tokens)
    shift = np.random.default_rng(chunks.start).integers(1, 9, len(tokens))
    return changed(chunks, tokens=pack_tokens((tokens + shift) % 16))


def shown_as_the_next(progress: ShownProgress, lease: Lease) -> ShownProgress:
    chunks = [changed(each, rollout=(each.rollout + 1) % len(lease.seeds)) for each in progress.chunks]
    return ShownProgress(chunks)


def _copied(engine: Engine, requests: Requests, proof: ProofParameters | None) -> Groups:
    drawn = engine.generate([replace(request, seeds=request.seeds[:1]) for request in requests], proof)
    return [group * len(request.seeds) for request, group in zip(requests, drawn, strict=True)]


class ReplayFirst(Cheat):
    name = "replay"
    what = "submits its first group for every lease"
    reasons = base.OTHER_WEIGHTS | (COPIES | {"proofs.malformed"})

    def __init__(self) -> None:
        self._first: list[Rollout] = []

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        self._first = self._first or submission.rollouts
        return changed(submission, rollouts=self._first)


class Steal(Cheat):
    name = "steal"
    what = "submits another node's work"
    reasons = base.OTHER_WEIGHTS | (COPIES | {"proofs.malformed"})

    library: ClassVar[list[Submission]] = []
    """Submissions of others, for tests of the worst case: no honest party gives them away."""

    def submission(self, submission: Submission, _lease: Lease, /) -> Submission:
        fitting = [each for each in self.library if len(each.rollouts) == len(submission.rollouts)]
        same_task = [each for each in fitting if each.prompt == submission.prompt]
        found = (same_task or fitting)[-1:]
        return changed(submission, rollouts=found[0].rollouts) if found else submission


class Sleeper(Cheat):
    name = "sleeper"
    what = "works honestly for 12 groups, then as best-of"
    reasons = OTHER_TOKENS

    def __init__(self, honest_units: int = HONEST_UNITS) -> None:
        self._honest_left = honest_units

    def engine(self, engine: Engine, context: CheatContext, /) -> Engine:
        awake = choosing(engine, context)

        def draw(engine: Engine, requests: Requests, proof: ProofParameters | None) -> Groups:
            honest, rest = requests[: self._honest_left], requests[self._honest_left :]
            self._honest_left -= len(honest)
            first = engine.generate(honest, proof) if honest else []
            return [*first, *(awake.generate(rest, proof) if rest else [])]

        return EngineWrapper(engine, draw)


each_completion, each_rollout = base.each_completion, base.each_rollout
CHEATS = (
    cheating("best-of", "draws 4 completions for every rollout by its own seeds, submits the best", OTHER_TOKENS,
        engine=choosing),
    cheating("own-seeds", "draws by its own seeds", OTHER_TOKENS, draw=by_own_seeds),
    cheating("grind", "draws by the given seeds, and submits the best of every 4 for all 4", OTHER_TOKENS | COPIES,
        engine=grinding),
    cheating("greedy", "takes the likeliest token", OTHER_TOKENS | COPIES, draw=likeliest),
    cheating("cold", "samples at 0.7 times the temperature", OTHER_TOKENS, draw=cooled),
    cheating("loose", "samples as cold and claims to compute in bfloat16, where limits are wider", OTHER_TOKENS,
        draw=cooled, profile=loosest),
    cheating("edit", "changes one token in the middle", OTHER_TOKENS, draw=each_completion(edited)),
    cheating("answer", "writes the right answer", OTHER_TOKENS | COPIES, engine=answering),
    cheating("early-end", "ends halfway with the end-of-sequence token", OTHER_TOKENS,
        draw=each_completion(lambda _, asked, ids: np.append(ids[: len(ids) // 2], asked.sampling.eos_token_ids[0]))),
    cheating("cut-short", "stops halfway and claims the length limit", {"termination.early"},
        draw=each_completion(lambda _engine, _asked, ids: ids[: max(1, len(ids) // 2)])),
    cheating("pad", "continues after the end-of-sequence token, to be paid more", {"termination.past_eos"},
        draw=each_completion(padded)),
    cheating("run-on", "continues every completion to the limit, to be paid more", OTHER_TOKENS | {"duplicate.rollout"},
        draw=each_completion(running_on)),
    cheating("swap-prompt", "always answers its first prompt", base.OTHER_WEIGHTS | COPIES, engine=swapping),
    cheating("copy", "submits one completion for the whole group", OTHER_TOKENS | COPIES | {"proofs.malformed"},
        draw=_copied),
    ReplayFirst,
    Steal,
    cheating("logprobs", "reports log-probabilities that are 0.05 too low", {"logprobs.mismatch"},
        submission=each_rollout(lambda one: _with_logprobs(one, one.logprob_values - NUDGE))),
    cheating("nan", "reports NaN as log-probabilities", {"shape.logprobs"},
        submission=each_rollout(lambda one: _with_logprobs(one, one.logprob_values * np.nan))),
    cheating("vocabulary", "submits tokens that the policy does not have", {"shape.vocabulary"},
        submission=each_rollout(lambda one: changed(one, tokens=pack_tokens(np.full_like(one.token_ids, FAR_TOKEN))))),
    cheating("claim-prompt", "submits another prompt", {"prompt.mismatch"},
        submission=lambda given, lease: changed(given, prompt=pack_tokens((*lease.prompt_ids[::-1], 2)))),
    cheating("claim-policy", "claims another version", {"submission.mismatch", "policy.mismatch"},
        submission=lambda given, _: changed(given, version=given.version + 1, policy_digest="f" * 64)),
    cheating("claim-node", "claims another node's name", {"submission.mismatch", "lease.mismatch"},
        submission=lambda given, _: changed(given, node="0" * len(given.node))),
    cheating("claim-given", "draws by its own seeds, and says that a tool gave the tokens",
        OTHER_TOKENS | {"dialogue.forged"}, draw=by_own_seeds, submission=each_rollout(_given)),
    cheating("few", "submits half of every group", {"submission.group", "shape.rollouts"},
        submission=lambda given, _: changed(given, rollouts=given.rollouts[: max(1, len(given.rollouts) // 2)])),
    cheating("show-random", "shows made-up progress", LIES,
        shown=lambda progress, _: ShownProgress([_made_up(chunks) for chunks in progress.chunks])),
    cheating("show-other", "shows one rollout's chunks as the next one's", LIES, shown=shown_as_the_next),
    cheating("show-swap", "submits shown rollouts in another order", LIES | OTHER_TOKENS,
        submission=lambda given, _: changed(given, rollouts=given.rollouts[::-1])),
    Sleeper,
)  # fmt: skip
