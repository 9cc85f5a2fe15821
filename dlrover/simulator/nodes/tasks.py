"""
Processes of a parameter-server job: servers that hold variables, a chief and workers that train them, an evaluator.

Each does what `dlrover/trainer/tensorflow` does, event by event: it tells the address of its server, follows the view of the cluster, opens its
session when the model is there, trains and reports, parks after its step, and, as chief, restores and saves. A process that is told
that its version is over only waits for its end.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec.structs import replace

from dlrover.core.clusters.cluster import PARK_PATIENCE, RESTORE_PATIENCE, SAVE_PATIENCE
from dlrover.core.job import Job
from dlrover.protocol.messages.cluster import (
    FRESH,
    NO_CUT,
    AnyClusterCommand,
    AskCluster,
    ClusterCommand,
    ClusterPhase,
    CutTaken,
    ModelRestored,
    ModelSaved,
    ParkForSave,
    ProcessParked,
    RenewVersion,
    ServerBound,
    TakeCut,
    VersionView,
)
from dlrover.protocol.messages.data import (
    Consumption,
    DataCommand,
    DatasetSpec,
    ExchangeShards,
    RegisterDataset,
    ShardsGiven,
    Supply,
)
from dlrover.protocol.messages.fleet import NodeType, RemoveNode
from dlrover.protocol.messages.job import AgentCommand, Command, ExitReason, Query, Reply
from dlrover.simulator.parts import AgentPart, SimulationPart, VirtualGroup
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.truth.variables import PARKED, ModelStorage, StoredModel, Update, Variables, VirtualTask
from dlrover.simulator.virtual_time import SECOND, micros, span

BINDING = (0.05, 1.0)
RESTORING = (0.1, 10.0)
SAVING = (0.05, 20.0)
SLOW_ODDS = 0.02
"""How often a step, a restore or a save takes longer than any process waits for it."""
SLOW = (20.0, 900.0)
HEARING = (0.001, 0.3)
"""Seconds until a process that waits for a newer view has asked for it."""
LOOK_AGAIN = 20 * SECOND
"""A process whose question was lost asks again."""
EVALUATION = (1.0, 60.0)
SAVE_ODDS = 0.15
"""Of a beat of the chief."""
RENEW_ODDS = 0.01
"""Of a beat of a coordinator: workers have joined, or it has lost a server before the master did."""
GATHER_ODDS = 0.3
"""How often what was read is told with the next step only."""
MOST_RECORDS = 3
"""Of one step."""
SLOW_RESTORE_ODDS = 0.1
MARGIN = 60.0
"""Seconds until a deadline is acted upon, and its decision durable."""
_PATIENCE = {
    ClusterPhase.RESTORING: RESTORE_PATIENCE,
    ClusterPhase.PARKING: PARK_PATIENCE,
    ClusterPhase.SAVING: SAVE_PATIENCE,
}


class VirtualTasks:
    """Of a job with parameter servers whose nodes have agents. Takes the place of `DataTraffic` there."""

    def __init__(self, simulation: SimulationPart, spec: DatasetSpec) -> None:
        self._sim = simulation
        self._spec = spec
        self._chance = random.Random(f"{simulation.plan.seed}/tasks")
        num_beats = spec.size * max(1, spec.num_epochs) / (MOST_RECORDS * simulation.shape.max_nodes / 2)
        self._pace = micros(simulation.plan.hours * 3600 / num_beats * self._chance.choice([0.3, 1.0, 2.0]))
        self._tasks: dict[str, VirtualTask] = {}
        """The newest of each node, by its label."""
        self._servers: dict[str, VirtualTask] = {}
        """By address."""
        self._variables: dict[tuple[str, ...], Variables] = {}
        self._told: dict[tuple[str, int], tuple[VirtualTask, Callable[[Reply], None]]] = {}
        self._asked: dict[int, VirtualTask] = {}
        """By identity of the question."""
        self._questions: list[AskCluster] = []
        self._number = 0
        """Of the newest view that the masters have released."""
        self._version = 0
        self._phase: ClusterPhase | None = None
        self._phase_since = 0
        self.storage = ModelStorage(spec)
        self.num_planned = 0
        """Saves of planned changes."""
        self.phases: dict[ClusterPhase, None] = {}
        """That the job has been in."""

    # Processes begin.

    def started(self, agent: AgentPart, group: VirtualGroup) -> None:
        task = VirtualTask(agent, group)
        self._tasks[agent.node.label] = task
        self._sim.events.after(span(self._chance, *BINDING), self._bind, task)

    def _bind(self, task: VirtualTask) -> None:
        if not task.is_running or task.agent.sleep.puts_off(self._bind, task):
            return
        if task.kind is NodeType.PS:
            task.address = f"host-{task.agent.node.number}:{len(self._servers)}"  # no port is used twice
            self._servers[task.address] = task
        coordinates = task.kind is NodeType.CHIEF and self._sim.shape.has_coordinator
        self._tell(task, ServerBound(address=task.address, is_coordinator=coordinates), lambda _: None)
        if task.kind is not NodeType.PS:
            self._ask(task)
            self._beat(task)

    # Views.

    def released(self, job: Job) -> None:
        """What a master has decided is durable: a process that waits for a newer view hears of it."""
        cluster = job.state.cluster
        if cluster is None or cluster.number == self._number:
            return
        if cluster.version < self._version or cluster.number < self._number:
            raise Violation("cluster", f"version {cluster.version} of the cluster follows version {self._version}")
        if (cluster.version, cluster.phase) != (self._version, self._phase):
            self._phase, self._phase_since = cluster.phase, self._sim.events.now
        self._number, self._version = cluster.number, cluster.version
        self.phases[cluster.phase] = None
        for task in list(self._tasks.values()):
            if task.is_running and task.kind is not NodeType.PS:
                self._sim.events.after(span(self._chance, *HEARING), self._ask_once, task)

    def _ask(self, task: VirtualTask) -> None:
        if task.is_running:
            self._ask_once(task)
            self._sim.events.after(LOOK_AGAIN, self._ask, task)

    def _ask_once(self, task: VirtualTask) -> None:
        if task.is_running:
            question = AskCluster(seen=task.view.number)
            self._questions = [*self._questions[-200:], question]
            self._asked[id(question)] = task
            task.agent.outbox.ask(question)

    def read(self, query: Query, reply: Reply) -> None:
        if not isinstance(query, AskCluster) or not isinstance(reply, VersionView):
            return
        task = self._asked.pop(id(query), None)
        if task is not None and task.is_running and reply.number > task.view.number:
            task.view = reply
            if reply.version > task.version and task.kind is not NodeType.EVALUATOR:
                task.is_over = True
            self._advance(task)

    # What a process does next.

    def _beat(self, task: VirtualTask) -> None:
        if not task.is_running:
            return
        self._advance(task)
        if task.can_act and task.variables is not None and not task.is_busy:
            self._step(task)
        self._sim.events.after(max(1000, int(self._pace * (0.5 + self._chance.random()))), self._beat, task)

    def _advance(self, task: VirtualTask) -> None:
        if not task.can_act:
            return
        if task.kind is NodeType.EVALUATOR:
            if task.view.is_over and not task.is_finishing:
                task.is_finishing = True
                self._sim.events.after(span(self._chance, *EVALUATION), task.agent.workers.finish, "")
        elif task.variables is None:
            self._open(task)
        elif task.view.phase in PARKED:
            self._park(task)
        elif task.is_finishing:
            self._finish(task)

    def _open(self, task: VirtualTask) -> None:
        view = task.view
        servers = [self._servers[address] for address in view.servers]
        if task.is_opening or not servers or view.phase is ClusterPhase.GATHERING:
            return
        if any(server.version != task.version for server in servers):
            raise Violation("cluster", f"{task.label} of version {task.version} shall use servers of another one")
        if not all(map(task.reaches, servers)):
            return  # TensorFlow waits; the next beat tries again
        is_attaching = view.restored_step is not None
        if not is_attaching and task.kind is not NodeType.CHIEF:
            return
        if is_attaching and task.kind is NodeType.CHIEF and self._sim.shape.has_coordinator:
            self._renew(task, "the coordinator has started again")
            return
        task.is_opening = True
        is_slow = not is_attaching and self._chance.random() < SLOW_RESTORE_ODDS
        duration = span(self._chance, *(SLOW if is_slow else BINDING if is_attaching else RESTORING))
        self._sim.events.after(duration, self._opened, task, tuple(servers), is_attaching)

    def _opened(self, task: VirtualTask, servers: tuple[VirtualTask, ...], is_attaching: bool) -> None:
        if not task.can_act or not all(map(task.reaches, servers)):
            task.is_opening = False
            return
        key = tuple(server.address for server in servers)
        if is_attaching:
            task.variables = self._variables[key]
            self._advance(task)
            return
        former = self._variables.get(key)
        if former is not None and len(former.updates) > former.num_restored:
            raise Violation("cluster", f"{task.label} restores variables that others have trained since")
        stored = self.storage.newest
        ranges = [] if stored is None else [*stored.sure, *stored.doubtful]
        variables = self._variables[key] = Variables(servers, [Update(place) for place in ranges])
        step, cut, text = (FRESH, NO_CUT, "") if stored is None else (stored.step, stored.cut, stored.text)

        def restored(_: Reply) -> None:
            task.variables = variables

        task.restored, task.restored_into = stored, variables
        self._tell(task, ModelRestored(step=step, cut=cut, data_state=text), restored)

    # Training.

    def _step(self, task: VirtualTask) -> None:
        variables = task.variables
        if variables is None or not task.has_variables or task.is_parked or task.is_saving or task.is_finishing:
            return
        if task.view.phase in PARKED:
            self._park(task)
            return
        if task.wants_save:
            self._save(task)
            return
        if self._chance.random() < SLOW_ODDS:
            task.is_busy = True
            self._sim.events.after(span(self._chance, *SLOW), self._end_slow_step, task)
            return
        if task.shards:
            self._learn(task, variables)
        if task.telling is None and (not task.untold or self._chance.random() > GATHER_ODDS):
            self._exchange(task)
        if task.kind is NodeType.CHIEF and self._chance.random() < SAVE_ODDS:
            self._save_now_and_then(task)
        if task.kind is NodeType.CHIEF and self._sim.shape.has_coordinator and self._chance.random() < RENEW_ODDS:
            self._renew(task, "the coordinator wants other workers")

    def _renew(self, task: VirtualTask, reason: str) -> None:
        """It asks until it hears that its version is over."""
        self._tell(task, RenewVersion(reason=reason), lambda _: None)

    def _end_slow_step(self, task: VirtualTask) -> None:
        task.is_busy = False
        self._advance(task)

    def _learn(self, task: VirtualTask, variables: Variables) -> None:
        shard = task.shards[0]
        start = shard.start + task.done.get(shard.id, 0)
        count = min(self._chance.randint(1, MOST_RECORDS), shard.end - start)
        update = variables.learn(shard, start, count, by=task, is_current=self._is_current(task))
        self._sim.training.num_updates += 1
        task.untold.append((Consumption(shard.id, count, len(variables.updates)), update))
        task.done[shard.id] = task.done.get(shard.id, 0) + count
        if start + count == shard.end:
            task.shards.pop(0)

    def _exchange(self, task: VirtualTask, *, is_reading: bool = True) -> None:
        if not task.has_registered:
            task.has_registered = True
            self._tell(task, RegisterDataset(dataset=self._spec.name, spec=self._spec), lambda _: None)
        want = max(0, 2 - len(task.shards)) if is_reading and not task.has_read_all else 0
        if not want and not task.untold:
            return
        consumed, task.telling = tuple(each for each, _ in task.untold), [update for _, update in task.untold]
        task.untold = []
        command = ExchangeShards(dataset=self._spec.name, consumed=consumed, want=want)
        self._tell(task, command, lambda reply: self._given(task, reply))

    def _given(self, task: VirtualTask, reply: Reply) -> None:
        for update in task.telling or ():
            update.is_confirmed = True
        task.telling = None
        if isinstance(reply, ShardsGiven):
            task.shards.extend(reply.shards)
            task.has_read_all = task.has_read_all or reply.supply is Supply.END
        task.is_finishing |= task.has_read_all and not task.shards and not task.untold
        self._advance(task)

    def _is_flushed(self, task: VirtualTask) -> bool:
        """Whether all that it read is confirmed; else that is on its way."""
        if task.telling is None and task.untold:
            self._exchange(task, is_reading=False)
        return task.telling is None and not task.untold

    def _finish(self, task: VirtualTask) -> None:
        if not self._is_flushed(task):
            return
        if task.kind is NodeType.WORKER:
            task.agent.workers.finish("")
        elif task.view.num_workers == 0 and not task.is_saving and task.has_variables:
            self._save(task, then=lambda: task.agent.workers.finish(""))

    # Parking and saving.

    def _park(self, task: VirtualTask) -> None:
        if task.is_busy or not self._is_flushed(task):
            return
        if not task.is_parked:
            task.parked_for = task.view.num_parks
            self._tell(task, ProcessParked(step=0), lambda _: self._advance(task))
        elif task.kind is NodeType.CHIEF and task.view.phase is ClusterPhase.SAVING and not task.is_saving:
            self._save(task)

    def _save_now_and_then(self, task: VirtualTask) -> None:
        if not self._sim.shape.has_exact_saves:
            task.wants_save = True
            self._save(task)
        elif task.asked_for != task.view.num_parks:
            task.asked_for = task.view.num_parks
            self._tell(task, ParkForSave(), lambda _: None)

    def _save(self, task: VirtualTask, then: Callable[[], None] | None = None) -> None:
        variables = task.variables
        if variables is None or task.is_saving or not self._is_flushed(task):
            return
        task.is_saving, task.wants_save = True, False
        sure = [update for update in variables.updates if update.is_confirmed]
        # An exact save of the chief's own cadence goes on without who does not park in time.
        variables.is_frozen = task.view.phase is ClusterPhase.SAVING and not self._sim.shape.has_exact_saves
        self.num_planned += variables.is_frozen

        def cut(reply: Reply) -> None:
            assert isinstance(reply, CutTaken), reply
            num_landed = len(variables.updates)
            self._sim.events.after(
                self._duration(SAVING), self._written, task, variables, sure, num_landed, reply, then
            )

        self._tell(task, TakeCut(), cut)

    def _written(
        self,
        task: VirtualTask,
        variables: Variables,
        sure: list[Update],
        num_landed: int,
        taken: CutTaken,
        then: Callable[[], None] | None,
    ) -> None:
        """The checkpoint is complete, if the servers and the chief have lived so long. A chief that was given up does not know."""
        task.is_saving = False
        was_frozen, variables.is_frozen = variables.is_frozen, False
        if not task.is_running or not variables.are_there or not all(map(task.reaches, variables.servers)):
            return
        if not was_frozen:
            num_landed = self._chance.randint(num_landed, len(variables.updates))
        known = {id(update) for update in sure}
        rest = [update.place for update in variables.updates[:num_landed] if id(update) not in known]
        stored = StoredModel([update.place for update in sure], rest, taken.cut, taken.data_state)
        self.storage.newest = stored

        def saved(_: Reply) -> None:
            if then is not None and task.is_running:
                then()

        self._tell(task, ModelSaved(step=stored.step, cut=taken.cut), saved)

    def _duration(self, usual: tuple[float, float]) -> int:
        return span(self._chance, *(SLOW if self._chance.random() < SLOW_ODDS else usual))

    # Messages.

    def _tell(
        self,
        task: VirtualTask,
        command: AnyClusterCommand | RegisterDataset | ExchangeShards,
        heard: Callable[[Reply], None],
    ) -> None:
        agent = task.agent
        whole = replace(command, node=agent.id, incarnation=agent.incarnation, round=task.group.world.round)
        self._told[agent.life, agent.outbox.tell(whole)] = (task, heard)

    def answered(self, agent: AgentPart, number: int, command: AgentCommand, reply: Reply) -> None:
        task, heard = self._told.pop((agent.life, number), (None, None))
        if task is not None and heard is not None and task.is_running:
            heard(reply)

    def refused(self, agent: AgentPart, number: int) -> None:
        task, _ = self._told.pop((agent.life, number), (None, None))
        if task is not None:
            task.is_over = True

    def was_refused(self, job: Job, command: Command, code: str) -> None:
        """In the core. A process that the master counts as there has done nothing that could be refused."""
        cluster = job.state.cluster
        if not isinstance(command, DataCommand | ClusterCommand) or cluster is None or job.end is not None:
            return
        node = job.state.nodes.live.get(command.node)
        is_current = node is not None and node.incarnation == command.incarnation
        if is_current and cluster.round_of(command.node) == command.round:
            raise Violation("I3", f"{type(command).__name__} of a process that goes on was refused: {code}")

    # What must be true.

    def agreed(self, job: Job, command: Command) -> None:
        """A chief has told which model its version goes on with: it and the books must fit."""
        assert isinstance(command, ModelRestored), "no model is told by anything else"
        books, agent = job.state.data.datasets.get(self._spec.name), self._sim.machines.agent_of(command.node)
        task = None if agent is None else self._tasks.get(agent.node.label)
        if books is None or task is None or task.restored_into is None:
            return  # nothing was read yet, or the chief is gone since: then nothing can be learned any more
        variables = task.restored_into
        variables.updates = self.storage.check_restored(task.restored, books)
        variables.num_restored = len(variables.updates)

    @property
    def num_records(self) -> int:
        stored = self.storage.newest
        return 0 if stored is None else sum(place.size for place in stored.sure)

    def is_read_out(self, job: Job) -> bool:
        books = job.state.data.datasets.get(self._spec.name)
        return books is not None and books.is_complete

    def check_end(self, job: Job, *, is_audited: bool) -> None:
        books, end = job.state.data.datasets.get(self._spec.name), job.end
        if books is None or end is None or end.reason is not ExitReason.COMPLETED:
            return
        if not books.is_complete:
            raise Violation("I3", f"the job has completed, and its data are not read: {end.message}")
        self.storage.check_complete(books)

    def check_removal(self, intent: RemoveNode) -> None:
        """A server that is not needed any more stays until all have moved."""
        server = intent.id
        if self._sim.ended_at is not None or "have switched" not in intent.reason:
            return
        for task in self._tasks.values():
            used = () if task.variables is None else task.variables.servers
            is_using = task.is_running and not task.is_finishing and self._is_known(task)
            if is_using and any(each.is_running and each.agent.node.platform_id == server for each in used):
                raise Violation("servers", f"node {server} is removed while {task.label} uses its variables")

    def stir(self) -> None:
        """Something is about to go wrong: be in the middle of something."""
        able = [task for task in self._tasks.values() if task.can_act and task.variables is not None]
        for task in able:
            if not task.is_busy:
                self._step(task)

    def check_patience(self, job: Job) -> str | None:
        """Whichever process is waited for, no phase lasts longer than its patience."""
        cluster = job.state.cluster
        limit = None if cluster is None else _PATIENCE.get(cluster.phase)
        if cluster is None or limit is None or job.end is not None or cluster.finished_at is not None:
            return None
        if (cluster.version, cluster.phase) != (self._version, self._phase):
            return None  # it begins with the command that is being looked at
        lasted = self._sim.events.now - self._phase_since
        if lasted < micros(limit + MARGIN) or self._sim.masters.were_disturbed_since(self._phase_since):
            return None
        return f"version {cluster.version} is {cluster.phase.value} for {lasted / SECOND:.0f} s"

    def _is_known(self, task: VirtualTask) -> bool:
        """Whether the master counts its agent as there."""
        master = self._sim.masters.newest
        node = None if master is None else master.job.state.nodes.live.get(task.agent.id)
        return node is not None and node.incarnation == task.agent.incarnation and node.dismissed is None

    def _is_current(self, task: VirtualTask) -> bool:
        master = self._sim.masters.newest
        cluster = None if master is None else master.job.state.cluster
        is_known = self._is_known(task) and cluster is not None
        return is_known and cluster is not None and cluster.round_of(task.agent.id) == task.group.world.round
