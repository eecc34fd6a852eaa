"""Who takes part in a simulated run, and what breaks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal.hub import HubSettings, RunSettings


@dataclass(frozen=True)
class WorkerKind:
    """Workers of one kind. Times are means; each worker's pace is its own, and `spread` says how much they differ.

    Those that are `proven` are past probation when they arrive. `lies` is the part of its groups that fail the audit.
    One that does not `deliver` takes leases and hands in nothing. If it `pretends`, it says and shows that it
    makes progress all the same. `network` and `address` are where they ask from. One that dies does so without a
    word after about `lives_s`, and is back `away_s` later: with its key, or, if it is banned and `fresh_keys`, with a
    new one.
    """

    count: int
    group_s: float = 60.0
    spread: float = 0.3
    units: int = 1
    proven: bool = False
    lies: float = 0.0
    delivers: bool = True
    pretends: bool = False
    network: str = ""
    address: str = ""
    lives_s: float = math.inf
    away_s: float = 120.0
    fresh_keys: bool = False


@dataclass(frozen=True)
class Scenario:
    """A run of `seconds` simulated seconds at the most.

    Workers arrive within `arrive_s`. Each of `validators` needs `audit_s` for a group and claims `claims` at a time;
    one group in `equal` teaches nothing. The trainer needs `train_s` for a step and dies in the middle of one step in
    `trainer_dies`. The hub is stopped every `restarts_s` and is back after `down_s`.
    """

    crews: tuple[WorkerKind, ...]
    seed: int = 0
    seconds: float = 600.0
    run: RunSettings = field(default_factory=lambda: RunSettings(steps=20, groups_per_step=16, group_size=2))
    hub: HubSettings = field(default_factory=HubSettings)
    arrive_s: float = 5.0
    heartbeat_s: float = 10.0
    validators: int = 1
    audit_s: float = 0.25
    claims: int = 8
    equal: float = math.inf
    train_s: float = 10.0
    trainer_dies: float = math.inf
    restarts_s: float = math.inf
    down_s: float = 5.0
