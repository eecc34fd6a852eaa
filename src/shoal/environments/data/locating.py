"""The files of a data set, in order: one file, or a folder of shards.

FILE.parquet | FILE.jsonl
FOLDER/…                                   shards of one kind, by name
FOLDER/data/SPLIT-00000-of-00002.parquet   a hub repository
"""

import os
import re
from pathlib import Path
from typing import Literal

from shoal.errors import EnvironmentSetupError

Kind = Literal["parquet", "jsonl"]
SUFFIXES: dict[str, Kind] = {
    ".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
}  # fmt: skip
SHARD = re.compile(r"^(?P<split>[A-Za-z][A-Za-z0-9_.]*?)-\d{4,}-of-\d{4,}")
SPLIT_WORDS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
NOT_DATA = frozenset({"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "config.json"})
MOST_FILES = 100_000


def locate(path: Path, split: str = "") -> tuple[Path, ...]:
    path = path.expanduser()
    _require(path)
    if path.is_dir():
        return _shards(path, split)
    if kind_of(path) is None:
        code = f"parquet.write_table(csv.read_csv({str(path)!r}), '{path.stem}.parquet')"
        how = f': python -c "from pyarrow import csv, parquet; {code}"' if path.suffix == ".csv" else ""
        raise EnvironmentSetupError(f"{path} is no .parquet or .jsonl file by its name: unpack or convert it{how}")
    if split not in ("", _split_of(path)):
        raise EnvironmentSetupError(f"{path} is one file and has no split {split!r}: leave options.split out")
    return (path,)


def kind_of(path: Path) -> Kind | None:
    return SUFFIXES.get(path.suffix)


def _require(path: Path) -> None:
    try:
        path.stat()
    except FileNotFoundError:
        raise EnvironmentSetupError(f"there is no data at {path}: check environment.data") from None
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise EnvironmentSetupError(f"cannot open the data {str(path)!r}: {why}; check environment.data") from None


def _shards(path: Path, split: str) -> tuple[Path, ...]:
    """Data files below a folder. Links to folders are not followed."""
    found: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for name in names:
            if kind_of(Path(name)) is not None and name not in NOT_DATA and not name.startswith((".", "_")):
                _require(Path(folder) / name)
                found.append(Path(folder) / name)
        if len(found) > MOST_FILES:
            raise EnvironmentSetupError(f"{path} holds more than {MOST_FILES:,} data files; give a folder of its own")
    if not found:
        raise EnvironmentSetupError(f"{path} holds no Parquet or JSON lines file; check environment.data")
    for several, what in (
        ({str(file.parent.relative_to(path)) for file in found}, "in several folders"),
        ({str(kind_of(file)) for file in found}, "of several kinds"),
    ):
        if len(several) > 1:
            listed = ", ".join(sorted(several)[:10])
            raise EnvironmentSetupError(f"{path} holds data {what} ({listed}): give one of them")
    splits = sorted({_split_of(file) for file in found})
    chosen = split or (splits[0] if len(splits) == 1 else "train" if "" not in splits else "")
    if chosen not in splits:
        listed = ", ".join(name or "(no name)" for name in splits)
        raise EnvironmentSetupError(f"{path} has no split {chosen!r}; it has {listed}: set environment.options.split")
    return tuple(sorted((file for file in found if _split_of(file) == chosen), key=lambda file: file.name))


def _split_of(path: Path) -> str:
    match = SHARD.match(path.name)
    word = path.name.partition(".")[0].lower()
    return match["split"] if match else word if word in SPLIT_WORDS else ""
