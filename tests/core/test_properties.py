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
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dlrover.core.commit_order import CommitSequence, replay
from dlrover.core.job import Job, Origin
from dlrover.core.membership.departures import DRAIN_MARGIN
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import CheckpointFailed, ShardWritten, SnapshotsHeld
from dlrover.protocol.messages.goodput import AccountGoodput, NodeAccount
from dlrover.protocol.messages.job import (
    AwaitOrder,
    BlockRendezvous,
    Command,
    End,
    FailureKind,
    Idle,
    Join,
    JoinRendezvous,
    Leave,
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
    UnblockRendezvous,
)
from tests.core.scene import Agent, Scene, failure, micros, terms

NAMES = "abcdef"
INDEX = st.integers(0, 11)
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
        BlockRendezvous(node=node, incarnation=incarnation, reason="late"),
        UnblockRendezvous(node=node, incarnation=incarnation),
        NodeDisconnected(node=node, incarnation=incarnation),
        NodeSilent(node=node, incarnation=incarnation, last_seen_at=micros(0)),
        ShardWritten(
            node=node,
            incarnation=incarnation,
            directory="/d",
            target="1",
            step=1,
            attempt="a",
            shard=0,
            num_shards=1,
            round=Round(round_),
            digest="d",
        ),
        CheckpointFailed(node=node, incarnation=incarnation, directory="/d", attempt="a", step=1, reason="full"),
        SnapshotsHeld(node=node, incarnation=incarnation, round=Round(round_), held=()),
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
        spares=st.integers(0, 2),
        standby=st.integers(0, 1),
        pend_timeout=st.none() | st.just(50.0),
        max_restarts=st.none() | st.integers(0, 2),
    )
    def begin(
        self,
        unit: int,
        low: int,
        more: int,
        spares: int,
        standby: int,
        pend_timeout: float | None,
        max_restarts: int | None,
    ) -> None:
        """Everybody is there and trains: from here it gets interesting."""
        policy = RestartPolicy(max_restarts=max_restarts)
        limits: dict[str, float] = {"node_unit": unit, "last_call": 30.0, "join_timeout": 60.0}
        if pend_timeout is not None:
            limits["pend_timeout"] = pend_timeout
        self.scene = Scene(terms(low * unit, (low + more) * unit, policy, standby=standby, **limits))
        for _ in range(self.scene.terms.limits.max_nodes + spares):
            self.launch(None)
        self.everybody_joins()

    def live(self) -> list[str]:
        """The agents of whom the job knows this very life."""
        live = self.scene.job.state.nodes.live
        return [
            name
            for name, agent in self.scene.agents.items()
            if agent.node in live and live[agent.node].incarnation == agent.incarnation
        ]

    def pick(self, index: int) -> str | None:
        names = self.live()
        return names[index % len(names)] if names else None

    def everybody_joins(self) -> None:
        """Everybody who is asked to and is not done."""
        for name in self.live():
            if isinstance(self.scene.wish(name), Join) and not self.scene.agents[name].finished_round:
                self.scene.join(name)

    @rule(
        seconds=st.sampled_from([0.0, 0.5, 1.0, 4.0, 5.0, 30.0, 40.0]), is_obeyed=st.sampled_from([True, True, False])
    )
    def wait(self, seconds: float, is_obeyed: bool) -> None:
        self.seconds += seconds
        self.scene.tick(self.seconds)
        if is_obeyed:
            self.everybody_joins()

    @precondition(lambda self: len(self.live()) < 9)
    @rule(rank=st.none() | st.integers(0, 3))
    def launch(self, rank: int | None) -> None:
        self.num_launches += 1
        with refused_only("rank-held"):
            self.scene.attach(f"n{self.num_launches}", rank=rank)

    @rule(low=st.integers(0, 3), more=st.integers(0, 2), is_obeyed=st.booleans())
    def scale(self, low: int, more: int, is_obeyed: bool) -> None:
        unit = self.scene.terms.limits.node_unit
        with refused_only("bad-limits", "job-ended"):
            self.scene.scale(low * unit, (low + more) * unit)
        if is_obeyed:
            self.everybody_joins()

    @rule(index=INDEX, lease=st.sampled_from([1.0, 30.0, 600.0]))
    def block(self, index: int, lease: float) -> None:
        name = self.pick(index)
        if name is not None:
            with refused_only("job-ended"):
                self.scene.block(name, lease=lease)

    @rule(index=INDEX)
    def unblock(self, index: int) -> None:
        name = self.pick(index)
        if name is not None:
            self.scene.unblock(name)

    @rule(ranks=st.lists(st.integers(0, 5), max_size=4), is_awaited=st.booleans())
    def order(self, ranks: list[int], is_awaited: bool) -> None:
        if is_awaited:
            self.scene.do(AwaitOrder(limit=2.0))
        else:
            self.scene.order(*ranks)

    @rule(index=INDEX)
    def the_dismissed_leave(self, index: int) -> None:
        name = self.pick(index)
        if name is not None and isinstance(self.scene.wish(name), Leave):
            self.scene.leave(name, LeaveReason.DISMISSED)

    @rule(index=INDEX, is_answer_lost=st.booleans())
    def come_back(self, index: int, is_answer_lost: bool) -> None:
        """On a new stream; whoever was given up or replaced meanwhile begins anew, on its own rank or another one.

        The newest process of a launch is never refused, not even if it did not hear what it was told the last time.
        """
        names = sorted(self.scene.agents)
        if names:
            self.attach_again(names[index % len(names)], is_answer_lost=is_answer_lost)

    def attach_again(self, name: str, *, is_answer_lost: bool = False) -> None:
        former = dataclasses.replace(self.scene.agents[name])
        attached = self.scene.attach(name, is_answer_lost=is_answer_lost)
        if former.finished_round:
            assert isinstance(attached.desired.wish, Idle | End | Leave), "a node that finished is never started again"
        if self.scene.agents[name] != former:
            self.past.append(former)

    @rule(index=INDEX)
    def repeat_an_attach(self, index: int) -> None:
        """Whatever became of the answer, the second one is the same."""
        names = sorted(self.scene.agents)
        if names:
            name = names[index % len(names)]
            former = self.scene.agents[name]
            unheard = self.scene.attach(name, is_answer_lost=True)
            assert self.scene.attach(name, is_answer_lost=True) == unheard
            if (former.node, former.incarnation) != (unheard.node, unheard.incarnation):
                self.past.append(former)

    @rule(index=INDEX)
    def finish_unheard(self, index: int) -> None:
        """The workers end well while the stream is broken; nobody knows until the agent is back."""
        name = self.pick(index)
        if name is not None and isinstance(self.scene.wish(name), Run):
            self.scene.agents[name].finished_round = self.scene.world(name).round
            self.scene.break_stream(name)

    @rule(index=INDEX)
    def agent_restarts(self, index: int) -> None:
        name = self.pick(index)
        if name is not None:
            self.past.append(self.scene.agents[name])
            self.scene.restart_agent(name)

    @rule(index=INDEX, is_wrong=st.booleans())
    def join(self, index: int, is_wrong: bool) -> None:
        name = self.pick(index)
        if name is not None:
            with refused_only("stale-round", "finished", "job-ended", "dismissed"):
                self.scene.join(name, round_=self.scene.job.state.rendezvous.round if is_wrong else None)

    @rule(
        index=INDEX,
        kind=st.sampled_from(FAULTS),
        step=st.none() | st.integers(0, 20),
        ago=st.sampled_from([0.0, 0.1, 2.0]),
        is_late=st.sampled_from([False, False, True]),
        is_obeyed=st.booleans(),
    )
    def fail(self, index: int, kind: FailureKind, step: int | None, ago: float, is_late: bool, is_obeyed: bool) -> None:
        name, newest = self.pick(index), self.scene.job.state.rendezvous.round
        if name is not None and newest - is_late >= 1:
            died = failure(kind, at=max(0.0, self.seconds - ago), traceback="boom" if step else "")
            self.scene.fail(name, died, round_=newest - is_late, step=step)
            if is_obeyed:
                self.everybody_joins()

    @rule(index=INDEX, seconds=st.lists(st.integers(0, 40), max_size=12), step=st.none() | st.integers(0, 20))
    def account(self, index: int, seconds: list[int], step: int | None) -> None:
        """Whatever workers tell of their time, true or not."""
        name = self.pick(index)
        if name is not None:
            agent = self.scene.agents[name]
            millis = tuple(1000 * each for each in seconds)
            round_ = self.scene.job.state.rendezvous.round
            self.scene.do(AccountGoodput(accounts=(NodeAccount(agent.node, agent.incarnation, round_, step, millis),)))

    @rule(index=INDEX)
    def finish(self, index: int) -> None:
        name = self.pick(index)
        if name is not None and self.scene.job.state.rendezvous.round:
            self.scene.finish(name)

    @rule(index=INDEX, reason=st.sampled_from(LeaveReason))
    def leave(self, index: int, reason: LeaveReason) -> None:
        name = self.pick(index)
        if name is not None:
            self.scene.leave(name, reason)

    @rule(index=INDEX, is_silent=st.booleans())
    def vanish(self, index: int, is_silent: bool) -> None:
        name = self.pick(index)
        if name is not None and is_silent:
            self.scene.silent(name)
        elif name is not None:
            self.scene.break_stream(name)

    @rule(index=INDEX)
    def repeat_the_last_command(self, index: int) -> None:
        name = self.pick(index)
        if name is None:
            return
        agent, before = self.scene.agents[name], self.scene.job.digest()
        origin = Origin(agent.node, agent.incarnation, agent.sequence)
        if self.scene.job.answered(origin) is not None:  # else it was refused, or nothing was sent yet
            anything = ReportFinished(node=agent.node, incarnation=agent.incarnation, round=Round(1))
            self.scene.do(anything, origin)
            assert self.scene.job.digest() == before, "a repeated command was applied again"

    @precondition(lambda self: self.past)
    @rule(index=INDEX, kind=INDEX)
    def speak_from_a_former_life(self, index: int, kind: int) -> None:
        agent = self.past[index % len(self.past)]
        commands = commands_of(agent, self.scene.job.state.rendezvous.round + 1)
        with pytest.raises(Rejected) as refused:
            self.scene.do(commands[kind % len(commands)])
        assert refused.value.code == "stale-incarnation", "I6"

    @rule(outage=st.sampled_from([0.0, 1.0, 100.0]))
    def master_restarts(self, outage: float) -> None:
        self.seconds += outage
        self.scene.at(self.seconds).restart_master()
        if outage == 1.0:
            for name in sorted(self.scene.agents):
                self.attach_again(name)

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
        """I8: enough healthy nodes, nobody fails any more: the job runs, or has ended, within a bounded time.

        Those who were there come back, in whatever state they are; new ones are launched only where too few are.
        """
        scene = self.scene
        for name in sorted(scene.agents):
            self.attach_again(name)
        live = list(scene.job.state.nodes.live.values())
        for name in self.live():
            if isinstance(scene.wish(name), Leave):
                scene.leave(name, LeaveReason.DISMISSED)
        unfinished = [node for node in live if not node.finished_round and node.dismissed is None]
        effective = scene.job.state.terms
        assert effective is not None, "nobody ever came"
        for _ in range(effective.limits.max_nodes - len(unfinished)):
            self.launch(None)
        for _ in range(20):
            if scene.job.end is not None or scene.job.state.rendezvous.is_active:
                break
            self.everybody_joins()
            at = scene.job.next_deadline()
            if at is not None:
                self.seconds = max(self.seconds, at / 1e6)
            scene.tick(self.seconds)
        if scene.job.end is None:
            assert scene.job.state.rendezvous.is_active, scene.job.status()
            assert any(isinstance(node.desired.wish, Run) for node in scene.job.state.nodes.live.values())
        else:
            scene.tick(self.seconds + scene.terms.shutdown_timeout + DRAIN_MARGIN)
            assert scene.job.stage is Stage.STOPPED


TestJobLife = JobLife.TestCase
TestJobLife.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    # Explaining a failure means tracing each line, which takes minutes before Python 3.12.
    phases=[phase for phase in Phase if phase is not Phase.explain],
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
