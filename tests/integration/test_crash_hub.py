"""The hub killed by SIGKILL at every named point, started again, and the run driven to its end.

What must hold, whenever it died: 0 lost receipts, 0 double credits, a ledger that verifies, accounts that are the sum
of the verdicts, and a run that reaches its last step (`kit.crash.Books.check`).
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kit import Request
from kit.crash import Actors, HubLives, Place
from kit.postgres import Cluster, running_cluster
from shoal.protocol import Message, SigningKey
from shoal.runtime.crash import POINTS

HUB_POINTS = [name for name in POINTS if name.startswith("hub.")]
CALLS_PER_CUT = 9
ONCE = ("hub.start.after_secret", "hub.start.before_commit")  # reached in the first life only
EACH = [(name, nth) for name in HUB_POINTS for nth in (1, 3) if nth == 1 or name not in ONCE]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def place(request: Request, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place(tmp_path / "hub")
    return Place(tmp_path / "hub", {"database": request.getfixturevalue("database_url")})


def survive(place: Place, asked: Sequence[str], always: bool = False, at_once: bool = False) -> HubLives:
    """A run whose hub dies as asked, and everything checked; the hub that was."""
    with HubLives(place, asked, always) as hub, Actors(hub) as actors:
        entries = actors.run_at_once() if at_once else actors.play()
    actors.books.check(place, entries)  # of a hub that was killed once more, when the run was over
    return hub


def test_killed_once_at_every_point_in_one_run(place: Place) -> None:
    hub = survive(place, HUB_POINTS)
    assert hub.struck == set(HUB_POINTS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "nth"), EACH)
def test_killed_at_one_point_early_or_late(place: Place, name: str, nth: int) -> None:
    hub = survive(place, [f"{name}:{nth}"])
    assert hub.struck == {name} or (nth > 1 and name.startswith("hub.credit.")), "all credit may mature in one go"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HUB_POINTS if name not in ONCE])
def test_killed_at_the_same_point_in_every_life(place: Place, name: str) -> None:
    """Each life dies at the same point, so that what a life began is always finished by another."""
    hub = survive(place, [f"{name}:2"], always=True)
    assert hub.deaths > 0 or name.startswith("hub.credit.")


@pytest.mark.slow
def test_killed_at_every_point_under_load(place: Place) -> None:
    hub = survive(place, HUB_POINTS, at_once=True)
    assert hub.struck == set(HUB_POINTS)


class Cutter(Actors):
    """Actors beside whom the database server is killed, and started again, before every so many calls."""

    def __init__(self, hub: HubLives, cluster: Cluster) -> None:
        super().__init__(hub)
        self.cuts = 0
        self._cluster = cluster
        self._calls = 0

    def call(self, key: SigningKey | None, method: str, path: str, body: Message | bytes | None = None) -> bytes:
        self._calls += 1
        if self._calls % CALLS_PER_CUT == 0:
            self.cuts += 1
            self._cluster.kill()
            self._cluster.start()
        return super().call(key, method, path, body)


@pytest.mark.slow
def test_database_server_is_killed_repeatedly(tmp_path: Path) -> None:
    """The hub lives on: it promises nothing meanwhile, and finds the server again."""
    with running_cluster(fsync=True) as cluster:
        place = Place(tmp_path / "hub", {"database": cluster.create()})
        with HubLives(place) as hub, Cutter(hub, cluster) as actors:
            entries = actors.play()
            assert actors.cuts > 3
            hub.end()
        actors.books.check(place, entries)
    assert hub.deaths == 0
