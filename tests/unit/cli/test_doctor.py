"""The doctor's look at this machine and at the road to a run: what stops a worker, what is only said."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit import Capture, Patch
from kit.cast import DEAD
from kit.cli import NODE, status, told
from shoal.cli.main import main
from shoal.models.load import load_model
from shoal.models.state import policy_views
from shoal.protocol import ModelSize, ProofParameters, RunStatus, SamplingParameters
from shoal.run import bench, doctor
from shoal.runtime.targets import PUBLIC_ONLY, Nearness, Reach
from shoal.validator.profiles import read_profile


@pytest.mark.parametrize(
    ("torch", "ok"), [("2.11.0+cu126", True), ("2.11.0", True), ("2.11.0+cpu", False), (None, False)]
)
def test_a_gpu_that_torch_cannot_use_is_said(monkeypatch: Patch, tmp_path: Path, torch: str | None, ok: bool) -> None:
    monkeypatch.setattr(doctor, "DEVICES", tmp_path)
    monkeypatch.setattr(doctor, "torch_version", lambda: torch)
    assert doctor._device() == doctor.MachineFinding("device", True, "cpu (no GPU, or no driver for it)")
    asked = doctor._device("cuda")
    assert (asked.ok, asked.text.rpartition("; ")[2]) == (False, "install its driver, or leave --device cuda out")
    (tmp_path / "nvidia0").touch()
    finding = doctor._device()
    assert finding.ok is ok
    assert finding.text.startswith("a GPU (nvidia0)")
    assert finding.stops == 0, "it can still work on its processor"


@pytest.mark.parametrize(
    ("least", "none", "ok", "stops"), [(0, 0, True, 0), (2**62, 0, False, 0), (2**62, 2**62, False, 3)]
)
def test_little_disk_warns_and_none_stops(monkeypatch, tmp_path, least, none, ok, stops):
    monkeypatch.setattr(doctor, "LEAST_DISK_BYTES", least)
    monkeypatch.setattr(doctor, "NO_DISK_BYTES", none)
    finding = doctor._disk(tmp_path / "not" / "there" / "yet")
    assert (finding.ok, finding.stops) == (ok, stops)
    assert str(tmp_path) in finding.text
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(("problems", "ok", "text"), [
    (["", ""], True, "2 of 2 sources answer"),
    (["", "b is down"], True, "1 of 2 sources answer: b is down; the others will do"),
    (["a is down", "b is down"], False, "0 of 2 sources answer: a is down; check your network"),
])  # fmt: skip
def test_some_sources_of_weights_will_do(monkeypatch: Patch, problems: list[str], ok: bool, text: str) -> None:
    info = SimpleNamespace(sources=("a",), last_resort=("b",))
    said = dict(zip(("a", "b"), problems, strict=True))
    monkeypatch.setattr(doctor, "_reach", lambda _reach, source: said[source])
    finding = doctor._weights(SimpleNamespace(info=info, reach=PUBLIC_ONLY))  # type: ignore[arg-type]
    assert finding.ok is ok
    assert finding.text.startswith(text)


def test_a_source_is_asked_as_a_worker_would_ask_it() -> None:
    assert "cannot be reached: Connection refused" in doctor._reach(Reach(Nearness.LOOPBACK), DEAD)
    assert "it may not send this machine there" in doctor._reach(PUBLIC_ONLY, DEAD)
    assert "is not a URL" in doctor._reach(PUBLIC_ONLY, "nonsense")


@pytest.mark.parametrize(("dtype", "profiles", "weights", "text"), [
    ("auto", ("torch/cpu/bfloat16",), 1000, "on cpu in bfloat16, with 8.0 GiB of free memory"),
    ("auto", ("torch/cpu/float32",), 1000, "on cpu in float32, with"),
    ("float32", ("torch/cpu/bfloat16",), 1000, "no validator of the run can judge what this machine computes"),
    ("auto", ("torch/cpu/float32",), 3 * 10**9, "3,000,000,000 weights, which take 12 GB in float32, and 6.87 GB"),
], ids=["bfloat16", "float32", "no-kind", "too-large"])  # fmt: skip
def test_compute_format_of_join_is_said(monkeypatch, dtype, profiles, weights, text):
    for module in ("shoal.engines.memory", "shoal.runtime.limits"):
        monkeypatch.setattr(f"{module}.free_memory_bytes", lambda: 8 * 2**30)
    info = SimpleNamespace(run="r", profiles=profiles, model=ModelSize(parameters=weights))
    finding = doctor._compute(info, "torch", "cpu", dtype)  # type: ignore[arg-type]
    assert text in finding.text
    assert finding.ok == (finding.stops == 0) == finding.text.startswith("on cpu")


def test_a_self_test_says_what_passed_and_what_was_caught(tmp_path: Path, capsys: Capture) -> None:
    shown = told(capsys, 0, "doctor", "--folder", tmp_path, "--selftest", "--device", "cpu").out
    assert "selftest honest work: 8 of 8 groups accepted by cpu/float32" in shown
    assert "completions of 1024 tokens, prompts included, fit at once" in shown
    assert "selftest proofs that are constants: caught: proofs.forged" in shown
    assert "problem" not in shown


def test_a_calibration_writes_a_profile_and_overwrites_none(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "mine.toml"
    arguments = ["doctor", "--folder", str(tmp_path), "--calibrate", "--device", "cpu", "--samples", "32"]
    arguments += ["--max-new-tokens", "10", "--out", str(out)]
    shown = told(capsys, 0, *arguments)
    assert "honest groups fail" in shown.out
    assert "bits a token" in shown.out
    assert "int4 weights" in shown.out
    assert re.search(r"main, 0 of \d+ sequences", shown.err), "as many as its time allows"
    profile = read_profile(out)
    assert profile.key == "torch/cpu/float32"
    assert "mine.toml exists already" in told(capsys, 2, *arguments).err
    assert read_profile(out) == profile


def test_limits_under_which_cheaper_weights_pass_are_told_and_not_written(tmp_path: Path, capsys: Capture) -> None:
    """The tiny model in bfloat16: its rounding hides int8 weights."""
    out = tmp_path / "mine.toml"
    arguments = ["doctor", "--folder", str(tmp_path), "--calibrate", "--device", "cpu", "--dtype", "bfloat16"]
    arguments += ["--samples", "32", "--max-new-tokens", "10"]
    assert main([*arguments, "--against", "cpu/bfloat16", "--out", str(out)]) == 1
    assert "refused: int8 weights would be caught in" in capsys.readouterr().out
    assert not out.exists()


def test_a_benchmark_measures_each_kind_of_work_beside_transformers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "BUDGET_S", 1.0)
    monkeypatch.setattr("shoal.cli.printing.EVERY_S", 0.0)
    arguments = ["doctor", "--folder", tmp_path, "--bench", "--device", "cpu", "--max-new-tokens", "16"]
    said = told(capsys, 0, *arguments, "--json")
    assert re.search("benchmark: . of 1 s, .*prefill with checks", said.err)
    found = json.loads(said.out)
    assert {finding["name"] for finding in found["findings"]} >= {"torch", "memory", "device"}
    measured = found["bench"]
    assert (measured["kind"], measured["parameters"], measured["run"]) == ("torch/cpu/float32", 172_672, None)
    assert min(measured[name] for name in ("generate", "worker", "prefill", "transformers", "rounds")) >= 1
    assert measured["verified_tokens_per_hour"] == int(3600 * measured["worker"])
    assert 8 <= measured["new_tokens"] <= 16


def test_a_benchmark_for_a_run_takes_its_policy_and_says_the_share(tmp_path, capsys, monkeypatch):
    model, sampling = load_model("tiny"), SamplingParameters(temperature=1.0, max_new_tokens=9, eos_token_ids=(1,))
    info = SimpleNamespace(profiles=("torch/cpu/float32",), proof=ProofParameters(rows=16), sampling=sampling)
    looks = iter([(10_000, 500), (30_000, 4_500)])  # 200 tokens a second

    def status_of(*_: object) -> RunStatus:
        now_ms, credit = next(looks)
        return status(now_ms=now_ms, nodes=(NODE.model_copy(update={"credit": credit}),))

    monkeypatch.setattr(bench, "BUDGET_S", 0.1)
    monkeypatch.setattr(bench, "status_of", status_of)
    monkeypatch.setattr(bench, "policy_of_run", lambda *_: (model.files, policy_views(model.model), info))
    monkeypatch.setattr(doctor, "examine", lambda *_, **_options: [])
    shown = told(capsys, 0, "doctor", DEAD, "--bench", "--device", "cpu").out
    found = re.search(r"generate with proofs +([0-9,]+) ", shown)
    assert found is not None
    mine = int(found[1].replace(",", ""))
    share = round(100 * mine / (mine + 200))
    assert f"run demo-1 verified 200 tokens/s in the last 20 s: this machine would do {share}% of its work" in shown
    assert "+ 9 tokens" in shown or "+ 8 tokens" in shown


def test_model_unknown_to_transformers_is_reported() -> None:
    numbers = {"generate": 100.0, "worker": 90.0, "prefill": 300.0, "transformers": None}
    counts = {"parameters": 5, "rows": 4, "prompt_tokens": 3, "new_tokens": 2, "rounds": 1}
    found = bench.Benchmark(
        "vllm/cpu/float32", **counts, **numbers, verified_tokens_per_hour=9, busy_cores=1.5, run=None
    )  # type: ignore[arg-type]
    shown = "\n".join(found.lines())
    assert "proofs cost 10%" in shown
    assert "cannot compute it" in shown
    assert " x transformers" not in shown
    assert "other programs kept 1.5 cores busy" in shown
