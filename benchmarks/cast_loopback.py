"""How long, and how much processor and memory, does a broadcast on one machine take, against the published package?

    python benchmarks/cast_loopback.py [--size-mb 512] [--runs 3] [--package-env FOLDER] [--out FILE]

    origin ─► 2 relays ─► 4 clients       real processes, loopback, a file of random bytes

Runs of shoal and of `shardcast` 0.3.2 (from the package index, in an environment of its own) alternate; medians count.
Wall time is from the start of publishing to the last client's verified file. Processor time is that of all processes
and their children between "all are ready" and the end; what starting them cost stands beside it. A run of the
package that does not end within `--limit` seconds is cut off and reported as stalled.

Files lie in memory (/dev/shm) if there is room, because a virtual disk, and page cache that a hypervisor has taken
back, cost more and vary more than what is measured here. `--work FOLDER` puts them on a disk.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cast_parts.broadcast import Kind, Node, Outcome, PackageKind, Shape, broadcast, random_file
from cast_parts.report import publish, table

ROLES = ("origin", "relay", "client")
NEEDED_BYTES = 8_000_000_000


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory(dir=options.work, prefix="cast-") as folder:
        work = Path(folder)
        file = random_file(work / "file.bin", options.size_mb * 1_000_000)
        kinds: list[Kind] = [Kind(work)]
        if not options.ours_only:
            kinds.append(PackageKind(options.package_env))
        outcomes: dict[str, list[Outcome]] = {kind.name: [] for kind in kinds}
        for run in range(options.runs):
            for kind in kinds:
                outcome = broadcast(kind, shape(options), file, work / f"{kind.name}-{run}", options.limit)
                outcomes[kind.name].append(outcome)
                print(
                    f"{kind.name}: {_seconds(outcome.wall_s)}, {outcome.cpu_s:.1f} s CPU {outcome.problem}", flush=True
                )
    report(options, outcomes)


def shape(options: argparse.Namespace) -> Shape:
    """Two relays that know each other, four clients that know both; the origin is the clients' last resort."""
    ports = free_ports(1 + options.relays)
    origin = Node("origin", port=ports[0])
    urls = [f"http://127.0.0.1:{port}" for port in ports[1:]]
    relays = tuple(
        Node(f"relay-{number}", port=port, sources=(origin.url,), peers=tuple(u for u in urls if u != urls[number]))
        for number, port in enumerate(ports[1:])
    )
    clients = tuple(
        Node(f"client-{number}", sources=tuple(urls), last_resort=(origin.url,)) for number in range(options.clients)
    )
    return Shape(origin, relays, clients)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; the package cannot choose one itself."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def memory_folder() -> Path | None:
    """A folder in memory with room for all copies; None if there is none: then the temporary folder is used."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and shutil.disk_usage(folder).free > NEEDED_BYTES else None


def report(options: argparse.Namespace, outcomes: dict[str, list[Outcome]]) -> None:
    rows = [_row(name, found, options.limit) for name, found in outcomes.items()]
    head = ["", "wall (median; each run)", "publish", "CPU", "starting", *(f"peak MB, {role}" for role in ROLES)]
    parts = [
        f"{options.size_mb} MB of random bytes, origin → {options.relays} relays → {options.clients} clients, loopback;"
        f" {options.runs} alternating runs, medians. Files in {options.work or tempfile.gettempdir()}.",
        table(head, rows),
    ]
    if len(outcomes) == 2:
        ours, package = outcomes.values()
        wall = _median_wall(package, options.limit) / _median_wall(ours, options.limit)
        cpu = _median([o.cpu_s for o in package]) / _median([o.cpu_s for o in ours])
        parts.append(
            f"The package needs {wall:.1f} times the wall time and {cpu:.1f} times the processor time of shoal."
            f" A stalled run was cut off after {options.limit:.0f} s and counts as that long."
        )
    publish(
        "A broadcast on one machine", f"python benchmarks/cast_loopback.py --runs {options.runs}", parts, options.out
    )


def _row(name: str, outcomes: Sequence[Outcome], limit_s: float) -> list[str]:
    each = ", ".join(_seconds(outcome.wall_s) for outcome in outcomes)
    return [
        name,
        f"**{_median_wall(outcomes, limit_s):.1f} s** ({each})",
        f"{_median([outcome.publish_s for outcome in outcomes]):.1f} s",
        f"{_median([outcome.cpu_s for outcome in outcomes]):.1f} s",
        f"{_median([outcome.start_cpu_s for outcome in outcomes]):.1f} s",
        *(f"{max(outcome.peak_mb(role) for outcome in outcomes):.0f}" for role in ROLES),
    ]


def _median_wall(outcomes: Sequence[Outcome], limit_s: float) -> float:
    """A run that was cut off counts as the limit: it took longer."""
    return _median([limit_s if outcome.wall_s is None else outcome.wall_s for outcome in outcomes])


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _seconds(seconds: float | None) -> str:
    return "stalled" if seconds is None else f"{seconds:.1f} s"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A broadcast on one machine, against the package shardcast 0.3.2.")
    parser.add_argument("--size-mb", type=int, default=512)
    parser.add_argument("--relays", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a run is cut off")
    parser.add_argument("--package-env", type=Path, default=Path(tempfile.gettempdir()) / "shardcast-env")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--work", type=Path, default=memory_folder(), help="where files are written")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.ours_only and shutil.which("wget") is None:
        parser.error("the package needs wget; install it, or give --ours-only")
    return options


if __name__ == "__main__":
    main()
