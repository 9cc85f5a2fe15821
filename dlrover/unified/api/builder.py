"""
The historical builder: `DLJobBuilder().node_num(2).role("policy").train("proj.policy.Policy")…build().submit("name")`.

Each method returns a builder. A role's builder hands what it does not know to the job's, so that `.end()` may be left out.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import TypeAdapter

from dlrover.unified.api.config import DLConfig, new_config
from dlrover.unified.api.enums import ACCELERATOR_TYPE, DLStreamType, RLRoleType
from dlrover.unified.api.translate import NO_SET_VARIABLES
from dlrover.unified.api.workload import WorkloadDesc
from dlrover.unified.plan import RankHome

SHORTEST_GROUP_TIMEOUT = 30
_ADAPTER: TypeAdapter[Any] = TypeAdapter(WorkloadDesc)


class DLJob:
    """What a builder has built. Its descriptions may still be edited."""

    def __init__(self, config: DLConfig, stream_type: DLStreamType, collocations: Sequence[set[str]]) -> None:
        self.dl_config = config
        self.stream_type = stream_type
        self.collocations = list(collocations)

    @property
    def workloads(self) -> dict[str, Any]:
        return self.dl_config.workloads

    def get_workload(self, role: str) -> Any:
        return self.workloads[role]

    @property
    def node_num(self) -> int:
        return self.dl_config.node_number

    @property
    def device_type(self) -> ACCELERATOR_TYPE:
        return self.dl_config.accelerator_type

    @property
    def config(self) -> Any:
        return self.dl_config.user_config

    @property
    def env(self) -> dict[str, str]:
        return self.dl_config.global_envs

    def model_dump_json(self, **options: Any) -> str:
        return self.dl_config.model_dump_json(**options)

    def submit(self, job_name: str | None = None, blocking: bool = True, **overrides: Any) -> Any:
        """The exit code; not blocking: a handle that equals 0."""
        from dlrover.unified.api.submit import submit

        return submit(new_config(self.dl_config, job_name, overrides, os.environ), blocking=blocking)


class RLJob(DLJob):
    pass


class RoleBuilder:
    def __init__(self, parent: DLJobBuilder, role: str, backend: str, entrypoint: str) -> None:
        self._parent = parent
        self.role_name = role
        self.fields: dict[str, Any] = {"backend": backend, "entry_point": entrypoint, "envs": {}}
        self._nnodes: int | None = None
        self._resource: dict[str, Any] = {}

    def total(self, num: int = 1) -> Self:
        self.fields["total"] = num
        return self

    def per_group(self, num: int = 1) -> Self:
        self.fields["per_group"] = num
        return self._recount()

    def nnodes(self, num: int) -> Self:
        self._nnodes = num
        return self._recount()

    def nproc_per_node(self, num: int) -> Self:
        self._nnodes = self._nnodes or 1
        return self.per_group(num)

    def resource(self, cpu: float = 0, memory: int = 0, disk: int = 0, accelerator: float = 0, **others: Any) -> Self:
        """Of one instance; memory and disk in MB. Aliases: mem, acc, gpu, ud_resource, user_defined."""
        given = {"cpu": cpu, "memory": memory, "disk": disk, "accelerator": accelerator}
        self._resource = {name: value for name, value in {**given, **others}.items() if value}
        return self

    def env(self, variables: Mapping[str, str] | None = None) -> Self:
        self.fields["envs"] |= dict(variables or {})
        return self

    def not_driver(self) -> Self:
        self.fields["is_driver"] = False
        return self

    def forked(self) -> Self:
        """Of a role of `train`: its workers are forked, also those of a class or function."""
        return self._live(RankHome.FORKED)

    def in_actor(self) -> Self:
        """Of a role of `train`: each worker is an actor. A class or function is that without this, too."""
        return self._live(RankHome.ACTOR)

    def disable_ray_auto_visible_device(self) -> Self:
        return self.env(dict.fromkeys(NO_SET_VARIABLES, "true"))

    def enable_node_group_failover(self, group_label_key: str, timeout: int = 300) -> Self:
        if timeout >= SHORTEST_GROUP_TIMEOUT:
            self.fields["node_group_failover"] = {
                "enabled": True,
                "group_label_key": group_label_key,
                "timeout": timeout,
            }
        return self

    def sub_stage(self, stages: Sequence[str] | None = None) -> Self:
        """Kept for old scripts, without effect."""
        return self

    def end(self) -> DLJobBuilder:
        return self._parent

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._parent, name)

    def build_desc(self) -> dict[str, Any]:
        return {**self.fields, "resource": self._resource or {"accelerator": 1}}

    def _live(self, home: RankHome) -> Self:
        if self.fields["backend"] != "elastic":
            switch = "forked" if home is RankHome.FORKED else "in_actor"
            raise ValueError(
                f"Role {self.role_name}: {switch}() applies only to roles of train(). A role of run() always "
                "runs in actors."
            )
        self.fields["home"] = home
        return self

    def _recount(self) -> Self:
        if self._nnodes is not None:
            self.fields["total"] = self._nnodes * self.fields.get("per_group", 1)
        return self


class DLJobBuilder:
    job_class: type[DLJob] = DLJob
    role_class: type[RoleBuilder] = RoleBuilder

    def __init__(self) -> None:
        self._node_num = 1
        self._device_per_node = 8
        self._device_type = "GPU"
        self._config: Any = {}
        self._env: dict[str, str] = {}
        self._roles: dict[str, RoleBuilder] = {}
        self._next_role: str | None = None
        self._collocations: list[set[str]] = []
        self._stream_type = DLStreamType.TASK_STREAM
        self._elastic_fields: dict[str, Any] = {}

    def node_num(self, num: int = 1) -> Self:
        self._node_num = num
        return self

    def device_per_node(self, num: int = 8) -> Self:
        self._device_per_node = num
        return self

    def device_type(self, device_type: str = "GPU") -> Self:
        self._device_type = device_type
        return self

    def config(self, config: Any = None) -> Self:
        self._config = config
        return self

    def global_env(self, env: Mapping[str, str] | None = None) -> Self:
        self._env |= dict(env or {})
        return self

    def role(self, name: str) -> Self:
        self._next_role = name
        return self

    def run(self, entrypoint: str) -> RoleBuilder:
        if self._next_role is None:
            raise ValueError("No role has a name yet. Start with: role(NAME).run(ENTRYPOINT).")
        return self._add("simple", entrypoint)

    def train(self, entrypoint: str) -> RoleBuilder:
        self._next_role = self._next_role or "ELASTIC"
        return self._add("elastic", entrypoint)

    def workload(self, role: str, entrypoint: str) -> RoleBuilder:
        return self.role(role).run(entrypoint)

    def with_collocation(self, *roles: str) -> Self:
        """These roles share devices."""
        self._collocations.append({self._known_name(role) for role in roles})
        return self

    def with_collocation_all(self, *exclude: str) -> Self:
        left = {self._known_name(role) for role in exclude}
        self._collocations.append({role for role in self._roles if role not in left})
        return self

    def as_task_stream(self) -> Self:
        self._stream_type = DLStreamType.TASK_STREAM
        return self

    def as_data_stream(self) -> Self:
        self._stream_type = DLStreamType.DATA_STREAM
        return self

    def no_setup_process_group(self) -> Self:
        self._elastic_fields["comm_auto_setup_process_group"] = False
        return self

    def skip_node_check(self) -> Self:
        self._elastic_fields["comm_pre_check"] = False
        return self

    def by_dlrover_run_cmd(self, command: str) -> Self:
        """One elastic role from a command line of dlrover-run or torchrun."""
        from dlrover.cli.options.parser import parse

        words = shlex.split(command)
        if not words or words[0] not in ("dlrover-run", "torchrun"):
            raise ValueError(f"The command must begin with dlrover-run or torchrun (got {command!r}).")
        parsed = parse(words[1:], {})
        nodes, nproc = parsed.text("nnodes") or "1", parsed.text("nproc_per_node") or "1"
        if not nodes.rpartition(":")[2].isdigit() or not nproc.isdigit():
            raise ValueError(f"--nnodes {nodes} and --nproc-per-node {nproc} must be whole numbers.")
        if not parsed.script:
            raise ValueError(f"The command contains no script: {command!r}.")
        num_nodes = int(nodes.rpartition(":")[2])
        if words[0] == "dlrover-run" and not parsed.flag("network_check"):
            self.skip_node_check()
        builder = self.train(shlex.join([parsed.script, *parsed.script_args]))
        builder.nnodes(num_nodes).nproc_per_node(int(nproc))
        return self.node_num(num_nodes).device_per_node(max(self._device_per_node, int(nproc)))

    def build(self) -> Any:
        """Raises pydantic's ValidationError, which is a ValueError."""
        descs = {name: role.build_desc() for name, role in self._roles.items()}
        for desc in descs.values():
            if desc["backend"] == "elastic":
                desc.update(self._elastic_fields)
        self._collocate(descs)
        self._check(descs)
        workloads = {name: _ADAPTER.validate_python(desc) for name, desc in descs.items()}
        config = DLConfig(
            user_config=self._config,
            workloads=workloads,
            global_envs=self._env,
            node_number=self._node_num,
            accelerator_type=ACCELERATOR_TYPE(self._device_type),
            device_per_node=self._device_per_node,
        )
        return self.job_class(config, self._stream_type, self._collocations)

    def _add(self, backend: str, entrypoint: str) -> RoleBuilder:
        role = self._next_role
        assert role is not None
        self._next_role = None
        if role in self._roles:
            raise ValueError(f"Role {role} is defined twice.")
        self._roles[role] = builder = self._new_role(role, backend, entrypoint)
        return builder

    def _new_role(self, role: str, backend: str, entrypoint: str) -> RoleBuilder:
        return self.role_class(self, role, backend, entrypoint)

    def _known_name(self, role: str) -> str:
        """As it is written; scripts of the original may give lower case for a role in upper case."""
        return role.upper() if role not in self._roles and role.upper() in self._roles else role

    def _collocate(self, descs: dict[str, dict[str, Any]]) -> None:
        seen: set[str] = set()
        for place, roles in enumerate(self._collocations):
            for role in sorted(roles):
                if role not in descs:
                    raise ValueError(
                        f"The collocation names the role {role}, which is not defined. Roles are {', '.join(descs)}."
                    )
                if role in seen or descs[role].get("group"):
                    raise ValueError(f"Role {role} is in more than one collocation.")
                seen.add(role)
                descs[role]["group"] = f"collocation_{place}"
                descs[role]["resource"] = {
                    **{k: v for k, v in descs[role]["resource"].items() if k not in ("accelerator", "acc", "gpu")},
                    "accelerator": round(1 / len(roles), 2),
                }

    def _check(self, descs: Mapping[str, Any]) -> None:
        """Rules of a kind of job."""


class RLJobBuilder(DLJobBuilder):
    job_class = RLJob

    def trainer(self, entrypoint: str) -> RoleBuilder:
        return self.role(RLRoleType.TRAINER.name).run(entrypoint)

    def actor(self, entrypoint: str) -> RoleBuilder:
        return self.role(RLRoleType.ACTOR.name).train(entrypoint)

    def rollout(self, entrypoint: str) -> RoleBuilder:
        return self.role(RLRoleType.ROLLOUT.name).run(entrypoint)

    def reference(self, entrypoint: str) -> RoleBuilder:
        return self.role(RLRoleType.REFERENCE.name).run(entrypoint)

    def reward(self, entrypoint: str) -> RoleBuilder:
        return self.role(RLRoleType.REWARD.name).run(entrypoint)

    def critic(self, entrypoint: str) -> RoleBuilder:
        return self.role(RLRoleType.CRITIC.name).train(entrypoint)

    def with_collocation_all(self, *exclude: str) -> Self:
        return super().with_collocation_all(*{*exclude, RLRoleType.TRAINER.name} & self._roles.keys())

    def _new_role(self, role: str, backend: str, entrypoint: str) -> RoleBuilder:
        builder = super()._new_role(role, backend, entrypoint)
        if role == RLRoleType.TRAINER.name:
            return builder.total(1).resource(cpu=4, memory=8192)
        return builder.not_driver()

    def _check(self, descs: Mapping[str, Any]) -> None:
        if self._stream_type is not DLStreamType.TASK_STREAM:
            raise ValueError("Reinforcement learning jobs are always task streams. Remove as_data_stream().")
        known = [role.name for role in RLRoleType]
        if unknown := [role for role in descs if role not in known]:
            raise ValueError(f"Role {unknown[0]} is unknown to RLJobBuilder. Roles are {', '.join(known)}.")
        if RLRoleType.ACTOR.name not in descs:
            raise ValueError("A reinforcement learning job needs the role ACTOR. Add actor(ENTRYPOINT).")
