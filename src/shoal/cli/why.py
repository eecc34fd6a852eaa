"""`shoal why`: what happened to a unit or to a node, and by which rule; told by the hub, with the proofs behind it.

shoal why 17            a unit: its leases, submissions, checks with their numbers, what it earned or cost
shoal why NODE          a node: how it stands, what was refused and why, its sanctions with the verdicts behind them
shoal why NODE --json   all of it with the signed documents: what one hands over to appeal
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.errors import HubRefused, HubUnreachable, UserError
from shoal.runtime.text import count_of, printable, visible, visible_json

if TYPE_CHECKING:
    from shoal.client import HubClient
    from shoal.protocol import LeaseStory, LedgerEntry, NodeStory, SubmissionStory, UnitStory

UNKNOWN = 404
MAX_EVIDENCE = 8
MAX_LEASES = 10
MAX_REWARDS = 16
MAX_REFUSED = 10


def why(
    what: Annotated[str, typer.Argument(metavar="UNIT|NODE", help="A unit's number, or a node's id or name.")],
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL|RUN]",
            help="A hub's address or a run's folder.  [default: the run in this folder, or in runs/]",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All of it, with the signed documents.")] = False,
    wait_s: Annotated[float, typer.Option("--wait", min=0, max=86_400, help="Seconds to try to reach the hub.")] = 3,
) -> None:
    """Say what happened to a unit or a node: which check, which numbers, which rule, what it cost."""
    from shoal.cli.status import client_of, when_stopped
    from shoal.run.folder import find_run
    from shoal.runtime.text import shoal_command

    place = find_run(where)
    with closing(client_of(place, wait_s)) as client:
        try:
            text, lines = _told(client, what)
        except HubRefused as error:
            if error.status != UNKNOWN:
                raise
            raise UserError(str(error)) from error
        except HubUnreachable as error:
            if "://" in place:
                raise
            alone = f"start it alone with {shoal_command()} hub --dir {place}, then ask again"
            raise HubUnreachable(f"{when_stopped(Path(place))[1]}. Only its hub can tell: {alone} ({error})") from error
    for line in [visible_json(text)] if as_json else map(visible, lines):
        typer.echo(line)


def _told(client: HubClient, what: str) -> tuple[str, Iterator[str]]:
    """What the hub tells about a unit or a node: for programs, and in words."""
    if what.isascii() and what.isdigit():
        unit = client.unit(int(what))
        return unit.model_dump_json(indent=2), unit_lines(unit)
    from shoal.run.orders import find_node

    node = client.node(find_node(client, what))
    return node.model_dump_json(indent=2), node_lines(node)


# ── a unit ───────────────────────────────────────────────────────────────────────────────────────────────────────


def unit_lines(story: UnitStory) -> Iterator[str]:
    yield f"unit {story.unit} (task {printable(story.task)}): {story.state}: {printable(story.sentence)}"
    for lease in story.leases:
        yield lease_line(lease)
        for submission in story.submissions:
            if submission.lease == lease.lease:
                yield from (f"  {line}" for line in submission_lines(submission))
    yield from entry_lines(story.ledger)
    if not story.seeds:
        yield "its seeds, and its leases as they were signed, are told once it is decided"


def lease_line(lease: LeaseStory) -> str:
    until = f" to {moment(lease.ended_at_ms)}" if lease.ended_at_ms is not None else ""
    said = f", {lease.progress:,} tokens claimed" if lease.progress else ""
    return (
        f"lease {lease.lease} of unit {lease.unit} to {lease.node[:12]} under policy {lease.policy.label}, "
        f"{moment(lease.issued_at_ms)}{until}: {lease.state}: {lease.sentence}{said}"
    )


def submission_lines(submission: SubmissionStory) -> Iterator[str]:
    decided = f", decided {moment(submission.decided_at_ms)}" if submission.decided_at_ms is not None else ""
    yield f"submission {submission.submission[:16]}…, received {moment(submission.received_at_ms)}{decided}"
    verdict = submission.verdict.document if submission.verdict is not None else {}
    if verdict.get("calibration"):
        kind = "" if verdict.get("measured", True) else ", by the limits of its number format"
        yield f"  judged by calibration {printable(verdict['calibration'])}{kind}"
    for check in verdict.get("checks", ()):
        yield f"  check {check_line(check)}"
    yield from (f"  {line}" for line in reward_lines(verdict))
    because = ": ".join(printable(part) for part in (submission.reason, submission.message) if part)
    yield f"  {submission.state}{f' ({because})' if because else ''}; rule: {submission.rule}"
    if submission.credit:
        yield f"  {submission.credit:,} credit for {submission.generated_tokens:,} tokens: {submission.credit_state}"


def reward_lines(verdict: dict[str, Any]) -> Iterator[str]:
    """The rewards, the mean of each of their parts, and which of those nobody else can compute again."""
    rewards: list[dict[str, Any]] = verdict.get("rewards") or []
    if not rewards:
        return
    shown = " ".join(_number(float(each["value"])) for each in rewards[:MAX_REWARDS])
    more = f" and {len(rewards) - MAX_REWARDS} more" if len(rewards) > MAX_REWARDS else ""
    yield f"rewards: {shown}{more}"
    names = dict.fromkeys(name for each in rewards for name in each.get("parts") or {})
    means = [(name, sum(float(each["parts"].get(name, 0.0)) for each in rewards) / len(rewards)) for name in names]
    if means:
        yield printable("parts, in the mean: " + ", ".join(f"{name} {_number(mean)}" for name, mean in means))
    if verdict.get("unreproducible"):
        yield printable(f"nobody else can compute again: {', '.join(verdict['unreproducible'])}")


def check_line(check: dict[str, Any]) -> str:
    """`sampling.seed failed: outside=812 limit=14 …: token 3 of sample 0 …`."""
    evidence: dict[str, Any] = check.get("evidence") or {}
    shown = [f"{name}={_number(value)}" for name, value in list(evidence.items())[:MAX_EVIDENCE]]
    more = f" and {len(evidence) - MAX_EVIDENCE} more numbers" if len(evidence) > MAX_EVIDENCE else ""
    numbers = f": {' '.join(shown)}{more}" if shown else ""
    said = printable(str(check.get("message") or ""))
    outcome = "held" if check.get("passed") else "failed"
    return f"{check.get('check')} {outcome}{printable(numbers)}{f': {said}' if said else ''}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ── a node ───────────────────────────────────────────────────────────────────────────────────────────────────────


def node_lines(story: NodeStory) -> Iterator[str]:
    node = story.node
    name = f" ({printable(node.name)})" if node.name else ""
    yield f"node {node.node}{name}, {node.role}: {printable(story.sentence)}"
    yield (
        f"trust: {'on probation' if node.on_probation else 'established'}, "
        f"{count_of(story.passed, 'full audit')} passed since its last strike, "
        f"{story.certain} certain and {story.statistical} statistical strikes"
    )
    yield f"liveness: {node.liveness}, last heard of {moment(node.last_seen_ms)}"
    until = f" until {moment(node.until_ms)}" if node.until_ms is not None else ""
    yield f"sanction: {node.state.value}{until}, suspended {count_of(node.suspensions, 'time')}"
    pace = f", a group takes it {story.pace_ms / 1000:.1f} s" if story.pace_ms else ""
    yield f"work: may hold {count_of(node.window, 'lease')}, let {story.lapsed} lapse{pace}"
    yield (
        f"earned: {node.credit:,} credit, {node.pending:,} pending; {node.accepted} accepted, {node.rejected} "
        f"rejected, {node.unsure} unsure" + (f"; for owner {node.owner[:16]}…" if node.owner else "")
    )
    if node.role == "worker" and not node.accepted:
        yield "ledger: no rows about it, because none of its work was ever accepted; the hub's database has the rest"
    for _, lines in sorted(_events(story), key=lambda event: event[0]):
        yield from lines
    if len(story.refused) > MAX_REFUSED:
        yield f"and {len(story.refused) - MAX_REFUSED} more refused (--json has them)"


def _events(story: NodeStory) -> Iterator[tuple[tuple[int, int], list[str]]]:
    """What happened to a node, each thing once, with when it did: submissions refused, leases lost, ledger rows."""
    for submission in story.refused[:MAX_REFUSED]:
        lines = [f"refused: unit {submission.unit}, lease {submission.lease}"]
        lines += [f"  {line}" for line in submission_lines(submission)]
        yield (submission.decided_at_ms or submission.received_at_ms, -1), lines
    lost = [lease for lease in story.leases if lease.state in ("expired", "void")]
    for lease in lost[:MAX_LEASES]:
        yield (lease.ended_at_ms or lease.deadline_ms, -1), [lease_line(lease)]
    ordered = [order for entry in story.ledger if entry.kind == "sanction" for order in _orders(entry, story)]
    for entry in story.ledger:
        if entry.kind == "sanction":
            yield (entry.at_ms, entry.index), list(sanction_lines(entry, story))
        elif entry.kind != "rejected" and entry not in ordered:  # those are told with their sanction
            yield (entry.at_ms, entry.index), list(entry_lines([entry]))


def _orders(sanction: LedgerEntry, story: NodeStory) -> list[LedgerEntry]:
    """The owner's orders that a sanction is of: both are written down in the same moment."""
    return [entry for entry in story.ledger if entry.kind == "admin" and entry.at_ms == sanction.at_ms]


def sanction_lines(entry: LedgerEntry, story: NodeStory) -> Iterator[str]:
    """A sanction with the rejections that it followed from, or the order."""
    from shoal.protocol.status import behind

    body = entry.body
    until = f" until {moment(body['until_ms'])}" if body.get("until_ms") else ""
    said = printable(str(body["reason"]))
    yield f"{moment(entry.at_ms)} ledger row {entry.index}: {body['state']}{until}: {said}"
    for order in _orders(entry, story):
        verb, by = (printable(str(order.body.get(name))) for name in ("verb", "by"))
        yield f"  by order of the run's owner ({verb}, ledger row {order.index}, signed by {by[:12]})"
    for rejected in behind(entry, story.ledger):
        yield (
            f"  because of unit {rejected.get('unit')}, submission {str(rejected.get('submission'))[:16]}…: "
            f"{rejected.get('reason')} ({rejected.get('severity') or 'soft'}), by validator "
            f"{str(rejected.get('validator'))[:12]}"
        )


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def entry_lines(entries: Sequence[LedgerEntry]) -> Iterator[str]:
    for entry in entries:
        said = {key: value for key, value in entry.body.items() if key in SHOWN and value not in ("", None)}
        details = printable(", ".join(f"{key} {str(value)[:40]}" for key, value in said.items()))
        yield f"{moment(entry.at_ms)} ledger row {entry.index}: {entry.kind}{f': {details}' if details else ''}"


SHOWN = ("step", "credit", "tokens", "reason", "severity", "owner", "verb", "target", "by", "role", "name")


def moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
