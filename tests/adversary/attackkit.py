"""A whole run in this process, to be attacked: real hub, origin, trainer and validator, each a thread; real sockets.

Everything goes through `run_role`, as the processes of `shoal run` do; what is seen of it is what the hub tells anyone,
and the batches, which it tells the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import shoal.trainer.loop  # noqa: F401 - torch and transformers cannot be imported first by several threads at once
from shoal.cli.folder import RunFolder
from shoal.cli.recipe import Recipe
from shoal.cli.roles import run_role
from shoal.client import ClientOptions, HubClient
from shoal.engines import Completion, Engine, GenerationRequest
from shoal.ledger import verify
from shoal.protocol import BatchGroup, LedgerEntry, NodeView, SigningKey, fingerprint
from shoal.runtime.stop import StopToken
from shoal.worker.cheats import Disguise

DEADLINE_S = 200
STEPS = 3
NEEDED = ("hub", "origin", "trainer", "validator-0")
RECIPE = {
    "run": {"steps": STEPS, "groups_per_step": 4, "group_size": 16, "max_staleness": 1, "max_new_tokens": 10},
    "trainer": {"learning_rate": 1e-4, "grad_clip": 1.0, "weight_decay": 0, "minibatches": 4, "evaluate_every": 0},
    "hub": {"port": 0},
    "relay": {"count": 0},
    "worker": {"count": 1, "units_per_lease": 4, "lease_wait_s": 0.5, "heartbeat_s": 0.5},
    "validator": {"audit_wait_s": 0.5},
}


class Attacked:
    """The run under attack."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder.prepare(folder, Recipe.model_validate(RECIPE))
        self.url = self.folder.assign_endpoints().hub
        self.stop = StopToken()
        self.threads = ThreadPoolExecutor(max_workers=8)
        self.roles: list[Future[None]] = []
        for name in NEEDED:
            self.start(name)

    def start(self, name: str, cheat: str | None = None) -> Future[None]:
        self.roles.append(self.threads.submit(run_role, self.folder, name, self.stop, cheat))
        return self.roles[-1]

    def ending(self, role: Future[None]) -> BaseException | None:
        """What a role ends with; at once an error if one that everybody needs has failed meanwhile."""
        needed = self.roles[: len(NEEDED)]
        wait([role, *(each for each in needed if not each.done())], DEADLINE_S, FIRST_COMPLETED)
        for name, each in zip(NEEDED, needed, strict=True):
            assert not each.done() or each.exception() is None, f"{name}: {each.exception()}"
        return role.exception(DEADLINE_S)

    def close(self) -> None:
        self.stop.set("the test ends")
        for role in self.roles:
            role.exception(DEADLINE_S)
        self.threads.shutdown()

    def client(self, key: SigningKey) -> HubClient:
        pinned = fingerprint(self.folder.root_key)
        return HubClient(self.url, key, self.stop, pinned, options=ClientOptions(patience_s=DEADLINE_S))

    def nodes(self) -> dict[str, NodeView]:
        with _closing(self.client(SigningKey.generate())) as anyone:
            return {node.name: node for node in anyone.status().nodes}

    def ledger(self) -> list[LedgerEntry]:
        """The whole ledger, verified."""
        with _closing(self.client(SigningKey.generate())) as anyone:
            head, entries = anyone.ledger_head(), list[LedgerEntry]()
            while page := anyone.ledger(after=len(entries) - 1).entries:
                entries += page
        verify(entries, head)
        return entries

    def trained(self) -> list[BatchGroup]:
        """Every group of every batch."""
        with _closing(self.client(self.folder.key("trainer"))) as trainer:
            batches = [trainer.batch(step, 0).batch for step in range(STEPS)]
        return [group for batch in batches if batch is not None for group in batch.groups]


@contextmanager
def _closing(client: HubClient) -> Iterator[HubClient]:
    try:
        yield client
    finally:
        client.close()


class Counting(Disguise):
    """Counts the completions that the engine behind a cheat is asked for."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.completions = 0

    def generate(self, requests: Sequence[GenerationRequest], keep_hidden: bool = False) -> list[list[Completion]]:
        self.completions += sum(len(request.seeds) for request in requests)
        return super().generate(requests, keep_hidden)
