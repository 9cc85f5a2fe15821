"""
What stacks tell: who waits for the others, who is somewhere else, and how to say so in a few lines.

A rank waits for others when it is inside a collective: by torch's record of its device, by its own account, by the functions on its stack, or because it
rests in the engine of backward, which in data-parallel training runs the collectives of gradients without any trace in Python. Everything else is the rank's
own business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from dlrover.protocol.messages.watch import Collective, Phase, WorkerDump

_COLLECTIVE_FILES = ("torch/distributed/distributed_c10d.py", "torch/distributed/nn/functional.py")
_COLLECTIVE_NAMES = (
    "all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "barrier",
    "monitored_barrier", "send", "recv", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_object", "broadcast_object_list",
    "wait_for_workers", "batch_isend_irecv",
)  # fmt: skip
_ENGINE = (
    "torch/autograd/graph.py",
    "torch/autograd/__init__.py",
    "torch/_tensor.py",
    "torch/nn/parallel/distributed.py",
    "torch/nn/modules/_functions.py",
)
"""Where C++ runs collectives by itself: gradients, buffers, statistics of batches."""
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/ipdb/__main__.py", "/code.py", "/interactiveshell.py")
_LOADER = "torch/utils/data/"
_HOST_BACKENDS = ("", "gloo", "mpi")
_INSIDE = ("/dlrover/", "torch/", "/lib/python3", "<frozen", "/lib64/python3")
_FRAME = re.compile(r"^(?P<file>.*):(?P<line>\d+) (?P<function>.*)$")
_CHILD = re.compile(r"^(?P<pid>\d+) (?P<state>\S) \S+(?: cpu=(?P<cpu>[0-9.]+))?")


class Frame(Struct, frozen=True):
    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        return not any(part in self.file for part in _INSIDE)


def frames(dump: WorkerDump) -> tuple[Frame, ...]:
    """Of the main thread, innermost first; empty if the process did not answer."""
    for thread in dump.threads:
        if thread.is_main:
            return tuple(map(parse_frame, thread.frames))
    return ()


def parse_frame(text: str) -> Frame:
    found = _FRAME.match(text)
    if found is None:
        return Frame(text, 0, "")
    return Frame(found["file"], int(found["line"]), found["function"])


def user_frame(dump: WorkerDump) -> Frame | None:
    """Where in the user's own code the main thread is."""
    stack = frames(dump)
    return next((frame for frame in stack if frame.is_users), stack[0] if stack else None)


def signature(dump: WorkerDump) -> tuple[str, ...]:
    """The same for two ranks at the same place. Lines count: the next line of a script is another place."""
    return tuple(f"{frame.file}:{frame.line}" for frame in frames(dump))


def device_collective(dump: WorkerDump) -> Collective | None:
    """
    The oldest that runs on a device and does not end: the ranks that began it wait for those that did not.

    The call has returned long ago, and the main thread sleeps, spins or is somewhere else: neither its stack nor its processor time say anything then.
    """
    running = (each for each in dump.recorded if each.is_inside and each.has_started)
    return next((each for each in running if each.backend not in _HOST_BACKENDS), None)


def own_collective(dump: WorkerDump) -> Collective | None:
    """The one that it is in now: on its device, or by its own account."""
    on_device = device_collective(dump)
    if on_device is not None:
        return on_device
    collective = None if dump.progress is None else dump.progress.collective
    return collective if collective is not None and collective.is_inside else None


def waits_for_others(dump: WorkerDump, *, is_computing: bool) -> bool:
    if own_collective(dump) is not None:
        return True
    phase = None if dump.progress is None else dump.progress.phase
    if phase is Phase.COLLECTIVE:
        return True
    stack = frames(dump)
    if stack and _is_collective_call(stack[0]):
        return True
    return not is_computing and _rests_in_backward(stack)


def collective_call(stack: Sequence[Frame]) -> Frame | None:
    """The call of a collective that a thread is inside; frames of ours and of torch's own wrappers may lie over it."""
    for frame in stack:
        if _is_collective_call(frame):
            return frame
        if frame.is_users or "/lib/python3" in frame.file:
            return None
    return None


def is_loading(dump: WorkerDump) -> bool:
    if dump.progress is not None and dump.progress.phase is Phase.DATA:
        return True
    return any(_LOADER in frame.file for frame in frames(dump)[:12])


def is_debugged(dump: WorkerDump) -> bool:
    """A person sits at a prompt inside the script."""
    return any(frame.file.endswith(_DEBUGGERS) or "/debugpy/" in frame.file for frame in frames(dump)[:16])


def children_cpu(dump: WorkerDump) -> float:
    """Seconds that its own processes have used, by the lines that tell of them."""
    found = (_CHILD.match(line) for line in dump.children)
    return sum(float(child["cpu"]) for child in found if child is not None and child["cpu"])


def stopped_children(dump: WorkerDump) -> tuple[str, ...]:
    found = ((line, _CHILD.match(line)) for line in dump.children)
    return tuple(line for line, child in found if child is not None and child["state"] in "TtZX")


def blocked_children(dump: WorkerDump) -> tuple[str, ...]:
    found = ((line, _CHILD.match(line)) for line in dump.children)
    return tuple(line for line, child in found if child is not None and child["state"] == "D")


def cluster(dumps: Iterable[WorkerDump]) -> list[list[WorkerDump]]:
    """Those at the same place together, the largest group first; equal ones by their lowest rank."""
    groups: dict[tuple[str, ...], list[WorkerDump]] = {}
    for dump in dumps:
        groups.setdefault(signature(dump), []).append(dump)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0].global_rank))


def say_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs[:20])
    more = f" and {len(runs) - 20} more groups" if len(runs) > 20 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {text}{more}"


def say_collective(collective: Collective) -> str:
    shape = f" of {collective.shape}" if collective.shape else ""
    group = f" in group {collective.group}" if collective.group else ""
    return f"{collective.operation}{shape}, number {collective.sequence}{group}"


def _is_collective_call(frame: Frame) -> bool:
    return any(frame.file.endswith(name) for name in _COLLECTIVE_FILES) or (
        "torch/distributed" in frame.file and frame.function in _COLLECTIVE_NAMES
    )


def _rests_in_backward(stack: Sequence[Frame]) -> bool:
    return bool(stack) and any(stack[0].file.endswith(name) for name in _ENGINE)
