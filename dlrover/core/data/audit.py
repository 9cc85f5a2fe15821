"""
The audit of a job's data: from the commands alone, without believing the books.

It follows which shard was given to whom and what was reported of it, rolls back when ranks went on with an older model, and at the end
counts every place of every epoch: seen once, seen twice, or missing.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.core.data.dataset import Dataset
from dlrover.core.data.ranges import Places, Range, overlapping, range_of, said, subtract, united
from dlrover.protocol.messages.data import (
    NO_STEP,
    DatasetSpec,
    ExchangeShards,
    LeasedShard,
    RegisterDataset,
    RestoreAgreed,
    RestoreDataset,
    ShardsGiven,
    TaskType,
)
from dlrover.protocol.messages.job import Command, Reply


class AuditFinding(Struct, frozen=True, kw_only=True):
    """What became of one dataset."""

    dataset: str
    num_seen: int
    """Records in the model, counted once each."""
    num_owed: int
    """Records that were to be read by the end of the journal, in the epochs that had begun."""
    repeated: tuple[str, ...]
    """Ranges that are in the model twice."""
    missing: tuple[str, ...]
    """Ranges of epochs that are over, and in no model."""
    num_trusted: int = 0
    """Records that were read before what the journal tells, or before an explicit return to a checkpoint."""
    num_set_aside: int = 0
    is_complete: bool = False

    @property
    def is_clean(self) -> bool:
        return not self.repeated and not self.missing


class Audit:
    def __init__(self, datasets: dict[str, Dataset]) -> None:
        """With the books as they stood at the first command."""
        self._ledgers = {name: _Ledger.of_books(books) for name, books in datasets.items()}

    def follow(self, command: Command, reply: Reply, datasets: dict[str, Dataset]) -> None:
        """A command that was applied, and the books after it (which are looked at only after an explicit return)."""
        match command:
            case RegisterDataset(spec=spec) if spec.name not in self._ledgers:
                is_returned = datasets[spec.name].num_returns > 0
                self._ledgers[spec.name] = _Ledger.of_books(datasets[spec.name]) if is_returned else _Ledger(spec)
            case ExchangeShards() if isinstance(reply, ShardsGiven):
                self._ledgers[command.dataset].exchange(command, reply)
            case RestoreAgreed():
                for name, ledger in list(self._ledgers.items()):
                    if ledger.num_returns != datasets[name].num_returns:
                        self._ledgers[name] = _Ledger.of_books(datasets[name])
                    elif ledger.spec.task_type is TaskType.TRAINING:
                        ledger.restore(command, name)
            case RestoreDataset():
                self._ledgers[command.dataset] = _Ledger.of_books(datasets[command.dataset])

    def findings(self, datasets: dict[str, Dataset]) -> list[AuditFinding]:
        return [self._ledgers[name].finding(datasets[name]) for name in self._ledgers]


class _Ledger:
    """One dataset."""

    def __init__(self, spec: DatasetSpec) -> None:
        self.spec = spec
        self._given: dict[int, LeasedShard] = {}
        self._done: dict[int, int] = {}
        self._seen: list[tuple[int, Range]] = []
        """Step, and what the model contains since then."""
        self._begins_at = 0
        """Epoch; those before it are trusted."""
        self._owed: list[Range] | None = None
        """Of the first epoch; None: all of it."""
        self._starts = dict(spec.partitions)
        """Of a stream: where the books began."""
        self._num_trusted = 0
        self.num_returns = 0

    @classmethod
    def of_books(cls, books: Dataset) -> _Ledger:
        ledger = cls(books.spec)
        ledger._begins_at = books.epoch
        ledger._owed = [*books.returned, *books.held_ranges(), *([] if books.is_stream else books.fresh_ranges())]
        ledger._seen = [(step, each) for step, ranges in books.provisional.items() for each in ranges]
        ledger._owed += [each for _, each in ledger._seen]
        ledger._starts = dict(books.offsets)
        ledger._num_trusted = books.num_committed
        ledger.num_returns = books.num_returns
        ledger._given = {id_: books.shard(id_) for id_ in books.held}
        return ledger

    def exchange(self, command: ExchangeShards, reply: ShardsGiven) -> None:
        for each in command.consumed:
            shard, done = self._given[each.shard], self._done.get(each.shard, 0)
            start = shard.start + done
            place = Range(shard.epoch, start, start + each.count, shard.partition, shard.listing)
            self._seen.append((each.step, place))
            self._done[each.shard] = done + each.count
        for shard in reply.shards:
            self._given[shard.id] = shard

    def restore(self, command: RestoreAgreed, name: str) -> None:
        self._seen = [(step, each) for step, each in self._seen if step == NO_STEP or step <= command.step]
        known = Places(united(each for _, each in self._seen))
        for claim in command.claims.get(name, ()):
            if claim.step <= command.step:
                self._seen += [(claim.step, rest) for rest in known.without(range_of(claim))]

    def finding(self, books: Dataset) -> AuditFinding:
        seen = sorted((each for _, each in self._seen), key=lambda each: (each.key, each.start))
        twice = list(overlapping(seen))
        # Shards for evaluation and prediction may be given to two workers: whoever is quicker counts.
        repeated = twice if self.spec.task_type is TaskType.TRAINING else []
        owed = self._owed_until(books)
        open_ = [
            *books.returned,
            *books.held_ranges(),
            *(each.range for each in books.set_aside),
        ]
        open_ += [] if books.is_stream else books.fresh_ranges()
        missing = subtract(owed, [*seen, *open_])
        return AuditFinding(
            dataset=self.spec.name,
            num_seen=sum(each.size for each in seen) - sum(each.size for each in twice),
            num_owed=sum(each.size for each in owed),
            repeated=tuple(map(said, repeated)),
            missing=tuple(map(said, missing)),
            num_trusted=self._num_trusted,
            num_set_aside=sum(each.range.size for each in books.set_aside),
            is_complete=books.is_complete,
        )

    def _owed_until(self, books: Dataset) -> list[Range]:
        """Everything that was to be read in the epochs up to the newest one."""
        if books.is_stream:
            starts = {part: self._starts.get(part, 0) for part in books.offsets}
            since = [Range(0, starts[part], end, part) for part, end in books.offsets.items() if end > starts[part]]
            return [*(self._owed or []), *since]
        first = [Range(self._begins_at, 0, self.spec.size)] if self._owed is None else list(self._owed)
        return first + [Range(epoch, 0, self.spec.size) for epoch in range(self._begins_at + 1, books.epoch + 1)]
