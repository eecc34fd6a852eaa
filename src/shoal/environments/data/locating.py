"""The files of a data set, in order: one file, or a folder of shards.

FILE.parquet | FILE.jsonl
FOLDER/…                                   shards of one kind, by name
FOLDER/data/SPLIT-00000-of-00002.parquet   a hub repository
ORG/NAME[@REVISION][:CONFIG[/SPLIT]]       the same on the Hugging Face hub, by what its card says of its parts;
                                           without readable files, the Parquet files that the hub makes of them
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import Literal

from shoal.errors import EnvironmentSetupError
from shoal.runtime import hf

Kind = Literal["parquet", "jsonl"]
SUFFIXES: dict[str, Kind] = {
    ".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
}  # fmt: skip
SHARD = re.compile(r"^(?P<split>[A-Za-z][A-Za-z0-9_.]*?)-\d{4,}-of-\d{4,}")
SPLIT_WORDS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
NOT_DATA = frozenset({"state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "config.json"})
MOST_FILES = 100_000
CONVERTED = "refs/convert/parquet"


def locate(path: Path, split: str = "") -> tuple[Path, ...]:
    if (name := hf.parse(path)) is not None:
        found = hub_data(name, split)
        return tuple(found.folder / file for file in found.files if kind_of(Path(file)) is not None)
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


def hub_data(name: hf.HubName, split: str = "") -> hf.Snapshot:
    """The files of a part of a data set of the hub, downloaded: of the configuration and split that the name or
    `split` gives, or of the only one."""
    config, _, named = name.part.rpartition("/") if "/" in name.part else (name.part, "", "")
    if named and split and named != split:
        raise EnvironmentSetupError(f"{name} names the split {named!r}, and options.split is {split!r}: leave one out")
    choose = partial(_part_files, config=config, split=named or split)
    try:
        return hf.snapshot(name, "dataset", choose)
    except _NothingReadable as error:
        if name.revision:
            raise
        try:
            converted = hf.snapshot(replace(name, revision=CONVERTED), "dataset", choose)
        except EnvironmentSetupError:
            raise error from None
    return replace(converted, name=replace(converted.name, part=name.part))


class _NothingReadable(EnvironmentSetupError):
    pass


def _part_files(repository: hf.Repository, config: str, split: str) -> list[str]:
    """The card and the files of one part. The card's own list of parts counts, else folders and names do."""
    data = [file for file in sorted(repository.sizes) if _is_data(file)]
    if not data:
        kinds = ", ".join(sorted({PurePosixPath(file).suffix or file for file in repository.sizes})[:8]) or "nothing"
        remedy = "convert them, and give the file or folder"
        raise _NothingReadable(str(repository.error(f"has no Parquet or JSON lines file (it has {kinds}): {remedy}")))
    card = ["README.md"] if "README.md" in repository.sizes else []
    parts = _card_parts(repository.read(card[0]), data) if card else {}
    for file in () if parts else data:
        parts.setdefault(_folder_of(file), {}).setdefault(_split_of(PurePosixPath(file)), []).append(file)
    if config not in parts:
        if config or (len(parts) > 1 and "default" not in parts):
            has = ", ".join(sorted(each or "(no name)" for each in parts)[:20])
            given = f"has no part {config!r}" if config else "has several parts"
            raise repository.error(f"{given}; it has {has}: give {repository.name.repo}:PART")
        config = "default" if "default" in parts else next(iter(parts))
    splits = parts[config]
    chosen = split or (next(iter(splits)) if len(splits) == 1 else "train" if "" not in splits else "")
    if chosen not in splits:
        has = ", ".join(sorted(each or "(no name)" for each in splits))
        example = f"{repository.name.repo}:{config or 'default'}/SPLIT"
        raise repository.error(f"has no split {chosen!r}; it has {has}: give {example}, or environment.options.split")
    files = splits[chosen]
    found = [kind for kind in ("parquet", "jsonl") if any(kind_of(Path(file)) == kind for file in files)]
    return [*card, *(file for file in files if kind_of(Path(file)) == found[0])]


def _is_data(file: str) -> bool:
    name = PurePosixPath(file).name
    hidden = any(part.startswith((".", "_")) for part in file.split("/"))
    return kind_of(Path(name)) is not None and name not in NOT_DATA and not hidden


def _folder_of(file: str) -> str:
    """The configuration that a file is of: its folder, without one that is only of a split, and without `data`."""
    folders = list(PurePosixPath(file).parts[:-1])
    if folders and _split_of(PurePosixPath(file)) == folders[-1]:
        folders.pop()
    return "/".join(folders[1:] if folders[:1] == ["data"] else folders)


def _card_parts(card: Path, data: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Configuration → split → files, as the `configs` at the head of a data set's card say; {} if it says nothing."""
    from huggingface_hub import metadata_load

    found: dict[str, dict[str, list[str]]] = {}
    try:
        for config in (metadata_load(card) or {}).get("configs") or ():
            given = config.get("data_files", ())
            for one in [given] if isinstance(given, str) else given:
                split, paths = (one["split"], one["path"]) if isinstance(one, dict) else ("train", one)
                patterns = [_pattern(str(path)) for path in ([paths] if isinstance(paths, str) else paths)]
                files = [file for file in data if any(pattern.fullmatch(file) for pattern in patterns)]
                if files:
                    found.setdefault(str(config["config_name"]), {}).setdefault(str(split), []).extend(files)
    except Exception:  # noqa: BLE001 - the card is anybody's text, and its parser has errors of its own
        return {}
    return found


def _pattern(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob.removeprefix("./"))
    meant = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meant.get(part) or re.escape(part) for part in parts))


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


def _split_of(path: PurePath) -> str:
    """By its name; a file that is only a number is of the split that its folder is called."""
    match = SHARD.match(path.name)
    word = path.name.partition(".")[0].lower()
    if word.isdecimal():
        return path.parent.name.removeprefix("partial-")
    return match["split"] if match else word if word in SPLIT_WORDS else ""
