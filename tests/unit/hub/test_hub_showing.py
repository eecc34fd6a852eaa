"""Newcomers who show their progress, over HTTP: taken, renewed by, looked at, held against the submission."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.hub import ROOT, RUN_ID, Actor, Bench, code_of, ok, submission_body
from kit.state import rules
from shoal.hub.service.showing import Showing
from shoal.hub.state import Moment, Refusal, ShownRow, submissions
from shoal.ledger import Chain, Keys, Proofs
from shoal.protocol import Lease, ProgressReply, ProofParameters, Rollout, ShownChunks, ShownProgress, Submission
from shoal.protocol.codec import BodyLimits, pack, unpack
from shoal.protocol.node import NodeState
from shoal.protocol.status import Evidence
from shoal.protocol.submission import pack_logprobs as logprobs
from shoal.protocol.submission import pack_tokens, shown_digest, submission_digest
from shoal.protocol.verdict import Audit, Outcome, Severity, SubmissionBodies

ROWS = 32
LEASE_S = 10.0

pytestmark = pytest.mark.hub(run={"max_new_tokens": 128, "groups_per_step": 8}, settings={"lease_s": LEASE_S})


def chunks(rollout: int = 0, start: int = 0, count: int = 1, first: int = 5) -> ShownChunks:
    tokens = [first + at for at in range(start, start + ROWS * count)]
    return ShownChunks(rollout, start, pack_tokens(tokens), b"p" * 258 * count)


def show(who: Actor, lease: str, *said: ShownChunks) -> Any:
    return who.call("POST", f"/leases/{lease}/progress", pack(ShownProgress(list(said))))


def shown(bench: Bench, lease: Lease, *said: ShownChunks) -> ProgressReply:
    return ProgressReply.model_validate_json(ok(show(bench.alice, lease.lease, *said)).content)


def looked_at(bench: Bench) -> tuple[Lease, Audit]:
    """A lease of which a chunk was shown, and what a validator gets of it."""
    [lease] = bench.alice.lease()
    shown(bench, lease, chunks(0))
    [audit] = bench.audits()
    return lease, audit


def bodies(bench: Bench, *names: str) -> list[bytes]:
    query = "&".join(f"name={name}" for name in names)
    answer = ok(bench.validator.call("GET", f"/submissions?{query}")).content
    return unpack(answer, SubmissionBodies, BodyLimits()).bodies


def failed(bench: Bench, audit: Audit, **changes: Any) -> Any:
    fields = {"reason": "progress.seed", "message": "made up", "severity": Severity.CERTAIN, "depth": "progress"}
    return bench.judge(audit, (), outcome=Outcome.REJECTED, generated_tokens=0, **{**fields, **changes})


def test_shown_chunks_renew_a_lease_and_the_same_again_does_not(bench: Bench) -> None:
    [lease] = bench.alice.lease()
    bench.clock.advance(6)
    reply = shown(bench, lease, chunks(0), chunks(1, count=2))
    assert reply.tokens == (32, 64)
    assert reply.deadline_ms == bench.clock.now_ms() + 10_000
    bench.clock.advance(1)
    assert shown(bench, lease, chunks(0), chunks(1, count=2)) == reply
    bench.clock.advance(1)
    later = shown(bench, lease, chunks(0, start=64), chunks(1, start=64))
    assert later.tokens == (32, 96), "a chunk after a gap is left out, and the answer says what is missing"
    assert later.deadline_ms == bench.clock.now_ms() + 10_000


def test_what_is_shown_of_others_of_ended_leases_or_in_other_forms_is_refused(bench: Bench) -> None:
    [lease] = bench.alice.lease()
    assert code_of(show(bench.bob, lease.lease, chunks())) == (403, "lease.not_yours")
    assert code_of(show(bench.alice, "u99a0", chunks())) == (404, "lease.unknown")
    for said in (chunks(rollout=2), chunks(count=5)):
        assert code_of(show(bench.alice, lease.lease, said)) == (422, "progress.malformed")
    for body, code in ((b"x", (422, "progress.malformed")), (b"x" * (2**20 + 1), (413, "body.too_big"))):
        assert code_of(bench.alice.call("POST", f"/leases/{lease.lease}/progress", body)) == code
    bench.clock.advance(11)
    bench.bob.lease()
    assert code_of(show(bench.alice, lease.lease, chunks())) == (410, "lease.late")


def test_a_validator_is_given_one_shown_rollout_and_again_after_each_doubling(bench: Bench) -> None:
    [lease] = bench.alice.lease()
    assert bench.audits() == ()
    shown(bench, lease, chunks(0), chunks(1))
    [audit] = bench.audits()
    assert (audit.depth, audit.shown) == ("progress", ())
    [body] = bodies(bench, audit.submission)
    assert submission_digest(body) == audit.submission
    claim = unpack(body, Submission, BodyLimits())
    named = (claim.lease, claim.unit, claim.node, claim.policy_digest)
    assert named == (lease.lease, 0, lease.node, lease.policy.digest)
    assert sorted(rollout.tokens for rollout in claim.rollouts) == [b"", chunks().tokens]
    assert sorted(rollout.proofs for rollout in claim.rollouts) == [b"", chunks().proofs]
    assert bench.audits() == ()
    shown(bench, lease, chunks(0, start=32))
    assert bench.audits() == (), "96 tokens are not twice as many as 64"
    shown(bench, lease, chunks(1, start=32))
    assert len(bench.audits()) == 1


def test_of_two_shown_leases_the_one_that_ends_first_is_looked_at_first_also_by_a_new_hub(bench: Bench) -> None:
    [mine], [other] = bench.alice.lease(), bench.bob.lease()
    shown(bench, mine, chunks())
    bench.clock.advance(1)
    ok(show(bench.bob, other.lease, chunks()))
    bench.clock.advance(1)
    shown(bench, mine, chunks(start=32))  # so that it ends after the other
    context = bench.hub.context
    new = Showing(context)
    with context.storage.read() as reader:
        moment = Moment(context.rules, reader.progress(), context.clock.now_ms())
        found = [new.audit(reader, moment, (), idle=True) for _ in range(3)]
    for audits in (found, [*bench.audits(), *bench.audits(), *bench.audits(), None]):
        leases = [None if audit is None else Lease.model_validate(audit.lease.document).lease for audit in audits]
        assert leases == [other.lease, mine.lease, None]


def test_a_certain_failure_bans_ends_the_lease_and_can_be_checked_later(bench: Bench) -> None:
    lease, audit = looked_at(bench)
    ok(failed(bench, audit))
    view = bench.view(bench.alice)
    assert (view.state, view.rejected, view.strikes) == (NodeState.BANNED, 1, 1)
    assert view.reason == "progress.seed: made up"
    assert bench.status().units["open"] == 1
    [again] = bench.bob.lease()
    assert (again.unit, again.seeds) == (lease.unit, lease.seeds)
    story = ok(bench.http.get(f"/units/{lease.unit}")).json()
    told = [(each["submission"], each["reason"]) for each in story["submissions"]]
    assert told == [(audit.submission, "progress.seed")]
    bench.restart()
    assert submission_digest(bodies(bench, audit.submission)[0]) == audit.submission, "the bytes are kept"


def _release(bench: Bench, lease: Lease) -> None:
    ok(bench.alice.call("POST", "/leases/release", {"leases": [lease.lease]}))


def _lapse(bench: Bench, lease: Lease) -> None:
    bench.clock.advance(LEASE_S + 1)


def _require_ledger_verifies(bench: Bench, kinds: set[str]) -> None:
    entries = bench.ledger().entries
    told = ok(bench.http.get("/ledger/evidence?after=-1&limit=200")).json()["evidence"]
    evidence = {each["row"]: Evidence.model_validate(each) for each in told}
    chain = Chain()
    proofs = Proofs(Keys(RUN_ID, ROOT.public_key), chain)
    for entry in entries:
        chain.add(entry)
        proofs.add(entry, evidence.get(entry.index))
    assert kinds <= {entry.kind for entry in entries}


@pytest.mark.parametrize(("end", "meanwhile"), [
    (_release, "open"), (_release, "leased"), (_release, "accepted"), (_lapse, "leased"), (_lapse, "submitted"),
    (_lapse, "accepted"),
])  # fmt: skip
def test_a_lease_that_ended_before_the_verdict_bans_its_node_and_leaves_the_unit_alone(bench, end, meanwhile):
    bench.accept_groups(1)  # alice is in the ledger now, so her ban has to be
    lease, audit = looked_at(bench)
    end(bench, lease)
    if meanwhile != "open":
        [taken] = bench.bob.lease()
        assert taken.unit == lease.unit
    if meanwhile in ("submitted", "accepted"):
        ok(bench.bob.submit(taken))
    if meanwhile == "accepted":
        bench.accept()
    before = ok(bench.http.get(f"/units/{lease.unit}")).json()
    ok(failed(bench, audit))
    assert bench.row(bench.alice).state is NodeState.BANNED
    after = ok(bench.http.get(f"/units/{lease.unit}")).json()
    assert after["state"] == before["state"] == meanwhile
    assert [each["state"] for each in after["leases"]] == [each["state"] for each in before["leases"]]
    told = [each["reason"] for each in after["submissions"] if each["submission"] == audit.submission]
    assert told == ["progress.seed"]
    _require_ledger_verifies(bench, {"credit", "rejected"})
    ok(failed(bench, audit))
    if meanwhile == "leased":
        ok(bench.bob.submit(taken))


def test_a_progress_verdict_that_names_another_unit_or_node_changes_nothing(bench: Bench) -> None:
    lease, audit = looked_at(bench)
    for changes in ({"unit": lease.unit + 5}, {"node": bench.bob.key.node}):
        assert code_of(failed(bench, audit, **changes)) == (422, "verdict.mismatch")
    assert ok(bench.http.get(f"/units/{lease.unit}")).json()["submissions"] == []
    ok(bench.alice.submit(lease))


def test_the_audit_of_a_submission_carries_what_was_shown(bench: Bench) -> None:
    [lease] = bench.alice.lease()
    shown(bench, lease, chunks(1))
    shown(bench, lease, chunks(1, start=32))
    tokens = pack_tokens(range(5, 5 + 64))
    honest = Rollout(tokens=tokens, logprobs=logprobs([-0.5] * 64), finish="eos", proofs=b"p" * 516)
    ok(bench.alice.submit(lease, submission_body(lease, rollouts=[honest, honest])))
    [audit] = [each for each in bench.audits() if each.depth == "full"]
    [prefix] = audit.shown
    assert (prefix.rollout, prefix.tokens, prefix.proof_bytes) == (1, 64, 516)
    assert prefix.digest == shown_digest(tokens, b"p" * 516)


def test_while_submissions_wait_shown_progress_gets_a_small_share_of_the_bytes(bench: Bench) -> None:
    [lease] = bench.alice.lease()
    shown(bench, lease, chunks(0, count=4), chunks(1, count=4))
    bench.bob.deliver()
    assert [audit.depth for audit in bench.audits()] == ["full"], "a small group does not pay for a long rollout"
    assert [audit.depth for audit in bench.audits()] == ["full"], "claimed before, and given again"


PROOF = ProofParameters(topk=8, rows=4)
RULES = rules(group_size=2, max_new_tokens=16)


def cut_chunks(rollout: int, start: int, tokens: Sequence[int], proofs: bytes | None = None) -> ShownChunks:
    made = bytes(4 * -(-len(tokens) // 4)) if proofs is None else proofs
    return ShownChunks(rollout, start, pack_tokens(tokens), made)


def take(last: ShownRow | None, *said: ShownChunks) -> tuple[tuple[int, ...], ShownRow | None, list[ShownChunks]]:
    return submissions.take_shown(RULES, PROOF, "u0a0", last, said)


@pytest.mark.parametrize(("said", "why"), [
    (cut_chunks(2, 0, range(4)), "groups have 2 rollouts"), (cut_chunks(0, 0, range(17)), "17 tokens; at most 16"),
    (cut_chunks(0, 0, range(4), proofs=bytes(19)), "19 bytes of proofs do not fit 1 chunks"),
    (cut_chunks(0, 0, range(8), proofs=bytes(7)), "7 bytes of proofs do not fit 2 chunks"),
    (cut_chunks(0, 0, ()), "0 bytes of tokens"), (ShownChunks(0, 0, b"\0" * 5, bytes(4)), "5 bytes of tokens"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(said, why):
    with pytest.raises(Refusal, match=why) as caught:
        take(None, said)
    assert (caught.value.status, caught.value.code) == (422, "progress.malformed")


@given(data=st.data())
def test_however_messages_are_cut_lost_and_repeated_the_copy_becomes_the_group(data: st.DataObject):
    lengths = data.draw(st.tuples(st.integers(1, 16), st.integers(1, 16)))
    whole = [list(range(100 * row, 100 * row + length)) for row, length in enumerate(lengths)]
    proofs = [[bytes([row, at, 1, 2]) for at in range(-(-length // 4))] for row, length in enumerate(lengths)]
    last, bodies = None, list[bytes]()
    have = (0, 0)
    for _ in range(200):
        if have == lengths:
            break
        believed = tuple(data.draw(st.sampled_from([0, have[row]])) for row in range(2))  # an answer may be lost
        said = []
        for row, start in enumerate(believed):
            left = -(-(lengths[row] - start) // 4)
            count = data.draw(st.integers(0, min(left, 2)))
            if count:
                part = proofs[row][start // 4 : start // 4 + count]
                said.append(cut_chunks(row, start, whole[row][start : start + 4 * count], b"".join(part)))
        have, row_, new = take(last, *said)
        if row_ is not None:
            body = pack(ShownProgress(new))
            last, bodies = replace(row_, body=body), [*bodies, body]
        if data.draw(st.booleans()):
            have = (0, 0) if last is None else last.tokens  # what the next answer says
    found = submissions.joined_parts([unpack(body, ShownProgress, BodyLimits()).chunks for body in bodies])
    for row, (tokens, proof) in found.items():
        assert pack_tokens(whole[row]).startswith(tokens)
        assert b"".join(proofs[row]).startswith(proof)
        assert len(tokens) // 4 == (last.tokens[row] if last else 0)
    for prefix in submissions.prefixes(found):
        begins = pack_tokens(whole[prefix.rollout][: prefix.tokens])
        assert prefix.digest == shown_digest(begins, b"".join(proofs[prefix.rollout])[: prefix.proof_bytes])


def test_only_a_certain_failure_is_taken_from_an_audit_of_progress(bench: Bench) -> None:
    lease, audit = looked_at(bench)
    odd: list[dict[str, Any]] = [{"severity": Severity.STATISTICAL}, {"reason": "sampling.seed"}]
    for answer in (bench.judge(audit), *(failed(bench, audit, **changes) for changes in odd)):
        assert code_of(answer) == (422, "verdict.progress")
    ok(bench.alice.submit(lease))
    assert code_of(failed(bench, audit)) == (409, "verdict.late")
