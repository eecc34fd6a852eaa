"""What strangers, and keys that are trusted no more, must not get: work for the hub, a way back in, a second seat."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from kit.asgi import in_loop
from kit.hub import ADMIN, ROOT, TRAINER, VALIDATOR, Bench, Owner, certificate, code_of, make_config, ok, policy
from shoal.hub.changes import Changes, Topic
from shoal.hub.http import auth, polling
from shoal.hub.http.auth import read_body
from shoal.hub.http.limits import Edge
from shoal.hub.service.context import ORDERS, orders_of
from shoal.hub.service.upkeep import READ_POSTS, Posting
from shoal.hub.state.commands import Record, Refusal
from shoal.hub.storage import Reader
from shoal.protocol import AuditRequest, PolicyAnnouncement, Registration, SigningKey, VerdictReport, sign_document
from shoal.runtime.clock import ManualClock

SECOND = SigningKey.from_seed(b"w" * 32)


def refusal_of(call: Callable[[], Any]) -> tuple[int, str]:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value.status, caught.value.code


@pytest.mark.parametrize("by", [ADMIN, ROOT])
def test_nobody_is_pardoned_whose_key_was_revoked(bench: Bench, owner: Owner, by: SigningKey) -> None:
    assert owner.order("revoke", key=ROOT, target=VALIDATOR.public_key).changed
    assert code_of(owner.post(owner.request("pardon", key=by, target=VALIDATOR.node))) == (409, "admin.revoked")
    assert bench.row(bench.actor(VALIDATOR)).state.value == "banned"
    story = ok(bench.http.get(f"/nodes/{VALIDATOR.node}")).json()
    assert story["sentence"] == "banned: its key was revoked by the run's owner, and that is for good"
    assert code_of(bench.validator.call("POST", "/audits", {"max_audits": 1})) == (403, "node.banned")


def test_a_key_that_is_revoked_while_it_registers_is_not_taken_in(bench, owner, monkeypatch):
    hub, revoke = bench.hub, owner.request("revoke", key=ROOT, target=SECOND.public_key)
    decide, orders = hub.context.decision, [revoke]

    def late(**options: bool) -> AbstractContextManager[Any]:
        if orders:
            hub.administration.act(orders.pop())
        return decide(**options)

    monkeypatch.setattr(hub.context, "decision", late)
    signed = certificate(SECOND, "validator")
    registration = Registration(public_key=SECOND.public_key, role="validator", certificate=signed)
    assert refusal_of(lambda: hub.membership.register(registration)) == (403, "auth.revoked")
    assert bench.stored.node(SECOND.node) is None
    assert code_of(bench.actor(SECOND).register()) == (403, "auth.revoked"), "nor does it come back as a worker"


@pytest.mark.hub
def test_what_was_on_its_way_when_a_key_was_revoked_is_refused(bench: Bench) -> None:
    hub, validator, trainer = bench.hub, bench.row(bench.actor(VALIDATOR)), bench.row(bench.actor(TRAINER))
    with hub.context.storage.write() as transaction:
        revoked = (VALIDATOR.public_key, TRAINER.public_key)
        orders = orders_of(transaction).model_copy(update={"revoked": revoked})
        transaction.put_setting(ORDERS, orders.model_dump_json())
    announcement = PolicyAnnouncement(run=hub.context.config.run_id, policy=policy(1), created_at_ms=0)
    for call in (
        lambda: hub.checking.audits(validator, AuditRequest(max_audits=1)),
        lambda: hub.checking.verdicts(validator, VerdictReport(verdicts=(sign_document(announcement, VALIDATOR),))),
        lambda: hub.training.announce(trainer, sign_document(announcement, TRAINER)),
        lambda: hub.training.batch(trainer, 0),
    ):
        assert refusal_of(call) == (403, "auth.revoked")


def test_who_is_shut_out_while_its_body_comes_in_is_refused(bench, owner, monkeypatch):
    async def slow(*args: Any) -> bytes:
        bench.hub.administration.act(owner.request("revoke", target=VALIDATOR.public_key))
        return await read_body(*args)

    monkeypatch.setattr(auth, "read_body", slow)
    assert code_of(bench.validator.call("POST", "/heartbeat", {})) == (403, "node.banned")


def test_an_order_that_is_old_or_was_given_before_stops_nobody(bench, owner, monkeypatch):
    pause = owner.request("pause")
    ok(owner.post(pause))
    late = owner.request("pause", key=ROOT, issued_at_ms=bench.clock.now_ms() - 121_000)
    again = owner.request("resume", key=ROOT)
    ok(owner.post(again))
    assert owner.order("revoke", key=ROOT, target=ADMIN.public_key).changed
    bench.hub.posting.post()  # so that the upkeep has nothing to write
    write = Mock(wraps=bench.hub.context.storage.write)
    monkeypatch.setattr(bench.hub.context.storage, "write", write)
    assert code_of(owner.post(pause)) == (403, "admin.revoked")
    assert not ok(owner.post(again)).json()["changed"]
    assert code_of(owner.post(late)) == (401, "admin.skew")
    assert not [call for call in write.call_args_list if True in (*call.args[1:], call.kwargs.get("exclusive"))]


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request comes from an address of somebody else's."""
    monkeypatch.setattr(Edge, "client_of", lambda _self, _scope: "192.0.2.1")


def test_readers_make_the_hub_post_now_and_then_only(bench: Bench) -> None:
    hub, clock = bench.hub, ManualClock()
    posting = Posting(hub.context, clock)
    page = posting._post_all = Mock(wraps=posting._post_all)  # type: ignore[method-assign]

    def recorded() -> None:
        bench.stored.apply([Record("sanction", {"node": "0" * 32}, 1)])

    posting.post()
    before = page.call_count
    for _ in range(READ_POSTS * 3):
        recorded()
        posting.post_for_reader()
    assert page.call_count - before == READ_POSTS
    clock.advance(0.25)
    posting.post_for_reader()
    assert page.call_count - before == READ_POSTS + 1
    clock.advance(0.25)
    posting.post_for_reader()  # nothing to post: costs nothing
    recorded()
    posting.post_for_reader()
    assert page.call_count - before == READ_POSTS + 2
    recorded()
    posting.post()  # the upkeep's own is never held up
    assert page.call_count - before == READ_POSTS + 3


@pytest.mark.parametrize("path", ["/units/7", f"/nodes/{'f' * 32}"])
def test_who_asks_for_what_is_not_there_makes_nobody_post(bench, path, monkeypatch):
    post = Mock()
    monkeypatch.setattr(bench.hub.posting, "post_for_reader", post)
    assert bench.http.get(path).status_code == 404
    post.assert_not_called()
    ok(bench.http.get(f"/nodes/{VALIDATOR.node}"))
    post.assert_called_once()


def test_no_page_that_anyone_may_read_loads_every_node(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "nodes", Mock(side_effect=AssertionError("all nodes were loaded")))
    for actor in (bench.trainer, bench.validator, bench.alice, bench.bob):
        actor.beat()
    text = ok(bench.http.get("/metrics")).text
    assert 'shoal_hub_nodes{presence="here",role="trainer",state="active"} 1.0' in text
    assert 'shoal_hub_nodes{presence="here",role="worker",state="active"} 2.0' in text


@pytest.mark.usefixtures("outside")
def test_strangers_share_an_answer_for_a_second(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = bench.app.edge.clock = ManualClock()
    counted = Mock(wraps=bench.hub.reporting.status)
    monkeypatch.setattr(bench.hub.reporting, "status", counted)
    for _ in range(5):
        bench.http.get("/status")
    counted.assert_called_once()
    clock.advance(1.01)
    bench.http.get("/status")
    assert counted.call_count == 2


@in_loop
async def test_one_shared_answer_is_computed_at_a_time_for_all_who_asked_before_it_began(tmp_path: Path) -> None:
    clock, go, begun = ManualClock(), asyncio.Event(), list[int]()
    edge, mine, strangers = Edge(make_config(tmp_path), clock), "", "192.0.2.1"

    async def compute() -> int:
        begun.append(len(begun) + 1)
        number = len(begun)
        await go.wait()
        return number

    asking = [asyncio.create_task(edge.shared("x", mine, compute))]
    await asyncio.sleep(0)
    clock.advance(0.1)
    asking.append(asyncio.create_task(edge.shared("x", strangers, compute)))
    asking += [asyncio.create_task(edge.shared("x", mine, compute)) for _ in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert begun == [1]
    go.set()
    assert await asyncio.wait_for(asyncio.gather(*asking), 10) == [1, 1, 2, 2, 2]


@in_loop
async def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    edge, stranger = Edge(make_config(tmp_path)), "192.0.2.1"

    with pytest.raises(Refusal):
        await edge.shared("x", stranger, AsyncMock(side_effect=Refusal(503, "hub.busy", "not now")))
    assert await edge.shared("x", stranger, AsyncMock(return_value=7)) == 7


@pytest.mark.usefixtures("outside")
def test_a_header_that_looks_like_a_signature_exempts_nobody_from_turns(bench: Bench) -> None:
    edge = bench.app.edge
    turns = edge.reading_of = Mock(wraps=edge.reading_of)  # type: ignore[method-assign]
    ok(bench.http.get("/status", headers={"shoal-signature": "00" * 64}))
    bench.validator.call("GET", f"/submissions?name={'0' * 64}")
    bench.trainer.call("GET", "/batches/0/rollouts")
    turns.assert_called_once()  # the others say nothing to who has not proven who it is


def test_a_proxy_that_nobody_named_is_warned_of_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        ok(bench.http.get("/health", headers={"x-forwarded-for": "203.0.113.9"}))
    warned = [record for record in caplog.records if "hub.trusted_proxies" in record.getMessage()]
    assert len(warned) == 1


@pytest.mark.hub
def test_the_story_of_a_node_is_one_query_of_the_ledger_however_much_it_did(bench, monkeypatch):
    bench.accept_groups(2)
    about = Mock(wraps=Reader.ledger_about)
    monkeypatch.setattr(Reader, "ledger_about", lambda self, *args: about(self, *args))
    story = ok(bench.http.get(f"/nodes/{bench.alice.key.node}")).json()
    assert len(story["recent"]) == 2
    about.assert_called_once()


@in_loop
async def test_a_newer_poll_of_the_same_key_ends_the_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "OVER_S", 0.0)
    changes = Changes()
    polls = polling.Polls(changes)
    tries: list[str] = []

    def attempt(name: str) -> Callable[[], Awaitable[tuple[str, bool]]]:
        async def look() -> tuple[str, bool]:
            tries.append(name)
            return f"nothing for {name}", False

        return look

    def poll(name: str, who: str, topic: Topic = Topic.LEASES) -> asyncio.Task[str]:
        return asyncio.create_task(polls.poll(topic, 20, attempt(name), who))

    async def settled(count: int) -> None:
        while len(tries) < count:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)

    older, other, elsewhere = poll("older", "a"), poll("other", "b"), poll("elsewhere", "a", Topic.AUDITS)
    await settled(3)
    newer = poll("newer", "a")
    assert await asyncio.wait_for(older, 10) == "nothing for older"
    assert not newer.done()
    assert not other.done()
    assert not elsewhere.done()
    assert tries.count("older") == 1, "it looks no more: what it would find is the newer one's"
    changes.close()
    await asyncio.wait_for(asyncio.gather(newer, other, elsewhere), 10)
    assert polls._latest == {}
