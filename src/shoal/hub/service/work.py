"""What workers call: leases, releases, submissions.

PUT ─► caps ─► would it be taken at all? ─► decode ─► blob + fsync ─► row + commit ─► signed receipt
                (a refusal costs no disk)                             │ nothing before this point is promised
                                                                      └ the row says how deeply it will be audited
"""

import threading
from collections.abc import Sequence
from dataclasses import replace

from shoal.environments import identity_of
from shoal.errors import CodecError, ConfigError, EnvironmentSetupError, ModelError
from shoal.hub.changes import Topic
from shoal.hub.service.context import Context, node_label, orders_of, shared
from shoal.hub.service.drawing import Drawing, NotReady
from shoal.hub.service.measuring import Calibrating
from shoal.hub.service.stock import Stock
from shoal.hub.service.turns import Place
from shoal.hub.state import calibrations, draws, leases, newcomers, nodes, pacing, reputation, submissions
from shoal.hub.state.commands import Command, Refusal, Save
from shoal.hub.state.rows import Holding, LeaseRow, LeaseState, Moment, NodeRow, SubmissionRow, UnitRow
from shoal.hub.storage import Reader, Writer
from shoal.ledger import head_of
from shoal.protocol import Lease, LeaseRelease, LeaseReply, LeaseRequest, NodeState, SignedDocument, unpack
from shoal.protocol.submission import SUBMISSION_FORMAT, Receipt, Submission, submission_digest
from shoal.protocol.verdict import AuditRequest
from shoal.runtime.crash import point

FOR_VALIDATORS = 4  # units that one validator gets to generate: enough for an engine, and audits do not wait long
AHEAD = 24  # a request whose units others took makes the tasks of so many requests: as many may be decided at once


class Work:
    def __init__(self, context: Context, calibrating: Calibrating) -> None:
        self._context, self._calibrating = context, calibrating
        self._limits = context.config.submission_limits
        self.drawing = Drawing(context)
        # When an established node asked last, and who delivered when: as far as this process knows.
        self._asked_ms: int | None = None
        self._delivered_ms: dict[str, int] = {}
        self._delivered_lock = threading.Lock()
        self._tempo_at: tuple[int, pacing.Tempo | None] = (-1, None)
        self._stock = Stock(context, self.drawing) if context.storage.is_shared else None
        with context.storage.read() as reader:
            self._next_unit = reader.progress().next_unit  # as far as this process knows: whose task is wanted next
        self.late = 0  # submissions refused since the start because their unit had gone to somebody else

    def lease(self, node: NodeRow, request: LeaseRequest, network: str = "", address: str = "") -> LeaseReply:
        """Tasks are made before the decision, which is made again (`retry`) if others took those units meanwhile, or if
        there must be new units first. The worker asks from `network` (empty: this very machine), there from
        `address`."""
        if self._stock is None:
            self.drawing.prepare(self._next_unit, request.max_units)
        elif not self._stock.units():
            self._stock.refill()
        try:
            reply = self._lease(node, request, Place(network, address, node.node))
        except NotReady as missing:
            self.drawing.prepare_again(missing.again)
            if missing.first is not None and self._stock:
                self._stock.refill(missing=True)
            elif missing.first is not None:
                self.drawing.prepare(missing.first, AHEAD * request.max_units)
            raise
        if reply.leases and self._stock:
            self._stock.refill(wait=False)
        return reply

    def _lease(self, node: NodeRow, request: LeaseRequest, place: Place) -> LeaseReply:
        context, planned = self._context, leases.LeasePlan()
        with context.decision(sweep=True, counted=False) as (transaction, moment):
            terms = self._calibrating.terms(transaction, request.profile)
            fresh, held, lost = self._arrived(transaction, node, moment, request, place.network, terms)
            known = [each.lease for each in held if each.lease.request == request.request]
            halted = orders_of(transaction).halted(moment.now_ms) or terms.waiting
            if known:  # the same request gets the same leases again
                granted = known
            elif halted:
                planned, granted = leases.LeasePlan(halted), []
            else:
                ask, open_units, moment = self._ask(transaction, moment, fresh, len(held), request, place)
                planned = leases.plan(moment, open_units, ask)
                missing = [unit for unit in planned.again if not self.drawing.is_made(unit)]
                if missing:
                    raise NotReady(again=missing)
                new, alarms = list[UnitRow](), list[Command]()
                if self._stock is None:
                    new, alarms = self.drawing.fresh_units(transaction, moment, planned.fresh)
                elif planned.fresh and not planned.again and self._stock.is_worth_a_try(moment.progress):
                    raise NotReady(first=moment.progress.next_unit)
                issued = leases.issue(moment, ask, planned, new)
                granted = self._issue(transaction, issued, request.profile, terms.calibration, new)
                transaction.apply(alarms)
            if granted:
                point("hub.lease.before_commit")
        if granted:
            point("hub.lease.after_commit")
        if self._stock:
            self._stock.took(lease.unit for lease in granted)
        self._next_unit = max([self._next_unit, moment.progress.next_unit, *(lease.unit + 1 for lease in granted)])
        # a node that gets nothing for another reason than a lack of units waits for nobody's turn
        if fresh.on_probation and not known and (planned.short or granted):
            inside = not granted and planned.short == "inside"
            context.turns.asked(place, len(granted), moment.now_ms, planned.deferred, inside)
        if lost:
            context.changes.notify(Topic.LEASES)  # others may have got nothing for want of these units
        finished = pacing.is_finished(moment.rules, moment.progress)
        if granted or finished:
            context.waits.done(node_label(node))
        else:
            context.waits.waiting(node_label(node), f"a unit: {planned.waiting}", moment.now_ms)
        return LeaseReply(
            leases=tuple(context.signed_before(lease.document) for lease in granted),
            waiting="" if granted else planned.waiting, finished=finished, policy=moment.progress.policy,
            held_back=not granted and planned.held_back,
        )  # fmt: skip

    def _arrived(
        self, transaction: Writer, node: NodeRow, moment: Moment, request: LeaseRequest, network: str,
        terms: calibrations.CalibrationTerms,
    ) -> tuple[NodeRow, list[Holding], bool]:  # fmt: skip
        """The node as it is now; what it holds, and what it got for the same request; whether it has lost something."""
        before, commands = nodes.lift(transaction.node(node.node) or node, moment.now_ms)
        measured = before if terms.measured else reputation.unmeasured(before)
        fresh = replace(measured, network=network, kind=request.profile)
        if fresh != before:
            commands.append(Save(fresh, fresh.state))
        transaction.apply(commands)
        held = transaction.holdings(node.node, request.request)
        if request.held is None:
            return fresh, held, False
        kept, active = frozenset(request.held), [each for each in held if each.lease.state is LeaseState.ACTIVE]
        lost = leases.abandon(moment, fresh, active, request.request, kept)
        if not lost:
            return fresh, held, False
        transaction.apply(lost)
        return transaction.node(node.node) or node, transaction.holdings(node.node, request.request), True

    def _ask(
        self, transaction: Writer, moment: Moment, fresh: NodeRow, held: int, request: LeaseRequest, place: Place
    ) -> tuple[leases.Demand, list[UnitRow], Moment]:
        context = self._context
        if self._stock is None:
            open_units, moment = transaction.open_units(request.max_units), context.moment(transaction)
        else:
            open_units = transaction.open_units(request.max_units, among=self._stock.units())
            if fresh.on_probation or len(open_units) < request.max_units:
                moment = replace(moment, progress=transaction.progress())
                may_be_new = pacing.room(moment.rules, moment.progress) and self._stock.is_worth_a_try(moment.progress)
                if not open_units and not may_be_new:
                    open_units = transaction.open_units(request.max_units)  # other hubs', too
        crowd = self._crowd(transaction, moment, fresh, held, place)
        if self._stock and newcomers.is_tight(moment, fresh, crowd):
            moment = replace(moment, progress=transaction.frontier())
            crowd = self._crowd(transaction, moment, fresh, held, place)
        policy = request.policy
        is_known = policy is not None and (
            policy == moment.progress.policy or transaction.policy(policy.incarnation, policy.version) == policy
        )
        ask = leases.Demand(
            node=fresh, request=request.request, max_units=request.max_units, held=held,
            crowd=crowd, tempo=self._tempo(transaction, moment),
            policy=policy, behind=request.behind and is_known,
        )  # fmt: skip
        return ask, open_units, moment

    def _tempo(self, reader: Reader, moment: Moment) -> pacing.Tempo | None:
        step = moment.progress.next_step
        if self._tempo_at[0] != step:
            found = [reader.batch(number) for number in range(max(0, step - pacing.LAST_BATCHES), step)]
            self._tempo_at = (step, pacing.tempo([batch.written_at_ms for batch in found if batch is not None]))
        return self._tempo_at[1]

    def _crowd(self, transaction: Writer, moment: Moment, node: NodeRow, held: int, place: Place) -> newcomers.Crowd:
        """An established node at its limit is not asking, nor one that delivers nothing: it must not keep work from
        newcomers."""
        since_ms = moment.now_ms - newcomers.HERE_MS
        if not node.on_probation:
            delivers = self._delivered_ms.get(node.node, 0) >= _counts_since_ms(moment)
            if delivers and held < nodes.window(moment.rules, node) and node.state is NodeState.ACTIVE:
                self._asked_ms = moment.now_ms
            return newcomers.Crowd()
        ahead, ahead_inside = self._context.turns.ahead(place, moment.now_ms, moment.rules.lease_ms)
        return newcomers.Crowd(
            in_hand=transaction.newcomers_in_hand(node.node), established=transaction.is_established_here(since_ms),
            asking=self._asked_ms is not None and self._asked_ms >= since_ms, ahead=ahead, ahead_inside=ahead_inside,
            taken=self._context.turns.taken(place),
        )  # fmt: skip

    def _issue(
        self, transaction: Writer, issued: list[tuple[LeaseRow, UnitRow]], profile: str, calibration: str = "",
        fresh: Sequence[UnitRow] = (),
    ) -> list[LeaseRow]:  # fmt: skip
        config, identity = self._context.config, identity_of(self._context.config.environment)
        signed = []
        for lease, unit in issued:
            try:
                prompt = self.drawing.prompt_of(unit)
            except (EnvironmentSetupError, ModelError) as error:  # it was usable when it was drawn
                raise ConfigError(f"unit {unit.unit} cannot be given out again: {error}") from error
            document = Lease(
                **shared(lease, Lease), run=config.run_id, policy=lease.policy, task=unit.task, prompt_ids=prompt.ids,
                seeds=draws.unit_seeds(self._context.secret, config.run_id, unit.unit, config.run.group_size),
                sampling=config.sampling, proof=config.proof, profile=profile, calibration=calibration,
                environment=identity.name, environment_version=identity.version, environment_digest=identity.digest,
                data_digest=identity.data_digest, length_target=prompt.length_target, dialogue=prompt.dialogue,
            )  # fmt: skip
            signed.append((replace(lease, document=self._context.sign(document)), unit))
        transaction.apply(leases.issued(signed, fresh))
        return [lease for lease, _ in signed]

    def lease_to_validator(self, node: NodeRow, request: AuditRequest) -> tuple[SignedDocument, ...]:
        context, left = self._context, frozenset(request.left)
        with context.storage.read() as reader:
            units = reader.open_units(FOR_VALIDATORS, for_validators=True)
            if not units and not reader.holdings(node.node):
                return ()
        self.drawing.prepare_again(units)
        with context.decision(sweep=True) as (transaction, moment):
            holdings = transaction.holdings(node.node)
            transaction.apply(leases.give_up(moment, holdings, left))
            held = [each.lease for each in holdings if each.lease.lease not in left]
            if not held and not orders_of(transaction).halted(moment.now_ms):
                units = transaction.open_units(FOR_VALIDATORS, for_validators=True)
                made = [unit for unit in units if self.drawing.is_made(unit)]  # others come with the next request
                planned = leases.plan_for_validator(moment, made)
                name = f"entrusted-u{units[0].unit}a{units[0].attempt}" if units else ""
                ask = leases.Demand(transaction.node(node.node) or node, name, len(units), held=0)
                held = self._issue(transaction, leases.issue(moment, ask, planned), request.generates)
        return tuple(context.signed_before(lease.document) for lease in held)

    def release(self, node: NodeRow, request: LeaseRelease) -> None:
        """Others' leases are looked up beforehand, where that locks nothing of theirs."""
        with self._context.storage.read() as reader:
            for lease in dict.fromkeys(request.leases):
                if (held := reader.holding(lease)) is not None:
                    submissions.check_owner(held, node.node, lease)  # whose a lease is never changes
        with self._context.decision() as (transaction, moment):
            fresh = transaction.node(node.node) or node
            own = [held for held in transaction.holdings(node.node) if held.lease.lease in request.leases]
            commands = leases.release(moment, fresh, own)
            transaction.apply(commands)
        if commands:
            self._context.changes.notify(Topic.LEASES)

    def submit(self, node: NodeRow, lease: str, body: bytes) -> tuple[int, SignedDocument]:
        """(201 or 200, the signed receipt). On return the submission survives any crash."""
        context = self._context
        arrival = submissions.Arrival(node.node, lease, submission_digest(body), len(body))
        status, row = self.consider(node, arrival)
        if status == submissions.SAME_AGAIN:
            return status, context.signed_before(row.receipt)
        arrival = replace(arrival, tokens=self._check_header(body, row))
        point("hub.submit.before_blob")
        context.blobs.put(body)
        point("hub.submit.after_blob")
        with context.decision(counted=False) as (transaction, moment):
            status, row, fresh, holding = self._receive(transaction, moment, node, arrival)
            if status == submissions.CREATED:
                head = head_of(context.config.run_id, transaction.ledger_last())
                receipt = Receipt(run=context.config.run_id, ledger=head, **shared(row, Receipt))
                row = replace(row, receipt=context.sign(receipt))
                transaction.apply(submissions.received(fresh, holding, row, moment.now_ms))
            point("hub.submit.before_commit")
        point("hub.submit.after_commit")
        with self._delivered_lock:  # in order of delivery: what no longer counts goes from the front
            self._delivered_ms.pop(node.node, None)
            self._delivered_ms[node.node] = moment.now_ms
            since_ms = _counts_since_ms(moment)
            while self._delivered_ms[oldest := next(iter(self._delivered_ms))] < since_ms:
                del self._delivered_ms[oldest]
        context.changes.notify(Topic.AUDITS)
        return status, context.signed_before(row.receipt)

    def consider(self, node: NodeRow, arrival: submissions.Arrival) -> tuple[int, SubmissionRow]:
        with self._context.storage.read() as reader:
            return self._receive(reader, self._context.moment(reader, counted=False), node, arrival)[:2]

    def _receive(
        self, reader: Reader, moment: Moment, node: NodeRow, arrival: submissions.Arrival
    ) -> tuple[int, SubmissionRow, NodeRow, Holding]:
        fresh = reader.node(arrival.node) or node
        holding = submissions.check_owner(reader.holding(arrival.lease), arrival.node, arrival.lease)
        existing = reader.submission_of_lease(arrival.lease)
        if existing is None:
            nodes.require_welcome(fresh, moment.now_ms)
            fraction = draws.audit_fraction(self._context.secret, arrival.submission)
            arrival = replace(arrival, depth=reputation.depth_for(moment.rules, fresh, fraction))
        try:
            return *submissions.receive(moment, fresh, holding, existing, arrival), fresh, holding
        except Refusal as refusal:
            self.late += refusal.code == submissions.LATE
            raise

    def _check_header(self, body: bytes, row: SubmissionRow) -> int:
        try:
            submission = unpack(body, Submission, self._limits)
        except CodecError as error:
            raise Refusal(422, "submission.malformed", str(error)) from error
        group_size, rollouts = self._context.rules.group_size, submission.rollouts
        if (count := len(rollouts)) != group_size:
            raise Refusal(422, "submission.group", f"the submission has {count} rollouts; groups have {group_size}")
        expected = {"run": self._context.config.run_id, "node": row.node, "lease": row.lease, "unit": row.unit}
        for name, value in {"format": SUBMISSION_FORMAT, **expected}.items():
            if (found := getattr(submission, name)) != value:
                sentence = f"the submission's {name} is {found!r}; this lease has {value!r}"
                raise Refusal(422, "submission.mismatch", sentence)
        return sum(len(submission.prompt) + len(rollout.tokens) for rollout in rollouts) // 4


def _counts_since_ms(moment: Moment) -> int:
    return moment.now_ms - max(newcomers.HERE_MS, moment.rules.lease_ms)
