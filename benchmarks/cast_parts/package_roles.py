"""One process of a broadcast with the published `shardcast` package: `python package_roles.py ROLE OPTIONS-AS-JSON`.

Runs in an environment of its own, without shoal. As `roles.py`; see children.py for how it is talked to. It is used as
its own commands use it, with three kindnesses: a relay looks for news every second instead of every thirty, the probe
file that its constructors need is there, and every process has its own copy of the package, because clients of one
machine would overwrite each other's `temp_distribution.txt` beside it.
"""

import json
import os
import sys
import time
from pathlib import Path

POLL_S = 1.0


def main():
    role, options = sys.argv[1], json.loads(sys.argv[2])
    Path(options["folder"]).mkdir(parents=True, exist_ok=True)
    {"origin": origin, "relay": relay, "client": client}[role](options)
    sys.stdout.flush()
    os._exit(0)  # its threads do not end by themselves


def origin(options):
    from shardcast.origin_server import OriginServer

    _write_probe(options["folder"])
    server = OriginServer(options["folder"], options["port"])
    say(ready=f"http://{options['host']}:{options['port']}")
    if told_to_go():
        say(began=time.monotonic())
        server.broadcast(options["file"])
        say(done=time.monotonic())
        told_to_go()


def relay(options):
    from shardcast.middle_node import MiddleNode

    _write_probe(options["folder"])
    MiddleNode(options["upstreams"], options["folder"], options["port"], check_interval=1)
    say(ready=f"http://{options['host']}:{options['port']}")
    while told_to_go():
        pass


def client(options):
    from shardcast.client_node import ClientNode

    node = ClientNode(options["sources"], options["folder"])
    say(ready="")
    if told_to_go():
        while not node.list_available_versions():
            time.sleep(POLL_S)
        received = None
        while received is None:
            received = node.download_version("v1")
        say(done=time.monotonic(), file=received)
        told_to_go()


def _write_probe(folder):
    Path(folder, "data1.bin").write_bytes(os.urandom(1_000_000))


def say(**values):
    print(json.dumps(values), flush=True)


def told_to_go():
    return bool(sys.stdin.readline())


if __name__ == "__main__":
    main()
