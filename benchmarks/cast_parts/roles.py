"""One process of a broadcast with shoal, for a benchmark: `python roles.py origin|relay|client OPTIONS-AS-JSON`.

See children.py for how it is talked to. Version 0 is a few bytes, published before anything is timed, so that every
relay and client has found its sources; version 1 is the file.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.protocol import load_or_create_key
from shoal.runtime.stop import StopToken
from shoal.shardcast import Downloader, Origin, RelayConfig, run_origin, run_relay

RUN = "benchmark"
POLL_S = 0.1
DEADLINE_S = 600.0

Options = dict[str, Any]


def main() -> None:
    role, options = sys.argv[1], json.loads(sys.argv[2])
    stop = StopToken()
    {"origin": origin, "relay": relay, "client": client}[role](options, stop)


def origin(options: Options, stop: StopToken) -> None:
    folder = Path(options["folder"])
    publisher = Origin(folder, RUN, load_or_create_key(Path(options["key"])))
    folder.with_name("small").write_bytes(b"a first version")
    publisher.publish(0, folder.with_name("small"))
    serving = _serve(lambda: run_origin(folder, options["host"], options["port"], stop, _ready))
    if _told_to_go():
        say(began=time.monotonic())
        publisher.publish(1, Path(options["file"]))
        say(done=time.monotonic())
        _told_to_go()
    stop.set("the benchmark is over")
    serving.join()


def relay(options: Options, stop: StopToken) -> None:
    config = RelayConfig(
        folder=Path(options["folder"]),
        upstreams=tuple(options["upstreams"]),
        run=RUN,
        trusted_key=options["trusted_key"],
        host=options["host"],
        port=options["port"],
        **options.get("settings", {}),
        peers=tuple(options.get("peers", ())),
    )
    serving = _serve(lambda: run_relay(config, stop, _ready))
    while _told_to_go():
        pass
    stop.set("the benchmark is over")
    serving.join()


def client(options: Options, stop: StopToken) -> None:
    downloader = Downloader(
        options["sources"],
        RUN,
        options["trusted_key"],
        Path(options["folder"]),
        stop,
        last_resort=options.get("last_resort", ()),
    )
    downloader.fetch(downloader.newest(DEADLINE_S), DEADLINE_S)
    say(ready="")
    if _told_to_go():
        while (ref := downloader.newest(DEADLINE_S)).version == 0:
            time.sleep(POLL_S)
        payload = downloader.fetch(ref, DEADLINE_S)
        say(done=time.monotonic(), file=str(payload.path))
        _told_to_go()
    stop.set("the benchmark is over")
    downloader.close()


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def _ready(url: str) -> None:
    say(ready=url)


def _told_to_go() -> bool:
    """Wait for a line; false at the end of the input."""
    return bool(sys.stdin.readline())


def _serve(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    main()
