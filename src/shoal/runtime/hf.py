"""Repositories of the Hugging Face hub: named as people name them, downloaded into the library's cache, pinned.

    ORG/NAME[@REVISION][:PART]     a path that exists here is a path, not a name
        └─ opened ─► ORG/NAME@COMMIT[:PART][#blake3=…]      what a run records: found in the cache, also offline

Only files that a caller chose are downloaded: safetensors, JSON, templates and vocabularies of a model; Parquet, JSON
lines and the card of a data set. No weights that must be unpickled, no Python. `models/locked` takes the library off
the network in its process and its children, so the user's own HF_HUB_OFFLINE is read here first.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from shoal.errors import ConfigError, DiskError, EnvironmentSetupError, ModelError, ResourceError, ShoalError, UserError
from shoal.runtime.files import resource_error, write_atomically
from shoal.runtime.limits import show_bytes
from shoal.runtime.text import count_of, printable

IS_OFFLINE = any(
    os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
)
Kind = Literal["model", "dataset"]
KINDS: dict[Kind, tuple[str, type[UserError]]] = {
    "model": ("model", ModelError), "dataset": ("data set", EnvironmentSetupError),
}  # fmt: skip
NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^:#@]+))?(?::(?P<part>[^:#@]+))?"
    r"(?:#blake3=(?P<digest>[0-9a-f]{64}))?",
    re.ASCII,
)
FOLDERS = ("models", "datasets", "spaces", "runs", "data", "evals", "recipes")  # the first three are no account there
FILES = re.compile(r"\.(parquet|pq|jsonl|ndjson|json|csv|tsv|txt|toml|py|tar|gz|zip|zst)$")
COMMIT = re.compile(r"[0-9a-f]{40}")
SHARD = re.compile(r"(.*-)\d{5}(-of-(\d{5})\..*)")
MODEL_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
MODEL_TEXTS = ("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model")
MOST_FILES, MOST_SMALL_BYTES = 2000, 64 * 2**20
ASKING_S = 30.0


@dataclass(frozen=True)
class HubName:
    repo: str
    revision: str = ""
    part: str = ""
    digest: str = ""

    @property
    def is_pinned(self) -> bool:
        return bool(COMMIT.fullmatch(self.revision))

    def __str__(self) -> str:
        added = (("@", self.revision), (":", self.part), ("#blake3=", self.digest))
        return self.repo + "".join(f"{mark}{text}" for mark, text in added if text)


@dataclass(frozen=True)
class Repository:
    """One commit of a repository: its files by name, with their sizes. `read` downloads a small one."""

    name: HubName
    kind: Kind
    sizes: Mapping[str, int]
    read: Callable[[str], Path]

    def error(self, why: str) -> UserError:
        what, kind = KINDS[self.kind]
        return kind(f"the {what} {self.name} {why}")


@dataclass(frozen=True)
class Snapshot:
    """Files on this machine. `name` has the commit."""

    name: HubName
    folder: Path
    files: tuple[str, ...]


Choose = Callable[[Repository], Sequence[str]]
"""The files that are wanted, in the order of their download: the last ones prove that the others are there."""


def parse(text: str | Path) -> HubName | None:
    """The name of a repository; None for a path that exists, or that cannot be such a name.

    >>> str(parse("openai/gsm8k@main:socratic/test"))
    'openai/gsm8k@main:socratic/test'
    """
    found = NAME.fullmatch(str(text))
    if not found or found["repo"].split("/")[0] in FOLDERS or FILES.search(found["repo"]) or Path(text).exists():
        return None
    return HubName(**{key: value or "" for key, value in found.groupdict().items()})


def model_folder(path: str | Path, weights: bool = True) -> Path:
    """The folder of a model: the path itself, or what is downloaded by its name."""
    name = parse(path)
    return Path(path).expanduser() if name is None else model(name, weights).folder


def is_whole(path: str | Path) -> bool:
    """Whether nothing is left to be downloaded: it is a path, or a model that is in the cache with its weights."""
    name = parse(path)
    return name is None or _kept(name, "model", model_files) is not None


def model(name: HubName, weights: bool = True) -> Snapshot:
    """Without `weights`, only what describes it."""
    return snapshot(name, "model", model_files if weights else partial(model_files, weights=False))


def model_files(repository: Repository, weights: bool = True) -> list[str]:
    """What is read of a model's repository, the weights last; without safetensors it is refused."""
    top = sorted(name for name in repository.sizes if "/" not in name)
    small = [name for name in top if name.endswith((".json", ".jinja")) or name in MODEL_TEXTS]
    found = [name for name in top if name.endswith(".safetensors")]
    large = [name for name in found if MODEL_WEIGHTS.fullmatch(name)] or found
    if weights and not large:
        others = next((f" (it has {name})" for name in top if name.endswith((".bin", ".gguf", ".pt", ".pth"))), "")
        remedy = "take another revision or repository, or save it with save_pretrained and give the folder"
        raise repository.error(f"has no *.safetensors file{others}, and shoal reads no other weights: {remedy}")
    return [*small, *(large if weights else ())]


def snapshot(name: HubName, kind: Kind, choose: Choose) -> Snapshot:
    """A pinned one that is whole in the cache is used as it is. Else the hub is asked; without network, the cache."""
    if name.is_pinned and (kept := _kept(name, kind, choose)):
        return kept
    what, error_type = KINDS[kind]
    if IS_OFFLINE:
        if kept := _kept(name, kind, choose):
            return kept
        why = "is not in the cache" if _cached(name, kind) is None else "is not whole in the cache"
        remedy = "unset it to download, put a copy into the cache (hf download), or give a folder"
        raise error_type(f"the {what} {name} {why} ({cache_folder()}), and HF_HUB_OFFLINE is set: {remedy}")
    try:
        return _downloaded(name, kind, choose)
    except ResourceError as error:
        if isinstance(error, DiskError) or (kept := _kept(name, kind, choose)) is None:
            raise
        sys.stderr.write(f"{error}; using {kept.name} of the cache\n")
        return kept


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _cached(name: HubName, kind: Kind) -> tuple[HubName, Path] | None:
    """The folder of a commit in the cache, by the layout that the library documents."""
    place = cache_folder() / f"{kind}s--{name.repo.replace('/', '--')}"
    commit = name.revision
    if not name.is_pinned:
        try:
            commit = (place / "refs" / (commit or "main")).read_text().strip()
        except (OSError, ValueError):
            return None
    folder = place / "snapshots" / commit
    return (replace(name, revision=commit), folder) if COMMIT.fullmatch(commit) and folder.is_dir() else None


def _kept(name: HubName, kind: Kind, choose: Choose) -> Snapshot | None:
    """What is whole in the cache: files are downloaded in the order of `choose`, and shards say how many they are."""
    if (found := _cached(name, kind)) is None:
        return None
    pinned, folder = found
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    try:
        chosen = choose(Repository(pinned, kind, sizes, lambda name: paths[name]))
    except UserError:
        return None
    shards = [match for match in map(SHARD.fullmatch, chosen) if match]
    is_whole = all(sum(each[1] == one[1] and each[2] == one[2] for each in shards) == int(one[3]) for one in shards)
    return Snapshot(pinned, folder, tuple(chosen)) if chosen and is_whole else None


def _downloaded(name: HubName, kind: Kind, choose: Choose) -> Snapshot:
    with _spoken(name, kind):
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download

        revision = name.revision or "main"
        if ".." in revision or revision.startswith("/"):
            raise ConfigError(f"{revision!r:.60} is no revision of {name.repo}: name a commit, a branch or a tag")
        info: Any = HfApi().repo_info(
            name.repo, repo_type=kind, revision=revision, files_metadata=True, timeout=ASKING_S
        )
        pinned = replace(name, revision=str(info.sha))
        if not pinned.is_pinned or (name.is_pinned and pinned.revision != name.revision):
            raise ConfigError(
                f"the server of {name.repo} answers with {info.sha!r:.60} for revision {revision}: refused"
            )
        sizes = {str(each.rfilename): int(each.size or 0) for each in info.siblings or ()}

        def read(file: str) -> Path:
            _check_files(opened, [file], small=True)
            return Path(hf_hub_download(name.repo, file, repo_type=kind, revision=pinned.revision))

        opened = Repository(pinned, kind, sizes, read)
        chosen = list(choose(opened))
        small = [file for file in chosen if file.endswith((".json", ".jinja", *MODEL_TEXTS))] if kind == "model" else []
        _check_files(opened, small, small=True)
        _check_files(opened, chosen)
        folder = cache_folder() / f"{kind}s--{name.repo.replace('/', '--')}" / "snapshots" / pinned.revision
        missing = [file for file in chosen if not (folder / file).is_file()]
        if missing:
            _check_room(pinned, sum(sizes[file] for file in missing))
            size = show_bytes(sum(sizes[file] for file in missing))
            sys.stderr.write(
                f"downloading {pinned.repo}@{pinned.revision[:12]}: {count_of(len(missing), 'file')}, {size}\n"
            )
        large = [file for file in chosen if file not in small]
        for files in (small, large):  # weights in the cache prove that the rest is there
            patterns = [re.sub(r"([*?[])", r"[\1]", file) for file in files]
            if files:
                found = snapshot_download(
                    name.repo, repo_type=kind, revision=pinned.revision, allow_patterns=patterns
                )  # fmt: skip
                folder = Path(found)
        if not name.is_pinned:  # by which `_cached` finds it without network, as the library does
            ref = folder.parents[1] / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ref, pinned.revision.encode())
    return Snapshot(pinned, folder, tuple(chosen))


def check_push(text: str) -> HubName:
    """The repository that is to be pushed to. That somebody is logged in is asked before there is work to lose."""
    found = NAME.fullmatch(text)
    if not found or any(found[part] for part in ("revision", "part", "digest")):
        raise UserError(f"--push {text}: give the name of a repository, ORG/NAME")
    name = HubName(found["repo"])
    if IS_OFFLINE:
        raise UserError(f"--push {text}: HF_HUB_OFFLINE is set: unset it, or export without --push")
    with _spoken(name, "model", "push"):
        from huggingface_hub import HfApi

        HfApi().whoami()
    return name


def push(name: HubName, kind: Kind, files: Mapping[str, Path | bytes], private: bool, message: str) -> str:
    """One commit of exactly these files, in a repository that is made if it is not there; returns its address. Files
    that are there and not among these stay."""
    what, error_type = KINDS[kind]
    with _spoken(name, kind, "push"):
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi()
        api.create_repo(name.repo, repo_type=kind, private=private, exist_ok=True)
        if private and not api.repo_info(name.repo, repo_type=kind, timeout=ASKING_S).private:
            remedy = "make it private in its settings, choose another name, or leave out --private"
            raise error_type(f"the {what} {name.repo} is there already, and public: {remedy}")
        added = [CommitOperationAdd(path, data) for path, data in sorted(files.items())]
        api.create_commit(name.repo, added, repo_type=kind, commit_message=message)
    return f"{endpoint()}/{'datasets/' * (kind == 'dataset')}{name.repo}"


def _check_files(repository: Repository, files: Collection[str], small: bool = False) -> None:
    """Before anything is written: names that stay in the folder, not too many, no texts without end."""
    if len(files) > MOST_FILES:
        remedy = "name a part of it, or download what you need (hf download) and give the folder"
        raise repository.error(f"has {len(files):,} files of these, more than {MOST_FILES:,}: {remedy}")
    for file in files:
        parts = file.split("/")
        if not file.isprintable() or "\\" in file or len(file) > 1000 or {"", ".", ".."} & set(parts):
            raise repository.error(f"has a file with the name {printable(file)[:100]!r}, which is refused")
        if small and repository.sizes.get(file, 0) > MOST_SMALL_BYTES:
            size, most = show_bytes(repository.sizes[file]), show_bytes(MOST_SMALL_BYTES)
            raise repository.error(f"has a {file} of {size}, and at most {most} are read: it is no such file")


def _check_room(name: HubName, wanted: int) -> None:
    place = next(folder for folder in (cache_folder(), *cache_folder().parents) if folder.exists())
    if (free := shutil.disk_usage(place).free) < wanted:
        room = f"it takes {show_bytes(wanted)}, and {place} has {show_bytes(free)} free"
        raise DiskError(f"cannot download {name}: {room}: free some space, or set HF_HOME to a folder on a larger disk")


@contextmanager
def _spoken(name: HubName, kind: Kind, verb: str = "download") -> Iterator[None]:
    """The library on the network, whatever `models/locked` has set, and its errors as one line with the remedy."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:  # the library raises its own, those of two HTTP clients, and the system's
        raise _refusal(name, kind, verb, error) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _refusal(name: HubName, kind: Kind, verb: str, error: Exception) -> ShoalError:
    from huggingface_hub import errors

    (what, error_type), at = KINDS[kind], endpoint()
    status = getattr(getattr(error, "response", None), "status_code", None)
    page = f"{at}/{'datasets/' * (kind == 'dataset')}{name.repo}"
    token = "log in (hf auth login), or set HF_TOKEN to a token"
    if verb == "push" and (status == 401 or isinstance(error, errors.LocalTokenNotFoundError)):
        return UserError(f"cannot push {name.repo} to {at}, which does not know you: {token} that may write there")
    if isinstance(error, errors.GatedRepoError):
        return error_type(f"the {what} {name.repo} is gated: accept its terms at {page}, then {token} of that account")
    if isinstance(error, errors.RevisionNotFoundError):
        remedy = "leave it out for the newest, or give a branch, a tag or a commit"
        return error_type(f"the {what} {name.repo} has no revision {name.revision!r} at {at}: {remedy}")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        missing = f"there is no {what} {name.repo} at {at}, or it is private, and no such path is here"
        return error_type(f"{missing}: check the name; if it is private, {token} that may read it")
    if status == 403:
        return error_type(f"{at} does not allow this for the {what} {name.repo} (HTTP 403): {token} that may")
    if isinstance(error, OSError) and error.errno and not isinstance(error, errors.HfHubHTTPError | ConnectionError):
        return resource_error(f"{verb} {name} to", cache_folder(), error)
    said = printable(str(error).strip().partition("\n")[0])[:200] or type(error).__name__
    or_else = "; the export is whole" if verb == "push" else ", or give a folder that has it"
    remedy = "try again, or check the connection (and HF_ENDPOINT)"
    return ResourceError(
        f"cannot {verb} the {what} {name} {'to' if verb == 'push' else 'from'} {at} ({said}): {remedy}{or_else}"
    )
