"""`shoal doctor --selftest` and `--calibrate`, as they are typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.validator.profiles import read_profile


def test_a_self_test_says_what_passed_and_what_was_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--folder", str(tmp_path), "--selftest", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "selftest honest work: 8 of 8 groups accepted by cpu/float32" in shown
    assert "completions of 1024 tokens, prompts included, fit at once" in shown
    assert "selftest proofs that are constants: caught: proofs.forged" in shown
    assert "problem" not in shown


def test_a_calibration_writes_a_profile_and_overwrites_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.toml"
    arguments = ["doctor", "--folder", str(tmp_path), "--calibrate", "--device", "cpu", "--sequences", "64"]
    arguments += ["--tokens", "10", "--out", str(out)]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert "honest groups fail" in shown.out
    assert "bits a token" in shown.out
    assert "int4 weights" in shown.out
    assert "main, 0 of 384 sequences" in shown.err
    profile = read_profile(out)
    assert profile.key == "torch/cpu/float32"
    assert main(arguments) == 2
    assert "mine.toml exists already" in capsys.readouterr().err
    assert read_profile(out) == profile


def test_limits_under_which_cheaper_weights_pass_are_told_and_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny model in bfloat16: its rounding hides int8 weights."""
    out = tmp_path / "mine.toml"
    arguments = ["doctor", "--folder", str(tmp_path), "--calibrate", "--device", "cpu", "--dtype", "bfloat16"]
    assert main([*arguments, "--tokens", "10", "--against", "cpu/bfloat16", "--out", str(out)]) == 1
    assert "refused: int8 weights would be caught in" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--selftest", "--calibrate"], "ask for one of them"),
        (["--selftest", "--against", "cuda"], "write device/format"),
        (["--selftest", "--against", "cpu/float32", "--against", "cpu/bfloat16"], "give --against once"),
        (["--selftest", "--device", "tpu"], "there is no device 'tpu'"),
        (["--selftest", "--dtype", "int3"], "does not compute in 'int3'"),
        (["--selftest", "--model", "no-such-folder"], "no-such-folder"),
        (["--selftest", "--profile", "missing.toml"], "missing.toml"),
        (["--calibrate", "http://127.0.0.1:1/"], "leave the URL away"),
        (["--calibrate", "--model", "no-such-folder"], "no-such-folder"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_sentence(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *arguments]) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.glob("*.toml"))
