"""Held-out means never trained on, and this is where it is checked: by the digest of what is asked, not by names.

    prompts evaluated ─► digests ─┐
    prompts of the training set ──┴─► those in both: leaks; which of them were in batches, the run's archive says

Spaces, case and width do not make another prompt; another conversation before it does.
The training set is streamed: memory goes with what is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.environments import Environment, Task
from shoal.environments.composed import inner_of
from shoal.environments.mix import MixedEnvironment
from shoal.environments.questions import UNUSABLE, task_digest, task_digests
from shoal.errors import LeakFound

SHOWN = 5


@dataclass(frozen=True)
class Leaks:
    """Ids of evaluated tasks that are in the training set, and those of them that a batch is known to have had."""

    known: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        some = ", ".join(self.known[:SHOWN]) + (", …" if len(self.known) > SHOWN else "")
        trained = f", {len(self.trained)} of them in batches that were trained on" if self.trained else ""
        return f"{len(self.known)} of the evaluated tasks are in the training set{trained}: {some}"

    def refuse(self) -> None:
        if self.known:
            raise LeakFound(f"{self.sentence}; --allow-leaks leaves them out and evaluates the others")


def find_leaks(tasks: Iterable[Task], training: Environment, trained_ids: Iterable[str] = ()) -> Leaks:
    """Which of `tasks` the training environment has in its training split; `trained_ids` are its tasks in batches."""
    ids_by_digest: dict[bytes, list[str]] = {}
    for task in tasks:
        ids_by_digest.setdefault(task_digest(task), []).append(task.id)
    batches = (task_digest(training.task(task_id)) for task_id in trained_ids)
    known, trained = (
        {task for digest in digests for task in ids_by_digest.get(digest, ())}
        for digests in (train_digests(training), batches)
    )
    return Leaks(tuple(sorted(known | trained)), tuple(sorted(trained)))


def train_digests(environment: Environment) -> Iterator[bytes]:
    """The digest of every prompt of the training split that can be used; a data set has them without reading again."""
    inner = inner_of(environment)
    if isinstance(inner, MixedEnvironment):  # all that a part may come to, without what another part holds out
        for part in inner.parts:
            yield from (found for found in train_digests(part.environment) if found not in inner.aside)
        return
    yield from (found for found in task_digests(inner, "train") if found != UNUSABLE)


def archived_ids(rollouts: Path) -> set[str]:
    """The tasks in the batches of a run, by the files that its trainer keeps of them."""
    import pyarrow.parquet as pq

    found: set[str] = set()
    for path in sorted(rollouts.glob("step-*.parquet")):
        found.update(pq.read_table(path, columns=["task"]).column("task").unique().to_pylist())
    return found
