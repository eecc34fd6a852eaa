"""Shown progress: honest chunks pass wherever they are cut, wrong ones fail for certain, what is doubtful says nothing;
a submission begins with what was shown of it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from honest import LengthEnvironment, docket, engine, lease, loaded, long_lease, proved, submission

from shoal.engines.shelf import LoadedPolicy
from shoal.protocol import Lease, Outcome, ProofParameters, Rollout, Severity, Submission, Verdict, pack_tokens
from shoal.protocol.submission import ShownPrefix, shown_digest
from shoal.runtime.clock import ManualClock
from shoal.toploc import split_proofs
from shoal.validator.judge import Judge
from shoal.validator.profiles import AccidentLimits, Profile, Profiles, load_profiles

ROWS = 8
NOTHING = Rollout(tokens=b"", logprobs=b"", finish="length")


def cut(of: Lease, rollout: Rollout, chunks: int) -> Rollout:
    proofs = split_proofs(rollout.proofs, len(rollout.tokens) // 4, engine().hidden_size, 16, ROWS)
    return Rollout(
        tokens=rollout.tokens[: 4 * ROWS * chunks], logprobs=b"", finish="length", proofs=b"".join(proofs[:chunks])
    )


def shown(of: Lease, index: int, rollout: Rollout) -> Submission:
    """A submission with one rollout, as a hub makes it of a lease at work."""
    rollouts = [NOTHING] * len(of.seeds)
    rollouts[index] = rollout
    return msgspec.structs.replace(submission(of), rollouts=rollouts)


def verdicts(
    of: Lease, what: Submission, by: LoadedPolicy | None = None, limits: Profiles | None = None
) -> list[Verdict]:
    judge = Judge(LengthEnvironment(), limits or load_profiles(), clock=ManualClock())
    return judge.verdicts([docket(of, what, depth="progress")], by or loaded())


def prefix(index: int, rollout: Rollout) -> ShownPrefix:
    count = len(rollout.tokens) // 4
    digest = shown_digest(rollout.tokens, rollout.proofs)
    return ShownPrefix(rollout=index, tokens=count, proof_bytes=len(rollout.proofs), digest=digest)


@pytest.mark.parametrize("chunks", [1, 2, 5, 8])
def test_honest_chunks_say_nothing(chunks: int) -> None:
    of = long_lease()
    for index, rollout in enumerate(submission(of).rollouts):
        assert verdicts(of, shown(of, index, cut(of, rollout, chunks))) == []


def failing(of: Lease) -> dict[str, tuple[Rollout, str]]:
    rollouts = submission(of).rollouts
    honest, other = cut(of, rollouts[0], 4), cut(of, rollouts[1], 4)
    noise = np.random.default_rng(0).integers(2, 90, 4 * ROWS)
    made_up = Rollout(tokens=pack_tokens(noise), logprobs=b"", finish="length", proofs=honest.proofs)
    again = proved(of, msgspec.structs.replace(submission(of), rollouts=[made_up])).rollouts[0]
    half = pack_tokens([*honest.token_ids[: 2 * ROWS], *noise[2 * ROWS :]])
    constant = honest.proofs[:2] + b"\x3f\x80" + bytes(30)
    replace = msgspec.structs.replace
    return {
        "random tokens": (made_up, "progress.seed"),
        "random tokens, with the policy's own proofs": (replace(again, logprobs=b""), "progress.seed"),
        "the second half made up": (replace(honest, tokens=half), "progress.seed"),
        "another seed's chunks": (other, "progress.seed"),
        "tokens that are none": (replace(honest, tokens=pack_tokens([500] * 4 * ROWS)), "progress.shape"),
        "a proof too few": (replace(honest, proofs=honest.proofs[:-34]), "progress.proofs"),
        "proofs that fit anything": (replace(honest, proofs=constant * 4), "progress.proofs"),
    }


EXACT = load_profiles()[long_lease().profile]
COARSE = EXACT.model_copy(update={"accidents": AccidentLimits(first=2e-3, later=1e-4)})


@pytest.mark.parametrize("limits", [pytest.param(EXACT, id="exact"), pytest.param(COARSE, id="coarse")])
@pytest.mark.parametrize("name", list(failing(long_lease())))
def test_wrong_chunks_fail_for_certain(name: str, limits: Profile) -> None:
    of = long_lease()
    rollout, reason = failing(of)[name]
    if limits is COARSE and name == "the second half made up":
        assert verdicts(of, shown(of, 0, rollout), limits={limits.key: limits}) == [], "of two chunks it is doubtful"
        return
    [verdict] = verdicts(of, shown(of, 0, rollout), limits={limits.key: limits})
    assert (verdict.outcome, verdict.reason, verdict.severity) == (Outcome.REJECTED, reason, Severity.CERTAIN)
    assert (verdict.depth, verdict.unit, verdict.node, verdict.generated_tokens) == ("progress", 5, of.node, 0)
    assert not verdict.checks[-1].passed
    assert verdict.message


def test_what_is_doubtful_a_fault_of_one_prefill_and_a_validator_that_cannot_tell_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of, right, wrong, broken = long_lease(), loaded(), loaded(4.0), loaded()
    mine, other = (cut(of, rollout, 4) for rollout in submission(of).rollouts[:2])
    assert verdicts(of, shown(of, 0, msgspec.structs.replace(mine, proofs=other.proofs))) == [], "left to the audit"
    engines = iter([wrong.engine.prefill, right.engine.prefill])
    monkeypatch.setattr(right.engine, "prefill", lambda *asked: next(engines)(*asked))
    assert verdicts(of, shown(of, 0, mine), right) == []
    assert next(engines, None) is None
    made_up = shown(of, 0, failing(of)["random tokens"][0])
    monkeypatch.setattr(broken.engine, "prefill", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    assert verdicts(of, made_up, broken) == []
    assert verdicts(of.model_copy(update={"environment_digest": "f" * 64}), made_up) == []


def judged(of: Lease, what: Submission, *prefixes: ShownPrefix, depth: str = "full") -> Verdict:
    judge = Judge(LengthEnvironment(), load_profiles(), clock=ManualClock())
    [verdict] = judge.verdicts([docket(of, what, shown=prefixes, depth=depth)], loaded())
    return verdict


def test_a_submission_that_begins_with_what_was_shown_is_accepted() -> None:
    of = long_lease()
    rollouts = submission(of).rollouts
    prefixes = [prefix(0, cut(of, rollouts[0], 3)), prefix(2, cut(of, rollouts[2], 8))]
    assert judged(of, submission(of), *prefixes).outcome is Outcome.ACCEPTED


@pytest.mark.parametrize("depth", ["full", "light"])
def test_a_submission_that_begins_otherwise_than_shown_fails_for_certain(depth: str) -> None:
    of = long_lease()
    rollouts = submission(of).rollouts
    right = cut(of, rollouts[0], 3)
    flipped = bytes([right.proofs[0] ^ 1]) + right.proofs[1:]
    for other in (
        cut(of, rollouts[1], 3),
        msgspec.structs.replace(right, proofs=flipped),
        msgspec.structs.replace(right, tokens=right.tokens[:-4] + b"\5\0\0\0"),
    ):
        verdict = judged(of, submission(of), prefix(2, cut(of, rollouts[2], 1)), prefix(0, other), depth=depth)
        assert (verdict.reason, verdict.severity) == ("progress.prefix", Severity.CERTAIN)
        assert verdict.checks[-1].evidence["rollout"] == 0
        assert verdict.checks[-1].evidence["shown"] == prefix(0, other).digest


def test_a_rollout_that_is_shorter_than_what_was_shown_of_it_fails_for_certain() -> None:
    of, short = long_lease(), lease(5, seeds=4, proof=ProofParameters(topk=16, rows=ROWS))
    longer = cut(of, submission(of).rollouts[0], 8)
    assert judged(short, submission(short), prefix(0, longer)).reason == "progress.prefix"
