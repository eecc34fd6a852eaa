"""A server that speaks the Hugging Face hub's API as far as shoal uses it, over HTTP on loopback, Xet disabled.

It lists, serves (with ETag, X-Repo-Commit and Range) and receives (preupload, large files by LFS, commit), asks for a
token where a repository is private or gated, and notes every request.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_" + "t" * 34
Files = Mapping[str, bytes]


def commit_of(files: Files, parent: str = "") -> str:
    text = parent + "".join(f"{name} {hashlib.sha1(data).hexdigest()}\n" for name, data in sorted(files.items()))
    return hashlib.sha1(text.encode()).hexdigest()


@dataclass
class FakeRepository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    declared: dict[str, int] = field(default_factory=dict)  # sizes that are not those of the bytes

    def put(self, files: Files, ref: str = "main") -> str:
        commit = commit_of(files, self.refs.get(ref, ""))
        self.commits[commit], self.refs[ref] = dict(files), commit
        return commit


@dataclass
class HuggingFace:
    url: str
    cache: Path
    repositories: dict[tuple[str, str], FakeRepository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    failing: int = 0  # the status that every request gets

    def put(self, name: str, files: Files, kind: str = "models", ref: str = "main", **changes: Any) -> str:
        """A new commit of a repository, which is made if it is not there; its hash."""
        repository = self.repositories.setdefault((kind, name), FakeRepository())
        vars(repository).update(changes)
        return repository.put(files, ref)

    def put_folder(self, name: str, folder: Path, kind: str = "models", **more: bytes) -> str:
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.put(name, {**files, **more}, kind)

    @property
    def environment(self) -> dict[str, str]:
        """What a command gets to ask this server."""
        return {
            "HF_ENDPOINT": self.url, "HF_HUB_CACHE": str(self.cache), "HF_HOME": str(self.cache.parent),
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0",
            "XDG_CACHE_HOME": str(self.cache.parent / "xdg"),
        }  # fmt: skip


class _Refused(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HuggingFace

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str, message: str = "") -> None:
        self.answer(status, json.dumps({"error": message}).encode(), X_Error_Code=code, X_Error_Message=message or code)
        raise _Refused

    def say(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.hub.failing:
                self.refuse(self.hub.failing, "", "made to fail")
            for pattern, method in ROUTES:
                if found := re.fullmatch(pattern, f"{self.command} {path}"):
                    return method(self, body, **found.groupdict())
            self.refuse(404, "", f"no such call: {self.command} {path}")
        except _Refused:
            pass

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def found(self, kind: str | None, repo: str, rev: str | None, contents: bool = False) -> tuple[FakeRepository, str]:
        repository = self.hub.repositories.get((kind or "models", repo))
        knows = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not knows):
            self.refuse(404 if knows else 401, "RepoNotFound", "Repository not found")
        assert repository is not None
        if contents and repository.gated and not knows:
            self.refuse(401, "GatedRepo", f"Access to {repo} is restricted")
        commit = repository.refs.get(rev or "main", rev or "")
        if commit not in repository.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {rev}")
        return repository, commit

    def described(self, repository: FakeRepository, name: str, data: bytes) -> dict[str, Any]:
        size = repository.declared.get(name, len(data))
        about: dict[str, Any] = {"size": size, "oid": hashlib.sha1(data).hexdigest(), "path": name, "type": "file"}
        if name.endswith((".safetensors", ".parquet")):
            about["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 130}
        return about

    def info(self, _body: bytes, kind: str, repo: str, rev: str | None) -> None:
        repository, commit = self.found(kind, repo, rev)
        files = repository.commits[commit].items()
        siblings = [
            {"rfilename": each["path"], "size": each["size"], "blobId": each["oid"]}
            for each in (self.described(repository, name, data) for name, data in files)
        ]
        gated = "manual" if repository.gated else False
        about = {"id": repo, "sha": commit, "siblings": siblings, "private": repository.private, "gated": gated}
        self.say({**about, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, _body: bytes, kind: str, repo: str, rev: str) -> None:
        repository, commit = self.found(kind, repo, rev)
        self.say([self.described(repository, name, data) for name, data in repository.commits[commit].items()])

    def resolve(self, _body: bytes, repo: str, rev: str, file: str, kind: str | None = None) -> None:
        repository, commit = self.found((kind or "models/").rstrip("/"), repo, rev, contents=True)
        if file not in repository.commits[commit]:
            self.refuse(404, "EntryNotFound", "Entry not found")
        data = repository.commits[commit][file]
        etag, start = hashlib.sha1(data).hexdigest(), 0
        if ranged := re.match(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(ranged[1])
        headers = {"ETag": f'"{etag}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        headers |= {"Content_Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        headers["Content_Length"] = str(len(data) - start)
        self.answer(206 if start else 200, data[start:], **headers)

    def create(self, body: bytes) -> None:
        self.signed_in()
        asked = json.loads(body)
        kind, name = f"{asked.get('type') or 'model'}s", f"{asked['organization']}/{asked['name']}"
        if (kind, name) in self.hub.repositories:
            known = {"error": "You already created this repo", "url": f"{self.hub.url}/{name}"}
            return self.answer(409, json.dumps(known).encode())
        private = bool(asked.get("private")) or asked.get("visibility") == "private"  # by the library's version
        self.hub.put(name, {".gitattributes": b""}, kind, private=private)
        return self.say({"url": f"{self.hub.url}/{name}", "id": name, "name": name})

    def signed_in(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401, "", "Invalid username or password.")

    def whoami(self, _body: bytes) -> None:
        self.signed_in()
        self.say({"name": "org", "type": "user", "orgs": [], "auth": {"type": "access_token"}})

    def yaml(self, _body: bytes) -> None:
        self.say({"errors": [], "warnings": []})

    def preupload(self, body: bytes, kind: str, repo: str, rev: str) -> None:
        self.signed_in()
        self.found(kind, repo, rev)
        large = (".safetensors", ".parquet")
        self.say({"files": [
            {"path": each["path"], "uploadMode": "lfs" if each["path"].endswith(large) else "regular",
             "shouldIgnore": False}
            for each in json.loads(body)["files"]
        ]})  # fmt: skip

    def batch(self, body: bytes, repo: str, kind: str | None = None) -> None:
        self.signed_in()
        self.say({"transfer": "basic", "objects": [
            {**each, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}}
            for each in json.loads(body)["objects"]
        ]})  # fmt: skip

    def store(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.blobs[oid] = body
        self.answer(200)

    def commit(self, body: bytes, kind: str, repo: str, rev: str) -> None:
        self.signed_in()
        repository, before = self.found(kind, repo, rev)
        files = dict(repository.commits[before])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
        made = repository.put(files)
        self.say({"success": True, "commitOid": made, "commitUrl": f"{self.hub.url}/{repo}/commit/{made}"})


REPO, KIND = r"(?P<repo>[\w.-]+/[\w.-]+)", r"(?P<kind>models|datasets)"
ROUTES: list[tuple[str, Any]] = [
    (rf"GET /api/{KIND}/{REPO}(?:/revision/(?P<rev>.+))?", _Handler.info),
    (rf"GET /api/{KIND}/{REPO}/tree/(?P<rev>[^/]+)/?", _Handler.tree),
    (rf"(?:GET|HEAD) /(?P<kind>datasets/)?{REPO}/resolve/(?P<rev>[^/]+)/(?P<file>.+)", _Handler.resolve),
    (r"POST /api/repos/create", _Handler.create),
    (r"GET /api/whoami-v2", _Handler.whoami),
    (r"POST /api/validate-yaml", _Handler.yaml),
    (rf"POST /api/{KIND}/{REPO}/preupload/(?P<rev>.+)", _Handler.preupload),
    (rf"POST /api/{KIND}/{REPO}/commit/(?P<rev>.+)", _Handler.commit),
    (rf"POST /(?P<kind>datasets/)?{REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /lfs/(?P<oid>[0-9a-f]{64})", _Handler.store),
]


@contextmanager
def fake_hub(cache: Path) -> Iterator[HuggingFace]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = HuggingFace(f"http://127.0.0.1:{server.server_port}", cache / "hub")
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})  # type: ignore[assignment]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hf_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFace]:
    """The server, asked by this process and by those that it starts."""
    from huggingface_hub import constants

    from shoal.runtime import hf

    with fake_hub(tmp_path / "huggingface") as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_TOKEN", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(found.cache))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(hf, "IS_OFFLINE", False)
        yield found
