"""Advice that is printed works when it is copied."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit import Capture, Patch
from kit.cli import ALWAYS, TINY, command_line, mistake, told
from shoal.cli.help import leaves
from shoal.cli.main import main
from shoal.errors import EnvironmentSetupError
from shoal.protocol import ModelSize
from shoal.run.preflight import advice
from shoal.run.recipe import Recipe
from shoal.runtime.config import parse_config
from shoal.runtime.text import install_command, shoal_command


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: Patch) -> Path:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "shoal"):
        (folder / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    return folder


def test_commands_that_are_said_work_where_they_are_said(venv: Path, monkeypatch: Patch, tmp_path: Path) -> None:
    assert (shoal_command(), shoal_command("python")) == (".venv/bin/shoal", ".venv/bin/python")
    assert install_command("wandb") == ".venv/bin/python -m pip install wandb"
    other = tmp_path / "other"
    other.mkdir()
    (other / "shoal").touch(0o755)
    monkeypatch.setenv("PATH", str(other))
    assert shoal_command() == ".venv/bin/shoal", "another one on the path is not meant"
    monkeypatch.setenv("PATH", str(venv))
    assert (shoal_command(), shoal_command("python")) == ("shoal", "python")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(other)
    assert shoal_command() == str(venv / "shoal")


ROOT = Path(__file__).parents[3]


def test_the_reference_is_up_to_date() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "make_reference.py"), "--check"]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAST = ("CHANGELOG.md", "log.md")  # they tell what was: files and commands may be gone
FENCE = re.compile(r"^ *```\w*\n(.*?)^ *```", re.M | re.S)
COMMAND = r"(shoal (?:--debug )?[a-z-]+(?:\s[^`|>]*)?)"


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def shown_commands(page: Path) -> Iterator[str]:
    """`shoal …` at the beginning of a line of an example, after a prompt or variables, and between backticks."""
    for block in FENCE.findall(re.sub(r"<[^<>\n]+>", "…", page.read_text())):  # <a placeholder>
        lines = block.replace("\\\n", " ").splitlines()
        found = (re.match(rf"\s*(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?{COMMAND}(?=[|>]|$)", line) for line in lines)
        yield from (match.group(1) for match in found if match is not None)
    yield from re.findall(rf"`(?:\.venv/bin/)?{COMMAND}`", prose(page))


def test_commands_are_there_with_these_options() -> None:
    present = [page for page in PAGES if page.name not in PAST]
    commands = [(page, shown) for page in present for shown in shown_commands(page)]
    assert len(commands) > 100  # they are found at all
    wrong = [f"{page.relative_to(ROOT)}: {said}" for page, shown in commands if (said := mistake(shown))]
    assert wrong == []


def test_examples_of_help_can_be_given() -> None:
    examples = [(name, command.epilog.rpartition("Example: ")[2]) for name, command in leaves(command_line())]
    assert [said for name, shown in examples if (said := mistake(shown)) or not shown.startswith(f"shoal {name}")] == []


def test_options_in_messages_exist() -> None:
    commands = [command for _, command in leaves(command_line())]
    known = {word for each in commands for option in each.params for word in [*option.opts, *option.secondary_opts]}
    known |= {*ALWAYS, "--version", "--enclosed-worker", "--nproc-per-node"}
    unknown = set()
    for path in sorted((ROOT / "src" / "shoal").rglob("*.py")):
        if "sandbox" not in str(path):  # bubblewrap has options of its own
            texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            said = {
                word
                for text in texts
                if isinstance(text, str)
                for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)
            }
            unknown |= {f"{path.relative_to(ROOT)}: {word}" for word in said - known}
    assert unknown == set()


def test_mistakes_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n```\n$ shoal nonsense x\n```\n")
    assert [mistake(shown) for shown in shown_commands(page)] == ["shoal nonsense x: there is no command nonsense"]
    assert "--nonsense" in mistake("shoal ledger verify WHERE --nonsense 3")


ONE_TASK = "tasks = [('1=', '1')]\ndef score(prompt, completion, answer):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("tasks", "every", "said"),
    [(0, 1, "no task is held out"), (1, 1, "only 1 task;"), (127, 1, "only 127 tasks;"), (128, 1, ""), (0, 0, "")],
)
def test_few_held_out_tasks_are_said(tasks: int, every: int, said: str) -> None:
    environment = SimpleNamespace(tasks=lambda _split: [None] * tasks)
    recipe = Recipe.model_validate({"trainer": {"evaluate_every": every}})
    assert [said in line for line in advice(recipe, environment)] == ([True] if said else [])


def test_validators_that_cannot_keep_up_are_said_with_the_number_that_can(monkeypatch: Patch, capsys: Capture) -> None:
    """33.6 M tokens of 32 B weights: 8 GPUs of 266 TFLOP/s train for 3,027 s, one of 160 checks for 13,422 s."""
    large = ModelSize(parameters=32 * 10**9, payload_bytes=64 * 10**9)
    monkeypatch.setattr("shoal.run.preflight.announced_size", lambda _recipe: large)
    environment = SimpleNamespace(tasks=lambda _split: [None] * 128)
    run, words = {"groups_per_step": 256, "group_size": 16, "max_new_tokens": 32768}, "and about 5 validators keep up"
    recipes = [
        Recipe.model_validate({"run": run, "trainer": {"processes": 8}, "validator": {"count": count}})
        for count in (1, 4, 5)
    ]
    assert [[words in line for line in advice(recipe, environment)] for recipe in recipes] == [[True], [True], []]
    nobody = Recipe.model_validate({"run": run, "validator": {"count": 0}})
    [said] = advice(nobody, environment)
    assert said.startswith("validator.count is 0: no group is accepted until a validator runs elsewhere (`shoal admin")
    large = ModelSize()
    assert list(advice(recipes[0], environment)) == [], "nothing is known of a model that is not here"
    large = ModelSize(parameters=32 * 10**9)
    assert main(["run", str(TINY), "--dry-run", "--set", "trainer.processes=8", "--set", "run.steps=100000"]) == 0
    assert words in capsys.readouterr().err


def test_the_dry_run_says_it(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "one.py").write_text(ONE_TASK)
    (tmp_path / "one.toml").write_text('[environment]\nfile = "one.py"\n')
    said = told(capsys, 0, "run", tmp_path / "one.toml", "--dry-run")
    assert "no task is held out" in said.err
    assert "shoal: train: 1 task, 1 read, with the model's tokenizer: 1 of " in said.err
    assert "shoal: held out: 0 tasks\n" in said.err
    assert said.out.startswith("# derived from the model tiny: 0.2 M weights, ")
    assert "held out" not in said.out, "what it prints is a recipe"


def test_a_dry_run_shows_a_prompt_as_the_model_gets_it(capsys: Capture) -> None:
    said = told(capsys, 0, "run", TINY, "--dry-run").err
    assert "the prompt of task sort/train/0, 7 tokens: '833286='; its tokens: '8' '3' '3' '2' '8' '6' '='" in said


def test_a_dry_run_without_the_model_says_what_it_could_not_check(tmp_path: Path, capsys: Capture) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\npath = "large"\n')
    said = told(capsys, 0, "run", recipe, "--dry-run")
    assert f"there is no model folder {tmp_path / 'large'}: what needs it was not checked" in said.err
    assert "was not checked" not in said.out, "what it prints is a recipe"
    assert "1,000 read, without a tokenizer: 1,000 of sort" in said.err
    assert said.out.startswith(
        "# not known yet, since they follow from the size of the model, and there is no model at "
    )
    assert parse_config(said.out, Recipe, "shown").hub.lease_s is None, "and not that of a small model"
    recipe.write_text('[model]\npath = "large"\n[environment]\nname = "sorting"\n')
    assert main(["run", str(recipe), "--dry-run"]) == 2, "all else is checked"
    recipe.write_text('[model]\npath = "large"\n')
    assert main(["run", str(recipe), "--prepare"]) == 2, "a run needs it"
    (tmp_path / "large").mkdir()
    assert main(["run", str(recipe), "--dry-run"]) == 2, "a folder that is there must be a model's"


def test_a_dry_run_says_what_a_run_is_refused_for_on_this_machine(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr("shoal.run.preflight.GPU_FILES", ())
    request = ("run", TINY, "--set", "trainer.device=cuda")
    said = told(capsys, 0, *request, "--dry-run")
    assert 'a run is refused here: trainer.device is "cuda", but this machine has no GPU' in said.err
    assert parse_config(said.out, Recipe, "shown").trainer.device == "cuda", "it can be planned for another machine"
    assert 'trainer.device is "cuda", but this machine has no GPU' in told(capsys, 2, *request).err


def test_the_gsm8k_recipe_is_checked_with_a_model_and_without(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.chdir("/")  # the rows are found from anywhere
    fitting = ("--set", "model.path=tiny", "--set", "run.max_new_tokens=24")
    said = told(capsys, 0, "run", "gsm8k", "--dry-run", *fitting).err
    assert "train: 16 tasks, 16 read, with the model's tokenizer: 16 of mathematics" in said
    assert "held out: 4 tasks, 4 read" in said
    said = told(capsys, 0, "run", "gsm8k", "--dry-run").err
    assert "instruct-model: what needs it was not checked" in said
    assert main(["run", "gsm8k", "--prepare", "never"]) == 2, "a run needs a model"


def test_the_described_recipe_says_what_became_of_its_rows_and_that_nothing_was_scored_here(capsys, monkeypatch):
    def lacks(_environment: object) -> None:
        raise EnvironmentSetupError("no bubblewrap")

    monkeypatch.setattr("shoal.run.preflight.require_scoring", lacks)
    described = str(TINY.parent / "intellect2.toml")
    said = told(capsys, 0, "run", described, "--dry-run").err
    assert "28 rows in 1 file, format described (code, mathematics): 21 to train on, 5 held out, 2 outside" in said
    assert "train: 21 tasks, 21 read, without a tokenizer: 17 of mathematics, 4 of code" in said
    assert "no task was scored, and a run is refused here: no bubblewrap" in said
    assert main(["run", str(TINY), "--prepare", "never"]) == 2, "a run is"


def test_the_dry_run_refuses_what_the_run_in_that_folder_would(tmp_path: Path, capsys: Capture) -> None:
    request = ["run", str(TINY), str(tmp_path / "run")]
    assert main([*request, "--prepare"]) == 0
    (tmp_path / "run" / "hub").mkdir()  # it has begun
    told(capsys, 0, *request, "--dry-run")
    said = told(capsys, 2, *request, "--dry-run", "--set", "trainer.lora.rank=8")
    assert "was made with another recipe" in said.err
    assert said.out == ""
