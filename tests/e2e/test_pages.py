"""The commands of the first pages that people read, executed as they stand there, on the tiny model.

    page ─► commands, in their order ─► each is executed, or `ELSEWHERE` says why it is not
                                        runs take one small step (`SMALL`), the first of them is shared by all pages

Commands with a placeholder get what it stands for (`MEANT`). Pages are read at every run of the test: a command that
somebody adds is executed, or the test fails.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit import TempPaths
from kit.run import ledger

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SHARED = "shoal run recipes/tiny.toml runs/mine --set environment.file=examples/custom_reward.py"
SMALL = ["run.steps=1", "run.groups_per_step=8", "run.group_size=8", "trainer.evaluate_every=0", "hub.refill_cap=20"]

ELSEWHERE = {
    "make demo": "installs over the network; tests/e2e/test_demo.py runs the demo",
    "shoal join <the join URL>": "while a run is live, by another machine; tests/adversary/test_join_sandbox.py",
    "kill -9 <a pid from runs/demo/processes.json>": "while a run is live; tests/e2e/test_kills.py",
}
"""A command of a page, without its comment: why it is not executed here, and what does it instead."""

MEANT = {
    "shoal eval MODEL --env aime:aime25.jsonl": "shoal eval tiny --env aime:aime25.jsonl --max-new-tokens 8",
    "runs/mine --set environment.file=rewards.py": "runs/rewards --set environment.file=rewards.py",  # mine is taken
    "evals/tiny-sort-DIGEST": "evals/before",
}
"""What a person would write in a place of the command."""

PAGES = {
    "README.md": ("## Train", 5),
    "docs/start/first-run.md": ("", 9),
    "docs/guides/own-reward.md": ("", 2),
    "docs/guides/evaluate.md": ("", 6),
}
"""Page: the heading of the part whose commands count, and how many there are."""

REWARDS = """
def even(completions, **columns):
    return [float(len(completion) % 2 == 0) for completion in completions]
"""


def commands(page: str) -> list[str]:
    """The lines of fenced examples that are commands, without the environment's folder and comments."""
    heading, _ = PAGES[page]
    text = (ROOT / page).read_text()
    part = re.split(r"^## ", text[text.index(heading) + len(heading) :], flags=re.M)[0] if heading else text
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", part, re.M | re.S)
    lines = "\n".join(block for language, block in blocks if not language).replace("\\\n", " ").splitlines()
    plain = (re.sub(r"\s+#\s.*$", "", line).removeprefix(".venv/bin/").strip() for line in lines)
    return [line for line in plain if re.match(r"(shoal|python|make|kill|pip|hf) \S", line)]


def execute(folder: Path, command: str) -> str:
    """What it prints; it must end with 0."""
    program, *words = shlex.split(command)
    small = [word for setting in SMALL for word in ("--set", setting)] if words[0] == "run" and len(words) > 3 else []
    if command.startswith("python examples/one_file_rl.py"):
        small = ["--steps", "1", "--evaluate-every", "1"]
    start = [sys.executable, *(["-m", "shoal.cli"] if program == "shoal" else [])]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [*start, *words, *small], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=TIMEOUT_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: TempPaths) -> Path:
    """Where a clone would be, with the shared run, a copy of it in place of the demo's, and files that a reader has."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("recipes", "examples"):
        (folder / name).symlink_to(ROOT / name)
    execute(folder, SHARED)
    shutil.copytree(folder / "runs" / "mine", folder / "runs" / "demo")
    rows = [entry.model_dump_json() + "\n" for entry in ledger(folder / "runs" / "demo")]
    (folder / "runs" / "demo" / "ledger.jsonl").write_text("".join(rows))  # as a demo leaves it
    (folder / "rewards.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"{number}="}) + "\n" for number in range(1000, 1200)]
    (folder / "rows.jsonl").write_text("".join(rows))
    rows = [json.dumps({"problem": f"What is {number} + 1?", "answer": str(number + 1)}) + "\n" for number in range(8)]
    (folder / "aime25.jsonl").write_text("".join(rows))
    return folder


def test_pages_have_these_commands_and_reasons_are_of_commands_on_them() -> None:
    assert {page: len(commands(page)) for page in PAGES} == {page: count for page, (_, count) in PAGES.items()}
    shown = {command for page in PAGES for command in commands(page)}
    assert SHARED in shown
    assert set(ELSEWHERE) <= shown
    assert [part for part in MEANT if not any(part in command for command in shown)] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_do_what_they_say(page: str, folder: Path) -> None:
    for command in commands(page):
        if command in ELSEWHERE or command == SHARED:
            continue
        for shown, meant in MEANT.items():
            command = command.replace(shown, meant)
        execute(folder, command)


def test_what_a_run_leaves_is_read_as_the_page_reads_it(folder: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/start/first-run.md").read_text(), re.M | re.S)
    (folder / "read.py").write_text(program)
    said = execute(folder, "python read.py")
    assert "worker-0" in said or "Account" in said, said
