"""A run folder with a hub that really serves it, in a thread: real keys, a real database, a made-up environment."""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kit.cast import Run, Running
from kit.hub import FakeEnvironment
from shoal import protocol
from shoal.hub import HubConfig
from shoal.hub.http.server import run_hub
from shoal.hub.service import Hub
from shoal.hub.state import credits, nodes
from shoal.hub.state.commands import AddVerdict, Record, Save
from shoal.hub.state.rows import LeaseRow, LeaseState, SubmissionRow, SubmissionState, UnitRow, UnitState
from shoal.ledger import head_of
from shoal.run.folder import RunFolder, port_of
from shoal.run.recipe import Recipe
from shoal.runtime.config import parse_config
from shoal.shardcast import Origin

RECIPE = "[hub]\nport = 0\n[run]\nname = 'small'\nsteps = 3\ngroups_per_step = 2\ngroup_size = 2\nmax_staleness = 1"


def make_folder(path: Path, *overrides: str) -> RunFolder:
    folder = RunFolder.prepare(path, parse_config(RECIPE, Recipe, "test", overrides))
    folder.assign_endpoints()
    return folder


def hub_config(folder: RunFolder) -> HubConfig:
    endpoints = folder.endpoints
    return HubConfig(
        folder=folder.path / "hub", run_id=folder.run_id, run=folder.recipe.run,
        settings=folder.recipe.hub.model_copy(update={"port": port_of(endpoints.hub)}), environment=FakeEnvironment(),
        encode=lambda task: list(task.prompt.encode()), eos_token_ids=(0,), key=folder.key("hub"),
        root_key=folder.root_key, certificates=folder.certificates, sources=endpoints.sources,
        last_resort=endpoints.last_resort,
    )  # fmt: skip


@contextmanager
def running(run: Run) -> Iterator[str]:
    """The address of a server while it serves."""
    server = Running(run)
    try:
        yield server.url
    finally:
        server.end()


def serving(folder: RunFolder) -> AbstractContextManager[str]:
    """The address of the folder's hub while it serves."""
    return running(partial(run_hub, hub_config(folder)))


def record(hub: Hub, *rows: tuple[str, dict[str, Any]]) -> None:
    """Write entries into the ledger of a hub as its decisions would; credit also onto the node's own row."""
    with hub.context.storage.write() as transaction:
        for kind, body in rows:
            transaction.apply([Record(kind, body, hub.context.clock.now_ms())])
            node = transaction.node(body.get("node", ""))
            if kind == "credit" and node is not None:
                transaction.apply([Save(replace(node, credit=node.credit + body["credit"]), node.state)])
    hub.posting.post()


def join(hub: Hub, key: protocol.SigningKey, name: str, vouch: protocol.SignedDocument | None = None) -> str:
    """Register a worker; returns its node id. It is in the ledger once it has earned."""
    return hub.membership.register(protocol.Registration(public_key=key.public_key, name=name, vouch=vouch)).node


def join_validator(hub: Hub, folder: RunFolder) -> str:
    signed, key = folder.certificate("validator-0"), folder.key("validator-0").public_key
    return hub.membership.register(protocol.Registration(public_key=key, role="validator", certificate=signed)).node


def earn(hub: Hub, folder: RunFolder, node: str, unit: int, tokens: int) -> None:
    """Work of a node is accepted: rows, documents and ledger as a submission and its verdict leave them."""
    run, now_ms, judge = folder.run_id, hub.context.clock.now_ms(), folder.key("validator-0")
    name, lease = hashlib.sha256(b"%d" % unit).hexdigest(), f"u{unit}a0"
    about: dict[str, Any] = {"run": run, "node": node, "unit": unit, "submission": name}
    rewards = tuple(protocol.RolloutReward(value=value) for value in (0.0, 1.0))
    verdict = protocol.Verdict(
        **about, outcome="accepted", rewards=rewards, generated_tokens=tokens, decided_at_ms=now_ms,
        environment_digest=hub.context.config.environment.digest,
    )  # fmt: skip
    signed = protocol.sign_document(verdict, judge).model_dump_json()
    row = LeaseRow(lease, unit, node, 0, f"request-{unit}", 0, 0, "0" * 64, now_ms, now_ms, LeaseState.SUBMITTED)
    with hub.context.storage.write() as transaction:
        before = transaction.node(node)
        assert before is not None
        head = head_of(run, transaction.ledger_last())
        receipt = protocol.Receipt(**about, lease=lease, size_bytes=1, received_at_ms=now_ms, ledger=head)
        submission = SubmissionRow(
            name, lease, unit, node, 0, 0, "0" * 64, 1, now_ms, SubmissionState.ACCEPTED,
            protocol.sign_document(receipt, folder.key("hub")).model_dump_json(), judge.node, generated_tokens=tokens,
        )  # fmt: skip
        after, record = credits.earn(replace(before, accepted=before.accepted + 1), submission, signed, now_ms)
        joined = [] if before.on_chain else nodes.joined(after, now_ms)
        transaction.apply([
            Save(UnitRow(unit, "task", UnitState.TRAINED, submission=name), None), Save(row, None),
            Save(submission, None), AddVerdict(name, signed), Save(after, before.state), *joined, record,
        ])  # fmt: skip
    hub.posting.post()


def batch(step: int) -> tuple[str, dict[str, Any]]:
    return "batch", {"step": step, "units": [], "digest": "d"}


def publish(folder: RunFolder, hub: Hub, version: int) -> None:
    """A policy of one small file, whose signed manifest carries the ledger's head of now."""
    signed = hub.reporting.ledger_head()
    origin = Origin(folder.path / "origin", folder.run_id, folder.key("trainer"))
    origin.publish(version, [protocol.TensorView("w", "F32", (1,), memoryview(bytes([version] * 4)))],
                   ledger_head=protocol.LedgerHead.model_validate(signed.document))  # fmt: skip
