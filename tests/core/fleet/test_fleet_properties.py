"""
Random lives of a job with a platform, against I5, I7 and what the fleet promises about itself.

The platform starts, fails, takes away and forgets nodes, tells of it late, twice or not at all; agents come, finish, fall
silent; people scale, exchange, suspend and restart; masters die in between. After each command the fleet is checked, and
who paid for a new node is counted a second time, from outside. At the end faults stop, and the job has to go on or to
have ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dlrover.core.commit_order import replay
from dlrover.core.fleet.platform_news import UNSEEN_TOO_LONG
from dlrover.core.fleet.relaunch import ENDED, is_failure
from dlrover.core.job import Origin, Outcome
from dlrover.core.membership.departures import DRAIN_MARGIN
from dlrover.core.membership.forming import is_all_finished
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import (
    DefineFleet,
    ErrorLevel,
    FleetSpec,
    MigrateNode,
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodesListed,
    NodeType,
    PlatformNode,
    PsReady,
    ReplicaSpec,
    ReportNodeError,
    Resource,
    RestartJob,
    ResumeJob,
    ScaleJob,
    ScaleReplicas,
    SizeReplicas,
    Strategy,
    SuspendJob,
)
from dlrover.protocol.messages.job import (
    Command,
    ExitReason,
    FailureKind,
    Join,
    LeaveReason,
    PlatformId,
    RestartPolicy,
    Run,
    Stage,
)
from tests.core.fleet.fleet_scene import FleetScene, workers
from tests.core.scene import failure, terms

INDEX = st.integers(0, 11)
PEOPLE = (DefineFleet, NodesListed, ScaleJob, ScaleReplicas, SizeReplicas, MigrateNode, RestartJob)
"""Commands that want nodes for other reasons than an end; a list may bring back what was lost with a journal."""


@dataclass
class CountedScene(FleetScene):
    """
    Counts once more, from outside, which nodes were paid by a rank's budget.

    A new node replaces the node of its rank that this command ended. The newest node of the rank is another one where an
    exchange is under way: its failure ends the exchange, and the node that was to be exchanged keeps the rank.
    """

    paid: dict[tuple[NodeType, int], int] = field(default_factory=dict)

    def do(self, command: Command, origin: Origin | None = None) -> Outcome:
        before = {} if self.job.state.fleet is None else dict(self.job.state.fleet.nodes)
        live = {id_ for id_, node in before.items() if node.is_live}
        outcome = super().do(command, origin)
        if isinstance(command, PEOPLE) or self.job.state.fleet is None:
            return outcome
        for node in self.fleet.nodes.values():
            key = (node.node_type, node.rank)
            former = [other for other in before.values() if (other.node_type, other.rank) == key]
            if node.id in before or not former:
                continue
            replaced = max(former, key=lambda other: (other.id in live and not other.is_live, other.id))
            if not replaced.is_live and is_failure(replaced.exit_reason):
                self.paid[key] = self.paid.get(key, 0) + 1
                assert self.paid[key] <= self.fleet.replicas[node.node_type].budget(node.rank), f"I7: {key}"
        return outcome


@contextlib.contextmanager
def perhaps_refused() -> Iterator[None]:
    """What is tried may be refused; that nothing changes then is checked by the scene."""
    with contextlib.suppress(Rejected):
        yield


class FleetLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.seen: dict[int, None] = {}
        """Nodes that came when nobody wanted them any more."""

    @initialize(
        low=st.integers(1, 3),
        more=st.integers(0, 2),
        standby=st.integers(0, 1),
        budget=st.integers(0, 2),
        critical=st.sampled_from(["", "all", "0:1"]),
        is_ps=st.booleans(),
        has_evaluator=st.booleans(),
        remove=st.booleans(),
        window=st.sampled_from([0.0, 3600.0]),
    )
    def begin(
        self,
        low: int,
        more: int,
        standby: int,
        budget: int,
        critical: str,
        is_ps: bool,
        has_evaluator: bool,
        remove: bool,
        window: float,
    ) -> None:
        self.is_ps = is_ps
        replicas = workers(low + more, max_relaunches=budget, critical=critical)
        affinity = {0: low, 3: more} if more else {}
        if is_ps:
            resource = Resource(cpu=16.0, memory_mb=8192)
            replicas[NodeType.PS] = ReplicaSpec(count=2, max_relaunches=budget, resource=resource)
        if has_evaluator:
            replicas[NodeType.EVALUATOR] = ReplicaSpec(count=1, max_relaunches=budget)
        spec = FleetSpec(
            replicas=replicas,
            strategy=Strategy.PS if is_ps else Strategy.ALLREDUCE,
            standby=standby,
            remove_exited=remove,
            group_affinity=affinity,
            failure_window=window,
        )
        policy = RestartPolicy(max_restarts=1)
        self.scene = CountedScene(terms(low, low + more, policy, join_timeout=60.0))
        self.scene.begin(spec)

    def pick(self, index: int) -> int | None:
        """Some node that the platform has."""
        nodes = sorted(self.scene.cloud)
        return nodes[index % len(nodes)] if nodes else None

    def agents(self) -> list[str]:
        """Those of whom the job knows this very life."""
        live = self.scene.job.state.nodes.live
        return [
            name
            for name, agent in self.scene.agents.items()
            if agent.node in live and live[agent.node].incarnation == agent.incarnation
        ]

    def everybody_joins(self) -> None:
        for name in self.agents():
            if isinstance(self.scene.wish(name), Join):
                self.scene.join(name)

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 60.0, 400.0, 1000.0]), is_obeyed=st.booleans())
    def wait(self, seconds: float, is_obeyed: bool) -> None:
        self.seconds += seconds
        self.scene.tick(self.seconds)
        if is_obeyed:
            self.everybody_joins()

    @rule(index=INDEX, phase=st.sampled_from(NodePhase), reason=st.sampled_from(NodeExit), code=st.none() | st.just(1))
    def show(self, index: int, phase: NodePhase, reason: NodeExit, code: int | None) -> None:
        node = self.pick(index)
        if node is not None:
            self.scene.show(node, phase, exit_reason=reason, exit_code=code, host=f"host-{index}")
            if phase is NodePhase.DELETED:
                self.scene.cloud.pop(node, None)

    @rule()
    def everything_runs(self) -> None:
        for node in sorted(self.scene.cloud):
            if node in self.scene.cloud and self.scene.cloud[node].phase not in ENDED:
                self.scene.run(node)

    @rule(index=INDEX, reason=st.sampled_from([NodeExit.NONE, NodeExit.KILLED, NodeExit.HARDWARE]))
    def vanish(self, index: int, reason: NodeExit) -> None:
        node = self.pick(index)
        if node is not None:
            self.scene.vanish(node, exit_reason=reason)

    @rule(index=INDEX, kind=st.sampled_from(NodeEventKind), phase=st.sampled_from(NodePhase))
    def tell_of_the_past(self, index: int, kind: NodeEventKind, phase: NodePhase) -> None:
        """An old event arrives again, or about a node that is long gone."""
        launches = list(self.scene.launches.values())
        if launches:
            launch = launches[index % len(launches)]
            seen = PlatformNode(
                id=launch.id, node_type=launch.node_type, rank=launch.rank, phase=phase, name=launch.name
            )
            if phase in (NodePhase.PENDING, NodePhase.RUNNING) and kind is not NodeEventKind.DELETED:
                if launch.id not in self.scene.cloud:
                    return  # a platform does not bring back what it has ended
            elif launch.id in self.scene.cloud:
                return
            self.scene.do(NodeChanged(kind=kind, node=seen))

    @rule(index=INDEX, phase=st.sampled_from([NodePhase.PENDING, NodePhase.RUNNING]))
    def launch_takes_effect_late(self, index: int, phase: NodePhase) -> None:
        """Of a node that was never seen, and has been let go meanwhile."""
        late = [
            launch
            for launch in self.scene.launches.values()
            if launch.id in self.scene.removals and launch.id not in self.scene.cloud and launch.id not in self.seen
        ]
        if late:
            launch = late[index % len(late)]
            self.seen[launch.id] = None
            self.scene.cloud[launch.id] = PlatformNode(
                id=launch.id, node_type=launch.node_type, rank=launch.rank, phase=phase, name=launch.name
            )
            self.scene.show(launch.id, phase)

    @rule(is_lossy=st.booleans(), index=INDEX)
    def list_again(self, is_lossy: bool, index: int) -> None:
        node = self.pick(index)
        if is_lossy and node is not None:
            del self.scene.cloud[node]
        self.scene.list()

    @rule(index=INDEX)
    def come(self, index: int) -> None:
        node = self.pick(index)
        known = None if node is None else self.scene.fleet.nodes.get(PlatformId(node))
        if node is not None and known is not None and known.node_type is NodeType.WORKER:
            with perhaps_refused():
                self.scene.attach(f"n{node}", rank=known.rank)

    @rule()
    def everybody_comes(self) -> None:
        for index in range(len(self.scene.cloud)):
            self.come(index)
        self.everybody_joins()

    @rule(index=INDEX, kind=st.sampled_from([FailureKind.EXCEPTION, FailureKind.EXIT_CODE, FailureKind.PEER_LOST]))
    def workers_fail(self, index: int, kind: FailureKind) -> None:
        names = self.agents()
        if names and self.scene.job.state.rendezvous.round:
            code = 201 if kind is FailureKind.EXIT_CODE else None
            self.scene.fail(names[index % len(names)], failure(kind, at=self.seconds, exit_code=code))

    @rule(index=INDEX, what=st.sampled_from(["silent", "break", "restart", "finish", "error"]))
    def agent_does(self, index: int, what: str) -> None:
        names = self.agents()
        if not names:
            return
        name = names[index % len(names)]
        agent = self.scene.agents[name]
        match what:
            case "silent":
                self.scene.silent(name)
            case "break":
                self.scene.break_stream(name)
            case "restart":
                with perhaps_refused():
                    self.scene.restart_agent(name)
            case "finish" if self.scene.job.state.rendezvous.round:
                self.scene.finish(name)
            case "error":
                self.scene.do(
                    ReportNodeError(
                        node=agent.node, incarnation=agent.incarnation, level=ErrorLevel.NODE, message="ECC error"
                    )
                )

    @rule(index=INDEX, reason=st.sampled_from(LeaveReason))
    def leave(self, index: int, reason: LeaveReason) -> None:
        names = self.agents()
        if names:
            self.scene.leave(names[index % len(names)], reason)

    @rule(low=st.integers(1, 3), more=st.integers(0, 3), kind=st.sampled_from(NodeType))
    def scale(self, low: int, more: int, kind: NodeType) -> None:
        with perhaps_refused():
            if self.is_ps:
                self.scene.do(ScaleReplicas(node_type=kind, count=low + more))
            else:
                self.scene.do(ScaleJob(min_nodes=low, max_nodes=low + more))

    @rule(kind=st.sampled_from(NodeType), cpu=st.integers(-1, 8))
    def size(self, kind: NodeType, cpu: int) -> None:
        with perhaps_refused():
            self.scene.do(SizeReplicas(node_type=kind, resource=Resource(cpu=cpu)))

    @rule(index=INDEX)
    def migrate(self, index: int) -> None:
        node = self.pick(index)
        if node is not None:
            with perhaps_refused():
                self.scene.do(MigrateNode(node=PlatformId(node), resource=Resource(cpu=9)))

    @rule(command=st.sampled_from([SuspendJob(), ResumeJob(), ResumeJob(), RestartJob(), PsReady(), PsReady()]))
    def people_do(self, command: Command) -> None:
        with perhaps_refused():
            self.scene.do(command)

    @rule(outage=st.sampled_from([0.0, 100.0]), is_listed=st.booleans())
    def master_restarts(self, outage: float, is_listed: bool) -> None:
        self.seconds += outage
        self.scene.at(self.seconds).restart_master()
        if is_listed:
            self.scene.list()

    @precondition(lambda self: self.scene.job.end is not None)
    @rule()
    def nothing_is_launched_after_the_end(self) -> None:
        launched = list(self.scene.launched)
        self.scene.list()
        assert self.scene.launched == launched

    def teardown(self) -> None:
        if hasattr(self, "scene"):
            assert replay(None, self.scene.journal).job.encode() == self.scene.job.encode(), "I5"
            self.faults_stop()

    def faults_stop(self) -> None:
        """I8: the platform gives what is asked for, agents do what they should: the job goes on, or ends."""
        scene = self.scene
        if scene.job.stage is Stage.SUSPENDED:
            scene.do(ResumeJob())
        for _ in range(12):
            scene.list()
            self.everything_runs()
            if not self.is_ps:
                self.everybody_comes()
            if scene.job.end is not None or self.is_well():
                break
            at = scene.job.next_deadline()
            self.seconds = max(self.seconds + UNSEEN_TOO_LONG, 0.0 if at is None else at / 1e6)
            scene.tick(self.seconds)
        if scene.job.end is None:
            assert self.is_well(), scene.job.status()
            return
        scene.tick(self.seconds + scene.terms.shutdown_timeout + DRAIN_MARGIN)
        assert scene.job.stage is Stage.STOPPED
        scene.list()
        assert not scene.cloud, "nothing of an ended job remains on the platform"

    def is_well(self) -> bool:
        scene, fleet = self.scene, self.scene.fleet
        if self.is_ps:
            return all(not replicas.pending for replicas in fleet.replicas.values())
        state = scene.job.state
        have_ended = bool(fleet.replicas[NodeType.WORKER].finished) and not any(fleet.live_nodes(NodeType.WORKER))
        if have_ended or is_all_finished(state.rendezvous):
            return any(fleet.live_nodes(NodeType.EVALUATOR))
        return state.rendezvous.is_active and any(
            isinstance(node.desired.wish, Run) for node in state.nodes.live.values()
        )


def test_workers_that_ended_without_an_agent_leave_the_job_to_its_evaluator() -> None:
    """Found as a counterexample to I8: the job is well, because it ends with the evaluator."""
    life = FleetLife()
    life.begin(
        low=1, more=0, standby=1, budget=0, critical="", is_ps=False, has_evaluator=True, remove=True, window=0.0
    )
    life.everything_runs()
    life.list_again(index=0, is_lossy=True)
    for index in (0, 1):
        life.show(code=None, index=index, phase=NodePhase.SUCCEEDED, reason=NodeExit.NONE)
    life.faults_stop()
    assert life.scene.job.end is None
    [evaluator] = life.scene.fleet.live_nodes(NodeType.EVALUATOR)
    life.scene.show(evaluator.id, NodePhase.SUCCEEDED)
    assert life.scene.job.end is not None
    assert life.scene.job.end.reason is ExitReason.COMPLETED


TestFleetLife = FleetLife.TestCase
TestFleetLife.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.explain],
    suppress_health_check=[HealthCheck.too_slow],
)
