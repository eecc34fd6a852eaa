"""A run on disk: its recipe, its keys with their certificates, its addresses. Made once, then opened by every role.

The root key is needed only here, to make certificates: move it off the machine when they exist.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from shoal import protocol
from shoal.client import split_join_url
from shoal.client.trust import pinned_root, run_id
from shoal.errors import ConfigError, ProtocolError, ResourceError, UserError
from shoal.run.recipe import Recipe, load_recipe, refuse_other_recipe, shipped_recipes
from shoal.runtime import FolderLock, StopToken, SystemClock, ensure_folder, meant, write_atomically
from shoal.runtime.config import dump_config, load_config
from shoal.shardcast.server import public_url

ADMIN = "admin"
BEFOREHAND = (".lock", "demo.json")  # may lie in a folder before a run is made in it
SOLO = "hub/batches"  # what only a run without a hub has
LOCK_WAIT_S = 15.0  # for a run in this folder that is just ending
RECIPE_MODE = 0o600  # hub.database may hold a password


class Endpoints(BaseModel, frozen=True, extra="forbid"):
    """`bind` is the address that the run's servers listen on; the URLs are how others reach them."""

    run: str
    root_key: str
    bind: str
    hub: str
    origin: str
    relays: tuple[str, ...]
    advertise: tuple[str, ...] = ()

    @property
    def join(self) -> str:
        url = self.advertise[0].rstrip("/") if self.advertise else self.hub
        return f"{url}/#{protocol.fingerprint(self.root_key)}"

    @property
    def sources(self) -> tuple[str, ...]:
        return self.relays or (self.origin,)

    @property
    def last_resort(self) -> tuple[str, ...]:
        return (self.origin,) if self.relays else ()


@dataclass(frozen=True)
class RunFolder:
    path: Path
    recipe: Recipe

    @classmethod
    def prepare(cls, path: Path, recipe: Recipe, changed: bool = False) -> RunFolder:
        """Make the folder, or open one with the same recipe; afterwards every key and certificate exists. `changed`:
        the recipe is the folder's own with other settings, which a run that has not begun may have."""
        stored = path / "recipe.toml"
        if not stored.exists() and path.is_dir() and any(entry.name not in BEFOREHAND for entry in path.iterdir()):
            raise ConfigError(f"the folder {path} is not empty and not a run's; give another RUN")
        with FolderLock(path).acquire(StopToken(), LOCK_WAIT_S):  # the recipe of a running run must not change
            cls.refuse_other(path, recipe, changed)
            ensure_folder(path / "logs")
            ensure_folder(path / "keys", private=True)
            folder = cls(path, recipe)
            for name, role in {**folder.trusted_roles, ADMIN: "admin"}.items():
                if not folder._certificate_path(name).exists():
                    folder._root()  # fails before any key is made
                    key = protocol.load_or_create_key(path / "keys" / f"{name}.key")
                    folder.put_certificate(name, folder.certify(role, key.public_key))
            write_atomically(stored, dump_config(recipe).encode(), RECIPE_MODE)
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        stored = path / "recipe.toml"
        if not stored.is_file():
            wrong = "has no recipe.toml: it is not a run's folder" if path.exists() else "is not there"
            address = re.findall(r"(?:^|/)([\w.-]+:\d+(?:/#.*)?)$", str(path)) or ["…"]
            ways = f"its folder, its name under runs/{_runs_here()}, or its URL, http://{address[0]}"
            raise ConfigError(f"{path} {wrong}; a run is given by {ways}")
        return cls(path, _stored_recipe(stored))

    @staticmethod
    def stored(path: Path) -> Recipe | None:
        """The recipe of the run in this folder, if there is one."""
        return (
            _stored_recipe(path / "recipe.toml")
            if (path / "keys").is_dir() and (path / "recipe.toml").is_file()
            else None
        )

    @staticmethod
    def refuse_other(path: Path, recipe: Recipe, changed: bool = False) -> None:
        stored, has_begun = path / "recipe.toml", (path / "hub").exists()
        if stored.exists() and (has_begun or not changed):
            refuse_other_recipe(path, _stored_recipe(stored), recipe)
            if has_begun:
                _refuse_moved(path, _stored_recipe(stored), recipe)

    @property
    def trusted_roles(self) -> dict[str, protocol.Role]:
        """The processes that the root key certifies, with validators that were added later."""
        count = self.recipe.validator.count
        while self._certificate_path(f"validator-{count}").exists():
            count += 1
        validators: dict[str, protocol.Role] = {f"validator-{index}": "validator" for index in range(count)}
        return {"hub": "hub", "trainer": "trainer", **validators}

    @property
    def root_key(self) -> str:
        """The root's public key, from the hub's certificate: the private key may be elsewhere."""
        return self._signed("hub").signed_by

    @property
    def trainer_key(self) -> str:
        return protocol.open_document(self._signed("trainer"), protocol.RoleCertificate, self.root_key).public_key

    @property
    def run_id(self) -> str:
        return run_id(self.recipe.run.name, protocol.fingerprint(self.root_key))

    def key(self, name: str) -> protocol.SigningKey:
        return protocol.load_key(self.path / "keys" / f"{name}.key")

    def certificate(self, name: str) -> protocol.SignedDocument:
        """The certificate of a trusted process, checked against the root key, its own key and this run."""
        signed, path = self._signed(name), self._certificate_path(name)
        role: protocol.Role = "admin" if name == ADMIN else self.trusted_roles[name]
        try:
            document = protocol.open_document(signed, protocol.RoleCertificate, self.root_key)
        except ProtocolError as error:
            raise ConfigError(f"{path}: {error}; remove it to get a new one") from error
        if (document.run, document.role, document.public_key) != (self.run_id, role, self.key(name).public_key):
            raise ConfigError(f"{path} is for another key, role or run; remove it")
        return signed

    @property
    def certificates(self) -> tuple[protocol.SignedDocument, ...]:
        return tuple(self.certificate(name) for name in self.trusted_roles)

    def certify(self, role: protocol.Role, public_key: str, for_s: float | None = None) -> protocol.SignedDocument:
        """A certificate by the root key, whose private half must be here; it is not written to disk. It holds for
        `for_s` seconds, or for good."""
        root, now_ms = self._root(), SystemClock().now_ms()
        run = run_id(self.recipe.run.name, protocol.fingerprint(root.public_key))
        document = protocol.RoleCertificate(
            run=run, role=role, public_key=public_key, issued_at_ms=now_ms,
            expires_at_ms=None if for_s is None else now_ms + round(for_s * 1000),
        )  # fmt: skip
        return protocol.sign_document(document, root)

    def put_certificate(self, name: str, signed: protocol.SignedDocument) -> None:
        write_atomically(self._certificate_path(name), signed.model_dump_json(indent=2).encode() + b"\n")

    def _certificate_path(self, name: str) -> Path:
        return self.path / "keys" / f"{name}.json"

    def _signed(self, name: str) -> protocol.SignedDocument:
        path = self._certificate_path(name)
        try:
            return protocol.SignedDocument.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"cannot read the certificate {path}: {error.strerror}") from error
        except ValidationError as error:
            problem = protocol.first_problem(error)
            raise ConfigError(f"{path} is not a certificate: {problem}; remove it to get a new one") from error

    def _root(self) -> protocol.SigningKey:
        """The private root key. Created for a new run only: a second root key would split the run."""
        path = self.path / "keys" / "root.key"
        if not (self.path / "hub" / "hub.db").exists() and not any(path.parent.glob("*.json")):
            return protocol.load_or_create_key(path)
        if not path.exists():
            raise ConfigError(f"a certificate is missing and so is the root key: put it back at {path}, then try again")
        root = protocol.load_key(path)
        if self._certificate_path("hub").exists() and root.public_key != self.root_key:
            raise ConfigError(f"{path} is not the root key that signed this run's certificates; put that one back")
        return root

    @staticmethod
    def is_solo(path: Path) -> bool:
        return (path / SOLO).is_dir()

    def require_hub(self) -> None:
        if self.is_solo(self.path):
            look = "its figures are in trainer/metrics.jsonl, its rollouts in `shoal rollouts`"
            raise ConfigError(f"{self.path} is a solo run: it has no hub, no nodes and no ledger; {look}")

    @property
    def endpoints(self) -> Endpoints:
        self.require_hub()
        path = self.path / "endpoints.json"
        try:
            return Endpoints.model_validate_json(path.read_bytes())
        except FileNotFoundError as error:
            raise ConfigError(f"{self.path} has no endpoints.json; prepare the run with: shoal run") from error
        except (OSError, ValidationError) as error:
            raise ConfigError(f"{path} is damaged; remove it and start the run again") from error

    def assign_endpoints(self) -> Endpoints:
        """Choose the addresses and write them down. Earlier ports are kept if they are free."""
        hub, ports = self.recipe.hub, list[int]()
        try:
            before = self.endpoints
            earlier = [port_of(url) for url in (before.hub, before.origin, *before.relays)]
        except ConfigError:  # missing or damaged: they are chosen again
            earlier = []
        for index in range(2 + self.recipe.relay.count):
            wanted = [hub.port] if index == 0 and hub.port else [*earlier[index : index + 1], 0, 0, 0]
            ports.append(_free_port(hub.host, wanted, ports))
        urls = [public_url(hub.host, port) for port in ports]
        endpoints = Endpoints(
            run=self.run_id, root_key=self.root_key, bind=hub.host, hub=urls[0], origin=urls[1],
            advertise=hub.advertise, relays=tuple(urls[2:]),
        )  # fmt: skip
        write_atomically(self.path / "endpoints.json", endpoints.model_dump_json(indent=2).encode() + b"\n")
        return endpoints


def _free_port(host: str, wanted: Sequence[int], taken: Sequence[int]) -> int:
    why = "all are in use"
    for port in wanted:
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                probe.bind((host, port))
                bound: int = probe.getsockname()[1]
        except OSError as error:
            why = str(error.strerror)
            continue
        if bound not in taken:
            return bound
    remedy = "Stop what uses the port, or choose another (--set hub.port=0 takes any that is free)"
    where = f"cannot listen on port {wanted[0] or '(any)'} of {host} ({why})"
    raise ResourceError(f"{where}: is it an address of this machine? {remedy}")


def _stored_recipe(path: Path) -> Recipe:
    """A recipe without a [run] section was not written by shoal."""
    recipe = load_config(path, Recipe)
    if "[run]" not in path.read_text():
        raise ConfigError(f"{path} is damaged: it has no [run] section; put back the recipe that the run was made with")
    return recipe


def hub_address(where: str, wait_s: float) -> tuple[str, float, str | None]:
    if "://" in where:
        url, pinned = split_join_url(where)
        return url, wait_s, pinned_root([url], pinned)
    folder = RunFolder.open(Path(where))
    return folder.endpoints.hub, wait_s, protocol.fingerprint(folder.root_key)


def run_path(name: str) -> Path:
    """The folder of a run: `name` itself; or the one of this name under runs/, unless a run of this name is here."""
    here, named = Path(name), Path("runs", name)
    bare = here.name == name != ".." and not (here / "recipe.toml").is_file()
    return named if bare and (named.exists() or not here.exists()) else here


def _runs_here() -> str:
    names = sorted(path.parent.name for path in Path("runs").glob("*/recipe.toml"))
    return f" ({', '.join(names[:8])}{', …' if len(names) > 8 else ''})" if names else ""


def find_run(where: str | None) -> str:
    """`where`; else the run in this folder, or the only one in runs/."""
    if where is not None:
        return where
    if Path("recipe.toml").is_file() and Path("keys").is_dir():
        return "."
    runs = [path.parent for path in Path("runs").glob("*/recipe.toml")] if Path("runs").is_dir() else []
    if len(runs) == 1:
        return str(runs[0])
    found = f"runs/ has {len(runs)}" if runs else "runs/ has no run"
    raise UserError(f"which run? give its folder, its name under runs/, or its hub's URL: {found}{_runs_here()}")


def resolve(source: Path | None, directory: Path | None, overrides: Sequence[str]) -> Recipe:
    if source is None and directory is not None:
        if not directory.is_dir():
            made = f"to make one: shoal run RECIPE {directory} (a TOML file, or a name that shoal init lists)"
            missing = f"there is no run folder {directory}{_runs_here()}{meant(directory.name, shipped_recipes())}"
            raise ConfigError(f"{missing}; {made}")
        source = RunFolder.open(directory).path / "recipe.toml"
    if source is None:
        raise ConfigError(
            "which recipe? for example: shoal run tiny (shoal init lists them), or shoal run RUN to resume a run"
        )
    return load_recipe(source, overrides)


def without_passwords(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"hub": recipe.hub.model_copy(update={"database": masked(recipe.hub.database)})})


def masked(url: str) -> str:
    """
    >>> masked("postgresql://shoal:s3cr@t@db.example/run?sslpassword=other&sslmode=require")
    'postgresql://shoal:***@db.example/run?sslpassword=***&sslmode=require'
    """
    return re.sub(r"(?i)([?&]\w*password=)[^&]*", r"\1***", re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url))


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1].rstrip("/"))


def _refuse_moved(path: Path, stored: Recipe, given: Recipe) -> None:
    before, now = stored.hub, given.hub
    if given.run.steps < stored.run.steps:
        why = f"run.steps was {stored.run.steps}, is {given.run.steps}: a run that has begun may become longer"
        raise ConfigError(f"{why}, never shorter; to end it earlier, stop it (resume with: shoal run {path})")
    begun = (path / "hub" / "hub.db").exists() or any((path / "origin" / "manifests").glob("*"))
    if not begun or (masked(before.database), before.storage) == (masked(now.database), now.storage):
        return  # not begun, or only the password differs
    named = {"database": masked(now.database), "storage": now.storage, "storage_endpoint": now.storage_endpoint}
    places = "".join(f" --set hub.{name}={value}" for name, value in named.items() if value)
    remedy = f"to move it, stop it, then: shoal backup {path} FILE, shoal restore FILE RUN{places}"
    here = f"hub.database {masked(before.database)!r}, hub.storage {before.storage!r}"
    raise ConfigError(f"what the run in {path} holds is at {here}; {remedy}")
