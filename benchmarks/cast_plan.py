"""The plan on paper: seconds per training step for a large model and many workers, from measured constants.

    python benchmarks/cast_plan.py [--parameters 32e9] [--workers 1000] [--relay-mbit 1000] [--per-relay 10]

No measurement of its own: the constants below come from the other benchmarks, and each can be given as an option. A
step's weights take, on the slowest road:

    publish ─► origin's uplink ─► relays' uplinks, level by level ─► workers' links ─► apply, verify
               └── these overlap: a chunk is forwarded while the next one arrives ─┘

so transfers count once, at the link that has most to carry (that of a relay with workers behind it: a copy for each of
them and one for its peers), times what the links benchmark found above the ideal, plus a little for every level.
"""

from __future__ import annotations

import argparse
from math import ceil

from cast_parts.report import table


def main() -> None:
    options = parse_options()
    model_bytes = 2 * options.parameters
    rows = []
    for words, size, touched in (("delta", options.delta_share * model_bytes, True), ("full", model_bytes, False)):
        for depth in (1, 2, 3):
            rows.append(_row(options, f"{words}, {size / 1e9:.2f} GB", depth, size, touched))
    print(
        f"{options.parameters:.3g} parameters in bfloat16 ({model_bytes / 1e9:.0f} GB), {options.workers} workers,"
        f" {options.relay_mbit:.0f} Mbit/s relays and origin, {options.per_relay} workers per relay:\n"
    )
    print(table(["", "levels", "relays", "publish", "transfer", "apply and verify", "together"], rows))


def _row(options: argparse.Namespace, words: str, depth: int, size: float, touched: bool) -> list[object]:
    counts = _levels(options, depth)
    rate = options.relay_mbit * 125_000
    below = options.workers / counts[-1]  # what a relay sends to its workers,
    trading = 1.0  # and what it sends to the other relays of its level; an upper relay or the origin sends less
    transfer_s = (below + trading) * size / rate * options.overhead + depth * options.level_s
    model_mb = 2 * options.parameters / 1e6
    publish_s = model_mb / options.publish_mb_s
    apply_s = model_mb / options.apply_mb_s if touched else 0.0  # a whole payload is verified as it arrives
    spent = [publish_s, transfer_s, apply_s]
    return [words, depth, sum(counts), *(f"{seconds:,.0f} s" for seconds in spent), f"**{sum(spent):,.0f} s**"]


def _levels(options: argparse.Namespace, depth: int) -> list[int]:
    counts = [ceil(options.workers / options.per_relay)]
    while len(counts) < depth:
        counts.insert(0, max(1, ceil(counts[0] / options.per_relay)))
    return counts


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Seconds per training step on paper, from measured constants.")
    parser.add_argument("--parameters", type=float, default=32e9)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--relay-mbit", type=float, default=1000.0)
    parser.add_argument("--per-relay", type=int, default=10, help="workers behind a relay, and relays behind a relay")
    parser.add_argument("--delta-share", type=float, default=0.0010, help="delta_codec.py, one step at 1e-6")
    parser.add_argument(
        "--publish-mb-s", type=float, default=2050, help="publish_speed.py, 16 cores, 16 GB: compare, hash"
    )
    parser.add_argument("--apply-mb-s", type=float, default=1000, help="swap_in_place.py: read, apply, hash, write")
    parser.add_argument("--overhead", type=float, default=1.2, help="transfer above the ideal, cast_links.py")
    parser.add_argument("--level-s", type=float, default=0.3, help="what one more level costs, cast_fanout.py")
    return parser.parse_args()


if __name__ == "__main__":
    main()
