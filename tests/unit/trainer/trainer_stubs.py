"""What a trainer talks to, in memory: a tiny model, groups of rollouts, a hub that fails on request. As a program it is
one rank of a group: `python trainer_stubs.py FOLDER STEPS SETTINGS-JSON`, started as by `torchrun`."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kit.tiny import build_tiny, build_tokenizer, tokenizer_config
from shoal import protocol
from shoal.errors import HubRefused
from shoal.models.load import LoadedModel, adapted
from shoal.models.logprobs import Head, hidden_states, token_logprobs
from shoal.models.lora import AdapterShape
from shoal.models.tokenizer import TextTokenizer
from shoal.protocol import Evaluation, PolicyRef, SamplingParameters, SignedDocument, SigningKey
from shoal.protocol.batch import Batch, BatchReply, TrainingBatch, TrainingGroup, TrainingRollout
from shoal.runtime.stop import StopToken, stop_on_signals
from shoal.shardcast.origin import Origin
from shoal.trainer.checkpoint import CheckpointStore, StoredCheckpoint
from shoal.trainer.learner import Learner, new_learner
from shoal.trainer.loop import TrainingParts, TrainingRun
from shoal.trainer.ranks import join_ranks
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.shards import follow_rank_0, lead_ranks
from shoal.trainer.step import StepWork, train_step

torch.set_num_threads(1)  # tiny models: a second thread on a busy machine only costs

RUN = "test-0123456789ab"
KEY = SigningKey.from_seed(b"t" * 32)
EOS = 1
SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=6, eos_token_ids=(EOS,))
SETTINGS = TrainerSettings(learning_rate=1e-3, minibatches=2, evaluate_every=2, batch_deadline_s=20, device="cpu")


def tiny_model(seed: int = 0, **changes: Any) -> Any:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 48}
    return build_tiny(seed, **{**small, **changes})


def tiny_files(model: Any) -> dict[str, bytes]:
    return {
        "config.json": model.config.to_json_string(use_diff=False).encode(),
        "generation_config.json": b'{"eos_token_id": 1, "pad_token_id": 0}\n',
        "tokenizer.json": build_tokenizer().to_str().encode(),
        "tokenizer_config.json": tokenizer_config().encode(),
    }


def tiny_loaded(settings: TrainerSettings) -> LoadedModel:
    """What a run of these settings starts from: with adapters, if it is they that are trained."""
    model = tiny_model()
    files = tiny_files(model)
    loaded, lora = LoadedModel(model, TextTokenizer(files), files), settings.lora
    return loaded if lora is None else adapted(loaded, AdapterShape(lora.rank, lora.alpha, lora.targets))


def learner(settings: TrainerSettings = SETTINGS, seed: int = 0, **changes: Any) -> Learner:
    return new_learner(tiny_model(seed, **changes), settings)


def weights(of: Learner) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in of.model.named_parameters()}


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def logprobs_of(model: Any, prompt: np.ndarray, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, tokens]))[None]
    with torch.no_grad():
        hidden = hidden_states(model, ids)[0, len(prompt) - 1 : -1]
        return token_logprobs(hidden, Head.of(model), torch.from_numpy(tokens), temperature).logprobs.numpy()


def make_group(
    unit: int, version: int, model: Any, rewards: list[float] | None = None, finishes: list[str] | None = None
) -> TrainingGroup:
    """A group of random completions of random lengths, with the log-probabilities that `model` gives them."""
    random = np.random.default_rng(unit)
    prompt = random.integers(3, 90, size=random.integers(2, 6))
    given = rewards if rewards is not None else [float(value) for value in random.permutation([0.0, 1.0, 0.5, 0.0])]
    rollouts = []
    for index, reward in enumerate(given):
        tokens = random.integers(3, 90, size=random.integers(1, 7))
        finish = finishes[index] if finishes else "eos"
        logprobs = protocol.pack_logprobs(logprobs_of(model, prompt, tokens))
        rollouts.append(TrainingRollout(protocol.pack_tokens(tokens), logprobs, finish, reward))  # type: ignore[arg-type]
    return TrainingGroup(unit, f"task/{unit}", version, protocol.pack_tokens(prompt), rollouts)


@cache
def written_down(steps: int, max_staleness: int) -> list[list[TrainingGroup]]:
    """Three groups per step, as old as the bound allows."""
    behaviour = tiny_model()
    ages = [max(0, step - max_staleness) for step in range(steps)]
    return [[make_group(step * 3 + unit, version, behaviour) for unit in range(3)] for step, version in enumerate(ages)]


def written_batch(step: int, groups: Sequence[TrainingGroup], **fields: Any) -> Batch:
    """What the hub has written down of these groups."""
    written = tuple(
        protocol.BatchGroup(
            unit=group.unit, submission="", node=f"node-{group.unit}",
            policy=PolicyRef(incarnation=0, version=group.version, digest="00" * 32),
            rewards=tuple(rollout.reward for rollout in group.rollouts),
        )
        for group in groups
    )  # fmt: skip
    return Batch(step=step, groups=written, written_at_ms=0, **fields)


class FakeHub:
    """In place of `HubClient`. Batches are fixed in advance, as a hub's are once written down. `before[name]` is
    called, with the step or version, before a call is served: a test raises or stops there. `score` is what validators
    measure of each version that is due, as soon as it is announced; None: they never come."""

    def __init__(self, steps: int = 4, max_staleness: int = 0) -> None:
        self.steps, self.max_staleness = steps, max_staleness
        self.policies: dict[tuple[int, int], str] = {}
        self.reports: dict[int, dict[str, float]] = {}
        self.alarms: dict[int, dict[str, str]] = {}
        self.before: dict[str, Callable[[int], None]] = {}
        self.evaluated: dict[int, Evaluation] = {}
        self.score: Callable[[int], float | None] = lambda _version: 0.25
        self._arrived = threading.Condition()
        self._groups = written_down(steps, max_staleness)
        self._asked: set[int] = set()

    def _hook(self, name: str, number: int) -> None:
        if name in self.before:
            self.before[name](number)

    @property
    def policy(self) -> PolicyRef | None:
        if not self.policies:
            return None
        incarnation, version = max(self.policies)
        return PolicyRef(incarnation=incarnation, version=version, digest=self.policies[incarnation, version])

    def remember(self, origin: Origin) -> None:
        """What an earlier life of the run has published."""
        if (head := origin.head()) is not None:
            self.policies[head.policy.incarnation, head.policy.version] = head.policy.digest

    def run_info(self) -> protocol.RunInfo:
        return protocol.RunInfo(
            run=RUN, name="test", root_key=KEY.public_key, certificates=(), sources=(), environment="stub",
            environment_digest="", sampling=SAMPLING, group_size=4, max_staleness=self.max_staleness, steps=self.steps,
        )  # fmt: skip

    def status(self) -> protocol.RunStatus:
        return protocol.RunStatus(
            run=RUN, name="test", now_ms=0, finished=False, steps=self.steps, step=0, policy=self.policy,
            max_staleness=self.max_staleness, units={}, submissions={}, nodes=(), waits=(), verdicts=(), reports=(),
            alarms=(), ledger=self.ledger_head(),
        )  # fmt: skip

    def ledger_head(self) -> protocol.LedgerHead:
        return protocol.LedgerHead(run=RUN, index=len(self.policies), hash="ab" * 32)

    def announce(self, signed: SignedDocument) -> None:
        ref = protocol.open_document(signed, protocol.PolicyAnnouncement, KEY.public_key).policy
        self._hook("announce", ref.version)
        with self._arrived:
            if self.policies.setdefault((ref.incarnation, ref.version), ref.digest) != ref.digest:
                raise HubRefused(409, "policy.digest", f"policy {ref.label} has another digest")
            if (ref.version % 2 == 0 or ref.version == self.steps) and (score := self.score(ref.version)) is not None:
                self.measure(ref.version, score)
            self._arrived.notify_all()
        self._hook("announced", ref.version)

    def batch(self, step: int, wait_s: float) -> BatchReply:
        """Written down once a version is out that is allowed in it; at first a group is missing."""
        if step not in self._asked:
            self._asked.add(step)
            return BatchReply(waiting="1 more group", accepted=2)
        self._hook("batch", step)
        with self._arrived:
            newest = lambda: max((version for _, version in self.policies), default=-1)  # noqa: E731
            ready = self._arrived.wait_for(lambda: newest() >= step - self.max_staleness, timeout=wait_s)
        if not ready:
            return BatchReply(waiting="3 more groups")
        batch = written_batch(step, self._groups[step], dropped_groups=2, sampled_reward=0.625)
        return BatchReply(batch=batch)

    def rollouts(self, step: int) -> TrainingBatch:
        self._hook("rollouts", step)
        return TrainingBatch(step=step, groups=self._groups[step])

    def report(self, report: protocol.StepReport) -> None:
        self._hook("report", report.step)
        self.reports[report.step] = report.metrics
        self.alarms |= {report.step: report.alarms} if report.alarms else {}

    def evaluations(self, since: int) -> protocol.EvaluationPage:
        """What `evaluated` says of the versions from `since` on."""
        self._hook("evaluations", since)
        found = [each for each in self.evaluated.values() if each.policy.version >= since]
        return protocol.EvaluationPage(evaluations=tuple(sorted(found, key=lambda each: each.policy.version)))

    def measure(self, version: int, mean: float | None, complete: bool = True, partial: bool = False) -> None:
        ref = PolicyRef(incarnation=0, version=version, digest="ab" * 32)
        made = {"policy": ref, "tasks": 8, "scored": 8, "mean": mean, "complete": complete, "partial": partial}
        self.evaluated[version] = Evaluation.model_validate(made)


class Killed(BaseException):
    """Stands for kill -9: nothing in the trainer may catch it."""


def killing(number: int) -> Callable[[int], None]:
    """For `FakeHub.before`: the process dies when that step or version is reached."""

    def kill(reached: int) -> None:
        if reached == number:
            raise Killed

    return kill


def gradients(made: Learner, work: StepWork) -> tuple[list[dict[str, torch.Tensor]], dict[str, float]]:
    """The gradient of every optimizer step of a training step, seen at the optimizer; and the step's numbers."""
    seen: list[dict[str, torch.Tensor]] = []
    named = made.trained()
    made.optimizer.register_step_pre_hook(lambda *_: seen.append({n: p.grad.clone() for n, p in named.items()}))
    return seen, train_step(made, work)


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "trainer" / "metrics.jsonl").read_text().splitlines()]


def changed(**values: Any) -> TrainerSettings:
    return TrainerSettings.model_validate({**SETTINGS.model_dump(), **values})


def stored_in(folder: Path) -> StoredCheckpoint:
    """The newest checkpoint of a folder of checkpoints."""
    stored = CheckpointStore(folder, 2).newest()
    assert stored is not None
    return stored


def run_ranks(folder: Path, world: int, steps: int, settings: TrainerSettings) -> list[tuple[int, str]]:
    """All processes of a group of ranks, from start to end: exit code and output of each. Rank 0 trains a tiny model
    against a hub in memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    given = filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
    shared["PYTHONPATH"] = os.pathsep.join(given)
    command = [sys.executable, __file__, str(folder), str(steps), settings.model_dump_json()]
    each = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)} for rank in range(world)]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ranks = [subprocess.Popen(command, env=environment, **piped) for environment in each]
    try:
        said = [rank.communicate(timeout=240)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


def training_run(
    folder: Path, hub: FakeHub, settings: TrainerSettings = SETTINGS, stop: StopToken | None = None, **parts: Any
) -> tuple[TrainingRun, Learner]:
    """A trainer as a new process would make it: fresh model, real origin, the folder and the hub that there are."""
    made = learner(settings)
    given: dict[str, Any] = {
        "folder": folder / "trainer", "hub": hub, "origin": Origin(folder / "origin", RUN, KEY), "learner": made,
        "files": tiny_files(made.model), "key": KEY, "base_model": "tiny",
    }  # fmt: skip
    return TrainingRun(TrainingParts(**{**given, **parts}), stop or StopToken()), made


def be_rank(folder: Path, steps: int, settings: TrainerSettings) -> None:
    stop, ranks = stop_on_signals(), join_ranks(collective_s=60)
    try:
        if ranks.rank == 0:
            loaded, hub = tiny_loaded(settings), FakeHub(steps)
            hub.remember(Origin(folder / "origin", RUN, KEY))
            made = lead_ranks(loaded, settings, ranks)
            training_run(folder, hub, settings, stop, learner=made, files=dict(loaded.files))[0].run()
        else:
            follow_rank_0(ranks, stop)
    finally:
        if ranks.rank == 0:
            ranks.end()
    ranks.leave()


if __name__ == "__main__":
    be_rank(Path(sys.argv[1]), int(sys.argv[2]), TrainerSettings.model_validate_json(sys.argv[3]))
