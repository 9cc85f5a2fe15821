"""Launch from Python: what is refused before anything starts, and who hears an interrupt."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from dlrover.python.elastic_agent.torch.dynamic_failover import (
    AgentFailureInfo,
    DynamicAgentFailoverExtension,
    FailoverStrategy,
)

from dlrover.agent.config import Entry, EntryKind, WatchConfig, WorkerLogConfig
from dlrover.cli.launch.config import ElasticLaunchConfig
from dlrover.cli.launch.programmatic import _settings, launch_agent
from dlrover.cli.options.environment import read_environment
from dlrover.cli.options.parser import parse
from dlrover.cli.options.settings import build_settings
from dlrover.protocol.errors import ConfigError
from tests.cli.conftest import DEADLINE
from tests.small_disk import mounted


@pytest.mark.parametrize(
    ("config", "entrypoint"),
    [
        (ElasticLaunchConfig(min_nodes=3, max_nodes=2), print),
        (ElasticLaunchConfig(rdzv_configs={"join_timeout": "soon"}), print),
        (ElasticLaunchConfig(signals_to_handle="SIGNO"), print),
        (ElasticLaunchConfig(), "no-such-program"),
        (ElasticLaunchConfig(), None),
    ],
)
def test_nonsense_is_refused_before_anything_starts(
    config: ElasticLaunchConfig, entrypoint: object, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_dir))
    with pytest.raises(ConfigError):
        launch_agent(config, entrypoint, [])  # type: ignore[arg-type]
    assert {path.name for path in short_dir.rglob("*") if path.is_file()} <= {".lock"}


@dataclass
class LaunchConfigOfTorch21:
    """The fields of torch 2.1's `LaunchConfig` that matter here: no `logs_specs`, no filters, no shutdown timeout."""

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 2
    run_id: str = "old"
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=lambda: {"timeout": 900})
    max_restarts: int = 3
    monitor_interval: float = 30
    start_method: str = "spawn"
    log_dir: str | None = None
    log_line_prefix_template: str | None = None
    redirects: int = 0
    tee: dict[int, int] = field(default_factory=lambda: {0: 3})
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None


def test_the_launch_config_of_an_older_torch_is_taken() -> None:
    entry = Entry.of(EntryKind.PROGRAM, "true")
    config: Any = LaunchConfigOfTorch21()
    settings = _settings(config, read_environment({}), entry=entry)
    assert settings.log == WorkerLogConfig(tee={0: 3})
    assert settings.shutdown_timeout == 30.0
    assert settings.terms.restarts.max_restarts == 3


@pytest.mark.parametrize(
    ("variable", "text", "field", "expected"),
    [
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7", "shutdown_timeout", 7.0),
        ("DLROVER_PREEMPTION_FILE", "/notice", "preemption_file", "/notice"),
        ("DLROVER_EXTENSION_DYNAMIC_FAILOVER", "mine::Failover", "failover_extension", "mine::Failover"),
        ("DLROVER_TOPOLOGY_QUERIER", "mine::Querier", "topology_querier", "mine::Querier"),
        ("DLROVER_TOPOLOGY_SORTER", "mine::Sorter", "topology_sorter", "mine::Sorter"),
        ("DLROVER_LOG_AGENT_DIR", "/logs", "log", WorkerLogConfig(log_dir="/logs", tee_default=3)),
        ("TRAINING_LOG_FILE", "/train.log", "watch", WatchConfig(log_file="/train.log")),
        ("FAILURE_NODE_ERRORS", "#bad card#", "watch", WatchConfig(node_errors=("bad card",))),
        ("XPU_TIMER_PORT", "4711", "watch", WatchConfig(xpu_timer_port=4711)),
        ("PYTHON_EXEC", "/python", "interpreter", "/python"),
        ("NODE_RANK", "3", "node_rank", 3),
    ],
)
def test_a_launch_from_python_reads_the_variables_of_the_command(
    variable: str, text: str, field: str, expected: object
) -> None:
    entry = Entry.of(EntryKind.PROGRAM, "true")
    environment = read_environment({variable: text})
    settings = _settings(ElasticLaunchConfig(), environment, entry=entry)
    assert getattr(settings, field) == expected
    from_command = build_settings(parse(["--nnodes=1:2", "-m", "job"], {}), environment)
    assert getattr(from_command, field) == expected


class Extension(DynamicAgentFailoverExtension):
    def get_user_failover_strategy(self, failure_info: AgentFailureInfo) -> FailoverStrategy:
        return FailoverStrategy.NORMAL_FAILOVER


def test_a_failover_extension_is_named_for_the_agent() -> None:
    environment = read_environment({"DLROVER_EXTENSION_DYNAMIC_FAILOVER": "mine::Failover"})
    entry = Entry.of(EntryKind.PROGRAM, "true")

    def named(extension: object) -> str:
        config = ElasticLaunchConfig(dynamic_failover_extension=extension)
        return _settings(config, environment, entry=entry).failover_extension

    assert named(Extension()) == "tests.cli.launch.test_programmatic::Extension"
    assert named("other::Failover") == "other::Failover"
    assert named(None) == "mine::Failover"
    with pytest.raises(ConfigError, match="give module::Class"):
        named("other.Failover")
    inside = type("Inside", (Extension,), {"__qualname__": "Outer.Inside"})
    with pytest.raises(ConfigError, match="give module::Class"):
        named(inside())


def test_the_configuration_wins_over_variables() -> None:
    environment = read_environment({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7", "DLROVER_LOG_AGENT_DIR": "/logs"})
    config = ElasticLaunchConfig(shutdown_timeout=9, log_dir="/other")
    settings = _settings(config, environment, entry=Entry.of(EntryKind.PROGRAM, "true"))
    assert (settings.shutdown_timeout, settings.log.log_dir) == (9.0, "/other")


def test_a_variable_of_the_wrong_form_is_named() -> None:
    environment = read_environment({"DLROVER_TOPOLOGY_QUERIER": "nonsense"})
    with pytest.raises(ConfigError, match="DLROVER_TOPOLOGY_QUERIER nonsense"):
        _settings(ElasticLaunchConfig(), environment, entry=Entry.of(EntryKind.PROGRAM, "true"))


CALL = """
import sys
from dlrover.cli.launch.programmatic import ElasticLaunchConfig, launch_agent
try:
    launch_agent(ElasticLaunchConfig(is_warm=False), "sh", ["-c", sys.argv[1]])
except KeyboardInterrupt:
    sys.exit(99)
"""


@pytest.fixture
def call(short_dir: Path, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a program that launches a shell script, and waits until that runs."""
    started: list[subprocess.Popen[str]] = []
    fifo = tmp_path / "runs"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)

    def start(script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CALL, script.replace("RUNS", f"echo > {fifo}")],
            env={**os.environ, "TMPDIR": str(short_dir)},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert select.select([reader], [], [], DEADLINE)[0], "the script does not run"
        return process

    yield start
    os.close(reader)
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["kill -INT", "ctrl-c"])
def test_an_interrupt_of_the_caller_stops_the_job_in_good_order(
    send: Callable[[int, int], None], call: Callable[[str], subprocess.Popen[str]], tmp_path: Path, short_dir: Path
) -> None:
    orderly = tmp_path / "orderly"
    process = call(f"trap 'sleep 0.5; touch {orderly}; exit 0' INT; RUNS; while :; do sleep 0.1; done")
    send(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 99, errors
    assert "interrupted again" not in errors
    assert orderly.exists()
    assert {path.name for path in short_dir.rglob("*") if path.is_file()} <= {".lock"}


def test_a_second_interrupt_of_the_caller_kills_the_job(
    call: Callable[[str], subprocess.Popen[str]], tmp_path: Path, short_dir: Path
) -> None:
    heard = tmp_path / "heard"
    os.mkfifo(heard)
    process = call(f"trap 'echo > {heard}' INT; trap '' TERM; RUNS; while :; do sleep 0.1; done")
    os.kill(process.pid, signal.SIGINT)
    heard.read_bytes()  # by the worker: nobody on the way may take both for one
    assert process.poll() is None, "it minds its worker's grace"
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 99, errors
    assert "interrupted again" in errors
    assert {path.name for path in short_dir.rglob("*") if path.is_file()} <= {".lock"}


def test_a_full_disk_is_told_before_anything_starts(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(short_dir / "small") as disk:
        monkeypatch.setenv("TMPDIR", str(disk))
        with pytest.raises(ConfigError, match=r"No space left.*TMPDIR"):
            launch_agent(ElasticLaunchConfig(), print, ["x" * 2_000_000])  # too long for the file that has the call
        assert {path.name for path in disk.rglob("*") if path.is_file()} <= {".lock"}
