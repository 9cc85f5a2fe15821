"""
What workers print: to the console, into files, and the last of it kept for the report of a failure.

Options, file names and line prefixes are torchrun's. Unlike there a stream that goes to the console and is kept as
well passes through a pipe of ours instead of a file that is polled. One thread copies all of them, because a console
that does not take its bytes must block the worker that prints and not the agent's event loop.

A worker that fails because another one is gone writes its traceback before the agent knows that. It therefore writes the last
of its stderr, from that traceback on, into a pipe of its own (`WorkerFiles.held_path`). Files get it at once; the console gets
it when the agent says that this worker is the one that failed first, or when no decision has come within `stream_copies.LONGEST_HELD`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import string
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dlrover.agent.config import Streams, WorkerLogConfig
from dlrover.agent.workers.stream_copies import (
    LONGEST_HELD,
    MAX_HELD_BYTES,
    TAIL_BYTES,
    Copy,
    HeldWords,
    Pump,
    Sink,
)
from dlrover.protocol.errors import ConfigError

_log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds for a console to take what is left: a failure that waits to be reported is worth more than its last lines."""
LONGEST = 10.0
"""Seconds in all, for a machine that is too busy to run the thread that copies: the failure is judged by those lines."""
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
    copies: list[Copy] = field(default_factory=list)
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
            return "", (
                "no output yet, or the worker prints straight to the console. To keep a log, start the job with --tee 3"
            )
        share = max_bytes // len(parts)
        texts = [raw[-share:].decode("utf-8", "replace") for _, raw in parts]
        if len(parts) == 1:
            return texts[0], parts[0][0]
        headed = [f"--- {name} ---\n{text}" for (name, _), text in zip(parts, texts, strict=True)]
        return "\n".join(headed), " and ".join(name for name, _ in parts)


class WorkerOutput:
    """Console and log files of this node's workers, over all attempts."""

    def __init__(
        self,
        config: WorkerLogConfig,
        *,
        role: str,
        run_id: str,
        runtime_dir: str,
        patience: float = PATIENCE,
        longest: float = LONGEST,
        longest_held: float = LONGEST_HELD,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        self._config = config
        self._longest = longest
        self._patience = patience
        self._role = role
        self._run_id = run_id
        self._runtime_dir = runtime_dir
        self._run_dir = ""
        self._pump = Pump(longest_held=longest_held)
        self._max_held_bytes = max_held_bytes
        self._current: list[WorkerFiles] = []
        self._filtered: dict[int, Sink] = {}

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
            return "", "this worker's output is not open now"
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
        used_before, ends_at = self._pump.seconds_passing_on(), loop.time() + max(self._patience, self._longest)
        while not is_done.is_set():
            used = self._pump.seconds_passing_on() - used_before
            left = min(self._patience - used, ends_at - loop.time())
            if left <= 0:
                _log.warning("The rest of the workers' output is lost, because the console accepts no more.")
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

    def _open_filtered(self, directory: str) -> dict[int, Sink]:
        if not self._has_files:
            return {}
        wanted = {1: self._config.duplicate_stdout_filters, 2: self._config.duplicate_stderr_filters}
        names = {1: "filtered_stdout.log", 2: "filtered_stderr.log"}
        return {
            number: Sink.open(os.path.join(directory, names[number])) for number, needles in wanted.items() if needles
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
            self._pump.drop(files.copies, [], lambda: None)
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
        file = Sink.open(path) if path else None
        try:
            reader, writer = os.pipe()
        except OSError:
            if file is not None:
                file.close()
            raise
        copy = Copy(
            number=number,
            console=number if is_shown else None,
            prefix=prefix,
            file=file,
            filtered=self._filtered.get(number) if is_teed else None,
            needles=tuple(os.fsencode(needle) for needle in needles),
        )
        copy.descriptor = reader
        os.set_blocking(reader, False)
        files.copies.append(copy)
        self._pump.add(copy)
        return writer

    def _open_held(self, files: WorkerFiles, path: str, prefix: bytes, global_rank: int) -> None:
        """Beside its stderr. A person who wants to see the log of the agent sees everything, so nothing is held back there."""
        usual = next((copy for copy in files.copies if copy.number == 2), None)
        kept = os.path.join(os.path.dirname(files.error_file), "not_shown.log") if self._has_files and not path else ""
        copy = Copy(
            number=2,
            console=2,
            prefix=prefix,
            file=Sink(path, None, is_continued=True) if path else None,
            filtered=None if usual is None else usual.filtered,
            needles=() if usual is None else usual.needles,
            held=HeldWords(global_rank, kept, self._max_held_bytes),
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


def _read_tail(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read(TAIL_BYTES)
    except OSError:
        return b""
