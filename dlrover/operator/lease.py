"""
Leader election: of several operators the one that holds the Lease acts.

A Lease says who holds it and when it was renewed. Clocks of machines differ, so another holder's time is never
compared with ours: a Lease is free when it has not changed for its duration, measured with our own clock. The holder
stops acting before that: it gives up if it could not renew for a shorter time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from msgspec import Struct

from dlrover.platforms.kubernetes.api import LEASES, ClusterApi, FoundObject, NotFound
from dlrover.platforms.kubernetes.elastic_job import JsonObject
from dlrover.platforms.kubernetes.objects import Lease, decode
from dlrover.protocol.errors import Unavailable

log = logging.getLogger(__name__)

LEASE_NAME = "dlrover-elasticjob"


class LeaseTiming(Struct, frozen=True, kw_only=True):
    """Seconds. The defaults are those of controllers of Kubernetes itself."""

    duration: float = 15.0
    """Others wait so long after the last renewal."""
    renew_deadline: float = 10.0
    """The holder stops acting so long after its last renewal. It must be shorter than `duration`."""
    retry: float = 2.0
    """Between two renewals, and between two looks at another's Lease."""


USUAL_TIMING = LeaseTiming()


class LeadershipLost(Exception):
    """The Lease could not be renewed in time, or another operator holds it."""


class LeaderLease:
    def __init__(
        self,
        api: ClusterApi,
        *,
        namespace: str,
        identity: str,
        name: str = LEASE_NAME,
        timing: LeaseTiming = USUAL_TIMING,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._identity = identity
        self._name = name
        self._timing = timing
        self._seen = ""
        """Version of the Lease at the last look."""
        self._seen_at = 0.0
        """When we first saw that version."""
        self.is_held = False

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for the Lease, then do the work while it is held. Raises `LeadershipLost`; releases the Lease at the end."""
        await self._acquire()
        log.info("leading lease=%s/%s identity=%s", self._namespace, self._name, self._identity)
        task = asyncio.ensure_future(work())
        renewal = asyncio.ensure_future(self._renew())
        try:
            await asyncio.wait((task, renewal), return_when=asyncio.FIRST_COMPLETED)
            if renewal.done() and not task.done():
                task.cancel()
                await asyncio.wait((task,))
            renewal.cancel()
            await asyncio.wait((renewal,))
            if not renewal.cancelled():
                renewal.result()
            task.result()
        finally:
            for each in (task, renewal):
                each.cancel()
            await asyncio.wait((task, renewal))
            await self._release()

    async def _acquire(self) -> None:
        is_logged = False
        while not await self._try():
            if not is_logged:
                log.info("waiting lease=%s/%s identity=%s", self._namespace, self._name, self._identity)
                is_logged = True
            await asyncio.sleep(self._timing.retry * random.uniform(1.0, 1.2))
        self.is_held = True

    async def _renew(self) -> None:
        now = asyncio.get_running_loop().time
        renewed_at = now()
        while True:
            await asyncio.sleep(self._timing.retry)
            deadline = renewed_at + self._timing.renew_deadline
            began_at = now()
            try:
                async with asyncio.timeout_at(deadline):
                    is_ours = await self._try()
            except TimeoutError:
                is_ours = False
            if is_ours:
                renewed_at = began_at
            elif now() >= deadline:
                self.is_held = False
                raise LeadershipLost(
                    f"The Lease {self._namespace}/{self._name} was not renewed within {self._timing.renew_deadline:g} s."
                )

    async def _try(self) -> bool:
        """Take or renew the Lease. False: another operator holds it, or the API server did not answer."""
        try:
            answer = await self._api.get(LEASES, self._name, namespace=self._namespace)
            if isinstance(answer, NotFound):
                body = self._body(transitions=0, acquired_at=_micro_time())
                return isinstance(await self._api.create(LEASES, body, namespace=self._namespace), FoundObject)
            if not isinstance(answer, FoundObject):
                log.warning("lease unreadable lease=%s/%s: %s", self._namespace, self._name, answer.message)
                return False
            lease = decode(Lease, answer.body)
            if not self._is_free(lease):
                return False
            return await self._take(lease)
        except Unavailable as error:
            log.warning("lease unreachable lease=%s/%s: %s", self._namespace, self._name, error)
            return False

    def _is_free(self, lease: Lease) -> bool:
        now = asyncio.get_running_loop().time()
        version = lease.metadata.resource_version
        if version != self._seen:
            self._seen, self._seen_at = version, now
        if lease.spec.holder_identity in ("", self._identity):
            return True
        duration = max(float(lease.spec.lease_duration_seconds), self._timing.duration)
        return now >= self._seen_at + duration

    async def _take(self, lease: Lease) -> bool:
        """With the version that was read: of two operators that try at once, one gets it."""
        is_ours = lease.spec.holder_identity == self._identity
        acquired = lease.spec.acquire_time
        body = self._body(
            transitions=lease.spec.lease_transitions + (0 if is_ours else 1),
            acquired_at=_micro_time(acquired) if is_ours and acquired is not None else _micro_time(),
        )
        metadata = {"name": self._name, "namespace": self._namespace}
        body["metadata"] = {**metadata, "resourceVersion": lease.metadata.resource_version}
        answer = await self._api.replace(LEASES, self._name, body, namespace=self._namespace)
        if isinstance(answer, FoundObject):
            self._seen = answer.version
            return True
        return False

    async def _release(self) -> None:
        """So that the next operator need not wait. If it fails, the Lease ends by itself."""
        if not self.is_held:
            return
        self.is_held = False
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(self._timing.retry):
                answer = await self._api.get(LEASES, self._name, namespace=self._namespace)
                if not isinstance(answer, FoundObject):
                    return
                lease = decode(Lease, answer.body)
                if lease.spec.holder_identity != self._identity:
                    return
                body = self._body(transitions=lease.spec.lease_transitions, acquired_at=_micro_time(), holder="")
                body["metadata"] = {"name": self._name, "resourceVersion": lease.metadata.resource_version}
                await self._api.replace(LEASES, self._name, body, namespace=self._namespace)

    def _body(self, *, transitions: int, acquired_at: str, holder: str | None = None) -> JsonObject:
        return {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity if holder is None else holder,
                "leaseDurationSeconds": max(1, round(self._timing.duration)),
                "acquireTime": acquired_at,
                "renewTime": _micro_time(),
                "leaseTransitions": transitions,
            },
        }


def _micro_time(instant: datetime | None = None) -> str:
    return (instant or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
