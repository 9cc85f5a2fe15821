"""Bad input: one clear paragraph that says what to do, a non-zero exit, and nothing left behind."""

from __future__ import annotations

import socket

import pytest

from tests.integration.jobs import SCRIPTS

OK = f"{SCRIPTS}/dump_env.py"


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--nproc-per-mode=2", OK, "."], 2, "--nproc-per-node"),
        (["--nnodes=3:2", OK, "."], 2, "MIN"),
        (["--nnodes=0", OK, "."], 2, "--nnodes"),
        (["--nnodes=two", OK, "."], 2, "--nnodes"),
        (["--nproc-per-node=0", OK, "."], 2, "--nproc-per-node"),
        (["no-such-script.py"], 2, "no-such-script.py"),
        (["--rdzv-conf=join_timeout=soon", OK, "."], 2, "join_timeout"),
        (["--max-restarts=many", OK, "."], 2, "--max-restarts"),
        (["--log-dir=/proc/nowhere", "--redirects=3", OK, "."], 2, "/proc/nowhere"),
        (["--no-python", "./no-such-program"], 2, "no-such-program"),
        ([], 2, "script"),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else None,
)
def test_a_clear_error(jobs, args, code, says):
    job = jobs.run(*args)
    assert job.process.returncode == code, job.err
    assert says in job.err
    assert "Traceback" not in job.err
    assert not any(jobs.runtime.rglob("*.json"))


def test_an_unreadable_script(jobs, tmp_path):
    script = tmp_path / "secret.py"
    script.write_text("print('hello')")
    script.chmod(0)
    job = jobs.start("dlrover-run without override", script)
    assert job.wait() == 2, job.err
    assert "secret.py" in job.err
    assert "Traceback" not in job.err


def test_a_read_only_log_directory(jobs, tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    folder.chmod(0o555)
    job = jobs.start("dlrover-run without override", f"--log-dir={folder}", "--redirects=3", OK, ".")
    assert job.wait() == 2, job.err
    assert str(folder) in job.err
    assert "Traceback" not in job.err


def test_a_port_taken_by_somebody_else(jobs):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        job = jobs.run("--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={port}", OK, ".")
    assert job.process.returncode not in (0, None)
    assert str(port) in job.err
    assert "Traceback" not in job.err


def test_a_syntax_error_ends_the_job_at_once(jobs, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("def f(:\n")
    job = jobs.run("--nproc-per-node=2", script)
    assert job.process.returncode == 1
    assert "SyntaxError" in job.err
    assert job.err.count("failed") < 6, "no restart can help"


def test_a_mistake_in_the_script_ends_the_job_at_once(jobs, tmp_path):
    """The same exception in all ranks before any step: not tried again."""
    script = tmp_path / "mistaken.py"
    script.write_text(
        "import os, pathlib, time\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        'pathlib.Path(f\'ran-{os.environ["RANK"]}-{os.environ["TORCHELASTIC_RESTART_COUNT"]}\').touch()\n'
        "dist.barrier()\n"
        "undefined_name\n"
    )
    job = jobs.run("--nproc-per-node=2", script)
    assert job.process.returncode == 1
    assert "All ranks failed with the same exception before the first step" in job.err
    assert {path.name for path in tmp_path.glob("ran-*")} == {"ran-0-0", "ran-1-0"}
