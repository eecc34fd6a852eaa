"""Attacks on the hub itself, by whoever can reach its address: each is refused with a code, and changes nothing.

The finer points of each have their own tests (tests/unit/hub, tests/unit/ledger); here every one is tried once, by
hand, against a hub behind real sockets.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import TempPaths
from kit.served_hub import Caller, Hub, establish, ok, packed, refusal, running_hub, submission
from shoal import protocol
from shoal.errors import LedgerError
from shoal.ledger import verify

MIB = 2**20
FAILED = {
    "outcome": "rejected", "rewards": (), "generated_tokens": 0, "reason": "x.y", "severity": protocol.Severity.CERTAIN
}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: TempPaths) -> Iterator[Hub]:
    with running_hub(tmp_path_factory.mktemp("door") / "run") as hub:
        yield hub


@pytest.fixture
def worker(hub: Hub) -> Caller:
    return hub.worker()


# ── who asks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_replayed_request(hub: Hub, worker: Caller) -> None:
    headers = worker.signed("POST", "/heartbeat", b"{}")
    ok(hub.http.post("/heartbeat", content=b"{}", headers=headers))
    assert refusal(hub.http.post("/heartbeat", content=b"{}", headers=headers)) == (401, "auth.replay")


@pytest.mark.parametrize("minutes", [-5, 5])
def test_a_request_of_another_time(hub: Hub, worker: Caller, minutes: int) -> None:
    """Kept for later, or dated ahead: refused, and told what time it is here, by which the next one is fine."""
    now_ms = time.time_ns() // 1_000_000
    headers = protocol.sign_request(worker.key, hub.run, "POST", "/heartbeat", b"{}", now_ms + minutes * 60_000)
    answer = hub.http.post("/heartbeat", content=b"{}", headers=headers)
    assert refusal(answer) == (401, "auth.skew")
    signed = protocol.SignedDocument.model_validate(answer.json()["clock"])
    clock = protocol.open_document(signed, protocol.HubClock, hub.folder.key("hub").public_key)
    assert (clock.node, clock.nonce) == (headers["shoal-node"], headers["shoal-nonce"])
    told_ms = clock.now_ms
    headers = protocol.sign_request(worker.key, hub.run, "POST", "/heartbeat", b"{}", told_ms)
    ok(hub.http.post("/heartbeat", content=b"{}", headers=headers))


def test_a_forged_identity(hub: Hub, worker: Caller) -> None:
    """Signed with one's own key in the name of another; and a key of one's own that says it is the trainer."""
    thief = hub.worker()
    headers = thief.signed("POST", "/heartbeat", b"{}") | {"shoal-node": worker.key.node}
    assert refusal(hub.http.post("/heartbeat", content=b"{}", headers=headers)) == (401, "auth.signature")
    impostor = hub.caller()
    answer = impostor.register("trainer", certificate=hub.folder.certificate("trainer"))
    assert refusal(answer)[0] == 403


def test_work_in_the_name_of_another(hub: Hub, worker: Caller) -> None:
    [lease] = hub.worker().lease()
    assert refusal(worker.submit(lease)) == (403, "lease.not_yours")


def test_a_request_for_another_run(hub: Hub, worker: Caller) -> None:
    headers = worker.signed("POST", "/heartbeat", b"{}", run="other-000000000000")
    assert refusal(hub.http.post("/heartbeat", content=b"{}", headers=headers)) == (401, "auth.signature")


def test_a_stranger_and_a_role_that_is_not_ones_own(hub: Hub, worker: Caller) -> None:
    assert refusal(hub.caller().call("POST", "/heartbeat", b"{}")) == (401, "auth.unknown_node")
    for path in ("/audits", "/verdicts", "/batches/0"):
        assert refusal(worker.call("POST", path, {})) == (403, "auth.role")


# ── what is handed in ────────────────────────────────────────────────────────────────────────────────────────────


def test_an_oversized_body(worker: Caller) -> None:
    [lease] = worker.lease()
    assert refusal(worker.submit(lease, bytes(32 * MIB))) == (413, "body.too_big")


def test_a_truncated_body(worker: Caller) -> None:
    [lease] = worker.lease()
    whole = packed(submission(lease))
    assert refusal(worker.submit(lease, whole[: len(whole) // 2])) == (422, "submission.malformed")


def test_a_forged_reward(worker: Caller) -> None:
    """There is no place for one: a submission that brings a reward along is none."""
    [lease] = worker.lease()
    honest = submission(lease)
    scored = [{**rollout, "reward": 1.0} for rollout in honest["rollouts"]]
    for forged in ({**honest, "rewards": [1.0] * len(lease.seeds)}, {**honest, "rollouts": scored}):
        assert refusal(worker.submit(lease, packed(forged))) == (422, "submission.malformed")


def test_another_answer_after_the_first(worker: Caller) -> None:
    [lease] = worker.deliver()
    other = submission(lease, engine="another")
    assert refusal(worker.submit(lease, packed(other))) == (409, "submission.other_body")


# ── what is asked for ────────────────────────────────────────────────────────────────────────────────────────────


def test_seed_grinding(hub: Hub) -> None:
    """Who gives a unit back gets no other dice for it, and neither does anyone else."""
    grinder, next_one = hub.worker(), hub.worker()
    [lease] = grinder.lease()
    for caller in (grinder, next_one):
        ok(grinder.call("POST", "/leases/release", {"leases": [lease.lease]}))
        again = {each.unit: each for each in caller.lease(16)}
        assert again[lease.unit].seeds == lease.seeds
        assert again[lease.unit].prompt_ids == lease.prompt_ids
        ok(caller.call("POST", "/leases/release", {"leases": [each.lease for each in again.values()]}))


def test_a_profile_that_nobody_has_measured(worker: Caller) -> None:
    """Who could choose what it is measured by would choose a measure that nothing fails."""
    for profile in ("torch/cpu/int2", "anything/at/all"):
        asked = {"request": "request-loose", "profile": profile}
        assert refusal(worker.call("POST", "/leases", asked)) == (403, "profile.unknown")


def test_hoarding_leases(tmp_path_factory: TempPaths) -> None:
    """A new key has one unit until its first group is accepted, and loses it when the time is over."""
    with running_hub(tmp_path_factory.mktemp("hoard") / "run", hub={"lease_s": 0.5, "requests_per_key_s": 0}) as hub:
        hoarder = hub.worker()
        held = hoarder.lease(16)
        assert len(held) == 1
        assert "until its first group is accepted" in hoarder.ask().waiting
        units: set[int] = set()
        end_s = time.monotonic() + 20
        while not units >= {lease.unit for lease in held} and time.monotonic() < end_s:
            other = hub.worker()
            for lease in other.lease(4):
                units.add(lease.unit)
                ok(other.submit(lease))
        assert units >= {lease.unit for lease in held}


def test_progress_that_is_only_said(tmp_path_factory: TempPaths) -> None:
    """A newcomer that says more tokens with every heartbeat, and shows none, holds a unit no longer than `lease_s`."""
    with running_hub(tmp_path_factory.mktemp("said") / "run", hub={"lease_s": 0.5, "requests_per_key_s": 0}) as hub:
        liar = hub.worker()
        [lease] = liar.lease(1)
        tokens, end_s, deadlines = 0, time.monotonic() + 20, {lease.lease: lease.deadline_ms}
        while deadlines and time.monotonic() < end_s:
            assert deadlines == {lease.lease: lease.deadline_ms}
            tokens += 1
            deadlines = ok(liar.call("POST", "/heartbeat", {"progress": {lease.lease: tokens}})).json()["deadlines"]
        assert [each.unit for each in hub.worker().lease(1)] == [lease.unit]


def test_sybil_keys_after_a_ban(tmp_path_factory: TempPaths) -> None:
    """The banned key stays out. New ones are free, but all together they get a share, and the others the rest."""
    with running_hub(tmp_path_factory.mktemp("sybil") / "run") as hub:
        cheat, honest = hub.worker(), hub.worker()
        establish(hub, [honest])
        validator = hub.caller(hub.folder.key("validator-0"))
        cheat.deliver()
        [audit] = validator.audits()
        validator.judge(audit, **FAILED)
        assert refusal(cheat.call("POST", "/leases", {"request": "request-again"})) == (403, "node.banned")
        sybils = [hub.worker() for _ in range(20)]
        taken = [lease for sybil in sybils for lease in sybil.lease(16)]
        assert len(taken) <= 8  # a quarter of the 32 units that two steps may have alive
        assert len(honest.lease(16)) == 12  # its window: a newcomer's four, and one more for each group accepted
        assert all(node.on_probation for node in hub.status().nodes if node.accepted == 0 and node.role == "worker")


# ── what was written down ────────────────────────────────────────────────────────────────────────────────────────


def test_throwaway_keys_that_register_and_cheat_leave_nothing_in_the_ledger(tmp_path: Path) -> None:
    """Registrations, rejections and bans were rows for ever, which everybody has to read: 38 MB a day per address."""
    with running_hub(tmp_path / "run") as hub:
        validator = hub.trusted("validator-0", "validator")
        before = ok(hub.http.get("/ledger/head")).json()["document"]
        sybils = [hub.worker(f"sybil-{number}") for number in range(20)]
        for cheat in sybils[:3]:
            ok(cheat.submit(cheat.lease()[0]))
            [audit] = validator.audits()
            validator.judge(audit, **FAILED)
        assert ok(hub.http.get("/ledger/head")).json()["document"] == before
        story = ok(hub.http.get(f"/nodes/{sybils[0].key.node}")).json()
        assert (story["node"]["state"], story["ledger"]) == ("banned", [])
        signed = story["refused"][0]["verdict"]["signed_by"]
        assert signed == validator.key.public_key, "it can be contested all the same"


def test_a_ledger_that_is_rolled_back_or_changed(hub: Hub) -> None:
    """Whoever has seen a head can tell that rows behind it are gone, or are others."""
    for _ in range(3):
        hub.worker()
    signed = protocol.SignedDocument.model_validate_json(ok(hub.http.get("/ledger/head")).content)
    head = protocol.open_document(signed, protocol.LedgerHead, hub.folder.key("hub").public_key)
    entries = list(protocol.LedgerPage.model_validate_json(ok(hub.http.get("/ledger")).content).entries)
    entries = entries[: head.index + 1]
    verify(entries, head)
    with pytest.raises(LedgerError):
        verify(entries[:-1], head)
    changed = entries[1].model_copy(update={"body": {**entries[1].body, "name": "another"}})
    with pytest.raises(LedgerError):
        verify([entries[0], changed, *entries[2:]], head)
