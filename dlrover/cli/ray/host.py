"""
The host of a job in a Ray cluster: what `dlrover local` is on a laptop, as an actor.

Parent of the master, truth about the nodes, and the only one that drivers talk to. It is detached, so a driver may die; Ray starts it again
where it dies, and it finds its nodes by their names. The master below it knows nothing of Ray: it speaks to the host's unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec

from dlrover.cli.launch.discovery import MasterPort, new_launch
from dlrover.cli.launch.hosted_command import exit_code_of, take_master_port
from dlrover.cli.launch.hosted_master import HostedMaster
from dlrover.cli.launch.last_words import failure_report
from dlrover.cli.launch.launcher import EXIT_FAILED, EXIT_MASTER_LOST, EXIT_USAGE, Programs, result_of
from dlrover.cli.launch.runtime_dir import NodeDirectory, user_root
from dlrover.cli.options.environment import read_environment
from dlrover.cli.ray.bulletin import Bulletin
from dlrover.cli.ray.messages import PLAN, HostAccount, JobOver, RayJobPlan, pack
from dlrover.cli.ray.node import LauncherActor
from dlrover.host.edges import contained
from dlrover.master.config import MasterConfig
from dlrover.platforms.hosted.table import HostConfig, NodeHost
from dlrover.platforms.local.memory_limits import MemoryLimits
from dlrover.platforms.local.node_process import send, wait_gone
from dlrover.platforms.ray.directory import ActorDirectory
from dlrover.platforms.ray.messages import JobSecrets
from dlrover.platforms.ray.node_actor import NodeActor
from dlrover.platforms.ray.raylet import on_raylet_end
from dlrover.platforms.ray.recovery import find_secrets
from dlrover.platforms.ray.starter import RayStarter
from dlrover.platforms.ray.store import JobResult, JobStore, Registry
from dlrover.protocol.addresses import Address
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.job import JobEnd

log = logging.getLogger(__name__)

NODE_FAREWELL = 5.0
"""Seconds that nodes have for leaving by themselves when the master has said that the job is over."""
STOP_MARGIN = 5.0
"""Seconds beyond the workers' grace that the job has for ending after a signal."""
MASTER_TIMEOUT = 2.0
HOST_MEMORY = 256 << 20
"""Bytes that host and master ask Ray for. Ray ignores the wish for a machine of an actor that asks for nothing."""
JOURNAL_MARK = "journal.mark"
"""File beside the journal with a number that the store has, too, if the journal is the newest."""
DELIVERY = 10.0
"""Seconds for a driver that is there to take the result."""


class RayHost:
    """Made with the id of the job alone: Ray keeps a constructor's arguments."""

    node_class: type[NodeActor] = LauncherActor
    roles_file = ""
    """In the runtime directory, if the job is a role of a multi-role job: the report about all its roles, which the page shows."""
    begin_timeout = 60.0
    """Seconds for the driver to tell the secrets. If it was killed meanwhile, there is no job."""

    def __init__(self, job_uid: str) -> None:
        import ray

        self._store = JobStore(job_uid)
        self._job_uid = job_uid
        self._epoch = self._store.claim_epoch()
        self._bulletin = Bulletin(self._epoch)
        self._plan: RayJobPlan | None = None
        self._address: Address | None = None
        self._secrets = JobSecrets(token="")
        self._directory: NodeDirectory | None = None
        self._files: ActorDirectory | None = None
        self._port: MasterPort | None = None
        self._starter: RayStarter | None = None
        self._host: NodeHost | None = None
        self._master: HostedMaster | None = None
        self._stopped_by: int | None = None
        self._end: JobEnd | None = None
        self._exit_code = EXIT_FAILED
        self._why = ""
        """A sentence about an end that the master did not decide."""
        self._is_over = asyncio.Event()
        self._is_serving = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        on_raylet_end(self._vanish)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._tasks.append(asyncio.ensure_future(self._live(None)))
        else:
            asyncio.get_running_loop().call_later(self.begin_timeout, self._abandon)

    # What drivers ask for.

    async def begin(self, secrets: bytes) -> None:
        """Once, by the driver that made the job."""
        if not self._tasks:
            self._tasks.append(asyncio.ensure_future(self._live(msgspec.msgpack.decode(secrets, type=JobSecrets))))

    async def news(self, follower: str, host_epoch: int, after: int, wait: float) -> bytes:
        return pack(await self._bulletin.news(follower, host_epoch, after, wait))

    async def taken(self, follower: str) -> None:
        """The driver has the end of the job: the host need not wait for it any more."""
        self._bulletin.taken(follower)

    async def describe(self) -> bytes:
        """Once the host serves; with the token, for drivers of this cluster."""
        await self._is_serving.wait()
        plan = self._plan
        assert plan is not None
        assert self._directory is not None
        return pack(
            HostAccount(
                job_name=plan.job_name,
                address="" if plan.master is None else str(self._address),
                token=self._secrets.token,
                tls=plan.tls,
                host=_own_address(),
                host_epoch=self._epoch,
                summary=plan.summary,
                pid=os.getpid(),
                master_pid=0 if self._master is None else self._master.pid or 0,
                socket=os.path.join(self._directory.path, "host.sock"),
            )
        )

    async def stop(self, number: int) -> None:
        """As a signal to `dlrover local`: the first ends the job in good order, a second SIGINT at once."""
        if self._stopped_by is not None:
            if number == signal.SIGINT and self._host is not None:
                self._bulletin.say("interrupted again: all processes are killed at once")
                self._conclude(128 + number)
                self._tasks.append(asyncio.ensure_future(self._host.stop(grace=0.0)))
            return
        self._stopped_by = number
        self._abandon()
        if self._master is None or self._plan is None or not self._master.end_job(128 + number):
            self._conclude(128 + number)
            return
        limit = self._plan.shutdown_timeout + STOP_MARGIN
        asyncio.get_running_loop().call_later(limit, self._conclude, 128 + number)

    # The job.

    async def _live(self, secrets: JobSecrets | None) -> None:
        def tell(error: Exception) -> None:
            log.exception("the host failed job=%s", self._job_uid)
            what = "" if isinstance(error, DLRoverError) else f"{type(error).__name__}: "
            self._conclude(EXIT_MASTER_LOST, f"The job cannot run on {_own_address()}: {what}{error}")

        with contained(tell):  # drivers have to hear of it, and the nodes have to end
            if await self._begin(secrets):
                await self._is_over.wait()
        await self._finish()

    async def _begin(self, secrets: JobSecrets | None) -> bool:
        """False: there is nothing to host."""
        data = self._store.read_plan()
        if data is None:  # the job was over, and its host died in its last moments
            return False
        plan = self._plan = PLAN.decode(data)
        if secrets is None:
            secrets = await find_secrets(self._job_uid, self._store, self._epoch)
            if secrets is None and plan.has_variables:
                self._conclude(
                    EXIT_MASTER_LOST,
                    "The job's host failed while no node was running. The values of --env are lost, because "
                    "only the host and the nodes held them. Start the job again.",
                )
                return True
        self._secrets = secrets if secrets is not None and secrets.token else JobSecrets(token=os.urandom(24).hex())
        if secrets is not None:
            self._secrets = msgspec.structs.replace(self._secrets, environ=secrets.environ)
        environment = read_environment(os.environ)
        self._directory = directory = NodeDirectory(user_root(environment), plan.job_name, new_launch())
        self._files = ActorDirectory(f"h-{self._job_uid}", is_shared=True)
        self._port = take_master_port(_own_address(), environment.host_ports)
        self._address = Address(_own_address(), self._port.port)
        await self._open(plan, directory)
        self._is_serving.set()
        return True

    async def _open(self, plan: RayJobPlan, directory: NodeDirectory) -> None:
        config = HostConfig(directory=directory.path, program=(), capacity=plan.capacity, grace=plan.grace)
        self._starter = starter = RayStarter(
            plan.nodes,
            host_epoch=self._epoch,
            secrets=self._secrets,
            store=self._store,
            on_line=self._bulletin.line,
            on_fatal=self._on_fatal,
            on_fenced=self._vanish,
            actor_class=self.node_class,
        )
        self._host = host = NodeHost(config, starter, on_change=self._bulletin.change)
        self._bulletin.hold, self._bulletin.release = host.hold_output, host.release_output
        starter.master_address = str(self._address)
        host.restore(self._job_uid, self._store.read_ledger(), await starter.find())
        await host.start()
        self._tasks.append(asyncio.ensure_future(starter.watch_drains()))
        if plan.master is None:
            return
        directory.record(str(self._address), plan.tls)
        self._master = HostedMaster(
            Programs().master,
            {name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            directory=directory,
            log_file=os.path.join(directory.path, "master.log"),
            master_grace=plan.master_grace,
            adopt=_adopt,
            say=self._bulletin.say,
            on_end=self._on_end,
            on_lost=self._conclude,
        )
        self._master.start(self._master_config(plan, plan.master, directory, config.socket))
        self._bulletin.address = str(self._address)
        if self._epoch > 1:
            self._bulletin.say(f"the job's host was started again on {_own_address()}; workers keep training")
            await starter.move_master(str(self._address))

    def _master_config(
        self, plan: RayJobPlan, template: MasterConfig, directory: NodeDirectory, host_socket: str
    ) -> MasterConfig:
        assert self._address is not None
        return msgspec.structs.replace(
            template,
            host=self._address.host,
            port=self._address.port,
            token_file=directory.write("token", self._secrets.token.encode()),
            journal=self._journal(plan),
            platform="local",
            platform_options={
                "socket": host_socket,
                "own_addresses": True,
                "can_limit_memory": MemoryLimits.available(),
                "can_cordon": True,
            },
            job_uid=self._job_uid,
            roles_file=os.path.join(directory.path, self.roles_file) if self.roles_file else "",
        )

    def _journal(self, plan: RayJobPlan) -> str:
        """
        Of the last host, if it was on this machine or on a shared directory. One that another host has overtaken is worse than none.
        """
        if plan.journal:
            os.makedirs(plan.journal, exist_ok=True)
            return os.path.join(plan.journal, f"{plan.job_name}-{self._job_uid}.sqlite")
        assert self._files is not None
        mark = self._files.read(JOURNAL_MARK)
        if not mark or mark != self._store.last_journal():
            self._files.empty()
            mark = os.urandom(8).hex()
            self._files.write(JOURNAL_MARK, mark)
            self._store.write_journal(mark)
        return os.path.join(self._files.path, "journal.sqlite")

    # The end.

    def _on_end(self, end: JobEnd) -> None:
        assert self._plan is not None
        if not self._is_over.is_set():
            self._end = end
            is_of_worker = self._plan.is_exit_code_of_worker
            self._conclude(exit_code_of(end, is_of_worker=is_of_worker, stopped_by=self._stopped_by))

    def _on_fatal(self, sentence: str) -> None:
        self._conclude(EXIT_USAGE, sentence)

    def _conclude(self, exit_code: int, why: str = "") -> None:
        if not self._is_over.is_set():
            self._exit_code, self._why = exit_code, why
            self._is_over.set()

    def _abandon(self) -> None:
        """Nothing began yet, and nothing will."""
        if not self._tasks:
            data = self._store.read_plan()
            self._plan = None if data is None else PLAN.decode(data)
            self._why = "The program that submitted the job ended before the job began. Submit it again."
            self._tasks.append(asyncio.ensure_future(self._finish()))

    async def _finish(self) -> None:
        import ray

        if self._host is not None:
            if self._end is not None:
                await self._host.wait(NODE_FAREWELL)
            await self._host.stop(is_urgent=self._stopped_by is not None)
        if self._master is not None and (pid := self._master.terminate()) is not None:
            await _wait_child(pid, MASTER_TIMEOUT)
        if self._host is not None:
            await self._host.close()
        report = f"dlrover ray: {self._why}\n" if self._why else ""
        if self._plan is not None and self._end is not None and self._end.exit_code and self._exit_code:
            report = failure_report(self._plan.job_name, result_of(self._end))
        for left in (self._port.close if self._port else None, self._directory and self._directory.remove):
            if left:
                left()
        if self._files is not None:
            self._files.remove()
        self._bulletin.close(JobOver(self._exit_code, report))
        if self._plan is not None:
            registry = Registry()
            if not await self._bulletin.delivered(DELIVERY):
                registry.leave_result(
                    self._plan.job_name, JobResult(exit_code=self._exit_code, report=report, ended_at=_wall_clock())
                )
            registry.remove(self._plan.job_name)
        self._store.clear()
        for task in self._tasks[1:]:
            task.cancel()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _vanish(self) -> None:
        """The raylet above is gone, or another host has taken over: nothing of this one may act any more."""
        if self._master is not None and self._master.pid is not None:
            send(self._master.pid, signal.SIGKILL)
        os._exit(1)


def _adopt(pid: int, on_exit: Callable[[int], None]) -> None:
    """SIGCHLD is the main thread's, and that one is Ray's."""
    loop = asyncio.get_running_loop()
    descriptor = os.pidfd_open(pid)

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        on_exit(status)

    loop.add_reader(descriptor, ended)


async def _wait_child(pid: int, timeout: float) -> None:
    await wait_gone([pid], timeout)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    await wait_gone([pid], MASTER_TIMEOUT)


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _wall_clock() -> float:
    import time

    return time.time()


def make_host(ray: Any, plan: RayJobPlan, *, namespace: str, host_class: type[RayHost] = RayHost) -> Any:
    """The actor, which waits for `begin`. It goes to the head's machine unless the user chose another: the cluster ends with that one anyway."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    machine = plan.host_machine or next(
        (node["NodeID"] for node in ray.nodes() if node["Alive"] and _is_head(node)), ""
    )
    strategy: Any = NodeAffinitySchedulingStrategy(machine, soft=True) if machine else "DEFAULT"
    return (
        ray.remote(host_class)
        .options(
            name="host",
            namespace=namespace,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            memory=HOST_MEMORY,
            scheduling_strategy=strategy,
        )
        .remote(plan.job_uid)
    )


def start_host(ray: Any, plan: RayJobPlan, secrets: JobSecrets, *, namespace: str) -> Any:
    """The actor, told to begin."""
    actor = make_host(ray, plan, namespace=namespace)
    ray.get(actor.begin.remote(pack(secrets)))
    return actor


def _is_head(node: dict[str, Any]) -> bool:
    return "node:__internal_head__" in node["Resources"]
