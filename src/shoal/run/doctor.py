"""`shoal doctor`: is this machine fit for shoal, and can it reach a run? One line per finding, with the remedy.

`shoal join` makes the same checks: what makes work impossible ends it with the exit code `stops`; everything else is a
warning.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from math import inf
from pathlib import Path

from shoal.client import ClientOptions, HubClient, TrustedRun
from shoal.client.trust import parse_join_urls, pinned_root
from shoal.errors import BroadcastError, ConfigError, HubError, ResourceError, ShoalError, UserError
from shoal.protocol import MAX_SKEW_MS, RunInfo, SigningKey
from shoal.runtime import MachineLimits, StopToken, SystemClock, ensure_folder
from shoal.runtime.targets import Reach, proxy_of
from shoal.shardcast.connection import Connection, Deadline, Timeouts

GIB = 2**30
LEAST_TORCH = (2, 11)
LEAST_MEMORY_BYTES = LEAST_DISK_BYTES = 2 * GIB
NO_DISK_BYTES = 64 * 2**20  # with less not even the smallest policy fits beside finished work
TIMEOUT_S = 5.0
MAX_SOURCES = 16
DEVICES = Path("/dev")
GPU_FILES = ("nvidiactl", "nvidia0", "dxg", "kfd")  # of the drivers of NVIDIA, of a Windows host, of AMD
OPTIONS = ClientOptions(patience_s=1.0, connect_timeout_s=TIMEOUT_S, answer_timeout_s=TIMEOUT_S, warn_after_s=inf)


@dataclass(frozen=True)
class MachineFinding:
    """`stops`: the exit code of a worker that cannot work because of it, else 0."""

    name: str
    ok: bool
    text: str
    stops: int = 0

    @property
    def line(self) -> str:
        return f"{'ok     ' if self.ok else 'problem'}  {self.name:<8} {self.text}"


def examine(
    urls: Sequence[str], folder: Path, device: str = "auto", dtype: str = "auto", engine: str = "torch"
) -> list[MachineFinding]:
    """All checks; one that cannot be made is a problem, not a crash."""
    checks = (_torch, _memory, lambda: _device(device), lambda: _disk(folder), lambda: _writable(folder))
    return [*(check() for check in checks), *(_route(urls, engine, device, dtype) if urls else [])]


def examine_worker(client: HubClient, folder: Path) -> list[MachineFinding]:
    machine = [_memory(), _device(), _disk(folder), _writable(folder)]
    return [*machine, _clock(client), _weights(client.trusted_run())]


def _torch() -> MachineFinding:
    """From the package's metadata, because importing torch takes seconds."""
    version = torch_version() or "0.0 (not installed; a relay or a hub does without)"
    numbers = tuple(int(part) for part in version.split()[0].split("+")[0].split(".")[:2])
    return _judged("torch", numbers >= LEAST_TORCH, version, "install torch 2.11 or newer (see README)")


def torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _memory() -> MachineFinding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _judged("memory", total >= LEAST_MEMORY_BYTES, f"{total / GIB:.1f} GiB", "torch and a tiny model need 2 GiB")


def gpu_files() -> list[str]:
    return [name for name in GPU_FILES if (DEVICES / name).exists()]


def _device(asked: str = "auto") -> MachineFinding:
    """By the files of drivers in /dev, because torch would take seconds."""
    gpus = gpu_files()
    if not gpus:
        remedy = "install its driver, or leave --device cuda out"
        return _judged("device", asked != "cuda", "cpu (no GPU, or no driver for it)", remedy)
    can_use = "+cpu" not in (torch_version() or "+cpu")
    remedy = "the installed torch has no CUDA: install one that has"
    return _judged("device", can_use, f"a GPU ({', '.join(gpus)})", remedy)


def _disk(folder: Path) -> MachineFinding:
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    text, ok = f"{free / GIB:.1f} GiB free at {existing}", free >= LEAST_DISK_BYTES
    found = _judged("disk", ok, text, "free some space, or use another folder")
    return replace(found, stops=ResourceError.exit_code) if free < NO_DISK_BYTES else found


def _writable(folder: Path) -> MachineFinding:
    try:
        return MachineFinding("folder", True, f"{ensure_folder(folder.absolute())} is writable")
    except ShoalError as error:
        return MachineFinding("folder", False, str(error), error.exit_code)


def _route(urls: Sequence[str], engine: str, device: str, dtype: str) -> Iterator[MachineFinding]:
    """Each address of the hub; clock, weights and number format by the first that answers."""
    try:
        bases, given = parse_join_urls(urls)
        pinned, proxy = pinned_root(bases, given), proxy_of(bases[0])
        yield MachineFinding("proxy", True, "none" if proxy is None else f"{proxy.shown} (by the environment)")
    except UserError as error:
        yield MachineFinding("hub", False, str(error), error.exit_code)
        return
    met = None
    for base in bases:
        with closing(HubClient(base, SigningKey.generate(), StopToken(), pinned, options=OPTIONS)) as client:
            finding = _hub(client)
            yield finding
            if finding.ok and met is None:
                met = client.trusted_run()
                pinned = met.root_fingerprint  # the others have to belong to the same run
                yield _clock(client)
    if met is not None:
        yield _weights(met)
        if torch_version() is not None:
            yield _compute(met.info, engine, device, dtype)


def _compute(info: RunInfo, engine: str, device: str, dtype: str) -> MachineFinding:
    """What `shoal join` would compute in for the run, by the same functions. Loads torch."""
    from shoal.engines import choose, free_bytes
    from shoal.worker.settings import refuse_too_large

    try:
        device, dtype = choose(engine, device, dtype, info.profiles)
        refuse_too_large(info, device, dtype, MachineLimits())
    except (ConfigError, ResourceError) as error:
        return MachineFinding("compute", False, str(error), error.exit_code)
    free_gib = free_bytes(device) / GIB
    return MachineFinding("compute", True, f"on {device} in {dtype}, with {free_gib:.1f} GiB of free memory")


def _hub(client: HubClient) -> MachineFinding:
    try:
        info = client.run_info()
    except ShoalError as error:
        what = " does not answer as a hub; check the address and your network" if isinstance(error, HubError) else ""
        return MachineFinding("hub", False, f"{client.url}{what}: {' '.join(str(error).split())}", error.exit_code)
    text = f"{client.url} runs {info.run}, {info.steps} steps, protocol {info.protocol_version}"
    return MachineFinding("hub", True, text)


def _clock(client: HubClient) -> MachineFinding:
    """Not fatal: a client corrects its requests by the hub's clock."""
    try:
        skew_ms = SystemClock().now_ms() - client.status().now_ms
    except ShoalError as error:
        return MachineFinding("clock", False, f"the hub does not say what time it is: {' '.join(str(error).split())}")
    text = f"{abs(skew_ms) / 1000:.1f} s {'ahead of' if skew_ms > 0 else 'behind'} the hub"
    return _judged("clock", abs(skew_ms) < MAX_SKEW_MS / 2, text, "set this machine's clock, for instance with NTP")


def _weights(trusted: TrustedRun) -> MachineFinding:
    sources = [*trusted.info.sources, *trusted.info.last_resort][:MAX_SOURCES]
    if not sources:
        return MachineFinding("weights", False, "the hub names no source of weights; ask the run's owner")
    with ThreadPoolExecutor(max_workers=len(sources)) as threads:
        problems = [problem for problem in threads.map(partial(_reach, trusted.reach), sources) if problem]
    text = f"{len(sources) - len(problems)} of {len(sources)} sources answer"
    if not problems:
        return MachineFinding("weights", True, text)
    remedy = "check your network, or ask the run's owner" if len(problems) == len(sources) else "the others will do"
    return MachineFinding("weights", len(problems) < len(sources), f"{text}: {problems[0]}; {remedy}")


def _reach(reach: Reach, source: str) -> str:
    """What is wrong with a source, if anything. A source without files yet is fine."""
    try:
        with closing(Connection(source, StopToken(), Timeouts(TIMEOUT_S, TIMEOUT_S, reach=reach))) as connection:
            status = connection.get("/head.json", Deadline(TIMEOUT_S)).status
        return f"{source} answers HTTP {status}" if status >= 500 else ""
    except (BroadcastError, ConfigError) as error:
        return str(error)


def _judged(name: str, ok: bool, text: str, remedy: str) -> MachineFinding:
    return MachineFinding(name, ok, text if ok else f"{text}; {remedy}")
