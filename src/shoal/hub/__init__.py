"""The hub: gives out work, takes it in, has it checked, and writes down what each step is trained on.

    settings   RunSettings, HubSettings, HubConfig; EvaluationPlan
    state/     every decision, pure
    storage/   rows and blobs
    service/   what each call does
    http/      the HTTP interface: create_app, run_hub
    changes    long polls, and who waits for what; limits: how much one caller may ask for

`create_app` and `run_hub` are loaded when they are used: whoever only reads the settings (the command line) does not
wait for a web framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.hub.settings import HubConfig, HubSettings, RunSettings
from shoal.hub.state.rows import EvaluationPlan

if TYPE_CHECKING:
    from shoal.hub.http.app import create_app
    from shoal.hub.http.server import run_hub

__all__ = ["EvaluationPlan", "HubConfig", "HubSettings", "RunSettings", "create_app", "run_hub"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from shoal.hub.http.app import create_app

        return create_app
    if name == "run_hub":
        from shoal.hub.http.server import run_hub

        return run_hub
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
