"""What the exchange of snapshots between agents is allowed to take, in copies, bytes and seconds."""

from __future__ import annotations

from msgspec import Struct

from dlrover.agent.replicas.wire import STALL


class ReplicaConfig(Struct, frozen=True, kw_only=True):
    job: str
    copies: int = 0
    """--snapshot-replicas; a trainer may ask for more."""
    num_data: int = 0
    num_parity: int = 0
    """--snapshot-parity k+m."""
    bytes_per_second: float = 0.0
    """Limit for what this node sends in the background; 0: none."""
    ask_limit: float = 5.0
    """Seconds for the master, and for all peers together, to say what there is."""
    fetch_limit: float = 120.0
    """Seconds for fetching what the workers of a round need before they start without it."""
    push_limit: float = 600.0
    """Seconds for one copy."""
    parity_limit: float = 120.0
    """Seconds for the whole group to protect a save by parity."""
    stall: float = STALL
    """Seconds without a byte after which a peer is given up."""
