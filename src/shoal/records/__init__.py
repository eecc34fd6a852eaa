"""Every judged rollout of a run, for people: texts, tokens, rewards and their parts, reasons, per-token gaps.

The hub that does the run's background work writes `RUN/hub/records/`, Parquet files of one schema (`schema`), from what
is in its database; so a kill at any point loses nothing. Also what was rejected, unsure, or dropped is there.

    from shoal.records import Wanted, open_records

    records = open_records("runs/NAME")
    for rollout in records.whole(records.find(Wanted(order="worst", limit=3))):
        print(rollout.reward, rollout.parts, rollout.completion)
    frame = records.table().to_pandas()
"""

from pathlib import Path

from shoal.errors import UserError
from shoal.records.records import ORDERS, Order, Records, Wanted
from shoal.records.schema import OUTCOMES, RolloutRecord
from shoal.records.segments import Segments
from shoal.runtime.extras import require

__all__ = ["FOLDER", "ORDERS", "OUTCOMES", "Order", "Records", "RolloutRecord", "Segments", "Wanted", "open_records"]


FOLDER = "records"


def open_records(run: Path | str) -> Records:
    """Of a run's folder; the run may still be running."""
    require("data", "reading records of rollouts")
    folder = Path(run) / "hub" / FOLDER
    if not folder.is_dir():
        raise UserError(f"{run} has no records of rollouts yet ({folder} is missing): its hub writes them as it judges")
    return Records(folder)
