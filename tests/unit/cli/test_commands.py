"""The commands through the real CLI: help is fast and light, mistakes are one clear line with the right exit code."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from kit import Capture, Patch, fork
from kit.cast import DEAD, Lab, reply
from kit.cli import NODE, TINY, report, status, told, wait
from shoal.cli.help import leaves
from shoal.cli.main import READERS, app, explain, main
from shoal.client.trust import run_id
from shoal.errors import ConfigError, DeadlineExceeded, HubRefused, ResourceError
from shoal.hub import HubConfig
from shoal.protocol import RoleCertificate, RunInfo, SamplingParameters, SigningKey, fingerprint, sign_document
from shoal.run.estimate import with_derived_settings
from shoal.run.folder import RunFolder
from shoal.run.recipe import Recipe, load_recipe, shipped_recipes
from shoal.run.roles import run_role
from shoal.runtime.config import parse_config
from shoal.runtime.stop import STOPPED_CODE, SUPERVISED, StopToken

Shoal = Callable[..., subprocess.CompletedProcess[str]]
MOST_COMMANDS = 34  # those of groups included; only goes down, unless a commit says why


@pytest.fixture
def shoal(tmp_path: Path) -> Shoal:
    """Runs `shoal …` in an empty folder."""
    return partial(fork.run, tmp_path)


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from shoal.cli.main import main; assert main(['--help']) == 0;"
        "heavy = {'torch', 'transformers', 'h11', 'sqlalchemy', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ran.returncode == 0, ran.stderr
    spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime  # other processes may keep us waiting
    assert spent_s < 0.3


def test_a_stopped_demo_says_how_to_start_it_as_it_was(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    stopped = SimpleNamespace(ending=SimpleNamespace(exit_code=STOPPED_CODE), elapsed_s=0.0)
    monkeypatch.setattr("shoal.run.launch.launch", lambda *_arguments: stopped)
    given = "--seed 3 --staleness 1 --steps 7 --cheat cold --patience 60"
    said = told(capsys, STOPPED_CODE, "demo", tmp_path / "demo", *given.split()).out
    assert f"demo {tmp_path / 'demo'} {given}\n" in said


COMMANDS: Any = typer.main.get_command(app)
OPTIONS = """
    adapter against all allow-leaks assume batch batch-rows bench best calibrate chat cheat check count data
    device devices dry-run dtype engine env epochs every folder for force form from gpu gpu-hour-price head host
    hours idle index json keep-versions key keys limit max-bandwidth max-disk max-memory max-new-tokens
    max-tokens memory min-reward model name node once order origin out outcome owner parameters pass-rate patience
    peer port prepare private pause profile push rank reason recheck require rescore resume rollouts samples
    sandbox seed selftest serve set solo split staleness step steps stop task tasks temperature text trained-on
    trusted unit upstream validation verify version vouch wait without-evidence witness workers
"""


def test_commands_are_these_and_one_thing_has_one_word_in_all() -> None:
    expected = (
        "admin backup cast compare dashboard data demo doctor eval export filter hub init join key leave ledger plan "
        "plot relay restore rollouts run sft status trainer validator why"
    )
    assert sorted(COMMANDS.commands) == expected.split()
    assert len(list(leaves(COMMANDS))) <= MOST_COMMANDS
    words = {word for _, command in leaves(COMMANDS) for each in command.params for word in each.opts if "-" in word}
    assert words == {f"--{word}" for word in OPTIONS.split()}, "is there an option for this already?"


def test_help_groups_the_commands_by_reader(capsys: Capture) -> None:
    shown = told(capsys, 0, "--help").out
    assert all(reader in shown for reader in READERS)
    assert "Commands" not in shown, "a command is in no group"
    assert told(capsys, 0).out == told(capsys, 0, "help").out == shown
    assert told(capsys, 0, "help", "cast", "fetch").out == told(capsys, 0, "cast", "fetch", "--help").out


@pytest.mark.parametrize(("name", "command"), [*leaves(COMMANDS)], ids=[name for name, _ in leaves(COMMANDS)])
def test_help_is_sentences_with_an_example(name: str, command: Any, capsys: Capture) -> None:
    shown = told(capsys, 0, *name.split(), "--help").out
    assert shown.startswith(f"Usage: shoal {name} ")
    assert f"\nExample: shoal {name}" in shown
    assert "<" not in shown.replace("<answer>{answer}</answer>", "").replace("<answer>", ""), "a type, not a word"
    for said in (command.help, *(parameter.help for parameter in command.params)):
        text = said.partition(" (default:")[0].strip()
        assert text[0].isupper(), said
        assert text.endswith("."), said
    assert all(each.metavar for each in command.params if not getattr(each, "is_flag", False))


def test_errors_become_one_line_with_their_exit_code_and_a_traceback_on_request(capsys, monkeypatch):
    assert explain(ResourceError("no\n  space")) == ("no space", 3)
    assert explain(HubRefused(403, "node.banned", "you are banned")) == ("you are banned [node.banned, HTTP 403]", 4)
    line, code = explain(KeyError("oops"))
    assert code == 1
    assert line.startswith("this is a bug: KeyError: 'oops'")
    monkeypatch.setenv("SHOAL_DEBUG", "1")
    error = told(capsys, 2, "run", "none.toml").err
    assert "Traceback" in error
    assert error.splitlines()[-1].startswith("shoal: there is no recipe at none.toml (shoal init lists")


def test_supervised_role_shows_the_traceback_of_a_bug_only(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)
    monkeypatch.setenv(SUPERVISED, "1")  # stderr is the role's log
    known: tuple[tuple[Exception, int], ...] = (
        (ConfigError("no such key"), 2),
        (ResourceError("the port is taken"), 3),
        (DeadlineExceeded("no batch for step 3"), 1),
    )
    for error, code in known:
        monkeypatch.setattr("shoal.cli.run.role", _failing(error))
        assert main(["trainer", "run"]) == code
        assert capsys.readouterr().err == f"shoal: {error}\n"
    assert "Traceback" not in told(capsys, 2, "trainer", "--nonsense").err
    monkeypatch.setattr("shoal.cli.run.role", _failing(KeyError("oops")))
    said = told(capsys, 1, "trainer", "run").err
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("shoal: this is a bug: KeyError")


def _failing(error: Exception) -> Callable[..., None]:
    def fail(*_arguments: object) -> None:
        raise error

    return fail


def test_a_dry_run_prints_the_recipe_and_touches_nothing(shoal: Shoal, tmp_path: Path) -> None:
    ran = shoal("run", str(TINY), "--dry-run", "--set", "worker.count=5", "--set", "run.steps=7")
    assert ran.returncode == 0
    shown = parse_config(ran.stdout, Recipe, "shown")
    assert shown == with_derived_settings(load_recipe(TINY, ["run.steps=7", "worker.count=5"]))[0]
    assert (shown.hub.lease_s, shown.trainer.checkpoint_every) == (60, 1)
    ran = shoal("run", str(TINY), "--dry-run", "--set", "hub.database=postgresql://shoal:s3cret@db.example/run")
    assert "postgresql://shoal:***@db.example/run" in ran.stdout
    assert "s3cret" not in ran.stdout + ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipe_is_found_by_its_name_and_starts_the_run_of_that_name(name: str, monkeypatch: Patch) -> None:
    monkeypatch.chdir("/")  # no recipe is a file there
    assert load_recipe(Path(name)).run.name == name
    assert len(shipped_recipes()[name].split()) > 3


def test_recipes_are_listed_and_started_from_any_folder(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "tiny             A tiny policy" in told(capsys, 0, "init").out
    assert "runs/tiny is ready" in told(capsys, 0, "run", "tiny", "--prepare", "--set", "run.steps=7").out
    assert "steps = 7" in told(capsys, 0, "run", "tiny", "--dry-run").out, "now it is the run of this name"
    assert "runs/mine is ready" in told(capsys, 0, "run", "tiny", "mine", "--prepare").out


def test_project_has_a_recipe_with_a_reward_that_works(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "next: cd mine && " in told(capsys, 0, "init", "mine").out
    assert sorted(path.name for path in Path("mine").iterdir()) == ["README.md", "mine.toml", "reward.py"]
    assert not any("NAME" in path.read_text() for path in Path("mine").iterdir())
    monkeypatch.chdir("mine")
    shown = told(capsys, 0, "run", "mine.toml", "--dry-run")
    assert (f'file = "{tmp_path}/mine/reward.py"', "1,000 of reward") == (
        next(line for line in shown.out.splitlines() if line.startswith("file")), shown.err.splitlines()[0][-15:],
    )  # fmt: skip
    Path("mine").mkdir()
    assert "wrote mine/mine.toml" in told(capsys, 0, "init", "mine").out, "an empty folder may be there"
    assert "is there and is not an empty folder" in told(capsys, 2, "init", "mine").err


def test_completion_is_printed_and_completes_commands() -> None:
    completing = {**os.environ, "_SHOAL_COMPLETE": "complete_bash", "COMP_WORDS": "shoal re", "COMP_CWORD": "1"}
    shown = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for options, environment, said in (
        ([], completing, "restore\nrelay"), (["--show-completion", "zsh"], shown, "#compdef shoal"),
    ):  # fmt: skip
        command = [sys.executable, "-m", "shoal.cli", *options]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
        assert said in ran.stdout


def test_preparing_makes_a_folder_and_starts_nothing(shoal: Shoal, tmp_path: Path) -> None:
    ran = shoal("run", str(TINY), "--prepare")
    assert ran.returncode == 0, ran.stderr
    folder = RunFolder.open(tmp_path / "runs" / "tiny")
    assert f"shoal join {folder.endpoints.join}" in ran.stdout
    commands = [line.split() for line in ran.stdout.splitlines() if line.startswith("  ")]
    assert {"hub", "relay", "trainer", "validator", "join"} == {command[1] for command in commands}
    assert all("runs/tiny" in command for command in commands)
    assert not (folder.path / "processes.json").exists()


STATUS = status(
    nodes=(NODE,), waits=(wait("trainer", "a batch", 12),), alarms=("the cap is reached",),
    reports=(report(1, reward_mean=0.5, held_out=0.75),),
)  # fmt: skip


ROOT, HUB = SigningKey.from_seed(b"r" * 32), SigningKey.from_seed(b"h" * 32)
RUN = run_id("demo", fingerprint(ROOT.public_key))
CERTIFICATE = RoleCertificate(run=RUN, role="hub", public_key=HUB.public_key, issued_at_ms=1)
RUN_INFO = sign_document(
    RunInfo(
        run=RUN, name="demo", root_key=ROOT.public_key, certificates=(sign_document(CERTIFICATE, ROOT),),
        sources=(DEAD,), environment="sort", environment_digest="e" * 64, group_size=2, max_staleness=1, steps=3,
        sampling=SamplingParameters(temperature=1.0, max_new_tokens=8, eos_token_ids=(0,)),
    ), HUB,
)  # fmt: skip


@pytest.fixture
def hub_url(lab: Lab) -> str:
    """A hub that says nothing but these two."""
    said = {"/run": RUN_INFO, "/status": STATUS}
    return lab.source(lambda target, to: reply(to, 200, said[target].model_dump_json().encode())).url


def test_status_is_shown_for_people_and_for_programs(hub_url: str, capsys: Capture) -> None:
    shown = told(capsys, 0, "status", hub_url).out
    for part in ("demo-1", "step 2/9", "held out    0.75", "the cap is reached", "trainer waits for a batch", "worker"):
        assert part in shown
    assert type(STATUS).model_validate_json(told(capsys, 0, "status", hub_url, "--json").out) == STATUS


def test_the_doctor_finds_a_healthy_machine_healthy(tmp_path: Path, capsys: Capture) -> None:
    main(["doctor", "--folder", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["torch", "memory", "device", "disk", "folder"]
    assert lines[0].startswith("ok")
    assert lines[-1].startswith("ok")


def test_the_doctor_says_what_to_do_about_each_problem(hub_url: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    assert main(["doctor", hub_url, "--folder", str(tmp_path / "file" / "x")]) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert any("a part of the path is a file" in line for line in problems)
    assert any("set this machine's clock" in line for line in problems)  # that hub lives in 1970
    assert any("0 of 1 sources answer" in line and "check your network" in line for line in problems)
    assert "check the address and your network" in told(capsys, 1, "doctor", DEAD, "--folder", tmp_path).out
    assert main(["doctor", f"{hub_url}/#{'ab' * 20}", "--folder", str(tmp_path)]) == 1
    assert "another run or an impostor" in capsys.readouterr().out
    assert "is not a hub address" in told(capsys, 1, "doctor", "nonsense", "--folder", tmp_path).out


def test_output_that_is_not_utf_8_ends_nothing() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    script = "from shoal.cli.main import main; main(['--version']); print(chr(0x2192), 'b', chr(0x2026))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, timeout=60, check=True)
    assert b"? b ?" in ran.stdout


@pytest.mark.parametrize("engine", ["torch", "scripted"])
def test_scripted_work_only_where_validators_are_scripted(tmp_path: Path, engine: str, monkeypatch: Patch) -> None:
    folder = RunFolder.prepare(tmp_path / "run", load_recipe(TINY, [f"worker.engine={engine}"]))
    folder.assign_endpoints()
    taken: list[HubConfig] = []
    monkeypatch.setattr("shoal.hub.http.server.run_hub", lambda config, *_: taken.append(config))
    run_role(folder, "hub", StopToken())
    assert ("scripted/cpu/float32" in taken[0].profiles) == (engine == "scripted")
    assert "torch/cpu/float32" in taken[0].profiles


SIGNALLED_AT_AN_IMPORT = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Finder())
from shoal.cli.__main__ import begin
sys.argv = ["shoal", *{words!r}]
sys.exit(begin())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("words", "module", "supervised", "code"), [
    (["join", DEAD], "shoal.cli.main", False, 0), (["join", DEAD], "shoal.run.join", False, 0),
    (["--debug", "join", DEAD], "shoal.worker.loop", False, 0),
    (["join", "nowhere"], "shoal.run.roles", True, STOPPED_CODE),
    (["status", DEAD], "shoal.cli.main", False, STOPPED_CODE),
    (["status", DEAD], "shoal.cli.view", False, STOPPED_CODE),
])  # fmt: skip
def test_a_signal_while_a_process_starts_ends_it_as_later_and_without_a_traceback(
    words: list[str], module: str, supervised: bool, code: int, number: signal.Signals
) -> None:
    script = SIGNALLED_AT_AN_IMPORT.format(words=words, module=module, number=int(number))
    environment = {**os.environ, **({SUPERVISED: "1"} if supervised else {})}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "", "")


def test_a_supervised_role_that_a_signal_ends_does_not_look_done(tmp_path: Path) -> None:
    folder = RunFolder.prepare(tmp_path / "run", load_recipe(TINY))
    folder.assign_endpoints()
    command = [sys.executable, "-m", "shoal.cli", "hub", str(folder.path)]
    with subprocess.Popen(
        command, env={**os.environ, SUPERVISED: "1"}, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert any("listens at" in line for line in iter(process.stderr.readline, ""))
        process.terminate()
        assert process.wait(30) == STOPPED_CODE
    with fork.Forked(tmp_path, ("hub", str(folder.path)), tmp_path / "said") as unsupervised:
        unsupervised.until("listens at")
        assert unsupervised.end() == 0
