from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dlrover.agent.config import WorkerLogConfig
from dlrover.agent.workers.output import LONGEST, TAIL_BYTES, WorkerFiles, WorkerOutput
from dlrover.agent.workers.stream_copies import LONGEST_HELD, MAX_HELD_BYTES
from dlrover.protocol.errors import ConfigError
from tests.agent.lab import DEADLINE, descriptors, until

Maker = Callable[..., WorkerOutput]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Maker]:
    made: list[WorkerOutput] = []

    def make(
        *,
        patience: float = DEADLINE,
        longest: float = LONGEST,
        longest_held: float = LONGEST_HELD,
        max_held_bytes: int = MAX_HELD_BYTES,
        **config: Any,
    ) -> WorkerOutput:
        runtime_dir = tmp_path / "runtime"
        runtime_dir.mkdir(exist_ok=True)
        output = WorkerOutput(
            WorkerLogConfig(**config),
            role="trainer",
            run_id="run/1",
            runtime_dir=str(runtime_dir),
            patience=patience,
            longest=longest,
            longest_held=longest_held,
            max_held_bytes=max_held_bytes,
        )
        made.append(output)
        return output

    yield make
    for output in made:
        output.close()


def say(files: WorkerFiles, out: str = "", err: str = "") -> None:
    """What a worker would print."""
    os.write(files.stdout, out.encode())
    os.write(files.stderr, err.encode())


def tree_of(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


async def test_without_options_both_streams_reach_the_console_and_errors_are_kept(
    make: Maker, capfd: pytest.CaptureFixture[str]
) -> None:
    output = make()
    zero, one = output.open_attempt(0, [4, 5])
    say(zero, "hello\n", "oh no\n")
    say(one, "there\n")
    await output.drain(zero)
    assert (zero.tail(), one.tail()) == ("oh no\n", "")
    await output.close_attempt()
    assert capfd.readouterr() == ("hello\nthere\n", "oh no\n")
    assert output.log_dir == ""
    assert zero.log_file == ""


async def test_redirects_go_to_torchruns_files(make: Maker, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = make(log_dir=str(tmp_path / "logs"), redirects={0: 3, 1: 2})
    zero, one = output.open_attempt(2, [0, 1])
    say(zero, "out0\n", "err0\n")
    say(one, "out1\n", "err1\n")
    assert zero.tail() == "err0\n"
    await output.close_attempt()
    assert capfd.readouterr() == ("out1\n", "")
    assert os.path.basename(output.log_dir).startswith("run_1_")
    assert tree_of(Path(output.log_dir)) == [
        "attempt_2/0/stderr.log",
        "attempt_2/0/stdout.log",
        "attempt_2/1/stderr.log",
    ]
    assert Path(zero.log_file).read_text() == "err0\n"
    assert zero.error_file == os.path.join(output.log_dir, "attempt_2", "0", "error.json")


async def test_tee_writes_files_and_prefixed_lines(
    make: Maker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = make(log_dir=str(tmp_path), tee_default=3)
    (zero,) = output.open_attempt(0, [7])
    say(zero, "one\ntw", "bad\n")
    await output.drain(zero)
    assert capfd.readouterr() == ("[trainer0]:one\n", "[trainer0]:bad\n")
    say(zero, "o\n\nend")
    await output.close_attempt()
    assert capfd.readouterr().out == "[trainer0]:two\n[trainer0]:\n[trainer0]:end"
    stdout = Path(output.log_dir, "attempt_0", "0", "stdout.log")
    assert stdout.read_text() == "one\ntwo\n\nend"


async def test_the_prefix_template_of_torchrun(make: Maker, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = make(log_dir=str(tmp_path), tee_default=1, line_prefix="<${role_name} ${rank}/${local_rank} ${x}>")
    (zero,) = output.open_attempt(0, [7])
    say(zero, "a\n")
    await output.close_attempt()
    assert capfd.readouterr().out == "<trainer 7/0 ${x}>a\n"


async def test_filtered_ranks_keep_silent_but_keep_their_files_and_tails(
    make: Maker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = make(log_dir=str(tmp_path), tee={1: 1, 2: 1}, local_ranks_filter=(1,))
    zero, one, two = output.open_attempt(0, [0, 1, 2])
    for files in (zero, one, two):
        say(files, f"out{files.local_rank}\n", f"err{files.local_rank}\n")
    await output.close_attempt()
    assert capfd.readouterr() == ("[trainer1]:out1\n", "err1\n")
    assert zero.tail() == "err0\n"
    assert Path(output.log_dir, "attempt_0", "2", "stdout.log").read_text() == "out2\n"


async def test_lines_that_match_are_collected_over_all_ranks(
    make: Maker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = make(log_dir=str(tmp_path), tee_default=3, duplicate_stdout_filters=("loss", "acc"))
    zero, one = output.open_attempt(0, [0, 1])
    say(zero, "loss 3\nnoise\n", "loss on stderr\n")
    say(one, "acc 1\n")
    await output.close_attempt()
    filtered = Path(output.log_dir, "attempt_0", "filtered_stdout.log").read_text()
    assert sorted(filtered.splitlines()) == ["[trainer0]:loss 3", "[trainer1]:acc 1"]
    assert not Path(output.log_dir, "attempt_0", "filtered_stderr.log").exists()
    assert "[trainer0]:noise" in capfd.readouterr().out


async def test_filters_without_tee_make_empty_files_and_leak_nothing(make: Maker, tmp_path: Path) -> None:
    output = make(log_dir=str(tmp_path), redirect_default=3, duplicate_stderr_filters=("x",))
    before = descriptors()
    for attempt in range(3):
        output.open_attempt(attempt, [0])
        await output.close_attempt()
    assert descriptors() <= before
    assert Path(output.log_dir, "attempt_2", "filtered_stderr.log").read_text() == ""


async def test_only_the_tail_of_long_output_is_kept(make: Maker, capfd: pytest.CaptureFixture[str]) -> None:
    output = make()
    (zero,) = output.open_attempt(0, [0])
    for number in range(400):
        os.write(zero.stderr, b"%04d" % number + b"x" * 1019 + b"\n")
    await output.drain(zero)
    assert TAIL_BYTES <= len(zero.tail()) <= 2 * TAIL_BYTES
    assert zero.tail().endswith("x\n")
    assert "0399" in zero.tail()
    await output.close_attempt()
    assert len(capfd.readouterr().err) == 400 * 1024


async def test_an_endless_line_is_passed_on_in_pieces(
    make: Maker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = make(log_dir=str(tmp_path), tee_default=1)
    (zero,) = output.open_attempt(0, [0])
    for _ in range(40):
        os.write(zero.stdout, b"x" * 4096)
    await output.drain(zero)
    os.write(zero.stdout, b"\nnext\n")
    await output.close_attempt()
    shown = capfd.readouterr().out
    assert shown == "[trainer0]:" + "x" * 40 * 4096 + "\n[trainer0]:next\n"


async def test_a_process_that_keeps_the_pipe_open_does_not_keep_the_agent_waiting(
    make: Maker, capfd: pytest.CaptureFixture[str]
) -> None:
    output = make()
    (zero,) = output.open_attempt(0, [0])
    held = os.dup(zero.stderr)
    say(zero, "", "last words\n")
    zero.close_descriptors()
    await asyncio.wait_for(output.drain(zero), DEADLINE / 2)
    await asyncio.wait_for(output.close_attempt(), DEADLINE / 2)
    assert zero.tail() == "last words\n"
    os.close(held)
    assert capfd.readouterr().err == "last words\n"


async def test_the_last_words_are_waited_for_while_nobody_runs_the_thread_that_copies_them(
    make: Maker, capfd: pytest.CaptureFixture[str]
) -> None:
    """A busy machine is no console that takes no bytes; and a failure is judged by these words."""
    output = make(patience=0.05)
    (zero,) = output.open_attempt(0, [0])
    may_run = threading.Event()
    output._pump._call(may_run.wait)
    say(zero, "", "last words\n")
    draining = asyncio.create_task(output.drain(zero))
    done, _ = await asyncio.wait([draining], timeout=0.2)
    assert not done
    may_run.set()
    await asyncio.wait_for(draining, DEADLINE)
    assert zero.tail() == "last words\n"


@pytest.mark.parametrize("is_blocked_before", [True, False])
async def test_a_console_that_takes_no_bytes_ends_the_wait(
    make: Maker,
    full_pipe: tuple[int, int],
    caplog: pytest.LogCaptureFixture,
    is_blocked_before: bool,
) -> None:
    output = make(patience=0.05, longest=2 * DEADLINE)
    (zero,) = output.open_attempt(0, [0])
    zero.copies[0].console = full_pipe[1]
    say(zero, "", "last words\n")
    if is_blocked_before:
        await until(lambda: zero.tail())
    await asyncio.wait_for(output.drain(zero), DEADLINE / 2)
    await asyncio.wait_for(output.close_attempt(), DEADLINE / 2)
    assert zero.tail() == "last words\n"
    assert caplog.text.count("the console accepts no more") == 2
    while os.read(full_pipe[0], 65536)[-11:] != b"last words\n":
        pass
    os.close(full_pipe[1])


async def test_attempts_follow_each_other_and_leak_nothing(make: Maker, capfd: pytest.CaptureFixture[str]) -> None:
    output = make()
    before = descriptors()
    for attempt in range(5):
        for files in output.open_attempt(attempt, [0, 1]):
            say(files, "", f"{attempt}\n")
            files.close_descriptors()
        await output.close_attempt()
    assert descriptors() <= before
    attempts = os.listdir(os.path.dirname(os.path.dirname(os.path.dirname(files.error_file))))
    assert sorted(attempts) == ["attempt_3", "attempt_4"]
    assert capfd.readouterr().err.splitlines() == ["0", "0", "1", "1", "2", "2", "3", "3", "4", "4"]


async def test_an_attempt_that_finds_too_few_descriptors_leaks_none(make: Maker, tmp_path: Path) -> None:
    """Whichever of its files and pipes is the first that cannot be opened."""
    output = make(log_dir=str(tmp_path / "logs"), tee_default=3)
    output.open_attempt(0, [0])
    await output.close_attempt()
    before, limits = descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
    num_failed, attempt, is_enough = 0, 0, False
    while not is_enough:
        attempt += 1
        assert attempt < 40 + len(os.listdir("/proc/self/fd")), "one attempt does not need so many"
        resource.setrlimit(resource.RLIMIT_NOFILE, (_first_free() + attempt, limits[1]))
        try:
            output.open_attempt(attempt, [0, 1])
            is_enough = True
        except ConfigError:
            num_failed += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await output.close_attempt()
        await until(lambda: descriptors() <= before)
    assert num_failed > 5


def _first_free() -> int:
    """Descriptors are numbers up to the limit: the lowest that is not in use."""
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


async def test_files_without_a_directory_go_to_a_new_one(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    output = make(redirect_default=1)
    output.open_attempt(0, [0])
    assert output.log_dir.startswith(f"{tmp_path}/dlrover_logs_")


async def test_dev_null_as_directory_means_no_files(make: Maker, capfd: pytest.CaptureFixture[str]) -> None:
    output = make(log_dir=os.devnull, redirect_default=3)
    (zero,) = output.open_attempt(0, [0])
    say(zero, "shown\n")
    await output.close_attempt()
    assert capfd.readouterr().out == "shown\n"
    assert output.log_dir == ""


async def test_a_log_directory_that_cannot_be_used_is_a_clear_error(make: Maker, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(
        ConfigError, match=r"log files cannot be created under .*file/logs: Not a directory .*--log-dir"
    ):
        make(log_dir=str(blocker / "logs"), redirect_default=3).open_attempt(0, [0])


async def test_a_full_disk_is_told_once_and_the_console_goes_on(
    make: Maker, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    output = make(log_dir=str(tmp_path), tee_default=1)
    (zero,) = output.open_attempt(0, [0])
    copy = zero.copies[0]
    assert copy.file is not None
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), copy.file.file.fileno())  # the disk behind the file runs full
    for number in range(3):
        say(zero, f"{number}\n")
        await output.drain(zero)
    assert capfd.readouterr().out == "[trainer0]:0\n[trainer0]:1\n[trainer0]:2\n"
    told = [record.getMessage() for record in caplog.records if "written" in record.getMessage()]
    path = f"{output.log_dir}/attempt_0/0/stdout.log"
    assert told == [f"{path} can no longer be written (No space left on device). Training continues without this log."]


class OverQuota:
    """A file whose bytes were taken by the cache and refused by the server when it is closed."""

    def __init__(self, file: Any, *, takes_bytes: bool) -> None:
        self._file = file
        self._takes_bytes = takes_bytes

    def fileno(self) -> int:
        if not self._takes_bytes:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


@pytest.mark.parametrize("takes_bytes", [True, False])
async def test_a_file_that_cannot_be_closed_does_not_end_the_copying(
    make: Maker,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    *,
    takes_bytes: bool,
) -> None:
    output = make(log_dir=str(tmp_path), tee_default=3)
    for attempt in range(2):
        (zero,) = output.open_attempt(attempt, [0])
        for copy in zero.copies[:2]:
            copy.file.file = OverQuota(copy.file.file, takes_bytes=takes_bytes)
        say(zero, f"out{attempt}\n", f"err{attempt}\n")
        await output.close_attempt()
        assert capfd.readouterr() == (f"[trainer0]:out{attempt}\n", f"[trainer0]:err{attempt}\n")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 4
    assert all("stdout.log" in text or "stderr.log" in text for text in told)
    assert all("Disk quota exceeded" in text for text in told)


@pytest.mark.parametrize("breaks", ["take", "finish"])
async def test_one_stream_that_cannot_be_copied_does_not_end_the_copying_of_the_others(
    make: Maker, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, breaks: str
) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("a bug of ours")

    output = make(tee_default=0)
    zero, one = output.open_attempt(0, [0, 1])
    setattr(zero.copies[0], breaks, fail)
    say(zero, "", "who knows\n")
    await output.drain(zero)
    say(zero, "", "who knows\n")  # its pipe is still read
    say(one, "", "first\n")
    await output.close_attempt()
    (zero,) = output.open_attempt(1, [0])
    say(zero, "", "second\n")
    await output.close_attempt()
    assert capfd.readouterr().err.splitlines()[-2:] == ["first", "second"]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [RuntimeError]
    assert not [record for record in caplog.records if "console" in record.getMessage()]


def test_a_console_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, sys
from dlrover.agent.config import WorkerLogConfig
from dlrover.agent.workers.output import WorkerOutput
async def main():
    output = WorkerOutput(WorkerLogConfig(), role="r", run_id="i", runtime_dir={str(tmp_path)!r}, patience={DEADLINE})
    (files,) = output.open_attempt(0, [0])
    for _ in range(3):
        os.write(files.stderr, b"into the void\\n")
        await output.drain(files)
    await output.close_attempt()
    output.close()
    print(len(files.tail()))
asyncio.run(main())
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=writer, stdout=subprocess.PIPE, timeout=DEADLINE, check=False, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, "42\n")


# What a worker says of a peer that is gone.

BEFORE, TRACEBACK = "before\n", "Traceback (most recent call last):\nRuntimeError: Connection closed by peer\n"


def lament(files: WorkerFiles) -> None:
    """As a worker does it whose peer is gone: the rest of its stderr goes elsewhere."""
    say(files, "", BEFORE)
    descriptor = os.open(files.held_path, os.O_WRONLY)
    os.dup2(descriptor, files.stderr)
    os.close(descriptor)
    os.write(files.stderr, TRACEBACK[:20].encode())
    os.write(files.stderr, TRACEBACK[20:].encode())


@pytest.mark.parametrize("config", [{}, {"tee_default": 3}])
async def test_of_two_workers_that_lost_a_peer_only_the_one_that_failed_first_says_so_on_the_console(
    make: Maker, tmp_path: Path, capfd: pytest.CaptureFixture[str], config: dict[str, Any]
) -> None:
    output = make(log_dir=str(tmp_path), **config)
    workers = output.open_attempt(0, [4, 5])
    for files in workers:
        lament(files)
        await output.drain(files)
        assert files.tail() == BEFORE + TRACEBACK, "the failure is judged by it at once"
    prefixes = ["[trainer0]:", "[trainer1]:"] if config else ["", ""]
    assert sorted(capfd.readouterr().err.splitlines()) == [f"{prefix}before" for prefix in prefixes]
    await output.close_attempt()
    assert capfd.readouterr().err == ""
    output.settle_held(lambda rank: rank == 5)
    wanted = "".join(f"{prefixes[1]}{line}\n" for line in TRACEBACK.splitlines())
    await until(lambda: os.fstat(2).st_size >= len(wanted))  # `capfd` loses what is written while it reads
    assert capfd.readouterr().err == wanted
    own = Path(output.log_dir, "attempt_0", "0")
    if config:
        assert (own / "stderr.log").read_text() == BEFORE + TRACEBACK
        assert (own.parent / "1" / "stderr.log").read_text() == BEFORE + TRACEBACK
    else:
        assert (own / "not_shown.log").read_text() == TRACEBACK


async def test_what_nobody_decides_about_is_shown_in_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = WorkerOutput(WorkerLogConfig(), role="trainer", run_id="run", runtime_dir=str(tmp_path))
    (zero,) = output.open_attempt(0, [0])
    lament(zero)
    output.settle_held(lambda _rank: False)  # about workers that are gone, and this one is not
    await output.close_attempt()
    assert capfd.readouterr().err == BEFORE
    output.close()
    assert capfd.readouterr().err == TRACEBACK


@pytest.mark.parametrize("limit", [{"longest_held": 0.05}, {"longest_held": 2 * DEADLINE, "max_held_bytes": 10}])
async def test_nothing_is_held_for_too_long_or_too_much_of_it(
    make: Maker, capfd: pytest.CaptureFixture[str], limit: dict[str, Any]
) -> None:
    """A worker may hang after its last words, or not stop to speak."""
    output = make(**limit)
    (zero,) = output.open_attempt(0, [0])
    lament(zero)
    await until(lambda: os.fstat(2).st_size >= len(BEFORE + TRACEBACK))  # `capfd` loses what is written while it reads
    assert capfd.readouterr().err == BEFORE + TRACEBACK
    os.write(zero.stderr, b"and more")
    await output.close_attempt()
    assert capfd.readouterr().err == "and more"


async def test_whoever_reads_the_log_of_the_agent_reads_everything(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (zero,) = make().open_attempt(0, [0])
    assert zero.held_path == ""


async def test_a_stream_that_goes_to_a_file_only_is_left_alone(make: Maker, tmp_path: Path) -> None:
    hidden = make(log_dir=str(tmp_path), redirect_default=3).open_attempt(0, [0])
    filtered = make(local_ranks_filter=(1,)).open_attempt(0, [0])
    assert [files.held_path for files in (*hidden, *filtered)] == ["", ""]
