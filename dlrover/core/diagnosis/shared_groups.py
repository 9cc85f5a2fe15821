"""
Two threads of one rank inside collectives of the same process group.

A group has one order of its collectives, and all ranks must begin them in that order. Two threads begin theirs in an order that the scheduler chooses, another
one on each rank: then rank 0 waits for its peers in a broadcast while they wait for it in an all_reduce. Each thread alone looks healthy, and all ranks look
as if the network lost something. The stacks of all threads tell, and torch's own record says whether the order differs between ranks, which is proof.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from dlrover.core.diagnosis import stacks
from dlrover.core.diagnosis.stacks import Frame, say_ranks
from dlrover.protocol.messages.watch import Collective, WorkerDump


class SharedGroup(Struct, frozen=True):
    ranks: tuple[int, ...]
    """That have two threads inside."""
    evidence: tuple[str, ...]
    is_order_different: bool
    """Torch's record shows one number of the group with different operations on two ranks."""


def find_shared_group(dumps: Sequence[WorkerDump]) -> SharedGroup | None:
    """None: no rank has two threads in collectives of one group."""
    shared = [dump for dump in dumps if _may_share(dump)]
    if not shared:
        return None
    ranks = tuple(dump.global_rank for dump in shared)
    difference = _difference(dumps)
    who = say_ranks(ranks)
    verb = "has" if len(ranks) == 1 else "have"
    evidence = [
        f"{who[0].upper()}{who[1:]} {verb} two threads inside collectives of one process group: {_what_threads_do(shared[0])}.",
        difference,
        "Give each thread a group of its own (torch.distributed.new_group), or call collectives from one thread only.",
    ]
    return SharedGroup(ranks, tuple(filter(None, evidence)), bool(difference))


def _may_share(dump: WorkerDump) -> bool:
    if len(_threads_inside(dump)) < 2:
        return False
    groups = [collective.group for collective in dump.recorded if collective.is_inside]
    # Without a record the groups are unknown. With one: threads that have a group each are all right.
    return not groups or len(groups) > len(dict.fromkeys(groups))


def _threads_inside(dump: WorkerDump) -> list[tuple[str, Frame, Frame | None]]:
    """Name, call of the collective and place in the user's code, of each thread that is inside one."""
    found = []
    for thread in dump.threads:
        frames = [stacks.parse_frame(text) for text in thread.frames]
        call = stacks.collective_call(frames)
        if call is not None:
            found.append((thread.name, call, next((frame for frame in frames if frame.is_users), None)))
    return found


def _what_threads_do(dump: WorkerDump) -> str:
    said = []
    for name, call, place in _threads_inside(dump)[:4]:
        where = "" if place is None else f" at {place.file}:{place.line} ({place.function})"
        said.append(f"thread {name} is in {call.function}{where}")
    return ", ".join(said)


def _difference(dumps: Sequence[WorkerDump]) -> str:
    """A number of a group under which two ranks do different things."""
    first: dict[tuple[str, int], tuple[int, Collective]] = {}
    for dump in dumps:
        for collective in dump.recorded:
            if not collective.is_inside:
                continue
            key = (collective.group, collective.sequence)
            rank, known = first.setdefault(key, (dump.global_rank, collective))
            if (known.operation, known.shape) != (collective.operation, collective.shape):
                return (
                    f"Collective number {collective.sequence} of group {collective.group} is {_say(known)} on rank {rank} and "
                    f"{_say(collective)} on rank {dump.global_rank}."
                )
    return ""


def _say(collective: Collective) -> str:
    return f"{collective.operation} of {collective.shape}" if collective.shape else collective.operation
