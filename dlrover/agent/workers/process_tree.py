"""
Processes below us: who they are, how each ended, and how to end them all.

The agent is a subreaper: whatever a worker leaves behind, however often it forked and whatever session it opened,
becomes our child in the end. So "everything that belongs to the job here" is simply "our descendants", and nothing
else is ever touched. A process is named by pid *and* start time and signalled through a pidfd, so that a reused pid
is never hit.

Not all of them are the workers': code that runs in the agent (a user's storage or collector, our own probes) starts
programs too, and waits for them itself. Those are told apart by their session. A session is inherited or made anew,
never joined, and the zygote and each worker have their own: so a child in the agent's session was started by the agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import select
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dlrover.agent.workers.cgroups import Cgroups
from dlrover.agent.workers.endings import has_memory_for, held_by
from dlrover.agent.workers.sigterm import ACCELERATORS, LOOK_EVERY, Handler, Reaction, caught_signals
from dlrover.host.processes import RunningProcess, all_processes, below, descendants, look_up, open_pidfd
from dlrover.host.shared_page.death_notice import DeathNotice
from dlrover.host.signals import send_signal
from dlrover.protocol.messages.job import StopCause

if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36

_KILL_DEADLINE = 10.0
"""
Seconds to wait for processes after SIGKILL; one that sleeps uninterruptibly in the kernel cannot be waited for for
ever.
"""


_LAST_WORDS = 0.5
"""Seconds before SIGKILL at which a worker that had time enough to end is looked at."""


class Graces(NamedTuple):
    """Seconds between the signal and SIGKILL, at most, where the job does not end."""

    without_handler: float = 0.2
    """After a failure. The default action needs no time at all."""
    after_failure: float = 3.0
    for_membership: float = 5.0


GRACES = Graces()


class Exit(NamedTuple):
    """How a child ended."""

    pid: int
    exit_code: int | None
    signal: int | None
    has_core: bool
    at: float
    """Wall clock, when we were told."""

    @classmethod
    def of_status(cls, pid: int, status: int, at: float) -> Exit:
        """`status` as `waitpid` tells it."""
        number = status & 0x7F
        return cls(pid, None if number else status >> 8, number or None, bool(status & 0x80), at)


def become_subreaper() -> None:
    """From now on orphans among our descendants become our children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(
            number,
            "the agent cannot adopt orphaned processes: prctl(PR_SET_CHILD_SUBREAPER) failed "
            f"({os.strerror(number)}). Run it on Linux 3.4 or newer",
        )


def kill_descendants(keep: Collection[int] = (), *, deadline: float = _KILL_DEADLINE) -> list[int]:
    """
    Kill everything below us but `keep` and what is below those, and reap it; without an event loop, for the launcher.

    Returns the pids that could not be got rid of in time (uninterruptible sleep in the kernel).
    """
    until = time.monotonic() + deadline
    while True:
        remaining = _kill_once(keep)
        if not remaining or time.monotonic() >= until:
            return [process.pid for process in remaining]
        # Wait for one that must go; its children become ours and are met in the next turn.
        _wait_gone(remaining[0], min(until - time.monotonic(), 0.5))


def _kill_once(keep: Collection[int]) -> list[RunningProcess]:
    """SIGKILL to all, reap what is dead; returns those that are still to be waited for."""
    own_pid = os.getpid()
    remaining = []
    for process in descendants(own_pid, keep=keep):
        send_signal(process, signal.SIGKILL)
        # A zombie of another parent: the parent is on the list too, and then the zombie is ours.
        if process.state != "Z" or process.parent_pid != own_pid or not _reap(process.pid):
            remaining.append(process)
    return remaining


def _wait_gone(process: RunningProcess, timeout: float) -> None:
    try:
        descriptor = open_pidfd(process.pid)
    except ProcessLookupError:
        return
    if descriptor is None:
        time.sleep(min(timeout, 0.005))  # without pidfd the kernel has no way to tell about a grandchild
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(max(timeout, 0.0) * 1000)
    finally:
        os.close(descriptor)


def _reap(pid: int) -> bool:
    """False: its main thread has ended and others have not, so that it looks like a zombie and runs on."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


class ProcessTree:
    """
    The processes of this node's agent, seen from its event loop.

    Watches workers through pidfds (or SIGCHLD where there are none), reaps orphans that end by themselves while
    training runs, and stops trees. `keep` names pids that are never touched: the zygote of the moment. With `cgroups`
    what is to be killed is killed there at once, before the agent looks for it.

    Helpers, children in our own session that the agent does not watch, are left to the code that started them, and so is what
    is below them: that code reads the exit status, and a failed upload whose status we had taken would look like a
    success. They end with us. A program that is started in a session of its own cannot be told from what a worker left,
    and is stopped with the workers; one that leaves a child behind in our session leaves a zombie there until we end.
    """

    def __init__(
        self,
        keep: Callable[[], Collection[int]] = tuple,
        *,
        cgroups: Cgroups | None = None,
        graces: Graces = GRACES,
        accelerators: tuple[str, ...] = ACCELERATORS,
    ) -> None:
        """`accelerators`: how the paths of devices begin whose users compute while they wait for them."""
        import asyncio

        self._graces = graces
        self._accelerators = accelerators
        self._keep = keep
        self._cgroups = cgroups
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, _Watch] = {}
        self._is_closed = False
        self._loop.add_signal_handler(signal.SIGCHLD, self._on_child)

    def close(self) -> None:
        """Kills the helpers as well: the process that waits for them ends now, and the launcher may not be there to do it."""
        self._is_closed = True
        self._loop.remove_signal_handler(signal.SIGCHLD)
        of_workers = {process.pid for process in self._of_workers()}
        for process in descendants(os.getpid(), keep=self._keep()):
            if process.pid not in of_workers:
                send_signal(process, signal.SIGKILL)
        for watch in list(self._watched.values()):
            self._forget(watch)

    def watch(
        self, pid: int, page: tuple[int, int] | None = None, unneeded_ports: Collection[int] = ()
    ) -> asyncio.Future[Exit]:
        """
        Resolves when this child has ended: it runs no more of its program. It is reaped later, by us alone, when the kernel has freed all
        that it had. `page` is the descriptor and the place at which it holds a `death_notice`; without one the two moments are one.
        `unneeded_ports` it may keep until then, because no later worker needs them.
        """
        assert pid not in self._watched, f"pid {pid} is watched already"
        process = look_up(pid)
        if process is None or process.parent_pid != os.getpid():
            raise ProcessLookupError(errno.ESRCH, f"process {pid} is not a child of this agent")
        descriptor = open_pidfd(pid)
        watch = _Watch(process, descriptor, self._loop.create_future(), self._loop.create_future())
        watch.unneeded_ports = unneeded_ports
        self._watched[pid] = watch
        if descriptor is not None:
            self._loop.add_reader(descriptor, self._collect, watch)
            watch.notice = self._open_notice(watch, page)
        else:
            self._loop.call_soon(self._collect, watch)
        return watch.exit

    def _open_notice(self, watch: _Watch, page: tuple[int, int] | None) -> DeathNotice | None:
        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
                self._loop.call_soon_threadsafe(self._on_notice, watch)

        try:
            return None if page is None else DeathNotice(*page, tell)
        except OSError as error:
            _log.info(
                "No death notice for pid %d; the agent notices its end when the kernel has freed its memory: %s",
                watch.process.pid,
                error.strerror,
            )
            return None

    def _on_notice(self, watch: _Watch) -> None:
        """The main thread of a worker has gone: by the end of the process, by `exec`, or alone. Only the first is an exit."""
        if watch.exit.done() or self._watched.get(watch.process.pid) is not watch:
            return
        now = look_up(watch.process.pid)
        if not watch.process.is_same(now) or now is None or not now.is_exiting or not now.wait_status:
            return  # or it ends with 0, and nobody waits for that
        ended = Exit.of_status(now.pid, now.wait_status, time.time())
        _log.info("ending pid=%d exit_code=%s signal=%s", ended.pid, ended.exit_code, ended.signal)
        watch.exit.set_result(ended)

    @property
    def _ending(self) -> dict[int, _Watch]:
        """Workers that have ended, and whose memory and descriptors the kernel has not freed yet."""
        return {pid: watch for pid, watch in self._watched.items() if watch.exit.done()}

    async def gone(self) -> None:
        """Until nothing is left of the workers that have ended."""
        import asyncio

        if ending := self._ending:
            await asyncio.wait([watch.freed for watch in ending.values()], timeout=_KILL_DEADLINE)

    def note_sizes(self) -> None:
        """Before workers end: an exiting process does not say any more how large it was."""
        for watch in self._watched.values():
            now = look_up(watch.process.pid)
            if now is not None and watch.process.is_same(now) and not now.is_exiting:
                watch.resident_bytes = now.resident_bytes

    async def room(self, num_workers: int) -> None:
        """
        Until so many new workers can have what the ended ones had: devices, ports, locks and memory are free only when the kernel has taken
        them back. Where they need none of it they need not wait.
        """
        import asyncio

        ending = self._ending
        if not ending:
            return
        held = {pid: held_by(pid, watch.unneeded_ports) for pid, watch in ending.items()}
        waited = {pid: watch for pid, watch in ending.items() if held[pid]}
        if not has_memory_for(num_workers, [watch.resident_bytes for watch in ending.values()]):
            waited, held = ending, {pid: held[pid] or "its memory" for pid in ending}
        if not waited:
            return
        _log.info(
            "new workers wait until these processes have ended: %s",
            "; ".join(f"pid {pid}: {held[pid]}" for pid in waited),
        )
        await asyncio.wait([watch.freed for watch in waited.values()], timeout=_KILL_DEADLINE)

    def _collect(self, watch: _Watch) -> None:
        """Read the status of a watched child, if it has ended."""
        if watch.process.pid not in self._watched:
            return
        at = time.time()
        if watch.descriptor is not None:
            result = os.waitid(os.P_PIDFD, watch.descriptor, os.WEXITED | os.WNOHANG)
        else:
            result = os.waitid(os.P_PID, watch.process.pid, os.WEXITED | os.WNOHANG)
        if result is None:
            return
        is_normal = result.si_code == os.CLD_EXITED
        ended = Exit(
            pid=watch.process.pid,
            exit_code=result.si_status if is_normal else None,
            signal=None if is_normal else result.si_status,
            has_core=result.si_code == os.CLD_DUMPED,
            at=at,
        )
        _log.info("ended pid=%d exit_code=%s signal=%s", ended.pid, ended.exit_code, ended.signal)
        self._forget(watch)
        if not watch.exit.done():
            watch.exit.set_result(ended)
        watch.freed.set_result(None)

    def _forget(self, watch: _Watch) -> None:
        self._watched.pop(watch.process.pid, None)
        if watch.descriptor is not None:
            self._loop.remove_reader(watch.descriptor)
            os.close(watch.descriptor)
            watch.descriptor = None
        if watch.notice is not None:
            watch.notice.close()
            watch.notice = None

    def _on_child(self) -> None:
        if self._is_closed:
            return  # a signal that was on its way; whoever ends now is for somebody else
        for watch in [watch for watch in self._watched.values() if watch.descriptor is None]:
            self._collect(watch)
        self.reap_orphans()

    def reap_orphans(self) -> None:
        """Adopted processes that ended by themselves: no other process would take them out of the process table."""
        own_pid = os.getpid()
        for process in self._of_workers():
            is_dead_child = process.parent_pid == own_pid and process.state == "Z"
            if is_dead_child and process.pid not in self._watched:
                _reap(process.pid)

    def _of_workers(self) -> list[RunningProcess]:
        """Every descendant but the kept ones, the helpers and what is below either, parents first."""
        own_pid, own_session = os.getpid(), os.getsid(0)
        processes = list(all_processes())
        helpers = {
            process.pid
            for process in processes
            if process.parent_pid == own_pid and process.session == own_session and process.pid not in self._watched
        }
        return below(own_pid, processes, helpers.union(self._keep()))

    def _stop_of(self, process: RunningProcess, cause: StopCause, shutdown_timeout: float) -> _Stop:
        return _Stop(process, cause, shutdown_timeout, graces=self._graces, accelerators=self._accelerators)

    async def stop(
        self,
        pids: Iterable[int],
        *,
        cause: StopCause,
        shutdown_timeout: float,
        number: int = signal.SIGTERM,
        on_stuck: Callable[[Sequence[int]], None] | None = None,
    ) -> dict[int, float]:
        """
        End these watched workers with all that is below them, then every other descendant but the kept ones and helpers.

        First the signal and the time that the cause allows, then SIGKILL. When this returns nothing of the job runs
        here (or it sleeps in the kernel beyond our reach, which is logged); `gone` waits for what the kernel still has to free. Returns how many seconds each worker
        was given; one that was still there then was killed. `on_stuck` hears shortly before of those that had time and
        do not end.

        A worker may be no more than a shell around the program that trains, and die of the signal at once: what is below
        it and has a handler of its own has the time that a worker has. What has none goes when its worker has gone.
        """
        import asyncio

        watches = [watch for watch in (self._watched.get(pid) for pid in pids) if watch is not None]
        stops = [(watch, self._stop_of(watch.process, cause, shutdown_timeout)) for watch in watches]
        signalled = self._of_workers()
        wrapped = [
            self._stop_of(process, cause, shutdown_timeout)
            for process in _with_handler([watch.process for watch in watches], signalled, number)
        ]
        # Not only what is below the workers now: what they left to us (daemons) belongs to them as well.
        for process in signalled:
            send_signal(process, number)
            if process.state == "T":
                send_signal(process, signal.SIGCONT)  # a stopped process takes no signal but SIGKILL
        began_at = self._loop.time()
        await asyncio.gather(
            *(self._wait_or_kill(watch, stop, began_at, on_stuck) for watch, stop in stops),
            *(self._wait_for_wrapped(stop, began_at) for stop in wrapped),
        )
        await self.sweep(is_leaving_ending=True)
        return {stop.process.pid: stop.given for _watch, stop in stops}

    async def _wait_for_wrapped(self, stop: _Stop, began_at: float) -> None:
        """Until it has ended, by itself or with a worker that was killed, or has had its time."""
        while True:
            left = began_at + stop.given - self._loop.time()
            if left > 0:
                await self._gone(stop.process, left)
            now = look_up(stop.process.pid)
            if now is None or now.is_dead or not stop.process.is_same(now):
                return
            if self._loop.time() >= began_at + stop.given and not stop.extend():
                _log.info("pid=%d is still there %.1f s after the signal", stop.process.pid, stop.given)
                return

    async def _wait_or_kill(
        self, watch: _Watch, stop: _Stop, began_at: float, on_stuck: Callable[[Sequence[int]], None] | None
    ) -> None:
        import asyncio

        while True:
            left = max(0.0, began_at + stop.given - self._loop.time())
            if on_stuck is not None and left > 2 * _LAST_WORDS:
                await asyncio.wait([watch.exit], timeout=left - _LAST_WORDS)
                if not watch.exit.done():
                    on_stuck([watch.process.pid])
                left = max(0.0, began_at + stop.given - self._loop.time())
            await asyncio.wait([watch.exit], timeout=left)
            if watch.exit.done():
                return
            if not stop.extend():
                break
        _log.info("killing pid=%d, still there %.1f s after the signal", watch.process.pid, stop.given)
        for process in (watch.process, *descendants(watch.process.pid)):
            send_signal(process, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL to every descendant but the kept ones and helpers, without waiting for their ends."""
        if self._cgroups is not None:
            self._cgroups.kill(self._keep())
        for process in self._of_workers():
            send_signal(process, signal.SIGKILL)  # to a zombie, too: threads of it may live

    async def sweep(self, *, deadline: float = _KILL_DEADLINE, is_leaving_ending: bool = False) -> None:
        """
        Kill and reap every descendant but the kept ones and helpers, until none is left. `is_leaving_ending`: workers that have ended are
        left to the kernel.
        """
        import asyncio

        until = self._loop.time() + deadline
        if self._cgroups is not None:
            self._cgroups.kill(self._keep())
        while True:
            remaining = []
            own_pid = os.getpid()
            ending = self._ending if is_leaving_ending else {}
            for process in self._of_workers():
                if process.pid in ending or (process.is_dead and process.parent_pid in ending):
                    continue
                send_signal(process, signal.SIGKILL)
                is_our_orphan = process.parent_pid == own_pid and process.pid not in self._watched
                if process.state != "Z" or not is_our_orphan or not _reap(process.pid):
                    remaining.append(process)
            if not remaining:
                if self._cgroups is not None:
                    self._cgroups.remove_empty()
                return
            left = until - self._loop.time()
            if left <= 0:
                stuck = ", ".join(f"{process.pid} ({process.state})" for process in remaining)
                _log.error(
                    "These processes still exist %g s after SIGKILL: %s. They may wait inside the kernel for a device.",
                    deadline,
                    stuck,
                )
                return
            waits: list[Awaitable[object]] = [self._gone(process, left) for process in remaining]
            await asyncio.gather(*waits)

    async def _gone(self, process: RunningProcess, timeout: float) -> None:
        """Until the process is dead or, if watched, collected."""
        import asyncio

        watch = self._watched.get(process.pid)
        if watch is not None:
            await asyncio.wait([watch.freed], timeout=timeout)
            return
        try:
            descriptor = open_pidfd(process.pid)
        except ProcessLookupError:
            return
        if descriptor is None:
            await asyncio.sleep(min(timeout, 0.005))  # no pidfd and maybe not our child: nothing can tell us
            return
        is_dead = asyncio.Event()
        self._loop.add_reader(descriptor, is_dead.set)
        try:
            async with asyncio.timeout(timeout):
                await is_dead.wait()
        except TimeoutError:
            return
        finally:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)


class _Watch:
    def __init__(
        self,
        process: RunningProcess,
        descriptor: int | None,
        exit_: asyncio.Future[Exit],
        freed: asyncio.Future[None],
    ) -> None:
        self.process = process
        self.descriptor = descriptor
        self.exit = exit_
        """It runs no more of its program."""
        self.freed = freed
        """It has been reaped."""
        self.notice: DeathNotice | None = None
        self.unneeded_ports: Collection[int] = ()
        self.resident_bytes: int | None = None
        """As `note_sizes` has seen it; None: it had ended by then."""


class _Stop:
    """How long one process is waited for before SIGKILL. Built before the signal is sent."""

    def __init__(
        self,
        process: RunningProcess,
        cause: StopCause,
        shutdown_timeout: float,
        *,
        graces: Graces,
        accelerators: tuple[str, ...],
    ) -> None:
        self.process = process
        self._reaction = Reaction(process.pid, accelerators=accelerators)
        self._limit = longest_grace(cause, self._reaction.handler, shutdown_timeout, graces=graces)
        self._is_observed = cause is StopCause.FAILURE and self._reaction.handler is Handler.ANNOUNCED
        self.given = min(LOOK_EVERY, self._limit) if self._is_observed else self._limit
        """Seconds after the signal, so far."""

    def extend(self) -> bool:
        """The given time is over. Whether there is more of it."""
        if self.given >= self._limit:
            return False
        if self._reaction.has_begun():
            self.given = self._limit
        elif self._reaction.is_on_its_way(LOOK_EVERY):
            self.given = min(self.given + LOOK_EVERY, self._limit)
        else:
            return False
        return True


def _with_handler(
    workers: Sequence[RunningProcess], processes: Sequence[RunningProcess], number: int
) -> list[RunningProcess]:
    """
    Those below the workers that have a handler of their own for the signal.

    A fork has its parent's handler as well, and it was not meant for it: a parent that has reacted to the signal and ended
    would be followed by a wait for children that only took note of it. A fork shows its parent's command line, at the very place in
    memory where the parent has it; a new program has its own.
    """
    seen = {process.pid: process for process in processes}
    seen.update((worker.pid, worker) for worker in workers)
    is_handled: dict[int, bool] = {}

    def handles(pid: int) -> bool:
        if pid not in is_handled:
            is_handled[pid] = number in caught_signals(pid)
        return is_handled[pid]

    def is_own(process: RunningProcess) -> bool:
        parent = seen[process.parent_pid]
        is_fork = process.command_line == parent.command_line
        return handles(process.pid) and not (is_fork and handles(parent.pid))

    own = {process.pid: process for worker in workers for process in below(worker.pid, processes)}
    return [process for process in own.values() if is_own(process)]


def longest_grace(
    cause: StopCause,
    handler: Handler,
    shutdown_timeout: float,
    *,
    graces: Graces = GRACES,
) -> float:
    """Seconds between the signal and SIGKILL, at most."""
    match cause:
        case StopCause.FAILURE:
            # The job waits for us.
            grace = graces.without_handler if handler is Handler.NONE else graces.after_failure
            return min(grace, shutdown_timeout)
        case StopCause.MEMBERSHIP:
            return min(graces.for_membership, shutdown_timeout)
        case StopCause.END_OF_JOB | StopCause.PREEMPTION:
            return shutdown_timeout
