"""`shoal cast`: broadcast any file or folder. What each command does is in `shoal.shardcast.cast`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option, Typer

from shoal.cli import options
from shoal.runtime import logs
from shoal.runtime.stop import StopToken, stop_on_signals

cast = Typer(
    help="Broadcast files and folders to many machines: signed, verified, resumable. No run or hub is needed.",
    epilog="Start with: shoal cast publish FILE", name="cast", no_args_is_help=True, context_settings=options.HELP,
)  # fmt: skip

KEY = "What signs it. (default: FOLDER.key, made if new)"
SOURCES = "Publisher or relays, one with the publisher's key."
PATIENCE = "Give up when nothing arrives for so many seconds."


@cast.command()
def publish(
    path: Annotated[Path, Argument(metavar="PATH", help="A file, or a folder with all that is in it.")],
    directory: Annotated[Path, Option("--dir", metavar="FOLDER", help="Where the tree is.")] = Path("www"),
    key: Annotated[Path | None, Option(metavar="FILE", help=KEY)] = None,
    name: Annotated[str | None, Option(help="Of the broadcast. (default: that of PATH)")] = None,
    keep: options.Keep = 3,
    serve: Annotated[bool, Option("--serve/--no-serve", help="Serve the tree until stopped.")] = True,
    host: options.Host = "0.0.0.0",
    port: options.Port = 8471,
) -> None:
    """Publish a file or folder as the next version, and serve it."""
    from shoal.cli.printing import CastTerminal
    from shoal.shardcast.cast.serve import PublishRequest, run_publish

    request = PublishRequest(path, directory, key, name, keep, serve, host, port)
    run_publish(request, lambda: _begin("cast"), CastTerminal())


@cast.command()
def relay(
    upstreams: Annotated[list[str], Option("--upstream", metavar="URL#KEY", help=options.UPSTREAM)],
    peers: options.Peers = None,
    directory: Annotated[Path, Option("--dir", metavar="FOLDER", help="Where the mirror is.")] = Path("mirror"),
    host: options.Host = "0.0.0.0",
    port: options.Port = 8472,
    keep: options.Keep = 3,
    disk_budget_gb: options.DiskBudget = None,
) -> None:
    """Mirror a broadcast, verify every chunk, and serve it on."""
    from shoal.cli.printing import CastTerminal
    from shoal.shardcast.cast.serve import RelayRequest, run_cast_relay

    settings = {"keep_versions": keep, "disk_budget_gb": disk_budget_gb}
    request = RelayRequest(tuple(upstreams), tuple(peers or ()), directory, host, port, settings)
    run_cast_relay(request, lambda: _begin("relay"), CastTerminal())


@cast.command()
def fetch(
    sources: Annotated[list[str], Argument(metavar="URL#KEY", help=SOURCES)],
    output: Annotated[str, Option("--output", "-o", metavar="PATH", help="The file or folder to write.")],
    wait_s: options.Wait = 10,
    patience_s: Annotated[float, Option("--patience", min=1, max=86_400, help=PATIENCE)] = 60,
    force: Annotated[bool, Option("--force", help="Replace files that were not fetched from here.")] = False,
) -> None:
    """Bring a version here. Ctrl-C and the same command again continues; a second time costs nothing."""
    from shoal.cli.printing import CastTerminal
    from shoal.shardcast.cast.fetch import FetchRequest, run_fetch

    request = FetchRequest(tuple(sources), output, wait_s, patience_s, force)
    raise Exit(run_fetch(request, lambda: _begin("fetch"), CastTerminal()))


def _begin(role: str) -> StopToken:
    stop = stop_on_signals()
    logs.setup(role, None, logs.is_verbose())
    if role == "fetch" and not logs.is_verbose():
        logging.getLogger("shoal").setLevel(logging.WARNING)
    return stop
