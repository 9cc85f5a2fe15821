"""
What comes in to a virtual master and waits for its next turn, with room for a bounded number of requests.
"""

from __future__ import annotations

from dlrover.core.outcome import Origin
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.messages.checkpoint import AwaitSaveDuties
from dlrover.protocol.messages.cluster import AskCluster
from dlrover.protocol.messages.frames import Refusal, Request
from dlrover.protocol.messages.job import MAX_REQUESTS_IN_WORK, Attach, Command, MasterStarted, Query
from dlrover.protocol.messages.kv import KvQuery
from dlrover.protocol.messages.sync import SyncQuery
from dlrover.simulator.parts import MasterPart, VirtualLine, VirtualWork

SERVICE_TIME = 0.0005


class VirtualInbox:
    """Of one master."""

    def __init__(self, master: MasterPart) -> None:
        self._master = master
        self._works: list[VirtualWork] = []
        self._num_in_work = 0
        self._num_refused = 0

    def __len__(self) -> int:
        return len(self._works)

    def put(self, body: Command | Query) -> None:
        """Never refused, and never answered on a stream."""
        self._works.append(VirtualWork(body))

    def take(self) -> list[VirtualWork]:
        works, self._works = self._works, []
        return works

    def accept(self, line: VirtualLine, request: Request) -> None:
        body = request.body
        if isinstance(body, Attach):
            if line.has_presented:
                return
            line.has_presented = True
            self._offer(VirtualWork(body, line, None, request.id))
            return
        if line.node is None or line.incarnation is None:
            self._master.send(line, Refusal(id=request.id, code=ErrorCode.NOT_ATTACHED, message=""))
            return
        if isinstance(body, KvQuery | SyncQuery | AwaitSaveDuties | AskCluster):
            self._offer(VirtualWork(body, line, None, request.id))
            return
        assert not isinstance(body, MasterStarted), "agents send no such command"
        work = VirtualWork(body, line, Origin(line.node, line.incarnation, request.sequence), request.id)
        if line.held and request.sequence > min(line.held):
            self._refuse_for_now(work, self._retry_after())
            return
        line.held.pop(request.sequence, None)
        self._offer(work)

    def _offer(self, work: VirtualWork) -> None:
        if self._num_in_work >= MAX_REQUESTS_IN_WORK:
            self._num_refused += 1
            self._refuse_for_now(work, self._retry_after())
            return
        self._num_in_work += 1
        self._works.append(work)
        self._master.plan_turn()

    def _retry_after(self) -> float:
        return max(0.05, self._num_refused * SERVICE_TIME)

    def leave(self, work: VirtualWork) -> None:
        """It was decided."""
        self._num_in_work -= work.is_from_outside

    def turn_away(self, works: list[VirtualWork]) -> None:
        """They changed nothing and may come again."""
        for work in works:
            self.leave(work)
            self._refuse_for_now(work, 1.0)

    def end_turn(self) -> None:
        if not self._works:
            self._num_refused = 0

    def _refuse_for_now(self, work: VirtualWork, retry_after: float) -> None:
        line = work.line
        if line is None:
            self._master.sim.platform.word_lost(self._master, work.body)
            return
        if work.origin is not None:
            line.held[work.origin.sequence] = None
        elif isinstance(work.body, Attach):
            line.has_presented = False
        refusal = Refusal(id=work.id, code=ErrorCode.UNAVAILABLE, message="", retry_after=retry_after)
        self._master.send(line, refusal)
