"""
A master that stops at a line, for tests of what it may still do when it goes on: `python -m ... KUBECONFIG JOB`.

It reads orders as JSON lines and answers each with one. An order names an intent and the line, counted while the
platform and its ledger work on it, at which the process stops itself by SIGSTOP.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from dlrover.platforms.base import Intent, StaleMaster
from dlrover.platforms.kubernetes import ledger, platform
from dlrover.platforms.kubernetes.access import find_access
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.platforms.kubernetes.platform import PodPlatform
from dlrover.platforms.kubernetes.pods import PodJob
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.fleet import LaunchNode, NodesListed, RemoveNode

FILES = (ledger.__file__, platform.__file__)
STEPS = (
    *("apply", "_launch", "_create", "_meet", "_remove", "_find", "_delete"),
    *("enter", "_submit", "_begin", "_write_all", "_linger", "_write", "_reread", "_put", "read", "learn"),
    *("carrying_out", "close_launch"),
)
"""Functions of the two files that an intent goes through. What they calculate with does nothing outside."""


class Order(msgspec.Struct):
    intent: LaunchNode | RemoveNode
    stop_at: int = 0
    """0: at no line."""


class Answer(msgspec.Struct):
    result: str
    num_lines: int


def line_counter(stop_at: int, count: list[int]) -> Callable[[FrameType, str, object], object]:
    def trace(frame: FrameType, event: str, argument: object) -> object:
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name not in STEPS:
            return None
        if event == "line":
            count[0] += 1
            if count[0] == stop_at:
                os.kill(os.getpid(), signal.SIGSTOP)
        return trace

    return trace


async def obey(pods: PodPlatform, order: Order) -> Answer:
    count = [0]
    sys.settrace(line_counter(order.stop_at, count))
    intent: Intent = order.intent
    try:
        await pods.apply(intent)
        result = "done"
    except (StaleMaster, Rejected, Unavailable) as error:
        result = f"{type(error).__name__}: {error}"
    finally:
        sys.settrace(None)
    return Answer(result, count[0])


async def main() -> None:
    job = msgspec.json.decode(sys.argv[2], type=PodJob)
    pods = PodPlatform(ClusterApi(find_access({}, kubeconfig=Path(sys.argv[1]))), job)
    sights = pods.watch()
    first = await anext(sights)
    assert isinstance(first, NodesListed)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("ready", flush=True)
    while line := await reader.readline():
        answer = await obey(pods, msgspec.json.decode(line, type=Order))
        print(msgspec.json.encode(answer).decode(), flush=True)
    await pods.close()


if __name__ == "__main__":
    asyncio.run(main())
