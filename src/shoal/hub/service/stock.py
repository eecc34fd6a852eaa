"""Units made ahead, where hubs share a database: so that a lease takes a unit that is there, under no lock but its own.

    few left ─► tasks are made ─► frontier lock: as many new units as there is room for, `STOCK` at most ─► open units

Open units count as alive, so pacing holds; a unit's task still follows from its number and from what is in batches.
Each hub takes its own first, whose prompts it has; another one's if there is no room for more, or if they are far
behind: then their hub may be gone.
"""

import threading
from collections.abc import Iterable
from dataclasses import replace

from shoal.hub.service.context import Context, orders_of
from shoal.hub.service.drawing import Drawing, NotReady
from shoal.hub.state import RunProgress, Save, pacing

STOCK, FEW = 32, 12
FAR = 8 * STOCK


class Stock:
    def __init__(self, context: Context, drawing: Drawing) -> None:
        self._context, self._drawing = context, drawing
        self._units, self._lock, self._refilling = set[int](), threading.Lock(), threading.Lock()
        self._tried: tuple[int, int] | None = None  # next unit and step when there was no unit to be made

    def units(self) -> list[int]:
        with self._lock:
            return sorted(self._units)

    def took(self, units: Iterable[int]) -> None:
        with self._lock:
            self._units.difference_update(units)

    def is_worth_a_try(self, progress: RunProgress) -> bool:
        return self._tried != (progress.next_unit, progress.next_step)

    def refill(self, wait: bool = True, missing: bool = False) -> None:
        """`wait`: for another thread that refills it. What it made is enough then. `missing`: a lease found none of its
        units open, for another hub took them or a new incarnation voided them."""
        before = self.units()
        if (len(before) >= FEW and not missing) or not self._refilling.acquire(blocking=wait):
            return
        try:
            if self.units() == before:
                self._refill()
        finally:
            self._refilling.release()

    def _refill(self) -> None:
        context = self._context
        with context.storage.read() as reader:
            progress, open_units = reader.progress(), reader.open_units(FAR)
            is_halted = bool(orders_of(reader).halted(context.clock.now_ms()))
        far = progress.next_unit - FAR
        left = {unit.unit for unit in open_units if unit.unit in self._units or unit.unit < far}
        self._drawing.prepare_again([unit for unit in open_units if unit.unit in left])
        count = 0 if is_halted else min(STOCK, pacing.room(context.rules, progress))
        if count:
            self._drawing.prepare(progress.next_unit, count)
            with context.storage.write(durable=False) as transaction:  # a lease on one is
                moment = replace(context.moment(transaction), progress=transaction.frontier())
                count = min(STOCK, pacing.room(context.rules, moment.progress))
                try:
                    units, alarms = self._drawing.fresh_units(transaction, moment, count)
                    is_stuck = count and not units  # there was room, and no task that can be used
                    self._tried = (moment.progress.next_unit, moment.progress.next_step) if is_stuck else None
                except NotReady:  # another hub took these numbers meanwhile: the next refill makes others
                    units, alarms = [], []
                transaction.apply([*(Save(unit, None) for unit in units), *alarms])
            left.update(unit.unit for unit in units)
        with self._lock:
            self._units = left
