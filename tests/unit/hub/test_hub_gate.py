"""Calls that were overtaken are made again; long polls look again where nobody tells them; the ledger's outbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.hub import Bench, certificate, make_config, worker_key
from shoal.errors import ResourceError
from shoal.hub.changes import Changes, Topic, long_poll
from shoal.hub.service import Hub, context, retry, upkeep
from shoal.hub.state.commands import Refusal
from shoal.hub.storage import StaleRow
from shoal.ledger import verify
from shoal.protocol import Registration
from shoal.runtime.clock import ManualClock


class TestRetry:
    @pytest.fixture(autouse=True)
    def at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(context, "PAUSE_S", 0.0)

    def test_a_decision_that_was_overtaken_is_made_again(self) -> None:
        failures = [StaleRow("once"), StaleRow("twice")]

        def call() -> str:
            if failures:
                raise failures.pop()
            return "answer"

        assert retry(call) == "answer"

    def test_but_not_for_ever(self) -> None:
        made: list[int] = []

        def call() -> None:
            made.append(1)
            raise StaleRow("always")

        with pytest.raises(Refusal) as caught:
            retry(call)
        assert (caught.value.status, caught.value.code, len(made)) == (503, "hub.busy", context.ATTEMPTS)

    def test_other_failures_are_not_repeated(self) -> None:
        made: list[int] = []

        def call() -> None:
            made.append(1)
            raise ResourceError("the disk is full")

        with pytest.raises(ResourceError):
            retry(call)
        assert len(made) == 1

    def test_routes_retry(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        register, failures = bench.app.state.hub.membership.register, [StaleRow("once")]

        def overtaken(*arguments: object) -> object:
            if failures:
                raise failures.pop()
            return register(*arguments)

        monkeypatch.setattr(bench.app.state.hub.membership, "register", overtaken)
        assert bench.alice.register(name="again").status_code == 200
        assert not failures


def test_a_long_poll_looks_again_though_nobody_tells_it() -> None:
    """As on a database where another hub makes the changes."""
    answers = iter([False, False, True])

    async def attempt() -> tuple[str, bool]:
        return "answer", next(answers)

    async def is_gone() -> bool:
        return False

    poll = long_poll(Changes(), Topic.LEASES, 20, attempt, is_gone, look_s=0.001)
    assert asyncio.run(asyncio.wait_for(poll, 10)) == "answer"
    assert next(answers, None) is None


class TestPosting:
    @pytest.fixture
    def hub(self, tmp_path: Path) -> Iterator[Hub]:
        """With the run and four nodes recorded, and nobody who posts by himself."""
        hub = Hub(make_config(tmp_path / "hub"), ManualClock())
        for key in map(worker_key, range(1, 5)):
            signed = certificate(key, "validator")
            registration = Registration(public_key=key.public_key, role="validator", certificate=signed)
            hub.membership.register(registration)
        yield hub
        hub.close()

    def outgoing(self, hub: Hub) -> int:
        with hub.context.storage.read() as reader:
            return reader.outbox_length()

    def test_a_long_outbox_is_posted_in_pages(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(upkeep, "POSTED_AT_A_TIME", 2)
        assert self.outgoing(hub) == 5
        hub.posting.post()
        page = hub.reporting.ledger_page(-1, 99)
        verify(page.entries, page.head)
        assert (self.outgoing(hub), [entry.kind for entry in page.entries]) == (0, ["run"] + ["node"] * 4)

    def test_only_the_leader_posts(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub.context.storage, "lead", lambda *_: False)
        hub.upkeep.tick()
        assert hub.reporting.ledger_page(-1, 99).entries == ()
        monkeypatch.undo()
        hub.upkeep.tick()
        assert self.outgoing(hub) == 0

    def test_a_hub_that_stops_leaves_nothing_outgoing(self, hub: Hub) -> None:
        hub.close()
        hub.close()
        assert self.outgoing(hub) == 0

    def test_a_hub_that_could_not_post_stops_all_the_same(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        def full() -> None:
            raise ResourceError("the disk is full")

        monkeypatch.setattr(hub.posting, "post", full)
        hub.close()
        monkeypatch.undo()
        assert self.outgoing(hub) == 5, "for the next start"
