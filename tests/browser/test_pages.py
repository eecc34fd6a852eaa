"""The pages about a run in a real browser (Chromium, by Playwright): `make test-browser`."""

import hashlib
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit import TempPaths
from kit.cast import Running
from kit.hub import HUB, VALIDATOR, Bench, ok, submission_body, verdict_on
from shoal import protocol
from shoal.dashboard import DashboardSettings
from shoal.dashboard.site import Site
from shoal.hub.http.server import run_hub

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = (
    "<script>window.hit=1</script><img src=x onerror=window.hit=1>\"'><svg onload=window.hit=1>"
    "javascript:window.hit=1 \u202e{{1+1}} \x1b[2J"
)
PAGES = ("", "nodes", "rollouts", "tasks", "policies", "ledger", "recipe", "rollout/0/0", "rollout/1/0")
IN_TIME_MS = 30_000
KIND = '\\"kind\\":\\"node\\"'


def as_hostile_texts(ids: list[list[int]]) -> list[str]:
    return [HOSTILE for _ in ids]


@pytest.fixture(scope="module")
def url(tmp_path_factory: TempPaths) -> Iterator[str]:
    """A hub whose prompts, completions, names, reasons and parts of rewards are hostile, through its real calls."""
    folder = tmp_path_factory.mktemp("pages") / "hub"
    bench = Bench(folder, {"groups_per_step": 4}, changes={"texts": as_hostile_texts})
    ok(bench.announce(0))
    bench.change(bench.alice, name=HOSTILE)
    for outcome in ("accepted", "rejected"):
        [lease] = bench.alice.lease()
        ok(bench.alice.submit(lease, submission_body(lease)))
        [audit] = bench.audits()
        parts = tuple(protocol.RolloutReward(value=value, parts={HOSTILE: value}) for value in (0.0, 1.0))
        changes: dict[str, Any] = {"outcome": outcome, "message": HOSTILE[:500]}
        if outcome == "rejected":
            changes |= {"reason": "sampling.seed", "severity": None}
        opened = protocol.open_document(audit.lease, protocol.Lease, HUB.public_key)
        verdict = verdict_on(opened, audit.submission, rewards=parts if outcome == "accepted" else (), **changes)
        assert not ok(bench.report(protocol.sign_document(verdict, VALIDATOR))).json().get("refused")
    for step in range(3):
        metrics = {"reward_mean": step / 3, "entropy": 1.0, "part_x": 0.5}
        ok(bench.trainer.call("POST", "/steps", {"step": step, "metrics": metrics, "alarms": {"guard.x": HOSTILE}}))
    config = bench.app.hub.context.config
    bench.hub.close()
    bench.close()
    pages = lambda hub: Site(hub, DashboardSettings(public="all"), HOSTILE, folder / "records")  # noqa: E731
    serving = Running(partial(run_hub, config, pages=pages))
    try:
        yield serving.url
    finally:
        serving.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium: install it (Debian: apt install chromium)")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_renders_without_errors_and_texts_are_inert(url: str, browser: Any, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, said, asked = context.new_page(), list[str](), set[str]()
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.add("/".join(request.url.split("/")[:3])))
    for path in PAGES:
        page.goto(f"{url}/#/{path}")
        page.reload()
        page.wait_for_selector("main h1", timeout=IN_TIME_MS)
        assert page.inner_text("main h1") != "Not shown", (path, page.inner_text("main"))
        assert page.evaluate("() => window.hit") is None, path
        assert page.evaluate("() => document.querySelectorAll('main script, main img, main svg').length") == 0, path
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth + 1"), f"{path} is too wide"
    page.goto(f"{url}/#/rollout/0/0")
    page.wait_for_selector("main .text", timeout=IN_TIME_MS)
    assert "<script>window.hit=1</script>" in page.inner_text("main"), "the text is shown as it is"
    assert said == []
    assert asked == {url.rstrip("/")}, "nothing from elsewhere"
    context.close()


def test_a_chart_is_drawn_and_its_numbers_are_a_table_too(url: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"{url}/")
    page.wait_for_selector(".chart canvas", timeout=IN_TIME_MS)
    page.click(".chart summary >> nth=0")
    assert page.locator(".chart >> nth=0").locator("details tbody tr").count() == 3
    page.close()


def test_chain_is_checked_in_the_browser_and_a_changed_row_is_found(url: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"{url}/#/ledger")
    page.click("text=Check the whole chain", timeout=IN_TIME_MS)
    page.wait_for_selector("#verified:has-text('All')", timeout=IN_TIME_MS)

    def changed(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=answer.text().replace(KIND, KIND.replace("node", "nude"), 1))

    page.route("**/view/ledger*", changed)
    page.click("text=Check the whole chain")
    page.wait_for_selector("#verified:has-text('was changed')", timeout=IN_TIME_MS)
    page.close()


def test_pages_are_reached_by_keyboard_and_named_for_screen_readers(url: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"{url}/")
    page.wait_for_selector("main h1", timeout=IN_TIME_MS)
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to the content"
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('Nodes')", timeout=IN_TIME_MS)
    assert page.get_attribute("nav a[aria-current=page]", "href") == "#/nodes"
    assert page.evaluate("() => document.activeElement.id") == "main"
    assert page.evaluate("() => [...document.querySelectorAll('input, select')].every((each) => each.labels.length)")
    page.close()


def test_live_changes_arrive(url: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"{url}/")
    page.wait_for_selector("#live:has-text('live')", timeout=IN_TIME_MS)
    assert "test: step" in page.title()
    page.close()


def test_own_sha256_is_the_standards(url: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(f"{url}/")
    for text in ("", "abc", "ä" * 55, "x" * 64, "é" * 1000):
        found = page.evaluate("async (text) => (await import('/ui/sha256.js')).sha256(text)", text)
        assert found == hashlib.sha256(text.encode()).hexdigest()
    page.close()


def test_files_of_the_pages_are_in_the_package() -> None:
    assert (Path(__file__).parents[2] / "src/shoal/dashboard/static/LICENSE-uplot").is_file()
