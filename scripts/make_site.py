"""What `mkdocs build` needs to make a site of pages that are written to be read in the repository. Used by mkdocs.yml.

    pages of docs/, of the root and of benchmarks/results ─► one set, each called by its path in the repository
                                                             so that relative links between pages hold as they are
    a link to any other file ─► the repository's address, or plain text where none is given

The repository's address is `REPOSITORY_URL` in the environment. Nothing is fetched.
mkdocs reads Markdown by other rules than the repository's host: what belongs to an item of a list is indented by four
columns there and has no fences, and anchors have other names. All three are translated.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
RESULTS = "benchmarks/results"
SHOWN = ("*.md", "docs/**/*.md", "docs/**/*.svg", "docs/**/*.png", f"{RESULTS}/*.md", f"{RESULTS}/*.png")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
ITEM_TEXT = re.compile(r"^ {2,3}(?=\S)", re.M)
INDENTED_FENCE = re.compile(r"^( +)```\w*\n(.*?)^\1```$", re.M | re.S)


def anchor(heading: str, _separator: str = "-") -> str:
    """As the repository's host makes them, so that one link works in both places.

    >>> anchor("A run: `shoal run`")
    'a-run-shoal-run'
    """
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.repo_url = os.environ.get("REPOSITORY_URL", "").rstrip("/") or None
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": anchor}
    results = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / RESULTS).glob("*.md"))
    config.nav = [*(config.nav or []), {"Measurements": results}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages under the names that they have in the repository, and what the theme brings."""
    pages = sorted({path.relative_to(ROOT).as_posix() for shown in SHOWN for path in ROOT.glob(shown)})
    theme = [file for file in files if not (config.docs_dir and file.src_dir == config.docs_dir)]
    return Files([*theme, *(page_file(name, config) for name in pages)])


def page_file(name: str, config: MkDocsConfig) -> File:
    """A page keeps its name as its source; its address loses `docs/`, and README.md is the first page."""
    file = File.generated(config, name, abs_src_path=str(ROOT / name))
    if name.startswith("docs/"):
        file.dest_uri = file.dest_uri.removeprefix("docs/")
    return file


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    folder = PurePosixPath(page.file.src_uri).parent

    def linked(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path, _, _heading = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        name = Path(os.path.normpath(folder / path)).as_posix()
        if files.get_file_from_path(name) is not None or not (ROOT / name).exists():
            return match[0]  # a page; or a mistake, which mkdocs reports
        if config.repo_url is None:
            return text
        return f"{picture}[{text}]({config.repo_url}/{'tree' if (ROOT / name).is_dir() else 'blob'}/main/{name})"

    def translated(text: str) -> str:
        return LINK.sub(linked, ITEM_TEXT.sub("    ", INDENTED_FENCE.sub(as_indented_code, text)))

    parts = FENCED.split(markdown)
    return "".join(part if FENCED.fullmatch(part) else translated(part) for part in parts)


def as_indented_code(fence: re.Match[str]) -> str:
    """A fence in an item of a list: the renderer knows only indented code there, eight columns deep."""
    depth = len(fence[1])
    return "\n".join(f"        {line[depth:]}".rstrip() for line in fence[2].splitlines())
