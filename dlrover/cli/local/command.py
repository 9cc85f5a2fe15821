"""
`dlrover local`: a job of several nodes on this machine, each of them a real `dlrover-run`.

This process is the node host: parent of the master and of all nodes. The master asks it for nodes through the same
interface that a cluster has, so relaunches, standbys and scaling are the real ones. It starts the master again if it
dies, shows what goes on, and ends only when nothing of the job is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.agent.workers.process_tree import kill_descendants
from dlrover.cli.console import say_block
from dlrover.cli.launch import job_names
from dlrover.cli.launch.discovery import new_launch
from dlrover.cli.launch.hosted_command import (
    check_command,
    exit_code_of,
    passed_on,
    read_nodes,
    split_command,
    take_master_port,
)
from dlrover.cli.launch.hosted_master import HostedMaster
from dlrover.cli.launch.last_words import failure_report
from dlrover.cli.launch.launcher import (
    EXIT_FAILED,
    EXIT_MASTER_LOST,
    EXIT_USAGE,
    Programs,
    result_of,
)
from dlrover.cli.launch.piped_script import is_piped
from dlrover.cli.launch.runtime_dir import (
    NodeDirectory,
    directory_of,
    launch_of,
    reap,
    remove_left,
    remove_snapshots,
    saving_until,
    snapshot_root,
    user_root,
)
from dlrover.cli.local.display import Display
from dlrover.cli.options.brain_settings import add_brain_options, brain_of
from dlrover.cli.options.environment import read_environment
from dlrover.cli.options.parser import parse
from dlrover.cli.options.scaling_settings import add_scaling_options, scaling_of
from dlrover.cli.options.settings import Settings, probe_directory, read_settings
from dlrover.host.bystander_processes import BystanderProcesses
from dlrover.host.console import PATIENCE
from dlrover.master.config import BrainTerms, MasterConfig
from dlrover.platforms.hosted.table import HostConfig, NodeHost
from dlrover.platforms.local import namespaces
from dlrover.platforms.local.kernel_claims import KernelTag
from dlrover.platforms.local.memory_limits import MemoryLimits
from dlrover.platforms.local.namespaces import Namespaces
from dlrover.platforms.local.starter import LocalStarter, claim_kernel_names, remove_left_behind
from dlrover.protocol.addresses import LOOPBACK, Address
from dlrover.protocol.errors import ConfigError, JobError
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec, Resource, Strategy
from dlrover.protocol.messages.job import JobEnd
from dlrover.protocol.messages.scaling import ScaleTerms

NODE_FAREWELL = 5.0
"""Seconds that nodes have for leaving by themselves when the master has said that the job is over."""
CONSOLE_FAREWELL = 60.0
"""Seconds without any progress that the console has for the last lines; a person may read them in a pager."""
STOP_MARGIN = 10.0
"""Seconds beyond the workers' grace that the job has for ending after a signal."""
MASTER_TIMEOUT = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class LocalPlan(Struct, frozen=True, kw_only=True):
    """The command line, checked."""

    min_nodes: int
    max_nodes: int
    """Workers; beside them the nodes of a parameter-server job below."""
    ps: int = 0
    """Parameter servers; 0: the workers form one world."""
    chief: int = 0
    evaluator: int = 0
    standby: int
    max_relaunches: int
    cpus: float = 0.0
    """Cores that each node is meant for; 0: it is not said."""
    memory_mb: int
    netns: str
    job_name: str
    """Empty: it is called after the script."""
    log_dir: str
    max_local_nodes: int = 0
    """That may run at a time; 0: as many as the job is meant to have."""
    scaling: ScaleTerms = ScaleTerms()
    brain: BrainTerms | None = None
    settings: Settings
    """Of one node, as its `dlrover-run` will read them."""
    node_argv: tuple[str, ...]

    @property
    def fleet(self) -> FleetSpec:
        size = Resource(cpu=self.cpus, memory_mb=self.memory_mb)
        workers = ReplicaSpec(count=self.max_nodes, max_relaunches=self.max_relaunches, resource=size)
        if not self.ps:
            return FleetSpec(replicas={NodeType.WORKER: workers}, standby=self.standby)
        beside = {NodeType.PS: self.ps, NodeType.CHIEF: self.chief, NodeType.EVALUATOR: self.evaluator}
        others = {kind: replace(workers, count=count) for kind, count in beside.items() if count}
        return FleetSpec(replicas={NodeType.WORKER: workers, **others}, strategy=Strategy.PS)


def main(argv: Sequence[str] | None = None) -> int:
    # Before gRPC is imported anywhere: this process starts others all the time, and gRPC would have a say in it.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        if not sys.platform.startswith("linux"):
            raise ConfigError(f"dlrover local needs Linux (kernel 5.4 or newer); this is {sys.platform}.")
        return run(read_plan(argv, os.environ), os.environ)
    except ConfigError as error:
        say_block(f"dlrover local: error: {error}")
        return EXIT_USAGE


def read_plan(argv: Sequence[str] | None, environ: Mapping[str, str]) -> LocalPlan:
    """Raises `ConfigError`; ends the process for `--help` and options that are none."""
    own, command = split_command(build_parser(), list(sys.argv[1:] if argv is None else argv))
    options = build_parser().parse_args(own)
    if not command:
        raise ConfigError("Name the training script: dlrover local --nodes 2 -- train.py")
    min_nodes, max_nodes = read_nodes(options.nodes)
    if not math.isfinite(options.cpus):
        raise ConfigError(f"--cpus {options.cpus}: give a finite number.")
    for name in ("standby", "max_relaunches", "cpus", "memory", "ps", "chief", "evaluator", "max_local_nodes"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: give 0 or more.")
    _check_cluster(options, command)
    if options.nproc_per_node:
        command = [f"--nproc-per-node={options.nproc_per_node}", *command]
    check_command(command, "dlrover local")
    strategy = ("--strategy=ps",) if options.ps else ()
    tuner = (f"--tuner={options.tuner}",) if options.tuner else ()
    node_argv = (f"--nnodes={min_nodes}:{max_nodes}", f"--standby={options.standby}", *strategy, *tuner, *command)
    _, settings = read_settings(node_argv, passed_on(environ))
    scaling = scaling_of(options, environ, tuner=settings.tuner, bounds=(min_nodes, max_nodes))
    brain, brain_notes = brain_of(
        options, environ, user=settings.environment.user, entry=settings.entry, min_nodes=min_nodes
    )
    settings = replace(settings, notes=(*settings.notes, *scaling.notes, *brain_notes))
    if is_piped(settings.entry):
        raise ConfigError(
            f"The training script {settings.entry.name} can be read only once, and each node needs it. Write it to a file."
        )
    probe_directory(options.log_dir, option="--log-dir", purpose="log")
    return LocalPlan(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        ps=options.ps,
        chief=options.chief,
        evaluator=options.evaluator,
        standby=options.standby,
        max_relaunches=options.max_relaunches,
        cpus=options.cpus,
        memory_mb=options.memory,
        netns=options.netns,
        job_name=options.job_name or settings.environment.job_name,
        log_dir=os.path.abspath(options.log_dir) if options.log_dir else "",
        max_local_nodes=options.max_local_nodes,
        scaling=scaling.terms,
        brain=brain,
        settings=settings,
        node_argv=node_argv,
    )


def run(plan: LocalPlan, environ: Mapping[str, str], *, programs: Programs | None = None) -> int:
    """The whole life of the job on this machine. Gives its exit code."""
    remove_left_behind()  # of killed hosts: they may hold address ranges
    claim, networks, memory = _claim_kernel_names(plan)
    try:
        return _run_with(plan, environ, networks, memory, programs or Programs())
    finally:
        if networks is not None:
            networks.close()
        if claim is not None:
            claim.release()


def _claim_kernel_names(plan: LocalPlan) -> tuple[KernelTag | None, Namespaces | None, MemoryLimits | None]:
    reason = namespaces.available() if plan.netns != "off" else "not wanted"
    if plan.netns == "on" and reason:
        raise ConfigError(f"--netns on: {reason}. Leave out --netns on, or give --netns off.")
    wants_memory = bool(plan.memory_mb)
    if wants_memory and not MemoryLimits.available():
        raise ConfigError(
            f"--memory {plan.memory_mb}: memory limits for nodes need root and a memory cgroup, and this "
            "machine does not offer both. Leave out --memory."
        )
    return claim_kernel_names(wants_networks=not reason, wants_memory=wants_memory)


def _run_with(
    plan: LocalPlan,
    environ: Mapping[str, str],
    networks: Namespaces | None,
    memory: MemoryLimits | None,
    programs: Programs,
) -> int:
    neighbours = BystanderProcesses()
    root = user_root(read_environment(environ))
    master_port = take_master_port(networks.master_address if networks is not None else LOOPBACK)
    launch = new_launch()
    directory: NodeDirectory | None = None
    try:
        name = job_names.given(plan.job_name) if plan.job_name else job_names.after_script(plan.settings.entry)
        directory = NodeDirectory(root, name.name, launch, others=name.others)
        plan = replace(plan, job_name=directory.job_name)
        return asyncio.run(
            LocalJob(
                plan,
                directory=directory,
                job_uid=launch,
                address=Address(networks.master_address if networks is not None else LOOPBACK, master_port.port),
                networks=networks,
                memory=memory,
                environ=environ,
                programs=programs,
            ).run()
        )
    finally:
        kill_descendants(neighbours.pids())
        master_port.close()
        if directory is not None:
            directory.remove()
            with contextlib.suppress(ConfigError):
                for left in reap(root, older_than=0.0, job_dir=directory.job_dir):  # of nodes that were killed
                    remove_snapshots(snapshot_root(plan.settings.environment), plan.job_name, launch_of(left.path))


class LocalJob:
    """One run. All of it happens in one event loop, in the main thread: the kernel ties children to it."""

    def __init__(
        self,
        plan: LocalPlan,
        *,
        directory: NodeDirectory,
        job_uid: str,
        address: Address,
        networks: Namespaces | None,
        memory: MemoryLimits | None,
        environ: Mapping[str, str],
        programs: Programs,
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._job_uid = job_uid
        self._address = address
        self._environ = environ
        self._token = os.urandom(24).hex()
        self._token_file = directory.write("token", self._token.encode())
        directory.record(str(address), plan.settings.tls)
        self._host_config = HostConfig(
            directory=directory.path,
            program=(
                sys.executable,
                "-P",
                "-m",
                "dlrover.cli.run",
                f"--job-token-file={self._token_file}",
                *plan.node_argv,
            ),
            environ=self._node_environ(),
            log_dir=plan.log_dir,
            capacity=plan.max_local_nodes,
            room=sum(spec.count for spec in plan.fleet.replicas.values()) + plan.standby,
            grace=plan.settings.shutdown_timeout + STOP_MARGIN,
        )
        self._networks = networks
        self._memory = memory
        self._master = HostedMaster(
            programs.master,
            environ,
            directory=directory,
            log_file=os.path.join(plan.log_dir or directory.path, "master.log"),
            master_grace=plan.settings.master_grace,
            adopt=lambda pid, on_exit: self._starter.adopt(pid, on_exit),
            say=lambda text: self._display.say(text),
            on_end=self._on_end,
            on_lost=self._conclude,
        )
        self._stopped_by: int | None = None
        self._end: JobEnd | None = None
        self._is_over = asyncio.Event()
        self._farewell: asyncio.Task[None] | None = None
        """Only the console is left to wait for."""
        self._exit_code = EXIT_FAILED

    async def run(self) -> int:
        is_terminal = sys.stderr.isatty() and sys.stdout.isatty()
        self._display = Display(str(self._address), self._token, tls=self._plan.settings.tls, is_terminal=is_terminal)
        try:
            with self._display:
                await self._run()
            self._report()
        finally:
            patience = CONSOLE_FAREWELL if self._stopped_by is None else PATIENCE
            self._farewell = asyncio.ensure_future(self._display.drain(patience))
            await asyncio.wait([self._farewell])
        return self._exit_code

    async def _run(self) -> None:
        display = self._display
        self._starter = LocalStarter(
            self._host_config,
            networks=self._networks,
            memory=self._memory,
            on_line=display.line,
            saving_until=self._saving_until,
            on_gone=self._tidy_up,
        )
        self._host = NodeHost(self._host_config, self._starter, on_change=display.change)
        display.hold, display.release = self._host.hold_output, self._host.release_output
        self._starter.open()
        await self._host.start()
        self._listen_to_signals()
        self._introduce()
        try:
            self._master.start(self._master_config())
        except JobError as error:
            display.say(str(error))
            self._conclude(EXIT_MASTER_LOST)
        showing = asyncio.ensure_future(display.run())
        try:
            await self._is_over.wait()
            await self._finish()
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
            await self._host.close()
            self._starter.close()

    def _introduce(self) -> None:
        plan = self._plan
        nodes = f"{plan.min_nodes}" if plan.min_nodes == plan.max_nodes else f"{plan.min_nodes} to {plan.max_nodes}"
        standby = f" and {plan.standby} standby" if plan.standby else ""
        what = f"{nodes} nodes{standby}"
        if plan.ps:
            what = ", ".join(f"{spec.count} {kind.value}" for kind, spec in plan.fleet.replicas.items())
        self._display.say(f"job {plan.job_name}: {what}, master at {self._address}")
        if self._networks is not None:
            self._display.say(
                "each node has its own network namespace: it reaches only the other nodes and the master. Give "
                "--netns off to share this machine's network"
            )
        if plan.settings.watching.dashboard_port >= 0:
            self._display.say(f"dashboard: `dlrover dashboard {plan.job_name}` prints a link to it")
        if plan.log_dir:
            self._display.say(f"output of the nodes: {plan.log_dir}")

    def _saving_until(self, node_pid: int) -> float:
        path = directory_of(self._directory.job_dir, node_pid)
        return 0.0 if path is None else saving_until(path)

    async def _tidy_up(self, node_pid: int) -> None:
        """
        After a node: its launcher was killed if anything is left. Snapshots are large, and in memory that the next node needs.

        In a thread, since giving gigabytes back takes its time.
        """
        path = directory_of(self._directory.job_dir, node_pid)
        if path is None:
            return
        snapshots = snapshot_root(self._plan.settings.environment)
        with contextlib.suppress(
            OSError, RuntimeError
        ):  # not to be removed, or no thread to be had: the end tries it again
            await asyncio.to_thread(remove_left, path, self._plan.job_name, snapshots)

    def _node_environ(self) -> dict[str, str]:
        surroundings = passed_on(self._environ)
        return {
            **surroundings,
            "DLROVER_MASTER_ADDR": str(self._address),
            "DLROVER_REPORT": "off",
            "ELASTIC_JOB_NAME": self._plan.job_name,
            "JOB_UID": self._job_uid,
            "NODE_NUM": str(self._plan.max_nodes),
            "WORKER_NUM": str(self._plan.max_nodes),
            "PYTHONUNBUFFERED": surroundings.get("PYTHONUNBUFFERED", "1"),
        }

    # The master.

    def _path(self, name: str) -> str:
        return os.path.join(self._directory.path, name)

    def _master_config(self) -> MasterConfig:
        return MasterConfig(
            job_name=self._plan.job_name,
            host=self._address.host,
            port=self._address.port,
            token_file=self._token_file,
            tls=self._plan.settings.tls,
            journal=self._journal(),
            log_root=self._plan.settings.environment.log_root,
            user=self._plan.settings.environment.user,
            platform="local",
            platform_options={
                "socket": self._host_config.socket,
                "own_addresses": self._networks is not None,
                "can_limit_memory": self._memory is not None,
            },
            job_uid=self._job_uid,
            fleet=self._plan.fleet,
            scaling=self._plan.scaling,
            brain=self._plan.brain,
            pre_check_ops=self._plan.settings.pre_check_ops,
            topology_querier=self._plan.settings.topology_querier,
            topology_sorter=self._plan.settings.topology_sorter,
            event_reporters=self._plan.settings.environment.event_reporters,
            reports=self._plan.log_dir,
            **msgspec.structs.asdict(self._plan.settings.watching),
        )

    def _journal(self) -> str:
        """One file per run: a journal of an ended job of the same name must not be taken for ours."""
        folder = self._plan.settings.journal
        if not folder:
            return self._path("journal.sqlite")
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, f"{os.path.basename(self._directory.job_dir)}-{self._job_uid}.sqlite")

    def _on_end(self, end: JobEnd) -> None:
        if not self._is_over.is_set():
            self._end = end
            is_of_worker = self._plan.settings.is_exit_code_of_worker
            self._conclude(exit_code_of(end, is_of_worker=is_of_worker, stopped_by=self._stopped_by))

    # The end.

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started under nohup: the user wants to outlive the terminal
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._farewell is not None:
            self._farewell.cancel()
            return
        if self._stopped_by is not None:
            if number == signal.SIGINT:
                self._display.say("interrupted again: all processes are killed at once")
                self._conclude(128 + number)
                asyncio.ensure_future(self._host.stop(grace=0.0))  # noqa: RUF006 (`_finish` waits for the same nodes)
            return
        self._stopped_by = number
        if self._is_over.is_set():
            if num_saving := self._host.num_saving:
                self._display.say(
                    f"stopped by {signal.Signals(number).name}: {num_saving} nodes still write checkpoints and "
                    "have 25 s to finish"
                )
            asyncio.ensure_future(self._host.stop())  # noqa: RUF006 (as above)
            return
        # The master ends the job on all nodes in good order, and then itself.
        if not self._master.end_job(128 + number):
            self._conclude(128 + number)
            return
        limit = self._plan.settings.shutdown_timeout + STOP_MARGIN
        asyncio.get_running_loop().call_later(limit, self._conclude, 128 + number)

    def _conclude(self, exit_code: int) -> None:
        if not self._is_over.is_set():
            self._exit_code = exit_code
            self._is_over.set()

    async def _finish(self) -> None:
        if self._end is not None:
            await self._host.wait(NODE_FAREWELL)
        if self._stopped_by is None and (num_saving := self._host.num_saving):
            self._display.say(f"waiting for {num_saving} nodes that still write checkpoints")
        await self._host.stop(is_urgent=self._stopped_by is not None)
        if (pid := self._master.terminate()) is not None:
            await self._starter.wait_child(pid, MASTER_TIMEOUT)
        if self._stopped_by is not None and self._exit_code == 0 and self._host.cut_off:
            self._exit_code = 128 + self._stopped_by
            self._display.say(
                f"training finished, but {signal.Signals(self._stopped_by).name} stopped the last checkpoints. "
                f"The unfinished checkpoints of {', '.join(self._host.cut_off)} may be lost. Checkpoints that "
                "were committed before are kept."
            )

    def _report(self) -> None:
        if self._end is None or self._end.exit_code == 0 or self._exit_code == 0:
            return
        self._display.say_block(failure_report(self._plan.job_name, result_of(self._end)))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlrover local",
        description="Run a job of several nodes on this machine; each node is a real dlrover-run.",
        usage="dlrover local [options] -- [options of dlrover-run] SCRIPT [ARGS]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", default="2", metavar="N|MIN:MAX", help="number of nodes, or MIN:MAX for an elastic job (2)")
    add(
        "--ps",
        type=int,
        default=0,
        metavar="P",
        help="number of parameter servers of a TensorFlow job; --nodes then gives its workers",
    )
    add(
        "--chief",
        type=int,
        default=0,
        metavar="0|1",
        help="with --ps: 1 for a chief beside the workers; 0: one of the workers is the chief",
    )
    add(
        "--evaluator", type=int, default=0, metavar="0|1", help="with --ps: 1 for a node that evaluates each checkpoint"
    )
    add(
        "--standby",
        type=int,
        default=0,
        metavar="S",
        help="number of extra nodes that wait warm and replace a lost one at once",
    )
    add("--nproc-per-node", default="", metavar="P", help="workers on each node, as for dlrover-run (1)")
    add("--max-relaunches", type=int, default=3, metavar="R", help="how often a node rank may be relaunched (3)")
    add(
        "--cpus",
        type=float,
        default=0.0,
        metavar="C",
        help="processor cores of each node, for judging whether a server is busy and how many nodes fit (no limit)",
    )
    add(
        "--memory",
        type=int,
        default=0,
        metavar="MIB",
        help="most memory that each node may use, in MiB; needs root (no limit)",
    )
    add(
        "--netns",
        choices=("auto", "on", "off"),
        default="auto",
        help="give each node its own network namespace and address: on, off, or auto (auto: on if you are root and "
        "the machine allows it)",
    )
    add(
        "--max-local-nodes",
        type=int,
        default=0,
        metavar="N",
        help="most nodes that may run at a time; `dlrover scale --room N` changes it (as many as the job may have)",
    )
    add_scaling_options(add)
    add_brain_options(add)
    add(
        "--job-name",
        default="",
        metavar="NAME",
        help="name of the job for other commands, such as `dlrover status NAME`",
    )
    add(
        "--log-dir",
        default="",
        metavar="DIR",
        help="directory in which to keep the output of the nodes and the master's log",
    )
    return parser


def _check_cluster(options: argparse.Namespace, command: Sequence[str]) -> None:
    """Raises `ConfigError` for options that do not fit together."""
    if parse(command, {}).is_given("strategy"):
        raise ConfigError("--strategy after `dlrover local`: give --ps N in front of `--` instead.")
    if not options.ps:
        if options.chief or options.evaluator:
            raise ConfigError("--chief and --evaluator belong to a parameter-server job. Give --ps N as well.")
        return
    for name in ("chief", "evaluator"):
        if getattr(options, name) > 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: a parameter-server job has at most one {name}.")
    if options.standby:
        raise ConfigError("--standby with --ps: a parameter-server job has no standby nodes. Leave one of them out.")
    if options.nproc_per_node not in ("", "1"):
        raise ConfigError(
            f"--nproc-per-node {options.nproc_per_node} with --ps: a node of a parameter-server job runs one process. Give more --nodes."
        )


if __name__ == "__main__":
    sys.exit(main())
