"""
Messages of dynamic data sharding.

A dataset is cut into shards, ranges of places, and the records themselves never travel. Workers take shards, a batch of them at a time, and say
what they have consumed of them together with the step of the model that contains it. One message carries all of that, so a worker that reads fast
costs the master one command for many shards.

What a range means depends on the dataset: numbers of records for a table and for an unshuffled text; places in the shuffled order of the
epoch for a shuffled text (`dlrover.agreed.permutation`); offsets in a partition for a stream.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from msgspec import Struct

from dlrover.protocol.messages.identity import Incarnation, Micros, NodeId, Round

MAX_DATASETS = 256
MAX_NAME_BYTES = 256
MAX_SHARDS_AT_ONCE = 1024
MAX_PARTITIONS = 4096
MAX_ERROR_BYTES = 1024
MAX_STATE_BYTES = 1 << 20
"""Of the state of all datasets in a checkpoint's manifest."""
NO_STEP = -1
"""Consumed for good, whatever model contains it: of scripts that do not tell their steps."""


def last_shared(step: int, round_: int, turns: Iterable[tuple[int, int]]) -> int:
    """
    The last step up to which a model of that step, trained in that round, has the history that counts. Each turn is a round and the step
    that its ranks went on with: what older rounds had trained beyond that was given up then, and its records are read again by others.
    """
    return min([step, *(at for later, at in turns if later > round_)])


class TaskType(enum.IntEnum):
    """What is done with the records; the numbers are those of the original's protocol."""

    NONE = 0
    TRAINING = 1
    EVALUATION = 2
    PREDICTION = 3
    WAIT = 4
    TRAIN_END_CALLBACK = 5


class StorageKind(enum.StrEnum):
    TABLE = "table"
    """Shards are shuffled, the records inside stay in order."""
    TEXT = "text"
    """Records are shuffled over the whole dataset."""
    STREAM = "stream"
    """Partitions with growing offsets; in order inside a partition."""


class DatasetSpec(Struct, frozen=True, kw_only=True):
    """What a dataset is. The first worker's word counts; the others must say the same."""

    name: str
    size: int
    """Records of one epoch; of a stream in all, -1 for endless."""
    shard_size: int
    num_epochs: int = 1
    """0 or less: endless."""
    batch_size: int = 1
    shuffle: bool = False
    seed: int = 0
    storage: StorageKind = StorageKind.TABLE
    task_type: TaskType = TaskType.TRAINING
    partitions: dict[str, int] = {}
    """Of a stream: the first offset of each."""
    is_required: bool | None = None
    """Whether a job whose workers leave it unread has failed. None: if it is for training."""
    is_bad_data_skipped: bool = False
    """Whether a job may complete although shards of it could not be read and were set aside."""
    lease: float = 1800.0
    """
    Seconds after which a shard for evaluation or prediction is taken from a worker that was not heard of; 0: never. A shard for
    training stays with its worker as long as that lives: the model may contain it.
    """
    max_errors: int = 3
    """How often a shard may fail by its data before it is set aside."""
    grows: bool = False
    """
    Of a stream: nothing lies beyond the ends that were told so far, and they move on until it is said that the stream is over. Otherwise a
    partition without an end can be read for ever.
    """
    fingerprint: str = ""
    """Of the data themselves, where a reader has looked: data that were exchanged are refused like another cut. Empty: none has."""


class LeasedShard(Struct, frozen=True, array_like=True):
    """A range of places, and under which number it was given."""

    id: int
    epoch: int
    start: int
    end: int
    partition: str = ""
    indices: tuple[int, ...] = ()
    """The records themselves, where a checkpoint of the original listed them one by one: `start` and `end` count in that list."""
    listing: int = 0
    """Number of the list."""


class DataCommand(Struct, frozen=True, kw_only=True):
    node: NodeId = NodeId(-1)
    """Put in by the agent, as is the incarnation."""
    incarnation: Incarnation = Incarnation(0)
    round: Round = Round(0)
    local_rank: int = 0


class DatasetCommand(DataCommand, frozen=True, kw_only=True):
    dataset: str


class RegisterDataset(DatasetCommand, tag=True, frozen=True, kw_only=True):
    """Answered by `DatasetState`. Telling the same again is harmless, another cut is refused."""

    spec: DatasetSpec


class Consumption(Struct, frozen=True, array_like=True):
    """So many records, from where the shard's consumption stood, are in the model from this step on."""

    shard: int
    count: int
    step: int = NO_STEP


class ShardError(Struct, frozen=True, array_like=True):
    shard: int
    message: str


class ExchangeShards(DatasetCommand, tag=True, frozen=True, kw_only=True):
    """All at once, or nothing: what was consumed, what failed, what comes back unused, and how many more are wanted."""

    consumed: tuple[Consumption, ...] = ()
    failed: tuple[ShardError, ...] = ()
    unused: tuple[int, ...] = ()
    """Shards that go back with what is left of them: no worker here will read it."""
    want: int = 0
    has_model: bool = False
    """
    The sender has loaded a model in this round, and one rank says which (`RestoreAgreed`). That word may come later than this question: until
    then it is unknown what is still to be read.
    """
    waived: str = ""
    """Why the rest of the dataset is left unread on purpose: then the job may end without it."""


class Claim(Struct, frozen=True, array_like=True):
    """A restored model says: this is in me, since that step. Any other worker that was to read it must not."""

    epoch: int
    start: int
    end: int
    step: int
    partition: str = ""
    listing: int = 0


class RestoreAgreed(DataCommand, tag=True, frozen=True, kw_only=True):
    """
    The ranks of a round agree on the model they go on with. What any dataset gave to later steps is to be read again, and nothing else.

    One rank says it for all, before any rank takes a shard in the round.
    """

    step: int
    claims: dict[str, tuple[Claim, ...]] = {}
    """By dataset: what the model contains, and a message about it may have been lost. The restored state carries it."""
    data_state: str = ""
    """
    What the manifest of a restored checkpoint says of all datasets, for books that know less or more than its model. Of a model from memory: what the
    newest checkpoint in storage says, for books that know nothing, because the journal was lost.
    """
    is_explicit: bool = False
    """The user named the checkpoint to go back to: its word counts, whatever the books say."""


class RestoreDataset(DatasetCommand, tag=True, frozen=True, kw_only=True):
    """Go back to a dataset checkpoint, whatever was read since. Answered by `DatasetState`."""

    content: str


class ExtendStream(DatasetCommand, tag=True, frozen=True, kw_only=True):
    """Partitions of a stream that came, and where those end that are over. In a stream that grows ends only move forward."""

    partitions: dict[str, int] = {}
    ends: dict[str, int] = {}
    is_over: bool = False
    """Of a stream that grows: nothing more will come."""


class AskDataset(Struct, tag=True, frozen=True, kw_only=True):
    """Answered by `DatasetState`."""

    dataset: str
    round: Round = Round(0)


class AskDataCheckpoint(Struct, tag=True, frozen=True, kw_only=True):
    """Answered by `DataCheckpoint`: the text to keep beside the model of that step."""

    dataset: str
    """Empty: all that are for training, as the manifest of a checkpoint has it."""
    step: int = NO_STEP
    """-1: as things stand, what is being read counted as unread."""
    round: Round = Round(0)


class AwaitRestore(Struct, tag=True, frozen=True, kw_only=True):
    """Have the ranks said which model they go on with (`RestoreAgreed`)? Answered by `RestoreState`, as soon as they have."""

    round: Round
    wait: float = 0.0
    """Seconds to wait for a positive answer."""


class RestoreState(Struct, tag=True, frozen=True):
    is_agreed: bool
    """Also for a round that is not the newest: its workers have nothing to wait for."""


class Supply(enum.StrEnum):
    GIVEN = "given"
    WAIT = "wait"
    """Nothing now; others still read, and what they leave may come back."""
    END = "end"


class ShardsGiven(Struct, tag=True, frozen=True, kw_only=True):
    supply: Supply
    shards: tuple[LeasedShard, ...] = ()
    recalled: tuple[int, ...] = ()
    """Others have nothing to do: give these back unless you have begun them."""
    retry_after: float = 0.0
    held_back_for: float = 0.0
    """
    Seconds after which shards are given out at the latest, although the ranks have not said which model they go on with. `AwaitRestore` tells
    when they have. 0: that is not what is waited for.
    """


class DatasetState(Struct, tag=True, frozen=True, kw_only=True):
    spec: DatasetSpec
    epoch: int
    """0-based; of the shards that are given out now."""
    num_shards: int
    """Of one epoch."""
    num_todo: int
    """Records of the running epoch that are not taken, returned ones included."""
    num_doing: int
    """Records that workers hold."""
    num_consumed: int
    """Records in all epochs that a model contains, provisionally or for good."""
    num_committed: int
    """Of them: in a checkpoint in storage, or told without a step."""
    num_set_aside: int = 0
    is_complete: bool = False
    set_aside: tuple[str, ...] = ()
    """A sentence for each shard that failed too often."""
    num_total: int = -1
    """Records of all epochs; -1: endless, or not known yet."""
    num_readers: int = 0
    """Workers that hold something."""
    speed: float = 0.0
    """Records a second, over about the last minute of reading in this round."""
    remaining: float | None = None
    """Seconds until the end at that speed; None: unknown."""
    consumed_at: Micros = Micros(0)
    """When something was last reported as read, on the master's clock."""
    waived: str = ""
    """Why the rest is left unread on purpose; empty: it is not."""


class DataCheckpoint(Struct, tag=True, frozen=True):
    content: str


AnyDataCommand = RegisterDataset | ExchangeShards | RestoreAgreed | RestoreDataset | ExtendStream
AnyDataQuery = AskDataset | AskDataCheckpoint | AwaitRestore
DataReply = ShardsGiven | DatasetState | DataCheckpoint | RestoreState
