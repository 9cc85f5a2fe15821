"""
What a ledger holds and what an entry in it means: the judgement without the requests.

Apart from the requests because two run it: the platform against a real ConfigMap, and the simulator's cluster against a
virtual one, with two masters at once and every crash between an entry and what follows it.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from dlrover.platforms.base import Intent, StaleMaster
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.fleet import LaunchNode

MAX_PLANS = 100
"""Uids of plans that are remembered; a plan that is older than that is long ended in its own status, too."""


class Span(Struct, frozen=True):
    """Ids from `first` to `last`, both included."""

    first: int
    last: int
    is_open: bool = False
    """Their creates have not been answered."""


class LedgerState(Struct, frozen=True, kw_only=True):
    epoch: int = 0
    used: tuple[Span, ...] = ()
    """Ascending, without overlaps; neighbours differ in `is_open`."""
    plans: tuple[str, ...] = ()
    """Oldest first."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Type and number of nodes, as people's newest number for each was carried out."""

    @property
    def next_id(self) -> int:
        return self.used[-1].last + 1 if self.used else 0

    def span_of(self, node_id: int) -> Span | None:
        """None: the id was never used."""
        index = bisect_right(self.used, node_id, key=lambda span: span.first) - 1
        span = self.used[index] if index >= 0 else None
        return span if span is not None and node_id <= span.last else None

    def marked(self, ids: Iterable[int], *, is_open: bool) -> LedgerState:
        """With these ids as used and with or without a mark, whatever they were before."""
        changes = dict.fromkeys(ids, is_open)
        if not changes:
            return self
        return replace(self, used=tuple(_joined(_pieces(self.used, changes))))

    def with_plan(self, uid: str) -> LedgerState:
        return self if uid in self.plans else replace(self, plans=(*self.plans, uid)[-MAX_PLANS:])


def encode_state(state: LedgerState) -> dict[str, str]:
    """As `data` of the ConfigMap."""
    spans = (
        (str(span.first) if span.first == span.last else f"{span.first}-{span.last}") + "+" * span.is_open
        for span in state.used
    )
    data = {"epoch": str(state.epoch), "used": ",".join(spans), "plans": ",".join(state.plans)}
    if state.sizes:
        data["sizes"] = ",".join(f"{name}={count}" for name, count in state.sizes)
    return data


def decode_state(data: dict[str, str]) -> LedgerState:
    """Raises `Unavailable` for a ledger that was changed by hand: going on would use ids twice."""
    try:
        epoch = int(data.get("epoch") or 0)
        spans = [_span(text) for text in data.get("used", "").split(",") if text]
        sizes = tuple(_size(text) for text in data.get("sizes", "").split(",") if text)
    except ValueError as error:
        raise Unavailable(f"The job's ledger is damaged ({error}). Correct its ConfigMap by hand.") from error
    for before, after in pairwise(spans):
        if after.first <= before.last:
            raise Unavailable(
                f"The job's ledger is damaged: the numbers {data['used']!r} must ascend. Correct its ConfigMap by hand."
            )
    plans = tuple(uid for uid in data.get("plans", "").split(",") if uid)
    return LedgerState(epoch=epoch, used=tuple(_joined(iter(spans))), plans=plans[-MAX_PLANS:], sizes=sizes)


class LedgerEntry(enum.Enum):
    """What the ledger says about the id of an intent, once it has been entered."""

    OPEN = "open"
    """A launch whose create has not been answered: create it."""
    CLOSED = "closed"
    """The id was used and its create answered, or it was removed: there is nothing to create."""
    NEW = "new"
    """A removal of an id that was never used. It is used now."""


def entered(state: LedgerState, intent: Intent) -> tuple[LedgerState, LedgerEntry]:
    """The ledger with this intent in it. Raises `StaleMaster`."""
    if intent.master_epoch < state.epoch:
        raise StaleMaster(intent, state.epoch)
    state = replace(state, epoch=intent.master_epoch)
    span = state.span_of(intent.id)
    if isinstance(intent, LaunchNode):
        if span is None:
            return state.marked([intent.id], is_open=True), LedgerEntry.OPEN
        return state, LedgerEntry.OPEN if span.is_open else LedgerEntry.CLOSED
    if span is None or span.is_open:
        return state.marked([intent.id], is_open=False), LedgerEntry.NEW if span is None else LedgerEntry.OPEN
    return state, LedgerEntry.CLOSED


def recovered(state: LedgerState, known: LedgerState) -> LedgerState:
    """A ledger that was deleted and the operator made anew, with what its master still knows of the former one."""
    for span in known.used:
        state = state.marked(range(span.first, span.last + 1), is_open=span.is_open)
    for uid in known.plans:
        state = state.with_plan(uid)
    return replace(state, epoch=max(state.epoch, known.epoch), sizes=state.sizes or known.sizes)


def settled(state: LedgerState, answered: Mapping[int, int]) -> LedgerState:
    """
    Without the marks of answered creates. `answered`: id to the epoch of its launch.

    A master that was followed clears no mark: the next one looks after the launches that it finds open.
    """
    return state.marked((each for each, epoch in answered.items() if epoch >= state.epoch), is_open=False)


def _pieces(spans: tuple[Span, ...], changes: dict[int, bool]) -> Iterator[Span]:
    """The spans without the changed ids, and each changed id on its own, ascending."""
    ids = sorted(changes)
    at = 0
    for span in spans:
        first = span.first
        while at < len(ids) and ids[at] <= span.last:
            changed = ids[at]
            if first < changed:
                yield Span(first, changed - 1, span.is_open)
            yield Span(changed, changed, changes[changed])
            first = max(first, changed + 1)
            at += 1
        if first <= span.last:
            yield Span(first, span.last, span.is_open)
    for changed in ids[at:]:
        yield Span(changed, changed, changes[changed])


def _joined(spans: Iterator[Span]) -> Iterator[Span]:
    """Neighbours of the same kind as one span."""
    current: Span | None = None
    for span in spans:
        if current is not None and span.first == current.last + 1 and span.is_open == current.is_open:
            current = Span(current.first, span.last, span.is_open)
        else:
            if current is not None:
                yield current
            current = span
    if current is not None:
        yield current


def _size(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    return name, int(count)


def _span(text: str) -> Span:
    is_open = text.endswith("+")
    first, dash, last = text.removesuffix("+").partition("-")
    if not dash:
        last = first
    if not (first.isdecimal() and last.isdecimal()):
        raise ValueError(f"{text!r} is not a range of ids")
    span = Span(int(first), int(last), is_open)
    if span.last < span.first:
        raise ValueError(f"{text!r} ends before it begins")
    return span
