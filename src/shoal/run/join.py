"""Taking part in a run elsewhere, knowing only its URL: as a worker or a relay.

choices ─► hub (its root key pinned) ─► this machine (doctor) ─┬─► key, vouch ─► register, fetch, work: worker/loop
exit 2      exit 1, 4                    exit 3, else warnings  └─► several workers: each of them by `fleet`
"""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from shoal.client import HubClient
from shoal.client.trust import RUN_SUFFIX_HEX, parse_join_urls, pinned_root, remember_root
from shoal.errors import DeadlineExceeded, ResourceError, UserError
from shoal.run import fleet
from shoal.run.fleet import FleetStatus, Show, WorkerPlace
from shoal.run.folder import hub_address
from shoal.run.roles import start_role
from shoal.runtime import (
    STOPPED_CODE,
    SUPERVISED,
    FolderLock,
    MachineLimits,
    StopToken,
    ensure_folder,
    home,
    is_verbose,
    resource_error,
    write_atomically,
)  # fmt: skip
from shoal.runtime.limits import ALL_DAY, PAUSED, Hours, give_way
from shoal.runtime.targets import SANDBOX, endpoint_of
from shoal.worker.earnings import Standing

if TYPE_CHECKING:
    from shoal.shardcast import RelayConfig

log = logging.getLogger(__name__)
LEAVING = "leaving"
LOOK_EVERY_S = 1.0
HERE = WorkerPlace(".", "auto")


@dataclass(frozen=True)
class JoinRequest:
    urls: tuple[str, ...]
    folder: Path | None
    engine: str
    device: str
    dtype: str
    name: str | None
    wait_s: float
    cheat: str | None = None
    owner: Path | None = None
    vouch: Path | None = None
    check: bool = True
    limits: MachineLimits = field(default_factory=MachineLimits)
    sandbox: bool = False
    gpu: str | None = None
    workers: int | None = None
    trusted: Path | None = None
    hours: Hours = ALL_DAY
    idle: bool = False

    @property
    def command(self) -> tuple[str, ...]:
        """A process of its own that works so."""
        given = TypeAdapter(JoinRequest).dump_json(self).decode()
        return (sys.executable, "-m", "shoal.cli", "--enclosed-worker", given)


def run_joined_worker(request: JoinRequest, show: Show | None = None) -> int:
    """Returns the exit code: a supervised process that a signal stops is not done. `show` draws how they stand."""
    from shoal.engines import ENGINES, check_engine
    from shoal.engines.registry import TorchEntry
    from shoal.run.owner import certificate_of, vouch_of
    from shoal.worker.loop import ending_quietly, run_worker
    from shoal.worker.settings import WorkerConfig, WorkerSettings, check_choices, identity

    urls, pinned = parse_join_urls(request.urls)
    if request.owner is not None and request.vouch is not None:
        raise UserError("--owner and --vouch say the same thing: give one of them")
    check_engine(request.engine, request.device, request.dtype)
    settings = WorkerSettings.model_validate({"device": request.device, "dtype": request.dtype})
    check_choices(request.engine, request.cheat, settings)
    counts = isinstance(ENGINES[request.engine], TorchEntry) and request.device != "cpu" and request.workers != 1
    places = fleet.plan_workers(fleet.visible_gpus() if counts else [], request.device, request.gpu, request.workers)
    fleet.refuse_one_vouch(places, request)
    supervised, stop = SUPERVISED in os.environ, start_role("worker", None, is_verbose())

    if request.idle and SANDBOX not in os.environ and not supervised:
        give_way()

    met: list[FleetStatus] = []
    if SANDBOX not in os.environ:  # else the process around the sandbox does it
        threading.Thread(target=_attend, args=(stop, met), name="attending", daemon=True).start()
    with ending_quietly(stop):
        folder, root_fingerprint, profiles = meet_hub(urls, pinned, request, stop)
        (folder / LEAVING).unlink(missing_ok=True)
        on_gpus = f"{ENGINES[request.engine].profile}/cuda/"
        certificate = None if request.trusted is None else certificate_of(identity(folder), request.trusted)
        if certificate is not None:  # where a sandbox shows it, too
            request = replace(request, trusted=(folder / "certificate.json").absolute())
            write_atomically(folder / "certificate.json", certificate.model_dump_json().encode())
        if places and places[0].gpu is not None and not any(kind.startswith(on_gpus) for kind in profiles):
            log.warning("the run takes no work of GPUs: one worker computes on the processor (--workers: more)")
            places = []
        alone, places = not places, places or [HERE]
        for place in places:
            Standing.forget(folder / place.name)
        met.append(FleetStatus(folder, places, show=None if request.sandbox and alone else show))
        if not alone:
            return fleet.run_fleet(request, urls, stop, folder.absolute(), root_fingerprint, places, met[0])
        if request.sandbox:
            from shoal.run.sandbox import run_in_sandbox

            code = run_in_sandbox(request, urls, stop, folder.absolute(), root_fingerprint)
            return STOPPED_CODE if code == 0 and supervised and stop.is_set() else code
        config = WorkerConfig(
            folder=folder, settings=settings, engine=request.engine, hub_url=urls[0],
            root_fingerprint=root_fingerprint, name=(request.name or f"node-{identity(folder).node[:8]}")[:64],
            cheat=request.cheat, further_hubs=urls[1:],
            vouch=vouch_of(identity(folder), request.owner, request.vouch), limits=request.limits,
            certificate=certificate,
            hours=request.hours, idle=request.idle,
        )  # fmt: skip
        run_worker(config, stop)
    return STOPPED_CODE if supervised and stop.is_set() else 0


def _attend(stop: StopToken, met: Sequence[FleetStatus]) -> None:
    """Show how the workers stand, stop them for `shoal leave`, and say at once that they stop, because the group that
    is being generated may take long. `met`: of the folder, once it is known."""
    while not stop.wait(LOOK_EVERY_S):
        for status in met:
            status.draw()
            if (status.folder / LEAVING).exists():
                stop.set("shoal leave")
    log.info("stopping (%s): finished groups are sent, leases given back; a second time ends at once", stop.reason)


def joined_folder(where: str) -> Path:
    """The folder in which a worker has joined a run: of a join URL, of a run's name under ~/.shoal, or this folder."""
    runs = sorted(each for each in home().glob("*") if each.is_dir())
    if "://" in where:
        urls, pinned = parse_join_urls([where])
        root = pinned_root(urls, pinned)
        named = [each for each in runs if root is not None and each.name.endswith(f"-{root[:RUN_SUFFIX_HEX]}")]
    else:
        named = [Path(where), *(each for each in runs if where in (each.name, each.name.rpartition("-")[0]))]
    folders = [folder for each in named for folder in (each, each / "worker") if (folder / ".lock").is_file()]
    found = [each for each in folders if not any((place / "recipe.toml").is_file() for place in (each, each.parent))]
    if len(found) == 1:
        return found[0]
    known = f" ({', '.join(each.name for each in runs if (each / 'worker').is_dir())})" if runs else ""
    what = f"{where}: {'several workers' if found else 'no worker'} of this machine joined so"
    raise UserError(f"{what}; give the join URL, the run's name in {home()}{known}, or the worker's folder")


def pause(folder: Path, paused: bool) -> str:
    """Each worker sees the file of its own folder, also in a sandbox."""
    try:
        for place in _places(folder):
            (place / PAUSED).touch() if paused else (place / PAUSED).unlink(missing_ok=True)
    except OSError as error:
        raise resource_error("write to", folder, error) from error
    what = "its leases are given back; to continue: shoal leave RUN --resume" if paused else "it works when it may"
    return f"{folder}: {'paused' if paused else 'resumed'}; {what if is_locked(folder) else 'no worker runs there now'}"


def leave(folder: Path, wait_s: float) -> str:
    """Ask the workers in this folder to stop, and wait until they have. By a file, because the number of a process in a
    sandbox or a container is another one here."""
    if not is_locked(folder):
        return f"{folder}: no worker runs there; its key, weights and unsent work stay"
    write_atomically(folder / LEAVING, b"")
    try:
        FolderLock(folder).acquire(StopToken(), wait_s).release()
    except ResourceError as error:
        why = f"the worker in {folder} has not ended within {wait_s:.0f} s; its log says what it does"
        raise DeadlineExceeded(why) from error
    finally:
        (folder / LEAVING).unlink(missing_ok=True)
    places = [WorkerPlace(os.path.relpath(each, folder), "") for each in _places(folder)]
    return f"{folder} has left: {FleetStatus(folder, places).line(())}"


def is_locked(folder: Path) -> bool:
    try:
        FolderLock(folder).acquire(StopToken()).release()
    except ResourceError:
        return True
    return False


def _places(folder: Path) -> list[Path]:
    return [folder, *(key.parent for key in sorted(folder.glob("*/node.key")))]


def run_standalone_relay(hub: str, wait_s: float, folder: Path | None, given: "RelayConfig") -> None:
    """Mirror a run that `hub` tells of: without upstreams from the sources that it names."""
    from shoal.shardcast import run_relay

    stop = start_role("relay", None, is_verbose())
    with closing(HubClient.of_a_person(*hub_address(hub, wait_s), stop)) as client:
        trusted = client.trusted_run()
        remember_root(client.url, trusted.root_fingerprint)
    folder = folder or run_home(trusted.run) / "relay"
    named = frozenset(map(endpoint_of, (*given.upstreams, *given.peers)))
    config = replace(
        given, folder=folder, run=trusted.run, trusted_key=trusted.trainer_key,
        reach=replace(trusted.reach, given=named),
        upstreams=given.upstreams or (*trusted.info.sources, *trusted.info.last_resort),
        disk_bytes=given.disk_bytes or MachineLimits().disk(folder),  # else a run could fill the disk
    )  # fmt: skip
    run_relay(config, stop, lambda _url: None)


def meet_hub(
    urls: Sequence[str], pinned: str | None, request: JoinRequest, stop: StopToken
) -> tuple[Path, str, tuple[str, ...]]:
    """Meet the hub, then check this machine. Returns folder, the run's root fingerprint, the kinds that it takes."""
    from shoal.run.doctor import examine_worker

    known = pinned_root(urls, pinned)
    with closing(HubClient.of_a_person(urls, request.wait_s, known, stop)) as client:
        trusted = client.trusted_run()  # fails before anything is written here
        if known is None:
            first = "the URL has no root key, so the first answer is trusted: root key %s; does the run's owner agree?"
            log.warning(first, trusted.root_fingerprint)
        remember_root(client.url, trusted.root_fingerprint)
        folder = request.folder or run_home(trusted.run) / ("worker" if request.trusted is None else "trusted")
        findings = examine_worker(client, folder) if request.check else []
    for finding in findings:
        if not finding.ok and finding.stops:
            more = "(shoal doctor says more, --no-check skips this)"
            raise ResourceError(f"this machine cannot work: {finding.text} {more}")
        if not finding.ok:
            log.warning("%s: %s", finding.name, finding.text)
    return folder, trusted.root_fingerprint, trusted.info.profiles


def run_home(run: str) -> Path:
    return ensure_folder(home(), private=True) / Path(run).name
