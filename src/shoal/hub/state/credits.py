"""Credit: earned at once, or pending for a window in which a failed audit of the same node takes it away.

    accepted ─┬─ every group is audited ──────► credit
              └─ audits by reputation ─► pending ─┬─ the window passes, or the run is over (upkeep) ─► credit
                                                  └─ an audit of the node fails ─► void

Each row of the ledger has the hashes of the signed receipt and verdict. A submission's row says how far it is
(`matures_at_ms`), in the same transaction: it moves on once. Credit + pending + void = all that was ever accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.hub.state import Command, Moment, NodeRow, Record, Save, SubmissionRow, pacing
from shoal.ledger import credit_for
from shoal.protocol import document_hash

NEVER_MS = 2**62  # later than any credit matures


def matures_at_ms(moment: Moment) -> int | None:
    return None if moment.rules.audit == "all" else moment.now_ms + moment.rules.credit_window_ms


def due_until_ms(moment: Moment, is_all_judged: bool) -> int:
    """Pending credit is due if it matures until then; at the end of a run, with nothing left to judge, all of it."""
    return NEVER_MS if is_all_judged and pacing.is_finished(moment.rules, moment.progress) else moment.now_ms


def earn(node: NodeRow, accepted: SubmissionRow, verdict: str, now_ms: int) -> tuple[NodeRow, Record]:
    amount, body = credit_for(accepted.generated_tokens), _proven(accepted, verdict)
    if accepted.matures_at_ms is None:
        return replace(node, credit=node.credit + amount), Record("credit", body, now_ms)
    body["matures_at_ms"] = accepted.matures_at_ms
    return replace(node, pending=node.pending + amount), Record("pending", body, now_ms)


def mature(
    due: Sequence[SubmissionRow], nodes: Mapping[str, NodeRow], verdicts: Mapping[str, str], now_ms: int
) -> list[Command]:
    after, commands = dict(nodes), list[Command]()
    for row in due:
        node, amount = after[row.node], credit_for(row.generated_tokens)
        after[row.node] = replace(node, pending=node.pending - amount, credit=node.credit + amount)
        commands.append(Save(replace(row, matures_at_ms=None), row.state))
        commands.append(Record("credit", _proven(row, verdicts[row.submission]), now_ms))
    return commands + [Save(after[name], node.state) for name, node in nodes.items() if after[name] != node]


def void(node: NodeRow, pending: Sequence[SubmissionRow], reason: str, now_ms: int) -> tuple[NodeRow, list[Command]]:
    """The node without its pending credit, which the caller saves, and the other commands."""
    commands: list[Command] = []
    for row in pending:
        commands.append(Save(replace(row, matures_at_ms=None), row.state))
        commands.append(Record("void", {**_body(row), "reason": reason}, now_ms))
    lost = sum(credit_for(row.generated_tokens) for row in pending)
    return replace(node, pending=node.pending - lost), commands


def _proven(row: SubmissionRow, verdict: str) -> dict[str, Any]:
    return {**_body(row), "receipt": document_hash(row.receipt), "verdict": document_hash(verdict)}


def _body(row: SubmissionRow) -> dict[str, Any]:
    return {
        "node": row.node, "unit": row.unit, "submission": row.submission, "tokens": row.generated_tokens,
        "credit": credit_for(row.generated_tokens), "validator": row.validator,
    }  # fmt: skip
