"""Why: the hub tells all that happened to a unit and to a node, with proofs, and nothing that must stay secret."""

from typing import Any

import httpx2
import pytest

from kit.hub import HUB, RUN_ID, TRAINER, VALIDATOR, Bench, certificate, code_of, ok, worker_key
from shoal.hub.service import reporting
from shoal.ledger import fold
from shoal.protocol import CheckResult, Lease, Outcome, Receipt, Registration, Severity, SigningKey, Verdict, Vouch
from shoal.protocol.signing import SignedDocument, document_hash, open_document, sign_document, sign_values
from shoal.protocol.status import EvidencePage, NodeStory, UnitStory, behind

ALICE, BOB = worker_key(1).node, worker_key(2).node
FAILED: dict[str, Any] = {
    "outcome": Outcome.REJECTED, "reason": "sampling.seed", "severity": Severity.CERTAIN,
    "message": "token 3 of sample 0 was not drawn with its seed",
    "checks": (CheckResult(check="sampling", passed=False, evidence={"outside": 812, "limit": 14}, message="no"),),
}  # fmt: skip

pytestmark = pytest.mark.hub()


def unit_story(bench: Bench, unit: int) -> UnitStory:
    return UnitStory.model_validate_json(ok(bench.http.get(f"/units/{unit}")).content)


def node_story(bench: Bench, node: str) -> NodeStory:
    return NodeStory.model_validate_json(ok(bench.http.get(f"/nodes/{node}")).content)


def test_the_story_of_a_unit_from_its_first_lease_to_training(bench: Bench) -> None:
    [lost] = bench.bob.lease()
    ok(bench.bob.call("POST", "/leases/release", {"leases": [lost.lease]}))
    leases = bench.accept_groups(2)
    assert bench.batch(0) is not None
    ok(bench.announce(1))
    story = unit_story(bench, 0)
    assert (story.state, story.step, story.sentence) == ("trained", 0, "trained on in step 0")
    assert [(each.node, each.state) for each in story.leases] == [(BOB, "released"), (ALICE, "submitted")]
    assert story.leases[0].ended_at_ms is not None
    [submission] = story.submissions
    assert (submission.state, submission.credit, submission.credit_state) == ("accepted", 6, "final")
    assert submission.verdict is not None
    assert open_document(submission.verdict, Verdict, VALIDATOR.public_key).unit == 0
    assert submission.receipt is not None
    assert open_document(submission.receipt, Receipt, HUB.public_key).lease == leases[0].lease
    assert [entry.kind for entry in story.ledger] == ["credit", "batch"]
    assert story.leases[1].document is not None
    assert story.seeds == open_document(story.leases[1].document, Lease, HUB.public_key).seeds == leases[0].seeds


def test_seeds_are_told_only_when_nobody_can_get_the_unit_any_more(bench: Bench) -> None:
    leases = bench.alice.lease(2)
    secrets = {seed for lease in leases for seed in lease.seeds}

    def leaks(unit: int) -> bool:
        texts = [bench.http.get(f"/units/{unit}").text, bench.http.get(f"/nodes/{ALICE}").text]
        return any(seed in text for text in texts for seed in secrets)

    assert not leaks(0)  # leased
    for lease in leases:
        ok(bench.alice.submit(lease))
    assert not leaks(0)  # handed in
    first, second = bench.audits()
    ok(bench.judge(first))
    assert not leaks(0)  # accepted, and may still be pulled
    ok(bench.judge(second, **FAILED))
    assert not leaks(1)  # rejected: open again
    bench.bob.deliver()
    bench.accept()
    assert bench.batch(0) is not None
    assert leaks(0)
    assert unit_story(bench, 1).seeds == leases[1].seeds


def test_stories_of_a_rejected_unit_and_its_node_say_which_check_and_rule_and_have_what_an_appeal_needs(bench) -> None:
    ok(bench.judge(bench.audit_of(bench.alice), **FAILED))
    story = unit_story(bench, 0)
    assert story.sentence == "waits for a worker again, after 1 lease"
    [submission] = story.submissions
    assert "cannot happen by accident" in submission.rule
    assert submission.verdict is not None
    [check] = open_document(submission.verdict, Verdict, VALIDATOR.public_key).checks
    assert check.evidence == {"outside": 812, "limit": 14}
    assert (submission.credit, submission.credit_state) == (0, "none")
    story = node_story(bench, ALICE)
    assert story.run == RUN_ID
    assert story.sentence.startswith("banned: sampling.seed: token 3")
    assert (story.certain, story.node.state.value, story.node.name) == (1, "banned", "alice")
    [refused] = story.refused
    assert refused.lease == "u0a0"
    assert refused.verdict is not None
    assert story.ledger == (), "nothing of it was ever accepted: only the hub's database tells of it"
    assert [each.state for each in story.leases] == ["submitted"]


def test_the_ban_of_a_node_that_earned_is_in_the_ledger_with_its_cause(bench: Bench) -> None:
    bench.accept_groups(1)
    ok(bench.judge(bench.audit_of(bench.alice), **FAILED))
    story = node_story(bench, ALICE)
    [sanction] = [entry for entry in story.ledger if entry.kind == "sanction"]
    [cause] = behind(sanction, story.ledger)
    [refused] = story.refused
    assert cause["submission"] == refused.submission
    assert refused.verdict is not None
    assert cause["verdict"] == document_hash(refused.verdict)


def test_the_evidence_of_each_row_is_what_it_points_to(bench: Bench) -> None:
    bench.accept_groups(2)
    credits = [entry for entry in bench.ledger().entries if entry.kind == "credit"]
    page = EvidencePage.model_validate_json(ok(bench.http.get("/ledger/evidence?after=-1&limit=200")).content)
    assert [each.row for each in page.evidence] == [entry.index for entry in credits]
    for each, entry in zip(page.evidence, credits, strict=True):
        assert each.receipt is not None
        assert each.verdict is not None
        assert entry.body["receipt"] == document_hash(each.receipt)
        assert entry.body["verdict"] == document_hash(each.verdict)
    after = f"/ledger/evidence?after={credits[0].index}&limit=1"
    assert [each["row"] for each in ok(bench.http.get(after)).json()["evidence"]] == [credits[1].index]


def test_of_very_many_nodes_the_status_shows_those_that_matter(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "NODES_SHOWN", 6)
    ranks = (("trusted", 2), ("sanctioned", 1), ("credit", 1), ("seen", 6))
    monkeypatch.setattr(reporting, "RANKS", ranks)
    bench.accept_groups(1)
    ok(bench.judge(bench.audit_of(bench.bob), **FAILED))
    for number in range(3, 12):
        ok(bench.actor(worker_key(number)).register(name=f"n{number}"))
    status = bench.status()
    shown = [node.node for node in status.nodes]
    assert len(shown) == 6
    assert {node.role for node in status.nodes[:2]} == {"trainer", "validator"}
    assert shown[2:4] == [BOB, ALICE]
    assert (sum(status.node_counts.values()), status.node_counts["worker.banned"]) == (13, 1)


def test_a_refusal_is_shown_behind_the_newest_decisions_and_only_once(bench, monkeypatch):
    monkeypatch.setattr(reporting, "VERDICTS_SHOWN", 1)
    shown = []
    for actor, changes in ((bench.alice, {**FAILED, "severity": Severity.STATISTICAL}), (bench.bob, {})):
        ok(bench.judge(bench.audit_of(actor), **changes))
        shown.append([(verdict.node, verdict.outcome) for verdict in bench.status().verdicts])
        bench.clock.advance(1)
    assert shown == [[(ALICE, "rejected")], [(BOB, "accepted"), (ALICE, "rejected")]]


OWNER, OTHER = SigningKey.from_seed(b"o" * 32), SigningKey.from_seed(b"p" * 32)
CAROL = worker_key(5)


def vouch(node: str = CAROL.node, owner: SigningKey = OWNER, by: SigningKey | None = None) -> SignedDocument:
    return sign_document(Vouch(owner=owner.public_key, node=node, issued_at_ms=1), by or owner)


def register(bench: Bench, key: SigningKey, signed: SignedDocument | None, **changes: Any) -> httpx2.Response:
    return bench.actor(key).call("POST", "/nodes", Registration(public_key=key.public_key, vouch=signed, **changes))


def vouches(bench: Bench) -> list[dict[str, Any]]:
    return [entry.body for entry in bench.ledger().entries if entry.kind == "vouch"]


def works(bench: Bench, key: SigningKey) -> None:
    """The node has a group accepted, with which it comes into the ledger."""
    bench.actor(key).deliver()
    bench.accept()


def test_an_owner_is_written_down_once_and_stays(bench: Bench) -> None:
    assert ok(register(bench, CAROL, vouch())).json()["owner"] == OWNER.public_key
    ok(register(bench, CAROL, vouch()))
    assert ok(register(bench, CAROL, None)).json()["owner"] == OWNER.public_key, "silence takes nothing away"
    assert code_of(register(bench, CAROL, vouch(owner=OTHER))) == (409, "vouch.owner")
    assert vouches(bench) == [], "nothing of hers was accepted yet"
    works(bench, CAROL)
    signed = vouch().model_dump(mode="json")
    assert vouches(bench) == [{"node": CAROL.node, "owner": OWNER.public_key, "vouch": signed}]
    assert fold(bench.ledger().entries).by_node[CAROL.node].owner == OWNER.public_key


@pytest.mark.parametrize(("signed", "code"), [
    (vouch(node="0" * 32), "vouch.other"),  # for another node
    (vouch(by=OTHER), "vouch.other"),  # in the name of somebody else
    (vouch().model_copy(update={"signature": "0" * 128}), "vouch.signature"),
    (vouch().model_copy(update={"kind": "lease"}), "vouch.signature"),
    (certificate(CAROL, "worker"), "vouch.signature"),
])  # fmt: skip
def test_a_vouch_that_does_not_hold_is_refused_and_leaves_nothing(bench, signed, code):
    assert code_of(register(bench, CAROL, signed)) == (403, code)
    assert vouches(bench) == []
    assert CAROL.node not in [node.node for node in bench.status().nodes]


def test_a_vouch_carries_no_load(bench: Bench) -> None:
    """Keys are free, and what a key brings is kept: 60 a minute of 64 kB would be 5 GB a day for each address."""
    values = {**vouch().document, "load": "x" * 2000}
    signed = sign_values("vouch", values, OWNER)
    assert code_of(register(bench, CAROL, signed)) == (422, "vouch.size")
    ok(register(bench, CAROL, sign_values("vouch", {**vouch().document, "later": "field"}, OWNER)))


def test_only_workers_have_owners(bench: Bench) -> None:
    signed = certificate(TRAINER, "trainer")
    answer = register(bench, TRAINER, vouch(TRAINER.node), role="trainer", certificate=signed)
    assert code_of(answer) == (403, "vouch.role")
