"""How small and how fast are deltas of real training steps, against xor + zstd in the same run?

    OMP_NUM_THREADS=1 python benchmarks/delta_codec.py [--snapshots FOLDER] [--out FILE]

Snapshots come from `delta_training.py`, which is run first if they are not there: SmolLM2-135M, policy-gradient steps,
AdamW in float32, published as bfloat16.

    step k ──► step k+1     a delta of one step: bytes as a share of the model's, encode and apply per core
    step k ──► step k+8     one delta over several steps, against the chain of single ones

Both codings see the same blocks of the payload, one after the other, in one thread; time is the processor's. Every
delta is applied, and the result compared with the real weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from cast_parts.report import publish, table

from shoal.shardcast import delta

Weights = npt.NDArray[np.uint16]
WIDTH = 2
SPANS = (2, 4, 8)


@dataclass(frozen=True)
class Codec:
    """A way of coding one block, given as old and new bytes."""

    name: str
    encode: Callable[[memoryview, memoryview], bytes]
    apply: Callable[[memoryview, bytes], object]


@dataclass
class Figures:
    """What was measured of one codec on one kind of delta."""

    shares: list[float] = field(default_factory=list)
    encode_mb_s: list[float] = field(default_factory=list)
    apply_mb_s: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return statistics.median(self.shares)


def xor_encode(old: memoryview, new: memoryview) -> bytes:
    difference = np.frombuffer(old, np.uint64) ^ np.frombuffer(new, np.uint64)
    return zstandard.ZstdCompressor(level=1).compress(difference.data)


def xor_apply(target: memoryview, block: bytes) -> None:
    bits = np.frombuffer(target, np.uint64)
    difference = zstandard.ZstdDecompressor().decompress(block)
    np.bitwise_xor(bits, np.frombuffer(difference, np.uint64), out=bits)


OURS = Codec(
    "shoal",
    lambda old, new: delta.encode_block(old, new, WIDTH),
    lambda target, block: delta.Change.read(BytesIO(block), target.nbytes // WIDTH, WIDTH).apply(target, WIDTH),
)
XOR = Codec("xor + zstd-1", xor_encode, xor_apply)


def main() -> None:
    options = parse_options()
    if not (options.snapshots / "index.json").exists():
        script = Path(__file__).with_name("delta_training.py")
        subprocess.run([sys.executable, str(script), str(options.snapshots)], check=True)
    index = json.loads((options.snapshots / "index.json").read_text())
    rates = [float(rate) for rate in options.rates.split(",")]
    measured = [(rate, Measured(options.snapshots / f"{rate:g}", index["training"]["steps"])) for rate in rates]
    for _, each in measured:
        each.run()
    command = "OMP_NUM_THREADS=1 python benchmarks/delta_codec.py"
    publish("Deltas of real training steps", command, describe(index, measured), options.out)


class Measured:
    """All deltas of one learning rate."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self.changed: list[float] = []
        self.one_ulp: list[float] = []
        self.single = {codec.name: Figures() for codec in (OURS, XOR)}
        self.direct = {span: {codec.name: Figures() for codec in (OURS, XOR)} for span in SPANS}

    def run(self) -> None:
        old = self._load(0)
        for step in range(self._steps):
            new = self._load(step + 1)
            self._note_changes(old, new)
            for codec in (OURS, XOR):
                measure(codec, old, new, self.single[codec.name])
            old = new
        for span in SPANS:
            if span <= self._steps:
                first = self._load(self._steps - span)
                for codec in (OURS, XOR):
                    measure(codec, first, old, self.direct[span][codec.name])

    def chain(self, span: int) -> float:
        """The share of the last `span` single deltas together."""
        return sum(self.single[OURS.name].shares[-span:])

    def _note_changes(self, old: Weights, new: Weights) -> None:
        differ = old != new
        self.changed.append(float(differ.mean()))
        steps = new[differ].astype(np.int32) - old[differ].astype(np.int32)
        self.one_ulp.append(float((np.abs(steps) == 1).mean()))

    def _load(self, step: int) -> Weights:
        weights: Weights = np.load(self._folder / f"{step}.npy")
        return weights


def measure(codec: Codec, old: Weights, new: Weights, figures: Figures) -> None:
    """Encode and apply a whole model; refuse a codec that is not exact."""
    before, after = (memoryview(values.data).cast("B") for values in (old, new))
    cuts = [(at, min(at + delta.BLOCK_BYTES, before.nbytes)) for at in range(0, before.nbytes, delta.BLOCK_BYTES)]
    started_s = time.process_time()
    blocks = [codec.encode(before[begin:end], after[begin:end]) for begin, end in cuts]
    encoded_s = time.process_time() - started_s
    target = old.copy()
    view = memoryview(target.data).cast("B")
    started_s = time.process_time()
    for (begin, end), block in zip(cuts, blocks, strict=True):
        codec.apply(view[begin:end], block)
    applied_s = time.process_time() - started_s
    if not np.array_equal(target, new):
        raise SystemExit(f"{codec.name} did not give the new weights")
    figures.shares.append(sum(map(len, blocks)) / before.nbytes)
    figures.encode_mb_s.append(before.nbytes / 1e6 / encoded_s)
    figures.apply_mb_s.append(before.nbytes / 1e6 / applied_s)


def describe(index: dict[str, Any], measured: Sequence[tuple[float, Measured]]) -> list[str]:
    training = index["training"]
    about = (
        f"SmolLM2-135M ({index['values']:,} weights, {2 * index['values'] / 1e6:.0f} MB as bfloat16),"
        f" {training['steps']} policy-gradient steps per rate, each of {training['groups']} groups of"
        f" {training['group']} completions and {training['minibatches']} AdamW update, after {training['warm_up']} that"
        " only warmed up Adam's moments. Shares are of the model's bytes; medians over the steps. Speeds are MB of"
        " model per second of one core."
    )
    prepared = (
        "The starting weights were prepared (see `delta_training.py`): spread within their bfloat16 rounding, and those"
        " that 4-bit quantisation had rounded to zero spread over its step. That matters: without the second, at 1e-6,"
        " 0.41 % of the values changed, most of them those zeros (0.41 % of the bytes; xor + zstd-1 0.74 %, ratio"
        " 0.56); without either, 4.3 % in the first step and 0.53 % in the third."
    )
    between = "Several steps behind: one direct delta, against a chain of single ones."
    return [about, prepared, _single_table(measured), between, _direct_table(measured)]


def _single_table(measured: Sequence[tuple[float, Measured]]) -> str:
    rows = []
    for rate, each in measured:
        ours, xor = each.single[OURS.name], each.single[XOR.name]
        rows.append([
            f"{rate:g}", _percent(statistics.median(each.changed)), f"{statistics.median(each.one_ulp):.0%}",
            _percent(ours.share), _percent(xor.share), f"{ours.share / xor.share:.2f}",
            _speeds(ours.encode_mb_s), _speeds(ours.apply_mb_s), _speeds(xor.encode_mb_s), _speeds(xor.apply_mb_s),
        ])  # fmt: skip
    return table(
        ["learning rate", "values changed", "of these by one unit", "shoal", "xor + zstd-1", "ratio",
         "encode MB/s", "apply MB/s", "xor encode", "xor apply"], rows,
    )  # fmt: skip


def _direct_table(measured: Sequence[tuple[float, Measured]]) -> str:
    rows = []
    for rate, each in measured:
        for span in SPANS:
            ours, xor = each.direct[span][OURS.name], each.direct[span][XOR.name]
            if ours.shares:
                rows.append([
                    f"{rate:g}", span, _percent(ours.share), _percent(each.chain(span)), _percent(xor.share),
                    f"{ours.share / xor.share:.2f}", _speeds(ours.encode_mb_s), _speeds(ours.apply_mb_s),
                ])  # fmt: skip
    return table(
        ["learning rate", "steps", "direct", "chain", "xor + zstd-1, direct", "ratio", "encode MB/s", "apply MB/s"],
        rows,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3f} %"


def _speeds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f}"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Size and speed of deltas of real training steps.")
    default = Path(tempfile.gettempdir()) / "shoal-delta"
    parser.add_argument("--snapshots", type=Path, default=default, help="made by delta_training.py if missing")
    parser.add_argument("--rates", default="3e-7,1e-6,1e-5")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
