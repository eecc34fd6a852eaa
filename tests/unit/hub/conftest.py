"""What most tests of the hub begin with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.hub import Bench, Owner, ok


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A hub in this process. With the mark `hub` it has those settings, and policy 0 is announced."""
    mark = request.node.get_closest_marker("hub")
    bench = Bench(tmp_path / "hub", **(mark.kwargs if mark else {}))
    if mark:
        ok(bench.announce(0))
    yield bench
    bench.close()


@pytest.fixture
def owner(bench: Bench) -> Owner:
    return Owner(bench)
