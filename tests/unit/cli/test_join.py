"""`shoal join` as a contributor meets it: what is wrong is said first and in one line, what was earned is said last.

The hub is a real one in a thread of this process, with the scripted engine: nothing here needs torch, and some of it
checks that torch was not loaded.
"""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import Capture, eventually
from kit.cast import DEAD
from kit.cli import one_line, told
from kit.fork import Forked, clean_environment, run
from kit.roles import ONE_STEP, ServedRun, prepared, served_run
from kit.run import processes_of
from kit.sandbox import gone, needs_bubblewrap, sandboxed
from shoal.adversary import CHEATS
from shoal.protocol import SigningKey, load_key, load_or_create_key
from shoal.run.owner import vouch_for

DEADLINE_S = 60
WITHOUT_TORCH = """
import sys
from shoal.cli.main import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was loaded"
sys.exit(code)
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedRun]:
    with served_run(prepared(tmp_path / "run", ONE_STEP)) as run:
        yield run


def start_join(tmp_path: Path, *arguments: str) -> Forked:
    """A contributor's process; it fails if it has loaded torch by its end."""
    words = ("join", *arguments, "--folder", str(tmp_path / "node"))
    return Forked(tmp_path, words, tmp_path / "output", tmp_path / "error")


def start_join_anew(tmp_path: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """The same by an interpreter of its own, as a contributor starts it."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "join", *arguments, "--folder", str(tmp_path / "node")]
    with (tmp_path / "output").open("wb") as output, (tmp_path / "error").open("wb") as error:
        return subprocess.Popen(command, stdout=output, stderr=error, cwd=tmp_path, env=clean_environment())


def finished(process: Forked | subprocess.Popen[bytes], tmp_path: Path) -> tuple[int, str]:
    try:
        code = process.wait(DEADLINE_S)
    finally:
        process.kill()
    error = (tmp_path / "error").read_text()
    assert "Traceback" not in error
    return code, error


@pytest.mark.parametrize(("option", "size", "message"), [
    ("--max-memory", "100kB", "weights, which take 691 kB in float32, and 100 kB"),
    ("--max-disk", "3B", "and 3 bytes are allowed"),
])  # fmt: skip
def test_policy_above_a_limit_names_the_option(served, tmp_path, option, size, message):
    served.publish(0)
    words = (served.endpoints.join, "--engine", "scripted", "--no-check", option, size)
    code, error = finished(start_join(tmp_path, *words), tmp_path)
    assert code == 3
    assert message in error
    assert option in error
    assert served.workers() == []
    assert not list((tmp_path / "node").rglob("*.bin")) + list((tmp_path / "node").rglob("*.part"))


@pytest.mark.parametrize("sandboxed", [False, pytest.param(True, marks=needs_bubblewrap)])
def test_a_joined_worker_works_is_vouched_for_and_says_what_it_earned(served, tmp_path, sandboxed):
    """Of several hubs one that answers will do. An owner's key stays outside of a sandbox."""
    served.publish(0)
    owner = load_or_create_key(tmp_path / "owner.key")
    start, words = (start_join, ["--sandbox"]) if sandboxed else (start_join_anew, [DEAD])
    words += [served.endpoints.join, "--engine", "scripted", "--name", "guest", "--owner", str(tmp_path / "owner.key")]
    process = start(tmp_path, *words)
    try:
        served.train()
    finally:
        code, error = finished(process, tmp_path)
    assert code == 0, error
    assert sandboxed or f"the hub at {DEAD} does not answer" in error
    [guest] = [node for node in served.client.status().nodes if node.name == "guest"]
    assert guest.owner == owner.public_key
    assert guest.accepted > 0
    earned = f"{guest.accepted} group{'' if guest.accepted == 1 else 's'} accepted, credit +{guest.credit}"
    assert f"the run is finished: {earned}; in all" in error
    assert "cheats" not in error


@needs_bubblewrap
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_in_a_sandbox_stops_in_good_order_when_told_to(served: ServedRun, tmp_path: Path, number: int) -> None:
    process = start_join(tmp_path, served.endpoints.join, "--engine", "scripted", "--sandbox")
    try:
        eventually(lambda: served.workers() != [])
    finally:
        process.send_signal(number)
        code, error = finished(process, tmp_path)
    assert code == 0, error
    assert "this start: 0 groups accepted" in error.splitlines()[-1]


@needs_bubblewrap
def test_a_sandbox_ends_with_the_process_that_made_it(served: ServedRun, tmp_path: Path) -> None:
    process = start_join(tmp_path, served.endpoints.join, "--engine", "scripted", "--sandbox")
    try:
        eventually(lambda: served.workers() != [])
        inside = sandboxed() & processes_of(tmp_path / "node").keys()
        assert inside
    finally:
        process.kill()
    assert gone(inside)


def test_machine_that_cannot_work_never_registers(served, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shoal.run.doctor.NO_DISK_BYTES", 2**62)
    monkeypatch.setattr("shoal.run.doctor.LEAST_DISK_BYTES", 2**62)
    arguments = ["join", served.endpoints.join, "--engine", "scripted", "--folder", str(tmp_path / "node")]
    assert "this machine cannot work" in (said := told(capsys, 3, *arguments).err)
    assert "free some space" in said
    assert served.workers() == []


def test_vouch_for_another_machine_is_refused_at_once(served: ServedRun, tmp_path: Path, capsys: Capture) -> None:
    vouch = vouch_for("0" * 32, SigningKey.generate())
    (tmp_path / "vouch.json").write_text(vouch.model_dump_json())
    arguments = ["join", served.endpoints.join, "--engine", "scripted", "--folder", str(tmp_path / "node")]
    assert f"vouches for node {'0' * 32}" in told(capsys, 2, *arguments, "--vouch", tmp_path / "vouch.json").err
    assert served.workers() == []


def test_a_cheating_worker_says_so_first_and_stops_when_told_to(served: ServedRun, tmp_path: Path) -> None:
    process = start_join(tmp_path, served.endpoints.hub, "--engine", "scripted", "--cheat", "copy")
    try:
        eventually(lambda: served.workers() != [])
        node = load_key(tmp_path / "node" / "node.key").node
        assert served.workers() == [f"node-{node[:8]}"], "a name that nobody chose says nothing of the machine"
    finally:
        process.send_signal(signal.SIGINT)
        code, error = finished(process, tmp_path)
    assert code == 0
    assert f"this worker cheats (copy): it {CHEATS['copy'].what}" in error
    root = served.endpoints.join.partition("#")[2]
    assert f"the URL has no root key, so the first answer is trusted: root key {root}" in error
    assert "this start: 0 groups accepted" in error.splitlines()[-1]


def test_a_joined_worker_is_paused_resumed_and_left_from_elsewhere(served, tmp_path, own_home, capsys):
    """By its URL, its run's name, and its folder. The hub shows the pause; a paused worker that starts again rests."""
    worker = own_home / served.folder.run_id / "worker"
    words, output = ("join", served.endpoints.join, "--engine", "scripted", "--hours", "0-24"), tmp_path / "output"

    def doing() -> list[str]:
        return [node.doing for node in served.client.status().nodes if node.role == "worker"]

    with Forked(tmp_path, words, output) as process:
        process.until("works for run")
        said = told(capsys, 0, "leave", served.endpoints.join, "--pause").out
        assert f"{worker}: paused; its leases are given back; to continue: shoal leave RUN --resume" in said
        eventually(lambda: doing() == ["paused by its owner"], otherwise=process.said)
        assert f"{worker} has left: 0 tokens, 0 groups accepted, credit +0\n" == told(capsys, 0, "leave", worker).out
        assert process.wait() == 0
    assert "stopping (shoal leave)" in process.said()
    assert not (worker / "leaving").exists()
    (worker / "leaving").touch()  # of a command that was killed: a later start is not meant
    with Forked(tmp_path, words, output.with_name("again")) as process:
        process.until("paused by its owner")
        name = served.folder.run_id.rpartition("-")[0]
        assert "resumed; it works when it may" in told(capsys, 0, "leave", name, "--resume").out
        eventually(lambda: doing() == [""], otherwise=process.said)
        assert process.end() == 0
    assert "no worker runs there" in told(capsys, 0, "leave", worker).out
    assert "paused; no worker runs there now" in told(capsys, 0, "leave", worker, "--pause").out


def test_a_worker_that_waits_for_its_hub_stops_when_told_to(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)
        process = start_join(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}", "--wait", str(DEADLINE_S))
        try:
            server.accept()[0].close()  # it is asking, and will ask again
        finally:
            process.terminate()
            code, error = finished(process, tmp_path)
    assert code == 0
    assert error.splitlines()[-1].endswith("stopped (SIGTERM)")


def test_a_fingerprint_that_is_not_the_hubs_is_refused(served: ServedRun, tmp_path: Path) -> None:
    message = one_line(run(tmp_path, "join", f"{served.endpoints.hub}/#{'0' * 40}", "--folder", "node"), 1)
    assert "another run or an impostor" in message
    assert not (tmp_path / "node").exists()
