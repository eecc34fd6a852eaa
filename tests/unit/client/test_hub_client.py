"""The client against a scripted hub: signatures, retries, refusals, and answers that must not be believed."""

import json
from collections.abc import Callable
from typing import Any

import fake_run
import httpx2
import pytest
from fake_run import HUB, REPLY, RUN, STRANGER, VIEW, ScriptedHub, answer, lease, no_answer, refusal, run_info, signed

from shoal import errors, protocol
from shoal.errors import CodecError, HubRefused, HubUnreachable, ProtocolError, ShutOut, SignatureError
from shoal.protocol import LeaseReply, LeaseRequest, Problem, Receipt, SigningKey, fingerprint, pack, submission_digest
from shoal.protocol.node import PROTOCOL_VERSION, Heartbeat, HubClock
from shoal.protocol.signing import Document, SignedDocument, sign_values
from shoal.protocol.verdict import SubmissionBodies

BODY = b"a packed submission"


def receipt(**changes: object) -> Receipt:
    fields = {
        "run": RUN, "node": fake_run.NODE.node, "lease": "lease-1", "unit": 7, "submission": submission_digest(BODY),
        "size_bytes": len(BODY), "received_at_ms": 1,
    }  # fmt: skip
    return Receipt(**{**fields, **changes})  # type: ignore[arg-type]


def test_requests_are_signed_for_the_run_over_path_query_and_body() -> None:
    hub = ScriptedHub(script=[answer(VIEW)])
    assert hub.client(fingerprint(fake_run.ROOT.public_key)).register("n", "worker", None) == VIEW
    assert hub.verify(hub.requests[0]).node == fake_run.NODE.node
    with pytest.raises(SignatureError):
        hub.verify(hub.requests[0], run="other-run")


def test_public_calls_need_no_identity() -> None:
    head = protocol.LedgerHead(run=RUN, index=3, hash="b" * 64)
    hub = ScriptedHub(script=[answer(signed(head))])
    assert hub.client().ledger_head() == head
    assert "shoal-signature" not in hub.requests[0].headers


def test_retry_has_a_new_signature_and_the_same_body() -> None:
    hub = ScriptedHub(script=[no_answer, httpx2.Response(502), refusal(503, "hub.busy", "wait"), answer(LeaseReply())])
    hub.client().lease(LeaseRequest(request="request-1", max_units=4))
    signatures = [hub.verify(request) for request in hub.requests]
    assert len({signature.nonce for signature in signatures}) == 4
    assert [signature.at_ms for signature in signatures] == sorted({signature.at_ms for signature in signatures})
    assert len({request.content for request in hub.requests}) == 1


@pytest.mark.parametrize("text", ["7", "soon", "", "-1", "9" * 40])
def test_too_many_requests_waits_as_long_as_the_hub_says_and_a_strange_retry_after_is_bounded(text: str) -> None:
    hub = ScriptedHub(script=[refusal(429, "rate", "slow down", retry_after=text), answer(VIEW)])
    hub.client(patience_s=100).register("n", "worker", None)
    assert hub.stop.waits == [7.0] if text == "7" else hub.stop.waits[0] <= 60


def test_past_its_patience_it_says_where_how_long_and_what_to_do() -> None:
    hub = ScriptedHub(script=[no_answer] * 1000)
    with pytest.raises(HubUnreachable, match=r"http://hub:1 .*POST /nodes.* for \d+ s: .*refused; check the address"):
        hub.client(patience_s=30).register("n", "worker", None)
    assert 20 < sum(hub.stop.waits) <= 30


def test_a_stop_ends_the_retries() -> None:
    hub = ScriptedHub(script=[no_answer] * 3)
    hub.stop.set("SIGTERM")
    with pytest.raises(errors.DeadlineExceeded, match="SIGTERM"):
        hub.client().register("n", "worker", None)
    assert len(hub.requests) == 1


def test_a_refusal_carries_the_hubs_code_and_sentence_and_is_not_retried() -> None:
    hub = ScriptedHub(script=[refusal(401, "signature.skew", "the request's clock is 300 s ahead: set the clock")])
    with pytest.raises(HubRefused, match="300 s ahead") as caught:
        hub.client().register("n", "worker", None)
    assert (caught.value.status, caught.value.code) == (401, "signature.skew")
    assert not isinstance(caught.value, ShutOut)
    assert len(hub.requests) == 1


@pytest.mark.parametrize("code", ["node.banned", "node.suspended"])
def test_a_refusal_of_this_node_is_known_as_one(code: str) -> None:
    hub = ScriptedHub(script=[refusal(403, code, "this node is out: sampling.seed")])
    with pytest.raises(ShutOut, match=r"this node is out: sampling\.seed"):
        hub.client().register("n", "worker", None)


def test_answer_of_another_kind_is_an_error() -> None:
    hub = ScriptedHub(script=[httpx2.Response(200, content=b'{"hello": "world"}')])
    with pytest.raises(ProtocolError, match="not as a shoal hub"):
        hub.client().register("n", "worker", None)


def test_the_run_is_fetched_once_and_verified() -> None:
    hub = ScriptedHub(script=[answer(REPLY), answer(REPLY)])
    client = hub.client(fingerprint(fake_run.ROOT.public_key))
    client.heartbeat(Heartbeat())
    hub.info = signed(run_info(), STRANGER)
    client.heartbeat(Heartbeat())
    with pytest.raises(SignatureError):
        hub.client().run_info()


def test_leases_must_be_signed_by_the_hub_for_this_run_and_this_node() -> None:
    client = ScriptedHub().client()
    good = signed(lease())
    assert client.open_leases(LeaseReply(leases=(good,))) == [(lease(), good)]
    for bad in (signed(lease(), STRANGER), signed(lease(node=STRANGER.node)), signed(lease(run="x"))):
        with pytest.raises(SignatureError):
            client.open_leases(LeaseReply(leases=(bad,)))
    assert client.open_lease(signed(lease(node=STRANGER.node))).node == STRANGER.node


@pytest.mark.parametrize(
    ("changes", "by"),
    [({"submission": "c" * 64}, HUB), ({"lease": "lease-2"}, HUB), ({"node": STRANGER.node}, HUB), ({}, STRANGER)],
)
def test_a_receipt_for_something_else_is_refused(changes: dict[str, object], by: object) -> None:
    hub = ScriptedHub(script=[answer(signed(receipt(**changes), by), 201)])  # type: ignore[arg-type]
    with pytest.raises(SignatureError):
        hub.client().submit("lease-1", BODY)


def test_a_lease_id_cannot_change_the_path() -> None:
    hub = ScriptedHub(script=[answer(signed(receipt(lease="../x?y")), 201)])
    assert hub.client().submit("../x?y", BODY) == receipt(lease="../x?y")
    assert hub.requests[0].url.raw_path == b"/submissions/..%2Fx%3Fy"


def test_a_submission_is_checked_against_its_name() -> None:
    answers = [pack(SubmissionBodies([BODY, b"2"])), pack(SubmissionBodies([b"2", BODY])), pack(SubmissionBodies([]))]
    hub = ScriptedHub(script=[httpx2.Response(200, content=content) for content in answers])
    client = hub.client()
    names = [submission_digest(BODY), submission_digest(b"2")]
    assert client.submissions(names) == [BODY, b"2"]
    for _ in range(2):
        with pytest.raises(CodecError, match="do not match"):
            client.submissions(names)


def test_a_patient_twin_shares_the_run_but_not_the_patience() -> None:
    hub = ScriptedHub(script=[no_answer] * 100)
    client = hub.client(patience_s=50)
    client.run_info()
    with pytest.raises(HubUnreachable):
        client.patient(1.0).heartbeat(Heartbeat())
    assert sum(hub.stop.waits) <= 1.0


def wrong_clock(hub_ms: int, by: SigningKey = HUB, **changes: Any) -> Callable[[httpx2.Request], httpx2.Response]:
    """A hub that refuses a request for its date, and says what time it is."""

    def refused(request: httpx2.Request) -> httpx2.Response:
        fields = {
            "run": RUN, "node": fake_run.NODE.node, "nonce": request.headers["shoal-nonce"], "now_ms": hub_ms,
            **changes,
        }  # fmt: skip
        clock = signed(HubClock(**fields), by)
        return answer(Problem(code="auth.skew", message="the clock is off", clock=clock), 401)

    return refused


def test_told_that_its_clock_is_wrong_it_asks_again_by_the_hubs_and_keeps_to_that() -> None:
    hub_ms = ScriptedHub().clock.now_ms() - 3_600_000
    hub = ScriptedHub(script=[wrong_clock(hub_ms), answer(VIEW), answer(REPLY)])
    client = hub.client()
    client.register("n", "worker", None)
    client.patient(5.0).heartbeat(Heartbeat())
    times = [int(request.headers["shoal-time"]) for request in hub.requests]
    assert abs(times[0] - hub_ms) == 3_600_000
    assert all(abs(at_ms - hub_ms) < 1000 for at_ms in times[1:])


def test_two_requests_refused_for_the_same_clock_are_both_asked_again() -> None:
    """As two threads do: the second refusal is no news, but its request was dated before the first."""
    skew = wrong_clock(ScriptedHub().clock.now_ms() + 3_600_000)

    def refused_meanwhile(request: httpx2.Request) -> httpx2.Response:
        assert client.register("n", "worker", None) == VIEW
        return skew(request)

    hub = ScriptedHub(script=[refused_meanwhile, skew, answer(VIEW), answer(REPLY)])
    client = hub.client()
    assert client.heartbeat(Heartbeat()).node == VIEW


NOW_MS, LATER_MS = ScriptedHub().clock.now_ms(), ScriptedHub().clock.now_ms() + 3_600_000


@pytest.mark.parametrize(
    "refused",
    [
        refusal(401, "auth.skew", "the clock is off", shoal_time=str(LATER_MS)), wrong_clock(NOW_MS),
        wrong_clock(LATER_MS, by=STRANGER), wrong_clock(LATER_MS, by=fake_run.TRAINER),
        wrong_clock(LATER_MS, nonce="n" * 24), wrong_clock(LATER_MS, node=STRANGER.node),
        wrong_clock(LATER_MS, run="other-run"),
    ],
    ids=["unsigned", "the same time", "a stranger", "another role", "another request", "another node", "another run"],
)  # fmt: skip
def test_time_that_no_hub_signed_for_this_request_corrects_no_clock(refused: Any) -> None:
    hub = ScriptedHub(script=[refused] * 3)
    with pytest.raises(HubRefused, match="the clock is off"):
        hub.client().register("n", "worker", None)
    assert len(hub.requests) == 1


def test_a_silence_is_mentioned_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    hub = ScriptedHub(script=[*[no_answer] * 12, answer(VIEW)])
    with caplog.at_level("INFO", "shoal.client"):
        hub.client().register("n", "worker", None)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split("(")[0] for line in said[:1]] == ["the hub at http://hub:1 does not answer /nodes "]
    assert len(said) == 2
    assert "answers again, after" in said[1]
    caplog.clear()
    hub.script += [*[no_answer] * 4, answer(VIEW)]  # a hiccup is not mentioned
    hub.client().register("n", "worker", None)
    assert not caplog.records


def test_a_hub_of_this_version_gets_all_of_it_and_is_told_the_version() -> None:
    hub = ScriptedHub(script=[answer(REPLY)])
    hub.client().heartbeat(Heartbeat(progress={"u1a0": 3}))
    assert json.loads(hub.requests[0].content)["progress"] == {"u1a0": 3}
    assert hub.requests[0].headers["shoal-protocol"] == str(PROTOCOL_VERSION)
    assert hub.requests[0].headers["user-agent"].startswith("shoal/")


def later(document: Document, **added: Any) -> SignedDocument:
    return sign_values(document.kind, {**document.model_dump(mode="json"), **added}, HUB)


def test_unknown_fields_of_a_newer_hub_are_ignored() -> None:
    reply = {"leases": [later(lease(), colour="grey").model_dump()], "mood": "good"}
    hub = ScriptedHub(info=later(run_info(), colour="grey"), script=[httpx2.Response(200, json=reply)])
    client = hub.client()
    got = client.lease(LeaseRequest(request="request-1"))
    assert client.open_leases(got)[0][0] == lease()


def test_a_role_that_came_later_can_have_a_certificate_without_harm() -> None:
    extra = later(run_info()).model_copy()
    certificate = sign_values("role-certificate", {"run": "x", "role": "gardener", "public_key": "0" * 64}, HUB)
    certificates = [*extra.document["certificates"], certificate.model_dump(mode="json")]
    hub = ScriptedHub(info=later(run_info(), certificates=certificates))
    assert hub.client().trusted_run().hub_keys == {HUB.public_key}
