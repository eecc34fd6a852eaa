"""Slow newcomers against real hub, worker and validator: a group takes them about three times `lease_s`.

An honest one shows its work, keeps its lease and is accepted. Those who lie about their progress are banned for it.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from test_loop_scripted import DEADLINE_S, URL, Run, check_accounts

from kit import Patch, eventually
from shoal.adversary import CHEATS
from shoal.client import HubClient
from shoal.engines import Engine
from shoal.engines.registry import ENGINES, EngineEntry
from shoal.engines.scripted import ScriptedEngine
from shoal.errors import HubRefused
from shoal.hub import RunSettings
from shoal.protocol import NodeState, NodeStory, NodeView, ProofParameters
from shoal.worker.settings import WorkerSettings

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


class LongEntry(EngineEntry):
    def make(self, files: Mapping[str, bytes], _device: str, _dtype: str) -> Engine:
        return Long(files)


class SlowEntry(EngineEntry):
    def make(self, files: Mapping[str, bytes], _device: str, _dtype: str) -> Engine:
        return Slow(files)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Patch) -> Iterator[Run]:
    """With a secret that is known, so that seeds and lengths are the same every time."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "secret").write_text("ab" * 32)
    monkeypatch.setitem(ENGINES, "scripted", LongEntry("scripted"))
    monkeypatch.setitem(ENGINES, "slow", SlowEntry("scripted"))
    Slow.hurry.clear()
    run = Run(tmp_path, SETTINGS, lease_s=LEASE_S, proof=ProofParameters(rows=8))
    yield run
    Slow.hurry.set()
    run.close()


ONE = WorkerSettings(units_per_lease=1)
LIES = {  # how deep the audit is that finds it, and by which reason
    "show-random": ("progress", ("progress.seed",)),
    "show-other": ("progress", ("progress.seed",)),
    # submits otherwise than it showed; on a busy machine perhaps before it has shown anything
    "show-swap": ("full", ("progress.prefix", "sampling.seed")),
}


def test_slow_newcomers_who_lie_about_progress_are_banned(run: Run) -> None:
    run.publish(0)
    validator, honest = run.validator(), run.worker("honest", "slow", ONE)
    liars = {cheat: run.worker(cheat, "slow", ONE, cheat=cheat) for cheat in LIES}

    def is_over() -> bool:
        nodes = run.nodes()
        banned = all(name in nodes and nodes[name].state is NodeState.BANNED for name in LIES)
        return banned and nodes["honest"].accepted >= 1

    eventually(is_over, DEADLINE_S, run.status)
    Slow.hurry.set()
    for cheat, (_, reasons) in LIES.items():
        with pytest.raises(HubRefused, match=f"banned.*({'|'.join(map(re.escape, reasons))})"):
            liars[cheat].result(DEADLINE_S)
    run.stop.set("nothing changes any more")
    honest.result(DEADLINE_S)
    validator.exception(DEADLINE_S)
    nodes = run.nodes()
    assert_kept_its_lease(nodes["honest"], run.trainer.node(nodes["honest"].node))
    client = HubClient(URL, run.validator_key, run.stop, run.fingerprint, run.http)
    for cheat, (depth, reasons) in LIES.items():
        view, (reason, _, _) = nodes[cheat], nodes[cheat].reason.partition(": ")
        assert reason in {*reasons} & {*CHEATS[cheat].reasons}
        assert (view.accepted, view.credit, view.strikes) == (0, 0, 1)
        [refused] = run.trainer.node(view.node).refused
        assert (refused.depth, refused.state, refused.reason) == (depth, "rejected", reason)
        assert refused.verdict.document["severity"] == "certain"
        assert client.submissions([refused.submission]), "the bytes are there for a check of the verdict"
    check_accounts(run)


def assert_kept_its_lease(view: NodeView, told: NodeStory) -> None:
    """For more than twice as long as a lease lasts, by showing its work."""
    assert (view.rejected, view.unsure, view.strikes, view.suspensions) == (0, 0, 0, 0)
    first = min(told.leases, key=lambda lease: lease.issued_at_ms)
    assert first.state == "submitted"
    assert first.ended_at_ms is not None
    assert first.ended_at_ms - first.issued_at_ms > 2 * LEASE_S * 1000, "else this shows nothing"
    assert first.progress >= 32
