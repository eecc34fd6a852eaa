"""Publishing: in a thread, in order, its failures seen by whoever trains; conflicts begin a new incarnation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from trainer_stubs import KEY, RUN, FakeHub, stored_in, tiny_files, tiny_model

from shoal.errors import DeadlineExceeded, HubRefused, PolicyMismatch, ResourceError
from shoal.models.state import policy_state
from shoal.protocol import PolicyManifest
from shoal.runtime.clock import SystemClock
from shoal.shardcast.origin import Origin
from shoal.trainer.checkpoint import CheckpointStore, Copied
from shoal.trainer.publisher import Publisher
from shoal.trainer.record import RunRecord, Trackers

Make = Callable[..., Publisher]


def handover(version: int = 0, seed: int = 0, captured: Any = None) -> tuple[Any, ...]:
    return version, Copied(policy_state(tiny_model(seed)), captured), [{"step": 0, "loss": 1.0}]


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
            "republished_until": -1, "deadline_s": 20.0, "files": tiny_files(tiny_model()), "dtype": "float32",
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


def test_a_version_is_written_with_the_ledgers_head_then_announced(
    tmp_path: Path, hub: FakeHub, publisher: Make
) -> None:
    manifest = published(publisher(), handover(0))
    assert hub.policies == {(0, 0): manifest.policy.digest}
    assert manifest.ledger_head is not None
    assert manifest.ledger_head.hash == "ab" * 32
    assert {entry.name for entry in manifest.entries} >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert (tmp_path / "origin" / "manifests" / "0.0.json").is_file()


def test_what_is_replayed_is_reported_and_not_published(hub: FakeHub, publisher: Make) -> None:
    made = publisher()
    made.submit(*handover(1), publish=False)
    assert made.wait() is None
    assert hub.reports == {0: {"loss": 1.0}}
    assert hub.policies == {}


@pytest.mark.parametrize("failing", ["report", "save"])
def test_what_could_not_be_reported_or_saved_is_not_published(
    hub: FakeHub, publisher: Make, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_file: object) -> None:
        raise OSError(28, "No space left on device")

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
    first = published(made, (0, Copied(weights, {"model.safetensors": weights}, lambda: weight.fill_(2))))
    second = published(made, (1, Copied({"weight": torch.full((4,), 2.0)}, None)))
    assert stored_in(tmp_path / "checkpoints").tensors()["weight"].tolist() == [2.0] * 4
    assert first.policy.digest == second.policy.digest


def test_training_goes_on_while_a_version_is_on_its_way_and_one_that_hangs_ends_in_a_deadline(
    hub: FakeHub, publisher: Make
) -> None:
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
def test_another_digest_for_a_published_version_begins_an_incarnation(
    hub: FakeHub, publisher: Make, origin: str
) -> None:
    published(publisher(), handover(0, seed=0))
    # with the origin's folder lost, only the hub's 409 tells that the digest differs
    second = publisher(origin, republished_until=0)
    assert published(second, handover(0, seed=1)).policy.incarnation == second.incarnation == 1
    assert set(hub.policies) == {(0, 0), (1, 0)}
    assert hub.policies[0, 0] != hub.policies[1, 0]


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        pytest.param(HubRefused(403, "role.trainer", "only the trainer may"), HubRefused, id="another refusal"),
        pytest.param(HubRefused(409, "policy.digest", "another digest"), PolicyMismatch, id="endless conflict"),
        pytest.param(None, PolicyMismatch, id="never published before: a second trainer is at work"),
    ],
)
def test_what_no_new_incarnation_mends_is_an_error(
    hub: FakeHub, publisher: Make, refusal: HubRefused | None, error: type[Exception]
) -> None:
    if refusal is None:
        published(publisher(), handover(0, seed=1))
    else:
        hub.before["announce"] = Mock(side_effect=refusal)
    made = publisher(republished_until=-1 if refusal is None else 5)
    with pytest.raises(error):
        published(made, handover(0))
    assert (made.incarnation == 0) == (error is HubRefused or refusal is None)
