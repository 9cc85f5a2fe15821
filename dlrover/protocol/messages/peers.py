"""
What agents ask the master about each other, and what they tell each other about snapshots in their memory.

The master only says who is where; the bytes go from agent to agent. Its answer does not grow with the job: a node learns of those
that keep something for it and of some neighbours, never of all nodes.

Between two agents every message stands alone in a frame with a checksum, and everything that follows as raw bytes (metadata, data) has
its own sums in the message before it. Nothing here can name code.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.protocol.messages.identity import NodeId, NodeRank, Round

PEER_PROTOCOL = 1
MOST_NEIGHBOURS = 64
"""Of so many members a node is told beside its own keepers: who looks for a lost piece asks these."""
MOST_COPIES = 8
LARGEST_GROUP = 32
"""Nodes of one parity group."""


class AskPeers(Struct, tag=True, frozen=True, kw_only=True):
    """Who keeps what for this node in this round, and who else is there?"""

    node: NodeId
    round: Round
    copies: int = 0
    """Whole copies that shall be kept elsewhere."""
    num_data: int = 0
    """k of a parity group k+m; 0: no parity."""
    num_parity: int = 0


class Peer(Struct, frozen=True):
    node: NodeId
    node_rank: NodeRank
    address: str
    """host:port of its agent."""


class Peers(Struct, tag=True, frozen=True, kw_only=True):
    round: Round
    keepers: tuple[Peer, ...] = ()
    """They keep the copies of the asking node, the most valuable first."""
    group: tuple[Peer, ...] = ()
    """The parity group of the node, itself included, in the order that all its members see."""
    neighbours: tuple[Peer, ...] = ()
    """Members of the world that can be asked for pieces, nearest first, without the asking node."""
    num_members: int = 0


# Between two agents.


class Challenge(Struct, tag=True, frozen=True, kw_only=True):
    """The first word of the called side."""

    nonce: bytes
    version: int = PEER_PROTOCOL


class Proof(Struct, tag=True, frozen=True, kw_only=True):
    """The caller knows the job's token; the token itself never travels."""

    nonce: bytes
    mac: bytes


class Welcome(Struct, tag=True, frozen=True, kw_only=True):
    """So does the called side."""

    mac: bytes


class Held(Struct, frozen=True, kw_only=True):
    """One snapshot of one shard that a node can give."""

    shard: int
    attempt: str
    """Of the save: equal for all shards of it, and never used again."""
    step: int
    round: int
    """In which it was saved."""
    num_shards: int
    num_bytes: int
    is_copy: bool = False
    """Kept for another node."""


class HeldParity(Struct, frozen=True, kw_only=True):
    """Parity over pieces of several shards of one save."""

    attempt: str
    step: int
    round: int
    num_shards: int
    made_in: int
    """Round in which the parity was made: another round has other groups."""
    lane: int
    """Which of the node's shards, in their order, is meant: each is protected with those of the same lane of other nodes."""
    stripe: int
    row: int
    num_data: int
    columns: tuple[tuple[int, int], ...]
    """Per column of the stripe: the shard, and the length of its image (see `dlrover.snapshot.image`)."""


class ListHeld(Struct, tag=True, frozen=True, kw_only=True):
    round: Round


class HeldList(Struct, tag=True, frozen=True, kw_only=True):
    items: tuple[Held, ...] = ()
    parity: tuple[HeldParity, ...] = ()


class SlotHeader(Struct, tag=True, frozen=True, kw_only=True):
    """One slot, about to follow: metadata, then data, of the lengths in the record. Begins a push, answers a pull."""

    round: Round
    """Of the sender, now."""
    shard: int
    attempt: str
    num_shards: int
    sequence: int
    """Of the file it comes from."""
    num_slots: int
    meta_bytes: int
    data_bytes: int
    """Room of that file: a mirror has the same."""
    slot: int
    record: bytes
    """As in the segment, with its own checksum."""
    sums: bytes
    """The same of the data's checksums."""


class PullSlot(Struct, tag=True, frozen=True, kw_only=True):
    round: Round
    shard: int
    attempt: str


class PieceHeader(Struct, tag=True, frozen=True, kw_only=True):
    """A piece of a shard's image, about to follow, to be folded into the parity of a stripe."""

    round: Round
    attempt: str
    step: int
    saved_in: int
    num_shards: int
    lane: int
    stripe: int
    row: int
    column: int
    num_data: int
    shard: int
    image_bytes: int
    length: int
    crc: int
    algorithm: int


class AwaitParity(Struct, tag=True, frozen=True, kw_only=True):
    """Answer when the parity of this stripe is whole, or cannot be any more."""

    round: Round
    attempt: str
    lane: int
    stripe: int
    row: int
    saved_in: int
    step: int
    """Tell whether the holder has gone on to a newer save."""
    patience: float
    """Seconds."""


class PullPiece(Struct, tag=True, frozen=True, kw_only=True):
    """A range of a shard's image, or of a parity."""

    round: Round
    attempt: str
    shard: int = -1
    made_in: int = 0
    lane: int = -1
    stripe: int = -1
    row: int = -1
    start: int = 0
    length: int = 0


class Piece(Struct, tag=True, frozen=True, kw_only=True):
    """The answer to `PullPiece`; the bytes follow."""

    length: int
    crc: int
    algorithm: int


class Accepted(Struct, tag=True, frozen=True, kw_only=True):
    """Go on; or, behind the last byte: it is here, whole and verified."""


class Refused(Struct, tag=True, frozen=True, kw_only=True):
    code: str
    message: str = ""


PeerMessage = (
    Challenge
    | Proof
    | Welcome
    | ListHeld
    | HeldList
    | SlotHeader
    | PullSlot
    | PieceHeader
    | AwaitParity
    | PullPiece
    | Piece
    | Accepted
    | Refused
)
