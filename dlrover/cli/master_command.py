"""
`dlrover master`: a master started by hand or in a cluster, for nodes that connect to it with DLROVER_MASTER_ADDR.

Takes the option names of the original's master where their feature exists; those that have none here are refused with the
reason, because an option that does nothing is worse than an error.
"""

from __future__ import annotations

import argparse
import ast
import os
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec

from dlrover.cli.cluster_master import (
    CLUSTER_PLATFORMS,
    TERMINATION_MESSAGE,
    ClusterStart,
    ClusterWish,
    leave_notice,
    prepare_in_cluster,
)
from dlrover.cli.console import say_block
from dlrover.cli.launch import processes
from dlrover.cli.launch.discovery import MasterPort, check_token, new_launch, read_token_file
from dlrover.cli.launch.launcher import EXIT_USAGE, Programs
from dlrover.cli.launch.processes import SignalInbox
from dlrover.cli.launch.runtime_dir import NodeDirectory, user_root
from dlrover.cli.node_types import read_fleet
from dlrover.cli.options.brain_settings import add_brain_options, brain_of
from dlrover.cli.options.environment import Environment, read_environment
from dlrover.cli.options.scaling_settings import OPTION_FIELDS, add_scaling_options, scaling_of
from dlrover.cli.options.settings import check_operators, check_plugin, watch_terms
from dlrover.cli.options.view_settings import Watching
from dlrover.host.console import PATIENCE, ConsoleWriter
from dlrover.protocol.addresses import LOOPBACK, Address, TlsConfig
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.fleet import FleetSpec
from dlrover.protocol.messages.scaling import ScaleTerms
from dlrover.protocol.messages.watch import WatchTerms

EVERYWHERE = "0.0.0.0"
STOP_TIMEOUT = 5.0
_YES = ("true", "1", "yes")
_NO = ("false", "0", "no")
_SERVICES = ("grpc", "http")

_OTHER_PLATFORMS = {
    "volcano": "volcano is a scheduler of Kubernetes and not a platform. Name it in `spec.gang` of the job, and use: "
    "--platform pyk8s",
}
_WITHOUT_EFFECT = (
    (
        "--xpu-type",
        ("nvidia", "ascend", "mthreads", "metax", "cpu"),
        "the resource names in the job's description already tell the kind of accelerator",
    ),
    ("--task-process-timeout", ("1800",), "the script sets this time when it registers a dataset"),
    (
        "--training-elastic-mode",
        ("base",),
        "this version does not support the mode of DeepSpeed's universal checkpoints",
    ),
)
"""Options of the original: name, values that ask for nothing here, and why others cannot be had."""
_ON_RAY = (
    "job_name", "platform", "job_spec", "node_num", "pending_timeout", "pending_fail_strategy", "relaunch_error", "namespace", *OPTION_FIELDS,
)  # fmt: skip
"""Fields of the options that count for a job on Ray."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser("dlrover master")
    options, unknown = read_options(parser, argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if notes := reset_options_without_effect(options):
            raise ConfigError(f"{notes[0]} Leave it out.")
        return run(options)
    except ConfigError as error:
        say_block(f"dlrover master: error: {error}")
        return EXIT_USAGE


def read_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, with what the workers of a Ray job run as `command`, and the words that are none of them."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options, unknown = parser.parse_known_args(words[:end])
    options.command = words[end + 1 :]
    if options.platform == "ray" and unknown and not unknown[0].startswith("-"):
        options.command, unknown = unknown, []  # typer drops the `--`
    return options, unknown


def reset_options_without_effect(options: argparse.Namespace) -> list[str]:
    """Of the original's options: a sentence for each one that was given with a value that would matter, and is reset."""
    notes = []
    for name, harmless, reason in _WITHOUT_EFFECT:
        field = name[2:].replace("-", "_")
        value = getattr(options, field)
        if value.lower() not in harmless:
            notes.append(f"{name} {value} has no effect: {reason}.")
            setattr(options, field, harmless[0])
    if options.platform == "ray":
        notes += _reset_options_without_effect_on_ray(options)
    if options.namespace and options.platform not in CLUSTER_PLATFORMS:
        notes.append(f"--namespace {options.namespace} has no effect: --platform {options.platform} has no namespaces.")
        options.namespace = ""
    if not options.fleet and options.platform not in (*CLUSTER_PLATFORMS, "ray"):
        for field, harmless_value in (("relaunch_error", "false"), ("group_affinity", "")):
            if getattr(options, field).lower() != harmless_value:
                name = "--" + field.replace("_", "-")
                notes.append(f"{name} {getattr(options, field)} has no effect, because this master starts no nodes.")
                setattr(options, field, harmless_value)
    return notes


def _reset_options_without_effect_on_ray(options: argparse.Namespace) -> list[str]:
    """There the job's host chooses the address and the files of the master. `--node-num` is in the job file."""
    notes = []
    defaults = vars(build_parser("", allow_abbrev=True).parse_args(["--job-name=x"]))
    for field, default in defaults.items():
        if field not in _ON_RAY and getattr(options, field) != default:
            notes.append(
                f"--{field.replace('_', '-')} {getattr(options, field)} has no effect: with --platform ray the "
                "job's host starts the master. Give options of dlrover-run after `--`, in front of the script."
            )
            setattr(options, field, default)
    return notes


def run(options: argparse.Namespace, *, programs: Programs | None = None) -> int:
    """Start the master, tell where it is, wait for its end."""
    if options.platform == "ray":
        from dlrover.cli.ray.job_file import run_job_file

        return run_job_file(
            options.job_spec,
            options.command,
            job_name=options.job_name,
            pending_timeout=options.pending_timeout,
            pending_strategy=options.pending_fail_strategy,
            relaunches_errors=_is_yes(options.relaunch_error, "--relaunch-error"),
            scaling=options,
        )
    from dlrover.master.config import MasterConfig

    environment = read_environment(os.environ)
    is_in_cluster = options.platform in CLUSTER_PLATFORMS
    tls = _tls(options)
    fleet = None if is_in_cluster else _fleet(options)
    platform_options = _platform_options(options)
    if options.job_spec or options.command:
        what = f"--job-spec {options.job_spec}" if options.job_spec else f"A script ({' '.join(options.command)})"
        raise ConfigError(f"{what} needs --platform ray.")
    host = options.host or (EVERYWHERE if is_in_cluster else LOOPBACK)
    master_port = _take_master_port(host, options.port, environment.host_ports)
    address = Address(host, master_port.port)
    directory = NodeDirectory(user_root(environment), options.job_name, new_launch())
    try:
        directory.record(str(address), tls)
        token = environment.job_token and check_token(environment.job_token, "The variable DLROVER_JOB_TOKEN")
        if options.token_file:
            token = read_token_file(options.token_file)
        journal = os.path.abspath(options.journal or os.path.join(directory.path, "journal.sqlite"))
        job_uid, start = "", None
        if is_in_cluster:
            start = prepare_in_cluster(
                _cluster_wish(options, environment, master_port.port, token, journal), os.environ
            )
            fleet, platform_options, job_uid, token = start.fleet, start.platform_options, start.job_uid, start.token
        brain, brain_notes = brain_of(options, os.environ, user=environment.user, namespace=options.namespace)
        token_file = directory.write("token", (token or directory.share_token()).encode())
        config = MasterConfig(
            job_name=options.job_name,
            journal=journal,
            log_root=environment.log_root,
            user=environment.user,
            host=host,
            port=master_port.port,
            token_file=token_file,
            tls=tls,
            topology_querier=check_plugin(
                options.topology_querier or environment.topology_querier, option="--topology-querier"
            ),
            topology_sorter=check_plugin(
                options.topology_sorter or environment.topology_sorter, option="--topology-sorter"
            ),
            event_reporters=environment.event_reporters,
            pre_check_ops=check_operators(options.pre_check_ops),
            failover_extension=_failover(options, fleet),
            platform="" if fleet is None else options.platform,
            platform_options=platform_options,
            job_uid=job_uid,
            fleet=fleet,
            scaling=_scaling(options, start) if fleet is not None else None,
            brain=brain,
            end_file=os.path.join(directory.path, "end.json") if is_in_cluster else "",
            watch=_watch(options),
            **msgspec.structs.asdict(_watching(options)),
            ready_file=os.path.join(directory.path, "master.ready"),
            parent_death=True,
            parent_pid=os.getpid(),
        )
        path = directory.write("master.json", msgspec.json.encode(config))
        with SignalInbox((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)) as inbox:
            pid = processes.spawn((*(programs or Programs()).master, "--config", path), os.environ)
            hint = "" if token else f", token in {token_file}"
            reached_at = Address(socket.gethostname(), master_port.port) if host in ("0.0.0.0", "::") else address
            lines = [f"job {options.job_name} at {address}{hint}; set DLROVER_MASTER_ADDR={reached_at}"]
            if config.dashboard_port >= 0:
                lines.insert(0, f"`dlrover dashboard {options.job_name}` prints a link to the dashboard")
            console = _say([*lines, *brain_notes])
            exit_code = _wait(pid, inbox)
            console.flush(PATIENCE)
            # In a cluster the job's end is in the message, and any other code than 0 means: start the master again.
            return 0 if is_in_cluster and leave_notice(config.end_file, options.termination_message_path) else exit_code
    finally:
        master_port.close()
        directory.remove()


def _take_master_port(host: str, port: int, host_ports: Sequence[int]) -> MasterPort:
    """Without a port: the first free one of HOST_PORTS, which others can reach, else any."""
    for choice in host_ports if port == 0 else ():
        try:
            return MasterPort(host, choice)
        except OSError:
            continue
    try:
        return MasterPort(host, port)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror or error}. Choose another port.") from error


def _say(lines: Sequence[str]) -> ConsoleWriter:
    """Before the master's own lines, if the console takes any; else when it does. The end of the master is heard meanwhile."""
    console = ConsoleWriter()
    for line in lines:
        console.write(2, f"dlrover master: {line}\n".encode(sys.stderr.encoding, "backslashreplace"))
    console.flush(PATIENCE)
    return console


def _watch(options: argparse.Namespace) -> WatchTerms | None:
    """None: as the nodes were started."""
    given = (options.hang_detection, options.hang_downtime, options.max_hang_downtime)
    if given == (None, None, None):
        return None
    defaults = (2, 5.0, 120.0)
    strategy, downtime, longest = (
        default if value is None else value for value, default in zip(given, defaults, strict=True)
    )
    return watch_terms(int(strategy), downtime, longest)


def _fleet(options: argparse.Namespace) -> FleetSpec | None:
    """None: people start the nodes. That is what `--platform local` alone has always meant."""
    from dlrover.core.fleet.commands import check_spec
    from dlrover.platforms.registry import find_platform

    if options.platform in _OTHER_PLATFORMS:
        raise ConfigError(f"--platform {options.platform}: {_OTHER_PLATFORMS[options.platform]}")
    find_platform(options.platform)
    if not options.fleet:
        if options.platform != "local" or options.platform_options:
            raise ConfigError(
                f"--platform {options.platform} starts nodes only with a fleet: give --fleet FILE, for example "
                'with {"replicas": {"worker": {"count": 2}}}.'
            )
        return None
    text = _read(options.fleet, "--fleet")
    try:
        spec = _with_patience(read_fleet(text), options)
        check_spec(spec)
    except (ConfigError, msgspec.MsgspecError, Rejected) as error:
        raise ConfigError(f"--fleet {options.fleet}: {error}") from error
    return spec


def _with_patience(spec: FleetSpec, options: argparse.Namespace) -> FleetSpec:
    """What the command line says of waiting counts more than the file."""
    given = {
        "pending_timeout": options.pending_timeout,
        "pending_strategy": options.pending_fail_strategy,
        "group_affinity": _group_affinity(options.group_affinity) or None,
        "relaunch_always": True if _is_yes(options.relaunch_error, "--relaunch-error") else None,
    }
    return msgspec.structs.replace(spec, **{name: value for name, value in given.items() if value is not None})


def _scaling(options: argparse.Namespace, start: ClusterStart | None) -> ScaleTerms:
    """In a cluster the ElasticJob says whether the job scales itself; the command line counts more."""
    if start is None:
        return scaling_of(options, os.environ).terms
    options.nodes_start = options.nodes_start or start.nodes_start
    return scaling_of(options, os.environ, default=start.scale_mode, types=start.scaled_types, gives_sizes=True).terms


def _cluster_wish(
    options: argparse.Namespace, environment: Environment, port: int, token: str, journal: str
) -> ClusterWish:
    for name in ("fleet", "platform_options"):
        if getattr(options, name):
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} has no effect with --platform {options.platform}: the ElasticJob sets it. Leave it out."
            )
    return ClusterWish(
        job_name=options.job_name,
        namespace=options.namespace,
        port=port,
        token=token,
        pod_ip=environment.pod_ip,
        journal=journal,
        pending_timeout=options.pending_timeout,
        pending_strategy=options.pending_fail_strategy,
        group_affinity=_group_affinity(options.group_affinity),
        relaunches_errors=_is_yes(options.relaunch_error, "--relaunch-error"),
    )


def _group_affinity(text: str) -> dict[int, int]:
    """`{0: 10, 1: 15}`, as Python or JSON writes it."""
    if not text:
        return {}
    try:
        found = ast.literal_eval(text)
        groups = {int(group): int(count) for group, count in found.items()}
    except (ValueError, SyntaxError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"--group-affinity {text}: give a map of groups to workers, such as {{0: 10, 1: 15}}."
        ) from error
    if any(group < 0 or count < 1 for group, count in groups.items()):
        raise ConfigError(
            f"--group-affinity {text}: group numbers must be at least 0, and each group needs at least 1 worker."
        )
    return groups


def _is_yes(text: str, option: str) -> bool:
    if text.lower() not in (*_YES, *_NO):
        raise ConfigError(f"{option} {text}: give true or false.")
    return text.lower() in _YES


def _failover(options: argparse.Namespace, fleet: FleetSpec | None) -> str:
    name = check_plugin(options.dynamic_failover_extension, option="--dynamic-failover-extension")
    if name and fleet is None:
        raise ConfigError(
            f"--dynamic-failover-extension {name}: agents call this extension, and this master starts no agents. Give "
            "the option to dlrover-run on the nodes, or set DLROVER_EXTENSION_DYNAMIC_FAILOVER there."
        )
    return name


def _platform_options(options: argparse.Namespace) -> dict[str, object]:
    if not options.platform_options:
        return {}
    try:
        return msgspec.json.decode(_read(options.platform_options, "--platform-options"), type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--platform-options {options.platform_options}: {error}") from error


def _read(path: str, option: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}.") from error


def _watching(options: argparse.Namespace) -> Watching:
    if options.service_type not in _SERVICES:
        raise ConfigError(f"--service-type {options.service_type}: give {' or '.join(_SERVICES)}.")
    return Watching.of(
        is_enabled=_is_yes(options.enable_dashboard, "--enable-dashboard") or options.service_type == "http",
        port=options.dashboard_port,
        host=options.dashboard_host,
        url=options.dashboard_url,
        metrics_port=options.metrics_port,
        metrics_host=options.metrics_host,
    )


def _tls(options: argparse.Namespace) -> TlsConfig | None:
    """A user who gives any of the files wants TLS: an open master instead would be a bad surprise."""
    files = {name: getattr(options, f"tls_{name}") for name in ("ca", "cert", "key")}
    if not any(files.values()):
        return None
    if not (files["cert"] and files["key"]):
        raise ConfigError("A master with TLS needs its own certificate: give both --tls-cert and --tls-key.")
    for name, path in files.items():
        if path and not os.access(path, os.R_OK):
            raise ConfigError(f"--tls-{name} {path}: this file does not exist or cannot be read.")
    return TlsConfig(**{name: os.path.abspath(path) if path else "" for name, path in files.items()})


def _wait(pid: int, inbox: SignalInbox) -> int:
    stopped_by: int | None = None
    while True:
        came = [number for number in inbox.wait(STOP_TIMEOUT if stopped_by else None) if number != signal.SIGCHLD]
        ended = processes.reap_children()
        if pid in ended:
            if stopped_by is not None:
                return 128 + stopped_by
            status = ended[pid]
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if stopped_by is not None:
            processes.send(pid, signal.SIGKILL)  # asked before, and either its time is up or somebody insists
        elif came:
            stopped_by = came[0]
            processes.send(pid, signal.SIGTERM)


def build_parser(program: str, *, allow_abbrev: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Start a master by hand.",
        epilog="With --platform ray, give what the workers run last: -- SCRIPT ARGUMENTS.",
        allow_abbrev=allow_abbrev,
    )

    def add(name: str, **keywords: object) -> None:
        spellings = dict.fromkeys((name, "--" + name[2:].replace("-", "_")))
        parser.add_argument(*spellings, **keywords)  # type: ignore[arg-type]

    add("--job-name", required=True, help="name of the job")
    add("--host", default="", help=f"address to listen on ({LOOPBACK}; in a cluster {EVERYWHERE}, all addresses)")
    add("--port", type=_port, default=0, help="port to listen on (0: one of HOST_PORTS, or any free port)")
    add(
        "--node-num",
        type=_positive,
        default=1,
        help="accepted without effect: the nodes tell the master how many they are",
    )
    add(
        "--platform",
        default="local",
        help="platform that starts the nodes: local, pyk8s, ray, a registered name, or MODULE::CLASS",
    )
    add(
        "--job-spec",
        default="",
        metavar="FILE",
        help="with --platform ray: file that describes the job's nodes, .json or .yaml",
    )
    add("--namespace", default="", help="namespace of the ElasticJob (that of the pod or of the kubeconfig)")
    add(
        "--fleet",
        default="",
        metavar="FILE",
        help="JSON file that lists the nodes to start (without it, you start the nodes by hand)",
    )
    add("--platform-options", default="", metavar="FILE", help="options of the platform, a JSON object")
    add(
        "--journal",
        default="",
        metavar="FILE",
        help="keep the journal in this file, and continue from it after a restart",
    )
    add("--token-file", default="", metavar="FILE", help="file that holds the job token (or DLROVER_JOB_TOKEN)")
    add(
        "--tls-ca",
        default="",
        metavar="FILE",
        help="CA certificates (PEM) that the certificates of clients must come from",
    )
    add("--tls-cert", default="", metavar="FILE", help="our certificate")
    add("--tls-key", default="", metavar="FILE", help="its key")
    add(
        "--pre-check-ops",
        default="",
        metavar="OPERATORS",
        help="checks before training: MODULE::CLASS,... or a list of tuples",
    )
    add(
        "--dynamic-failover-extension",
        default="",
        metavar="MODULE::CLASS",
        help="plug-in that decides, on the nodes of --fleet, what the job does after a failure",
    )
    add(
        "--pending-timeout",
        type=float,
        metavar="SECONDS",
        help="seconds that a node of --fleet may wait for its resources",
    )
    add(
        "--pending-fail-strategy",
        type=int,
        metavar="-1|0|1|2",
        help="which nodes end the job when they wait too long: none (-1, 0), those that the job needs to start (1), "
        "any (2)",
    )
    add(
        "--termination-message-path",
        default=TERMINATION_MESSAGE,
        metavar="FILE",
        help=f"file in which the kubelet reads how the job ended ({TERMINATION_MESSAGE})",
    )
    add("--group-affinity", default="", metavar="MAP", help="workers of each scheduling group, such as {0: 10, 1: 15}")
    add(
        "--relaunch-error",
        nargs="?",
        const="true",
        default="false",
        metavar="true|false",
        help="also replace nodes that ended with an error of the script",
    )
    add_scaling_options(add)
    add_brain_options(add)
    add(
        "--topology-querier",
        default="",
        metavar="MODULE::CLASS",
        help="plug-in that tells the network switches above a host",
    )
    add("--topology-sorter", default="", metavar="MODULE::CLASS", help="plug-in that orders the nodes of a world")
    add(
        "--hang-detection",
        type=int,
        metavar="0|1|2",
        help="what the master does when workers hang: log (0), tell people (1), restart workers (2)",
    )
    add(
        "--hang-downtime",
        type=float,
        metavar="MINUTES",
        help="minutes without progress until the workers restart, if nothing proves that they hang (5)",
    )
    add("--max-hang-downtime", type=float, metavar="MINUTES", help="the same for phases that may take long (120)")
    add(
        "--enable-dashboard",
        nargs="?",
        const="true",
        default="false",
        metavar="true|false",
        help="serve a page about the job",
    )
    add(
        "--dashboard-port",
        type=_port,
        default=8080,
        help="port of the page (8080); any free port if it is taken, or with 0",
    )
    add("--dashboard-host", default=LOOPBACK, help=f"address of the page ({LOOPBACK}; :: or 0.0.0.0: all addresses)")
    add("--dashboard-url", default="", metavar="URL", help="URL under which a reverse proxy shows the page")
    add(
        "--service-type",
        type=str.lower,
        default="grpc",
        metavar="grpc|http",
        help="http: the port of the page also answers questions as JSON (POST /ask). Agents use gRPC in both cases",
    )
    add("--metrics-port", type=_port, default=-1, help="port of /metrics for Prometheus (only on the page's port)")
    add("--metrics-host", default=LOOPBACK, help=f"address of /metrics ({LOOPBACK})")
    for name, harmless, _ in _WITHOUT_EFFECT:
        add(name, default=harmless[0], nargs="?", const="true", help=argparse.SUPPRESS)
    return parser


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text} is not a port; give a number from 0 to 65535")
    return int(text)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} must be a number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
