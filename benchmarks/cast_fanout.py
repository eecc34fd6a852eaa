"""How does the time to reach N clients grow, with N and with the depth of the tree?

    sudo python benchmarks/cast_fanout.py [--size-mb 5] [--clients 1,2,4,8,16,32] [--depths 0,1,2,3] [--out FILE]

Machines are network namespaces, each with one throttled link to a switch (`tc tbf`, needs root): so slow that the
processor is not what is measured. At the lowest level there is a relay for every four clients, above it one for every
two relays; relays of one level trade. Depth 0 is the origin alone, for comparison.

    depth 2:   origin ═ 80 ═►  relay relay  ═ 80 ═►  relay relay relay relay  ═►  clients, 10 Mbit/s each

All relays and clients are threads of one process, each inside its own namespace: 47 processes would measure two cores.
Time is from the start of publishing to the last client's verified version. Result: a table and a plot.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from cast_parts.broadcast import random_file
from cast_parts.namespaces import Network, in_machine, why_not
from cast_parts.report import publish, table

from shoal.protocol import PolicyRef, SigningKey
from shoal.runtime.stop import StopToken
from shoal.shardcast import Downloader, Origin, RelayConfig, run_origin, run_relay

RUN = "benchmark"
PORT = 8471
CLIENTS_PER_RELAY, RELAYS_PER_RELAY = 4, 2
READY_S, DEADLINE_S, POLL_S = 30.0, 120.0, 0.02


@dataclass(frozen=True)
class Machine:
    name: str
    host: str

    @property
    def url(self) -> str:
        return f"http://{self.host}:{PORT}"


@dataclass(frozen=True)
class Point:
    depth: int
    clients: int
    relays: int
    seconds: float
    origin_copies: float


def levels(clients: int, depth: int) -> list[int]:
    """How many relays each level has, from the origin down.

    >>> levels(32, 3)
    [2, 4, 8]
    """
    sizes: list[int] = []
    for _ in range(depth):
        sizes.insert(0, ceil(sizes[0] / RELAYS_PER_RELAY) if sizes else ceil(clients / CLIENTS_PER_RELAY))
    return sizes


class Fanout:
    """The machines, made once, and broadcasts over trees of them."""

    def __init__(self, network: Network, options: argparse.Namespace, work: Path) -> None:
        self._network = network
        self._work = work
        self._file = random_file(work / "file.bin", options.size_mb * 1_000_000)
        counts, depths = options.clients, options.depths
        relays = max((sum(levels(count, depth)) for count in counts for depth in depths), default=0)
        self._origin = self._machine("origin", "10.9.0.1", options.relay_mbit)
        self._relays = [self._machine(f"relay-{n}", f"10.9.1.{n + 1}", options.relay_mbit) for n in range(relays)]
        self._clients = [self._machine(f"client-{n}", f"10.9.2.{n + 1}", options.mbit) for n in range(max(counts))]

    def measure(self, clients: int, depth: int) -> Point:
        folder = self._work / f"{depth}-{clients}"
        folder.mkdir()
        stop = StopToken()
        threads: list[threading.Thread] = []
        try:
            return self._broadcast(folder, clients, depth, stop, threads)
        finally:
            stop.set("this broadcast is over")
            for thread in threads:
                thread.join(READY_S)
            shutil.rmtree(folder, ignore_errors=True)

    def _broadcast(
        self, folder: Path, clients: int, depth: int, stop: StopToken, threads: list[threading.Thread]
    ) -> Point:
        key = SigningKey.generate()
        publisher = Origin(folder / "origin", RUN, key)
        first = folder / "small"
        first.write_bytes(b"a first version")
        publisher.publish(0, first)
        self._serve(threads, self._origin, lambda ready: run_origin(folder / "origin", "0.0.0.0", PORT, stop, ready))
        sources = self._start_relays(folder, clients, depth, key.public_key, stop, threads)
        arrivals = Arrivals(clients)
        for number, machine in enumerate(self._clients[:clients]):
            client = Client(folder / machine.name, sources[number % len(sources)], key.public_key, stop, arrivals)
            thread = threading.Thread(target=client.run, daemon=True)
            threads.append(thread)
            in_machine(self._network, machine.name, thread)
        arrivals.await_ready()
        sent = self._network.sent_bytes("origin")
        began_s = time.monotonic()
        publisher.publish(1, self._file)
        seconds = arrivals.await_done() - began_s
        copies = (self._network.sent_bytes("origin") - sent) / self._file.stat().st_size
        return Point(depth, clients, sum(levels(clients, depth)), seconds, copies)

    def _start_relays(
        self, folder: Path, clients: int, depth: int, trusted_key: str, stop: StopToken, threads: list[threading.Thread]
    ) -> list[list[str]]:
        """Start all levels; for each machine of the last one, what its clients ask."""
        unused = list(self._relays)
        above = [self._origin]
        for size in levels(clients, depth):
            level, unused = unused[:size], unused[size:]
            for number, machine in enumerate(level):
                config = RelayConfig(
                    folder=folder / machine.name,
                    upstreams=(above[number * len(above) // size].url,),
                    run=RUN,
                    trusted_key=trusted_key,
                    host="0.0.0.0",
                    port=PORT,
                    peers=tuple(other.url for other in level if other != machine),
                )
                self._serve(threads, machine, lambda ready, config=config: run_relay(config, stop, ready))  # type: ignore[misc]
            above = level
        return [[machine.url] for machine in above]

    def _serve(
        self, threads: list[threading.Thread], machine: Machine, run: Callable[[Callable[[str], None]], None]
    ) -> None:
        ready = threading.Event()
        thread = threading.Thread(target=run, args=(lambda _: ready.set(),), daemon=True)
        threads.append(thread)
        in_machine(self._network, machine.name, thread)
        if not ready.wait(READY_S):
            raise SystemExit(f"{machine.name} does not listen")

    def _machine(self, name: str, host: str, mbit: float) -> Machine:
        self._network.machine(name, host, mbit)
        return Machine(name, host)


class Arrivals:
    """How many clients are ready, and when the last of them was done."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self._changed = threading.Condition()
        self.ready = 0
        self._done_s: list[float] = []

    def note_ready(self) -> None:
        with self._changed:
            self.ready += 1
            self._changed.notify_all()

    def note_done(self) -> None:
        with self._changed:
            self._done_s.append(time.monotonic())
            self._changed.notify_all()

    def await_ready(self) -> None:
        self._await("ready", lambda: self.ready)

    def await_done(self) -> float:
        self._await("done", lambda: len(self._done_s))
        return max(self._done_s)

    def _await(self, what: str, count: Callable[[], int]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: count() == self._clients, DEADLINE_S):
                raise SystemExit(f"{count()} of {self._clients} clients are {what} after {DEADLINE_S:.0f} s")


@dataclass(frozen=True)
class Client:
    """A worker, as far as weights are concerned."""

    folder: Path
    sources: Sequence[str]
    trusted_key: str
    stop: StopToken
    arrivals: Arrivals

    def run(self) -> None:
        downloader = Downloader(self.sources, RUN, self.trusted_key, self.folder, self.stop)
        downloader.fetch(downloader.newest(DEADLINE_S), DEADLINE_S)
        poller = downloader.head_poller()
        self.arrivals.note_ready()
        newest: PolicyRef | None = None
        while newest is None and not self.stop.wait(POLL_S):
            newest = poller.newer(wait_s=10)
        if newest is not None:
            downloader.fetch(newest, DEADLINE_S)
            self.arrivals.note_done()
        poller.close()
        downloader.close()


def main() -> None:
    options = parse_options()
    problem = why_not()
    if problem:
        print(problem)
        return
    points: list[Point] = []
    with tempfile.TemporaryDirectory(dir=options.work, prefix="cast-") as folder, Network() as network:
        fanout = Fanout(network, options, Path(folder))
        for depth in options.depths:
            for clients in options.clients:
                points.append(fanout.measure(clients, depth))
                print(points[-1], flush=True)
    report(options, points)


def report(options: argparse.Namespace, points: Sequence[Point]) -> None:
    cells = {(point.depth, point.clients): point for point in points}
    rows = []
    for depth in options.depths:
        times = [f"{cells[depth, count].seconds:.1f} s" for count in options.clients]
        most = cells[depth, max(options.clients)]
        rows.append([_depth_words(depth), *times, most.relays, f"{most.origin_copies:.1f}"])
    once_s = options.size_mb * 8 / options.mbit
    parts = [
        f"{options.size_mb} MB of random bytes; clients have {options.mbit:.0f} Mbit/s ({once_s:.1f} s for the file"
        f" once), the origin and relays {options.relay_mbit:.0f} Mbit/s, in each direction. The last client's time,"
        " from the start of publishing. All relays and clients are threads of one process.",
        table(
            ["", *(f"{count} clients" for count in options.clients), "relays at most", "copies from the origin"], rows
        ),
    ]
    if options.out is not None:
        picture = options.out.with_suffix(".png")
        plot(options, points, picture, once_s)
        parts.append(f"![time against the number of clients]({picture.name})")
    publish("Fan-out", "sudo python benchmarks/cast_fanout.py", parts, options.out)


def plot(options: argparse.Namespace, points: Sequence[Point], picture: Path, once_s: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for depth in options.depths:
        line = [point for point in points if point.depth == depth]
        axes.plot([p.clients for p in line], [p.seconds for p in line], marker="o", label=_depth_words(depth))
    axes.axhline(once_s, color="grey", linestyle=":", label="a client's link, once")
    axes.set(xscale="log", xlabel="clients", ylabel="seconds until the last one has it", ylim=(0, None))
    axes.set_xticks(options.clients, [str(count) for count in options.clients])
    axes.minorticks_off()
    axes.set_title(
        f"{options.size_mb} MB; clients {options.mbit:.0f} Mbit/s, relays and origin {options.relay_mbit:.0f} Mbit/s"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def _depth_words(depth: int) -> str:
    return "origin alone" if depth == 0 else f"{depth} level{'s' * (depth > 1)} of relays"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to reach N clients, behind trees of relays.")
    parser.add_argument("--size-mb", type=int, default=5)
    parser.add_argument("--mbit", type=float, default=10.0, help="a client's link")
    parser.add_argument("--relay-mbit", type=float, default=80.0, help="a relay's and the origin's link")
    parser.add_argument("--clients", type=_numbers, default=_numbers("1,2,4,8,16,32"))
    parser.add_argument("--depths", type=_numbers, default=_numbers("0,1,2,3"))
    parser.add_argument("--work", type=Path, help="where files are written; the temporary folder if not given")
    parser.add_argument("--out", type=Path, help="a Markdown file; the plot is put beside it")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
