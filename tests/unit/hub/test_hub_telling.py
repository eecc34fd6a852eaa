"""Which verdicts a status shows: the newest, and refusals that hundreds of acceptances would hide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.hub import Bench, fresh_request, ok
from shoal.hub.service import reporting
from shoal.protocol import Outcome, Severity


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    ok(bench.announce(0))
    yield bench
    bench.close()


def test_a_refusal_is_shown_behind_the_newest_decisions_and_only_once(
    started: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "VERDICTS_SHOWN", 1)
    bad, good = started.alice.lease(fresh_request(), 1), started.bob.lease(fresh_request(), 1)
    ok(started.alice.submit(bad[0]))
    (audit,) = started.audits()
    refusal = {"outcome": Outcome.REJECTED, "reason": "sampling.seed", "severity": Severity.STATISTICAL}
    ok(started.judge(audit, **refusal))
    assert [verdict.unit for verdict in started.status().verdicts] == [bad[0].unit]
    started.clock.advance(1)
    ok(started.bob.submit(good[0]))
    (audit,) = started.audits()
    ok(started.judge(audit))
    shown = [(verdict.unit, verdict.outcome) for verdict in started.status().verdicts]
    assert shown == [(good[0].unit, "accepted"), (bad[0].unit, "rejected")]
