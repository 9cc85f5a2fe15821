"""
The workers of one node in one world: started together, watched, stopped together.

A group lives for one round. It does not decide anything: it says how the workers ended, and the agent and the master
decide what that means.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import signal
import socket
import string
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from dlrover.agent.config import AgentConfig, EntryKind
from dlrover.agent.decisions.last_breath import DEATHS
from dlrover.agent.monitor.config_tuner import FILE_NAME
from dlrover.agent.monitor.progress import WorkerWatch
from dlrover.agent.workers.failures import Evidence, could_not_start, count_oom_kills, describe_failure
from dlrover.agent.workers.last_breath import Survivor, take_last_breath
from dlrover.agent.workers.log_patterns import LogVerdict
from dlrover.agent.workers.output import WorkerFiles, WorkerOutput
from dlrover.agent.workers.process_tree import Exit, ProcessTree
from dlrover.agent.workers.socket import WorkerSocket
from dlrover.agent.workers.spawner import Leash, Spawner, StartFailed
from dlrover.agent.workers.user_patterns import UserPatterns
from dlrover.agreed.mistakes import FIRST_LIFE, may_be_mistake
from dlrover.agreed.reach import NOTHING_TOLD
from dlrover.host.shared_page.breath_page import BreathPage
from dlrover.protocol.addresses import Address
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.job import Micros, NodeRank, StopCause, WorkerFailure, WorldSpec
from dlrover.protocol.messages.watch import Reach

_log = logging.getLogger(__name__)

SIMULTANEOUS = 0.02
"""Seconds to wait after the first failure for others that die with it, so that one report names them all."""
HEAD_START = 0.02
"""
Seconds that global rank 0 is ahead of the other warm workers: it listens where they connect, and torch's store answers a
refused connection with a pause of about 0.4 s. Without it 2 of 12 restarts of two workers lost that race.
"""
ALIKE_PATIENCE = 2.0
"""
Seconds that the other workers have to fail alike after the first one may have met a mistake in the script. Only before the
first step of the job. Workers of one node begin within a tenth of a second of each other, those of several within a second.
"""
_PORTS = range(20_000, 30_000)
"""
Below the range from which the kernel takes source ports of outgoing connections: none can take an offered port by
chance.
"""
_TORCHELASTIC_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


@dataclass(frozen=True)
class Finished:
    """All workers ended with exit code 0."""

    step: int | None


@dataclass(frozen=True)
class Failed:
    """At least one did not. The others still run until `stop`."""

    failures: tuple[WorkerFailure, ...]
    """Earliest first; empty: `stop` has told them all."""
    step: int | None
    lived: float
    reach: Reach = NOTHING_TOLD


@dataclass
class _Worker:
    local_rank: int
    global_rank: int
    files: WorkerFiles
    pid: int = 0
    leash: Leash | None = None
    exit: asyncio.Future[Exit] | None = None
    pattern_verdict: LogVerdict | None = None
    failure: WorkerFailure | None = None
    is_told: bool = False
    """`wait` or `stop` has given its failure to the caller: only one of them does."""


class WorkerGroup:
    def __init__(
        self,
        config: AgentConfig,
        world: WorldSpec,
        *,
        node_rank: NodeRank,
        spawner: Spawner,
        tree: ProcessTree,
        output: WorkerOutput,
        worker_socket: WorkerSocket,
        master_now: Callable[[], Micros],
        snapshot_home: str = "",
        watch: WorkerWatch | None = None,
        patterns: UserPatterns | None = None,
        environ: Mapping[str, str] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        alike_patience: float = ALIKE_PATIENCE,
        simultaneous: float = SIMULTANEOUS,
    ) -> None:
        self.world = world
        self._config = config
        self._node_rank = node_rank
        self._spawner = spawner
        self._tree = tree
        self._output = output
        self._socket = worker_socket
        self._master_now = master_now
        self._snapshot_home = snapshot_home
        self._watch = watch
        self._patterns = patterns
        self._environ = dict(spawner.environ if environ is None else environ)
        self._sleep = sleep
        self._alike_patience = alike_patience
        self._simultaneous = simultaneous
        self._workers: list[_Worker] = []
        self._started_at = 0.0
        self._num_oom_kills = 0
        self._signalled_at: float | None = None
        """Wall clock, when we began to stop them; what ended before ended by itself."""
        self._stepless: frozenset[int] = frozenset()
        """Local ranks that had made no step when the watch on them ended."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that were started, by local rank."""
        return tuple(worker.pid for worker in self._workers if worker.pid)

    @property
    def step(self) -> int | None:
        """Greatest step that any of them reported, or took or restored a checkpoint of. Of a script that counts anew: the newest one."""
        reported = self._socket.step(self.world.round)
        named = None if self._watch is None else self._watch.named_step(self.world.round)
        if named is not None and self.reach.is_counting_anew:
            return named
        return max((step for step in (reported, named) if step is not None), default=None)

    @property
    def reach(self) -> Reach:
        """How far they came by other counts."""
        return NOTHING_TOLD if self._watch is None else self._watch.reach(self.world.round)

    @property
    def lived(self) -> float:
        """Seconds since they were started."""
        return time.monotonic() - self._started_at if self._started_at else 0.0

    async def start(self, offer: PortOffer | None = None) -> None:
        """
        Start all workers. One that cannot be started counts as failed, and `wait` says so.

        `offer` is our reserved port; it is given up in any case, and at the last moment if global rank 0 is here.
        """
        assert not self._workers, "a group is started once"
        try:
            world = self.world
            ranks = range(world.first_global_rank, world.first_global_rank + world.local_world_size)
            self._socket.open_round(world.round)
            if self._watch is not None:
                _open_seats(self._watch, self.world)
            files = self._output.open_attempt(world.restart_count, ranks)
            self._workers = [_Worker(local, rank, files[local]) for local, rank in enumerate(ranks)]
            self._num_oom_kills = count_oom_kills()
            self._started_at = time.monotonic()
            _log_thread_rule(self.world, self._environ)
            await self._tree.room(len(self._workers))
            await asyncio.gather(*(self._fork(worker) for worker in self._workers))
            if offer is not None:
                offer.release()
            await asyncio.gather(*(self._release(worker) for worker in self._workers if worker.global_rank == 0))
            if self._spawner.is_warm and world.world_size > 1:
                await self._sleep(HEAD_START)
            await asyncio.gather(*(self._release(worker) for worker in self._workers if worker.global_rank != 0))
        finally:
            if offer is not None:
                offer.release()
            for worker in self._workers:
                if worker.leash is not None:
                    worker.leash.close()  # superseded before it could run: it ends without having done anything

    async def wait(self) -> Finished | Failed:
        """Until all have ended well or one has not. The rest is left running: the caller stops it."""
        pending = {worker.exit for worker in self._workers if worker.exit is not None and not worker.failure}
        while pending and not _has_failed(self._workers):
            _done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if not _has_failed(self._workers):
            return Finished(self.step)
        lived = self.lived
        if pending:
            await asyncio.wait(pending, timeout=self._simultaneous)
        failed = [worker for worker in self._workers if worker.failure or _has_ended_badly(worker)]
        await asyncio.gather(*map(self._read_log, failed))
        return Failed(self._tell(failed), self.step, lived, self.reach)

    @property
    def may_be_mistaken(self) -> bool:
        """Whether all that is known may come from a mistake in the script, which the other workers are then about to make, too."""
        if self.world.round != FIRST_LIFE or self._config.terms.restarts.max_restarts is not None:
            return False
        told = [worker.failure for worker in self._workers if worker.failure is not None]
        return all(map(may_be_mistake, told)) and all(self._is_before_step(worker) for worker in self._workers)

    async def await_alike(self) -> None:
        """
        Give the workers that still run a moment to fail as the others did. A worker that is stopped before has told nothing, and the
        job would begin again with the same mistake.
        """
        pending = {worker.exit for worker in self._workers if worker.exit is not None and not worker.exit.done()}
        if pending:
            await asyncio.wait(pending, timeout=self._alike_patience)

    async def stop(self, cause: StopCause, with_signal: int = signal.SIGTERM) -> tuple[WorkerFailure, ...]:
        """
        End the workers and everything they ever started. Harmless when they have ended already.

        Returns the failures that `wait` has not told: of workers that had failed by themselves before our signal, but
        were still on their way out when another one, maybe only its victim, was seen to be gone.
        """
        self._signalled_at = self._signalled_at or time.time()
        self._tree.note_sizes()
        if cause is StopCause.FAILURE:
            await _save_last_step(self._workers, self._watch)
        await self._tree.stop(
            self.pids,
            cause=cause,
            shutdown_timeout=self._config.shutdown_timeout,
            number=with_signal,
            on_stuck=None if self._watch is None else self._watch.looks.note_stuck,
        )
        if self._watch is not None:
            self._stepless = frozenset(each.local_rank for each in self._workers if self._is_before_step(each))
            self._watch.close_round()
        late = [worker for worker in self._workers if worker.failure is None and self._failed_by_itself(worker)]
        await asyncio.gather(*map(self._read_log, late))
        failures = self._tell(late)
        await self._output.close_attempt()
        return failures

    async def gone(self) -> None:
        """Until the kernel has freed all that the stopped workers had."""
        await self._tree.gone()

    async def _read_log(self, worker: _Worker) -> None:
        """Before its failure is described: all that it printed, and what the user wants to follow it."""
        await self._output.drain(worker.files)
        if self._patterns is not None and worker.failure is None and self._failed_by_itself(worker):
            worker.pattern_verdict = await self._patterns.find(worker.files.tail(), self._config.watch.log_file)

    def _tell(self, workers: Sequence[_Worker]) -> tuple[WorkerFailure, ...]:
        """Failures that were not reported yet. Both callers may have waited for the output of the same worker."""
        untold = [worker for worker in workers if not worker.is_told]
        for worker in untold:
            worker.is_told = True
        return tuple(sorted((self._describe(worker) for worker in untold), key=lambda failure: failure.exited_at))

    def kill(self) -> None:
        """SIGKILL, at once and without waiting: for an agent that is leaving through an error."""
        self._signalled_at = self._signalled_at or time.time()
        self._tree.kill()
        self._output.abandon_attempt()

    def _failed_by_itself(self, worker: _Worker) -> bool:
        """Whether it ended badly before we stopped it, or had at least written down why."""
        if not _has_ended_badly(worker):
            return False
        assert worker.exit is not None, "ended without having been started"
        at = self._signalled_at
        return at is None or worker.exit.result().at < at or _wrote_error(worker, before=at)

    def _is_before_step(self, worker: _Worker) -> bool:
        if worker.local_rank in self._stepless:
            return True
        if self._watch is None or self.step is not None:
            return False
        is_young = self.lived < self._config.terms.restarts.lived_long
        return self._watch.is_before_step(worker.local_rank, is_young=is_young)

    async def _fork(self, worker: _Worker) -> None:
        entry = self._config.entry
        substituted = [
            string.Template(os.fsdecode(word)).safe_substitute(local_rank=worker.local_rank) for word in entry.args
        ]
        files = worker.files
        try:
            environ = worker_environment(
                self._environ,
                self._config,
                self.world,
                node_rank=self._node_rank,
                local_rank=worker.local_rank,
                files=worker.files,
                agent_socket=self._socket.path,
                snapshot_home=self._snapshot_home,
            )
            if self._watch is not None:
                environ.update(self._watch.environment(worker.local_rank))
            leash = await self._spawner.spawn(
                kind=entry.kind,
                target=entry.name,
                args=substituted,
                environ={os.fsencode(name): os.fsencode(value) for name, value in environ.items()},
                streams=(files.stdin, files.stdout, files.stderr),
            )
        except StartFailed as error:
            self._note_start_failure(worker, str(error))
            return
        finally:
            files.close_descriptors()
        try:
            page = None if self._watch is None else self._watch.death_page(worker.local_rank)
            worker.exit = self._tree.watch(leash.pid, page, _ports_of_round(self._config, self.world))
        except ProcessLookupError:
            leash.close()
            self._note_start_failure(worker, f"the worker (pid {leash.pid}) was killed before it began")
            return
        worker.pid, worker.leash = leash.pid, leash
        if self._watch is not None:
            self._watch.started(worker.local_rank, worker.pid)

    async def _release(self, worker: _Worker) -> None:
        if worker.leash is None:
            return
        try:
            await worker.leash.release()
        except StartFailed as error:
            self._note_start_failure(worker, str(error))

    def _note_start_failure(self, worker: _Worker, message: str) -> None:
        worker.failure = could_not_start(
            global_rank=worker.global_rank,
            local_rank=worker.local_rank,
            message=f"cannot start {self._config.entry.name}: {message}",
            at=self._master_now(),
            pid=worker.pid,
        )

    def _describe(self, worker: _Worker) -> WorkerFailure:
        if worker.failure is None:
            assert worker.exit is not None, "a worker that never was started has its failure noted"
            ended = worker.exit.result()
            ago = max(0.0, time.time() - ended.at)
            worker.failure = describe_failure(
                Evidence(
                    global_rank=worker.global_rank,
                    local_rank=worker.local_rank,
                    exit=ended,
                    exited_at=Micros(self._master_now() - int(ago * 1e6)),
                    error_file=worker.files.error_file,
                    log_tail=worker.files.tail(),
                    log_file=worker.files.log_file,
                    was_signalled=not self._failed_by_itself(worker),
                    num_oom_kills=count_oom_kills() - self._num_oom_kills,
                    has_stepped=self.step is not None,
                    training_log=self._config.watch.log_file,
                    node_errors=self._config.watch.node_errors,
                    pattern_verdict=worker.pattern_verdict,
                    hosts_coordinator=worker.global_rank == 0,
                    is_before_step=self._is_before_step(worker),
                )
            )
        return worker.failure


def _open_seats(watch: WorkerWatch, world: WorldSpec) -> None:
    try:
        watch.open_round(world)
    except OSError as error:
        raise ConfigError(
            f"This node cannot have {world.local_world_size} workers: {error.strerror}. Raise the hard limit of "
            "open files (ulimit -Hn), or start fewer workers."
        ) from error


def _log_thread_rule(world: WorldSpec, environ: Mapping[str, str]) -> None:
    if world.restart_count == 0 and world.local_world_size > 1 and "OMP_NUM_THREADS" not in environ:
        _log.warning(
            "OMP_NUM_THREADS is not set, so each of the %d workers of this node uses 1 thread. To use more, "
            "set it to another number.",
            world.local_world_size,
        )


def _ports_of_round(config: AgentConfig, world: WorldSpec) -> tuple[int, ...]:
    """The coordinator's, unless the next round has to use it as well: the user has chosen it, or has few to offer."""
    if config.coordinator_port or config.host_ports:
        return ()
    port = split_address(world.coordinator)[1]
    return (int(port),) if port.isdecimal() else ()


async def _save_last_step(workers: Sequence[_Worker], watch: WorkerWatch | None) -> None:
    """If all that still run have a guard, and none that failed here has met an error of the script."""
    told = [worker.failure for worker in workers if worker.failure is not None]
    if watch is None or not all(failure.kind in DEATHS for failure in told):
        return
    live = [worker for worker in workers if worker.exit is not None and not worker.exit.done()]
    survivors = []
    try:
        for worker in live:
            page = watch.death_page(worker.local_rank)
            assert page is not None, "a started worker has a seat"
            assert worker.exit is not None, "it runs"
            survivors.append(Survivor(worker.local_rank, worker.pid, worker.exit, BreathPage(*page)))
        await take_last_breath(survivors)
    except OSError as error:
        _log.info("the last step cannot be saved: %s", error.strerror)
    finally:
        for survivor in survivors:
            survivor.page.close()


def _has_failed(workers: Sequence[_Worker]) -> bool:
    return any(worker.failure or _has_ended_badly(worker) for worker in workers)


def _wrote_error(worker: _Worker, *, before: float) -> bool:
    try:
        return os.stat(worker.files.error_file).st_mtime < before
    except OSError:
        return False


def _has_ended_badly(worker: _Worker) -> bool:
    return worker.exit is not None and worker.exit.done() and worker.exit.result().exit_code != 0


def worker_environment(
    base: Mapping[str, str],
    config: AgentConfig,
    world: WorldSpec,
    *,
    node_rank: int,
    local_rank: int,
    files: WorkerFiles,
    agent_socket: str,
    snapshot_home: str = "",
) -> dict[str, str]:
    """
    What a worker finds in its environment: torchrun's names and values, and ours beside them.

    Values that differ from torchrun's on purpose: run id, address and port, file names, and the store, which is never
    the agent's because an agent that restarts would take the job's store with it.
    """
    global_rank = world.first_global_rank + local_rank
    host, port = split_address(world.coordinator)
    environ = dict(base)
    if "OMP_NUM_THREADS" not in environ and world.local_world_size > 1:
        environ["OMP_NUM_THREADS"] = "1"
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", _TORCHELASTIC_SIGNALS)
    environ.update(
        {
            "RANK": str(global_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world.world_size),
            "LOCAL_WORLD_SIZE": str(world.local_world_size),
            "GROUP_RANK": str(world.group_rank),
            "GROUP_WORLD_SIZE": str(world.group_world_size),
            "ROLE_NAME": config.role,
            "ROLE_RANK": str(global_rank),
            "ROLE_WORLD_SIZE": str(world.world_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": str(world.restart_count),
            # Without --max-restarts torchrun says 0 here; our own rule has no number to tell.
            "TORCHELASTIC_MAX_RESTARTS": str(config.terms.restarts.max_restarts or 0),
            "TORCHELASTIC_RUN_ID": config.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": files.error_file,
            "DLROVER_HELD_STDERR": files.held_path,
            "DLROVER_AGENT_SOCKET": agent_socket,
            "DLROVER_JOB_NAME": config.job_name,
            "DLROVER_ROUND": str(world.round),
            "DLROVER_JOB_AGE": f"{world.job_age:.0f}",
            "DLROVER_TURNS": ",".join(f"{round_}:{step}" for round_, step in world.turns),
            "DLROVER_MAX_NODES": str(config.terms.limits.max_nodes),
            "DLROVER_NODE_RANK": str(node_rank),
            "DLROVER_LOCAL_RANK": str(local_rank),
            "DLROVER_PARAL_CONFIG_PATH": os.path.join(config.runtime_dir, FILE_NAME),
            "RUNTIME_METRICS_PATH": os.path.join(config.runtime_dir, "runtime_metrics.json"),
        }
    )
    if world.task is not None:
        environ.update(
            DLROVER_CLUSTER_VERSION=str(world.task.version),
            DLROVER_TASK_TYPE=world.task.node_type.value,
            DLROVER_TASK_RANK=str(world.task.rank),
            DLROVER_NODE_HOST=config.host,
        )
    elif config.framework != "torch":
        environ.update(DLROVER_FRAMEWORK=config.framework, DLROVER_NODE_HOST=config.host)
    if snapshot_home:
        environ["DLROVER_SNAPSHOT_HOME"] = snapshot_home
        environ["DLROVER_SNAPSHOT_FALLBACK"] = os.path.join(config.runtime_dir, "segments")
    if config.entry.kind is EntryKind.FUNCTION:
        # Beside the call itself: that file is the user's process's own, our runtime directory goes with the job.
        environ["DLROVER_RESULT_FILE"] = f"{config.entry.name}.result.{global_rank}"
    if config.is_virtual_local_rank:
        environ["LOCAL_RANK"] = "0"
        environ["CUDA_VISIBLE_DEVICES"] = _visible_device(base.get("CUDA_VISIBLE_DEVICES"), local_rank)
    return environ


def _visible_device(visible: str | None, local_rank: int) -> str:
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise StartFailed(
            f"--virtual-local-rank: there is no device for local rank {local_rank} in "
            f"CUDA_VISIBLE_DEVICES={visible}. Start fewer workers on this node, or give the node more devices."
        )
    return devices[local_rank].strip()


def split_address(address: str) -> tuple[str, str]:
    """host and port; brackets of an IPv6 host are for the text only."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


class PortOffer:
    """
    A port of this node, bound and not listening, so that no other process gets it before our workers do.

    Bound without SO_REUSEADDR: with it two agents on one host could hold the same port, neither of them listening.
    And not listening, because a worker of another node that is early must be refused and try again, not connect to
    us.
    """

    def __init__(self, host: str, port: int, sock: socket.socket | None = None) -> None:
        """Without a socket it is not kept: a port of the user's, which several agents of this host may offer."""
        self._socket = sock
        self.port = port
        self.address = str(Address(host, port))

    @classmethod
    def bind(cls, host: str, ports: Sequence[int] = (), *, offered: Sequence[int] = ()) -> PortOffer:
        """
        A free one of `ports`, or any. Raises OSError when none is free.

        `offered` are those we offered before, oldest first: taken only if `ports` has no other, in that order.
        """
        if ports:
            ports = [*(port for port in ports if port not in offered), *(port for port in offered if port in ports)]
            # A port that we used before may still have connections in their last minute: allowed in the second turn
            # only.
            attempts = [(port, False) for port in ports] + [(port, True) for port in ports]
        else:
            fresh = [port for port in random.sample(_PORTS, 64 + len(offered)) if port not in offered]
            attempts = [(port, False) for port in fresh] + [(0, False)]
        for port, is_reused in attempts:
            try:
                sock = _bind(port, is_reused=is_reused)
                return cls(host, sock.getsockname()[1], sock)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
        raise OSError(errno.EADDRINUSE, f"none of the ports {', '.join(map(str, ports))} is free")

    def release(self) -> None:
        """May be called again."""
        if self._socket is not None:
            self._socket.close()


def _bind(port: int, *, is_reused: bool) -> socket.socket:
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # a kernel without IPv6
        try:
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            if is_reused:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRNOTAVAIL and family == socket.AF_INET6:
                continue  # IPv6 is compiled in and switched off
            raise
        return sock
    raise OSError(errno.EAFNOSUPPORT, "this host has neither IPv6 nor IPv4")
