"""What every storage keeps of tasks and evaluations, run against each implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit import Request
from kit.storage import apply, leased, node, on_postgres, submission
from shoal.hub.state.commands import Command, Save
from shoal.hub.state.rows import EvaluationRow, EvaluationState, Pool, TaskRow
from shoal.hub.storage import SqliteStorage, StaleRow, Storage

IMPLEMENTATIONS: dict[str, Callable[[Request, Path], Storage]] = {
    "sqlite": lambda _request, folder: SqliteStorage(folder / "hub.db"),
    "postgres": on_postgres,
}

EASY = TaskRow("math/1", groups=3, rate=0.95, solved=1, pool=Pool.EASY, last_unit=2**40)


@pytest.fixture(params=IMPLEMENTATIONS)
def storage(request: Request, tmp_path: Path) -> Iterator[Storage]:
    storage = IMPLEMENTATIONS[request.param](request, tmp_path)
    yield storage
    storage.close()


def evaluation(version: int, first: int = 0, **changes: Any) -> EvaluationRow:
    fields = {"incarnation": 0, "version": version, "first": first, "digest": "d", "tasks": 16}
    return EvaluationRow(**{**fields, **changes})


def new(*rows: EvaluationRow) -> list[Command]:
    return [Save(row, None) for row in rows]


def test_a_tasks_row_is_written_over(storage: Storage) -> None:
    apply(storage, EASY, TaskRow("math/2", 1, 0.5))
    hard = replace(EASY, groups=4, rate=1 / 3, solved=0, pool=Pool.HARD)
    apply(storage, hard)
    with storage.read() as reader:
        assert reader.task_rows(["math/1", "math/3"]) == {"math/1": hard}, "to the last bit of its rate"
        assert reader.task_rows(["math/2", "math/3", "math/1"]) == {"math/1": hard, "math/2": TaskRow("math/2", 1, 0.5)}
        assert reader.pool_counts() == {"hard": 1, "normal": 1}


def test_thousands_of_tasks_are_found_at_once(storage: Storage) -> None:
    apply(storage, *[TaskRow(f"t/{number}", 1) for number in range(1200)])
    with storage.read() as reader:
        assert len(reader.task_rows([f"t/{number}" for number in range(0, 2400, 2)])) == 600


def test_a_failed_transaction_leaves_pools_as_they_were(storage: Storage) -> None:
    apply(storage, EASY)
    with pytest.raises(StaleRow):
        apply(storage, replace(EASY, pool=Pool.RETIRED), *new(evaluation(0), evaluation(0)))
    with storage.read() as reader:
        assert reader.task_rows(["math/1"]) == {"math/1": EASY}
        assert reader.pool_counts() == {"easy": 1}


def test_units_by_number_and_what_their_groups_solved(storage: Storage) -> None:
    row = replace(submission(1), pass_rate=0.1 + 0.2)
    apply(storage, Save(node(1), None), *leased(1), *leased(2), Save(row, None))
    with storage.read() as reader:
        tasks = {number: unit.task for number, unit in reader.units_named([2, 1, 9]).items()}
        assert tasks == {1: "task-1", 2: "task-2"}
        found = reader.submission(row.submission)
        assert found.pass_rate == 0.1 + 0.2


def test_slices_come_and_go(storage: Storage) -> None:
    done = evaluation(0, 0, state=EvaluationState.DONE, scores=(1.0, None, 0.25), document="{}", decided_at_ms=5)
    apply(storage, *new(done, evaluation(0, 16), evaluation(2, 0), evaluation(4, 0, state=EvaluationState.VOID)))
    with storage.read() as reader:
        assert reader.evaluation(0, 0, 0) == done
        assert reader.evaluation(1, 0, 0) is None
        assert [row.key for row in reader.evaluations_under_way()] == [(0, 0, 0), (0, 0, 16), (0, 2, 0)]
    claimed = evaluation(2, 0).to(EvaluationState.CLAIMED, validator="v", claimed_until_ms=9)
    apply(storage, Save(claimed, EvaluationState.OPEN))
    apply(storage, Save(evaluation(0, 16).to(EvaluationState.VOID), EvaluationState.OPEN))
    with storage.write() as transaction:
        assert transaction.evaluation(0, 2, 0) == claimed
        assert transaction.evaluations_under_way() == [claimed], "nothing of version 0 is to come"


def test_two_cannot_have_one_slice(storage: Storage) -> None:
    apply(storage, *new(evaluation(0)))
    claimed = evaluation(0).to(EvaluationState.CLAIMED, validator="v", claimed_until_ms=9)
    apply(storage, Save(claimed, EvaluationState.OPEN))
    with pytest.raises(StaleRow):
        apply(storage, Save(replace(claimed, validator="w"), EvaluationState.OPEN))
    with pytest.raises(StaleRow):
        apply(storage, *new(evaluation(0)))


def test_the_newest_slices_in_order(storage: Storage) -> None:
    rows = [evaluation(version, first, incarnation=version // 4) for version in range(6) for first in (0, 16)]
    apply(storage, *new(*rows))
    with storage.read() as reader:
        assert reader.evaluations_since(0, 100) == rows
        assert [row.version for row in reader.evaluations_since(4, 100)] == [4, 4, 5, 5]
        assert reader.evaluations_since(0, 2) == rows[-4:], "no version in part"
