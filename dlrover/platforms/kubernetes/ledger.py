"""
What Kubernetes does not remember: which node ids were ever used, which master is the newest, which plans are done.

Pods vanish when they are deleted, and with them every trace of their ids. So each job has one ConfigMap, its ledger,
with three texts: `epoch`, `used` (`0-1023,1031+`) and `plans`. A `+` marks ids of open launches: the create has not been
answered, and only such an id may be created again.

Each write carries the version that was read. So two masters cannot both write, and the older one learns it from the
conflict. Writes are gathered: one for all entries that came while the last one was under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from dlrover.platforms.base import Intent, StaleMaster
from dlrover.platforms.kubernetes.answers import CONFIG_MAPS, Conflict, FoundObject, NotFound
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.platforms.kubernetes.job.ledger_state import (
    LedgerEntry,
    LedgerState,
    decode_state,
    encode_state,
    entered,
    recovered,
    settled,
)
from dlrover.platforms.kubernetes.objects import ConfigMap, decode
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.fleet import LaunchNode

log = logging.getLogger(__name__)

LINGER = 0.25
"""Seconds that entries wait for more while creates or deletes are under way: fewer writes, and a call takes about as long."""
SETTLE = 1.0
"""Seconds after which marks of answered creates are cleared by a write of their own, if no other write takes them."""
MAX_CONFLICTS = 10
"""Conflicts in a row for one write. Only the operator and another master write here, so it is two or three at most."""


@dataclass(eq=False)
class _Pending:
    change: Callable[[LedgerState], tuple[LedgerState, object]]
    """Raises `StaleMaster`."""
    done: asyncio.Future[object] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class JobLedger:
    """One job's ledger. `enter` and `note_plan` return when what they say is written, or read as written before."""

    def __init__(self, api: ClusterApi, *, namespace: str, name: str, job_uid: str, linger: float = LINGER) -> None:
        self._api = api
        self._job_uid = job_uid
        self._longest_linger = linger
        self._namespace = namespace
        self._name = name
        self._known: tuple[ConfigMap, LedgerState] | None = None
        """As last read, written or watched."""
        self._answered: dict[int, int] = {}
        """Ids whose creates were answered, with the epoch of the launch. Their marks go with the next write."""
        self._num_calls = 0
        """Creates and deletes under way."""
        self._queue: list[_Pending] = []
        self._came = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._settling: asyncio.TimerHandle | None = None

    @property
    def state(self) -> LedgerState | None:
        """Newest that we know; None: it has not been read yet."""
        return None if self._known is None else self._known[1]

    async def read(self) -> LedgerState:
        """From the server. Raises `Unavailable`, also if there is no ledger."""
        answer = await self._api.get(CONFIG_MAPS, self._name, namespace=self._namespace)
        if isinstance(answer, FoundObject):
            return self.learn(decode(ConfigMap, answer.body))
        if isinstance(answer, NotFound):
            raise Unavailable(
                f"The ledger {self._name} of the job does not exist in {self._namespace}. The operator creates "
                "it with the job. Without an operator, the master needs the right to create ConfigMaps."
            )
        raise Unavailable(f"The ledger {self._name} cannot be read: {answer.message}")

    def learn(self, seen: ConfigMap) -> LedgerState:
        """
        What a read, a write or a watch shows. An older version than the known one changes nothing.

        Raises `Unavailable` for a ledger that cannot be read, and for that of a newer job with our job's name.
        """
        if all(owner.uid != self._job_uid for owner in seen.metadata.owner_references):
            raise Unavailable(
                f"The ledger {self._name} belongs to a newer job of the same name. The job of this master was deleted."
            )
        if self._known is not None and not _is_newer(seen, self._known[0]):
            return self._known[1]
        state = decode_state(seen.data)
        if self._known is not None and seen.metadata.uid != self._known[0].metadata.uid:
            log.warning(
                "the ledger was deleted and created anew; the master writes its content again ledger=%s", self._name
            )
            state = recovered(state, self._known[1])
        self._known = (seen, state)
        return state

    async def enter(self, intent: Intent) -> LedgerEntry:
        """Enter an intent before anything is done about it. Raises `StaleMaster` and `Unavailable`."""
        state = self.state
        if state is not None and intent.master_epoch < state.epoch:
            raise StaleMaster(intent, state.epoch)  # epochs only grow, so this needs no request
        return await self._submit(lambda state: entered(state, intent))  # type: ignore[return-value]

    async def note_plan(self, uid: str, master_epoch: int) -> bool:
        """Whether the plan is new. Raises `Unavailable`."""

        def note(state: LedgerState) -> tuple[LedgerState, object]:
            if master_epoch < state.epoch:
                raise Unavailable(
                    f"A newer master (epoch {state.epoch}) runs the job, so this master (epoch {master_epoch}) records no plan."
                )
            return replace(state.with_plan(uid), epoch=master_epoch), uid not in state.plans

        return bool(await self._submit(note))

    async def note_sizes(self, sizes: Mapping[str, int], master_epoch: int) -> None:
        """How many nodes of each type people want, as it was carried out. Raises `Unavailable`."""

        def note(state: LedgerState) -> tuple[LedgerState, object]:
            if master_epoch < state.epoch:
                raise Unavailable(
                    f"A newer master (epoch {state.epoch}) runs the job, so this master (epoch {master_epoch}) records no sizes."
                )
            return replace(state, sizes=tuple(sorted(sizes.items())), epoch=master_epoch), None

        await self._submit(note)

    @contextlib.contextmanager
    def carrying_out(self) -> Iterator[None]:
        """Around what follows an entry. Meanwhile other entries wait a moment for more to come."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._came.set()

    def close_launch(self, intent: LaunchNode) -> None:
        """Its create has been answered: its mark may go, with whatever is written next."""
        self._answered[intent.id] = intent.master_epoch
        if self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(SETTLE, self._settle)

    async def close(self) -> None:
        """Marks that are still to be cleared stay: the next master asks for those nodes and finds them."""
        if self._settling is not None:
            self._settling.cancel()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    def _settle(self) -> None:
        self._settling = None
        if self._answered:
            self._queue.append(_Pending(lambda state: (state, None)))
            self._queue[-1].done.add_done_callback(_look_at)
            self._begin()

    async def _submit(self, change: Callable[[LedgerState], tuple[LedgerState, object]]) -> object:
        pending = _Pending(change)
        self._queue.append(pending)
        self._begin()
        return await pending.done

    def _begin(self) -> None:
        self._came.set()
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write_all())

    async def _write_all(self) -> None:
        while self._queue:
            await self._linger()
            batch, self._queue = [each for each in self._queue if not each.done.done()], []
            try:
                await self._write(batch)
            except Unavailable as error:
                for each in batch:
                    if not each.done.done():
                        each.done.set_exception(Unavailable(str(error), error.retry_after, error.code))
            except BaseException as error:
                for each in batch:
                    if not each.done.done():
                        each.done.set_exception(Unavailable(f"The ledger could not be written: {error!r}"))
                raise

    async def _linger(self) -> None:
        """Until at least half of those that could come have come, and no longer than a moment."""
        try:
            async with asyncio.timeout(self._longest_linger):
                while self._num_calls > len(self._queue):
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            pass

    async def _write(self, batch: list[_Pending]) -> None:
        """
        One write for all, or one read if all of them find the ledger as it should be.

        What is known may be old, and a master that has been followed must not act on it. So a batch that changes nothing
        reads the ledger, and one that changes something is held to the version that it was worked out for.
        """
        is_fresh = self._known is None
        known = self._known if self._known is not None else await self._reread()
        for _ in range(MAX_CONFLICTS):
            answered = dict(self._answered)
            new, results = _worked_out(known[1], answered, batch)
            if new != decode_state(known[0].data):
                if not await self._put(known[0], new):
                    known, is_fresh = await self._reread(), True
                    continue
                for each in answered:
                    self._answered.pop(each, None)
            elif not is_fresh:
                known, is_fresh = await self._reread(), True
                continue
            for pending, result in results:
                if pending.done.done():
                    continue  # its caller does not wait any more
                if isinstance(result, StaleMaster):
                    pending.done.set_exception(result)
                else:
                    pending.done.set_result(result)
            return
        raise Unavailable(
            f"The ledger {self._name} was not written: another program changed it during each of {MAX_CONFLICTS} tries."
        )

    async def _reread(self) -> tuple[ConfigMap, LedgerState]:
        await self.read()
        assert self._known is not None, "a read that succeeds is known"
        return self._known

    async def _put(self, seen: ConfigMap, new: LedgerState) -> bool:
        """False: the ledger has another version now."""
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "resourceVersion": seen.metadata.resource_version,
                "labels": seen.metadata.labels,
                "annotations": seen.metadata.annotations,
                "ownerReferences": msgspec.to_builtins(seen.metadata.owner_references),
            },
            "data": {**seen.data, **encode_state(new)},
        }
        answer = await self._api.replace(CONFIG_MAPS, self._name, body, namespace=self._namespace)
        if isinstance(answer, FoundObject):
            self.learn(decode(ConfigMap, answer.body))
            return True
        if isinstance(answer, Conflict):
            return False
        raise Unavailable(f"The ledger {self._name} cannot be written: {answer.message}")


def _worked_out(
    state: LedgerState, answered: Mapping[int, int], batch: list[_Pending]
) -> tuple[LedgerState, list[tuple[_Pending, object]]]:
    state = settled(state, answered)
    results: list[tuple[_Pending, object]] = []
    for pending in batch:
        try:
            state, result = pending.change(state)
        except StaleMaster as error:
            result = error
        results.append((pending, result))
    return state, results


def _is_newer(seen: ConfigMap, known: ConfigMap) -> bool:
    """Versions count up, as Kubernetes 1.35 promises and every server before did. Others are taken as they come."""
    one, other = seen.metadata.resource_version, known.metadata.resource_version
    return int(one) > int(other) if one.isdecimal() and other.isdecimal() else one != other


def _look_at(done: asyncio.Future[object]) -> None:
    """Clearing marks is a courtesy: what cannot be written now goes with the next write."""
    if not done.cancelled() and (error := done.exception()) is not None:
        log.debug("marks of answered creates stay for now reason=%s", error)
