"""Which route a submission takes, and what happens when the store's is closed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from shoal.client.delivery import AVOID_S, Delivery
from shoal.client.http import REACH, open_http
from shoal.errors import HubRefused
from shoal.protocol import submission_digest
from shoal.runtime.clock import ManualClock
from shoal.runtime.targets import PUBLIC_ONLY

BODY = b"a group"


class FakeHub:
    """Notes what it is asked for. `commits` are refusals to answer commits with, before it takes one."""

    def __init__(self, uploads: str = "store", needed: bool = True) -> None:
        self.asked: list[str] = []
        self.uploads, self.needed = uploads, needed
        self.ticket_refusal: HubRefused | None = None
        self.commits: list[HubRefused] = []

    def run_info(self) -> Any:
        return SimpleNamespace(run="run", uploads=self.uploads)

    def trusted_run(self) -> Any:
        return SimpleNamespace(reach=PUBLIC_ONLY)

    def submit(self, lease: str, body: bytes) -> Any:
        self.asked.append("submit")
        return f"receipt for {lease}, {submission_digest(body)}, by the hub"

    def upload_ticket(self, _lease: str, request: Any) -> Any:
        self.asked.append("ticket")
        assert (request.submission, request.size_bytes) == (submission_digest(BODY), len(BODY))
        if self.ticket_refusal is not None:
            raise self.ticket_refusal
        headers = {"content-length": str(len(BODY)), "x-amz-checksum-sha256": "AA=="}
        return SimpleNamespace(url="http://store/put?X-Amz-Signature=secret", headers=headers, needed=self.needed)

    def commit_upload(self, lease: str, submission: str) -> Any:
        self.asked.append("commit")
        if self.commits:
            raise self.commits.pop(0)
        return f"receipt for {lease}, {submission}, by the store"


class FakeStore:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: int = 200) -> None:
        self.status = status
        self.put: list[tuple[str, bytes]] = []
        monkeypatch.setattr(httpx.Client, "send", self._send)

    def _send(self, request: httpx.Request, stream: bool, **_: Any) -> httpx.Response:
        assert (request.method, stream) == ("PUT", True)
        assert request.extensions[REACH] == PUBLIC_ONLY
        assert request.extensions["timeout"]["connect"] is not None
        content = request.read()
        assert request.headers["content-length"] == str(len(content))
        self.put.append((str(request.url), content))
        return httpx.Response(self.status, text="<Error>no\n room</Error>", request=request)


def delivery(hub: FakeHub, clock: ManualClock | None = None) -> Delivery:
    return Delivery(hub, clock or ManualClock())  # type: ignore[arg-type]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    return FakeStore(monkeypatch)


@pytest.mark.parametrize(
    ("hub", "commits", "asked", "puts"),
    [
        pytest.param({"uploads": "hub"}, (), ["submit"], 0, id="a run without a store"),
        pytest.param({}, (), ["ticket", "commit"], 1, id="by the store, put once"),
        pytest.param({"needed": False}, (), ["ticket", "commit"], 0, id="the hub has it already"),
        *(
            pytest.param({}, (code,), ["ticket", "commit", "submit"], 1, id=code)
            for code in ("upload.missing", "upload.other_bytes", "upload.by_hub")
        ),
    ],
)
def test_which_way_a_submission_goes(store: FakeStore, hub: Any, commits: Any, asked: list[str], puts: int) -> None:
    fake = FakeHub(**hub)
    fake.commits = [HubRefused(409, code, "…") for code in commits]
    receipt: Any = delivery(fake).hand_in("u1a0", BODY)
    assert (
        receipt == f"receipt for u1a0, {submission_digest(BODY)}, by the {'store' if asked[-1] == 'commit' else 'hub'}"
    )
    assert (fake.asked, [body for _, body in store.put]) == (asked, [BODY] * puts)


@pytest.mark.parametrize("code", ["lease.late", "submission.other_body", "lease.not_yours"])
def test_a_refusal_of_the_submission_is_final_on_either_route(store: FakeStore, code: str) -> None:
    hub = FakeHub()
    hub.ticket_refusal = HubRefused(410, code, "…")
    with pytest.raises(HubRefused, match=code):
        delivery(hub).hand_in("u1a0", BODY)
    assert (hub.asked, store.put) == (["ticket"], [])


def test_a_store_that_refuses_is_left_alone_for_a_while_and_then_tried_again(monkeypatch, caplog):
    store, hub, clock = FakeStore(monkeypatch, status=403), FakeHub(), ManualClock()
    route = delivery(hub, clock)
    for _ in range(3):
        route.hand_in("u1a0", BODY)
    assert hub.asked == ["ticket", "submit", "submit", "submit"]
    [said] = [record.getMessage() for record in caplog.records]
    assert "HTTP 403 <Error>no room</Error>" in said
    assert "secret" not in said  # the rest of the URL is leave to upload
    store.status = 200
    clock.advance(AVOID_S)
    route.hand_in("u1a0", BODY)
    assert hub.asked[4:] == ["ticket", "commit"]
    route.close()


def test_a_worker_that_ends_while_it_uploads_still_has_the_hub() -> None:
    hub = FakeHub()
    route = delivery(hub)
    route._http = open_http()
    route.close()
    route.hand_in("u1a0", BODY)  # over connections that are closed
    assert hub.asked == ["ticket", "submit"]
