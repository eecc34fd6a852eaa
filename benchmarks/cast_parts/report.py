"""Tables in Markdown, on the terminal and into a file."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def publish(title: str, command: str, parts: Sequence[str], out: Path | None) -> None:
    """Print a report; with `out`, write it there too."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = "\n\n".join([f"# {title}", f"`{command}`, {today}, {machine()}.", *parts]) + "\n"
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)


def machine() -> str:
    """The processor, its cores, memory and kernel, in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    kind = names[0] if names else platform.machine()
    load = os.getloadavg()[0]
    return (
        f"{kind}, {os.cpu_count()} cores, {memory_gb:.0f} GB, Linux {platform.release()},"
        f" Python {platform.python_version()}; load when it ended {load:.1f}"
    )
