"""`shoal cast`: broadcast any file or folder. What each command does is in `shoal.shardcast.cast`."""

import logging
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, Typer

from shoal.cli import options
from shoal.cli.help import CONTEXT, Command, CommandGroup
from shoal.runtime import StopToken, logs, stop_on_signals

cast = Typer(
    help="Broadcast files and folders to many machines: signed, verified, resumable. No run and no hub is needed.",
    name="cast", cls=CommandGroup, context_settings=CONTEXT,
)  # fmt: skip

TREE = "Where the published files are, which are served."
KEY = "The key file that signs. (default: FOLDER.key, made if it is not there)"
NAME = "The name of the broadcast. (default: that of PATH)"
SOURCES = "The publisher's URL or relays' URLs; one of them ends in the publisher's key."


@cast.command(cls=Command, epilog="Example: shoal cast publish model.safetensors")
def publish(
    path: Annotated[Path, Argument(metavar="PATH", help="A file, or a folder with everything in it.")],
    folder: Annotated[Path, options.value("--folder", "FOLDER", TREE)] = Path("www"),
    key: Annotated[Path | None, options.value("--key", "FILE", KEY)] = None,
    name: Annotated[str | None, options.value("--name", "NAME", NAME)] = None,
    keep: options.KeepVersions = 3,
    serve: Annotated[bool, Option("--serve/--no-serve", help="Serve what is published until Ctrl-C.")] = True,
    host: options.Host = "0.0.0.0",
    port: options.Port = 8471,
) -> None:
    """Publish a file or folder as the next version, and serve it. It prints the commands that others need."""
    from shoal.cli.printing import CommandTerminal
    from shoal.shardcast.cast.serve import PublishRequest, run_publish

    request = PublishRequest(path, folder, key, name, keep, serve, host, port)
    run_publish(request, lambda: _begin("cast"), CommandTerminal())


@cast.command(cls=Command, epilog="Example: shoal cast relay --upstream http://HOST:8471/#KEY --port 8472")
def relay(
    upstreams: Annotated[list[str], options.value("--upstream", "URL#KEY", options.UPSTREAM_HELP)],
    peers: options.Peers = None,
    folder: Annotated[Path, options.value("--folder", "FOLDER", "Where to keep the mirror.")] = Path("mirror"),
    host: options.Host = "0.0.0.0",
    port: options.Port = 8472,
    keep: options.KeepVersions = 3,
    max_disk: options.MaxDisk = None,
) -> None:
    """Mirror a broadcast, verify every chunk, and serve it to others."""
    from shoal.cli.printing import CommandTerminal
    from shoal.shardcast import RelayConfig
    from shoal.shardcast.cast.serve import run_cast_relay

    config = RelayConfig(folder, tuple(upstreams), "", "", host, port, tuple(peers or ()), keep, max_disk)
    run_cast_relay(config, lambda: _begin("relay"), CommandTerminal())


@cast.command(cls=Command, epilog="Example: shoal cast fetch http://HOST:8471/#KEY --out model.safetensors")
def fetch(
    sources: Annotated[list[str], Argument(metavar="URL#KEY", help=SOURCES)],
    out: Annotated[str, options.value("--out", "PATH", "The file or folder to write.")],
    wait_s: options.Wait = 10,
    patience_s: options.Patience = 60,
    force: Annotated[bool, Option("--force", help="Replace files that were not fetched by this command.")] = False,
) -> None:
    """Fetch the newest version. After Ctrl-C the same command resumes; what is here already is not fetched again."""
    from shoal.cli.printing import CommandTerminal
    from shoal.shardcast.cast.fetch import FetchRequest, run_fetch

    request = FetchRequest(tuple(sources), out, wait_s, patience_s, force)
    raise Exit(run_fetch(request, lambda: _begin("fetch"), CommandTerminal()))


def _begin(role: str) -> StopToken:
    stop = stop_on_signals()
    logs.setup(role, None, logs.is_verbose())
    if role == "fetch" and not logs.is_verbose():
        logging.getLogger("shoal").setLevel(logging.WARNING)
    return stop
