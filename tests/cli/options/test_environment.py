"""The variables of the launcher that platforms set: what each of them leads to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlrover.cli.options.environment import read_environment
from dlrover.cli.options.parser import parse
from dlrover.cli.options.settings import build_settings
from dlrover.host.log_root import LogRoot
from dlrover.protocol.errors import ConfigError
from tests.cli.conftest import DEADLINE

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("environ", "field", "expected"),
    [
        ({"NODE_ID": "7"}, "foreign_node", 7),
        ({"WORKER_ID": "7"}, "foreign_node", 7),
        ({"NODE_ID": "7", "DLROVER_NODE_ID": "7"}, "foreign_node", -1),
        ({"NODE_ID": "ip-10-0-0-1"}, "foreign_node", -1),
        ({"NODE_ID": "1" * 40}, "foreign_node", -1),
        ({"POD_NAME": "job-worker-3"}, "node_name", "job-worker-3"),
        ({"POD_NAME": "x" * 999}, "node_name", "x" * 256),
        ({"NODE_IP": "10.0.0.7", "MY_NODE_IP": "10.0.0.8"}, "node_ip", "10.0.0.7"),
        ({"MY_NODE_IP": "10.0.0.8"}, "node_ip", "10.0.0.8"),
        ({"POD_IP": "10.1.0.7", "MY_POD_IP": "10.1.0.8"}, "pod_ip", "10.1.0.7"),
        ({"MY_POD_IP": "10.1.0.8"}, "pod_ip", "10.1.0.8"),
        ({"USER": "ann"}, "user", "ann"),
        ({"USER": "ann", "USER_ID": "4711"}, "user", "4711"),
        ({"USER": "\udcff"}, "user", "?"),
        ({}, "is_monitored", True),
        ({"MONITOR_ENABLED": "true"}, "is_monitored", True),
        ({"MONITOR_ENABLED": "false"}, "is_monitored", False),
        ({"AUTO_MONITOR_WORKLOAD": "False"}, "is_monitored", False),
        ({"RDZV_ENDPOINT": "10.1.0.7"}, "rdzv_endpoint", "10.1.0.7"),
        ({"MASTER_CLIENT_TIMEOUT": "7"}, "client_timeout", 7.0),
        ({"NODE_NUM": "3"}, "node_num", 3),
        ({"WORKER_NUM": "3"}, "node_num", 3),
        ({"NODE_NUM": "0"}, "node_num", None),
        ({"RANK": "1", "WORLD_SIZE": "4", **POD}, "node_num", 4),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **POD}, "node_num", None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "node_num", None),
        ({"DLROVER_TRAINING_ELASTIC_MODE": "ucp"}, "unused", ("DLROVER_TRAINING_ELASTIC_MODE=ucp",)),
        ({"DLROVER_MASTER_SERVICE_TYPE": "http"}, "unused", ("DLROVER_MASTER_SERVICE_TYPE=http",)),
        ({"DLROVER_MASTER_SERVICE_TYPE": "grpc", "DLROVER_TRAINING_ELASTIC_MODE": "base"}, "unused", ()),
        ({"DLROVER_LOG_LEVEL": "debug"}, "log_level", "DEBUG"),
        ({}, "log_root", None),
        ({"DLROVER_LOG_ROOT_DIR": "/logs"}, "log_root", LogRoot(directory="/logs")),
        (
            {"DLROVER_LOG_ROOT_DIR": "/logs", "DLROVER_LOG_LEVEL": "ERROR", "DLROVER_LOG_ROTATE_MAX_BYTES": str(MIB)},
            "log_root",
            LogRoot(directory="/logs", level="ERROR", max_bytes=MIB),
        ),
        (
            {"DLROVER_LOG_ROOT_DIR": "/l", "DLROVER_LOG_ROTATE_MAX_BYTES": "9", "DLROVER_LOG_ROTATE_BACKUP_COUNT": "2"},
            "log_root",
            LogRoot(directory="/l", num_backups=2),
        ),
        ({"DLROVER_LOG_ROOT_DIR": "/l", "DLROVER_LOG_ROTATE_BACKUP_COUNT": "no"}, "log_root", LogRoot(directory="/l")),
    ],
)
def test_a_variable_and_what_it_says(environ: dict[str, str], field: str, expected: Any) -> None:
    assert getattr(read_environment(environ), field) == expected


def test_a_variable_that_has_no_effect_is_told() -> None:
    environ = {"DLROVER_TRAINING_ELASTIC_MODE": "ucp"}
    settings = build_settings(parse(["-m", "job"], environ), read_environment(environ))
    assert settings.notes == ("The variable DLROVER_TRAINING_ELASTIC_MODE=ucp has no effect in this version.",)


def test_an_unknown_level_is_no_reason_not_to_train() -> None:
    with pytest.warns(UserWarning, match="DLROVER_LOG_LEVEL=LOUD is not used"):
        assert read_environment({"DLROVER_LOG_LEVEL": "LOUD"}).log_level == "WARNING"


def test_a_timeout_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="MASTER_CLIENT_TIMEOUT=soon must be a number of seconds"):
        read_environment({"MASTER_CLIENT_TIMEOUT": "soon"})


def test_a_job_tells_its_platform_variables_to_master_log_and_status(short_dir: Path, tmp_path: Path) -> None:
    """One job with all of them: what the script is told, what the log file has, and what the master shows."""
    script = tmp_path / "look.py"
    script.write_text(
        "import subprocess, sys\n"
        "ask = [sys.executable, '-m', 'dlrover.cli.main', 'status', 'the-job']\n"
        "print(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)\n"
    )
    environ = {
        **os.environ,
        "TMPDIR": str(short_dir),
        "COLUMNS": "200",
        "ELASTIC_JOB_NAME": "the-job",
        "NODE_ID": "5",
        "POD_NAME": "the-pod",
        "USER_ID": "ann-4711",
        "DLROVER_LOG_ROOT_DIR": str(tmp_path / "logs"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "dlrover.cli.run", "--no-warm", str(script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert "started by ann-4711" in done.stdout
    assert "the-pod" in done.stdout
    log = (tmp_path / "logs" / "dlrover.log").read_text()
    assert "serving job=the-job" in log, "the master's"
    assert "[agent.py:" in log, "the agent's"
    assert "INFO" not in done.stderr, "the console has a level of its own"
