"""The HTTP interface against its own table: requests that fit it, and many that do not, by everybody.

    routes.TABLE ─► requests that fit, requests that do not ─► signed by a worker, a validator, the trainer, a stranger,
    or by nobody ─► no 5xx; the answer is what the table says, or a `Problem` ─► nothing was damaged

The hub is in this process, so that thousands of requests take seconds; what sockets add is in tests/adversary.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
import zstandard
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kit import Patch
from kit.hub import RUN_ID, Bench, ok, submission_body, worker_key
from shoal.hub.service.calls import TABLE, Call
from shoal.ledger import fold, verify
from shoal.ledger.accounts import Account
from shoal.protocol import LedgerPage, Problem

ROLES = ("nobody", "stranger", "worker", "validator", "trainer")
FAST, LONG = 6, 200


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: Patch) -> Iterator[Bench]:
    """A hub in the middle of a run: units open, leased, submitted, accepted; one batch written down."""
    monkeypatch.setattr("shoal.hub.http.polling.MAX_WAIT_S", 0.0)
    bench = Bench(tmp_path / "hub", run={"steps": 50, "max_staleness": 1}, settings={"requests_per_key_s": 0})
    ok(bench.announce(0))
    bench.accept_groups(2)
    assert bench.batch(0) is not None
    ok(bench.announce(1))
    yield bench
    bench.close()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def fitting(schema: dict[str, Any], definitions: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that fit a JSON schema such as pydantic writes."""
    if "$ref" in schema:
        return fitting(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        return st.one_of(*(fitting(each, definitions) for each in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "object" if "properties" in schema:
            fields = {name: fitting(each, definitions) for name, each in schema["properties"].items()}
            required = {name: fields.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(required, optional=fields)
        case "object":
            return st.dictionaries(st.text(max_size=8), JUNK, max_size=2)
        case "array":
            least = schema.get("minItems", 0)
            return st.lists(fitting(schema.get("items", {}), definitions), min_size=least, max_size=max(least, 2))
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True)
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=min(40, schema.get("maxLength", 40)))
        case "integer":
            return st.integers(schema.get("minimum"), schema.get("maximum"))
        case "number":
            return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return JUNK


def schema_of(kind: Any) -> st.SearchStrategy[Any]:
    schema = kind.model_json_schema()
    return fitting(schema, schema.get("$defs", {}))


@st.composite
def requests(draw: st.DrawFn, call: Call) -> tuple[dict[str, Any], bytes]:
    """Parameters and a body: as the table says, or with something else in places."""
    at, body = draw(schema_of(call.at)), b""
    if call.takes is not None:
        said = draw(schema_of(call.takes))
        if draw(st.booleans()):
            said = draw(JUNK) if draw(st.booleans()) else {**said, draw(st.sampled_from([*said, "x"])): draw(JUNK)}
        body = json.dumps(said).encode()
    elif call.method != "GET":
        body = draw(st.binary(max_size=100))
    if at and draw(st.integers(0, 3)) == 0:
        at[draw(st.sampled_from(sorted(at)))] = draw(st.text(max_size=20) | st.integers())
    return at, body


class Fuzzer:
    """Sends them as everybody in turn, and says whether the answers are such as may be given."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        stranger = bench.actor(worker_key(99))
        self._actors = dict(zip(ROLES, (None, stranger, bench.alice, bench.validator, bench.trainer), strict=True))
        self._random = random.Random(6)
        self.statuses: Counter[tuple[str, int]] = Counter()

    def run(self, examples: int) -> None:
        for rows in TABLE.values():
            for call in rows:
                self._fuzz(call, examples)

    def _fuzz(self, call: Call, examples: int) -> None:
        @settings(
            max_examples=examples, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(made=requests(call))
        def one(made: tuple[dict[str, Any], bytes]) -> None:
            at, body = made
            path, query = self._target(call, at)
            for role, actor in self._actors.items():
                target = path + query
                if actor is None:
                    response = self._bench.http.request(call.method, target, content=body)
                else:
                    response = actor.call(call.method, target, body)
                self.statuses[role, response.status_code] += 1
                self._check(call, response, f"{role}: {call.method} {target[:200]}: {response.text[:300]}")

        one()

    def _target(self, call: Call, at: dict[str, Any]) -> tuple[str, str]:
        """Half of the time, a lease, unit, node or step that exists: random names get no further than 404."""
        with self._bench.hub.context.storage.read() as reader:
            leases = [holding.lease.lease for holding in reader.holdings()]
        nodes = [self._bench.alice.key.node, self._bench.trainer.key.node]
        known: dict[str, list[Any]] = {"lease": [*leases, "u0a0"], "unit": [0, 1, 2, 3], "node": nodes, "step": [0, 1]}
        path, query = call.path, list[tuple[str, str]]()
        for name, value in at.items():
            if f"{{{name}}}" in path:
                chosen = self._random.choice(known.get(name, [value])) if self._random.random() < 0.5 else value
                path = path.replace(f"{{{name}}}", quote(str(chosen) or "x", safe="", errors="replace"))
            else:
                query += [(name, str(each)) for each in (value if isinstance(value, list) else [value])]
        encoded = [(name, value.encode(errors="replace")) for name, value in query]
        return path, f"?{httpx2.QueryParams(encoded)}" if encoded else ""

    def _check(self, call: Call, response: httpx2.Response, what: str) -> None:
        assert response.status_code < 500, what
        if response.status_code >= 300:
            Problem.model_validate_json(response.content)
        elif call.reply is None:
            assert (response.status_code, response.content) == (204, b""), what
        elif isinstance(call.reply, str):
            assert response.headers["content-type"] == call.reply, what
        else:
            assert response.headers["content-type"] == "application/json", what
            call.reply.model_validate_json(response.content)


def assert_undamaged(bench: Bench) -> None:
    """The run is whole: its ledger holds, accounts are what its rows say, and it can continue."""
    hub = bench.app.hub
    hub.upkeep.tick()
    page = LedgerPage.model_validate_json(ok(bench.http.get("/ledger?after=-1&limit=1000")).content)
    verify(page.entries, page.head)
    accounts = fold(page.entries)
    with hub.context.storage.read() as reader:
        for node in reader.nodes():
            account = accounts.by_node.get(node.node, Account())
            assert account.credit == node.credit, node
            assert account.pending == node.pending, node
        held = [holding.unit.unit for holding in reader.holdings()]
        assert len(held) == len(set(held))
        units = sum(count for state, count in reader.unit_counts().items() if not state.startswith("void_"))
        assert units == reader.progress().next_unit
    bench.alice.lease(4)
    assert bench.status().run == RUN_ID


@pytest.mark.parametrize("examples", [FAST, pytest.param(LONG, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_random_requests_do_not_break_the_hub(bench, examples, record_property):
    fuzzer = Fuzzer(bench)
    fuzzer.run(examples)
    assert_undamaged(bench)
    for role in ROLES:
        assert sum(count for (who, _), count in fuzzer.statuses.items() if who == role) > 60
    for role in ("worker", "validator", "trainer"):  # they are let in
        assert fuzzer.statuses[role, 200] > 5, fuzzer.statuses
    by_status = Counter(status for _, status in fuzzer.statuses.elements())
    record_property("table", f"fuzzed: {sum(by_status.values())} requests, by status {dict(sorted(by_status.items()))}")


def test_submissions_with_changed_bytes_are_refused(bench: Bench) -> None:
    """Bytes replaced, cut out or put in between, inside and outside of the frame: refused by name, or another body."""
    noise = random.Random(6)
    [lease] = bench.alice.lease(1)
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


@pytest.mark.parametrize("document", [
    pytest.param('{"a":' * 5000 + "1" + "}" * 5000, id="nested"), pytest.param("[" * 20_000 + "]" * 20_000, id="lists"),
    pytest.param('{"n":' + "9" * 20_000 + "}", id="digits"), pytest.param('{"n":1e999}', id="infinite"),
    pytest.param('{"n":NaN}', id="nan"), pytest.param('{"s":"\\ud800"}', id="surrogate"),
    pytest.param('{"n":-0.0,"m":1E400,"k":123456789012345678901234567890}', id="numbers"),
    pytest.param('{"a":1,"a":2,"":null,"\\u0000":[]}', id="keys"),
])  # fmt: skip
def test_odd_documents_are_refused(bench: Bench, document: str) -> None:
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
