"""
The books of one dataset: what is not taken yet, who holds what, and what is in the model since which step.

A record of an epoch is always in exactly one of these places:

    fresh        behind the cursor of the epoch; nothing is stored for it
    returned     taken once and given back; handed out before anything fresh
    held         leased to one worker of one round
    provisional  consumed, in the model from a step on that no checkpoint in storage has reached yet
    committed    consumed for good; only counted
    set aside    failed too often by its data

Nothing here grows with the size of the dataset: the order of shards and records is computed (`permutation`), and only what
is under way is listed. A restored model of step S sends everything provisional after S back to the head of the queue, and every
lease with it; so what a model has seen and what is still to be read always add up to the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from dlrover.core.data.fresh import FreshData
from dlrover.core.data.leases import HeldShard, LeaseHolder, Outdone, SetAside
from dlrover.core.data.ranges import Places, Range, append, joined, range_of, united
from dlrover.protocol.messages.data import NO_STEP, Claim, LeasedShard
from dlrover.protocol.messages.identity import NodeId, Round
from dlrover.protocol.messages.job import Micros

MOST_RECALLED = 16
"""Shards that are asked back at once of one worker."""
SLOW = 2
"""So many times what a shard usually takes: who needs longer is helped by who has nothing to do."""
MOST_OUTDONE = 4096
MOST_ADVANCED = 65_536
"""Shards that are listed to compare two states of a dataset."""
PACE_MARKS, PACE_INTERVAL = 12, 5_000_000
"""How many points of the recent past the speed of reading is told from, and how many microseconds they are apart."""


class Mark(Struct, frozen=True, array_like=True):
    """How far the reading was at some time."""

    at: Micros
    num_consumed: int


class Dataset(FreshData, Struct):
    returned: list[Range] = []
    """The last one is handed out first."""
    held: dict[int, HeldShard] = {}
    readers: dict[NodeId, dict[int, LeaseHolder]] = {}
    """Workers that hold something, by node and local rank."""
    num_readers: int = 0
    last_id: int = 0
    provisional: dict[int, list[Range]] = {}
    num_consumed: int = 0
    num_committed: int = 0
    errors: dict[str, int] = {}
    set_aside: list[SetAside] = []
    listings: dict[int, tuple[int, ...]] = {}
    restored_round: Round = Round(0)
    """The newest round whose workers said which model they go on with."""
    pace: list[Mark] = []
    """Of this round, the oldest first."""
    consumed_at: Micros = Micros(0)
    waived: str = ""
    """Why the rest is left unread on purpose."""
    num_returns: int = 0
    """How often the books were replaced by what a checkpoint says."""
    typical: int = 0
    """Microseconds from the giving of a shard to its end, lately."""
    outdone: dict[int, Outdone] = {}
    num_unbegun: int = 0
    """Held shards of which nothing is reported yet."""
    num_recalled: int = 0
    is_stepped: bool = False
    """Its readers name the steps of their model: so they will say which model a round goes on with."""

    def __post_init__(self) -> None:
        """Counted anew for a snapshot of a master that did not count."""
        self.num_unbegun = sum(not held.is_begun for held in self.held.values())
        self.num_recalled = sum(len(reader.recalled) for reader in self.all_readers())

    # What there is.

    @property
    def is_complete(self) -> bool:
        return self.is_exhausted and not self.returned and not self.held

    @property
    def has_history(self) -> bool:
        """Whether anything was ever read of it, as far as these books know."""
        return self.num_consumed > 0 or self.is_stepped

    def advance_to(self, epoch: int, cursor: int, offsets: dict[str, int]) -> bool:
        """Let what is fresh up to there be listed as returned; False: that is too much to list."""
        num_ahead = (epoch - self.epoch) * self.num_shards + cursor - self.cursor
        if num_ahead > MOST_ADVANCED:
            return False
        for _ in range(num_ahead):
            if self.cursor >= self.num_shards:
                self.epoch, self.cursor = self.epoch + 1, 0
            self.returned.append(self.take_fresh_shard())
        for part, offset in offsets.items():
            if part in self.offsets and offset > self.offsets[part]:
                self.returned.append(Range(0, self.offsets[part], offset, part))
                self.num_left -= offset - self.offsets[part] if self.num_left > 0 else 0
                self.offsets[part] = offset
        return True

    def places_left(self) -> tuple[object, ...]:
        """What is not consumed yet, the same for books that say it in other pieces."""
        pieces = sorted([*self.returned, *self.held_ranges()], key=lambda each: (each.key, each.start))
        whole: list[Range] = []
        for each in pieces:
            if whole and whole[-1].key == each.key and whole[-1].end == each.start:
                whole[-1] = joined(whole[-1], each)
            else:
                whole.append(each)
        return tuple(whole), self.epoch, self.cursor, tuple(sorted(self.offsets.items())), self.num_left

    # How fast it goes.

    def note_pace(self, now: Micros) -> None:
        self.consumed_at = now
        if not self.pace or now - self.pace[-1].at >= PACE_INTERVAL:
            self.pace.append(Mark(now, self.num_consumed))
            del self.pace[:-PACE_MARKS]

    @property
    def speed(self) -> float:
        """Records a second."""
        if not self.pace or self.consumed_at <= self.pace[0].at:
            return 0.0
        return (self.num_consumed - self.pace[0].num_consumed) * 1e6 / (self.consumed_at - self.pace[0].at)

    # Handing out.

    def reader(self, node: NodeId, local_rank: int) -> LeaseHolder | None:
        return self.readers.get(node, {}).get(local_rank)

    def take(self, reader: LeaseHolder, want: int) -> list[LeasedShard]:
        """
        Up to `want` shards, returned ones first. Towards the end of an epoch every worker gets fewer at once, so that none is
        left with a heap while the others have nothing.
        """
        given = []
        for _ in range(min(want, self._fair_share(reader))):
            found = self._next(reader)
            if found is None:
                break
            self.last_id += 1
            given.append(self._hand(found, reader))
        return given

    def take_copy(self, reader: LeaseHolder) -> LeasedShard | None:
        """
        Nothing is left but what is being read: a second copy of what a slow worker holds for longest. The worker that finishes it
        first counts. Not for training: a model must not see a record twice.
        """
        slow = SLOW * self.typical
        late = [
            (held.given_at, id_)
            for id_, held in self.held.items()
            if not held.twin and id_ not in reader.ids and reader.heard_at - held.given_at > slow
        ]
        if self.is_stream or not self.typical or not late:
            return None
        _, id_ = min(late)
        held = self.held[id_]
        held.counted_to = held.range.start
        self.last_id += 1
        copy = self._hand(held.range, reader)
        held.twin, self.held[copy.id].twin = copy.id, id_
        self.held[copy.id].counted_to = held.counted_to
        return copy

    def _hand(self, found: Range, reader: LeaseHolder) -> LeasedShard:
        """Under the newest number."""
        self._enter(self.last_id, HeldShard(found, reader.node, reader.local_rank, given_at=reader.heard_at), reader)
        return self.shard(self.last_id)

    def _enter(self, id_: int, held: HeldShard, reader: LeaseHolder) -> None:
        self.held[id_] = held
        self.num_unbegun += not held.is_begun
        reader.ids[id_] = None
        if len(reader.ids) == 1:
            self.readers.setdefault(reader.node, {})[reader.local_rank] = reader
            self.num_readers += 1

    def held_ranges(self) -> list[Range]:
        """What is given and not reported, each record once."""
        return [held.open for id_, held in self.held.items() if not held.twin or id_ < held.twin]

    def shard(self, id_: int) -> LeasedShard:
        found = self.held[id_].range
        listed = self.listings[found.listing][found.start : found.end] if found.listing else ()
        return LeasedShard(id_, found.epoch, found.start, found.end, found.partition, listed, found.listing)

    def recall(self) -> bool:
        """A worker has nothing to do: ask the holder of most shards for half of what it has not begun. False: no worker has any."""
        if self.is_stream:
            return False  # the rest of a partition is read by the one who reads its beginning
        if (
            self.num_recalled or not self.num_unbegun
        ):  # often asked at the end of an epoch, so nobody is looked for in vain
            return self.num_recalled > 0
        unbegun = [[id_ for id_ in reader.ids if not self.held[id_].is_begun] for reader in self.all_readers()]
        most = max(unbegun, key=len)
        for id_ in most[len(most) // 2 :][-MOST_RECALLED:]:  # those it would come to last
            self._reader_of(id_).recalled[id_] = None
            self.num_recalled += 1
        return True

    # Taking back.

    def consume(self, id_: int, count: int, step: int) -> None:
        """The caller has checked who holds it and how much is left."""
        if id_ in self.outdone:
            self.outdone[id_].num_left -= count
            if not self.outdone[id_].num_left:
                del self.outdone[id_]
            return
        held = self.held[id_]
        whole = held.range
        taken = Range(whole.epoch, whole.start, whole.start + count, whole.partition, whole.listing)
        held.range = Range(whole.epoch, whole.start + count, whole.end, whole.partition, whole.listing)
        self.num_unbegun -= not held.is_begun
        held.is_begun = True
        self._forget_recall(self._reader_of(id_), id_)
        if held.counted_to >= 0:
            taken = self._count_copy(held, taken)
        if not held.range.size:
            self._let_go(id_)
            self._note_duration(self.consumed_at - held.given_at)
            if held.twin:
                self._outdo(held.twin)
        self.num_consumed += taken.size
        if step == NO_STEP:
            self.num_committed += taken.size
        else:
            self.is_stepped = True
            append(self.provisional.setdefault(step, []), taken)

    def _note_duration(self, micros: int) -> None:
        self.typical = max(1, micros if not self.typical else (7 * self.typical + micros) // 8)

    def _count_copy(self, held: HeldShard, taken: Range) -> Range:
        """What of it was not reported before. Both copies know from now on."""
        start = min(max(taken.start, held.counted_to), taken.end)
        for each in (held, self.held[held.twin]) if held.twin else (held,):
            each.counted_to = max(each.counted_to, taken.end)
        return Range(taken.epoch, start, taken.end, taken.partition, taken.listing)

    def _outdo(self, id_: int) -> None:
        held = self.held[id_]
        held.twin = 0
        self.outdone[id_] = Outdone(held.node, held.local_rank, held.range.size)
        self._let_go(id_)
        for old in list(self.outdone)[:-MOST_OUTDONE]:
            del self.outdone[old]

    def outdone_of(self, node: NodeId, local_rank: int) -> list[int]:
        return [id_ for id_, each in self.outdone.items() if (each.node, each.local_rank) == (node, local_rank)]

    def fail(self, id_: int, message: str) -> bool:
        """Its data cannot be read. True: once too often, it is set aside."""
        left = self._take_back(id_)
        if not left:
            return False
        [failed] = left
        key = f"{failed.epoch}/{failed.partition}/{failed.listing}/{failed.start}"
        self.errors[key] = self.errors.get(key, 0) + 1
        if self.errors[key] > self.spec.max_errors:
            del self.errors[key]
            self.set_aside.append(SetAside(failed, message))
            return True
        self._return([failed])
        return False

    def give_back(self, ids: Iterable[int]) -> None:
        """What was asked back for idle workers comes in halves: there may be several of them."""
        whole, halves = [], []
        for id_ in ids:
            is_recalled = id_ in self.held and id_ in self._reader_of(id_).recalled
            for each in self._take_back(id_):
                middle = each.start + -(-each.size // (2 * self.spec.batch_size)) * self.spec.batch_size
                if is_recalled and each.start < middle < each.end and not each.listing:
                    halves.append(Range(each.epoch, middle, each.end, each.partition))
                    each = Range(each.epoch, each.start, middle, each.partition)
                whole.append(each)
        self._return(halves)
        self._return(whole)

    def _reader_of(self, id_: int) -> LeaseHolder:
        held = self.held[id_]
        return self.readers[held.node][held.local_rank]

    def _take_back(self, id_: int) -> list[Range]:
        """What has to be given to another worker: nothing of a copy that another still reads."""
        if self.outdone.pop(id_, None) is not None:
            return []
        held = self.held[id_]
        self._let_go(id_)
        if not held.twin:
            return [held.open]
        self.held[held.twin].twin = 0
        return []

    def end_leases(self, readers: Iterable[LeaseHolder]) -> int:
        """Of workers that are gone. How many shards came back."""
        gone = list(readers)
        ids = [id_ for reader in gone for id_ in reader.ids]
        for reader in gone:
            for id_ in list(reader.recalled):
                self._forget_recall(reader, id_)
            for id_ in self.outdone_of(reader.node, reader.local_rank):
                del self.outdone[id_]
        self.give_back(ids)
        return len(ids)

    def readers_of(self, node: NodeId) -> list[LeaseHolder]:
        return list(self.readers.get(node, {}).values())

    def all_readers(self) -> list[LeaseHolder]:
        return [reader for node in list(self.readers) for reader in self.readers_of(node)]

    # Models that come back, and models that are safe.

    def restore(self, step: int, claims: Iterable[Claim] = (), *, round_: Round | None = None) -> list[Claim]:
        """
        Go on with the model of this step. Gives the claims that cannot be: their ranges were never taken, so these are not the
        books that the model was trained by.

        What workers of this round hold stays with them: it is in no model, and they are about to read it.
        """
        undone = [each for later in sorted(self.provisional) if later > step for each in self.provisional[later]]
        self.provisional = {at: ranges for at, ranges in self.provisional.items() if at <= step}
        self.num_consumed -= sum(each.size for each in undone)
        self.pace, self.waived = [], ""
        reached = [claim for claim in claims if claim.step <= step]
        claimed = Places(united(range_of(claim) for claim in reached))
        former = [id_ for reader in self.all_readers() if reader.round != round_ for id_ in reader.ids]
        # Nobody had told of these, so a worker of this round could get them: it has to begin anew.
        seen = [id_ for id_, held in self.held.items() if claimed.within(held.range)]
        self._return([*undone, *(self._let_go(id_) for id_ in dict.fromkeys([*former, *seen]))])
        return self._claim(reached)

    def take_over_leases(self, former: Dataset, round_: Round) -> None:
        """
        These books replace the former ones: what workers of this round hold stays with them as far as it is unread by these books, too. Of
        anything else they will hear that it is not theirs any more.
        """
        leases = [
            (reader, id_) for reader in former.all_readers() if reader.round == round_ for id_ in list(reader.ids)
        ]
        before, self.returned = self.returned, []
        if leases and self.advance_to(former.epoch, former.cursor, former.offsets):
            self.returned.reverse()  # the last one is handed out first, and all of them after what was given back
        unread = Places([*self.returned, *before])
        for reader, id_ in leases:
            held = former.held[id_]
            number = held.range.listing
            if number and former.listings[number] != self.listings.get(number):
                continue
            if not unread.without(held.range):
                unread.remove(held.range)
                holder = self.reader(reader.node, reader.local_rank) or replace(reader, ids={}, recalled={})
                self._enter(id_, replace(held), holder)
        self.returned = unread.ranges()

    def commit(self, step: int) -> None:
        """A checkpoint of that step is in storage: no model will be older than it from here on."""
        for at in [at for at in self.provisional if at <= step]:
            self.num_committed += sum(each.size for each in self.provisional.pop(at))

    # Inside.

    def _let_go(self, id_: int) -> Range:
        held = self.held.pop(id_)
        self.num_unbegun -= not held.is_begun
        reader = self.readers[held.node][held.local_rank]
        del reader.ids[id_]
        self._forget_recall(reader, id_)
        if not reader.ids:
            del self.readers[held.node][held.local_rank]
            self.num_readers -= 1
            if not self.readers[held.node]:
                del self.readers[held.node]
        return held.range

    def _forget_recall(self, reader: LeaseHolder, id_: int) -> None:
        if id_ in reader.recalled:
            del reader.recalled[id_]
            self.num_recalled -= 1

    def _fair_share(self, reader: LeaseHolder) -> int:
        if self.is_stream:
            return len(self.offsets) or 1
        others = self.num_readers - bool(reader.ids)
        left = self.num_shards - self.cursor + len(self.returned)
        return max(1, -(-left // (2 * (others + 1))))

    def _next(self, reader: LeaseHolder) -> Range | None:
        if self.is_stream:
            return self._next_of_stream(reader)
        if self.returned:
            return self.returned.pop()
        if not self.has_fresh:
            return None
        if self.cursor >= self.num_shards:
            self.epoch, self.cursor = self.epoch + 1, 0
        return self.take_fresh_shard()

    def _next_of_stream(self, reader: LeaseHolder) -> Range | None:
        """A partition is read by one worker at a time: its records keep their order."""
        taken = {held.range.partition: None for id_, held in self.held.items() if id_ not in reader.ids}
        for place in range(len(self.returned) - 1, -1, -1):
            if self.returned[place].partition not in taken:
                return self.returned.pop(place)
        waiting = {each.partition: None for each in self.returned}
        for part in self.open_partitions():
            if part not in waiting and part not in taken:
                return self.take_of_partition(part)
        return None

    def _return(self, ranges: Iterable[Range]) -> None:
        """To the head of the queue, the earliest first; neighbours become one again, up to a whole shard."""
        kept: list[Range] = []
        for each in sorted(ranges, key=self.reading_order):
            if each.size and not (kept and self._joins(kept[-1], each)):
                kept.append(each)
            elif each.size:
                kept[-1] = joined(kept[-1], each)
        self.returned.extend(reversed(kept))

    def _joins(self, one: Range, two: Range) -> bool:
        is_same_shard = (
            self.is_stream or one.listing or one.start // self.spec.shard_size == two.start // self.spec.shard_size
        )
        return one.key == two.key and one.end == two.start and bool(is_same_shard)

    def _claim(self, claims: Iterable[Claim]) -> list[Claim]:
        """Take back what was returned of them meanwhile. Gives those that are not accounted for after that."""
        returned = Places(self.returned)
        counted = Places(each for ranges in self.provisional.values() for each in ranges)
        refused = []
        for claim in claims:
            missing = counted.without(range_of(claim))
            if any(returned.without(each) for each in missing):
                refused.append(claim)
                continue
            for part in [part for each in missing for part in returned.within(each)]:
                returned.remove(part)
                counted.add(part)
                self.num_consumed += part.size
                append(self.provisional.setdefault(claim.step, []), part)
        self.returned = returned.ranges()
        return refused
