"""
Launch from Python: `ElasticLaunch(config, function)(*args)` gives a map from global rank to what the function returned.

The user's process stays what it was: the launcher runs as its child, because it must be a subreaper, own the signals
and may not be surprised by threads. The function and its arguments travel as a pickle in a private directory from the
user's process to its own workers, and the return values come back the same way; no socket carries a pickle.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from dlrover.agent.config import AgentResult, Entry, EntryKind, LogConfig, WatchConfig
from dlrover.cli.discovery import new_launch
from dlrover.cli.environment import Environment, read_environment
from dlrover.cli.runtime_dir import NodeDirectory, explained, user_root
from dlrover.cli.settings import (
    Settings,
    absolute,
    check_plugin,
    check_program,
    check_script,
    encode_settings,
    parse_nproc,
    parse_rdzv_conf,
    parse_signals,
    probe_log_dir,
    usual_shutdown_timeout,
)
from dlrover.protocol.errors import ConfigError, JobError
from dlrover.protocol.messages import JobTerms, Limits, RestartPolicy
from dlrover.snapshot.class_meta import found_in

EXIT_USAGE = 2
MAX_INTERRUPTS = 2
"""How many the launcher is trusted to handle; after that it is killed, and its children end with it."""


@dataclass
class ElasticLaunchConfig:
    """torch's `LaunchConfig` by its field names, with ours behind it. A `LaunchConfig` itself is taken, too."""

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int | str = 1
    run_id: str = ""
    role: str = "default"
    rdzv_endpoint: str = ""
    rdzv_backend: str = ""
    """Accepted; nodes always meet at the master."""
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    max_restarts: int | None = None
    """None: as long as the job makes progress."""
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    local_addr: str | None = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    # Ours. torch puts the first four into its `logs_specs`.
    log_dir: str = ""
    redirects: int | dict[int, int] = 0
    tee: int | dict[int, int] = 0
    local_ranks_filter: Sequence[int] = ()
    node_unit: int = 1
    node_rank: int | None = None
    is_warm: bool = True
    preload: Sequence[str] = ()
    master_grace: float = 600.0
    dynamic_failover_extension: Any = None
    """An object of a class derived from `DynamicAgentFailoverExtension`, or `module::Class`. None: as the environment says."""


_DEFAULTS = ElasticLaunchConfig()


class ElasticLaunch:
    """A launch that is ready to be called with the arguments of its entry point."""

    def __init__(
        self, config: ElasticLaunchConfig, entrypoint: Callable[..., Any] | str, use_dlrover_launch: bool = True
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._use_dlrover_launch = use_dlrover_launch

    def __call__(self, *args: Any) -> dict[int, Any]:
        if self._use_dlrover_launch:
            return launch_agent(self._config, self._entrypoint, list(args))
        return _launch_with_torch(self._config, self._entrypoint, list(args))


def launch_agent(
    config: ElasticLaunchConfig, entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]
) -> dict[int, Any]:
    """
    Run the entry point on this node's share of the job and wait for the end of the job.

    Gives the return values of this node's workers by global rank; commands return nothing. Raises `ConfigError` if
    nothing could be started, `JobError` if the job failed.
    """
    if entrypoint is None:
        raise ConfigError("The entry point is None: give a function, or a command as text.")
    environment = read_environment(os.environ)
    directory = NodeDirectory(user_root(environment), f"call-{os.getpid()}", new_launch())
    try:
        target = os.path.join(directory.path, "call.pickle")
        entry = _entry(entrypoint, args, target)
        outcome_file = os.path.join(directory.path, "outcome.json")
        settings = _settings(config, environment, entry=entry, outcome_file=outcome_file)
        probe_log_dir(settings.log.log_dir, option="log_dir")
        settings_file = directory.write("settings.json", encode_settings(settings))
        exit_code = _run_launcher(settings_file, _search_path(_ask(config, "dynamic_failover_extension")))
        _raise_if_failed(exit_code, outcome_file)
        return _return_values(directory.path, target)
    finally:
        directory.remove()


def _run_launcher(settings_file: str, search_path: str) -> int:
    """
    The launcher's exit code. It and the agent look for modules of the user's in `search_path` too, after all others of PYTHONPATH.

    It has a session of its own, so that the terminal's Ctrl-C reaches only us: whoever interrupts us, the launcher
    hears of it exactly once. The first ends the job in good order, the second kills everything at once.
    """
    argv = [sys.executable, "-P", "-m", "dlrover.cli.launcher", settings_file]
    paths = [path for path in (os.environ.get("PYTHONPATH", ""), search_path) if path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} if search_path else None
    child = subprocess.Popen(argv, start_new_session=True, env=env)
    num_interrupts = 0
    try:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                num_interrupts += 1
                child.send_signal(signal.SIGINT if num_interrupts <= MAX_INTERRUPTS else signal.SIGKILL)
    finally:
        if child.poll() is None:
            child.terminate()  # an exception out of turn: the job must not go on without anybody who waits for it


def _raise_if_failed(exit_code: int, outcome_file: str) -> None:
    if exit_code == 0:
        return
    if exit_code in (128 + signal.SIGINT, -signal.SIGINT):  # the latter before it could say so
        raise KeyboardInterrupt
    try:
        with open(outcome_file, "rb") as file:
            result = msgspec.json.decode(file.read(), type=AgentResult)
    except FileNotFoundError:
        raise JobError(f"The launcher ended with exit code {exit_code} and left no result.") from None
    message = (result.end.message if result.end else "") or result.message or f"exit code {exit_code}"
    if exit_code == EXIT_USAGE:
        raise ConfigError(message)
    raise JobError(message)


def _return_values(directory: str, target: str) -> dict[int, Any]:
    from dlrover.trainer.function import read_result

    prefix = f"{os.path.basename(target)}.result."
    ranks = sorted(
        int(name.removeprefix(prefix))
        for name in os.listdir(directory)
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit()
    )
    return {rank: read_result(os.path.join(directory, f"{prefix}{rank}")) for rank in ranks}


def _entry(entrypoint: Callable[..., Any] | str, args: Sequence[Any], target: str) -> Entry:
    if callable(entrypoint):
        from dlrover.trainer.function import write_call

        with explained(os.path.dirname(target)):
            write_call(target, entrypoint, tuple(args))
        return Entry.of(EntryKind.FUNCTION, target)
    words = tuple(str(arg) for arg in args)
    if entrypoint == sys.executable and words[:1] == ("-u",) and len(words) > 1:
        # What torch's own launcher makes of a script; undone, so that it can start warm.
        if words[1] == "-m" and len(words) > 2:
            return Entry.of(EntryKind.MODULE, words[2], words[3:])
        check_script(words[1])
        return Entry.of(EntryKind.SCRIPT, words[1], words[2:])
    check_program(entrypoint)
    return Entry.of(EntryKind.PROGRAM, entrypoint, words)


def _settings(config: ElasticLaunchConfig, environment: Environment, *, entry: Entry, outcome_file: str) -> Settings:
    def ask(name: str) -> Any:
        return _ask(config, name)

    conf = ",".join(f"{key}={value}" for key, value in ask("rdzv_configs").items())
    times = parse_rdzv_conf(conf, [])
    if "last_call" in times:
        times["first_call"] = times["last_call"]
    try:
        limits = Limits(min_nodes=ask("min_nodes"), max_nodes=ask("max_nodes"), node_unit=ask("node_unit"), **times)
    except ValueError as error:
        raise ConfigError(f"{error}.") from error
    run_id = ask("run_id")
    shutdown_timeout = ask("shutdown_timeout")
    return Settings(
        terms=JobTerms(limits=limits, restarts=RestartPolicy(max_restarts=ask("max_restarts"))),
        entry=entry,
        local_world_size=parse_nproc(str(ask("nproc_per_node"))),
        node_rank=ask("node_rank") if ask("node_rank") is not None else environment.node_rank,
        role=ask("role"),
        interpreter=environment.interpreter,
        is_warm=ask("is_warm"),
        preload=tuple(ask("preload")),
        log=_log(config, environment),
        watch=WatchConfig(
            log_file=environment.training_log_file,
            node_errors=environment.node_errors,
            xpu_timer_port=environment.xpu_timer_port,
        ),
        shutdown_timeout=usual_shutdown_timeout(environment) if shutdown_timeout is None else float(shutdown_timeout),
        preemption_file=absolute(environment.preemption_file),
        failover_extension=_failover(ask("dynamic_failover_extension"), environment),
        topology_querier=check_plugin(environment.topology_querier, option="The variable DLROVER_TOPOLOGY_QUERIER"),
        topology_sorter=check_plugin(environment.topology_sorter, option="The variable DLROVER_TOPOLOGY_SORTER"),
        master_grace=ask("master_grace"),
        is_virtual_local_rank=ask("virtual_local_rank"),
        signals=parse_signals(ask("signals_to_handle")),
        rdzv_endpoint=ask("rdzv_endpoint"),
        rdzv_id="" if run_id == "none" else run_id,
        local_addr=ask("local_addr") or "",
        environment=environment,
        outcome_file=outcome_file,
    )


def _failover(given: Any, environment: Environment) -> str:
    """The extension by its name: the agent is another process and builds it there, without arguments."""
    if given is None:
        return check_plugin(environment.failover_extension, option="The variable DLROVER_EXTENSION_DYNAMIC_FAILOVER")
    if isinstance(given, str):
        return check_plugin(given, option="dynamic_failover_extension")
    kind = type(given)
    if kind.__module__ == "__main__":
        raise ConfigError(
            f"dynamic_failover_extension: {kind.__name__} is defined in the script itself, which the agent cannot import. Put it into a "
            "module beside the script and import it from there."
        )
    return check_plugin(f"{kind.__module__}::{kind.__qualname__}", option="dynamic_failover_extension")


def _search_path(given: Any) -> str:
    """Where this process has found the class of an extension; the agent does not know the script's own directory."""
    return "" if given is None or isinstance(given, str) else found_in(type(given).__module__)


def _ask(config: ElasticLaunchConfig, name: str) -> Any:
    """torch's `LaunchConfig` lacks our fields, and in older versions some of its own: our defaults hold."""
    return getattr(config, name, getattr(_DEFAULTS, name))


def _log(config: ElasticLaunchConfig, environment: Environment) -> LogConfig:
    """
    Ours has the four values as fields, as torch's had before 2.3; later it keeps them inside `logs_specs`, in
    attributes without a public reader.
    """
    specs = getattr(config, "logs_specs", None)
    if specs is None:
        log_dir, redirects, tee = (_ask(config, name) for name in ("log_dir", "redirects", "tee"))
        ranks: Iterable[int] = _ask(config, "local_ranks_filter") or ()
    else:
        redirects, tee = getattr(specs, "_redirects", 0), getattr(specs, "_tee", 0)
        ranks = getattr(specs, "_local_ranks_filter", None) or ()
        log_dir = getattr(specs, "_root_log_dir", None) or ""
    redirect_default, redirect_map = _streams(redirects)
    tee_default, tee_map = _streams(tee)
    return LogConfig(
        log_dir=absolute(log_dir or environment.agent_log_dir),
        redirects=redirect_map,
        redirect_default=redirect_default,
        tee=tee_map,
        tee_default=tee_default,
        local_ranks_filter=tuple(sorted(ranks)),
        duplicate_stdout_filters=tuple(_ask(config, "duplicate_stdout_filters") or ()),
        duplicate_stderr_filters=tuple(_ask(config, "duplicate_stderr_filters") or ()),
        line_prefix=getattr(config, "log_line_prefix_template", None) or environment.line_prefix,
    )


def _streams(value: int | Mapping[int, int]) -> tuple[int, dict[int, int]]:
    if isinstance(value, Mapping):
        return 0, {int(rank): int(streams) for rank, streams in value.items()}
    return int(value), {}


def _launch_with_torch(
    config: ElasticLaunchConfig, entrypoint: Callable[..., Any] | str, args: list[Any]
) -> dict[int, Any]:
    """The way out: torch's own agent, with what of the configuration it knows."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if isinstance(config, ElasticLaunchConfig):
        known = {item.name for item in fields(LaunchConfig)}
        values = {name: value for name, value in vars(config).items() if name in known and value is not None}
        values["rdzv_backend"] = config.rdzv_backend or "c10d"
        values["rdzv_endpoint"] = config.rdzv_endpoint or "localhost:0"
        config = LaunchConfig(**values)
    values_by_rank: dict[int, Any] = elastic_launch(config, entrypoint)(*args)
    return values_by_rank
