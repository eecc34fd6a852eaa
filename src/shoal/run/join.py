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
from shoal.client.trust import parse_join_urls, pinned_root, remember_root
from shoal.errors import ResourceError, UserError
from shoal.run import fleet
from shoal.run.folder import hub_address
from shoal.run.roles import start_role
from shoal.runtime import (
    STOPPED_CODE,
    SUPERVISED,
    MachineLimits,
    StopToken,
    ensure_folder,
    home,
    is_verbose,
    write_atomically,
)  # fmt: skip
from shoal.runtime.limits import ALL_DAY, Hours, give_way
from shoal.runtime.targets import SANDBOX, endpoint_of

if TYPE_CHECKING:
    from shoal.shardcast import RelayConfig

log = logging.getLogger(__name__)


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


def run_joined_worker(request: JoinRequest) -> int:
    """Returns the exit code: a supervised process that a signal stops is not done."""
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

    def say_when_stopping() -> None:
        """At once, because the group that is being generated may take long."""
        while not stop.wait(60):
            pass
        log.info("stopping (%s): finished groups are sent, leases given back; a second time ends at once", stop.reason)

    if SANDBOX not in os.environ:  # else the process around the sandbox says it
        threading.Thread(target=say_when_stopping, name="stopping", daemon=True).start()
    with ending_quietly(stop):
        folder, root_fingerprint, profiles = meet_hub(urls, pinned, request, stop)
        on_gpus = f"{ENGINES[request.engine].profile}/cuda/"
        certificate = None if request.trusted is None else certificate_of(identity(folder), request.trusted)
        if certificate is not None:  # where a sandbox shows it, too
            request = replace(request, trusted=(folder / "certificate.json").absolute())
            write_atomically(folder / "certificate.json", certificate.model_dump_json().encode())
        if places and places[0].gpu is not None and not any(kind.startswith(on_gpus) for kind in profiles):
            log.warning("the run takes no work of GPUs: one worker computes on the processor (--workers: more)")
            places = []
        if places:
            return fleet.run_fleet(request, urls, stop, folder.absolute(), root_fingerprint, places)
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
