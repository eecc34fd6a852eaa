"""The documents: every link leads somewhere, and every command that they show exists with these options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from shoal.cli.main import app

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAST = ("CHANGELOG.md", "log.md")  # they tell what was: files and commands may be gone
FENCE = re.compile(r"^ *```\w*\n(.*?)^ *```", re.M | re.S)
COMMAND = r"(shoal (?:--debug )?[a-z-]+(?:\s[^`|>]*)?)"
ALWAYS = {"--help", "-h", "--debug"}


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The names under which headings can be linked to, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def broken_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{link}: there is no such heading"


def shown_commands(page: Path) -> Iterator[str]:
    """`shoal …` at the beginning of a line of an example, after a prompt or variables, and between backticks."""
    for block in FENCE.findall(re.sub(r"<[^<>\n]+>", "…", page.read_text())):  # <a placeholder>
        lines = block.replace("\\\n", " ").splitlines()
        found = (re.match(rf"\s*(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?{COMMAND}(?=[|>]|$)", line) for line in lines)
        yield from (match.group(1) for match in found if match is not None)
    yield from re.findall(rf"`(?:\.venv/bin/)?{COMMAND}`", prose(page))


def mistake(shown: str) -> str:
    """What is wrong with a command as it is shown; empty if nothing is."""
    words, command = shlex.split(shown, comments=True)[1:], _group()
    while words and hasattr(command, "commands"):
        word = words.pop(0)
        if word.startswith("-"):
            continue
        if word not in command.commands:
            return f"{shown}: there is no command {word}"
        command = command.commands[word]
    there = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]} | ALWAYS
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in there]
    return f"{shown}: there is no option {', '.join(unknown)}" if unknown else ""


@cache
def _group() -> Any:
    return typer.main.get_command(app)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_commands_are_there_with_these_options() -> None:
    present = [page for page in PAGES if page.name not in PAST]
    commands = [(page, shown) for page in present for shown in shown_commands(page)]
    assert len(commands) > 100  # they are found at all
    wrong = [f"{page.relative_to(ROOT)}: {said}" for page, shown in commands if (said := mistake(shown))]
    assert wrong == []


def test_mistakes_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`, three\n[a](#one-two-three) [b](#four) [c](gone.md)\n```\n$ shoal nonsense x\n```\n")
    assert [link.partition(":")[0] for link in broken_links(page)] == ["#four", "gone.md"]
    assert [mistake(shown) for shown in shown_commands(page)] == ["shoal nonsense x: there is no command nonsense"]
    assert "--nonsense" in mistake("shoal ledger verify WHERE --nonsense 3")
