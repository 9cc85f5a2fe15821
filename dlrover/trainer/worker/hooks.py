"""
Installed in every worker before its script begins: the progress page, the dump of stacks on a signal, and the hooks.

Nothing here may break a script: what cannot be installed is left out, and the agent sees from the page that it is missing.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import os
from types import ModuleType

from dlrover.host.shared_page import death_notice
from dlrover.protocol import progress_page as layout
from dlrover.trainer import environment, phases
from dlrover.trainer.late_imports import when_imported

_HIGH_DESCRIPTOR = 900
"""A script that closes low numbers and opens files of its own does not get this one by chance."""


def install(where: environment.WorkerEnvironment | None) -> None:
    if where is None or not where.progress_page:
        return
    writer = phases.open_page(where.progress_page)
    if writer is None:
        return
    death_notice.hold(where.progress_page, layout.DEATH_NOTICE_AT)
    if where.dump_file and where.dump_signal:
        _register_dump(writer, where.dump_file, where.dump_signal)
    atexit.register(_end)
    if where.has_hooks:
        when_imported("torch", lambda torch: _install_torch(torch, where))


def _register_dump(writer: phases.PhaseWriter, path: str, number: int) -> None:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        low = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _HIGH_DESCRIPTOR)
        except OSError:
            descriptor = low
        else:
            os.close(low)
        faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
        writer.words[layout.DUMP_SIGNAL] = number


def notice_signal(number: int) -> None:
    """The script has its own use for a signal: if it is ours, no process may send it any more."""
    writer = phases.current()
    if writer is not None and writer.words[layout.DUMP_SIGNAL] == number:
        writer.words[layout.DUMP_SIGNAL] = 0


def _end() -> None:
    writer = phases.current()
    if writer is not None:
        writer.enter(phases.END)


def _install_torch(torch: ModuleType, where: environment.WorkerEnvironment) -> None:
    from dlrover.trainer.torch.hooks import canary, flight_recorder, progress_hooks

    on_step = canary.Canary(where.canary_every).after_step if where.canary_every > 0 else None
    progress_hooks.install(torch, on_step=on_step)
    writer = phases.current()
    if writer is not None:
        writer.words[layout.HAS_HOOKS] = 1
    if where.recorder_pipe:
        when_imported(
            "torch.distributed.distributed_c10d",
            lambda c10d: flight_recorder.install(c10d, pipe=where.recorder_pipe, file=where.recorder_file),
        )
