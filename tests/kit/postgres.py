"""A PostgreSQL server of the tests' own: a private cluster on a free loopback port, from the system's binaries.

    cluster (once for a process; about two seconds) ─► a database for each test, copied from a template (about 0.1 s)

`initdb` and `postgres` refuse to run as root, so root runs them as a user without rights. Where there are no binaries
the tests are skipped and say so. Nothing is synced to disk unless the cluster is started with `fsync`: the tests that
kill want that the server really promises what it says.

    def test_something(database_url: str) -> None: …  # a fixture for all tests: postgresql://… of an empty database
    def test_more(postgres: Cluster) -> None: …       # the server, to make and drop databases, or to kill
"""

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kit.fork import free_port

START_S = 60
USERS = ("postgres", "nobody")
OPTIONS = {
    "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "max_connections": "300", "shared_buffers": "32MB",
    "autovacuum": "off", "jit": "off",
}  # fmt: skip
NO_FSYNC = {"fsync": "off", "full_page_writes": "off"}

_numbers = itertools.count()


def binaries() -> Path | None:
    """Where the server's programs are: on the path, or where Debian puts them (the newest version)."""
    found = shutil.which("initdb")
    if found is not None and (Path(found).parent / "postgres").exists():
        return Path(found).parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


def _as_user() -> dict[str, Any]:
    """Arguments of `subprocess` that give up root's rights, if we have them."""
    if os.geteuid() != 0:
        return {}
    for name in USERS:
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    pytest.skip(f"PostgreSQL does not run as root, and there is none of the users {', '.join(USERS)}")


@dataclass
class Cluster:
    """A running server. `kill` and `start` are for the tests that want it to fail."""

    bin: Path
    folder: Path
    port: int
    options: dict[str, str]
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://shoal@127.0.0.1:{self.port}/{database}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def create(self, template: str = "template1") -> str:
        """The URL of a database that nobody uses yet, like `template`."""
        name = f"test_{os.getpid()}_{next(_numbers)}"
        self.execute(f'CREATE DATABASE {name} TEMPLATE "{template}"')
        return self.url(name)

    def drop(self, url: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS {url.rpartition('/')[2]} WITH (FORCE)")

    def execute(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[call-overload]

    def start(self) -> None:
        """Start the server and wait until it answers."""
        import psycopg  # every test run reads this file; few need the driver

        options = [f"--{name}={value}" for name, value in {**self.options, "port": str(self.port)}.items()]
        log = self.folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(self.bin / "postgres"), "-D", str(self.folder / "data"), *options],
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **_as_user(),
            )  # fmt: skip
        end_s = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.url(), connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                ended = self._process.poll() is not None
                if ended or time.monotonic() > end_s:
                    raise RuntimeError(f"PostgreSQL does not answer: {error}\n{log.read_text()[-2000:]}") from error
                time.sleep(0.05)

    def kill(self) -> None:
        """As if the machine's power was cut, as far as the server's processes go."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(START_S)

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGQUIT)  # at once: nothing here is worth a checkpoint
        self._process.wait(START_S)


@contextmanager
def running_cluster(fsync: bool = False) -> Iterator[Cluster]:
    """A cluster of its own for as long as the block lasts, or a skip with the reason."""
    found = binaries()
    if found is None:
        pytest.skip("PostgreSQL is not installed: no initdb on the path or in /usr/lib/postgresql (Debian: postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="shoal-pg-"))
    try:
        user = _as_user()
        if user:
            os.chown(folder, user["user"], user["group"])
        command = [str(found / "initdb"), "-D", str(folder / "data"), "-U", "shoal", "-A", "trust", "-E", "UTF8"]
        command += ["--locale=C", "--no-sync", "--no-instructions"]
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=START_S, **user)
        if made.returncode != 0:
            pytest.skip(f"initdb does not work here: {made.stderr.strip()}")
        cluster = Cluster(found, folder, free_port(), OPTIONS | ({} if fsync else NO_FSYNC))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """The cluster of this process (with xdist: one for each worker)."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def database_url(postgres: Cluster) -> Iterator[str]:
    """An empty database for one test."""
    url = postgres.create()
    yield url
    postgres.drop(url)
