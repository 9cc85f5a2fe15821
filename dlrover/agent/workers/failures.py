"""
Why a worker ended, as far as this node can tell.

The kernel says how (exit code or signal, oom_kill counter of the cgroup), the error file of torch's `@record` or of
our own worker entry says what the exception was, the end of the log says it where there is no such file. Patterns
decide only between kinds of failure that the master treats differently; when nothing matches, the plain kind stays.
"""

from __future__ import annotations

import builtins
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from dlrover.agent.config import LogAction
from dlrover.agent.workers.log_patterns import LogVerdict, find_node_error, log_lines
from dlrover.agent.workers.process_tree import Exit
from dlrover.agreed.lost_peers import mentions_lost_peer, tells_of_lost_peer
from dlrover.host import cgroup
from dlrover.host.shared_page.breath_words import EXIT_LAST_BREATH
from dlrover.host.signals import signal_name
from dlrover.protocol.messages.job import MAX_FAILURE_BYTES, MAX_MESSAGE_BYTES, FailureKind, Micros, WorkerFailure
from dlrover.protocol.text import encodable

_MAX_MESSAGE_CHARACTERS = 500
_MAX_EXCEPTION_CHARACTERS = 16 * 1024
"""Of the text that is searched for a cause; some name every weight of a model, and the cause is at the beginning or the end."""
_MAX_ERROR_FILE_CHARACTERS = 8 * 1024 * 1024
_MAX_REPORT_BYTES = MAX_MESSAGE_BYTES // 2
"""Of the long texts of all failures in one report."""
_SHORT_TRACEBACK_BYTES = 512

_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_MEMORY = re.compile(
    r"^[\w.]*MemoryError\b|CUDA out of memory|DefaultCPUAllocator: (can't|not enough)|std::bad_alloc",
)
_BAD_SCRIPT = re.compile(r"^(SyntaxError|IndentationError|TabError|ModuleNotFoundError)\b")
_CANNOT_OPEN = re.compile(r"can't open file (?:(?!can't open).)*: \[Errno \d+\]|: No module named ")
_SYNTAX_ERROR = re.compile(r"^  File .*\n(?:.*\n){1,4}?(?:SyntaxError|IndentationError|TabError): .*$", re.MULTILINE)
_CHAINED = re.compile(r"(During handling of the above|direct cause of the following) exception")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""What torch's own hook puts before each line once a process group exists."""
_EXCEPTION_LINE = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)", re.MULTILINE)
_MAX_NAME = 100
_MOST_NAMES = 100
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Evidence:
    """All that is known of one ended worker."""

    global_rank: int
    local_rank: int
    exit: Exit
    exited_at: Micros
    error_file: str = ""
    log_tail: str = ""
    log_file: str = ""
    was_signalled: bool = False
    """We had sent it a signal before."""
    num_oom_kills: int = 0
    """By how much the cgroup's oom_kill counter grew while it ran."""
    has_stepped: bool = False
    """A step was reported in its round: the script itself is sound."""
    training_log: str = ""
    """File that the script logs to beside its streams."""
    node_errors: tuple[str, ...] = ()
    """Texts of the user's that say the node is broken."""
    pattern_verdict: LogVerdict | None = None
    """What the user wants to follow a line that is in its log; None: no pattern was found."""
    hosts_coordinator: bool = False
    """It binds the coordinator's port."""
    is_before_step: bool = False
    """It is known not to have made a step."""


def describe_failure(evidence: Evidence) -> WorkerFailure:
    recorded = read_error_file(evidence.error_file)
    # A record without details is one that could not be read: the log may still say it.
    told = recorded if recorded and any((recorded.message, recorded.traceback)) else _from_log(evidence.log_tail)
    exception = keep_ends(told.message or last_line(told.traceback))
    kind = classify(evidence, exception)
    said = None if kind is FailureKind.STOPPED_BY_US else _log_verdict(evidence)
    return WorkerFailure(
        global_rank=evidence.global_rank,
        local_rank=evidence.local_rank,
        pid=evidence.exit.pid,
        kind=kind,
        exited_at=evidence.exited_at,
        exit_code=evidence.exit.exit_code,
        signal=evidence.exit.signal,
        message=one_line(_message(evidence, kind, exception)),
        # Both texts together stay within the limit of a report.
        traceback=keep_tail(told.traceback, MAX_FAILURE_BYTES // 2),
        log_tail=keep_tail(evidence.log_tail, MAX_FAILURE_BYTES // 2 - 8192),
        log_file=encodable(evidence.log_file),
        error_file=encodable(evidence.error_file) if recorded else "",
        node_error=one_line(said.line) if said is not None and said.action is LogAction.RELAUNCH else "",
        stop_line=one_line(said.line) if said is not None and said.action is LogAction.ABORT else "",
        exceptions=told.exceptions or exceptions_of(told.traceback),
        is_before_step=evidence.is_before_step,
    )


def _log_verdict(evidence: Evidence) -> LogVerdict | None:
    if evidence.pattern_verdict is not None:
        return evidence.pattern_verdict
    node_error = find_node_error(log_lines(evidence.log_tail, evidence.training_log), evidence.node_errors)
    return LogVerdict(LogAction.RELAUNCH, node_error) if node_error else None


def fit_into_report(failures: Sequence[WorkerFailure]) -> tuple[WorkerFailure, ...]:
    """
    As one message can carry them, earliest first. Hundreds of workers of a node may fail at once: the first tell all, those after them
    only what went wrong.
    """
    fitting = []
    left = _MAX_REPORT_BYTES
    for failure in failures:
        left -= len(failure.traceback.encode()) + len(failure.log_tail.encode())
        if left < 0:
            failure = replace(failure, traceback=keep_tail(failure.traceback, _SHORT_TRACEBACK_BYTES), log_tail="")
        fitting.append(failure)
    return tuple(fitting)


def could_not_start(*, global_rank: int, local_rank: int, message: str, at: Micros, pid: int = 0) -> WorkerFailure:
    return WorkerFailure(
        global_rank=global_rank,
        local_rank=local_rank,
        pid=pid,
        kind=FailureKind.START_FAILED,
        exited_at=at,
        message=one_line(message),
    )


def classify(evidence: Evidence, exception: str) -> FailureKind:
    ended = evidence.exit
    if evidence.was_signalled:
        return FailureKind.STOPPED_BY_US
    if ended.signal == signal.SIGKILL and evidence.num_oom_kills > 0:
        return FailureKind.OUT_OF_MEMORY
    tail = last_lines(evidence.log_tail, 50)
    if ended.signal is not None:
        if ended.signal == signal.SIGABRT:
            # C++ code that lost its peer, or memory, ends with terminate(): its reason is in the log only.
            if _MEMORY.search(tail):
                return FailureKind.MEMORY_ERROR
            if mentions_lost_peer(tail):
                return FailureKind.PEER_LOST
        return FailureKind.SIGNAL
    if ended.exit_code == EXIT_LAST_BREATH:
        return FailureKind.PEER_LOST
    if not exception:
        return FailureKind.BAD_SCRIPT if _CANNOT_OPEN.search(tail) else FailureKind.EXIT_CODE
    if _MEMORY.search(exception):
        return FailureKind.MEMORY_ERROR
    if evidence.hosts_coordinator and _PORT_TAKEN.search(exception):
        return FailureKind.PORT_TAKEN
    if not evidence.has_stepped and _BAD_SCRIPT.match(exception):
        return FailureKind.BAD_SCRIPT
    if tells_of_lost_peer(exception):
        return FailureKind.PEER_LOST
    return FailureKind.EXCEPTION


def _message(evidence: Evidence, kind: FailureKind, exception: str) -> str:
    ended = evidence.exit
    if ended.signal is not None:
        name = signal_name(ended.signal)
        match kind:
            case FailureKind.OUT_OF_MEMORY:
                return f"killed by the kernel ({name}): the memory limit of the container was reached"
            case FailureKind.STOPPED_BY_US:
                return f"stopped by the agent with {name}"
        core = ", core dumped" if ended.has_core else ""
        said = f": {exception}" if exception else ""
        return f"ended by {name}{core}{said}"
    if exception:
        return exception
    if kind is FailureKind.BAD_SCRIPT:
        return last_line(evidence.log_tail)
    return f"exit code {ended.exit_code}"


@dataclass(frozen=True)
class Recorded:
    """Content of an error file."""

    message: str
    traceback: str
    exceptions: tuple[str, ...] = ()
    """As our own worker entry writes them; torch's `@record` does not."""


def read_error_file(path: str) -> Recorded | None:
    """
    None if there is none. A corrupt one, not finished or endless, counts as a failure without details.

    JSON can say half a character, which comes from the name of a file that is no UTF-8; no report could carry it.
    """
    if not path:
        return None
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            data = json.loads(file.read(_MAX_ERROR_FILE_CHARACTERS))
    except OSError:
        return None
    except (ValueError, RecursionError):
        return Recorded("", "")
    message = data.get("message") if isinstance(data, dict) else None
    if isinstance(message, str):
        return Recorded(encodable(message), "")
    if not isinstance(message, dict):
        return Recorded("", "")
    details = message.get("extraInfo")
    traceback = details.get("py_callstack", "") if isinstance(details, dict) else ""
    names = details.get("exceptions") if isinstance(details, dict) else None
    exceptions = (
        tuple(encodable(str(name)[:_MAX_NAME]) for name in names[:_MOST_NAMES]) if isinstance(names, list) else ()
    )
    return Recorded(encodable(str(message.get("message", ""))), encodable(str(traceback)), exceptions)


def exceptions_of(traceback: str) -> tuple[str, ...]:
    """
    The same from the text alone, where all types in it are Python's own or torch's for process groups. Empty: there is another, of
    which this node does not know the bases.
    """
    names: dict[str, None] = {}
    for line in _EXCEPTION_LINE.findall(traceback):
        name = line.rpartition(".")[2]
        kind = getattr(builtins, line, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            names |= dict.fromkeys(base.__name__ for base in kind.__mro__ if base is not object)
        elif name.startswith("Dist"):
            names[name] = None
        else:
            return ()
    return tuple(names)


def _from_log(tail: str) -> Recorded:
    return Recorded("", last_traceback(tail))


def last_traceback(text: str) -> str:
    """The newest Python traceback of a log, up to the line that names the exception."""
    text = _RANK_PREFIX.sub("", text)
    start = text.rfind(_TRACEBACK)
    if start < 0:
        return _last_syntax_error(text)
    # A chain ("During handling of...") belongs together: go back as long as the texts between say so.
    while True:
        before = text.rfind(_TRACEBACK, 0, start)
        if before < 0 or not _CHAINED.search(text[before:start]):
            break
        start = before
    lines = text[start:].splitlines()
    end = 1
    for number, line in enumerate(lines[1:], 1):
        if re.match(r"[A-Za-z_][\w.]*(:|$)", line):
            end = number + 1
            if not any(_TRACEBACK in later for later in lines[end:]):
                break
    return "\n".join(lines[:end]) + "\n"


def _last_syntax_error(text: str) -> str:
    """The interpreter shows an error in the script itself without the usual headline."""
    found = _SYNTAX_ERROR.findall(text)
    return f"{found[-1]}\n" if found else ""


def last_line(text: str) -> str:
    stripped = text.rstrip()
    return stripped[stripped.rfind("\n") + 1 :]


def last_lines(text: str, count: int) -> str:
    return "\n".join(text.splitlines()[-count:])


def one_line(text: str) -> str:
    line = " ".join(encodable(text).split())
    return line if len(line) <= _MAX_MESSAGE_CHARACTERS else line[: _MAX_MESSAGE_CHARACTERS - 1] + "…"


def keep_ends(text: str) -> str:
    """Both ends of a text that is too long to be searched."""
    half = _MAX_EXCEPTION_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]}…\n{text[-half:]}"


def keep_tail(text: str, limit_bytes: int) -> str:
    """The last bytes of the text that fit, without half a character."""
    raw = text.encode("utf-8", "replace")
    return raw[-limit_bytes:].decode("utf-8", "ignore")


def count_oom_kills(cgroup_file: str = cgroup.CGROUP_FILE, root: str = cgroup.ROOT) -> int:
    """How many processes of our memory cgroup the kernel has killed for memory so far; 0 where it does not count them."""
    counts = (cgroup.num_oom_kills(group) for group in cgroup.groups("memory", cgroup_file=cgroup_file, root=root))
    return next((count for count in counts if count is not None), 0)
