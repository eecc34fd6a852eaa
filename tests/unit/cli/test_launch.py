"""`shoal run` around stand-ins for the roles: what starts, what ends a run, and that nothing is left."""

import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx2
import numpy as np
import pytest

from kit import Patch
from kit.cli import RecordingDisplay
from shoal.errors import ConfigError, ResourceError
from shoal.protocol import load_or_create_key
from shoal.run import launch as launch_module
from shoal.run.folder import RunFolder
from shoal.run.launch import Launched, conclusion, kept_line, launch, process_spec
from shoal.run.recipe import Recipe
from shoal.run.roles import command_of, role_names, run_role, validator_config
from shoal.runtime import SUPERVISED, FolderLock, StopToken, shoal_command
from shoal.runtime.config import parse_config
from shoal.runtime.supervise import Ending, ProcessSpec
from shoal.shardcast import Content, Origin

SERVE = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nwhile True: signal.pause()"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    recipe = parse_config("[hub]\nport = 0\n[worker]\ncount = 2\n[validator]\ncount = 2", Recipe, "test")
    return RunFolder.prepare(tmp_path / "run", recipe)


def test_each_role_is_a_command_of_the_same_program_and_essential_roles_end_the_run() -> None:
    run = Path("/r")
    assert command_of(run, "origin") == ["relay", "--origin", "/r"]
    assert command_of(run, "validator-1") == ["validator", "/r", "--index", "1"]
    honest, cheater = (process_spec(run, "worker-0", cheat) for cheat in (None, "best-of"))
    assert honest.argv == (sys.executable, "-m", "shoal.cli", "join", "/r", "--index", "0")
    assert honest.log == run / "logs" / "worker-0.log"
    assert cheater == replace(honest, argv=(*honest.argv, "--cheat", "best-of"))
    names = ("hub", "origin", "relay-0", "trainer", "validator-0", "worker-0")
    kinds = {name: process_spec(Path("/r"), name) for name in names}
    assert [spec.when_done for spec in kinds.values()] == ["restart", "restart", "restart", "end", "rest", "rest"]
    assert [name for name, spec in kinds.items() if not spec.essential] == ["relay-0", "worker-0"]


def test_validators_may_all_run_elsewhere(tmp_path: Path) -> None:
    """One that is certified later gets the number 0."""
    recipe = parse_config("[validator]\ncount = 0", Recipe, "test")
    made = RunFolder.prepare(tmp_path / "run", recipe)
    made.assign_endpoints()
    assert role_names(made) == ["hub", "origin", "relay-0", "trainer", "worker-0"]
    assert set(made.trusted_roles) == {"hub", "trainer"}
    key = load_or_create_key(made.path / "keys" / "validator-0.key")
    made.put_certificate("validator-0", made.certify("validator", key.public_key))
    assert validator_config(RunFolder.open(made.path), 0).key.public_key == key.public_key


def stand_ins(monkeypatch: Patch, trainer: str) -> None:
    def spec(path: Path, name: str) -> ProcessSpec:
        real = process_spec(path, name)
        code = trainer if name == "trainer" else SERVE
        return ProcessSpec(name, (sys.executable, "-S", "-c", code), real.log, real.essential, real.when_done)

    monkeypatch.setattr(launch_module, "process_spec", spec)


def start(folder: RunFolder, patience_s: float = 600.0) -> Launched:
    return launch(folder, patience_s, StopToken(), RecordingDisplay())


def test_the_run_ends_well_with_its_trainer_and_further_processes_are_supervised_like_the_rest(monkeypatch, folder):
    log = folder.path / "logs" / "worker-2.log"
    gate = f"import os, time\nwhile not os.path.exists({str(log)!r}) or 'up' not in open({str(log)!r}).read(): pass"
    stand_ins(monkeypatch, gate)
    up = (sys.executable, "-S", "-c", f"print('up', flush=True)\n{SERVE}")
    extra, display = ProcessSpec("worker-2", up, log, False, "rest"), RecordingDisplay()
    launched = launch(folder, 600.0, StopToken(), display, (extra,), {"worker-2": "cheats"})
    assert launched.ending == Ending(0, "")
    assert launched.status is None
    assert 0 < launched.elapsed_s < 60
    assert display.said[0].startswith(f"run {folder.run_id} in {folder.path}, hub at http://127.0.0.1:")
    assert folder.endpoints.join in display.said[1]
    assert [process.name for process in display.scenes[-1].processes] == [*role_names(folder), "worker-2"]
    assert display.scenes[-1].notes == {"worker-2": "cheats"}
    assert json.loads((folder.path / "processes.json").read_text()) == {}
    assert "trainer is done" in (folder.path / "logs" / "run.log").read_text()


def test_a_finished_run_says_what_it_keeps(tmp_path: Path) -> None:
    for name, size in {"trainer": 3_000_000, "origin": 2_000_000, "hub": 1_000_000, "logs": 1}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * size)
    line = kept_line(tmp_path)
    assert line.startswith(f"{tmp_path} keeps 6")
    assert re.search(r": trainer 3[\d.]* MB, origin 2[\d.]* MB, hub 1[\d.]* MB, …$", line)


def test_only_a_finished_run_loses_its_caches_and_older_versions(monkeypatch: Patch, folder: RunFolder) -> None:
    origin = Origin(folder.path / "origin", folder.run_id, folder.key("trainer"))
    for version in range(5):
        origin.publish(version, Content.of({"weight": np.random.default_rng(version).bytes(400_000)}))
    caches = [folder.path / name for name in ("worker-7/cache", "validator-0/cache", "relay-0/chunks")]
    kept = [folder.path / name for name in ("worker-7/outbox", "trainer/checkpoints/3.0", "trainer/export", "hub")]
    for path in (*caches, *kept):
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"data")
    stand_ins(monkeypatch, BROKEN)
    assert start(folder).ending.exit_code == 2
    assert all((path / "file").exists() for path in (*caches, *kept))
    stand_ins(monkeypatch, "print('done')")
    assert start(folder).ending.exit_code == 0
    assert not any(path.exists() for path in caches)
    assert all((path / "file").exists() for path in kept)
    head = origin.head()
    assert head.versions == ("0.2", "0.3", "0.4"), "the last, and two that its groups may be of"


BROKEN = "import sys; print('shoal: the model is broken', file=sys.stderr); sys.exit(2)"


@pytest.mark.parametrize(
    ("trainer", "patience_s", "code", "words"),
    [(BROKEN, 600.0, 2, "trainer: the model is broken"), (SERVE, 0.5, 1, "the hub does not answer")],
)
def test_run_that_cannot_continue_ends_with_the_reason(monkeypatch, folder, trainer, patience_s, code, words):
    stand_ins(monkeypatch, trainer)
    ending = start(folder, patience_s).ending
    assert (ending.exit_code, words in ending.message) == (code, True), ending


def test_stopping_is_neither_success_nor_a_crash(monkeypatch: Patch, folder: RunFolder) -> None:
    stand_ins(monkeypatch, SERVE)
    stop, display = StopToken(), RecordingDisplay()
    timer = threading.Timer(0.3, stop.set, ["SIGINT"])
    timer.start()
    launched = launch(folder, 600.0, stop, display)
    timer.join()
    assert launched.ending == Ending(130, "stopped (SIGINT)")
    assert display.said[-1].startswith("stopping (SIGINT)")


@pytest.mark.parametrize(("code", "rows", "last"), [
    (0, [], "the trained model is in {run}/trainer/export"),
    (1, [], "0 steps in 1 s"),
    (130, [], "to resume: {shoal} run {run}"),
    (0, [{"step": 0, "groups": 0, "dropped_groups": 4}], "the unchanged model is in {run}/trainer/export"),
    (0, [{"step": 0, "held_out": 0.5}, {"step": 5, "held_out": 0.75}], "the trained model is in {run}/trainer"),
    (0, [{"step": 0, "held_out": 0.75}, {"step": 5, "held_out": 0.75}], "the trained model is in {run}/trainer"),
    (0, [{"step": 0, "held_out": 0.9}, {"step": 2, "held_out": 0.9}, {"step": 5, "held_out": 0.75}],
     "version 2 has the best held-out score, 0.900 (last 0.750); to take it: {shoal} export {run} OUT --best"),
])  # fmt: skip
def test_how_a_run_ended_decides_what_to_do_next(folder, code, rows, last):
    (folder.path / "trainer").mkdir()
    (folder.path / "trainer" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = conclusion(folder.path, Launched(Ending(code, ""), None, 1.0))
    assert said[-1].startswith(last.format(run=folder.path, shoal=shoal_command()))
    assert ("unchanged" in last) == any(line.startswith("nothing was trained on: all 4 groups") for line in said)


def test_folder_that_another_start_has_changed_or_runs_in_is_refused(folder: RunFolder, monkeypatch: Patch) -> None:
    other = folder.recipe.model_copy(update={"run": folder.recipe.run.model_copy(update={"seed": 7})})
    with pytest.raises(ConfigError, match="another start has just made another run"):
        launch(RunFolder(folder.path, other), 600.0, StopToken(), RecordingDisplay())
    assert not (folder.path / "endpoints.json").exists()
    monkeypatch.setattr(launch_module, "LOCK_WAIT_S", 0.0)
    with (
        FolderLock(folder.path).acquire(StopToken()),
        pytest.raises(ResourceError, match=f"in use by process {os.getpid()}"),
    ):
        start(folder)


def test_a_start_waits_for_what_an_earlier_one_left_running(monkeypatch: Patch, folder: RunFolder) -> None:
    stand_ins(monkeypatch, "print('done')")
    with FolderLock(folder.path / "worker-1").acquire(StopToken()):
        monkeypatch.setattr(launch_module, "LOCK_WAIT_S", 0.0)
        with pytest.raises(ResourceError, match="worker-1 is in use"):
            start(folder)
    assert start(folder).ending.exit_code == 0


@pytest.mark.parametrize(("name", "message"), [
    ("cook", "there is no role 'cook'"), ("validator-7", "this run has 2 validators; there is no --index 7"),
    ("relay-7", "this run has 1 relays; there is no --index 7"),
])  # fmt: skip
def test_a_role_that_the_run_does_not_have(folder: RunFolder, name: str, message: str) -> None:
    folder.assign_endpoints()
    with pytest.raises(ConfigError, match=message):
        run_role(folder, name, StopToken())


def test_a_stranger_needs_only_the_join_url_to_mirror_a_run(folder: RunFolder, tmp_path: Path) -> None:
    url, stop = folder.assign_endpoints().join, StopToken()
    command = [sys.executable, "-m", "shoal.cli", "relay", url, "--host", "127.0.0.1", "--port", "0"]
    with ThreadPoolExecutor() as threads:
        roles = [threads.submit(run_role, folder, name, stop) for name in ("hub", "origin")]
        mirror = ["--folder", str(tmp_path / "mirror")]
        with subprocess.Popen([*command, *mirror], stderr=subprocess.PIPE, text=True) as relay:
            line = next((line for line in relay.stderr if "serving at" in line), "")
            assert httpx2.get(line.split()[-1], timeout=5).status_code < 500
            relay.terminate()
            assert relay.wait(20) == 0
            relay.stderr.read()
        stop.set("the test is over")
        for role in roles:
            role.result(20)


BEGIN = """
import logging, sys
from pathlib import Path
from shoal.run.roles import start_role
start_role("hub", Path(sys.argv[1]), False)
logging.getLogger("shoal").info("hello")
"""


@pytest.mark.parametrize("supervised", [False, True])
def test_a_role_writes_its_log_unless_a_supervisor_keeps_it(tmp_path: Path, supervised: bool) -> None:
    environment = {**os.environ, **({SUPERVISED: "1"} if supervised else {})}
    command = [sys.executable, "-c", BEGIN, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert b"hello" in process.stderr.readline()
    assert (tmp_path / "logs" / "hub.log").exists() is not supervised
