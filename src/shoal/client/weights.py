"""Where a node fetches weights: from sources that the hub names, verified by the trainer's key alone.

The owner may add and remove relays during the run, so the hub is asked for them now and then.
"""

import logging
from pathlib import Path

from shoal.client.hub import HubClient
from shoal.client.trust import TrustedRun
from shoal.errors import ShoalError
from shoal.protocol import PolicyRef
from shoal.runtime import Clock, MachineLimits, StopToken, SystemClock
from shoal.shardcast import Downloader, DownloadSettings, Payload
from shoal.shardcast.connection import PoolSettings

log = logging.getLogger(__name__)

LOOK_EVERY_S = 60.0
LOOK_PATIENCE_S = 5.0


def downloader_of(
    trusted: TrustedRun, folder: Path, stop: StopToken, kept_payloads: int, limits: MachineLimits = MachineLimits()
) -> Downloader:
    info, pool = trusted.info, PoolSettings.throttled(limits.bandwidth_bytes_s, trusted.reach)
    most = info.model.payload_bytes or None
    settings = DownloadSettings(kept_payloads=kept_payloads, pool=pool, max_payload_bytes=most, limits=limits)
    return Downloader(info.sources, trusted.run, trusted.trainer_key, folder, stop, settings, info.last_resort)


class RefreshingDownloader:
    """`Downloader.fetch` from the sources that the hub names now. If the hub does not answer, sources stay."""

    def __init__(self, client: HubClient, downloader: Downloader, clock: Clock = SystemClock()) -> None:
        self._client, self._downloader, self._clock = client, downloader, clock
        info, self._looked_s = client.run_info(), clock.monotonic_s()
        self._sources = (info.sources, info.last_resort)

    def __call__(self, policy: PolicyRef, deadline_s: float) -> Payload:
        if self._clock.monotonic_s() - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = self._clock.monotonic_s()
            self._look(min(LOOK_PATIENCE_S, deadline_s))
        return self._downloader.fetch(policy, deadline_s)

    def _look(self, patience_s: float) -> None:
        try:
            info = self._client.patient(patience_s).refreshed_run().info
        except ShoalError as error:
            log.debug("the hub was not asked for new sources of weights: %s", error)
            return
        if (info.sources, info.last_resort) != self._sources:
            self._sources = (info.sources, info.last_resort)
            self._downloader.set_sources(info.sources, last_resort=info.last_resort)
            log.info("weights come from %s from now on", ", ".join(info.sources) or "nowhere")
