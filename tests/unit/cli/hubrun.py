"""A run folder with a hub that really serves it, in a thread: real keys, a real database, a made-up environment."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.cli.folder import RunFolder, port_of
from shoal.cli.recipe import Recipe
from shoal.environments import Score, Split, Task
from shoal.hub import HubConfig, run_hub
from shoal.hub.service import Hub
from shoal.hub.state import nodes
from shoal.hub.state.commands import Record, SaveNode
from shoal.ledger import credit_for
from shoal.protocol import LedgerHead, Registration, SigningKey, TensorView
from shoal.runtime.config import parse_config
from shoal.runtime.stop import StopToken
from shoal.shardcast import Origin

RECIPE = "[hub]\nport = 0\n[run]\nname = 'small'\nsteps = 3\ngroups_per_step = 2\ngroup_size = 2\nmax_staleness = 1"
READY_S = 30.0


class Tasks:
    """Ten tasks whose prompts are their names."""

    name, digest = "fake", "e0" * 32

    def __init__(self) -> None:
        self._tasks = [Task(id=f"task-{index}", prompt=f"{index}=", answer="") for index in range(10)]

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks if split == "train" else []

    def task(self, task_id: str) -> Task:
        return next(task for task in self._tasks if task.id == task_id)

    def score(self, task: Task, completion: str) -> Score:
        return Score(0.0)


def make_folder(path: Path, *overrides: str) -> RunFolder:
    folder = RunFolder.prepare(path, parse_config(RECIPE, Recipe, "test", overrides))
    folder.assign_endpoints()
    return folder


def hub_config(folder: RunFolder) -> HubConfig:
    endpoints = folder.endpoints
    return HubConfig(
        folder=folder.path / "hub",
        run_id=folder.run_id,
        run=folder.recipe.run,
        settings=folder.recipe.hub.model_copy(update={"port": port_of(endpoints.hub)}),
        environment=Tasks(),
        encode=lambda task: list(task.prompt.encode()),
        eos_token_id=0,
        key=folder.key("hub"),
        root_key=folder.root_key,
        certificates=folder.certificates,
        sources=endpoints.sources,
        last_resort=endpoints.last_resort,
    )


@contextmanager
def serving(folder: RunFolder) -> Iterator[str]:
    """The address of the folder's hub while it serves."""
    stop, ready = StopToken(), threading.Event()
    thread = threading.Thread(target=run_hub, args=(hub_config(folder), stop, lambda _url: ready.set()))
    thread.start()
    try:
        assert ready.wait(READY_S), "the hub did not start"
        yield folder.endpoints.hub
    finally:
        stop.set("the test is over")
        thread.join(READY_S)


def record(hub: Hub, *rows: tuple[str, dict[str, Any]]) -> None:
    """Write entries into the ledger of a hub as its decisions would; credit also onto the node's own row."""
    with hub.context.storage.write() as transaction:
        for kind, body in rows:
            transaction.apply([Record(kind, body, hub.context.clock.now_ms())])
            node = transaction.node(body.get("node", ""))
            if kind == "credit" and node is not None:
                transaction.apply([SaveNode(replace(node, credit=node.credit + body["credit"]), node.state)])
    hub.posting.post()


def join(hub: Hub, key: SigningKey, name: str) -> str:
    """Register a worker, and write it into the ledger as its first accepted work would; returns its node id."""
    node = hub.membership.register(Registration(public_key=key.public_key, name=name)).node
    with hub.context.storage.write() as transaction:
        row = transaction.node(node)
        assert row is not None
        if not row.on_chain:
            transaction.apply([SaveNode(replace(row, accepted=1), row.state), *nodes.joined(row, row.registered_at_ms)])
    return node


def credit(node: str, submission: str, tokens: int, unit: int = 0) -> tuple[str, dict[str, Any]]:
    body = {"node": node, "unit": unit, "submission": submission, "tokens": tokens, "credit": credit_for(tokens)}
    return "credit", body


def batch(step: int) -> tuple[str, dict[str, Any]]:
    return "batch", {"step": step, "units": [], "digest": "d"}


def publish(folder: RunFolder, hub: Hub, version: int) -> None:
    """A policy of one small file, whose signed manifest carries the ledger's head of now."""
    signed = hub.reporting.ledger_head()
    origin = Origin(folder.path / "origin", folder.run_id, folder.key("trainer"))
    origin.publish(version, [TensorView("w", "F32", (1,), memoryview(bytes([version] * 4)))],
                   ledger_head=LedgerHead.model_validate(signed.document))  # fmt: skip
