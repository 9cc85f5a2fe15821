"""
The books of a dataset at the master, as one worker asks and tells of them.

A message is not sent twice by us; the agent does that, under its number, for as long as the master is away. When even that is
over, readers get `DataUnavailable`, never the end of the data.
"""

from __future__ import annotations

from dlrover.protocol.errors import DLRoverError, Rejected, Unavailable
from dlrover.protocol.messages.data import (
    NO_STEP,
    AskDataCheckpoint,
    AskDataset,
    AwaitRestore,
    DataCheckpoint,
    DatasetSpec,
    DatasetState,
    ExchangeShards,
    ExtendStream,
    RegisterDataset,
    RestoreDataset,
    ShardsGiven,
)
from dlrover.protocol.messages.job import Reply, Round, WorkerRequest
from dlrover.trainer import environment
from dlrover.trainer.agent_link import Link

_MARGIN = 2.0
"""Seconds that the answer to a question may need on top of those that it waits on the master."""


class DataUnavailable(DLRoverError):
    """Shards cannot be had, although there are some. Nothing was lost: what was taken goes back when this worker ends."""


class DatasetBooks:
    """Of one dataset. Methods may be called by any thread."""

    def __init__(self, spec: DatasetSpec, link: Link, patience: float) -> None:
        """`patience`: seconds that a master may be away before readers are told."""
        where = environment.current()
        self.spec = spec
        self.round = Round(0) if where is None else where.round
        self.local_rank = 0 if where is None else where.local_rank
        self._link = link
        self._patience = patience

    def register(self) -> None:
        name, spec = self.spec.name, self.spec
        self._ask_state(RegisterDataset(dataset=name, spec=spec, round=self.round, local_rank=self.local_rank))

    def state(self) -> DatasetState:
        return self._ask_state(AskDataset(dataset=self.spec.name))

    def checkpoint(self, step: int = NO_STEP) -> str:
        reply = self._ask(AskDataCheckpoint(dataset=self.spec.name, step=step, round=self.round))
        assert isinstance(reply, DataCheckpoint), reply
        return reply.content

    def restore(self, content: str) -> DatasetState:
        """Go back to a dataset checkpoint. Raises Rejected if that cannot be used."""
        name, rank = self.spec.name, self.local_rank
        return self._ask_state(RestoreDataset(dataset=name, content=content, round=self.round, local_rank=rank))

    def extend(self, ends: dict[str, int], *, is_over: bool) -> None:
        """Of a stream that grows: partitions reach this far now."""
        extension = ExtendStream(
            dataset=self.spec.name,
            partitions=dict.fromkeys(ends, 0),
            ends=ends,
            is_over=is_over,
            round=self.round,
            local_rank=self.local_rank,
        )
        self._ask(extension)

    def exchange(self, message: ExchangeShards) -> ShardsGiven:
        reply = self._ask(message)
        assert isinstance(reply, ShardsGiven), reply
        return reply

    def await_model(self, wait: float) -> None:
        """Until the ranks have said which model they go on with, or so many seconds. Raises Rejected or Unavailable."""
        self._link.ask(AwaitRestore(round=self.round, wait=wait), timeout=wait + _MARGIN)

    def _ask_state(self, request: WorkerRequest) -> DatasetState:
        reply = self._ask(request)
        assert isinstance(reply, DatasetState), reply
        return reply

    def _ask(self, request: WorkerRequest) -> Reply:
        try:
            return self._link.ask(request, timeout=self._patience)
        except Unavailable as error:
            raise DataUnavailable(
                f"The master did not answer for {self._patience:g} s about dataset {self.spec.name!r}: {error}. "
                "No record is lost. Start the job again; it continues from its last checkpoint."
            ) from error
        except Rejected as error:
            raise Rejected(f"Dataset {self.spec.name!r}: {error}", code=error.code) from error
