"""
`dlrover ray run`: its command line, checked, as the plan of a job.

Nothing here needs Ray, so that a wrong option is told before it is imported.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from dlrover.agent.config import Entry, EntryKind
from dlrover.cli.launch import job_names
from dlrover.cli.launch.discovery import new_launch
from dlrover.cli.launch.hosted_command import check_command, passed_on, read_nodes, split_command
from dlrover.cli.options.environment import read_environment
from dlrover.cli.options.parser import Parsed, parse
from dlrover.cli.options.scaling_settings import add_scaling_options, scaling_of
from dlrover.cli.options.settings import Settings, build_settings, check_script, encode_settings
from dlrover.cli.ray.messages import RayJobPlan
from dlrover.core.fleet.commands import check_spec
from dlrover.master.config import MasterConfig
from dlrover.platforms.ray.messages import JobSecrets
from dlrover.platforms.ray.node_actor import TOKEN_WORD
from dlrover.platforms.ray.placement import Placement, demand_of
from dlrover.platforms.ray.starter import RayNodes
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec, Resource, Strategy
from dlrover.protocol.messages.scaling import ScaleTerms

PROGRAM = "dlrover ray run"
STOP_MARGIN = 10.0
_VARIABLES = ("DLROVER_", "TORCH", "NCCL_", "GLOO_", "OMP_")
"""Variables of the driver's own surroundings that say how to train, not what this machine is like."""


class RayRun(Struct, frozen=True, kw_only=True):
    """The command line, checked."""

    plan: RayJobPlan
    environ: dict[str, str]
    """Of --env: secrets, as far as we know."""
    address: str
    working_dir: str
    """Sent to each machine; empty: the code is there."""
    is_detached: bool
    has_given_name: bool
    waits_for_machines: bool
    settings: Settings
    resource: Resource
    notes: tuple[str, ...] = ()

    def secrets(self) -> JobSecrets:
        return JobSecrets(token=os.urandom(24).hex(), environ=self.environ)


class NodeSize(Struct, frozen=True, kw_only=True):
    min_nodes: int
    max_nodes: int
    standby: int
    max_relaunches: int
    resource: Resource


def read_run(argv: Sequence[str], environ: Mapping[str, str]) -> RayRun:
    """Raises `ConfigError`; ends the process for `--help` and options that are none."""
    parser = build_parser()
    own, command = split_command(parser, list(argv))
    options = parser.parse_args(own)
    if not command:
        raise ConfigError(f"Name the training script: {PROGRAM} --nodes 2 -- train.py")
    if options.nproc_per_node:
        command = [f"--nproc-per-node={options.nproc_per_node}", *command]
    check_command(command, PROGRAM)
    min_nodes, max_nodes = read_nodes(options.nodes)
    size = NodeSize(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        standby=_count(options.standby, "--standby"),
        max_relaunches=_count(options.max_relaunches, "--max-relaunches"),
        resource=Resource(
            cpu=_amount(options.cpus, "--cpus"),
            gpus=_count(options.gpus, "--gpus"),
            gpu_type=options.gpu_type,
            memory_mb=_count(options.memory, "--memory"),
        ),
    )
    return build_run(
        command,
        environ,
        size=size,
        options=options,
        fleet=FleetSpec(
            replicas={
                NodeType.WORKER: ReplicaSpec(
                    count=size.max_nodes, max_relaunches=size.max_relaunches, resource=size.resource
                )
            },
            standby=size.standby,
            pending_timeout=options.pending_timeout,
        ),
    )


def build_run(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    size: NodeSize,
    options: argparse.Namespace,
    fleet: FleetSpec,
    scaled_types: tuple[NodeType, ...] | None = None,
) -> RayRun:
    """Raises `ConfigError`. `scaled_types`: that the job may change by itself; None: all that can."""
    given = passed_on(environ)
    parsed = parse([f"--nnodes={size.min_nodes}:{size.max_nodes}", f"--standby={size.standby}", *command], given)
    if parsed.immediate:
        raise ConfigError(f"{parsed.immediate} is an option of dlrover-run only.")
    entry, script = _entry(parsed, options.working_dir)
    settings = build_settings(parsed, read_environment(given), entry=entry)
    encode_settings(settings)
    try:
        check_spec(fleet)
    except Rejected as error:
        raise ConfigError(str(error)) from error
    job_uid = new_launch()
    name = options.job_name or settings.environment.job_name or job_names.after_script(entry).name
    node_argv = _node_argv(parsed, command, script or entry.name, size)
    extra = _resources(options.resource)
    bounds = (size.min_nodes, size.max_nodes)
    scaling = scaling_of(options, environ, types=scaled_types, tuner=settings.tuner, bounds=bounds)
    nodes = RayNodes(
        job_uid=job_uid,
        job_name=name,
        argv=("-P", "-m", "dlrover.cli.run", f"--job-token-file={TOKEN_WORD}", *node_argv),
        script=script,
        environ=_job_environ(given, name, job_uid, size.max_nodes),
        resources=extra,
        placement=_placement(options.placement),
    )
    variables = _variables(options.env, environ)
    plan = RayJobPlan(
        job_uid=job_uid,
        job_name=name,
        nodes=nodes,
        summary=_summary(size, fleet, demand_of(size.resource, extra)),
        master=_master(name, settings, fleet, scaling.terms),
        journal=settings.journal,
        has_variables=bool(variables),
        host_machine=options.host_machine,
        capacity=options.capacity,
        grace=settings.shutdown_timeout + STOP_MARGIN,
        shutdown_timeout=settings.shutdown_timeout,
        master_grace=settings.master_grace,
        is_exit_code_of_worker=settings.is_exit_code_of_worker,
        tls=settings.tls,
    )
    return RayRun(
        plan=plan,
        environ=variables,
        address=options.address,
        working_dir=os.path.abspath(options.working_dir) if options.working_dir else "",
        is_detached=options.detach,
        has_given_name=bool(options.job_name or settings.environment.job_name),
        waits_for_machines=options.wait_for_machines,
        settings=settings,
        resource=size.resource,
        notes=(*settings.notes, *scaling.notes),
    )


def renamed(run: RayRun, name: str) -> RayRun:
    """The same job under another name."""
    plan = run.plan
    nodes = msgspec.structs.replace(plan.nodes, job_name=name, environ={**plan.nodes.environ, "ELASTIC_JOB_NAME": name})
    master = None if plan.master is None else msgspec.structs.replace(plan.master, job_name=name)
    return msgspec.structs.replace(run, plan=msgspec.structs.replace(plan, job_name=name, nodes=nodes, master=master))


def _entry(parsed: Parsed, working_dir: str) -> tuple[Entry, str]:
    """What workers run, and the file that must be on each machine. Files are made absolute, unless they travel along."""
    if working_dir and not os.path.isdir(working_dir):
        raise ConfigError(f"--working-dir {working_dir}: there is no such directory.")
    if not parsed.script:
        raise ConfigError(f"Name the training script: {PROGRAM} --nodes 2 -- train.py")
    if parsed.flag("module"):
        return Entry.of(EntryKind.MODULE, parsed.script, parsed.script_args), ""
    if parsed.flag("no_python"):
        return Entry.of(EntryKind.PROGRAM, parsed.script, parsed.script_args), ""
    kind = EntryKind.RUN_PATH if parsed.flag("run_path") else EntryKind.SCRIPT
    path = parsed.script
    if working_dir and not os.path.isabs(path):
        check_script(os.path.join(working_dir, path))
    elif os.path.exists(path):
        check_script(path)
        path = os.path.abspath(path)
    elif not os.path.isabs(path):
        raise ConfigError(
            f"The training script {path} does not exist here (looked from {os.getcwd()}). Give its absolute path on the machines of the cluster, "
            "or send your code along with --working-dir DIR."
        )
    return Entry.of(kind, path, parsed.script_args), path


def _node_argv(parsed: Parsed, command: Sequence[str], target: str, size: NodeSize) -> tuple[str, ...]:
    num_options = len(command) - len(parsed.script_args) - 1
    return (
        f"--nnodes={size.min_nodes}:{size.max_nodes}",
        f"--standby={size.standby}",
        *command[:num_options],
        target,
        *parsed.script_args,
    )


def _job_environ(given: Mapping[str, str], name: str, job_uid: str, max_nodes: int) -> dict[str, str]:
    """What each node is told of the job. Of the surroundings only what says how to train: machines differ."""
    kept = {key: value for key, value in given.items() if key.startswith(_VARIABLES) and key != "DLROVER_MASTER_ADDR"}
    return {
        **kept,
        "DLROVER_REPORT": "off",
        "ELASTIC_JOB_NAME": name,
        "JOB_UID": job_uid,
        "NODE_NUM": str(max_nodes),
        "WORKER_NUM": str(max_nodes),
        "PYTHONUNBUFFERED": given.get("PYTHONUNBUFFERED", "1"),
    }


def _master(name: str, settings: Settings, fleet: FleetSpec, scaling: ScaleTerms) -> MasterConfig:
    return MasterConfig(
        job_name=name,
        journal="",
        tls=settings.tls,
        log_root=settings.environment.log_root,
        user=settings.environment.user,
        fleet=fleet,
        scaling=scaling,
        pre_check_ops=settings.pre_check_ops,
        topology_querier=settings.topology_querier,
        topology_sorter=settings.topology_sorter,
        event_reporters=settings.environment.event_reporters,
        **msgspec.structs.asdict(settings.watching),
    )


def _summary(size: NodeSize, fleet: FleetSpec, demand: Mapping[str, float]) -> str:
    from dlrover.platforms.ray.placement import describe

    if fleet.strategy is Strategy.PS:
        kinds = ", ".join(f"{replica.count} {kind.value}" for kind, replica in fleet.replicas.items() if replica.count)
        return f"{kinds}; each worker {describe(demand)}"
    nodes = f"{size.min_nodes}" if size.min_nodes == size.max_nodes else f"{size.min_nodes} to {size.max_nodes}"
    standby = f" and {size.standby} standby" if size.standby else ""
    return f"{nodes} nodes{standby} of {describe(demand)}"


def _variables(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, has_value, value = text.partition("=")
        if not has_value:
            if name not in environ:
                raise ConfigError(f"--env {name}: this variable is not set on this machine. Give --env {name}=VALUE.")
            value = environ[name]
        if not name:
            raise ConfigError(f"--env {text}: give NAME=VALUE, or NAME to send the value that it has on this machine.")
        found[name] = value
    return found


def _resources(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in given:
        name, _, amount = text.partition("=")
        if not name or name in ("CPU", "GPU", "memory", "object_store_memory"):
            raise ConfigError(
                f"--resource {text}: give NAME=AMOUNT. Use --cpus for processors and --gpus for accelerators."
            )
        found[name] = _amount(amount, f"--resource {text}")
    return found


def _placement(text: str) -> Placement:
    try:
        return Placement(text)
    except ValueError as error:
        raise ConfigError(f"--placement {text}: give {', '.join(Placement)}.") from error


def _count(text: str, option: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{option} {text}: give a whole number of 0 or more.")
    return int(text)


def _amount(text: str, option: str) -> float:
    try:
        amount = float(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: give a number.") from error
    if not 0 <= amount < math.inf:
        raise ConfigError(f"{option} {text}: give a number of 0 or more.")
    return amount


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds") from error


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Run an elastic job on an existing Ray cluster. Each node is an actor that runs dlrover-run.",
        usage=f"{PROGRAM} [options] -- [options of dlrover-run] SCRIPT [ARGS]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--address",
        default="",
        metavar="A",
        help="address of the cluster's head, HOST:PORT (RAY_ADDRESS, or the cluster of this machine)",
    )
    add("--nodes", default="1", metavar="N|MIN:MAX", help="number of nodes, or MIN:MAX for an elastic job (1)")
    add("--nproc-per-node", default="", metavar="P", help="workers on each node, as for dlrover-run (1)")
    add("--cpus", default="1", metavar="C", help="processor cores of each node (1)")
    add("--gpus", default="0", metavar="G", help="accelerators of each node (0)")
    add("--gpu-type", default="", metavar="TYPE", help="Ray's name for the kind of accelerator, such as A100")
    add("--memory", default="0", metavar="MIB", help="memory of each node, in MiB (no requirement)")
    add(
        "--resource",
        action="append",
        default=[],
        metavar="NAME=AMOUNT",
        help="amount of a custom resource of each node; may be given again",
    )
    add(
        "--standby",
        default="0",
        metavar="S",
        help="number of extra nodes that wait warm and replace a lost one at once",
    )
    add("--placement", default="spread", metavar="|".join(Placement), help="how nodes are placed on machines (spread)")
    add(
        "--host-machine",
        default="",
        metavar="ID",
        help="Ray's node id of the machine that runs the job's host and master (the head's)",
    )
    add_scaling_options(add)
    add("--capacity", type=int, default=0, metavar="N", help="most nodes that may run at a time (no limit)")
    add("--max-relaunches", default="3", metavar="R", help="how often a node rank may be relaunched (3)")
    add(
        "--pending-timeout",
        type=_seconds,
        default=900.0,
        metavar="S",
        help="seconds that a needed node may wait for a machine (900; 0: no limit)",
    )
    add(
        "--wait-for-machines",
        action="store_true",
        help="start even if no machine of the cluster is large enough for a node",
    )
    add(
        "--job-name",
        default="",
        metavar="NAME",
        help="name of the job for other commands, such as `dlrover ray status NAME`",
    )
    add(
        "--working-dir",
        default="",
        metavar="DIR",
        help="directory to send to each machine; the script is looked up in it",
    )
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable for all nodes. Ray shows this command line, so for a secret give only its NAME",
    )
    add(
        "--detach",
        action="store_true",
        help="return as soon as the job is submitted; `dlrover ray attach` then shows its output",
    )
    return parser
