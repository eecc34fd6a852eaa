"""Links between pages lead somewhere: the file exists, and the heading that is named after `#`."""

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks/results").glob("*.md")]


@cache
def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def anchor(heading: str) -> str:
    """
    >>> anchor("What is kept: `origin`")
    'what-is-kept-origin'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken(page: Path, link: str) -> bool:
    name, _, heading = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return True
    return bool(heading) and heading not in map(anchor, re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE))


def test_links_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    local = [(page, link) for page, link in links if not link.startswith("http")]
    assert len(local) > 100
    assert [f"{page.relative_to(ROOT)}: {link}" for page, link in local if broken(page, link)] == []


def test_missing_file_and_heading_are_broken() -> None:
    readme = ROOT / "README.md"
    links = ["docs/none.md", "docs/log.md#none", "docs/log.md#log"]
    assert [broken(readme, link) for link in links] == [True, True, False]
