"""In place of a `HubClient`: replies come from a list, and what the hub would get is kept."""

from types import SimpleNamespace
from typing import Any

from shoal.protocol import Heartbeat, HeartbeatReply, NodeState, NodeView, PolicyRef, Role, SigningKey


class StubClient:
    """`info` are the fields of `RunInfo` that the role reads. Heartbeats are answered with `view` and `policy`."""

    def __init__(self, key: SigningKey, role: Role, info: dict[str, Any], *replies: Any) -> None:
        self.key, self.info, self.replies = key, SimpleNamespace(**info), list(replies)
        self.view = NodeView(node=key.node, name="n", role=role, state=NodeState.ACTIVE)
        self.requests: list[Any] = []
        self.beats: list[Heartbeat] = []
        self.deadlines: dict[str, int] = {}
        self.policy: PolicyRef | None = None
        self.finished = False

    def run_info(self) -> Any:
        return self.info

    def refreshed_run(self) -> Any:
        return SimpleNamespace(info=self.info)

    def patient(self, _patience_s: float) -> Any:
        return self

    def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        self.beats.append(heartbeat)
        told = {"deadlines": self.deadlines, "policy": self.policy, "finished": self.finished}
        return HeartbeatReply(node=self.view, **told)

    def next_reply(self, request: Any, at_the_end: Any) -> Any:
        """The next of `replies`: an exception is raised, a function called."""
        self.requests.append(request)
        reply = self.replies.pop(0) if self.replies else at_the_end
        if isinstance(reply, Exception):
            raise reply
        return reply() if callable(reply) else reply
