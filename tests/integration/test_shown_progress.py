"""Slow newcomers against real hub, worker and validator: a group takes them about three times `lease_s`.

An honest one shows its work, keeps its lease and is accepted. Those who lie about their progress are banned for it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from test_loop_scripted import DEADLINE_S, PACE, URL, Run, check_accounts, eventually

from kit import Patch
from shoal.adversary import CHEATS
from shoal.client import HubClient
from shoal.engines.registry import ENGINES
from shoal.engines.scripted import ScriptedEngine
from shoal.errors import HubRefused
from shoal.hub import RunSettings
from shoal.protocol import NodeState, NodeStory, ProofParameters
from shoal.worker import WorkerConfig, WorkerSettings, run_worker

LEASE_S = 2.5
STEP_S = 0.06
SETTINGS = RunSettings(name="shown", steps=4, groups_per_step=8, group_size=4, max_new_tokens=32)


class Long(ScriptedEngine):
    """Hardly ever ends a completion before the limit: the token that is likely now and then is another one."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(files)
        self._eos_token_id = 0


class Slow(Long):
    hurry = threading.Event()  # set when a test ends

    def _step(self, sequence):  # type: ignore[no-untyped-def]
        self.hurry.wait(STEP_S)
        return super()._step(sequence)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Patch) -> Iterator[Run]:
    """With a secret that is known, so that seeds and lengths are the same every time."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "secret").write_text("ab" * 32)
    entry = ENGINES["scripted"]
    monkeypatch.setitem(ENGINES, "scripted", replace(entry, make=lambda files, *_: Long(files)))
    monkeypatch.setitem(ENGINES, "slow", replace(entry, make=lambda files, *_: Slow(files)))
    Slow.hurry.clear()
    run = Run(tmp_path, SETTINGS, lease_s=LEASE_S, proof=ProofParameters(rows=8))
    yield run
    Slow.hurry.set()
    run.close()


def slow_worker(run: Run, name: str, cheat: str | None = None) -> Future[None]:
    settings = WorkerSettings(units_per_lease=1)
    config = WorkerConfig(
        run.folder / name, settings, "slow", URL, run.fingerprint, name, run.http, cheat=cheat, pace=PACE
    )
    return run._start(run_worker, config)


def is_banned(run: Run, liar: Future[None], reason: str) -> None:
    """Wait until it is, and it knows."""
    eventually(lambda: "liar" in run.nodes() and run.nodes()["liar"].state is NodeState.BANNED, run.status)
    Slow.hurry.set()
    with pytest.raises(HubRefused, match=f"banned.*{re.escape(reason)}"):
        liar.result(DEADLINE_S)


def story(run: Run, name: str) -> NodeStory:
    return run.trainer.node(run.nodes()[name].node)


def test_a_newcomer_whose_group_takes_longer_than_a_lease_shows_its_work_and_is_accepted(run: Run) -> None:
    run.publish(0)
    run.validator()
    slow_worker(run, "slow")
    eventually(lambda: "slow" in run.nodes() and run.nodes()["slow"].accepted >= 1, run.status)
    view, told = run.nodes()["slow"], story(run, "slow")
    assert (view.rejected, view.unsure, view.strikes, view.suspensions) == (0, 0, 0, 0)
    first = min(told.leases, key=lambda lease: lease.issued_at_ms)
    assert first.state == "submitted"
    assert first.ended_at_ms is not None
    assert first.ended_at_ms - first.issued_at_ms > 2 * LEASE_S * 1000, "else this shows nothing"
    assert first.progress >= 32
    check_accounts(run)


@pytest.mark.parametrize(("cheat", "reason"), [("show-random", "progress.seed"), ("show-other", "progress.seed")])
def test_showing_tokens_off_the_seeds_is_banned_before_the_group_ends(run: Run, cheat: str, reason: str) -> None:
    run.publish(0)
    run.validator()
    is_banned(run, slow_worker(run, "liar", cheat), reason)
    view, told = run.nodes()["liar"], story(run, "liar")
    assert reason in CHEATS[cheat].reasons
    assert (view.state, view.accepted, view.credit, view.strikes) == (NodeState.BANNED, 0, 0, 1)
    assert view.reason.startswith(f"{reason}: ")
    [refused] = told.refused
    assert (refused.depth, refused.state, refused.reason) == ("progress", "rejected", reason)
    assert refused.verdict.document["severity"] == "certain"
    assert run.status().units["open"] == 1, "the unit is for somebody else"
    kept = HubClient(URL, run.validator_key, run.stop, run.fingerprint, run.http).submissions([refused.submission])
    assert kept, "and the bytes are there for whoever wants to check the verdict"


def test_who_submits_otherwise_than_it_showed_is_banned(run: Run) -> None:
    run.publish(0)
    run.validator()
    is_banned(run, slow_worker(run, "liar", "show-swap"), "progress.prefix")
    view = run.nodes()["liar"]
    assert (view.state, view.accepted, view.credit) == (NodeState.BANNED, 0, 0)
    [refused] = story(run, "liar").refused
    assert (refused.depth, refused.reason) == ("full", "progress.prefix")


def test_a_newcomer_that_only_says_so_loses_its_lease(run: Run, monkeypatch: Patch) -> None:
    monkeypatch.setattr("shoal.worker.showing.ProgressSender.of", lambda *_: None)
    run.publish(0)
    slow_worker(run, "talker")
    eventually(lambda: "talker" in run.nodes() and bool(story(run, "talker").leases), run.status)
    eventually(lambda: story(run, "talker").leases[-1].state != "active", run.status)
    first = story(run, "talker").leases[-1]
    assert first.state == "expired"
    assert first.ended_at_ms is not None
    assert first.ended_at_ms - first.issued_at_ms < 2 * LEASE_S * 1000
    assert first.progress == 0
