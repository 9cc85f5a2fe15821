"""
A Ray cluster as the conductor knows it: makes, runs, watches and ends the instances of one job.

Every call may come from a conductor that took over, so each finds what is there by its name first. A mark in the store, written before an instance is
made, tells one that died while no conductor was there from one that is still to come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from dlrover.cli.ray.messages import JobOver
from dlrover.platforms.ray.access import missing_module, namespace_of, say_missing
from dlrover.platforms.ray.store import ClusterKeyValues
from dlrover.unified.conductor import InstanceBroken
from dlrover.unified.core.messages import InstanceId
from dlrover.unified.entry import EntryPoint, EntryPointKind
from dlrover.unified.extension import ManagerExtension, NodeInfo
from dlrover.unified.layout import CPU, GPU, MEMORY
from dlrover.unified.plan import EnsemblePlan, RoleKind
from dlrover.unified.shell.actor_wire import start
from dlrover.unified.shell.book import KeyBook
from dlrover.unified.shell.elastic_role import ElasticRole
from dlrover.unified.shell.instance_actor import InstanceActor
from dlrover.unified.shell.machine_replacement import LivingMachine, MachineReplacement
from dlrover.unified.shell.messages import END, InstanceOrder, pack
from dlrover.unified.shell.printed_lines import LINES
from dlrover.unified.shell.room import JobRoom
from dlrover.unified.shell.told_events import ToldEvents

log = logging.getLogger(__name__)

MAX_CONCURRENCY = 1000
"""Calls that wait in one actor at a time; most of them wait for its end."""
FOREVER = asyncio.Event


class RayCluster:
    def __init__(
        self,
        plan: EnsemblePlan,
        *,
        say: Callable[[str], None],
        on_line: Callable[[str, bytes, bool], None],
        extension: ManagerExtension | None,
        events: ToldEvents,
    ) -> None:
        self._plan = plan
        self._say = say
        self._on_line = on_line
        self._events = events
        self._namespace = namespace_of(plan.job_uid)
        self._store = ClusterKeyValues()
        self._book = KeyBook(self._store, plan.job_uid)
        self.room = JobRoom(plan, say)
        self._replacement = MachineReplacement(extension, living_machines, self._store, plan.job_uid, say=say)
        self._made: dict[InstanceId, asyncio.Future[Any]] = {}
        """Actors, and hosts of elastic roles; asked for by this conductor or found."""
        self._ended: set[InstanceId] = set()
        self._lost: set[InstanceId] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def place(self) -> None:
        with self._events.span("#creating_placement_group"):
            await self.room.place()

    async def create(self, instance: InstanceId) -> None:
        made = self._coming(instance)
        role = self._plan.roles[instance.role]
        if instance in self._ended or self._is_marked("ended", instance):
            await FOREVER().wait()
        self._book.reopen(instance.role)
        if role.kind is RoleKind.ELASTIC:
            elastic = await self._elastic(instance, must_make=True)
            assert elastic is not None
            _settle(made, elastic)
            await elastic.ready()
            return
        actor = self._find(instance)
        if actor is None:
            self._mark("made", instance)
            actor = self._make_actor(instance)
        self._settle_actor(instance, actor)
        await self._call(instance, actor, "begin", pack(self._order(instance)))

    async def run(self, instance: InstanceId) -> None:
        found = await self._await_made(instance)
        if isinstance(found, ElasticRole):
            end = await found.over()
            if end.exit_code:
                raise InstanceBroken(say_end(end), f"exit {end.exit_code}")
            return
        if found is None:
            await FOREVER().wait()
        await self._call(instance, found, "run")

    async def gone(self, instance: InstanceId) -> str:
        cause = await self._gone(instance)
        self._lost.add(instance)
        return cause

    async def _gone(self, instance: InstanceId) -> str:
        import ray.exceptions

        found = await self._await_made(instance)
        if found is None:
            return "it was lost while the job had no conductor"
        if isinstance(found, ElasticRole):
            return await found.gone()
        while True:
            try:
                await found.wait.remote()
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(UNAVAILABLE)  # Ray reaches it no more, and does not know yet whether it lives
            except ray.exceptions.RayError as error:
                return _cause(error)

    async def end(self, instance: InstanceId, *, is_kill: bool) -> None:
        import ray.exceptions

        self._ended.add(instance)
        self._mark("ended", instance)
        known = self._made.get(instance)
        if known is not None and known.done():
            found = known.result()
        elif self._plan.roles[instance.role].kind is RoleKind.ELASTIC:
            found = await self._elastic(instance, must_make=False)
        else:
            found = self._find(instance)
        if found is None:
            if known is not None:
                _settle(known, None)
            return
        if isinstance(found, ElasticRole):
            await found.end(is_kill=is_kill)
            return
        if is_kill or not await self._is_begun(found):
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(found, no_restart=True)
            return
        with contextlib.suppress(ray.exceptions.RayError):  # it ends before it answers
            await found.end.remote()

    async def replace_machine(self, instance: InstanceId) -> bool:
        machine = self._store.get(self._machine_key(instance))
        if machine is None:
            return False
        return await self._replacement.replace(machine.decode(), self._plan.roles[instance.role].machine_group)

    def close_role(self, role: str, why: str) -> None:
        """Calls to it are refused from now on, and do not wait."""
        self._book.close(role, why)

    def close_all(self, why: str) -> None:
        self._book.close_all(why)

    def actors(self) -> dict[str, Any]:
        """Of simple roles and streams, by name."""
        return {
            _name(instance): made.result()
            for instance, made in self._made.items()
            if instance not in self._lost and made.done() and not isinstance(made.result(), ElasticRole | None)
        }

    def elastic_roles(self) -> dict[str, ElasticRole]:
        return {
            instance.role: made.result()
            for instance, made in sorted(self._made.items())
            if instance not in self._lost and made.done() and isinstance(made.result(), ElasticRole)
        }

    # Instances.

    def _coming(self, instance: InstanceId) -> asyncio.Future[Any]:
        if instance not in self._made:
            self._made[instance] = asyncio.get_running_loop().create_future()
        return self._made[instance]

    async def _await_made(self, instance: InstanceId) -> Any:
        """None: it is not there, and never comes."""
        if instance in self._made:
            return await asyncio.shield(self._made[instance])
        made = self._coming(instance)
        if self._plan.roles[instance.role].kind is RoleKind.ELASTIC:
            found = await self._elastic(instance, must_make=False)
        else:
            found = self._find(instance)
        if found is None or isinstance(found, ElasticRole):
            _settle(made, found)
        else:
            self._settle_actor(instance, found)
        return made.result()

    def _settle_actor(self, instance: InstanceId, actor: Any) -> None:
        made = self._coming(instance)
        if not made.done():
            made.set_result(actor)
            start(self._print(instance, actor), self._tasks)

    async def _print(self, instance: InstanceId, actor: Any) -> None:
        """What its code prints. Long questions, one at a time."""
        import ray.exceptions

        with contextlib.suppress(ray.exceptions.RayError):  # it is gone: `gone` tells
            while True:
                for line, is_error in LINES.decode(await actor.output.remote()):
                    self._on_line(str(instance), line, is_error)

    async def _elastic(self, instance: InstanceId, *, must_make: bool) -> ElasticRole | None:
        role = ElasticRole(self._plan, instance, on_line=self._on_line, say=self._say)
        if role.is_there() or (self._is_marked("made", instance) and not must_make):
            if must_make:
                await role.begin()  # the last conductor may have died before it did
            role.follow()
            return role
        if not must_make:
            return None
        self._mark("made", instance)
        await role.start(self.room)
        role.follow()
        return role

    def _find(self, instance: InstanceId) -> Any:
        import ray

        try:
            return ray.get_actor(_name(instance), namespace=self._namespace)
        except ValueError:
            return None

    def _make_actor(self, instance: InstanceId) -> Any:
        import ray

        role = self._plan.roles[instance.role]
        demand = self._plan.layout.demands.get(instance.role, {})
        options: dict[str, Any] = {
            "name": _name(instance),
            "namespace": self._namespace,
            "lifetime": "detached",
            "max_restarts": 0,
            "max_concurrency": MAX_CONCURRENCY,
            "num_cpus": demand.get(CPU, 0.0),
            "num_gpus": demand.get(GPU, 0.0),
            "resources": {name: amount for name, amount in demand.items() if name not in (CPU, GPU, MEMORY)},
            "scheduling_strategy": self.room.strategy(instance.role, instance.rank),
        }
        if demand.get(MEMORY):
            options["memory"] = demand[MEMORY]
        runtime_env = dict(self._plan.runtime_env)
        no_set = {name: value for name, value in role.environ.items() if name.startswith("RAY_")}
        if no_set:  # Ray reads these before our own code runs
            runtime_env["env_vars"] = no_set
        if runtime_env:
            options["runtime_env"] = runtime_env
        return ray.remote(InstanceActor).options(**options).remote()

    def _order(self, instance: InstanceId) -> InstanceOrder:
        plan = self._plan
        role = plan.roles[instance.role]
        return InstanceOrder(
            job=plan.spec.name,
            job_uid=plan.job_uid,
            role=instance.role,
            rank=instance.rank,
            incarnation=instance.incarnation,
            actor=_name(instance),
            entry=role.entry or EntryPoint(EntryPointKind.NAME, ""),
            environ={**plan.environ, **role.environ},
            num_ranks={name: each.num_ranks for name, each in plan.roles.items()},
            silent_roles=plan.silent_roles(),
            local_world_size=role.local_world_size,
            config=plan.config,
            batch=role.batch,
            lease=role.lease,
            is_driver=plan.spec.role(instance.role).is_driver,
            process_group=role.process_group,
            is_named_as_of_old=role.is_named_as_of_old,
            is_device_by_rank=role.is_device_by_rank,
        )

    async def _call(self, instance: InstanceId, actor: Any, method: str, *args: bytes) -> None:
        """Until it has answered. Raises `InstanceBroken`; never returns for one that is gone, unless it was never there."""
        import ray.exceptions

        while True:
            try:
                end = END.decode(await getattr(actor, method).remote(*args))
                break
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(UNAVAILABLE)
            except ray.exceptions.RuntimeEnvSetupError as error:
                raise InstanceBroken(_cause(error), "runtime_env") from error
            except ray.exceptions.RayActorError as error:
                if module := missing_module(error):
                    raise InstanceBroken(say_missing(module, "a machine of the cluster"), module) from error
                await FOREVER().wait()  # `gone` tells
            except ray.exceptions.RayTaskError as error:
                raise InstanceBroken(_cause(error), type(error.cause).__name__) from error
        if end.machine:
            self._store.put(self._machine_key(instance), end.machine.encode())
        if end.cause:
            raise InstanceBroken(end.cause, end.traceback)

    async def _is_begun(self, actor: Any) -> bool:
        """Whether it answers: an actor that waits for room is ended without a call."""
        import ray.exceptions

        try:
            async with asyncio.timeout(BEGUN_TIMEOUT):
                await actor.describe.remote()
        except (ray.exceptions.RayError, TimeoutError):
            return False
        return True

    def _machine_key(self, instance: InstanceId) -> str:
        """On which the newest life of it is."""
        return f"{self._plan.job_uid}/machine/{instance.role}-{instance.rank}"

    def _mark(self, what: str, instance: InstanceId) -> None:
        self._store.put(f"{self._plan.job_uid}/{what}/{_name(instance)}", b"1")

    def _is_marked(self, what: str, instance: InstanceId) -> bool:
        return self._store.get(f"{self._plan.job_uid}/{what}/{_name(instance)}") is not None


def living_machines() -> dict[str, LivingMachine]:
    """By Ray's id."""
    import ray

    return {
        each["NodeID"]: LivingMachine(
            node=NodeInfo(
                id=each["NodeID"], host=each.get("NodeManagerHostname", ""), ip=each.get("NodeManagerAddress", "")
            ),
            labels=each.get("Labels") or {},
        )
        for each in ray.nodes()
        if each["Alive"]
    }


BEGUN_TIMEOUT = 2.0
CAUSE = "cause"
"""Begins a line of the report of a failed job."""
UNAVAILABLE = 0.2
"""Seconds before an instance that Ray does not reach is asked again."""


def _name(instance: InstanceId) -> str:
    return f"{instance.role}-{instance.rank}.{instance.incarnation}"


def _settle(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def say_end(end: JobOver) -> str:
    """Of an elastic role, in one line: its exit code, and the cause of the first failure that its report names; else the last line of that."""
    lines = [line.strip() for line in end.report.splitlines() if line.strip(" =-")]
    causes = [line.removeprefix(CAUSE).strip() for line in lines if line.startswith(f"{CAUSE} ")]
    words = f"first failure: {causes[0]}" if causes else lines[-1] if lines else ""
    return f"exit code {end.exit_code}" + (f": {words}" if words else "")


def _cause(error: Exception) -> str:
    """Ray's own words, without its tables."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, Exception) else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines)[:300] or type(error).__name__
