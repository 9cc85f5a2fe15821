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
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.agent.workers.process_tree import kill_descendants
from dlrover.cli.console import say_block
from dlrover.cli.launch import job_names, processes
from dlrover.cli.launch.discovery import MasterPort, new_launch
from dlrover.cli.launch.last_words import failure_report
from dlrover.cli.launch.launcher import (
    EXIT_FAILED,
    EXIT_MASTER_LOST,
    EXIT_USAGE,
    START_PATIENCE,
    Programs,
    pause_after,
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
from dlrover.cli.options.environment import read_environment
from dlrover.cli.options.parser import OPTION_NAMES, nearest, parse
from dlrover.cli.options.settings import Settings, parse_nnodes, probe_directory, read_settings
from dlrover.host.bystander_processes import Neighbours
from dlrover.host.console import PATIENCE
from dlrover.master.config import MasterConfig
from dlrover.platforms.hosted.table import HostConfig, NodeHost, claim_kernel_names, remove_left_behind
from dlrover.platforms.local import namespaces
from dlrover.platforms.local.kernel_claims import KernelTag
from dlrover.platforms.local.memory_limits import MemoryLimits
from dlrover.platforms.local.namespaces import Namespaces
from dlrover.protocol.addresses import LOOPBACK, Address
from dlrover.protocol.errors import ConfigError, DLRoverError, JobError
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec, Resource
from dlrover.protocol.messages.job import JobEnd

NODE_FAREWELL = 5.0
"""Seconds that nodes have for leaving by themselves when the master has said that the job is over."""
CONSOLE_FAREWELL = 60.0
"""Seconds without any progress that the console has for the last lines; somebody may read them in a pager."""
STOP_MARGIN = 10.0
"""Seconds beyond the workers' grace that the job has for ending after a signal."""
MASTER_TIMEOUT = 2.0
NUM_QUICK_DEATHS = 5
"""Master deaths before it ever served, in a row, after which the job is given up."""
MAX_MASTER_PAUSE = 5.0
_NUM_PORT_CHOICES = 5
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# What nodes are told by their host, not by the user. Variables of the surroundings would contradict it.
_OURS = (
    "nnodes", "standby", "node_rank", "standalone", "rdzv_endpoint", "rdzv_id", "job_name", "master_addr", "master_port", "local_addr",
    "job_token_file",
)  # fmt: skip
_INSTEAD = {
    "nnodes": "Give --nodes in front of `--`.",
    "standby": "Give it in front of `--`.",
    "job_name": "Give it in front of `--`.",
}
_NOT_PASSED_ON = (
    "DLROVER_JOB_TOKEN", "DLROVER_NODE_ID", "DLROVER_AGENT_SOCKET", "NODE_ID", "WORKER_ID", "NODE_RANK", "WORKER_RANK", "NODE_NUM",
    "WORKER_NUM", "POD_NAME", "POD_IP", "MY_POD_IP", "RELAUNCHED_POD", "RDZV_ENDPOINT", "HOST_PORTS",
)  # fmt: skip


class LocalPlan(Struct, frozen=True, kw_only=True):
    """The command line, checked."""

    min_nodes: int
    max_nodes: int
    standby: int
    max_relaunches: int
    memory_mb: int
    netns: str
    job_name: str
    """Empty: it is called after the script."""
    log_dir: str
    settings: Settings
    """Of one node, as its `dlrover-run` will read them."""
    node_argv: tuple[str, ...]

    @property
    def fleet(self) -> FleetSpec:
        workers = ReplicaSpec(
            count=self.max_nodes, max_relaunches=self.max_relaunches, resource=Resource(memory_mb=self.memory_mb)
        )
        return FleetSpec(replicas={NodeType.WORKER: workers}, standby=self.standby)


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
    own, command = _split(list(sys.argv[1:] if argv is None else argv))
    options = _parser().parse_args(own)
    if not command:
        raise ConfigError("Name the training script: dlrover local --nodes 2 -- train.py")
    try:
        min_nodes, max_nodes = parse_nnodes(options.nodes)
    except ConfigError as error:
        raise ConfigError(f"{error}".replace("--nnodes", "--nodes")) from error
    for name in ("standby", "max_relaunches", "memory"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: give 0 or more.")
    if options.nproc_per_node:
        command = [f"--nproc-per-node={options.nproc_per_node}", *command]
    surroundings = {name: value for name, value in environ.items() if name not in _NOT_PASSED_ON}
    for dest in _OURS:
        if parse(command, {}).is_given(dest):
            option = f"--{dest.replace('_', '-')}"
            advice = _INSTEAD.get(dest, "Leave it out.")
            raise ConfigError(f"{option} after `dlrover local`: each node is told that by the job. {advice}")
    node_argv = (f"--nnodes={min_nodes}:{max_nodes}", f"--standby={options.standby}", *command)
    _, settings = read_settings(node_argv, surroundings)
    if is_piped(settings.entry):
        raise ConfigError(
            f"The training script {settings.entry.name} can be read only once, and each node needs it. Write it to a file."
        )
    probe_directory(options.log_dir, option="--log-dir", purpose="log")
    return LocalPlan(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        standby=options.standby,
        max_relaunches=options.max_relaunches,
        memory_mb=options.memory,
        netns=options.netns,
        job_name=options.job_name or settings.environment.job_name,
        log_dir=os.path.abspath(options.log_dir) if options.log_dir else "",
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
        raise ConfigError(f"--netns on: {reason}. Leave it out, or use --netns off.")
    wants_memory = bool(plan.memory_mb)
    if wants_memory and not MemoryLimits.available():
        raise ConfigError(
            f"--memory {plan.memory_mb}: the memory of nodes cannot be limited here; it needs root and a memory cgroup."
        )
    return claim_kernel_names(wants_networks=not reason, wants_memory=wants_memory)


def _run_with(
    plan: LocalPlan,
    environ: Mapping[str, str],
    networks: Namespaces | None,
    memory: MemoryLimits | None,
    programs: Programs,
) -> int:
    neighbours = Neighbours()
    root = user_root(read_environment(environ))
    seat = _take_seat(networks.master_address if networks is not None else LOOPBACK)
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
                address=Address(networks.master_address if networks is not None else LOOPBACK, seat.port),
                networks=networks,
                memory=memory,
                environ=environ,
                programs=programs,
            ).run()
        )
    finally:
        kill_descendants(neighbours.pids())
        seat.close()
        if directory is not None:
            directory.remove()
            with contextlib.suppress(ConfigError):
                for left in reap(root, older_than=0.0, job_dir=directory.job_dir):  # of nodes that were killed
                    remove_snapshots(snapshot_root(plan.settings.environment), plan.job_name, launch_of(left.path))


def _take_seat(host: str) -> MasterPort:
    """A free port with the claim on it, so that no node takes it for its own to host a master at."""
    for _ in range(_NUM_PORT_CHOICES):
        trial = MasterPort(host, 0)
        trial.close()
        with contextlib.suppress(OSError):
            return MasterPort(host, trial.port)
    raise ConfigError(f"{_NUM_PORT_CHOICES} free ports in a row at {host} were taken before the master could use them.")


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
        self._programs = programs
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
            grace=plan.settings.shutdown_timeout + STOP_MARGIN,
        )
        self._networks = networks
        self._memory = memory
        self._master: int | None = None
        self._num_quick_deaths = 0
        self._restart: asyncio.TimerHandle | None = None
        self._missed_since: float | None = None
        """Since then the master could not be started again."""
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
        self._host = NodeHost(
            self._host_config,
            networks=self._networks,
            memory=self._memory,
            on_line=display.line,
            on_change=display.change,
            saving_until=self._saving_until,
            on_gone=self._tidy_up,
        )
        display.hold, display.release = self._host.hold_output, self._host.release_output
        await self._host.start()
        self._listen_to_signals()
        self._introduce()
        try:
            self._start_master()
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

    def _introduce(self) -> None:
        plan = self._plan
        nodes = f"{plan.min_nodes}" if plan.min_nodes == plan.max_nodes else f"{plan.min_nodes} to {plan.max_nodes}"
        standby = f" and {plan.standby} standby" if plan.standby else ""
        self._display.say(f"job {plan.job_name}: {nodes} nodes{standby}, master at {self._address}")
        if self._networks is not None:
            self._display.say(
                "each node has its own network namespace: it reaches the other nodes and the master, nothing else "
                "(--netns off shares this machine's network)"
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
        passed_on = {name: value for name, value in self._environ.items() if name not in _NOT_PASSED_ON}
        return {
            **passed_on,
            "DLROVER_MASTER_ADDR": str(self._address),
            "DLROVER_REPORT": "off",
            "ELASTIC_JOB_NAME": self._plan.job_name,
            "JOB_UID": self._job_uid,
            "NODE_NUM": str(self._plan.max_nodes),
            "WORKER_NUM": str(self._plan.max_nodes),
            "PYTHONUNBUFFERED": passed_on.get("PYTHONUNBUFFERED", "1"),
        }

    # The master.

    def _path(self, name: str) -> str:
        return os.path.join(self._directory.path, name)

    @property
    def _master_log(self) -> str:
        return os.path.join(self._plan.log_dir or self._directory.path, "master.log")

    def _start_master(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path("master.ready"))  # it speaks of one life only
        config = MasterConfig(
            job_name=self._plan.job_name,
            host=self._address.host,
            port=self._address.port,
            token_file=self._token_file,
            tls=self._plan.settings.tls,
            journal=self._journal(),
            ready_file=self._path("master.ready"),
            end_file=self._path("end.json"),
            log_file=self._master_log,
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
            pre_check_ops=self._plan.settings.pre_check_ops,
            topology_querier=self._plan.settings.topology_querier,
            topology_sorter=self._plan.settings.topology_sorter,
            event_reporters=self._plan.settings.environment.event_reporters,
            reports=self._plan.log_dir,
            **msgspec.structs.asdict(self._plan.settings.watching),
            parent_death=True,
            parent_pid=os.getpid(),
        )
        path = self._directory.write("master.json", msgspec.json.encode(config))
        argv = (*self._programs.master, "--config", path)
        self._master = processes.spawn(argv, self._environ, output=self._master_log)
        self._host.adopt(self._master, self._on_master_exit)

    def _restart_master(self) -> None:
        """
        Nodes train on without it, so what keeps it from starting (a full disk, no processes) may take its time to heal.

        But not for ever: when it has been away for as long as agents wait for it, there is nobody left to end the job.
        """
        loop = asyncio.get_running_loop()
        self._restart = None
        try:
            self._start_master()
            self._missed_since = None
        except (DLRoverError, OSError) as error:
            limit = max(START_PATIENCE, self._plan.settings.master_grace)
            if self._missed_since is None:
                self._missed_since = loop.time()
                self._display.say(f"the master cannot be started now; trying again for {limit:.0f} s. {error}")
            missed = loop.time() - self._missed_since
            if missed >= limit:
                self._display.say(f"the master could not be started for {limit:.0f} s. {error}")
                self._conclude(EXIT_MASTER_LOST)
            else:
                self._restart = loop.call_later(pause_after(missed), self._restart_master)

    def _journal(self) -> str:
        """One file per run: a journal of an ended job of the same name must not be taken for ours."""
        folder = self._plan.settings.journal
        if not folder:
            return self._path("journal.sqlite")
        os.makedirs(folder, exist_ok=True)
        return os.path.join(folder, f"{os.path.basename(self._directory.job_dir)}-{self._job_uid}.sqlite")

    def _on_master_exit(self, status: int) -> None:
        self._master = None
        if self._is_over.is_set():
            return
        self._end = self._read_end()
        if self._end is not None:
            self._conclude(self._code_of(self._end))
            return
        if self._stopped_by is not None:
            self._conclude(128 + self._stopped_by)
            return
        how = processes.describe_status(status)
        has_served = os.path.exists(self._path("master.ready"))
        self._num_quick_deaths = 0 if has_served else self._num_quick_deaths + 1
        is_refused = not has_served and _code(status) == EXIT_USAGE
        if self._num_quick_deaths > NUM_QUICK_DEATHS or is_refused:
            self._display.say(f"the master could not start ({how}). Its log ends with:\n{self._master_tail()}")
            self._conclude(EXIT_USAGE if is_refused else EXIT_MASTER_LOST)
            return
        pause = min(MAX_MASTER_PAUSE, 0.1 * 2**self._num_quick_deaths) if self._num_quick_deaths else 0.0
        self._display.say(f"the master ended ({how}); starting it again, workers train on")
        self._restart = asyncio.get_running_loop().call_later(pause, self._restart_master)

    def _read_end(self) -> JobEnd | None:
        try:
            with open(self._path("end.json"), "rb") as file:
                return msgspec.json.decode(file.read(), type=JobEnd)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            self._display.say(f"the master left an end of the job that cannot be read: {error}")
            return None

    def _code_of(self, end: JobEnd) -> int:
        if self._stopped_by is not None and end.exit_code != 0:
            return 128 + self._stopped_by
        worker = result_of(end).worker_exit_code
        if end.exit_code == EXIT_FAILED and self._plan.settings.is_exit_code_of_worker and worker:
            return worker
        return end.exit_code

    def _master_tail(self) -> str:
        try:
            with open(self._master_log, encoding="utf-8", errors="replace") as file:
                return "".join(file.readlines()[-15:]).rstrip()
        except FileNotFoundError:
            return "(nothing)"

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
                self._display.say("interrupted again: killing everything at once")
                self._conclude(128 + number)
                asyncio.ensure_future(self._host.stop(grace=0.0))  # noqa: RUF006 (`_finish` waits for the same nodes)
            return
        self._stopped_by = number
        if self._is_over.is_set():
            if num_saving := self._host.num_saving:
                self._display.say(
                    f"stopped by {signal.Signals(number).name}: {num_saving} nodes that still write checkpoints finish what they can in 25 s"
                )
            asyncio.ensure_future(self._host.stop())  # noqa: RUF006 (as above)
            return
        if self._restart is not None:
            self._restart.cancel()
        if self._master is None or not os.path.exists(self._path("master.ready")):
            self._conclude(128 + number)
            return
        # The master ends the job on all nodes in good order, and then itself.
        processes.send(self._master, signal.SIGUSR1)
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
        if self._master is not None:
            processes.send(self._master, signal.SIGTERM)
            await self._host.wait_child(self._master, MASTER_TIMEOUT)
        if self._stopped_by is not None and self._exit_code == 0 and self._host.cut_off:
            self._exit_code = 128 + self._stopped_by
            self._display.say(
                f"training finished, but {signal.Signals(self._stopped_by).name} came while the last checkpoints were written: those of "
                f"{', '.join(self._host.cut_off)} are not finished and may be lost. What was committed before stays."
            )

    def _report(self) -> None:
        if self._end is None or self._end.exit_code == 0 or self._exit_code == 0:
            return
        self._display.say_block(failure_report(self._plan.job_name, result_of(self._end)))


def _code(status: int) -> int | None:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlrover local",
        description="Run a job of several nodes on this machine; each node is a real dlrover-run.",
        usage="dlrover local [options] -- [options of dlrover-run] SCRIPT [ARGS]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", default="2", metavar="N|MIN:MAX", help="how many nodes; MIN:MAX for an elastic job (2)")
    add("--standby", type=int, default=0, metavar="S", help="so many more wait warm to take the place of a lost one")
    add("--nproc-per-node", default="", metavar="P", help="workers on each node, as for dlrover-run (1)")
    add("--max-relaunches", type=int, default=3, metavar="R", help="how often a node rank may be relaunched (3)")
    add(
        "--memory",
        type=int,
        default=0,
        metavar="MIB",
        help="memory that each node may use, in MiB; needs root (no limit)",
    )
    add(
        "--netns",
        choices=("auto", "on", "off"),
        default="auto",
        help="give each node its own network namespace and address (auto: if we are root and it is possible)",
    )
    add("--job-name", default="", metavar="NAME", help="for `dlrover status NAME` and others")
    add("--log-dir", default="", metavar="DIR", help="keep the output of the nodes and the master's log there")
    return parser


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """
    Our own options, and what each node runs: from `--` on, or from the first word that is none of ours.

    The second way because `--` may have been eaten by who called us, as command-line libraries like to do.
    """
    takes_value = {name for action in _parser()._actions if action.nargs != 0 for name in action.option_strings}
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return argv[:position], argv[position + 1 :]
        if word in takes_value:
            position += 2
        elif word in ("-h", "--help") or word.partition("=")[0] in takes_value:
            position += 1
        else:
            _check_option(word)
            break
    return argv[:position], argv[position:]


def _check_option(word: str) -> None:
    """Raises `ConfigError` for an option that is nobody's; the nodes' launcher would know only half of what it could be."""
    name = word.partition("=")[0]
    ours = [option for action in _parser()._actions for option in action.option_strings]
    if name.startswith("--") and name not in OPTION_NAMES:
        raise ConfigError(
            f"{name} is no option of dlrover local, nor of the nodes' dlrover-run.{nearest(name, (*ours, *OPTION_NAMES))}"
        )


if __name__ == "__main__":
    sys.exit(main())
