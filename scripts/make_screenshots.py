"""Write the pictures of a run's pages that README and docs show: docs/start/pages-*.png.

.venv/bin/python scripts/make_screenshots.py runs/demo     (`make screenshots`; needs Chromium and Playwright)
"""

import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

from shoal.run.folder import RunFolder

OUT = Path(__file__).parents[1] / "docs" / "start"
PICTURES = {"pages-overview.png": ("", "light"), "pages-rollouts.png": ("rollouts?order=best", "dark")}
START_S, SIZE = 60.0, {"width": 1100, "height": 760}


def main(run: Path) -> None:
    url = RunFolder.open(run).endpoints.hub
    hub = subprocess.Popen([sys.executable, "-m", "shoal.cli", "hub", str(run)], stderr=subprocess.DEVNULL)
    try:
        wait_for(url, hub)
        with sync_playwright() as started:
            browser = started.chromium.launch(
                executable_path=shutil.which("chromium") or shutil.which("chromium-browser"), args=["--no-sandbox"]
            )
            for name, (page, scheme) in PICTURES.items():
                shown = browser.new_context(viewport=SIZE, color_scheme=scheme).new_page()
                shown.goto(f"{url}/#/{page}")
                shown.wait_for_selector("main table, main canvas")
                shown.wait_for_selector("#live:has-text('live')")
                shown.screenshot(path=OUT / name)
                sys.stdout.write(f"{OUT / name}\n")
            browser.close()
    finally:
        hub.terminate()
        hub.wait(20)


def wait_for(url: str, hub: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and hub.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the hub of the run did not start at {url} in {START_S:.0f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
