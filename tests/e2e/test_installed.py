"""What is published: wheel and source distribution, built here; the wheel in an environment of its own, used from an
empty folder. What shoal needs comes from the environment that runs the tests: nothing is fetched."""

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from kit import Patch, TempPaths
from kit.cli import run_shoal
from kit.run import start_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LOSS = """
def loss(tokens, parameters):
    ratio_N = (tokens.logprobs_N - tokens.behaviour_N).exp()
    return -ratio_N.clamp(max=1 + parameters.epsilon) * tokens.advantages_N
"""
SMALL = (
    "run.steps=1", "run.groups_per_step=4", "trainer.evaluate_every=0", "trainer.minibatches=1",
    "worker.units_per_lease=4", "trainer.loss=loss.py:loss",
)  # fmt: skip


def ran(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: TempPaths) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    ran(sys.executable, "-m", "hatchling", "build", "-d", folder)
    return folder


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: TempPaths) -> Path:
    """The interpreter of a new environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False)
    interpreter, (wheel,) = folder / "bin" / "python", built.glob("*.whl")
    ran(sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", "--no-index", "--no-deps", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Paths in a .pth file come after the folder that it is in, and their own .pth files, such as that of a clone that
    # is installed to be edited, are not read.
    (packages / "needed.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return interpreter


def test_wheel_and_source_distribution_have_recipes_examples_and_types(built: Path) -> None:
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    found = (path for folder in ("recipes", "examples") for path in (ROOT / folder).rglob("*.*"))
    shipped = [str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts]
    assert {"recipes/tiny.toml", "recipes/data/sums.jsonl", "examples/project/reward.py"} <= {*shipped}
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"shoal/{name}" for name in (*shipped, "py.typed")} <= {*names}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"shoal", "shoal_rl"}
    with tarfile.open(archive) as packed:
        files = {name.partition("/")[2] for name in packed.getnames()}
    assert {*shipped, "src/shoal/py.typed", "pyproject.toml", "Makefile", "tests/conftest.py"} <= files


def test_first_steps_from_an_empty_folder(python: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(tmp_path)

    def shoal(*arguments: str) -> str:
        done = run_shoal(tmp_path, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = ran(python, "-c", "import os; os.chdir('/'); import shoal; print(shoal.__file__)")
    assert Path(where).is_relative_to(python.parents[1])
    assert "shoal init mine" in ran(python.with_name("shoal"), "--help")
    assert "intellect2" in shoal("init"), "the recipes"
    assert "runs/tiny is ready" in shoal("run", "tiny", "--prepare")
    assert (tmp_path / "runs" / "tiny" / "recipe.toml").is_file()

    assert "wrote mine/reward.py" in shoal("init", "mine")
    (tmp_path / "loss.py").write_text(LOSS)
    settings = [part for setting in SMALL for part in ("--set", setting)]
    assert "runs/mine is ready" in shoal("run", "mine/mine.toml", "--prepare", *settings)
    with start_run(tmp_path / "runs" / "mine", recipe=None, env={"OMP_NUM_THREADS": "1"}) as run:
        assert run.wait() == 0, run.said()
    shoal("export", "mine", "models/mine")
    assert {"model.safetensors", "config.json", "README.md"} <= {
        path.name for path in (tmp_path / "models" / "mine").iterdir()
    }
