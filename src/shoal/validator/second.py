"""A second look at work that the first one would reject or leave open: in the worker's own number format.

    first look                 second look          verdict
    fails for certain          fails, too           rejected, certain
                               passes or open       unsure (`second.passed`)
    fails by statistics        fails, too           rejected, statistical
                               passes or open       unsure (`second.passed`)
                               not possible here    unsure (`second.missing`)
    open (an accident)         passes               accepted
                               anything else        unsure, as before

A validator that computes in another format than the worker sees rounding of two formats; in the worker's own it sees
less of it, and independently. Where both have the same format, and to confirm what is certain where this machine has no
other, the group is prefilled again alone: a fault of one batch or of the memory does not repeat itself. An accident in
the validator's own coarse format may be the validator's: it is looked at in float32 where there is the memory for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from shoal.engines import Engine, build
from shoal.engines.memory import release_memory
from shoal.engines.shelf import EngineShelf, Fetch
from shoal.errors import BroadcastError, ConfigError, DeadlineExceeded, ModelError, ResourceError
from shoal.protocol import CheckResult, PolicyRef, Severity, Tally
from shoal.protocol.lease import format_of
from shoal.validator.case import Case, Finding, passed, unsure
from shoal.validator.verdicts import MACHINERY_SECOND_MISSING, MACHINERY_SECOND_PASSED

log = logging.getLogger(__name__)

WAIT_S = 30.0

Engines = Callable[[PolicyRef, str], Engine | None]
"""An engine of this policy that computes in a number format; None if this machine has none."""


class SecondEngines:
    """One more engine, of another number format than the validator's own. It is made when it is first needed, follows
    the policies that it is asked for, and is dropped when nothing is to be audited (`drop`)."""

    def __init__(self, engine: str, device: str, fetch: Fetch) -> None:
        self._engine, self._device, self._fetch = engine, device, fetch
        self._dtype = ""
        self._shelf: EngineShelf | None = None
        self._failed: tuple[PolicyRef, str] | None = None

    def get(self, policy: PolicyRef, dtype: str) -> Engine | None:
        """Tried once for each policy and format: a machine without the memory for it is not asked at every audit."""
        if self._failed == (policy, dtype):
            return None
        if self._shelf is None or self._dtype != dtype:
            self.drop()
            self._shelf = EngineShelf(self._fetch, lambda files: build(self._engine, files, self._device, dtype), 1)
            self._dtype = dtype
        try:
            return self._shelf.get(policy, WAIT_S).engine
        except (BroadcastError, ConfigError, DeadlineExceeded, ModelError, ResourceError) as error:
            log.warning("no second look in %s is possible, so what needs one is unsure: %s", dtype, error)
            self._failed = (policy, dtype)
            self.drop()
            return None

    def drop(self) -> None:
        """Give its memory back."""
        if self._shelf is not None:
            self._shelf = None
            release_memory()


def settle(
    case: Case, first: list[Finding], again: Case | None, second: Sequence[Finding]
) -> tuple[list[Finding], Tally]:
    """All findings, the one that decides last, and what joins the node's record. `again` is the case with the second
    replay and `second` what was found of it; None if there is no second look."""
    last, dtype = first[-1], format_of(case.lease.profile)
    if again is None:
        if last.unsure or last.severity is Severity.CERTAIN:
            return first, case.tally
        message = f"this validator cannot compute in {dtype} to confirm it with a second look: {last.result.message}"
        return [*first, unsure(MACHINERY_SECOND_MISSING, message, format=dtype)], case.tally
    found = second[-1]
    if last.unsure:
        return ([*first[:-1], passed("second", format=dtype)] if found.passed else first), case.tally
    if found.passed or found.unsure:
        message = f"seen in {dtype}, the worker's own number format, the group is in order: {last.result.message}"
        return [*first, unsure(MACHINERY_SECOND_PASSED, message, format=dtype, first=last.reason)], again.tally
    evidence = {**found.result.evidence, "format": dtype, "reason": found.reason}
    confirmed = CheckResult(check="second", passed=False, evidence=evidence, message=found.result.message)
    return [*first[:-1], Finding(confirmed, found.reason, found.severity), last], case.tally
