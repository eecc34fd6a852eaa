"""What does a hub carry?

    python benchmarks/hub_load.py [--workers 1000] [--minutes 5] [--group-s 20] [--heartbeat-s 5]
    python benchmarks/hub_load.py --postgres --hubs 2 --round-trip-ms 20 …

Real hub processes over real HTTP on this machine: workers that lease, take their time, submit and send heartbeats, each
request signed; a validator that fetches every submission and judges it; a trainer that asks for batches and their
rollouts and announces versions. Beside it, in the same run and with the same client, a bare endpoint (Starlette on
uvicorn: POST, JSON in, JSON out) in one process: the ratio says what signatures, nonces and decisions cost.

`--postgres` starts a PostgreSQL server of its own, with fsync; `--database` names another. Several hubs share it. With
`--round-trip-ms` each trip of a hub to it takes so much longer: then hubs wait, instead of competing for this machine's
cores, and what one hub and two carry says how far they stand in each other's way.

Reported: latencies of lease and submit, requests a second, requests for each second of the hubs' processor time, their
memory over time. Afterwards the database is opened and compared with what was promised: nothing may be lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from load_parts.fleet import Fleet
from load_parts.servers import RUN, Server, children_cpu_s, key_of
from load_parts.wire import Latencies, Wire

from shoal import ledger
from shoal.hub.state.rows import SubmissionState
from shoal.hub.storage import open_storage
from shoal.ledger import credit_for

CLOSED_LOOP = 16
CLOSED_LOOP_S = 10.0
WARM_UP_S = 10.0
PAGE = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--group-s", type=float, default=20.0, help="seconds that a group takes a worker, on average")
    parser.add_argument("--heartbeat-s", type=float, default=5.0)
    parser.add_argument("--database", default="", help="postgresql://…; else SQLite")
    parser.add_argument("--postgres", action="store_true", help="a PostgreSQL server for this run alone")
    parser.add_argument("--round-trip-ms", type=float, default=0.0, help="how much longer each trip to it takes")
    parser.add_argument("--hubs", type=int, default=1, help="how many share the database")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        database = None
        if options.postgres:
            sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
            from kit.postgres import running_cluster

            database = stack.enter_context(running_cluster(fsync=True))
            options.database = database.create()
        with contextlib.ExitStack() as serving:
            hubs = []
            for _ in range(options.hubs):
                hubs.append(Server.start("hub", f"{folder}/hub", options.database, str(options.round_trip_ms)))
                serving.callback(hubs[-1].stop)
            measure(hubs, options, database.pid if database else None)
        check(Path(folder) / "hub", options.database, options.receipts)


def measure(hubs: list[Server], options: argparse.Namespace, database: int | None) -> None:
    fleet = Fleet([hub.host_and_port for hub in hubs], options.workers, options.group_s, options.heartbeat_s)
    memory: list[tuple[float, float]] = []
    seconds, waits = options.minutes * 60, Counter[str]()

    def used() -> list[float]:
        return [*(hub.cpu_s() for hub in hubs), time.process_time(), children_cpu_s(database) if database else 0.0]

    async def watched() -> tuple[float, list[float]]:
        watching = asyncio.create_task(watch_memory(hubs[0], memory))
        looking = asyncio.create_task(watch_waits(options.database, fleet, waits))
        running = asyncio.create_task(fleet.run(WARM_UP_S + options.workers / 100, seconds))
        while not fleet.latencies.on and not running.done():
            await asyncio.sleep(0.05)
        began_s, before = time.monotonic(), used()
        while fleet.latencies.on and not running.done():
            await asyncio.sleep(0.05)
        took_s, after = time.monotonic() - began_s, used()
        await running
        watching.cancel()
        looking.cancel()
        return took_s, [now_s - then_s for then_s, now_s in zip(before, after, strict=True)]

    took_s, spent = asyncio.run(watched())
    print(f"(this client used {spent[-2] / took_s:.2f} of a core, the database {spent[-1] / took_s:.2f})")
    if waits:
        shown = ", ".join(f"{what} {count / waits.total():.0%}" for what, count in waits.most_common())
        print(f"(connections inside a transaction, {waits.total()} samples: {shown})")
    report(fleet, took_s, sum(spent[: len(hubs)]), spent[-1])
    print_memory(memory)
    compare(hubs[0], options)
    options.receipts = fleet.receipts


async def watch_waits(database: str, fleet: Fleet, waits: Counter[str]) -> None:
    """What the database's connections wait for while they are inside a transaction."""
    if not database:
        return
    import psycopg

    query = """SELECT CASE WHEN state = 'active' THEN COALESCE(wait_event_type || ' ' || wait_event, 'running')
        ELSE 'the hub' END FROM pg_stat_activity WHERE application_name = 'shoal hub' AND state <> 'idle'"""
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        while True:
            await asyncio.sleep(0.05)
            if fleet.latencies.on:
                waits.update(row[0] for row in await (await connection.execute(query)).fetchall())


async def watch_memory(hub: Server, memory: list[tuple[float, float]]) -> None:
    began_s = time.monotonic()
    while True:
        memory.append((time.monotonic() - began_s, hub.rss_mb()))
        await asyncio.sleep(5)


def report(fleet: Fleet, took_s: float, cpu_s: float, database_cpu_s: float) -> None:
    found = fleet.latencies
    total = sum(len(values) for values in found.seconds.values())
    print(f"\n{fleet.workers} workers, {took_s:.0f} s: {fleet.steps} steps, {len(fleet.receipts)} receipts")
    print("\n| call | per second | p50 ms | p99 ms | longest ms |\n|---|---|---|---|---|")
    for kind, values in sorted(found.seconds.items(), key=lambda item: -len(item[1])):
        ordered = sorted(value * 1000 for value in values)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        rate, p50 = len(ordered) / took_s, statistics.median(ordered)
        print(f"| {kind} | {rate:.1f} | {p50:.1f} | {p99:.1f} | {ordered[-1]:.0f} |")
    print(f"\n{total / took_s:.0f} requests/s; {len(fleet.hubs)} hub(s) used {cpu_s / took_s:.2f} of a core: ", end="")
    print(f"{total / cpu_s:.0f} requests for each second of processor time")
    if submitted := len(found.seconds.get("submit", ())):
        each = f"{cpu_s / submitted * 1000:.1f} ms of processor time of the hubs"
        print(f"a submission and all around it: {each}, {database_cpu_s / submitted * 1000:.1f} of the database")
    print(f"answered otherwise than 2xx: {found.refused or 'nothing'}")


def print_memory(memory: list[tuple[float, float]]) -> None:
    parts = [memory[len(memory) * tenth // 10] for tenth in range(10)] + [memory[-1]]
    print("memory (MiB at s): " + ", ".join(f"{rss:.0f} at {at_s:.0f}" for at_s, rss in parts))


def compare(hub: Server, options: argparse.Namespace) -> None:
    """The same client, the same call, as fast as it goes: the hub's heartbeat against a bare endpoint's."""
    bare = Server.start("bare")
    try:
        plain = asyncio.run(closed_loop(bare, options.workers))
        full = asyncio.run(closed_loop(hub, options.workers))
    finally:
        bare.stop()
    print("\n| POST /heartbeat, 16 at a time | requests/s | per second of processor time |\n|---|---|---|")
    print(f"| bare endpoint | {plain[0]:.0f} | {plain[1]:.0f} |")
    print(f"| the hub | {full[0]:.0f} | {full[1]:.0f} |")
    print(f"ratio per core: {full[1] / plain[1]:.2f}  ({options.database.split(':')[0] or 'SQLite'})")


async def closed_loop(server: Server, workers: int) -> tuple[float, float]:
    """(requests/s, requests for each second of the server's processor time)."""
    body = json.dumps({"doing": "generating", "counters": {"tokens": 4096, "busy_s": 12.5}}).encode()
    keys = [key_of(f"worker-{number}") for number in range(workers)]
    latencies, count, end_s = Latencies(), 0, time.monotonic() + CLOSED_LOOP_S

    async def one(number: int) -> None:
        nonlocal count
        wire = Wire(*server.host_and_port, RUN, keys[number], latencies)
        while time.monotonic() < end_s:
            number = (number + CLOSED_LOOP) % len(keys)  # in turn, for a single key would be told to slow down
            wire.key = keys[number]
            status, _answer = await wire.call("heartbeat", "POST", "/heartbeat", body)
            count += status == 200
        wire.close()

    began_s, used_s = time.monotonic(), server.cpu_s()
    await asyncio.gather(*(one(number) for number in range(CLOSED_LOOP)))
    return count / (time.monotonic() - began_s), count / (server.cpu_s() - used_s)


def check(folder: Path, database: str, receipts: dict[str, str]) -> None:
    """Compare the database with what was promised. Raises at the first thing that does not hold."""
    storage = open_storage(database, folder)
    try:
        with storage.read() as reader:
            rows = reader.submissions_named(list(receipts))
            lost = [name for name, lease in receipts.items() if name not in rows or rows[name].lease != lease]
            assert not lost, f"{len(lost)} receipts are not in the database: {lost[:3]}"
            unjudged = [row.unit for row in rows.values() if row.state != SubmissionState.ACCEPTED]
            assert not unjudged, f"{len(unjudged)} submissions were not accepted: {unjudged[:3]}"
            assert all((folder / "blobs" / name).exists() for name in receipts), "bytes are missing"
            entries = []
            while page := reader.ledger_after(len(entries) - 1, PAGE):
                entries += page
            ledger.verify(entries, ledger.head_of(RUN, reader.ledger_last()))
            accounts = ledger.fold(entries).by_node
            earned = sum(credit_for(row.generated_tokens) for row in rows.values())
            given = sum(node.credit for node in reader.nodes())
            assert given == earned == sum(account.credit for account in accounts.values()), (given, earned)
    finally:
        storage.close()
    print(f"nothing lost: {len(receipts)} receipts in the database and judged, {earned} credit, ", end="")
    print(f"{len(entries)} ledger rows verified")


if __name__ == "__main__":
    main()
