"""
The conductor as an actor: detached, without resources, started again by Ray where it dies. Nothing of the job depends on one life of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import Any

import msgspec

from dlrover.cli.ray.bulletin import Bulletin
from dlrover.cli.ray.messages import HostAccount, JobOver
from dlrover.cli.ray.messages import pack as pack_news
from dlrover.core.machine_journal import JournalCorrupt
from dlrover.platforms.ray.access import namespace_of
from dlrover.platforms.ray.raylet import on_raylet_end
from dlrover.platforms.ray.store import ClusterKeyValues, JobResult, JobStore, Registry
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.identity import Micros
from dlrover.protocol.messages.roles import REPEAT
from dlrover.unified.conductor import Conductor
from dlrover.unified.core.machine import EXIT_FAILED, EXIT_NO_ROOM
from dlrover.unified.core.messages import BeginEnsemble, FinishEnsemble, StageOfJob
from dlrover.unified.extension import load_extension
from dlrover.unified.plan import PLAN, EnsemblePlan
from dlrover.unified.shell.actor_wire import start
from dlrover.unified.shell.elastic_role import plan_key
from dlrover.unified.shell.messages import EnsembleAccount, pack
from dlrover.unified.shell.ray_cluster import RayCluster
from dlrover.unified.shell.roles_report import roles_report, states
from dlrover.unified.shell.told_events import CONTROLLER, ControllerEvents, ToldEvents
from dlrover.unified.store import ConductorFenced, EnsembleJournal

log = logging.getLogger(__name__)

DELIVERY = 10.0
"""Seconds for a driver that is there to take the result."""
PID_TIMEOUT = 2.0
EXIT_REFUSED = 2


class ConductorActor:
    """Made with the id of the job alone: the plan is in the store."""

    def __init__(self, job_uid: str) -> None:
        self._job_uid = job_uid
        self._store = ClusterKeyValues()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._bulletin = Bulletin(_life_number())
        self._plan: EnsemblePlan | None = None
        self._conductor: Conductor | None = None
        self._cluster: RayCluster | None = None
        self._epoch = 0
        self._has_begun = asyncio.Event()
        self._is_over = asyncio.Event()
        on_raylet_end(lambda: os._exit(1))
        start(self._live(), self._tasks)

    # What drivers ask for.

    async def news(self, follower: str, host_epoch: int, after: int, wait: float) -> bytes:
        return pack_news(await self._bulletin.news(follower, host_epoch, after, wait))

    async def taken(self, follower: str) -> None:
        self._bulletin.taken(follower)

    async def describe(self) -> bytes:
        """As a host describes its job, for commands that know both kinds."""
        await self._has_begun.wait()
        assert self._conductor is not None
        status = self._conductor.status()
        roles = [f"{role.name} {states(role)}" for role in status.roles]
        return pack_news(
            HostAccount(
                job_name=status.name,
                address="",
                token="",
                tls=None,
                host="",
                host_epoch=self._epoch,
                summary=f"{status.stage}: {'; '.join(roles)}. {status.verdict}",
                pid=os.getpid(),
                master_pid=0,
                socket="",
            )
        )

    async def account(self) -> bytes:
        """Once it conducts: `EnsembleAccount`."""
        await self._has_begun.wait()
        assert self._conductor is not None
        assert self._cluster is not None
        elastic = self._cluster.elastic_roles()
        pids = await self._pids(self._cluster.actors())
        for name, role in elastic.items():
            account = await role.account()
            if account is not None:
                pids[name] = account.pid
        return pack(
            EnsembleAccount(
                status=self._conductor.status(),
                pid=os.getpid(),
                epoch=self._epoch,
                pids=pids,
                hosts={name: role.namespace for name, role in elastic.items()},
            )
        )

    async def roles(self, known: bytes = b"") -> bytes:
        """`RolesReport` as JSON, for commands: one that differs from `known`, or the same after a while."""
        await self._has_begun.wait()
        assert self._conductor is not None
        assert self._plan is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPEAT):
                while msgspec.json.encode(roles_report(self._conductor.status(), self._plan)) == known:
                    await self._conductor.next_decision()
        return msgspec.json.encode(roles_report(self._conductor.status(), self._plan))

    async def stop(self, number: int) -> None:
        """As a signal to the job."""
        await self.end("stopped by a user", 128 + number)

    async def end(self, reason: str, exit_code: int) -> bool:
        """False: the job ends already."""
        await self._has_begun.wait()
        assert self._conductor is not None
        return self._conductor.stop(reason, exit_code)

    async def restart(self, reason: str) -> bool:
        """Every instance anew. False: the job does not run."""
        await self._has_begun.wait()
        assert self._conductor is not None
        return self._conductor.restart(reason)

    async def blame(self, role: str, rank: int, reason: str) -> bool:
        """By a diagnosis of a worker. False: the instance is unknown, or the job ends."""
        await self._has_begun.wait()
        assert self._conductor is not None
        return self._conductor.blame(role, rank, reason)

    # Its life.

    async def _live(self) -> None:
        data = self._store.get(plan_key(self._job_uid))
        if data is None:  # the job was over, and its conductor died in its last moments
            self._vanish()
            return
        plan = self._plan = PLAN.decode(data)
        self._name = plan.spec.name
        extension, refusal = None, ""
        try:
            extension = load_extension()
        except ConfigError as error:
            refusal = str(error)
        if plan.is_of_old:  # the historical interface promises its variables to the controller, too
            os.environ.update({name: value for name, value in plan.environ.items() if name.startswith("DLROVER_")})
        events = ToldEvents(CONTROLLER, is_told=plan.is_of_old)
        self._events = ControllerEvents(events)
        cluster = self._cluster = RayCluster(
            plan, say=self._bulletin.say, on_line=self._bulletin.line, extension=extension, events=events
        )
        journal = EnsembleJournal(self._store, self._job_uid)
        conductor = self._conductor = Conductor(journal, cluster, _now)
        conductor.on_verdict = self._bulletin.say
        if extension is not None:
            extension.manager = conductor
        tending = start(self._tend(conductor, cluster, refusal), self._tasks)
        showing = start(self._show_roles(plan, conductor, cluster), self._tasks)
        try:
            over = await conductor.conduct(BeginEnsemble(plan.spec))
        except ConductorFenced as error:
            log.warning("%s", error)
            os._exit(1)
        except JournalCorrupt as error:  # the next life would find the same
            tending.cancel()
            showing.cancel()
            # Elastic roles leave the registry when their jobs are removed, which nobody orders now.
            registry = Registry()
            for name in registry.names():
                if name.startswith(f"{self._name}."):
                    registry.remove(name)
            await self._finish(FinishEnsemble(EXIT_FAILED, f"The conductor cannot go on. {error}"))
            return
        except Exception as error:  # the edge of the process: Ray starts the next life, which reads the journal
            log.exception("the conductor failed because of a bug job=%s", self._job_uid)
            self._bulletin.say(f"the conductor failed: {type(error).__name__}: {error}")
            os._exit(1)
        self._has_begun.set()
        tending.cancel()  # it writes to the store, which is cleared now
        showing.cancel()
        self._events.look(conductor.status())
        await self._finish(over)

    async def _tend(self, conductor: Conductor, cluster: RayCluster, refusal: str) -> None:
        """Calls to roles that ended are refused; nothing waits for them. `refusal`: why the job must not run."""
        await conductor.has_begun.wait()
        if refusal:
            conductor.stop(refusal, EXIT_REFUSED)
        self._epoch = conductor.epoch
        self._has_begun.set()
        self._events.begin(conductor.status())
        while True:
            status = conductor.status()
            self._events.look(status)
            if status.stage in (StageOfJob.STOPPING, StageOfJob.STOPPED):
                cluster.close_all(f"the job ends: {status.verdict}")
            for role in status.roles:
                if role.instances and all(each.state == "finished" for each in role.instances):
                    cluster.close_role(role.name, "it has ended")
            await conductor.next_decision()

    async def _show_roles(self, plan: EnsemblePlan, conductor: Conductor, cluster: RayCluster) -> None:
        """On the pages of the elastic roles: what changed, and the same again where a host was away."""
        await self._has_begun.wait()
        while True:
            status = conductor.status()
            report = roles_report(status, plan)
            await asyncio.gather(*(role.show_roles(report) for role in cluster.elastic_roles().values()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPEAT):
                    while conductor.status() == status:
                        await conductor.next_decision()

    async def _finish(self, over: FinishEnsemble) -> None:
        assert self._cluster is not None
        self._cluster.close_all(f"the job is over: {over.reason}")
        report = over.reason if over.exit_code else ""
        if over.exit_code == EXIT_NO_ROOM:
            report += f". {await asyncio.to_thread(self._cluster.room.missing)}"
        self._cluster.room.remove()
        self._bulletin.close(JobOver(over.exit_code, report))
        if not await self._bulletin.delivered(DELIVERY):
            Registry().leave_result(
                self._name, JobResult(exit_code=over.exit_code, report=report, ended_at=time.time())
            )
        remove_actors(self._job_uid)
        for key in self._store.keys(f"{self._job_uid}-"):
            self._store.delete(key)
        JobStore(self._job_uid).clear()
        Registry().remove(self._name)
        self._vanish()

    def _vanish(self) -> None:
        import ray

        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _pids(self, actors: dict[str, Any]) -> dict[str, int]:
        async def one(name: str, actor: Any) -> tuple[str, int]:
            import ray.exceptions

            try:
                async with asyncio.timeout(PID_TIMEOUT):
                    return name, await actor.describe.remote()
            except (ray.exceptions.RayError, TimeoutError):
                return name, 0

        found = await asyncio.gather(*(one(name, actor) for name, actor in actors.items()))
        return {name: pid for name, pid in found if pid}


def _now() -> Micros:
    return Micros(int(time.time() * 1_000_000))


def _life_number() -> int:
    """A follower sees by it that this life counts its news anew."""
    return int.from_bytes(os.urandom(6), "big") + 1


def remove_actors(job_uid: str) -> None:
    """Whatever may be left, but for the conductor itself."""
    import ray

    for each in ray.util.list_named_actors(all_namespaces=True):
        is_ours = each["namespace"] == namespace_of(job_uid) or each["namespace"].startswith(
            f"{namespace_of(job_uid)}-"
        )
        if is_ours and each["name"] != "conductor":
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.kill(ray.get_actor(each["name"], namespace=each["namespace"]), no_restart=True)
