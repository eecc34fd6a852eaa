"""The architecture, held: import directions, the packages without torch, the purity of hub/state, sizes, no pickles.

Every rule is a function from sources to a list of violations, so that each is also shown a source that breaks it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

SRC = Path(__file__).parent.parent / "src"

LAYERS = [
    {"cli"},
    {"run"},
    {"dashboard", "simulator"},
    {"trainer", "worker", "validator", "hub"},
    {"evaluation", "adversary"},
    {"engines", "client", "rewards"},
    {"algorithms", "environments", "toploc", "sampling", "shardcast", "ledger", "models", "records"},
    {"runtime"},
    {"protocol"},
    {"errors"},
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
TORCH_FREE = (
    "cli", "run", "hub", "dashboard", "client", "ledger", "shardcast", "environments", "records", "rewards",
    "runtime", "protocol", "errors",
)  # fmt: skip
HEAVY = {"torch", "transformers"}
PURE = ("shoal.hub.state", "shoal.ledger")
PURE_SHOAL = ("shoal.errors", "shoal.protocol", "shoal.ledger", "shoal.hub.state")
PURE_LIBRARY = {
    "__future__", "abc", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq", "hmac",
    "itertools", "json", "math", "operator", "pydantic", "types", "typing",
}  # fmt: skip
PRINTERS = {"typer", "click", "rich"}
LOADER = "shoal.runtime.extensions"
LOADING = {
    "shoal.algorithms.registry", "shoal.environments.dataset", "shoal.environments.function",
    "shoal.environments.registry", "shoal.run.recipe", "shoal.trainer.record", "shoal.trainer.settings",
}  # fmt: skip
"""Who may load code of the owner's: what reads a recipe's words. Nothing that reads a lease, a row or a submission."""
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
SANDBOXED = "shoal.environments.sandbox.runner"
"""Its text is handed to an interpreter inside the sandbox, where it runs programs; nobody may import it."""
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 600

Sources = dict[str, str]


parsed = cache(ast.parse)  # every rule looks at every module


@cache
def project() -> Sources:
    """Module name → source of everything in the package."""
    modules = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = path.read_text()
    return modules


# ── what a module imports ────────────────────────────────────────────────────────────────────────────────────────


def statements(tree: ast.AST, *, at_import_time: bool) -> Iterator[ast.AST]:
    """All nodes; or only those that run when the module is imported: no function bodies, nothing for type checkers."""
    for child in ast.iter_child_nodes(tree):
        if at_import_time and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import_time and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements(child, at_import_time=at_import_time)


def imports(module: str, source: str, known: Sources, *, at_import_time: bool = False) -> set[str]:
    """The imported modules by absolute name; `from shoal.hub import state` is `shoal.hub.state` if there is one."""
    found: set[str] = set()
    package = module if _is_package(module, known) else module.rpartition(".")[0]
    for node in statements(parsed(source), at_import_time=at_import_time):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, *([node.module] if node.module else [])])
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names}
    return found


def _is_package(module: str, known: Sources) -> bool:
    return any(other.startswith(f"{module}.") for other in known)


def package_of(module: str) -> str:
    """`shoal.hub.state.rows` → `hub`."""
    return module.split(".")[1] if "." in module else ""


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


# ── the rules ────────────────────────────────────────────────────────────────────────────────────────────────────


def layer_violations(sources: Sources) -> list[str]:
    """Imports point strictly down; packages of one layer do not know each other."""
    bad = []
    for module, source in sources.items():
        package = package_of(module)
        if package and package not in LEVEL:
            bad.append(f"{module}: package {package!r} has no place in LAYERS")
            continue
        for target in imports(module, source, sources):
            other = package_of(target) if target.startswith("shoal.") else ""
            if not package or not other or other == package:
                continue
            if other not in LEVEL or LEVEL[other] <= LEVEL[package]:
                bad.append(f"{module} imports {target}: not below it")
    return bad


def mutual_import_violations(sources: Sources) -> list[str]:
    """No two packages import each other, subpackages such as hub.state and hub.storage included."""

    def folder(module: str) -> str:
        return module if _is_package(module, sources) else module.rpartition(".")[0]

    edges = set()
    for module, source in sources.items():
        for target in imports(module, source, sources):
            if target in sources and folder(target) != folder(module):
                edges.add((folder(module), folder(target)))
    nested = {(a, b) for a, b in edges if a.startswith(f"{b}.") or b.startswith(f"{a}.")}
    return sorted(f"{a} and {b} import each other" for a, b in edges - nested if (b, a) in edges and a < b)


def purity_violations(sources: Sources) -> list[str]:
    """hub/state decides: no time, no randomness, no system, no database; only plain values in and out."""
    bad = []
    for module, source in sources.items():
        if not within(module, PURE):
            continue
        for target in imports(module, source, sources):
            allowed = within(target, PURE_SHOAL) if target.startswith("shoal") else target.split(".")[0] in PURE_LIBRARY
            if not allowed:
                bad.append(f"{module} imports {target}")
    return bad


def torch_violations(sources: Sources) -> list[str]:
    """Nothing that a torch-free package imports, directly or not, imports torch."""
    roots = [m for m in sources if package_of(m) in TORCH_FREE or m.endswith(".settings") or m == "shoal"]
    return [
        f"{root} reaches {target} through {module}"
        for root, target, module in reached(sources, roots)
        if target.split(".")[0] in HEAVY or target == "safetensors.torch"
    ]


def reached(sources: Sources, roots: list[str]) -> Iterator[tuple[str, str, str]]:
    """What importing each root imports, directly or not: root, imported module, and the module that imports it."""
    graph = {module: imports(module, source, sources, at_import_time=True) for module, source in sources.items()}
    for root in roots:
        seen, queue = set[str](), [root]
        while queue:
            module = queue.pop()
            if module in seen:
                continue
            seen.add(module)
            for target in graph[module]:
                yield root, target, module
                parts = target.split(".")  # importing a.b.c also runs a and a.b
                queue += [".".join(parts[:i]) for i in range(1, len(parts) + 1) if ".".join(parts[:i]) in sources]


def printing_violations(sources: Sources) -> list[str]:
    """The command line parses and prints; nobody else does."""
    return [
        f"{module} imports {target}"
        for module, source in sources.items()
        if package_of(module) != "cli"
        for target in imports(module, source, sources)
        if target.split(".")[0] in PRINTERS
    ]


def unsafe_violations(sources: Sources) -> list[str]:
    """Nothing is unpickled or evaluated, whoever it came from. What runs strangers' programs runs in the sandbox."""
    bad = []
    for module, source in sources.items():
        for target in imports(module, source, sources):
            if target.split(".")[0] in UNPICKLERS or target == SANDBOXED:
                bad.append(f"{module} imports {target}")
            if f"{target}.".startswith(f"{LOADER}.") and module not in LOADING:
                bad.append(f"{module} imports {target}")
        if module == SANDBOXED:
            continue
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                loads = called == "torch.load" and not safe
                pickles = any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords)
                if called in ("eval", "exec", "compile", "__import__") or loads or pickles:
                    bad.append(f"{module}:{node.lineno} calls {called}")
    return bad


def size_violations(sources: Sources) -> list[str]:
    bad = []
    for module, source in sources.items():
        if len(source.splitlines()) > MAX_FILE_LINES:
            bad.append(f"{module} has {len(source.splitlines())} lines")
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    bad.append(f"{module}.{node.name} has {lines} lines")
    return bad


RULES = [
    layer_violations, mutual_import_violations, purity_violations, torch_violations, printing_violations,
    unsafe_violations, size_violations,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_the_rule(rule: object) -> None:
    assert rule(project()) == []  # type: ignore[operator]


# ── every rule can be broken ─────────────────────────────────────────────────────────────────────────────────────

BASE = {"shoal": "", "shoal.errors": "", "shoal.hub": "", "shoal.hub.state": "", "shoal.hub.storage": "",
        "shoal.client": "", "shoal.worker": "", "shoal.worker.loop": "", "shoal.models": "",
        "shoal.models.load": "import torch", "shoal.runtime": "", "shoal.runtime.x": ""}  # fmt: skip
LONG = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES

BROKEN = [
    (layer_violations, "shoal.runtime.bad", "from shoal.hub import state"),
    (layer_violations, "shoal.runtime.bad", "from ..hub import state"),
    (layer_violations, "shoal.runtime.bad", "import shoal.client"),
    (layer_violations, "shoal.worker.bad", "from shoal import hub"),
    (layer_violations, "shoal.worker.bad", "def f():\n    import shoal.hub"),
    (layer_violations, "shoal.unknown", ""),
    (purity_violations, "shoal.hub.state.bad", "import time"),
    (purity_violations, "shoal.hub.state.bad", "from os import path"),
    (purity_violations, "shoal.hub.state.bad", "def f():\n    import random"),
    (purity_violations, "shoal.hub.state.bad", "from sqlalchemy import select"),
    (purity_violations, "shoal.hub.state.bad", "from shoal.hub.storage import x"),
    (purity_violations, "shoal.hub.state.bad", "from shoal.runtime.x import y"),
    (purity_violations, "shoal.hub.state.bad", "from ..storage import x"),
    (torch_violations, "shoal.client.bad", "import torch.nn"),
    (torch_violations, "shoal.client.bad", "from transformers import AutoModel"),
    (torch_violations, "shoal.client.bad", "try:\n    from shoal.models.load import x\nexcept ImportError:\n    pass"),
    (torch_violations, "shoal.hub.bad", "class A:\n    import torch"),
    (torch_violations, "shoal.worker.settings", "from safetensors.torch import save"),
    (printing_violations, "shoal.runtime.bad", "import typer"),
    (printing_violations, "shoal.worker.bad", "def f():\n    from rich.console import Console"),
    (unsafe_violations, "shoal.worker.bad", "import pickle"),
    (unsafe_violations, "shoal.worker.bad", "def f():\n    from cloudpickle import loads"),
    (unsafe_violations, "shoal.worker.bad", "eval('1')"),
    (unsafe_violations, "shoal.worker.bad", "def f(x):\n    exec(x)"),
    (unsafe_violations, "shoal.worker.bad", "import torch\ntorch.load('x')"),
    (unsafe_violations, "shoal.worker.bad", "import torch\ntorch.load('x', weights_only=False)"),
    (unsafe_violations, "shoal.worker.bad", "import numpy as np\nnp.load('x', allow_pickle=True)"),
    (unsafe_violations, "shoal.worker.bad", f"import {SANDBOXED}"),
    (unsafe_violations, "shoal.worker.bad", f"def f():\n    from {SANDBOXED} import run"),
    (unsafe_violations, SANDBOXED, "import pickle"),
    (unsafe_violations, "shoal.worker.bad", "from shoal.runtime.extensions import resolve"),
    (size_violations, "shoal.worker.bad", LONG),
    (size_violations, "shoal.worker.bad", "x = 1\n" * (MAX_FILE_LINES + 1)),
]
FINE = [
    ("shoal.cli", "import typer\nfrom rich.text import Text"),
    ("shoal.worker.good", "from shoal.client import x\nfrom shoal.runtime.x import y\nimport shoal.errors"),
    ("shoal.client.good", "def f():\n    import torch"),
    ("shoal.client.good", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    ("shoal.hub.state.good", "import hashlib\nfrom shoal.errors import x\nfrom collections.abc import Sequence"),
    ("shoal.models.good", "import torch\nmodel.eval()\ntorch.load('x', weights_only=True)"),
    ("shoal.worker.good", LONG.replace("    x = 1\n", "", 1)),
]


@pytest.mark.parametrize(("rule", "module", "source"), BROKEN)
def test_a_broken_rule_is_noticed(rule: object, module: str, source: str) -> None:
    assert rule(BASE) == []  # type: ignore[operator]
    assert rule({**BASE, module: source}) != []  # type: ignore[operator]


@pytest.mark.parametrize(("module", "source"), FINE)
def test_allowed_source_breaks_no_rule(module: str, source: str) -> None:
    assert [violation for rule in RULES for violation in rule({**BASE, module: source})] == []


def test_packages_that_import_each_other_are_noticed() -> None:
    sources = {
        **BASE,
        "shoal.hub.state.a": "from shoal.hub.storage.b import y",
        "shoal.hub.storage.b": "from shoal.hub.state.a import x",
    }
    assert mutual_import_violations(sources) == ["shoal.hub.state and shoal.hub.storage import each other"]


# ── the same, for real ───────────────────────────────────────────────────────────────────────────────────────────

WITHOUT_TORCH = """
import importlib, pkgutil, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is absent in this test")

sys.meta_path.insert(0, NoTorch())
import shoal
for package in sys.argv[1].split(","):
    try:
        module = importlib.import_module(f"shoal.{package}")
    except ModuleNotFoundError as error:
        if error.name != f"shoal.{package}":
            raise
        continue
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"shoal.{package}."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
from shoal.cli.main import main
assert main(["--help"]) == 0
assert "torch" not in sys.modules
"""


def test_the_torch_free_packages_import_and_help_works_where_torch_is_absent() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, ",".join(TORCH_FREE)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert "run" in ran.stdout


def test_the_blocker_of_torch_blocks() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + "\nimport torch", "errors"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode != 0
    assert "torch is absent in this test" in ran.stderr


# -- what contributors expect ------------------------------------------------------------------------------------------

ROOT = SRC.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITH_TORCH = {"triton"}  # comes with torch's CUDA builds and is imported with them only
ELSEWHERE = {"vllm"}  # in an environment of its own (engines/vllm/needs)


def declared(requirements: list[str]) -> set[str]:
    return {re.split(r"[\s<>=!~\[;]", each, maxsplit=1)[0].lower().replace("_", "-") for each in requirements}


def of_extras(*names: str) -> list[str]:
    """What these extras require, and the extras that they contain."""
    found = []
    for requirement in (each for name in names for each in PROJECT["optional-dependencies"][name]):
        own = re.match(r"shoal-rl\[(.*)\]", requirement)
        found += of_extras(*own[1].split(",")) if own else [requirement]
    return found


def undeclared(sources: Sources, requirements: list[str]) -> set[str]:
    """Packages that are imported somewhere, and come only by accident: with another one."""
    imported = {name.split(".")[0] for module, source in sources.items() for name in imports(module, source, sources)}
    known = sys.stdlib_module_names | {"shoal"} | WITH_TORCH | ELSEWHERE
    return {name.replace("_", "-") for name in imported - known} - declared(requirements)


def test_every_imported_package_is_declared() -> None:
    assert undeclared(project(), [*PROJECT["dependencies"], *of_extras("all")]) == set()
    assert undeclared({"shoal.x": "import numpy, h11\nimport os"}, ["numpy>=2"]) == {"h11"}


LIGHT = ("hub", "client", "ledger", "shardcast", "runtime", "protocol", "run")
IN_EXTRAS = re.compile(
    r"shoal\.(hub\.storage\.(postgres|s3)|shardcast\.(delta|kernels)|run\.(bench|preflight|solo|trials|(demo|models)\..*))"
)
"""What a command loads after `extras.require`."""


def not_in(extras: list[str], sources: Sources, roots: list[str]) -> list[str]:
    """Packages that these modules import, which an installation with these extras only may lack."""
    there = sys.stdlib_module_names | {"shoal", "triton", *declared([*PROJECT["dependencies"], *of_extras(*extras)])}
    named = {(root, target.split(".")[0], module) for root, target, module in reached(sources, roots)}
    odd = [each for each in named if not {each[1], each[1].replace("_", "-")} & there]
    return sorted(f"{root} reaches {name} through {module}" for root, name, module in odd)


def test_each_installation_has_what_its_commands_import() -> None:
    light = [m for m in project() if package_of(m) in (*LIGHT, "cli") and not IN_EXTRAS.fullmatch(m)]
    assert not_in([], project(), [m for m in light if m != "shoal.run.ledger.recheck"]) == []
    assert not_in(["worker"], project(), ["shoal.worker.loop", "shoal.engines.torch", "shoal.adversary"]) == []
    assert not_in(["data"], project(), [m for m in project() if package_of(m) in ("environments", "rewards")]) == []
    (found,) = not_in([], {"shoal.hub": "import shoal.models", "shoal.models": "import numpy"}, ["shoal.hub"])
    assert found == "shoal.hub reaches numpy through shoal.models"


def test_constraints_are_within_the_bounds_of_the_project() -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for requirement in map(Requirement, [*PROJECT["dependencies"], *of_extras("all", "dev")]):
        assert requirement.name.lower() not in pinned or requirement.specifier.contains(
            pinned[requirement.name.lower()]
        ), requirement


def test_workflows_and_hooks_are_yaml_that_names_what_is_there() -> None:
    workflows = {path.name: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*.yml")}
    assert sorted(workflows) == ["ci.yml", "newest.yml"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    in_ci = [step.get("run", "") for job in workflows["ci.yml"]["jobs"].values() for step in job["steps"]]
    assert {"make lint", "make test", "make demo", "make test-vllm"} <= set(in_ci)
    for workflow in workflows.values():
        runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
        assert {run.split()[1] for run in runs if run.startswith("make ")} <= targets
        assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    tested = workflows["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python-version"]
    assert tested == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={tested[0]}"
    versions = [name for name in PROJECT["classifiers"] if name.startswith("Programming Language")]
    assert [name.rpartition(" ")[2] for name in versions] == tested
    (hooks,) = (each["hooks"] for each in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"])
    assert [hook["entry"].split()[0] for hook in hooks] == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy"]
    for template in ROOT.glob(".github/ISSUE_TEMPLATE/*.md"):
        assert {"name", "about"} <= set(yaml.safe_load(template.read_text().split("---")[1]))


# -- how large the house may be ----------------------------------------------------------------------------------------

# These only go down. A commit that raises one says why.
RATCHETS = {
    "lines": 58_990,  # models by id, stop strings, trusted and volunteers' workers, solo, records, pages
    "statements": 41_300,  # the same
    "files": 331,
    "files in the fullest folder": 18,  # shoal rollouts has a file of its own
    "names of classes used twice": 0,
    "test lines": 55_280,  # the same
}


def sizes(root: Path = SRC) -> dict[str, int]:
    """How large the sources are, by what `RATCHETS` names; the tests beside them are counted in lines."""
    paths = sorted(root.rglob("*.py"))
    nodes = [node for path in paths for node in ast.walk(parsed(path.read_text()))]
    folders = Counter(path.parent for path in paths if path.name != "__init__.py")
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    tests = (root.parent / "tests").rglob("*.py")
    return {
        "lines": sum(len(path.read_text().splitlines()) for path in paths),
        "statements": sum(isinstance(node, ast.stmt) for node in nodes),
        "files": len(paths),
        "files in the fullest folder": max(folders.values(), default=0),
        "names of classes used twice": sum(count > 1 for count in classes.values()),
        "test lines": sum(len(path.read_text().splitlines()) for path in tests),
    }


def test_the_house_does_not_grow() -> None:
    """Settings and commands have ratchets of their own in tests/unit/cli."""
    found = sizes()
    grown = {name: (found[name], most) for name, most in RATCHETS.items() if found[name] > most}
    assert not grown, f"(found, allowed): {grown}; shrink something else, or raise RATCHETS and say why"


def test_larger_source_is_counted(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.py").write_text("class A:\n    x = 1\n")
    (tmp_path / "src" / "two.py").write_text("class A: ...\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("x = 1\n")
    expected = {"lines": 3, "statements": 4, "files": 2, "files in the fullest folder": 2}
    assert sizes(tmp_path / "src") == {**expected, "names of classes used twice": 1, "test lines": 1}


def sections() -> dict[str, str]:
    """ARCHITECTURE.md by its headings."""
    parts = re.split(r"^## (.*)$", (SRC.parent / "ARCHITECTURE.md").read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("heading", "least"), [("The path of a rollout", 30), ("Where to look", 5)])
def test_architecture_names_functions_that_exist(heading: str, least: int) -> None:
    named = re.findall(r"`([a-z_/]+):([A-Za-z_.]+)`", sections()[heading])
    assert len(named) > least
    for module, function in named:
        found: list[ast.stmt] = parsed(project()[f"shoal.{module.replace('/', '.')}"]).body
        for part in function.split("."):
            inside = [node for node in found if getattr(node, "name", None) == part]
            assert inside, f"{module}:{function}"
            found = getattr(inside[0], "body", [])


def test_architecture_names_modules_and_tests_that_hold_the_invariants() -> None:
    (section,) = (text for heading, text in sections().items() if heading.startswith("Invariants"))
    invariants = [" ".join(text.split()) for text in re.split(r"^\d+\. ", section, flags=re.M)[1:]]
    assert len(invariants) == 13
    for invariant in invariants:
        held, _, shown = invariant.partition("shown by")
        for path in re.findall(r"`([a-z_/]+)(?:\{([a-z_,]+)\})?`", held):
            modules = [path[0] + name for name in path[1].split(",")] if path[1] else [path[0]]
            assert all(f"shoal.{module.replace('/', '.')}" in project() for module in modules), invariant
        tests = re.findall(r"`([a-z0-9_/]+\.py)`", shown)
        assert tests, invariant
        assert all((Path(__file__).parent / test).is_file() for test in tests), invariant


def test_architecture_fits_three_screens() -> None:
    lines = (SRC.parent / "ARCHITECTURE.md").read_text().splitlines()
    assert len(lines) <= 180
    assert max(map(len, lines)) <= 120
