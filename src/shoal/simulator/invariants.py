"""What must hold after any simulated run, in the middle of it too: each broken one is a sentence.

receipts ─► in the database, with the same bytes        credit ─► the sum of verdicts, and the ledger's
units ─► in one active lease, in one batch              batches ─► within staleness, written once, without lies
"""

from collections import Counter
from collections.abc import Iterator

from shoal import ledger
from shoal.hub.state import SubmissionState, UnitState, pacing
from shoal.hub.state.units import VOID_STALE
from shoal.hub.storage import Reader
from shoal.ledger import credit_for
from shoal.protocol import LedgerEntry, NodeState
from shoal.simulator.world import RUN, World

PAGE = 1000


def problems(world: World) -> list[str]:
    with world.storage.read() as reader:
        found = (check(world, reader) for check in (_receipts, _units, _credit, _batches, _ledger))
        return [sentence for sentences in found for sentence in sentences]


def _receipts(world: World, reader: Reader) -> Iterator[str]:
    known = reader.submissions_named(list(world.receipts))
    for name, receipt in world.receipts.items():
        row = known.get(name)
        if row is None or (row.lease, row.node, row.unit) != (receipt.lease, receipt.node, receipt.unit):
            yield f"the submission {name[:16]} of lease {receipt.lease} got a receipt and is not there"
        elif not world.blobs.has(name):
            yield f"the bytes of {name[:16]} are lost"


def _units(world: World, reader: Reader) -> Iterator[str]:
    holdings = reader.holdings()
    held = Counter(holding.unit.unit for holding in holdings)
    yield from (f"unit {unit} is in {count} active leases" for unit, count in held.items() if count > 1)
    for holding in holdings:
        overtaken = holding.unit.state == UnitState.VOID and holding.unit.reason == VOID_STALE  # paid, not trained on
        if holding.unit.state != UnitState.LEASED and not overtaken:
            yield f"unit {holding.unit.unit} is {holding.unit.state.value} and leased to {holding.lease.node[:8]}"
        if (node := reader.node(holding.lease.node)) is None or node.state == NodeState.BANNED:
            yield f"the banned node {holding.lease.node[:8]} holds lease {holding.lease.lease}"
    leased = [unit.unit for unit in reader.alive_units() if unit.state == UnitState.LEASED]
    yield from (f"unit {unit} is leased to nobody" for unit in leased if unit not in held)
    progress, rules = reader.progress(), world.rules
    if progress.alive > pacing.cap(rules, progress):
        yield f"{progress.alive} units are alive at step {progress.next_step}"
    by_node = Counter(holding.lease.node for holding in holdings)
    most = rules.leases_per_node
    yield from (f"node {node[:8]} holds {count} leases" for node, count in by_node.items() if count > most)


def _credit(world: World, reader: Reader) -> Iterator[str]:
    """What a node has is what validators gave it, neither more nor less; honest ones are never banned."""
    final: Counter[str] = Counter()
    pending: Counter[str] = Counter()
    liars = set()
    for row in reader.submissions_in(list(SubmissionState), len(world.receipts) + 1):
        if row.submission in world.lies:
            liars.add(row.node)
        if row.matures_at_ms is not None:
            pending[row.node] += credit_for(row.generated_tokens)
        elif row.state == SubmissionState.ACCEPTED and world.rules.audit == "all":
            final[row.node] += credit_for(row.generated_tokens)
    for node in reader.nodes():
        if world.rules.audit == "all" and node.credit != final[node.node]:
            yield f"node {node.node[:8]} has credit {node.credit}, its verdicts give {final[node.node]}"
        if node.pending != pending[node.node]:
            yield f"node {node.node[:8]} has {node.pending} pending, its submissions {pending[node.node]}"
        if node.state == NodeState.BANNED and node.node not in liars:
            yield f"node {node.node[:8]} is banned and never lied: {node.reason}"


def _batches(world: World, reader: Reader) -> Iterator[str]:
    trained: Counter[int] = Counter()
    for step, seen in world.batches.items():
        if reader.batch(step) != seen:
            yield f"the batch of step {step} has changed"
        for group in seen.groups:
            trained[group.unit] += 1
            if step - group.policy.version > world.rules.max_staleness:
                yield f"unit {group.unit} of version {group.policy.version} is too stale for step {step}"
            if group.submission in world.lies and world.rules.audit == "all":
                yield f"step {step} was trained on a lie: unit {group.unit}"
    yield from (f"unit {unit} is in {count} batches" for unit, count in trained.items() if count > 1)
    if world.counts["batches changed"]:
        yield f"{world.counts['batches changed']} batches were answered in two ways"


def _ledger(_world: World, reader: Reader) -> Iterator[str]:
    """The chain holds, and its accounts are the nodes'; what is outgoing is not in it yet."""
    entries: list[LedgerEntry] = []
    while page := reader.ledger_after(len(entries) - 1, PAGE):
        entries += page
    ledger.verify(entries, ledger.head_of(RUN, reader.ledger_last()))
    if reader.outbox_length():
        return
    accounts = ledger.fold(entries).by_node
    for node in reader.nodes():
        account = accounts.get(node.node, ledger.Account())
        if (node.credit, node.pending) != (account.credit, account.pending):
            yield f"node {node.node[:8]} has credit {node.credit}, pending {node.pending}; in the ledger {account}"
