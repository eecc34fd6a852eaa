"""Ten thousand workers, a simulated hour: does everything hold, and what does a decision cost?

    python benchmarks/simulated_fleet.py [--workers 10000] [--minutes 60] [--group-s 300] [--seed 0]

The real hub services and decisions over SQLite in memory, under a manual clock (`src/shoal/simulator`): workers of all
paces that come, die and come back, some that lie and return with fresh keys, some that sit on leases; four validators;
a trainer that dies now and then; a hub that is restarted every ten minutes. A worker needs five minutes for a group, as
with a large model; heartbeats come every ten seconds. At the end every invariant is checked (`simulator.invariants`),
the ledger row by row.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from shoal.hub import HubSettings, RunSettings
from shoal.simulator import Scenario, Simulation, WorkerKind, problems


def scenario(workers: int, minutes: float, group_s: float, seed: int) -> Scenario:
    return Scenario(
        workers=(
            WorkerKind(workers * 80 // 100, group_s=group_s, lives_s=3600, away_s=300),
            WorkerKind(workers * 10 // 100, group_s=3 * group_s, spread=0.5),
            WorkerKind(workers * 5 // 100, group_s=group_s / 2, lies=0.2, fresh_keys=True),
            WorkerKind(workers * 5 // 100, delivers=False),
        ),
        seed=seed,
        seconds=minutes * 60,
        run=RunSettings(steps=10**6, groups_per_step=workers // 2, group_size=4, max_staleness=3),
        hub=HubSettings(lease_s=120, lease_hard_s=3600),
        arrive_s=60,
        validators=4,
        audit_s=0.05,
        claims=64,
        equal=10,
        train_s=60,
        trainer_dies=10,
        restarts_s=600,
        down_s=10,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="simulated")
    parser.add_argument("--group-s", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began_s, cpu_s = time.monotonic(), time.process_time()
        simulation = Simulation(Path(folder), scenario(options.workers, options.minutes, options.group_s, options.seed))
        outcome = simulation.run()
        took_s, used_s = time.monotonic() - began_s, time.process_time() - cpu_s
        found = problems(simulation.world)
    print(f"{options.workers} workers, {outcome.seconds / 60:.0f} simulated minutes, seed {options.seed}:")
    print(f"{outcome.events:,} events in {used_s:.0f} s of processor time ({took_s:.0f} s on the clock): ", end="")
    print(f"{used_s / outcome.events * 1e6:.0f} µs an event, {outcome.seconds / used_s:.1f} times as fast as life")
    print(f"steps {outcome.steps}, " + ", ".join(f"{name} {count:,}" for name, count in sorted(outcome.counts.items())))
    print(f"memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB; ledger head {outcome.ledger}")
    print("every invariant holds" if not found else "\n".join(["BROKEN:", *found[:20]]))
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
