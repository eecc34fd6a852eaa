"""`shoal cast publish`: write the next version into a folder, then serve it; `shoal cast relay`: mirror it elsewhere.

    model.bin ─► www/          head.json manifests/ chunks/    served by this command or any HTTP server
                 www.key       signs it; made on first use, beside the folder and never in it

Publishing again into the same folder makes the next version. A server that already runs there picks it up by itself.
"""

import logging
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import BroadcastError, ManifestRefused, PolicyMismatch, ResourceError, UserError, VersionNotFound
from shoal.protocol import BroadcastHead, SigningKey, load_or_create_key
from shoal.protocol.policy import name_problem
from shoal.runtime import StopToken, ensure_folder, show_bytes
from shoal.shardcast import Content, Origin, OriginSettings, RelayConfig, run_origin, run_relay
from shoal.shardcast.cast import Sources, Terminal, say_commands
from shoal.shardcast.connection import Address, Deadline, Timeouts
from shoal.shardcast.lookup import Lookup
from shoal.shardcast.manifest import read_head
from shoal.shardcast.scheduler import SourceScores
from shoal.shardcast.tree import HEAD, Tree

log = logging.getLogger(__name__)

FIRST_VERSION = 1
ATTEMPT_S = 5.0  # to reach the upstream once; a relay may be started before it


@dataclass(frozen=True)
class PublishRequest:
    path: Path
    directory: Path
    key: Path | None
    name: str | None
    keep: int
    serve: bool
    host: str
    port: int

    @property
    def key_path(self) -> Path:
        return self.key or self.directory.absolute().with_name(f"{self.directory.absolute().name}.key")

    @property
    def own_name(self) -> str:
        return self.path.absolute().name


def run_publish(request: PublishRequest, begin: Callable[[], StopToken], terminal: Terminal) -> None:
    """Publish, report, and serve it until stopped, from `begin` on."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: an unfinished publication has no effect
    path, directory = request.path.absolute(), request.directory.absolute()
    if not path.exists():
        raise UserError(f"there is no file or folder {request.path} to publish")
    if not (path.is_file() or path.is_dir()):
        raise UserError(f"{request.path} is neither a file nor a folder")

    def is_within(inner: Path, folder: Path) -> bool:
        return Path(os.path.realpath(inner)).is_relative_to(os.path.realpath(folder))

    if is_within(request.key_path, directory):
        raise UserError(f"the key {request.key_path} would lie in {request.directory}, which is served to everybody")
    for what, where in (("the key", request.key_path), ("the published tree", directory)):
        if is_within(where, path):
            raise UserError(f"{what} {where} lies in {request.path}, which is to be published; choose another --folder")
    try:
        content = Content.at(path)
    except BroadcastError as error:
        raise UserError(f"{error}; rename it and publish again") from error
    if content.size_bytes == 0:
        raise UserError(f"{request.path} is empty: there is nothing to publish")
    ensure_folder(request.directory.absolute().parent)
    key = load_or_create_key(request.key_path)
    head = _head(request.directory, key)
    if request.serve and request.port:
        try:
            socket.create_server((request.host, request.port)).close()
        except OSError as error:
            taken = f"port {request.port} on {request.host} is taken: nothing was published"
            advice = f"choose another with --port, or, if what runs there serves {request.directory}, add --no-serve"
            raise ResourceError(f"{taken}; {advice}") from error
    _publish(request, content, key, head, terminal)
    if not request.serve:
        terminal.say(
            f"a server that runs for {request.directory} has it now; without one, start any HTTP server. Then: "
            f"shoal cast fetch URL/#{key.public_key} --out {shlex.quote(request.own_name)}"
        )
        return

    def say(url: str) -> None:
        say_commands(terminal, url, key.public_key, request.own_name)

    run_origin(request.directory, request.host, request.port, begin(), say)


def _head(directory: Path, key: SigningKey) -> BroadcastHead | None:
    try:
        return read_head((directory / HEAD).read_bytes(), None, key.public_key)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{directory} cannot be published into: {error.strerror}") from error
    except ManifestRefused as error:
        advice = "give the right one with --key, or another --folder"
        raise UserError(f"what {directory} offers is not signed by this key: {advice}") from error


def _publish(
    request: PublishRequest, content: Content, key: SigningKey, head: BroadcastHead | None, terminal: Terminal
) -> None:
    """Publish as the next version, unless the newest has the same content (the server is only started again)."""
    name = request.name or request.own_name
    problem = name_problem(name) or ("it has a slash" if "/" in name else "")
    if problem:
        raise UserError(f"a broadcast cannot be called {name!r}: {problem}; give another --name")
    if head is not None and name != head.run:
        raise UserError(
            f"{request.directory} is the broadcast {head.run!r}: give another --folder for {name!r}, or, if it is the "
            f"next version of that, --name {shlex.quote(head.run)}"
        )
    started_s = time.monotonic()
    origin = Origin(request.directory, name, key, settings=OriginSettings(keep_versions=request.keep))
    version = FIRST_VERSION
    if head is not None:  # and the next one if what was published has been damaged
        version = head.policy.version + (head.policy.place not in origin.known())
    while True:
        try:
            with terminal.metered(f"publishing {request.path.name}") as report:
                report(0, content.size_bytes)
                manifest = origin.publish(version, content, on_progress=report)
            break
        except PolicyMismatch:  # other content, or a version that another process has published meanwhile
            version += 1
    if head is not None and manifest.policy == head.policy:
        terminal.say(f"{name} version {version} is published already, and nothing has changed since")
        return
    seconds, size = time.monotonic() - started_s, show_bytes(manifest.size_bytes)
    line = f"published {name} version {version}: {size} in {seconds:.1f} s, digest {manifest.policy.digest}"
    for delta in manifest.deltas[:1]:
        line += f"; as a difference to version {delta.base.version}: {show_bytes(delta.size_bytes)}"
    terminal.say(line)


def run_cast_relay(config: RelayConfig, begin: Callable[[], StopToken], terminal: Terminal) -> None:
    """Mirror until stopped; `begin` is called when `config` was found valid. Its URLs are as a person gives them, with
    the key; the run is that of the sources' head."""
    sources, peers = Sources.parse(config.upstreams), tuple(peer.partition("#")[0] for peer in config.peers)
    for peer in peers:
        Address.parse(peer)
    folder = ensure_folder(config.folder)
    stop, run = begin(), None
    if (data := Tree(folder).read(HEAD)) is not None:
        try:
            run = read_head(data, None, sources.key).run
        except ManifestRefused as error:
            raise UserError(f"{folder} mirrors another publisher: {error}; give another --folder") from error
    log.info("looking for the broadcast at %s", ", ".join(sources.urls))
    with closing(Lookup(SourceScores(sources.urls), None, sources.key, stop, Timeouts())) as lookup:
        while run is None:
            if stop.is_set():
                return
            try:
                run = lookup.newest(None, Deadline(ATTEMPT_S))[0].run
            except VersionNotFound as error:
                log.warning("%s; still trying", error)
    config = replace(config, upstreams=sources.urls, peers=peers, run=run, trusted_key=sources.key)
    run_relay(config, stop, lambda url: say_commands(terminal, url, sources.key, run))
