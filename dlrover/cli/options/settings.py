"""
From the parsed command line and the environment to one frozen struct that is known to make sense.

Everything a user can get wrong is found here, before anything starts, and answered in one paragraph: what was given,
what it means, what to do. The directories are probed last because that is the only check that may create something.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import stat
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from dlrover.agent.config import Entry, EntryKind, Streams, TlsConfig, WatchConfig, WorkerLogConfig
from dlrover.cli.options.environment import Environment, read_environment
from dlrover.cli.options.parser import Parsed, ValueOrigin, nearest, parse, unavailable
from dlrover.cli.options.scaling_settings import read_tuner
from dlrover.cli.options.view_settings import Watching
from dlrover.cli.options.watch_settings import watch_config
from dlrover.host.ownership import make_directory
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.check import CheckTerms
from dlrover.protocol.messages.fleet import Strategy
from dlrover.protocol.messages.job import Detection, JobTerms, Limits, RestartPolicy
from dlrover.protocol.messages.peers import LARGEST_GROUP, MOST_COPIES
from dlrover.protocol.messages.scaling import Tuner
from dlrover.protocol.messages.watch import HangStrategy, WatchTerms

DEFAULT_SHUTDOWN_TIMEOUT = 30.0
_DESCRIPTORS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Names that mean another file in each process, also where that is a regular one."""


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user wants. Where the master is and what the job is called follows from it in `discovery`."""

    terms: JobTerms
    entry: Entry
    local_world_size: int | str = 1
    node_rank: int | None = None
    role: str = "default"
    interpreter: str = ""
    is_warm: bool = True
    preload: tuple[str, ...] = ()
    framework: str = "torch"
    log: WorkerLogConfig = WorkerLogConfig()
    watch: WatchConfig = WatchConfig()
    tls: TlsConfig | None = None
    shutdown_timeout: float = DEFAULT_SHUTDOWN_TIMEOUT
    master_grace: float = 600.0
    preemption_file: str = ""
    failover_extension: str = ""
    failover_dir: str = ""
    """Where the module of the extension is found, beside the usual path."""
    is_saving_at_break_points: bool = False
    snapshot_write_limit: float = 0.0
    snapshot_copies: int = 0
    snapshot_parity: tuple[int, int] = (0, 0)
    snapshot_bandwidth: float = 0.0
    pre_check_ops: str = ""
    topology_querier: str = ""
    topology_sorter: str = ""
    is_virtual_local_rank: bool = False
    is_exit_code_of_worker: bool = False
    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    journal: str = ""
    job_token_file: str = ""
    watching: Watching = Watching()
    tuner: Tuner = Tuner.OFF
    """`--auto-tuning`, `--tuner`."""

    is_standalone: bool = False
    rdzv_endpoint: str = ""
    job_name: str = ""
    rdzv_id: str = ""
    """Empty: none was given."""
    master_addr: str = ""
    """Empty: none was given."""
    master_port: int | None = None
    local_addr: str = ""

    environment: Environment = Environment()
    notes: tuple[str, ...] = ()
    """What was accepted but has no effect, for the console."""
    outcome_file: str = ""
    """Where a programmatic launch wants the agent's result; empty: nowhere."""


def read_settings(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Parsed, Settings]:
    """Raises `ConfigError`."""
    parsed = parse(argv, environ)
    assert not parsed.immediate, "--help and --check-env are answered before settings are read"
    return parsed, check_settings(parsed, environ)


def check_settings(parsed: Parsed, environ: Mapping[str, str]) -> Settings:
    """Raises `ConfigError`."""
    error = unavailable(parsed)
    if error is not None:
        raise error
    environment = read_environment(environ)
    settings = build_settings(parsed, environment)
    encode_settings(settings)
    probe_log_dir(settings.log.log_dir, option="--log-dir")
    probe_directory(settings.journal, option="--journal", purpose="journal")
    return settings


def build_settings(parsed: Parsed, environment: Environment, *, entry: Entry | None = None) -> Settings:
    """`entry`: what workers run, if not what the command line names."""
    notes = [f"The variable {variable} has no effect in this version." for variable in environment.unused]
    limits = _limits(parsed, environment, notes)
    max_restarts = parsed.integer("max_restarts") if parsed.is_given("max_restarts") else None
    if max_restarts is not None and max_restarts < 0:
        raise ConfigError(f"--max-restarts {max_restarts}: give 0 or more.")
    is_automatic = parsed.flag("auto_config") and not parsed.is_given("nproc_per_node")
    rdzv_id = parsed.text("rdzv_id") if parsed.is_given("rdzv_id") else ""
    master_port = parsed.integer("master_port") if parsed.values["master_port"] is not None else None
    if master_port is not None and not 0 <= master_port <= 65535:
        raise ConfigError(f"--master-port {master_port}: give a port from 0 to 65535.")
    return Settings(
        terms=JobTerms(
            limits=limits,
            restarts=RestartPolicy(max_restarts=max_restarts),
            detection=_detection(parsed),
            standby=_standby(parsed),
            strategy=Strategy.PS if parsed.text("strategy") == "ps" else Strategy.ALLREDUCE,
            check=_check(parsed, limits, notes),
            watch=watch_terms(
                parsed.integer("hang_detection"), parsed.number("hang_downtime"), parsed.number("max_hang_downtime")
            ),
        ),
        entry=read_entry(parsed) if entry is None else entry,
        local_world_size=parse_nproc("auto" if is_automatic else parsed.text("nproc_per_node")),
        node_rank=_node_rank(parsed, environment, limits, notes),
        role=parsed.text("role"),
        tuner=_tuner(parsed),
        interpreter=environment.interpreter,
        is_warm=not parsed.flag("no_warm"),
        preload=_preload(parsed.text("preload")),
        framework=parsed.text("framework"),
        log=_log(parsed, environment),
        watch=watch_config(parsed, environment),
        tls=_tls(parsed),
        shutdown_timeout=_shutdown_timeout(parsed, environment),
        master_grace=_at_least_zero("--master-grace", parsed.number("master_grace")),
        is_saving_at_break_points=parsed.flag("save_at_breakpoint"),
        snapshot_write_limit=_at_least_zero("--snapshot-write-limit", parsed.number("snapshot_write_limit")),
        snapshot_copies=_snapshot_copies(parsed),
        snapshot_parity=_snapshot_parity(parsed),
        snapshot_bandwidth=_at_least_zero("--snapshot-bandwidth", parsed.number("snapshot_bandwidth")),
        preemption_file=absolute(parsed.text("preemption_file") or environment.preemption_file),
        failover_extension=_plugin(
            parsed, "dynamic_failover_extension", environment.failover_extension, "DLROVER_EXTENSION_DYNAMIC_FAILOVER"
        ),
        pre_check_ops=check_operators(parsed.text("pre_check_ops")),
        topology_querier=_plugin(parsed, "topology_querier", environment.topology_querier, "DLROVER_TOPOLOGY_QUERIER"),
        topology_sorter=_plugin(parsed, "topology_sorter", environment.topology_sorter, "DLROVER_TOPOLOGY_SORTER"),
        is_virtual_local_rank=parsed.flag("virtual_local_rank"),
        is_exit_code_of_worker=parsed.text("exit_code") == "worker",
        signals=parse_signals(parsed.text("signals_to_handle")),
        journal=_journal(parsed.text("journal")),
        job_token_file=parsed.text("job_token_file"),
        watching=_watching(parsed),
        is_standalone=parsed.flag("standalone"),
        rdzv_endpoint=parsed.text("rdzv_endpoint"),
        job_name=parsed.text("job_name"),
        rdzv_id="" if rdzv_id == "none" else rdzv_id,
        master_addr=parsed.text("master_addr") if parsed.is_given("master_addr") else "",
        master_port=master_port,
        local_addr=parsed.text("local_addr"),
        environment=environment,
        notes=tuple(notes),
    )


def encode_settings(settings: Settings) -> bytes:
    """
    As JSON, in which they or parts of them travel to other processes. Raises `ConfigError` for what cannot.

    What workers run and its arguments may be any bytes. All else is shown to people and sent to the master.
    """
    try:
        return msgspec.json.encode(settings)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{error.object!r} is not valid UTF-8. Only the script and its arguments may contain such names. "
            "Give another name in this option or variable."
        ) from error


def effective_values(parsed: Parsed) -> str:
    """All options that were not left at their default, and how they came about; for the log."""
    parts = [
        f"{dest}={parsed.values[dest]!r}({origin})"
        for dest, origin in parsed.origins.items()
        if origin is not ValueOrigin.DEFAULT
    ]
    return " ".join(parts) or "all defaults"


def parse_nnodes(text: str) -> tuple[int, int]:
    bounds = text.split(":")
    try:
        numbers = [int(bound) for bound in bounds]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not 0 < numbers[0] <= numbers[-1]:
        raise ConfigError(
            f"--nnodes {text}: give the number of nodes N, or MIN:MAX with 0 < MIN <= MAX, for example --nnodes 1 or "
            "--nnodes 2:4."
        )
    return numbers[0], numbers[-1]


# Keys of --rdzv-conf that torch's own rendezvous backends know. They steer machinery that does not exist here.
_TORCH_RDZV_KEYS = (
    "timeout", "read_timeout", "is_host", "store_type", "close_timeout", "heartbeat_timeout", "keep_alive_interval",
    "keep_alive_max_attempt", "use_libuv", "rank", "cert", "key", "cacert", "protocol", "ssl_cert", "ssl_cert_key",
    "ca_cert", "etcd_prefix",
)  # fmt: skip
_OUR_RDZV_KEYS = ("join_timeout", "lastcall_timeout", "last_call_timeout", "pend_timeout")
_QUOTES = "'\""


def parse_rdzv_conf(text: str, notes: list[str]) -> dict[str, float]:
    """Only the times we know. All other keys leave a note: torch accepts each key and looks at those of its backend."""
    found: dict[str, float] = {}
    text = _unquoted(text)
    for part in text.split(",") if text else ():
        key, equals, value = (_unquoted(piece) for piece in part.partition("="))
        if not key or not equals or not value:
            raise ConfigError(
                f"--rdzv-conf {text}: {part!r} does not have the form KEY=VALUE. Give KEY=VALUE,KEY=VALUE."
            )
        if key in _TORCH_RDZV_KEYS:
            notes.append(f"--rdzv-conf {key} has no effect here: it belongs to torch's own rendezvous.")
            continue
        if key not in _OUR_RDZV_KEYS:
            hint = nearest(key, (*_OUR_RDZV_KEYS, *_TORCH_RDZV_KEYS))
            notes.append(f"--rdzv-conf {key} has no effect, because the rendezvous has no such setting.{hint}")
            continue
        try:
            seconds = float(value)
        except ValueError as error:
            raise ConfigError(f"--rdzv-conf {key}={value}: give a number of seconds.") from error
        if not seconds >= 0 or (math.isinf(seconds) and key != "pend_timeout"):
            raise ConfigError(f"--rdzv-conf {key}={value}: give a finite number of seconds of at least 0.")
        if math.isinf(seconds):
            continue  # a surplus node waits until the job ends, as by default
        found["last_call" if key.startswith("last") else key] = seconds
    return found


def _unquoted(text: str) -> str:
    """A shell that quotes twice, as in a YAML file, leaves quotes around the whole, a key or a value."""
    text = text.strip()
    while len(text) > 1 and text[0] in _QUOTES and text[-1] == text[0]:
        text = text[1:-1].strip()
    return text


def parse_streams(option: str, text: str) -> tuple[int, dict[int, int]]:
    """torchrun's form: one number for all local ranks, or a map of them. Gives (default, per local rank)."""
    form = f"{option} {text}: give 0, 1, 2 or 3 (none, stdout, stderr, both), or a map of local ranks such as 0:1,1:2."
    if text in ("0", "1", "2", "3"):
        return int(text), {}
    streams: dict[int, int] = {}
    for part in text.split(","):
        rank, colon, value = part.partition(":")
        if not (colon and rank.isascii() and rank.isdigit() and value in ("0", "1", "2", "3")):
            raise ConfigError(form)
        streams[int(rank)] = int(value)
    return int(Streams.NONE), streams


def parse_signals(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        name = part.strip()
        if not name:
            continue
        number = getattr(signal, name, None) if name.startswith("SIG") and not name.startswith("SIG_") else None
        if number is None:
            names = [known.name for known in signal.Signals]
            raise ConfigError(f"--signals-to-handle {text}: there is no signal {name}.{nearest(name, names)}")
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise ConfigError(f"--signals-to-handle {text}: {name} cannot be handled; leave it out.")
        found.append(int(number))
    return tuple(dict.fromkeys(found))


def read_entry(parsed: Parsed) -> Entry:
    """What the workers run; checked as far as it can be without running it."""
    if parsed.flag("run_path"):
        check_script(parsed.script)
        kind = EntryKind.RUN_PATH
    elif parsed.flag("no_python"):
        if parsed.flag("module"):
            raise ConfigError("--no-python and --module exclude each other. Leave one out.")
        check_program(parsed.script)
        kind = EntryKind.PROGRAM
    elif parsed.flag("module"):
        kind = EntryKind.MODULE
    else:
        check_script(parsed.script)
        kind = EntryKind.SCRIPT
    return Entry.of(kind, parsed.script, parsed.script_args)


def is_read_once(path: str) -> bool:
    """Whether the script is a pipe or a descriptor. Raises OSError if there is no such file."""
    mode = os.stat(path).st_mode
    return path.startswith(_DESCRIPTORS) or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_script(path: str) -> None:
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, "__main__.py")):
            return  # `python DIR` runs it
        raise ConfigError(
            f"The training script {path} is a directory without a __main__.py. Name the Python file in it."
        )
    try:
        if is_read_once(path):
            # Only a look: what is read here is missing in the script that the launcher reads later.
            if not os.access(path, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        with open(path, "rb") as script:
            script.read(1)
    except FileNotFoundError as error:
        raise ConfigError(
            f"The training script {path} does not exist (looked from {os.getcwd()}). Check the path; a module is run "
            "with -m, a program that is not Python with --no-python."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"The training script {path} cannot be read: {error.strerror}. Check its permissions and the path."
        ) from error


def check_program(path: str) -> None:
    import shutil

    if shutil.which(path) is not None:
        return
    if os.path.isdir(path):
        raise ConfigError(f"The program {path} (--no-python) is a directory. Name the program in it.")
    if os.path.exists(path) and os.sep in path:
        raise ConfigError(f"The program {path} (--no-python) is not executable. Use: chmod +x {path}")
    where = "does not exist" if os.sep in path else "is not found on the PATH; a file in this directory is ./" + path
    raise ConfigError(f"The program {path} (--no-python) {where}.")


def probe_log_dir(path: str, *, option: str) -> None:
    if path != os.devnull:  # torchrun's way to say that nothing shall be kept
        probe_directory(path, option=option, purpose="log")


def probe_directory(path: str, *, option: str, purpose: str) -> None:
    """Make sure that files can be written there: the first worker should not have to find out."""
    if not path:
        return
    created = _missing_parents(path)
    probe = os.path.join(path, f".dlrover-probe-{os.getpid()}")
    try:
        make_directory(path)
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.unlink(probe)
    except OSError as error:
        for directory in created:
            try:
                os.rmdir(directory)
            except OSError:
                break  # not created, or no longer empty
        raise ConfigError(
            f"The {purpose} directory {path} cannot be written to: {error.strerror}. Choose another one with {option}, or "
            "change its permissions."
        ) from error


def _missing_parents(path: str) -> list[str]:
    """The directories that `makedirs` would create, deepest first."""
    missing = []
    path = os.path.abspath(path)
    while not os.path.exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def _limits(parsed: Parsed, environment: Environment, notes: list[str]) -> Limits:
    min_nodes, max_nodes = parse_nnodes(parsed.text("nnodes"))
    if parsed.flag("auto_config") and not parsed.is_given("nnodes") and environment.node_num is not None:
        min_nodes = max_nodes = environment.node_num
    if parsed.flag("standalone") and max_nodes > 1:
        if min_nodes > 1:
            raise ConfigError(
                f"--standalone with --nnodes {parsed.text('nnodes')}: a standalone job has one node. Leave out "
                "--standalone and name a --rdzv-endpoint that all nodes reach."
            )
        max_nodes = 1  # nobody else can know the free port
    times = parse_rdzv_conf(parsed.text("rdzv_conf"), notes)
    if "last_call" in times:
        times["first_call"] = times["last_call"]
    if not parsed.number("monitor_interval") >= 0:
        raise ConfigError(
            f"--monitor-interval {parsed.text('monitor_interval')}: give a number of seconds of at least 0."
        )
    if (handler := parsed.text("event_log_handler")) != "null":
        notes.append(
            f"--event-log-handler {handler} has no effect here: `dlrover events` shows what happens in the job."
        )
    try:
        return Limits(min_nodes=min_nodes, max_nodes=max_nodes, node_unit=parsed.integer("node_unit"), **times)
    except ValueError as error:
        raise ConfigError(f"{error}.") from error


def _detection(parsed: Parsed) -> Detection:
    """What was not given follows from what was, in the proportions of the defaults."""
    heartbeat, silence = parsed.number("heartbeat"), parsed.number("node_silence")
    usual = Detection()
    grace = parsed.number("node_grace")
    if parsed.values["node_suspicion"] is not None:
        suspicion = parsed.number("node_suspicion")
    else:
        suspicion = max(2 * heartbeat, min(usual.suspicion, silence))
    try:
        return Detection(
            heartbeat=heartbeat,
            silence=silence,
            suspicion=suspicion,
            lease=min(usual.lease, 0.75 * silence),
            break_grace=grace,
            break_grace_with_spare=min(usual.break_grace_with_spare, grace),
        )
    except ValueError as error:
        raise ConfigError(
            f"The values --heartbeat {heartbeat:g}, --node-silence {silence:g}, --node-suspicion {suspicion:g} and --node-grace "
            f"{grace:g} are not valid: {error}."
        ) from error


def _snapshot_copies(parsed: Parsed) -> int:
    copies = parsed.integer("snapshot_replicas")
    if not 0 <= copies <= MOST_COPIES:
        raise ConfigError(f"--snapshot-replicas {copies}: give a number of copies from 0 to {MOST_COPIES}.")
    return copies


def _snapshot_parity(parsed: Parsed) -> tuple[int, int]:
    text = parsed.text("snapshot_parity")
    if not text:
        return 0, 0
    k, plus, m = text.partition("+")
    if not (plus and k.isdecimal() and m.isdecimal() and int(k) and int(m) and int(k) + int(m) <= LARGEST_GROUP):
        raise ConfigError(
            f"--snapshot-parity {text}: give K+M, for example 4+1: groups of K+M nodes, at most {LARGEST_GROUP}, of which any M may "
            "be lost."
        )
    if parsed.integer("snapshot_replicas"):
        raise ConfigError(
            "--snapshot-parity and --snapshot-replicas protect from the same losses. Give only one of them."
        )
    return int(k), int(m)


def watch_terms(strategy: int, downtime: float, max_downtime: float) -> WatchTerms:
    """From the historical options, in minutes. Raises `ConfigError`."""
    if strategy not in tuple(HangStrategy):
        raise ConfigError(f"--hang-detection {strategy}: give 0 (log only), 1 (tell people) or 2 (restart workers).")
    for option, minutes in (("--hang-downtime", downtime), ("--max-hang-downtime", max_downtime)):
        if not 0 < minutes < float("inf"):
            raise ConfigError(f"{option} {minutes:g}: give a number of minutes above 0.")
    return WatchTerms(
        strategy=HangStrategy(strategy),
        hang_timeout=downtime * 60.0,
        longest_timeout=max(downtime, max_downtime) * 60.0,
    )


def _watching(parsed: Parsed) -> Watching:
    is_enabled = parsed.flag("enable_dashboard") or parsed.is_given("dashboard_port")
    metrics = parsed.integer("metrics_port") if parsed.values["metrics_port"] is not None else -1
    return Watching.of(
        is_enabled=is_enabled,
        port=parsed.integer("dashboard_port"),
        host=parsed.text("dashboard_host"),
        url=parsed.text("dashboard_url"),
        metrics_port=metrics,
        metrics_host=parsed.text("metrics_host"),
    )


def _standby(parsed: Parsed) -> int:
    standby = parsed.integer("standby")
    if standby < 0:
        raise ConfigError(f"--standby {standby}: give a number of nodes of at least 0.")
    return standby


_AUTO_CHECK_NODES = 4
"""--auto-config checks jobs of at least so many nodes: fewer cannot tell a bad node from a bad partner so well."""


def _check(parsed: Parsed, limits: Limits, notes: list[str]) -> CheckTerms | None:
    """None: nodes are not checked."""
    precheck = int(parsed.text("precheck"))
    is_perf_test = parsed.flag("comm_perf_test") or precheck == 2
    is_automatic = parsed.flag("auto_config") and limits.max_nodes >= _AUTO_CHECK_NODES
    if not (parsed.flag("network_check") or precheck or is_perf_test or is_automatic):
        if parsed.flag("exclude_straggler"):
            notes.append("--exclude-straggler has no effect without --network-check.")
        return None
    from dlrover.trainer.torch.node_check.registry import module_of

    accelerator = parsed.text("accelerator")
    module = module_of(accelerator)
    if module is None:
        notes.append(
            f"--accelerator {accelerator}: no installed package can check this kind of device, so the node "
            "check cannot run. Install a package that can, or give --accelerator cpu."
        )
        return None
    try:
        return CheckTerms(
            module=module,
            accelerator=accelerator,
            is_perf_test=is_perf_test,
            excludes_stragglers=parsed.flag("exclude_straggler"),
            straggler_ratio=parsed.number("straggler_ratio"),
            fresh_for=parsed.number("check_fresh_for"),
        )
    except ValueError as error:
        raise ConfigError(f"{error}.") from error


def _plugin(parsed: Parsed, dest: str, by_variable: str, variable: str) -> str:
    """The option wins over the variable; an error names the one that it is about."""
    if parsed.text(dest):
        return check_plugin(parsed.text(dest), option=f"--{dest.replace('_', '-')}")
    return check_plugin(by_variable, option=f"The variable {variable}")


def check_plugin(name: str, *, option: str) -> str:
    """Only the form: it is imported where it runs, in the master."""
    module, separator, class_name = name.partition("::")
    is_module = all(piece.isidentifier() for piece in module.split("."))
    if name and not (separator and is_module and class_name.isidentifier()):
        raise ConfigError(f"{option} {name}: give module::Class, for example my_network::Querier.")
    return name


def check_operators(text: str) -> str:
    """Only the form, as for other plug-ins of the master."""
    if text.strip() in ("", "[]"):
        return ""
    from dlrover.master.diagnosis.pre_checks import parse_operators  # late: few need it, and it imports much

    parse_operators(text)
    return text


def _tuner(parsed: Parsed) -> Tuner:
    if parsed.text("tuner"):
        return read_tuner(parsed.text("tuner"))
    return Tuner.MEMORY if parsed.flag("auto_tunning") else Tuner.OFF


def parse_nproc(text: str) -> int | str:
    """A number, or a word that the agent resolves once torch is there."""
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text.isidentifier():
        return text  # auto, gpu, xpu, or a device of which only torch knows, such as npu
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(
            f"--nproc-per-node {text}: give a number of at least 1, or auto, gpu, xpu, cpu or the name of a device that torch knows."
        )
    return number


def _node_rank(parsed: Parsed, environment: Environment, limits: Limits, notes: list[str]) -> int | None:
    """A variable of the platform wins: it is set anew for a replacement, a command line is copied."""
    given = parsed.integer("node_rank") if parsed.is_given("node_rank") else None
    if given is not None and given < 0:
        raise ConfigError(f"--node-rank {given}: give 0 or more.")
    if parsed.flag("standalone"):
        return None
    rank = environment.node_rank
    if rank is not None and environment.node_rank_variable == "RANK" and limits.max_nodes == 1:
        rank = None  # each pod runs a job of its own
    if rank is None:
        return given
    if given is not None and given != rank:
        notes.append(
            f"--node-rank {given} has no effect, because the variable {environment.node_rank_variable}={rank} takes "
            "precedence."
        )
    return rank


_PRELOADED = ("torch._dynamo", "dlrover.trainer.torch.flash_checkpoint")
"""Beside torch, for all jobs that do not say otherwise."""


def _preload(text: str) -> tuple[str, ...]:
    modules = tuple(part.strip() for part in text.split(",") if part.strip())
    for module in modules:
        if module.startswith("-") and module[1:] not in _PRELOADED:
            raise ConfigError(f"--preload {text}: a minus can leave out only {' and '.join(_PRELOADED)}.")
        if not all(piece.isidentifier() for piece in module.removeprefix("-").split(".")):
            raise ConfigError(f"--preload {text}: {module!r} is not a name of a Python module.")
    return modules


def _log(parsed: Parsed, environment: Environment) -> WorkerLogConfig:
    redirect_default, redirects = parse_streams("--redirects", parsed.text("redirects"))
    tee_default, tee = parse_streams("--tee", parsed.text("tee"))
    ranks_text = parsed.text("local_ranks_filter")
    try:
        ranks = tuple(sorted({int(part) for part in ranks_text.split(",")})) if ranks_text else ()
    except ValueError as error:
        raise ConfigError(f"--local-ranks-filter {ranks_text}: give local ranks such as 0,1,2.") from error
    if environment.agent_log_dir and not any(parsed.is_given(name) for name in ("log_dir", "redirects", "tee")):
        tee_default = int(Streams.ALL)  # who names a directory by the variable wants files in it
    return WorkerLogConfig(
        log_dir=absolute(parsed.text("log_dir") or environment.agent_log_dir),
        redirects=redirects,
        redirect_default=redirect_default,
        tee=tee,
        tee_default=tee_default,
        local_ranks_filter=ranks,
        duplicate_stdout_filters=parsed.texts("duplicate_stdout_filters"),
        duplicate_stderr_filters=parsed.texts("duplicate_stderr_filters"),
        line_prefix=environment.line_prefix,
    )


def _tls(parsed: Parsed) -> TlsConfig | None:
    files = {name: parsed.text(f"tls_{name}") for name in ("ca", "cert", "key")}
    if not any(files.values()):
        return None
    for name, path in files.items():
        if path and not os.access(path, os.R_OK):
            raise ConfigError(f"--tls-{name} {path}: this file does not exist or cannot be read.")
    if bool(files["cert"]) != bool(files["key"]):
        raise ConfigError("--tls-cert and --tls-key belong together: give both or none.")
    return TlsConfig(**{name: os.path.abspath(path) if path else "" for name, path in files.items()})


def _shutdown_timeout(parsed: Parsed, environment: Environment) -> float:
    if parsed.values["shutdown_timeout"] is not None:
        return _at_least_zero("--shutdown-timeout", float(parsed.integer("shutdown_timeout")))
    return usual_shutdown_timeout(environment)


def usual_shutdown_timeout(environment: Environment) -> float:
    """Where no option names one."""
    return DEFAULT_SHUTDOWN_TIMEOUT if environment.shutdown_timeout is None else environment.shutdown_timeout


def _at_least_zero(option: str, seconds: float) -> float:
    if not seconds >= 0:
        raise ConfigError(f"{option} {seconds:g}: give a number of seconds of at least 0.")
    return seconds


def _journal(path: str) -> str:
    if path and os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(f"--journal {path} is a file. Give a directory; each job gets a file of its own in it.")
    return absolute(path)


def absolute(path: str) -> str:
    return os.path.abspath(path) if path else ""
