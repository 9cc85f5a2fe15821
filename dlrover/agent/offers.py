"""
The ports that an agent offers for meetings: one at a time, held until what meets there starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dlrover.agent.workers.group import PortOffer

NUM_OFFERED = 128


class Offers:
    """Of one agent."""

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        """`ports`: HOST_PORTS; empty: any."""
        self._host = host
        self._ports = ports
        self._held: PortOffer | None = None
        self._offered: deque[int] = deque(maxlen=NUM_OFFERED)
        """Oldest first: a port serves one round, or comes back last where HOST_PORTS has no other."""

    def bind(self, port: int) -> tuple[str, bool]:
        """Address and whether it was offered before. `port`: the user's; 0: a free one. Raises OSError if none is free."""
        self._held = (
            PortOffer(self._host, port) if port else PortOffer.bind(self._host, self._ports, offered=self._offered)
        )
        is_reused = self._held.port in self._offered
        if is_reused:
            self._offered.remove(self._held.port)
        self._offered.append(self._held.port)
        return self._held.address, is_reused

    def take(self) -> PortOffer | None:
        """For what meets there now; None: nothing is offered."""
        offer, self._held = self._held, None
        return offer

    def drop(self) -> None:
        offer = self.take()
        if offer is not None:
            offer.release()
