"""Group commit: writers share a trip to the disk, and nobody's promise depends on anybody else's mistake."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine

from shoal.hub.storage.grouping import Busy, GroupCommit

WAIT_S = 20.0


class Bench:
    """A file with one table; counts commits, and can hold the first body until others queue behind it."""

    def __init__(self, path: Path) -> None:
        self.engines = [self._engine(path), self._engine(path)]
        self.writers = GroupCommit(self.engines[0], self.engines[1], patience_s=WAIT_S)
        self.commits = 0
        self.fails = False
        with self.writers.write(durable=True) as connection:
            connection.exec_driver_sql("CREATE TABLE said (who INTEGER PRIMARY KEY)")
        self.commits = 0

    def _engine(self, path: Path) -> Engine:
        bench = self

        class Counted(sqlite3.Connection):
            def commit(self) -> None:
                bench.commits += 1
                bench.at_commit()
                if bench.fails:
                    raise sqlite3.OperationalError("the disk is full")
                super().commit()

        connecting = {"factory": Counted, "isolation_level": None, "check_same_thread": False}
        return create_engine(f"sqlite:///{path}", connect_args=connecting)

    def at_commit(self) -> None:
        """For a test that looks at this moment."""

    def say(self, who: int, durable: bool = True) -> None:
        with self.writers.write(durable) as connection:
            connection.exec_driver_sql("INSERT INTO said VALUES (?)", (who,))

    def together(self, *calls: Callable[[], None]) -> list[BaseException | None]:
        """Run the calls in threads such that all but the first queue while the first is in its body."""
        results: list[BaseException | None] = [None] * len(calls)

        def guarded(index: int) -> None:
            try:
                calls[index]()
            except BaseException as error:  # noqa: BLE001  it is what the test looks at
                results[index] = error

        with self.writers._lock:
            threads = [threading.Thread(target=guarded, args=(index,)) for index in range(len(calls))]
            for thread in threads:
                thread.start()
            deadline = threading.Event()
            while self.writers._queued < len(calls):
                assert not deadline.wait(0.001)
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        return results

    def said(self) -> list[int]:
        with self.engines[1].connect() as connection:
            return [row[0] for row in connection.exec_driver_sql("SELECT who FROM said ORDER BY who")]

    def close(self) -> None:
        self.fails = False
        self.writers.close()
        for engine in self.engines:
            engine.dispose()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "file.db")
    yield bench
    bench.close()


def test_one_writer_alone_commits_at_once_and_those_who_queue_share_one_commit(bench: Bench) -> None:
    bench.say(10)
    assert (bench.said(), bench.commits) == ([10], 1)
    assert bench.together(*(lambda who=who: bench.say(who) for who in range(10))) == [None] * 10
    assert (bench.said(), bench.commits) == (list(range(11)), 2)


def test_what_need_not_be_durable_joins_whoever_is_there(bench: Bench) -> None:
    results = bench.together(lambda: bench.say(0), lambda: bench.say(1, durable=False), lambda: bench.say(2))
    assert results == [None] * 3
    assert bench.said() == [0, 1, 2]


def test_nobody_returns_before_the_commit(bench: Bench) -> None:
    """At the moment of the commit, none of its writers has returned."""
    returned: list[int] = []
    at_commit: list[int] = []
    bench.at_commit = lambda: at_commit.append(len(returned))  # type: ignore[method-assign]

    def say(who: int) -> None:
        bench.say(who)
        returned.append(who)

    bench.together(*(lambda who=who: say(who) for who in range(5)))
    assert at_commit == [0]
    assert sorted(returned) == list(range(5))


def test_a_body_that_fails_is_undone_alone(bench: Bench) -> None:
    def stumble(who: int) -> None:
        with bench.writers.write(durable=True) as connection:
            connection.exec_driver_sql("INSERT INTO said VALUES (?)", (who,))
            raise RuntimeError("no")

    calls = [lambda: bench.say(0), lambda: stumble(1), lambda: bench.say(2), lambda: stumble(3), lambda: bench.say(4)]
    results = bench.together(*calls)
    assert [type(result) for result in results] == [type(None), RuntimeError, type(None), RuntimeError, type(None)]
    assert bench.said() == [0, 2, 4]


def test_a_commit_that_fails_fails_all_its_writers_and_the_next_one_works(bench: Bench) -> None:
    bench.fails = True
    results = bench.together(*(lambda who=who: bench.say(who) for who in range(4)))
    assert all(isinstance(result, sqlite3.OperationalError) for result in results)
    bench.fails = False
    assert bench.said() == []
    bench.say(9)
    assert bench.said() == [9]


def test_whoever_cannot_get_in_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "file.db")
    bench.writers._patience_s = 0.01
    with bench.writers._lock, pytest.raises(Busy):
        bench.say(1)
    bench.say(2)
    assert bench.said() == [2]
    bench.close()
