"""`shoal backup` and `shoal restore`: a run that is going on, as one file, goes on from it elsewhere."""

import io
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit import Capture, Patch, TempPaths, fork
from kit.cli import told
from kit.folder import LocalRun
from shoal.cli.main import main
from shoal.errors import ConfigError, ProtocolError, ResourceError, UserError
from shoal.run import backup
from shoal.run.backup import MANIFEST, backup_run, new_bundle, restore_run, verify_backup
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe
from shoal.run.sources import export_run
from shoal.runtime.metrics import MetricsLog
from shoal.shardcast.tree import Tree


def quiet(_line: str) -> None:
    pass


@pytest.fixture(scope="module")
def taken(tmp_path_factory: TempPaths) -> Path:
    """A backup of a run that stands at version 1; the run's folder lies beside it."""
    folder = tmp_path_factory.mktemp("taken")
    run = LocalRun(folder / "run")
    run.step()
    run.close()
    backup_run(folder / "run", folder / "run.tar", quiet)
    return folder / "run.tar"


def test_backup_of_a_running_run_resumes_with_every_receipt(tmp_path: Path) -> None:
    run = LocalRun(tmp_path / "run")
    run.step()
    promised = list(run.receipts)
    busy, failures = threading.Event(), list[Exception]()

    def go_on() -> None:
        try:
            while not run.finished:
                run.work()
                busy.set()
                run.step()
        except Exception as error:  # noqa: BLE001  looked at where the test ends
            failures.append(error)

    going = threading.Thread(target=go_on)
    going.start()
    assert busy.wait(60)
    summary = backup_run(tmp_path / "run", tmp_path / "run.tar", quiet)
    going.join(120)
    assert failures == []
    run.check()
    run.close()
    assert len(summary.submissions) >= len(promised)
    assert not list((tmp_path / "run").glob(".backup-*"))
    restore_run(tmp_path / "run.tar", tmp_path / "elsewhere" / "run")
    restored = LocalRun(tmp_path / "elsewhere" / "run", receipts=promised)
    assert (restored.folder.run_id, restored.endpoints) == (run.folder.run_id, run.endpoints)
    while not restored.finished:
        restored.step()
    restored.check()
    restored.close()


def test_it_has_what_a_run_needs_and_keys_stay_private(taken: Path, tmp_path: Path) -> None:
    assert taken.stat().st_mode & 0o777 == 0o600
    summary = restore_run(taken, tmp_path / "run")
    assert (summary.version, len(summary.submissions)) == (1, 2)
    before, after = RunFolder.open(taken.parent / "run"), RunFolder.open(tmp_path / "run")
    assert after.recipe == before.recipe
    for name in ("root.key", "hub.key", "trainer.key"):
        assert (tmp_path / "run" / "keys" / name).read_bytes() == (before.path / "keys" / name).read_bytes()
        assert (tmp_path / "run" / "keys" / name).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "run" / "worker-0" / "node.key").exists()
    assert (tmp_path / "run" / "trainer" / "checkpoints" / "1.0" / "model.safetensors").exists()
    assert Tree(tmp_path / "run" / "origin").places() == [(0, 0), (0, 1)]
    assert not (tmp_path / "run" / "hub" / "hub.db-wal").exists()


@pytest.mark.parametrize(
    ("keep_best", "held"), [(0, {"9.0", "10.0"}), (1, {"9.0", "10.0", "2.1"}), (2, {"9.0", "10.0", "2.1", "1.0"})]
)
def test_the_best_checkpoints_go_in_too(tmp_path: Path, keep_best: int, held: set[str]) -> None:
    source = tmp_path / "run" / "trainer" / "checkpoints"
    for name in ("1.0", "2.0", "2.1", "5.0", "9.0", "10.0"):
        (source / name).mkdir(parents=True)
        (source / name / "checkpoint.json").write_text("{}")
    metrics = MetricsLog(tmp_path / "run" / "trainer" / "metrics.jsonl")
    for version, score in {1: 0.6, 2: 0.8, 4: 0.9, 5: 0.5}.items():  # the fourth has no checkpoint any more
        metrics.append(version, {"held_out": score})
    backup._hold_checkpoints(tmp_path / "run", tmp_path / "scratch", keep_best)
    assert {path.name for path in (tmp_path / "scratch" / "trainer" / "checkpoints").iterdir()} == held


def test_checkpoint_that_goes_while_held_is_not_taken_in_part(tmp_path: Path, monkeypatch: Patch) -> None:
    source = tmp_path / "run" / "trainer" / "checkpoints"
    for version in (1, 2):
        (source / f"{version}.0").mkdir(parents=True)
        for name in ("a", "b"):
            (source / f"{version}.0" / name).write_bytes(b"x")
    hold, calls = backup._hold, list[Path]()

    def remove_the_oldest_meanwhile(path: Path, target: Path) -> None:
        calls.append(path)
        if len(calls) == 4:  # the second file of the older one
            path.unlink()
            (source / "1.0" / "a").unlink()
            (source / "1.0").rmdir()
        hold(path, target)

    monkeypatch.setattr(backup, "_hold", remove_the_oldest_meanwhile)
    backup._hold_checkpoints(tmp_path / "run", tmp_path / "scratch", keep_best=1)
    held = sorted(str(path.relative_to(tmp_path / "scratch")) for path in (tmp_path / "scratch").rglob("[ab]"))
    assert held == ["trainer/checkpoints/2.0/a", "trainer/checkpoints/2.0/b"]


def test_manifest_that_goes_while_chunks_are_held_is_left_out(tmp_path: Path, monkeypatch: Patch) -> None:
    source = tmp_path / "run" / "origin"
    for name in ("head.json", "manifests/0.1.json", "manifests/0.2.json", "chunks/ab/abcd"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"x")
    hold = backup._hold

    def collect_meanwhile(path: Path, target: Path) -> None:
        if path.parent.name == "ab":
            (source / "manifests" / "0.1.json").unlink()
        hold(path, target)

    monkeypatch.setattr(backup, "_hold", collect_meanwhile)
    backup._hold_origin(tmp_path / "run", tmp_path / "scratch")
    held = {str(path.relative_to(tmp_path / "scratch" / "origin")) for path in (tmp_path / "scratch").rglob("*.*")}
    assert held == {"head.json", "manifests/0.2.json"}


Made = Callable[[Path], bytes]


def rewritten(change: Callable[[str, bytes], bytes | None]) -> Made:
    """A copy of a tar with members changed, or (None) left out."""

    def copy(whole: Path) -> bytes:
        out = io.BytesIO()
        with tarfile.open(whole) as old, tarfile.open(fileobj=out, mode="w") as new:
            for info in old:
                data = change(info.name, old.extractfile(info).read())
                if data is not None:
                    info.size = len(data)
                    new.addfile(info, io.BytesIO(data))
        return out.getvalue()

    return copy


def flipped(part: str) -> Made:
    def change(name: str, data: bytes) -> bytes:
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if name.startswith(part) else data

    return rewritten(change)


def without(part: str) -> Made:
    return rewritten(lambda name, data: None if name.startswith(part) else data)


def alone(name: str, **values: Any) -> Made:
    """A tar of this member alone."""

    def write(_whole: Path) -> bytes:
        out, info = io.BytesIO(), tarfile.TarInfo(name)
        for key, value in values.items():
            setattr(info, key, value)
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            tar.addfile(info, io.BytesIO(b"x"))
        return out.getvalue()

    return write


OUTSIDE, STRANGE = "no name of a file in a run's folder", "a member that no backup has"
HOLE = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(2**40)}


@pytest.mark.parametrize(("made", "said"), [
    *((flipped(part), "damaged") for part in ("hub/hub.db", "hub/blobs/", "keys/root.key", MANIFEST)),
    *((without(part), "damaged") for part in ("hub/blobs/", "keys/hub.key", MANIFEST, "hub/hub.db")),
    (rewritten(lambda _name, data: data.replace(b'"run": "kept-', b'"run": "a-')), "does not match its own hash"),
    (lambda whole: whole.read_bytes()[: whole.stat().st_size // 2], "damaged"),
    (lambda _whole: b"no tar at all" * 100, "damaged"),
    *((alone(name), OUTSIDE) for name in ("../outside", "/etc/outside", "hub/../../outside", "./hub")),
    (alone("hub/secret", type=tarfile.SYMTYPE, linkname="/etc/passwd"), STRANGE),
    (alone("hub/hub.db", pax_headers=HOLE, size=1), STRANGE),
])  # fmt: skip
def test_damaged_backup_is_refused_and_restores_nothing(taken, tmp_path, made, said):
    bad = tmp_path / "bad.tar"
    bad.write_bytes(made(taken))
    with pytest.raises(ProtocolError, match=said):
        verify_backup(bad)
    with pytest.raises(ProtocolError, match=said):
        restore_run(bad, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar"]


def test_nothing_is_replaced(taken: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        backup_run(taken.parent / "run", taken, quiet)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("here")
    with pytest.raises(ConfigError, match="is not empty"):
        restore_run(taken, tmp_path / "run")
    assert (tmp_path / "run" / "mine").read_text() == "here"


def test_failed_backup_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="none: No such file"), new_bundle(tmp_path / "out.tar", "run", 1) as bundle:
        bundle.add("a", tmp_path / "none")
    with pytest.raises(UserError, match="there is no backup at"):
        verify_backup(tmp_path / "none.tar")
    assert list(tmp_path.iterdir()) == []


def test_the_commands_say_what_to_do_next(taken: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "private keys" in told(capsys, 0, "backup", taken.parent / "run", tmp_path / "again.tar").out
    assert "is whole" in told(capsys, 0, "backup", "--verify", tmp_path / "again.tar").out
    assert main(["restore", str(tmp_path / "again.tar"), str(tmp_path / "run")]) == 0
    assert f"run {tmp_path / 'run'}" in capsys.readouterr().out
    assert main(["backup", str(tmp_path / "run")]) == 2
    assert main(["backup", str(tmp_path), str(tmp_path / "no.tar")]) == 2
    assert not (tmp_path / "no.tar").exists()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.prepare(tmp_path / "run", Recipe.model_validate({"hub": {"port": 0}}))
    (folder.path / "trainer" / "checkpoints" / "0.0").mkdir(parents=True)
    return folder.path


@pytest.mark.parametrize(("there", "target", "code", "sentence"), [
    ({"out/thesis.txt": "years of work"}, "out", 2, "exists and is not an export of shoal; choose another folder"),
    ({"out/shoal.json": "hi", "out/precious.txt": "mine"}, "out", 2, "exists and is not an export of shoal"),
    ({"file": ""}, "file/out", 3, "a part of the path is a file, not a folder"),
], ids=["somebody-elses", "called-shoal.json", "below-a-file"])  # fmt: skip
def test_a_target_that_is_no_export_is_left_alone(run, tmp_path, there, target, code, sentence):
    for name, text in there.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    ran = fork.run(tmp_path, "export", str(run), str(tmp_path / target))
    assert (ran.returncode, sentence in ran.stderr) == (code, True), ran.stderr
    assert {name: (tmp_path / name).read_text() for name in there} == there
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_run_that_has_no_checkpoint_yet(run: Path, tmp_path: Path) -> None:
    (run / "trainer" / "checkpoints" / "0.0").rmdir()
    with pytest.raises(ConfigError, match=r"there is no checkpoint in .* yet: export again once"):
        export_run(run, tmp_path / "out")
