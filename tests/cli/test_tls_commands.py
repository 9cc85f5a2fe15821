"""`dlrover status`, `stop` and `master` with TLS, and that none of them goes without it in silence."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import DEADLINE, until_said
from tests.cli.launch.test_check_env_and_commands import DLROVER, run
from tests.protocol.rpc.test_certificates import Authority

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def address(authority: Authority, short_dir: Path) -> Iterator[str]:
    """A master by hand that asks clients for a certificate, too."""
    tls = authority.issue("master")
    options = ["--tls-ca", authority.ca, "--tls-cert", tls.cert, "--tls-key", tls.key]
    master = subprocess.Popen(
        [*DLROVER, "master", "--job-name", "secret", *options],
        env={**os.environ, "XDG_RUNTIME_DIR": str(short_dir), "TMPDIR": str(short_dir), "DLROVER_JOB_TOKEN": "token"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        where, _ = until_said(master, "job secret at ", "serving job=secret")
        yield where.split(" at ")[1].split(";")[0]
    finally:
        master.send_signal(signal.SIGINT)
        master.communicate(timeout=DEADLINE)


@needs_openssl
def test_status_and_stop_reach_a_master_with_tls(authority: Authority, address: str, short_dir: Path) -> None:
    client = authority.issue("client")
    tls = ["--tls-ca", authority.ca, "--tls-cert", client.cert, "--tls-key", client.key]
    status = run("status", "--addr", address, *tls, runtime=short_dir, DLROVER_JOB_TOKEN="token")
    assert status.returncode == 0, status.stderr
    assert "job secret" in status.stdout
    stop = run("stop", "--addr", address, *tls, runtime=short_dir, DLROVER_JOB_TOKEN="token")
    assert stop.returncode == 0, stop.stderr


@needs_openssl
def test_a_job_of_ours_is_found_with_its_certificates(address: str, short_dir: Path) -> None:
    status = run("status", "secret", runtime=short_dir)
    assert status.returncode == 0, status.stderr
    assert "job secret" in status.stdout


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["master", "--job-name", "j", "--tls-ca", __file__, "--tls-key", __file__], "--tls-cert and --tls-key"),
        (["master", "--job-name", "j", "--tls-ca", __file__], "--tls-cert and --tls-key"),
        (["master", "--job-name", "j", "--tls-cert", "/no/cert", "--tls-key", __file__], "--tls-cert /no/cert"),
        (["status", "--addr", "127.0.0.1:9", "--tls-cert", __file__], "both cert and key"),
        (["stop", "--addr", "127.0.0.1:9", "--tls-ca", "/no/ca"], "/no/ca"),
    ],
)
def test_half_of_what_tls_needs_is_an_error(args: list[str], expected: str, short_dir: Path) -> None:
    done = run(*args, runtime=short_dir, DLROVER_JOB_TOKEN="x")
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
