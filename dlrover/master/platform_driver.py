"""
Between the job and its platform: carries out what the job asks for, and tells it what the platform shows.

Effects come from the loop when they are durable. Each node has a lane of its own, in which only the newest intent counts:
a removal makes a launch pointless, and an intent that the platform does not take now is tried again, later and later,
until it does or the job changes its mind (its pending timeout removes a node that never comes: that is the limit). No
lane waits for another, and the loop waits for none of them.

How much room the platform has is asked for when it or its nodes have changed, and now and then, as long as the job scales itself.

What the platform shows goes to the loop in order. If anything is lost on the way (the line to the platform, a command that
could not be written) the watch begins anew, and so with a full list: the list repairs whatever was missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from dlrover.core.fleet.platform_news import REFUSAL_COUNTS
from dlrover.host.edges import contained, logged
from dlrover.platforms.base import Intent, LaunchNotTaken, Platform, RoomChanged, Sight, StaleMaster
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.fleet import (
    DefineFleet,
    FleetSpec,
    LaunchNode,
    LaunchRefused,
    NodeChanged,
    NodeEventKind,
    NodePhase,
    NodesListed,
    NodeType,
    Resource,
)
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.messages.job import Reply
from dlrover.protocol.messages.scaling import DefineScaling, PlanOffered, RoomSeen, ScaleTerms
from dlrover.protocol.text import encodable

log = logging.getLogger(__name__)

FleetWord = DefineScaling | DefineFleet | NodesListed | NodeChanged | LaunchRefused | RoomSeen | PlanOffered
Tell = Callable[[FleetWord], "asyncio.Future[Reply]"]
"""To the loop; the future is done when the command is durable, and fails with Unavailable or Rejected."""


class PlatformPatience(NamedTuple):
    """Seconds that the driver gives to the platform."""

    call: float = 30.0
    """For one call: a platform that hangs holds up one lane, not the job."""
    first_pause: float = 0.5
    longest_pause: float = 30.0
    """Between two attempts, before jitter."""
    out_of_reach: float = 8.0
    """The same for a platform that cannot be reached: it may be back at any moment, and the first intent must not wait."""
    longest_request: float = 60.0
    """A platform may ask to be left alone for so long (`retry_after`)."""
    repetition: float = REFUSAL_COUNTS / 2
    """Between two words about the same refusal: the job takes one for outdated after twice that time."""
    watch: float = 300.0
    """After so long a watch is begun anew, with a full list: one that hangs without a word would not be noticed."""
    room: float = 30.0
    """Between two questions for room, if nothing happens: quotas and machines of others change without an event for us."""
    room_rest: float = 0.25
    """After a change: nodes come and go in groups."""
    farewell: float = 5.0
    """For what is still to be done when the job is over."""


PATIENCE = PlatformPatience()
_LIVE = (NodePhase.INITIAL, NodePhase.PENDING, NodePhase.RUNNING)
MAX_CALLS = 32
"""At the same time: a thousand launches must not bury the platform's server."""


class _Pause(NamedTuple):
    """How long to wait for the next attempt."""

    at_least: float = 0.0
    at_most: float = 0.0


@dataclass(eq=False)
class _Lane:
    """What shall become of one node."""

    intent: Intent | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    told: str = ""
    """Why the platform does not take it, as the job was last told."""
    told_at: float = 0.0
    task: asyncio.Task[None] | None = None


class PlatformDriver:
    """Built by the service; `run` is its task, `take` is called by the loop."""

    def __init__(
        self,
        platform: Platform,
        spec: FleetSpec,
        tell: Tell,
        *,
        patience: PlatformPatience = PATIENCE,
        environ: Mapping[str, str] | None = None,
        scaling: ScaleTerms | None = None,
        is_scaling: Callable[[], bool] = lambda: False,
        first: Callable[[], Awaitable[None]] | None = None,
        propose: Callable[[], Awaitable[PlanOffered | None]] | None = None,
    ) -> None:
        """
        `environ`: what the nodes' processes shall find in their environment. `is_scaling`: the job decides about its own size now.
        `first`: what comes between the definition of the fleet and its first launch; it raises `Unavailable` to be called again.
        `propose`: with what the fleet might begin; asked once, before it is defined.
        """
        self._platform = platform
        self._environ = dict(environ or {})
        self._spec = spec
        self._tell = tell
        self._patience = patience
        self._first = first
        self._propose = propose
        self.has_begun = asyncio.Event()
        """The fleet is defined, and what stands written about the job was carried out."""
        self._lanes: dict[PlatformId, _Lane] = {}
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._is_lost = asyncio.Event()
        """Something did not reach the job: list again."""
        self._trouble = ""
        self._scaling = scaling
        self._is_scaling = is_scaling
        self._live: dict[PlatformId, NodeType] = {}
        """Nodes that the platform has and that have not ended."""
        self._may_room_differ = asyncio.Event()
        self._told_room: int | None = -1 if platform.capabilities.knows_room else None
        """-1: nothing was told."""
        self._allowed: int | None = None
        """Workers that the job may have by advice from outside; None: any number."""
        self._allowed_reason = ""

    # Effects.

    def take(self, intent: Intent) -> None:
        """Never waits. The newest intent of a node replaces what has not been done yet."""
        lane = self._lanes.setdefault(intent.id, _Lane())
        if isinstance(intent, LaunchNode) and self._environ:
            intent = replace(intent, environ={**intent.environ, **self._environ})
        lane.intent = intent
        lane.changed.set()
        if lane.task is None:
            lane.task = asyncio.ensure_future(self._work(intent.id, lane))

    async def drain(self) -> None:
        """The job is over: give open removals a moment, launches none."""
        for lane in self._lanes.values():
            if isinstance(lane.intent, LaunchNode):
                lane.intent = None
                lane.changed.set()
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=self._patience.farewell)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, node: PlatformId, lane: _Lane) -> None:
        pause = self._patience.first_pause
        while (intent := lane.intent) is not None:
            lane.changed.clear()
            again = await self._attempt(lane, intent)
            if lane.intent is not intent:
                pause = self._patience.first_pause
            elif again is None:
                lane.intent = None
            else:
                pause = min(pause, again.at_most)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(again.at_least + pause * random.uniform(0.5, 1.0)):
                        await lane.changed.wait()
                pause = min(2 * pause, again.at_most)
        del self._lanes[node]

    async def _attempt(self, lane: _Lane, intent: Intent) -> _Pause | None:
        """When to try again; None: nothing more is to be done about it."""

        def tell(error: Exception) -> None:
            reason = encodable(f"The platform failed because of a bug ({type(error).__name__}: {error}).")
            if reason != lane.told:
                log.exception("the platform failed because of a bug node=%s", intent.name)
            self._tell_refusal(lane, intent, reason)

        refused = _Pause(at_most=self._patience.longest_pause)
        with contained(tell):  # an extension may raise anything; a lane that ends with it would never be driven again
            try:
                async with self._calls, asyncio.timeout(self._patience.call):
                    await self._platform.apply(intent)
            except StaleMaster as error:
                # The journal's fence ends this master as soon as it writes; until then it must only keep still.
                log.warning("an order to the platform came from an old master: %s", error)
                return None
            except Rejected as error:
                log.error("the platform rejected an order for good node=%s reason=%s", intent.name, error)
                self._tell_refusal(lane, intent, str(error))
                return None
            except LaunchNotTaken as error:
                self._tell_refusal(lane, intent, str(error))
                return refused
            except Unavailable as error:
                self._tell_refusal(lane, intent, str(error))
                asked = min(error.retry_after or 0.0, self._patience.longest_request)
                return _Pause(asked, self._patience.out_of_reach)
            except TimeoutError:
                self._tell_refusal(lane, intent, f"The platform did not answer within {self._patience.call:g} s.")
                return _Pause(at_most=self._patience.out_of_reach)
            log.info("the platform accepted intent=%s node=%s", type(intent).__name__, intent.name)
            return None
        return refused

    def _tell_refusal(self, lane: _Lane, intent: Intent, reason: str) -> None:
        """For each change of the reason, and now and then because it still holds: the attempts themselves are no news."""
        now = asyncio.get_running_loop().time()
        reason = encodable(reason)
        if reason == lane.told and now - lane.told_at < self._patience.repetition:
            return
        if reason != lane.told:
            log.warning(
                "the platform does not carry out intent=%s node=%s reason=%s",
                type(intent).__name__,
                intent.name,
                reason,
            )
        lane.told, lane.told_at = reason, now
        if isinstance(intent, LaunchNode):
            self._say(LaunchRefused(node=intent.id, reason=reason))

    # Sights.

    async def run(self) -> None:
        """Until cancelled."""
        await self._define()
        await self._begin()
        self.has_begun.set()
        asking = asyncio.ensure_future(self._ask_for_room())
        try:
            await self._watch_on()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _watch_on(self) -> None:
        pause = 0.0
        while True:
            began_at = asyncio.get_running_loop().time()
            await self._watch()
            if asyncio.get_running_loop().time() - began_at > self._patience.longest_pause:
                pause = 0.0
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(max(2 * pause, self._patience.first_pause), self._patience.longest_pause)

    async def _define(self) -> None:
        """Nothing else makes sense to the job before; so try until it is written."""
        pause = self._patience.first_pause
        offer = None
        while True:
            try:
                if self._scaling is not None:
                    await self._tell(DefineScaling(terms=self._scaling))
                if self._propose is not None:
                    offer, self._propose = await self._propose(), None
                if offer is not None:
                    await self._tell(offer)
                await self._tell(DefineFleet(spec=self._spec))
                return
            except Unavailable as error:
                log.warning("the fleet cannot be defined yet reason=%s", error)
            except Rejected as error:
                if self._first is None or error.code != ErrorCode.FLEET_DIFFERS:
                    raise
                # A person edited what describes the job, and another master began. New numbers of nodes come to the job as orders.
                log.warning("The description of the job has changed. The job keeps the fleet that it started with.")
                return
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, self._patience.longest_pause)

    async def _begin(self) -> None:
        """Nothing is listed before, and so nothing is launched."""
        pause = self._patience.first_pause
        while self._first is not None:
            try:
                await self._first()
                return
            except Unavailable as error:
                log.warning("the description of the job cannot be read yet reason=%s", error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, self._patience.out_of_reach)

    async def _watch(self) -> None:
        """One watch, until it breaks, something was lost, or its time is over."""

        def tell(error: Exception) -> None:
            trouble = (
                str(error)
                if isinstance(error, Unavailable)
                else f"The platform failed because of a bug ({type(error).__name__}: {error})."
            )
            if trouble != self._trouble and not isinstance(error, Unavailable):
                log.exception("the platform failed because of a bug while it was watched")
            self._note_trouble(trouble)

        self._is_lost.clear()
        seeing = asyncio.ensure_future(self._see())
        losing = asyncio.ensure_future(self._is_lost.wait())
        try:
            limit = self._patience.watch * random.uniform(0.8, 1.0)
            await asyncio.wait([seeing, losing], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            with contained(tell):  # an extension may raise anything; the next watch may be better
                if seeing.done():
                    seeing.result()
        finally:
            for task in (seeing, losing):
                task.cancel()
            await asyncio.gather(seeing, losing, return_exceptions=True)

    async def _see(self) -> None:
        async with contextlib.aclosing(self._platform.watch()) as sights:  # type: ignore[type-var]
            async for sight in sights:
                self._note_trouble("")
                self._note_room(sight)
                if not isinstance(sight, RoomChanged):
                    self._say(sight)

    # Room.

    def _note_room(self, sight: Sight) -> None:
        match sight:
            case NodesListed(nodes=nodes):
                self._live = {node.id: node.node_type for node in nodes if node.phase in _LIVE}
            case NodeChanged(kind=kind, node=node):
                is_live = kind is not NodeEventKind.DELETED and node.phase in _LIVE
                if is_live == (node.id in self._live):
                    return
                if is_live:
                    self._live[node.id] = node.node_type
                else:
                    del self._live[node.id]
        self._may_room_differ.set()

    def allow(self, nodes: int | None, reason: str) -> None:
        """So many workers are the job's share of a cluster; None: nothing limits it but the platform."""
        if (nodes, reason) != (self._allowed, self._allowed_reason):
            self._allowed, self._allowed_reason = nodes, reason
            self._may_room_differ.set()

    async def _ask_for_room(self) -> None:
        """Until cancelled."""
        workers = self._spec.replicas.get(NodeType.WORKER)
        if workers is None:
            return
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience.room):
                    await self._may_room_differ.wait()
            self._may_room_differ.clear()
            if not self._is_scaling():
                continue
            known = await self._room_of_platform(workers.resource)
            if known is None:
                continue
            most, reason = known
            if self._allowed is not None and (most is None or self._allowed < most):
                most, reason = self._allowed, self._allowed_reason
            if most != self._told_room:
                self._told_room = most
                log.info("the platform has room for nodes=%s reason=%s", most, reason)
                self._say(RoomSeen(most=most, reason=encodable(reason)))
            await asyncio.sleep(self._patience.room_rest)

    async def _room_of_platform(self, size: Resource) -> tuple[int | None, str] | None:
        """Workers that the job can have in all (None: any number), and what limits them; None: the platform cannot tell now."""
        if not self._platform.capabilities.knows_room:
            return None, ""
        room = None
        with logged(
            log, "the platform failed because of a bug when asked for its room"
        ):  # an extension may raise anything
            try:
                async with asyncio.timeout(self._patience.call):
                    room = await self._platform.room(size)
            except (Unavailable, Rejected, TimeoutError) as error:
                log.debug("the platform does not tell its room reason=%s", error)
        if room is None:
            return None
        num_live = sum(node_type is NodeType.WORKER for node_type in self._live.values())
        return None if room.free is None else max(0, num_live + room.free), room.reason

    def _note_trouble(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            log.warning("the state of the platform cannot be read reason=%s", trouble)
        elif self._trouble and not trouble:
            log.info("the state of the platform can be read again")
        self._trouble = trouble

    def _say(self, word: FleetWord) -> None:
        self._tell(word).add_done_callback(lambda told: self._on_told(word, told))

    def _on_told(self, word: FleetWord, told: asyncio.Future[Reply]) -> None:
        error = None if told.cancelled() else told.exception()
        if isinstance(error, Rejected):
            log.warning("the job rejected command=%s reason=%s", type(word).__name__, error)
        elif isinstance(error, Unavailable):
            log.info(
                "a change on the platform did not reach the job; all nodes are listed again command=%s reason=%s",
                type(word).__name__,
                error,
            )
            self._is_lost.set()
            if isinstance(word, RoomSeen):
                self._told_room = -1
            if isinstance(word, LaunchRefused) and word.node in self._lanes:
                self._lanes[word.node].told = ""  # tell it again with the next attempt
        else:
            assert error is None, f"the loop answers with nothing else: {error!r}"
