"""How fast an origin publishes: a first version whole, then versions in which one value in a hundred changed.

    python benchmarks/publish_speed.py --gigabytes 16 [--changed 0.01] [--versions 3] [--folder DIR]

Ratios are against writing the same payload to one file, without hashing or comparing anything, in the same run. Nothing
is synced in either but what publishing itself syncs (chunks that are offered). Memory is beside the payload itself.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from shoal.protocol import SigningKey, TensorView
from shoal.shardcast import Content, Origin

TENSOR_BYTES = 2**27


def main() -> None:
    options = parse_options()
    tensors = [np.empty(TENSOR_BYTES // 2, np.uint16) for _ in range(round(options.gigabytes * 1e9 / TENSOR_BYTES))]
    source = np.random.default_rng(0)
    for tensor in tensors:
        tensor[:] = source.standard_normal(2**16).astype(np.float16).view(np.uint16).repeat(tensor.size // 2**16)
    size = sum(tensor.nbytes for tensor in tensors)
    began_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        plain_s = min(written_s(tensors, Path(folder) / "plain") for _ in range(2))
        report("written to one file", size, plain_s, plain_s)
        origin = Origin(Path(folder) / "origin", "speed", SigningKey.generate())
        for version in range(options.versions):
            for tensor in tensors if version else ():
                tensor[source.integers(0, tensor.size, round(options.changed * tensor.size))] += 1
            content = Content.of({}, [view_of(number, tensor) for number, tensor in enumerate(tensors)])
            began = time.monotonic()
            manifest = origin.publish(version, content)
            seconds = time.monotonic() - began
            told = "whole" if manifest.anchor else f"a delta of {manifest.deltas[0].size_bytes / size:.2%}"
            report(f"version {version}, {told}", size, seconds, plain_s)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began_kib) / 2**10
    print(f"memory beside the payload: {grown:.0f} MiB; {platform.machine()}, {os.cpu_count()} cores")


def view_of(number: int, tensor: np.ndarray) -> TensorView:
    return TensorView(f"layer.{number}", "BF16", tensor.shape, memoryview(tensor))


def written_s(tensors: list[np.ndarray], path: Path) -> float:
    began = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            file.write(memoryview(tensor).cast("B"))
    seconds = time.monotonic() - began
    path.unlink()
    return seconds


def report(what: str, size: int, seconds: float, plain_s: float) -> None:
    print(f"{what:34} {seconds:7.2f} s {size / 1e9 / seconds:6.2f} GB/s  {plain_s / seconds:.2f} of plain", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--changed", type=float, default=0.01, help="share of values that change per version")
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; the system's temporary folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
