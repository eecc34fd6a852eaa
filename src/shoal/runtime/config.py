"""A recipe: TOML in, a typed model out, and back. Every mistake is one line that says where it is and what is allowed.

    recipe.toml ─┐
                 ├─► plain tables ─► strict validation ─► model ─► dump_config ─► TOML that loads to the same model
    --set a.b=c ─┘

Validation is strict (`steps = "20"` is a mistake); all models must forbid unknown keys.
"""

import contextlib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shoal.errors import ConfigError

M = TypeVar("M", bound=BaseModel)
Tables = dict[str, Any]
Keys = tuple[str, ...]

MAX_RECIPE_BYTES = 1_000_000
NONE = "none"
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # of models, and of dataclasses


def load_config(path: Path, kind: type[M], overrides: Sequence[str] = ()) -> M:
    """The model in the TOML file at `path`, with `section.key=value` overrides applied in order."""
    try:
        if path.exists() and not path.is_file():
            what = "a folder" if path.is_dir() else "not a regular file"  # a pipe would wait
            raise ConfigError(f"{path} is {what}; give the path of a recipe file")
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
        if len(data) > MAX_RECIPE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_RECIPE_BYTES} bytes: that is no recipe")
        text = data.decode("utf-8-sig")  # some editors put a byte order mark in front
    except FileNotFoundError as error:
        raise ConfigError(f"there is no recipe at {path} (shoal init lists those that come with shoal)") from error
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name}: not valid TOML: byte {error.start} is not UTF-8") from error
    return parse_config(text, kind, path.name, overrides)


def parse_config(text: str, kind: type[M], source: str, overrides: Sequence[str] = ()) -> M:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {_lower(str(error))}") from error
    overridden = {_apply(tables, override): override for override in overrides}
    try:
        model = kind.model_validate_json(json.dumps(tables, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors()[0], kind, source, overridden)) from error
    for keys, override in overridden.items():
        if override.partition("=")[2].strip() == NONE:
            _require_none(model, keys, override)
    return model


def dump_config(model: BaseModel) -> str:
    """TOML that loads to an equal model. None is left out, so it must be the default of its key."""
    tables = model.model_dump(mode="json", exclude_none=True)
    return "\n".join(_table_lines((), tables)).strip() + "\n"


def _require_none(model: Any, keys: Keys, override: str) -> None:
    kind = type(model)
    for index, key in enumerate(keys):
        if isinstance(model, Mapping) or model is None:
            return
        if isinstance(model, BaseModel) and key not in type(model).model_fields:
            raise ConfigError(f"--set {override}: {_unknown(keys[: index + 1], kind)}")
        model = model[int(key)] if isinstance(model, tuple) else getattr(model, key)
    if model is not None:
        raise ConfigError(
            f"--set {override}: it must have a value; without one from the recipe it is {_inline(model)} "
            f"(--set {'.'.join(keys)}= takes the recipe's away)"
        )


def _apply(tables: Tables, override: str) -> Keys:
    name, equals, text = override.partition("=")
    keys = tuple(part.strip() for part in name.split("."))
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"--set {override}: expected section.key=value, for example --set run.steps=10")
    table: Any = tables
    unset = (value := text.strip()) in ("", NONE)
    for key in keys[:-1]:
        if isinstance(table, list):  # several tables, numbered from 0
            if not (key.isascii() and key.isdecimal() and int(key) < len(table)):
                raise ConfigError(f"--set {override}: give a number from 0 to {len(table) - 1} in place of {key}")
            table = table[int(key)]
        else:
            table = table.get(key, {}) if unset else table.setdefault(key, {})
        several = isinstance(table, list) and table and all(isinstance(one, dict) for one in table)
        if not isinstance(table, dict) and not several:
            raise ConfigError(f"--set {override}: {key} is a value, not a section")
    if isinstance(table, list):
        raise ConfigError(f"--set {override}: {keys[-1]} would be a whole table; name one of its keys")
    if unset:
        if table.pop(keys[-1], None) is None and not value:
            raise ConfigError(f'--set {override}: nothing sets it, so it cannot be unset (an empty text is "")')
        return keys
    table[keys[-1]] = value  # a value that is not TOML is a string without quotes
    with contextlib.suppress(tomllib.TOMLDecodeError):
        parsed = tomllib.loads(f"value = {value}")
        table[keys[-1]] = parsed["value"] if len(parsed) == 1 else value  # more than one key: a line break
    return keys


def _sentence(problem: ErrorDetails, kind: type[BaseModel], source: str, overridden: Mapping[Keys, str]) -> str:
    keys, given = tuple(str(part) for part in problem["loc"]), problem["input"]
    unknown = problem["type"] in UNKNOWN  # an override may have more parts than the key
    blamed = (
        text for path, text in overridden.items() if keys[: len(path)] == (path[: len(keys)] if unknown else path)
    )
    where = next((f"--set {text}" for text in blamed), source)
    label = f"[{keys[0]}] {'.'.join(keys[1:])}".strip() if keys else ""
    if unknown:
        return f"{where}: {_unknown(keys, kind)}"
    if problem["type"] == "missing":
        return f"{where}: {label} is missing"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    shown = _inline(given) if len(_inline(given)) <= 80 else f"{_inline(given)[:77]}…"
    if problem["type"] in ("list_type", "tuple_type") and isinstance(given, str | int | float):
        message = f"a list is wanted, such as [{shown}]"
    if not keys:
        return f"{where}: {_lower(message)}"
    # The values of a whole section would make the message too long.
    return f"{where}: {label}{'' if isinstance(given, Mapping) else f' = {shown}'}: {_lower(message)}"


def _unknown(keys: Keys, kind: type[BaseModel]) -> str:
    fields: Mapping[str, Any] = kind.model_fields
    for field in (part for part in keys[:-1] if not part.isdecimal()):  # numbers: of several tables in a list
        annotation = getattr(fields.get(field), "annotation", None)
        inner = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type)]
        known_by = (vars(each).get("__dataclass_fields__") or getattr(each, "model_fields", None) for each in inner)
        fields = next(filter(None, known_by), fields)
    key, known = keys[-1], list(fields)
    near = get_close_matches(key, known, n=1, cutoff=0.6)
    section = len(keys) == 1
    subject = f"there is no section [{key}]" if section else f"[{'.'.join(keys[:-1])}] has no key {key!r}"
    if near:
        return f"{subject}; did you mean {f'[{near[0]}]' if section else repr(near[0])}?"
    return f"{subject}; it may have: {', '.join(known)}" if known else subject


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _table_lines(path: Keys, table: Mapping[str, Any]) -> Iterator[str]:
    """The lines of one table. Plain keys come first: in TOML what follows a sub-table belongs to that."""
    if path:
        yield f"\n[{'.'.join(_key(part) for part in path)}]"
    yield from (f"{_key(key)} = {_inline(value)}" for key, value in table.items() if not isinstance(value, dict))
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _table_lines((*path, key), value)


def _inline(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_inline(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_inline(item)}" for key, item in value.items()) + "}"
    plain = value if isinstance(value, bool | int | float) else str(value)
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's strings and numbers are TOML's


def _key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _inline(key)
