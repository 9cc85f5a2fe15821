"""
How long a phase of training may last before it is time to look.

A look is harmless, so its threshold is short: learned from how long each phase lasted so far, in histograms that workers keep
themselves. What cannot be learned yet (the first step, compiling, the first evaluation) gets the time that such things take. Nothing
here acts; that a worker is stalled is a reason to look and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from dlrover.protocol.messages.watch import Phase

_FIRST_OCTAVE = 10
_PARTS = 4
"""Buckets to an octave: a duration is known to within a fifth."""


class StallPatience(Struct, frozen=True, kw_only=True):
    """Seconds before a look."""

    least: float = 2.0
    """Shorter pauses are the machine's: another job, the garbage collector, a slow disk."""
    factor: float = 20.0
    """Times the 99th percentile of the phase."""
    unlearned: float = 10.0
    """For a phase of which fewer than `enough` stretches are known."""
    enough: int = 5
    first_step: float = 20.0
    """Until the first step is over: allocations, connections, caches."""
    start: float = 60.0
    """Imports, building the model, restoring, reading the list of files."""
    compile: float = 60.0
    evaluation: float = 10.0
    checkpoint: float = 10.0
    longest: float = 120.0
    """However slow the phase was, unless it regularly takes longer than a third of this."""


def bucket_of(ns: int) -> int:
    """The bucket in which a worker counts a stretch of so many nanoseconds."""
    bits = ns.bit_length()
    if bits < _FIRST_OCTAVE:
        return 0
    return ((bits - _FIRST_OCTAVE) * _PARTS) + ((ns >> (bits - 3)) & 3) + 1


def upper_seconds(bucket: int) -> float:
    """The end of a bucket."""
    if bucket == 0:
        return 2.0 ** (_FIRST_OCTAVE - 1) / 1e9
    octave, part = divmod(bucket - 1, _PARTS)
    return float((_PARTS + part + 1) << (octave + _FIRST_OCTAVE - 3)) / 1e9


def percentile_99(counts: Sequence[int]) -> float:
    """
    Seconds. The greatest of all is left out as soon as there are ten: it is the first one, which everything makes slow.
    """
    total = sum(counts)
    wanted = total - max(total // 100, 1 if total >= 10 else 0)
    seen = 0
    for bucket, count in enumerate(counts):
        seen += count
        if count and seen >= wanted:
            return upper_seconds(bucket)
    return 0.0


class PhaseBook:
    """
    What one node has learned of its phases, over all its workers and rounds.

    Former rounds count as long as the present one has too little to say: after a restart a hang must not wait for a new education.
    """

    def __init__(self, patience: StallPatience | None = None) -> None:
        self._patience = patience or StallPatience()
        self._former: dict[Phase, tuple[int, ...]] = {}

    def close_round(self, workers: Sequence[Mapping[Phase, Sequence[int]]]) -> None:
        """The histograms of workers that have ended."""
        for counts in workers:
            for phase, additional in counts.items():
                if phase is not Phase.START:
                    known = self._former.get(phase, (0,) * len(additional))
                    # Halved with each round: a change of the world or of the data is forgotten in a few.
                    self._former[phase] = tuple(
                        (old + 1) // 2 + new for old, new in zip(known, additional, strict=True)
                    )

    @property
    def least(self) -> float:
        """Seconds before which no worker is stalled, in whatever phase."""
        return self._patience.least

    def look_after(self, phase: Phase, counts: Sequence[int], *, has_stepped: bool) -> float:
        """Seconds in this phase after which a worker with this histogram of it is stalled."""
        patience = self._patience
        floor = self._floor(phase, has_stepped=has_stepped)
        if sum(counts) < patience.enough:
            counts = self._former.get(phase, ())
            if sum(counts) < patience.enough:
                return floor if phase in _KNOWN_TO_BE_LONG else max(floor, patience.unlearned)
        usual = percentile_99(counts)
        return max(floor, min(patience.factor * usual, max(patience.longest, 3 * usual)))

    def _floor(self, phase: Phase, *, has_stepped: bool) -> float:
        patience = self._patience
        match phase:
            case Phase.START | Phase.RESTORE | Phase.END:
                return patience.start
            case Phase.COMPILE:
                return patience.compile
            case Phase.EVALUATION:
                return patience.evaluation
            case Phase.CHECKPOINT:
                return patience.checkpoint
            case _:
                return patience.least if has_stepped else patience.first_step


_KNOWN_TO_BE_LONG = (Phase.START, Phase.RESTORE, Phase.END, Phase.COMPILE)


class SeenPage(Struct, frozen=True, kw_only=True):
    """What a worker's page says, as far as stalls are concerned. Instants in seconds of one clock."""

    phase: Phase
    since: float
    num_changes: int
    has_stepped: bool
    counts: tuple[int, ...]
    """Histogram of the phase it is in."""
    is_stopped: bool = False
    """By a signal, so that it cannot go on, whatever its phase is used to."""


class StallWatch:
    """Says which workers of a round are stalled, and when to look at their pages next."""

    def __init__(self, book: PhaseBook, *, recheck: float = 0.5) -> None:
        """`recheck`: seconds between two looks at the page of a stalled worker; nothing else tells that it moves again."""
        self._book = book
        self._recheck = recheck
        self._stalled: dict[int, int] = {}
        """By local rank: the change count at which it stands."""

    @property
    def stalled(self) -> tuple[int, ...]:
        return tuple(sorted(self._stalled))

    def see(self, workers: Mapping[int, SeenPage], now: float) -> tuple[bool, float]:
        """Whether a worker has become stalled or moves again; and the seconds after which to come back at the latest."""
        has_changed = False
        wakes: list[float] = []
        for rank, seen in workers.items():
            stands_at = self._stalled.get(rank)
            if stands_at is not None and stands_at != seen.num_changes:
                del self._stalled[rank]
                has_changed = True
                stands_at = None
            if stands_at is not None:
                wakes.append(self._recheck)
                continue
            limit = self._book.look_after(seen.phase, seen.counts, has_stepped=seen.has_stepped)
            limit = self._book.least if seen.is_stopped else limit
            left = seen.since + limit - now
            if left <= 0:
                self._stalled[rank] = seen.num_changes
                has_changed = True
                left = self._recheck
            # It may enter a phase with less patience at once; nothing tells us, so no look is further away than the least patience.
            wakes.append(min(left, self._book.least))
        for rank in [rank for rank in self._stalled if rank not in workers]:
            del self._stalled[rank]
            has_changed = True
        return has_changed, max(min(wakes, default=self._recheck), 0.05)
