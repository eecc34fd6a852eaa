"""`GET /ready`: every role is here, audits catch what is known to be bad, the disk takes what comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.hub import Bench, fresh_request, ok
from shoal.errors import DiskError, ResourceError
from shoal.hub.storage import SqliteStorage
from shoal.protocol import Outcome, Severity


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "hub", {"steps": 1})
    ok(bench.announce(0))
    beat(bench)
    yield bench
    bench.close()


def beat(bench: Bench, **counters: float) -> None:
    ok(bench.trainer.call("POST", "/heartbeat", {}))
    ok(bench.validator.call("POST", "/heartbeat", {"counters": counters}))


def problems(bench: Bench) -> list[str]:
    response = bench.http.get("/ready")
    body = response.json()
    assert response.status_code == (200 if body["ready"] else 503)
    assert body["ready"] == (body["problems"] == [])
    found: list[str] = body["problems"]
    return found


def test_a_run_with_everybody_in_place_is_ready(bench: Bench) -> None:
    assert problems(bench) == []


def test_roles_that_are_gone_are_named(bench: Bench) -> None:
    bench.clock.advance(61)
    assert [problem.split(":")[0] for problem in problems(bench)] == [
        "no trainer was heard of for 60 s",
        "no validator was heard of for 60 s",
    ]
    ok(bench.trainer.call("POST", "/heartbeat", {}))
    assert [problem.split()[1] for problem in problems(bench)] == ["validator"]


def test_a_finished_run_needs_nobody(bench: Bench) -> None:
    bench.accept_groups(2)
    assert bench.batch(0) is not None
    ok(bench.announce(1))
    bench.clock.advance(1000)
    assert problems(bench) == []


def test_a_missed_canary_is_told_for_as_long_as_it_counts_and_alarms_once(bench: Bench) -> None:
    beat(bench, canaries_caught=3, canaries_missed=1)
    (problem,) = problems(bench)
    assert problem.startswith("validator let 1 known-bad submissions pass: stop it")
    first = bench.status().alarms
    assert len(first) == 1
    bench.clock.advance(5)
    beat(bench, canaries_caught=4, canaries_missed=1)
    assert bench.status().alarms == first
    beat(bench, canaries_caught=4, canaries_missed=2)
    assert "let 2 known-bad" in bench.status().alarms[0]
    beat(bench)  # started again
    assert problems(bench) == []
    assert len(bench.status().alarms) == 1


def test_a_worker_cannot_raise_that_alarm(bench: Bench) -> None:
    ok(bench.alice.call("POST", "/heartbeat", {"counters": {"canaries_missed": 1}}))
    assert bench.status().alarms == ()
    assert problems(bench) == []


@pytest.mark.parametrize(("audited", "caught", "expected"), [(255, 0, 0), (256, 0, 1), (256, 1, 0)])
def test_a_validator_that_meets_no_canary_is_untested(bench: Bench, audited: int, caught: int, expected: int) -> None:
    beat(bench, accepted=audited - 2, rejected=1, unsure=1, canaries_caught=caught)
    found = problems(bench)
    assert len(found) == expected
    assert all("256 audits" in problem for problem in found)


def test_a_disk_that_takes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: SqliteStorage, durable: bool = True, exclusive: bool = False) -> None:
        raise ResourceError("cannot use the database /srv/run/hub.db: shoal@db.internal is gone")

    assert problems(bench) == []
    monkeypatch.setattr(SqliteStorage, "write", refuse)
    assert problems(bench) == [], "tried once in a while only"
    bench.clock.advance(5)
    assert problems(bench) == ["the hub cannot write to its database: its log says why, and what to do"]
    bench.app.state.hub.context.fail(DiskError("cannot write /srv/run/blobs/x: the disk is full"))
    bench.clock.advance(5)
    [problem] = problems(bench)
    assert problem.startswith("the hub's disk takes nothing more (full, ")
    assert "/srv" not in problem


@pytest.mark.parametrize(("failed", "accepted", "expected"), [(7, 0, 0), (8, 100, 1), (8, 152, 0)])
def test_a_validator_that_cannot_score_is_told(bench: Bench, failed: int, accepted: int, expected: int) -> None:
    beat(bench, no_sample=failed, unsure=failed, accepted=accepted, canaries_caught=1)
    found = problems(bench)
    assert len(found) == expected
    assert all(f"could not score {failed} of {failed + accepted} groups" in problem for problem in found)


def test_a_validator_that_abstains_is_told(bench: Bench) -> None:
    beat(bench, abstained=1)
    [problem] = problems(bench)
    assert "has another environment, or other data" in problem


def test_what_could_not_be_scored_is_counted_in_status_and_metrics(bench: Bench) -> None:
    beat(bench, no_sample=3, unsure=3, canaries_caught=1)
    ok(bench.alice.call("POST", "/heartbeat", {"counters": {"no_sample": 40}}))
    assert bench.status().no_sample == 3
    assert "shoal_hub_no_sample 3.0" in bench.http.get("/metrics").text


class TestStandstill:
    """Nobody left to train, check or work: said within seconds, with what to do."""

    def told(self, bench: Bench) -> list[str]:
        found = list(bench.status().standstill)
        assert bench.http.get("/ready").json()["standstill"] == found
        return found

    def work(self, bench: Bench) -> None:
        ok(bench.alice.call("POST", "/heartbeat", {}))

    def test_nothing_is_said_while_everybody_is_here(self, bench: Bench) -> None:
        self.work(bench)
        assert self.told(bench) == []

    def test_the_only_worker_was_banned(self, bench: Bench) -> None:
        self.work(bench)
        (lease,) = bench.alice.lease(fresh_request())
        ok(bench.alice.submit(lease))
        (audit,) = bench.audits()
        ok(bench.judge(audit, (), outcome=Outcome.REJECTED, reason="proofs.drift", severity=Severity.CERTAIN))
        (sentence,) = self.told(bench)
        assert sentence.startswith("nobody is left to work: worker")
        assert "was banned for proofs.drift" in sentence
        assert f"`shoal why {bench.alice.key.node[:8]}`" in sentence
        assert "start another with `shoal join`" in sentence
        assert problems(bench) == [], "workers must reach the hub to join"

    def test_the_only_worker_is_suspended(self, bench: Bench) -> None:
        self.work(bench)
        (lease,) = bench.alice.lease(fresh_request())
        ok(bench.alice.submit(lease))
        (audit,) = bench.audits()
        ok(bench.judge(audit, (), outcome=Outcome.REJECTED, reason="proofs.drift", severity=Severity.STATISTICAL))
        (sentence,) = self.told(bench)
        assert "is suspended for 60 s more: proofs.drift" in sentence

    def test_who_is_silent_for_twenty_seconds_is_missed(self, bench: Bench) -> None:
        self.work(bench)
        bench.clock.advance(21)
        missing = [sentence.partition(":")[0] for sentence in self.told(bench)]
        assert missing == [f"nobody is left to {what}" for what in ("train", "check", "work")]
        beat(bench)
        (sentence,) = self.told(bench)
        assert "was heard of 21 s ago for the last time" in sentence

    def test_workers_whose_format_is_still_measured_after_two_minutes(self, tmp_path: Path) -> None:
        coarse = "torch/cpu/bfloat16"
        bench = Bench(tmp_path / "coarse", {"steps": 1}, changes={"measurable": (coarse,)})
        ok(bench.announce(0))
        said = []
        for _ in range(2):
            beat(bench)
            for worker in (bench.alice, bench.bob):
                ok(worker.call("POST", "/heartbeat", {}))
                ok(worker.call("POST", "/leases", {"request": fresh_request(), "profile": coarse}))
            said.append(self.told(bench))
            bench.clock.advance(121)
        bench.close()
        [sentence] = said[1]
        assert said[0] == [], "a first calibration takes its time"
        assert sentence == (
            f"no worker here is of a kind that can be judged now ({coarse}): "
            "the run's validators have not measured work in bfloat16 yet"
        )

    def test_a_node_that_has_registered_and_is_loading_is_not_missed_for_a_minute(self, bench: Bench) -> None:
        """Neither at the start nor when a run is resumed: `shoal run` shows the sentence as soon as there is one."""
        assert self.told(bench) == []
        bench.clock.advance(61)
        beat(bench)
        (sentence,) = self.told(bench)
        assert "was heard of 61 s ago for the last time" in sentence

    def test_a_halted_or_finished_run_needs_nobody(self, bench: Bench) -> None:
        bench.accept_groups(2)
        assert bench.batch(0) is not None
        ok(bench.announce(1))
        bench.clock.advance(1000)
        assert self.told(bench) == []
