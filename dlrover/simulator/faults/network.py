"""
The network between agents and masters: ordered streams that can be slow, cut, or broken at the worst moment.

A stream keeps order, as TCP does; what reorders messages is that a broken stream may still deliver while its successor
is already open. A cut in one direction holds what is sent until it heals. A break loses what is under way, or delivers it
late, and each end learns of it in its own time. Healthy heartbeats are no events: a stream is muted from the instant
at which they stop coming through, and the one that comes first afterwards is sent as a `Beat` of its own.
"""

from __future__ import annotations

import random

from dlrover.simulator.parts import CLOSE, Close, Downward, Pulse, Upward, VirtualLink, VirtualStream
from dlrover.simulator.shapes import Costs
from dlrover.simulator.virtual_time import VirtualTime, span

KEEPALIVE = (10.0, 20.0)
"""Seconds after which an agent notices that nothing answers any more."""
HEARTBEAT = (0.0, 6.0)
"""Seconds that the newest heartbeat is old when they stop coming."""
SLOW = 200
"""Times slower, on a slow link."""


class Network:
    """Carries frames, as planned events."""

    def __init__(self, events: VirtualTime, chance: random.Random, costs: Costs) -> None:
        self._events = events
        self._chance = chance
        self._low, self._high = costs.network

    def delay(self, link: VirtualLink) -> int:
        delay = span(self._chance, self._low, self._high)
        return delay * SLOW if link.is_slow else delay

    def send_up(self, connection: VirtualStream, parcel: Upward) -> None:
        link = connection.link
        if link.num_cuts_up or connection.held_up:
            connection.held_up.append(parcel)
            return
        connection.up_at = at = max(connection.up_at, self._events.now + self.delay(link))
        self._events.at(at, self._arrive_up, connection, parcel)
        if link.duplicates and not isinstance(parcel, Close | Pulse):
            link.duplicates -= 1
            self._events.at(at, self._arrive_up, connection, parcel)

    def send_down(self, connection: VirtualStream, parcels: tuple[Downward, ...]) -> None:
        """One frame."""
        if connection.link.num_cuts_down or connection.held_down:
            connection.held_down.append(parcels)
            return
        connection.down_at = at = max(connection.down_at, self._events.now + self.delay(connection.link))
        self._events.at(at, self._arrive_down, connection, parcels)

    def mute(self, connection: VirtualStream) -> None:
        """Heartbeats stop coming through."""
        connection.master.lines.watch(connection, span(self._chance, *HEARTBEAT))

    def healed(self, connection: VirtualStream) -> None:
        """What was held goes on its way, in order."""
        if not connection.link.num_cuts_up:
            held, connection.held_up = connection.held_up, []
            for parcel in held:
                self.send_up(connection, parcel)
        if not connection.link.num_cuts_down:
            frames, connection.held_down = connection.held_down, []
            for parcels in frames:
                self.send_down(connection, parcels)

    def _arrive_up(self, connection: VirtualStream, parcel: Upward) -> None:
        if not connection.is_lossy or parcel is CLOSE:
            connection.master.receive(connection, parcel)

    def _arrive_down(self, connection: VirtualStream, parcels: tuple[Downward, ...]) -> None:
        if connection.is_open_below:
            connection.agent.channel.receive(connection, parcels)
