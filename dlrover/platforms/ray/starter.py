"""
Nodes as actors of a Ray cluster: the second thing that can start a node for a node host.

A node that dies is noticed by the call that waits for it: that fails within milliseconds of the end of the actor's process. Ray's own health
check is never waited for, and "dead" is never taken for "gone": the actor ends its own processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from dlrover.host.edges import contained
from dlrover.platforms.base import NodeRoom, check_size
from dlrover.platforms.hosted.starter import FoundNode, HostLedger, NodeEnding, OnWaiting, ending_of, short_name
from dlrover.platforms.ray import cluster
from dlrover.platforms.ray.access import missing_module, namespace_of, say_missing
from dlrover.platforms.ray.messages import END, OUTPUT, ActorEnd, JobSecrets, NodeOrder, pack
from dlrover.platforms.ray.node_actor import NodeActor
from dlrover.platforms.ray.placement import (
    CPU,
    GPU,
    MEMORY,
    ClusterMachine,
    MachineChoice,
    Placement,
    choose,
    demand_of,
    room_for,
)
from dlrover.platforms.ray.store import JobStore, Tombstone
from dlrover.protocol.messages.fleet import LaunchNode, Resource
from dlrover.protocol.messages.identity import PlatformId

log = logging.getLogger(__name__)

NODE_PREFIX = "node-"
LOOK_AGAIN = 1.0
"""Seconds between two looks at the cluster while a node waits for room, and at machines that are drained."""
MISPLACED = 60.0
"""
Seconds after which a node that waits on the machine of our choice is put elsewhere, if there is room. Twice as long each time: an actor on a
busy machine may take long to start, and Ray does not tell that from waiting.
"""
LAST_LINES = 5.0
"""Seconds for the rest of a node's output, after its end."""
EXIT_NO_START = 126
EXIT_LOST = 128 + signal.SIGKILL
OnLine = Callable[[str, bytes, bool], None]
OnFatal = Callable[[str], None]
"""A sentence: no machine will ever run a node of this job."""


class RayNodes(Struct, frozen=True, kw_only=True):
    """What all nodes of a job have in common. Kept in the cluster's store, so without secrets."""

    job_uid: str
    job_name: str
    argv: tuple[str, ...]
    script: str = ""
    environ: dict[str, str] = {}
    resources: dict[str, float] = {}
    """Beyond the size of a node: Ray's custom resources."""
    placement: Placement = Placement.SPREAD
    runtime_env: dict[str, object] = {}
    orphan_grace: float = 3.0
    placement_group: str = ""
    """Name of the group that holds room for the first nodes of this job: it is a role of a job with several."""
    bundles: tuple[int, ...] = ()
    """Of the group, by rank of the node. Nodes beyond it are placed as others."""


class RayNode:
    """One node, from its place in the queue to its end. Its life is a task of the host's event loop."""

    def __init__(self, starter: RayStarter, intent: LaunchNode, *, on_waiting: OnWaiting, actor: Any = None) -> None:
        self._starter = starter
        self.intent = intent
        self._on_waiting = on_waiting
        loop = asyncio.get_running_loop()
        self.exit_code: asyncio.Future[int] = loop.create_future()
        self.running: asyncio.Future[str] = loop.create_future()
        self.machine = ""
        """Ray's id of the machine that it is on or goes to."""
        self.actor = actor
        self._end: ActorEnd | None = None
        self._saving_until = 0.0
        self._is_wanted = True
        self._patience = MISPLACED
        self._may_print = asyncio.Event()
        self._may_print.set()
        self._printing: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Future[Any]] = set()
        self.life = asyncio.ensure_future(self._live())

    @classmethod
    def ended(cls, starter: RayStarter, stone: Tombstone) -> RayNode:
        """One that ended under a former host."""
        node = cls(starter, stone.intent, on_waiting=lambda why: None)
        node.life.cancel()
        node.running.set_result(stone.host)
        node._finish(ActorEnd(exit_code=stone.exit_code, is_out_of_memory=stone.is_out_of_memory, cause=stone.cause))
        return node

    def signal(self, number: int) -> None:
        if self.exit_code.done():
            return
        if not self.running.done():
            self._give_up()
            return
        self._call(self.actor.signal.remote(self._starter.host_epoch, number))

    async def wait(self, timeout: float) -> None:
        await asyncio.wait([self.exit_code], timeout=timeout)

    async def kill(self) -> None:
        if self.exit_code.done():
            return
        if not self.running.done():
            self._give_up()
            return
        self._call(self.actor.kill.remote(self._starter.host_epoch))
        await self.wait(KILL_TIMEOUT)
        if not self.exit_code.done():
            self._starter.kill_actor(self.actor)
            await self.wait(KILL_TIMEOUT)

    async def sweep(self, grace: float) -> None:
        """The actor has swept its machine before it told of the end, or the kernel and the actor's own watch do. Its place is free now."""
        if self._printing is not None:
            await asyncio.wait([self._printing], timeout=LAST_LINES)
            self._printing.cancel()
        self._starter.over(self)

    def ending(self) -> NodeEnding:
        assert self._end is not None, "ending() before sweep()"
        end = self._end
        return ending_of(end.exit_code, is_out_of_memory=end.is_out_of_memory, cause=end.cause)

    def tombstone(self) -> Tombstone:
        assert self._end is not None
        host = self.running.result() if self.running.done() and not self.running.cancelled() else ""
        return Tombstone(
            intent=self.intent,
            exit_code=self._end.exit_code,
            is_out_of_memory=self._end.is_out_of_memory,
            cause=self._end.cause,
            host=host,
        )

    def saving_until(self) -> float:
        return self._saving_until

    def hold_output(self) -> None:
        self._may_print.clear()

    def release_output(self) -> None:
        self._may_print.set()

    async def tell_master(self, address: str) -> None:
        if self.running.done() and not self.exit_code.done():
            await _quietly(self.actor.set_master.remote(self._starter.host_epoch, address))

    def preempt(self) -> None:
        if self.running.done() and not self.exit_code.done():
            self._call(self.actor.preempt.remote(self._starter.host_epoch))

    # Its life.

    async def _live(self) -> None:
        import ray.exceptions

        def tell(error: Exception) -> None:
            log.exception("node failed node=%s", self.intent.name)
            self._finish(ActorEnd(exit_code=EXIT_NO_START, cause=f"{type(error).__name__}: {error}"))

        with contained(tell):  # whatever it is, the master has to hear of this node
            try:
                if self.actor is None:
                    await self._find_place()
                else:
                    await self._await_start(
                        self.actor.run.remote(pack(self._starter.order(self.intent))), may_move=False
                    )
                self._printing = asyncio.ensure_future(self._print())
                self._fence = asyncio.ensure_future(self._watch_fence())
                self._finish(END.decode(await self.actor.wait.remote()))
            except _GivenUp:
                self._finish(ActorEnd(exit_code=128 + signal.SIGTERM))
            except ray.exceptions.RayError as error:
                await self._on_lost(error)

    async def _find_place(self) -> None:
        """Until the actor runs. It is in Ray's queue meanwhile, where the autoscaler sees what it asks for."""
        while True:
            choice = await self._starter.choose(self)
            self._on_waiting(choice.sentence)
            if not choice.machine and not choice.may_queue:
                await self._pause()
                continue
            self.machine = choice.machine
            self.actor = self._starter.create(self.intent, choice)
            started = self.actor.run.remote(pack(self._starter.order(self.intent)))
            if await self._await_start(started, may_move=bool(choice.machine)):
                return
            self._starter.kill_actor(self.actor)
            self.actor = None
            await self._starter.name_is_free(self.intent)

    async def _await_start(self, started: Any, *, may_move: bool) -> bool:
        """False: it waits on a machine that was full after all, and another has room."""
        running = asyncio.ensure_future(_result(started))
        num_looks = 0
        try:
            while True:
                await asyncio.wait([running], timeout=LOOK_AGAIN)
                if not self._is_wanted:
                    raise _GivenUp
                if running.done():
                    self.machine = running.result()
                    if not self.running.done():
                        self.running.set_result(await self._starter.host_of(self.machine))
                    if self._starter.master_address:  # it may have moved while the order was on its way
                        await self.tell_master(self._starter.master_address)
                    return True
                num_looks += 1
                choice = await self._starter.choose(self)
                has_room = bool(choice.machine) and choice.machine != self.machine
                if may_move and has_room and num_looks * LOOK_AGAIN >= self._patience:
                    self._patience *= 2
                    return False
                if not choice.machine:
                    self._on_waiting(choice.sentence)
        finally:
            running.cancel()

    async def _pause(self) -> None:
        await asyncio.sleep(LOOK_AGAIN)
        if not self._is_wanted:
            raise _GivenUp

    async def _print(self) -> None:
        """Long questions, one at a time; none while the display of the lines cannot keep up."""
        name = short_name(self.intent)
        loop = asyncio.get_running_loop()
        import ray.exceptions

        with contextlib.suppress(ray.exceptions.RayError):  # the node is gone: `_live` tells how
            while True:
                await self._may_print.wait()
                output = OUTPUT.decode(await self.actor.output.remote())
                self._saving_until = loop.time() + output.saving_for if output.saving_for else 0.0
                for line, is_error in output.lines:
                    self._starter.on_line(name, line, is_error)
                if output.is_over:
                    return

    async def _watch_fence(self) -> None:
        """A newer host of this job has spoken to the node: Ray gave ours up, and was wrong."""
        import ray.exceptions

        with contextlib.suppress(ray.exceptions.RayError):
            await self.actor.fenced.remote(self._starter.host_epoch)
            self._starter.on_fenced()

    def _give_up(self) -> None:
        """Never a call: it would wait for the actor to be created."""
        self._is_wanted = False
        if self.actor is not None:
            self._starter.kill_actor(self.actor)

    async def _on_lost(self, error: Exception) -> None:
        if not self._is_wanted:
            self._finish(ActorEnd(exit_code=128 + signal.SIGTERM))
            return
        text = _cause(error)
        is_out_of_memory = "low on memory" in text  # by Ray's memory monitor, perhaps before the node's first line
        if self.running.done() or is_out_of_memory:
            self._finish(ActorEnd(exit_code=EXIT_LOST, is_out_of_memory=is_out_of_memory, cause=text))
            return
        if module := missing_module(error):
            host = await self._starter.host_of(self.machine)
            text = say_missing(module, f"the machine {host}" if host else "a machine of the cluster")
        self._finish(ActorEnd(exit_code=EXIT_NO_START, cause=text))
        if _is_lasting(error):
            self._starter.on_fatal(f"{self.intent.name} cannot be started: {text}")

    def _finish(self, end: ActorEnd) -> None:
        self._end = end
        self._saving_until = 0.0
        if not self.running.done():
            self.running.cancel()
        if not self.exit_code.done():
            self.exit_code.set_result(end.exit_code)

    def _call(self, call: Any) -> None:
        """Its failure must be noticed: `_live` does by its own call."""
        future = asyncio.ensure_future(_quietly(call))
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)


class RayStarter:
    def __init__(
        self,
        nodes: RayNodes,
        *,
        host_epoch: int,
        secrets: JobSecrets,
        store: JobStore,
        on_line: OnLine = lambda name, line, is_error: None,
        on_fatal: OnFatal = lambda sentence: None,
        on_fenced: Callable[[], None] = lambda: None,
        actor_class: type[NodeActor] = NodeActor,
    ) -> None:
        self._nodes = nodes
        self.host_epoch = host_epoch
        self._secrets = secrets
        self._store = store
        self.on_line = on_line
        self.on_fatal = on_fatal
        self.on_fenced = on_fenced
        self._actor_class = actor_class
        self.master_address = ""
        self._cordoned: dict[str, None] = {}
        """Machines that the job wants no node on any more."""
        self._living: dict[PlatformId, RayNode] = {}

    def check(self, intent: LaunchNode, job_number: int) -> None:
        """Whatever a machine lacks may come: the node waits, and says what for."""

    def start(self, job_uid: str, intent: LaunchNode, *, key: str, on_waiting: OnWaiting) -> RayNode:
        self._store.write_node(intent)
        node = RayNode(self, intent, on_waiting=on_waiting)
        self._living[intent.id] = node
        return node

    def remember(self, job_uid: str, ledger: HostLedger) -> None:
        self._store.write_ledger(ledger)

    def cordon(self, host: str) -> None:
        self._cordoned[host] = None

    def forget(self, node: PlatformId) -> None:
        """It was removed."""
        self._store.forget_node(node)

    async def room(self, resource: Resource, living: Sequence[Resource], *, capacity: int) -> NodeRoom:
        check_size(resource, "a question for room")
        machines = await asyncio.to_thread(cluster.machines)
        demand = demand_of(resource, self._nodes.resources)
        return room_for(machines, demand, num_living=len(living), capacity=capacity)

    async def find(self) -> list[FoundNode]:
        """What a former host left: nodes that run or wait, and those that ended."""
        import ray

        namespace = namespace_of(self._nodes.job_uid)
        stones = self._store.tombstones()
        found: list[FoundNode] = []
        for intent in self._store.nodes():
            if intent.id in stones:
                found.append(FoundNode(intent, RayNode.ended(self, stones[intent.id])))
                continue
            actor = None
            with contextlib.suppress(ValueError):  # it was never made, or it is dead
                actor = ray.get_actor(f"{NODE_PREFIX}{intent.id}", namespace=namespace)
            if actor is None:
                stone = Tombstone(intent=intent, exit_code=EXIT_LOST, cause="lost while the job's host was restarting")
                self._store.bury(stone)
                found.append(FoundNode(intent, RayNode.ended(self, stone)))
                continue
            node = RayNode(self, intent, on_waiting=lambda why: None, actor=actor)
            self._living[intent.id] = node
            found.append(FoundNode(intent, node))
        return found

    def order(self, intent: LaunchNode) -> NodeOrder:
        return NodeOrder(
            host_epoch=self.host_epoch,
            job_uid=self._nodes.job_uid,
            job_name=self._nodes.job_name,
            intent=intent,
            argv=self._nodes.argv,
            script=self._nodes.script,
            environ=self._nodes.environ,
            secrets=self._secrets,
            master_address=self.master_address,
            orphan_grace=self._nodes.orphan_grace,
        )

    async def choose(self, node: RayNode) -> MachineChoice:
        if self._bundle_of(node.intent) is not None:
            return MachineChoice(
                "", f"The node waits for the resources that {self._nodes.placement_group} reserves for it."
            )
        machines = await asyncio.to_thread(cluster.machines)
        demand = demand_of(node.intent.resource, self._nodes.resources)
        others = [each for each in self._living.values() if each is not node and each.machine]
        counts: dict[str, int] = {}
        for other in others:
            counts[other.machine] = counts.get(other.machine, 0) + 1
        # Ray does not count a node that is on its way yet.
        coming = [each for each in others if not each.running.done()]
        machines = [
            _without(
                machine,
                [demand_of(e.intent.resource, self._nodes.resources) for e in coming if e.machine == machine.id],
            )
            for machine in machines
        ]
        choice = choose(
            machines,
            demand,
            num_nodes_on=counts,
            avoid=(*node.intent.avoid_hosts, *self._cordoned),
            placement=self._nodes.placement,
        )
        if choice.machine:
            return choice
        outlook = await asyncio.to_thread(cluster.outlook)
        return MachineChoice("", f"{choice.sentence} {outlook}", choice.may_queue)

    def create(self, intent: LaunchNode, choice: MachineChoice) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        demand = demand_of(intent.resource, self._nodes.resources)
        strategy: Any = "SPREAD" if self._nodes.placement is not Placement.PACK else "DEFAULT"
        if choice.machine:
            strategy = NodeAffinitySchedulingStrategy(choice.machine, soft=choice.may_queue)
        bundle = self._bundle_of(intent)
        if bundle is not None:
            group = ray.util.get_placement_group(self._nodes.placement_group)
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        others = {name: amount for name, amount in demand.items() if name not in (CPU, GPU, MEMORY)}
        options: dict[str, Any] = {
            "name": f"{NODE_PREFIX}{intent.id}",
            "namespace": namespace_of(self._nodes.job_uid),
            "lifetime": "detached",
            "max_restarts": 0,
            "num_cpus": demand.get(CPU, 0.0),
            "num_gpus": demand.get(GPU, 0.0),
            "resources": others,
            "scheduling_strategy": strategy,
        }
        if demand.get(MEMORY):
            options["memory"] = demand[MEMORY]
        if self._nodes.runtime_env:
            options["runtime_env"] = self._nodes.runtime_env
        return ray.remote(self._actor_class).options(**options).remote()

    def _bundle_of(self, intent: LaunchNode) -> int | None:
        """None: it is placed by its own resources."""
        return self._nodes.bundles[intent.rank] if intent.rank < len(self._nodes.bundles) else None

    def kill_actor(self, actor: Any) -> None:
        import ray
        import ray.exceptions

        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # dead already
            ray.kill(actor, no_restart=True)

    async def name_is_free(self, intent: LaunchNode) -> None:
        """An actor that was killed keeps its name for some milliseconds."""
        import ray

        for _ in range(200):
            try:
                ray.get_actor(f"{NODE_PREFIX}{intent.id}", namespace=namespace_of(self._nodes.job_uid))
            except ValueError:
                return
            await asyncio.sleep(0.05)

    def over(self, node: RayNode) -> None:
        """Nothing of it is left: its place is for others."""
        self._living.pop(node.intent.id, None)
        self._store.bury(node.tombstone())
        if node.actor is not None:
            self.kill_actor(node.actor)

    async def host_of(self, machine_id: str) -> str:
        machines = await asyncio.to_thread(cluster.machines)
        return next((machine.host for machine in machines if machine.id == machine_id), machine_id[:8])

    async def move_master(self, address: str) -> None:
        self.master_address = address
        await asyncio.gather(*(node.tell_master(address) for node in tuple(self._living.values())))

    def living(self) -> list[RayNode]:
        return list(self._living.values())

    async def watch_drains(self) -> None:
        """Until cancelled. Ray announces no drain, so this asks."""
        told: set[tuple[PlatformId, str]] = set()
        while True:
            machines = await asyncio.to_thread(cluster.machines)
            drained = {machine.id for machine in machines if machine.drained_at is not None}
            for node in self.living():
                if node.machine in drained and node.running.done() and (node.intent.id, node.machine) not in told:
                    told.add((node.intent.id, node.machine))
                    log.info("machine is drained node=%s machine=%s", node.intent.name, node.machine)
                    node.preempt()
            await asyncio.sleep(LOOK_AGAIN)


KILL_TIMEOUT = 10.0
"""Seconds for a killed node to be gone."""


class _GivenUp(Exception):
    """The node was removed before it ran."""


async def _result(call: Any) -> str:
    return str(await call)


async def _quietly(call: Any) -> None:
    """A call to a node that may be gone: the one that waits for its end hears of that."""
    import ray.exceptions

    with contextlib.suppress(ray.exceptions.RayError):
        await call


def _without(machine: ClusterMachine, demands: Sequence[Mapping[str, float]]) -> ClusterMachine:
    if not demands:
        return machine
    free = dict(machine.free)
    for demand in demands:
        for name, amount in demand.items():
            free[name] = free.get(name, 0.0) - amount
    return ClusterMachine(
        id=machine.id, host=machine.host, total=machine.total, free=free, drained_at=machine.drained_at
    )


def _cause(error: Exception) -> str:
    """Ray's own words, without its tables."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, Exception) else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines)[:600]


def _is_lasting(error: Exception) -> bool:
    """The next attempt would fail in the same way: no script, no package, a runtime environment that cannot be made."""
    import ray.exceptions

    if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        return True
    if isinstance(error, ray.exceptions.RayTaskError):
        return True
    is_early = isinstance(error, ray.exceptions.ActorDiedError)
    return is_early and (bool(missing_module(error)) or "runtime_env" in str(error))
