"""One process of a group of ranks, as `torchrun` would start it: `python rank_program.py FOLDER STEPS SETTINGS-JSON`.

Rank 0 trains a tiny model against a hub in memory; the others follow it. What comes of it is in FOLDER/trainer.
`SHOAL_TEST_DIE=RANK.STEP` kills that rank (SIGKILL) in the middle of that step, in the group's first life only.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from trainer_stubs import KEY, RUN, FakeHub, tiny_loaded

from shoal.protocol import PolicyRef
from shoal.runtime.stop import StopToken, stop_on_signals
from shoal.shardcast.origin import Origin
from shoal.trainer import step as steps
from shoal.trainer.loop import TrainingParts, TrainingRun
from shoal.trainer.ranks import RankGroup, join_ranks
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.shards import follow, lead


def main() -> None:
    folder, steps, settings = Path(sys.argv[1]), int(sys.argv[2]), TrainerSettings.model_validate_json(sys.argv[3])
    stop = stop_on_signals()
    ranks = join_ranks(collective_s=60)
    _die_if_told(ranks)
    try:
        if ranks.rank == 0:
            _lead(folder, steps, settings, ranks, stop)
        else:
            follow(ranks, stop)
    finally:
        if ranks.rank == 0:
            ranks.end()
    ranks.leave()


def _lead(folder: Path, steps: int, settings: TrainerSettings, ranks: RankGroup, stop: StopToken) -> None:
    loaded = tiny_loaded(settings)
    origin = Origin(folder / "origin", RUN, KEY)
    hub = FakeHub(steps)
    _remember(hub, origin)
    parts = TrainingParts(
        folder=folder / "trainer", hub=hub, origin=origin, learner=lead(loaded, settings, ranks),
        files=dict(loaded.files), key=KEY,
    )  # fmt: skip
    TrainingRun(parts, stop).run()


def _remember(hub: FakeHub, origin: Origin) -> None:
    """The hub of this process's earlier life had seen what the origin has."""
    head = origin.head()
    ref: PolicyRef | None = head.policy if head else None
    if ref is not None:
        hub.policies[ref.incarnation, ref.version] = ref.digest


def _die_if_told(ranks: RankGroup) -> None:
    rank, _, step = os.environ.get("SHOAL_TEST_DIE", "-1.0").partition(".")
    if int(rank) != ranks.rank or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    finish = steps.Update._finish

    def die(self: steps.Update, *arguments: Any) -> None:
        if self.work.step == int(step):
            os.kill(os.getpid(), signal.SIGKILL)
        finish(self, *arguments)

    steps.Update._finish = die  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
