"""The web server of a real Ray's head: `RayJobSubmitter` hands it commands, as in scripts of the original, and its pages show no secret."""

from __future__ import annotations

import asyncio
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.client.platform.ray.ray_job_submitter import RayJobSubmitter
from dlrover.protocol.errors import ConfigError
from tests.ray.jobs import RunningRayJob
from tests.ray.lab import RayLab, free_port, until

PAGES = (
    "api/jobs/",
    "api/v0/actors?detail=1",
    "api/v0/jobs?detail=1",
    "api/v0/objects?detail=1",
    "api/v0/runtime_envs?detail=1",
    "api/v0/tasks?detail=1",
    "api/v0/workers?detail=1",
    "logical/actors",
    "nodes?view=details",
    "nodes?view=summary",
)
"""What the dashboard is made of."""


@pytest.fixture(scope="module")
def web_lab(ray_dir: str) -> Iterator[tuple[RayLab, str]]:
    """With the address of its web server."""
    port = free_port()
    lab = RayLab(ray_dir, head_cpus=2, include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=port)
    try:
        yield lab, f"http://127.0.0.1:{port}"
    finally:
        lab.close()


@pytest.fixture(scope="module")
def job_server(web_lab: tuple[RayLab, str]) -> str:
    return web_lab[1]


def submitter(folder: Path, url: str, command: str, more: str = "") -> RayJobSubmitter:
    code = folder / "code"
    code.mkdir(exist_ok=True)
    (code / "colour.txt").write_text("green")
    conf = folder / "conf.yaml"
    conf.write_text(f"dashboardUrl: {url}\ncommand: {command}\nworkingDir: {code}\n{more}")
    return RayJobSubmitter(str(conf))


async def lines_of(job: RayJobSubmitter, job_id: str) -> str:
    return "".join([lines async for lines in job.log_iter(job_id)])


def test_a_command_runs_in_its_working_directory_and_its_end_is_told(job_server: str, tmp_path: Path):
    job = submitter(tmp_path, job_server, "cat colour.txt")
    job_id = until(job.submit)
    assert job.wait_until_finish(job_id, timeout=120) == "SUCCEEDED"
    assert job.status(job_id) == "SUCCEEDED"
    assert "green" in asyncio.run(lines_of(job, job_id))
    assert job_id in [known.submission_id for known in job.list()]


def test_a_whole_job_runs_below_a_submitted_command(web_lab: tuple[RayLab, str], tmp_path: Path):
    lab, url = web_lab
    script = tmp_path / "says.py"
    script.write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    job = submitter(tmp_path, url, f"{sys.executable} -P -m dlrover.cli.main ray run --nodes 2 --cpus 0.5 -- {script}")
    job_id = until(job.submit)
    assert job.wait_until_finish(job_id, timeout=240) == "SUCCEEDED", asyncio.run(lines_of(job, job_id))
    lines = asyncio.run(lines_of(job, job_id))
    assert "rank 0 of 2" in lines
    assert "rank 1 of 2" in lines
    lab.await_nothing_left(str(script))


def test_no_secret_is_on_the_dashboard(web_lab: tuple[RayLab, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a variable that is named only: Ray shows the command line of each driver."""
    lab, url = web_lab
    monkeypatch.setenv("API_KEY", "verysecretvalue")
    job = RunningRayJob(lab, tmp_path, "--env", "API_KEY")
    try:
        job.await_steps(world_size=1)
        token = job.account().token

        def look() -> dict[str, str] | None:
            """All pages, once the calls that carry secrets are among the tasks."""
            shown = {page: fetch(f"{url}/{page}") for page in PAGES}
            tasks = shown["api/v0/tasks?detail=1"]
            is_known = "RayHost.begin" in tasks and "LauncherActor.run" in tasks and "node-0" in shown["logical/actors"]
            return shown if is_known else None

        shown = until(look, job.output)
        assert [page for page, text in shown.items() if token in text or "verysecretvalue" in text] == []
        job.let_end()
        assert job.wait() == 0, job.output()
        lab.await_nothing_left()
    finally:
        job.close()


def fetch(url: str) -> str:
    """What the page shows, be it an error: not every version of Ray can answer each."""
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            return str(reply.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        return error.read().decode(errors="replace")


def test_a_command_that_fails_is_told_as_failed(job_server: str, tmp_path: Path):
    job = submitter(tmp_path, job_server, "ls /no/such/file")
    assert job.wait_until_finish(job.submit(), timeout=120) == "FAILED"


def test_a_wait_ends_with_its_time_and_a_job_is_stopped(job_server: str, tmp_path: Path):
    job = submitter(tmp_path, job_server, "sleep 300")
    job_id = job.submit()
    assert job.wait_until_finish(job_id, timeout=0.1) in ("PENDING", "RUNNING")
    until(lambda: job.status(job_id) == "RUNNING")
    assert job.stop_job(job_id)
    assert job.wait_until_finish(job_id, timeout=120) == "STOPPED"


def test_requirements_reach_the_runtime_environment(job_server: str, tmp_path: Path):
    """The packages are not there, so the job never runs: what counts is that the job server was told of them."""
    missing = tmp_path / "no_such_package-1.0-py3-none-any.whl"
    job = submitter(tmp_path, job_server, "ls", f"requirements: ['{missing}']\n")
    job_id = job.submit()
    assert missing.name in str(job.client.get_job_info(job_id).runtime_env["pip"])
    job.stop_job(job_id)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("command: ls\n", "dashboardUrl"),
        ("dashboardUrl: http://127.0.0.1:1\ncommand: ls\nworkdir: .\n", "workdir"),
        ("dashboardUrl: [1]\ncommand: ls\n", "dashboardUrl"),
        ("dashboardUrl: http://127.0.0.1:1\ncommand: ls\n", "No Ray job server answers at http://127.0.0.1:1"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_said(tmp_path: Path, text: str, sentence: str):
    conf = tmp_path / "conf.yaml"
    conf.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        RayJobSubmitter(str(conf))


def test_a_configuration_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no such file"):
        RayJobSubmitter(str(tmp_path / "conf.yaml"))
