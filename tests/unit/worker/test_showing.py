"""What a worker on probation shows of its leases: when, in which parts, after which losses; what it then submits."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from shoal.engines import Chunks, Completion, GenerationRequest
from shoal.engines.scripted import ScriptedEngine
from shoal.errors import HubRefused, HubUnreachable
from shoal.hub.state import submissions as state
from shoal.hub.state.rows import Rules, ShownRow
from shoal.protocol import Lease, NodeState, PolicyRef, ProofParameters, SamplingParameters, TensorView, pack_tokens
from shoal.protocol.node import HeartbeatReply, NodeView
from shoal.protocol.submission import ProgressReply, ShownChunks, ShownProgress
from shoal.runtime.clock import ManualClock
from shoal.worker import showing
from shoal.worker.showing import ProgressSender

POLICY = PolicyRef(incarnation=0, version=0, digest="d" * 64)
PROOF = ProofParameters(topk=16, rows=4)
LEASE = Lease(
    run="demo", lease="u7a0", node="n" * 32, unit=7, attempt=0, policy=POLICY, task="t", prompt_ids=(10, 11),
    seeds=tuple(f"{seed:016x}" for seed in (5, 6, 7)), proof=PROOF, environment_digest="e" * 64, issued_at_ms=0,
    sampling=SamplingParameters(temperature=1.0, max_new_tokens=30, eos_token_ids=(0,)), deadline_ms=8_000,
)  # fmt: skip
RULES = Rules(
    steps=1, groups_per_step=1, group_size=3, max_staleness=0, max_new_tokens=30, refill_cap=1,
    leases_per_node=1, lease_ms=1, audit_ms=1,
)  # fmt: skip


class ShownHub:
    """Stands where the client stands, and keeps what is shown as a hub does."""

    def __init__(self) -> None:
        self.last: ShownRow | None = None
        self.parts: list[list[ShownChunks]] = []
        self.sizes: list[int] = []
        self.failures: list[Exception] = []
        self.loses_answers = 0
        self.heard = threading.Condition()
        self.calls = 0
        self.deadlines: dict[str, int] = {}

    def patient(self, _patience_s: float) -> "ShownHub":
        return self

    def show(self, lease: str, progress: ShownProgress) -> ProgressReply:
        with self.heard:
            self.calls += 1
            self.heard.notify_all()
            if self.failures:
                raise self.failures.pop()
            self.sizes.append(sum(len(each.tokens) + len(each.proofs) for each in progress.chunks))
            tokens, part, new = state.take_shown(RULES, PROOF, lease, self.last, progress.chunks)
            if part is not None:
                self.last, self.parts = part, [*self.parts, new]
            if self.loses_answers:
                self.loses_answers -= 1
                raise HubUnreachable("the answer was lost")
            return ProgressReply(tokens=tokens, deadline_ms=9_000 + self.calls)

    def until(self, what: Callable[[], bool]) -> None:
        with self.heard:
            assert self.heard.wait_for(what, 10)

    def matches(self, *, whole: bool = False) -> bool:
        """Whether its copy is like the group, as far as it goes; and whether it goes as far as the group does."""
        copy = state.joined_parts(self.parts)
        lengths = [len(tokens) // 4 for tokens, _ in copy.values()]
        return (not whole or lengths == [len(each.token_ids) for each in GROUP]) and all(
            pack_tokens(GROUP[rollout].token_ids).startswith(tokens) and GROUP[rollout].proofs.startswith(proofs)
            for rollout, (tokens, proofs) in copy.items()
        )

    def until_whole(self) -> None:
        self.until(lambda: self.matches(whole=True))


@pytest.fixture
def hub() -> ShownHub:
    return ShownHub()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def shows(hub: ShownHub, clock: ManualClock) -> Iterator[ProgressSender]:
    with ProgressSender(hub, hub.deadlines.__setitem__, clock=clock) as shows:  # type: ignore[arg-type]
        yield shows


def drawn() -> tuple[list[dict[int, Chunks]], list[Completion]]:
    """Every snapshot that the scripted engine gives of this lease, and the group that comes of it."""
    engine = ScriptedEngine()
    engine.load_policy(POLICY, {"w": TensorView("w", "F32", (1,), memoryview(np.ones(1, "<f4")).cast("B"))})
    shots: list[dict[int, Chunks]] = []
    request = GenerationRequest(
        LEASE.prompt_ids, LEASE.seed_numbers, LEASE.sampling, on_chunks=lambda take: shots.append(take())
    )
    return shots, engine.generate([request], PROOF)[0]


SHOTS, GROUP = drawn()


def hear(shows: ProgressSender, on_probation: bool) -> None:
    view = NodeView(node="n", name="", role="worker", state=NodeState.ACTIVE, on_probation=on_probation)
    shows.hear(HeartbeatReply(node=view))


def see(shows: ProgressSender, clock: ManualClock, *shots: dict[int, Chunks], every_s: float = 2.0) -> None:
    told = shows.of(LEASE)
    assert told is not None
    for shot in shots:
        clock.advance(every_s)
        told(lambda shot=shot: shot)


def test_nothing_is_taken_from_the_engine_before_a_quarter_of_the_lease_has_passed(shows, clock, hub):
    told = shows.of(LEASE)
    told(lambda: pytest.fail("too early"))
    clock.advance(1.9)
    told(lambda: pytest.fail("too early"))
    clock.advance(0.1)
    told(lambda: SHOTS[0])
    told(lambda: pytest.fail("just shown"))
    hub.until(lambda: hub.calls == 1)


def test_the_hub_gets_every_chunk_in_parts_and_the_deadline_moves(shows, clock, hub, monkeypatch):
    monkeypatch.setattr(showing, "PART_BYTES", 60)
    see(shows, clock, *SHOTS)
    hub.until_whole()
    assert max(hub.sizes) <= 60 + 4 * 4 + 34
    assert hub.deadlines["u7a0"] > 9_000
    assert shows.keeps_word("u7a0", GROUP)


def test_lost_answers_and_unreachable_hubs_cost_nothing_but_time(shows, clock, hub):
    hub.loses_answers = 1
    see(shows, clock, SHOTS[2])
    hub.until(lambda: hub.calls == 1)
    hub.failures = [HubUnreachable("away")]
    see(shows, clock, SHOTS[3])
    hub.until(lambda: hub.calls == 2)
    see(shows, clock, SHOTS[-1])
    hub.until_whole()


def test_a_hub_that_has_lost_its_copy_gets_all_of_it_again(shows, clock, hub):
    see(shows, clock, SHOTS[2])
    hub.until(lambda: hub.last is not None)
    hub.last, hub.parts = None, []
    see(shows, clock, SHOTS[-1])
    hub.until_whole()


def test_after_a_refusal_nothing_more_is_shown(shows, clock, hub):
    hub.failures = [HubRefused(410, "lease.late", "the lease has ended")]
    see(shows, clock, SHOTS[0])
    hub.until(lambda: hub.calls == 1)
    told = shows.of(LEASE)
    for _ in range(100):
        if shows._leases["u7a0"].ended:
            break
        threading.Event().wait(0.02)
    clock.advance(60)
    told(lambda: pytest.fail("nobody wants it"))
    assert hub.calls == 1


def test_past_probation_nobody_is_told(shows, clock):
    told = shows.of(LEASE)
    hear(shows, on_probation=False)
    assert shows.of(LEASE) is None
    clock.advance(60)
    told(lambda: pytest.fail("nobody wants it"))
    hear(shows, on_probation=True)
    assert shows.of(LEASE) is not None


@pytest.mark.parametrize(
    ("at", "proof", "kept"), [(8, 0, True), (7, 0, False), (None, 1, False)], ids=["beyond", "within", "proof"]
)
def test_a_group_that_begins_otherwise_than_was_shown_is_not_to_be_submitted(shows, clock, hub, at, proof, kept):
    see(shows, clock, SHOTS[1])
    hub.until(lambda: hub.calls >= 1)
    assert len(SHOTS[1][5].token_ids) == 8
    tokens, proofs = GROUP[0].token_ids.copy(), bytes([GROUP[0].proofs[0] ^ proof]) + GROUP[0].proofs[1:]
    if at is not None:
        tokens[at] += 1
    other = [replace(GROUP[0], token_ids=tokens, proofs=proofs), *GROUP[1:]]
    assert shows.keeps_word("u7a0", other) is kept
    assert shows.keeps_word("u7a0", other), "of a lease of which nothing was shown anything goes"


def test_regenerated_group_continues_only_with_the_same_tokens(shows, clock, hub):
    see(shows, clock, SHOTS[2])
    hub.until(lambda: hub.calls >= 1)
    see(shows, clock, SHOTS[0], SHOTS[3])
    hub.until(lambda: hub.last is not None and sum(hub.last.tokens) == sum(len(c.token_ids) for c in SHOTS[3].values()))
    calls = hub.calls
    tokens = SHOTS[-1][5].token_ids.copy()
    tokens[0] += 1
    see(shows, clock, {**SHOTS[-1], 5: replace(SHOTS[-1][5], token_ids=tokens)})
    assert shows._leases["u7a0"].ended
    assert hub.calls == calls
