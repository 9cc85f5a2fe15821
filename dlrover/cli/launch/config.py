"""
What a launch from Python is told: torch's `LaunchConfig` by its field names, the original's fields behind them, ours behind those.

Not derived from torch's class: the launcher's side of a program need not import torch. The order of the fields is that of the original on
the torch of today, so that positional arguments mean the same; a test compares.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlrover.agent.config import Streams
from dlrover.cli.options.environment import read_environment
from dlrover.cli.options.settings import parse_streams
from dlrover.protocol.errors import ConfigError

_AUTO_CHECK_NODES = 4
_TORCH_TIMEOUT = 900
_ACCELERATORS = {"Ascend": "ascend-npu", "MetaX": "metax-tech.com/gpu", "mthreads": "mthreads.com/gpu"}
"""What the name of a device tells."""

StreamChoice = int | str | Mapping[int, int] | None


class LogConfig:
    """Where the files of workers go; the original's name and methods."""

    def __init__(self) -> None:
        self.given_dir = ""
        """Empty: no files were asked for."""
        self._redirects: int | dict[int, int] = 0
        self._tee: int | dict[int, int] = 0

    def setup(self, log_dir: str | None, redirects: StreamChoice = None, tee: StreamChoice = None) -> None:
        """Without a directory nothing changes. Without a choice of streams all of them go to files and to the console."""
        if not log_dir:
            return
        self.given_dir = str(log_dir)
        self._redirects, self._tee = _streams(redirects), _streams(tee)
        if not self._redirects and not self._tee:
            self._redirects = self._tee = int(Streams.ALL)

    @property
    def log_dir(self) -> str:
        return self.given_dir or tempfile.gettempdir()

    @property
    def redirects(self) -> int | dict[int, int]:
        return self._redirects

    @property
    def tee(self) -> int | dict[int, int]:
        return self._tee

    @property
    def logs_specs(self) -> Any:
        """torch's form of the same."""
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

        def of_torch(streams: int | dict[int, int]) -> Any:
            return {rank: Std(each) for rank, each in streams.items()} if isinstance(streams, dict) else Std(streams)

        return DefaultLogsSpecs(log_dir=self.log_dir, redirects=of_torch(self._redirects), tee=of_torch(self._tee))


@dataclass
class ElasticLaunchConfig:
    """A `LaunchConfig` of torch is taken in its place, too."""

    # torch's.
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int | str = 1
    logs_specs: Any = None
    """torch's form of the directory and the streams below; `setup_log` counts more."""
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    """torch's default. Accepted; nodes always meet at the master."""
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int | None = None
    """None: as long as the job makes progress."""
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    # The original's.
    precheck: int = 0
    network_check: bool = False
    comm_perf_test: bool = False
    node_unit: int = 1
    training_port: int = 64000
    auto_config: bool = False
    auto_tunning: bool = False
    exclude_straggler: bool = False
    save_at_breakpoint: bool = False
    accelerator: str = ""
    """Empty: as `--accelerator` by default."""
    log_config: LogConfig = field(default_factory=LogConfig)
    training_log_file: str = ""
    """Empty: as TRAINING_LOG_FILE says."""
    failure_node_errors: str = ""
    """Empty: as FAILURE_NODE_ERRORS says."""
    numa_affinity: bool = False
    membind_policy: str = "none"
    ucp_device_type: str = "cpu"
    dynamic_failover_extension: Any = None
    """An object of a `DynamicAgentFailoverExtension`, or `module::Class`. Agents build it anew, without arguments."""
    # Ours. Before torch 2.3 the first three were torch's.
    log_dir: str = ""
    redirects: int | dict[int, int] = 0
    tee: int | dict[int, int] = 0
    local_ranks_filter: Sequence[int] = ()
    node_rank: int | None = None
    is_warm: bool = True
    preload: Sequence[str] = ()
    master_grace: float = 600.0

    def __post_init__(self) -> None:
        """The key that torch puts there for its own rendezvous; programs look at it, and nothing here does."""
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        self.rdzv_configs.setdefault("timeout", _TORCH_TIMEOUT)

    def get_log_dir(self) -> str:
        return self.log_config.log_dir

    def get_log_tee(self) -> int | dict[int, int]:
        return self.log_config.tee

    def get_log_redirects(self) -> int | dict[int, int]:
        return self.log_config.redirects

    def get_log_specs(self) -> Any:
        return self.log_config.logs_specs

    def setup_log(self, log_dir: str | None, redirects: StreamChoice = None, tee: StreamChoice = None) -> None:
        self.log_config.setup(log_dir, redirects=redirects, tee=tee)

    def set_node_unit(self, node_unit: int) -> None:
        self.node_unit = node_unit
        self.rdzv_configs["node_unit"] = node_unit

    def auto_configure_params(self) -> None:
        """What the environment and the devices tell; with `auto_config` also how many nodes and workers there are."""
        environment = read_environment(os.environ)
        self.training_log_file = environment.training_log_file
        errors = environment.node_errors
        self.failure_node_errors = f"#{'#'.join(errors)}#" if errors else ""
        device, num_devices = _devices()
        for mark, accelerator in _ACCELERATORS.items():
            if mark in device:
                self.accelerator = accelerator
        if not self.auto_config:
            return
        if environment.node_num is not None:
            self.min_nodes = self.max_nodes = environment.node_num
        if num_devices:
            self.nproc_per_node = num_devices
        if self.min_nodes >= _AUTO_CHECK_NODES:
            self.network_check = True

    def update_precheck_args(self) -> None:
        """What the level of `precheck` asks for. It never switches anything off."""
        self.network_check = self.network_check or self.precheck >= 1
        self.comm_perf_test = self.comm_perf_test or self.precheck >= 2

    def to_json(self) -> dict[str, Any]:
        names = ("min_nodes", "max_nodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint")
        view = {name: getattr(self, name) for name in names}
        view["rdzv_configs"] = json.dumps(self.rdzv_configs)
        return view | {"max_restarts": self.max_restarts, "accelerator": self.accelerator}


def _streams(choice: StreamChoice) -> int | dict[int, int]:
    """As the original: what cannot be read counts as none."""
    if isinstance(choice, str):
        try:
            default, by_rank = parse_streams("streams", choice)
        except ConfigError:
            return 0
        return by_rank or default
    if isinstance(choice, Mapping):
        return {int(rank): int(streams) for rank, streams in choice.items()}
    return int(choice or 0) if choice in (None, *Streams) else 0


def _devices() -> tuple[str, int]:
    """Name and number of torch's devices; no name where there is none, or no torch."""
    try:
        import torch
    except ImportError:
        return "", 0
    if not torch.cuda.is_available():
        return "", 0
    return str(torch.cuda.get_device_name()), torch.cuda.device_count()
