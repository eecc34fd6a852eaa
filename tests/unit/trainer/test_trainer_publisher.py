"""Publishing: in a thread, in order, its failures seen by whoever trains; conflicts begin a new incarnation."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from trainer_stubs import KEY, RUN, FakeHub, tiny_files, tiny_model

from shoal.errors import DeadlineExceeded, HubRefused, PolicyMismatch, ResourceError
from shoal.models.state import policy_state, to_torch
from shoal.runtime.clock import SystemClock
from shoal.shardcast.origin import Origin
from shoal.trainer.checkpoint import CheckpointStore, Copied
from shoal.trainer.publisher import Handover, Publication, Publisher, views_of
from shoal.trainer.record import RunRecord, Trackers


def handover(version: int = 0, seed: int = 0, publish: bool = True) -> Handover:
    rows = [{"step": 0, "loss": 1.0}]
    return Handover(version, Copied(policy_state(tiny_model(seed)), None), rows, publish=publish)


def publisher(tmp_path: Path, hub: FakeHub, **changes: object) -> Publisher:
    given: dict[str, object] = {
        "origin": Origin(tmp_path / "origin", RUN, KEY), "hub": hub, "key": KEY, "run": RUN, "incarnation": 0,
        "republished_until": -1, "deadline_s": 20.0, "files": tiny_files(tiny_model()), "dtype": "float32",
        "record": RunRecord(tmp_path / "metrics.jsonl", hub, Trackers(), SystemClock()),
        "store": CheckpointStore(tmp_path / "checkpoints", 1),
    }  # fmt: skip
    return Publisher(Publication(**{**given, **changes}))  # type: ignore[arg-type]


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub(steps=0)


def test_a_version_is_written_with_the_ledgers_head_then_announced(tmp_path: Path, hub: FakeHub) -> None:
    made = publisher(tmp_path, hub)
    made.submit(handover(0))
    manifest = made.wait()
    made.close()
    assert manifest is not None
    assert hub.policies == {(0, 0): manifest.policy.digest}
    assert manifest.ledger_head is not None
    assert manifest.ledger_head.hash == "ab" * 32
    assert {entry.name for entry in manifest.entries} >= {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert (tmp_path / "origin" / "manifests" / "0.0.json").is_file()


def test_what_is_replayed_is_reported_and_not_published(tmp_path: Path, hub: FakeHub) -> None:
    made = publisher(tmp_path, hub)
    made.submit(handover(1, publish=False))
    assert made.wait() is None
    made.close()
    assert hub.reports == {0: {"loss": 1.0}}
    assert hub.policies == {}


def test_what_could_not_be_reported_is_not_published(tmp_path: Path, hub: FakeHub) -> None:
    def full(_step: int) -> None:
        raise ResourceError("cannot write the report: the disk is full")

    hub.before["report"] = full
    made = publisher(tmp_path, hub)
    made.submit(handover(1))
    with pytest.raises(ResourceError, match="the disk is full"):
        made.wait()
    made.close()
    assert hub.policies == {}


def test_what_cannot_be_saved_is_not_published(tmp_path: Path, hub: FakeHub) -> None:
    def full(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    made = publisher(tmp_path, hub)
    made.submit(Handover(0, Copied(policy_state(tiny_model()), {"model.safetensors": full})))
    with pytest.raises(ResourceError, match="the disk is full"):
        made.wait()
    made.close()
    assert hub.policies == {}


def test_a_copy_is_read_only_once_it_has_arrived(tmp_path: Path, hub: FakeHub) -> None:
    weight, saved = torch.zeros(4), []

    def save(path: Path) -> None:
        saved.append(weight.tolist())
        path.touch()

    made = publisher(tmp_path, hub)
    made.submit(Handover(0, Copied({"weight": weight}, {"model.safetensors": save}, lambda: weight.fill_(2))))
    first = made.wait()
    made.submit(Handover(1, Copied({"weight": torch.full((4,), 2.0)}, None)))
    second = made.wait()
    made.close()
    assert saved == [[2.0] * 4]
    assert first is not None
    assert second is not None
    assert first.policy.digest == second.policy.digest


def test_the_published_type_is_the_one_asked_for() -> None:
    model = tiny_model()
    half = views_of(policy_state(model), "bfloat16")
    assert {view.dtype for view in half} == {"BF16"}
    view = next(view for view in half if view.name == "lm_head.weight")
    assert torch.equal(to_torch(view), model.lm_head.weight.to(torch.bfloat16))


def test_training_goes_on_while_a_version_is_on_its_way(tmp_path: Path, hub: FakeHub) -> None:
    reached, go = threading.Event(), threading.Event()

    def hold(_version: int) -> None:
        reached.set()
        assert go.wait(20)

    hub.before["announce"] = hold
    made = publisher(tmp_path, hub)
    made.submit(handover(0))
    assert reached.wait(20)
    made.check()  # does not wait, does not raise
    assert hub.policies == {}
    go.set()
    assert made.wait() is not None
    made.close()


def test_a_failure_surfaces_at_check_at_wait_and_at_the_next_submit(tmp_path: Path, hub: FakeHub) -> None:
    def full(_version: int) -> None:
        raise ResourceError("cannot write: the disk is full")

    hub.before["announce"] = full
    made = publisher(tmp_path, hub)
    made.submit(handover(0))
    for look in (made.wait, made.check, lambda: made.submit(handover(1))):
        with pytest.raises(ResourceError, match="disk is full"):
            look()
    made.close()


def test_a_publication_that_hangs_ends_in_a_deadline(tmp_path: Path, hub: FakeHub) -> None:
    go = threading.Event()
    hub.before["announce"] = lambda _version: assert_set(go)
    made = publisher(tmp_path, hub, deadline_s=0.05)
    made.submit(handover(0))
    with pytest.raises(DeadlineExceeded, match="publishing a policy took longer"):
        made.wait()
    go.set()
    made.close()


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


def test_publishing_the_same_again_is_harmless(tmp_path: Path, hub: FakeHub) -> None:
    for _ in range(2):
        made = publisher(tmp_path, hub, republished_until=0)
        made.submit(handover(0))
        made.wait()
        made.close()
        assert made.incarnation == 0
    assert list(hub.policies) == [(0, 0)]


@pytest.mark.parametrize("origin_lost", [False, True])
def test_another_digest_for_a_published_version_begins_an_incarnation(
    tmp_path: Path, hub: FakeHub, origin_lost: bool
) -> None:
    first = publisher(tmp_path, hub)
    first.submit(handover(0, seed=0))
    first.wait()
    first.close()
    # with the origin's folder lost, only the hub's 409 tells that the digest differs
    second = publisher(tmp_path / "lost" if origin_lost else tmp_path, hub, republished_until=0)
    second.submit(handover(0, seed=1))
    manifest = second.wait()
    second.close()
    assert manifest is not None
    assert second.incarnation == manifest.policy.incarnation == 1
    assert set(hub.policies) == {(0, 0), (1, 0)}
    assert hub.policies[0, 0] != hub.policies[1, 0]


def test_a_conflict_on_a_version_never_published_before_is_an_error(tmp_path: Path, hub: FakeHub) -> None:
    """It means that a second trainer is at work; new incarnations would only hide it."""
    first = publisher(tmp_path, hub)
    first.submit(handover(0, seed=0))
    first.wait()
    first.close()
    second = publisher(tmp_path, hub, republished_until=-1)
    second.submit(handover(0, seed=1))
    with pytest.raises(PolicyMismatch):
        second.wait()
    second.close()


def test_any_other_refusal_of_the_hub_is_an_error(tmp_path: Path, hub: FakeHub) -> None:
    def refuse(_version: int) -> None:
        raise HubRefused(403, "role.trainer", "only the trainer may announce")

    hub.before["announce"] = refuse
    made = publisher(tmp_path, hub, republished_until=5)
    made.submit(handover(0))
    with pytest.raises(HubRefused, match="only the trainer"):
        made.wait()
    made.close()
    assert made.incarnation == 0


def test_an_endless_conflict_ends(tmp_path: Path, hub: FakeHub) -> None:
    def conflict(_version: int) -> None:
        raise HubRefused(409, "policy.digest", "another digest")

    hub.before["announce"] = conflict
    made = publisher(tmp_path, hub, republished_until=5)
    made.submit(handover(0))
    with pytest.raises(PolicyMismatch, match="another trainer"):
        made.wait()
    made.close()
