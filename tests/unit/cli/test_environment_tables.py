"""The tables of [environment]: read from TOML, changed by --set, anchored at the recipe, written back the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.run.recipe import Recipe, load_recipe, missing_inputs, paths_of
from shoal.runtime.config import dump_config, parse_config

EVERYTHING = """
[environment]
train_size = 500
held_out_size = 16
data = "rows"
options = {held_out = "other.jsonl", columns = {question = "q"}, list = [1, 2.5, "x", true, [{deep = "er"}]]}

[[environment.mix]]
name = "dataset"
label = "maths"
weight = 2.5
data = "maths.jsonl"
[environment.mix.options]
held_out = "aime.jsonl"

[[environment.mix]]
file = "reward.py"

[[environment.mix]]
name = "reasoning-gym"
options = {mix = [{generator = "chain_sum", weight = 2.0, settings = {max_terms = 2}}, {generator = "lcm"}]}

[environment.length]
targets = [8, 16]
form = "max"

[environment.prompt]
chat = false
thinking = "<think>\\n"

[[environment.judges]]
label = "taste"
path = "judge"

[[environment.judges]]
label = "word"
url = "http://127.0.0.1:1/v1"
model = "m"

[environment.pools]
retire_after = 3

[environment.scoring]
seconds = 2.5
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "recipe.toml"
    path.parent.mkdir()
    path.write_text(EVERYTHING)
    return path


def test_everything_is_read_and_written_back_the_same(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    assert parse_config(dump_config(loaded), Recipe, "again") == loaded
    assert loaded.environment.options["list"] == [1, 2.5, "x", True, [{"deep": "er"}]]
    assert loaded.environment.length is not None
    assert loaded.environment.length.targets == (8, 16)


def test_paths_are_meant_from_where_the_recipe_lies(recipe: Path) -> None:
    environment, base = load_recipe(recipe).environment, recipe.parent
    assert environment.data == base / "rows"
    assert environment.options["held_out"] == str(base / "other.jsonl")
    assert environment.mix[0].data == base / "maths.jsonl"
    assert environment.mix[0].options == {"held_out": str(base / "aime.jsonl")}
    assert environment.mix[1].file == base / "reward.py"
    assert environment.judges[0].path == base / "judge"
    assert environment.judges[1].path is None


def test_a_restored_run_is_told_what_it_lacks(recipe: Path) -> None:
    loaded, base = load_recipe(recipe), recipe.parent
    names = ["judge", "rows", "other.jsonl", "maths.jsonl", "aime.jsonl", "reward.py"]
    assert paths_of(loaded.environment) == [base / name for name in names]
    (base / "rows").mkdir()
    assert missing_inputs(loaded) == [str(base / name) for name in names if name != "rows"]


def test_overrides_reach_into_tables_and_are_meant_from_here(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changed = load_recipe(recipe, [
        "environment.mix.0.weight=9", "environment.mix.0.data=mine.jsonl", "environment.options.held_out=aside.jsonl",
        "environment.mix.2.options.mix.1.generator=gcd", "environment.judges.0.path=other_judge",
        "environment.length.targets=[4]", "environment.options.depth.of.nesting=3",
    ]).environment  # fmt: skip
    assert changed.mix[0].weight == 9.0
    assert changed.mix[0].data == tmp_path / "mine.jsonl"
    assert changed.options["held_out"] == str(tmp_path / "aside.jsonl")
    assert changed.mix[2].options["mix"][1] == {"generator": "gcd"}
    assert changed.judges[0].path == tmp_path / "other_judge"
    assert changed.length is not None
    assert changed.length.targets == (4,)
    assert changed.options["depth"] == {"of": {"nesting": 3}}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("environment.mix.7.weight=1", "there are 3 of these, numbered from 0; there is no 7"),
        ("environment.mix.first.weight=1", "there is no first"),
        ("environment.mix.0=1", "would be a whole table"),
        ("environment.length.targets.0=1", "targets is a value, not a section"),
        ("environment.mix.0.wieght=1", "did you mean 'weight'"),
        ("environment.mix.0.weight=-1", "greater than 0"),
        ("environment.length.from=max", r"\[environment.length\] has no key 'from'"),
    ],
)
def test_overrides_that_go_nowhere(recipe: Path, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_recipe(recipe, [override])
