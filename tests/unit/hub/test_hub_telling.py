"""Which verdicts a status shows: the newest, and refusals that hundreds of acceptances would hide."""

from __future__ import annotations

from shoal.hub.service.reporting import REFUSALS_SHOWN, VERDICTS_SHOWN, telling
from shoal.hub.state.machines import SubmissionState
from shoal.hub.state.rows import SubmissionRow


def decided(unit: int, state: SubmissionState = SubmissionState.ACCEPTED) -> SubmissionRow:
    return SubmissionRow(f"{unit:064x}", "lease", unit, "node", 0, 0, "digest", 1, 0, state, decided_at_ms=unit)


def test_a_refusal_is_shown_behind_the_newest_decisions() -> None:
    rows = [decided(unit) for unit in range(200, 0, -1)]
    rows[100] = decided(100, SubmissionState.REJECTED)
    rows[150] = decided(50, SubmissionState.INCONCLUSIVE)
    shown = telling(rows)
    assert shown == [*rows[:VERDICTS_SHOWN], rows[100], rows[150]]


def test_no_number_of_refusals_makes_a_status_long() -> None:
    rows = [decided(unit, SubmissionState.REJECTED) for unit in range(1000, 0, -1)]
    assert len(telling(rows)) == VERDICTS_SHOWN + REFUSALS_SHOWN


def test_few_decisions_are_all_shown() -> None:
    rows = [decided(2), decided(1, SubmissionState.REJECTED)]
    assert telling(rows) == rows
