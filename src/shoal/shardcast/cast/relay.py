"""`shoal cast relay`: mirror a broadcast and serve it on. Needs a disk and an upstream, nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ManifestRefused, UserError, VersionNotFound
from shoal.runtime.files import ensure_folder
from shoal.runtime.stop import StopToken
from shoal.shardcast import RelayConfig, RelaySettings, run_relay
from shoal.shardcast.cast import Sources, Terminal, say_commands
from shoal.shardcast.connection import Address, Deadline, Timeouts
from shoal.shardcast.lookup import Lookup
from shoal.shardcast.manifest import read_head
from shoal.shardcast.plan import SourceScores
from shoal.shardcast.tree import HEAD, Tree

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


def run_cast_relay(request: RelayRequest, begin: Callable[[], StopToken], terminal: Terminal) -> None:
    """Mirror until told to stop; `begin` is called once the request is known to make sense."""
    sources, peers = Sources.parse(request.upstreams), tuple(peer.partition("#")[0] for peer in request.peers)
    for peer in peers:
        Address.parse(peer)
    settings, folder = RelaySettings.model_validate(request.settings), ensure_folder(request.directory)
    stop, run = begin(), None
    if (data := Tree(folder).read(HEAD)) is not None:
        try:
            run = read_head(data, None, sources.key).run
        except ManifestRefused as error:
            raise UserError(f"{folder} mirrors another publisher: {error}; give another --dir") from error
    log.info("looking for the broadcast at %s", ", ".join(sources.urls))
    with closing(Lookup(SourceScores(sources.urls), None, sources.key, stop, Timeouts())) as lookup:
        while run is None:
            if stop.is_set():
                return
            try:
                run = lookup.newest(None, Deadline(ATTEMPT_S))[0].run
            except VersionNotFound as error:
                log.warning("%s; still trying", error)
    config = RelayConfig(folder, sources.urls, run, sources.key, request.host, request.port, settings, peers)
    run_relay(config, stop, lambda url: say_commands(terminal, url, request.host, sources.key, run))
