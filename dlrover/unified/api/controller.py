"""`PrimeMasterApi`: what workers ask of the controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlrover.platforms.ray.access import namespace_of
from dlrover.protocol.errors import ConfigError
from dlrover.unified.api.enums import DiagnosticResponsibility
from dlrover.unified.api.worker import ActorInfo, actor_named
from dlrover.unified.runtime.calls import RoleActor
from dlrover.unified.runtime.current import current
from dlrover.unified.shell.messages import ACCOUNT, CONDUCTOR

CALL_TIMEOUT = 60.0
NAMES_A_CAUSE = (DiagnosticResponsibility.ROOT_CAUSE, DiagnosticResponsibility.RELATED)


class PrimeMasterApi:
    """From inside a worker that is an actor. Answers are waited for."""

    @staticmethod
    def get_status() -> Any:
        from dlrover.unified.api.submit import MasterStatus

        status = ACCOUNT.decode(_ask("account")).status
        return MasterStatus(status.stage, status.exit_code, status.num_job_restarts)

    @staticmethod
    def start() -> None:
        """It has started before any worker runs."""

    @staticmethod
    def shutdown() -> None:
        PrimeMasterApi.stop()

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
        """Raises ValueError for an unknown name."""
        actor = _known(name)
        return ActorInfo(name=actor.name, role=actor.role, rank=actor.rank)

    @staticmethod
    def report_actor_restarted(name: str) -> None:
        """The conductor sees that itself. Raises ValueError for an unknown name."""
        _known(name)

    @staticmethod
    def report_execution_result(name: str, result: object) -> None:
        """The conductor sees that itself. Raises ValueError for an unknown name."""
        _known(name)

    @staticmethod
    def report_diagnostic_info(name: str, info: Any) -> None:
        """
        `info`: `type`, `responsibility`, `code`, `reason` and others, as a dict or an object.

        With ROOT_CAUSE or RELATED the next failure of the job counts for this worker and its machine. Raises ValueError for an unknown name.
        """
        actor = _known(name)
        told = info if isinstance(info, Mapping) else vars(info)
        if DiagnosticResponsibility(told.get("responsibility", DiagnosticResponsibility.UNKNOWN)) in NAMES_A_CAUSE:
            words = [str(told[key]) for key in ("code", "reason") if told.get(key) not in (None, "")]
            _ask("blame", actor.role, actor.rank, ": ".join(words) or "no reason was given")


def _known(name: str) -> RoleActor:
    try:
        return actor_named(name)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _ask(method: str, *args: Any) -> Any:
    import ray

    conductor = ray.get_actor(CONDUCTOR, namespace=namespace_of(current().job_uid))
    return ray.get(getattr(conductor, method).remote(*args), timeout=CALL_TIMEOUT)
