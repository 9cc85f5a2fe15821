"""
Carries out how a virtual agent goes, as `dlrover/agent/leaving.py` does: event by event instead of line by line.

A farewell that was heard, or was not heard in time, is the last word, because a stream that healed would bring the node back.
"""

from __future__ import annotations

from dlrover.agent.decisions.decisions import last_words
from dlrover.agent.decisions.departure import Departure, Urgency
from dlrover.protocol.messages.job import LeaveJob
from dlrover.simulator.parts import AgentPart
from dlrover.simulator.virtual_time import SECOND

FAREWELL = 2 * SECOND


class VirtualLeaving:
    """Of one agent."""

    def __init__(self, agent: AgentPart) -> None:
        self._agent = agent
        self._sim = agent.sim
        self._departure: Departure | None = None
        self._said: LeaveJob | None = None
        self._said_sequence = 0
        self.is_closed = False
        """The master has heard the last words, or will not: the stream is closed for good."""

    @property
    def exit_code(self) -> int:
        return 0 if self._departure is None else self._departure.exit_code

    def go(self, departure: Departure) -> None:
        self._departure = departure
        if departure.urgency is Urgency.LOST_MASTER and departure.notice:
            self._sim.ledger.gave_up(departure.notice)
        self._agent.workers.want_none(departure.cause)
        if departure.is_farewell_first:
            self._sim.checks.leave(self._agent)
            self._say_farewell()
        self.go_when_stopped()

    def go_when_stopped(self) -> None:
        agent = self._agent
        if not agent.is_alive or agent.workers.group is not None:
            return  # asked again when they have stopped
        if self.is_closed:
            agent.exit()
        elif self._said is None:
            self._say_farewell()

    def _say_farewell(self) -> None:
        agent, departure = self._agent, self._departure
        assert departure is not None, "it stays"
        words = last_words(agent.me, departure, self._said) if agent.channel.is_attached else None
        if words is None:
            self._close()
            return
        self._said = words
        self._said_sequence = agent.outbox.tell(words)
        self._sim.events.after(FAREWELL, self._stop_waiting, self._said_sequence)

    def attached(self) -> None:
        """Under another incarnation the farewell of the former one counts for nothing."""
        if self._said is not None and not self.is_closed and self._said.incarnation != self._agent.incarnation:
            self._say_farewell()

    def heard(self, sequence: int) -> bool:
        """An answer or a refusal. Returns whether it was that of the farewell."""
        if self._said is None or sequence != self._said_sequence:
            return False
        self._close()
        return True

    def _stop_waiting(self, sequence: int) -> None:
        is_waiting = self._agent.is_alive and sequence == self._said_sequence and not self.is_closed
        if is_waiting and not self._agent.sleep.puts_off(self._stop_waiting, sequence):
            self._close()

    def _close(self) -> None:
        self.is_closed = True
        self._agent.channel.drop()
        self.go_when_stopped()
