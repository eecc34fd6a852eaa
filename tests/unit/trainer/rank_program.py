"""One process of a group of ranks, as `torchrun` would start it: `python rank_program.py FOLDER STEPS SETTINGS-JSON`.

Rank 0 trains a tiny model against a hub in memory; the others follow_rank_0 it. What comes of it is in FOLDER/trainer.
"""

import sys
from pathlib import Path

from trainer_stubs import KEY, RUN, FakeHub, tiny_loaded

from shoal.runtime.stop import StopToken, stop_on_signals
from shoal.shardcast.origin import Origin
from shoal.trainer.loop import TrainingParts, TrainingRun
from shoal.trainer.ranks import RankGroup, join_ranks
from shoal.trainer.settings import TrainerSettings
from shoal.trainer.shards import follow_rank_0, lead_ranks


def main() -> None:
    folder, steps, settings = Path(sys.argv[1]), int(sys.argv[2]), TrainerSettings.model_validate_json(sys.argv[3])
    stop = stop_on_signals()
    ranks = join_ranks(collective_s=60)
    try:
        if ranks.rank == 0:
            _lead(folder, steps, settings, ranks, stop)
        else:
            follow_rank_0(ranks, stop)
    finally:
        if ranks.rank == 0:
            ranks.end()
    ranks.leave()


def _lead(folder: Path, steps: int, settings: TrainerSettings, ranks: RankGroup, stop: StopToken) -> None:
    loaded = tiny_loaded(settings)
    origin = Origin(folder / "origin", RUN, KEY)
    hub = FakeHub(steps)
    hub.remember(origin)
    parts = TrainingParts(
        folder=folder / "trainer", hub=hub, origin=origin, learner=lead_ranks(loaded, settings, ranks),
        files=dict(loaded.files), key=KEY,
    )  # fmt: skip
    TrainingRun(parts, stop).run()


if __name__ == "__main__":
    main()
