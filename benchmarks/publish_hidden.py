"""Claim: with rollouts that suffice, saving and publishing every version costs the trainer at most 5 % of its time.

    python benchmarks/publish_hidden.py                                              # the built-in model, CPU
    python benchmarks/publish_hidden.py --shape 50m --samples 32 --tokens 256 --steps 4
    python benchmarks/publish_hidden.py --device cuda --shape qwen3-0.6b --samples 512 --tokens 1024 --compile

The real loop (`TrainingRun`) with a real origin folder, checkpoints with fsync and hashes, archive and metrics; only
the hub is a stub, in memory, whose batches are always ready. A step's checkpoint (12 bytes per weight), its delta, its
hashes and its announcement are made beside the training of the next one.

The alternative, in the same run: the same work in front. Its hub hands out a batch only when the version before it is
out, as it must where no rollout may be older than the policy (`max_staleness = 0`).

"Not training" is 1 - train_s / step_s, over all steps but the first, which has nothing beside it and warms things up.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.models.load import load_model
from shoal.protocol import (
    Batch,
    BatchGroup,
    BatchReply,
    EvaluationPage,
    LedgerHead,
    NodeState,
    NodeView,
    PolicyAnnouncement,
    PolicyRef,
    RunInfo,
    RunStatus,
    SamplingParameters,
    SignedDocument,
    SigningKey,
    StepReport,
    TrainingBatch,
    TrainingGroup,
    TrainingRollout,
    open_document,
    pack_logprobs,
    pack_tokens,
)
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.stop import StopToken
from shoal.shardcast.origin import Origin
from shoal.trainer.guards import GuardSettings
from shoal.trainer.learner import make_deterministic, new_learner
from shoal.trainer.loop import TrainingParts, TrainingRun
from shoal.trainer.settings import MemorySettings, TrainerSettings

RUN, KEY = "bench-0123456789ab", SigningKey.from_seed(b"b" * 32)
SHAPES: dict[str, dict[str, Any]] = {
    "50m": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49_152},
    "135m": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
             "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49_152},
    "qwen3-0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                   "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936},
}  # fmt: skip
GROUP = 8


@dataclass
class PlentyHub:
    """In place of `HubClient`: batches made before, given at once, or once their policy is out (`in_front`)."""

    batches: Sequence[Sequence[TrainingGroup]]
    in_front: bool
    newest: PolicyRef | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def run_info(self) -> RunInfo:
        sampling = SamplingParameters(temperature=1.0, max_new_tokens=1 << 16, eos_token_ids=(1,))
        return RunInfo(
            run=RUN, name="bench", root_key=KEY.public_key, certificates=(), sources=(), environment="bench",
            environment_digest="", sampling=sampling, group_size=GROUP,
            max_staleness=0 if self.in_front else 1, steps=len(self.batches),
        )  # fmt: skip

    def status(self) -> RunStatus:
        return RunStatus(
            run=RUN, name="bench", now_ms=0, finished=False, steps=len(self.batches), step=0, policy=self.newest,
            max_staleness=1, units={}, submissions={}, nodes=(), waits=(), verdicts=(), reports=(), alarms=(),
            ledger=self.ledger_head(),
        )  # fmt: skip

    def register(self, name: str, role: Any, certificate: SignedDocument | None) -> NodeView:  # noqa: ARG002
        return NodeView(node=KEY.node, name=name, role=role, state=NodeState.ACTIVE)

    def ledger_head(self) -> LedgerHead:
        return LedgerHead(run=RUN, index=0, hash="ab" * 32)

    def announce(self, signed: SignedDocument) -> None:
        with self.changed:
            self.newest = open_document(signed, PolicyAnnouncement, KEY.public_key).policy
            self.changed.notify_all()

    def batch(self, step: int, wait_s: float) -> BatchReply:
        with self.changed:
            if self.in_front and not self.changed.wait_for(
                lambda: self.newest is not None and self.newest.version >= step, timeout=wait_s
            ):
                return BatchReply(waiting="the policy")
        policy = PolicyRef(incarnation=0, version=step, digest="00" * 32)
        groups = tuple(
            BatchGroup(unit=each.unit, submission="", node="", rewards=(0.0,) * GROUP, policy=policy)
            for each in self.batches[step]
        )
        return BatchReply(batch=Batch(step=step, groups=groups, dropped_groups=0, written_at_ms=0))

    def rollouts(self, step: int) -> TrainingBatch:
        return TrainingBatch(step=step, groups=list(self.batches[step]))

    def report(self, report: StepReport) -> None:
        pass

    def evaluations(self, since: int) -> EvaluationPage:  # noqa: ARG002
        return EvaluationPage(evaluations=())


def main() -> None:
    options = parse_options()
    made = {name: run_once(options, in_front=name == "in front") for name in ("beside", "in front")}
    parameters, rows = made["beside"][0], {name: each[1] for name, each in made.items()}
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    print(
        f"\n{options.shape}: {parameters / 1e6:.1f} M parameters, {options.samples * options.tokens} completion tokens "
        f"per step, a checkpoint every {options.checkpoint_every} steps ({parameters * 12 / 1e6:.0f} MB), on {where}, "
        f"{os.cpu_count()} cores, torch {torch.__version__}; mean of {len(rows['beside'])} steps\n"
    )
    print("| saving and publishing | step | training | copy | wait for it | its work | **not training** |")
    print("|---|---|---|---|---|---|---|")
    for name, measured in rows.items():
        mean = {key: statistics.fmean(row[key] for row in measured) for key in measured[0]}
        waited = mean["publish_wait_s"] + (mean["wait_s"] if name == "in front" else 0)
        print(
            f"| {name} | {mean['step_s']:.3f} s | {mean['train_s']:.3f} s | {mean['copy_s'] * 1e3:.1f} ms | "
            f"{waited * 1e3:.0f} ms | {mean['hidden_s'] * 1e3:.0f} ms | **{not_training(measured):.1%}** |"
        )
    print(f"\nIn front, a step takes {ratio(rows):.2f} times as long.")


def not_training(rows: Sequence[dict[str, float]]) -> float:
    return 1 - sum(row["train_s"] for row in rows) / sum(row["step_s"] for row in rows)


def ratio(rows: dict[str, list[dict[str, float]]]) -> float:
    means = {name: statistics.fmean(row["step_s"] for row in measured) for name, measured in rows.items()}
    return means["in front"] / means["beside"]


def run_once(options: argparse.Namespace, in_front: bool) -> tuple[int, list[dict[str, float]]]:
    """Train all steps; the number of parameters, and the rows but the first."""
    settings = TrainerSettings(
        learning_rate=1e-6,
        minibatches=4,
        device=options.device,
        threads=options.threads,
        evaluate_every=0,
        micro_batch_tokens=options.micro,
        checkpoint_every=options.checkpoint_every,
        publish_dtype="float32" if options.shape == "tiny" else "bfloat16",
        guards=GuardSettings(divergence={"action": "off"}),  # the recorded tokens are nobody's
        memory=MemorySettings(precision="bfloat16" if options.device == "cuda" else "float32", compile=options.compile),
    )
    make_deterministic(settings)
    torch.manual_seed(0)
    model, files = build(options)
    hub = PlentyHub([batch(step, options, model.config.vocab_size) for step in range(options.steps + 1)], in_front)
    folder = Path(tempfile.mkdtemp(prefix="publish-hidden-", dir=options.folder))
    try:
        parts = TrainingParts(
            folder=folder / "trainer",
            hub=hub,
            origin=Origin(folder / "origin", RUN, KEY),
            learner=new_learner(model, settings),
            files=files,
            key=KEY,
        )
        (folder / "trainer").mkdir()
        TrainingRun(parts, StopToken()).run()
        rows = MetricsLog(folder / "trainer" / "metrics.jsonl").rows()
        return sum(each.numel() for each in model.parameters()), rows[1:]
    finally:
        shutil.rmtree(folder)


def build(options: argparse.Namespace) -> tuple[Any, dict[str, bytes]]:
    tiny = load_model("tiny", device="cpu")
    if options.shape == "tiny":
        return tiny.model.to(options.device), dict(tiny.files)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**SHAPES[options.shape], tie_word_embeddings=True, max_position_embeddings=1 << 16)
    with torch.device(options.device):
        model = Qwen3ForCausalLM(config)
    return model, {**tiny.files, "config.json": config.to_json_string(use_diff=False).encode()}


def batch(step: int, options: argparse.Namespace, vocabulary: int) -> list[TrainingGroup]:
    """Groups of random tokens with as many log-probabilities as an untrained model gives them, more or less."""
    random = np.random.default_rng(step)
    groups = []
    for unit in range(options.samples // GROUP):
        rollouts = []
        for place in range(GROUP):
            tokens = random.integers(3, 90, size=options.tokens)
            logprobs = np.full(options.tokens, -np.log(vocabulary), np.float32)
            rollouts.append(TrainingRollout(pack_tokens(tokens), pack_logprobs(logprobs), "eos", float(place % 2)))
        groups.append(
            TrainingGroup(step * 4096 + unit, f"task/{unit}", step, pack_tokens(random.integers(3, 90, 16)), rollouts)
        )
    return groups


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["tiny", *SHAPES], default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--samples", type=int, default=256, help="completions per step")
    parser.add_argument("--tokens", type=int, default=16, help="tokens per completion")
    parser.add_argument("--steps", type=int, default=8, help="steps measured")
    parser.add_argument("--micro", type=int, default=16_384, help="micro_batch_tokens")
    parser.add_argument("--checkpoint-every", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints and origin go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
