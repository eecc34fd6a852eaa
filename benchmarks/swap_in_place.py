"""How long does an engine stand still for new weights? Changed values written in place, against a full load.

    python benchmarks/swap_in_place.py [--millions 64] [--device cuda] [--share 0.01] [--out FILE]

A model of plain matrices in bf16; a step that moves the given share of its values by one unit in the last place (the
shares of real training are in results/delta_codec.md). Published by an origin, fetched over loopback by a client that
holds the version before, put into the running model: once by the changes alone, once as a whole. The weights in place
are hashed at the end and must have the digest that was signed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.models.state import apply_state, change_state, policy_views
from shoal.protocol import PolicyManifest, SigningKey
from shoal.runtime.stop import StopToken
from shoal.shardcast import Content, Downloader, Origin, OriginSettings, Payload, digest_of, run_origin

WIDTH = 2048
DEADLINE_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=64, help="parameters of the model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share", type=float, default=0.01, help="share of values that a step changes")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = max(1, options.millions * 1_000_000 // WIDTH**2)
    model = nn.ParameterList([_matrix() for _ in range(layers)])
    running = nn.ParameterList([nn.Parameter(torch.empty_like(weight), False) for weight in model]).to(options.device)
    with tempfile.TemporaryDirectory() as folder:
        rows = list(_measure(model, running, Path(folder), options.share, options.steps))
    table = _table(rows, layers * WIDTH**2, options)
    print(table)
    if options.out is not None:
        options.out.write_text(table + "\n", encoding="utf-8")


def _matrix() -> nn.Parameter:
    return nn.Parameter((0.02 * torch.randn(WIDTH, WIDTH)).bfloat16(), requires_grad=False)


def _measure(
    model: nn.Module, running: nn.Module, folder: Path, share: float, steps: int
) -> Iterator[dict[str, float]]:
    key, stop = SigningKey.generate(), StopToken()
    settings = OriginSettings()
    with _serving(folder / "origin", stop) as url:
        origin = Origin(folder / "origin", "swap", key, settings=settings)
        downloader = Downloader([url], "swap", key.public_key, folder / "cache", stop)
        manifest = _publish(origin, model, 0)
        apply_state(running, _tensors(downloader.fetch(manifest.policy, DEADLINE_S)))
        for version in range(1, steps + 1):
            _step(model, share)
            published, manifest = _timed(lambda version=version: _publish(origin, model, version))
            fetched, payload = _timed(lambda manifest=manifest: downloader.fetch(manifest.policy, DEADLINE_S))
            changes = payload.changes_from(payload.made.begin)
            assert changes is not None, "the version did not come as a delta"
            updated, _ = _timed(lambda changes=changes: change_state(running, changes))
            _check(running, manifest)
            loaded, _ = _timed(lambda payload=payload: apply_state(running, _tensors(payload)))
            _check(running, manifest)
            size = sum(delta.size_bytes for delta in manifest.deltas)
            yield {"publish": published, "fetch": fetched, "update": updated, "load": loaded, "bytes": size}
    stop.set("done")


def _publish(origin: Origin, model: nn.Module, version: int) -> PolicyManifest:
    return origin.publish(version, Content.of({}, list(policy_views(model).values())))


def _tensors(payload: Payload) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in payload.tensors}


def _step(model: nn.Module, share: float) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.view(torch.int16).add_((torch.rand(weight.shape) < share).to(torch.int16))


def _check(running: nn.Module, manifest: PolicyManifest) -> None:
    found = digest_of({}, list(policy_views(running).values()), manifest.chunk_size_bytes)
    assert found == manifest.policy.digest, "the weights in place are not those that were signed"


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


@contextmanager
def _serving(folder: Path, stop: StopToken) -> Iterator[str]:
    urls: list[str] = []
    ready = threading.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    thread = threading.Thread(target=run_origin, args=(folder, "127.0.0.1", 0, stop, on_ready), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield urls[0]
    finally:
        stop.set("done")
        thread.join(10)


def _table(rows: list[dict[str, float]], values: int, options: argparse.Namespace) -> str:
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.processor() or "CPU"
    size = 2 * values / 1e6
    return "\n".join(
        [
            f"{values / 1e6:.0f} M parameters in bf16 ({size:.0f} MB), {options.share:.1%} of the values changed per "
            f"step, weights on {device}, {os.cpu_count()} cores, torch {torch.__version__}; median of {len(rows)}.",
            "",
            "| | ms | MB/s of model size |",
            "|---|---|---|",
            *(
                f"| {words} | {1000 * median[name]:.0f} | {size / median[name]:,.0f} |"
                for name, words in {
                    "publish": "publish: deltas, hashes, disk",
                    "fetch": f"fetch {median['bytes'] / 1e6:.1f} MB, apply on disk, verify (generation continues)",
                    "update": "**the engine stops: changed values in place**",
                    "load": "the engine stops: a full load instead",
                }.items()
            ),
            "",
            f"In place, the pause is {median['load'] / median['update']:.1f} times shorter.",
        ]
    )


if __name__ == "__main__":
    main()
