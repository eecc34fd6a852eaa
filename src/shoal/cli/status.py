"""`shoal status`: how a run stands, as tables for people or JSON for programs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from shoal.cli.printing import console, sheet
from shoal.client import HubClient, split_join_url
from shoal.client.known_hubs import known_root
from shoal.errors import HubUnreachable
from shoal.protocol import NodeState, NodeView, RunStatus, fingerprint
from shoal.run.progress import in_order, labels, latest, reward_of, verdict_line, waits_line
from shoal.run.watchdog import lag_line, owner_line
from shoal.runtime.metrics import MetricsLog
from shoal.runtime.text import shoal_command, visible, visible_json

MAX_ROWS = 40
MAX_REFUSED = 5


def show_status(where: str, as_json: bool, wait_s: float) -> None:
    """Ask the hub at a URL, or the hub of a run's folder, and show its answer."""
    with closing(client_of(where, wait_s)) as client:
        try:
            status = client.status()
        except HubUnreachable as error:
            if "://" in where:
                raise
            finished, sentence = when_stopped(Path(where))
            if not finished or as_json:
                raise HubUnreachable(f"{sentence} ({error})") from error
            typer.echo(sentence)
            return
    if as_json:
        typer.echo(visible_json(status.model_dump_json(indent=2)))
        return
    out = console()
    for part in render(status):
        out.print(visible(part) if isinstance(part, str) else part)


def client_of(where: str, wait_s: float) -> HubClient:
    """A client of the hub at a URL, or of a run's folder; held to the root key that is known of it, if any is."""
    if "://" in where:
        url, pinned = split_join_url(where)
        root = known_root([url], pinned)
    else:
        from shoal.run.folder import RunFolder

        folder = RunFolder.open(Path(where))
        url, root = folder.endpoints.hub, fingerprint(folder.root_key)
    return HubClient.of_a_person(url, wait_s, root)


def when_stopped(path: Path) -> tuple[bool, str]:
    """What a folder can say of a run whose hub does not answer: whether it is finished, and how it stands."""
    from shoal.run.folder import RunFolder

    steps, rows = RunFolder.open(path).recipe.run.steps, MetricsLog(path / "trainer" / "metrics.jsonl").rows()
    done = max((int(row["step"]) for row in rows), default=0)
    scores = [row["held_out"] for row in rows if "held_out" in row]
    score = f", held-out score {scores[0]:.3f} → {scores[-1]:.3f}" if scores else ""
    if done >= steps:
        export = path / "trainer" / "export"
        measure = f"to measure it: {shoal_command()} eval {path} --env SPEC"
        return True, f"the run in {path} is finished: {steps} steps{score}; its model is in {export}; {measure}"
    again = f"{shoal_command()} run --dir {path}"
    return False, f"the run in {path} is not running: {done} of {steps} steps{score}; go on with: {again}"


def render(status: RunStatus) -> list[str | Table]:
    """What there is to see, most important first."""
    parts: list[str | Table] = [_headline(status)]
    parts += [f"[bold yellow]owner[/] {escape(line)}" for line in (owner_line(status),) if line]
    parts += [f"[bold red]ledger[/] {escape(line)}" for line in (lag_line(status),) if line]
    parts += [f"[bold red]standstill[/] {escape(sentence)}" for sentence in status.standstill]
    parts += [f"[bold red]alarm[/] {escape(alarm)}" for alarm in status.alarms]
    waits = waits_line(status, most=8)
    if waits:
        parts.append(f"[yellow]waiting[/] {escape(waits)}")
    parts.append(_counts(status))
    parts += [line for line in (_tasks(status),) if line]
    if status.nodes:
        heads = ("node", "name", "role", "state", "ok/bad", "credit", "seen", "doing")
        rows = [_row(node, status.now_ms) for node in status.nodes[:MAX_ROWS]]
        parts.append(sheet(heads, rows, ("doing", "name")))
    total = sum(status.node_counts.values())
    if total > min(len(status.nodes), MAX_ROWS):
        counts = ", ".join(f"{count} {name}" for name, count in sorted(status.node_counts.items()))
        parts.append(f"{min(len(status.nodes), MAX_ROWS)} of {total} nodes are shown: {counts}")
    refused = [verdict for verdict in status.verdicts if verdict.outcome != "accepted"]
    refused.sort(key=lambda verdict: verdict.decided_at_ms)
    names = labels(status.nodes)
    parts += [escape(verdict_line(verdict, names)) for verdict in refused[-MAX_REFUSED:]]
    return parts


def _headline(status: RunStatus) -> str:
    reports = in_order(status)
    policy = status.policy.label if status.policy is not None else "none yet"
    state = "finished" if status.finished else f"step {status.step} of {status.steps}"
    rewards = [reward for report in reports if (reward := reward_of(report.metrics)) is not None]
    measured = [
        ("reward", rewards[-1] if rewards else None),
        ("held out", latest(reports, "held_out")),
        ("staleness", latest(reports, "staleness_mean")),
    ]
    shown = "".join(f", {label} {value:.3f}" for label, value in measured if value is not None)
    return f"[bold]{escape(status.run)}[/]: {state}, policy {policy}{shown}"


def _counts(status: RunStatus) -> str:
    units = ", ".join(f"{count} {state}" for state, count in status.units.items() if count)
    submissions = ", ".join(f"{count} {state}" for state, count in status.submissions.items() if count)
    missed = f" ({status.no_sample} could not be scored: no reward)" if status.no_sample else ""
    ledger = f"ledger entries: {status.ledger.index + 1}"
    return f"units: {units or 'none'}; submissions: {submissions or 'none'}{missed}; {ledger}"


def _tasks(status: RunStatus) -> str:
    """How hard the tasks are that were seen, and what is being measured on held-out ones; empty if there is neither."""
    pools = ", ".join(f"{count} {pool}" for pool, count in sorted(status.pools.items()))
    measured = [
        f"measuring version {each.policy.version}: {each.scored} of {each.tasks} held-out tasks"
        for each in status.evaluations
        if not each.complete
    ]
    return "; ".join([*([f"tasks seen: {pools}"] if pools else []), *measured])


def _row(node: NodeView, now_ms: int) -> tuple[str, ...]:
    credit = f"{node.credit} + {node.pending} pending" if node.pending else str(node.credit)
    seen_s = max(0, now_ms - node.last_seen_ms) / 1000
    done, doing = f"{node.accepted}/{node.rejected}", node.doing or node.reason
    return node.node[:8], node.name, node.role, _standing(node), done, credit, f"{seen_s:.0f} s", doing


def _standing(node: NodeView) -> str:
    """A newcomer is active, but not yet much trusted: it gets less work. Who is not heard of is not here."""
    if node.state is NodeState.ACTIVE and node.liveness != "here":
        return node.liveness
    return "probation" if node.on_probation and node.state is NodeState.ACTIVE else node.state.value
