"""A hub that lies: a real server at one address, whose every answer is the attack's choice.

HostileHub ─┬─ root, hub key          those of whatever run it plays at the moment; `become` plays another
            ├─ info                   what it says of the run, signed
            ├─ answers[path]          what it says to anything else: (status, headers, body) or a function of it
            └─ requests               everything that it was sent
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from shoal import protocol
from shoal.client.trust import run_id

SAMPLING = protocol.SamplingParameters(temperature=1.0, max_new_tokens=8, eos_token_ids=(0,))


@dataclass(frozen=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, dict[str, str], bytes]


@dataclass
class HostileHub:
    url: str = ""
    requests: list[Asked] = field(default_factory=list)
    answers: dict[str, Answer | Callable[[Asked], Answer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.become("demo")

    def become(self, name: str, **changes: Any) -> None:
        """Play a run of this name with keys of its own; `changes` are of its `RunInfo`."""
        seed = name.encode()[:20].ljust(31, b".")
        self.root, self.key, self.trainer = (protocol.SigningKey.from_seed(seed + bytes([n])) for n in range(3))
        self.fingerprint = protocol.fingerprint(self.root.public_key)
        self.run = run_id(name, self.fingerprint)
        fields: dict[str, Any] = {
            "run": self.run, "name": name, "root_key": self.root.public_key,
            "certificates": (self.certificate("hub", self.key), self.certificate("trainer", self.trainer)),
            "sources": (), "environment": "sort", "environment_digest": "e" * 64,
            "sampling": SAMPLING, "group_size": 2, "max_staleness": 1, "steps": 3,
            "profiles": ("torch/cpu/float32", "scripted/cpu/float32"),
        }  # fmt: skip
        self.info = protocol.RunInfo(**{**fields, **changes})

    def certificate(self, role: Any, holder: protocol.SigningKey) -> protocol.SignedDocument:
        document = protocol.RoleCertificate(run=self.run, role=role, public_key=holder.public_key, issued_at_ms=1)
        return protocol.sign_document(document, self.root)

    def sign(self, document: protocol.Document) -> protocol.SignedDocument:
        return protocol.sign_document(document, self.key)

    def answer(self, asked: Asked) -> Answer:
        self.requests.append(asked)
        given = self.answers.get(asked.path.split("?")[0])
        if given is not None:
            return given(asked) if callable(given) else given
        if asked.path == "/run":
            return 200, {}, self.sign(self.info).model_dump_json().encode()
        return 404, {}, json.dumps({"code": "http.404", "message": "no such thing"}).encode()


@contextmanager
def hostile_hub(host: str = "127.0.0.1") -> Iterator[HostileHub]:
    hub = HostileHub()
    with answering(hub.answer, host) as hub.url:
        yield hub


@contextmanager
def answering(answer: Callable[[Asked], Answer], host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a server that says this to every request, for as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, answer_headers, content = answer(Asked(self.command, self.path, headers, body))
            self.send_response(status)
            for name, value in {"content-type": "application/json", **answer_headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_CONNECT = handle_any  # noqa: N815 - the library's names

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer((host, 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub() -> Iterator[HostileHub]:
    with hostile_hub() as served:
        yield served
