"""Whether a run can continue by itself: alarms about validators, and who is missing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.hub import Bench, ok, verdict_on, worker_key
from shoal.protocol import Outcome, Severity, VerdictReply, VerdictReport, sign_document


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "hub", {"steps": 1})
    ok(bench.announce(0))
    beat(bench)
    yield bench
    bench.close()


def beat(bench: Bench, **counters: float) -> None:
    bench.trainer.beat()
    bench.validator.beat(counters=counters)


def test_a_missed_canary_alarms_once_for_each(bench: Bench) -> None:
    beat(bench, canaries_caught=3, canaries_missed=1)
    first = bench.status().alarms
    assert len(first) == 1
    assert first[0].startswith("validator let 1 known-bad submissions pass: stop it")
    bench.clock.advance(5)
    beat(bench, canaries_caught=4, canaries_missed=1)
    assert bench.status().alarms == first
    beat(bench, canaries_caught=4, canaries_missed=2)
    assert "let 2 known-bad" in bench.status().alarms[0]
    beat(bench)  # started again
    assert len(bench.status().alarms) == 1


def test_first_of_two_opposite_verdicts_stands_and_the_status_alarms(bench: Bench) -> None:
    second = bench.actor(worker_key(9))
    ok(second.register("validator"))
    [lease] = bench.alice.lease()
    ok(bench.alice.submit(lease))
    [audit] = bench.audits()
    ok(bench.judge(audit))
    severe = {"outcome": Outcome.REJECTED, "severity": Severity.CERTAIN, "reason": "sampling.seed"}
    signed = sign_document(verdict_on(lease, audit.submission, (), generated_tokens=0, **severe), second.key)
    for _ in range(2):  # it tells so once more
        answer = ok(second.call("POST", "/verdicts", VerdictReport(verdicts=(signed,))))
        [refused] = VerdictReply.model_validate_json(answer.content).refused
        assert (refused.status, refused.code) == (409, "verdict.decided")
    row = bench.row(bench.alice)
    assert (row.accepted, row.rejected, row.certain) == (1, 0, 0)
    [alarm] = bench.status().alarms
    both = f"validators {bench.validator.key.node} and {second.key.node} disagree about unit {lease.unit}"
    assert f"{both}; the first verdict stands" in alarm


@pytest.mark.parametrize(("counters", "said"), [
    pytest.param({"accepted": 253, "rejected": 1, "unsure": 1}, "", id="255 audits without a canary"),
    pytest.param({"accepted": 254, "rejected": 1, "unsure": 1}, "made 256 audits", id="256 audits without one"),
    pytest.param({"accepted": 254, "rejected": 1, "unsure": 1, "canaries_caught": 1}, "", id="one caught"),
    pytest.param({"unscored": 7, "unsure": 7}, "", id="7 unscored"),
    pytest.param({"unscored": 8, "unsure": 8, "accepted": 100}, "not score 8 of 108", id="8 of 108 unscored"),
    pytest.param({"unscored": 8, "unsure": 8, "accepted": 152}, "", id="5 % unscored"),
    pytest.param({"abstained": 1}, "has another environment, or other data", id="abstains"),
])  # fmt: skip
def test_a_validator_whose_audits_say_little_alarms_once(bench: Bench, counters: dict[str, float], said: str) -> None:
    for _ in range(2):
        beat(bench, **counters)
        assert [said in each for each in bench.status().alarms] == [True] * bool(said)


def test_what_could_not_be_scored_is_counted_in_status_and_metrics(bench: Bench) -> None:
    beat(bench, unscored=3, unsure=3, canaries_caught=1)
    bench.alice.beat(counters={"unscored": 40})
    assert bench.status().unscored == 3
    assert "shoal_hub_unscored 3.0" in bench.http.get("/metrics").text


class TestStandstill:
    """Nobody left to train, check or work: said within seconds, with what to do."""

    def test_the_only_worker_was_banned(self, bench: Bench) -> None:
        bench.alice.beat()
        audit = bench.audit_of(bench.alice)
        ok(bench.judge(audit, (), outcome=Outcome.REJECTED, reason="proofs.drift", severity=Severity.CERTAIN))
        (sentence,) = bench.status().standstill
        assert sentence.startswith("nobody is left to work: worker")
        assert "was banned for proofs.drift" in sentence
        assert f"`shoal why {bench.alice.key.node[:8]}`" in sentence
        assert "start another with `shoal join`" in sentence

    def test_who_is_silent_for_twenty_seconds_is_missed(self, bench: Bench) -> None:
        bench.alice.beat()
        bench.clock.advance(21)
        missing = [sentence.partition(":")[0] for sentence in bench.status().standstill]
        assert missing == [f"nobody is left to {what}" for what in ("train", "check", "work")]
        beat(bench)
        (sentence,) = bench.status().standstill
        assert "was heard of 21 s ago for the last time" in sentence

    def test_workers_whose_format_is_still_measured_after_two_minutes(self, tmp_path: Path) -> None:
        coarse = "torch/cpu/bfloat16"
        bench = Bench(tmp_path / "coarse", {"steps": 1}, changes={"measurable": (coarse,)})
        ok(bench.announce(0))
        said = []
        for _ in range(2):
            beat(bench)
            for worker in (bench.alice, bench.bob):
                worker.beat()
                worker.ask(profile=coarse)
            said.append(bench.status().standstill)
            bench.clock.advance(121)
        bench.close()
        [sentence] = said[1]
        assert said[0] == (), "a first calibration takes its time"
        assert sentence == (
            f"no worker here is of a kind that can be judged now ({coarse}): "
            "the run's validators have not measured work in bfloat16 yet"
        )

    def test_a_node_that_has_registered_and_is_loading_is_not_missed_for_a_minute(self, bench: Bench) -> None:
        """Neither at the start nor when a run is resumed: `shoal run` shows the sentence as soon as there is one."""
        assert bench.status().standstill == ()
        bench.clock.advance(61)
        beat(bench)
        (sentence,) = bench.status().standstill
        assert "was heard of 61 s ago for the last time" in sentence

    def test_a_halted_or_finished_run_needs_nobody(self, bench: Bench) -> None:
        bench.accept_groups(2)
        assert bench.batch(0) is not None
        ok(bench.announce(1))
        bench.clock.advance(1000)
        assert bench.status().standstill == ()
