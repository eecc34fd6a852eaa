"""The files under deploy/: their programs take them, and what they name exists in shoal."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.cli import mistake
from kit.deploy import DEPLOY, compose, nginx_in_front
from kit.fork import free_port
from kit.hub import Bench, ok

ROOT = DEPLOY.parent
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.name != ".env")
UNITS, ALERTS = sorted((DEPLOY / "systemd").iterdir()), DEPLOY / "prometheus" / "alerts.yml"
NOT_OURS = re.compile(r"up|node_\w+|shoal:\w+")  # of Prometheus, of node_exporter, recorded by alerts.yml itself
MEASURED = {"shoal_hub_held_out_score"}  # once a version is: tests/unit/hub/test_hub_evaluations.py
RAISED = re.compile(r'(?:\balarm|RaiseAlarm)\(\s*[\w.]+, \*?(?:f?"(\w+)|([\w.]+))')
RAISED_BY_NAME = {
    "NO_TASK": "tasks", "EXHAUSTED": "pools", "reputation.STEERED": "sampling", "alarm": "calibration",
    "code": "guard", "f": "canary", "str": "",
}  # fmt: skip


def documents(path: Path) -> list[Any]:
    return [json.loads(path.read_text())] if path.suffix == ".json" else list(yaml.safe_load_all(path.read_text()))


def test_yaml_and_json_parse() -> None:
    read = [path for path in FILES if path.suffix in (".yaml", ".yml", ".json")]
    assert len(read) > 12
    assert all(all(documents(path)) for path in read)


def containers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pod and container of all that Kubernetes starts."""
    found = [each for path in (DEPLOY / "kubernetes").rglob("*.yaml") for each in documents(path)]
    pods = [each["spec"]["template"]["spec"] for each in found if each["kind"] == "StatefulSet"]
    return [(pod, each) for pod in pods for each in [*pod.get("initContainers", ()), *pod["containers"]]]


def own_services() -> dict[str, dict[str, Any]]:
    return {name: each for name, each in compose({})["services"].items() if each["image"].startswith("shoal:")}


def commands() -> Iterator[str]:
    """What compose, Kubernetes and systemd start, and what a comment or an alert says to a person."""
    for service in own_services().values():
        shell = "\n".join(service["command"]).replace("\\\n", " ").splitlines()
        plain = "entrypoint" not in service
        yield from [shlex.join(["shoal", *service["command"]])] if plain else [x for x in shell if x[:6] == "shoal "]
    yield from (shlex.join(["shoal", *each["args"]]) for _, each in containers() if "args" in each)
    for path in FILES:
        yield from re.findall(r"^ExecStart=/opt/shoal/bin/(.*)$", path.read_text(), re.M)
        yield from re.findall(r"`(shoal [^`]+)`", path.read_text())


def test_commands_exist_with_their_options() -> None:
    found = list(commands())
    assert {shown.split()[1] for shown in found} >= {"hub", "relay", "trainer", "validator", "join", "run", "admin"}
    assert len(found) > len(UNITS) + 20
    assert [wrong for shown in found if (wrong := mistake(shown))] == []


def expressions() -> list[str]:
    rules = [rule["expr"] for group in documents(ALERTS)[0]["groups"] for rule in group["rules"]]
    [board] = documents(DEPLOY / "grafana" / "shoal.json")
    return rules + [each["expr"] for panel in board["panels"] for each in panel["targets"]]


def test_metrics_and_states_of_alerts_and_dashboard_exist(tmp_path: Path) -> None:
    named, states = set[str](), set[str]()
    with closing(Bench(tmp_path)) as bench:
        assert bench.http.post("/leases").status_code == 401
        text = ok(bench.http.get("/metrics")).text
    for expr in expressions():
        plain = re.sub(r"\{[^}]*\}|\[\w+\]", "", expr)
        named |= set(re.findall(r"\b(?:shoal[_:]|process_|node_|up\b)\w*", plain))
        for metric, said in re.findall(r'(shoal_hub_(?:units|submissions))\{[^}]*state[!=~]+"([^"]*)"', expr):
            states |= {f'{metric}{{state="{state}"}} 0.0' for state in said.replace(".*", "_stale").split("|")}
        for said in re.findall(r'shoal_hub_nodes\{([^}]*)"', expr):
            words = set(re.findall(r'(?:role|state|presence)="(\w+)', said))
            assert words <= {"trainer", "validator", "worker", "active", "here"}, expr
    assert len(named) > 30
    assert len(states) > 5
    known = set(re.findall(r"^(?:# HELP )?(\w+)", text, re.M)) | MEASURED
    assert sorted(name for name in named - known if not NOT_OURS.fullmatch(name)) == []
    assert sorted(state for state in states if state not in text) == []


def test_every_alarm_of_the_hub_has_one_rule_of_its_own() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src/shoal/hub").rglob("*.py"))
    subjects = {constant or RAISED_BY_NAME[name] for constant, name in RAISED.findall(sources)} - {""}
    subjects |= set(re.findall(r'found\["(\w+)"\]', sources))
    assert subjects >= {"canary", "scoring", "guard", "calibration", "kind", "verdict", "trusted", "unit", "refill"}
    matchers = re.findall(r'shoal:new_alarms\{about(!?)[=~]+"([^"]+)"', "\n".join(expressions()))
    [others] = [pattern for negated, pattern in matchers if negated]
    own = [pattern for negated, pattern in matchers if not negated]
    assert {each: sum(bool(re.fullmatch(one, each)) for one in own) for each in subjects} == dict.fromkeys(subjects, 1)
    assert [each for each in subjects if not re.fullmatch(others, each)] == [], "they would be said twice"


@pytest.mark.parametrize("what", ["nginx -t", "promtool", "kubectl trusted", "kubectl relays", "kubectl workers"])
def test_programs_take_their_files(tmp_path: Path, what: str) -> None:
    program, _, part = what.partition(" ")
    if program == "nginx":
        command = [*nginx_in_front(tmp_path, free_port(), free_port())[0], part]
    elif shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    elif program == "kubectl":
        command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / part)]
    else:
        command = ["promtool", "check", "rules", str(ALERTS)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    images = {"shoal:hub", "shoal:relay", "shoal:trainer", "shoal:worker"}
    assert set(re.findall(r"image: (\S+)", checked.stdout)) <= images


def test_systemd_takes_the_units_and_finds_them_closed(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for path in UNITS:
        (tmp_path / path.name).write_text(path.read_text().replace("/opt/shoal/bin/shoal", str(shutil.which("true"))))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *map(str, tmp_path.iterdir())]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    assert str(tmp_path) not in said, said
    for copy in tmp_path.iterdir():  # in tenths: 0 is closed, 96 a unit without directives
        rated = ["systemd-analyze", "security", "--offline=true", "--threshold=35", str(copy)]
        assert subprocess.run(rated, capture_output=True).returncode == 0, copy.name


def test_nothing_runs_as_root_writes_to_its_image_or_holds_a_secret() -> None:
    closed = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    for pod, each in containers():
        assert (each["securityContext"], pod["securityContext"]["runAsNonRoot"]) == (closed, True)
    assert {(each["read_only"], *each["cap_drop"]) for each in own_services().values()} == {(True, "ALL")}
    _, _wheel, *stages = re.split(r"^FROM ", (DEPLOY / "Containerfile").read_text(), flags=re.M)
    assert [re.findall(r"^USER (\S+)", stage, re.M)[-1] for stage in stages] == ["10001:10001"] * 4
    given = dict(re.findall(r"^(\w+)=(\S*)", (DEPLOY / "env.example").read_text(), re.M))
    assert [name for name in given if re.search("PASSWORD|SECRET", name) and given[name]] == []
    assert set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text())) == set(given)


def test_sdist_holds_the_kit_and_what_the_image_copies_makes_the_wheel(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), "-t"]
    subprocess.run([*build, "sdist"], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as packed:
        packed.extractall(tmp_path, filter="data")
    [sources] = tmp_path.glob("shoal_rl-*/")
    assert [path for path in FILES if not (sources / path.relative_to(ROOT)).is_file()] == []
    text, context = (DEPLOY / "Containerfile").read_text(), tmp_path / "context"
    copied = [name for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.M) for name in line.split()]
    assert set(copied) == set(re.findall(r"^!(.*)$", (DEPLOY / "Containerfile.dockerignore").read_text(), re.M))
    for name in copied:
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).rename(context / name)
    subprocess.run([*build, "wheel"], cwd=context, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert "shoal/recipes/tiny.toml" in wheel.namelist()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra for found in re.findall(r"whl\)\[([\w,]+)\]", text) for extra in found.split(",")} <= set(extras)
