"""
How long a page takes for a thousand nodes and more, in a real Chromium; with `--images DIR` also the pictures of the docs, of a real job.

    python benchmarks/dashboard.py [--runs N] [--images docs/images]

Figures for each number of nodes, medians: the state as one message; from its arrival to the drawn page; from opening the address to the drawn
page; one update in which a fifth of the nodes changed, from its arrival to the drawn page; one scrape of the metrics, and how long it takes the master.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.integration.browser import CHROMIUM, FLAGS  # noqa: E402
from tests.master.web.page_lab import NOW, TOKEN, Page, a_progress, a_status, populate, serve_page  # noqa: E402

SIZES = (100, 1000, 5000)
MEASURE = "(({startTime, duration}) => [duration, startTime + duration])(performance.getEntriesByName('render').at(-1))"


async def measure(browser: Any, num_nodes: int, runs: int) -> str:
    rows = []
    async with serve_page() as page:
        populate(page, num_nodes)
        await page.update()
        size = len(page.gatherer.board.encoded(0))
        for _ in range(runs):
            began_at = time.perf_counter()
            scrape = len(await page.job_metrics.render())
            scraped = time.perf_counter() - began_at
            rows.append((*await open_page(browser, page, num_nodes), scraped))
    whole, opened, update, scraped = (statistics.median(column) for column in zip(*rows, strict=True))
    return (
        f"{num_nodes:6d} nodes: state {size / 1e6:.2f} MB, drawn {whole:.0f} ms after its arrival and {opened:.0f} ms after opening; "
        f"update {update:.0f} ms; scrape {scrape / 1e6:.2f} MB in {scraped * 1000:.0f} ms"
    )


async def open_page(browser: Any, page: Page, num_nodes: int) -> tuple[float, float, float]:
    context = await browser.new_context(viewport={"width": 1400, "height": 1000})
    tab = await context.new_page()
    await tab.goto(f"{page.url}/?token={TOKEN}")
    await tab.wait_for_selector("body[data-ready]")
    whole, opened = await tab.evaluate(MEASURE)
    began_at = time.perf_counter()
    for node in range(0, num_nodes, 5):
        page.gatherer.observe(a_progress(node, step=2000 + int(began_at)), NOW)
    page.job.status = a_status(num_nodes, host=f"h{began_at:.0f}")
    count = await tab.evaluate("performance.getEntriesByName('update').length")
    await page.update()
    await tab.wait_for_function(f"() => performance.getEntriesByName('update').length > {count}")
    update = await tab.evaluate("performance.getEntriesByName('update').at(-1).duration")
    await context.close()
    return whole, opened, update


async def take_pictures(browser: Any, folder: Path) -> None:
    """Of a real job of three nodes that loses a worker and is saved on the way; and of a thousand nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dlr-") as scratch:
        work = Path(scratch)
        argv = [
            sys.executable,
            "-m",
            "dlrover.cli.main",
            "local",
            "--nodes",
            "3",
            "--job-name",
            "gpt-small",
            "--netns",
            "off",
        ]
        argv += ["--", "--enable-dashboard", "--dashboard-port", "0", "--tee", "3", "--log-dir", str(work / "logs")]
        argv += [str(ROOT / "tests/integration/scripts/shown.py"), scratch, "--plain"]
        environ = {**os.environ, "TMPDIR": scratch, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        job = start(argv, environ, work)
        try:
            await until(lambda: all((work / f"pid-{rank}").exists() for rank in range(3)))
            url = say([*argv[:3], "dashboard", "gpt-small"], environ)
            await picture_job(browser, url, work, folder)
        finally:
            job.send_signal(signal.SIGINT)
            job.wait(60)
    async with serve_page() as page:
        populate(page, 1000)
        context = await browser.new_context(viewport={"width": 1200, "height": 560})
        tab = await context.new_page()
        await tab.goto(f"{page.url}/?token={TOKEN}")
        await tab.wait_for_selector("body[data-ready]")
        await tab.click("#grid", position={"x": 200, "y": 40})
        await tab.screenshot(path=folder / "dashboard-thousand.png")


async def picture_job(browser: Any, url: str, work: Path, folder: Path) -> None:
    context = await browser.new_context(viewport={"width": 1400, "height": 1000}, color_scheme="light")
    context.set_default_timeout(120_000)
    tab = await context.new_page()
    await tab.goto(url)
    await tab.wait_for_selector("#loss svg")
    await asyncio.sleep(15)
    os.kill(int((work / "pid-1").read_text()), signal.SIGKILL)
    await tab.wait_for_selector("#failures details")
    await tab.click("[data-action=save]")
    await tab.click("#confirm-yes")
    await tab.wait_for_function("() => document.querySelector('#checkpoints').textContent.includes('storage')")
    await asyncio.sleep(20)
    await tab.click("#grid", position={"x": 60, "y": 10})
    await tab.click("#diagnosis summary")
    await tab.click("#h-timeline ~ details summary")
    await tab.focus("#log-name")
    await tab.select_option("#log-name", "worker-1")
    await tab.click("#log-show")
    await tab.wait_for_function("() => document.querySelector('#log').textContent.includes('step')")
    await tab.mouse.move(0, 0)
    await tab.evaluate("scrollTo(0, 0)")
    await tab.screenshot(path=folder / "dashboard-light.png", full_page=True)
    await tab.click("#theme")
    await tab.wait_for_selector(":root[data-theme=dark]")
    await tab.evaluate("scrollTo(0, 0)")
    await tab.screenshot(path=folder / "dashboard-dark.png")
    await tab.set_viewport_size({"width": 390, "height": 844})
    await tab.evaluate("scrollTo(0, 0)")
    await asyncio.sleep(1)
    await tab.screenshot(path=folder / "dashboard-phone.png")


def start(argv: list[str], environ: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "job.log").open("wb") as out:
        return subprocess.Popen(argv, env=environ, stdout=out, stderr=out, cwd=folder)


def say(argv: list[str], environ: dict[str, str]) -> str:
    return subprocess.run(argv, env=environ, capture_output=True, text=True, check=True).stdout.strip()


async def until(condition: Any, timeout: float = 120.0) -> None:
    ends_at = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < ends_at, "the job did not come up"
        await asyncio.sleep(0.2)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--images", type=Path, help="write the pictures of the docs there, and measure nothing")
    options = parser.parse_args()
    if not CHROMIUM:
        sys.exit("No chromium on this machine. Use: apt-get install chromium")
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        if options.images:
            await take_pictures(browser, options.images)
        else:
            for num_nodes in SIZES:
                print(await measure(browser, num_nodes, options.runs), flush=True)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
