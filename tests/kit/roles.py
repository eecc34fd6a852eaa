"""A run whose roles are threads of this process, behind real sockets; its trainer publishes tensors of one number."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shoal.client import HubClient
from shoal.ledger import verify
from shoal.protocol import LedgerEntry, PolicyAnnouncement, PolicyRef, TensorView, sign_document
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe
from shoal.run.roles import run_role
from shoal.runtime.stop import StopToken
from shoal.shardcast import Content, Origin

DEADLINE_S = 60.0
Sections = Mapping[str, dict[str, Any]]
ONE_STEP: Sections = {
    "run": {"steps": 1, "groups_per_step": 1, "group_size": 2, "max_new_tokens": 6},
    "hub": {"port": 0, "refill_cap": 0},  # nobody sorts anything: the step continues without its group
    "relay": {"count": 0},
    "worker": {"engine": "scripted"},
}


def prepared(path: Path, recipe: Sections, **changes: dict[str, Any]) -> RunFolder:
    """The folder of a run with this recipe and these changes to its sections; its addresses are assigned."""
    sections = {name: {**recipe.get(name, {}), **changes.get(name, {})} for name in {*recipe, *changes}}
    folder = RunFolder.prepare(path, Recipe.model_validate(sections))
    folder.assign_endpoints()
    return folder


@contextmanager
def running_roles(folder: RunFolder, *names: str) -> Iterator[dict[str, Future[None]]]:
    """These roles until the block ends."""
    stop = StopToken()
    with ThreadPoolExecutor(len(names)) as threads:
        try:
            yield {name: threads.submit(run_role, folder, name, stop) for name in names}
        finally:
            stop.set("the test ends")


def publish(origin: Origin, trainer: HubClient, version: int, content: Content | None = None) -> PolicyRef:
    """Publish and announce a version: one tensor that holds its number, unless there is other content."""
    head, weights = trainer.ledger_head(), memoryview(np.full(4, version, dtype="<f4")).cast("B")
    policy = origin.publish(version, content or [TensorView("w", "F32", (4,), weights)], ledger_head=head).policy
    announcement = PolicyAnnouncement(run=head.run, policy=policy, created_at_ms=1)
    trainer.announce(sign_document(announcement, trainer.key))
    return policy


def whole_ledger(client: HubClient) -> list[LedgerEntry]:
    """The whole ledger, verified against a head that the hub signed."""
    head, entries = client.ledger_head(), list[LedgerEntry]()
    while page := client.ledger(after=len(entries) - 1).entries:
        entries += page
    verify(entries, head)
    return entries


class ServedRun:
    """A run of one step whose hub, origin and validator run, and whose trainer is this object."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.endpoints, key = folder, folder.endpoints, folder.key("trainer")
        self.client = HubClient(self.endpoints.hub, key, StopToken())
        self.client.register("trainer", "trainer", folder.certificate("trainer"))
        self._origin = Origin(folder.path / "origin", folder.run_id, key)

    def publish(self, version: int) -> None:
        publish(self._origin, self.client, version)

    def train(self) -> None:
        """The only step: wait for its batch, publish what comes after it."""
        for _ in range(int(DEADLINE_S)):
            if self.client.batch(0, wait_s=1).batch is not None:
                return self.publish(1)
        raise AssertionError(self.client.status())

    def workers(self) -> list[str]:
        return [node.name for node in self.client.status().nodes if node.role == "worker"]


@contextmanager
def served_run(folder: RunFolder) -> Iterator[ServedRun]:
    with running_roles(folder, "hub", "origin", "validator-0") as roles:
        run = ServedRun(folder)
        with closing(run.client):
            yield run
    for role in roles.values():
        role.result(DEADLINE_S)
