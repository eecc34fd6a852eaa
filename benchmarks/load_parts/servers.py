"""The two servers that are measured, each a process of its own: the hub, and a bare endpoint of the same framework.

python -m load_parts.servers hub FOLDER [DATABASE [MS]]  the real hub, with ordinary settings but for limits per
                                                         address; each trip to a PostgreSQL takes MS longer
python -m load_parts.servers bare                        one POST route: JSON in, JSON out, nothing else

Both print their URL once they answer, and end with their input.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.hub import HubConfig, HubSettings, RunSettings
from shoal.protocol import SigningKey
from shoal.runtime.stop import StopToken
from shoal.simulator.world import NumberedTasks

RUN = "load"
READY_S = 60.0
STOP_S = 30.0
TICKS = os.sysconf("SC_CLK_TCK")
GROUPS_PER_STEP, GROUP_SIZE, STALENESS, TOKENS = 1024, 2, 4, 64


def key_of(name: str) -> SigningKey:
    return SigningKey.from_seed(name.encode().ljust(32))


def hub_config(folder: Path, database: str) -> HubConfig:
    """All workers come from one address here, so limits per address are off; those per key stay."""
    return HubConfig(
        folder=folder,
        run_id=RUN,
        run=RunSettings(
            steps=10**6,
            groups_per_step=GROUPS_PER_STEP,
            group_size=GROUP_SIZE,
            max_staleness=STALENESS,
            max_new_tokens=TOKENS,
        ),
        settings=HubSettings(port=0, database=database, requests_per_address_s=0),
        environment=NumberedTasks(),
        encode=lambda task: list(task.prompt.encode()),
        eos_token_ids=(0,),
        key=key_of("hub"),
        root_key=key_of("root").public_key,
    )


def serve_hub(folder: Path, database: str) -> None:
    from shoal.hub.http.server import run_hub

    run_hub(hub_config(folder, database), _stop_with_input(), on_ready=lambda url: print(url, flush=True))


def delay_trips(milliseconds: float) -> None:
    """As if the database were that far away. A commit or rollback of nothing makes no trip."""
    import psycopg

    def delayed(owner: Any, name: str, is_free: Callable[[Any], bool] = lambda _: False) -> None:
        call = getattr(owner, name)

        def late(self: Any, *arguments: Any, **named: Any) -> Any:
            if not is_free(self):
                time.sleep(milliseconds / 1000)
            return call(self, *arguments, **named)

        setattr(owner, name, late)

    def is_idle(connection: Any) -> bool:
        return bool(connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE)

    def is_piped(cursor: Any) -> bool:
        return bool(cursor.connection.info.pipeline_status)

    delayed(psycopg.Cursor, "execute", is_piped)
    delayed(psycopg.Cursor, "executemany")
    delayed(psycopg.Pipeline, "__exit__")
    delayed(psycopg.Connection, "commit", is_idle)
    delayed(psycopg.Connection, "rollback", is_idle)


def serve_bare() -> None:
    import uvicorn

    from load_parts.bare import app
    from shoal.runtime.http import bind

    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    listener = bind("127.0.0.1", 0, "bare.", StopToken())  # as the hub's: with Nagle's algorithm off
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    stop = _stop_with_input()
    threading.Thread(target=lambda: (stop.wait(10**6), setattr(server, "should_exit", True)), daemon=True).start()
    server.run(sockets=[listener])


def _stop_with_input() -> StopToken:
    """Set when the parent closes our input, or dies."""
    stop = StopToken()

    def watch() -> None:
        sys.stdin.read()
        stop.set("the benchmark is over")

    threading.Thread(target=watch, daemon=True).start()
    return stop


def cpu_s_of(stat: str, ended_children: bool = False) -> float:
    fields = Path(stat).read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if ended_children else 13])) / TICKS


def children_cpu_s(process: int) -> float:
    """Of a process and its children, also of those that have ended."""
    spent_s = cpu_s_of(f"/proc/{process}/stat", ended_children=True)
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):
            spent_s += cpu_s_of(f"/proc/{child}/stat")
    return spent_s


@dataclass
class Server:
    """A started server: where it is, and what it has used."""

    process: subprocess.Popen[str]
    url: str

    @classmethod
    def start(cls, *arguments: str) -> Server:
        process = subprocess.Popen(
            [sys.executable, "-m", "load_parts.servers", *arguments],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit(f"the server ended before it was ready (status {process.wait(READY_S)})")
        return cls(process, url)

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def cpu_s(self) -> float:
        return cpu_s_of(f"/proc/{self.process.pid}/stat")

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(STOP_S)


def main() -> None:
    kind, *rest = sys.argv[1:]
    began_s = time.monotonic()
    if kind == "hub":
        if len(rest) > 2 and float(rest[2]):
            delay_trips(float(rest[2]))
        serve_hub(Path(rest[0]), rest[1] if len(rest) > 1 else "")
    else:
        serve_bare()
    print(f"{kind} served for {time.monotonic() - began_s:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
