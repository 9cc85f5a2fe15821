"""
What workers print: to the console, into files, and the last of it kept for the report of a failure.

Options, file names and line prefixes are torchrun's. Unlike there a stream that goes to the console and is kept as
well passes through a pipe of ours instead of a file that is polled. One thread copies all of them, because a console
that does not take its bytes must block the worker that prints and not the agent's event loop.

A worker that fails because another one is gone writes its traceback before anybody knows that. It therefore writes the last
of its stderr, from that traceback on, into a pipe of its own (`WorkerFiles.held_path`). Files get it at once; the console gets
it when the agent says that this worker is the one that failed first, or when nobody has decided within `LONGEST_HELD`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import string
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from dlrover.agent.config import LogConfig, Streams
from dlrover.host.console import write_all
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages import MAX_FAILURE_BYTES

_log = logging.getLogger(__name__)

TAIL_BYTES = MAX_FAILURE_BYTES
PATIENCE = 1.0
"""Seconds for a console to take what is left: a failure that waits to be reported is worth more than its last lines."""
_LONGEST = 10.0
"""Seconds in all, for a machine that is too busy to run the thread that copies: the failure is judged by those lines."""
LONGEST_HELD = 15.0
"""Seconds for the agent to find out who failed first: longer than the master needs to give up a node that is silent."""
MAX_HELD_BYTES = 1024 * 1024
_CHUNK = 65536
_DEFAULT_PREFIX = "[${role_name}${local_rank}]:"


@dataclass
class WorkerFiles:
    """What one worker is started with, and where its words can be found afterwards."""

    local_rank: int
    stdin: int
    stdout: int
    stderr: int
    error_file: str
    log_file: str = ""
    """Where its stderr goes, or else its stdout; empty if neither has a file."""
    copies: list[_Copy] = field(default_factory=list)
    held_path: str = ""
    """Where a worker writes what it says of a lost peer, or of Ctrl-C, instead of its stderr; empty: there."""
    held_writer: int = -1

    def close_descriptors(self) -> None:
        """The worker has its own by now; ours would keep pipes from ever ending."""
        for descriptor in {self.stdin, self.stdout, self.stderr} - {-1}:
            os.close(descriptor)
        self.stdin = self.stdout = self.stderr = -1

    def close_held(self) -> None:
        """It has ended, and opens it no more."""
        if self.held_writer >= 0:
            os.close(self.held_writer)
            self.held_writer = -1

    def tail(self) -> str:
        """The last that it printed, errors preferred; empty where it wrote straight to a terminal."""
        by_stream = self._kept()
        raw = by_stream[2] or by_stream[1]
        if not raw and self.log_file:
            raw = _read_tail(self.log_file)
        return raw.decode("utf-8", "replace")

    def _kept(self) -> dict[int, bytes]:
        """By stream; what was held back comes last."""
        return {
            number: b"".join(bytes(copy.tail) for copy in self.copies if copy.number == number) for number in (1, 2)
        }

    def tails(self, max_bytes: int) -> tuple[str, str]:
        """The last of all its streams that can be read, and a note about them, for people who look while it runs."""
        parts = []
        kept = self._kept()
        for number, name in ((1, "stdout"), (2, "stderr")):
            path = os.path.join(os.path.dirname(self.log_file), f"{name}.log") if self.log_file else ""
            raw = kept[number] or (_read_tail(path) if path and os.path.exists(path) else b"")
            if raw:
                parts.append((name, raw))
        if not parts:
            return "", "nothing yet, or it prints straight to the console: start the job with --tee 3 to keep a log"
        share = max_bytes // len(parts)
        texts = [raw[-share:].decode("utf-8", "replace") for _, raw in parts]
        if len(parts) == 1:
            return texts[0], parts[0][0]
        headed = [f"--- {name} ---\n{text}" for (name, _), text in zip(parts, texts, strict=True)]
        return "\n".join(headed), " and ".join(name for name, _ in parts)


class WorkerOutput:
    """Console and log files of this node's workers, over all attempts."""

    def __init__(
        self, config: LogConfig, *, role: str, run_id: str, runtime_dir: str, patience: float = PATIENCE
    ) -> None:
        self._config = config
        self._patience = patience
        self._role = role
        self._run_id = run_id
        self._runtime_dir = runtime_dir
        self._run_dir = ""
        self._pump = _Pump()
        self._current: list[WorkerFiles] = []
        self._filtered: dict[int, _Sink] = {}

    @property
    def log_dir(self) -> str:
        """Directory of this run's log files; empty if nothing is logged to files."""
        return self._run_dir if self._has_files else ""

    @property
    def _has_files(self) -> bool:
        config = self._config
        if config.log_dir == os.devnull:
            return False
        wanted = (config.redirect_default, config.tee_default, *config.redirects.values(), *config.tee.values())
        return bool(config.log_dir) or any(wanted)

    def open_attempt(self, attempt: int, global_ranks: Sequence[int]) -> list[WorkerFiles]:
        """Files and pipes for the workers of one start. Errors here are the user's to solve, so they say how."""
        assert not self._current, "the streams of the former attempt are still open"
        try:
            directory = self._make_attempt_dir(attempt)
            self._filtered = self._open_filtered(directory)
            for local_rank, global_rank in enumerate(global_ranks):
                self._current.append(self._open_worker(directory, local_rank, global_rank))
        except OSError as error:
            self.abandon_attempt()
            where = self._config.log_dir or self._runtime_dir
            raise ConfigError(
                f"The workers' log files cannot be created under {where}: {error.strerror} ({error.filename}). "
                "Give a directory with room that this user may write to as --log-dir, or drop --redirects and --tee."
            ) from error
        return self._current

    def tail_of(self, local_rank: int, max_bytes: int) -> tuple[str, str]:
        """The last that a worker of now printed, and where that comes from. Reads files: not for the event loop."""
        files = next((each for each in self._current if each.local_rank == local_rank), None)
        if files is None:
            return "", "its streams are not open now"
        return files.tails(max(0, min(max_bytes, TAIL_BYTES)))

    async def drain(self, files: WorkerFiles) -> None:
        """
        Until all that the worker had printed when this was called has been copied.

        A process it left behind may hold the pipe open, so this does not wait for its end; a blocked console ends the
        wait.
        """
        if files.copies:
            await self._wait_for(lambda then: self._pump.drain(files.copies, then))

    async def close_attempt(self) -> None:
        """All workers are gone: copy the rest and close."""
        if any(files.copies for files in self._current):
            await self._wait_for(self._let_go)
        else:
            self.abandon_attempt()

    def settle_held(self, is_shown: Callable[[int], bool]) -> None:
        """Of the workers that are gone: whose last words the console shall have, by global rank. The others' are for files only."""
        self._pump.settle_held(is_shown)

    def abandon_attempt(self) -> None:
        """The same without waiting for the copies."""
        self._let_go(lambda: None)

    def _let_go(self, then: Callable[[], None]) -> None:
        for files in self._current:
            files.close_descriptors()
            files.close_held()
        copies = [copy for files in self._current for copy in files.copies]
        self._pump.drop(copies, list(self._filtered.values()), then)
        self._current = []
        self._filtered = {}

    async def _wait_for(self, begin: Callable[[Callable[[], None]], None]) -> None:
        """Until the pump has done what `begin` asks of it."""
        import asyncio

        loop = asyncio.get_running_loop()
        is_done = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be gone when a blocked console wakes up
                loop.call_soon_threadsafe(is_done.set)

        begin(tell)
        used_before, ends_at = self._pump.seconds_passing_on(), loop.time() + max(self._patience, _LONGEST)
        while not is_done.is_set():
            used = self._pump.seconds_passing_on() - used_before
            left = min(self._patience - used, ends_at - loop.time())
            if left <= 0:
                _log.warning("The workers' output is not copied to its end: the console takes no more.")
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await is_done.wait()

    def close(self) -> None:
        self.abandon_attempt()
        self._pump.close()

    def _make_attempt_dir(self, attempt: int) -> str:
        if not self._run_dir:
            if self._has_files:
                # Without --log-dir torchrun too leaves a temporary directory behind: somebody asked for these files.
                base = self._config.log_dir or tempfile.mkdtemp(prefix="dlrover_logs_")
                os.makedirs(base, exist_ok=True)
                # The name is only torchrun's prefix; a job name may hold what a file name may not.
                prefix = self._run_id.replace(os.sep, "_")
                self._run_dir = tempfile.mkdtemp(prefix=f"{prefix}_", dir=base)
                _log.info("log directory set to: %s", self._run_dir)
            else:
                self._run_dir = os.path.join(self._runtime_dir, "attempts")
        directory = os.path.join(self._run_dir, f"attempt_{attempt}")
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        if not self._has_files:
            # Error files only, and a job may restart thousands of times: keep those of this start and the one before.
            newest = {f"attempt_{number}" for number in (attempt, attempt - 1)}
            for name in set(os.listdir(self._run_dir)) - newest:
                shutil.rmtree(os.path.join(self._run_dir, name), ignore_errors=True)
        return directory

    def _open_filtered(self, directory: str) -> dict[int, _Sink]:
        if not self._has_files:
            return {}
        wanted = {1: self._config.duplicate_stdout_filters, 2: self._config.duplicate_stderr_filters}
        names = {1: "filtered_stdout.log", 2: "filtered_stderr.log"}
        return {
            number: _Sink.open(os.path.join(directory, names[number])) for number, needles in wanted.items() if needles
        }

    def _open_worker(self, directory: str, local_rank: int, global_rank: int) -> WorkerFiles:
        config = self._config
        own = os.path.join(directory, str(local_rank))
        os.mkdir(own)
        redirects = Streams(config.redirects.get(local_rank, config.redirect_default))
        tee = Streams(config.tee.get(local_rank, config.tee_default))
        if not self._has_files:
            redirects = tee = Streams.NONE
        is_shown = not config.local_ranks_filter or local_rank in config.local_ranks_filter
        files = WorkerFiles(
            local_rank=local_rank,
            stdin=os.dup(0),
            stdout=-1,
            stderr=-1,
            error_file=os.path.join(own, "error.json"),
        )
        try:
            for number, name, flag in ((1, "stdout", Streams.OUT), (2, "stderr", Streams.ERR)):
                path = os.path.join(own, f"{name}.log") if (redirects | tee) & flag else ""
                is_teed = bool(tee & flag)
                prefix = self._prefix(local_rank, global_rank) if is_teed else b""
                setattr(files, name, self._open_stream(files, number, path, prefix, is_teed=is_teed, is_shown=is_shown))
                files.log_file = path or files.log_file
                if number == 2 and is_shown and (is_teed or not path) and not _log.isEnabledFor(logging.INFO):
                    self._open_held(files, path, prefix, global_rank)
        except OSError:
            files.close_descriptors()
            files.close_held()
            raise
        return files

    def _open_stream(
        self, files: WorkerFiles, number: int, path: str, prefix: bytes, *, is_teed: bool, is_shown: bool
    ) -> int:
        """The descriptor that the worker gets as its stdout or stderr."""
        if path and not (is_teed and is_shown):
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if not path and is_shown and (number == 1 or os.isatty(2)):
            return os.dup(number)
        if not path and not is_shown and number == 1:
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        needles = self._config.duplicate_stdout_filters if number == 1 else self._config.duplicate_stderr_filters
        copy = _Copy(
            number=number,
            console=number if is_shown else None,
            prefix=prefix,
            file=_Sink.open(path) if path else None,
            filtered=self._filtered.get(number) if is_teed else None,
            needles=tuple(os.fsencode(needle) for needle in needles),
        )
        reader, writer = os.pipe()
        copy.descriptor = reader
        os.set_blocking(reader, False)
        files.copies.append(copy)
        self._pump.add(copy)
        return writer

    def _open_held(self, files: WorkerFiles, path: str, prefix: bytes, global_rank: int) -> None:
        """Beside its stderr. Whoever wants to see the log of the agent sees everything, so nothing is held back there."""
        usual = next((copy for copy in files.copies if copy.number == 2), None)
        kept = os.path.join(os.path.dirname(files.error_file), "not_shown.log") if self._has_files and not path else ""
        copy = _Copy(
            number=2,
            console=2,
            prefix=prefix,
            file=_Sink.open(path, is_continued=True) if path else None,
            filtered=None if usual is None else usual.filtered,
            needles=() if usual is None else usual.needles,
            held=_Held(global_rank, kept),
            before=usual,
        )
        copy.descriptor, files.held_writer = os.pipe2(os.O_CLOEXEC)
        files.held_path = f"/proc/{os.getpid()}/fd/{files.held_writer}"
        os.set_blocking(copy.descriptor, False)
        files.copies.append(copy)
        self._pump.add(copy)

    def _prefix(self, local_rank: int, global_rank: int) -> bytes:
        template = string.Template(self._config.line_prefix or _DEFAULT_PREFIX)
        return template.safe_substitute(role_name=self._role, local_rank=local_rank, rank=global_rank).encode()


@dataclass
class _Sink:
    """A log file that stops taking bytes after its first error instead of ending the job."""

    path: str
    file: BinaryIO | None

    @classmethod
    def open(cls, path: str, *, is_continued: bool = False) -> _Sink:
        return cls(path, open(path, "ab" if is_continued else "wb", buffering=0))

    def write(self, data: bytes) -> None:
        if self.file is None:
            return
        try:
            write_all(self.file.fileno(), data)
        except OSError as error:
            _log.warning("%s cannot be written any more (%s); training goes on without it.", self.path, error.strerror)
            file, self.file = self.file, None
            with contextlib.suppress(OSError):  # for the same reason, which has been told
                file.close()

    def close(self) -> None:
        """A network file system may refuse only now what its cache has taken before (quota, full server)."""
        file, self.file = self.file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            _log.warning("%s may lack its last lines (%s).", self.path, error.strerror)


@dataclass(eq=False)
class _Held:
    """The last words of a worker, until it is known whether they are news."""

    global_rank: int
    kept_at: str
    """File for what the console does not get; empty: another file has it already, or none is wanted."""
    text: bytearray = field(default_factory=bytearray)
    since: float = 0.0
    """On the monotonic clock, when it began to speak; 0: it has not."""


@dataclass(eq=False)
class _Copy:
    """One pipe from a worker and where its bytes go. Belongs to the pump's thread once added."""

    number: int
    console: int | None
    prefix: bytes
    """Before each line on the console; empty: bytes are passed on as they come."""
    file: _Sink | None
    filtered: _Sink | None
    needles: tuple[bytes, ...]
    descriptor: int = -1
    tail: bytearray = field(default_factory=bytearray)
    line: bytearray = field(default_factory=bytearray)
    """The unfinished line of a prefixed stream."""
    has_begun_line: bool = False
    """Part of an overlong line is out already."""
    is_broken: bool = False
    """A bug of ours keeps its bytes from being passed on."""
    held: _Held | None = None
    """None: the console gets everything at once."""
    before: _Copy | None = None
    """The stream that this one goes on with."""

    def take(self, data: bytes) -> None:
        self.tail += data
        if len(self.tail) > 2 * TAIL_BYTES:
            del self.tail[:-TAIL_BYTES]
        if self.file is not None:
            self.file.write(data)
        if not self.prefix:
            self._show(data)
            return
        self.line += data
        *lines, rest = self.line.split(b"\n")
        out = bytearray()
        for line in lines:
            out += self._finished(bytes(line) + b"\n")
            self.has_begun_line = False
        if len(rest) > _CHUNK:
            out += self._finished(bytes(rest))
            self.has_begun_line, rest = True, bytearray()
        self.line = bytearray(rest)
        self._show(bytes(out))

    def finish(self) -> None:
        if self.line:
            self._show(self._finished(bytes(self.line)))
            self.line = bytearray()
        if self.file is not None:
            self.file.close()

    def _finished(self, line: bytes) -> bytes:
        shown = line if self.has_begun_line else self.prefix + line
        if self.filtered is not None and any(needle in line for needle in self.needles):
            self.filtered.write(shown)
        return shown

    def _show(self, data: bytes) -> None:
        if self.console is None or not data:
            return
        if self.held is not None:
            self.held.since = self.held.since or time.monotonic()
            self.held.text += data
            if len(self.held.text) > MAX_HELD_BYTES:
                self.settle(is_shown=True)
            return
        try:
            write_all(self.console, data)
        except OSError:
            self.console = None  # whoever read our console has gone; there is nobody left to tell

    def settle(self, *, is_shown: bool) -> None:
        """What was held goes to the console, and so does what follows; or neither does."""
        held, self.held = self.held, None
        if held is None:
            return
        if is_shown:
            self._show(bytes(held.text))
            return
        self.console = None
        if held.kept_at and held.text:
            with contextlib.suppress(OSError):  # a full disk; the job's events have the error itself
                with open(held.kept_at, "ab") as file:
                    file.write(held.text)


class _Pump:
    """
    The thread that copies. It starts with the first pipe and ends with `close`, and with nothing else: without it workers
    would soon wait for ever in the middle of a line. A stream that cannot be passed on is given up alone.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        """
        Guards `_calls`, the only thing both threads touch; a queue could not be waited for together with the pipes.
        """
        self._calls: list[Callable[[], object]] = []
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._held: list[_Copy] = []
        """With words that nobody has decided about, the oldest first. Of the pump's thread."""
        self._passing_on: tuple[float, float | None] = (0.0, None)
        """For how long, and since when just now, bytes are passed on. The other thread only reads it."""

    def seconds_passing_on(self) -> float:
        """How much of its time consoles and disks have taken so far."""
        seconds, since = self._passing_on
        return seconds if since is None else seconds + time.monotonic() - since

    def add(self, copy: _Copy) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="worker-output", daemon=True)
            self._thread.start()
        self._call(lambda: self._selector.register(copy.descriptor, selectors.EVENT_READ, copy))

    def drain(self, copies: Sequence[_Copy], then: Callable[[], None]) -> None:
        def now() -> None:
            for copy in copies:
                self._copy(copy)
            then()

        self._call(now)

    def drop(self, copies: Sequence[_Copy], sinks: Sequence[_Sink], then: Callable[[], None]) -> None:
        """Copy what is there and forget these pipes."""

        def now() -> None:
            for copy in copies:
                self._copy(copy)
                self._end(copy)
            for sink in sinks:
                sink.close()
            then()

        if copies or sinks:
            self._call(now)

    def settle_held(self, is_shown: Callable[[int], bool]) -> None:
        def now() -> None:
            ended = [copy for copy in self._held if copy.descriptor < 0]
            self._held = [copy for copy in self._held if copy.descriptor >= 0]
            for copy in ended:
                self._settle(copy, is_shown=copy.held is not None and is_shown(copy.held.global_rank))

        self._call(now)

    def close(self) -> None:
        if self._thread is not None:
            self._call(self._stop)
            self._thread.join(timeout=2.0)  # a blocked console must not keep the agent from leaving
            if self._thread.is_alive():
                return
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _stop(self) -> None:
        self._show_held(time.monotonic() + LONGEST_HELD)  # nobody will decide any more, and nothing is lost
        self._is_closing = True

    def _note_held(self, copy: _Copy) -> None:
        if copy.held is not None and copy.held.since and copy not in self._held:
            self._held.append(copy)

    def _show_held(self, now: float) -> None:
        """What was held for too long."""
        while self._held and (self._held[0].held is None or now >= self._held[0].held.since + LONGEST_HELD):
            self._settle(self._held.pop(0), is_shown=True)

    def _settle(self, copy: _Copy, *, is_shown: bool) -> None:
        with self._timed():
            copy.settle(is_shown=is_shown)

    def _call(self, function: Callable[[], object]) -> None:
        if self._thread is None:
            function()  # nothing has been copied yet, so there is nobody to share with
            return
        with self._lock:
            self._calls.append(function)
        with contextlib.suppress(BlockingIOError):  # full of wake-ups already
            os.write(self._wake_writer, b".")

    def _run(self) -> None:
        while not self._is_closing:
            overdue_at = self._held[0].held.since + LONGEST_HELD if self._held and self._held[0].held else None
            for key, _events in self._selector.select(None if overdue_at is None else overdue_at - time.monotonic()):
                if key.data is None:
                    os.read(self._wake_reader, 4096)
                else:
                    self._copy(key.data, at_most=1)
            self._work_off()
            self._show_held(time.monotonic())

    def _work_off(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:  # the edge of the thread: a bug in one request must not end it
                _log.exception("bug in the copying of the workers' output")

    def _copy(self, copy: _Copy, at_most: int = 64) -> None:
        try:
            self._read(copy, at_most)
        except Exception:  # the same
            _log.exception("a stream of the workers' cannot be read any more")
            self._end(copy)

    def _read(self, copy: _Copy, at_most: int) -> None:
        """Until nothing is there now. Bounded, so that one who prints without end does not starve the others."""
        for _ in range(at_most):
            if copy.descriptor < 0:
                return
            try:
                data = os.read(copy.descriptor, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._end(copy)
                return
            self._pass_on(copy, data)

    def _pass_on(self, copy: _Copy, data: bytes) -> None:
        if copy.is_broken:
            return  # still read: the worker would end by a closed pipe
        if copy.before is not None:
            self._copy(copy.before)  # what it had written before it changed over
        try:
            with self._timed():
                copy.take(data)
            self._note_held(copy)
        except Exception:  # the same
            copy.is_broken = True
            _log.exception("bug in the copying of the workers' output: the rest of a stream is not shown")

    def _end(self, copy: _Copy) -> None:
        if copy.descriptor < 0:
            return
        with contextlib.suppress(KeyError):  # dropped before it was ever registered
            self._selector.unregister(copy.descriptor)
        os.close(copy.descriptor)
        copy.descriptor = -1
        try:
            with self._timed():
                copy.finish()
        except Exception:  # the same
            _log.exception("bug at the end of a stream of the workers'")
        self._note_held(copy)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        seconds, since = self._passing_on[0], time.monotonic()
        self._passing_on = seconds, since
        try:
            yield
        finally:
            self._passing_on = seconds + time.monotonic() - since, None


def _read_tail(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read(TAIL_BYTES)
    except OSError:
        return b""
