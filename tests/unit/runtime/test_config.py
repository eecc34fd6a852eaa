"""Recipes: what loads, what is refused and in which words, and that a dumped model loads to itself."""

import contextlib
import os
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from shoal.errors import ConfigError
from shoal.runtime.config import dump_config, load_config, parse_config


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Trainer(Section):
    learning_rate: float = Field(default=1e-4, gt=0)
    minibatches: int = Field(default=4, ge=1)
    loss: Literal["clip", "cispo"] = "clip"
    compile: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    resume: Path | None = None

    @model_validator(mode="after")
    def _no_compiled_cispo(self) -> "Trainer":
        if self.compile and self.loss == "cispo":
            raise ValueError("cispo cannot be compiled; set compile = false")
        return self


class Environment(Section):
    name: str = "sort"
    options: dict[str, int | float | bool | str] = Field(default_factory=dict)
    words: list[str] = Field(default_factory=list)


class Recipe(Section):
    trainer: Trainer = Trainer()
    environment: Environment = Environment()


def refused(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, Recipe, "recipe.toml", overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


@pytest.mark.parametrize(("text", "overrides", "expected"), [
    ("[trainer]\nlearning_rat = 1", (), "[trainer] has no key 'learning_rat'; did you mean 'learning_rate'?"),
    ("[environment]\nzzz = 1", (), "[environment] has no key 'zzz'; it may have: name, options, words"),
    ("[trainr]\nx = 1", (), "there is no section [trainr]; did you mean [trainer]?"),
    ("[trainer]\nlearning_rate = -1", (), "[trainer] learning_rate = -1: input should be greater than 0"),
    ("[trainer]\nminibatches = '4'", (), '[trainer] minibatches = "4": input should be a valid integer'),
    ("[trainer]\nminibatches = true", (), "[trainer] minibatches = true: input should be a valid integer"),
    ("[trainer]\nminibatches = 1.5", (), "[trainer] minibatches = 1.5: input should be a valid integer"),
    ("[trainer]\nloss = 'klip'", (), "[trainer] loss = \"klip\": input should be 'clip' or 'cispo'"),
    ("[trainer]\nbetas = [1]", (), "[trainer] betas.1 is missing"),
    ("[environment]\nwords = 'sun'", (), '[environment] words = "sun": a list is wanted, such as ["sun"]'),
    ("trainer = 3", (), "[trainer] = 3: input should be"),
    ("[trainer]\nlearning_rate = = 3", (), "not valid TOML: invalid value (at line 2"),
    ("[trainer]\ncompile = true\nloss = 'cispo'", (), "[trainer]: cispo cannot be compiled; set compile = false"),
    ("", ("trainer.minibatches=many",), '[trainer] minibatches = "many": input should be'),
    ("", ("trainer.minibatch=2",), "[trainer] has no key 'minibatch'; did you mean 'minibatches'?"),
    ("[trainer]\nminibatches = 4", ("trainer.minibatches.x=1",), "minibatches is a value, not a section"),
    ("", ("trainer.minibatches=",), "nothing sets it"),
    ("[trainer]\nminibatches = 2", ("trainer.minibatchs=",), "nothing sets it"),
    *(("", (bad,), "expected section.key=value") for bad in ("", "steps", "steps=3", "run.=3", ".s=3", "a..s=1")),
])  # fmt: skip
def test_a_mistake_is_named_with_where_it_is_and_what_is_allowed(text, overrides, expected):
    where = f"--set {overrides[0]}" if overrides else "recipe.toml"  # an override is blamed, not the file
    assert refused(text, *overrides).startswith(f"{where}: {expected}")


def test_values_and_overrides_are_read_with_their_types() -> None:
    text = "[trainer]\nlearning_rate = 3e-4\nbetas = [0.5, 1]\nresume = 'a/b'\n[environment.options]\ndigits = 8"
    recipe = parse_config(
        text, Recipe, "recipe.toml", ["trainer.minibatches=2", "trainer.minibatches=3", "environment.options.easy=true"]
    )
    assert recipe.trainer == Trainer(learning_rate=3e-4, betas=(0.5, 1.0), resume=Path("a/b"), minibatches=3)
    assert recipe.environment.options == {"digits": 8, "easy": True}
    unset = ["environment.options.digits=", "trainer.betas= ", "environment.name=''"]
    recipe = parse_config(text, Recipe, "recipe.toml", unset)
    assert (recipe.environment.options, recipe.trainer.betas, recipe.environment.name) == ({}, Trainer().betas, "")
    assert parse_config(text, Recipe, "recipe.toml", ["environment.options="]).environment == Environment()
    none = ["environment.options.digits=none", "environment.options.rest=none", "trainer.resume=none"]
    recipe = parse_config(text, Recipe, "recipe.toml", none)
    assert (recipe.environment.options, recipe.trainer.resume) == ({}, None)
    assert parse_config("", Recipe, "r", ["environment.name='none'"]).environment.name == "none"
    assert refused(text, "trainer.minibatches=none").startswith("--set trainer.minibatches=none: it must have a value")
    assert "did you mean 'minibatches'?" in refused(text, "trainer.minibatchs=none")


def test_an_override_that_is_not_toml_is_a_string() -> None:
    recipe = parse_config("", Recipe, "r", ["environment.name=my task", "environment.words=['a', 'b']"])
    assert recipe.environment == Environment(name="my task", words=["a", "b"])
    assert parse_config("", Recipe, "r", ["environment.name=a=b"]).environment.name == "a=b"
    assert parse_config("[environment]\nname = 1979-05-27", Recipe, "r").environment.name == "1979-05-27"
    assert parse_config("", Recipe, "r") == Recipe()
    assert parse_config("", Recipe, "r", ["environment.name=1\nwords=2"]).environment.name == "1\nwords=2"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no recipe at .*none\.toml"):
        load_config(tmp_path / "none.toml", Recipe)
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path, Recipe)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match=r"binary.toml: not valid TOML: byte 8"):
        load_config(binary, Recipe)
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * 1_000_001)
    with pytest.raises(ConfigError, match="that is no recipe"):
        load_config(huge, Recipe)


def test_a_dump_is_toml_a_person_would_write() -> None:
    recipe = Recipe(environment=Environment(options={"digits": 8, "a b": "c"}, words=["x\ny"]))
    assert dump_config(recipe) == (
        '[trainer]\nlearning_rate = 0.0001\nminibatches = 4\nloss = "clip"\ncompile = false\nbetas = [0.9, 0.95]\n'
        '\n[environment]\nname = "sort"\nwords = ["x\\ny"]\n\n[environment.options]\ndigits = 8\n"a b" = "c"\n'
    )


class Anything(Section):
    """Every type a setting may have."""

    text: str = ""
    number: float = 0.0
    whole: int = 0
    flag: bool = False
    maybe: int | None = None
    numbers: tuple[float, ...] = ()
    names: list[str] = Field(default_factory=list)
    rows: list[dict[str, int]] = Field(default_factory=list)
    table: dict[str, str | bool] = Field(default_factory=dict)


class Nested(Section):
    top: int = 1
    one: Anything = Anything()
    two: Anything = Anything()


texts = st.text(st.characters(blacklist_categories=("Cs",)), max_size=20)
anything = st.builds(
    Anything, text=texts, number=st.floats(allow_nan=False), whole=st.integers(-(2**63), 2**63 - 1),
    flag=st.booleans(), maybe=st.none() | st.integers(-5, 5),
    numbers=st.lists(st.floats(allow_nan=False), max_size=3).map(tuple), names=st.lists(texts, max_size=3),
    rows=st.lists(st.dictionaries(texts, st.integers(-9, 9), max_size=2), max_size=2),
    table=st.dictionaries(texts, texts | st.booleans(), max_size=3),
)  # fmt: skip


@given(st.builds(Nested, top=st.integers(0, 9), one=anything, two=anything))
def test_dumped_config_loads_to_the_same_model(model: Nested) -> None:
    assert parse_config(dump_config(model), Nested, "dump") == model


@given(st.text(max_size=60))
def test_no_text_raises_anything_but_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_config(text, Recipe, "r")
    with contextlib.suppress(ConfigError):
        parse_config("", Recipe, "r", [text])


def test_a_pipe_is_not_waited_for_and_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match="is not a regular file"):
        load_config(tmp_path / "pipe.toml", Recipe)
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf[trainer]\nminibatches = 3\n")
    assert load_config(tmp_path / "marked.toml", Recipe).trainer.minibatches == 3
