"""A model of 8 billion weights on one GPU: every step that a run takes with it, one after another, timed.

    python benchmarks/large_shape.py [--shape 8b] [--tokens 2048] [--folder DIR] [--out FILE.json]     # 60 GB of disk
    OMP_NUM_THREADS=1 python benchmarks/large_shape.py --shape small --tokens 64 --device cpu --dtype float32

Trainer with adapters ─► first version published whole ─► fetched over loopback into a worker's engine ─► a group with
proofs ─► limits measured and the group judged ─► a training step on it ─► a delta published ─► fetched and written
into the running engine, whose weights are hashed. Weights are random: this is about size and speed, not about learning.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stranger_gpu import SHAPES, machine, make_model

from shoal.engines import GenerationRequest, build
from shoal.engines.memory import release_memory
from shoal.engines.shelf import EngineShelf, LoadedPolicy
from shoal.engines.torch import TorchEngine
from shoal.environments import EnvironmentSettings
from shoal.environments import build as build_environment
from shoal.models.state import policy_views
from shoal.protocol import PolicyManifest, ProofParameters, SamplingParameters, SigningKey
from shoal.runtime.stop import StopToken
from shoal.shardcast import Content, Downloader, Origin, OriginSettings, digest_of, run_origin
from shoal.trainer.checkpoint import Copies
from shoal.trainer.learner import Learner, new_learner, starting_model
from shoal.trainer.publisher import views_of
from shoal.trainer.samples import Prepared, Sample
from shoal.trainer.settings import LoraSettings, MemorySettings, TrainerSettings
from shoal.trainer.step import StepWork, train_samples
from shoal.validator.calibrate import Plan, measure, openings
from shoal.validator.judge import Judge
from shoal.validator.verdicts import POLICY, LeaseTemplate, audit_job_of

WAIT_S = 300.0
GIB = 2**30


class Log:
    """Seconds of every step, and the GPU's memory at its peak."""

    def __init__(self, out: Path | None) -> None:
        self.found: dict[str, Any] = {}
        self._out = out

    def timed(self, name: str, action: Callable[[], Any], **more: Any) -> Any:
        began_s = time.monotonic()
        result = action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            more["gpu_peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 1)
            torch.cuda.reset_peak_memory_stats()
        more["host_peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1)
        self.note(name, seconds=round(time.monotonic() - began_s, 2), **more)
        return result

    def note(self, name: str, **figures: Any) -> None:
        self.found[name] = {**self.found.get(name, {}), **figures}
        print(name, figures, flush=True)
        if self._out:
            self._out.write_text(json.dumps(self.found, indent=2) + "\n")


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run(options, Path(folder))


def run(options: argparse.Namespace, folder: Path) -> None:
    log = Log(options.out)
    log.note("machine", shape=options.shape, **{"is": machine(options.device)})
    make_model(folder / "model", options.shape, "bfloat16", options.device)
    release_memory()
    settings = TrainerSettings(
        learning_rate=1e-4, minibatches=1, device=options.device, publish_dtype=options.dtype, lora=LoraSettings(),
        micro_batch_tokens=8192, memory=MemorySettings(precision=options.dtype, recompute=True),
    )  # fmt: skip
    loaded = log.timed("trainer: load", lambda: starting_model(str(folder / "model"), settings))
    learner = log.timed("trainer: adapters", lambda: new_learner(loaded.model, settings))
    log.note("trainer: adapters", trained=sum(each.numel() for each in learner.trained().values()))
    files, eos = dict(loaded.files), (SHAPES[options.shape][0] - 1,)  # no completion ends early
    with published(folder, settings, log, files) as (publish, shelf):
        first = publish(0, learner)
        worker = log.timed("worker: fetch and load", lambda: shelf.get(first.policy, WAIT_S)).engine
        sampling = SamplingParameters(temperature=1.0, max_new_tokens=options.tokens, eos_token_ids=eos)
        environment = build_environment(EnvironmentSettings(name="sort"))
        terms = LeaseTemplate("large", options.group_size, sampling, ProofParameters(), worker.kind, environment.digest)
        task = environment.tasks("train")[0]
        lease = terms.lease(0, loaded.tokenizer.encode(task.prompt), task.id)
        request = GenerationRequest(lease.prompt_ids, lease.seed_numbers, sampling)
        (group,) = log.timed("worker: generate and prove", lambda: worker.generate([request], terms.proof))
        tokens = sum(len(each.token_ids) for each in group)
        log.note("worker: generate and prove", tokens=tokens)
        plan = Plan(openings(loaded.tokenizer), eos)

        def limits() -> Any:
            copy = worker.copied(files, options.dtype)
            return measure(copy, {worker.kind.partition("/")[2]: copy}, plan)

        assert isinstance(worker, TorchEngine)
        found = log.timed("validator: limits", limits)
        log.note("validator: limits", problems=found.problems)
        release_memory()
        judge = Judge(environment, {found.profile.key: found.profile}, second_engine=lambda _policy, _dtype: worker)
        audit_job = audit_job_of(lease, group, worker, SigningKey.generate())
        (verdict,) = log.timed(
            "validator: check", lambda: judge.verdicts([audit_job], LoadedPolicy(POLICY, worker, files)), tokens=tokens
        )
        log.note("validator: check", outcome=verdict.outcome.value, reason=verdict.reason)
        samples = [
            Sample(
                np.array(lease.prompt_ids), each.token_ids.astype(np.int64), each.logprobs.astype(np.float32),
                1.0 if place % 2 else -1.0, np.ones(len(each.token_ids), dtype=np.bool_),
            )
            for place, each in enumerate(group)
        ]  # fmt: skip
        work = Prepared([samples], without_signal=0, rollouts=len(samples), truncated=0)
        for number in range(2):
            said = log.timed(
                f"trainer: step {number}",
                lambda number=number: train_samples(learner, work, StepWork(step=number, temperature=1.0)),
                tokens=tokens,
            )
            log.note(f"trainer: step {number}", loss=said["loss"], grad_norm=said["grad_norm"])
        second = publish(1, learner)
        log.note("publish 1", delta_bytes=sum(each.size_bytes for each in second.deltas), whole=second.size_bytes)
        swapped = log.timed("worker: fetch and swap", lambda: shelf.get(second.policy, WAIT_S)).engine
        assert swapped is worker, "another engine was built"
        views = list(policy_views(worker.model).values())
        same = log.timed("digest of what is in place", lambda: digest_of(files, views, second.chunk_size_bytes))
        assert same == second.policy.digest, "the weights in place are not those that were signed"
    log.note("end", digest_in_place="as signed")


@contextmanager
def published(folder: Path, settings: TrainerSettings, log: Log, files: dict[str, bytes]) -> Iterator[Any]:
    """A function that publishes a learner's weights, and a shelf that fetches what it published over loopback."""
    key, stop, copies = SigningKey.generate(), StopToken(), Copies()
    origin = Origin(folder / "origin", "large", key, settings=OriginSettings())
    urls: list[str] = []
    ready = threading.Event()
    serving = threading.Thread(
        target=run_origin,
        args=(folder / "origin", "127.0.0.1", 0, stop, lambda url: (urls.append(url), ready.set())),
        daemon=True,
    )
    serving.start()
    assert ready.wait(60)
    downloader = Downloader(urls, "large", key.public_key, folder / "cache", stop)
    device, dtype = settings.device, settings.memory.precision
    shelf = EngineShelf(downloader.fetch, lambda given: build("torch", given, device, dtype), 1)

    def publish(version: int, learner: Learner) -> PolicyManifest:
        copied = log.timed(f"trainer: begin copy {version}", lambda: copies.take(learner, False))
        log.timed(f"trainer: copy {version}", copied.arrived)
        views = log.timed(f"trainer: round {version}", lambda: views_of(copied.weights, settings.publish_dtype))
        content = Content.of(files, views)
        size = sum(view.data.nbytes for view in views)
        manifest: PolicyManifest = log.timed(f"publish {version}", lambda: origin.publish(version, content), bytes=size)
        return manifest

    try:
        yield publish, shelf
    finally:
        stop.set("done")
        serving.join(10)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--folder", type=Path, help="on a disk with 60 GB free; the system's temporary folder")
    parser.add_argument("--out", type=Path, help="where the figures are written, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
