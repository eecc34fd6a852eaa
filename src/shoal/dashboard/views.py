"""What each page shows, as JSON values. `level` says to whom."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from shoal.hub.service import Hub
from shoal.hub.state import Refusal
from shoal.hub.state.rows import UnitState
from shoal.protocol.signing import canonical_json
from shoal.records import ORDERS, OUTCOMES, Records, Wanted
from shoal.records.records import empty, means

Level = Literal["none", "overview", "all", "owner"]
POINTS, ROWS, PAGE = 1000, 100, 200
SEARCH_S = 0.1
PRIVATE = ("gaps", "margins", "checks")  # what a cheat could be tuned by
OVERVIEW = (
    "run", "name", "now_ms", "finished", "steps", "step", "max_staleness", "units", "submissions", "waits", "alarms",
    "node_counts", "unscored", "standstill", "pools", "outbox",
)  # fmt: skip
Asked = Mapping[str, str]


class Views:
    def __init__(self, hub: Hub, recipe: str, records: Path | None) -> None:
        self._hub, self._recipe = hub, recipe
        self._records = None if records is None else Records(records)
        self._series: tuple[int, dict[str, list[float | None]]] = (-1, {})
        self._computed: tuple[pa.Table, dict[str, dict[int, int]], dict[str, str]] | None = None
        self.names: dict[str, Callable[[str, Asked, Level], Any]] = {
            "overview": self._overview, "series": self._series_of, "nodes": self._nodes, "node": self._node,
            "rollouts": self._rollouts, "rollout": self._rollout, "tasks": self._tasks, "policies": self._policies,
            "ledger": self._ledger, "recipe": lambda _rest, _asked, _level: {"text": self._recipe},
        }  # fmt: skip

    def show(self, name: str, rest: str, asked: Asked, level: Level) -> Any:
        return self.names[name](rest, asked, level)

    def _overview(self, _rest: str, _asked: Asked, level: Level) -> dict[str, Any]:
        status = self._hub.reporting.status().model_dump(mode="json")
        found = {name: status[name] for name in OVERVIEW}
        policy = status["policy"] or {}
        groups = means(self._table("sample", 0), "sample", "outcome", "reason")
        refused = {f"{each['outcome']}: {each['reason']}": each["sample_count"] for each in groups if each["reason"]}
        credit = sum(int(node["credit"]) for node in status["nodes"])
        return {
            **found, "level": level, "version": policy.get("version"), "conduct": status["standing"]["conduct"],
            "ledger_rows": status["ledger"]["index"] + 1, "credit": credit, "refused": refused,
        }  # fmt: skip

    def _series_of(self, _rest: str, asked: Asked, _level: Level) -> dict[str, list[float | None]]:
        """Metrics by step, averaged over neighbours where there are more than `points`."""
        with self._hub.context.storage.read() as reader:
            last = reader.reports(1)
            newest = last[0].step if last else -1
            if self._series[0] != newest:
                reports = reader.reports(10**7)
                names = sorted({name for each in reports for name in each.metrics})
                columns: dict[str, list[float | None]] = {"step": [float(each.step) for each in reports]}
                self._series = newest, columns | {
                    name: [each.metrics.get(name) for each in reports] for name in names if name != "step"
                }  # fmt: skip
        columns = self._series[1]
        points, count = _whole(asked, "points", POINTS), len(columns.get("step", ()))
        size = max(1, math.ceil(count / max(1, points)))
        return {
            name: [_mean(values[at : at + size]) for at in range(0, count, size)] for name, values in columns.items()
        }

    def _nodes(self, _rest: str, asked: Asked, _level: Level) -> list[dict[str, Any]]:
        page = self._hub.stories.nodes(asked.get("after", "")[:64], PAGE)
        return [node.model_dump(mode="json") for node in page.nodes]

    def _node(self, rest: str, _asked: Asked, _level: Level) -> dict[str, Any]:
        full = self._hub.stories.node(rest)
        story = full.model_dump(mode="json", include={
            "run", "node", "sentence", "registered_at_ms", "streak", "passed", "certain", "statistical", "lapsed",
            "pace_ms",
        })  # fmt: skip
        shown = (
            "unit",
            "state",
            "reason",
            "message",
            "rule",
            "decided_at_ms",
            "generated_tokens",
            "credit",
            "credit_state",
        )
        for name in ("recent", "refused"):
            story[name] = [{key: getattr(each, key) for key in shown} for each in getattr(full, name)]
        hours, kinds = self._hours()
        own = hours.get(rest, {})
        others = [median(by.values()) for node, by in hours.items() if node != rest and kinds[node] == kinds.get(rest)]
        story["hours"] = [{"hour_ms": hour * 3_600_000, "tokens": own[hour]} for hour in sorted(own)]
        story["same_kind_tokens_per_hour"] = median(others) if others else None
        return story

    def _hours(self) -> tuple[dict[str, dict[int, int]], dict[str, str]]:
        """Accepted tokens by node and hour, and each node's kind; computed again when there are new records."""
        table = self._table()
        if self._computed is None or self._computed[0] is not table:
            hour = pc.divide(table["decided_at_ms"], 3_600_000)
            paid = table.append_column("hour", hour).filter(
                pc.is_in(table["outcome"], pa.array(["accepted", "dropped"]))
            )
            hours: dict[str, dict[int, int]] = defaultdict(dict)
            kinds = dict[str, str]()
            for each in means(paid, "tokens", "node", "kind", "hour"):
                kinds[each["node"]] = each["kind"]
                hours[each["node"]][each["hour"]] = round(each["tokens_mean"] * each["tokens_count"])
            self._computed = table, hours, kinds
        return self._computed[1], self._computed[2]

    def _table(self, column: str = "", value: object = None) -> pa.Table:
        """The records without texts, or those with a value in a column; no rows where none are kept."""
        table = empty() if self._records is None else self._records.table()
        return table.filter(pc.equal(table[column], value)) if column else table

    def _rollouts(self, _rest: str, asked: Asked, level: Level) -> list[dict[str, Any]]:
        records = self._kept(level)
        order, outcome = asked.get("order", "newest"), asked.get("outcome", "")
        if order not in ORDERS or outcome not in ("", *OUTCOMES):
            raise ValueError(f"order is one of {', '.join(ORDERS)}; outcome one of {', '.join(OUTCOMES)}")
        chosen: dict[str, Any] = {name: asked.get(name, "") for name in ("reason", "node", "task", "text")}
        chosen |= {name: _whole(asked, name, None) for name in ("unit", "step", "version")}
        limit, after = max(1, min(ROWS, _whole(asked, "limit", ROWS))), max(0, _whole(asked, "after", 0))
        wanted = Wanted(order, outcome, **chosen, limit=limit, after=after, seconds=SEARCH_S)
        found = records.find(wanted, self._public() if level != "owner" else None)
        return [{name: value for name, value in asdict(each).items() if name in records.columns} for each in found]

    def _public(self) -> pa.Table:
        """Rollouts that were accepted, of units that nobody can get any more."""
        with self._hub.context.storage.read() as reader:
            alive = [unit.unit for unit in reader.alive_units()]
        table = self._table()
        table = table.filter(pc.is_in(table["outcome"], pa.array(["accepted", "dropped"])))
        return table.filter(pc.invert(pc.is_in(table["unit"], pa.array(alive, pa.int64()))))

    def _rollout(self, rest: str, _asked: Asked, level: Level) -> dict[str, Any]:
        records, (group, _, sample) = self._kept(level), rest.partition("/")
        if not (group.isdigit() and sample.isdigit() and len(group) < 16 and len(sample) < 10):
            raise ValueError("a rollout is named by its group and its number in it: /view/rollout/3/0")
        found = records.whole(records.at(int(group), int(sample)))
        if not found:
            raise Refusal(404, "http.404", f"there is no rollout {rest} in the records")
        each = asdict(found[0])
        if level != "owner":
            if each["outcome"] not in ("accepted", "dropped") or each["unit"] not in self._decided({each["unit"]}):
                raise Refusal(
                    403, "http.403", "its unit may still be given to somebody: ask again when it is trained on"
                )
            each |= {name: [] for name in PRIVATE}
        for name in ("logprobs", "gaps", "margins"):
            each[name] = [float(value) if math.isfinite(value) else None for value in each[name] or ()]
        return each

    def _kept(self, level: Level) -> Records:
        if level == "overview":
            raise Refusal(403, "http.403", "the owner of this run does not show its rollouts (dashboard.public)")
        if self._records is None:
            raise Refusal(404, "http.404", "this hub keeps no records of rollouts (hub.records_gb)")
        return self._records

    def _decided(self, units: set[int]) -> set[int]:
        """Units that nobody can get any more."""
        with self._hub.context.storage.read() as reader:
            rows = reader.units_named(sorted(units))
        ended = (UnitState.TRAINED, UnitState.DROPPED, UnitState.VOID)
        return {unit for unit, row in rows.items() if row.state in ended or row.step is not None}

    def _tasks(self, _rest: str, _asked: Asked, level: Level) -> list[dict[str, Any]]:
        """Those with the most rollouts: their mean reward by version."""
        self._kept(level)
        table = self._table()
        if level != "owner":
            table = table.filter(pc.is_in(table["outcome"], pa.array(["accepted", "dropped"])))
        found: dict[str, dict[int, tuple[float, int]]] = defaultdict(dict)
        for each in means(table, "reward", "task", "version"):
            found[each["task"]][each["version"]] = each["reward_mean"], each["reward_count"]
        counts = {task: sum(count for _, count in by.values()) for task, by in found.items()}
        return [
            {
                "task": task, "rollouts": counts[task], "versions": sorted(found[task]),
                "rewards": [found[task][version][0] for version in sorted(found[task])],
            }
            for task in sorted(found, key=lambda task: (-counts[task], task))[:PAGE]
        ]  # fmt: skip

    def _policies(self, _rest: str, _asked: Asked, _level: Level) -> list[dict[str, Any]]:
        with self._hub.context.storage.read() as reader:
            rows = reader.policies(PAGE)
        scores = {each.policy: each for each in self._hub.evaluating.page(0).evaluations}
        groups = means(self._table("sample", 0), "sample", "incarnation", "version")
        generated = {(each["incarnation"], each["version"]): each["sample_count"] for each in groups}
        return [
            {
                **policy.model_dump(), "announced_at_ms": at_ms, "held_out": score.mean if score else None,
                "groups": generated.get((policy.incarnation, policy.version), 0),
            }
            for policy, at_ms in rows
            for score in [scores.get(policy)]
        ]  # fmt: skip

    def _ledger(self, _rest: str, asked: Asked, _level: Level) -> dict[str, Any]:
        """Rows with the exact text that their hash is of, so that a browser can check the chain."""
        page = self._hub.reporting.ledger_page(_whole(asked, "after", -1), min(1000, _whole(asked, "limit", PAGE)))
        names = ("index", "previous", "kind", "body", "at_ms")
        rows = [
            {"text": canonical_json({name: getattr(each, name) for name in names}).decode(), "hash": each.hash}
            for each in page.entries
        ]  # fmt: skip
        return {"rows": rows, "head": page.head.model_dump()}


def _whole(asked: Asked, name: str, default: Any) -> Any:
    if name not in asked:
        return default
    try:
        return max(-1, min(2**53, int(asked[name])))
    except ValueError as error:
        raise ValueError(f"{name} is a whole number, not {asked[name][:20]!r}") from error


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return fmean(there) if there else None
