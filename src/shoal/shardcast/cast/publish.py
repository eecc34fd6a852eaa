"""`shoal cast publish`: write the next version into a folder, then serve the folder.

    model.bin ─► www/          head.json manifests/ chunks/    what is served, by this command or any HTTP server
                 www.key       signs it; made on first use, beside the folder and never in it

Publishing again into the same folder makes the next version. A server that already runs there picks it up by itself, so
the second command then has nothing left to serve.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import BroadcastError, ManifestRefused, PolicyMismatch, ResourceError, UserError
from shoal.protocol import BroadcastHead, PolicyManifest, PolicyRef, SigningKey, load_or_create_key
from shoal.protocol.policy import name_problem
from shoal.runtime.files import ensure_folder
from shoal.runtime.stop import StopToken
from shoal.shardcast import Content, Origin, OriginSettings, run_origin
from shoal.shardcast.cast import Terminal, megabytes, say_commands
from shoal.shardcast.connection import Connection, Deadline
from shoal.shardcast.content import chunk_of
from shoal.shardcast.lookup import get_document
from shoal.shardcast.manifest import MAX_HEAD_BYTES, place_of, read_head, read_manifest
from shoal.shardcast.server import local_url
from shoal.shardcast.tree import HEAD, manifest_key

FIRST_VERSION = 1
PROBE_S = 2.0


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
    """Publish, say what was published and how to get it, and serve it until stopped, from `begin` on."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: what is half written counts for nothing
    content = _content(request)
    ensure_folder(request.directory.absolute().parent)
    key = load_or_create_key(request.key_path)
    head = _head(request.directory, key)
    if request.serve and _port_is_taken(request) and (head is None or _served(request, key) != head.policy):
        raise ResourceError(
            f"port {request.port} on {request.host} is taken: nothing was published; choose another with --port"
        )
    manifest = _publish(request, content, key, head, terminal)

    def say(url: str) -> None:
        say_commands(terminal, url, request.host, key.public_key, request.own_name)

    if request.serve:
        stop = begin()
        try:
            return run_origin(request.directory, request.host, request.port, stop, say)
        except ResourceError:
            if _served(request, key) != manifest.policy:
                raise
        terminal.say("a server that already runs there has picked it up; this command is done")
    elif _served(request, key) != manifest.policy:
        return terminal.say(
            f"a server that runs for {request.directory} has it now; if there is none, any HTTP server will do. Then: "
            f"shoal cast fetch URL/#{key.public_key} -o {shlex.quote(request.own_name)}"
        )
    return say(local_url(request.host, request.port))


def _content(request: PublishRequest) -> Content:
    """What is to be published, refused in one sentence if it cannot be."""
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
            raise UserError(f"{what} {where} lies in {request.path}, which is to be published; choose another --dir")
    try:
        content = Content.at(path)
    except BroadcastError as error:
        raise UserError(f"{error}; rename it and publish again") from error
    if content.size_bytes == 0:
        raise UserError(f"{request.path} is empty: there is nothing to publish")
    return content


def _publish(
    request: PublishRequest, content: Content, key: SigningKey, head: BroadcastHead | None, terminal: Terminal
) -> PolicyManifest:
    name = _name(request, head)
    newest = head.policy.version if head is not None else None
    unchanged = _unchanged(request, content, key, head)
    if unchanged is not None:
        terminal.say(f"{name} version {newest} is published already, and nothing has changed since")
        return unchanged
    version = FIRST_VERSION if newest is None else newest + 1
    origin = Origin(request.directory, name, key, settings=OriginSettings(kept_versions=request.keep))
    started_s = time.monotonic()
    try:
        with terminal.metered(f"publishing {request.path.name}") as report:
            manifest = origin.publish(version, content, on_progress=report)
    except PolicyMismatch:  # somebody else has just published it: this one is the next
        return _publish(request, content, key, _head(request.directory, key), terminal)
    told = (
        f"published {name} version {version}: {megabytes(manifest.size_bytes)} in {time.monotonic() - started_s:.1f} s"
    )
    how = "".join(
        f"; as a difference to version {delta.base.version}: {megabytes(delta.size_bytes)}"
        for delta in manifest.deltas[:1]
    )
    terminal.say(f"{told}, digest {manifest.policy.digest}{how}")
    return manifest


def _unchanged(
    request: PublishRequest, content: Content, key: SigningKey, head: BroadcastHead | None
) -> PolicyManifest | None:
    """The newest version, if this is it once more: starting the server again makes no new one."""
    if head is None:
        return None
    try:
        data = (request.directory / manifest_key(place_of(head))).read_bytes()
        manifest = read_manifest(data, head.run, key.public_key)
    except (OSError, ManifestRefused):
        return None
    if manifest.entries != content.entries:
        return None
    chunks = tuple(chunk_of(data) for data in content.cut(manifest.chunk_size_bytes))
    return manifest if chunks == manifest.chunks else None


def _head(directory: Path, key: SigningKey) -> BroadcastHead | None:
    """What the folder offers now. A folder that another key signs is not ours to publish into."""
    try:
        return read_head((directory / HEAD).read_bytes(), None, key.public_key)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{directory} cannot be published into: {error.strerror}") from error
    except ManifestRefused as error:
        raise UserError(
            f"what {directory} offers is not signed by this key: give the right one with --key, or another --dir"
        ) from error


def _name(request: PublishRequest, head: BroadcastHead | None) -> str:
    if head is not None and request.name not in (None, head.run):
        raise UserError(f"{request.directory} is the broadcast {head.run!r}; give another --dir for {request.name!r}")
    own = request.own_name
    if head is not None and request.name is None and own != head.run:
        raise UserError(
            f"{request.directory} is the broadcast {head.run!r}: give another --dir for {own!r}, or, if it is the next "
            f"version of that, --name {shlex.quote(head.run)}"
        )
    name = head.run if head is not None else request.name or own
    problem = name_problem(name) or ("it has a slash" if "/" in name else "")
    if problem:
        raise UserError(f"a broadcast cannot be called {name!r}: {problem}; give another --name")
    return name


def _port_is_taken(request: PublishRequest) -> bool:
    try:
        socket.create_server((request.host, request.port)).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _served(request: PublishRequest, key: SigningKey) -> PolicyRef | None:
    """The newest version that is served under this port of this machine, if it is signed by this key."""
    if request.port == 0:
        return None
    with closing(Connection(local_url(request.host, request.port), StopToken())) as connection:
        try:
            data = get_document(connection, HEAD, MAX_HEAD_BYTES, Deadline(PROBE_S))
            return read_head(data or b"", None, key.public_key).policy
        except BroadcastError:  # whatever answers there, or does not, is not ours
            return None
