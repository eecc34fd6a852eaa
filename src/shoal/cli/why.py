"""`shoal why`: what happened to a unit or to a node, and by which rule, as its hub or the run's folder tells it.

One screen, with texts where the run's records are here. --all has every lease, check and row of the ledger; --json also
the signed documents behind it: what one needs to appeal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, echo

from shoal.cli import options
from shoal.errors import HubRefused, HubUnreachable, UserError
from shoal.runtime.text import count_of, printable, visible, visible_json

if TYPE_CHECKING:
    from shoal.client import HubClient
    from shoal.hub.service.stories import Stories
    from shoal.protocol import LeaseStory, LedgerEntry, NodeStory, SubmissionStory, UnitStory

UNKNOWN = 404
MAX_EVIDENCE, MAX_REWARDS = 8, 16
MAX_EVENTS = 10  # of each kind
MAX_TEXT, HEAD_LINES = 4, 6  # lines of a text; of what is said about a node
MORE = "--all shows every lease, check and ledger row"
SHOWN = ("step", "credit", "tokens", "reason", "severity", "owner", "verb", "target", "by", "role", "name")


def why(
    what: Annotated[str, Argument(metavar="UNIT|NODE", help="A unit's number, or a node's id or name.")],
    where: options.OptionalPlace = None,
    is_whole: Annotated[bool, Option("--all", help="Show every lease, check and ledger row.")] = False,
    as_json: options.Json = False,
    wait_s: options.Wait = 3,
) -> None:
    """Explain what happened to a unit or a node: which check, which numbers, which rule, and what it cost."""
    from shoal.protocol import UnitStory
    from shoal.run.folder import find_run
    from shoal.run.launch import asking_hub
    from shoal.run.past import past_hub

    place = find_run(where)
    try:
        with asking_hub(place, wait_s) as client:
            story = _story(client, what)
    except HubUnreachable:
        if "://" in place:
            raise
        with past_hub(Path(place)) as stories:
            story = _story(stories, what)
    if as_json:
        return echo(visible_json(story.model_dump_json(indent=2)))
    if isinstance(story, UnitStory):
        lines = unit_lines(story) if is_whole else chain(brief_unit(story, place), [MORE])
    else:
        lines = node_lines(story) if is_whole else chain(brief_node(story), [MORE])
    return echo("\n".join(map(visible, lines)))


def _story(hub: HubClient | Stories, what: str) -> UnitStory | NodeStory:
    from shoal.run.owner import find_node

    try:
        return hub.unit(int(what)) if what.isascii() and what.isdigit() else hub.node(find_node(hub, what))
    except HubRefused as error:
        if error.status != UNKNOWN:
            raise
        raise UserError(str(error)) from error


def brief_unit(story: UnitStory, place: str) -> Iterator[str]:
    yield f"unit {story.unit} (task {printable(story.task)}): {story.state}: {printable(story.sentence)}"
    if not story.submissions:
        return
    last = story.submissions[-1]
    earlier = f"; the last of {len(story.submissions)}" if len(story.submissions) > 1 else ""
    named = f"submission {last.submission[:16]}… of node {last.node[:12]}"
    yield f"{named}, received {moment(last.received_at_ms)}{earlier}"
    verdict = last.verdict.document if last.verdict is not None else {}
    yield from (f"  check {check_line(check)}" for check in verdict.get("checks", ()) if not check.get("passed"))
    yield from (f"  {line}" for line in reward_lines(verdict))
    because = ": ".join(printable(part) for part in (last.reason, last.message) if part)
    yield f"  {last.state}{f' ({because})' if because else ''}; rule: {last.rule}"
    yield from _texts(story.unit, last.submission, place)


def _texts(unit: int, submission: str, place: str) -> Iterator[str]:
    """The worst and the best rollout of a group, from the records of a run that is here."""
    from shoal.cli.rollouts import rollout_lines
    from shoal.records import FOLDER, Records, Wanted

    if "://" in place or not (folder := Path(place) / "hub" / FOLDER).is_dir():
        return
    records = Records(folder)
    group = [each for each in records.find(Wanted("oldest", unit=unit, limit=10**6)) if each.submission == submission]
    scored = sorted(group, key=lambda each: (each.reward is None, each.reward or 0.0))
    previous = None
    for each in records.whole([scored[0], *scored[1:][-1:]] if scored else []):
        yield from rollout_lines(each, previous, MAX_TEXT)
        previous = each


def brief_node(story: NodeStory) -> Iterator[str]:
    yield from islice(node_lines(story), HEAD_LINES)
    for refused in story.refused[:MAX_EVENTS]:
        because = ": ".join(printable(part) for part in (refused.reason, refused.message) if part)
        at_ms = refused.decided_at_ms or refused.received_at_ms
        yield f"{moment(at_ms)} unit {refused.unit} {refused.state}: {because}"


def unit_lines(story: UnitStory) -> Iterator[str]:
    yield f"unit {story.unit} (task {printable(story.task)}): {story.state}: {printable(story.sentence)}"
    for lease in story.leases:
        yield lease_line(lease)
        for submission in story.submissions:
            if submission.lease == lease.lease:
                yield from (f"  {line}" for line in submission_lines(submission))
    yield from map(entry_line, story.ledger)
    if not story.seeds:
        yield "its seeds, and its leases as they were signed, are told once it is decided"


def lease_line(lease: LeaseStory) -> str:
    until = f" to {moment(lease.ended_at_ms)}" if lease.ended_at_ms is not None else ""
    said = f", {lease.progress:,} tokens claimed" if lease.progress else ""
    which = f"lease {lease.lease} of unit {lease.unit} to {lease.node[:12]} under policy {lease.policy.label}"
    return f"{which}, {moment(lease.issued_at_ms)}{until}: {lease.state}: {lease.sentence}{said}"


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
    rewards: list[dict[str, Any]] = verdict.get("rewards") or []
    if not rewards:
        return
    more = f" and {len(rewards) - MAX_REWARDS} more" if len(rewards) > MAX_REWARDS else ""
    shown = " ".join(f"{float(each['value']):.4g}" for each in rewards[:MAX_REWARDS])
    yield f"rewards: {shown}{more}"
    parts: list[dict[str, Any]] = [each.get("parts") or {} for each in rewards]
    sums = {name: sum(float(each.get(name, 0.0)) for each in parts) for name in dict.fromkeys(chain(*parts))}
    if sums:
        means = ", ".join(f"{name} {total / len(rewards):.4g}" for name, total in sums.items())
        yield printable(f"parts, in the mean: {means}")
    if verdict.get("unreproducible"):
        yield printable(f"nobody else can compute again: {', '.join(verdict['unreproducible'])}")


def check_line(check: dict[str, Any]) -> str:
    """`sampling.seed failed: outside=812 limit=14 …: token 3 of sample 0 …`."""
    evidence: dict[str, Any] = check.get("evidence") or {}
    numbers = [f"{name}={each:.4g}" if isinstance(each, float) else f"{name}={each}" for name, each in evidence.items()]
    more = f" and {len(numbers) - MAX_EVIDENCE} more numbers" if len(numbers) > MAX_EVIDENCE else ""
    said = f"{check.get('check')} {'held' if check.get('passed') else 'failed'}"
    parts = (said, " ".join(numbers[:MAX_EVIDENCE]) + more, check.get("message"))
    return ": ".join(printable(str(part)) for part in parts if part)


def node_lines(story: NodeStory) -> Iterator[str]:
    node = story.node
    name = f" ({printable(node.name)})" if node.name else ""
    yield f"node {node.node}{name}, {node.role}: {printable(story.sentence)}"
    trust = f"{'on probation' if node.on_probation else 'established'}, {count_of(story.passed, 'full audit')} passed"
    yield f"trust: {trust} since its last strike, {story.certain} certain and {story.statistical} statistical strikes"
    until = f" until {moment(node.until_ms)}" if node.until_ms is not None else ""
    yield f"liveness: {node.liveness}, last heard of {moment(node.last_seen_ms)}"
    yield f"sanction: {node.state.value}{until}, suspended {count_of(node.suspensions, 'time')}"
    pace = f", a group takes it {story.pace_ms / 1000:.1f} s" if story.pace_ms else ""
    yield f"work: may hold {count_of(node.window, 'lease')}, let {story.lapsed} lapse{pace}"
    judged = f"{node.accepted} accepted, {node.rejected} rejected, {node.unsure} unsure"
    owner = f"; for owner {node.owner[:16]}…" if node.owner else ""
    yield f"earned: {node.credit:,} credit, {node.pending:,} pending; {judged}{owner}"
    if node.role == "worker" and not node.accepted:
        yield "ledger: no rows about it, because none of its work was ever accepted; the hub's database has the rest"
    for _, lines in sorted(_events(story), key=lambda event: event[0]):
        yield from lines
    if len(story.refused) > MAX_EVENTS:
        yield f"and {len(story.refused) - MAX_EVENTS} more refused (--json has them)"


def _events(story: NodeStory) -> Iterator[tuple[tuple[int, int], Iterable[str]]]:
    """What happened to a node, with its time. A rejection is told with the sanction that followed from it."""
    from shoal.protocol.status import behind

    for refused in story.refused[:MAX_EVENTS]:
        lines = [f"refused: unit {refused.unit}, lease {refused.lease}", *map("  {}".format, submission_lines(refused))]
        yield (refused.decided_at_ms or refused.received_at_ms, -1), lines
    for lease in [lease for lease in story.leases if lease.state in ("expired", "void")][:MAX_EVENTS]:
        yield (lease.ended_at_ms or lease.deadline_ms, -1), [lease_line(lease)]
    for entry in (entry for entry in story.ledger if entry.kind != "rejected"):
        lines = [entry_line(entry)]
        for body in behind(entry, story.ledger) if entry.kind == "sanction" else ():
            what = f"unit {body.get('unit')}, submission {str(body.get('submission'))[:16]}…: {body.get('reason')}"
            by = f"({body.get('severity') or 'soft'}), by validator {str(body.get('validator'))[:12]}"
            lines.append(f"  because of {printable(what)} {printable(by)}")
        yield (entry.at_ms, entry.index), lines


def entry_line(entry: LedgerEntry) -> str:
    said = {key: value for key, value in entry.body.items() if key in SHOWN and value not in ("", None)}
    if entry.kind == "sanction":
        until = entry.body.get("until_ms")
        said = {"state": f"{entry.body['state']}{f' until {moment(until)}' if until else ''}", **said}
    details = printable(", ".join(f"{key} {str(value)[:40]}" for key, value in said.items()))
    kind = "order of the run's owner" if entry.kind == "admin" else entry.kind
    return f"{moment(entry.at_ms)} ledger row {entry.index}: {kind}{f': {details}' if details else ''}"


def moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
