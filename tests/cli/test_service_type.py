"""`--service-type http`: a master that also takes questions as JSON, started by its own command or by its historical name."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import DEADLINE, until_said

MASTERS = {
    "new": (sys.executable, "-m", "dlrover.cli.main", "master", "--job-name", "j", "--service-type", "http"),
    "old": (
        *(sys.executable, "-m", "dlrover.python.master.main", "--platform", "local", "--job_name", "j"),
        *("--service_type", "http"),
    ),
}
TOKEN = "a token that is long enough"


def ask(port: int, question: object) -> dict[str, object]:
    end_at = time.monotonic() + DEADLINE
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
        try:
            connection.request("POST", "/ask", json.dumps(question), {"Authorization": f"Bearer {TOKEN}"})
            response = connection.getresponse()
            assert response.status == 200
            return json.loads(response.read())
        except ConnectionError:
            assert time.monotonic() < end_at
            time.sleep(0.05)
        finally:
            connection.close()


@pytest.mark.parametrize("command", MASTERS.values(), ids=MASTERS)
def test_the_page_s_port_takes_questions(command: tuple[str, ...], short_dir: Path, reserved_port: int) -> None:
    environ = {**os.environ, "TMPDIR": str(short_dir), "DLROVER_JOB_TOKEN": TOKEN}
    words = [*command, "--dashboard-port", str(reserved_port)]
    master = subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        until_said(master, "`dlrover dashboard j` prints a link", "job j at 127.0.0.1")
        answer = ask(reserved_port, {"type": "Ping"})
        assert answer["body"] == {"type": "Pong", "job_name": "j", "master_epoch": 1, "protocol_version": 1}
    finally:
        master.terminate()
        master.communicate(timeout=DEADLINE)


@pytest.mark.parametrize("command", MASTERS.values(), ids=MASTERS)
def test_another_service_is_refused_with_those_there_are(command: tuple[str, ...], short_dir: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(short_dir)}
    done = subprocess.run(
        [*command[:-1], "carrier-pigeon"], env=environ, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 2
    assert "--service-type carrier-pigeon: give grpc or http." in done.stderr
