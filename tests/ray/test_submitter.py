"""`RayJobSubmitter`: scripts of the original hand a command to the job server of a real Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.client.platform.ray.ray_job_submitter import RayJobSubmitter
from dlrover.protocol.errors import ConfigError
from tests.ray.lab import RayLab, free_port, until


@pytest.fixture(scope="module")
def job_server(ray_dir: str) -> Iterator[str]:
    port = free_port()
    lab = RayLab(ray_dir, head_cpus=2, include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=port)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        lab.close()


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
