"""What most tests of the hub begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.hub import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A hub with the default settings, in this process."""
    bench = Bench(tmp_path / "hub")
    yield bench
    bench.close()
