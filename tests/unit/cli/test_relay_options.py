"""`shoal relay` elsewhere: what is given on the command line is what the relay is set up with."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shoal.run.join
import shoal.shardcast
from shoal.cli.main import main
from shoal.runtime.stop import StopToken
from shoal.runtime.targets import PUBLIC_ONLY, Nearness, Reach
from shoal.shardcast import RelayConfig, RelaySettings

HUB = "http://127.0.0.1:9"


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[RelayConfig]:
    """The set-ups of the relays that were started; none of them runs."""
    found: list[RelayConfig] = []
    info = SimpleNamespace(sources=("http://relay:1",), last_resort=("http://origin:1",))
    trusted = SimpleNamespace(run="run-1", info=info, trainer_key="ab" * 32, reach=PUBLIC_ONLY)

    def remember(config: RelayConfig, *_: Any) -> None:
        found.append(config)

    monkeypatch.setattr(shoal.run.join, "meet", lambda *_: trusted)
    monkeypatch.setattr(shoal.run.join, "begin", lambda *_: StopToken())
    monkeypatch.setattr(shoal.shardcast, "run_relay", remember)
    return found


def test_every_option_reaches_the_relay(configs: list[RelayConfig], tmp_path: Path) -> None:
    options = {
        "--upstream": ["http://a:1", "http://b:1"],
        "--peer": ["http://c:1", "http://d:1"],
        "--folder": [str(tmp_path)],
        "--host": ["127.0.0.1"],
        "--port": ["7"],
        "--keep": ["4"],
        "--disk-budget-gb": ["1.5"],
        "--connections-per-client": ["9"],
    }
    arguments = [word for name, values in options.items() for value in values for word in (name, value)]
    assert main(["relay", "--run-info", HUB, *arguments]) == 0
    settings = RelaySettings(kept_versions=4, disk_budget_gb=1.5, connections_per_client=9)
    upstreams, peers = ("http://a:1", "http://b:1"), ("http://c:1", "http://d:1")
    named = Reach(Nearness.PUBLIC, frozenset((name, 1) for name in "abcd"))  # the user's own choice is not checked
    assert configs == [
        RelayConfig(tmp_path, upstreams, "run-1", "ab" * 32, "127.0.0.1", 7, settings, peers, reach=named)
    ]


def test_without_options_a_relay_is_as_a_recipe_would_have_it(configs: list[RelayConfig], tmp_path: Path) -> None:
    assert main(["relay", "--run-info", HUB, "--folder", str(tmp_path)]) == 0
    budget_gb = configs[0].settings.disk_budget_gb
    assert (configs[0].settings, configs[0].peers) == (RelaySettings(disk_budget_gb=budget_gb), ())
    assert budget_gb is not None  # a part of what is free: whoever publishes cannot fill the disk
    assert 0 < budget_gb < shutil.disk_usage(tmp_path).free / 1e9
    assert configs[0].upstreams == ("http://relay:1", "http://origin:1")
    assert configs[0].reach == PUBLIC_ONLY


@pytest.mark.parametrize("option", [["--keep", "0"], ["--disk-budget-gb", "0"], ["--connections-per-client", "0"]])
def test_a_limit_that_cannot_be_is_a_mistake_of_the_user(configs: list[RelayConfig], option: list[str]) -> None:
    assert main(["relay", "--run-info", HUB, *option]) == 2
    assert configs == []
