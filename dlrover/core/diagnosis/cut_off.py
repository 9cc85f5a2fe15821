"""
Who is cut off from the network, by what the ranks have sent without an answer.

Each such connection accuses both of its ends. The one end that all of them have in common is the one that is cut off; where there is none, or only a
single pair, it is unknown which of them it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from dlrover.core.diagnosis.stacks import say_ranks
from dlrover.protocol.messages.watch import UnansweredLink, WorkerDump

_RESENT = 2
"""Times. Once happens in the best networks."""


def lasting(first: WorkerDump | None, second: WorkerDump) -> tuple[UnansweredLink, ...]:
    """What does not get through: it was sent again and again, or waits at both dumps, seconds apart, on the same connection."""
    before = {(link.local, link.remote): None for link in (() if first is None else first.unanswered)}
    return tuple(
        link
        for link in second.unanswered
        if link.local != link.remote and (link.times >= _RESENT or (link.local, link.remote) in before)
    )


class CutOff(Struct, frozen=True):
    ranks: tuple[int, ...]
    """Empty: packets are lost, but it is not clear whose."""
    sentence: str


def find_cut_off(dumps: Sequence[WorkerDump]) -> CutOff | None:
    """Of dumps with lasting links only. None: all that was sent arrived."""
    ranks_at: dict[str, list[int]] = {}
    for dump in dumps:
        for address in dump.addresses:
            ranks_at.setdefault(address, []).append(dump.global_rank)
    links = [link for dump in dumps for link in dump.unanswered]
    pairs = {frozenset((link.local, link.remote)): None for link in links}
    if not pairs:
        return None
    times = max(link.times for link in links)
    common = frozenset.intersection(*pairs)
    if len(common) == 1:
        (address,) = common
        ranks = tuple(sorted(ranks_at.get(address, ())))
        others = sorted({rank for pair in pairs for end in pair - common for rank in ranks_at.get(end, ())})
        if ranks and others:
            who = say_ranks(ranks)
            return CutOff(
                ranks,
                f"{who[0].upper()}{who[1:]} ({address}) {'is' if len(ranks) == 1 else 'are'} cut off: what passes between there "
                f"and {say_ranks(others)} is not acknowledged, and was sent again up to {times} times.",
            )
    between = "; ".join(" and ".join(sorted(pair)) for pair in list(pairs)[:4])
    return CutOff(
        (),
        f"Packets are lost: what was sent between {between} is not acknowledged, and was sent again up to {times} times.",
    )
