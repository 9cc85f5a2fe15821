"""
A source, read as a dataset of the job: which of its records this process may read, and which the model has seen.

Shards come from the feed and are cut into pieces, the parts of batches. A piece travels with its records, through worker processes if need be, and
comes back when the model contains them; then it is reported. The pieces of a shard are reported in the order in which they were
cut, which is how the job keeps books of a shard: from its beginning.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from msgspec import Struct

from dlrover.agreed.permutation import Permutation
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.data import DatasetSpec, DatasetState, LeasedShard, StorageKind, TaskType
from dlrover.trainer.agent_link import Link
from dlrover.trainer.data.shard_feed import ShardFeed
from dlrover.trainer.data_sources.directory_tail import DirectoryTail, TailWatch
from dlrover.trainer.data_sources.source import Source, SourceChanged, SourceError

BATCHES_PER_SHARD = 10
_LOOK = 1.0
"""Seconds after which a reader that waits asks whether the watch of a directory still lives."""


class ShardPiece(Struct, frozen=True, array_like=True):
    """A run of places of one shard."""

    shard: int
    epoch: int
    start: int
    end: int
    partition: str = ""
    indices: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.end - self.start

    def part(self, first: int, last: int) -> ShardPiece:
        """The records from the `first` to before the `last`, counted from the beginning of the piece."""
        return ShardPiece(
            self.shard,
            self.epoch,
            self.start + first,
            self.start + last,
            self.partition,
            self.indices[first:last],
        )


def whole(shard: LeasedShard) -> ShardPiece:
    return ShardPiece(shard.id, shard.epoch, shard.start, shard.end, shard.partition, shard.indices)


def size_of(pieces: Iterable[ShardPiece]) -> int:
    return sum(piece.size for piece in pieces)


def cut(pieces: Sequence[ShardPiece], first: int, last: int) -> list[ShardPiece]:
    """The records from the `first` to before the `last` of all these."""
    found, at = [], 0
    for piece in pieces:
        low, high = max(first - at, 0), min(last - at, piece.size)
        if low < high:
            found.append(piece.part(low, high))
        at += piece.size
    return found


class SourceRecords:
    """Reads the records of pieces. Goes into other processes."""

    def __init__(self, source: Source, spec: DatasetSpec) -> None:
        self.source, self.spec = source, spec

    def read(self, pieces: Iterable[ShardPiece]) -> list[Any]:
        return [record for piece in pieces for record in self.source.read(self._places(piece), piece.partition)]

    def _places(self, piece: ShardPiece) -> Sequence[int]:
        if piece.indices:
            return piece.indices
        places = range(piece.start, piece.end)
        if self.spec.shuffle and self.spec.storage is StorageKind.TEXT:
            order = Permutation(self.spec.size, self.spec.seed, piece.epoch)
            return [order.at(place) for place in places]
        return places


def spec_of(
    source: Source,
    *,
    name: str = "",
    batch_size: int,
    num_epochs: int = 1,
    shuffle: bool | str = False,
    seed: int = 0,
    batches_per_shard: int = 0,
    task_type: TaskType = TaskType.TRAINING,
    **options: Any,
) -> DatasetSpec:
    """
    `shuffle`: "records" over the whole dataset, or "shards" as a whole; True: records, but shards where a source is read by row groups.
    `batches_per_shard`: 0: ten, or as many as a row group has.
    """
    if shuffle not in (False, True, "records", "shards"):
        raise ConfigError(f'`shuffle` must be False, True, "records" or "shards" (got {shuffle!r}).')
    if batch_size < 1 or batches_per_shard < 0:
        raise ConfigError(
            f"`batch_size` must be at least 1 (got {batch_size}), and the batches per shard at least 0 (got {batches_per_shard})."
        )
    is_stream = isinstance(source, DirectoryTail)
    if is_stream and shuffle:
        raise ConfigError(f"{source.name!r} grows while it is read, so it cannot be shuffled. Leave `shuffle` out.")
    group = int(getattr(source, "row_group_size", 0))
    is_by_shard = shuffle == "shards" or (shuffle is True and group > 0)
    storage = StorageKind.STREAM if is_stream else StorageKind.TABLE if is_by_shard else StorageKind.TEXT
    per_shard = (
        batches_per_shard or max(1, round(group / batch_size)) if group else batches_per_shard or BATCHES_PER_SHARD
    )
    size = -1 if is_stream else len(source)
    if not size:
        raise SourceError(f"{source.name!r} has no records.")
    return DatasetSpec(
        name=name or source.name,
        size=size,
        shard_size=batch_size * per_shard,
        batch_size=batch_size,
        num_epochs=num_epochs,
        shuffle=bool(shuffle),
        seed=seed,
        storage=storage,
        task_type=task_type,
        grows=is_stream,
        fingerprint=source.fingerprint,
        **options,
    )


class ShardReader:
    """One per dataset and process, in the process that trains."""

    def __init__(self, source: Source, spec: DatasetSpec, *, ahead: int = 0, link: Link | None = None) -> None:
        self.source, self.spec = source, spec
        self._feed = ShardFeed(spec, link=link, ahead=ahead)
        self._out: dict[int, LeasedShard] = {}
        """Shards that are being read here."""
        self._at: dict[int, int] = {}
        """Up to where they were reported."""
        self._lock = threading.Lock()
        """Guards the two above: a thread takes for other processes while the training thread reports."""
        self._watch: TailWatch | None = None

    def start(self) -> None:
        """Before processes are forked that will read: no thread may start meanwhile."""
        self._feed.start()

    def take(self, timeout: float | None = None) -> LeasedShard | None:
        """The next shard; None at the end of the data. Raises TimeoutError, DataUnavailable, and what a watched source says."""
        if not isinstance(self.source, DirectoryTail):
            shard = self._feed.take(timeout)
        else:
            shard = self._take_of_tail(self.source, timeout)
        if shard is not None:
            with self._lock:
                self._out[shard.id] = shard
                self._at[shard.id] = shard.start
        return shard

    def used(self, pieces: Sequence[ShardPiece], step: int) -> None:
        """The model of this step contains them. Raises ValueError, and then nothing was reported."""
        with self._lock:
            runs = [list(run) for _, run in groupby(pieces, key=lambda piece: piece.shard)]
            for run in runs:
                self._check(run)
            for run in runs:
                id_, end = run[0].shard, run[-1].end
                self._feed.consumed(self._out[id_], end - self._at[id_], step)
                self._at[id_] = end
                if end == self._out[id_].end:
                    del self._out[id_], self._at[id_]

    def give_back(self, ids: Iterable[int] | None = None) -> None:
        """Shards that no worker here will read on; None: all."""
        with self._lock:
            given = [self._out.pop(id_) for id_ in list(self._out if ids is None else ids) if id_ in self._out]
            for shard in given:
                del self._at[shard.id]
        self._feed.unused(given)

    def state(self) -> DatasetState:
        """With all that was reported here."""
        self._feed.flush()
        return self._feed.books.state()

    def checkpoint(self) -> str:
        """What is unread, as text; what is read and not reported counts as unread."""
        self._feed.flush()
        return self._feed.books.checkpoint()

    def restore(self, content: str) -> None:
        """Raises Rejected, and then nothing has changed."""
        with self._feed.going_back():
            self._feed.books.restore(content)
        with self._lock:
            self._out.clear()
            self._at.clear()

    def stop_early(self, reason: str = "training stopped early") -> None:
        """The rest of the data is left unread on purpose: the job completes without it."""
        self._feed.waive(reason)
        self._feed.flush()

    def close(self) -> None:
        watch, self._watch = self._watch, None
        try:
            if watch is not None:
                watch.close()
        finally:
            self._feed.close()

    def _check(self, run: list[ShardPiece]) -> None:
        at = self._at.get(run[0].shard)
        if at is None:
            raise ValueError(
                f"A batch of {self.spec.name!r} cannot be reported, because shard {run[0].shard} is not open "
                "here any more. The batch is of an earlier pass, or was reported before. Report each batch "
                "once, in the pass that read it."
            )
        if run[0].start != at or any(two.start != one.end for one, two in pairwise(run)):
            raise ValueError(
                f"A batch of {self.spec.name!r} was reported out of order: it begins at record {run[0].start} "
                f"of shard {run[0].shard}, but record {at} is next. Report batches in the order in which you "
                "got them."
            )

    def _take_of_tail(self, tail: DirectoryTail, timeout: float | None) -> LeasedShard | None:
        # Not before the first shard is wanted: until then the ranks may still agree on the model they go on with.
        if self._watch is None and int(os.environ.get("RANK") or 0) == 0:
            self._watch = TailWatch(tail, lambda ends, is_over: self._feed.extend(ends, is_over=is_over))
        left = timeout
        while True:
            if self._watch is not None and self._watch.trouble is not None:
                raise self._watch.trouble
            try:
                return self._feed.take(_LOOK if left is None else min(left, _LOOK))
            except TimeoutError:
                left = None if left is None else left - _LOOK
                if left is not None and left <= 0:
                    raise


def check_same_data(state: dict[str, Any], spec: DatasetSpec) -> None:
    """A saved state fits the dataset of today. Raises SourceChanged."""
    for word, saved, ours in (
        ("name", state.get("name"), spec.name),
        ("fingerprint", state.get("fingerprint"), spec.fingerprint),
    ):
        if saved != ours:
            raise SourceChanged(
                f"The state cannot be loaded: it was saved for data with the {word} {saved!r}, and these data "
                f"have {ours!r}. Its record numbers would name other records. Load it with the data and "
                "settings that it was saved with."
            )


def batches_of(shards: Iterable[LeasedShard | None], batch_size: int) -> Iterator[list[ShardPiece]]:
    """
    Full batches, over the edges of shards. Short ones at the end of an epoch, and where None comes instead of a shard: others hold the rest
    for now, and may wait for what is held here.
    """
    pieces: list[ShardPiece] = []
    for shard in shards:
        if pieces and (shard is None or shard.epoch != pieces[-1].epoch):
            yield pieces
            pieces = []
        if shard is not None:
            pieces.append(whole(shard))
        while (size := size_of(pieces)) >= batch_size:
            yield cut(pieces, 0, batch_size)
            pieces = cut(pieces, batch_size, size)
    if pieces:
        yield pieces
