"""Publishing: in a thread, in order, its failures seen by whoever trains; conflicts begin a new incarnation. Saving and
publishing beside training, in an order that a crash anywhere can rely on; which checkpoints are kept."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import trainer_stubs as stubs
from hypothesis import given
from hypothesis import strategies as st
from trainer_stubs import KEY, RUN, SETTINGS, FakeHub, Killed, killing, tiny_model, training_run

from shoal.errors import DeadlineExceeded, HubRefused, PolicyMismatch, ResourceError
from shoal.models.state import policy_state
from shoal.protocol import PolicyManifest
from shoal.runtime.clock import SystemClock
from shoal.runtime.sizing import settle
from shoal.shardcast.origin import Origin
from shoal.trainer.checkpoint import CheckpointStore, StateCopy
from shoal.trainer.folder import AWAITED, Place, Retention, ranked
from shoal.trainer.guards import GuardSettings
from shoal.trainer.publisher import Publisher
from shoal.trainer.record import RunRecord, Trackers

Make = Callable[..., Publisher]


def handover(version: int = 0, seed: int = 0, captured: Any = None) -> tuple[Any, ...]:
    return version, StateCopy(policy_state(tiny_model(seed)), captured), [{"step": 0, "loss": 1.0}]


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub(steps=0)


@pytest.fixture
def publisher(tmp_path: Path, hub: FakeHub) -> Iterator[Make]:
    """Makes publishers, which are closed in the end; `at` is the folder of the origin."""
    made: list[Publisher] = []

    def make(at: str = "origin", **changes: object) -> Publisher:
        given: dict[str, Any] = {
            "origin": Origin(tmp_path / at, RUN, KEY), "hub": hub, "key": KEY, "run": RUN, "incarnation": 0,
            "republished_until": -1, "deadline_s": 20.0, "files": stubs.tiny_files(tiny_model()), "dtype": "float32",
            "record": RunRecord(tmp_path / "metrics.jsonl", hub, Trackers(), SystemClock()),
            "store": CheckpointStore(tmp_path / "checkpoints", 1),
        }  # fmt: skip
        made.append(Publisher(**{**given, **changes}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def published(by: Publisher, given: tuple[Any, ...]) -> PolicyManifest:
    by.submit(*given)
    manifest = by.wait()
    assert manifest is not None
    return manifest


def test_a_version_is_written_with_the_ledgers_head_then_announced(tmp_path, hub, publisher):
    manifest = published(publisher(), handover(0))
    assert hub.policies == {(0, 0): manifest.policy.digest}
    assert manifest.ledger_head.hash == "ab" * 32
    assert {entry.name for entry in manifest.entries} >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert (tmp_path / "origin" / "manifests" / "0.0.json").is_file()


def test_replayed_versions_are_reported_and_not_published(hub: FakeHub, publisher: Make) -> None:
    made = publisher()
    made.submit(*handover(1), publish=False)
    assert made.wait() is None
    assert (hub.reports, hub.policies) == ({0: {"loss": 1.0}}, {})


@pytest.mark.parametrize("failing", ["report", "save"])
def test_version_that_was_not_reported_or_saved_is_not_published(hub, publisher, failing, monkeypatch):
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("shoal.trainer.checkpoint.save_tensors", full)
    captured = {"model.safetensors": {}} if failing == "save" else None
    if failing == "report":
        hub.before["report"] = Mock(side_effect=ResourceError("cannot write the report: the disk is full"))
    made = publisher()
    made.submit(*handover(0, captured=captured))
    with pytest.raises(ResourceError, match="the disk is full"):
        made.wait()
    assert hub.policies == {}


def test_a_copy_is_read_only_once_it_has_arrived(tmp_path: Path, publisher: Make) -> None:
    weight, made = torch.zeros(4), publisher()
    weights = {"weight": weight}
    first = published(made, (0, StateCopy(weights, {"model.safetensors": weights}, lambda: weight.fill_(2))))
    second = published(made, (1, StateCopy({"weight": torch.full((4,), 2.0)}, None)))
    assert stubs.stored_in(tmp_path / "checkpoints").tensors()["weight"].tolist() == [2.0] * 4
    assert first.policy.digest == second.policy.digest


def test_training_continues_while_publishing_and_a_hanging_version_times_out(hub: FakeHub, publisher: Make) -> None:
    reached, go = threading.Event(), threading.Event()
    hub.before["announce"] = lambda _version: reached.set() or go.wait(20)
    made = publisher(deadline_s=0.05)
    made.submit(*handover(0))
    assert reached.wait(20)
    made.check()  # does not wait, does not raise
    assert hub.policies == {}
    with pytest.raises(DeadlineExceeded):
        made.wait()
    go.set()
    made.deadline_s = 20
    assert made.wait() is not None


def test_a_failure_surfaces_at_check_at_wait_and_at_the_next_submit(hub: FakeHub, publisher: Make) -> None:
    hub.before["announce"] = Mock(side_effect=ResourceError("cannot write: the disk is full"))
    made = publisher()
    made.submit(*handover(0))
    for look in (made.wait, made.check, lambda: made.submit(*handover(1))):
        with pytest.raises(ResourceError, match="disk is full"):
            look()


@pytest.mark.parametrize("origin", ["origin", "lost"])
def test_another_digest_for_a_published_version_begins_an_incarnation(hub, publisher, origin):
    published(publisher(), handover(0, seed=0))
    # with the origin's folder lost, only the hub's 409 tells that the digest differs
    second = publisher(origin, republished_until=0)
    assert published(second, handover(0, seed=1)).policy.incarnation == second.incarnation == 1
    assert set(hub.policies) == {(0, 0), (1, 0)}
    assert hub.policies[0, 0] != hub.policies[1, 0]


@pytest.mark.parametrize(("refusal", "error"), [
    pytest.param(HubRefused(403, "role.trainer", "only the trainer may"), HubRefused, id="another refusal"),
    pytest.param(HubRefused(409, "policy.digest", "another digest"), PolicyMismatch, id="endless conflict"),
    pytest.param(None, PolicyMismatch, id="never published before: a second trainer is at work"),
])  # fmt: skip
def test_conflict_that_no_incarnation_resolves_is_an_error(hub, publisher, refusal, error):
    if refusal is None:
        published(publisher(), handover(0, seed=1))
    else:
        hub.before["announce"] = Mock(side_effect=refusal)
    made = publisher(republished_until=-1 if refusal is None else 5)
    with pytest.raises(error):
        published(made, handover(0))
    assert (made.incarnation == 0) == (error is HubRefused or refusal is None)


STEPS = 3
SCORES = {0: 0.1, 2: 0.8, 4: 0.3, 6: 0.8, 8: 0.2}


def without_stops() -> GuardSettings:
    """No guard that stops a run: for one of those, older checkpoints are kept too."""
    return GuardSettings.model_validate({name: {"action": "warn"} for name in ("divergence", "reward_collapse")})


PLAIN = SETTINGS.model_copy(update={"guards": without_stops()})
QUIET = PLAIN.model_copy(update={"evaluate_every": 0})
SPARSE = PLAIN.model_copy(update={"checkpoint_every": 7, "keep_checkpoints": 1})


def saved(folder: Path) -> list[str]:
    found = (folder / "trainer" / "checkpoints").glob("[!.]*")
    return sorted((path.name for path in found), key=lambda name: tuple(map(int, name.split("."))))


def newest(folder: Path) -> int:
    return max((int(name.partition(".")[0]) for name in saved(folder)), default=-1)


def test_a_version_goes_out_after_its_checkpoint_and_the_report_of_the_step_before(tmp_path: Path) -> None:
    hub, seen = FakeHub(STEPS, max_staleness=1), []
    hub.before["announce"] = lambda version: seen.append((version, newest(tmp_path), len(hub.reports)))
    hub.before["evaluations"] = seen.append  # nobody asks for scores that nobody measures
    training_run(tmp_path, hub, QUIET)[0].run()
    assert seen == [(version, version, version) for version in range(STEPS + 1)]


@pytest.mark.parametrize(("settings", "scores", "killed", "left"), [
    (SETTINGS, SCORES, None, ["6.0", "7.0", "8.0"]),  # and none that only guards look back to
    (PLAIN, {**SCORES, 6: 0.7}, 5, ["2.0", "7.0", "8.0"]),
    (SPARSE, {**SCORES, 6: 0.7}, None, ["2.0", "8.0"]),  # what is measured is saved though no checkpoint is due
], ids=["guarded", "killed", "sparse"])  # fmt: skip
def test_a_finished_run_keeps_the_newest_and_the_best(tmp_path, settings, scores, killed, left):
    during: list[list[str]] = []
    hub, settings = FakeHub(8, max_staleness=1), settings.model_copy(update={"minibatches": 1})
    hub.before["announce"], hub.score = lambda _version: during.append(saved(tmp_path)), scores.get
    if killed is not None:
        hub.before["batch"] = killing(killed)
        with pytest.raises(Killed):
            training_run(tmp_path, hub, settings)[0].run()
        assert "2.0" in saved(tmp_path)
        del hub.before["batch"]
    training_run(tmp_path, hub, settings)[0].run()
    assert saved(tmp_path) == left
    if settings.guards.lookback:
        assert "0.0" in during[-1], "a guard that stops the run may need it"
    else:
        assert max(map(len, during)) <= settle(settings).keep_checkpoints + settings.keep_best + AWAITED


RULE = Retention(keep=2, keep_best=1, is_measured=lambda version: version % 5 == 0)


def after(versions: int, scores: dict[int, float], delay: int = 0) -> list[int]:
    """What is left when versions were saved one by one, and the score of each came `delay` versions later."""
    left: set[Place] = set()
    for version in range(versions):
        known = {number: score for number, score in scores.items() if number + delay <= version}
        left = RULE.kept([*left, (version, 0)], known)
    return sorted(version for version, _ in left)


def test_the_newest_the_best_and_those_that_wait_for_their_score() -> None:
    assert after(28, {0: 0.1, 5: 0.7, 10: 0.6, 15: 0.2}) == [5, 20, 25, 26, 27]
    assert after(24, {0: 1.0, 5: 1.0, 10: 0.5, 15: 1.0, 20: 0.9}) == [15, 22, 23], "of equal ones the newer"
    assert after(100, {}) == [90, 95, 98, 99], "those that nobody ever measures do not pile up"
    scores = {0: 0.1, 5: 0.7, 10: 0.6, 15: 0.2, 20: 0.3}
    assert [after(34, scores, delay)[0] for delay in (0, 1, 4, 7)] == [5] * 4, "however late its score comes"


def test_a_version_of_two_incarnations_counts_once_and_as_the_newer_one() -> None:
    places = [(5, 0), (5, 1), (7, 1), (8, 1)]
    assert RULE.kept(places, {5: 0.9}) == {(5, 1), (7, 1), (8, 1)}
    assert ranked(places, {5: 0.9, 7: 0.1}) == [(5, 1), (7, 1)]


places_strategy = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), unique=True, max_size=30)
scores_strategy = st.dictionaries(st.integers(0, 40), st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=30)


@given(places_strategy, scores_strategy, st.integers(1, 4), st.integers(0, 3))
def test_bounded_stable_and_never_without_the_newest(places, scores, keep, keep_best):
    rule = Retention(keep, keep_best, RULE.is_measured)
    kept = rule.kept(places, scores)
    assert kept <= set(places)
    assert len(kept) <= keep + keep_best + (AWAITED if keep_best else 0)
    assert set(sorted(places, reverse=True)[:keep]) <= kept
    assert rule.kept(sorted(kept), scores) == kept, "what is kept for a reason stays as long as nothing is learnt"
    if keep_best:
        assert set(ranked(places, scores)[:keep_best]) <= kept
