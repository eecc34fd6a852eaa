"""Several workers on one machine: where each computes, what each may take, and real processes that are supervised."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from kit import Logs, Patch, eventually
from kit.fork import Forked
from kit.roles import ONE_STEP, ServedRun, prepared, served_run
from kit.run import processes_of
from kit.sandbox import needs_bubblewrap
from shoal.errors import ConfigError, UserError
from shoal.protocol import load_key
from shoal.run import fleet, join
from shoal.run.fleet import FleetStatus, WorkerPlace, ending_of, plan_workers
from shoal.run.join import JoinRequest
from shoal.runtime import MachineLimits, ManualClock, StopToken
from shoal.runtime.supervise import Ending, ProcessState, ProcessView
from shoal.worker.earnings import Standing

GPUS = ["0", "1", "2", "GPU-8f1e"]


@pytest.mark.parametrize(("gpus", "options", "places"), [
    ([], {}, []), (["0"], {}, []), (["0"], {"wanted": "0"}, []),
    (GPUS, {}, ["gpu-0:0", "gpu-1:1", "gpu-2:2", "gpu-3:GPU-8f1e"]),
    (GPUS, {"device": "cuda"}, ["gpu-0:0", "gpu-1:1", "gpu-2:2", "gpu-3:GPU-8f1e"]),
    (GPUS, {"wanted": "3, 1"}, ["gpu-1:1", "gpu-3:GPU-8f1e"]), (GPUS, {"wanted": "2"}, ["gpu-2:2"]),
    (GPUS, {"device": "cpu"}, []), (GPUS, {"workers": 1}, []),
    (GPUS, {"device": "cpu", "workers": 2}, ["cpu-0:None", "cpu-1:None"]),
    ([], {"workers": 3}, ["cpu-0:None", "cpu-1:None", "cpu-2:None"]),
])  # fmt: skip
def test_each_gpu_has_a_worker_and_the_processor_as_many_as_asked_for(gpus, options, places):
    found = plan_workers(gpus, **options)
    assert [f"{place.name}:{place.gpu}" for place in found] == places
    assert {place.device for place in found} <= {"cpu" if "workers" in options else "cuda"}


@pytest.mark.parametrize(("gpus", "options", "message"), [
    ([], {"wanted": "0"}, "--gpu 0: torch finds no GPU here"), (["0"], {"wanted": "1"}, "finds one GPU, 0 here"),
    (GPUS, {"wanted": "0,4"}, "finds GPUs 0 to 3 here"), (GPUS, {"wanted": "0,0"}, "is no list of GPUs"),
    (GPUS, {"wanted": "a"}, "is no list of GPUs: write for example 0 or 0,2"),
    (GPUS, {"wanted": "-1"}, "is no list of GPUs"),
    (GPUS, {"wanted": "0", "device": "cpu"}, "--gpu and --device cpu exclude each other"),
    (GPUS, {"wanted": "0", "workers": 2}, "--gpu and --workers exclude each other"),
    (GPUS, {"workers": 2}, "--workers is for the processor: add --device cpu"),
    ([], {"workers": 2, "device": "cuda"}, "--workers is for the processor"),
])  # fmt: skip
def test_a_choice_of_workers_that_cannot_be_is_refused(gpus, options, message):
    with pytest.raises(UserError, match=message):
        plan_workers(gpus, **options)


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "1"]), ("", ["0", "1"]), ("3,1", ["3", "1"]), ("5,2,7", ["5", "2"])]
)
def test_gpus_go_by_the_names_that_this_process_sees_them_under(visible, names):
    """torch may find fewer than are named: the rest does not exist."""
    assert fleet.gpu_names(2, visible) == names


def request(**changes: Any) -> JoinRequest:
    given: dict[str, Any] = {"engine": "torch", "device": "auto", "dtype": "auto", "name": "me", "wait_s": 1.0}
    return JoinRequest(("http://hub/",), None, **{**given, **changes})


def test_a_worker_sees_its_gpu_alone_and_takes_its_share(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    limits = MachineLimits(memory_bytes=9_000, disk_bytes=6_000, bandwidth_bytes_s=60_000.0)
    spec = fleet._spec(request(limits=limits, sandbox=True), tmp_path, WorkerPlace("gpu-2", "cuda", "GPU-8f1e"), 3)
    assert spec.env == {"CUDA_VISIBLE_DEVICES": "GPU-8f1e", "OMP_NUM_THREADS": "3"}
    inner = TypeAdapter(JoinRequest).validate_json(spec.argv[-1])
    assert inner.limits == MachineLimits(3_000, 2_000, 20_000.0)
    found = (inner.folder, inner.device, inner.name, inner.workers, inner.sandbox)
    assert found == (tmp_path / "gpu-2", "cuda", "me-gpu-2", 1, True)
    assert len(fleet._spec(request(name="n" * 64), tmp_path, WorkerPlace("cpu-0", "cpu"), 1).argv) == len(spec.argv)


def test_workers_on_the_processor_share_the_memory_that_is_free_now(monkeypatch: Patch) -> None:
    monkeypatch.setattr("shoal.runtime.limits.free_memory_bytes", lambda: 1_000_000)
    assert MachineLimits().shared_by(4, on_processor=True).memory_bytes == 200_000
    assert MachineLimits().shared_by(4, on_processor=False) == MachineLimits()
    with pytest.raises(ConfigError, match="--max-bandwidth is too little for 4 workers"):
        MachineLimits(bandwidth_bytes_s=30_000.0).shared_by(4, on_processor=False)


def test_one_vouch_for_several_nodes_is_refused(tmp_path: Path) -> None:
    both = [WorkerPlace("gpu-0", "cuda", "0"), WorkerPlace("gpu-1", "cuda", "1")]
    with pytest.raises(UserError, match="a vouch is for one node, and these are 2 workers"):
        fleet.refuse_one_vouch(both, request(vouch=tmp_path / "v"))
    with pytest.raises(UserError, match="a certificate is for one node, and these are 2 workers"):
        fleet.refuse_one_vouch(both, request(trusted=tmp_path / "c"))
    fleet.refuse_one_vouch(both[:1], request(vouch=tmp_path / "v"))


def view(name: str, state: ProcessState, code: int | None, since_s: float = 1.0, why: str = "is done") -> ProcessView:
    return ProcessView(name, state, None, 0, why, since_s, code)


@pytest.mark.parametrize(("processes", "ending"), [
    ([view("a", "resting", 0), view("b", "running", None)], None),
    ([view("a", "resting", 6), view("b", "restarting", -9)], None),
    ([view("a", "resting", 0), view("b", "resting", 0)], Ending(0, "")),
    ([view("a", "resting", 0), view("b", "given up", -9)], Ending(1, "")),
    ([view("a", "resting", 4, 1.0), view("b", "resting", 6, 2.0), view("c", "resting", 0, 3.0)], Ending(6, "")),
])  # fmt: skip
def test_it_ends_when_all_have_with_the_code_of_the_first_that_failed(processes, ending):
    assert ending_of(processes) == ending


def test_a_worker_started_again_counts_on_and_its_credit_is_the_hubs(tmp_path: Path, caplog: Logs) -> None:
    caplog.set_level("INFO")
    places, clock = [WorkerPlace("a", "cpu"), WorkerPlace("b", "cpu")], ManualClock()
    for place in places:
        (tmp_path / place.name).mkdir()
    status = FleetStatus(tmp_path, places, clock)
    running = [view("a", "running", None), view("b", "restarting", -9, why="was killed by SIGKILL")]
    Standing("one", 1_000, 5, 2, 700, 200, 30).leave(tmp_path / "a")
    clock.advance(10)
    status.look(running)
    assert caplog.messages == []
    clock.advance(20)
    Standing("two", 500, 6, 6, 900, 900, 0).leave(tmp_path / "a")  # a verdict came while it was down
    Standing("three", 3_000, 1, 0, 100, 0, 0).leave(tmp_path / "b")
    status.look(running)
    text = "3,500 tokens (117/s), 1 group accepted, credit +100; b: restarting, was killed by SIGKILL"
    assert caplog.messages == [f"1 of 2 workers run: {text}"], "of the first start of a nothing was seen"
    Standing("four", 100, 8, 6, 1_000, 900, 7).leave(tmp_path / "a")
    assert status.line(()) == "3,600 tokens, 3 groups accepted, credit +200 (7 pending)"


def test_rows_say_what_each_worker_does_what_all_earned_and_why_the_last_was_refused(tmp_path: Path) -> None:
    """A rate is of the last 30 s: 1,200 tokens in the first 20 s, 600 in the next 30 s."""
    shown, clock = list[Any](), ManualClock()
    (tmp_path / "a").mkdir()
    status = FleetStatus(tmp_path, [WorkerPlace("a", "cpu"), WorkerPlace("b", "cpu")], clock, shown.append)
    clock.advance(20)
    Standing("one", 1_200, 5, 2, 700, 200, 30).leave(tmp_path / "a")
    status.draw()
    totals = "1,200 tokens (60/s), 3 groups accepted, credit +500 (30 pending)"
    assert shown == [[("a", "ready"), ("b", "starting"), ("so far", totals)]]
    clock.advance(30)
    Standing("one", 1_800, 5, 2, 700, 200, 0, 2, 1, "paused until 22:00", "why").leave(tmp_path / "a")
    status.look([view("a", "running", None), view("b", "restarting", -9, why="was killed by SIGKILL")])
    status.draw()
    totals = "1,800 tokens (20/s), 3 groups accepted, 2 rejected, 1 unsure, credit +500"
    rows = [
        ("a", "paused until 22:00"),
        ("b", "restarting, was killed by SIGKILL"),
        ("so far", totals),
        ("last", "why"),
    ]
    assert shown[1] == rows
    alone = FleetStatus(tmp_path / "a", [join.HERE], clock, shown.append)
    alone.draw()
    assert shown[2][0] == ("worker", "paused until 22:00")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedRun]:
    with served_run(prepared(tmp_path / "run", ONE_STEP, run={"groups_per_step": 8})) as run:
        run.publish(0)
        yield run


@pytest.fixture
def start(served: ServedRun, tmp_path: Path) -> Iterator[Any]:
    """Two workers on this machine, by one command; whatever is left of them is killed at the end."""
    node = tmp_path / "node"
    words = f"join {served.endpoints.join} --engine scripted --device cpu --workers 2 --folder {node}".split()

    def start(*options: str) -> Forked:
        return Forked(tmp_path, (*words, *options), tmp_path / "output")

    yield start
    for pid in processes_of(node):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids(folder: Path) -> dict[str, int]:
    try:
        return dict(json.loads((folder / "processes.json").read_text()))
    except FileNotFoundError:
        return {}


@pytest.mark.parametrize("sandboxed", [False, pytest.param(True, marks=needs_bubblewrap)])
def test_two_workers_share_an_owner_and_the_command_ends_with_the_run(served, start, tmp_path, sandboxed):
    options = ["--max-memory", "2GB", "--max-bandwidth", "20Mbit/s", "--name", "mine"]
    with start(*options, *(["--sandbox"] if sandboxed else [])) as process:
        eventually(lambda: {"mine-cpu-0", "mine-cpu-1"} <= set(served.workers()), otherwise=process.said)
        served.train()
        assert process.wait(60) == 0, process.said()
    node, workers = tmp_path / "node", [each for each in served.client.status().nodes if each.role == "worker"]
    assert {worker.owner for worker in workers} == {load_key(node / "owner.key").public_key}
    assert {worker.node for worker in workers} == {load_key(node / f"cpu-{n}" / "node.key").node for n in (0, 1)}
    accepted, credit = (sum(getattr(worker, name) for worker in workers) for name in ("accepted", "credit"))
    assert accepted > 0
    said = process.said().splitlines()[-1]
    assert f"{accepted} groups accepted, credit +{credit:,}" in said
    assert "all workers have ended; " in said
    assert processes_of(node) == {}


def test_a_killed_worker_comes_back_and_sigterm_leaves_no_process(served, start, tmp_path):
    node = tmp_path / "node"
    with start() as process:
        eventually(lambda: len(served.workers()) == 2, otherwise=process.said)
        log, first = node / "cpu-1" / "worker.log", pids(node)["cpu-1"]
        eventually(lambda: "works for run" in log.read_text())
        os.kill(first, signal.SIGKILL)
        process.until(r"cpu-1 was killed by SIGKILL; starting it again")
        eventually(lambda: pids(node).get("cpu-1", first) != first)
        eventually(lambda: log.read_text().count("works for run") == 2, otherwise=process.said)
        assert len(served.workers()) == 2, "with the key that it had"
        assert process.end() == 0, process.said()
    assert processes_of(node) == {}
    assert "stopping (SIGTERM)" in process.said()


@pytest.mark.parametrize("sandboxed", [False, pytest.param(True, marks=needs_bubblewrap)])
def test_workers_end_with_a_supervisor_that_is_killed(served, start, tmp_path, sandboxed):
    node = tmp_path / "node"
    with start(*(["--sandbox"] if sandboxed else [])) as process:
        eventually(lambda: len(served.workers()) == 2, otherwise=process.said)
        assert len(processes_of(node)) >= 2
        process.kill()
        eventually(lambda: processes_of(node) == {}, otherwise=lambda: str(processes_of(node)))


def test_a_worker_that_cannot_work_is_left_and_its_exit_code_is_the_commands(served, start, tmp_path):
    """Another process holds the folder of one; the other works on."""
    node = tmp_path / "node"
    (node / "cpu-0").mkdir(parents=True)
    (node / "cpu-0" / "node.key").write_text("rubbish")
    with start() as process:
        process.until(r"cpu-0 ended with exit code 2: ")
        eventually(lambda: len(served.workers()) == 1, otherwise=process.said)
        os.kill(pids(node)["cpu-1"], signal.SIGTERM)
        process.until("cpu-1 was told to stop by somebody")
        assert process.end() == 0, "it was told to stop"


@pytest.mark.parametrize("kind", ["torch/cpu/float32", "torch/cuda/bfloat16"])
def test_gpus_of_which_the_run_takes_nothing_leave_one_worker_on_the_processor(tmp_path, monkeypatch, caplog, kind):
    ended = list[Any]()
    monkeypatch.setattr(join, "meet_hub", lambda *_: (tmp_path, "0" * 40, (kind, "vllm/cuda/float32")))
    monkeypatch.setattr(fleet, "run_fleet", lambda *given: ended.append([place.gpu for place in given[-2]]) or 0)
    monkeypatch.setattr(fleet, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(join, "start_role", lambda *_: StopToken())
    monkeypatch.setattr("shoal.worker.loop.run_worker", lambda config, _stop: ended.append(config.settings.device))
    assert join.run_joined_worker(request()) == 0
    alone = kind == "torch/cpu/float32"
    assert ended == (["auto"] if alone else [["0", "1"]])
    assert ("the run takes no work of GPUs" in caplog.text) == alone
