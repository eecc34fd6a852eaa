"""The only route to the hub: a typed HTTP client that trusts nothing it cannot verify. No torch.

HubClient       one method per row of the hub's HTTP table; signs, retries under a deadline, verifies answers
ClientOptions   patience, time-outs and back-off of a client
TrustedRun      the run as its root key vouches for it: the hub's, trainer's and validators' keys
RegularHeartbeat  a thread that tells the hub what this process does, and hears what the hub thinks of it
Intervals            how often a process that lasts asks the hub, and how long it waits for one that is away
split_join_url  `http://host:port/#fingerprint` taken apart
"""

from shoal.client.heartbeat import Activity, Intervals, RegularHeartbeat
from shoal.client.hub import HubClient
from shoal.client.transport import ClientOptions
from shoal.client.trust import TrustedRun, split_join_url

__all__ = ["Activity", "ClientOptions", "HubClient", "Intervals", "RegularHeartbeat", "TrustedRun", "split_join_url"]
