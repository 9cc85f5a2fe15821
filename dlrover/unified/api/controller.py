"""`PrimeMasterApi`: what workers ask of the controller."""

from __future__ import annotations

from typing import Any

from dlrover.platforms.ray.access import namespace_of
from dlrover.unified.api.worker import ActorInfo, actor_named
from dlrover.unified.runtime.current import current
from dlrover.unified.shell.messages import ACCOUNT, CONDUCTOR

CALL_TIMEOUT = 60.0


class PrimeMasterApi:
    """From inside a worker that is an actor. Answers are waited for."""

    @staticmethod
    def get_status() -> Any:
        from dlrover.unified.api.submit import MasterStatus

        status = ACCOUNT.decode(_ask("account")).status
        return MasterStatus(status.stage, status.exit_code, status.num_job_restarts)

    @staticmethod
    def stop() -> None:
        _ask("end", "stopped by one of its workers", 0)

    @staticmethod
    def restart() -> None:
        _ask("restart", "restarted by one of its workers")

    @staticmethod
    def get_all_roles() -> list[str]:
        return list(current().wire.roles())

    @staticmethod
    def get_workers_by_role(role: str, optional: bool = False) -> list[ActorInfo]:
        """Raises ValueError for an unknown role that is not optional."""
        roles = current().wire.roles()
        if role not in roles:
            if optional:
                return []
            raise ValueError(f"The job has no role {role!r}. It has: {', '.join(roles)}.")
        return [ActorInfo(name=f"{role}-{rank}", role=role, rank=rank) for rank in range(roles[role])]

    @staticmethod
    def get_actor_info(name: str) -> ActorInfo:
        actor = actor_named(name)
        return ActorInfo(name=actor.name, role=actor.role, rank=actor.rank)


def _ask(method: str, *args: Any) -> Any:
    import ray

    conductor = ray.get_actor(CONDUCTOR, namespace=namespace_of(current().job_uid))
    return ray.get(getattr(conductor, method).remote(*args), timeout=CALL_TIMEOUT)
