"""
The goodput accountant: each second of each place in the job, in exactly one class.

A place is a node rank: it is taken by one node after the other, and while none is there its time is down time. What a place is doing follows
from the job's own decisions (`class_of`), so a change of class is booked by the very command that changes it, and a replay books the same.
Only the time in which workers run has to be split by what they tell of themselves. It is counted as unsplit first; `account` moves it into
classes, at most as much as there is. Whatever is told, lost or told twice, the classes of a place therefore sum to the time it was there.

What a running place has not told yet (the last moments of killed workers) is split as its newest account was.

A fault is what ends a running world. From then on all time that produces nothing is owed to it, until new steps are computed.

Repeated steps are those up to the furthest point that was reached before the round began. There are two counts of that: the step that the script
reports, if it means the same in each life, else the steps in the model (`reach`). Where neither tells from where workers went on, repeated steps
cannot be told from new ones: they are booked as new, and the job and the fault remember that redo is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from dlrover.protocol.messages.goodput import SPLIT, NodeAccount, TimeClass
from dlrover.protocol.messages.job import FirstFailure, Micros, NodeId, NodeRank, Round

MAX_FAULTS = 64
"""So many are told apart, the newest ones; older ones are only counted."""
MAX_CAUSE = 300
_MICROS = 1000

LOST = (
    TimeClass.START_UP,
    TimeClass.RENDEZVOUS,
    TimeClass.NODE_CHECK,
    TimeClass.REDO,
    TimeClass.RESTORE,
    TimeClass.HANG,
    TimeClass.STOPPING,
    TimeClass.DOWN,
)
"""What a fault costs. Checkpoints, data and evaluation cost time in a healthy job too."""
_ONCE = (TimeClass.START_UP, TimeClass.RESTORE)
"""Happen when workers begin, and not again later in the same life: what comes untold after them is something else."""


class BookedFault(Struct):
    number: int
    at: Micros
    kind: str
    cause: str
    round: Round
    node_rank: NodeRank | None = None
    global_rank: int | None = None
    micros: dict[TimeClass, int] = {}
    running_at: Micros | None = None
    """When the next round began."""
    recovered_at: Micros | None = None
    """When new steps were first told of."""
    is_redo_known: bool = True


class NodeBooks(Struct):
    """The books of one node rank."""

    node: NodeId
    opened_at: Micros | None
    """None: closed, no worker shall be there any more."""
    since: Micros
    """Everything before is booked or counted as unsplit."""
    doing: TimeClass | None
    """None: its workers run."""
    lived: int = 0
    """Microseconds of earlier times between opening and closing."""
    micros: dict[TimeClass, int] = {}
    unsplit: int = 0
    """Microseconds of running workers that are not accounted for yet."""
    round: Round = Round(0)
    """Of the newest workers; `unsplit` and the next two are about these."""
    told: tuple[int, ...] = ()
    """What their accounts said, as a sum since they began."""
    mix: tuple[int, ...] = ()
    """How the newest account differed from the one before it."""
    step: int | None = None
    """Of the newest account of this round."""
    model_step: int | None = None
    fault: int = 0
    """To which lost time is owed now; 0: to none."""
    run_fault: int = 0
    """The same for what the newest workers lose."""


class Goodput(Struct):
    places: dict[NodeRank, NodeBooks] = {}
    faults: list[BookedFault] = []
    num_faults: int = 0
    beginning: dict[TimeClass, int] = {}
    """Lost time before the first steps that is owed to no fault."""
    began_at: Micros | None = None
    highest_step: int | None = None
    before_round: int | None = None
    """The highest step that was reached before the newest round: up to there steps are done again."""
    highest_model_step: int | None = None
    model_before_round: int | None = None
    """The same by the steps in the model."""
    is_redo_known: bool = True
    """Else some workers went on from where nothing tells."""

    def enter(self, rank: NodeRank, node: NodeId, doing: TimeClass | None, now: Micros, round_: Round) -> None:
        """From now on the place does this."""
        place = self.places.get(rank)
        if place is None:
            place = self.places[rank] = NodeBooks(node, now, now, doing)
            self.began_at = now if self.began_at is None else self.began_at
        else:
            self._catch_up(place, now)
            if place.opened_at is None:
                place.opened_at = now
                place.fault = 0
            place.node = node
        if doing is None and (place.doing is not None or place.round != round_):
            self._settle(place)
            place.round, place.told, place.mix, place.step, place.model_step = round_, (), (), None, None
            place.fault = place.fault or self._open_fault()
            place.run_fault = place.fault
        place.doing = doing

    def round_began(self, now: Micros, steps: Iterable[int | None], *, is_full: bool) -> None:
        """A world is complete. `is_full`: no node is missed any more."""
        self.reached(steps)
        self.before_round, self.model_before_round = self.highest_step, self.highest_model_step
        if self.faults and self.faults[-1].running_at is None:
            self.faults[-1].running_at = now
        if is_full:
            for rank, place in self.places.items():
                if place.doing is TimeClass.DOWN:
                    self.left(rank, now)

    def reached(self, steps: Iterable[int | None]) -> None:
        known = [step for step in (*steps, self.highest_step) if step is not None]
        self.highest_step = max(known, default=None)

    def fault_began(self, kind: str, cause: str, now: Micros, round_: Round, members: Iterable[NodeRank]) -> None:
        self.num_faults += 1
        self.faults = [*self.faults, BookedFault(self.num_faults, now, kind, cause[:MAX_CAUSE], round_)][-MAX_FAULTS:]
        for rank in members:
            if (place := self.places.get(rank)) is not None:
                self._catch_up(place, now)
                place.fault = self.num_faults

    def fault_named(
        self, kind: str, cause: str, first: FirstFailure | None, *, node_rank: NodeRank | None = None
    ) -> None:
        """Who began the newest fault, if it is about the round of that failure."""
        if not self.faults or (first is not None and first.round != self.faults[-1].round):
            return
        fault = self.faults[-1]
        fault.kind, fault.cause, fault.node_rank = kind, cause[:MAX_CAUSE], node_rank
        if first is not None and node_rank is None:
            fault.node_rank, fault.global_rank = first.node_rank, first.failure.global_rank

    def lost(self, rank: NodeRank, now: Micros, since: Micros | None) -> None:
        """The node of a place is gone; if its workers ran, they are believed to have ended at `since`."""
        place = self.places.get(rank)
        if place is None or place.opened_at is None:
            return
        self._catch_up(place, now)
        if place.doing is None and since is not None:
            missing = min(max(0, now - since), place.unsplit)
            place.unsplit -= missing
            self._book(place, TimeClass.DOWN, missing, place.fault)
        place.doing = TimeClass.DOWN
        place.fault = place.fault or self._open_fault()

    def left(self, rank: NodeRank, now: Micros) -> None:
        """The place is not part of the job any more."""
        place = self.places.get(rank)
        if place is not None and place.opened_at is not None:
            self._catch_up(place, now)
            self._close(place, now)

    def hung(self, now: Micros, stalled: int) -> None:
        """The running workers stood still for so many microseconds; called when the fault has begun."""
        for place in self.places.values():
            if place.opened_at is not None and (place.doing is None or place.fault == self.num_faults):
                self._catch_up(place, now)
                hung = min(max(0, stalled), place.unsplit)
                place.unsplit -= hung
                self._book(place, TimeClass.HANG, hung, place.fault)

    def account(self, account: NodeAccount, rank: NodeRank, now: Micros) -> None:
        """What the workers of the newest round did, as they tell it."""
        place = self.places.get(rank)
        if place is None or place.node != account.node or place.round != account.round or not place.round:
            return  # of workers that nobody asks about any more
        self._catch_up(place, now)
        self.reached([account.model_step if account.step is None else account.step])
        if account.step is not None:
            place.step = max(account.step, place.step or 0)
        if account.model_step is not None:
            place.model_step = account.model_step
            self.highest_model_step = max(account.model_step, self.highest_model_step or 0)
        if not account.is_redo_known:
            self.is_redo_known = False
            if (fault := self._fault(place.run_fault)) is not None:
                fault.is_redo_known = False
        told = _padded(account.millis)
        before = place.told or (0,) * len(SPLIT)
        place.told = tuple(map(max, told, before))
        news = tuple(max(0, new - old) for new, old in zip(told, before, strict=True))
        if not any(news):
            return
        place.mix = news
        for class_, millis in zip(SPLIT, news, strict=True):
            micros = min(millis * _MICROS, place.unsplit)
            place.unsplit -= micros
            self._book(place, class_, micros, place.run_fault)
            if class_ is TimeClass.COMPUTE and micros:
                self._recovered(place, now)

    def finish(self, now: Micros) -> None:
        """The job is over."""
        for rank in list(self.places):
            self.left(rank, now)

    def lived(self, place: NodeBooks, now: Micros) -> int:
        """Microseconds; what the classes of the place sum to, whatever happened."""
        return place.lived + (0 if place.opened_at is None else now - place.opened_at)

    def totals(self, place: NodeBooks, now: Micros) -> dict[TimeClass, int]:
        """Microseconds by class up to now, with what is not accounted for yet as it looks now."""
        totals = self.booked(place, now)
        untold = place.unsplit + (_open(place, now) if place.doing is None else 0)
        for class_, amount in _shares(untold, place):
            totals[class_] = totals.get(class_, 0) + amount
        return totals

    def booked(self, place: NodeBooks, now: Micros) -> dict[TimeClass, int]:
        """The same without that: what no account will move any more."""
        booked = dict(place.micros)
        if place.doing is not None and (open_ := _open(place, now)):
            booked[place.doing] = booked.get(place.doing, 0) + open_
        return booked

    def _catch_up(self, place: NodeBooks, now: Micros) -> None:
        passed = _open(place, now)
        place.since = now
        if place.doing is None:
            place.unsplit += passed
        elif passed:
            self._book(place, place.doing, passed, place.fault)

    def _settle(self, place: NodeBooks) -> None:
        """No worker will account for what is left of the newest workers."""
        for class_, amount in _shares(place.unsplit, place):
            self._book(place, class_, amount, place.run_fault)
        place.unsplit = 0

    def _close(self, place: NodeBooks, now: Micros) -> None:
        self._settle(place)
        assert place.opened_at is not None, "closed twice"
        place.lived += now - place.opened_at
        place.opened_at = None
        place.doing = TimeClass.IDLE
        place.fault = place.run_fault = 0

    def _book(self, place: NodeBooks, class_: TimeClass, micros: int, fault: int) -> None:
        if not micros:
            return
        place.micros[class_] = place.micros.get(class_, 0) + micros
        found = self._fault(fault)
        if class_ not in LOST or (found is None and (fault or not is_beginning(place))):
            return
        books = self.beginning if found is None else found.micros
        books[class_] = books.get(class_, 0) + micros

    def _recovered(self, place: NodeBooks, now: Micros) -> None:
        fault = self._fault(place.run_fault)
        if fault is not None and fault.recovered_at is None:
            fault.recovered_at = now
        if place.fault == place.run_fault:
            place.fault = 0
        place.run_fault = 0

    def _fault(self, number: int) -> BookedFault | None:
        if not number or not self.faults:
            return None
        index = number - self.faults[0].number
        return self.faults[index] if 0 <= index < len(self.faults) else None

    def _open_fault(self) -> int:
        """The newest one, if the job has not recovered from it."""
        return self.num_faults if self.faults and self.faults[-1].recovered_at is None else 0


def _open(place: NodeBooks, now: Micros) -> int:
    """Microseconds in what the place is doing now."""
    return now - place.since if place.opened_at is not None else 0


def is_beginning(place: NodeBooks) -> bool:
    return TimeClass.COMPUTE not in place.micros


def _padded(millis: Sequence[int]) -> tuple[int, ...]:
    """An older or a newer sender may know fewer or more classes."""
    return (*millis[: len(SPLIT)], *(0,) * (len(SPLIT) - len(millis)))


def _shares(amount: int, place: NodeBooks) -> list[tuple[TimeClass, int]]:
    """Split what was not told as the newest account was; the parts sum to the amount exactly."""
    if not amount:
        return []
    later = [(class_, part) for class_, part in zip(SPLIT, place.mix, strict=False) if part and class_ not in _ONCE]
    weights = later or [(class_, part) for class_, part in zip(SPLIT, place.mix, strict=False) if part]
    if not weights:
        return [(TimeClass.COMPUTE, amount)]
    whole = sum(part for _, part in weights)
    shares = [(class_, amount * part // whole) for class_, part in weights]
    rest = amount - sum(part for _, part in shares)
    shares[-1] = (shares[-1][0], shares[-1][1] + rest)
    return [(class_, part) for class_, part in shares if part]
