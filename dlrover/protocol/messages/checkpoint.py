"""
Messages about snapshots and checkpoints: trainers and their agent, agents and the master.

Between a trainer and its agent, over the node's unix socket, these are nudges: everything that counts stands in the segments, where
a restarted agent finds it too. No trainer ever waits for an answer.

Agents tell the master what they wrote, and the master tells one of them to commit when the set of shards is complete. What it wants of a
node is asked for with a question that waits (`AwaitSaveDuties`): it is answered as soon as there is something newer than what the agent
knows, so nothing is lost with a broken stream, and a master that was restarted is simply asked again.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from dlrover.protocol.messages.identity import Incarnation, Micros, NodeId, Round

MAX_PATH_CHARS = 4096
MAX_NAME_CHARS = 256
MAX_REASON_CHARS = 1024
MAX_SHARDS = 1_000_000


# Trainer to agent.


class OpenSnapshots(Struct, tag=True, frozen=True, kw_only=True):
    """This worker is going to save: own the directory of the segments."""

    home: str
    place: bytes = b""
    """
    Where it saves and with which classes, as `dlrover.snapshot.storage.places` reads it. The agent follows a copy of another node only as
    far as a worker of its own has named the same.
    """


class SnapshotSaved(Struct, tag=True, frozen=True, kw_only=True):
    """A slot is complete. Sum it, and persist it if it says so."""

    path: str
    """Of the segment."""
    slot: int
    generation: int
    step: int
    is_storage: bool = False


class SnapshotFailed(Struct, tag=True, frozen=True, kw_only=True):
    """A state could not even be copied into memory. Training goes on, and a person should know."""

    directory: str
    step: int
    reason: str


# Agent to trainer.


class SnapshotTaken(Struct, tag=True, frozen=True, kw_only=True):
    """From the agent: it holds this slot now, the trainer need not keep it any longer."""

    path: str
    generation: int


class CheckpointSettled(Struct, tag=True, frozen=True, kw_only=True):
    """What became of one storage save: it counts, or it was given up and why. Told to trainers and agents alike."""

    step: int
    attempt: str
    is_committed: bool
    reason: str = ""
    """Why not; one sentence."""
    directory: str = ""
    seconds: float = 0.0
    """From when this agent began to write until the end; 0: unknown. A measure of what a storage save costs."""
    number: int = 0
    """Of the master's news, growing; 0: settled without a master."""


class SaveRequested(Struct, tag=True, frozen=True, kw_only=True):
    """The state is wanted in storage soon: the next save shall be one to storage."""

    number: int
    """Grows with each request: one that was honoured is not honoured again."""
    reason: str = ""


TrainerNews = SnapshotTaken | CheckpointSettled | SaveRequested
"""All that an agent tells its trainers of snapshots."""


# Agent to master: commands.


class CheckpointCommand(Struct, frozen=True, kw_only=True):
    node: NodeId = NodeId(-1)
    """Put in by the agent's relay, as is the incarnation."""
    incarnation: Incarnation = Incarnation(0)


class ShardWritten(CheckpointCommand, tag=True, frozen=True, kw_only=True):
    """The files of one shard are staged and durable, and so is its manifest."""

    directory: str
    target: str
    step: int
    attempt: str
    shard: int
    num_shards: int
    round: Round
    """In which the state was saved; a break point is written in a later one."""
    digest: str
    """Of the shard's manifest as it lies in the staging directory."""
    save_timeout: float = 600.0
    """Seconds that the attempt may wait for its other shards."""


class CheckpointCommitted(CheckpointCommand, tag=True, frozen=True, kw_only=True):
    """The node has committed the attempt. It counts from here on."""

    directory: str
    attempt: str
    step: int
    round: Round = Round(0)
    is_by_files: bool = False
    """It was not told to: it could not reach the master for long, and the files were complete."""


class CheckpointFailed(CheckpointCommand, tag=True, frozen=True, kw_only=True):
    """A shard could not be written, or a commit not be made."""

    directory: str
    attempt: str
    step: int
    reason: str
    shard: int = -1
    """-1: it was the commit that failed."""
    num_shards: int = 0


class HeldSnapshot(Struct, frozen=True, kw_only=True):
    """A complete snapshot in a node's memory."""

    directory: str
    attempt: str
    step: int
    shard: int
    num_shards: int
    round: Round = Round(0)


class SnapshotsHeld(CheckpointCommand, tag=True, frozen=True, kw_only=True):
    """The workers of a round have ended at this node: what it still has of them, kept from being overwritten for a while."""

    round: Round
    held: tuple[HeldSnapshot, ...]


class RequestSave(Struct, tag=True, frozen=True, kw_only=True):
    """A client with the token wants the job's state in storage as soon as its trainers save next."""

    reason: str = ""


# What the master wants of a node.


class CommitCheckpoint(Struct, frozen=True, kw_only=True):
    """All shards of the attempt are written: make it count."""

    number: int
    directory: str
    target: str
    step: int
    attempt: str
    num_shards: int
    digest: str
    """`digest_of_shards`: the manifests in the directory must be those that were reported. Empty: some could not be."""
    is_waiting: bool = False
    """Some shards are still being written by nodes that have left and cannot report them: wait for their files."""
    is_newest: bool = True
    """False: a newer state was committed before. It becomes a checkpoint, and the trackers stay."""
    data_state: str = ""
    """What its model has still to read, for the manifest; empty: the job reads no shards, or it is not known any more."""


class PersistSnapshot(Struct, frozen=True, kw_only=True):
    """What the nodes decided together after a break: write these shards of this attempt, let go of all else."""

    number: int
    round: Round
    """Whose workers had ended."""
    directory: str = ""
    attempt: str = ""
    """Empty: no snapshot is whole in what is left of the job."""
    step: int = -1
    shards: tuple[int, ...] = ()


class AwaitSaveDuties(Struct, tag=True, frozen=True, kw_only=True):
    """What shall this node do about checkpoints, and what became of those under way?"""

    node: NodeId = NodeId(-1)
    incarnation: Incarnation = Incarnation(0)
    since: int = 0
    """The greatest number that it has heard of."""
    wait: float = 0.0
    """Seconds to wait for something newer."""


class SaveDuties(Struct, tag=True, frozen=True, kw_only=True):
    number: int
    """The greatest of all below."""
    commits: tuple[CommitCheckpoint, ...] = ()
    settled: tuple[CheckpointSettled, ...] = ()
    persists: tuple[PersistSnapshot, ...] = ()
    request: SaveRequested | None = None


# For people.


class CommittedCheckpoint(Struct, frozen=True, kw_only=True):
    directory: str
    step: int
    attempt: str = ""
    at: Micros = Micros(0)


class CheckpointTrouble(Struct, frozen=True, kw_only=True):
    """The newest thing that went wrong with saving."""

    reason: str
    step: int
    directory: str
    node: NodeId = NodeId(-1)
    host: str = ""
    at: Micros = Micros(0)
    count: int = 1
    """How often it happened in a row."""


class CheckpointStatus(Struct, frozen=True, kw_only=True):
    snapshot_step: int | None = None
    """The newest that every node of the world has told of having in memory."""
    copied_step: int | None = None
    """The newest that would survive the loss of a node without storage. None: no node has told of copies on others."""
    committed: tuple[CommittedCheckpoint, ...] = ()
    """The newest of each directory."""
    num_under_way: int = 0
    trouble: CheckpointTrouble | None = None
    """None, too, when saving has succeeded since."""


AnyCheckpointCommand = ShardWritten | CheckpointCommitted | CheckpointFailed | SnapshotsHeld
AnyCheckpointQuery = AwaitSaveDuties
CheckpointReply = SaveDuties


def digest_of_shards(digests: Mapping[int, str]) -> str:
    """One digest over those of all shards' manifests."""
    import hashlib  # here: the launcher imports this module, too, and must start in milliseconds

    total = hashlib.blake2b(digest_size=16)
    for shard in sorted(digests):
        total.update(f"{shard}:{digests[shard]}\n".encode())
    return total.hexdigest()
