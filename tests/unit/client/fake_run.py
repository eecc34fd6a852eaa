"""A run's keys and signed papers, and a hub that answers from a script: what the client's tests talk to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from kit.asgi import InProcess
from shoal.client import ClientOptions, HubClient
from shoal.client.trust import run_id
from shoal.protocol import Document, Lease, Message, PolicyRef, Problem, RequestSignature, SignedDocument, SigningKey
from shoal.protocol.identity import fingerprint
from shoal.protocol.lease import SamplingParameters
from shoal.protocol.node import HeartbeatReply, NodeState, NodeView, RoleCertificate, RunInfo
from shoal.protocol.signing import sign_document, verify_body, verify_request
from shoal.runtime import Backoff, ManualClock, StopToken

SAMPLING = SamplingParameters(temperature=1.0, max_new_tokens=8, eos_token_ids=(0,))


def key(number: int) -> SigningKey:
    return SigningKey.from_seed(bytes([number]) * 32)


ROOT, HUB, TRAINER, VALIDATOR, NODE, STRANGER = (key(n) for n in range(1, 7))
RUN = run_id("demo", fingerprint(ROOT.public_key))


def certificate(role: Any, holder: SigningKey, run: str = RUN, root: SigningKey = ROOT) -> SignedDocument:
    return sign_document(RoleCertificate(run=run, role=role, public_key=holder.public_key, issued_at_ms=1), root)


CERTIFICATES = (certificate("hub", HUB), certificate("trainer", TRAINER), certificate("validator", VALIDATOR))


def run_info(**changes: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "run": RUN, "name": "demo", "root_key": ROOT.public_key, "certificates": CERTIFICATES,
        "sources": ("http://origin",), "environment": "sort", "environment_digest": "e" * 64, "sampling": SAMPLING,
        "group_size": 2, "max_staleness": 1, "steps": 3,
    }  # fmt: skip
    return RunInfo(**{**fields, **changes})


def lease(**changes: Any) -> Lease:
    fields: dict[str, Any] = {
        "run": RUN, "lease": "lease-1", "node": NODE.node, "unit": 7, "attempt": 0,
        "policy": PolicyRef(incarnation=0, version=1, digest="a" * 64), "task": "t", "prompt_ids": (1, 2),
        "seeds": ("0" * 16, "f" * 16), "sampling": SAMPLING, "environment_digest": "e" * 64,
        "issued_at_ms": 1, "deadline_ms": 2,
    }  # fmt: skip
    return Lease(**{**fields, **changes})


def signed(document: Document, by: SigningKey = HUB) -> SignedDocument:
    return sign_document(document, by)


def answer(message: Message, status: int = 200) -> httpx2.Response:
    return httpx2.Response(status, content=message.model_dump_json().encode())


def refusal(status: int, code: str, message: str, **headers: str) -> httpx2.Response:
    body = Problem(code=code, message=message).model_dump_json().encode()
    return httpx2.Response(status, content=body, headers={k.replace("_", "-"): v for k, v in headers.items()})


class TickingStop(StopToken):
    """Waiting moves the manual clock instead of passing time, and is written down."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.clock.advance(seconds)
        return self.is_set()


Step = Callable[[httpx2.Request], httpx2.Response]


@dataclass
class ScriptedHub:
    """Answers `GET /run` with the run's description, and everything else with the next step of the script."""

    info: SignedDocument = field(default_factory=lambda: signed(run_info()))
    script: list[Step | httpx2.Response] = field(default_factory=list)
    requests: list[httpx2.Request] = field(default_factory=list)
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.stop = TickingStop(self.clock)

    def handle(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/run":
            return answer(self.info)
        self.requests.append(request)
        step = self.script.pop(0)
        return step if isinstance(step, httpx2.Response) else step(request)

    def client(self, pinned: str | None = None, patience_s: float = 60.0) -> HubClient:
        options = ClientOptions(patience_s=patience_s, backoff=Backoff(0.1, 5.0))
        return HubClient("http://hub:1/", NODE, self.stop, pinned, InProcess(self.handle), self.clock, options)

    def verify(self, request: httpx2.Request, run: str = RUN) -> RequestSignature:
        """Check a recorded request's signature as the hub would, and hand back what it says."""
        signature = RequestSignature.from_headers(request.headers)
        target = request.url.raw_path.decode()
        at_ms = self.clock.now_ms()
        verify_request(NODE.public_key, run, request.method, target, signature, at_ms)
        verify_body(signature, request.content)
        return signature


def no_answer(request: httpx2.Request) -> httpx2.Response:
    raise httpx2.ConnectError("connection refused", request=request)


VIEW = NodeView(node=NODE.node, name="n", role="worker", state=NodeState.ACTIVE)
REPLY = HeartbeatReply(node=VIEW)


class Network:
    """Hubs at made-up addresses. One that is down refuses connections, a broken one answers with an error, a frozen one
    costs a caller whatever it is ready to wait to "connect" or to "read"; what was asked where is written down."""

    def __init__(self, **infos: SignedDocument) -> None:
        self.infos, self.asked = infos, list[str]()
        self.down, self.frozen = set[str](), dict[str, str]()
        self.broken: dict[str, httpx2.Response] = {}
        self.clock = ManualClock()
        self.stop = TickingStop(self.clock)

    def handle(self, request: httpx2.Request) -> httpx2.Response:
        host, path = request.url.host, request.url.path
        self.asked.append(f"{host}{path}")
        if how := self.frozen.get(host):
            self.clock.advance(request.extensions["timeout"][how])
            raise (httpx2.ReadTimeout if how == "read" else httpx2.ConnectTimeout)("frozen", request=request)
        if host in self.down:
            no_answer(request)
        if host in self.broken and (path != "/run" or host not in self.infos):
            return self.broken[host]
        return answer(self.infos[host]) if path == "/run" else answer(REPLY)

    def client(self, *urls: str, pinned: str | None = None, patience_s: float = 60.0) -> HubClient:
        options = ClientOptions(patience_s=patience_s, backoff=Backoff(0.1, 5.0))
        return HubClient(urls, NODE, self.stop, pinned, InProcess(self.handle), self.clock, options)
