"""Where a node of a run fetches its weights: from sources that the hub names, believed by the trainer's key alone."""

from __future__ import annotations

from pathlib import Path

from shoal.client.trust import TrustedRun
from shoal.runtime.stop import StopToken
from shoal.shardcast import Downloader, DownloadSettings


def downloader_of(trusted: TrustedRun, folder: Path, stop: StopToken, kept_payloads: int) -> Downloader:
    """A downloader of the run's policies into `folder`; the origin is asked only when no relay can help."""
    return Downloader(
        trusted.info.sources,
        trusted.run,
        trusted.trainer_key,
        folder,
        stop,
        DownloadSettings(kept_payloads=kept_payloads),
        last_resort=trusted.info.last_resort,
    )
