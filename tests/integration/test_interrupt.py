"""Work that a newer policy has made useless: a real hub, a real origin, torch's engine. The announcement is heard long
before the next regular heartbeat, the next token of each row is the last, and the lease is free again."""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_loop_scripted import DEADLINE_S, PACE, URL, Run

from kit import Patch, eventually
from kit.hub import submission_body, verdict_on
from shoal import protocol
from shoal.client import Intervals
from shoal.engines.registry import ENGINES
from shoal.engines.torch import TorchEngine
from shoal.hub import HubConfig, RunSettings
from shoal.models.load import load_model, model_from_files
from shoal.models.state import policy_views
from shoal.shardcast import Content
from shoal.worker import loop
from shoal.worker.loop import run_worker
from shoal.worker.settings import WorkerConfig

SELDOM = Intervals(PACE.poll_s, heartbeat_s=15.0, patience_s=DEADLINE_S)
ROWS, LONG = 4, 20_000
SOON_S = 5.0  # a third of a heartbeat
NEVER_DRAWN = 5_000
DRAWN: list[tuple[float, int]] = []  # when, and how many tokens of the group there were then


class Spied(TorchEngine):
    def generate(self, requests: Any, proof: Any = None) -> Any:
        tokens = itertools.count(ROWS, ROWS)

        def counted(check: Any) -> None:
            DRAWN.append((time.monotonic(), next(tokens)))
            check()

        return super().generate([replace(each, check=partial(counted, each.check)) for each in requests], proof)


class LongRun(Run):
    """Completions that never end by themselves."""

    def hub_config(self) -> HubConfig:
        return replace(super().hub_config(), eos_token_ids=(NEVER_DRAWN,))

    def publish(self, version: int) -> protocol.PolicyRef:
        files = dict(load_model("tiny").files)
        config = {**json.loads(files["config.json"]), "max_position_embeddings": LONG + 100}
        files["config.json"] = json.dumps(config).encode()
        content = Content.of(files, list(policy_views(model_from_files(files)).values()))
        policy = self.origin.publish(version, content, ledger_head=self.trainer.ledger_head()).policy
        announcement = protocol.PolicyAnnouncement(run=self.id, policy=policy, created_at_ms=1)
        self.trainer.announce(protocol.sign_document(announcement, self.trainer_key))
        return policy

    def step(self, step: int) -> None:
        """Another worker's group, accepted by a validator that believes it, is the step's batch."""
        other, judge = self.client(protocol.SigningKey.from_seed(b"o" * 32)), self.client(self.validator_key)
        other.register("other", "worker", None)
        judge.register("judge", "validator", self.certificates["validator"])
        request = protocol.LeaseRequest(request=f"{step:032x}", max_units=1, wait_s=5.0, held=())
        [(lease, _)] = other.open_leases(other.lease(request))
        other.submit(lease.lease, submission_body(lease))
        [audit] = judge.audits(protocol.AuditRequest(max_audits=1)).audits
        verdict = verdict_on(lease, audit.submission, (0.0, 1.0) * (ROWS // 2))
        assert judge.verdicts([protocol.sign_document(verdict, self.validator_key)]).refused == ()
        assert self.trainer.batch(step, wait_s=5.0).batch is not None


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Patch) -> Iterator[LongRun]:
    DRAWN.clear()
    monkeypatch.setitem(ENGINES, "torch", replace(ENGINES["torch"], make=lambda files, *_: Spied(files)))
    sizes = {"steps": 4, "groups_per_step": 1, "group_size": ROWS, "max_new_tokens": LONG, "max_staleness": 1}
    run = LongRun(tmp_path, RunSettings(name="long", **sizes), lease_s=600)
    yield run
    run.close()


def test_useless_work_stops_with_the_next_token_and_its_lease_is_given_back(run, monkeypatch, record_property):
    heard: list[float] = []
    hear = loop.Worker._hear_of_policy

    def note(self: loop.Worker, reply: Any) -> None:
        hear(self, reply)
        if self._newest is not None and self._newest.version == 2:
            heard.append(time.monotonic())

    monkeypatch.setattr(loop.Worker, "_hear_of_policy", note)
    run.publish(0)
    config = WorkerConfig(
        run.folder / "w", loop.WorkerSettings(device="cpu", dtype="float32"), "torch", URL, run.fingerprint, "w",
        run.http, pace=SELDOM,
    )  # fmt: skip
    run._start(run_worker, config)
    eventually(lambda: DRAWN and DRAWN[-1][1] > 50 * ROWS, DEADLINE_S, run.status)
    run.step(0)
    run.publish(1)
    then = DRAWN[-1][1]
    eventually(lambda: DRAWN[-1][1] > then + 50 * ROWS, DEADLINE_S, "work that can still be trained on continues")
    run.step(1)
    run.publish(2)
    announced_s = time.monotonic()

    def states() -> list[str]:
        return [lease.state for lease in run.trainer.node(run.nodes()["w"].node).leases if lease.policy.version == 0]

    eventually(lambda: states() == ["released"], DEADLINE_S, states)
    first = DRAWN[: next((n for n in range(1, len(DRAWN)) if DRAWN[n][1] < DRAWN[n - 1][1]), len(DRAWN))]
    stopped_s, tokens = first[-1]
    assert sum(at_s > heard[0] for at_s, _ in first) <= 1, "the next token of each row is the last"
    assert heard[0] - announced_s < SOON_S
    assert tokens < ROWS * LONG
    since = tokens - next(tokens for at_s, tokens in reversed(first) if at_s <= announced_s)
    seconds = f"{stopped_s - announced_s:.3f} s (heard after {heard[0] - announced_s:.3f} s)"
    record_property("table", f"{since} tokens of {ROWS} rows in {seconds} after the announcement")
