"""Which environments there are, and how one is built from a recipe's [environment] section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from shoal.environments.composed import Composed, is_plain
from shoal.environments.digits import (
    AdditionEnvironment,
    AdditionOptions,
    CalculatorEnvironment,
    CalculatorOptions,
    SortEnvironment,
    SortOptions,
)
from shoal.environments.formats.registry import DatasetOptions
from shoal.environments.function import FunctionEnvironment
from shoal.environments.generated import Options
from shoal.environments.gym import GymEnvironment, GymOptions
from shoal.environments.mix import mixed
from shoal.environments.protocol import Environment, Split
from shoal.environments.settings import EnvironmentSettings, Ingredient
from shoal.errors import EnvironmentSetupError
from shoal.runtime.text import meant

GENERATED = 100_000
"""Tasks that a generating environment trains on, unless told otherwise."""


@dataclass(frozen=True)
class Builtin:
    """A built-in environment: the model of its options, and its constructor."""

    options: type[Options]
    make: Callable[[Options, Ingredient], Environment]


def _sizes(given: Ingredient) -> dict[Split, int]:
    return {"train": given.train_size or GENERATED, "held_out": given.held_out_size}


def _dataset(options: Options, given: Ingredient) -> Environment:
    from shoal.environments.dataset import make_dataset  # reads with pyarrow, which takes a moment to load

    return make_dataset(options, given)


def _gym(options: Options, given: Ingredient) -> Environment:
    assert isinstance(options, GymOptions)
    return GymEnvironment(options, _sizes(given))


ENVIRONMENTS: dict[str, Builtin] = {
    "sort": Builtin(SortOptions, lambda options, given: SortEnvironment(options, _sizes(given))),
    "addition": Builtin(AdditionOptions, lambda options, given: AdditionEnvironment(options, _sizes(given))),
    "calculator": Builtin(CalculatorOptions, lambda options, given: CalculatorEnvironment(options, _sizes(given))),
    "dataset": Builtin(DatasetOptions, _dataset),
    "reasoning-gym": Builtin(GymOptions, _gym),
}


def build(settings: EnvironmentSettings) -> Environment:
    """The environment that the settings describe; what is wrong with them is an `EnvironmentSetupError`."""
    inner = mixed(settings, build_ingredient) if settings.mix else build_ingredient(settings)
    return inner if is_plain(settings) else Composed(inner, settings)


def build_ingredient(settings: Ingredient) -> Environment:
    """The tasks and their scoring, without how they are asked."""
    if settings.file is not None:
        if settings.options:
            raise EnvironmentSetupError("environment.options belong to built-in environments; a file has none")
        return FunctionEnvironment(settings.file, settings.held_out_size)
    builtin = ENVIRONMENTS.get(settings.name)
    if builtin is None:
        raise EnvironmentSetupError(
            f"there is no environment {settings.name!r}{meant(settings.name, ENVIRONMENTS)};"
            f" there are {', '.join(sorted(ENVIRONMENTS))}, or set environment.file"
        )
    if settings.data is not None and settings.name != "dataset":  # or it would train on something else in silence
        raise EnvironmentSetupError(f'environment {settings.name} reads no data: set environment.name = "dataset"')
    return builtin.make(_options(builtin.options, settings), settings)


def _options(model: type[Options], settings: Ingredient) -> Options:
    for key in settings.options:
        if key not in model.model_fields:
            raise EnvironmentSetupError(
                f"environment {settings.name} has no option {key!r}{meant(key, model.model_fields)};"
                f" it has {', '.join(model.model_fields)}"
            )
    try:
        return model.model_validate(settings.options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "options"
        raise EnvironmentSetupError(f"environment {settings.name}: {where}: {first['msg']}") from None
