"""A hub that was restored from a backup has forgotten whoever came later; their workers introduce themselves anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx

from kit.hub import Bench, worker_key
from shoal.client import HubClient
from shoal.protocol import Heartbeat, LeaseRequest, NodeState
from shoal.runtime.stop import StopToken


def test_a_worker_goes_on_with_a_hub_from_before_it_came(tmp_path: Path) -> None:
    Bench(tmp_path / "hub").close()
    shutil.copytree(tmp_path / "hub", tmp_path / "backup")
    bench = Bench(tmp_path / "hub")
    there = [bench]

    def handle(request: httpx.Request) -> httpx.Response:
        return there[-1].http.send(request)

    http = httpx.Client(transport=httpx.MockTransport(handle))
    client = HubClient("http://hub", worker_key(3), StopToken(), http=http, clock=bench.clock)
    client.register("late", "worker", None)
    client.heartbeat(Heartbeat())
    bench.close()

    restored = Bench(tmp_path / "backup")
    there.append(restored)
    try:
        assert client.patient(5.0).heartbeat(Heartbeat()).node.state is NodeState.ACTIVE
        assert client.lease(LeaseRequest(request="request-1", max_units=1)).leases == ()
        assert [node.name for node in restored.status().nodes if node.role == "worker"].count("late") == 1
    finally:
        restored.close()
