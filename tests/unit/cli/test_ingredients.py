"""What cannot work is said before anything is made or started, in one line, with exit code 2."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli.ingredients import check_ingredients
from shoal.cli.recipe import Recipe
from shoal.errors import ModelError, UserError
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


def with_model(folder: Path) -> Recipe:
    return Recipe.model_validate({"model": {"path": str(folder)}})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(model_folder("tiny"), tmp_path / "model"))


def packed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _whole: b"", "its 0 bytes hold no whole header"),
    "cut in the length": (lambda whole: whole[:5], "its 5 bytes hold no whole header"),
    "cut in the header": (lambda whole: whole[:40], "its 40 bytes hold no whole header"),
    "cut in the weights": (lambda whole: whole[:-1], r"it should hold \d+ bytes of weights and holds \d+"),
    "too long": (lambda whole: whole + b"0", r"it should hold \d+ bytes of weights and holds \d+"),
    "a pointer of git-lfs": (lambda _whole: b"version https://git-lfs.github.com/spec/v1\n", "no whole header"),
    "no JSON": (lambda _whole: packed(b"{nonsense"), "its header cannot be read"),
    "no table": (lambda _whole: packed([1, 2]), "its header cannot be read"),
    "a tensor without a place": (lambda _whole: packed({"a": {"dtype": "F32"}}), "its header cannot be read"),
    "a tensor backwards": (lambda _whole: packed({"a": {"data_offsets": [4, 0]}}), "ends before it begins"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights(model: Path, damage: str) -> None:
    change, sentence = DAMAGE[damage]
    file = model / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelError, match=sentence) as refusal:
        check_ingredients(with_model(model))
    assert str(file) in str(refusal.value)
    assert "download it again" in str(refusal.value)


def test_one_file_of_several_that_is_missing(model: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"names model-00001-of-00002\.safetensors, which is not there"):
        check_ingredients(with_model(model))
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="is no list of weight files"):
        check_ingredients(with_model(model))


def test_a_tokenizer_that_knows_more_tokens_than_the_model(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 5}))
    with pytest.raises(
        ModelError, match=r"knows \d+ tokens, but the model has embeddings for 5: use the tokenizer that"
    ):
        check_ingredients(with_model(model))


def test_an_end_of_sequence_token_that_the_model_cannot_say(model: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**content, "eos_token_id": 10**6}))
    with pytest.raises(ModelError, match="is 1000000, beyond the"):
        check_ingredients(with_model(model))
