"""
A cloud that behaves as Kubernetes does: pods that terminate for a while, objects that outlive their machines, and a ledger.

An intent is entered into the ledger by one request and carried out by another. Between the two its master may crash, fall
asleep or be followed, and what was sent takes effect all the same: no request depends on another object. What an entry
means is judged by the platform's own code. A node that others delete is told as gone when its deletion begins, while its
agent still stops its workers.
"""

from __future__ import annotations

from dlrover.agent.decisions.departure import preempted
from dlrover.platforms.base import StaleMaster
from dlrover.platforms.kubernetes.job.ledger_state import LedgerEntry, LedgerState, entered, settled
from dlrover.protocol.messages.fleet import (
    FleetSpec,
    LaunchNode,
    NodeEventKind,
    NodeExit,
    NodePhase,
    RemoveNode,
    exit_reason_of,
)
from dlrover.protocol.messages.job import PlatformId
from dlrover.simulator.nodes.cloud import CALL, NOTICED, CloudDriver, Intent, VirtualCloud
from dlrover.simulator.parts import CloudNode, SimulationPart, VirtualNode
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.virtual_time import SECOND, micros, span

GRACE = (1.0, 60.0)
"""Seconds from the deletion to the kill of a pod whose agent does not end by itself."""
SETTLE = 1.0
"""Seconds until the mark of an answered create is cleared."""
SILENT_MACHINE = (50.0, 130.0)
"""Seconds until the cluster deletes pods of a machine that fell silent: not ready after 50, and 30 of tolerance."""
DEAD_MACHINE = 60.0
"""Seconds past the deletion after which a pod that we delete counts as gone although its object stays."""
COLLECTED = (60.0, 900.0)
"""Seconds until the object of a pod on a dead machine is gone, too."""
LAPSE = (0.0, 11.0)
"""Seconds for which the API server goes on accepting a master whose pod is gone."""
SENT_ODDS = 0.5
"""How often a request of a master that died had been sent before."""
EVICTED = 137
UNWANTED = 900.0
"""Seconds after which an unwanted pod has to be gone: three lists, without any fault meanwhile."""


class VirtualCluster(VirtualCloud):
    """Pods of one job, with their ledger."""

    def __init__(self, simulation: SimulationPart, spec: FleetSpec) -> None:
        super().__init__(simulation, spec)
        self.ledger = LedgerState()
        self._version = 0
        """Of the ledger. Each write carries the one that it was worked out for."""
        self._is_token_bound = self.sim.chance.platform.random() < 0.5
        """A master's access ends with its pod. Else only the ledger is between an old master and the pods."""
        self._lapsed_at: dict[int, int] = {}
        """Master epoch to when the API server refuses it."""
        self.interruption: int | None = None
        """So long the master sleeps, and is followed, between the next entry and what follows it."""
        self.num_conflicts = 0
        self.num_late_creates = 0
        self._made_late: dict[PlatformId, None] = {}
        self._created: dict[PlatformId, None] = {}

    # From an intent to a request.

    def _arrive(self, driver: CloudDriver, intent: Intent, pause: float) -> None:
        """The write of the ledger is at the API server."""
        if self._is_refused(intent):
            self._drop(intent)
            return
        if self.is_away:
            super()._arrive(driver, intent, pause)
            return
        try:
            state, entry = entered(self.ledger, intent)
        except StaleMaster:
            self.sim.note(f"the ledger refuses an intent of master epoch {intent.master_epoch}")
            self._drop(intent)
            self._close_lane(driver, intent)
            return
        if driver.ledger_version != self._version and state != self.ledger:
            self.num_conflicts += 1
            if not driver.master.is_alive:
                self._drop(intent)
                return
            driver.ledger_version = self._version  # it reads the ledger, and tries again
            self.sim.events.after(span(self.sim.chance.platform, *CALL), self._arrive, driver, intent, pause)
            return
        self._write(driver, state)
        self.launches[intent.id] = None
        if entry is LedgerEntry.CLOSED and isinstance(intent, LaunchNode):
            self._drop(intent)
            self._close_lane(driver, intent)
            return
        self.sim.events.after(span(self.sim.chance.platform, *CALL), self._carry_out, driver, intent, pause)

    def _carry_out(self, driver: CloudDriver, intent: Intent, pause: float) -> None:
        """The create or delete that follows the entry."""
        master, events = driver.master, self.sim.events
        self._interrupt(driver)
        if master.is_alive and master.is_stalled:
            events.after(SECOND, self._carry_out, driver, intent, pause)
            return
        if not master.is_alive and self.sim.chance.platform.random() >= SENT_ODDS:
            self._drop(intent)
            return
        if self._is_refused(intent):
            self._drop(intent)
            return
        super()._arrive(driver, intent, pause)
        if isinstance(intent, LaunchNode) and intent.id not in driver.lanes:
            events.after(micros(SETTLE), self._settle, driver, intent)

    def _interrupt(self, driver: CloudDriver) -> None:
        if self.interruption is not None and driver.master is self.sim.masters.newest and driver.master.is_awake:
            sleep, self.interruption = self.interruption, None
            self.sim.masters.replace(sleep=sleep)

    def _apply(self, intent: Intent) -> str:
        """The request itself. The API server knows nothing of the ledger."""
        node = self.nodes.get(intent.id)
        if isinstance(intent, RemoveNode):
            # Whoever runs the job now did not ask for what an older master deletes: to it that is an eviction.
            is_ours = intent.master_epoch >= self.ledger.epoch
            if node is not None and not node.is_going:
                self.sim.ledger.num_lost_nodes += not is_ours
                self._terminate(node, is_ours=is_ours)
            elif node is not None:
                node.is_ours |= is_ours
            return ""
        if node is not None:
            return "a pod of this name terminates" if node.is_going else ""
        if self.is_refusing and intent.id % 2:
            return "exceeded quota"
        if self.ledger.span_of(intent.id) is None:
            raise Violation("pods", f"{intent.name} is created, and the ledger does not know its id")
        is_repeated = intent.id in self._created
        self._created[intent.id] = None
        if intent.id in self.asked_to_remove or intent.master_epoch < self.ledger.epoch or is_repeated:
            self._late_create(intent)
        else:
            self._check_single(intent)
        self._create(intent)
        return ""

    def _write(self, driver: CloudDriver, state: LedgerState) -> None:
        if state.epoch < self.ledger.epoch:
            raise Violation("pods", f"master epoch {state.epoch} writes the ledger after {self.ledger.epoch} has")
        if state != self.ledger:
            self._version += 1
            self.ledger = state
            self.master_epoch = state.epoch
        driver.ledger_version = self._version

    def _settle(self, driver: CloudDriver, intent: LaunchNode) -> None:
        """Clearing a mark is a courtesy: it is not repeated, and the next master finds the node."""
        if driver.master.is_awake and self.driver is driver and not self.is_away and not self._is_refused(intent):
            self._write(driver, settled(self.ledger, {intent.id: intent.master_epoch}))

    def _drop(self, intent: Intent) -> None:
        """The request comes to nothing."""
        self._num_calls -= 1
        if isinstance(intent, LaunchNode):
            self.launching.pop(intent.id, None)

    def _close_lane(self, driver: CloudDriver, intent: Intent) -> None:
        if not driver.master.is_alive or self.driver is not driver:
            return
        newest = driver.lanes.get(intent.id)
        if newest is intent:
            del driver.lanes[intent.id]
        elif newest is not None:
            self._call(driver, newest)

    def _is_refused(self, intent: Intent) -> bool:
        """The master's pod is gone for long enough, and with it its token."""
        newest = self.sim.masters.newest
        if not self._is_token_bound or newest is None or intent.master_epoch >= newest.master_epoch:
            return False
        lapses_at = self._lapsed_at.get(intent.master_epoch)
        if lapses_at is None:
            lapses_at = self.sim.events.now + span(self.sim.chance.platform, *LAPSE)
            self._lapsed_at[intent.master_epoch] = lapses_at
        return self.sim.events.now >= lapses_at

    # From a deletion to an end.

    def _terminate(self, node: CloudNode, *, is_ours: bool, reason: NodeExit = NodeExit.KILLED) -> None:
        """The deletion time is set. What others delete counts as gone from here on; what we delete, when it is."""
        chance, events = self.sim.chance.platform, self.sim.events
        node.is_going = True
        node.is_ours = is_ours
        self.sim.troubles.add()
        if not is_ours and node.phase in (NodePhase.PENDING, NodePhase.RUNNING):
            node.phase, node.exit_reason = NodePhase.DELETED, reason
            self._changed(node, NodeEventKind.DELETED)
        machine = node.node
        if machine is not None and machine.is_power_lost:
            events.after(micros(DEAD_MACHINE), self._tell_ours, node)
            events.after(span(chance, *COLLECTED), self._gone, node)
            return
        agent = None if machine is None or not machine.is_powered else machine.agent
        if agent is None or agent.sleep.since is not None:
            events.after(span(chance, 0.0, GRACE[1] if agent is not None else 1.0), self._gone, node)
            return
        if not agent.me.is_leaving:
            agent.leave(preempted("the platform"))
        events.after(span(chance, *GRACE), self._gone, node)

    def _tell_ours(self, node: CloudNode) -> None:
        if self.nodes.get(node.launch.id) is node and node.is_ours and node.phase is not NodePhase.DELETED:
            node.phase = NodePhase.DELETED
            self._changed(node, NodeEventKind.DELETED)

    def _gone(self, node: CloudNode) -> None:
        """The object is gone, and with it whatever ran."""
        if self.nodes.get(node.launch.id) is not node:
            return
        del self.nodes[node.launch.id]
        self.sim.troubles.add()
        if node.node is not None and node.node.is_powered:
            self.sim.machines.lose(node.node, is_seen=True)
        if node.phase is not NodePhase.DELETED:
            node.phase = NodePhase.DELETED
            node.exit_reason = node.exit_reason or (NodeExit.NONE if node.is_ours else NodeExit.KILLED)
            self._changed(node, NodeEventKind.DELETED)

    def replace(self, lost: VirtualNode) -> None:
        """The processes of a pod have ended, or its machine has."""
        node = self.nodes.get(lost.platform_id)
        if node is None or node.node is not lost:
            return
        chance, events = self.sim.chance.platform, self.sim.events
        if node.is_going:
            if not lost.is_power_lost:
                events.after(span(chance, *NOTICED), self._gone, node)
        elif lost.is_power_lost:
            events.after(span(chance, *SILENT_MACHINE), self._delete_silent, node)
        elif lost.exit_code is None:
            events.after(span(chance, *NOTICED), self._delete_silent, node)
        else:
            reason = exit_reason_of(lost.exit_code)
            if reason not in (NodeExit.SUCCEEDED, NodeExit.KILLED):
                self.sim.ledger.fail_node(lost.fleet_rank, lost.node_type)
            events.after(span(chance, *NOTICED), self._end, node, reason, lost.exit_code)

    def _delete_silent(self, node: CloudNode) -> None:
        if self.nodes.get(node.launch.id) is node and not node.is_going:
            self._terminate(node, is_ours=False)

    def evict(self, pick: int, *, is_seen: bool) -> bool:
        """Deleted by others, evicted by its kubelet, or gone while no watch ran."""
        there = [node for _, node in sorted(self.nodes.items()) if not node.is_going]
        if not there:
            return False
        node = there[pick // 2 % len(there)]
        self.sim.ledger.num_lost_nodes += 1
        if not is_seen:
            self._delete(node.launch.id, is_seen=False)
        elif pick % 2 or node.phase is not NodePhase.RUNNING:
            self._terminate(node, is_ours=False)
        else:
            self._evict_by_kubelet(node)
        return True

    def _evict_by_kubelet(self, node: CloudNode) -> None:
        """The pod fails and its object stays, until it is removed."""
        machine = node.node
        node.has_ended = True
        if machine is not None and machine.is_powered:
            machine.exit_code = EVICTED
            self.sim.machines.lose(machine, is_seen=True)
            return
        self.sim.events.after(span(self.sim.chance.platform, *NOTICED), self._end, node, NodeExit.KILLED, EVICTED)

    # What must hold.

    def _leaves_by_itself(self, node: CloudNode) -> bool:
        """
        The cluster deletes it already, which on a dead machine takes longer than the job. Or it was made late, and the job ended
        before the master found it: the operator removes the running pods of an ended job.
        """
        return node.is_going or node.launch.id in self._made_late

    def _late_create(self, intent: LaunchNode) -> None:
        """
        It was removed, or its master followed, while its create was under way; or the answer to a first create was lost, and the
        pod was evicted before the second. The master that runs the job now finds the node, and either wants it or removes it.
        """
        self.num_late_creates += 1
        self._made_late[intent.id] = None
        self.sim.events.after(micros(UNWANTED), self._check_unwanted, intent.id, self.sim.events.now)

    def _check_unwanted(self, id_: PlatformId, since: int) -> None:
        node, sim = self.nodes.get(id_), self.sim
        if node is None or node.is_going or sim.ended_at is not None or sim.is_over:
            return
        if node.phase not in (NodePhase.PENDING, NodePhase.RUNNING):
            return
        if self.is_away or not sim.troubles.was_calm_since(since):
            sim.events.after(micros(UNWANTED), self._check_unwanted, id_, sim.events.now)
            return
        master = sim.masters.listening()
        fleet = None if master is None else master.job.state.fleet
        known = None if fleet is None else fleet.nodes.get(id_)
        if fleet is not None and (known is None or not known.is_live):
            raise Violation("pods", f"{node.launch.name} was created late, and the job neither wants nor removes it")
