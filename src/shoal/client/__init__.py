"""The only way to the hub: a typed HTTP client (`HubClient`) that verifies every answer; the heartbeat. No torch."""

from shoal.client.heartbeat import Activity, Intervals, RegularHeartbeat
from shoal.client.hub import HubClient
from shoal.client.transport import ClientOptions
from shoal.client.trust import TrustedRun, split_join_url

__all__ = ["Activity", "ClientOptions", "HubClient", "Intervals", "RegularHeartbeat", "TrustedRun", "split_join_url"]
