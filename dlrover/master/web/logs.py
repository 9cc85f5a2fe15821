"""
The last lines of a log: the master's own from its file, a worker's from its agent, which is asked for it.

No path ever comes from outside: a log is named `master` or `worker-RANK`, and where its text lies only its owner knows. So it works for nodes
on other machines, and there is nothing to climb out of. Logs hold whatever programs print; what comes is cut, decoded with a mark for what is
no text, and freed of terminal control sequences.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Callable
from itertools import count

from msgspec import Struct

from dlrover.protocol.messages.job import Micros, NodeId
from dlrover.protocol.messages.watch import SendTail, TailSent, WatchObservation, WatchOrder

MAX_TAIL_BYTES = 64 * 1024
MAX_LINES = 1000
MAX_LINE = 2000
ANSWER_WITHIN = 5.0
"""Seconds that an agent has for its answer."""
MAX_WAITING = 32
_WORKER = re.compile(r"worker-([0-9]{1,9})")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b-\x1f\x7f]")


class NoLog(Exception):
    """There is no such log, or nothing of it now; says why."""


class BadName(ValueError):
    """Not the name of a log."""


class LogText(Struct, frozen=True, kw_only=True):
    name: str
    text: str
    note: str = ""
    """What a person should know about it: cut, from where, why it is empty."""


class LogReader:
    def __init__(
        self,
        master_log: str,
        *,
        order: Callable[[NodeId, WatchOrder], bool],
        workers: Callable[[], dict[int, NodeId]],
    ) -> None:
        """`workers`: on which node the worker of a global rank is now."""
        self._master_log = master_log
        self._order = order
        self._workers = workers
        self._ids = count(secrets.randbelow(2**40) + 1)  # agents do nothing twice, not even for two masters
        self._waiting: dict[int, tuple[NodeId, asyncio.Future[TailSent]]] = {}

    def names(self) -> list[str]:
        own = ["master"] if self._master_log else []
        return [*own, *(f"worker-{rank}" for rank in sorted(self._workers()))]

    async def read(self, name: str) -> LogText:
        """Raises NoLog or BadName."""
        if name == "master":
            return await asyncio.to_thread(self._read_master)
        found = _WORKER.fullmatch(name)
        if found is None:
            raise BadName("The name of a log is master, or worker- with a rank.")
        return await self._read_worker(name, int(found[1]))

    def observe(self, observation: WatchObservation, now: Micros) -> None:
        if not isinstance(observation, TailSent):
            return
        node, answer = self._waiting.get(observation.request, (None, None))
        if answer is not None and node == observation.node and not answer.done():
            answer.set_result(observation)

    async def _read_worker(self, name: str, rank: int) -> LogText:
        node = self._workers().get(rank)
        if node is None:
            raise NoLog(f"No worker of rank {rank} runs now.")
        if len(self._waiting) >= MAX_WAITING:
            raise NoLog("Too many logs are being read now. Try again in a moment.")
        request = next(self._ids)
        answer: asyncio.Future[TailSent] = asyncio.get_running_loop().create_future()
        self._waiting[request] = (node, answer)
        try:
            order = SendTail(request=request, global_rank=rank, max_bytes=MAX_TAIL_BYTES)
            if not self._order(node, WatchOrder(id=-request, expires_in=ANSWER_WITHIN, order=order)):
                raise NoLog(f"The node of rank {rank} is not connected now.")
            async with asyncio.timeout(ANSWER_WITHIN):
                tail = await answer
        except TimeoutError:
            raise NoLog(f"The agent of rank {rank} did not answer within {ANSWER_WITHIN:g} s.") from None
        finally:
            del self._waiting[request]
        return LogText(name=name, text=readable(tail.text), note=tail.note)

    def _read_master(self) -> LogText:
        if not self._master_log:
            raise NoLog("This master writes its log to standard error, so the page cannot show it.")
        try:
            with open(self._master_log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - MAX_TAIL_BYTES))
                data = file.read(MAX_TAIL_BYTES)
        except OSError as error:
            raise NoLog(f"The master's log cannot be read: {error.strerror}.") from error
        note = f"the last {len(data)} of {size} bytes" if size > len(data) else ""
        return LogText(name="master", text=readable(data.decode("utf-8", "replace")), note=note)


def readable(text: str) -> str:
    """What can be shown: without control sequences, lines of a bearable length, the last of them."""
    lines = _CONTROL.sub("", text).split("\n")[-MAX_LINES:]
    return "\n".join(
        line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} … ({len(line)} characters)" for line in lines
    )
