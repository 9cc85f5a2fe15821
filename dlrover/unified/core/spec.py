"""
A multi-role job as it was described: roles, what each needs, and whom a failure drags along. Checked when it is built.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from msgspec import Struct

from dlrover.protocol.errors import ConfigError

MAX_INSTANCES = 10_000


class OnFailure(enum.StrEnum):
    """What restarts when an instance of a role fails. If its budget is used up, the next one of this list does."""

    SELF = "self"
    """The role recovers inside itself; what reaches the ensemble is final, and the whole role starts again."""
    INSTANCE = "instance"
    ROLE = "role"
    JOB = "job"
    STOP = "stop"
    """Nothing: the job ends."""


ESCALATION = {
    OnFailure.SELF: OnFailure.ROLE,
    OnFailure.INSTANCE: OnFailure.ROLE,
    OnFailure.ROLE: OnFailure.JOB,
    OnFailure.JOB: OnFailure.STOP,
}


class RoleSpec(Struct, frozen=True, kw_only=True):
    name: str
    count: int = 1
    needs: tuple[str, ...] = ()
    """Roles whose instances are all ready before one of this role is made."""
    is_driver: bool = True
    """The job is over when all instances of all drivers ended well."""
    on_failure: OnFailure = OnFailure.JOB
    max_restarts: int = 3
    """Restarts of one instance by itself, and of the role as a whole. One comes back in each hour without a failure."""
    restart_pause: float = 1.0
    """Seconds before the second restart; twice as long before each further one, at most 30. The first one is at once."""
    max_failures_per_machine: int | None = None
    """With one failure more, an instance starts again only after the cluster was asked for another machine. None: it never is."""


class EnsembleSpec(Struct, frozen=True, kw_only=True):
    name: str
    roles: tuple[RoleSpec, ...]
    max_job_restarts: int = 3
    placement_timeout: float = 600.0
    """Seconds that the job waits for room for all its instances."""
    stop_grace: float = 10.0
    """Seconds that an instance has for its end before it is killed."""
    max_machine_replacements: int = 10
    """When another machine is to be replaced after so many, the job ends."""

    def role(self, name: str) -> RoleSpec:
        return next(role for role in self.roles if role.name == name)


def check_spec(spec: EnsembleSpec) -> EnsembleSpec:
    """Raises `ConfigError` with what is wrong and what to do."""
    names = [role.name for role in spec.roles]
    if not spec.roles:
        raise ConfigError(f"Job {spec.name} has no role. Add at least one.")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"Role {twice[0]} is defined {names.count(twice[0])} times. Give each role a name of its own."
        )
    for role in spec.roles:
        _check_role(role, names)
    if not any(role.is_driver for role in spec.roles):
        raise ConfigError(f"No role of job {spec.name} is a driver, so it would never end. Make one a driver.")
    if cycle := find_cycle({role.name: role.needs for role in spec.roles}):
        raise ConfigError(f"Roles need each other in a circle: {' -> '.join(cycle)}. Remove one of these needs.")
    if spec.max_job_restarts < 0:
        raise ConfigError(f"max_job_restarts must be at least 0 (got {spec.max_job_restarts}).")
    for name, seconds in (("placement_timeout", spec.placement_timeout), ("stop_grace", spec.stop_grace)):
        if not 0 <= seconds < float("inf"):
            raise ConfigError(f"{name} must be a number of seconds, 0 or more (got {seconds:g}).")
    return spec


def _check_role(role: RoleSpec, names: Sequence[str]) -> None:
    if not role.name.isidentifier():
        raise ConfigError(f"Role {role.name!r}: a name has letters, digits and underscores, and begins with no digit.")
    if not 1 <= role.count <= MAX_INSTANCES:
        raise ConfigError(f"Role {role.name}: count must be between 1 and {MAX_INSTANCES} (got {role.count}).")
    if role.max_restarts < 0:
        raise ConfigError(f"Role {role.name}: max_restarts must be at least 0 (got {role.max_restarts}).")
    if not 0 <= role.restart_pause < float("inf"):
        raise ConfigError(f"Role {role.name}: restart_pause must be 0 or more (got {role.restart_pause:g}).")
    for needed in role.needs:
        if needed not in names:
            raise ConfigError(f"Role {role.name} needs {needed}, which is not defined. Roles are {', '.join(names)}.")


def find_cycle(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Names along one circle, the first one twice; empty: there is none."""
    done: set[str] = set()
    for start in needs:
        path: list[str] = []
        if found := _walk(start, needs, path, done):
            return found
    return []


def _walk(name: str, needs: Mapping[str, Sequence[str]], path: list[str], done: set[str]) -> list[str]:
    if name in path:
        return [*path[path.index(name) :], name]
    if name in done:
        return []
    path.append(name)
    for needed in needs[name]:
        if found := _walk(needed, needs, path, done):
            return found
    path.pop()
    done.add(name)
    return []
