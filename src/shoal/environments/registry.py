"""The list of environments, and how one is built from a recipe's [environment] section."""

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from shoal.environments import generated
from shoal.environments.formats import DatasetOptions
from shoal.environments.function import FunctionEnvironment
from shoal.environments.gym import GymEnvironment, GymOptions
from shoal.environments.mix import mixed
from shoal.environments.protocol import Environment, Split
from shoal.environments.settings import Composed, EnvironmentSettings, Table, TaskSource, is_plain
from shoal.errors import EnvironmentSetupError
from shoal.runtime.extensions import check_word, file_of, resolve, unpinned
from shoal.runtime.text import meant

GENERATED = 100_000  # default number of training tasks of a generating environment


def _dataset(options: DatasetOptions, given: TaskSource) -> Environment:
    from shoal.environments.dataset import DatasetEnvironment  # reads with pyarrow, which takes a moment to load

    if given.data is None:
        raise EnvironmentSetupError("environment dataset needs data: a Parquet or JSON lines file, or a folder of them")
    return DatasetEnvironment(options, given.data, given.held_out_size)


def _generating(make: Callable[[Any, dict[Split, int]], Environment]) -> Callable[[Any, TaskSource], Environment]:
    return lambda values, given: make(values, {"train": given.train_size or GENERATED, "held_out": given.held_out_size})


# name → the model of its options, and the function that builds it
ENVIRONMENTS: dict[str, tuple[type[Table], Callable[[Any, TaskSource], Environment]]] = {
    "sort": (generated.SortOptions, _generating(generated.SortEnvironment)),
    "addition": (generated.AdditionOptions, _generating(generated.AdditionEnvironment)),
    "calculator": (generated.CalculatorOptions, _generating(generated.CalculatorEnvironment)),
    "reasoning-gym": (GymOptions, _generating(GymEnvironment)),
    "dataset": (DatasetOptions, _dataset),
}


def build(settings: EnvironmentSettings) -> Environment:
    inner = mixed(settings, build_ingredient) if settings.mix else build_ingredient(settings)
    return inner if is_plain(settings) else Composed(inner, settings)


def build_ingredient(settings: TaskSource) -> Environment:
    if settings.file is not None:
        if settings.options:
            remedy = "leave them out (--set environment.options= takes away those of a recipe)"
            raise EnvironmentSetupError(f"environment.options are of built-in environments, a file has none: {remedy}")
        return FunctionEnvironment(settings.file, settings.held_out_size, settings.data)
    name, known = settings.name, ", ".join(sorted(ENVIRONMENTS))
    if settings.name not in ENVIRONMENTS:
        try:
            return _own(settings, resolve("environment.name", "environment", check_word("environment", name, ())))
        except ValueError:
            own = "or your own: FILE.py:NAME, or an entry point of the group shoal.environments"
            what = f"there is no environment {name!r}{meant(name, ENVIRONMENTS)}: {known}; {own}"
            raise EnvironmentSetupError(what) from None
    if settings.data is not None and settings.name != "dataset":
        raise EnvironmentSetupError(f'environment {settings.name} reads no data: set environment.name = "dataset"')
    model, make = ENVIRONMENTS[settings.name]
    fields = model.model_fields
    for key in settings.options:
        if key not in fields:
            raise EnvironmentSetupError(f"{name} has no option {key!r}{meant(key, fields)}; it has {', '.join(fields)}")
    try:
        options = model.model_validate(settings.options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "options"
        problem = first["msg"].removeprefix("Value error, ")
        raise EnvironmentSetupError(f"environment {settings.name}: {where}: {problem}") from None
    return make(options, settings)


def _own(settings: TaskSource, make: Callable[..., Any]) -> Environment:
    """The owner's own environment: called with its options, and with data and sizes where the recipe sets them."""
    fields, name = TaskSource.model_fields, unpinned(settings.name)
    values = {key: getattr(settings, key) for key in ("data", "train_size", "held_out_size")}
    given = {key: value for key, value in values.items() if value != fields[key].default}
    try:
        made = make(**settings.options, **given)
    except EnvironmentSetupError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentSetupError(f"environment.name: {name} raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Environment):
        lacks = "has not all of name, digest, tasks(split), task(id) and score(task, completion)"
        raise EnvironmentSetupError(f"environment.name: what {name} gives {lacks}")
    return made


def runs_own_code(settings: EnvironmentSettings) -> bool:
    """Whether scoring runs code of the owner's, which may hang."""
    return any(
        part.file is not None
        or part.name not in ENVIRONMENTS
        or file_of(str(part.options.get("grader", ""))) is not None
        for part in (settings, *settings.mix)
    )
