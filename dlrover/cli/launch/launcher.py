"""
The launcher: parent of this node's agent and, where the address is ours, of the job's master.

It does little and must not fail: no torch, no gRPC, no threads but one that looks for a master elsewhere. It starts
the agent first, because that begins to import torch at once; then the master. A master that dies is started again on
the same port and journal; an agent that dies without a result is started again within a budget. However the job ends,
nothing of it remains: not a process, adopted orphans included, and no file but the journal where it was asked for.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dlrover.agent.config import AgentConfig, AgentResult
from dlrover.cli.console import say, say_block
from dlrover.cli.launch import discovery, processes
from dlrover.cli.launch.children import LONGEST_PAUSE, LaunchedChild, await_exit
from dlrover.cli.launch.discovery import MasterPlace, MasterPort
from dlrover.cli.launch.master_files import MasterFiles
from dlrover.cli.launch.piped_script import copy_for_workers, read_piped
from dlrover.cli.launch.processes import SignalInbox
from dlrover.cli.launch.runtime_dir import (
    NodeDirectory,
    reap_in_passing,
    reap_snapshots,
    remove_snapshots,
    saving_until,
    snapshot_root,
    user_root,
)
from dlrover.cli.options.scaling_settings import from_environment
from dlrover.cli.options.settings import Settings
from dlrover.host.bystander_processes import BystanderProcesses
from dlrover.protocol.addresses import Address
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import Strategy
from dlrover.protocol.messages.job import JobEnd
from dlrover.protocol.messages.scaling import ScaleTerms, Tuner

if TYPE_CHECKING:
    from dlrover.cli.launch.master_probe import MasterProbe

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_MASTER_LOST = 23

MAX_AGENT_RESTARTS = 3
"""In a row, each without `AGENT_LIVED_LONG` of life: an agent that always dies at once will not heal."""
AGENT_LIVED_LONG = 60.0
MAX_PORT_CHOICES = 5
NUM_QUICK_DEATHS = 5
"""Master deaths before it ever served, in a row, that are answered by an immediate start; then the pauses grow."""
START_PATIENCE = 120.0
"""Seconds for what keeps a child from being started again to heal: a full disk, a machine that is out of processes."""
SWEEP_TIMEOUT = 5.0


class LaunchPatience(NamedTuple):
    """How long others may take to come and to end."""

    find_master: float = 120.0
    """Seconds for a master that another launcher hosts to answer for the first time."""
    agent_margin: float = 10.0
    """Seconds beyond the workers' grace that the agent has after a signal."""
    restart: float = START_PATIENCE
    """Seconds for a child that has to be started again to become possible."""
    master: float = 2.0
    """Seconds for a master to end by itself when its only node left, and after SIGTERM."""
    shared_master: float = 60.0
    """The same where other nodes may still be on their way out: longer than the core waits for them."""


class Programs(NamedTuple):
    """What to start; `--config FILE` is appended. Tests put stand-ins here."""

    # -P: the user's working directory must not shadow the standard library for *our* processes.
    agent: tuple[str, ...] = (sys.executable, "-P", "-m", "dlrover.agent")
    master: tuple[str, ...] = (sys.executable, "-P", "-m", "dlrover.master")


def process_tree() -> ModuleType:
    """Imported late: the agent's start must not wait for `ctypes`."""
    from dlrover.agent.workers import process_tree

    return process_tree


class Ended(NamedTuple):
    exit_code: int
    result: AgentResult | None
    """None: the agent left none."""


def launch(
    settings: Settings,
    environ: Mapping[str, str],
    *,
    programs: Programs | None = None,
    patience: LaunchPatience | None = None,
) -> int:
    """Run the job on this node to its end. Gives the exit code; raises `ConfigError` before anything starts."""
    script = read_piped(settings.entry)  # may wait for a person who types it, and whom a signal must set free
    with SignalInbox(settings.signals) as inbox:  # before all else: a signal finds somebody who clears up
        root = user_root(settings.environment)
        place, master_port = discovery.find_master(settings)
        directory: NodeDirectory | None = None
        meeting: MasterPort | None = None
        try:
            meeting = discovery.hold_coordinator_port(settings, place)
            name = discovery.name_job(settings, place)
            launch_id = discovery.new_launch()
            directory = NodeDirectory(root, name.name, launch_id, others=name.others)
            job_name = directory.job_name
            if script is not None:
                entry = copy_for_workers(settings.entry, script, directory)
                settings = msgspec.structs.replace(settings, entry=entry)
            token_file = directory.write("token", discovery.find_token(settings, place, directory).encode())
            launcher = Launcher(
                settings,
                inbox=inbox,
                directory=directory,
                job_name=job_name,
                launch_id=launch_id,
                # Scripts name files after it: another job may have the name that we chose tomorrow.
                run_id=f"{job_name}_{launch_id}" if name.is_chosen else job_name,
                token_file=token_file,
                place=place,
                master_port=master_port,
                programs=programs or Programs(),
                patience=patience or LaunchPatience(),
                environ=environ,
                root=root,
            )
            ended = launcher.run()
            if settings.outcome_file and ended.result is not None:
                _write_outcome(settings.outcome_file, ended.result)
            return ended.exit_code
        finally:
            for held in (master_port, meeting):
                if held is not None:
                    held.close()
            if directory is not None:
                remove_snapshots(snapshot_root(settings.environment), job_name, launch_id)
                directory.remove()


class Launcher:
    """One run of one node. All state is touched by the main thread only."""

    def __init__(
        self,
        settings: Settings,
        *,
        inbox: SignalInbox,
        directory: NodeDirectory,
        job_name: str,
        launch_id: str,
        run_id: str,
        token_file: str,
        place: MasterPlace,
        master_port: MasterPort | None,
        programs: Programs,
        patience: LaunchPatience,
        environ: Mapping[str, str],
        root: str,
    ) -> None:
        self._settings = settings
        self._inbox = inbox
        self._directory = directory
        self._job_name = job_name
        self._launch_id = launch_id
        self._run_id = run_id
        self._token_file = token_file
        self._place = place
        self._master_port = master_port
        self._programs = programs
        self._patience = patience
        self._root = root
        # torchrun tells its workers which signals it handles; ours expect the same variable.
        names = ",".join(signal.Signals(number).name for number in settings.signals)
        self._environ = {**environ, "TORCHELASTIC_SIGNALS_TO_HANDLE": names}
        # Agent and master read it from a file. Workers do not need it, and programs like to log their environment.
        self._environ.pop("DLROVER_JOB_TOKEN", None)

        self._files = MasterFiles(settings, directory.path, job_name=job_name, launch_id=launch_id)
        self._has_other_nodes = place.is_shared and settings.terms.limits.max_nodes > 1

        self._agent = LaunchedChild("agent")
        self._agent_started_at = 0.0
        self._num_agent_deaths = 0  # in a row
        self._neighbours: BystanderProcesses | None = None  # None: nothing has been started yet
        self._master = LaunchedChild("master")
        self._num_quick_master_deaths = 0  # in a row, each before the master served
        self._has_master_served = False
        self._num_port_choices = 1
        self._probe: MasterProbe | None = None
        self._job_end: JobEnd | None = None  # the master's last word
        self._stopped_by: int | None = None  # the first signal that asked us to end
        self._kill_agent_at: float | None = None
        self._is_hurried = False  # interrupted twice: nothing is worth waiting for
        self._departed: AgentResult | None = None  # our node has left the job, and we host the master for the others
        self._ended: Ended | None = None

    def run(self) -> Ended:
        try:
            self._start_agent()
            assert self._agent.pid is not None, "just started"
            self._neighbours = BystanderProcesses(besides=(self._agent.pid,))
            process_tree().become_subreaper()
            if self._place.is_ours:
                self._start_master()
                if self._settings.watching.dashboard_port >= 0:
                    say(f"dashboard: `dlrover dashboard {self._job_name}` prints a link to it")
            else:
                self._look_for_master()
            reap_in_passing(self._root)  # leftovers of others, now that nothing waits for us
            reap_snapshots(snapshot_root(self._settings.environment))
            while self._ended is None:
                self._turn()
            return self._ended
        finally:
            if self._probe is not None:
                self._probe.close()
            self._clear_up()

    def _turn(self) -> None:
        for number in self._inbox.wait(
            _until_first(self._kill_agent_at, self._agent.starts_at, self._master.starts_at)
        ):
            if number != signal.SIGCHLD:
                self._on_signal(number)
        for pid, status in processes.reap_children().items():
            self._on_exit(pid, status)
        self._on_time(time.monotonic())

    # The agent.

    def _start_agent(self) -> None:
        config = AgentConfig(
            job_name=self._job_name,
            run_id=self._run_id,
            launch=self._launch_id,
            master_addr=str(self._place.address),
            master_file=self._settings.environment.master_file,
            token_file=self._token_file,
            runtime_dir=self._directory.path,
            host=discovery.own_host(self._settings, self._place),
            terms=msgspec.structs.replace(self._settings.terms, shutdown_timeout=self._settings.shutdown_timeout),
            local_world_size=self._settings.local_world_size,
            entry=self._settings.entry,
            node_rank=self._settings.node_rank,
            role=self._settings.role,
            interpreter=self._settings.interpreter,
            is_warm=self._settings.is_warm,
            preload=self._settings.preload,
            framework="tensorflow" if self._settings.terms.strategy is Strategy.PS else self._settings.framework,
            log=self._settings.log,
            watch=self._settings.watch,
            is_tuned=self._settings.tuner is not Tuner.OFF,
            tls=self._settings.tls,
            signals=self._settings.signals,
            shutdown_timeout=self._settings.shutdown_timeout,
            master_grace=self._settings.master_grace,
            preemption_file=self._settings.preemption_file,
            failover_extension=self._settings.failover_extension,
            failover_dir=self._settings.failover_dir,
            host_ports=self._settings.environment.host_ports,
            coordinator_port=discovery.coordinator_port(self._settings),
            is_virtual_local_rank=self._settings.is_virtual_local_rank,
            platform_node=self._settings.environment.platform_node,
            node_type=self._settings.environment.node_type,
            node_name=self._settings.environment.node_name,
            node_ip=self._settings.environment.node_ip,
            foreign_node=self._settings.environment.foreign_node,
            group=self._settings.environment.node_group,
            snapshot_root=snapshot_root(self._settings.environment),
            is_saving_at_break_points=self._settings.is_saving_at_break_points,
            snapshot_write_limit=self._settings.snapshot_write_limit,
            snapshot_copies=self._settings.snapshot_copies,
            snapshot_parity=self._settings.snapshot_parity,
            snapshot_bandwidth=self._settings.snapshot_bandwidth,
            log_level=self._settings.environment.log_level,
            log_root=self._settings.environment.log_root,
        )
        self._directory.record(str(self._place.address), self._settings.tls)
        path = self._directory.write("agent.json", msgspec.json.encode(config))
        self._agent_started_at = time.monotonic()
        self._agent.pid = processes.spawn((*self._programs.agent, "--config", path), self._environ)

    def _restart_agent(self) -> None:
        why_not = self._agent.start_again(self._start_agent, limit=self._patience.restart)
        if why_not:
            self._fail(EXIT_FAILED, why_not)

    def _on_agent_exit(self, status: int) -> None:
        result = _read_result(self._directory.path)
        if self._stopped_by is not None:
            is_done = result is not None and result.exit_code == 0
            self._ended = Ended(0 if is_done else 128 + self._stopped_by, result)
            return
        if result is not None and result.is_job_alive and self._master.pid is not None and self._has_other_nodes:
            say(f"{result.message} This launcher keeps running, because it hosts the master for the other nodes.")
            self._departed = result
            return
        if result is not None:
            self._end_with(result)
            return
        if self._job_end is not None:
            self._end_without_agent(self._job_end)
            return
        how = processes.describe_status(status)
        lived = time.monotonic() - self._agent_started_at
        self._num_agent_deaths = 1 if lived >= AGENT_LIVED_LONG else self._num_agent_deaths + 1
        self._sweep()
        if self._num_agent_deaths > MAX_AGENT_RESTARTS:
            message = (
                f"The agent of this node ended {self._num_agent_deaths} times in a row without a result, the "
                f"last time with {how} after {lived:.1f} s. Read its output above, and run `dlrover-run "
                "--check-env`."
            )
            self._fail(EXIT_FAILED, message)
        else:
            say(f"the agent ended ({how}) and is started again; its workers are restored")
            self._restart_agent()

    def _end_without_agent(self, end: JobEnd) -> None:
        say("the job ended while this node's agent was not running")
        self._end_with(result_of(end))

    def _end_with(self, result: AgentResult) -> None:
        self._ended = Ended(_exit_code(self._settings, result), result)
        if result.exit_code == EXIT_USAGE:
            say_block(f"dlrover-run: error: {result.message}")
        elif result.is_job_alive:
            say(result.message)
        elif result.exit_code != 0 and self._settings.environment.is_reporting:
            from dlrover.cli.launch.last_words import failure_report, pass_error_file_on

            say_block(failure_report(self._job_name, result))
            pass_error_file_on(self._environ.get("TORCHELASTIC_ERROR_FILE"), result)

    # The master.

    def _look_for_master(self) -> None:
        from dlrover.cli.launch.master_probe import MasterProbe  # late: it needs threads, the usual job does not

        self._probe = MasterProbe(self._place.address, self._inbox, timeout=self._patience.find_master)

    def _start_master(self) -> None:
        from dlrover.master.config import MasterConfig

        self._files.begin_life()
        config = MasterConfig(
            job_name=self._job_name,
            host=self._place.bind_host,
            port=self._place.address.port,
            token_file=self._token_file,
            tls=self._settings.tls,
            journal=self._files.journal(),
            ready_file=self._files.ready,
            end_file=self._files.end,
            log_file=self._files.log,
            log_root=self._settings.environment.log_root,
            user=self._settings.environment.user,
            pre_check_ops=self._settings.pre_check_ops,
            topology_querier=self._settings.topology_querier,
            topology_sorter=self._settings.topology_sorter,
            event_reporters=self._settings.environment.event_reporters,
            reports=self._files.reports,
            scaling=_scaling(self._settings, self._environ),
            **msgspec.structs.asdict(self._settings.watching),
            parent_death=True,
            parent_pid=os.getpid(),
        )
        path = self._directory.write("master.json", msgspec.json.encode(config))
        self._master.pid = processes.spawn(
            (*self._programs.master, "--config", path), self._environ, output=self._files.log
        )

    def _restart_master(self) -> None:
        """Workers train on without it. When it has been away for as long as agents wait for it, no agent needs it any more."""
        limit = max(self._patience.restart, self._settings.master_grace)
        why_not = self._master.start_again(self._start_master, limit=limit)
        if why_not:
            self._fail(EXIT_MASTER_LOST, why_not)

    def _on_master_exit(self, status: int) -> None:
        from dlrover.master.config import EXIT_PORT_IN_USE

        self._job_end = self._files.read_end()
        if self._job_end is not None and self._departed is not None:
            self._ended = Ended(self._departed.exit_code, self._departed)
            return
        if self._job_end is not None and self._agent.starts_at is not None:
            self._end_without_agent(self._job_end)
            return
        if self._job_end is not None:
            # The agent is on its way out. One that is not (it has just been started again and will find no master)
            # must not wait for one.
            self._kill_agent_at = self._kill_agent_at or time.monotonic() + self._patience.agent_margin
            return
        # It did not say that the job is over, so it is not, whatever ended the master: a crash, somebody's signal.
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        how = processes.describe_status(status)
        if self._files.is_ready():
            self._has_master_served = True
            self._num_quick_master_deaths = 0
        else:
            self._num_quick_master_deaths += 1
        if code == EXIT_PORT_IN_USE and not self._has_master_served:
            self._on_port_taken()
            return
        is_first_start = code is not None and not self._has_master_served
        if is_first_start and (code == EXIT_USAGE or self._num_quick_master_deaths > NUM_QUICK_DEATHS):
            self._fail(
                EXIT_USAGE if code == EXIT_USAGE else EXIT_MASTER_LOST,
                f"The master could not start ({how}). Its log ends with:\n{self._files.log_tail()}",
            )
            return
        excess = self._num_quick_master_deaths - NUM_QUICK_DEATHS
        pause = min(LONGEST_PAUSE, 0.1 * 2**excess) if excess > 0 else 0.0
        say(
            f"the master ended ({how}) and is started again"
            + (f" in {pause:.1f} s" if pause else "")
            + "; workers keep training"
        )
        self._master.starts_at = time.monotonic() + pause

    def _on_port_taken(self) -> None:
        """Another process listened first. With a port that no other process knows, any other does as well."""
        if not self._place.is_port_free_choice:
            say(f"another launcher hosts the master at {self._place.address}; this launcher connects to it")
            self._place = msgspec.structs.replace(self._place, is_ours=False)
            self._look_for_master()
            return
        if self._stopped_by is not None:
            return  # the agent is ending anyway
        self._num_port_choices += 1
        if self._num_port_choices > MAX_PORT_CHOICES:
            self._fail(
                EXIT_FAILED,
                f"The master could not start: other programs took {MAX_PORT_CHOICES} free ports in a row before it "
                "could use them. Start the job again, or without --standalone and with --rdzv-endpoint HOST:PORT.",
            )
            return
        assert self._master_port is not None, "a place that is ours has a seat"
        self._master_port.close()
        self._master_port = MasterPort(self._place.bind_host, 0)
        self._num_quick_master_deaths = 0
        self._place = msgspec.structs.replace(
            self._place, address=Address(self._place.address.host, self._master_port.port)
        )
        if self._agent.pid is not None:
            self._agent.send(signal.SIGKILL)
            self._agent.pid = None
            self._sweep()
        self._restart_agent()
        self._restart_master()

    # Events.

    def _on_signal(self, number: int) -> None:
        if self._stopped_by is None:
            self._stopped_by = number
            _say_stopped(self._settings, self._job_name, number)
            self._kill_agent_at = time.monotonic() + self._settings.shutdown_timeout + self._patience.agent_margin
            if self._agent.pid is not None:
                # The agent passes it on to the workers, which may treat Ctrl-C and SIGTERM differently.
                self._agent.send(number if _is_heard(self._agent.pid, number) else signal.SIGTERM)
            if self._has_other_nodes and self._files.is_ready():
                # The master goes with us; without it the others would train into the void and then wait for its return.
                self._master.send(signal.SIGUSR1)
            if self._departed is not None or self._agent.starts_at is not None:
                self._ended = Ended(128 + number, self._departed)
        elif number == signal.SIGINT:
            say("interrupted again: all processes are killed at once")
            self._kill_agent_at = time.monotonic()
            self._is_hurried = True

    def _on_exit(self, pid: int, status: int) -> None:
        if pid == self._agent.pid:
            self._agent.pid = None
            if self._ended is None:
                self._on_agent_exit(status)
        elif pid == self._master.pid:
            self._master.pid = None
            if self._ended is None:
                self._on_master_exit(status)

    def _on_time(self, now: float) -> None:
        if self._ended is not None:
            return
        if self._kill_agent_at is not None and now >= self._kill_agent_at and not self._is_hurried:
            self._kill_agent_at = max(self._kill_agent_at, saving_until(self._directory.path))
        if self._kill_agent_at is not None and now >= self._kill_agent_at and self._agent.pid is not None:
            self._agent.send(signal.SIGKILL)
            self._kill_agent_at = None
        if self._agent.starts_at is not None and now >= self._agent.starts_at:
            self._restart_agent()
        if self._master.starts_at is not None and now >= self._master.starts_at:
            self._restart_master()
        if self._probe is not None and self._probe.is_over:
            probe, self._probe = self._probe, None
            if not probe.has_found and self._stopped_by is None:
                message = (
                    f"No master answered at {self._place.address} within {probe.timeout:.0f} s "
                    f"({probe.trouble}). This host does not start the master, because the address belongs to "
                    "another host. Check that the address is correct and reachable from here, and that the "
                    "launcher on that host runs."
                )
                self._fail(EXIT_MASTER_LOST, message)

    def _fail(self, exit_code: int, message: str) -> None:
        result = AgentResult(exit_code=exit_code, message=message)
        self._ended = Ended(exit_code, result)
        say(message)

    # The end.

    def _sweep(self) -> None:
        """Kill whatever is below us of the job. Only the master stays."""
        if self._neighbours is None:
            return
        keep = self._neighbours.pids()
        if self._master.pid is not None:
            keep.add(self._master.pid)
        left = process_tree().kill_descendants(keep, deadline=SWEEP_TIMEOUT)
        if left:
            say(
                f"the processes {left} still exist after SIGKILL. They wait inside the kernel, usually for a "
                "device or a file system."
            )

    def _clear_up(self) -> None:
        try:
            self._end_children()
        except OSError as error:
            # How the job ended is known by now, and nothing that goes wrong here may be told in its place.
            say(f"the launcher could not check that every process of the job has ended: {error}")

    def _end_children(self) -> None:
        both = (self._agent, self._master)
        if self._agent.pid is not None:
            # We end before the agent does (the master is out of reach): it may still stop its workers in good order.
            self._agent.send(signal.SIGTERM)
            await_exit(self._agent, among=both, inbox=self._inbox, patience=self._patience.master)
        if self._master.pid is not None:
            has_ended_well = self._ended is not None and self._ended.result is not None and self._stopped_by is None
            if has_ended_well or self._has_other_nodes:  # stopped by a signal: the others should still hear of it
                is_long = has_ended_well and self._has_other_nodes
                patience = self._patience.shared_master if is_long else self._patience.master
                await_exit(self._master, among=both, inbox=self._inbox, patience=patience)
        if self._master.pid is not None:
            self._master.send(signal.SIGTERM)
            await_exit(self._master, among=both, inbox=self._inbox, patience=self._patience.master)
        self._master.pid = None  # if it is still there, it goes with the rest
        goodput = self._files.read_goodput()
        if goodput is not None and goodput.num_faults and self._settings.environment.is_reporting:
            # One line about where the time went, if anything happened: torchrun says nothing, and nor do we without need.
            from dlrover.cli.launch.last_words import goodput_line

            say(goodput_line(goodput))
        self._sweep()
        if self._master_port is not None:
            self._master_port.close()


def _until_first(*planned: float | None) -> float | None:
    """Seconds until the first of these deadlines. None: there is none."""
    deadlines = [at for at in planned if at is not None]
    return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


def _read_result(directory: str) -> AgentResult | None:
    path = os.path.join(directory, "result.json")
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=AgentResult)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        say(f"the agent's result cannot be read: {error}")
        return None


def _exit_code(settings: Settings, result: AgentResult) -> int:
    if result.exit_code == EXIT_FAILED and settings.is_exit_code_of_worker and result.worker_exit_code:
        return result.worker_exit_code
    return result.exit_code


def _scaling(settings: Settings, environ: Mapping[str, str]) -> ScaleTerms | None:
    """No platform gives this job its nodes: all there is to change is what its workers do with theirs."""
    if settings.tuner is Tuner.OFF:
        return None
    terms, _ = from_environment(environ)
    return msgspec.structs.replace(terms, tuner=settings.tuner)


def _say_stopped(settings: Settings, job_name: str, number: int) -> None:
    if settings.environment.platform_node >= 0:
        return  # the platform ends its nodes so, also when all is well
    grace = f"Its workers have {settings.shutdown_timeout:g} s to end (--shutdown-timeout)"
    if number == signal.SIGINT:
        say(f"job {job_name} was interrupted. {grace}; press Ctrl-C again to kill them at once.")
    else:
        say(f"job {job_name} was stopped by {signal.Signals(number).name}. {grace}.")


def _is_heard(agent: int, number: int) -> bool:
    """
    An agent that has just been started has no handlers yet, and there are signals that would stop it, or go unnoticed. Of Ctrl-C
    Python would show a traceback; a handler for SIGTERM is never Python's own.
    """
    from dlrover.agent.workers.sigterm import caught_signals

    return {number, signal.SIGTERM} <= caught_signals(agent)


def result_of(end: JobEnd) -> AgentResult:
    """What the agent would have told, had it been there."""
    failure = None if end.first_failure is None else end.first_failure.failure
    worker_exit_code = None
    if failure is not None:
        worker_exit_code = failure.exit_code if failure.signal is None else 128 + failure.signal
    return AgentResult(
        exit_code=end.exit_code,
        message=end.message,
        worker_exit_code=worker_exit_code,
        first_failed_rank=None if failure is None else failure.global_rank,
        num_restarts=end.num_restarts,
        end=end,
    )


def _write_outcome(path: str, result: AgentResult) -> None:
    from dlrover.cli.launch.runtime_dir import write_private

    try:
        write_private(path, msgspec.json.encode(result))
    except ConfigError as error:
        say(f"the launcher could not write how the job ended; its exit code is correct. {error}")


def main() -> int:
    """`python -m dlrover.cli.launch.launcher SETTINGS`: the child of a programmatic launch, ends with its parent."""
    from dlrover.host.lifeline import follow_parent
    from dlrover.host.standard_streams import open_standard_descriptors

    open_standard_descriptors()
    with open(sys.argv[1], "rb") as file:
        settings = msgspec.json.decode(file.read(), type=Settings)
    if not follow_parent(signal.SIGTERM):
        return EXIT_FAILED
    try:
        return launch(settings, os.environ)
    except ConfigError as error:
        _write_outcome(settings.outcome_file, AgentResult(exit_code=EXIT_USAGE, message=str(error)))
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # before anything was started; afterwards the inbox takes it


if __name__ == "__main__":
    sys.exit(main())
