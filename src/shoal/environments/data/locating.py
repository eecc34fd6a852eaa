"""Which files a data set consists of, and in which order: a file, a folder of shards, or what Hugging Face leaves.

FILE.parquet | FILE.jsonl[.gz|.zst] | FILE.arrow | FILE.csv
FOLDER/…                            shards of one kind, by name
FOLDER/state.json                   saved with save_to_disk: the Arrow files that it lists
FOLDER/dataset_dict.json            several of those, one per split
FOLDER/snapshots/REVISION/…         the hub's cache
FOLDER/data/SPLIT-00000-of-00002.parquet   a hub repository
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import EnvironmentSetupError

Kind = Literal["parquet", "jsonl", "arrow", "csv"]
SUFFIXES: dict[str, Kind] = {
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv",
}  # fmt: skip
PACKED = {".gz": "gzip", ".zst": "zstd"}
SHARD = re.compile(r"^(?P<split>[A-Za-z][A-Za-z0-9_.]*?)-\d{4,}-of-\d{4,}")
SPLIT_WORDS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
NOT_DATA = frozenset({"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "config.json"})
MOST_FILES = 100_000


@dataclass(frozen=True)
class DataFile:
    path: Path
    kind: Kind


def locate(path: Path, split: str = "") -> tuple[DataFile, ...]:
    """The files of the data set at `path`, in the order of their rows."""
    path = path.expanduser()
    _require(path)
    if path.is_dir():
        return _folder(path, split)
    kind = kind_of(path)
    if kind is None:
        raise EnvironmentSetupError(
            f"{path} is of no kind that is known by its name: .parquet, .jsonl (also .gz, .zst), .arrow or .csv"
        )
    _only_split(_split_of(path), split, path)
    return (DataFile(path, kind),)


def kind_of(path: Path) -> Kind | None:
    packed = path.suffix in PACKED
    kind = SUFFIXES.get(path.with_suffix("").suffix if packed else path.suffix)
    return kind if not packed or kind == "jsonl" else None


def _require(path: Path) -> None:
    """Refuse a path at which nothing is, or nothing that can be looked at."""
    name = "/".join(path.parts[-2:])
    try:
        path.stat()
        return
    except FileNotFoundError:
        if path.is_symlink():
            said = f"the data {path} is a link to nowhere; check environment.data"
        elif HUB_NAME.match(str(path)) or (HUB_NAME.match(name) and not path.parent.exists()):
            said = (
                f"there is no file or folder {path}; if it is a data set of a hub, download it first (for example:"
                f" hf download --repo-type dataset {name} --local-dir FOLDER) and give the folder as environment.data"
            )
        else:
            said = f"there is no data at {path}; give a Parquet or JSON lines file, or a folder, as environment.data"
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        why = (error.strerror if isinstance(error, OSError) else None) or error
        said = f"cannot open the data {str(path)!r}: {why}; check environment.data"
    raise EnvironmentSetupError(said)


def _folder(path: Path, split: str) -> tuple[DataFile, ...]:
    if (path / "dataset_dict.json").is_file():
        return _folder(path / _one_split(_json(path / "dataset_dict.json").get("splits"), split, path), "")
    if (path / "state.json").is_file():
        return _saved(path, split)
    if not (path / "snapshots").is_dir():
        return _shards(path, split)
    main = path / "refs" / "main"
    if main.is_file():
        return _folder(path / "snapshots" / main.read_text().strip(), split)
    found = sorted(entry for entry in (path / "snapshots").iterdir() if entry.is_dir())
    if len(found) != 1:
        raise EnvironmentSetupError(f"{path} holds {len(found)} snapshots; give one of them: {path}/snapshots/REVISION")
    return _folder(found[0], split)


def _saved(path: Path, split: str) -> tuple[DataFile, ...]:
    """What `save_to_disk` wrote: the Arrow files in the order that it names."""
    state = _json(path / "state.json")
    _only_split(str(state.get("_split") or ""), split, path)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise EnvironmentSetupError(f"{path} was saved with a table of indices; save it again after flatten_indices()")
    listed = state.get("_data_files")
    names = [entry.get("filename") for entry in listed] if isinstance(listed, list) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise EnvironmentSetupError(f"{path / 'state.json'} names no files of its folder: save the data set again")
    missing = next((path / name for name in names if not (path / name).exists()), None)
    if missing:
        raise EnvironmentSetupError(f"{missing} is missing, though state.json names it: copy the whole folder")
    return tuple(DataFile(path / name, "arrow") for name in names)


def _shards(path: Path, split: str) -> tuple[DataFile, ...]:
    """Data files below a folder. Folders that are links are not followed: no loop, nothing from elsewhere."""
    found: list[DataFile] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for name in names:
            kind = kind_of(Path(name))
            if kind is not None and name not in NOT_DATA and not name.startswith((".", "_")):
                _require(Path(folder) / name)
                found.append(DataFile(Path(folder) / name, kind))
        if len(found) > MOST_FILES:
            raise EnvironmentSetupError(f"{path} holds more than {MOST_FILES:,} data files; give a folder of its own")
    if not found:
        raise EnvironmentSetupError(f"{path} holds no Parquet, JSON lines or Arrow file; check environment.data")
    places = sorted({file.path.parent for file in found})
    if len(places) > 1:
        listed = ", ".join(str(folder.relative_to(path)) for folder in places[:10])
        raise EnvironmentSetupError(f"{path} holds data in several folders ({listed}): give one of them")
    kinds = sorted({file.kind for file in found})
    if len(kinds) > 1:
        raise EnvironmentSetupError(f"{path} holds files of several kinds ({', '.join(kinds)}): give one of the files")
    splits = sorted({_split_of(file.path) for file in found})
    chosen = _one_split(splits, split, path) if len(splits) > 1 or split else splits[0]
    return tuple(sorted((file for file in found if _split_of(file.path) == chosen), key=lambda file: file.path.name))


def _split_of(path: Path) -> str:
    match = SHARD.match(path.name)
    word = path.name.partition(".")[0].lower()
    return match["split"] if match else word if word in SPLIT_WORDS else ""


def _only_split(name: str, wanted: str, path: Path) -> None:
    """Refuse a split of what has none or another: it would change nothing but the environment's digest."""
    if wanted and wanted != name:
        raise EnvironmentSetupError(
            f"{path} is {f'the split {name!r}' if name else 'not in splits'}, so it has no split {wanted!r}:"
            " leave environment.options.split out, or give the folder that holds the splits"
        )


def _one_split(splits: object, wanted: str, path: Path) -> str:
    names = [str(name) for name in splits] if isinstance(splits, list) else []
    chosen = wanted if wanted in names else wanted or (names[0] if len(names) == 1 else "train")
    if chosen in names:
        return chosen
    listed = ", ".join(name or "(no name)" for name in names) or "none"
    raise EnvironmentSetupError(f"{path} has no split {chosen!r}; it has {listed}: set environment.options.split")


def _json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EnvironmentSetupError(f"{path} cannot be read: {error}; save the data set again") from None
    return content if isinstance(content, dict) else {}
