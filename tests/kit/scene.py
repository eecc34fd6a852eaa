"""Made-up moments of a run: processes, verdicts, workers, and a display that remembers what it was told."""

from __future__ import annotations

from typing import Any, Self

from kit.cli import status
from shoal.protocol import NodeState, NodeView, PolicyRef, RecentVerdict, RunStatus
from shoal.run.progress import History, Scene
from shoal.runtime.supervise import ProcessView

POLICY = PolicyRef(incarnation=0, version=0, digest="ab" * 32)


def process(name: str, **changes: Any) -> ProcessView:
    values: dict[str, Any] = {"state": "running", "pid": 4711, "restarts": 0, "why": "", "since_s": 300.0}
    return ProcessView(name, **{**values, **changes})


def worker(index: int, **changes: Any) -> NodeView:
    values: dict[str, Any] = {
        "name": f"worker-{index}", "state": NodeState.ACTIVE, "doing": "generating 16 groups", "last_seen_ms": 99_000,
    }  # fmt: skip
    return NodeView(node=f"{index:032x}", role="worker", **{**values, **changes})


def verdict(unit: int, node: NodeView, outcome: str = "accepted", at_ms: int = 0, **changes: Any) -> RecentVerdict:
    reason, message = ("sampling.seed", "token 3 has another seed") if outcome == "rejected" else ("", "")
    values = {"reason": reason, "message": message, **changes}
    return RecentVerdict(unit=unit, node=node.node, outcome=outcome, decided_at_ms=at_ms or unit, **values)


def at_step(step: int, **changes: Any) -> RunStatus:
    return status(step=step, policy=POLICY.model_copy(update={"version": step}), **changes)


def scene(seen: RunStatus | None, *processes: ProcessView, elapsed_s: float = 65.0, **notes: str) -> Scene:
    history = History()
    if seen is not None:
        history.add(seen, elapsed_s)
    return Scene(seen, processes, history, elapsed_s, {name.replace("_", "-"): note for name, note in notes.items()})


class Memory:
    """A display that shows nothing and forgets nothing."""

    live = False
    every_s = 1.0

    def __init__(self) -> None:
        self.said: list[str] = []
        self.scenes: list[Scene] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, scene: Scene) -> None:
        self.scenes.append(scene)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass
