"""
What an agent has told and the master has not answered yet: repeated on each new stream, under its old number and in order.

A refusal for now is repeated after a pause; one for good is mended by the part that sent the command. A question is asked once:
an answer that is lost is not missed.
"""

from __future__ import annotations

from dlrover.protocol.messages.cluster import ClusterCommand
from dlrover.protocol.messages.frames import Answer, Refusal, Request
from dlrover.protocol.messages.job import AgentCommand, Query
from dlrover.simulator.parts import AgentPart, VirtualStream
from dlrover.simulator.truth.data import is_of_data
from dlrover.simulator.virtual_time import span


class VirtualOutbox:
    """Of one agent."""

    def __init__(self, agent: AgentPart) -> None:
        self._agent = agent
        self._sim = agent.sim
        self._waiting: dict[int, AgentCommand] = {}
        self._last_sequence = 0
        self._held: dict[int, None] = {}
        """Refused for now."""
        self._resends_on: VirtualStream | None = None
        """On which stream what is held will be sent again."""
        self._questions: dict[int, Query] = {}
        self._num_questions = 0

    def tell(self, command: AgentCommand) -> int:
        self._last_sequence += 1
        self._waiting[self._last_sequence] = command
        if self._agent.channel.is_attached:
            self._send(self._last_sequence)
        return self._last_sequence

    def tell_soon(self, command: AgentCommand) -> None:
        """Now, or when it wakes up."""
        if not self._agent.sleep.puts_off(self.tell_soon, command) and self._agent.is_alive:
            self.tell(command)

    def ask(self, query: Query) -> None:
        """A question is not repeated."""
        agent, channel = self._agent, self._agent.channel
        if agent.is_alive and channel.connection is not None and channel.is_attached and agent.sleep.since is None:
            self._num_questions += 1
            self._questions[-self._num_questions] = query
            self._sim.network.send_up(channel.connection, Request(id=-self._num_questions, body=query))

    def send_all(self) -> None:
        """Before anything new: numbers arrive in order."""
        for sequence in list(self._waiting):
            self._send(sequence)

    def _send(self, sequence: int) -> None:
        command, connection = self._waiting.get(sequence), self._agent.channel.connection
        if command is not None and connection is not None:
            request = Request(id=sequence, body=command, sequence=sequence)
            self._sim.network.send_up(connection, request)

    def detached(self) -> None:
        """What is held is sent with all the rest when there is a stream again."""
        self._held.clear()
        self._resends_on = None
        self._questions.clear()

    # What the master says to it.

    def answered(self, connection: VirtualStream, answer: Answer) -> None:
        agent, sim, number, body = self._agent, self._sim, answer.id, answer.body
        if number < 0:
            query = self._questions.pop(number, None)
            if query is not None:
                sim.store.read(query, body)
                sim.saves.read(agent, query, body)
                sim.syncs.read(agent, query, body)
                if sim.tasks is not None:
                    sim.tasks.read(query, body)
            return
        command = self._waiting.get(number)
        is_known = connection.master.journal is sim.masters.journal  # else it was lost meanwhile, and this with it
        if command is not None and is_known:
            sim.store.answered(command, body)
            sim.saves.answered(command, body)
            sim.syncs.answered(agent, command, body)
            if sim.data is not None:
                sim.data.answered(agent, number, command, body)
        if is_known:
            sim.ledger.heard_answer(agent, number)
        self._waiting.pop(number, None)
        agent.leaving.heard(number)

    def refused(self, refusal: Refusal) -> None:
        number = refusal.id
        if refusal.retry_after is not None:
            self._hold(number, refusal.retry_after)
        elif number < 0:
            self._questions.pop(number, None)  # nobody has set it yet
        else:
            command = self._waiting.pop(number, None)
            if self._sim.data is not None and (is_of_data(command) or isinstance(command, ClusterCommand)):
                self._sim.data.refused(self._agent, number)
            elif not self._agent.leaving.heard(number) and command is not None:
                self._agent.mend(command, refusal.code)

    def _hold(self, number: int, retry_after: float) -> None:
        if number and number not in self._waiting:
            return
        self._held[number] = None
        if self._resends_on is None:
            self._resends_on = self._agent.channel.connection
            pause = span(self._sim.chance.network, retry_after, 2 * retry_after)
            self._sim.events.after(pause, self._send_held, self._resends_on)

    def _send_held(self, connection: VirtualStream) -> None:
        agent = self._agent
        if (
            not agent.is_alive
            or self._resends_on is not connection
            or agent.sleep.puts_off(self._send_held, connection)
        ):
            return
        self._resends_on = None
        held, self._held = self._held, {}
        for number in sorted(held):
            if not number:
                self._sim.network.send_up(connection, agent.presentation())
            else:
                self._send(number)
