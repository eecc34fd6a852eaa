"""Ahead of the audits: the newest policy is loaded while nothing is to be audited, and one audit is rehearsed.

    heartbeat ─ newest policy ─► nothing to audit? ─► fetched, loaded ─► the first: a group of its own, checked and
                                                                        scored once, for nobody

The first audit of a process imports libraries, compiles kernels and waits for scoring processes. The rehearsal does
this before the first submission is there.
"""

from __future__ import annotations

import logging

from shoal.client import HubClient
from shoal.engines import Engine, GenerationRequest
from shoal.engines.shelf import EngineShelf, LoadedPolicy
from shoal.engines.submission import submission_of
from shoal.errors import BroadcastError, DeadlineExceeded
from shoal.protocol import HeartbeatReply, PolicyRef, RunInfo
from shoal.rewards import Job
from shoal.runtime.clock import Clock
from shoal.validator.case import Case
from shoal.validator.checks import AFTER_PREFILL, run_all
from shoal.validator.judge import Judge
from shoal.validator.profiles import Profile
from shoal.validator.replay import ENGINE_ERRORS, replay_all
from shoal.validator.specimens import Terms

log = logging.getLogger(__name__)

WAIT_S = 5.0  # for a later policy: audits of the one before may come in meanwhile
CHUNKS = 2  # of each rehearsed rollout: a whole one, and what follows it
PROMPT_TOKENS = 32


class Ahead:
    """Which policy is the newest, and whether it is loaded. `hear` may be called by another thread than the rest.

    `keeps_others`: a newer policy is loaded beside those in use. Otherwise only the first is loaded ahead. `rehearsed`:
    an audit was computed once, so that no rehearsal is needed.
    """

    def __init__(self, client: HubClient, shelf: EngineShelf, judge: Judge, keeps_others: bool, clock: Clock) -> None:
        self._client = client
        self._shelf = shelf
        self._judge = judge
        self._keeps_others = keeps_others
        self._clock = clock
        self._loaded: PolicyRef | None = None
        self.newest: PolicyRef | None = None
        self.rehearsed = False

    @property
    def is_due(self) -> bool:
        """Whether there is a policy to be loaded ahead."""
        wanted = self.newest is not None and self.newest != self._loaded
        return wanted and (self._keeps_others or not self.is_ready)

    @property
    def is_ready(self) -> bool:
        """Whether a first policy is loaded: by this, or by an audit."""
        return self._loaded is not None or self.rehearsed

    def hear(self, reply: HeartbeatReply) -> None:
        self.newest = reply.policy or self.newest

    def prepare(self) -> None:
        """Load the newest policy, if it is not loaded. If that fails, it is tried again later, or by an audit."""
        newest, began_s = self.newest, self._clock.monotonic_s()
        if newest is None or not self.is_due:
            return
        try:
            loaded = self._shelf.get(newest, WAIT_S if self.is_ready else self._shelf.wait_s)
        except (BroadcastError, DeadlineExceeded) as error:
            log.info("policy %s could not be loaded ahead: %s", newest.label, error)
            return
        loaded_s = self._clock.monotonic_s()
        log.info("policy %s was loaded ahead of audits in %.2f s", newest.label, loaded_s - began_s)
        if not self.rehearsed:
            self.rehearsed = True
            rehearse(self._judge, loaded, self._client.run_info())
            log.info("an audit was rehearsed in %.2f s", self._clock.monotonic_s() - loaded_s)
        self._loaded = newest


def rehearse(judge: Judge, loaded: LoadedPolicy, run: RunInfo) -> None:
    """Draw a group as the run's are, and compute all that an audit of it computes. Nobody looks at the outcome."""
    try:
        case = _own_group(loaded.engine, run)
        [replay] = replay_all(loaded.engine, [case])
        if not isinstance(replay, Exception):
            case.replay = replay
            run_all(AFTER_PREFILL, case)
        judge.decoders.of(loaded.files)
        if judge.scorer is not None:
            judge.scorer.scores([Job(judge.environment.tasks("train")[0].id, "")])
    except ENGINE_ERRORS as error:
        log.warning("the rehearsal of an audit failed; audits will show whether that matters: %s", error)


def _own_group(engine: Engine, run: RunInfo) -> Case:
    tokens = min(run.sampling.max_new_tokens, CHUNKS * run.proof.rows)
    sampling = run.sampling.model_copy(update={"max_new_tokens": tokens})
    prompt = tuple(token % engine.vocabulary_size for token in range(PROMPT_TOKENS))
    lease = Terms("rehearsal", run.group_size, sampling, run.proof, engine.kind).lease(0, prompt)
    [group] = engine.generate([GenerationRequest(lease.prompt_ids, lease.seed_numbers, sampling)], run.proof)
    submission = submission_of(lease, group, engine.name)
    return Case(lease, submission, "", engine.vocabulary_size, engine.hidden_size, Profile(key=engine.kind))
