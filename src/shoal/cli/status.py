"""`shoal status`: how a run stands, as tables for people or JSON for programs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from shoal.cli.progress import in_order, latest, waits_line
from shoal.client import ClientOptions, HubClient, split_join_url
from shoal.protocol import RunStatus, SigningKey
from shoal.runtime.stop import StopToken

MAX_ROWS = 40


def show_status(where: str, as_json: bool, wait_s: float) -> None:
    """Ask the hub at a URL, or the hub of a run's folder, and show its answer."""
    options = ClientOptions(patience_s=wait_s, connect_timeout_s=max(1.0, wait_s))
    with closing(HubClient(hub_url(where), SigningKey.generate(), StopToken(), options=options)) as client:
        status = client.status()
    if as_json:
        typer.echo(status.model_dump_json(indent=2))
        return
    console = Console()
    for part in render(status):
        console.print(part)


def hub_url(where: str) -> str:
    if "://" in where:
        return split_join_url(where)[0]
    from shoal.cli.folder import RunFolder

    return RunFolder.open(Path(where)).endpoints.hub


def render(status: RunStatus) -> list[str | Table]:
    """What there is to see, most important first."""
    parts: list[str | Table] = [_headline(status)]
    parts += [f"[bold red]alarm[/] {alarm}" for alarm in status.alarms]
    waits = waits_line(status, most=8)
    if waits:
        parts.append(f"[yellow]waiting[/] {waits}")
    parts.append(_counts(status))
    if status.nodes:
        parts.append(_nodes(status))
    refused = [verdict for verdict in status.verdicts if verdict.outcome != "accepted"]
    parts += [f"unit {v.unit} of {v.node[:8]}: {v.outcome}, {v.reason} {v.message}" for v in refused[-5:]]
    return parts


def _headline(status: RunStatus) -> str:
    reports = in_order(status)
    policy = status.policy.label if status.policy is not None else "none yet"
    state = "finished" if status.finished else f"step {status.step} of {status.steps}"
    numbers = [("reward", "reward_mean"), ("held out", "held_out"), ("staleness", "staleness_mean")]
    measured = [(label, latest(reports, name)) for label, name in numbers]
    shown = "".join(f", {label} {value:.3f}" for label, value in measured if value is not None)
    return f"[bold]{status.run}[/]: {state}, policy {policy}{shown}"


def _counts(status: RunStatus) -> str:
    units = ", ".join(f"{count} {state}" for state, count in status.units.items() if count)
    submissions = ", ".join(f"{count} {state}" for state, count in status.submissions.items() if count)
    return f"units: {units or 'none'}; submissions: {submissions or 'none'}; ledger entries: {status.ledger.index + 1}"


def _nodes(status: RunStatus) -> Table:
    table = Table("node", "name", "role", "state", "ok/bad", "credit", "seen", "doing", box=None)
    for node in status.nodes[:MAX_ROWS]:
        seen_s = max(0, status.now_ms - node.last_seen_ms) / 1000
        table.add_row(
            node.node[:8], node.name, node.role, node.state.value, f"{node.accepted}/{node.rejected}",
            str(node.credit), f"{seen_s:.0f} s", node.doing or node.reason,
        )  # fmt: skip
    return table
