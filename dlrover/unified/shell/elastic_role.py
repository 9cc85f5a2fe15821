"""
A role that is an elastic job of its own, with a host, a master and nodes, as `dlrover ray run` starts it. The conductor sees one instance of it.

How it recovers inside itself is decided by its own master. What reaches the conductor is its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dlrover.cli.ray.driver import SubmittedJob, remove_job
from dlrover.cli.ray.host import RayHost, make_host
from dlrover.cli.ray.messages import HostAccount, HostNews, JobOver, RayJobPlan, Said, ShownLine
from dlrover.cli.ray.messages import pack as pack_host
from dlrover.cli.ray.node import LauncherActor
from dlrover.platforms.ray.access import namespace_of
from dlrover.platforms.ray.messages import JobSecrets, NodeOrder
from dlrover.platforms.ray.starter import NODE_PREFIX
from dlrover.platforms.ray.store import JobStore, Registered, Registry, get
from dlrover.protocol.errors import JobError, Unavailable
from dlrover.protocol.messages.roles import RolesReport
from dlrover.unified.core.messages import InstanceId
from dlrover.unified.plan import PLAN, EnsemblePlan
from dlrover.unified.runtime.relay_frames import SOCKET_VARIABLE, WorkerWelcome
from dlrover.unified.runtime.wire import HEADER
from dlrover.unified.shell.actor_wire import ActorWire, as_ray_part, start
from dlrover.unified.shell.relay import CallRelay
from dlrover.unified.shell.room import JobRoom, group_name

ROLES_FILE = "roles.json"
"""In the runtime directory of the host."""
SHOW_TIMEOUT = 5.0
UID_VARIABLE, ROLE_VARIABLE = "DLROVER_ENSEMBLE_UID", "DLROVER_ENSEMBLE_ROLE"
SOCKET = "calls.sock"
AGAIN = 0.2


class RoleNode(LauncherActor):
    """A node of an elastic role: it also passes its workers' calls on."""

    def __init__(self) -> None:
        super().__init__()
        self._relay: CallRelay | None = None

    async def answer(self, header: bytes, target: tuple[str, int, int], *parts: Any) -> Any:
        """A call to a worker. Raises `Raised` or `CalleeGone`."""
        assert self._relay is not None
        result = await self._relay.answer(HEADER.decode(header), target, parts)
        return result[0] if len(result) == 1 else tuple(as_ray_part(memoryview(part)) for part in result)

    def _environ(self, order: NodeOrder) -> dict[str, str]:
        assert self._directory is not None
        environ = super()._environ(order)
        uid, role = environ[UID_VARIABLE], environ[ROLE_VARIABLE]
        plan = PLAN.decode(get(plan_key(uid)) or b"")
        num_ranks = {name: each.num_ranks for name, each in plan.roles.items()}
        self._relay = CallRelay(
            ActorWire(uid, num_ranks, asyncio.get_running_loop(), silent_roles=plan.silent_roles()),
            WorkerWelcome(
                job=plan.spec.name,
                job_uid=uid,
                role=role,
                num_ranks=num_ranks,
                takes_calls=plan.roles[role].takes_calls,
            ),
            plan.config,
            namespace=namespace_of(order.job_uid),
            actor=f"{NODE_PREFIX}{order.intent.id}",
        )
        path = os.path.join(self._directory.path, SOCKET)
        self._relay.open(path)
        return {**environ, SOCKET_VARIABLE: path}


class RoleHost(RayHost):
    """It also keeps what its master's page shows of the other roles."""

    node_class = RoleNode
    roles_file = ROLES_FILE

    async def show_roles(self, report: bytes) -> None:
        """Nothing, before it serves or after its end: the conductor reports again."""
        if self._directory is not None and os.path.isdir(self._directory.path):
            os.utime(
                self._directory.write(ROLES_FILE, report)
            )  # the page looks at the time, also if nothing has changed


class ElasticRole:
    def __init__(
        self,
        plan: EnsemblePlan,
        instance: InstanceId,
        *,
        on_line: Callable[[str, bytes, bool], None],
        say: Callable[[str], None],
    ) -> None:
        import ray

        template = plan.roles[instance.role].job
        assert template is not None
        self._ray = ray
        self._plan = plan
        self._role = instance.role
        self._template = template
        self.job_uid = f"{plan.job_uid}-{instance.role}-{instance.incarnation}"
        self.job_name = f"{plan.spec.name}.{instance.role}"
        self._job = SubmittedJob(ray, self.job_name, self.job_uid)
        self._on_line = on_line
        self._say = say
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[JobOver] = loop.create_future()
        self._gone: asyncio.Future[str] = loop.create_future()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def namespace(self) -> str:
        return namespace_of(self.job_uid)

    def is_there(self) -> bool:
        try:
            self._ray.get_actor("host", namespace=self.namespace)
        except ValueError:
            return False
        return True

    async def start(self, room: JobRoom) -> None:
        """Its host, which starts the rest."""
        plan = self._own_plan()
        Registry().forget_result(self.job_name)
        known = Registered(job_uid=self.job_uid, submitted_at=time.time())
        if not Registry().add(self.job_name, known):
            Registry().remove(self.job_name)  # of a former life of this role
            Registry().add(self.job_name, known)
        JobStore(self.job_uid).write_plan(msgspec.json.encode(plan))
        make_host(self._ray, plan, namespace=self.namespace, host_class=RoleHost)
        await self.begin()

    async def begin(self) -> None:
        """Nothing, if it has begun."""
        import ray.exceptions

        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it died; `follow` tells what became of it
            host = await asyncio.to_thread(self._ray.get_actor, "host", namespace=self.namespace)
            await host.begin.remote(pack_host(JobSecrets(token=os.urandom(24).hex())))

    def follow(self) -> None:
        """Once."""
        start(self._follow(), self._tasks)

    async def ready(self) -> None:
        """Until its host serves; never returns if that does not happen: `gone` tells."""
        while True:
            if await self.account() is not None:
                return
            await asyncio.sleep(AGAIN)  # Ray starts the host again, and tells nobody

    async def account(self) -> HostAccount | None:
        """None: the host does not answer now."""
        try:
            return await asyncio.to_thread(self._job.account)
        except Unavailable:
            return None

    async def show_roles(self, report: RolesReport) -> None:
        """On the page of its master. A host that is away now hears a later one."""
        import ray.exceptions

        own = msgspec.json.encode(msgspec.structs.replace(report, own_role=self._role))
        with contextlib.suppress(ray.exceptions.RayError, ValueError, TimeoutError):
            host = self._ray.get_actor("host", namespace=self.namespace)
            async with asyncio.timeout(SHOW_TIMEOUT):
                await host.show_roles.remote(own)

    async def over(self) -> JobOver:
        return await asyncio.shield(self._over)

    async def gone(self) -> str:
        return await asyncio.shield(self._gone)

    async def end(self, *, is_kill: bool) -> None:
        if is_kill:
            await asyncio.to_thread(remove_job, self._ray, self.job_name, self.job_uid)
            return
        with contextlib.suppress(Unavailable):
            await asyncio.to_thread(self._job.stop, signal.SIGTERM)

    async def _follow(self) -> None:
        cause = ""
        try:
            over = await self._job.follow(self._show)
            assert over is not None, "it follows until the end"
            self._over.set_result(over)
            await asyncio.to_thread(self._job.await_gone)
        except JobError as error:
            cause = str(error)
        self._gone.set_result(cause)

    def _show(self, news: HostNews) -> None:
        for item in news.items:
            if isinstance(item, ShownLine):
                self._on_line(f"{self._role}/{item.node}", item.line, item.is_error)
            elif isinstance(item, Said):
                self._say(f"{self._role}: {item.text}")

    def _own_plan(self) -> RayJobPlan:
        plan, template = self._plan, self._template
        places = plan.layout.places.get(self._role, ())
        nodes = msgspec.structs.replace(
            template.nodes,
            job_uid=self.job_uid,
            job_name=self.job_name,
            environ={**template.nodes.environ, **self._environ()},
            placement_group=group_name(plan) if places else "",
            bundles=places,
            runtime_env=dict(plan.runtime_env),
        )
        return msgspec.structs.replace(template, job_uid=self.job_uid, job_name=self.job_name, nodes=nodes)

    def _environ(self) -> Mapping[str, str]:
        is_old = self._plan.roles[self._role].is_named_as_of_old
        return {
            **({"JOB": self._plan.spec.name, "ROLE": self._role} if is_old else {}),
            **self._plan.environ,
            **self._plan.roles[self._role].environ,
            "JOB_UID": self.job_uid,
            UID_VARIABLE: self._plan.job_uid,
            ROLE_VARIABLE: self._role,
        }


def plan_key(job_uid: str) -> str:
    return f"{job_uid}/plan"
