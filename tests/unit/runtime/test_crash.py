"""Crash points: named and placed one for one, deadly when asked for, nothing otherwise."""

import ast
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

import shoal
from shoal.errors import ConfigError
from shoal.runtime import crash

SOURCES = Path(shoal.__file__).parent
ONE, OTHER = "hub.submit.after_blob", "worker.outbox.written"


def placed() -> Counter[str]:
    """How often each name is given to `point(…)` in the package."""
    return Counter(name for path in sorted(SOURCES.rglob("*.py")) for name in _points(ast.parse(path.read_text())))


def _points(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("point", "crash.point"):
            (argument,) = node.args
            assert isinstance(argument, ast.Constant), f"line {node.lineno}: a point is placed by its literal name"
            yield argument.value


def test_every_point_is_placed_once_and_every_placed_one_is_named() -> None:
    found = placed()
    assert set(found) ^ set(crash.POINTS) == set()
    assert set(found.values()) == {1}


class Died(BaseException):
    """In the place of a death."""


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(crash, "die", Mock(side_effect=Died))
    yield
    crash.arm({})


def test_it_strikes_at_the_point_and_at_the_count_asked_for() -> None:
    crash.arm({crash.CRASH_AT: f"{ONE}:3, {OTHER}"})
    for _ in range(2):
        crash.point(ONE)
    with pytest.raises(Died):
        crash.point(OTHER)
    with pytest.raises(Died):
        crash.point(ONE)


def test_a_point_that_has_struck_leaves_a_file_and_is_over_for_everybody(tmp_path: Path) -> None:
    environment = {crash.CRASH_AT: ONE, crash.CRASH_FOLDER: str(tmp_path)}
    crash.arm(environment)
    with pytest.raises(Died):
        crash.point(ONE)
    assert [path.name for path in tmp_path.iterdir()] == [ONE]
    crash.arm(environment)  # as another process does
    crash.point(ONE)


@pytest.mark.parametrize(("asked", "sentence"), [
    ("hub.submit.after_blop", "names 'hub.submit.after_blop'.*did you mean hub.submit.after_blob"),
    ("nonsense", "no crash point; there are hub.start.after_secret, "), (f"{ONE}:", "a number from 1, not ''"),
    (f"{ONE}:0", "a number from 1, not '0'"), (f"{OTHER},{ONE}:two", "a number from 1, not 'two'"),
])  # fmt: skip
def test_unknown_crash_points_are_refused(asked: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        crash.arm({crash.CRASH_AT: asked})


def run(command: list[str], asked: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, crash.CRASH_AT: asked}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("asked", "code"), [(f"{ONE}:2", -signal.SIGKILL), (f"{ONE}:3", 7)], ids=["reached", "not reached"]
)
def test_a_real_process_dies_without_another_word(asked: str, code: int) -> None:
    program = f"""
import sys
from shoal.runtime.crash import arm, point
arm()
try:
    point({ONE!r})
    print("once", flush=True)
    point({ONE!r})
finally:
    print("finally", flush=True)
sys.exit(7)
"""
    ran = run([sys.executable, "-c", program], asked)
    assert ran.returncode == code, ran.stderr
    assert ran.stdout.split() == (["once"] if code < 0 else ["once", "finally"])
