"""
The environment variables that the launcher reads, read once.

Nothing below the launcher looks at these again: values travel in the settings. (`PET_*` are read by `options`, because
there they are defaults of flags.)

Which variables count is a matter of care. `RANK` and `WORLD_SIZE` mean node rank and node count in a pod of a
PyTorchJob, but rank and size of a *worker* when a script starts `dlrover-run` from inside another launcher's worker;
they are used only where nothing else explains them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

from msgspec import Struct

from dlrover.cli.node_types import node_type_of
from dlrover.host.log_root import DEFAULT_BACKUPS, DEFAULT_BYTES, MIN_BYTES, LogRoot
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.text import encodable

DEFAULT_LOG_LEVEL = "WARNING"
"""torchrun is silent unless something happens, and so are we. DLROVER_LOG_LEVEL=INFO shows settings and decisions."""
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

# A process that has one of these was started by a launcher, so RANK in it belongs to a worker.
_MARKS_OF_A_WORKER = (
    "LOCAL_RANK",
    "TORCHELASTIC_RUN_ID",
    "DLROVER_AGENT_SOCKET",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
)


_WITHOUT_EFFECT = {
    "DLROVER_MASTER_SERVICE_TYPE": "grpc",
    "DLROVER_TRAINING_ELASTIC_MODE": "base",
    "DLROVER_METRIC_URL": "",
}
"""With the value that asks for nothing."""
_LONGEST_ID = 9
"""Digits of a NODE_ID. More are no count of relaunches."""
_LONGEST_LABEL = 256


class Environment(Struct, frozen=True, kw_only=True):
    master_addr: str = ""
    master_port: int | None = None
    """Where the master listens if no address of it is given."""
    job_name: str = ""
    job_token: str = ""
    node_rank: int | None = None
    node_rank_variable: str = ""
    """The variable that `node_rank` came from."""
    node_num: int | None = None
    platform_node: int = -1
    """What the platform that started this node knows it by; -1: started by hand."""
    foreign_node: int = -1
    """NODE_ID as another platform gave it: it grows with each relaunch of a rank. -1: none did."""
    node_name: str = ""
    """What the platform calls this node: the name of its pod."""
    node_ip: str = ""
    """Of the machine below a pod; plug-ins of the network know that one."""
    user: str = ""
    """To be recorded with the job."""
    node_type: NodeType = NodeType.WORKER
    node_group: int = -1
    is_reporting: bool = True
    """Whether this node tells how the job failed; the program that started all of them tells it once instead."""
    preemption_file: str = ""
    master_file: str = ""
    """DLROVER_MASTER_FILE: where the platform writes the master's newest address. Empty: the master stays where it is."""
    failover_extension: str = ""
    training_log_file: str = ""
    """Where the script logs, if not to its streams."""
    node_errors: tuple[str, ...] = ()
    """What in a log says that this node is broken."""
    xpu_timer_port: int | None = None
    """Where a kernel profiler on this node serves its metrics."""
    is_monitored: bool = True
    """MONITOR_ENABLED: steps are also read from the file that RUNTIME_METRICS_PATH names."""
    rdzv_endpoint: str = ""
    """RDZV_ENDPOINT: where nodes of one job meet, if no option names a place."""
    client_timeout: float | None = None
    """MASTER_CLIENT_TIMEOUT: seconds for an answer of the master; None: the usual."""
    topology_querier: str = ""
    topology_sorter: str = ""
    event_reporters: tuple[str, ...] = ()
    """Who is told of the job's events: `log`, `file:PATH`, a URL, or `module::Class`."""
    pod_ip: str = ""
    host_ports: tuple[int, ...] = ()
    interpreter: str = ""
    shutdown_timeout: float | None = None
    log_level: str = DEFAULT_LOG_LEVEL
    log_root: LogRoot | None = None
    """DLROVER_LOG_ROOT_DIR; None: there is no log file."""
    agent_log_dir: str = ""
    line_prefix: str = ""
    runtime_root: str = ""
    """XDG_RUNTIME_DIR; whether it is usable is checked where it is used."""
    temp_dir: str = "/tmp"
    snapshot_dir: str = "/dev/shm"
    """Where snapshots of the training state are kept: memory, if the machine has it there."""
    unused: tuple[str, ...] = ()
    """Variables of the original, each with its value, that ask for what this version does not have."""


def read_environment(environ: Mapping[str, str]) -> Environment:
    node_rank, node_rank_variable = _node_rank(environ)
    platform_node = _integer(environ, "DLROVER_NODE_ID", at_least=0)
    node_group = _integer(environ, "DLROVER_NODE_GROUP", at_least=-1)
    shutdown_timeout = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    level = _log_level(environ.get("DLROVER_LOG_LEVEL", ""))
    return Environment(
        master_addr=environ.get("DLROVER_MASTER_ADDR", ""),
        master_port=_port(environ, "DLROVER_MASTER_PORT"),
        job_name=environ.get("ELASTIC_JOB_NAME", ""),
        job_token=environ.get("DLROVER_JOB_TOKEN", ""),
        node_rank=node_rank,
        node_rank_variable=node_rank_variable,
        node_num=_node_num(environ),
        preemption_file=environ.get("DLROVER_PREEMPTION_FILE", ""),
        master_file=environ.get("DLROVER_MASTER_FILE", ""),
        failover_extension=environ.get("DLROVER_EXTENSION_DYNAMIC_FAILOVER", ""),
        training_log_file=environ.get("TRAINING_LOG_FILE", ""),
        node_errors=parse_node_errors(environ.get("FAILURE_NODE_ERRORS", "")),
        xpu_timer_port=_integer(environ, "XPU_TIMER_PORT", at_least=1),
        topology_querier=environ.get("DLROVER_TOPOLOGY_QUERIER", ""),
        topology_sorter=environ.get("DLROVER_TOPOLOGY_SORTER", ""),
        event_reporters=tuple(part for part in environ.get("DLROVER_EVENT_REPORTERS", "").split(",") if part.strip()),
        platform_node=-1 if platform_node is None else platform_node,
        foreign_node=_foreign_node(environ) if platform_node is None else -1,
        node_name=_label(environ, "POD_NAME"),
        node_ip=_label(environ, "NODE_IP") or _label(environ, "MY_NODE_IP"),
        user=_label(environ, "USER_ID") or _label(environ, "USER"),
        is_monitored=_is_monitored(environ),
        rdzv_endpoint=environ.get("RDZV_ENDPOINT", ""),
        client_timeout=_client_timeout(environ.get("MASTER_CLIENT_TIMEOUT", "")),
        node_type=NodeType.WORKER if platform_node is None else _node_type(environ.get("NODE_TYPE", "")),
        node_group=-1 if node_group is None else node_group,
        is_reporting=environ.get("DLROVER_REPORT", "") != "off",
        pod_ip=environ.get("POD_IP") or environ.get("MY_POD_IP", ""),
        host_ports=_ports(environ.get("HOST_PORTS", "")),
        interpreter=environ.get("PYTHON_EXEC", ""),
        shutdown_timeout=None
        if shutdown_timeout is None
        else _seconds("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", shutdown_timeout),
        log_level=level or DEFAULT_LOG_LEVEL,
        log_root=_log_root(environ, level),
        agent_log_dir=environ.get("DLROVER_LOG_AGENT_DIR", ""),
        line_prefix=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        runtime_root=environ.get("XDG_RUNTIME_DIR", ""),
        temp_dir=environ.get("TMPDIR") or "/tmp",
        snapshot_dir=environ.get("DLROVER_SNAPSHOT_DIR") or "/dev/shm",
        unused=tuple(
            f"{variable}={environ[variable]}"
            for variable, harmless in _WITHOUT_EFFECT.items()
            if environ.get(variable, harmless) not in (harmless, "")
        ),
    )


def _node_rank(environ: Mapping[str, str]) -> tuple[int | None, str]:
    for variable in ("NODE_RANK", "WORKER_RANK"):
        if environ.get(variable):
            return _integer(environ, variable, at_least=0), variable
    if _counts_nodes(environ):
        return _integer(environ, "RANK", at_least=0), "RANK"
    return None, ""


def _node_num(environ: Mapping[str, str]) -> int | None:
    """0 says nothing: it is what the original takes where the user gives none."""
    for variable in ("NODE_NUM", "WORKER_NUM"):
        if environ.get(variable):
            return _integer(environ, variable, at_least=0) or None
    return _integer(environ, "WORLD_SIZE", at_least=1) if _counts_nodes(environ) else None


def _counts_nodes(environ: Mapping[str, str]) -> bool:
    """Whether RANK and WORLD_SIZE are those of nodes: in a pod, and not inside a worker."""
    is_worker = any(mark in environ for mark in _MARKS_OF_A_WORKER)
    is_pod = bool(environ.get("KUBERNETES_SERVICE_HOST"))
    return is_pod and not is_worker and bool(environ.get("RANK") and environ.get("WORLD_SIZE"))


def _label(environ: Mapping[str, str], variable: str) -> str:
    """For people to read, so it is never a reason not to train."""
    return encodable(environ.get(variable, ""))[:_LONGEST_LABEL]


def _foreign_node(environ: Mapping[str, str]) -> int:
    """A name so general that it may hold anything: what is no number is not meant for us."""
    text = environ.get("NODE_ID") or environ.get("WORKER_ID", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _LONGEST_ID else -1


def _is_monitored(environ: Mapping[str, str]) -> bool:
    text = environ.get("MONITOR_ENABLED") or environ.get("AUTO_MONITOR_WORKLOAD", "")
    return text.lower() not in ("false", "0", "no")


def _client_timeout(text: str) -> float | None:
    return _seconds("MASTER_CLIENT_TIMEOUT", text) or None if text else None


def _log_level(text: str) -> str:
    """Empty: none was given, or none that exists. That is no reason not to train."""
    if text and text.upper() not in _LOG_LEVELS:
        known = ", ".join(_LOG_LEVELS)
        warnings.warn(f"DLROVER_LOG_LEVEL={text} is not used: it must be one of {known}.", stacklevel=3)
        return ""
    return text.upper()


def _log_root(environ: Mapping[str, str], level: str) -> LogRoot | None:
    directory = environ.get("DLROVER_LOG_ROOT_DIR", "")
    if not directory:
        return None
    return LogRoot(
        directory=os.path.abspath(directory),
        level=level or "INFO",
        max_bytes=_number_or(environ, "DLROVER_LOG_ROTATE_MAX_BYTES", DEFAULT_BYTES, at_least=MIN_BYTES),
        num_backups=_number_or(environ, "DLROVER_LOG_ROTATE_BACKUP_COUNT", DEFAULT_BACKUPS, at_least=1),
    )


def _number_or(environ: Mapping[str, str], variable: str, default: int, *, at_least: int) -> int:
    """As the original reads these two: what is no number, or too small, means the default."""
    text = environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) >= at_least else default


def _node_type(text: str) -> NodeType:
    """Looked at only on a node of a platform: elsewhere the variable may mean anything."""
    try:
        return node_type_of(text or NodeType.WORKER)
    except ValueError as error:
        known = ", ".join(kind.value for kind in NodeType)
        raise ConfigError(f"The variable NODE_TYPE={text} must be one of {known}.") from error


def _integer(environ: Mapping[str, str], variable: str, *, at_least: int) -> int | None:
    text = environ.get(variable, "")
    if not text:
        return None
    try:
        value = int(text)
    except ValueError as error:
        raise ConfigError(f"The variable {variable}={text} must be an integer.") from error
    if value < at_least:
        raise ConfigError(f"The variable {variable}={text} must be at least {at_least}.")
    return value


def _port(environ: Mapping[str, str], variable: str) -> int | None:
    port = _integer(environ, variable, at_least=1)
    if port is not None and port > 65535:
        raise ConfigError(f"The variable {variable}={port} must be a port from 1 to 65535.")
    return port


def _seconds(variable: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(f"The variable {variable}={text} must be a number of seconds.") from error
    if not value >= 0:
        raise ConfigError(f"The variable {variable}={text} must be at least 0 seconds.")
    return value


def _ports(text: str) -> tuple[int, ...]:
    try:
        ports = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"The variable HOST_PORTS={text} must be a comma-separated list of ports.") from error
    if not all(0 < port < 65536 for port in ports):
        raise ConfigError(f"The variable HOST_PORTS={text} must name ports from 1 to 65535.")
    return ports


def parse_node_errors(value: str) -> tuple[str, ...]:
    """Written as `#first#second#`. What is written otherwise is of no use, and no reason not to train."""
    value = value.strip()
    if not value:
        return ()
    if len(value) < 2 or not (value.startswith("#") and value.endswith("#")):
        warnings.warn(
            f"FAILURE_NODE_ERRORS={value!r} is not used: write the texts as #one text#another text#.",
            stacklevel=3,
        )
        return ()
    return tuple(text for text in (part.strip() for part in value.split("#")) if text)
