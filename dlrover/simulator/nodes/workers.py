"""
The workers of a virtual agent: started for a world, stopped for the next one, with ends of their own.

As `dlrover/agent/workers/driver.py` does, it approaches what is wanted one step at a time: workers of another world are stopped
first, however often the wish changes meanwhile.
"""

from __future__ import annotations

from dlrover.agent.decisions.last_breath import DEATHS
from dlrover.protocol.messages.job import (
    FailureKind,
    Micros,
    ReportFailure,
    Round,
    StopCause,
    WorkerFailure,
    WorldSpec,
)
from dlrover.simulator.parts import AgentPart, SimulationPart, VirtualGroup
from dlrover.simulator.truth import worlds
from dlrover.simulator.virtual_time import SECOND, span

PATIENCE = (0.0, 1.0)
"""Seconds for workers to fail as the others did, before they are stopped."""
LATE_FAILURE_ODDS = 0.02
"""How often workers that are being stopped turn out to have failed by themselves."""

_SIGNALS = {FailureKind.SIGNAL: 11, FailureKind.OUT_OF_MEMORY: 9, FailureKind.STOPPED_BY_US: 9}


class Workers:
    """Of one agent."""

    def __init__(self, agent: AgentPart) -> None:
        self._agent = agent
        self._sim = agent.sim
        self.group: VirtualGroup | None = None
        self._target: WorldSpec | None = None
        self._cause = StopCause.MEMBERSHIP
        self._is_patient = False
        self._num_groups = 0

    # What is wanted.

    @property
    def running_round(self) -> Round:
        return self.group.world.round if self.group is not None else Round(0)

    @property
    def is_wanted(self) -> bool:
        return self._target is not None

    @property
    def is_settled(self) -> bool:
        return self._target is (None if self.group is None else self.group.world)

    @property
    def is_patient(self) -> bool:
        return self._is_patient and not self.is_settled

    def want(self, world: WorldSpec) -> None:
        self._target = world
        self._approach()

    def want_none(self, cause: StopCause, *, is_patient: bool = False) -> None:
        self._target, self._cause = None, cause
        self._is_patient = is_patient and _may_be_mistaken(self._sim, self.group)
        self._approach()

    def _approach(self) -> None:
        group = self.group
        if group is not None:
            if group.world is not self._target and not group.is_stopping:
                self._begin_stop(group)
        elif self._target is not None and self._agent.is_alive:
            self._begin_start(self._target)

    def _begin_start(self, world: WorldSpec) -> None:
        costs, chance = self._sim.shape.costs, self._sim.chance.nodes
        group = self.group = VirtualGroup(world, self._sim.events.now)
        if world.task is None:
            worlds.workers_starting(self._sim, self._agent, world)
        is_cold = not self._num_groups and not self._sim.shape.has_warm_up
        low, high = costs.first_start if is_cold else costs.worker_start
        self._num_groups += 1
        duration = span(chance, low, high)
        self._sim.events.after(duration * 20 if self._agent.node.is_slow else duration, self._end_start, group)

    def _end_start(self, group: VirtualGroup) -> None:
        if self.group is not group or group.is_stopping or self._agent.sleep.puts_off(self._end_start, group):
            return
        group.is_up = True
        if group.world.task is not None:
            assert self._sim.tasks is not None, "of a job without servers"
            self._sim.tasks.started(self._agent, group)
            return
        if group.world.first_global_rank == 0 and self._sim.troubles.is_port_taken():
            self.fail(FailureKind.PORT_TAKEN)
            return
        self._sim.training.started(group.world, self._agent.node.number)

    def _begin_stop(self, group: VirtualGroup, kind: FailureKind | None = None) -> None:
        costs, chance = self._sim.shape.costs, self._sim.chance.nodes
        group.is_stopping = True
        if group.is_up:
            worlds.workers_ended(self._sim, self._agent, group, kind)
        is_stubborn = chance.random() < 0.05
        duration = span(chance, *(costs.stubborn_stop if is_stubborn else costs.stop)) if group.is_up else 1000
        if self._is_patient:
            duration += span(chance, *PATIENCE)
        self._sim.events.after(duration, self._end_stop, group)

    def _end_stop(self, group: VirtualGroup) -> None:
        if self.group is not group or self._agent.sleep.puts_off(self._end_stop, group):
            return
        self.group = None
        is_leaving = self._agent.me.is_leaving
        is_late = group.is_up and group.finishes_at is None and self._cause is StopCause.FAILURE
        if is_late and not is_leaving and self._sim.chance.nodes.random() < LATE_FAILURE_ODDS:
            self._sim.ledger.charge(self._agent)
            _report(self._agent, group, FailureKind.EXCEPTION, "late")
        if is_leaving:
            self._agent.leaving.go_when_stopped()
        self._approach()
        self._agent.workers_stopped()

    # What becomes of them.

    def finish(self, coordinator: str) -> None:
        """All workers of that world have done their work."""
        agent, group, now = self._agent, self.group, self._sim.events.now
        if not agent.is_alive or group is None or group.world.coordinator != coordinator or group.is_stopping:
            return
        if agent.sleep.puts_off(self.finish, coordinator):
            return
        group.finishes_at = now
        step = self._sim.training.step(coordinator)
        self.want_none(StopCause.END_OF_JOB)
        agent.do(agent.decisions.finished(group.world.round, step, now / SECOND))
        if agent.channel.outage_since is not None:
            agent.channel.plan_outage_check()

    def fail(self, kind: FailureKind, traceback: str = "") -> bool:
        """A worker ends badly. Returns whether there was one."""
        group = self.group
        if not self._agent.is_alive or group is None or not group.is_up or group.is_stopping:
            return False
        self._target, self._cause = None, StopCause.FAILURE
        self._is_patient = _may_be_mistaken(self._sim, self.group)
        _report(self._agent, group, kind, traceback)
        if kind in DEATHS:
            self._sim.breaths.failed(group, is_local=kind is not FailureKind.PEER_LOST)
        self._begin_stop(group, kind)
        return True

    def kill(self) -> None:
        """They run for an agent that slept too long."""
        if self.is_training:
            self._sim.ledger.charge(self._agent)
            self.fail(FailureKind.STOPPED_BY_US)

    def lose_peer(self, coordinator: str) -> None:
        """A collective fails because a worker of another node is gone."""
        group = self.group
        if group is not None and group.world.coordinator == coordinator and self._agent.sleep.since is None:
            self.fail(FailureKind.PEER_LOST)

    def die(self) -> None:
        """With their agent."""
        group, self.group = self.group, None
        if group is not None and group.is_up:
            worlds.workers_ended(self._sim, self._agent, group, None)

    # What is known of them.

    def runs(self, coordinator: str) -> bool:
        """Whether those of that world are up and not being stopped."""
        group = self.group
        return group is not None and group.world.coordinator == coordinator and group.is_up and not group.is_stopping

    @property
    def is_training(self) -> bool:
        """Whether those of some world are up and not being stopped."""
        return self._agent.is_alive and self.group is not None and self.group.is_up and not self.group.is_stopping

    def told_step(self) -> int | None:
        """What the newest heartbeat said."""
        return None if self.group is None else self._sim.training.step(self.group.world.coordinator)


def _may_be_mistaken(sim: SimulationPart, group: VirtualGroup | None) -> bool:
    """Whether the script may have a mistake, as `WorkerGroup` sees it."""
    if group is None or group.world.round != 1 or sim.shape.restarts.max_restarts is not None:
        return False
    return sim.training.step(group.world.coordinator) is None


def _report(agent: AgentPart, group: VirtualGroup, kind: FailureKind, traceback: str) -> None:
    sim, now = agent.sim, agent.sim.events.now
    failure = WorkerFailure(
        global_rank=group.world.first_global_rank,
        local_rank=0,
        pid=agent.node.number * 100 + agent.node.num_agents,
        kind=kind,
        exited_at=Micros(max(0, now + agent.clock_offset)),
        exit_code=1 if kind not in _SIGNALS else None,
        signal=_SIGNALS.get(kind),
        message=kind.value,
        traceback=traceback,
    )
    report = ReportFailure(
        node=agent.id,
        incarnation=agent.incarnation,
        round=group.world.round,
        failures=(failure,),
        step=sim.training.step(group.world.coordinator),
        lived=(now - group.started_at) / SECOND,
        has_whole_state=sim.shape.has_replicas,
    )
    agent.do(agent.decisions.failed(report))
