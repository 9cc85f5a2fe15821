"""
A world of one: answers a worker's requests where there is no agent.

Outside `dlrover-run` a script that uses the key-value store, sync points or shards of data still runs, alone: the very rooms of the
job's core live in the process, and no other process is ever there. Threads share it; a fork gets a copy; other processes see
nothing of it, so it cannot connect ranks.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from msgspec.structs import replace

from dlrover.core.exchange import sync_points
from dlrover.core.exchange.kv_store import KvStore
from dlrover.core.job import Job
from dlrover.core.outcome import NotYet
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.data import AskDataCheckpoint, AskDataset, DataCommand
from dlrover.protocol.messages.fleet import AskClusterVersion, AskPsNodes
from dlrover.protocol.messages.job import (
    AskStatus,
    Attach,
    Attached,
    Done,
    JobTerms,
    MasterStarted,
    Micros,
    NodeId,
    Reply,
    Round,
    WorkerNews,
    WorkerOrder,
    WorkerRequest,
)
from dlrover.protocol.messages.kv import KvCommand, KvQuery
from dlrover.protocol.messages.sync import BarrierOpen, JoinSync, NotifyBarrier, SyncFinished, SyncState

_ALONE = NodeId(0)
_JobQuery = AskDataset | AskDataCheckpoint | AskStatus | AskClusterVersion | AskPsNodes
_OF_THE_JOB = DataCommand | _JobQuery


class StandIn:
    """Implements `Link` within the process."""

    def __init__(self) -> None:
        self._kv = KvStore()
        self._sync = sync_points.SyncPoints()
        self._job: _LonelyJob | None = None
        self._changed = threading.Condition()
        """Guards all rooms."""

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        end_at = time.monotonic() + min(timeout, getattr(request, "wait", 0.0))
        with self._changed:
            if isinstance(request, _OF_THE_JOB):
                self._job = _LonelyJob() if self._job is None else self._job
                return self._job.ask(request)
            if isinstance(request, WorkerNews | WorkerOrder):
                name = type(request).__name__
                raise Rejected(
                    f"{name} has no effect, because this script runs outside a job. Start it with `dlrover-run`.",
                    ErrorCode.NO_JOB,
                )
            if isinstance(request, KvCommand | JoinSync | NotifyBarrier):
                reply = self._apply(request)
                self._changed.notify_all()
                return reply
            while isinstance(answer := self._answer(request), NotYet):
                left = end_at - time.monotonic()
                if left <= 0:
                    if isinstance(answer.otherwise, Rejected):
                        raise answer.otherwise
                    return answer.otherwise
                self._changed.wait(left)
            return answer

    def _apply(self, command: KvCommand | JoinSync | NotifyBarrier) -> Reply:
        match command:
            case JoinSync(name=name, round=round_):
                return self._sync.join(name, round_, (_ALONE, 0), Micros(0), lambda: {_ALONE: [0]})
            case NotifyBarrier(name=name, round=round_):
                self._sync.notify(name, round_)
                return Done()
            case _:
                return self._kv.apply(command)  # type: ignore[arg-type]  # all subclasses are in the union

    def _answer(self, query: WorkerRequest) -> Reply | NotYet:
        match query:
            case SyncFinished(name=name, round=round_):
                point = self._sync.points.get(round_, {}).get(name)
                found = point is not None
                return SyncState(True) if found else NotYet((), SyncState(False))
            case BarrierOpen(name=name, round=round_, generation=generation):
                found = self._sync.barriers.get(round_, {}).get(name, 0) >= generation
                return SyncState(True) if found else NotYet((), SyncState(False))
            case KvQuery():
                return self._kv.answer(query)
            case _:
                raise AssertionError(f"{type(query).__name__} is not a question")


class _LonelyJob:
    """Books of datasets need a node that holds shards: a job with one node that is always there."""

    def __init__(self) -> None:
        self._job = Job()
        self._apply(MasterStarted(1, "alone"))
        attached = self._apply(Attach(launch="alone", host="localhost", terms=JobTerms(), local_world_size=1))
        assert isinstance(attached, Attached), attached
        self._me = attached

    def ask(self, request: DataCommand | _JobQuery) -> Reply:
        if isinstance(request, DataCommand):
            me = self._me
            named = replace(request, node=me.node, incarnation=me.incarnation, round=Round(0), local_rank=0)
            return self._apply(named)
        answer = self._job.ask(request)
        assert not isinstance(answer, NotYet), "the books know everything"
        return answer

    def _apply(self, command: Any) -> Reply:
        return self._job.apply(command, Micros(max(self._job.now, time.monotonic_ns() // 1000))).reply
