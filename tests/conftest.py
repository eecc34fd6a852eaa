"""For all tests: no deadline per example of a property test (other processes may be busy on the same cores), a folder
of the user that is the test's own, and logging as it was before, whatever a test has set up.
"""

import logging
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kit.cast import lab
from kit.hf import hf_hub
from kit.postgres import database_url, postgres
from kit.s3 import shop, shop_keys
from shoal.runtime.logs import QUIET_LIBRARIES

__all__ = ["database_url", "hf_hub", "lab", "postgres", "shop", "shop_keys"]  # fixtures for whoever names them

settings.register_profile("shoal", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
settings.register_profile("thorough", settings.get_profile("shoal"), max_examples=200)  # make test-all
settings.load_profile("shoal")


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the known hubs, keys and heads of whoever runs it, nor those of another test."""
    path = tmp_path_factory.getbasetemp() / f"home-{secrets.token_hex(8)}"  # made by whoever writes to it
    monkeypatch.setenv("SHOAL_HOME", str(path))
    return path


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    changed = [root, *(logging.getLogger(name) for name in ("shoal", *QUIET_LIBRARIES))]
    handlers, levels = list(root.handlers), [each.level for each in changed]
    yield
    logging.captureWarnings(False)
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    for each, level in zip(changed, levels, strict=True):
        each.setLevel(level)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the tables that tests have left with `record_property("table", text)`, also those of other processes."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, ())]
    for name, text in (pair for report in reports for pair in report.user_properties):
        if name == "table":
            terminalreporter.write_line(f"\n{text}")
