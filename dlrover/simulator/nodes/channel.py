"""
The one stream between an agent and the master: sought, kept alive, dropped and sought again.

It heals itself, in pauses that grow; a master of an older epoch is not believed, and a wish that was overtaken is not
passed on. What waits for an answer outlives a stream: that is the outbox.
"""

from __future__ import annotations

from dlrover.agent.decisions.decisions import AgentTerms
from dlrover.protocol.messages.frames import Answer, Push, Refusal
from dlrover.protocol.messages.job import Attached, Desired
from dlrover.simulator.faults.network import KEEPALIVE
from dlrover.simulator.parts import CLOSE, PULSE, AgentPart, Downward, VirtualStream
from dlrover.simulator.virtual_time import SECOND, micros, span

ATTACH_TIMEOUT = 30 * SECOND
MASTER_GRACE = micros(AgentTerms().master_grace)
PATIENCE_WHEN_FINISHED = micros(AgentTerms().finished)
LONGEST_PAUSE = 2.0
"""Seconds between two attempts to connect, at most."""
FIRST_PAUSE = 0.02


class VirtualChannel:
    """Of one agent."""

    def __init__(self, agent: AgentPart) -> None:
        self._agent = agent
        self._sim = agent.sim
        self.connection: VirtualStream | None = None
        self.is_attached = False
        self.outage_since: int | None = agent.sim.events.now
        self._is_seeking = False
        self._envelope = FIRST_PAUSE
        self.master_epoch = 0
        self._desired_number = -1
        self._inbox: list[tuple[VirtualStream, tuple[Downward, ...]]] = []
        """What arrived while the agent slept."""

    # Connecting.

    def seek(self, pause: int) -> None:
        """Try to connect after a pause."""
        self._is_seeking = True
        self._sim.events.after(pause, self.attempt)

    def attempt(self, _: None = None) -> None:
        """Connect and present ourselves, or wait until there is a master."""
        agent, sim = self._agent, self._sim
        if not agent.is_alive or not self._is_seeking or agent.sleep.puts_off(self.attempt, None):
            return
        master = sim.masters.listening()
        if master is None or agent.node.link.is_cut:
            sim.masters.wait_for_one(agent)
            return
        self._is_seeking = False
        self.connection = VirtualStream(agent, agent.node.link, master, sim.events.now)
        agent.node.link.keep(self.connection)
        sim.network.send_up(self.connection, agent.presentation())
        sim.events.after(ATTACH_TIMEOUT, self._check_attached, self.connection)

    def _check_attached(self, connection: VirtualStream) -> None:
        if self._is_awake_on(connection) and not self.is_attached:
            self.drop()

    def _is_awake_on(self, connection: VirtualStream) -> bool:
        return self._agent.is_alive and self.connection is connection and self._agent.sleep.since is None

    def drop(self, *, is_lossy: bool = False) -> None:
        """Our end of the stream is closed, whatever the other end knows. Tries again, as long as we live."""
        connection, self.connection = self.connection, None
        if connection is None:
            return
        connection.is_open_below = False
        connection.is_lossy = is_lossy
        self._sim.network.send_up(connection, CLOSE)
        self._detach()

    def die(self, *, is_seen: bool) -> None:
        """With its process; `is_seen`: a kernel is left to close the stream."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.is_open_below = False
            if is_seen:
                self._sim.network.send_up(connection, CLOSE)
            else:
                self._sim.network.mute(connection)

    def _detach(self) -> None:
        agent = self._agent
        if self.is_attached or self.outage_since is None:
            self.outage_since = self._sim.events.now
            self.plan_outage_check()
        self.is_attached = False
        agent.outbox.detached()
        if agent.is_alive and not agent.leaving.is_closed:
            pause = span(self._sim.chance.network, 0.0, self._envelope)
            self._envelope = min(2 * self._envelope, LONGEST_PAUSE)
            self.seek(pause)

    def plan_outage_check(self) -> None:
        """How long the master is away is the one fact that no event announces."""
        is_finished = self._agent.decisions.finished_round > 0
        self._sim.events.after((PATIENCE_WHEN_FINISHED if is_finished else MASTER_GRACE) + 1, self._check_outage)

    def _check_outage(self, _: None = None) -> None:
        is_away = self._agent.is_alive and self.outage_since is not None
        if is_away and not self._agent.sleep.puts_off(self._check_outage, None):
            self._agent.follow()

    def is_overdue(self) -> bool:
        """Without a master for longer than its agent may stay."""
        is_awake = self._agent.sleep.since is None and not self._agent.me.is_leaving
        now, since = self._sim.events.now, self.outage_since
        return is_awake and since is not None and now - since > MASTER_GRACE + SECOND

    # Signs of life.

    def _check_keepalive(self, connection: VirtualStream) -> None:
        """Nothing answers on this stream any more: end it. A sleeping agent looks when it wakes up."""
        if self._is_awake_on(connection) and (connection.link.is_cut or not connection.master.is_awake):
            self.drop()

    def keepalive_soon(self) -> None:
        connection = self.connection
        if connection is not None:
            self._sim.events.after(span(self._sim.chance.network, *KEEPALIVE), self._check_keepalive, connection)

    def is_beating(self, connection: VirtualStream) -> bool:
        """Whether heartbeats come through on this stream."""
        return self._is_awake_on(connection) and not connection.link.num_cuts_up

    def pulse(self) -> None:
        """The first heartbeat after a silence."""
        if self.connection is not None:
            self._sim.network.send_up(self.connection, PULSE)

    # What arrives.

    def receive(self, connection: VirtualStream, parcels: tuple[Downward, ...]) -> None:
        agent = self._agent
        if agent.sleep.since is not None:
            self._inbox.append((connection, parcels))
            return
        for parcel in parcels:
            if not agent.is_alive or self.connection is not connection:
                return
            match parcel:
                case Answer(id=0, body=Attached() as attached):
                    self._accept(attached)
                case Answer():
                    agent.outbox.answered(connection, parcel)
                case Refusal(id=0, retry_after=None):
                    agent.refused(parcel.code)
                case Refusal():
                    agent.outbox.refused(parcel)
                case Push(desired=desired):
                    self._take(desired)
                case _:
                    self.connection = None
                    connection.is_open_below = False
                    self._detach()

    def read_late(self) -> None:
        """What arrived while the agent slept, if it is still of this stream."""
        inbox, self._inbox = self._inbox, []
        for connection, parcels in inbox:
            self.receive(connection, parcels)

    def _accept(self, attached: Attached) -> None:
        if attached.master_epoch < self.master_epoch:
            self.drop()
            return
        self.master_epoch = attached.master_epoch
        self.is_attached = True
        self.outage_since = None
        self._envelope = FIRST_PAUSE
        self._agent.attached(attached)
        self._desired_number = attached.desired.number
        self._agent.outbox.send_all()
        self._agent.take(attached.desired)

    def _take(self, desired: Desired) -> None:
        if desired.master_epoch < self.master_epoch:
            return
        self.master_epoch = desired.master_epoch
        if desired.number > self._desired_number:
            self._desired_number = desired.number
            self._agent.take(desired)
