"""How long the pages' queries take with 10,000 steps, 100,000 rollouts and 1,000 nodes in the records.

    python benchmarks/dashboard_queries.py [--steps N] [--rollouts N] [--nodes N]

A hub with made-up rows answers in this process, over its own HTTP server's code, without a network. "once" is the first
answer after new records, "again" the median of 20 more.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np

from kit.hub import Bench, ok
from shoal.dashboard import DashboardSettings
from shoal.dashboard.site import Site
from shoal.hub.state.commands import Save
from shoal.hub.state.rows import NodeRow
from shoal.protocol import StepReport
from shoal.records import Segments
from shoal.records.schema import NAMES, schema, table_of

GROUP, TOKENS, CHUNK = 10, 64, 200
VIEWS = (
    "overview", "series", "nodes", "policies", "tasks", "rollouts", "rollouts?order=worst", "rollouts?order=changed",
    "rollouts?node=n00000500", "rollouts?text=zebra&limit=20", "rollout/50/3", "ledger",
)  # fmt: skip


def write_records(folder: Path, rollouts: int, nodes: int) -> None:
    segments, rng = Segments(folder), np.random.default_rng(0)
    segments.open()
    names = [name for name in NAMES if str(schema().field(name).type).startswith("list")]
    plain = {name: "" for name in NAMES if str(schema().field(name).type).endswith("string")}
    for start in range(0, rollouts // GROUP, CHUNK):
        rows = []
        for group in range(start, min(start + CHUNK, rollouts // GROUP)):
            outcome = ("accepted", "accepted", "dropped", "rejected")[group % 4]
            for sample in range(GROUP):
                lists = {name: rng.integers(0, 50_000, TOKENS).astype(np.int32) for name in names}
                rows.append({
                    **dict.fromkeys(NAMES, 0), **plain, **lists, "pieces": ["ab"] * TOKENS, "checks": "[]",
                    "parts": [("right", 0.5)],
                    "group": group, "sample": sample, "submission": f"{group:064x}", "unit": group, "kept": True,
                    "outcome": outcome, "reason": "sampling.seed" if outcome == "rejected" else "",
                    "task": f"task-{group % 2000}", "node": f"n{group % nodes:08d}", "version": group // 10,
                    "step": group // 10, "reward": float(rng.random()), "tokens": TOKENS, "completion": "a word " * 20,
                })  # fmt: skip
        segments.append(table_of(rows), (start, f"{start:064x}"))
    segments.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in (("steps", 10_000), ("rollouts", 100_000), ("nodes", 1000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        write_records(Path(place) / "hub" / "records", asked.rollouts, asked.nodes)
        bench = Bench(Path(place) / "hub", settings={"records_gb": 0})
        ok(bench.announce(0))
        with bench.hub.context.storage.write() as transaction:
            metrics = dict.fromkeys(("reward_mean", "sampled_reward", "entropy", "tokens_per_s", "idle_fraction"), 0.5)
            for step in range(asked.steps):
                transaction.put_report(StepReport(step=step, metrics=metrics), 0)
            for number in range(asked.nodes):
                transaction.apply([Save(NodeRow(f"{number:032x}", f"{number:064x}", "worker", f"w{number}", 0), None)])
        bench.app._pages = Site(bench.hub, DashboardSettings(public="all"), "", bench.folder / "records")
        print("| page | once, ms | again, ms | bytes |\n|---|--:|--:|--:|")
        for view in VIEWS:
            taken = []
            for _ in range(21):
                began_s = time.perf_counter()
                answer = bench.http.get(f"/view/{view}", headers={"host": "localhost"})
                taken.append((time.perf_counter() - began_s) * 1000)
                assert answer.status_code == 200, answer.text[:200]
            print(
                f"| {view} | {taken[0]:.0f} | {statistics.median(taken[1:]):.0f} | {len(answer.content):,} |",
                flush=True,
            )
        bench.close()
        bench.hub.close()


if __name__ == "__main__":
    main()
