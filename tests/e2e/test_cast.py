"""`shoal cast` as people use it: processes, printed commands copied, kills, a full disk, the guide word for word."""

import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kit import Request, eventually, fork
from kit.cast import Lab, ask, reply
from kit.fork import free_port
from kit.smalldisk import in_own_namespace, small_disk

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "broadcast-files.md"
DEADLINE_S = 60.0
SIZE = 6_000_000
FETCH = re.compile(r"fetch it:  shoal (cast fetch \S+ --out .+)")
RELAY = re.compile(r"relay it:  shoal (cast relay --upstream \S+)")


def start(folder: Path, *arguments: str) -> fork.Forked:
    """A `shoal …` that runs beside the test."""
    return fork.Forked(folder, arguments, folder / f".output-{random.randrange(10**9)}")


def fetch(folder: Path, *arguments: str) -> str:
    """A fetch that goes well; its last line."""
    ran = fork.run(folder, "cast", "fetch", *arguments)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()[-1]


def random_file(path: Path, seed: int = 0, size: int = SIZE) -> bytes:
    data = random.Random(seed).randbytes(size)
    path.write_bytes(data)
    return data


def changed(data: bytes, seed: int) -> bytes:
    """The same, but for a few hundred bytes."""
    rng, new = random.Random(seed), bytearray(data)
    for _ in range(300):
        new[rng.randrange(len(new))] ^= 1
    return bytes(new)


def publisher(folder: Path, path: str, *more: str, port: int = 0) -> fork.Forked:
    return start(folder, "cast", "publish", path, "--host", "127.0.0.1", "--port", str(port), *more)


def url_of(process: fork.Forked, pattern: re.Pattern[str] = FETCH) -> str:
    return shlex.split(process.until(pattern)[1])[2]


def megabytes_fetched(line: str) -> float:
    """What had to be fetched, according to the last line."""
    if "all of it here already" in line:
        return 0.0
    found = re.search(r", ([\d.]+) (\w+) of it fetched", line) or re.search(r": ([\d.]+) (\w+)", line)
    assert found is not None, line
    return float(found[1]) / {"MB": 1, "kB": 1e3, "bytes": 1e6}[found[2]]


def disk_bytes(*folders: Path) -> int:
    """What the files in these folders take, each counted once however many names it has."""
    files = {(s := path.stat()).st_ino: s.st_size for top in folders for path in top.rglob("*") if path.is_file()}
    return sum(files.values())


@pytest.mark.slow
def test_printed_commands_work_when_copied(tmp_path: Path) -> None:
    data = random_file(tmp_path / "my model.bin")
    there = tmp_path / "there"
    there.mkdir()
    with publisher(tmp_path, "my model.bin") as origin:
        copied = shlex.split(origin.until(FETCH)[1])
        ran = fork.run(there, *copied)
        assert ran.returncode == 0, ran.stderr
        assert (there / "my model.bin").read_bytes() == data
        relay_command = shlex.split(origin.until(RELAY)[1])
        with start(there, *relay_command, "--host", "127.0.0.1", "--port", "0") as relay:
            copied = shlex.split(relay.until(FETCH)[1])
            assert fork.run(tmp_path, *copied[:-1], "from-relay.bin").returncode == 0
            assert relay.end() == 0
        assert (tmp_path / "from-relay.bin").read_bytes() == data
        assert origin.end() == 0
    said = origin.said()
    assert re.search(r"published my model\.bin version 1: 6 MB in [\d.]+ s, digest [0-9a-f]{64}", said), said


def test_second_fetch_costs_nothing_and_a_new_version_its_delta(tmp_path: Path) -> None:
    data = random_file(tmp_path / "a.bin")
    out = tmp_path / "out"
    out.mkdir()
    with publisher(tmp_path, "a.bin") as origin:
        url = url_of(origin)
        line = fetch(out, url, "--out", "a.bin")
        assert re.fullmatch(
            r"a\.bin version 1: 6 MB in [\d.]+ s, [\d.]+ MB/s; from http://127\.0\.0\.1:\d+ 100 %", line
        ), line
        assert disk_bytes(out) < 1.1 * SIZE
        assert megabytes_fetched(fetch(out, url, "--out", "a.bin")) == 0.0
        new = changed(data, 1)
        (tmp_path / "a.bin").write_bytes(new)
        ran = fork.run(tmp_path, "cast", "publish", "a.bin", "--no-serve")
        assert ran.returncode == 0, ran.stderr
        assert "version 2" in ran.stdout
        line = fetch(out, url, "--out", "a.bin")  # the running server has picked it up
        assert (out / "a.bin").read_bytes() == new
        assert megabytes_fetched(line) < 0.1, line
        assert disk_bytes(out) < 1.1 * SIZE


@pytest.mark.slow
def test_relay_serves_without_its_upstream_and_waits_for_a_late_one(tmp_path: Path) -> None:
    data = random_file(tmp_path / "a.bin", 1, 900_000)
    port = free_port()
    key = fork.run(tmp_path, "cast", "publish", "a.bin", "--no-serve").stdout
    upstream = f"http://127.0.0.1:{port}/{re.findall(r'/(#[0-9a-f]{64})', key)[0]}"
    relay_arguments = ("cast", "relay", "--upstream", upstream, "--host", "127.0.0.1", "--port", "0")
    with start(tmp_path, *relay_arguments) as relay:
        relay.until("looking for the broadcast")
        with publisher(tmp_path, "a.bin", port=port) as origin:
            url = url_of(relay)
            fetch(tmp_path, url, "--out", "first.bin")
            assert origin.end() == 0
        assert relay.end() == 0
    with start(tmp_path, *relay_arguments) as relay:  # its upstream is gone
        fetch(tmp_path, url_of(relay), "--out", "second.bin")
    assert (tmp_path / "first.bin").read_bytes() == (tmp_path / "second.bin").read_bytes() == data


def slow_copy(lab: Lab, url: str) -> tuple[str, list[str]]:
    """A server in between that lets through a few chunks, which it names, and then holds on to the rest."""
    passed: list[str] = []

    def between(target: str, to: socket.socket) -> None:
        if "/chunks/" in target:
            if len(passed) >= 3:
                source.closed.wait(DEADLINE_S)
                return
            passed.append(target)
        reply(to, *ask(url, target))

    source = lab.source(between)
    return source.url, passed


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM, signal.SIGKILL]
)  # a fetch takes the first two alike
def test_stopped_fetch_resumes(lab: Lab, tmp_path: Path, number: signal.Signals) -> None:
    data = random_file(tmp_path / "a.bin", 3, 24_000_000)
    with publisher(tmp_path, "a.bin") as origin:
        url, _, key = url_of(origin).partition("/#")
        slow, passed = slow_copy(lab, url)
        with start(tmp_path, "cast", "fetch", f"{slow}/#{key}", "--out", "out.bin") as stopped:
            eventually(lambda: len(passed) >= 3, DEADLINE_S)
            cache = tmp_path / ".out.bin.cast"
            eventually(lambda: any(part.stat().st_blocks for part in cache.glob("*.part")), DEADLINE_S)
            assert stopped.end(number) == (130 if number != signal.SIGKILL else -signal.SIGKILL), stopped.said()
            assert "Traceback" not in stopped.said()
        assert not (tmp_path / "out.bin").exists()
        line = fetch(tmp_path, f"{url}/#{key}", "--out", "out.bin")
        assert (tmp_path / "out.bin").read_bytes() == data
        assert megabytes_fetched(line) < 24.0, line


@pytest.mark.slow
def test_fetch_without_progress_gives_up(lab: Lab, tmp_path: Path) -> None:
    random_file(tmp_path / "a.bin", 3, 24_000_000)
    with publisher(tmp_path, "a.bin") as origin:
        url, _, key = url_of(origin).partition("/#")
        slow, _ = slow_copy(lab, url)
        ran = fork.run(tmp_path, "cast", "fetch", f"{slow}/#{key}", "--out", "out.bin", "--patience", "2")
    assert ran.returncode == 1
    assert "nothing has arrived for 2 s" in ran.stderr.splitlines()[-1]


def test_taken_port_is_named(tmp_path: Path) -> None:
    random_file(tmp_path / "a.bin", 1, 1000)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        ran = fork.run(tmp_path, "cast", "publish", "a.bin", "--host", "127.0.0.1", "--port", port)
    assert ran.returncode == 3
    assert f"port {port} on 127.0.0.1 is taken: nothing was published" in ran.stderr.splitlines()[-1]
    assert not (tmp_path / "www" / "head.json").exists()


@pytest.mark.slow
def test_full_disk_is_named_and_the_fetch_resumes(request: Request, tmp_path: Path) -> None:
    if in_own_namespace(request):
        return
    data = random_file(tmp_path / "a.bin")
    with publisher(tmp_path, "a.bin") as origin, small_disk(tmp_path / "disk", "16m") as disk:
        url = url_of(origin)
        disk.fill()
        ran = fork.run(disk.path, "cast", "fetch", url, "--out", "out.bin")
        assert ran.returncode == 3, ran.stderr
        assert "the disk is full" in ran.stderr.splitlines()[-1]
        ran = fork.run(disk.path, "cast", "publish", str(tmp_path / "a.bin"), "--no-serve")
        assert ran.returncode in (2, 3), ran.stderr
        assert "Traceback" not in ran.stderr
        disk.free()
        fetch(disk.path, url, "--out", "out.bin")
        assert (disk.path / "out.bin").read_bytes() == data


def commands_in(guide: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", guide, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.slow
def test_commands_of_the_guide_work(tmp_path: Path) -> None:
    """Its commands in order, as written; those that end in & run beside the others. URL and KEY are filled in."""
    ports = {port: str(free_port()) for port in ("8471", "8472", "8473")}
    known: dict[str, str] = {}
    with ExitStack() as stack:
        for line in commands_in(GUIDE.read_text()):
            text = line
            for written, port in ports.items():
                text = text.replace(written, port)
            text = text.replace("KEY", known.get("key", "KEY")).replace("your.address", "127.0.0.1")
            if text.endswith("&"):
                process = stack.enter_context(start(tmp_path, *shlex.split(text.removesuffix("&"))[1:]))
                known["key"] = process.until(FETCH)[1].partition("/#")[2].split()[0]
                continue
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            shell = {**fork.clean_environment(), "OMP_NUM_THREADS": "1", "PATH": path}
            ran = subprocess.run(
                text, shell=True, cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=DEADLINE_S
            )
            assert ran.returncode == 0, f"{text}\n{ran.stdout}{ran.stderr}"
    assert (tmp_path / "copy.bin").read_bytes() == (tmp_path / "model.bin").read_bytes()
