"""`shoal cast relay`: mirror a broadcast and serve it on. Needs a disk and an upstream, nothing else.

What it believes is remembered beside its folder (`mirror.trust.json`), so that it starts again without its upstream.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import BroadcastError, ManifestRefused
from shoal.runtime.files import ensure_folder
from shoal.runtime.stop import StopToken
from shoal.shardcast import RelayConfig, RelaySettings, run_relay
from shoal.shardcast.cast import Terminal, say_commands
from shoal.shardcast.cast.trust import Sources, Trust, agree, meet

log = logging.getLogger(__name__)

ATTEMPT_S = 5.0  # a relay that is started before its upstream waits for it, and says so


@dataclass(frozen=True)
class RelayRequest:
    upstreams: tuple[str, ...]
    peers: tuple[str, ...]
    directory: Path
    host: str
    port: int
    settings: Mapping[str, float | None]

    @property
    def trust_path(self) -> Path:
        folder = self.directory.absolute()
        return folder.with_name(f"{folder.name}.trust.json")


def run_cast_relay(request: RelayRequest, begin: Callable[[], StopToken], terminal: Terminal) -> None:
    """Mirror until told to stop; `begin` is called when what was asked for is known to make sense."""
    sources, peers = Sources.parse(request.upstreams), Sources.parse(request.peers)
    settings = RelaySettings.model_validate(request.settings)
    ensure_folder(request.directory)
    stop = begin()
    trust = _trust(sources, request.trust_path, stop)
    if trust is None:
        return
    folder, host, port = request.directory, request.host, request.port
    config = RelayConfig(folder, sources.urls, trust.run, trust.key, host, port, settings, peers.urls)
    run_relay(config, stop, lambda url: say_commands(terminal, url, host, trust.key, trust.run))


def _trust(sources: Sources, path: Path, stop: StopToken) -> Trust | None:
    """Whom to mirror; None if stopped while nobody was there yet."""
    _, remembered = agree(sources, path)
    if remembered is not None:
        return remembered
    log.info("looking for the broadcast at %s", ", ".join(sources.urls))
    said = ""
    while True:
        try:
            trust, first_use = meet(sources, path, stop, ATTEMPT_S)
            break
        except BroadcastError as error:
            if stop.is_set():
                return None
            if isinstance(error, ManifestRefused):
                raise
            if str(error) != said:
                log.warning("%s; still trying", error)
            said = str(error)
    if first_use:
        log.warning("no key was given: from now on key %s is believed (remembered in %s)", trust.key, path)
    return trust
