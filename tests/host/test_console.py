from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dlrover.host.console import ConsoleHandler, ConsoleWriter

LINE = "x" * 99


def log_to(handler: logging.Handler) -> logging.Logger:
    log = logging.Logger("a-log-of-its-own")  # not below the root
    log.addHandler(handler)
    return log


def read_rest(reader: int, writer: int, handler: logging.Handler) -> list[str]:
    """All that is logged to the full pipe."""
    with ThreadPoolExecutor() as pool, os.fdopen(os.dup(reader)) as file:
        text = pool.submit(file.read)
        handler.flush()
        os.close(writer)
        return text.result().lstrip(".").splitlines()


def test_a_console_that_takes_nothing_does_not_keep_the_one_who_logs(full_pipe: tuple[int, int]) -> None:
    handler = ConsoleHandler(full_pipe[1], held_bytes=10_050, patience=30.0)
    log = log_to(handler)
    for _ in range(1000):
        log.warning(LINE)
    log.warning("a short one has room")
    log.warning(LINE)
    *shown, loss, short, last = read_rest(*full_pipe, handler)
    assert shown == [LINE] * 100
    assert loss == "lines of the log are missing here, because the console accepted no output for too long: 900"
    assert short == "a short one has room"
    assert last.endswith("too long: 1")


def test_the_end_of_a_process_does_not_wait_for_a_console_that_takes_nothing(full_pipe: tuple[int, int]) -> None:
    handler = ConsoleHandler(full_pipe[1], patience=0.01)
    log_to(handler).warning(LINE)
    handler.flush()
    handler._patience = 30.0
    assert read_rest(*full_pipe, handler) == [LINE]  # it was not thrown away


def test_nothing_is_lost_at_the_end_of_a_process() -> None:
    code = """
import logging, os
from dlrover.host.console import ConsoleHandler, ConsoleWriter
logging.basicConfig(handlers=[ConsoleHandler(patience=30.0)], format="said: %(message)s")
for number in range(5000):
    logging.warning("%d caf\\udce9", number)
logging.shutdown()
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=30, check=True)
    assert done.stderr.decode().splitlines() == [f"said: {number} caf\\udce9" for number in range(5000)]


def test_a_console_that_is_gone_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = ConsoleHandler(writer, patience=30.0)
    log = log_to(handler)
    for _ in range(3):
        log.warning("into the void")
        handler.flush()
    os.close(writer)


def test_a_text_longer_than_all_that_is_held_is_written(full_pipe: tuple[int, int]) -> None:
    handler = ConsoleHandler(full_pipe[1], held_bytes=10, patience=30.0)
    log_to(handler).warning(LINE)
    assert read_rest(*full_pipe, handler) == [LINE]


def test_where_no_thread_can_be_started_the_lines_are_written_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without processes is what there may be to tell of."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reader, writer = os.pipe()
    handler = ConsoleHandler(writer, patience=30.0)
    log = log_to(handler)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        log.warning("one")
        log.warning("two")
        handler.flush()
    assert os.read(reader, 100) == b"one\ntwo\n"
    log.warning("by a thread again")
    assert read_rest(reader, writer, handler) == ["by a thread again"]
    os.close(reader)


def test_whoever_waits_for_room_is_told_once_and_at_once_where_there_is_room(full_pipe: tuple[int, int]) -> None:
    writer = ConsoleWriter()
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    writer.when_held(0, lambda: told.put("empty"))
    assert told.get_nowait() == "empty"
    for _ in range(10):
        writer.write(full_pipe[1], LINE.encode())
    writer.when_held(500, lambda: told.put("half"))
    writer.when_held(0, lambda: told.put("all"))
    assert told.empty()
    with ThreadPoolExecutor() as pool, os.fdopen(os.dup(full_pipe[0])) as file:
        text = pool.submit(file.read)
        writer.flush(30.0)
        os.close(full_pipe[1])
        assert text.result().lstrip(".") == LINE * 10
    assert (told.get(timeout=30), told.get(timeout=30)) == ("half", "all")
    assert told.empty()
