from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kit.cast import KEY, RUN, Handler, Running, ScriptedSource
from shoal.shardcast import RelayConfig, RelaySettings, run_origin, run_relay


@pytest.fixture
def started() -> Iterator[list[Running]]:
    running: list[Running] = []
    yield running
    for one in reversed(running):
        one.end()


@pytest.fixture
def start_origin(started: list[Running]) -> Callable[[Path], Running]:
    def start(folder: Path) -> Running:
        started.append(Running(partial(run_origin, folder, "127.0.0.1", 0)))
        return started[-1]

    return start


@pytest.fixture
def start_relay(started: list[Running]) -> Callable[..., Running]:
    def start(folder: Path, *upstreams: str, port: int = 0, long_poll_s: float = 20.0, **settings: float) -> Running:
        chosen, pace = RelaySettings.model_validate(settings), {"long_poll_s": long_poll_s, "poll_s": 0.05}
        config = RelayConfig(folder, upstreams, RUN, KEY.public_key, "127.0.0.1", port, chosen, **pace)  # type: ignore[arg-type]
        started.append(Running(partial(run_relay, config)))
        return started[-1]

    return start


@pytest.fixture
def scripted() -> Iterator[Callable[[Handler], ScriptedSource]]:
    sources: list[ScriptedSource] = []

    def start(handler: Handler) -> ScriptedSource:
        sources.append(ScriptedSource(handler))
        return sources[-1]

    yield start
    for source in sources:
        source.close()
