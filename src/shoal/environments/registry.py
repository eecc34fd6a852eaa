"""Which environments there are, and how one is built from a recipe's [environment] section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.environments.addition import AdditionEnvironment, AdditionOptions
from shoal.environments.function import FunctionEnvironment
from shoal.environments.generated import Options
from shoal.environments.protocol import Environment, Split
from shoal.environments.sort import SortEnvironment, SortOptions
from shoal.errors import EnvironmentSetupError


class EnvironmentSettings(BaseModel):
    """The [environment] section: a built-in `name` with its `options`, or a Python `file` of your own.

    `shuffle_rewards` is the control experiment: the validator then permutes the rewards within each group, and a run
    that still "improves" was not learning from them. It is no part of the environment's digest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="sort", description="a built-in environment")
    file: Path | None = Field(default=None, description="a Python file with tasks and score(), instead of a name")
    options: dict[str, int | float | bool | str] = Field(
        default_factory=dict, description="of the built-in environment; an unknown one is refused with the known ones"
    )
    train_size: int = Field(default=100_000, ge=1, description="tasks that a generating environment trains on")
    held_out_size: int = Field(default=256, ge=1, description="tasks that are never trained on, for evaluation")
    shuffle_rewards: bool = Field(default=False, description="the control: rewards permuted within each group")


@dataclass(frozen=True)
class Builtin:
    """A built-in environment: the model of its options, and its constructor."""

    options: type[Options]
    make: Callable[[Options, dict[Split, int]], Environment]


ENVIRONMENTS: dict[str, Builtin] = {
    "sort": Builtin(SortOptions, SortEnvironment),
    "addition": Builtin(AdditionOptions, AdditionEnvironment),
}


def build(settings: EnvironmentSettings) -> Environment:
    """The environment that the settings describe; what is wrong with them is an `EnvironmentSetupError`."""
    if settings.file is not None:
        if settings.options:
            raise EnvironmentSetupError("environment.options belong to built-in environments; a file has none")
        return FunctionEnvironment(settings.file, settings.held_out_size)
    builtin = ENVIRONMENTS.get(settings.name)
    if builtin is None:
        raise EnvironmentSetupError(
            f"there is no environment {settings.name!r}{_suggest(settings.name, ENVIRONMENTS)};"
            f" there are {', '.join(sorted(ENVIRONMENTS))}, or set environment.file"
        )
    sizes: dict[Split, int] = {"train": settings.train_size, "held_out": settings.held_out_size}
    return builtin.make(_options(builtin.options, settings), sizes)


def _options(model: type[Options], settings: EnvironmentSettings) -> Options:
    for key in settings.options:
        if key not in model.model_fields:
            raise EnvironmentSetupError(
                f"environment {settings.name} has no option {key!r}{_suggest(key, model.model_fields)};"
                f" it has {', '.join(model.model_fields)}"
            )
    try:
        return model.model_validate(settings.options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "options"
        raise EnvironmentSetupError(f"environment {settings.name}: {where}: {first['msg']}") from None


def _suggest(word: str, known: object) -> str:
    close = get_close_matches(word, list(known), n=1)  # type: ignore[call-overload]
    return f" (did you mean {close[0]!r}?)" if close else ""
