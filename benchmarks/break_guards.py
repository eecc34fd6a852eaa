"""Break guards one at a time and see whether a test notices: how strong the tests are.

    .venv/bin/python benchmarks/break_guards.py --count 30 --seed 1
    .venv/bin/python benchmarks/break_guards.py --guards FILE        # the same guards in another state of the sources

A guard is an `if` whose last statement raises. Broken, it lets everything pass. The tests of its package run first,
then those that import its module. Sources are changed in place, one at a time, and put back.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC, TESTS = ROOT / "src" / "shoal", ROOT / "tests"
LIMIT_S = 400


def guards() -> Iterator[tuple[str, str, ast.If]]:
    """File, the text of what is raised, and the statement, of all guards."""
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise) and not node.orelse:
                yield str(path.relative_to(SRC)), ast.unparse(node.body[-1]), node


def broken(source: str, guard: ast.If) -> str:
    """The source with `if condition:` turned into `if (condition) and False:`, so that names are still looked up."""
    lines = source.splitlines(keepends=True)
    test = guard.test
    assert test.end_lineno is not None
    assert test.end_col_offset is not None
    last = lines[test.end_lineno - 1].encode()
    lines[test.end_lineno - 1] = (last[: test.end_col_offset] + b") and False" + last[test.end_col_offset :]).decode()
    first = lines[test.lineno - 1].encode()
    lines[test.lineno - 1] = (first[: test.col_offset] + b"(" + first[test.col_offset :]).decode()
    return "".join(lines)


def tests_of(file: str) -> list[list[str]]:
    """The package's own tests; then the files that name its module."""
    parts = Path(file).with_suffix("").parts
    own = TESTS / "unit" / {"run": "cli"}.get(parts[0], parts[0])
    module = ".".join(("shoal", *parts)).removesuffix(".__init__")
    others = [
        str(path)
        for folder in ("contract", "adversary", "integration", "unit")
        for path in sorted((TESTS / folder).rglob("test_*.py"))
        if own not in path.parents
        and (module in path.read_text() or f"{module.rpartition('.')[0]} import" in path.read_text())
    ]
    return [found for found in ([str(own)] if own.is_dir() else [], others[:12]) if found]


def is_noticed(file: str, guard: ast.If) -> str:
    """The first test that fails, or nothing."""
    path = SRC / file
    source = path.read_text()
    try:
        path.write_text(broken(source, guard))
        for chosen in tests_of(file):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow and not gpu", *chosen]
            try:
                ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                return "a test does not end"
            if ran.returncode not in (0, 5):
                lines = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return lines[0] if lines else f"pytest ended with {ran.returncode}"
    finally:
        path.write_text(source)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--guards", type=Path, help="JSON: a list of what is raised; those that are here are broken")
    options = parser.parse_args()
    found = {said: (file, node) for file, said, node in guards()}
    names = sorted(found)
    if options.guards:
        names = [said for said in json.loads(options.guards.read_text()) if said in found]
    else:
        names = random.Random(options.seed).sample(names, min(options.count, len(names)))
    noticed = 0
    for number, said in enumerate(names, 1):
        file, node = found[said]
        by = is_noticed(file, node)
        noticed += bool(by)
        print(f"{number}/{len(names)} {file}: {said[:90]}: {by or 'NOT NOTICED'}", flush=True)
    print(f"{noticed} of {len(names)} were noticed")


if __name__ == "__main__":
    main()
