"""How long does a broadcast over slow links take, as a multiple of the time that one link needs for the file once?

    sudo python benchmarks/cast_links.py [--size-mb 192] [--mbit 200] [--only links-shoal,far-shoal] [--out FILE]

Machines are network namespaces, links are token buckets (`tc tbf`): needs root. Three topologies:

    links    origin ═ one uplink ═ switch ═ relay, relay;  every relay ═ own link ═ every client
             One copy must leave the origin; a plain tree sends one per relay. Relays that trade need about one.
    strict   every machine has exactly one link, in each direction, to one switch.
             Two relays must send four copies: with four clients a tree needs 2.
    far      origin ═ relay ═ client, 1 Gbit/s, 100 ms round trip (packets are held by this process: no netem needed)

The last client's file counts, from the start of publishing. Copies are the bytes that left the origin's machine,
headers included, divided by the file's. A run that takes longer than `--limit` is cut off.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cast_parts.broadcast import Kind, Node, Outcome, PackageKind, Shape, broadcast, random_file
from cast_parts.delay import Delay
from cast_parts.namespaces import Network, why_not
from cast_parts.report import publish, table

PORT = 8471
RELAYS, CLIENTS = 2, 4
FAR_MBIT, FAR_ROUND_TRIP_MS = 1000.0, 100.0


@dataclass(frozen=True)
class Case:
    """One way of broadcasting in one topology."""

    name: str
    topology: str
    words: str
    package: bool = False
    trade: bool = True


CASES = (
    Case("links-shoal", "links", "shoal"),
    Case("links-tree", "links", "shoal, relays do not trade", trade=False),
    Case("links-package", "links", "shardcast 0.3.2", package=True),
    Case("strict-shoal", "strict", "shoal"),
    Case("strict-tree", "strict", "shoal, relays do not trade", trade=False),
    Case("far-shoal", "far", "shoal"),
    Case("far-package", "far", "shardcast 0.3.2", package=True),
)


@dataclass(frozen=True)
class Result:
    case: Case
    outcome: Outcome
    once_s: float
    copies: float


def main() -> None:
    options = parse_options()
    problem = why_not()
    if problem:
        print(problem)
        return
    cases = [case for case in CASES if not options.only or case.name in options.only.split(",")]
    with tempfile.TemporaryDirectory(dir=options.work, prefix="cast-") as folder:
        results = []
        for case in cases:
            results.append(measure(case, options, Path(folder)))
            print(_line(results[-1]), flush=True)
    report(options, results)


def measure(case: Case, options: argparse.Namespace, work: Path) -> Result:
    file = random_file(work / "file.bin", options.size_mb * 1_000_000)
    kind = PackageKind(options.package_env) if case.package else Kind(work)
    mbit = FAR_MBIT if case.topology == "far" else options.mbit
    once_s = options.size_mb * 8 / mbit
    with Network() as network, Delay() as delay:
        shape = TOPOLOGIES[case.topology](network, case, options.mbit, delay)
        before = network.sent_bytes("origin")
        outcome = broadcast(kind, shape, file, work / "run", options.limit)
        copies = (network.sent_bytes("origin") - before) / file.stat().st_size
    return Result(case, outcome, once_s, copies)


def links(network: Network, case: Case, mbit: float, delay: Delay) -> Shape:  # noqa: ARG001
    """Own links between relays and clients; what the origin sends goes through its one uplink."""
    origin = _origin(network, mbit)
    relays = [_relay(network, number, origin, case, mbit) for number in range(RELAYS)]
    clients = []
    for client in range(CLIENTS):
        name = f"client-{client}"
        network.lonely(name)
        hosts = []
        for relay in range(RELAYS):
            address = f"10.8.{client}.{4 * relay}"
            hosts.append(address[:-1] + str(4 * relay + 1))
            network.link(f"relay-{relay}", hosts[-1], name, address[:-1] + str(4 * relay + 2), mbit)
        sources = tuple(f"http://{host}:{PORT}" for host in hosts)
        clients.append(Node(name, sources=sources, prefix=network.prefix(name)))
    return Shape(origin, tuple(relays), tuple(clients))


def strict(network: Network, case: Case, mbit: float, delay: Delay) -> Shape:  # noqa: ARG001
    """One link for every machine."""
    origin = _origin(network, mbit)
    relays = [_relay(network, number, origin, case, mbit) for number in range(RELAYS)]
    clients = []
    for number in range(CLIENTS):
        name, host = f"client-{number}", f"10.9.2.{number + 1}"
        network.machine(name, host, mbit)
        sources = tuple(relay.url for relay in relays)
        clients.append(Node(name, host, PORT, sources, (), (origin.url,), network.prefix(name)))
    return Shape(origin, tuple(relays), tuple(clients))


def far(network: Network, case: Case, mbit: float, delay: Delay) -> Shape:  # noqa: ARG001
    """A chain of two long links."""
    for name in ("origin", "relay-0", "client-0"):
        network.lonely(name)
    delay.link(network, ("origin", "10.10.1.1"), ("relay-0", "10.10.1.2"), FAR_MBIT, FAR_ROUND_TRIP_MS / 2)
    delay.link(network, ("relay-0", "10.10.2.1"), ("client-0", "10.10.2.2"), FAR_MBIT, FAR_ROUND_TRIP_MS / 2)
    origin = Node("origin", "10.10.1.1", PORT, prefix=network.prefix("origin"))
    relay = Node("relay-0", "0.0.0.0", PORT, (origin.url,), prefix=network.prefix("relay-0"))
    client = Node("client-0", sources=(f"http://10.10.2.1:{PORT}",), prefix=network.prefix("client-0"))
    return Shape(origin, (relay,), (client,))


TOPOLOGIES: dict[str, Callable[[Network, Case, float, Delay], Shape]] = {"links": links, "strict": strict, "far": far}


def _origin(network: Network, mbit: float) -> Node:
    network.machine("origin", "10.9.0.1", mbit)
    return Node("origin", "10.9.0.1", PORT, prefix=network.prefix("origin"))


def _relay(network: Network, number: int, origin: Node, case: Case, mbit: float) -> Node:
    name = f"relay-{number}"
    hosts = [f"10.9.1.{each + 1}" for each in range(RELAYS)]
    network.machine(name, hosts[number], mbit)
    others = tuple(f"http://{host}:{PORT}" for host in hosts if host != hosts[number])
    peers = others if case.trade and not case.package else ()
    node = Node(name, "0.0.0.0", PORT, (origin.url,), peers, prefix=network.prefix(name))
    return dataclasses.replace(node, host=hosts[number]) if case.topology == "strict" else node


def report(options: argparse.Namespace, results: Sequence[Result]) -> None:
    rows = [
        [
            result.case.topology,
            result.case.words,
            "cut off" if result.outcome.wall_s is None else f"{result.outcome.wall_s:.1f} s",
            _multiple(result, options.limit),
            f"{result.copies:.2f}",
        ]
        for result in results
    ]
    parts = [
        f"{options.size_mb} MB of random bytes, origin → {RELAYS} relays → {CLIENTS} clients, {options.mbit:.0f} Mbit/s"
        f" links ({options.size_mb * 8 / options.mbit:.1f} s for the file once); far: one relay, one client,"
        f" {FAR_MBIT:.0f} Mbit/s, {FAR_ROUND_TRIP_MS:.0f} ms round trip on each link. A run is cut off after"
        f" {options.limit:.0f} s.",
        table(["topology", "", "last client", "times one link, once", "copies that left the origin"], rows),
    ]
    publish("A broadcast over slow links", "sudo python benchmarks/cast_links.py", parts, options.out)


def _multiple(result: Result, limit_s: float) -> str:
    wall_s = result.outcome.wall_s
    return f"> {limit_s / result.once_s:.1f}" if wall_s is None else f"**{wall_s / result.once_s:.2f}**"


def _line(result: Result) -> str:
    wall = "cut off" if result.outcome.wall_s is None else f"{result.outcome.wall_s:.1f} s"
    return f"{result.case.name}: {wall}, {result.copies:.2f} copies {result.outcome.problem}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A broadcast over slow links, in network namespaces.")
    parser.add_argument("--size-mb", type=int, default=192)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--only", default="", help=f"some of {', '.join(case.name for case in CASES)}")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds after which a run is cut off")
    parser.add_argument("--package-env", type=Path, default=Path(tempfile.gettempdir()) / "shardcast-env")
    parser.add_argument("--work", type=Path, help="where files are written; the temporary folder if not given")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if shutil.which("wget") is None:
        parser.error("the package needs wget; install it")
    return options


if __name__ == "__main__":
    main()
