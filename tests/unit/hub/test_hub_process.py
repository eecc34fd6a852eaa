"""The hub as a process: start, stop, restart, `kill -9`, and everything that can be wrong with a port or a folder."""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue

import httpx2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import eventually
from kit.hub import TRAINER, Actor, Bench, make_config, ok, policy, submission_body, worker_key
from kit.smalldisk import in_own_namespace, small_disk
from kit.storage import Stored
from shoal.errors import ConfigError, DiskError, EnvironmentSetupError, ResourceError
from shoal.hub import HubConfig
from shoal.hub.http import server
from shoal.hub.http.app import App
from shoal.hub.http.server import run_hub
from shoal.hub.settings import MAX_INFLATED_BYTES, MAX_SUBMISSION_BYTES
from shoal.hub.storage import SqliteStorage
from shoal.protocol import MAX_PROMPT_TOKENS, PolicyAnnouncement, ProofParameters, sign_document, sign_request
from shoal.protocol.submission import Rollout, Submission, submission_digest
from shoal.runtime.clock import SystemClock
from shoal.runtime.stop import StopToken


class Running:
    """`run_hub` in a thread."""

    def __init__(self, config: HubConfig) -> None:
        self.stop = StopToken()
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=run_hub, args=(config, self.stop, self._on_ready))
        self._thread.start()
        assert self._ready.wait(20), "the hub did not get ready"

    def _on_ready(self, url: str) -> None:
        self.url = url
        self._ready.set()

    def end(self) -> float:
        """Seconds it took to stop."""
        before = time.monotonic()
        self.stop.set("test")
        self._thread.join(15)
        assert not self._thread.is_alive(), "the hub did not stop"
        return time.monotonic() - before


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.runtime.http.TAKEN_S", 0.1)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(make_config(tmp_path / "hub"))
    yield running
    running.end()


def test_it_serves_on_a_free_port_and_refuses_a_taken_or_foreign_one(running: Running, tmp_path: Path) -> None:
    assert httpx2.get(f"{running.url}/health").json() == {"ok": True}
    port = int(running.url.rsplit(":", 1)[1])
    config = make_config(tmp_path / "other", settings={"port": port})
    with pytest.raises(ResourceError, match=rf"port {port} on 127\.0\.0\.1 is taken: .*choose another"):
        run_hub(config, StopToken(), lambda _url: None)
    assert not (tmp_path / "other").exists(), "the port is checked first"
    config = make_config(tmp_path / "third", settings={"host": "192.0.2.1"})
    with pytest.raises(ResourceError, match=r"cannot listen on port 0 on 192\.0\.2\.1"):
        run_hub(config, StopToken(), lambda _url: None)


def test_stopping_answers_what_is_in_flight_and_is_quick(tmp_path: Path) -> None:
    running = Running(make_config(tmp_path / "hub"))
    with httpx2.Client(base_url=running.url, timeout=30) as http:
        worker = Actor(worker_key(1), http, SystemClock())
        ok(worker.register())
        with ThreadPoolExecutor(1) as pool:
            poll = pool.submit(worker.ask, wait_s=30)
            eventually(lambda: httpx2.get(f"{running.url}/status").json()["waits"])
            assert running.end() < 6
            assert poll.result(10).leases == ()


def test_a_second_hub_on_the_same_folder_is_refused(running, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "LOCK_WAIT_S", 0)
    with pytest.raises(ResourceError, match=r"in use by process \d+; stop that one first"):
        run_hub(make_config(tmp_path / "hub"), StopToken(), lambda _url: None)


class TestFolder:
    def test_a_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(ResourceError, match="cannot write to the folder"):
            App(make_config(tmp_path / "file" / "hub"))

    def test_the_secret_is_private_and_kept(self, tmp_path: Path) -> None:
        secret, kept = tmp_path / "secret", list[bytes]()
        for _ in range(2):
            App(make_config(tmp_path)).hub.close()
            kept.append(secret.read_bytes())
        assert secret.stat().st_mode & 0o777 == 0o600
        assert kept[0] == kept[1]

    @pytest.mark.parametrize("content", ["nonsense", "aabb", None])
    def test_a_lost_or_damaged_secret_would_change_the_seeds_and_is_refused(self, tmp_path, content):
        App(make_config(tmp_path)).hub.close()
        (tmp_path / "secret").unlink()
        if content is not None:
            (tmp_path / "secret").write_text(content)
        with pytest.raises(ConfigError, match="restore it from a backup"):
            App(make_config(tmp_path))

    def test_another_run_in_the_same_folder_is_refused_but_more_steps_are_fine(self, tmp_path: Path) -> None:
        App(make_config(tmp_path)).hub.close()
        with pytest.raises(ConfigError, match="group_size is 2, not 4"):
            App(make_config(tmp_path, run={"group_size": 4}))
        App(make_config(tmp_path, run={"steps": 99})).hub.close()

    def test_an_environment_without_tasks(self, tmp_path: Path) -> None:
        config = make_config(tmp_path)
        config.environment.tasks("train").clear()  # type: ignore[attr-defined]
        with pytest.raises(EnvironmentSetupError, match="no tasks"):
            App(config)


@pytest.mark.hub
def test_everything_is_there_again_after_a_restart(bench: Bench) -> None:
    one, two = bench.alice.lease(2, request="the-request-id")
    receipt = ok(bench.alice.submit(one)).content
    ok(bench.trainer.call("POST", "/steps", {"step": 0, "metrics": {"reward": 1}}))
    before = bench.status()

    bench.restart()
    after = bench.status()
    assert after.model_copy(update={"waits": before.waits}) == before
    assert bench.alice.lease(2, request="the-request-id") == [one, two]
    again = bench.alice.submit(one)
    assert (again.status_code, again.content) == (200, receipt)
    ok(bench.alice.submit(two))
    bench.accept()
    batch = bench.batch(0)

    bench.restart()
    assert bench.batch(0) == batch


@contextlib.contextmanager
def introduced(url: str) -> Iterator[Actor]:
    """A worker, after the trainer has announced policy 0."""
    with httpx2.Client(base_url=url, timeout=10) as http:
        trainer, worker = Actor(TRAINER, http, SystemClock()), Actor(worker_key(1), http, SystemClock())
        ok(trainer.register("trainer"))
        ok(worker.register())
        document = PolicyAnnouncement(run=trainer.run, policy=policy(0), created_at_ms=0)
        ok(trainer.call("POST", "/policies", sign_document(document, trainer.key)))
        yield worker


def test_idle_sockets_of_strangers_take_no_upload_slot(running: Running) -> None:
    """More forged uploads than there are slots, none of which sends its body: each is refused unread, others go on."""
    host, port = running.url.removeprefix("http://").split(":")
    with introduced(running.url) as worker:
        (lease,) = worker.lease()
        headers = sign_request(worker_key(2), worker.run, "PUT", "/submissions/u0a0", b"", SystemClock().now_ms())
        forged = {**headers, "shoal-node": worker.key.node, "host": "x", "content-length": "1000"}
        head = "".join(f"{name}: {value}\r\n" for name, value in forged.items())
        with contextlib.ExitStack() as stack:
            for _ in range(40):
                idle = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
                idle.sendall(f"PUT /submissions/u0a0 HTTP/1.1\r\n{head}\r\n".encode())
                assert idle.recv(64).startswith(b"HTTP/1.1 401 "), "refused before any of its body is there"
            assert worker.submit(lease).status_code == 201


FULL = "the disk is full: free some space"


def test_a_full_database_is_undone_and_works_again_when_there_is_room(tmp_path, request):
    if in_own_namespace(request):
        return
    with small_disk(tmp_path / "disk", "4m") as disk:
        storage = SqliteStorage(disk.path / "hub.db")
        stored, long = Stored(storage), ("a", "x" * 100_000)
        disk.fill()
        with pytest.raises(DiskError, match=rf"cannot write to the database {disk.path}/hub\.db: {FULL}"):
            stored.put_setting(*long)
        assert stored.setting("a") is None
        disk.free()
        stored.put_setting(*long)
        assert stored.setting("a") is not None
        storage.close()


@pytest.mark.parametrize("where", ["hub", "hub/blobs"])
def test_what_cannot_be_stored_gets_no_receipt(tmp_path: Path, request: pytest.FixtureRequest, where: str) -> None:
    if in_own_namespace(request):
        return
    with small_disk(tmp_path / where, "4m") as disk:
        bench = Bench(tmp_path / "hub")
        ok(bench.announce(0))
        (lease,) = bench.alice.lease()
        disk.fill()
        answer = bench.alice.submit(lease)
        assert (answer.status_code, answer.json()["code"]) == (503, "hub.resource")
        assert str(disk.path) not in answer.text, "that is for the log"
        failure = bench.hub.context.failure
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
        with httpx2.Client(base_url=ready.get(timeout=20), timeout=20) as http:
            worker = Actor(worker_key(1), http, SystemClock())
            ok(worker.register())
            disk.fill()
            assert worker.call("POST", "/leases", {"request": "request-1"}).status_code == 503
        with pytest.raises(DiskError, match=FULL):
            ended.result(timeout=20)


@settings(max_examples=30, deadline=None)
@given(
    group=st.integers(2, 32), tokens=st.integers(1, 100), topk=st.integers(8, 512), rows=st.integers(1, 64),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_an_honest_submission_is_never_too_big(group: int, tokens: int, topk: int, rows: int, seed: int) -> None:
    """Nothing in it can be compressed, every completion has its full length and every proof all its points."""
    noise = random.Random(seed)
    run = {"group_size": group, "max_new_tokens": tokens}
    config = replace(make_config(Path("unused"), run), proof=ProofParameters(topk=topk, rows=rows))
    proofs = noise.randbytes(-(-tokens // rows) * (2 + 2 * topk))
    rollout = Rollout(noise.randbytes(4 * tokens), noise.randbytes(4 * tokens), "length", proofs)
    submission = Submission(
        format=1, run="r" * 256, node="n" * 256, lease="l" * 256, unit=2**62, incarnation=2**62, version=2**62,
        policy_digest="d" * 256, prompt=noise.randbytes(4 * MAX_PROMPT_TOKENS), rollouts=[rollout] * group,
        engine="e" * 256,
    )  # fmt: skip
    inflated = len(msgspec.msgpack.encode(submission))
    compressed = inflated + inflated // 256 + 64  # the most that zstd makes of it
    limits = config.submission_limits
    assert inflated <= limits.inflated_bytes or limits.inflated_bytes == MAX_INFLATED_BYTES
    assert compressed <= limits.compressed_bytes or limits.compressed_bytes == MAX_SUBMISSION_BYTES


def test_it_is_not_much_larger_either_and_nobody_may_send_more_than_the_limits() -> None:
    """16 tokens at 128 points: one proof of 258 bytes for each rollout, which eight bytes a token would not hold."""
    config = make_config(Path("unused"), {"group_size": 16, "max_new_tokens": 16})
    assert config.submission_limits.inflated_bytes == 1024 * 1024 + 16 * (256 + 8 * 16 + 258)
    limits = make_config(Path("unused"), {"group_size": 256, "max_new_tokens": 131_072}).submission_limits
    assert (limits.compressed_bytes, limits.inflated_bytes) == (MAX_SUBMISSION_BYTES, MAX_INFLATED_BYTES)
