"""Records of rollouts: what the hub writes of each outcome, and how it is read."""

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kit.hub import HUB, VALIDATOR, Bench, as_texts, ok, submission_body, verdict_on
from shoal import protocol
from shoal.errors import ResourceError, UserError
from shoal.hub.service.archiving import FLUSH_MS, SETTLED_MS
from shoal.protocol.verdict import TokenTrace
from shoal.records import Records, Segments, Wanted, open_records
from shoal.records import segments as files
from shoal.records.schema import NAMES, RolloutRecord, schema, table_of

GAPS = [0.5, -0.25, float("nan")]
CHANGES = {"texts": as_texts}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with_texts = Bench(tmp_path / "hub", {"groups_per_step": 8}, changes=CHANGES)
    ok(with_texts.announce(0))
    yield with_texts
    with_texts.close()
    with_texts.app.hub.close()


def trace(rollouts: int) -> str:
    values = np.array(GAPS * rollouts, "<f2").tobytes()
    return base64.b64encode(protocol.pack(TokenTrace(values, values))).decode()


def judge_all(bench: Bench, **changes: object) -> list[str]:
    """One group, judged; the name of its submission."""
    bench.clock.advance(0.001)
    audit = bench.audit_of(bench.alice)
    lease = protocol.open_document(audit.lease, protocol.Lease, HUB.public_key)
    verdict = verdict_on(lease, audit.submission, **changes)  # type: ignore[arg-type]
    signed = protocol.sign_document(verdict, VALIDATOR)
    report = protocol.VerdictReport(verdicts=(signed,), traces={audit.submission: trace(2)})
    assert not ok(bench.validator.call("POST", "/verdicts", report)).json()["refused"]
    return [audit.submission]


def written(bench: Bench) -> Records:
    """All that was decided, as the hub's upkeep writes it."""
    for _ in range(2):
        bench.clock.advance((FLUSH_MS + SETTLED_MS) / 1000)
        bench.hub.upkeep.tick()
    return open_records(bench.folder.parent)


PARTS = tuple(protocol.RolloutReward(value=value, parts={"right": value}) for value in (0.0, 1.0))
REJECTED = {"outcome": "rejected", "reason": "shape.x", "message": "why", "rewards": (), "generated_tokens": 0}


def test_each_outcome_is_kept_with_texts_rewards_and_reasons(bench: Bench) -> None:
    judge_all(bench, rewards=PARTS)
    judge_all(bench, rewards=(PARTS[1], PARTS[1]))
    judge_all(bench, **REJECTED)
    judge_all(bench, **{**REJECTED, "outcome": "unsure"})
    records = written(bench)
    found = records.whole(records.find(Wanted(order="oldest", limit=99)))
    assert [(each.outcome, each.sample, each.reward) for each in found] == [
        ("accepted", 0, 0.0), ("accepted", 1, 1.0), ("dropped", 0, 1.0), ("dropped", 1, 1.0),
        ("rejected", 0, None), ("rejected", 1, None), ("unsure", 0, None), ("unsure", 1, None),
    ]  # fmt: skip
    first, second = found[:2]
    assert (first.prompt, first.completion, list(first.pieces)) == (
        as_texts([list(first.prompt_ids)])[0],
        "ABC",
        ["A", "B", "C"],
    )
    assert (list(first.token_ids), list(first.logprobs), first.prompt_tokens) == ([0, 1, 2], [-0.5] * 3, 2)
    assert (dict(second.parts), first.step, first.version, first.kept) == ({"right": 1.0}, 0, 0, True)
    assert (first.node, first.validator, first.kind) == (
        bench.alice.key.node, bench.validator.key.node, "torch/cpu/float32"
    )  # fmt: skip
    assert [(each.reason, each.message) for each in found[4::2]] == [("shape.x", "why")] * 2
    np.testing.assert_array_equal(np.array(first.gaps, float), GAPS)
    np.testing.assert_array_equal(np.array(second.margins, float), GAPS)
    with bench.hub.context.storage.read() as reader:
        assert reader.traces_of([first.submission]) == {}, "they are in the records now"


def test_restarted_hub_continues_behind_the_last_file(bench: Bench) -> None:
    names = judge_all(bench)
    written(bench)
    names += judge_all(bench)
    bench.clock.advance(SETTLED_MS / 1000)
    bench.hub.upkeep.tick()  # collects it, and writes more of them together later
    bench.hub.close()  # writes what was decided
    names_found = [each.submission for each in open_records(bench.folder.parent).find(Wanted(order="oldest", limit=9))]
    bench.restart()
    names += judge_all(bench)
    found = written(bench).find(Wanted(order="oldest", limit=9))
    assert names_found == [name for name in names[:2] for _ in range(2)]
    assert [(each.group, each.submission) for each in found[::2]] == list(enumerate(names))


BODIES = {
    "tokens that are no whole number": {"rollouts": [protocol.Rollout(b"12345", b"", "eos")] * 2},
    "ids beyond any vocabulary": {"rollouts": [protocol.Rollout(b"\xff" * 12, b"\x00" * 8, "eos", given=b"x")] * 2},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_hostile_body_is_recorded_without_what_cannot_be_read(bench: Bench, body: dict[str, object]) -> None:
    [lease] = bench.alice.lease()
    ok(bench.alice.submit(lease, submission_body(lease, **body)))
    [audit] = bench.audits()
    changes = {name: value for name, value in REJECTED.items() if name != "rewards"}
    ok(bench.judge(audit, (), **changes))
    judge_all(bench)
    found = written(bench).find(Wanted(order="oldest", limit=9))
    assert [each.outcome for each in found][-2:] == ["accepted"] * 2
    assert found[0].outcome == "rejected"


def test_without_a_budget_nothing_is_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "hub", settings={"records_gb": 0}, changes=CHANGES)
    ok(bench.announce(0))
    judge_all(bench)
    with pytest.raises(UserError, match="has no records"):
        written(bench)


def made(group: int, **changes: object) -> dict[str, object]:
    lists = {name: np.array([], np.int32) for name in NAMES if str(schema().field(name).type).startswith("list")}
    plain = {name: "" for name in NAMES if str(schema().field(name).type).endswith("string")}
    numbers = dict.fromkeys(set(NAMES) - set(lists) - set(plain), 0)
    named = {"group": group, "submission": f"{group * 16**58:064x}", "outcome": "accepted", "kept": True, "parts": []}
    return {**numbers, **plain, **lists, "pieces": [], "checks": "[]", **named, **changes}


def append(segments: Segments, *rows: dict[str, object]) -> None:
    last = rows[-1]
    segments.append(table_of(rows), (int(str(last["decided_at_ms"])), str(last["submission"])))


@pytest.fixture
def records(tmp_path: Path) -> Records:
    segments = Segments(tmp_path)
    segments.open()
    values = [  # reward, tokens, task, version, completion
        (0.0, 5, "a", 0, "cat"), (1.0, 9, "b", 0, "dog"), (0.5, 1, "a", 1, "the cat"), (None, 7, "b", 1, ""),
        (1.0, 2, "b", 2, ""),
    ]  # fmt: skip
    for group, (reward, tokens, task, version, text) in enumerate(values):
        append(segments, made(group, reward=reward, tokens=tokens, task=task, version=version, completion=text))
    return Records(tmp_path)


@pytest.mark.parametrize(
    ("wanted", "groups"),
    [
        (Wanted(), [4, 3, 2, 1, 0]),
        (Wanted(order="oldest", limit=2, after=1), [1, 2]),
        (Wanted(order="worst"), [0, 2, 4, 1]),
        (Wanted(order="best", limit=3), [4, 1, 2]),
        (Wanted(order="longest", limit=2), [1, 3]),
        (Wanted(order="changed", limit=3), [0, 2, 1]),  # a: 0 → 0.5; b: 1 → 1
        (Wanted(task="b", version=2), [4]),
        (Wanted(text="cat"), [2, 0]),
        (Wanted(text="cat", limit=1, after=1), [0]),
        (Wanted(outcome="rejected"), []),
    ],
)
def test_query_finds_groups_in_its_order(records: Records, wanted: Wanted, groups: list[int]) -> None:
    assert [each.group for each in records.find(wanted)] == groups


def test_random_order_follows_the_seed(records: Records) -> None:
    orders = {tuple(each.group for each in records.find(Wanted(order="random", seed=seed))) for seed in range(9)}
    assert len(orders) > 1
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)


def test_small_files_are_merged_and_leftovers_of_a_kill_ignored(tmp_path: Path) -> None:
    segments = Segments(tmp_path)
    segments.open()
    for group in range(files.MERGED - 1):
        append(segments, made(group))
    [*old] = segments.paths()
    saved = {path: path.read_bytes() for path in old}
    append(segments, made(files.MERGED - 1))
    assert [path.name for path in segments.paths()] == ["groups-0000000000-0000000007.parquet"]
    for path, data in saved.items():  # as after a kill between writing and removing
        path.write_bytes(data)
    segments.close()
    again = Segments(tmp_path)
    again.open()
    assert (again.next_group, len(Records(tmp_path))) == (files.MERGED, files.MERGED)


def test_beyond_the_budget_a_sample_keeps_its_texts_and_every_row_its_numbers(tmp_path: Path) -> None:
    """Names spread evenly: of 64 groups with rate 1/2 or less at most half keep their texts, of rejected ones more."""
    segments = Segments(tmp_path, budget_bytes=600_000)
    segments.open()
    rng = np.random.default_rng(0)
    for group in range(64):
        outcome, name = ("accepted", "rejected")[group % 2], f"{group * 4 * 16**62:064x}"
        text = "".join(map(chr, rng.integers(33, 126, 20_000)))
        kept = segments.keeps(name, outcome)
        changes = {"submission": name, "outcome": outcome, "kept": kept, "completion": text if kept else ""}
        append(segments, made(group, **changes))
    records = Records(tmp_path)
    found = records.whole(records.find(Wanted(limit=99)))
    assert segments.rate <= 0.5
    assert len(found) == 64
    assert all(bool(each.completion) == each.kept for each in found if each.group < 60)
    counts = {
        outcome: sum(each.kept for each in found if each.outcome == outcome) for outcome in ("accepted", "rejected")
    }
    assert 0 < counts["accepted"] < counts["rejected"]
    assert records.find(Wanted(text="no such text")) == [], "texts that are left out are not searched"
    assert all(each.kept == segments.keeps(each.submission, each.outcome) for each in found if each.group < 60)


def test_two_hubs_of_one_folder_do_not_write_at_the_same_time(bench: Bench) -> None:
    judge_all(bench)
    written(bench)
    with pytest.raises(ResourceError, match="in use"):
        Segments(bench.folder / "records").open()
    bench.hub.archiving.rest()  # as it does when another one leads
    Segments(bench.folder / "records").open()


def test_damaged_file_is_named(tmp_path: Path, records: Records) -> None:
    path = sorted(tmp_path.glob("*.parquet"))[0]
    path.write_bytes(b"no Parquet")
    with pytest.raises(Exception, match=path.name):
        Records(tmp_path).table()


def test_schema_has_a_column_for_each_field_of_a_record() -> None:
    assert tuple(schema().names) == NAMES == tuple(RolloutRecord.__dataclass_fields__)
