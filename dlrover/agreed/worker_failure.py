"""
What the failure of a worker says by itself: whether it is a consequence of another one, whether the node is to blame, and in words.
"""

from __future__ import annotations

import hashlib
import re

from dlrover.protocol.messages.job import FailureKind, FirstFailure, WorkerFailure

DEVICE_FAULT_CODES = (14, 128, 201, 202)
"""Exit codes by which accelerator runtimes say that the device is broken."""
_SECONDARY = {FailureKind.PEER_LOST: 1, FailureKind.STOPPED_BY_US: 2}
"""Consequences of another failure, the more telling first."""
_MEMORY = (FailureKind.OUT_OF_MEMORY, FailureKind.MEMORY_ERROR)
_SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
}  # fmt: skip
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\[rank\d+\]:?")
"""What differs between two tracebacks of the same bug: addresses, and the rank torch puts before each line."""


def is_secondary(failure: WorkerFailure) -> bool:
    return failure.kind in _SECONDARY


def first_of(failures: tuple[WorkerFailure, ...]) -> WorkerFailure:
    """The failure to blame: the earliest exit among those that are not consequences."""
    return min(failures, key=priority)


def is_device_fault(failure: WorkerFailure) -> bool:
    """Whether another try on the same node makes no sense: its device, or its log, says so."""
    if failure.node_error:
        return True
    return failure.kind is FailureKind.EXIT_CODE and failure.exit_code in DEVICE_FAULT_CODES


def is_out_of_memory(failure: WorkerFailure) -> bool:
    return failure.kind in _MEMORY


def describe(first: FirstFailure) -> str:
    """One sentence: who failed, where, when and how."""
    failure = first.failure
    step = "" if first.step is None else f" at step {first.step}"
    who = f"global rank {failure.global_rank} on node rank {first.node_rank} ({first.host})"
    log = f" Its log: {failure.log_file}." if failure.log_file else ""
    return f"Round {first.round}: {who} failed{step}: {_how(failure)}.{log}"


def traceback_digest(failure: WorkerFailure) -> str:
    """The same for two crashes of the same bug; empty if there is no traceback to compare."""
    text = _VARYING.sub("", failure.traceback).strip()
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest() if text else ""


def priority(failure: WorkerFailure) -> tuple[int, int, int]:
    return (_SECONDARY.get(failure.kind, 0), failure.exited_at, failure.global_rank)


def _how(failure: WorkerFailure) -> str:
    message = failure.message.strip().rstrip(".")
    is_more_told = message not in ("", f"exit code {failure.exit_code}")
    detail = f" ({message})" if is_more_told else ""
    match failure.kind:
        case FailureKind.EXCEPTION | FailureKind.MEMORY_ERROR:
            return message or "an exception"
        case FailureKind.SIGNAL if failure.signal is not None:
            name = _SIGNALS.get(failure.signal, "unnamed")
            said = message.removeprefix(f"ended by {name}")  # an agent's words for the same
            return f"killed by signal {failure.signal} ({name}){detail if said == message else said}"
        case FailureKind.OUT_OF_MEMORY:
            return f"killed by the kernel for lack of memory{detail}"
        case FailureKind.EXIT_CODE if failure.exit_code in DEVICE_FAULT_CODES:
            return f"exit code {failure.exit_code}, a device fault of that node{detail}"
        case FailureKind.EXIT_CODE:
            return f"exit code {failure.exit_code}{detail}"
        case FailureKind.PEER_LOST:
            return f"it lost the connection to another worker{detail}"
        case FailureKind.PORT_TAKEN:
            return f"the port of the coordinator was taken by another process{detail}"
        case FailureKind.BAD_SCRIPT:
            return f"the script cannot run{detail}"
        case FailureKind.STOPPED_BY_US:
            return f"it was stopped by its agent{detail}"
        case FailureKind.DIAGNOSED:
            return message or "it stood still"
        case FailureKind.START_FAILED:
            return f"it could not be started{detail}"
        case _:
            return message or failure.kind.value
