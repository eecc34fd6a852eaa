"""A run folder with a hub over it in this process, and clients that act as trainer, worker and validator.

    run = LocalRun(path)      the folder is made (or opened), the hub is up
    run.step()                leases, submissions, verdicts, a batch, the next policy: one whole step
    run.close()               the hub is down; the folder stays

Nothing is generated: completions are three fixed tokens, rewards are given. Policies are published by a real origin,
and checkpoints are files as the trainer's are, so that what is copied looks like a run.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.asgi import AppTransport, InProcess
from kit.hub import fresh_request, submission_body, verdict_on
from kit.roles import prepared, publish, whole_ledger
from shoal.client import HubClient
from shoal.environments import build
from shoal.hub import HubConfig
from shoal.hub.http.app import App
from shoal.ledger import fold
from shoal.models import TextTokenizer, model_folder, read_files
from shoal.protocol import AuditRequest, Lease, LeaseRequest, Receipt, sign_document
from shoal.run.folder import RunFolder
from shoal.runtime.stop import StopToken
from shoal.shardcast import Origin
from shoal.worker.settings import identity

SIZES = {"name": "kept", "steps": 3, "groups_per_step": 2, "group_size": 2, "max_staleness": 0, "max_new_tokens": 4}


@dataclass
class LocalRun:
    """One run folder, one hub, and everybody who talks to it."""

    path: Path
    hub: dict[str, Any] = field(default_factory=dict)
    receipts: list[Receipt] = field(default_factory=list)

    def __post_init__(self) -> None:
        exists = (self.path / "recipe.toml").exists()
        recipe = {"run": SIZES, "hub": {"port": 0, "newcomer_share": 1.0}}
        self.folder = RunFolder.open(self.path) if exists else prepared(self.path, recipe, hub=self.hub)
        self.endpoints = self.folder.endpoints
        self._transport = AppTransport(App(self._config()))
        self._http = InProcess(self._transport)
        names = ("trainer", "validator-0")
        self.trainer, self.validator = (self._client(self.folder.key(name)) for name in names)
        self.worker = self._client(identity(self.path / "worker-0"))
        self.trainer.register("trainer", "trainer", self.folder.certificate("trainer"))
        self.validator.register("validator-0", "validator", self.folder.certificate("validator-0"))
        self.worker.register("worker-0", "worker", None)
        self._origin = Origin(self.path / "origin", self.folder.run_id, self.folder.key("trainer"))
        if self.trainer.status().policy is None:
            self.publish(0)

    def close(self) -> None:
        self.version_at_end = self.version
        self._transport.close()

    @property
    def version(self) -> int:
        policy = self.trainer.status().policy
        return -1 if policy is None else policy.version

    @property
    def finished(self) -> bool:
        return self.trainer.status().finished

    def step(self) -> None:
        """From a policy to the next one."""
        step = self.version
        while (reply := self.trainer.batch(step, 0)).batch is None:
            self.work()
        assert len(reply.batch.groups) == SIZES["groups_per_step"]
        self.trainer.rollouts(step)
        self.checkpoint(step + 1)
        self.publish(step + 1)

    def work(self) -> None:
        """All open units are generated, submitted and accepted."""
        request = LeaseRequest(request=fresh_request(), max_units=4)
        for lease, _ in self.worker.open_leases(self.worker.lease(request)):
            self.receipts.append(self.worker.submit(lease.lease, submission_body(lease)))
        audits = self.validator.audits(AuditRequest(max_audits=8)).audits
        if audits:
            verdicts = [self._verdict(self.validator.open_lease(audit.lease), audit.submission) for audit in audits]
            self.validator.verdicts(verdicts)

    def publish(self, version: int) -> None:
        publish(self._origin, self.trainer, version)

    def checkpoint(self, version: int) -> None:
        folder = self.path / "trainer" / "checkpoints" / f"{version}.0"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint.json").write_text(f'{{"version": {version}}}')
        (folder / "model.safetensors").write_bytes(bytes([version]) * 1000)

    def check(self) -> None:
        """Every receipt is there and judged, no submission is credited twice, the accounts are the ledger's."""
        entries = whole_ledger(self.trainer)
        credited = [entry.body["submission"] for entry in entries if entry.kind == "credit"]
        assert len(credited) == len(set(credited))
        assert {receipt.submission for receipt in self.receipts} <= set(credited)
        [view] = [node for node in self.trainer.status().nodes if node.role == "worker"]
        account = fold(entries).by_node[view.node]
        assert (account.credit, account.accepted) == (view.credit, view.accepted)
        assert len(credited) == view.accepted

    def _client(self, key: Any) -> HubClient:
        return HubClient("http://hub", key, StopToken(), http=self._http)

    def _verdict(self, lease: Lease, submission: str) -> Any:
        return sign_document(verdict_on(lease, submission), self.folder.key("validator-0"))

    def _config(self) -> HubConfig:
        recipe = self.folder.recipe
        tokenizer = TextTokenizer(read_files(model_folder(recipe.model.path)))
        return HubConfig(
            folder=self.path / "hub", run_id=self.folder.run_id, run=recipe.run, settings=recipe.hub,
            environment=build(recipe.environment), encode=lambda task: tokenizer.encode(task.prompt),
            eos_token_ids=tokenizer.eos_token_ids,
            key=self.folder.key("hub"), root_key=self.folder.root_key, certificates=self.folder.certificates,
            sources=self.endpoints.sources,
        )  # fmt: skip
