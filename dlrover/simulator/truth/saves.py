"""
Storage saves under way while things go wrong, and what has to be true of them (I4).

Just before something goes wrong some members of the running world write shards, so that reports, duties and commits are hit
by it. The storage is modelled beside the job: it knows which shards were really written. No agent may be told to commit an attempt of
which a shard is missing; what the job takes for committed is whole in the storage; and what a node was told is committed is
not forgotten by a later master of the same journal.
"""

from __future__ import annotations

import random

from dlrover.core.checkpoints.state import NewestCommit
from dlrover.core.job import Job
from dlrover.protocol.messages.checkpoint import (
    AwaitSaveDuties,
    CheckpointCommand,
    CheckpointCommitted,
    CheckpointFailed,
    CommitCheckpoint,
    SaveDuties,
    ShardWritten,
)
from dlrover.protocol.messages.job import AgentCommand, Done, Query, Reply, Round
from dlrover.simulator.parts import AgentPart, SimulationPart
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.virtual_time import span

DIRECTORY = "/shared/run"
MOST_WRITERS = 3
WRITING = (0.0, 0.02)
"""Seconds: short, because what shall be hit is the talk about it."""
SLOW_WRITING = (1.0, 60.0)
SLOW_ODDS = 0.1
"""Of a shard: a later save may be complete before this one."""
LOOKS = (0.02, 1.0, 30.0)
"""Seconds after its shard at which a writer looks for its duty. The real one waits at the master; here each wait is an event."""
COMMITTING = (0.0, 0.05)
FAILURE_ODDS = 0.1


class SaveTraffic:
    """Owned by the simulation."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self._chance = random.Random(f"{simulation.plan.seed}/saves")
        self._num_attempts = 0
        self._steps: dict[str, tuple[int, Round]] = {}
        """Step and round of each attempt; round 0: that of the writer."""
        self._shards: dict[str, int] = {}
        """How many each attempt has."""
        self._orders: dict[str, tuple[Round, int]] = {}
        """Round and step of each attempt of which a shard is written. An attempt of two rounds is never complete."""
        self._written: dict[str, dict[int, None]] = {}
        self._committed: dict[str, None] = {}
        """Attempts that are checkpoints in the storage."""
        self._is_any_confirmed = False
        """Whether the job has confirmed one, under this journal."""

    def stir(self) -> None:
        """Something is about to go wrong: let a save be under way."""
        self.begin(step=self._num_attempts + 1, round_=Round(0))

    def begin(self, *, step: int, round_: Round) -> str:
        """The name of the attempt; empty: there is no node that could write. `round_`: of the world; 0: of any."""
        agents = [node.agent for node in self._sim.machines.nodes if node.agent is not None]
        running = [
            agent
            for agent in agents
            if (group := agent.workers.group) is not None
            and group.is_up
            and (not round_ or group.world.round == round_)
        ]
        writers = [agent for agent in running if agent.can_speak]
        if not writers:
            return ""
        self._num_attempts += 1
        attempt = f"a{self._num_attempts}"
        self._steps[attempt] = (step, round_)
        chosen = self._chance.sample(writers, min(MOST_WRITERS, len(writers)))
        self._shards[attempt] = len(chosen)
        self._written[attempt] = {}
        for shard, agent in enumerate(chosen):
            writing = SLOW_WRITING if self._chance.random() < SLOW_ODDS else WRITING
            self._sim.events.after(span(self._chance, *writing), self._write, agent, attempt, shard)
        return attempt

    def _write(self, agent: AgentPart, attempt: str, shard: int) -> None:
        if not agent.is_alive or agent.workers.group is None:
            return
        self._written[attempt][shard] = None
        step, asked_round = self._steps[attempt]
        round_ = asked_round or agent.workers.group.world.round
        self._orders[attempt] = (round_, step)
        agent.outbox.tell_soon(
            ShardWritten(
                node=agent.id,
                incarnation=agent.incarnation,
                directory=DIRECTORY,
                target=attempt,
                step=step,
                attempt=attempt,
                shard=shard,
                num_shards=self._shards[attempt],
                round=round_,
                digest="d",
            )
        )
        for seconds in LOOKS:
            self._sim.events.after(span(self._chance, seconds, 2 * seconds), self._look, agent)

    def _look(self, agent: AgentPart) -> None:
        if agent.is_alive and agent.incarnation:
            agent.outbox.ask(AwaitSaveDuties(node=agent.id, incarnation=agent.incarnation))

    def read(self, agent: AgentPart, query: Query, reply: Reply) -> None:
        match query, reply:
            case AwaitSaveDuties(), SaveDuties(commits=commits):
                for duty in commits:
                    self._sim.events.after(span(self._chance, *COMMITTING), self._commit, agent, duty)

    def _commit(self, agent: AgentPart, duty: CommitCheckpoint) -> None:
        if not agent.is_alive or agent.sleep.since is not None:
            return
        if len(self._written[duty.attempt]) != self._shards[duty.attempt]:
            raise Violation("I4", f"{agent.node.label} was told to commit {duty.attempt} with a shard missing")
        node, incarnation = agent.id, agent.incarnation
        if self._chance.random() < FAILURE_ODDS:
            agent.outbox.tell(
                CheckpointFailed(
                    node=node,
                    incarnation=incarnation,
                    directory=DIRECTORY,
                    attempt=duty.attempt,
                    step=duty.step,
                    reason="no space",
                )
            )
            return
        self._committed[duty.attempt] = None
        if self._sim.reading is not None:
            self._sim.reading.persisted(duty.attempt, duty.data_state)
        agent.outbox.tell(
            CheckpointCommitted(
                node=node, incarnation=incarnation, directory=DIRECTORY, attempt=duty.attempt, step=duty.step
            )
        )

    def answered(self, command: AgentCommand, reply: Reply) -> None:
        if isinstance(command, CheckpointCommitted) and isinstance(reply, Done):
            self._is_any_confirmed = True

    def check(self, job: Job) -> None:
        """Of a master that begins, and at the end."""
        room = job.state.checkpoints
        confirmed = {each.attempt: None for each in room.settled if each.is_committed}
        newest = room.committed.get(DIRECTORY)
        if newest is not None:
            confirmed[newest.attempt] = None
        for attempt in confirmed:
            if attempt not in self._committed or len(self._written[attempt]) != self._shards[attempt]:
                raise Violation("I4", f"the job takes {attempt} for a checkpoint, and the storage has none")
        known = {attempt.committer for attempt in room.attempts.values()} - {None}
        if not known <= set(job.state.nodes.live):
            raise Violation("I4", "a node that is gone shall commit")
        if self._is_any_confirmed and newest is None:
            raise Violation("I4", "a committed checkpoint was forgotten")

    def explain_step_back(self, job: Job, former: dict[str, NewestCommit]) -> str | None:
        """Nothing if neither the newest checkpoint nor a tracker goes back to an older round or step."""
        room = job.state.checkpoints
        for directory, newest in room.committed.items():
            before = former.get(directory, newest)
            if self._orders[newest.attempt] < self._orders[before.attempt]:
                return f"step {newest.step} became the newest checkpoint after step {before.step}"
        for attempt in room.attempts.values():
            last = room.committed.get(attempt.directory)
            is_tracked = attempt.committer is not None and attempt.is_newest and last is not None
            if is_tracked and last is not None and self._orders[attempt.attempt] < self._orders[last.attempt]:
                return f"the tracker would go back from step {last.step} to step {attempt.step}"
        return None

    def journal_lost(self) -> None:
        self._is_any_confirmed = False


def is_of_saves(command: AgentCommand) -> bool:
    return isinstance(command, CheckpointCommand)
