"""The historical runtime interface: who this worker is, what it exports, and proxies of others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from dlrover.protocol.errors import ConfigError
from dlrover.unified.api.enums import ACCELERATOR_TYPE
from dlrover.unified.runtime.calls import RoleActor
from dlrover.unified.runtime.current import Current, current
from dlrover.unified.runtime.methods import METHODS, mark_of
from dlrover.unified.shell.process_group import historical_name


class JobInfo(Struct, frozen=True, kw_only=True):
    name: str
    job_id: str
    user_config: Any
    accelerator_type: ACCELERATOR_TYPE = ACCELERATOR_TYPE.GPU


class ActorInfo(Struct, frozen=True, kw_only=True):
    name: str
    role: str
    rank: int
    node_rank: int = 0
    local_rank: int = 0
    spec: Any = None
    sub_master: str | None = None


class Worker:
    def __init__(self, here: Current) -> None:
        self.job_info = JobInfo(name=here.job, job_id=here.job_uid, user_config=here.config)
        self.actor_info = ActorInfo(
            name=historical_name(here.role, here.rank, here.world_size, here.local_world_size),
            role=here.role,
            rank=here.rank,
            node_rank=here.rank // here.local_world_size,
            local_rank=here.local_rank,
        )


def current_worker() -> Worker:
    return Worker(current())


def export_rpc_method(name: str, function: Callable[..., Any]) -> None:
    METHODS.export(name, function)


def export_rpc_instance(namespace: str | None, instance: object) -> None:
    """Its `@rpc` methods, as `<namespace>.<method>`."""
    METHODS.export_object(instance, namespace or "")


class UserRpcProxy:
    """An object with the RPC methods of a class, which run in another worker. Those that are coroutines there are awaited here."""

    def __init__(self, actor: RoleActor, namespace: str, cls: type) -> None:
        self._actor = actor
        self._namespace = namespace
        self._class = cls

    def __getattr__(self, attribute: str) -> Any:
        function = getattr(self._class, attribute, None)
        mark = mark_of(function)
        if mark is None:
            raise AttributeError(f"{self._class.__name__} has no @rpc method {attribute!r}")
        name = f"{self._namespace}.{mark.name}" if self._namespace else mark.name

        def call(*args: Any, **kwargs: Any) -> Any:
            future = self._actor.send(name, args, kwargs, retry=mark.retry)
            return _awaited(future) if inspect.iscoroutinefunction(function) else future.result()

        return call


def create_rpc_proxy(actor_name: str, namespace: str | None, cls: type) -> Any:
    """`actor_name`: `role-rank`, or the historical `role_world-rank_localworld-localrank`."""
    return UserRpcProxy(actor_named(actor_name), namespace or "", cls)


def actor_named(name: str) -> RoleActor:
    """Raises `ConfigError`."""
    for role, count in current().wire.roles().items():
        for rank in range(count):
            if name == f"{role}-{rank}" or name.startswith(f"{role}_{count}-{rank}_"):
                return RoleActor(role, rank)
    raise ConfigError(f"The job has no worker {name!r}. Its roles are {', '.join(current().wire.roles())}.")


async def _awaited(future: Any) -> Any:
    return await future
