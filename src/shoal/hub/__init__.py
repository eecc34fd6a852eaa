"""The hub: gives out work, takes it in, has it checked, and writes down what each step is trained on.

settings   RunSettings, HubSettings, HubConfig           state/     every decision, pure
service/   what each call does, and the table of calls   storage/   rows and blobs
changes    what changed, and who waits for what          buckets    how often somebody may do something
http/      `app.App`, `server.run_hub`; not loaded by those who only read the settings
"""

from shoal.hub.settings import HubConfig, HubSettings, RunSettings
from shoal.hub.state.rows import EvaluationPlan

__all__ = ["EvaluationPlan", "HubConfig", "HubSettings", "RunSettings"]
