"""Every reason code is in the table that contributors read, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.toploc.check import Reason as ProofReason
from shoal.validator import canary, checks, judge, rewards, verdicts

SOURCES = [Path(module.__file__ or "") for module in (checks, rewards, canary)]


def test_the_table_has_every_reason_that_the_checks_give() -> None:
    table = set(re.findall(r"^\| ([a-z]+\.[a-z_]+) +\|", checks.__doc__ or "", re.MULTILINE))
    given = {code for path in SOURCES for code in re.findall(r'failed\(\s*"([a-z]+\.[a-z_]+)"', path.read_text())}
    given |= {f"proofs.{reason}" for reason in ProofReason.__args__}
    given |= {"proofs.drift", *(reason for reason, _ in checks.RECORDED.values()), *judge.SHOWN_REASONS.values()}
    assert given == table


def test_every_unsure_reason_is_explained() -> None:
    constants = {value for name, value in vars(verdicts).items() if name.startswith("MACHINERY_")}
    assert constants == set(verdicts.MACHINERY)
