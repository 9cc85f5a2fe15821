"""
Random lives of a job against the invariants of the design (§7).

Several agents do what agents do and what they should not: repeat commands, speak from a former life, join wrong rounds,
die, come back, while the master restarts in between. After each command `check_invariants` looks at I1, I2, I5 and I7,
and `Scene.do` at I6: whatever is refused has changed nothing. At the end faults stop, and the job has to make progress.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dlrover.core.job import Job, Origin
from dlrover.core.sequence import CommitSequence, replay
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages import (
    Command,
    FailureKind,
    Join,
    JoinRendezvous,
    LeaveJob,
    LeaveReason,
    NodeDisconnected,
    NodeSilent,
    ReportFailure,
    ReportFinished,
    RestartPolicy,
    Round,
    Run,
    Stage,
)
from tests.core.scene import Agent, Scene, failure, micros, terms

NAMES = "abcdef"
FAULTS = [kind for kind in FailureKind if kind is not FailureKind.BAD_SCRIPT]  # that one ends every job at once


@contextlib.contextmanager
def refused_only(*codes: str) -> Iterator[None]:
    """What is tried may be refused, but for no other reason."""
    try:
        yield
    except Rejected as error:
        if error.code not in codes:
            raise


def commands_of(agent: Agent, round_: int) -> list[Command]:
    """One of each kind that names a node, as this agent would send it."""
    node, incarnation = agent.node, agent.incarnation
    return [
        JoinRendezvous(
            node=node, incarnation=incarnation, round=Round(round_), local_world_size=1, offer=f"late-{agent.name}:1"
        ),
        ReportFailure(node=node, incarnation=incarnation, round=Round(round_), failures=(failure(),)),
        ReportFinished(node=node, incarnation=incarnation, round=Round(round_)),
        LeaveJob(node=node, incarnation=incarnation, reason=LeaveReason.FAILED),
        NodeDisconnected(node=node, incarnation=incarnation),
        NodeSilent(node=node, incarnation=incarnation, last_seen_at=micros(0)),
    ]


class JobLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.past: list[Agent] = []
        self.num_launches = 0

    @initialize(
        unit=st.integers(1, 2),
        low=st.integers(1, 2),
        more=st.integers(0, 2),
        max_restarts=st.none() | st.integers(0, 2),
    )
    def begin(self, unit: int, low: int, more: int, max_restarts: int | None) -> None:
        policy = RestartPolicy(max_restarts=max_restarts)
        self.scene = Scene(
            terms(low * unit, (low + more) * unit, policy, node_unit=unit, last_call=30.0, join_timeout=60.0)
        )

    def agent(self, name: str) -> Agent | None:
        """The agent of that name if the job still knows this very life of it."""
        agent = self.scene.agents.get(name)
        live = None if agent is None else self.scene.job.state.nodes.live.get(agent.node)
        return agent if live is not None and agent is not None and live.incarnation == agent.incarnation else None

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 4.0, 5.0, 30.0, 40.0]))
    def wait_and_tick(self, seconds: float) -> None:
        self.seconds += seconds
        self.scene.tick(self.seconds)

    @rule(name=st.sampled_from(NAMES), rank=st.none() | st.integers(0, 3))
    def launch(self, name: str, rank: int | None) -> None:
        self.num_launches += 1
        former = self.scene.agents.pop(name, None)
        if former is not None:
            self.past.append(former)
        with refused_only("rank-held"):
            self.scene.attach(name, rank=rank, launch=f"launch-{name}-{self.num_launches}")

    @rule(name=st.sampled_from(NAMES))
    def come_back(self, name: str) -> None:
        agent = self.scene.agents.get(name)
        if agent is None:
            return
        node = next((one for one in self.scene.job.state.nodes.in_rank_order() if one.id == agent.node), None)
        if node is None:
            return
        before = dataclasses.replace(agent)
        with refused_only("stale-incarnation"):
            attached = self.scene.attach(name, launch=node.launch)
            if attached.incarnation != before.incarnation:
                self.past.append(before)

    @rule(name=st.sampled_from(NAMES))
    def agent_restarts(self, name: str) -> None:
        agent = self.agent(name)
        if agent is not None:
            self.past.append(agent)
            launch = self.scene.job.state.nodes.live[agent.node].launch
            self.scene.restart_agent(name, launch=launch)

    @rule(name=st.sampled_from(NAMES), is_wrong=st.booleans())
    def join(self, name: str, is_wrong: bool) -> None:
        if self.agent(name) is None:
            return
        with refused_only("stale-round", "finished", "job-ended"):
            self.scene.join(name, round_=self.scene.job.state.rendezvous.round if is_wrong else None)

    @rule()
    def obey(self) -> None:
        """Everybody who is asked to join does."""
        for name in sorted(self.scene.agents):
            if self.agent(name) is not None and isinstance(self.scene.wish(name), Join):
                self.scene.join(name)

    @rule(
        name=st.sampled_from(NAMES),
        kind=st.sampled_from(FAULTS),
        step=st.none() | st.integers(0, 20),
        ago=st.floats(0, 2),
        is_late=st.booleans(),
    )
    def fail(self, name: str, kind: FailureKind, step: int | None, ago: float, is_late: bool) -> None:
        newest = self.scene.job.state.rendezvous.round
        if self.agent(name) is None or newest - is_late < 1:
            return
        died = failure(kind, at=max(0.0, self.seconds - ago), traceback="boom" if step else "")
        self.scene.fail(name, died, round_=newest - is_late, step=step)

    @rule(name=st.sampled_from(NAMES))
    def finish(self, name: str) -> None:
        if self.agent(name) is not None and self.scene.job.state.rendezvous.round:
            self.scene.finish(name)

    @rule(name=st.sampled_from(NAMES), reason=st.sampled_from(LeaveReason))
    def leave(self, name: str, reason: LeaveReason) -> None:
        if self.agent(name) is not None:
            self.scene.leave(name, reason)

    @rule(name=st.sampled_from(NAMES), is_silent=st.booleans())
    def vanish(self, name: str, is_silent: bool) -> None:
        if self.agent(name) is not None:
            self.scene.silent(name) if is_silent else self.scene.break_stream(name)

    @rule(name=st.sampled_from(NAMES))
    def repeat_the_last_command(self, name: str) -> None:
        agent = self.scene.agents.get(name)
        if agent is None or not agent.sequence:
            return
        before = self.scene.job.digest()
        origin = Origin(agent.node, agent.incarnation, agent.sequence)
        command = ReportFinished(node=agent.node, incarnation=agent.incarnation, round=Round(1))
        try:
            answered = self.scene.job.answered(origin)
        except Rejected:
            return
        if answered is not None:
            assert self.scene.do(command, origin).reply == answered
            assert self.scene.job.digest() == before, "a repeated command was applied again"

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def speak_from_a_former_life(self, data: st.DataObject) -> None:
        agent = data.draw(st.sampled_from(self.past))
        live = self.scene.job.state.nodes.live.get(agent.node)
        if live is not None and live.incarnation == agent.incarnation:
            return
        command = data.draw(st.sampled_from(commands_of(agent, self.scene.job.state.rendezvous.round + 1)))
        with pytest.raises(Rejected) as refused:
            self.scene.do(command)
        assert refused.value.code == "stale-incarnation", "I6"

    @rule(outage=st.sampled_from([0.0, 1.0, 100.0]))
    def master_restarts(self, outage: float) -> None:
        self.seconds += outage
        self.scene.at(self.seconds).restart_master()

    @rule()
    def go_on_from_a_snapshot(self) -> None:
        job = Job.decode(self.scene.job.encode())
        self.scene.job = job
        self.scene.sequence = CommitSequence(job, master_epoch=job.master_epoch, next_number=job.number + 1)

    def teardown(self) -> None:
        if not hasattr(self, "scene"):
            return
        assert replay(None, self.scene.journal).job.encode() == self.scene.job.encode(), "I5"
        self.faults_stop()

    def faults_stop(self) -> None:
        """I8: enough healthy nodes, nobody fails any more: the job runs, or has ended, within a bounded time."""
        scene = self.scene
        for index in range(scene.terms.limits.max_nodes):
            self.num_launches += 1
            scene.agents.pop(f"fresh{index}", None)
            scene.attach(f"fresh{index}", launch=f"fresh-{index}-{self.num_launches}")
        for _ in range(20):
            if scene.job.end is not None or scene.job.state.rendezvous.is_active:
                break
            self.obey()
            at = scene.job.next_deadline()
            if at is not None:
                self.seconds = max(self.seconds, at / 1e6)
            scene.tick(self.seconds)
        if scene.job.end is None:
            assert scene.job.state.rendezvous.is_active, scene.job.status()
            assert any(isinstance(node.desired.wish, Run) for node in scene.job.state.nodes.live.values())
        else:
            scene.tick(self.seconds + 31)
            assert scene.job.stage is Stage.STOPPED


TestJobLife = JobLife.TestCase
TestJobLife.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow],
)


def a_random_journal(seed: int, num_steps: int = 300) -> list[bytes]:
    """A long life, for comparing replays: reproducible, and without a property tester's taste for the short."""
    chance = random.Random(seed)
    scene = Scene(terms(2, 4, last_call=5.0, first_call=1.0))
    for step in range(num_steps):
        scene.tick(scene.now / 1e6 + chance.choice([0.0, 0.1, 1.0, 6.0]))
        for name in sorted(scene.agents):
            if scene.agents[name].node in scene.job.state.nodes.live and isinstance(scene.wish(name), Join):
                scene.join(name)
        name = chance.choice(NAMES)
        known = scene.agents.get(name)
        if known is None or known.node not in scene.job.state.nodes.live:
            scene.agents.pop(name, None)
            scene.attach(name, launch=f"{name}-{step}")
        elif scene.job.state.rendezvous.round:
            match chance.randrange(6):
                case 0:
                    scene.fail(name, failure(at=scene.now / 1e6), step=step)
                case 1:
                    scene.restart_agent(name, launch=scene.job.state.nodes.live[known.node].launch)
                case 2:
                    scene.break_stream(name)
                case 3:
                    scene.silent(name)
                case 4:
                    scene.leave(name, LeaveReason.PREEMPTED)
                case _:
                    scene.restart_master()
    return scene.journal
