"""The hub: gives out work, takes it in, has it checked, and writes down what each step is trained on.

    settings   RunSettings, HubSettings, HubConfig; EvaluationPlan
    app        create_app: the hub as an ASGI app
    server     run_hub: the hub as a process
    state/     every decision, pure
    storage/   rows and blobs
    service/   what each call does
    routes_*   the HTTP interface; auth, bodies, openapi, docs_page, gate, changes and waits serve it

`create_app` and `run_hub` are loaded when they are used: whoever only reads the settings (the command line) does not
wait for a web framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.hub.settings import HubConfig, HubSettings, RunSettings
from shoal.hub.state.rows import EvaluationPlan

if TYPE_CHECKING:
    from shoal.hub.app import create_app
    from shoal.hub.server import run_hub

__all__ = ["EvaluationPlan", "HubConfig", "HubSettings", "RunSettings", "create_app", "run_hub"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from shoal.hub.app import create_app

        return create_app
    if name == "run_hub":
        from shoal.hub.server import run_hub

        return run_hub
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
