"""
A platform from which the job itself asks its nodes, and the part of a master that talks to it.

The cloud lives on while masters come and go: it keeps every id it ever heard of, refuses what an older master wants, and
shows what exists by lists and events. A driver belongs to one life of a master and dies with it, but not what it has sent.
Calls are slow, answers get lost, events come late or twice, and now and then it cannot be reached at all.
"""

from __future__ import annotations

from dlrover.core.fleet.platform_news import REFUSAL_COUNTS
from dlrover.protocol.messages.fleet import (
    DefineFleet,
    FleetSpec,
    LaunchNode,
    LaunchRefused,
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodesListed,
    NodeType,
    RemoveNode,
    exit_reason_of,
)
from dlrover.protocol.messages.job import Command, PlatformId, Query
from dlrover.protocol.messages.scaling import DefineScaling
from dlrover.simulator.nodes.agent import VirtualAgent
from dlrover.simulator.nodes.platform import REFUSAL_PAUSE, draw_health
from dlrover.simulator.parts import CloudNode, MasterPart, NodeSource, SimulationPart, VirtualNode
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.virtual_time import SECOND, micros, span

CALL = (0.005, 0.5)
NEWS = (0.005, 2.0)
"""Seconds until a change is shown to who watches."""
LATE_NEWS = (2.0, 90.0)
REPEATED_ODDS = 0.05
"""How often the same is shown once more, late."""
LOST_ANSWER_ODDS = 0.05
RELIST = (240.0, 300.0)
RETRY = (0.5, 30.0)
DELETION = (0.0, 4.0)
HEARD = SECOND
"""After so long whose node shall go has heard of it. Often sooner than it is gone."""
NOTICED = (0.0, 20.0)
"""Seconds until the platform knows that a process ended or a machine was taken away."""
POWER_NOTICED = (20.0, 200.0)
EVICTED_ODDS = 0.3
"""How often a machine without power is reported as taken away, not as failed."""

Intent = LaunchNode | RemoveNode


class CloudDriver:
    """Of one life of a master."""

    def __init__(self, master: MasterPart, now: int) -> None:
        self.master = master
        self.lanes: dict[PlatformId, Intent] = {}
        """What shall become of a node; only the newest intent counts."""
        self.told: dict[PlatformId, tuple[str, int]] = {}
        self.watch = 0
        """Number of the newest watch."""
        self.is_watching = False
        self.shown_at = now
        self.ledger_version = -1
        """As last read, where there is a ledger."""


class VirtualCloud(NodeSource):
    """Brings and removes nodes as the job asks for it."""

    def __init__(self, simulation: SimulationPart, spec: FleetSpec) -> None:
        super().__init__(simulation)
        self.spec = spec
        self.master_epoch = 0
        self.nodes: dict[PlatformId, CloudNode] = {}
        self.launches: dict[PlatformId, None] = {}
        """Every id that was ever heard of."""
        self.is_away = False
        """It cannot be reached."""
        self.driver: CloudDriver | None = None
        self._num_words = 0
        self._num_calls = 0
        self.launching: dict[PlatformId, LaunchNode] = {}
        """Sent and not arrived."""
        self.asked_to_remove: dict[PlatformId, None] = {}

    @property
    def num_pending(self) -> int:
        num_moving = sum(node.is_going or node.phase is NodePhase.PENDING for node in self.nodes.values())
        num_open = 0 if self.driver is None else len(self.driver.lanes)
        return num_moving + num_open + self._num_words + self._num_calls

    def begin(self) -> None:
        if self.sim.tasks is None:
            self.sim.agentless.begin(self)

    # The driver.

    def serve(self, master: MasterPart) -> None:
        """A master has begun."""
        driver = self.driver = CloudDriver(master, self.sim.events.now)
        if self.sim.shape.scaling is not None:
            self._say(driver, DefineScaling(terms=self.sim.shape.scaling))
        self._say(driver, DefineFleet(spec=self.spec))
        self._watch_soon(driver, 0.0, 1.0)

    def _say(
        self, driver: CloudDriver, word: DefineScaling | DefineFleet | NodesListed | NodeChanged | LaunchRefused
    ) -> None:
        driver.master.hear(word)

    def word_lost(self, master: MasterPart, word: Command | Query) -> None:
        """It could not be written. A list repairs whatever was missed."""
        driver = self.driver
        if driver is None or driver.master is not master:
            return
        if isinstance(word, DefineScaling | DefineFleet):
            self.sim.events.after(SECOND, self._say, driver, word)
            self._watch_soon(driver, 1.0, 2.0)
        elif isinstance(word, NodesListed | NodeChanged | LaunchRefused):
            if isinstance(word, LaunchRefused):
                driver.told.pop(word.node, None)
            self._watch_soon(driver, 0.5, 5.0)

    def take(self, master: MasterPart, intent: Intent) -> None:
        """What the job decided, as soon as it is durable."""
        if isinstance(intent, RemoveNode):
            if intent.id not in self.asked_to_remove:
                self.sim.agentless.check_removal(self.nodes.get(intent.id))
                if self.sim.tasks is not None:
                    self.sim.tasks.check_removal(intent)
            self.sim.events.after(HEARD, self._check_heard, intent.id, self.sim.events.now)
            self.asked_to_remove[intent.id] = None
        else:
            self.sim.people.check_launch(intent)
        driver = self.driver
        if driver is None or driver.master is not master:
            driver = self.driver = CloudDriver(master, self.sim.events.now)
        is_busy = intent.id in driver.lanes
        driver.lanes[intent.id] = intent
        if not is_busy:
            self._call(driver, intent)

    def _call(self, driver: CloudDriver, intent: Intent) -> None:
        if not driver.master.is_alive or self.driver is not driver:
            return
        if driver.master.is_stalled:
            self.sim.events.after(SECOND, self._call, driver, driver.lanes[intent.id])
            return
        self._num_calls += 1
        if isinstance(intent, LaunchNode):
            self.launching[intent.id] = intent
        self.sim.events.after(span(self.sim.chance.platform, *CALL), self._arrive, driver, intent, RETRY[0])

    def _arrive(self, driver: CloudDriver, intent: Intent, pause: float) -> None:
        """The call is at the cloud, whatever became of who sent it."""
        self._num_calls -= 1
        if isinstance(intent, LaunchNode):
            self.launching.pop(intent.id, None)
        refusal = "the cloud cannot be reached" if self.is_away else self._apply(intent)
        if not driver.master.is_alive or self.driver is not driver:
            return
        if driver.lanes.get(intent.id) is not intent:
            self._call(driver, driver.lanes[intent.id])
            return
        is_unheard = not refusal and self.sim.chance.platform.random() < LOST_ANSWER_ODDS
        if not refusal and not is_unheard:
            del driver.lanes[intent.id]
            return
        told, told_at = driver.told.get(intent.id, ("", 0))
        is_news = refusal != told or self.sim.events.now - told_at >= micros(REFUSAL_COUNTS / 2)
        if refusal and isinstance(intent, LaunchNode) and is_news:
            driver.told[intent.id] = (refusal, self.sim.events.now)
            self._say(driver, LaunchRefused(node=intent.id, reason=refusal))
        delay = span(self.sim.chance.platform, pause / 2, pause)
        self._num_calls += 1
        self.sim.events.after(delay, self._try_again, driver, intent, min(2 * pause, RETRY[1]))

    def _try_again(self, driver: CloudDriver, intent: Intent, pause: float) -> None:
        if not driver.master.is_alive or self.driver is not driver:
            self._num_calls -= 1
            return
        newest = driver.lanes[intent.id]
        if isinstance(newest, LaunchNode):
            self.launching[newest.id] = newest
        self.sim.events.after(span(self.sim.chance.platform, *CALL), self._arrive, driver, newest, pause)

    def _watch_soon(self, driver: CloudDriver, low: float, high: float) -> None:
        """End the watch that runs and begin another, with a full list."""
        driver.watch += 1
        driver.is_watching = False
        self.sim.events.after(span(self.sim.chance.platform, low, high), self._watch, driver, driver.watch)

    def _watch(self, driver: CloudDriver, watch: int) -> None:
        if self.driver is not driver or driver.watch != watch or not driver.master.is_alive or self.sim.is_over:
            return
        if self.is_away or driver.master.is_stalled:
            self._watch_soon(driver, 1.0, 5.0)
            return
        driver.is_watching = True
        nodes = tuple(node.shown() for _, node in sorted(self.nodes.items()))
        next_id = PlatformId(max(self.launches, default=-1) + 1)
        self._show(driver, NodesListed(nodes=nodes, master_epoch=self.master_epoch, next_id=next_id))
        self.sim.events.after(span(self.sim.chance.platform, *RELIST), self._watch_again, driver, watch)

    def _watch_again(self, driver: CloudDriver, watch: int) -> None:
        if driver.watch == watch:
            self._watch_soon(driver, 0.0, 1.0)

    def break_watch(self) -> bool:
        driver = self.driver
        if driver is None or not driver.is_watching:
            return False
        self._watch_soon(driver, *RETRY)
        return True

    def _show(self, driver: CloudDriver, word: NodesListed | NodeChanged) -> None:
        """In order, within one watch."""
        chance, events = self.sim.chance.platform, self.sim.events
        driver.shown_at = max(driver.shown_at, events.now + span(chance, *NEWS))
        self._num_words += 1
        events.at(driver.shown_at, self._deliver, driver, driver.watch, word)
        if isinstance(word, NodeChanged) and chance.random() < REPEATED_ODDS:
            self._num_words += 1
            events.after(span(chance, *LATE_NEWS), self._deliver, driver, -1, word)

    def _deliver(self, driver: CloudDriver, watch: int, word: NodesListed | NodeChanged) -> None:
        self._num_words -= 1
        if self.driver is driver and watch in (-1, driver.watch):
            self._say(driver, word)

    # The cloud.

    def _apply(self, intent: Intent) -> str:
        """Why not; empty if it was done, or needs no doing."""
        if intent.master_epoch < self.master_epoch:
            self.sim.note(f"the cloud refuses an intent of master epoch {intent.master_epoch}")
            return ""
        self.master_epoch = intent.master_epoch
        if isinstance(intent, RemoveNode):
            self.launches[intent.id] = None
            node = self.nodes.get(intent.id)
            if node is not None and not node.is_going:
                node.is_going = True
                self.sim.events.after(span(self.sim.chance.platform, *DELETION), self._obey, intent.id)
            return ""
        if intent.id in self.launches:
            return ""
        if self.is_refusing and intent.id % 2:
            return "the quota is used up"
        self.launches[intent.id] = None
        self._check_single(intent)
        self._create(intent)
        return ""

    def _create(self, launch: LaunchNode) -> None:
        node = self.nodes[launch.id] = CloudNode(launch)
        self._changed(node, NodeEventKind.ADDED)
        delay = span(self.sim.chance.platform, *self.sim.shape.costs.replacement)
        self.sim.events.after(delay, self._start, node)

    def _start(self, cloud_node: CloudNode) -> None:
        launch = cloud_node.launch
        if self.nodes.get(launch.id) is not cloud_node or cloud_node.is_going or self.sim.is_over:
            return
        if self.is_refusing:
            self.sim.events.after(span(self.sim.chance.platform, *REFUSAL_PAUSE), self._start, cloud_node)
            return
        cloud_node.phase = NodePhase.RUNNING
        self.started[launch.id] = None
        if launch.node_type is not NodeType.WORKER and not self.sim.shape.has_tasks:
            self.sim.troubles.add()
            self.sim.note(f"{launch.name} runs, rank {launch.rank}")
            self._changed(cloud_node, NodeEventKind.MODIFIED)
            return
        node = VirtualNode(self.sim.machines.num_launches, launch.rank if self.sim.shape.has_fixed_ranks else None)
        node.platform_id, node.fleet_rank, node.node_type = launch.id, launch.rank, launch.node_type
        cloud_node.node = node
        draw_health(self.sim, node)
        self.sim.machines.add(node)
        self.sim.note(f"{node.label} is launched as {launch.name}, rank {launch.rank}")
        self._changed(cloud_node, NodeEventKind.MODIFIED)
        VirtualAgent(self.sim, node)

    def replace(self, lost: VirtualNode) -> None:
        """A node ended. The job hears of it, in time, and decides what follows."""
        node = self.nodes.get(lost.platform_id)
        if node is None or node.is_going:
            return
        chance = self.sim.chance.platform
        if lost.exit_code is not None:
            reason = exit_reason_of(lost.exit_code)
            if reason not in (NodeExit.SUCCEEDED, NodeExit.KILLED):
                self.sim.ledger.fail_node(lost.fleet_rank, lost.node_type)
            self.sim.events.after(span(chance, *NOTICED), self._end, node, reason, lost.exit_code)
        elif lost.is_power_lost and chance.random() > EVICTED_ODDS:
            self.sim.events.after(span(chance, *POWER_NOTICED), self._end, node, NodeExit.HARDWARE, None)
        else:
            window = POWER_NOTICED if lost.is_power_lost else NOTICED
            node.is_going = True
            self.sim.events.after(span(chance, *window), self._delete, lost.platform_id)

    def succeed(self, node: CloudNode) -> None:
        """A program without an agent has done its work."""
        node.has_ended = True
        self.sim.troubles.add()
        self.sim.events.after(span(self.sim.chance.platform, *NOTICED), self._end, node, NodeExit.SUCCEEDED, 0)

    def _end(self, node: CloudNode, reason: NodeExit, exit_code: int | None) -> None:
        """It is shown as ended until it is removed."""
        if self.nodes.get(node.launch.id) is not node or node.is_going:
            return
        node.phase = NodePhase.SUCCEEDED if reason is NodeExit.SUCCEEDED else NodePhase.FAILED
        node.exit_reason, node.exit_code = reason, exit_code
        self._changed(node, NodeEventKind.MODIFIED)

    def _obey(self, id_: PlatformId) -> None:
        self._delete(id_, is_ours=True)

    def _delete(self, id_: PlatformId, is_seen: bool = True, *, is_ours: bool = False) -> None:
        node = self.nodes.pop(id_, None)
        if node is None:
            return
        self.sim.troubles.add()
        if node.node is not None and node.node.is_powered:
            self.sim.machines.lose(node.node, is_seen=True)
        node.phase = NodePhase.DELETED
        node.exit_reason = node.exit_reason or (NodeExit.NONE if is_ours else NodeExit.KILLED)
        if is_seen:
            self._changed(node, NodeEventKind.DELETED)

    def evict(self, pick: int, *, is_seen: bool) -> bool:
        """Take some node away, whether it runs or waits; unseen: only the next list shows it."""
        there = [id_ for id_, node in sorted(self.nodes.items()) if not node.is_going]
        if not there:
            return False
        self._delete(there[pick % len(there)], is_seen)
        self.sim.ledger.num_lost_nodes += 1
        return True

    def fail(self, pick: int, exit_code: int) -> bool:
        """The processes of some node end badly, all at once."""
        running = [
            node
            for _, node in sorted(self.nodes.items())
            if node.is_alone or (node.node is not None and node.node.is_powered)
        ]
        if not running:
            return False
        picked = running[pick % len(running)]
        node = picked.node
        if node is None:
            self._fail_alone(picked, exit_code)
            return True
        node.exit_code = exit_code
        self.sim.machines.lose(node, is_seen=True)
        return True

    def _fail_alone(self, node: CloudNode, exit_code: int) -> None:
        """A program without an agent ends badly. One that serves may not return at all, so there 0 is as bad as 1."""
        if node.launch.node_type is NodeType.PS and exit_code == 1:
            exit_code = 0
        node.has_ended = True
        self.sim.ledger.fail_node(node.launch.rank, node.launch.node_type)
        reason = exit_reason_of(exit_code)
        self.sim.events.after(span(self.sim.chance.platform, *NOTICED), self._end, node, reason, exit_code)

    def running_ids(self) -> list[PlatformId]:
        return [id_ for id_, node in sorted(self.nodes.items()) if node.phase is NodePhase.RUNNING]

    def _changed(self, node: CloudNode, kind: NodeEventKind) -> None:
        driver = self.driver
        if driver is not None and driver.is_watching and driver.master.is_alive and not self.is_away:
            self._show(driver, NodeChanged(kind=kind, node=node.shown()))
        elif driver is not None and driver.is_watching and self.is_away:
            self._watch_soon(driver, 1.0, 5.0)

    def _check_single(self, launch: LaunchNode) -> None:
        """A second node of a rank is brought only while one is exchanged for it, or when the first was given up."""
        master = self.sim.masters.newest
        fleet = None if master is None else master.job.state.fleet
        if fleet is None or self.sim.masters.num_journals_lost or launch.id in self.asked_to_remove:
            return
        for id_, node in self.nodes.items():
            is_there = node.phase in (NodePhase.PENDING, NodePhase.RUNNING) and not node.is_going
            is_well = is_there and not node.has_ended and (node.node is None or node.node.is_powered)
            is_given_up = id_ in fleet.nodes and not fleet.nodes[id_].is_live  # its removal is being written
            is_wanted = not is_given_up and id_ not in self.asked_to_remove and fleet.migrations.get(id_) != launch.id
            is_same = (node.launch.node_type, node.launch.rank) == (launch.node_type, launch.rank)
            if is_well and is_wanted and is_same:
                raise Violation("fleet", f"{launch.name} is launched while {node.launch.name} has its rank")

    def _check_heard(self, id_: PlatformId, decided_at: int) -> None:
        """Whose node is to be removed does not train on until it is, if nothing kept it from hearing so."""
        cloud_node, master = self.nodes.get(id_), self.sim.masters.listening()
        node = None if cloud_node is None else cloud_node.node
        agent = None if node is None else node.agent
        if node is None or agent is None or master is None or self.sim.ended_at is not None:
            return
        connection = agent.channel.connection
        is_attached = agent.channel.is_attached and connection is not None and master.lines.get(connection) is not None
        is_held_up = node.link.is_cut or node.link.is_slow or agent.sleep.since is not None
        is_disturbed = node.disturbed_at >= decided_at or self.sim.masters.were_disturbed_since(decided_at)
        if agent.workers.is_training and is_attached and not is_held_up and not is_disturbed:
            raise Violation("fleet", f"{node.label} shall be removed, and trains on as if it had not been told")

    def _leaves_by_itself(self, node: CloudNode) -> bool:
        """Its removal need not be asked for."""
        return False

    def check_removed(self) -> None:
        """Nothing of a job that is over stays behind."""
        for id_ in [*self.nodes, *self.launching]:
            is_leaving = id_ in self.nodes and self._leaves_by_itself(self.nodes[id_])
            if id_ not in self.asked_to_remove and not is_leaving:
                raise Violation("fleet", f"the job is over, and the removal of node {id_} was not asked for")
