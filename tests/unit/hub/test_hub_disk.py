"""The hub on a disk that is full: it promises nothing that it cannot keep, ends with a sentence, and loses nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import httpx
import pytest

from kit.hub import Actor, Bench, code_of, fresh_request, make_config, ok, submission_body, worker_key
from kit.smalldisk import in_own_namespace, small_disk
from shoal.errors import DiskError
from shoal.hub import run_hub
from shoal.hub.storage import SqliteStorage
from shoal.protocol import submission_digest
from shoal.runtime.clock import SystemClock
from shoal.runtime.stop import StopToken

FULL = "the disk is full: free some space"


def test_a_full_database_is_undone_and_works_again_when_there_is_room(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if in_own_namespace(request):
        return
    with small_disk(tmp_path / "disk", "4m") as disk:
        storage = SqliteStorage(disk.path / "hub.db")

        def put() -> None:
            with storage.write() as transaction:
                transaction.put_setting("a", "x" * 100_000)

        disk.fill()
        with pytest.raises(DiskError, match=rf"cannot write to the database {disk.path}/hub\.db: {FULL}"):
            put()
        with storage.read() as reader:
            assert reader.setting("a") is None
        disk.free()
        put()
        with storage.read() as reader:
            assert reader.setting("a") is not None
        storage.close()


@pytest.mark.parametrize("where", ["hub", "hub/blobs"])
def test_what_cannot_be_stored_gets_no_receipt(tmp_path: Path, request: pytest.FixtureRequest, where: str) -> None:
    if in_own_namespace(request):
        return
    with small_disk(tmp_path / where, "4m") as disk:
        bench = Bench(tmp_path / "hub")
        ok(bench.announce(0))
        (lease,) = bench.alice.lease(fresh_request())
        disk.fill()
        answer = bench.alice.submit(lease)
        assert code_of(answer) == (503, "hub.resource")
        assert str(disk.path) not in answer.text, "that is for the log"
        failure = bench.app.state.hub.context.failure
        assert isinstance(failure, DiskError), "the process ends with it"
        assert FULL in str(failure)
        assert str(disk.path) in str(failure)
        assert not (tmp_path / "hub" / "blobs" / submission_digest(submission_body(lease))).exists()
        disk.free()
        assert bench.status().submissions["received"] == 0
        assert bench.alice.submit(lease).status_code == 201, "nothing was promised or taken before"
        bench.close()


def test_the_process_ends_and_says_why(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if in_own_namespace(request):
        return
    with small_disk(tmp_path / "hub", "4m") as disk, ThreadPoolExecutor(1) as pool:
        ready: Queue[str] = Queue()
        ended = pool.submit(run_hub, make_config(disk.path), StopToken(), ready.put)
        with httpx.Client(base_url=ready.get(timeout=20), timeout=20) as http:
            worker = Actor(worker_key(1), http, SystemClock())
            ok(worker.register())
            disk.fill()
            assert worker.call("POST", "/heartbeat", {}).status_code == 503
        with pytest.raises(DiskError, match=FULL):
            ended.result(timeout=20)
