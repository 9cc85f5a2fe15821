"""
What a job keeps in the cluster's key-value store: small, without secrets, gone when the job is over.

The store outlives every process but the head's, so a host that was killed finds here what it must not forget. It is the one
part of Ray's interface that Ray calls internal, so all of its names are in this module.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from dlrover.platforms.hosted.starter import HostLedger
from dlrover.protocol.messages.fleet import LaunchNode
from dlrover.protocol.messages.identity import PlatformId

_NAMESPACE = b"dlrover"
_MAX_EPOCHS = 100_000


class Tombstone(Struct, frozen=True, kw_only=True):
    """A node that ended and was not removed yet; its actor is gone, so that another job can have its place."""

    intent: LaunchNode
    exit_code: int
    is_out_of_memory: bool = False
    cause: str = ""
    host: str = ""


class Registered(Struct, frozen=True, kw_only=True):
    """A job under its name."""

    job_uid: str
    user: str = ""
    submitted_at: float = 0.0
    """Seconds since 1970, by the clock of the driver's machine: for people."""
    actor: str = "host"
    """The one that drivers talk to. A job of several roles has a conductor."""


class JobResult(Struct, frozen=True, kw_only=True):
    """Of a job whose driver was gone when it ended; stays until it is asked for."""

    exit_code: int
    report: str = ""
    ended_at: float = 0.0


class Registry:
    """Jobs by name. One of a kind in a cluster."""

    def add(self, name: str, job: Registered) -> bool:
        """False: a job of that name is there."""
        return put(f"jobs/{name}", msgspec.json.encode(job), overwrite=False)

    def find(self, name: str) -> Registered | None:
        data = get(f"jobs/{name}")
        return None if data is None else msgspec.json.decode(data, type=Registered)

    def remove(self, name: str) -> None:
        delete(f"jobs/{name}")

    def names(self) -> list[str]:
        return sorted(key.removeprefix("jobs/") for key in keys("jobs/"))

    def leave_result(self, name: str, result: JobResult) -> None:
        put(f"results/{name}", msgspec.json.encode(result))

    def result(self, name: str) -> JobResult | None:
        data = get(f"results/{name}")
        return None if data is None else msgspec.json.decode(data, type=JobResult)

    def forget_result(self, name: str) -> None:
        delete(f"results/{name}")

    def results(self) -> list[str]:
        return sorted(key.removeprefix("results/") for key in keys("results/"))


class JobStore:
    """Keys of one job."""

    def __init__(self, job_uid: str) -> None:
        self._prefix = f"{job_uid}/"

    def write_plan(self, data: bytes) -> None:
        put(f"{self._prefix}plan", data)

    def read_plan(self) -> bytes | None:
        return get(f"{self._prefix}plan")

    def claim_epoch(self) -> int:
        """A number that no host of this job had before: the fence against a host that Ray has given up too early."""
        for number in range(len(keys(f"{self._prefix}host/")) + 1, _MAX_EPOCHS):
            if put(f"{self._prefix}host/{number}", b"1", overwrite=False):
                return number
        raise AssertionError(f"{_MAX_EPOCHS} hosts of one job")

    def write_ledger(self, ledger: HostLedger) -> None:
        put(f"{self._prefix}ledger", msgspec.json.encode(ledger))

    def read_ledger(self) -> HostLedger:
        data = get(f"{self._prefix}ledger")
        return HostLedger() if data is None else msgspec.json.decode(data, type=HostLedger)

    def write_journal(self, mark: str) -> None:
        """By which the newest journal of the job is known."""
        put(f"{self._prefix}journal", mark.encode())

    def last_journal(self) -> str:
        return (get(f"{self._prefix}journal") or b"").decode()

    def write_node(self, intent: LaunchNode) -> None:
        put(f"{self._prefix}node/{intent.id}", msgspec.json.encode(intent))

    def forget_node(self, node: PlatformId) -> None:
        delete(f"{self._prefix}node/{node}")
        delete(f"{self._prefix}ended/{node}")

    def bury(self, tombstone: Tombstone) -> None:
        put(f"{self._prefix}ended/{tombstone.intent.id}", msgspec.json.encode(tombstone))

    def nodes(self) -> list[LaunchNode]:
        found = (get(key) for key in keys(f"{self._prefix}node/"))
        return [msgspec.json.decode(data, type=LaunchNode) for data in found if data is not None]

    def tombstones(self) -> dict[PlatformId, Tombstone]:
        found = (get(key) for key in keys(f"{self._prefix}ended/"))
        stones = [msgspec.json.decode(data, type=Tombstone) for data in found if data is not None]
        return {stone.intent.id: stone for stone in stones}

    def clear(self) -> None:
        for key in keys(self._prefix):
            delete(key)


class ClusterKeyValues:
    """The store as an object, for those who also run without a cluster."""

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        return put(key, value, overwrite=overwrite)

    def get(self, key: str) -> bytes | None:
        return get(key)

    def delete(self, key: str) -> None:
        delete(key)

    def keys(self, prefix: str) -> list[str]:
        return keys(prefix)


def put(key: str, value: bytes, *, overwrite: bool = True) -> bool:
    """False: the key was there and was not overwritten."""
    from ray.experimental import internal_kv

    was_there = internal_kv._internal_kv_put(key.encode(), value, overwrite=overwrite, namespace=_NAMESPACE)
    return overwrite or not was_there


def get(key: str) -> bytes | None:
    from ray.experimental import internal_kv

    found: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=_NAMESPACE)
    return found


def delete(key: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(key.encode(), namespace=_NAMESPACE)


def keys(prefix: str) -> list[str]:
    from ray.experimental import internal_kv

    return sorted(key.decode() for key in internal_kv._internal_kv_list(prefix.encode(), namespace=_NAMESPACE))
