"""The page in a real browser: over a real job that is killed, stopped and steered, and over a thousand nodes that are none."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from dlrover.master.view.roles import gather_roles
from dlrover.protocol.messages.fleet import FleetNodeStatus, NodePhase, NodeType
from dlrover.protocol.messages.goodput import GoodputStatus, TimeClass
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.messages.requests import RelaunchNode
from dlrover.protocol.messages.scaling import ScaleDecision, ScaleMode, ScaleOutcome, ScalingStatus, SpeedPoint
from tests.integration.browser import Tab, needs_browser, open_browser
from tests.integration.jobs import SCRIPTS, kill, wait_until
from tests.master.view.test_roles import REPORT
from tests.master.web.page_lab import NOW, TOKEN, Page, a_failure, a_status, populate, serve_page

pytestmark = needs_browser
SCRIPT = SCRIPTS / "shown.py"
NAME = "<b>job</b>"
SHOWN = {
    "#tiles": "restarts",
    "#legend": "well 1",
    "#resources": "1 nodes use",
    "#speed svg": "",
    "#loss svg": "",
    "#timeline svg": "rounds",
    "#goodput": "compute",
    "#checkpoints": "memory",
    "#data": "records <b>",
    "#diagnosis": "nothing was ever wrong",
    "#failures": "none",
}

GOODPUT = GoodputStatus(
    now=NOW,
    wall=20.0,
    seconds={TimeClass.COMPUTE: 15.0, TimeClass.START_UP: 5.0},
    beginning={},
    goodput=0.75,
    goodput_since_start=0.75,
    num_faults=1,
    is_redo_known=False,
)


def link_of(jobs, *options: str) -> str:
    argv = [sys.executable, "-m", "dlrover.cli.main", "dashboard", NAME, *options]
    return subprocess.run(argv, env=jobs.env(), capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.mark.timeout(240)
def test_a_real_job_live_through_a_kill_and_all_actions(jobs, tmp_path):
    options = ["--enable-dashboard", "--dashboard-port=0", "--metrics-port=0", "--nproc-per-node=2", "--tee=3"]
    options.append("--pre-check-ops=dlrover.master.diagnosis.pre_checks::NoPreCheckOperator")
    job = jobs.start("dlrover-run", *options, f"--rdzv-id={NAME}", f"--log-dir={tmp_path}/logs", SCRIPT, tmp_path)
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in pids), explain=lambda: job.err)
    with open_browser() as browser:
        link = link_of(jobs)
        tab = Tab(browser).open(link)
        assert "token" not in tab.page.url
        for panel, text in SHOWN.items():
            tab.page.wait_for_selector(panel)
            tab.wait_for_text(panel, text)
        assert tab.text("#name") == NAME
        tab.page.select_option("#metric", "<i>norm</i>")
        tab.page.focus("#log-name")
        tab.page.select_option("#log-name", "worker-0")
        tab.page.click("#log-show")
        tab.wait_for_text("#log", "<script>alert('log')</script> red")

        kill(int(pids[1].read_text()))
        tab.wait_for_text("#failures", "signal 9")
        tab.wait_for_text("#tiles", "1 restart,")
        tab.wait_for_text("#events", "worker-failed")
        tab.wait_for_text("#diagnosis", "Rank 1 ended")
        tab.wait_for_text("#diagnosis", "pre-check PASS")

        tab.act("[data-action=save]")
        tab.wait_for_text("#toast", "goes to storage")
        tab.wait_for_text("#checkpoints", str(tmp_path / "checkpoints"))
        tab.act("[data-action=restart-workers]", "why not")
        tab.wait_for_text("#events", "why not")
        tab.wait_for_text("#events", "Round 3 starts")
        tab.page.click("#grid", position={"x": 5, "y": 5})
        tab.act("#node button:has-text('Relaunch')")
        tab.wait_for_text("#toast", "started by hand")
        assert [complaint.rsplit(" ", 1)[1] for complaint in tab.complaints] == ["api/v1/actions/relaunch-node"], (
            tab.complaints
        )

        reader = Tab(browser).open(link_of(jobs, "--read-only"))
        reader.page.wait_for_selector("body.reader")
        assert not reader.page.is_visible("[data-action=stop]")
        status = reader.page.evaluate(
            "fetch('/api/v1/actions/stop', {method: 'POST', body: '{\"confirm\": \"stop\"}'}).then((answer) => answer.status)"
        )
        assert status == 403
        stranger = Tab(browser)
        assert stranger.page.goto(link).status == 401, "used before"
        assert NAME not in stranger.page.content()

        tab.act("[data-action=stop]", "seen enough")
        tab.wait_for_text("#stage", "StoppedByUser")
        tab.wait_for_text("#link", "the job is over")
    assert job.wait() == 1, job.err


@dataclass
class Thousand:
    page: Page
    loop: asyncio.AbstractEventLoop

    def update(self) -> None:
        asyncio.run_coroutine_threadsafe(self.page.update(), self.loop).result(30)


@pytest.fixture
def thousand() -> Iterator[Thousand]:
    """Served from a thread of its own: the browser's driver keeps this one busy."""
    ready, over = threading.Event(), threading.Event()
    served: list[Thousand] = []

    async def serve() -> None:
        async with serve_page() as page:
            populate(page, 1000)
            page.job.goodput = GOODPUT
            await page.update()
            served.append(Thousand(page, asyncio.get_running_loop()))
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield served[0]
    over.set()
    thread.join(30)


def test_a_thousand_nodes_in_the_dark_on_a_phone_and_by_keyboard(thousand: Thousand) -> None:
    page = thousand.page
    with open_browser() as browser:
        tab = Tab(browser, color_scheme="dark").open(f"{page.url}/?token={TOKEN}")
        assert tab.page.get_attribute("#grid", "data-count") == "1000"
        render = tab.page.evaluate("performance.getEntriesByName('render')[0].duration")
        print(f"1,000 nodes rendered in {render:.0f} ms")
        assert "at most 75 %" in tab.text("#tiles")
        assert "Redo time is unknown" in tab.text("#goodput")
        assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 19, 29)"

        verdict = tab.text("#verdict")
        for blocked, stage, reason in (
            ("its disk is full", "blocked (running)", "its disk is full"),
            ("", "running", verdict),
        ):
            page.job.status = replace(page.job.status, blocked=blocked)
            thousand.update()
            tab.wait_for_text("#verdict", reason)
            assert tab.text("#stage") == stage

        tab.page.keyboard.press("Tab")
        assert tab.page.evaluate("document.activeElement.className") == "skip"
        tab.page.focus("#grid")
        for key in ("End", "ArrowLeft", "Enter"):
            tab.page.keyboard.press(key)
        tab.wait_for_text("#node h3", "worker-998")
        tab.page.focus("#node button:has-text('Cordon')")
        tab.page.keyboard.press("Enter")
        assert tab.page.evaluate("document.activeElement.value") == "no", "the harmless answer has the focus"
        tab.page.keyboard.press("Escape")
        tab.page.click("#node button:has-text('Cordon')")
        tab.page.click("#confirm-yes")
        tab.wait_for_text("#toast", "this job uses its machine no more")
        wish = page.job.asked[-1]
        assert isinstance(wish, RelaunchNode)
        assert (wish.node, wish.is_cordoned) == (998, True)

        tab.page.fill("#find", "lost")
        assert tab.page.get_attribute("#grid", "data-count") == "11"
        tab.page.fill("#find", "")
        tab.page.click("#table-box summary")
        tab.page.wait_for_function("() => document.querySelectorAll('#table tbody tr').length === 50")

        page.job.status = a_status(1000, name="<script>alert(1)</script>", host="<img src=x onerror=alert(2)>")
        page.fail(a_failure(3, message="<svg onload=alert(3)>", traceback="</pre><script>alert(4)</script>" * 1000))
        thousand.update()
        tab.wait_for_text("#name", "<script>")
        tab.wait_for_text("#failures", "<svg onload=alert(3)>")
        tab.wait_for_text("#node", "<img src=x onerror=alert(2)>-998")
        assert tab.page.locator("main script, main img, main svg[onload]").count() == 0

        tab.page.set_viewport_size({"width": 390, "height": 844})
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert tab.complaints == []


WIDTHS = {"a phone": 390, "a tablet": 820, "a desk": 1400}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_three_widths_and_needs_no_mouse(thousand: Thousand, scheme: str) -> None:
    page = thousand.page
    with open_browser() as browser:
        tab = Tab(browser, color_scheme=scheme).open(f"{page.url}/?token={TOKEN}")
        is_dark = tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 19, 29)"
        assert is_dark == (scheme == "dark")
        for node, (screen, width) in zip((998, 997, 996), WIDTHS.items(), strict=True):
            tab.page.set_viewport_size({"width": width, "height": 844})
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, screen
            tab.tab_to("document.activeElement.id === 'grid'")
            for key in ("End", *["ArrowLeft"] * (999 - node), "Enter"):
                tab.page.keyboard.press(key)
            tab.wait_for_text("#node h3", f"worker-{node}")
            tab.tab_to("document.activeElement.textContent.includes('Cordon')")
            tab.page.keyboard.press("Enter")
            tab.tab_to("document.activeElement.id === 'confirm-yes'")
            tab.page.keyboard.press("Enter")
            tab.page.wait_for_selector("dialog", state="hidden")
            wait_until(lambda node=node: cordoned(page)[-1:] == [node], explain=lambda screen=screen: screen)
        assert tab.complaints == []


def cordoned(page: Page) -> list[int]:
    return [wish.node for wish in page.job.asked if isinstance(wish, RelaunchNode) and wish.is_cordoned]


def test_the_curve_of_scaling_has_its_points_and_its_marks(thousand: Thousand) -> None:
    """Line 12 of scaling: speed over nodes with the fitted curve, and a mark for each change."""
    page = thousand.page
    now = page.job.status.now
    fleet = FleetNodeStatus(
        id=PlatformId(0), node_type=NodeType.WORKER, rank=0, name="worker-0", phase=NodePhase.RUNNING
    )
    page.job.status = replace(page.job.status, fleet=(fleet,))
    page.job.scaling = ScalingStatus(
        mode=ScaleMode.ON,
        sentence="4 nodes instead of 3: <b>32</b> records/s are expected.",
        target=4,
        unit="records/s",
        points=(
            *(SpeedPoint(nodes, 9.0 * nodes) for nodes in (1, 2, 3)),
            *(SpeedPoint(nodes, 8.9 * nodes, True) for nodes in range(1, 9)),
        ),
        decisions=tuple(
            ScaleDecision(number=number, at=now, outcome=outcome, sentence=f"change {number}", nodes_after=number)
            for number, outcome in ((2, ScaleOutcome.PLANNED), (3, ScaleOutcome.TAKEN_BACK), (4, ScaleOutcome.RESTED))
        ),
    )
    for second in range(5):
        page.gatherer.board.point("steps per second", now / 1e6 - 2 + second, 10.0 + second)
    thousand.update()
    with open_browser() as browser:
        tab = Tab(browser).open(f"{page.url}/?token={TOKEN}")
        tab.wait_for_text("#scaling-why", "on: 4 nodes instead of 3: <b>32</b>")
        count = tab.page.locator
        assert count("#scaling-curve polyline.fitted").count() == 1
        assert count("#scaling-curve circle.measured").count() == 3
        assert count("#scaling-curve path.warned").count() == 2, "a mark for each change, none for a rest"
        assert count("#scaling-curve line.change").count() == 1, "the wanted number"
        assert count("#scaling-decisions li").count() == 3
        assert count("#speed line.change").count() == 2, "the changes are marked on the plot of speed, too"
        assert tab.complaints == []


def test_roles_are_a_table_where_the_job_is_one_of_them(thousand: Thousand, tmp_path: Path) -> None:
    page = thousand.page
    file = tmp_path / "roles.json"
    page.gatherer.sources.append(gather_roles(str(file)))
    evil = replace(REPORT.roles[1], failure="rollout-1: <img src=x onerror=alert(5)>" + "x" * 400)
    with open_browser() as browser:
        tab = Tab(browser, color_scheme="dark").open(f"{page.url}/?token={TOKEN}")
        assert not tab.page.is_visible("#roles"), "a job without roles has no such panel"
        file.write_bytes(msgspec.json.encode(REPORT))
        thousand.update()
        tab.wait_for_text("#roles-table", "rollout-1: its process died")
        assert tab.page.is_visible("#roles")
        assert "Job grpo: RUNNING, restarted 0 times as a whole. rollout-1 failed" in tab.text("#roles-why")
        rows = [
            [cell.strip() for cell in row.locator("th, td").all_text_contents()]
            for row in tab.page.locator("#roles-table tbody tr").all()
        ]
        assert [row[:5] for row in rows] == [
            ["policy (this page)", "elastic", "1 of 1", "1 running", "0"],
            ["rollout", "simple", "1 of 2", "1 running, 1 starting", "1"],
        ]
        assert rows[0][5] == "none"
        assert tab.page.text_content("#roles-table [aria-current=page] th") == "policy (this page)"
        light = tab.page.evaluate("getComputedStyle(document.querySelector('#roles .badge.unwell')).color")
        tab.page.click("#theme")
        assert tab.page.evaluate("getComputedStyle(document.querySelector('#roles .badge.unwell')).color") != light

        # On a phone the table scrolls in itself, by keyboard, too; and what roles say is text.
        file.write_bytes(msgspec.json.encode(replace(REPORT, roles=(REPORT.roles[0], evil))))
        thousand.update()
        tab.wait_for_text("#roles-table", "<img src=x onerror=alert(5)>")
        assert tab.page.locator("#roles img").count() == 0
        tab.page.set_viewport_size({"width": 390, "height": 844})
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
        tab.page.focus("#roles-table")
        tab.page.keyboard.press("ArrowRight")
        tab.page.wait_for_function("() => document.querySelector('#roles-table').scrollLeft > 0")

        os.utime(file, (1, 1))
        thousand.update()
        tab.wait_for_text("#roles-why", "The conductor does not answer. This is its last report.")
        assert tab.complaints == []
