"""
The last words of a failed job: one block that names the first failing worker, its cause, and where to look.

Written by the launcher from what the agent left, in one write to stderr, so that it stands below everything the
workers said.
"""

from __future__ import annotations

import re
import shutil
import textwrap

from dlrover.agent.config import AgentResult
from dlrover.cli.console import say
from dlrover.host.signals import signal_name
from dlrover.protocol.messages.goodput import GoodputStatus, TimeClass
from dlrover.protocol.messages.job import ExitReason, FailureKind, FirstFailure, JobEnd

WIDTH = 100
MAX_TAIL_LINES = 30
REDO_UNKNOWN = (
    "Redo time is unknown: after a fault the script did not report the step at which it continued. Repeated "
    "steps therefore count as new steps. To tell them apart, call dlrover.trainer.report(step) in the script."
)
_KINDS = {
    FailureKind.EXCEPTION: "an exception",
    FailureKind.EXIT_CODE: "the process ended by itself",
    FailureKind.SIGNAL: "a signal",
    FailureKind.OUT_OF_MEMORY: "killed by the kernel: out of memory",
    FailureKind.MEMORY_ERROR: "out of memory in Python or in the allocator",
    FailureKind.PEER_LOST: "the connection to another worker was lost",
    FailureKind.PORT_TAKEN: "the port of the coordinator was taken",
    FailureKind.BAD_SCRIPT: "the script cannot run",
    FailureKind.STOPPED_BY_US: "stopped by DLRover",
    FailureKind.DIAGNOSED: "the diagnosis found it at fault while it ran",
    FailureKind.START_FAILED: "the process could not be started",
}


def failure_report(job_name: str, result: AgentResult) -> str:
    end: JobEnd | None = result.end
    is_stopped = end is not None and end.reason is ExitReason.STOPPED_BY_USER
    title = f"Job {job_name} {'was stopped' if is_stopped else 'failed'}"
    # Without the master's word only this node's part is known: it was refused, or lost the master.
    lines = ["=" * WIDTH, f"{title}: {end.reason}" if end else f"{title} on this node"]
    message = (end.message if end else "") or result.message
    if message:
        lines += textwrap.wrap(message, WIDTH)
    restarts = end.num_restarts if end else result.num_restarts
    if restarts:
        lines.append(f"Restarts before that: {restarts}")
    if end is not None and end.first_failure is not None:
        lines += ["-" * WIDTH, *_first_failure(end.first_failure)]
    elif result.first_failed_rank is not None:
        lines.append(f"First failure: global rank {result.first_failed_rank}, exit code {result.worker_exit_code}")
    lines.append("=" * WIDTH)
    return "\n".join(lines) + "\n"


def goodput_line(goodput: GoodputStatus) -> str:
    """One line for people: the figure, and where the rest went."""
    total = sum(goodput.seconds.values()) or 1.0
    others = sorted(((value / total, class_) for class_, value in goodput.seconds.items()), reverse=True)
    shown = [
        f"{class_.value} {share:.1%}" for share, class_ in others if class_ is not TimeClass.COMPUTE and share >= 0.0005
    ]
    faults = f", {goodput.num_faults} fault{'' if goodput.num_faults == 1 else 's'}" if goodput.num_faults else ""
    most = at_most(goodput)
    figure = f"goodput {most}{goodput.goodput:.1%} of {goodput.wall:.1f} s"
    if goodput.highest_step is not None:
        figure += f", {most}{goodput.goodput_since_start:.1%} since the first step"
    shown = shown[:5] + ([] if goodput.is_redo_known else ["redo unknown"])
    return f"{figure}{faults}" + (f"; {', '.join(shown)}" if shown else "")


def at_most(goodput: GoodputStatus) -> str:
    """Before a figure in which repeated steps may count as new ones."""
    return "" if goodput.is_redo_known else "at most "


def _first_failure(first: FirstFailure) -> list[str]:
    failure = first.failure
    rows = [
        ("first failure", f"global rank {failure.global_rank} (local rank {failure.local_rank}, pid {failure.pid})"),
        ("node", f"rank {first.node_rank} on {first.host}"),
        ("cause", _cause(first)),
        ("round", str(first.round)),
    ]
    if first.step is not None:
        rows.append(("step", str(first.step)))
    if failure.log_file and _is_kept(failure.log_file):
        rows.append(("log file", failure.log_file))
    if failure.error_file and _is_kept(failure.error_file):
        rows.append(("error file", failure.error_file))
    lines = [f"{name:<14}{value}" for name, value in rows]
    if failure.traceback:
        lines += ["traceback", *_indented(failure.traceback)]
    elif failure.log_tail:
        lines += ["last output", *_indented(failure.log_tail)]
    elif not (failure.log_file and _is_kept(failure.log_file)):
        lines.append(
            "There is no log or traceback of this process. To keep its output in files, start the job with "
            "--log-dir DIR --tee 3."
        )
    return lines


def _cause(first: FirstFailure) -> str:
    failure = first.failure
    if failure.signal is not None:
        status = f"signal {failure.signal} ({signal_name(failure.signal)})"
    elif failure.exit_code is not None:
        status = f"exit code {failure.exit_code}"
    else:
        status = "no exit status"
    kind = "" if failure.kind in (FailureKind.EXIT_CODE, FailureKind.SIGNAL) else f", {_KINDS[failure.kind]}"
    message = failure.message
    if failure.signal is not None:
        message = message.removeprefix(f"ended by {signal_name(failure.signal)}").lstrip(":, ")
    return f"{status}{kind}" + (f": {message}" if message not in ("", status) else "")


def _is_kept(path: str) -> bool:
    """Files in a node's runtime directory go with the job: what they say is in the report, the path would lead nowhere."""
    return re.search(r"/dlrover-\d+/[^/]+/node-[0-9a-f]{8}/", path) is None


def _indented(text: str) -> list[str]:
    lines = text.rstrip().splitlines()
    left_out = len(lines) - MAX_TAIL_LINES
    shown = (
        [f"  ... {left_out} lines left out", *(f"  {line}" for line in lines[-MAX_TAIL_LINES:])] if left_out > 0 else []
    )
    return shown or [f"  {line}" for line in lines]


def pass_error_file_on(target: str | None, result: AgentResult) -> None:
    """As torchrun: the program that started us may have named a file for the first worker's error."""
    first = result.end.first_failure if result.end else None
    if target and first is not None and first.failure.error_file:
        try:
            shutil.copyfile(first.failure.error_file, target)
        except OSError as error:
            # The failure was on another node, or the place is not writable: the report has said it all.
            say(f"the error file could not be copied to {target}: {error.strerror}")
