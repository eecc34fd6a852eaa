"""The run calibrates itself: a validator measures limits for the policy that it judges by, and puts them in force.

    newest policy ─► is anything missing? ─► measured (`calibrate`) ─► joined with what other machines measured
         │                                                                  │ signed; names the one that it replaces
         └─ a later version ─► a small group of its own: do its bands       └─► hub ── 409 ─► joined with the newer one
            leave those in force? ─► measured again

Each format is put in force as soon as it is measured. Formats without built-in limits come first: nobody has leases for
them yet. The others are measured when somebody computes so and nothing waits for an audit. Only work of this validator
is measured, never that of a node. Joined limits are wider than those of each machine, so every machine tests them on
its own measurement; if a cheat passes, the kind is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from shoal.client import HubClient
from shoal.engines import ENGINES, PLAIN, EngineShelf, LoadedPolicy, release_memory
from shoal.errors import BroadcastError, DeadlineExceeded, HubRefused, ProtocolError, UserError
from shoal.protocol import AuditReply, Calibration, MeasuredKind, PolicyRef, format_of, sign_document
from shoal.runtime.clock import Clock
from shoal.validator.calibrate import Measurement, Plan, has_moved, measure, prompts_of
from shoal.validator.case import ENGINE_ERRORS
from shoal.validator.judge import Judge
from shoal.validator.profiles import Profile, Profiles, limits_for, widest

if TYPE_CHECKING:
    from shoal.engines.torch import TorchEngine

log = logging.getLogger(__name__)

RETRY_S = 60.0  # after a measurement failed
LATEST_S = 60.0  # a measurement that is not urgent waits so long for a time without audits
PROBE_SHARE = 0.02  # at most this share of the time goes into probes and into refused kinds
CPU_SEQUENCES = 64  # the time of a CPU grows with the rows; that of a GPU hardly does
MOST_ON_CPU = 20_000_000  # weights: larger models take minutes to measure on a CPU; they use built-in limits
SENTENCE = 500


@dataclass
class UnpublishedLimits:
    """What this machine has measured with one policy and not published yet."""

    policy: PolicyRef
    kinds: dict[str, Measurement] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


class Calibrator:
    def __init__(self, client: HubClient, shelf: EngineShelf, judge: Judge, kind: str, clock: Clock) -> None:
        self._client, self._shelf, self._judge, self._kind, self._clock = client, shelf, judge, kind, clock
        self._known: dict[str, Calibration] = {}
        self._unable: set[str] = set()
        self._probed: PolicyRef | None = None
        self._retry_s = self._next_probe_s = self._next_refused_s = 0.0
        self._waits_s: float | None = None  # the time since which a measurement that is not urgent has waited
        self._unpublished: UnpublishedLimits | None = None
        self._tested: dict[str, Measurement] = {}  # by kind, under the limits that it was tested with last

    @property
    def machine(self) -> str:
        """What this validator computes with: device/format."""
        return self._kind.partition("/")[2]

    @property
    def has_measured(self) -> bool:
        return bool(self._tested)

    def limits(self, digest: str) -> Profiles | None:
        """The limits of a calibration, fetched once; None if they are not available."""
        made = self._calibration(digest)
        return None if made is None else profiles_of(made)

    def _calibration(self, digest: str) -> Calibration | None:
        if digest and digest not in self._known:
            try:
                made = self._client.calibration(digest)
                profiles_of(made)  # raises if they are not valid
                self._known[digest] = made
            except (HubRefused, ProtocolError, ValueError) as error:
                log.error("calibration %s… cannot be used: %s", digest[:16], error)
        return self._known.get(digest)

    def due(self, reply: AuditReply, newest: PolicyRef | None, is_ready: bool = True) -> Callable[[], None] | None:
        """The job that is due now, if any. Before audits: what nobody can work without, and a check whether the policy
        has moved. Other measurements: when there are no audits and this validator `is_ready`, or after a while."""
        now_s = self._clock.monotonic_s()
        if newest is None or now_s < self._retry_s or not self._kind.startswith(f"{ENGINES['torch'].profile}/"):
            return None
        in_force, digest = self._calibration(reply.calibration), reply.calibration
        is_lost = bool(digest) and in_force is None  # for example its signer was revoked: nothing can be judged by it
        found = self._unpublished
        if found is not None and found.policy.incarnation == newest.incarnation:
            return partial(self._publish, found, in_force, digest)
        if in_force is not None:
            # Limits that another machine joined after this one tested them.
            limits, mine = profiles_of(in_force), set(self._tested) & self._seen(in_force)
            untested = {kind: limits[kind] for kind in mine if limits[kind] != self._tested[kind].profile}
            if untested:
                return partial(self._test, untested, in_force, digest)
        wanted = self._missing(in_force, newest, reply.wanted)
        if not wanted:
            self._waits_s = None
            if in_force is None or newest in (self._probed, in_force.policy) or now_s < self._next_probe_s:
                return None
            return partial(self._probe, newest, in_force, digest)
        self._waits_s = now_s if self._waits_s is None else self._waits_s
        if (reply.audits or not is_ready) and not is_lost and now_s < self._waits_s + LATEST_S:
            own, known = format_of(self._kind), self._judge.profiles
            wanted = [kind for kind in wanted if own != "float32" or kind not in known]
        return partial(self._measure, newest, wanted[:1], in_force, digest) if wanted else None

    def attempt(self, job: Callable[[], None]) -> None:
        """Do what is due; after a failure it is tried again later."""
        try:
            job()
        except (BroadcastError, DeadlineExceeded, *ENGINE_ERRORS) as error:
            self._retry_s = self._clock.monotonic_s() + RETRY_S
            log.warning("limits could not be measured, tried again in %.0f s: %s", RETRY_S, error)

    @property
    def _formats(self) -> tuple[str, ...]:
        return ENGINES["torch"].formats(self.machine.partition("/")[0])

    def _computes(self, kind: str) -> bool:
        engine, device, number_format = kind.split("/")
        is_torch = engine == "torch" or (engine == PLAIN and device == "cuda")
        return is_torch and device == self.machine.partition("/")[0] and number_format in self._formats

    def _seen(self, made: Calibration) -> set[str]:
        """The kinds whose limits this machine has measured or tested."""
        return {kind for kind, each in made.kinds.items() if self.machine in seen_by(each)}

    def _missing(self, in_force: Calibration | None, newest: PolicyRef, asked: tuple[str, ...]) -> list[str]:
        """The kinds that this machine has to measure, the coarsest format first. For a kind that it cannot compute as,
        it measures its own kind of that number format, by which the other is judged. A refused kind is measured again
        with a later policy."""
        run, known, own = self._client.run_info(), self._judge.profiles, format_of(self._kind)
        device, measured = self.machine.partition("/")[0], set[str]()
        if in_force is not None and in_force.policy.incarnation == newest.incarnation:
            measured = set(in_force.kinds)
        others = [each for each in asked if not self._computes(each) and each not in measured]
        others = [each for each in others if not limits_for(each, own, {}, known)]
        asked = (*asked, *self._judge.plain_kinds, *(f"torch/{device}/{format_of(each)}" for each in others))
        open_formats = set(map(format_of, (*run.profiles, *asked)))
        usual = [f"torch/{device}/{each}" for each in self._formats if each in open_formats]
        kinds = [each for each in dict.fromkeys([*usual, *asked]) if self._computes(each) and each not in self._unable]
        # Kinds that have limits wait until somebody computes so; on a CPU, where coarse formats are slow, all wait.
        has_limits = {kind for kind in kinds if limits_for(kind, own, {}, known)}
        kinds = [kind for kind in kinds if kind in asked or (device != "cpu" and kind not in has_limits)]
        if device == "cpu" and run.model.parameters > MOST_ON_CPU:
            kinds = [kind for kind in kinds if kind not in has_limits]
        if in_force is not None and in_force.policy.incarnation == newest.incarnation:
            again = newest != in_force.policy and self._clock.monotonic_s() >= self._next_refused_s
            done = self._seen(in_force) | set(() if again else in_force.refused)
            kinds = [kind for kind in kinds if kind not in done]
        return sorted(kinds, key=format_of)

    def _plan(self, loaded: LoadedPolicy) -> Plan:
        run = self._client.run_info()
        sampling = run.sampling
        sequences = Plan.sequences if self.machine.startswith("cuda/") else CPU_SEQUENCES
        return Plan(
            prompts_of(loaded.files, self._judge.environment, sampling.max_new_tokens), sampling.eos_token_ids,
            sequences, min(Plan.tokens, sampling.max_new_tokens), temperature=sampling.temperature, proof=run.proof,
            model=run.run,
        )  # fmt: skip

    def _measure(self, policy: PolicyRef, kinds: list[str], in_force: Calibration | None, digest: str) -> None:
        loaded = self._shelf.get(policy, self._shelf.wait_s)
        began_s = self._clock.monotonic_s()
        plan, found = self._plan(loaded), UnpublishedLimits(policy)
        for kind in kinds:
            try:
                measured = self._one(loaded, kind, plan)
            except UserError as error:  # not a lack of memory, which may pass
                self._unable.add(kind)
                log.warning("work of %s cannot be measured here: %s", kind, error)
                continue
            finally:
                release_memory()
            if measured.profile.key != kind:  # this model is decoded by the plain path alone
                self._unable.add(kind)
            if measured.untested:
                log.warning("limits of %s are not tested with %s: too few", kind, "; ".join(measured.untested))
            refused = _problems([measured])
            found.refused |= refused
            if not refused:
                found.kinds[measured.profile.key] = measured
        found.seconds = round(self._clock.monotonic_s() - began_s, 1)
        self._next_refused_s = began_s + found.seconds / PROBE_SHARE
        log.info(
            "limits of %s measured with policy %s in %.1f s%s",
            ", ".join(found.kinds) or "nothing", policy.label, found.seconds,
            "".join(f"; refused {kind}: {why}" for kind, why in found.refused.items()),
        )  # fmt: skip
        if found.kinds or found.refused:
            self._publish(found, in_force, digest)

    def _own(self, loaded: LoadedPolicy) -> TorchEngine:
        from shoal.engines.torch import TorchEngine

        assert isinstance(loaded.engine, TorchEngine), "only torch's engine is measured"
        return loaded.engine

    def _copy(self, loaded: LoadedPolicy, kind: str) -> TorchEngine:
        """An engine of that kind with the policy loaded. The caller releases its memory."""
        return self._own(loaded).copied(loaded.files, format_of(kind), pages=not kind.startswith(f"{PLAIN}/"))

    def _one(self, loaded: LoadedPolicy, kind: str, plan: Plan) -> Measurement:
        worker, second = self._copy(loaded, kind), kind.partition("/")[2]  # what a second look computes with
        return measure(worker, {second: worker, self.machine: self._own(loaded)}, plan)

    def _publish(self, found: UnpublishedLimits, in_force: Calibration | None, digest: str) -> None:
        """Put it in force, joined with what is; if another calibration came first, it is joined with that next time."""
        # A new measurement after the policy has moved replaces all earlier ones.
        self._tested |= found.kinds
        kinds = {kind: measured_kind(each) for kind, each in found.kinds.items()}
        refused, machines = dict(found.refused), [self.machine]
        if in_force is not None and in_force.policy.incarnation == found.policy.incarnation:
            machines = list(dict.fromkeys([*in_force.machines, self.machine]))
            for kind, theirs in in_force.kinds.items():
                mine = found.kinds.get(kind)
                if mine is None:
                    kinds[kind] = theirs
                elif self.machine not in seen_by(theirs):
                    self._tested[kind] = both = mine.under(widest(mine.profile, Profile.model_validate(theirs.limits)))
                    kinds[kind] = measured_kind(both, theirs)
            is_mine = self.machine in in_force.machines
            before = {kind: why for kind, why in in_force.refused.items() if kind not in found.kinds or not is_mine}
            refused = before | refused | _problems(self._tested[kind] for kind in found.kinds)
        kinds = {kind: each for kind, each in kinds.items() if kind not in refused}
        made = Calibration(
            run=self._client.run_info().run, policy=found.policy, replaces=digest, kinds=kinds, refused=refused,
            machines=tuple(machines), seconds=found.seconds, made_at_ms=self._clock.now_ms(),
        )  # fmt: skip
        try:
            self._client.publish_calibration(sign_document(made, self._client.key))
            self._unpublished = None
        except HubRefused as refusal:
            self._unpublished = found if refusal.code == "calibration.outdated" else None
            if refusal.code not in ("calibration.outdated", "calibration.policy"):
                raise  # measured again later, not at once and for ever
            log.info("the limits that were measured are not in force: %s", refusal)

    def _test(self, limits: Profiles, in_force: Calibration, digest: str) -> None:
        again = {kind: self._tested[kind].under(each) for kind, each in limits.items()}
        self._tested |= again
        if refused := _problems(again.values()):
            log.warning("limits that another machine has joined are refused: %s", refused)
            self._publish(UnpublishedLimits(in_force.policy, refused=refused), in_force, digest)

    def _probe(self, policy: PolicyRef, in_force: Calibration, digest: str) -> None:
        """Check whether honest work of a new version still looks as it did when the limits were measured."""
        began_s, self._probed, moved = self._clock.monotonic_s(), policy, list[str]()
        loaded = self._shelf.get(policy, self._shelf.wait_s)
        plan, own = self._plan(loaded), self._own(loaded)
        for kind, limits in profiles_of(in_force).items():
            if not self._computes(kind):
                continue
            if has_moved(own if kind == own.kind else self._copy(loaded, kind), own, plan, limits):
                moved.append(kind)
            release_memory()
        self._next_probe_s = began_s + (self._clock.monotonic_s() - began_s) / PROBE_SHARE
        if moved:
            was = in_force.policy.label
            log.info("honest work of %s has moved since policy %s: measured again", ", ".join(moved), was)
            self._measure(policy, sorted(moved, key=format_of), in_force, digest)


def seen_by(kind: MeasuredKind) -> tuple[str, ...]:
    """The machines (device/format) that measured these limits."""
    return tuple((kind.limits.get("measured") or {}).get("validators", ()))


def profiles_of(made: Calibration) -> Profiles:
    return {kind: Profile.model_validate(each.limits) for kind, each in made.kinds.items()}


def _problems(tested: Iterable[Measurement]) -> dict[str, str]:
    return {each.profile.key: "; ".join(each.problems)[:SENTENCE] for each in tested if each.problems}


def measured_kind(measured: Measurement, theirs: MeasuredKind | None = None) -> MeasuredKind:
    """What is put in force; `theirs` is the measurement of another machine under limits that were no wider. Of each
    cheat the lowest caught share."""
    caught = {} if theirs is None else dict(theirs.caught)
    for each in measured.catches:
        name = f"{each.cheat}, {each.tokens} tokens"
        caught[name] = min(each.by_either, caught.get(name, 1.0))
    tokens = measured.profile.measured.tokens if measured.profile.measured else 0
    untested = (*measured.untested, *(() if theirs is None else theirs.untested))
    return MeasuredKind(
        limits=measured.profile.model_dump(mode="json"), caught=caught, untested=tuple(dict.fromkeys(untested)),
        tokens=tokens if theirs is None else min(tokens, theirs.tokens),
    )  # fmt: skip
