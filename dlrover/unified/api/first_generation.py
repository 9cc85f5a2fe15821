"""
The builder of the first generation (`dlrover.python.unified.api.base` and `.rl`), as an adapter to the second: other method names, a module and a
class instead of one entry point, and a trainer with `init()` and `fit()` that calls groups as `self.RG_<ROLE>`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

from dlrover.unified.api.builder import DLJobBuilder, RLJobBuilder, RoleBuilder
from dlrover.unified.runtime.calls import RoleGroup
from dlrover.unified.runtime.methods import rpc

GROUP_PREFIX = "RG_"
_INVOCATION = "__dlrover_invocation__"


class FirstRoleBuilder(RoleBuilder):
    def per_node(self, num: int = 1) -> Self:
        return self.per_group(num)

    def enable_ray_auto_visible_device(self) -> Self:
        """It is on unless it was switched off."""
        return self


class _Types:
    """Kinds of jobs. They are labels."""

    dl_type_name = ""

    def dl_type(self, name: str) -> Self:
        warnings.warn(
            "This builder belongs to the first generation of the API. Use dlrover.python.unified.api.builder.",
            DeprecationWarning,
            stacklevel=2,
        )
        self.dl_type_name = name
        return self

    def SFT_type(self) -> Self:  # noqa: N802  # names in scripts
        return self.dl_type("SFT")

    def PRE_type(self) -> Self:  # noqa: N802
        return self.dl_type("PRE")

    def RL_type(self) -> Self:  # noqa: N802
        return self.dl_type("RL")

    def MULTIMODAL_type(self) -> Self:  # noqa: N802
        return self.dl_type("MULTIMODAL")


class FirstDLJobBuilder(_Types, DLJobBuilder):
    role_class = FirstRoleBuilder

    def workload(self, role: str, module: str, class_name: str = "") -> RoleBuilder:
        return super().workload(role.lower(), f"{module}.{class_name}" if class_name else module)

    def dlrover_run(self, command: str) -> Self:
        """One elastic role; its nodes run the normal agent."""
        return self.by_dlrover_run_cmd(command)


class FirstRLJobBuilder(_Types, RLJobBuilder):
    role_class = FirstRoleBuilder

    def trainer(self, module: str, class_name: str = "") -> RoleBuilder:
        return super().trainer(_entry(module, class_name))

    def actor(self, module: str, class_name: str = "") -> RoleBuilder:
        return super().actor(_entry(module, class_name))

    def rollout(self, module: str, class_name: str = "") -> RoleBuilder:
        return super().rollout(_entry(module, class_name))

    def reference(self, module: str, class_name: str = "") -> RoleBuilder:
        return super().reference(_entry(module, class_name))

    def reward(self, module: str, class_name: str = "") -> RoleBuilder:
        return super().reward(_entry(module, class_name))

    def critic(self, module: str, class_name: str = "") -> RoleBuilder:
        return super().critic(_entry(module, class_name))


class FirstTrainer:
    """A trainer of the first generation: `init()`, then `fit()`."""

    def init(self) -> None:
        """Before `fit`."""

    def fit(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define fit().")

    def is_recoverable(self) -> bool:
        """Kept for old scripts: the job's own rules say what restarts."""
        return False

    def run(self) -> None:
        self.init()
        self.fit()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(GROUP_PREFIX):
            raise AttributeError(name)
        return GroupProxy(name.removeprefix(GROUP_PREFIX))


class GroupProxy:
    """Calls a method on the whole group. Lists as long as the group are dealt out, one element to each."""

    def __init__(self, role: str) -> None:
        self._role = role

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return functools.partial(self._call, method)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        group = RoleGroup(self._role)
        values: Sequence[Any] = [*args, *kwargs.values()]
        is_dealt = (
            len(group) > 1
            and bool(values)
            and all(isinstance(each, list | tuple) and len(each) == len(group) for each in values)
        )
        return group.call(method, *args, _scatter=is_dealt, **kwargs).result()


def trainer_invocation(
    blocking: bool = True,
    is_async: bool = False,
    timeout: float = 10,
    target: str = "ALL",
    auto_shard: bool = True,
    **_: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a method that a trainer calls. Every call is waited for here; the group's answers come in the order of ranks."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, _INVOCATION, (blocking, is_async, timeout, target, auto_shard))
        marked: Callable[..., Any] = rpc()(function)
        return marked

    return mark


def _entry(module: str, class_name: str) -> str:
    return f"{module}.{class_name}" if class_name else module
