"""The validator: claims audits, fetches what they need, judges them policy by policy, and signs the verdicts.

    hub ── audits ──► validator ── bodies ◄── hub        policies ◄── sources (a few stay loaded)
     ▲                    │
     └── signed verdicts ◄┴─ one batched prefill per policy ─► scoring processes (with limits), judges

Back-pressure: it claims `max_audits` at a time, and more only when those are done. Claims that it does not judge (it
was killed, a policy could not be fetched) expire at the hub. What could not be scored in time goes back with the next
request, which claims fewer. No failure here rejects a submission. Work leased for another environment is left to other
validators and costs the unit no attempt.
"""

import base64
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from shoal import errors
from shoal.client import Activity, ClientOptions, HubClient, Intervals, RegularHeartbeat
from shoal.client.weights import RefreshingDownloader, downloader_of
from shoal.engines import EngineShelf, LoadedPolicy, build, check_policy, free_bytes, keep_to_share, kind_of, warm_up
from shoal.environments import identity_of, judges_of, require_scoring
from shoal.errors import BroadcastError, CanaryMissed, ConfigError, DeadlineExceeded, HubRefused, ProtocolError
from shoal.protocol import Audit, AuditReply, AuditRequest, Outcome, PolicyRef, Verdict, sign_document
from shoal.protocol.verdict import MAX_BODIES_PER_REQUEST, MAX_VERDICTS_PER_REPORT
from shoal.rewards import DirectScorer, Scorer, ScoringPool
from shoal.rewards.panel import panel_of
from shoal.runtime import UNLIMITED_BYTES, Clock, FolderLock, StopToken, SystemClock, point
from shoal.runtime.sizing import Derived, RunSize, policies_loaded, settle
from shoal.shardcast import Prefetch
from shoal.toploc.points import compile_kernels
from shoal.validator.branches import BranchChecker
from shoal.validator.canary import Canary
from shoal.validator.judge import Judge, SecondEngines
from shoal.validator.limits import Calibrator
from shoal.validator.profiles import load_profiles
from shoal.validator.rewards import RewardNotes
from shoal.validator.settings import MEASURING, ValidatorConfig, ValidatorSettings, measurable_kinds, profile_keys
from shoal.validator.side_jobs import Preloader, SliceEvaluator, UnitGenerator, rehearse_with_tiny
from shoal.validator.verdicts import AuditJob

log = logging.getLogger(__name__)

LOCK_WAIT_S = 5.0
TRACE_BYTES = 8 * 1024 * 1024  # of one report
NO_TRACES: Mapping[str, bytes] = MappingProxyType({})
PORTION_BYTES = 32 * 1024 * 1024  # well below what the hub hands out in one answer
MAX_LEFT = 1024
CANARY_EVERY = 64  # full audits after which a known cheat is judged too; one that passes ends the validator
NOT_READY_POLL_S = 1.0  # one long poll while no policy is loaded
FIRST_CLAIM = 4  # audits; doubled while there are as many
FIRST_AUDIT_S = 30.0  # without audits, after which evaluations may begin
POLICY_TRIES = 3  # claims of a submission without its policy, before it is unsure


def run_validator(config: ValidatorConfig, stop: StopToken) -> None:
    """Audit until the run is finished, or until told to stop. Failures raise `ShoalError`; stopping does not."""
    options = ClientOptions(patience_s=config.pace.patience_s)
    try:
        with ExitStack() as stack:
            stack.enter_context(FolderLock(config.folder).acquire(stop, LOCK_WAIT_S))
            client = HubClient(config.hub_url, config.key, stop, config.root_fingerprint, config.http, options=options)
            stack.callback(client.close)
            client.register(config.folder.name, "validator", config.certificate)
            run = client.run_info()
            if config.environment.digest != run.environment_digest:
                raise errors.EnvironmentSetupError(
                    f"this validator's environment {config.environment.name} ({config.environment.digest[:16]}…) is "
                    f"not the run's {run.environment} ({run.environment_digest[:16]}…): use the recipe of run "
                    f"{run.run}, and the same files; a reward file that draws tasks at random must seed the generator"
                )
            require_scoring(config.environment)
            scorer: Scorer = DirectScorer(config.environment)
            if config.scored_by is not None:
                scorer = pool = ScoringPool(config.scored_by, config.environment, stop)
                stack.enter_context(closing(pool))
                pool.start()
            panel = stack.enter_context(closing(panel_of(judges_of(config.environment), stop, config.settings.device)))
            warm_up(config.engine, config.settings.device)
            threading.Thread(target=compile_kernels, name="kernels", daemon=True).start()
            panel.prepare()
            judge = Judge(
                config.environment, load_profiles(config.settings.profiles), config.shuffle_rewards, scorer=scorer,
                panel=panel, reward_notes=RewardNotes(config.folder), branch_checker=BranchChecker(), traces={},
            )  # fmt: skip
            _judge_with(client, judge, config, stop)
    except DeadlineExceeded:
        if not stop.is_set():
            raise
        log.info("the validator stopped (%s)", stop.reason)


def _judge_with(client: HubClient, judge: Judge, config: ValidatorConfig, stop: StopToken) -> None:
    settings, engine, run = config.settings, config.engine, client.run_info()
    kind = kind_of(engine, settings.device, settings.dtype)  # says what is wrong before anything is fetched
    keep_to_share(kind, settings.memory_share)
    known = {*profile_keys(settings), *(measurable_kinds(settings, "bfloat16") if engine == "torch" else ())}
    if blind := [each for each in run.profiles if each not in known]:
        sentence = (
            f"this validator cannot judge work of {', '.join(blind)}, which the run takes: by its engine and its "
            f'number format (validator.dtype = "{settings.dtype}") it judges {", ".join(sorted(known))}'
        )
        if len(blind) == len(run.profiles):
            raise ConfigError(f"{sentence}; start it with the run's recipe")
        log.warning("%s; such audits will be unsure", sentence)
    chosen = settle(settings, RunSize.of(run))
    weights = downloader_of(client.trusted_run(), config.folder / "cache", stop, chosen.keep_versions)
    with closing(weights) as downloader, Prefetch(downloader, stop):
        fetch = RefreshingDownloader(client, downloader)
        model_bytes = (4 if settings.dtype == "float32" else 2) * run.model.parameters
        loaded = policies_loaded(chosen.keep_versions, model_bytes, free_bytes(kind.split("/")[1]))
        where = (settings.device, settings.dtype)
        check = partial(check_policy, engine, device=where[0], dtype=where[1], memory_bytes=UNLIMITED_BYTES)
        shelf = EngineShelf(fetch, lambda files: build(engine, files, *where), loaded, check)
        shelf.wait_s = chosen.policy_wait_s
        calibrator = Calibrator(client, shelf, judge, kind, SystemClock())
        others = SecondEngines(engine, settings.device, fetch)
        judge = replace(judge, calibrations=calibrator.limits, second_engine=others.get)
        role = Validator(
            client, shelf, judge, settings, stop, kind=kind, calibrator=calibrator, idle=others.drop,
            chosen=replace(chosen, keep_versions=loaded), pace=config.pace,
        )  # fmt: skip
        if kind.startswith("torch/cuda"):
            rehearse_with_tiny(judge, run, "cuda")
        role.run()
    if role.finished:
        weights.forget()


class Validator:
    def __init__(
        self, client: HubClient, shelf: EngineShelf, judge: Judge, settings: ValidatorSettings, stop: StopToken,
        clock: Clock = SystemClock(), kind: str = "", calibrator: Calibrator | None = None,
        idle: Callable[[], None] = lambda: None, chosen: Derived | None = None, pace: Intervals = Intervals(),
    ) -> None:  # fmt: skip
        """`kind`: what it generates with; without it, it gets no units to generate. `idle` is called when nothing is to
        be audited. `chosen`: the settings that depend on the size of the run."""
        self._client, self._shelf, self._judge, self._stop, self._clock = client, shelf, judge, stop, clock
        self._kind, self._calibrator, self._idle, self._polling = kind, calibrator, idle, pace
        self._has_files = bool(settings.profiles)  # their limits were not tested here
        self._ready_s: float | None = None
        self._is_measuring = False  # then it does not wait for audits
        self._misses: Counter[str] = Counter()
        self._foreign: dict[str, None] = {}  # submissions for another environment, newest last
        self._chosen = chosen or settle(settings)
        self.finished = self._is_over = False
        # Few at first, so that the first verdicts come soon; later fewer only if scoring is too slow.
        self._most = min(FIRST_CLAIM, self._chosen.max_audits)
        self._canary = Canary(judge, CANARY_EVERY)
        self.activity = Activity(clock)
        self._preloader = Preloader(client, shelf, judge, self._chosen.keep_versions > 1, clock)
        self._heartbeat = RegularHeartbeat(client, pace.heartbeat_s, self.activity, self._preloader.hear)
        self._generator = UnitGenerator(client, shelf, self.activity, stop)
        self._evaluator = SliceEvaluator(client, shelf, judge.environment, judge.scorer, self.activity, stop, clock)

    def run(self) -> None:
        log.info("validator %s audits for run %s", self._client.key.node, self._client.run_info().run)
        with self._heartbeat:
            try:
                while not self._stop.is_set() and not self.finished:
                    if self._heartbeat.refusal is not None:
                        raise self._heartbeat.refusal
                    if self._preloader.newest is None:
                        self._heartbeat.once()  # its reply names the newest policy
                    with self.activity.waiting("submissions to audit"):
                        reply = self._client.audits(request := self._request())
                    if reply.finished and not reply.audits:
                        # A validator that could not evaluate asks again: the last version may wait for a score.
                        self.finished, self._is_over = self._is_over or request.evaluate != "no", True
                    else:
                        self._work(reply)
            except DeadlineExceeded:
                if not self._stop.is_set():
                    raise

    def _work(self, reply: AuditReply) -> None:
        """Do all that a reply asks for, then prepare for what comes next."""
        self._calibrate(reply)
        with self._evaluator.auditing():
            self.audit(reply.audits)
            self._generator.generate(reply.generate)
        if not reply.audits:
            self._idle()
            if self._preloader.is_due:
                with self.activity.busy("loading the newest policy"):
                    self._preloader.prepare()
        self._evaluator.measure(reply.evaluation)

    def _calibrate(self, reply: AuditReply) -> None:
        if self._calibrator is None:
            return
        job = self._calibrator.due(reply, self._preloader.newest, self._preloader.is_ready)
        self._is_measuring = job is not None
        if job is not None:
            with self.activity.busy(MEASURING):
                self._calibrator.attempt(job)
            if self._calibrator.has_measured and not self._preloader.has_measured:
                self._preloader.has_measured = True
                if not self._has_files:  # limits are built in, or were tested with every cheat just now
                    self._canary.due_in = FIRST_CLAIM + 1

    def _request(self) -> AuditRequest:
        ready, now_s = self._preloader.is_ready and not self._is_measuring, self._clock.monotonic_s()
        if ready and self._ready_s is None:  # the first verdicts come before evaluations
            self._ready_s = now_s + FIRST_AUDIT_S
        evaluates = ready and self._ready_s is not None and now_s >= self._ready_s
        return AuditRequest(
            max_audits=self._most,
            wait_s=self._polling.poll_s if ready else min(NOT_READY_POLL_S, self._polling.poll_s),
            left=(*tuple(self._misses)[-MAX_LEFT:], *self._foreign, *self._generator.left),
            evaluate=self._evaluator.readiness if evaluates or self._is_over else "no", generates=self._kind,
        )  # fmt: skip

    def audit(self, audits: Sequence[Audit]) -> None:
        """Judge audits, one policy after another, oldest first, because batches need those first."""
        fetched = [job for together in _portions(audits) for job in self._fetched(together)]
        jobs = [job for job in fetched if self._is_ours(job)]
        policies, claimed, judged = {job.lease.policy for job in jobs}, 0, 0
        for policy in sorted(policies, key=lambda ref: (ref.incarnation, ref.version)):
            if self._stop.is_set():
                return
            together = [job for job in jobs if job.lease.policy == policy]
            loaded = self._policy(policy, together)
            if loaded is None:
                continue
            began_s = self._clock.monotonic_s()
            with self.activity.busy(f"auditing {len(together)} groups of policy {policy.label}"):
                verdicts = self._judge.verdicts(together, loaded)
                done = {verdict.submission for verdict in verdicts}
                decided = [job for job in together if job.audit.submission in done]
                try:  # before anything is reported
                    caught = self._canary.check(decided, verdicts, loaded)
                except CanaryMissed:
                    self.activity.count("canaries_missed")
                    self._heartbeat.once()  # tells the hub why nothing is judged any more
                    raise
                if caught is not None:
                    self.activity.count("canaries_caught")
            traces = self._judge.traces or {}
            self._report(verdicts, traces)
            traces.clear()  # those of canaries too
            self._preloader.rehearsed, self._ready_s = True, began_s
            oldest_ms = min(job.audit.received_at_ms for job in together)
            log.info(
                "%d submissions by policy %s judged and reported in %.2f s, %.2f s after the first of them came in",
                len(together), policy.label, self._clock.monotonic_s() - began_s,
                (self._clock.now_ms() - oldest_ms) / 1000,
            )  # fmt: skip
            claimed += sum(job.audit.depth != "progress" for job in together)
            judged += sum(verdict.depth != "progress" for verdict in verdicts)
        if judged < claimed:  # more would be prefilled for nothing, and others could have had it
            self._most = max(1, judged)
            log.warning(
                "there was no time to score %d of %d groups: they are left for later, and %d are claimed at once from "
                "now on; more cores (environment.scoring.processes) or another validator would help",
                claimed - judged, claimed, self._most,
            )  # fmt: skip
        elif claimed >= self._most:
            self._most = min(2 * self._most, self._chosen.max_audits)

    def _is_ours(self, job: AuditJob) -> bool:
        """Whether this validator may say anything about it; if not, its claim runs out and somebody else gets it."""
        lease, mine = job.lease, identity_of(self._judge.environment)
        if self._judge.knows(lease):
            return True
        if not self._foreign:
            log.error(
                "unit %d was leased for environment %s (%s…, data %s…), this validator has %s (%s…, data %s…): it "
                "abstains from such units; start it with the run's recipe and data",
                lease.unit, lease.environment, lease.environment_digest[:16], lease.data_digest[:16],
                mine.name, mine.digest[:16], mine.data_digest[:16],
            )  # fmt: skip
        self.activity.count("abstained")
        self._foreign = dict.fromkeys([*self._foreign, job.audit.submission][-MAX_LEFT:])
        return False

    def _fetched(self, audits: Sequence[Audit]) -> list[AuditJob]:
        """Audits with their leases opened and their bytes fetched; without those whose papers are not in order."""
        try:
            bodies = self._client.submissions([audit.submission for audit in audits])
            pairs = zip(audits, bodies, strict=True)
            return [AuditJob(audit, self._client.open_lease(audit.lease), body) for audit, body in pairs]
        except (HubRefused, ProtocolError) as error:
            if len(audits) > 1:  # one by one, so that a missing one does not block the others
                return [job for audit in audits for job in self._fetched([audit])]
            log.error("submission %s cannot be audited: %s", audits[0].submission[:16], error)
            return []

    def _policy(self, policy: PolicyRef, jobs: Sequence[AuditJob]) -> LoadedPolicy | None:
        """The engine with this policy. Without it the claims expire; after a few times they are reported as unsure."""
        try:
            with self.activity.waiting(f"policy {policy.label}"):
                return self._shelf.get(policy, self._shelf.wait_s)
        except (BroadcastError, DeadlineExceeded) as error:
            if self._stop.is_set():
                return None
            log.warning("policy %s could not be fetched, %d audits wait: %s", policy.label, len(jobs), error)
            whole = [job for job in jobs if job.audit.depth != "progress"]  # the rest comes again by itself
            self._misses.update(job.audit.submission for job in whole)
            lost = [job for job in whole if self._misses[job.audit.submission] >= POLICY_TRIES]
            message = f"the validator could not fetch policy {policy.label}: {error}"
            named = [self._judge.named(job) for job in lost]
            self._report([each.unsure([], "machinery.policy", message, self._clock.now_ms()) for each in named])
            return None

    def _report(self, verdicts: Sequence[Verdict], traces: Mapping[str, bytes] = NO_TRACES) -> None:
        for start in range(0, len(verdicts), MAX_VERDICTS_PER_REPORT):
            part = verdicts[start : start + MAX_VERDICTS_PER_REPORT]
            point("validator.verdict.before_report")
            signed = [sign_document(verdict, self._client.key) for verdict in part]
            reply = self._client.verdicts(signed, dict(_sent(part, traces)))
            point("validator.verdict.after_report")
            refused = {refusal.submission: refusal for refusal in reply.refused}
            for verdict in part:
                self._misses.pop(verdict.submission, None)
                if refusal := refused.get(verdict.submission):
                    message = "the verdict on unit %d was not taken: %s [%s]"
                    log.warning(message, verdict.unit, refusal.message, refusal.code)
                    continue
                self.activity.count(verdict.outcome.value)
                self.activity.count("tokens", verdict.generated_tokens)
                if verdict.reason == "reward.machinery":
                    self.activity.count("unscored")
                if verdict.outcome is not Outcome.ACCEPTED:
                    log.info(
                        "unit %d of node %s %s, %s: %s",
                        verdict.unit, verdict.node, verdict.outcome.value, verdict.reason, verdict.message,
                    )  # fmt: skip


def _sent(verdicts: Sequence[Verdict], traces: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """Traces as they are sent, in base64: those of refused work first, as many as fit."""
    left = TRACE_BYTES
    for verdict in sorted(verdicts, key=lambda each: each.outcome is Outcome.ACCEPTED):
        trace = traces.get(verdict.submission, b"")
        if trace and (left := left - 4 * len(trace) // 3) > 0:
            yield verdict.submission, base64.b64encode(trace).decode()


def _portions(audits: Sequence[Audit]) -> Iterator[Sequence[Audit]]:
    """Audits whose bodies are fetched together: limited in number and total size."""
    portion: list[Audit] = []
    for audit in audits:
        size_bytes = sum(each.size_bytes for each in (*portion, audit))
        if portion and (len(portion) == MAX_BODIES_PER_REQUEST or size_bytes > PORTION_BYTES):
            yield portion
            portion = []
        portion.append(audit)
    if portion:
        yield portion
