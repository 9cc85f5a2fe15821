"""
Launch from Python: `ElasticLaunch(config, function)(*args)` gives a map from global rank to what the function returned.

The user's process stays what it was: the launcher runs as its child, because it must be a subreaper, own the signals
and may not be surprised by threads. The function and its arguments travel as a pickle in a private directory from the
user's process to its own workers, and the return values come back the same way; no socket carries a pickle.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from dlrover.agent.config import AgentResult, Entry, EntryKind
from dlrover.cli.launch.config import ElasticLaunchConfig
from dlrover.cli.launch.discovery import new_launch
from dlrover.cli.launch.runtime_dir import NodeDirectory, explained, user_root
from dlrover.cli.options.environment import Environment, parse_node_errors, read_environment
from dlrover.cli.options.parser import Parsed, ValueOrigin
from dlrover.cli.options.settings import (
    Settings,
    build_settings,
    check_program,
    check_script,
    encode_settings,
    probe_log_dir,
)
from dlrover.cli.options.table import OPTIONS, Value
from dlrover.protocol.errors import ConfigError, JobError
from dlrover.snapshot.storage.class_meta import found_in

log = logging.getLogger(__name__)

EXIT_USAGE = 2
MAX_INTERRUPTS = 2
"""How many the launcher is trusted to handle; after that it is killed, and its children end with it."""


_DEFAULTS = ElasticLaunchConfig()
_OPTION_DEFAULTS: Mapping[str, Value] = {option.dest: option.default for option in OPTIONS}


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
        raise ConfigError("The entry point is None. Give a function, or a command as text.")
    environment = read_environment(os.environ)
    with _call_directory(environment) as directory:
        target = os.path.join(directory.path, "call.pickle")
        settings = _settings(config, environment, entry=_entry(entrypoint, args, target))
        probe_log_dir(settings.log.log_dir, option="log_dir")
        _launch(settings, directory)
        return _return_values(directory.path, target)


def launch(entrypoint: Callable[..., Any] | str, *args: Any, nnodes: str | int = 1, **config: Any) -> dict[int, Any]:
    """
    Run a function, or a command, on the workers of this node: `dlrover.launch(train, 1e-3, nproc_per_node=2)`.

    `nnodes` is a number or "MIN:MAX"; all other names are fields of `ElasticLaunchConfig`. Gives what the function returned, by global rank. A
    function has to be importable by the workers: define it in a module, not in a notebook's cell. Raises `ConfigError` or `JobError`.
    """
    low, _, high = str(nnodes).partition(":")
    if not low.isdigit() or not (high or low).isdigit():
        raise ConfigError(f'nnodes={nnodes!r}: give a number of nodes, or "MIN:MAX".')
    known = {field.name for field in fields(ElasticLaunchConfig)}
    if unknown := sorted(config.keys() - known):
        raise ConfigError(
            f"launch() has no option {', '.join(unknown)}. Its options are nnodes and the fields of ElasticLaunchConfig."
        )
    bounds = {"min_nodes": int(low), "max_nodes": int(high or low)}
    return launch_agent(ElasticLaunchConfig(**{**bounds, **config}), entrypoint, args)


def launch_settings(settings: Settings) -> None:
    """The same for a command line that was read already: until the end of the job, which fails by `JobError`."""
    with _call_directory(settings.environment) as directory:
        _launch(settings, directory)


@contextlib.contextmanager
def _call_directory(environment: Environment) -> Iterator[NodeDirectory]:
    directory = NodeDirectory(user_root(environment), f"call-{os.getpid()}", new_launch())
    try:
        yield directory
    finally:
        directory.remove()


def _launch(settings: Settings, directory: NodeDirectory) -> None:
    outcome_file = os.path.join(directory.path, "outcome.json")
    told = encode_settings(msgspec.structs.replace(settings, outcome_file=outcome_file))
    exit_code = _run_launcher(directory.write("settings.json", told))
    _raise_if_failed(exit_code, outcome_file)


def _run_launcher(settings_file: str) -> int:
    """
    The launcher's exit code.

    It has a session of its own, so that the terminal's Ctrl-C reaches only us: no matter who interrupts us, the launcher
    hears of it exactly once. The first ends the job in good order, the second kills everything at once.
    """
    argv = [sys.executable, "-P", "-m", "dlrover.cli.launch.launcher", settings_file]
    child = subprocess.Popen(argv, start_new_session=True)
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
    from dlrover.trainer.worker.function import read_result

    prefix = f"{os.path.basename(target)}.result."
    ranks = sorted(
        int(name.removeprefix(prefix))
        for name in os.listdir(directory)
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit()
    )
    return {rank: read_result(os.path.join(directory, f"{prefix}{rank}")) for rank in ranks}


def _entry(entrypoint: Callable[..., Any] | str, args: Sequence[Any], target: str) -> Entry:
    if callable(entrypoint):
        from dlrover.trainer.worker.function import write_call

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


def _settings(config: ElasticLaunchConfig, environment: Environment, *, entry: Entry) -> Settings:
    """As the same values on the command line. What has no effect costs a line in the log."""
    told = msgspec.structs.replace(
        environment,
        training_log_file=_ask(config, "training_log_file") or environment.training_log_file,
        node_errors=parse_node_errors(_ask(config, "failure_node_errors")) or environment.node_errors,
        line_prefix=_ask(config, "log_line_prefix_template") or environment.line_prefix,
    )
    extension, extension_dir = _failover(_ask(config, "dynamic_failover_extension"))
    settings = build_settings(_parsed(config, extension), told, entry=entry)
    unused = [name for name, harmless in _WITHOUT_EFFECT.items() if _ask(config, name) not in harmless]
    if unused:
        log.warning("%s has no effect in this version.", ", ".join(unused))
    for note in settings.notes:
        log.warning("%s", note)
    return msgspec.structs.replace(settings, failover_dir=extension_dir)


_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    # Field: values that ask for nothing.
    "training_port": (60000, 64000),
    "numa_affinity": (False,),
    "ucp_device_type": ("cpu",),
    "numa_options": (None,),
    "metrics_cfg": ({}, None),
    "event_log_handler": ("null",),
}


def _parsed(config: ElasticLaunchConfig, failover_extension: str) -> Parsed:
    """The options that say the same. Those that are left out are as by default, and count as not given."""

    def ask(name: str) -> Any:
        return _ask(config, name)

    log_dir, redirects, tee = _log_files(config)
    configs = {key: value for key, value in ask("rdzv_configs").items() if key not in ("timeout", "node_unit")}
    nodes = (ask("min_nodes"), ask("max_nodes"))
    check = ("network_check", "comm_perf_test", "exclude_straggler")
    given: dict[str, Value] = {
        "role": ask("role"),
        "rdzv_endpoint": ask("rdzv_endpoint"),
        "rdzv_conf": ",".join(f"{key}={value}" for key, value in configs.items()),
        "signals_to_handle": ask("signals_to_handle"),
        "duplicate_stdout_filters": tuple(ask("duplicate_stdout_filters") or ()),
        "duplicate_stderr_filters": tuple(ask("duplicate_stderr_filters") or ()),
        "virtual_local_rank": bool(ask("virtual_local_rank")),
        "redirects": _stream_text(redirects),
        "tee": _stream_text(tee),
        "local_ranks_filter": ",".join(str(rank) for rank in sorted(_ranks_to_show(config))),
        "precheck": str(int(ask("precheck"))),
        **{name: bool(ask(name)) for name in (*check, "save_at_breakpoint", "auto_config", "auto_tunning")},
        "accelerator": ask("accelerator") or _OPTION_DEFAULTS["accelerator"],
        "node_unit": int(ask("rdzv_configs").get("node_unit", ask("node_unit"))),
        "dynamic_failover_extension": failover_extension,
        "no_warm": not ask("is_warm"),
        "preload": ",".join(ask("preload")),
        "master_grace": ask("master_grace"),
    }
    optional: dict[str, Value] = {
        "nnodes": None if nodes == (1, 1) else f"{nodes[0]}:{nodes[1]}",
        "nproc_per_node": None if ask("nproc_per_node") == 1 else str(ask("nproc_per_node")),
        "rdzv_id": ask("run_id") or None,
        "log_dir": log_dir or None,
        "local_addr": ask("local_addr") or None,
        "max_restarts": ask("max_restarts"),
        "shutdown_timeout": ask("shutdown_timeout"),
        "node_rank": ask("node_rank"),
    }
    chosen = {name: value for name, value in optional.items() if value is not None}
    values = {**_OPTION_DEFAULTS, **given, **chosen}
    is_given = {name: name in chosen or values[name] != default for name, default in _OPTION_DEFAULTS.items()}
    origins = {name: ValueOrigin.FLAG if is_given[name] else ValueOrigin.DEFAULT for name in values}
    return Parsed(values, origins, "", ())


def _ask(config: ElasticLaunchConfig, name: str) -> Any:
    """torch's `LaunchConfig` lacks our fields, and in older versions some of its own: our defaults hold."""
    return getattr(config, name, getattr(_DEFAULTS, name))


def _log_files(config: ElasticLaunchConfig) -> tuple[str, Any, Any]:
    """
    Directory, redirects and tee. `setup_log` counts most. Ours has the three values as fields, as torch's had before 2.3; later it
    keeps them inside `logs_specs`, in attributes without a public reader.
    """
    log_config, specs = _ask(config, "log_config"), _ask(config, "logs_specs")
    if log_config is not None and log_config.given_dir:
        return log_config.given_dir, log_config.redirects, log_config.tee
    if specs is None or _ask(config, "log_dir"):
        return _ask(config, "log_dir") or "", _ask(config, "redirects"), _ask(config, "tee")
    return getattr(specs, "_root_log_dir", None) or "", getattr(specs, "_redirects", 0), getattr(specs, "_tee", 0)


def _ranks_to_show(config: ElasticLaunchConfig) -> Iterable[int]:
    specs = _ask(config, "logs_specs")
    return _ask(config, "local_ranks_filter") or getattr(specs, "_local_ranks_filter", None) or ()


def _stream_text(value: int | Mapping[int, int]) -> str:
    """As an option: one number, or one for each local rank."""
    if isinstance(value, Mapping):
        return ",".join(f"{int(rank)}:{int(streams)}" for rank, streams in value.items()) or "0"
    return str(int(value))


def _failover(given: Any) -> tuple[str, str]:
    """As `module::Class`, and the directory where that is found: the agent is another process and builds it there, without arguments."""
    if given is None or isinstance(given, str):
        return given or "", ""
    kind = given if isinstance(given, type) else type(given)
    module, directory = kind.__module__, found_in(kind.__module__)
    if module == "__main__":
        program = sys.modules[module]
        file, spec = getattr(program, "__file__", None), getattr(program, "__spec__", None)
        if file is None:
            raise ConfigError(
                f"dynamic_failover_extension: agents cannot import {kind.__name__}, because it was defined "
                "interactively and not in a file. Put the class into a module and import it from there."
            )
        module = os.path.splitext(os.path.basename(file))[0] if spec is None else spec.name
        directory = directory if spec is None else found_in(module)
    return f"{module}::{kind.__qualname__}", directory


def _launch_with_torch(
    config: ElasticLaunchConfig, entrypoint: Callable[..., Any] | str, args: list[Any]
) -> dict[int, Any]:
    """The way out: torch's own agent, with what of the configuration it knows."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if isinstance(config, ElasticLaunchConfig):
        known = {item.name for item in fields(LaunchConfig)}
        values = {name: value for name, value in vars(config).items() if name in known and value is not None}
        if config.log_config.given_dir:
            values["logs_specs"] = config.get_log_specs()
        if config.rdzv_backend == _DEFAULTS.rdzv_backend:  # nobody chose it, and it needs a server
            values["rdzv_backend"] = "c10d"
        values["rdzv_endpoint"] = config.rdzv_endpoint or "localhost:0"
        config = LaunchConfig(**values)
    values_by_rank: dict[int, Any] = elastic_launch(config, entrypoint)(*args)
    return values_by_rank
