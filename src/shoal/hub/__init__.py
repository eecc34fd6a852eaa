"""The hub: gives out work, takes it in, has it checked, and writes down what each step is trained on.

settings   RunSettings, HubSettings, HubConfig           state/     every decision, pure
service/   what each call does                           storage/   rows and blobs
changes    long polls, and who waits for what            limits     how much one caller may ask for
http/      `app.create_app`, `server.run_hub`; not loaded by those who only read the settings
"""

from __future__ import annotations

from shoal.hub.settings import HubConfig, HubSettings, RunSettings
from shoal.hub.state.rows import EvaluationPlan

__all__ = ["EvaluationPlan", "HubConfig", "HubSettings", "RunSettings"]
