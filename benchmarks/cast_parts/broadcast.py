"""One broadcast, from the start of publishing to the last client's verified file, with shoal or with the package.

    origin ─► relay × r ─► client × c      each a process; who is asked by whom is a `Shape`

The same shape is run with either kind. A run that does not end in time is cut off and told so, not left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cast_parts.children import Child, Cost, Stalled
from shoal.protocol import load_or_create_key

PACKAGE = "shardcast==0.3.2"
HERE = Path(__file__).parent
READY_S = 60.0


@dataclass(frozen=True)
class Node:
    """One process: where it listens and whom it asks. `prefix` starts its command (a namespace to be run in)."""

    name: str
    host: str = "127.0.0.1"
    port: int = 0
    sources: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    last_resort: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class Shape:
    """Who takes part. Relays are started in order, so a deeper one comes after its upstreams."""

    origin: Node
    relays: tuple[Node, ...]
    clients: tuple[Node, ...]


@dataclass(frozen=True)
class Outcome:
    """`wall_s` is None if the run was cut off, for the reason in `problem`."""

    wall_s: float | None
    publish_s: float = 0.0
    costs: Mapping[str, Cost] = field(default_factory=dict)
    problem: str = ""

    @property
    def cpu_s(self) -> float:
        return sum(cost.cpu_s for cost in self.costs.values())

    @property
    def start_cpu_s(self) -> float:
        return sum(cost.start_cpu_s for cost in self.costs.values())

    def peak_mb(self, role: str) -> float:
        return max((cost.peak_mb for name, cost in self.costs.items() if name.startswith(role)), default=0.0)


class Kind:
    """How processes of one kind are started."""

    name = "shoal"

    def __init__(self, work: Path, settings: Mapping[str, Any] | None = None) -> None:
        self._key = work / "benchmark.key"
        self._trusted_key = load_or_create_key(self._key).public_key
        self._settings = dict(settings or {})

    def command(self, role: str, options: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
        told = {**options, "key": str(self._key), "trusted_key": self._trusted_key, "settings": self._settings}
        script = str(HERE / "roles.py")
        return [sys.executable, script, role, json.dumps(told)], {**os.environ, "OMP_NUM_THREADS": "1"}


class PackageKind(Kind):
    """The published package, in an environment of its own that is made on first use."""

    name = PACKAGE

    def __init__(self, environment: Path) -> None:
        self._python = environment / "bin" / "python"
        if not (environment / "ready").exists():
            venv.create(environment, with_pip=True)
            subprocess.run([str(self._python), "-m", "pip", "install", "--quiet", PACKAGE], check=True)
            (environment / "ready").touch()
        where = [str(self._python), "-c", "import shardcast; print(shardcast.__path__[0])"]
        self._source = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())

    def command(self, role: str, options: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
        own = Path(options["folder"]).with_suffix(".package")
        shutil.copytree(self._source, own / "shardcast")
        environment = {**os.environ, "PYTHONPATH": str(own), "SHARDCAST_LOG_LEVEL": "WARNING"}
        return [str(self._python), str(HERE / "package_roles.py"), role, json.dumps(options)], environment


def broadcast(kind: Kind, shape: Shape, file: Path, work: Path, limit_s: float) -> Outcome:
    """Run it once in the empty folder `work`, which is removed afterwards."""
    work.mkdir()
    children: dict[str, Child] = {}
    publish_s = 0.0
    try:
        origin = _start(kind, "origin", shape.origin, work, children, file=str(file))
        for node in shape.relays:
            _start(kind, "relay", node, work, children)
        clients = [_start(kind, "client", node, work, children) for node in shape.clients]
        for child in (*clients, origin):
            child.go()
        began_s = origin.expect("began", READY_S)
        publish_s = origin.expect("done", limit_s) - began_s
        done = [client.hear("done", max(0.1, began_s + limit_s - time.monotonic())) for client in clients]
        outcome = Outcome(max(said["done"] for said in done) - began_s, publish_s)
        _check(file, [Path(said["file"]) for said in done])
    except Stalled as error:
        outcome = Outcome(None, publish_s, problem=str(error))
    finally:
        costs = {name: child.end() for name, child in reversed(children.items())}
        shutil.rmtree(work, ignore_errors=True)
    return Outcome(outcome.wall_s, outcome.publish_s, costs, outcome.problem)


def random_file(path: Path, size_bytes: int) -> Path:
    if not path.exists() or path.stat().st_size != size_bytes:
        with path.open("wb") as file:
            for _ in range(0, size_bytes, 1 << 20):
                file.write(os.urandom(min(1 << 20, size_bytes - file.tell())))
    return path


def _start(kind: Kind, role: str, node: Node, work: Path, children: dict[str, Child], **more: Any) -> Child:
    """Start one process and wait until it is ready: one after the other, as the package's constructors need it."""
    options = {
        "folder": str(work / node.name), "host": node.host, "port": node.port, "upstreams": node.sources,
        "sources": node.sources, "peers": node.peers, "last_resort": node.last_resort, **more,
    }  # fmt: skip
    command, environment = kind.command(role, options)
    environment = {**(environment or os.environ), "PYTHONDONTWRITEBYTECODE": ""}  # nobody compiles at every start
    child = Child(node.name, [*node.prefix, *command], work / f"{node.name}.log", environment)
    children[node.name] = child
    child.ready(READY_S)
    return child


def _check(file: Path, received: Sequence[Path]) -> None:
    """What arrived is what was sent; not timed."""
    wanted = _digest(file)
    for path in received:
        if _digest(path) != wanted:
            raise SystemExit(f"{path} is not the file that was published")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
