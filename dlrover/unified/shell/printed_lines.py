"""What the user's code prints in an actor: to Ray's own log as always, and line by line to the job's conductor, which shows it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from typing import Any, TextIO

import msgspec

WAIT = 5.0
"""Seconds after which a question is answered without lines."""
MAX_LINES = 2000
"""That wait to be taken. The oldest are dropped: nothing may hold the user's code up."""


class PrintedLines:
    """From now on, of this process. Made in the actor's event loop."""

    def __init__(self) -> None:
        self._lines: deque[tuple[bytes, bool]] = deque(maxlen=MAX_LINES)
        self._has_lines = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        sys.stdout = _Tee(sys.stdout, self, is_error=False)
        sys.stderr = _Tee(sys.stderr, self, is_error=True)

    async def take(self) -> bytes:
        if not self._lines:
            self._has_lines.clear()
            try:
                async with asyncio.timeout(WAIT):
                    await self._has_lines.wait()
            except TimeoutError:
                pass
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return msgspec.msgpack.encode(lines)

    def add(self, line: bytes, *, is_error: bool) -> None:
        """From any thread."""
        self._lines.append((line, is_error))
        self._loop.call_soon_threadsafe(self._has_lines.set)


class _Tee:
    def __init__(self, stream: TextIO, lines: PrintedLines, *, is_error: bool) -> None:
        self._stream = stream
        self._lines = lines
        self._is_error = is_error
        self._part = threading.local()  # each thread ends its own lines

    def write(self, text: str) -> int:
        *whole, rest = (getattr(self._part, "text", "") + text).split("\n")
        self._part.text = rest
        for line in whole:
            self._lines.add(f"{line}\n".encode(errors="replace"), is_error=self._is_error)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


LINES = msgspec.msgpack.Decoder(list[tuple[bytes, bool]])
