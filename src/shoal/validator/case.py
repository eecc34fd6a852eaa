"""A case: the data that the checks of one submission see, and what a check finds.

Arrays are of all rollouts end to end: one value per token, or one per proof (a proof is of a chunk of tokens). Replays
of many cases are computed together and cut afterwards, because a numpy call on few tokens costs as much as on many.

`SeenWork` detects copies of one's own work or another's. Equal completions are common (easy tasks have one answer), so
only what seeds cannot repeat is remembered:

    a rollout  so improbable that no two seeds give it: its tokens, and the seed that gave them
    a proof    of enough values that no two computations give it: its bytes, and the tokens that it was made from

The same rollout from another seed, or the same proof from other tokens, is a copy. A unit that is issued again keeps
its seeds, so a submission that is judged again is not a copy. Only accepted work is remembered: otherwise a cheat could
make an honest node look like its copyist.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.engines import Engine, PrefillRequest
from shoal.engines.dialogue import Dialogue, Reading
from shoal.errors import CodecError, ShoalError
from shoal.models.ending import Decode, EndRule
from shoal.protocol import BodyLimits, CheckResult, Lease, ProofParameters, Severity, Sums, Tally, unpack
from shoal.protocol.submission import Rollout, ShownPrefix, Submission, drawn_mask, pack_tokens
from shoal.protocol.verdict import TokenTrace
from shoal.sampling import SeedCheck, check_seeded, uniforms_at
from shoal.sampling.check import distances
from shoal.toploc import Comparisons, PointBatch, chunk_rows, chunk_topk, compare, split_proofs
from shoal.toploc.points import proof_size
from shoal.validator.evidence import MOST_POINTS, Kept, Measures, Outliers, accident_sums, log_evidence, logprob_errors
from shoal.validator.profiles import NoiseLimits, Profile

log = logging.getLogger(__name__)

CAPACITY = 2**18  # entries; about 200 bytes each
DIGEST_BYTES = 16


class Mark(NamedTuple):
    """One thing to remember: what it is, its origin, and its place in the submission (rollout, token)."""

    kind: Literal["rollout", "proof"]
    what: bytes
    whose: bytes
    place: tuple[int, int]


def digest(kind: str, part: bytes) -> bytes:
    return hashlib.blake2b(kind.encode() + part, digest_size=DIGEST_BYTES).digest()


@dataclass
class SeenWork:
    """The marks of accepted submissions; beyond its capacity the least recently met are forgotten.

    >>> seen = SeenWork()
    >>> seen.remember([Mark("rollout", b"tokens", b"seed 1", (0, 0))])
    >>> seen.copied([Mark("rollout", b"tokens", b"seed 2", (3, 0))]).place
    (3, 0)
    """

    capacity: int = CAPACITY
    _whose: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict, repr=False)

    def copied(self, marks: Iterable[Mark]) -> Mark | None:
        """The first mark with another origin in an accepted submission, or earlier in this one."""
        own: dict[bytes, bytes] = {}
        for mark in marks:
            if {own.setdefault(mark.what, mark.whose), self._whose.get(mark.what, mark.whose)} != {mark.whose}:
                return mark
        return None

    def remember(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            self._whose.setdefault(mark.what, mark.whose)
            self._whose.move_to_end(mark.what)
        while len(self._whose) > self.capacity:
            self._whose.popitem(last=False)


MESSAGE_LIMIT, GIB = 500, 2**30
# These only bound memory. They must be wider than the limits of the hub: a body that the hub took is not too large.
BODY_LIMITS = BodyLimits(compressed_bytes=GIB, inflated_bytes=4 * GIB)

IMPROBABLE_NATS = -35.0  # two rollouts of this log-probability are not equal by chance: 10⁻¹⁵
DISTINCT_PROOF_BYTES = 2 + 2 * 16  # 16 values: fewer may agree by chance
FIRST_ROWS = 2

NO_RECORD = Tally()

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Replay:
    """What this validator's own prefill says of tokens and proofs, and the uniforms of the lease."""

    logprobs: Floats
    low: Floats
    high: Floats
    entropy: Floats
    varentropy: Floats
    uniforms: Floats
    comparisons: Comparisons

    @property
    def outside(self) -> npt.NDArray[np.bool_]:
        """Which tokens are not those that this validator would draw."""
        return ~((self.low <= self.uniforms) & (self.uniforms < self.high))

    @property
    def distance(self) -> Floats:
        return distances(self.uniforms, self.low, self.high)

    @property
    def is_finite(self) -> bool:
        """Whether the distributions are finite. (An impossible token has a log-probability of -inf.)"""
        sums = self.low.sum() + self.high.sum() + self.entropy.sum() + self.varentropy.sum()
        return bool(np.isfinite(sums) and not np.isnan(self.logprobs).any())


@dataclass(eq=False)
class Case:
    """One submission under audit. The lease is signed by the hub; the submission is a claim, or None with a `problem`
    if it could not be decoded. Values derived from tokens need a passed `shape`, `drawn` a passed `dialogue`,
    `replayed` the prefill. `record`: sums of what its node submitted before; `shown`: what it showed of this submission
    before. Of a part (`only`), `first` is the number of its first rollout."""

    lease: Lease
    submission: Submission | None
    problem: str
    vocabulary_size: int
    hidden_size: int
    profile: Profile
    seen: SeenWork = field(default_factory=SeenWork)
    record: Tally = NO_RECORD
    replay: Replay | None = None
    dialogue: Dialogue | None = None
    shown: tuple[ShownPrefix, ...] = ()
    first: int = 0
    decode: Decode | None = None

    @property
    def claim(self) -> Submission:
        assert self.submission is not None, "the envelope check comes first"
        return self.submission

    @property
    def rollouts(self) -> list[Rollout]:
        return self.claim.rollouts

    @property
    def replayed(self) -> Replay:
        assert self.replay is not None, "only after the prefill"
        return self.replay

    @cached_property
    def ending(self) -> EndRule:
        return EndRule.of(self.lease.sampling, self.decode)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return self.lease.seed_numbers

    @cached_property
    def lengths(self) -> list[int]:
        return [len(rollout.tokens) // 4 for rollout in self.rollouts]

    @cached_property
    def starts(self) -> Ints:
        return np.cumsum([0, *self.lengths[:-1]])

    @cached_property
    def tokens(self) -> Ints:
        return np.frombuffer(b"".join(rollout.tokens for rollout in self.rollouts), dtype="<u4").astype(np.int64)

    @cached_property
    def claimed(self) -> Floats:
        return np.frombuffer(b"".join(rollout.logprobs for rollout in self.rollouts), dtype="<f4").astype(np.float64)

    @cached_property
    def logprob_errors(self) -> Floats:
        return logprob_errors(self.claimed, self.replayed.logprobs)

    @cached_property
    def readings(self) -> list[Reading]:
        """Every rollout of a dialogue, parsed by its tokens alone."""
        assert self.dialogue is not None, "only of a dialogue"
        return [self.dialogue.read(rollout.token_ids.tolist()) for rollout in self.rollouts]

    @cached_property
    def drawn(self) -> npt.NDArray[np.bool_]:
        """Of tool tokens only proofs are judged."""
        pairs = zip(self.rollouts, self.lengths, strict=True)  # shown ones may end with tool tokens
        return np.concatenate([drawn_mask(r.given, n + 1)[:n] if r.given else np.ones(n, np.bool_) for r, n in pairs])

    @cached_property
    def generated(self) -> int:
        return int(self.drawn.sum())

    @cached_property
    def proofs(self) -> list[bytes]:
        """Every proof; `ProofError` if the bytes of a rollout do not divide into the right number."""
        size, topk, rows, chunks = self.hidden_size, self.lease.proof.topk, self.lease.proof.rows, list[bytes]()
        for rollout, length in zip(self.rollouts, self.lengths, strict=True):
            ends = _proof_ends(length, size, topk, rows)
            if len(rollout.proofs) != ends[-1]:
                split_proofs(rollout.proofs, length, size, topk, rows)  # says what is wrong
            chunks += [rollout.proofs[start:end] for start, end in pairwise((0, *ends))]
        return chunks

    @cached_property
    def points(self) -> Ints:
        return np.array([len(chunk) // 2 - 1 for chunk in self.proofs], dtype=np.int64)

    @cached_property
    def marks(self) -> list[Mark]:
        """What copies of this submission are recognised by. A proof of enough values is stored with the first tokens of
        its rows (each follows from the one before). Earlier tokens do not count, because a model may have forgotten
        them; nor does the policy, because a training step may change none of the largest activations; nor do later
        tokens, because rollouts that diverge late may have their largest activations in shared rows."""
        likelihood = np.add.reduceat(self.claimed, self.starts)
        marks = list[Mark]()
        for i in np.flatnonzero(likelihood < IMPROBABLE_NATS).tolist():
            what, whose = digest("rollout", self.rollouts[i].tokens), self.seeds[i].to_bytes(8, "big")
            marks.append(Mark("rollout", what, whose, (i, 0)))
        rows, last, chunks = self.lease.proof.rows, pack_tokens(self.lease.prompt_ids[-1:]), iter(self.proofs)
        for index, rollout in enumerate(self.rollouts):
            inputs = last + rollout.tokens[:-4]
            for start in range(0, len(inputs), 4 * rows):
                proof = next(chunks)
                if len(proof) >= DISTINCT_PROOF_BYTES and any(proof[4:]):  # not of equal values
                    whose = digest("inputs", inputs[start : start + 4 * FIRST_ROWS])
                    marks.append(Mark("proof", digest("proof", proof), whose, (index, start // 4)))
        return marks

    @property
    def proven(self) -> list[Mark]:
        """The marks without those of outlier proofs: who submits, as an accident, the proof that another will give must
        not make that one a copyist."""
        odd = {self.chunk_place(chunk) for chunk in np.flatnonzero(self.outliers.proofs).tolist()}
        return [mark for mark in self.marks if mark.kind == "rollout" or mark.place not in odd]

    @cached_property
    def outliers(self) -> Outliers:
        return Outliers.of(self.replayed, self.claimed, self.drawn, self.chunk_of, self.profile)

    @cached_property
    def kept(self) -> Kept:
        return self.outliers.kept(self.drawn, self.chunk_of, self.profile.accidents)

    @cached_property
    def chunks(self) -> list[int]:
        return [-(-length // self.lease.proof.rows) for length in self.lengths]

    @cached_property
    def rollout_of_chunk(self) -> Ints:
        return np.repeat(np.arange(len(self.chunks)), self.chunks)

    @cached_property
    def part(self) -> Ints:
        """For every proof, how many came before it in its rollout."""
        return np.concatenate([np.arange(count) for count in self.chunks])

    @cached_property
    def chunk_of(self) -> Ints:
        within: Ints = np.arange(len(self.tokens)) - np.repeat(self.starts, self.lengths)
        firsts: Ints = np.cumsum(self.chunks) - np.array(self.chunks)
        return np.repeat(firsts, self.lengths) + within // self.lease.proof.rows

    @cached_property
    def measures(self) -> Measures:
        return Measures.of(self.replayed, self.claimed, self.starts, self.kept, self.profile.noise)

    def accidents(self, points: Ints, most: float = MOST_POINTS) -> Sums:
        return accident_sums(points, self.rollout_of_chunk, self.profile.accidents, most)

    @property
    def trace(self) -> TokenTrace:
        replay, most = self.replayed, float(np.finfo(np.float16).max)
        inside = np.minimum(replay.uniforms - replay.low, replay.high - replay.uniforms)
        values = (np.where(self.drawn, each, np.nan) for each in (self.claimed - replay.logprobs, inside))
        gaps, margins = (np.clip(each, -most, most).astype("<f2").tobytes() for each in values)
        return TokenTrace(gaps, margins)

    @property
    def unsure_rate(self) -> float:
        """How likely honest work of this kind and length is to be unsure: about that of two accidents."""
        expected = self.accidents(np.zeros_like(self.points)).expected
        return 1.0 - (1.0 + expected) * math.exp(-expected)

    @cached_property
    def tally(self) -> Tally:
        channels = {name: self.measures.sums(name, self.profile) for name in NoiseLimits.model_fields}
        channels["accidents"] = self.accidents(self.outliers.worst)
        odd = int((self.outliers.worst > 0).sum())
        return Tally(tokens=self.generated, proofs=len(self.outliers.proofs), accidents=odd, channels=channels)

    def evidence(self, *channels: str) -> tuple[float, str]:
        """The strongest log-evidence of these channels in this submission, and its channel."""
        return max((log_evidence(name, self.tally.of(name)), name) for name in channels)

    @cached_property
    def seed_check(self) -> SeedCheck:
        """Without outliers where those are accidents."""
        replay, kept_T = self.replayed, self.kept.tokens
        uniforms, low, high = replay.uniforms[kept_T], replay.low[kept_T], replay.high[kept_T]
        return check_seeded(uniforms, low, high, replay.logprobs[kept_T], self.profile.sampling)

    def only(self, index: int) -> Case:
        """The case of one rollout with its own seed. A certain failure there is certain here."""
        lease = self.lease.model_copy(update={"seeds": (self.lease.seeds[index],)})
        submission = msgspec.structs.replace(self.claim, rollouts=[self.rollouts[index]])
        return replace(self, lease=lease, submission=submission, first=index)

    def place(self, position: int) -> tuple[int, int]:
        """The (rollout, token) of a position in `tokens`."""
        rollout = int(np.searchsorted(self.starts, position, side="right")) - 1
        return self.first + rollout, position - int(self.starts[rollout])

    def chunk_place(self, chunk: int) -> tuple[int, int]:
        """The (rollout, first token) of a proof in `proofs`."""
        return self.first + int(self.rollout_of_chunk[chunk]), int(self.part[chunk]) * self.lease.proof.rows


@lru_cache(maxsize=4096)
def _proof_ends(length: int, hidden_size: int, topk: int, rows: int) -> tuple[int, ...]:
    sizes = (proof_size(chunk_topk(r, hidden_size, topk, rows)) for r in chunk_rows(length, rows))
    return tuple(accumulate(sizes))


def read_body(body: bytes) -> tuple[Submission | None, str]:
    try:
        return unpack(body, Submission, BODY_LIMITS), ""
    except CodecError as error:
        return None, str(error)


Evidence = float | int | str


@dataclass(frozen=True)
class Finding:
    """What one check found. A failure has a reason code and a severity (None: it only costs credit). An `unsure` one
    has not passed and rejects nothing: the verdict is unsure, too."""

    result: CheckResult
    reason: str = ""
    severity: Severity | None = None
    unsure: bool = False

    @property
    def passed(self) -> bool:
        return self.result.passed


def passed(check: str, **evidence: Evidence) -> Finding:
    return Finding(CheckResult(check=check, passed=True, evidence=_finite(evidence)))


def failed(reason: str, message: str, severity: Severity | None = Severity.CERTAIN, **evidence: Evidence) -> Finding:
    """A failed check; the part of `reason` before its first dot is the check's name."""
    check = reason.partition(".")[0]
    result = CheckResult(check=check, passed=False, evidence=_finite(evidence), message=message[:MESSAGE_LIMIT])
    return Finding(result, reason, severity)


def unsure(reason: str, message: str, **evidence: Evidence) -> Finding:
    """A check that cannot decide: no credit, no training, no punishment."""
    return replace(failed(reason, message, None, **evidence), unsure=True)


def _finite(evidence: dict[str, Evidence]) -> dict[str, Evidence]:
    """A verdict is signed JSON, which has no NaN and no infinity: such numbers become strings."""
    odd = {name: str(x) for name, x in evidence.items() if isinstance(x, float) and not math.isfinite(x)}
    return {**evidence, **odd}


# torch reports a full device as RuntimeError, and a position beyond the model's last one as IndexError.
ENGINE_ERRORS = (ShoalError, RuntimeError, ValueError, LookupError, ArithmeticError, MemoryError)


def replay_all(engine: Engine, cases: Sequence[Case]) -> list[Replay | Exception]:
    """The replay of every case from as few engine calls as possible; if a call fails, from one call each."""
    found: dict[int, Replay | Exception] = {}
    for proof in dict.fromkeys(case.lease.proof for case in cases):
        alike = [case for case in cases if case.lease.proof == proof]
        try:
            replays: Sequence[Replay | Exception] = _replays(engine, alike, proof)
        except ENGINE_ERRORS as error:
            log.warning("a prefill of %d submissions failed (%s); trying each alone", len(alike), error)
            replays = [_alone(engine, case, proof) for case in alike]
        found.update(zip(map(id, alike), replays, strict=True))
    return [found[id(case)] for case in cases]


def _alone(engine: Engine, case: Case, proof: ProofParameters) -> Replay | Exception:
    try:
        return _replays(engine, [case], proof)[0]
    except ENGINE_ERRORS as error:
        log.warning("the prefill of unit %d failed: %s", case.lease.unit, error)
        return error


def _replays(engine: Engine, cases: Sequence[Case], proof: ProofParameters) -> list[Replay]:
    requests = [
        PrefillRequest(case.lease.prompt_ids, tokens_T, case.lease.sampling.temperature)
        for case in cases
        for tokens_T in np.split(case.tokens.astype(np.int32), case.starts[1:])
    ]
    prefills = engine.prefill(requests, proof)
    points = PointBatch.concat([prefill.points for prefill in prefills if prefill.points is not None])
    comparisons = compare(points, [chunk for case in cases for chunk in case.proofs])
    names = ("logprobs", "cdf_low", "cdf_high", "entropy", "varentropy")
    logprobs, low, high, entropy, varentropy = (
        np.concatenate([getattr(each, name) for each in prefills]).astype(np.float64) for name in names
    )
    everything = Replay(logprobs, low, high, entropy, varentropy, uniforms_of(cases), comparisons)
    ends = [0, *np.cumsum([len(case.tokens) for case in cases]).tolist()]
    chunk_ends = [0, *np.cumsum([len(case.proofs) for case in cases]).tolist()]
    cuts = zip(pairwise(ends), pairwise(chunk_ends), strict=True)
    return [part_of(everything, slice(*tokens), slice(*chunks)) for tokens, chunks in cuts]


def uniforms_of(cases: Sequence[Case]) -> Floats:
    lengths = np.array([length for case in cases for length in case.lengths])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    positions_T = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    seeds = np.array([seed for case in cases for seed in case.seeds], dtype=np.uint64)
    return uniforms_at(np.repeat(seeds, lengths), positions_T.astype(np.uint64))


def part_of(replay: Replay, tokens: slice | Ints, chunks: slice | Ints) -> Replay:
    compared = vars(replay.comparisons)
    sentences = compared["malformed"]
    malformed = sentences[chunks] if isinstance(chunks, slice) else [sentences[chunk] for chunk in chunks]
    numbers = {name: column[chunks] for name, column in compared.items() if name != "malformed"}
    columns = {name: column[tokens] for name, column in vars(replay).items() if name != "comparisons"}
    return Replay(**columns, comparisons=Comparisons(**numbers, malformed=malformed))


def joined(comparisons: Sequence[Comparisons]) -> Comparisons:
    names = [each.name for each in fields(Comparisons) if each.name != "malformed"]
    columns = {name: np.concatenate([getattr(each, name) for each in comparisons]) for name in names}
    return Comparisons(**columns, malformed=[sentence for each in comparisons for sentence in each.malformed])
