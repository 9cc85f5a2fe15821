from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from dlrover.cli import console
from dlrover.cli.console import MAX_HELD, say_block


class Pipe(NamedTuple):
    reader: int
    writer: int

    def fill(self) -> None:
        os.set_blocking(self.writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.writer, b"." * 4096)
        os.set_blocking(self.writer, True)

    def read(self) -> list[str]:
        return os.read(self.reader, 1 << 20).decode().lstrip(".").splitlines()


@contextlib.contextmanager
def piped_console() -> Iterator[Pipe]:
    """No fixture: pytest puts its own console back before the test begins."""
    reader, writer = os.pipe()
    former = sys.stderr
    with os.fdopen(writer, "w") as sys.stderr:
        yield Pipe(reader, writer)
    sys.stderr = former
    with contextlib.suppress(OSError):
        os.close(reader)


say = functools.partial(console.say, patience=0.01)


def test_a_console_that_takes_nothing_keeps_nobody_and_hears_all_of_it_later() -> None:
    with piped_console() as pipe:
        pipe.fill()
        say("one")
        say("two")
        assert pipe.read() == []
        say("three")
        assert pipe.read() == [f"dlrover-run: {text}" for text in ("one", "two", "three")]


def test_only_so_much_is_held_and_the_last_word_comes_last() -> None:
    with piped_console() as pipe:
        pipe.fill()
        for number in range(MAX_HELD + 5):
            say(str(number))
        assert pipe.read() == []
        say_block("the end")
        assert pipe.read() == [*(f"dlrover-run: {number}" for number in range(5, MAX_HELD + 5)), "the end"]


def test_a_console_that_is_gone_ends_nothing() -> None:
    with piped_console() as pipe:
        pipe.fill()
        say("held")
        os.close(pipe.reader)
        say("into the void")
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.close()
        say("to a file that is closed")
        say_block("the same")
