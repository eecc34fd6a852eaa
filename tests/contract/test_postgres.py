"""What is only so where several write at the same time: locks, the lead, and what PostgreSQL says in our words."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import text

from kit import Logs, Patch, Request, at_once
from kit.postgres import Cluster
from kit.storage import apply, leased, node, on_postgres, submission
from shoal.errors import ConfigError, ResourceError
from shoal.hub.state import Refusal, Save, SubmissionState, UnitRow
from shoal.hub.storage import StaleRow, Storage
from shoal.hub.storage import postgres as postgres_module
from shoal.hub.storage.postgres import PostgresStorage

SOON = {"lock_timeout": "100ms"}
"""So that who waits for somebody else's lock says so at once."""


@pytest.fixture
def storage(request: Request, monkeypatch: Patch) -> Any:
    monkeypatch.setattr(postgres_module, "LIMITS", {**postgres_module.LIMITS, **SOON})
    storage = on_postgres(request)
    apply(storage, Save(node(1), None), Save(node(2), None))
    yield storage
    storage.close()


def test_two_writers_pick_different_rows(storage: Storage) -> None:
    apply(storage, *(Save(UnitRow(number, "t"), None) for number in range(4)))
    apply(storage, *leased(4), *leased(5), *leased(6))
    apply(storage, *(Save(submission(number), None) for number in (4, 5, 6)))
    received = [SubmissionState.RECEIVED]
    with storage.write() as first, storage.write() as second:
        assert [row.unit for row in first.open_units(2)] == [0, 1]
        assert [row.unit for row in second.open_units(9)] == [2, 3]
        assert [row.unit for row in first.submissions_in(received, 1)] == [4]
        assert [row.unit for row in second.waiting_audits(on_probation=True, limit=9)] == [5, 6]
    with storage.write() as third:
        assert len(third.open_units(9)) == 4, "free again with the end of the transaction"


@pytest.mark.parametrize("read", [
    lambda writer: writer.node(node(1).node), lambda writer: writer.lock_nodes([node(2).node, node(1).node]),
    lambda writer: writer.holding("u0a0"), lambda writer: writer.holdings(node(1).node),
    lambda writer: writer.unit(0), lambda writer: writer.submission(submission(0).submission),
    lambda writer: writer.submission_of_lease("u0a0"), lambda writer: writer.light_audits(node(1).node),
    lambda writer: writer.frontier(),
], ids=["node", "nodes", "lease", "leases", "unit", "submission", "of lease", "light", "frontier"])  # fmt: skip
def test_rows_read_by_a_writer_are_locked(storage: Storage, read: Callable[[Any], Any]) -> None:
    apply(storage, *leased(0), Save(replace(submission(0), depth="light"), None))

    def beside() -> None:
        with storage.write() as second:
            read(second)

    with storage.write() as first:
        read(first)
        with pytest.raises(StaleRow, match="lock timeout"):
            beside()
    beside()


def test_exclusive_writer_excludes_other_writers(storage: Storage) -> None:
    def beside(exclusive: bool) -> None:
        with storage.write(durable=False, exclusive=exclusive) as transaction:
            transaction.progress()

    with storage.write() as first:
        first.progress()
        beside(exclusive=False)
        with pytest.raises(StaleRow):
            beside(exclusive=True)
    with storage.write(exclusive=True):
        with pytest.raises(StaleRow):
            beside(exclusive=False)
        with storage.read() as reader:
            assert len(reader.nodes()) == 2, "readers wait for nobody"
        assert storage.take_nonce("a", "n", 5), "nor does a nonce, or a sign of life"
        assert not storage.take_nonce("a", "n", 5)
        storage.arrivals.heard("a", 5)
        storage.flush()
    with storage.read() as reader:
        assert reader.presence("a").last_seen_ms == 5
    beside(exclusive=True)


def test_deadlock_is_a_stale_row(request: Request, storage: Storage, monkeypatch: Patch) -> None:
    monkeypatch.undo()  # time enough for the database to see the deadlock
    patient = PostgresStorage(request.getfixturevalue("prepared_url"))
    barrier = threading.Barrier(2)

    def lock_both(first: int, second: int) -> str:
        try:
            with patient.write() as transaction:
                transaction.node(node(first).node)
                barrier.wait(10)
                transaction.node(node(second).node)
            return "got both"
        except StaleRow as error:
            return str(error)

    ended = at_once(partial(lock_both, 1, 2), partial(lock_both, 2, 1))
    patient.close()
    assert sorted(ended) == ["got both", "somebody else was at the same rows: deadlock detected"]


def test_leader_leads_until_it_resigns_or_expires(storage: Storage) -> None:
    assert storage.is_shared
    assert storage.lead("upkeep", "a", 60)
    assert storage.lead("upkeep", "a", 60), "the leader stays the leader"
    assert not storage.lead("upkeep", "b", 60)
    assert storage.lead("other work", "b", 60)
    storage.resign("upkeep", "b")
    assert not storage.lead("upkeep", "b", 60), "nobody resigns for another"
    storage.resign("upkeep", "a")
    assert storage.lead("upkeep", "b", -1)
    assert storage.lead("upkeep", "a", 60), "its time was over"


def test_commits_are_as_durable_as_promised_by_any_database(storage: Storage, postgres: Cluster, caplog: Logs) -> None:
    for durable, said in ((True, "on"), (False, "off")):
        with storage.write(durable=durable) as transaction:
            assert transaction._connection.execute(text("SHOW synchronous_commit")).scalar() == said
    url = postgres.create()
    postgres.execute(f"ALTER DATABASE {url.rpartition('/')[2]} SET synchronous_commit TO off")
    careless = PostgresStorage(url)
    with careless.write() as transaction:
        assert transaction._connection.execute(text("SHOW synchronous_commit")).scalar() == "on"
    assert "runs with fsync off" in caplog.text, "the server of these tests does"
    careless.close()


def test_zero_character_is_refused(storage: Storage) -> None:
    with pytest.raises(Refusal, match=r"request\.value"):
        apply(storage, Save(replace(node(3), name="a\x00b"), None))


def test_lost_connection_is_an_error_and_opened_again(storage: Storage) -> None:
    def cut() -> None:
        with storage.write() as transaction:
            others = "pg_stat_activity WHERE datname = current_database()"
            transaction._connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM {others}"))

    with pytest.raises(ResourceError, match="cannot use the database postgresql://shoal@127"):
        cut()
    with storage.read() as reader:
        assert len(reader.nodes()) == 2


def test_missing_server_is_named_without_the_password() -> None:
    with pytest.raises(ResourceError, match="is the server running") as caught:
        PostgresStorage("postgresql://me:secret@127.0.0.1:9/none")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["mysql://host/name", "not a url"])
def test_url_of_another_database_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="it looks like postgresql://"):
        PostgresStorage(url)
