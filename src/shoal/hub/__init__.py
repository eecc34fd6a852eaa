"""The hub: gives out work, takes it in, has it checked, and writes down what each step is trained on.

settings   RunSettings, HubSettings, HubConfig; EvaluationPlan
state/     every decision, pure
storage/   rows and blobs
service/   what each call does
http/      the HTTP interface: `app.create_app`, `server.run_hub`; who only reads the settings does not load it
changes    long polls, and who waits for what; limits: how much one caller may ask for
"""

from __future__ import annotations

from shoal.hub.settings import HubConfig, HubSettings, RunSettings
from shoal.hub.state.rows import EvaluationPlan

__all__ = ["EvaluationPlan", "HubConfig", "HubSettings", "RunSettings"]
