"""Replays: what the validator's own engine says of the tokens and proofs of many submissions, from few large calls.

    cases ─► one prefill per proof size ─► one comparison of all proofs, the uniforms of all seeds ─► a `Replay` each
                  │ the engine fails
                  └► each alone, to find the one it was

Everything is computed for all cases laid end to end, and cut afterwards: a group has few tokens, and a call of numpy on
few tokens costs as much as on many.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from shoal.engines import Engine, Prefill, PrefillRequest
from shoal.errors import ShoalError
from shoal.protocol import ProofParameters
from shoal.sampling.stream import uniforms_at
from shoal.toploc import Comparisons, PointBatch, compare
from shoal.validator.case import Case, Floats, Ints, Replay

log = logging.getLogger(__name__)

ENGINE_ERRORS = (ShoalError, RuntimeError, ValueError, MemoryError)  # torch reports a full device as RuntimeError


def replay_all(engine: Engine, cases: Sequence[Case]) -> list[Replay | Exception]:
    """The replay of every case from as few engine calls as it takes; if a call fails, from one call each."""
    found: dict[int, Replay | Exception] = {}
    for proof in dict.fromkeys(case.lease.proof for case in cases):
        alike = [case for case in cases if case.lease.proof == proof]
        found.update(zip(map(id, alike), _replays(engine, alike, proof), strict=True))
    return [found[id(case)] for case in cases]


def _replays(engine: Engine, cases: Sequence[Case], proof: ProofParameters) -> Sequence[Replay | Exception]:
    try:
        return _together(engine, cases, proof)
    except ENGINE_ERRORS as error:
        log.warning("a prefill of %d submissions failed (%s); trying each alone", len(cases), error)
        return [_alone(engine, case, proof) for case in cases]


def _alone(engine: Engine, case: Case, proof: ProofParameters) -> Replay | Exception:
    try:
        return _together(engine, [case], proof)[0]
    except ENGINE_ERRORS as error:
        log.warning("the prefill of unit %d failed: %s", case.lease.unit, error)
        return error


def _together(engine: Engine, cases: Sequence[Case], proof: ProofParameters) -> list[Replay]:
    prefills = engine.prefill([request for case in cases for request in _requests(case)], proof)
    points = PointBatch.concat([prefill.points for prefill in prefills if prefill.points is not None])
    comparisons = compare(points, [chunk for case in cases for chunk in case.proofs])
    names = ("logprobs", "cdf_low", "cdf_high", "entropy", "varentropy")
    logprobs, low, high, entropy, varentropy = (_joined(prefills, name) for name in names)
    everything = Replay(logprobs, low, high, entropy, varentropy, uniforms_of(cases), comparisons)
    ends = np.cumsum([len(case.tokens) for case in cases]).tolist()
    chunk_ends = np.cumsum([len(case.proofs) for case in cases]).tolist()
    cuts = zip([0, *ends], ends, [0, *chunk_ends], chunk_ends, strict=False)
    return [part_of(everything, slice(first, last), slice(begin, end)) for first, last, begin, end in cuts]


def _requests(case: Case) -> list[PrefillRequest]:
    lease, tokens_T = case.lease, case.tokens.astype(np.int32)
    starts = case.starts.tolist()
    return [
        PrefillRequest(lease.prompt_ids, tokens_T[start : start + length], lease.sampling.temperature)
        for start, length in zip(starts, case.lengths, strict=True)
    ]


def _joined(prefills: Sequence[Prefill], name: str) -> Floats:
    return np.concatenate([getattr(prefill, name) for prefill in prefills]).astype(np.float64)


def uniforms_of(cases: Sequence[Case]) -> Floats:
    """The uniform that the lease gives for every token."""
    lengths = np.array([length for case in cases for length in case.lengths])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    positions_T = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    seeds = np.array([seed for case in cases for seed in case.seeds], dtype=np.uint64)
    return uniforms_at(np.repeat(seeds, lengths), positions_T.astype(np.uint64))


def part_of(replay: Replay, tokens: slice | Ints, chunks: slice | Ints) -> Replay:
    """The replay of some of the tokens, and of the chunks that they make, in this order."""
    compared = replay.comparisons
    parts = {field.name: getattr(compared, field.name) for field in dataclasses.fields(compared)}
    parts = {
        name: [part[chunk] for chunk in chunks]
        if isinstance(part, list) and not isinstance(chunks, slice)
        else part[chunks]
        for name, part in parts.items()
    }
    return Replay(
        logprobs=replay.logprobs[tokens],
        low=replay.low[tokens],
        high=replay.high[tokens],
        entropy=replay.entropy[tokens],
        varentropy=replay.varentropy[tokens],
        uniforms=replay.uniforms[tokens],
        comparisons=Comparisons(**parts),
    )
