"""
How an agent goes: dismissed, preempted, refused, at the end of its job, or because there was no master for too long.

It stops its workers first and says goodbye if there is time: a farewell that was heard, or was not heard in time, is the
last word, because a stream that healed would bring it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover.protocol.messages.job import Incarnation, LeaveJob, LeaveReason, StopCause
from dlrover.simulator.virtual_time import SECOND

if TYPE_CHECKING:
    from dlrover.simulator.nodes.agent import VirtualAgent

FAREWELL = 2 * SECOND
MASTER_GRACE = 600 * SECOND
"""Workers train on without a master for so long."""
PATIENCE_WHEN_FINISHED = 30 * SECOND

EXIT_FAILED, EXIT_MASTER_LOST, EXIT_TERMINATED = 1, 23, 143


class Departure:
    """Of one agent."""

    def __init__(self, agent: VirtualAgent) -> None:
        self._agent = agent
        self._sim = agent.sim
        self.has_begun = False
        self.exit_code = 0
        self._farewell: LeaveReason | None = None
        """Said once the workers have stopped."""
        self._goodbye_sequence = 0
        self._goodbye_incarnation = Incarnation(0)

    # Why.

    def dismiss(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self._part(LeaveReason.DISMISSED, StopCause.MEMBERSHIP)

    def preempt(self) -> None:
        """The machine will be taken away."""
        self.exit_code = EXIT_TERMINATED
        self._part(LeaveReason.PREEMPTED, StopCause.PREEMPTION)

    def _part(self, reason: LeaveReason, cause: StopCause) -> None:
        """Say so, stop the workers meanwhile, and go."""
        self.has_begun = True
        self._farewell = reason
        self._sim.checks.leave(self._agent)
        self._agent.workers.want_none(cause)
        self._say_goodbye()
        self.go_when_stopped()

    def end(self, exit_code: int) -> None:
        """The job has ended."""
        self.has_begun = True
        self.exit_code = exit_code
        self._farewell = LeaveReason.JOB_ENDED
        self._agent.workers.want_none(StopCause.END_OF_JOB)
        self.go_when_stopped()

    def give_up(self, exit_code: int) -> None:
        """Without a farewell: there is nobody to take it."""
        self.has_begun = True
        self.exit_code = exit_code
        self._agent.workers.want_none(StopCause.FAILURE)
        self.go_when_stopped()

    def _patience(self) -> int:
        return PATIENCE_WHEN_FINISHED if self._agent.workers.finished_round else MASTER_GRACE

    def plan_outage_check(self) -> None:
        self._sim.events.after(self._patience() + 1, self._check_outage)

    def _check_outage(self, _: None = None) -> None:
        """Without a master for too long: stop, and go."""
        agent, workers = self._agent, self._agent.workers
        since = agent.channel.outage_since
        if not agent.is_alive or since is None or self.has_begun or agent.sleep.puts_off(self._check_outage, None):
            return
        if workers.finished_round:
            since = max(since, workers.finished_at)
        if self._sim.events.now - since > self._patience():
            self.give_up(0 if workers.finished_round else EXIT_MASTER_LOST)

    def is_overdue(self) -> bool:
        """Without a master for longer than it may be."""
        since = self._agent.channel.outage_since
        is_awake = self._agent.sleep.since is None and not self.has_begun
        return is_awake and since is not None and self._sim.events.now - since > MASTER_GRACE + SECOND

    # The last words.

    def go_when_stopped(self) -> None:
        agent = self._agent
        if not agent.is_alive or agent.workers.group is not None:
            return  # asked again when it has stopped
        if self._farewell is LeaveReason.JOB_ENDED and not self._goodbye_sequence:
            self._say_goodbye()
        elif self._farewell is None:
            agent.exit()

    def _say_goodbye(self) -> None:
        agent, reason = self._agent, self._farewell
        if reason is None or not agent.channel.is_attached:
            self._close()
            return
        self._goodbye_incarnation = agent.incarnation
        leave = LeaveJob(node=agent.id, incarnation=agent.incarnation, reason=reason)
        self._goodbye_sequence = agent.outbox.tell(leave)
        self._sim.events.after(FAREWELL, self._stop_waiting, self._goodbye_sequence)

    def attached(self) -> None:
        """Under another incarnation the farewell of the former one counts for nothing."""
        is_said = self._farewell is not None and self._goodbye_sequence
        if is_said and self._goodbye_incarnation != self._agent.incarnation:
            self._say_goodbye()

    def heard(self, sequence: int) -> bool:
        """An answer or a refusal. Returns whether it was that of the farewell."""
        if sequence != self._goodbye_sequence:
            return False
        self._close()
        return True

    def _stop_waiting(self, sequence: int) -> None:
        is_waiting = self._agent.is_alive and sequence == self._goodbye_sequence and self._farewell is not None
        if is_waiting and not self._agent.sleep.puts_off(self._stop_waiting, sequence):
            self._close()

    def _close(self) -> None:
        """It was heard, or nobody will hear it: then close, because a healed stream would bring us back."""
        self._farewell = None
        self._agent.channel.drop()
        self.go_when_stopped()

    def is_closing(self) -> bool:
        """A farewell that was heard, or was not heard in time, is the last word."""
        return self.has_begun and self._farewell is None
