"""The HTTP interface against its own document: whatever the document allows, and much that it does not, by everybody.

    /openapi.json ─► schemathesis: requests that fit, requests that do not ─► signed by a worker, a validator, the
    trainer, a stranger, or by nobody ─► no 5xx; the answer is one that the document describes ─► nothing was damaged

The hub is in this process, so that thousands of requests take seconds; what sockets add is in tests/adversary.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
import zstandard
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kit import Patch
from kit.hub import RUN_ID, Actor, Bench, fresh_request, ok, submission_body, worker_key
from shoal.hub.http.routes import BULK
from shoal.ledger import fold, verify
from shoal.ledger.accounts import Account
from shoal.protocol import LedgerPage, sign_request

ROLES = ("nobody", "stranger", "worker", "validator", "trainer")
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
FAST, LONG = 3, 100


@schemathesis.serializer(BULK)
def _as_bulk(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: Patch) -> Iterator[Bench]:
    """A hub in the middle of a run: units open, leased, handed in, accepted; one batch written down."""
    monkeypatch.setattr("shoal.hub.changes.MAX_WAIT_S", 0.0)
    bench = Bench(tmp_path / "hub", run={"steps": 50, "max_staleness": 1}, settings={"requests_per_key_s": 0})
    ok(bench.announce(0))
    bench.accept_groups(2)
    assert bench.batch(0) is not None
    ok(bench.announce(1))
    yield bench
    bench.close()


@cache
def strategies(document: str) -> list[st.SearchStrategy[schemathesis.Case]]:
    """For every call: requests that fit its description, and requests that do not."""
    schema = schemathesis.openapi.from_dict(json.loads(document))
    schema.config.base_url = "http://hub"
    operations = [found.ok() for found in schema.get_all_operations()]
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    return [operation.as_strategy(generation_mode=mode) for operation in operations for mode in modes]


class Fuzzer:
    """Sends what schemathesis made, as everybody in turn, and says whether the answers are such as may be given."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._actors: dict[str, Actor | None] = {
            "nobody": None,
            "stranger": bench.actor(worker_key(99)),
            "worker": bench.alice,
            "validator": bench.validator,
            "trainer": bench.trainer,
        }
        self._random = random.Random(6)
        self.statuses: Counter[tuple[str, int]] = Counter()

    def run(self, examples: int) -> None:
        for cases in strategies(ok(self._bench.http.get("/openapi.json")).text):
            try:
                self._fuzz(cases, examples)
            except (Unsatisfiable, pytest.skip.Exception):
                continue  # nothing about this call can be wrong

    def _fuzz(self, cases: st.SearchStrategy[schemathesis.Case], examples: int) -> None:
        @settings(
            max_examples=examples, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=cases)
        def one(case: schemathesis.Case) -> None:
            self._point_at_what_there_is(case)
            for role, actor in self._actors.items():
                self._try(case, role, actor)

        one()

    def _try(self, case: schemathesis.Case, role: str, actor: Actor | None) -> None:
        response = self._send(case, actor)
        self.statuses[role, response.status_code] += 1
        assert response.status_code < 500, f"{role}: {case.method} {case.path}: {response.text}"
        case.validate_response(response, checks=CHECKS)

    def _point_at_what_there_is(self, case: schemathesis.Case) -> None:
        """Half of the time, name a lease, unit, node or step that exists: random names get no further than 404."""
        if self._random.random() < 0.5 or not case.path_parameters:
            return
        with self._bench.app.state.hub.context.storage.read() as reader:
            leases = [holding.lease.lease for holding in reader.holdings()]
        known = {
            "lease": [*leases, "u0a0"],
            "unit": [0, 1, 2, 3],
            "node": [self._bench.alice.key.node, self._bench.trainer.key.node],
            "step": [0, 1, 2],
        }
        for name in case.path_parameters:
            if name in known:
                case.path_parameters[name] = self._random.choice(known[name])

    def _send(self, case: schemathesis.Case, actor: Actor | None) -> httpx.Response:
        prepared = requests.Request(**case.as_transport_kwargs(base_url="http://hub")).prepare()
        body = prepared.body or b""
        content = body.encode() if isinstance(body, str) else bytes(body)
        headers = {name: _text(value) for name, value in prepared.headers.items() if name.lower() != "content-length"}
        request = httpx.Request(case.method, prepared.url or "", content=content)
        if actor is not None:
            target = request.url.raw_path.decode("ascii")
            headers |= sign_request(actor.key, RUN_ID, case.method, target, content, self._bench.clock.now_ms())
        request.headers.update(headers)
        response = self._bench.http.send(request)
        response.elapsed = timedelta(0)  # schemathesis wants to know
        return response


def _text(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1", errors="replace")


def ledger_page(bench: Bench, after: int) -> LedgerPage:
    return LedgerPage.model_validate_json(ok(bench.http.get(f"/ledger?after={after}&limit=1000")).content)


def assert_undamaged(bench: Bench) -> None:
    """The run is whole: its ledger holds, accounts are what its rows say, and it can go on."""
    hub = bench.app.state.hub
    hub.upkeep.tick()
    entries, after = [], -1
    while page := LedgerPage.model_validate_json(
        ok(bench.http.get(f"/ledger?after={after}&limit=1000")).content
    ).entries:
        entries += page
        after = page[-1].index
    head = LedgerPage.model_validate_json(ok(bench.http.get("/ledger?limit=1")).content).head
    verify(entries, head)
    accounts = fold(entries)
    with hub.context.storage.read() as reader:
        for node in reader.nodes():
            account = accounts.by_node.get(node.node, Account())
            assert account.credit == node.credit, node
            assert account.pending == node.pending, node
        held = [holding.unit.unit for holding in reader.holdings()]
        assert len(held) == len(set(held))
        units = sum(count for state, count in reader.unit_counts().items() if not state.startswith("void_"))
        assert units == reader.progress().next_unit
    bench.alice.lease(fresh_request(), 4)
    assert bench.status().run == RUN_ID


def test_nothing_that_the_document_allows_or_forbids_breaks_the_hub(bench: Bench) -> None:
    fuzzer = Fuzzer(bench)
    fuzzer.run(FAST)
    assert_undamaged(bench)
    for role in ROLES:
        assert sum(count for (who, _), count in fuzzer.statuses.items() if who == role) > 60
    for role in ("worker", "validator", "trainer"):  # they do get through the door
        assert fuzzer.statuses[role, 200] > 5, fuzzer.statuses


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_same_for_longer(bench: Bench, record_property: Callable[[str, object], None]) -> None:
    fuzzer = Fuzzer(bench)
    fuzzer.run(LONG)
    assert_undamaged(bench)
    by_status = Counter(status for _, status in fuzzer.statuses.elements())
    record_property("table", f"fuzzed: {sum(by_status.values())} requests, by status {dict(sorted(by_status.items()))}")


def test_submissions_with_changed_bytes(bench: Bench) -> None:
    """Bytes replaced, cut out or put in between, inside and outside of the frame: refused by name, or another body."""
    noise = random.Random(6)
    [lease] = bench.alice.lease(fresh_request(), 1)
    whole = submission_body(lease)
    raw = zstandard.ZstdDecompressor().decompress(whole)
    for number in range(80):
        inside = number % 2 == 0
        source = raw if inside else whole
        start = noise.randrange(len(source))
        end = min(len(source), start + noise.choice([0, 1, 8, len(source)]))
        changed = source[:start] + noise.randbytes(noise.choice([0, 1, 2, 200])) + source[end:]
        body = zstandard.ZstdCompressor().compress(changed) if inside else changed
        response = bench.alice.submit(lease, body)
        assert response.status_code in (201, 200, 409, 410, 413, 422), (response.text, changed)
    assert_undamaged(bench)


@pytest.mark.parametrize(
    "document",
    [
        pytest.param('{"a":' * 5000 + "1" + "}" * 5000, id="nested"),
        pytest.param("[" * 20_000 + "]" * 20_000, id="lists"),
        pytest.param('{"n":' + "9" * 20_000 + "}", id="digits"),
        pytest.param('{"n":1e999}', id="infinite"),
        pytest.param('{"n":NaN}', id="nan"),
        pytest.param('{"s":"\\ud800"}', id="surrogate"),
        pytest.param('{"n":-0.0,"m":1E400,"k":123456789012345678901234567890}', id="numbers"),
        pytest.param('{"a":1,"a":2,"":null,"\\u0000":[]}', id="keys"),
    ],
)
def test_documents_that_nobody_would_write(bench: Bench, document: str) -> None:
    """In every place that takes a signed document from somebody who may send one."""
    signed = f'{{"kind":"verdict","document":{document},"signed_by":"{"a" * 64}","signature":"{"b" * 128}"}}'
    calls = [
        (bench.validator, "/verdicts", f'{{"verdicts":[{signed}]}}'),
        (bench.trainer, "/policies", signed),
        (bench.trainer, "/steps", f'{{"step":1,"metrics":{document}}}'),
        (bench.alice, "/heartbeat", f'{{"counters":{document}}}'),
        (bench.alice, "/nodes", json.dumps({"public_key": bench.alice.key.public_key})[:-1]
         + f',"role":"trainer","certificate":{signed}}}'),
    ]  # fmt: skip
    for actor, path, body in calls:
        response = actor.call("POST", path, body.encode())
        assert response.status_code < 500, (path, response.text)
    ok(bench.http.get("/status"))
    assert_undamaged(bench)
