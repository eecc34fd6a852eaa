"""Who sees what of the pages about a run, and how they are sent."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kit.hub import Bench, as_texts, ok
from shoal.dashboard import DashboardSettings
from shoal.dashboard.site import Site, static_files

STRANGER = "203.0.113.9"
HOSTILE = "<img src=x onerror=alert(1)>=1+1"
PAGES = ("overview", "series", "nodes", "policies", "ledger", "recipe", "tasks", "rollouts")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """One group trained on, one that may still be given to somebody."""
    made = Bench(
        tmp_path / "hub",
        {"groups_per_step": 1, "max_staleness": 2},
        {"trusted_proxies": ["127.0.0.1"]},
        changes={"texts": as_texts},
    )
    ok(made.announce(0))
    made.accept_groups(1)
    assert made.batch(0) is not None
    ok(made.judge(made.audit_of(made.bob), (), outcome="rejected", reason="sampling.seed", message=HOSTILE))
    made.clock.advance(60)
    for _ in range(2):
        made.clock.advance(30)
        made.hub.upkeep.tick()
    yield made
    made.close()
    made.hub.close()


def shows(bench: Bench, public: str) -> None:
    settings = DashboardSettings.model_validate({"public": public})
    bench.app._pages = Site(bench.hub, settings, "[run]\nname = 'x'", bench.folder / "records")


def seen(bench: Bench, path: str, **headers: str) -> httpx2.Response:
    return bench.http.get(path, headers={"host": "localhost:8470", **headers})


def by_stranger(bench: Bench, path: str) -> httpx2.Response:
    return seen(bench, path, **{"x-forwarded-for": STRANGER})


@pytest.mark.parametrize(("public", "hidden"), [("none", PAGES), ("overview", ("tasks", "rollouts")), ("all", ())])
def test_strangers_see_what_the_owner_shows(bench: Bench, public: str, hidden: tuple[str, ...]) -> None:
    shows(bench, public)
    for page in PAGES:
        assert by_stranger(bench, f"/view/{page}").status_code == (403 if page in hidden else 200), page
        assert seen(bench, f"/view/{page}").status_code == 200, "the owner sees everything"
    assert by_stranger(bench, "/").status_code == 200, "the page says why it is empty"


def everything(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from everything(each)
    elif isinstance(value, list):
        for each in value:
            yield from everything(each)
    else:
        yield str(value)


def test_strangers_never_see_undecided_units_seeds_or_numbers_of_single_tokens(bench: Bench) -> None:
    shows(bench, "all")
    rows = by_stranger(bench, "/view/rollouts").json()
    assert {(row["unit"], row["outcome"]) for row in rows} == {(0, "accepted")}, "unit 1 is given out again"
    assert {row["unit"] for row in seen(bench, "/view/rollouts").json()} == {0, 1}
    probed = [by_stranger(bench, f"/view/rollouts?text=A&limit=1&after={place}").json() for place in range(3)]
    assert [[row["unit"] for row in found] for found in probed] == [[0], [0], []], "hidden ones take no place"
    undecided = next(row for row in seen(bench, "/view/rollouts?unit=1").json())
    assert by_stranger(bench, f"/view/rollout/{undecided['group']}/0").status_code == 403
    shown = by_stranger(bench, f"/view/rollout/{rows[0]['group']}/0").json()
    assert (shown["completion"], shown["gaps"], shown["margins"], shown["checks"]) == ("ABC", [], [], [])
    for page in (*PAGES, f"node/{bench.alice.key.node}", "rollouts?unit=0", f"rollout/{rows[0]['group']}/1"):
        words = set(everything(by_stranger(bench, f"/view/{page}").json()))
        assert not words & {"seeds", "network", "address", "document", "evidence"}, page


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8470"},
        {"x-forwarded-for": STRANGER},
        {"forwarded": "for=1.2.3.4"},
        {"x-real-ip": "1.2.3.4"},
    ],
)
def test_request_by_another_name_or_through_a_proxy_is_not_the_owners(bench: Bench, headers: dict[str, str]) -> None:
    shows(bench, "overview")
    assert seen(bench, "/view/rollouts", **headers).status_code == 403


@pytest.mark.parametrize("path", ["/", "/ui/main.js", "/view/overview"])
def test_every_answer_forbids_what_is_not_the_hubs_own_and_is_sent_once(bench: Bench, path: str) -> None:
    shows(bench, "overview")
    first = seen(bench, path, **{"accept-encoding": "identity"})
    policy = first.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert first.headers["x-content-type-options"] == "nosniff"
    if path != "/view/overview":  # which has the time in it
        again = seen(bench, path, **{"if-none-match": first.headers["etag"], "accept-encoding": "identity"})
        assert (again.status_code, again.content) == (304, b"")
    bench.http.headers["accept-encoding"] = "gzip"
    zipped = seen(bench, path)
    assert zipped.headers["content-encoding"] == "gzip"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/ui/../site.py", 404), ("/ui/%2e%2e/site.py", 404), ("/view/nothing", 404), ("/view/rollout/x/0", 422),
        ("/view/rollouts?order=sideways", 422), ("/view/rollouts?unit=x", 422), ("/view/rollout/9999/0", 404),
        ("/view/node/nobody", 404), ("/view/overview?format=csv", 422), ("/view/rollout/99999999999999999999/0", 422),
        ("/view/ledger?after=x", 422),
    ],
)  # fmt: skip
def test_bad_addresses_get_a_sentence(bench: Bench, path: str, status: int) -> None:
    shows(bench, "all")
    answer = seen(bench, path)
    assert answer.status_code == status
    assert answer.json()["message"]


def test_pages_are_only_read(bench: Bench) -> None:
    shows(bench, "all")
    assert bench.http.post("/view/overview", headers={"host": "localhost"}).status_code == 405


def test_cells_of_a_csv_file_are_no_formulas(bench: Bench) -> None:
    shows(bench, "all")
    bench.change(bench.alice, name="=1+1")
    answer = seen(bench, "/view/nodes?format=csv")
    assert "attachment" in answer.headers["content-disposition"]
    assert "'=1+1" in answer.text
    assert ",=1+1" not in answer.text


def test_followers_get_an_event_when_something_has_changed(bench: Bench) -> None:
    shows(bench, "overview")
    first = by_stranger(bench, "/view/events")
    assert first.headers["content-type"] == "text/event-stream"
    lines = dict(line.split(": ", 1) for line in first.text.strip().split("\n"))
    assert json.loads(lines["data"])["step"] == 0
    ok(bench.announce(1))
    second = seen(bench, "/view/events", **{"x-forwarded-for": STRANGER, "last-event-id": lines["id"]})
    assert f"id: {lines['id']}" not in second.text
    assert '"version":1' in second.text


def test_ledger_rows_have_the_text_that_their_hash_is_of(bench: Bench) -> None:
    import hashlib

    shows(bench, "overview")
    page = seen(bench, "/view/ledger").json()
    for row in page["rows"]:
        assert hashlib.sha256(b"shoal/ledger/v1\n" + row["text"].encode()).hexdigest() == row["hash"]
    assert page["head"]["hash"] == page["rows"][-1]["hash"]


def test_static_files_are_small_and_make_no_html_of_texts() -> None:
    sources = {path: data for path, (data, _) in static_files().items()}
    assert sum(len(gzip.compress(data)) for data in sources.values()) < 100_000
    own = b"".join(data for path, data in sources.items() if path.endswith(".js") and "uplot" not in path)
    for word in (
        b"innerHTML",
        b"outerHTML",
        b"insertAdjacent",
        b"document.write",
        b"eval(",
        b"new Function",
        b"http://",
        b"https://",
    ):
        assert word not in own
