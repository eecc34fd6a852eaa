"""The only way to the hub: a typed HTTP client that verifies every answer. No torch.

HubClient         one method per HTTP call; signs, retries until a deadline, verifies answers
ClientOptions     patience, time-outs and back-off of a client
TrustedRun        the verified run: keys of its hub, trainer and validators
RegularHeartbeat  a thread that reports what this process does
Intervals         how often a long-running process asks the hub, and how long it waits for it
split_join_url    `http://host:port/#fingerprint` into its parts
"""

from shoal.client.heartbeat import Activity, Intervals, RegularHeartbeat
from shoal.client.hub import HubClient
from shoal.client.transport import ClientOptions
from shoal.client.trust import TrustedRun, split_join_url

__all__ = ["Activity", "ClientOptions", "HubClient", "Intervals", "RegularHeartbeat", "TrustedRun", "split_join_url"]
