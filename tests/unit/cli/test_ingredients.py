"""What cannot work is said before anything is made or started, in one line, with exit code 2."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shoal.cli.ingredients import check_ingredients
from shoal.cli.recipe import Recipe
from shoal.errors import UserError
from shoal.models import model_folder

SCORE = "\ndef score(prompt, completion, answer):\n    return 1.0\n"


def reward_file(folder: Path, source: str) -> Recipe:
    file = folder / "reward.py"
    file.write_text(source)
    return Recipe.model_validate({"environment": {"file": str(file)}}, strict=False)


def test_the_defaults_are_fine() -> None:
    check_ingredients(Recipe())


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("tasks = [('', '1'), ('1=', '1')]" + SCORE, "has no tokens"),
        ("tasks = [('héllo', '1'), ('1=', '1')]" + SCORE, "does not know"),
        ("tasks = [('1' * 100000, '1'), ('1=', '1')]" + SCORE, "the model has room for"),
        ("tasks = [('1=', '1'), ('2=', '2')]\ndef score(task, completion):\n    return task['answer']", "TypeError"),
        ("tasks = [('1=', '1'), ('2=', '2')]\ndef score(task, completion):\n    raise SystemExit(7)", "SystemExit"),
        ("import sys\nsys.exit(7)" + SCORE, "does not load"),
    ],
)
def test_an_environment_that_cannot_work(tmp_path: Path, source: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as refusal:
        check_ingredients(reward_file(tmp_path, source))
    assert "\n" not in str(refusal.value)


def test_an_engine_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="there is no such engine; there are scripted, torch"):
        check_ingredients(Recipe.model_validate({"worker": {"engine": "torhc"}}))


def test_a_model_folder_without_weights(tmp_path: Path) -> None:
    shutil.copytree(model_folder("tiny"), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UserError, match=r"has no \*\.safetensors file"):
        check_ingredients(Recipe.model_validate({"model": {"path": str(tmp_path / "model")}}))
