"""The documentation as a site: every page is in it once, it builds without a warning, and asks no other server."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://repository.example/shoal"


def named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav if isinstance(nav, list) else nav.values():
            yield from named(part)


def test_nav_names_every_page_once() -> None:
    """Measurements are added by scripts/make_site.py."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    nav = Counter(named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert nav == Counter(path.relative_to(ROOT).as_posix() for path in pages)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it; links to files that are no pages lead to `REPOSITORY`."""
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed here: pip install 'shoal-rl[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    environment = {**os.environ, "REPOSITORY_URL": REPOSITORY}
    done = subprocess.run([*command, "--site-dir", str(folder)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    results = sorted(path.stem for path in (ROOT / "benchmarks/results").glob("*.md"))
    assert sorted(path.stem for path in (site / "benchmarks/results").glob("*.html")) == results
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {path for path in pages if not (site / path).is_file()} == set()
    assert "Reinforcement learning of language models" in (site / "index.html").read_text()


def test_links_of_the_site_lead_to_its_pages_or_to_the_repository(site: Path) -> None:
    page = (site / "guides" / "own-reward.html").read_text()
    assert f'href="{REPOSITORY}/blob/main/examples/custom_reward.py"' in page
    assert 'href="environments.html#prompts"' in page
    assert f'href="{REPOSITORY}/tree/main/benchmarks/results"' in (site / "log.html").read_text()


def test_reading_the_site_asks_no_other_server(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"(?:https?:)?//[^\"]+\"|url\(\s*[\"']?(?:https?:)?//"
    )
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 80
    assert [(path.name, found[0]) for path in files if (found := loaded.search(path.read_text()))] == []


def test_fences_in_lists_are_code(site: Path) -> None:
    page = (site / "guides" / "several-machines.html").read_text()
    assert "```" not in page
    assert re.search(r"<li>\s*<p><strong>Prepare.*?<pre><code>shoal run.*?It prints the join URL.*?</li>", page, re.S)


def test_messages_of_the_troubleshooting_page_are_those_of_the_program() -> None:
    headings = re.findall(r"^## `(.*)`$", (ROOT / "docs/start/troubleshooting.md").read_text(), re.M)
    assert len(headings) >= 10
    nodes = [node for path in (ROOT / "src").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    texts = "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    wanted = [part.strip(" :();,.'[]") for heading in headings for part in heading.split("…")]
    assert [part for part in wanted if part and part not in texts] == []
