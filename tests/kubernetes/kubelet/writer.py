"""
Statuses of one pod on their way to the API server: in order, each whole, as late as the node's fault says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.kubernetes.kubelet.client import ApiError, Body
from tests.kubernetes.kubelet.host import Host
from tests.kubernetes.kubelet.status import Verdict, timestamp

Change = Callable[[Body], Body]
_RETRY = 0.2


class StatusWriter:
    """`run` is its task. What cannot be written now is written later; of several that wait the newest counts."""

    def __init__(self, host: Host, path: str, uid: str) -> None:
        self._host = host
        self._path = path
        self._uid = uid
        self._waiting: asyncio.Queue[Change] = asyncio.Queue()
        self._is_closed = False

    def write(self, change: Change) -> None:
        if not self._is_closed:
            self._waiting.put_nowait(change)

    def write_rejection(self, verdict: Verdict) -> None:
        """All that a kubelet writes of a pod that it does not take."""

        def change(before: Body) -> Body:
            now = before.get("startTime") or timestamp(self._host.now())
            return {**before, "phase": "Failed", "reason": verdict.reason, "message": verdict.message, "startTime": now}

        self.write(change)

    def close(self) -> None:
        """The object is gone; what waits is dropped."""
        self._is_closed = True

    async def flush(self) -> None:
        await self._waiting.join()

    async def run(self) -> None:
        while True:
            change = await self._waiting.get()
            if self._host.lateness:
                await asyncio.sleep(self._host.lateness)
            while not self._is_closed:
                try:
                    written = await self._host.cluster.change_status(self._path, self._uid, change)
                    if written is None:
                        self.close()
                    break
                except ApiError:
                    await asyncio.sleep(_RETRY)
                    while not self._waiting.empty():
                        self._waiting.task_done()
                        change = self._waiting.get_nowait()
            self._waiting.task_done()
