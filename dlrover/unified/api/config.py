"""The configuration of a whole job in the historical interface: `DLConfig` is what a builder makes, `JobConfig` what is submitted."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from dlrover.unified.api.enums import ACCELERATOR_TYPE, MasterStateBackendType
from dlrover.unified.api.workload import ResourceDesc, WorkloadDesc

ENVIRONMENT_PREFIX = "DLROVER_UNIFIED_"


class DLConfig(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True, validate_assignment=True)

    user_config: Any = Field(default_factory=dict)
    workloads: dict[str, WorkloadDesc] = Field(min_length=1)
    global_envs: dict[str, str] = Field(default_factory=dict)
    node_number: int = Field(default=1, ge=1)
    accelerator_type: ACCELERATOR_TYPE = ACCELERATOR_TYPE.GPU
    device_per_node: int = Field(default=8, ge=1)

    @field_validator("user_config", mode="before")
    @classmethod
    def _omega(cls, value: Any) -> Any:
        """A dict or a namespace becomes an OmegaConf with its interpolations resolved; other objects stay."""
        if value is None:
            value = {}
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        if not isinstance(value, Mapping) and not _is_omega(value):
            return value
        from omegaconf import OmegaConf

        conf = value if _is_omega(value) else OmegaConf.create(dict(value))
        OmegaConf.resolve(conf)
        return conf

    @field_serializer("user_config")
    def _plain(self, value: Any) -> Any:
        if not _is_omega(value):
            return value
        from omegaconf import OmegaConf

        return OmegaConf.to_container(value, resolve=True)

    @model_validator(mode="after")
    def _fits(self) -> DLConfig:
        groups: dict[str, list[str]] = {}
        for role, desc in self.workloads.items():
            if desc.resource.is_empty():
                raise ValueError(
                    f"Role {role}: give CPU, an accelerator or a custom resource. Memory alone cannot place an "
                    "instance on a machine."
                )
            groups.setdefault(desc.group or role, []).append(role)
        total = 0.0
        for name, roles in groups.items():
            numbers = {role: self.workloads[role].num_groups for role in roles}
            if len(set(numbers.values())) > 1:
                raise ValueError(f"Group {name}: all its roles need the same number of groups (got {numbers}).")
            size = sum(_accelerators(self.workloads[role].resource) * self.workloads[role].per_group for role in roles)
            if size > self.device_per_node + 0.05:
                raise ValueError(
                    f"Group {name} asks for {size:g} accelerators on one node, but a node has only "
                    f"{self.device_per_node}."
                )
            total += size * next(iter(numbers.values()))
        if total > self.node_number * self.device_per_node + 0.05:
            raise ValueError(
                f"The roles ask for {total:g} accelerators in all, but {self.node_number} nodes with "
                f"{self.device_per_node} each have only {self.node_number * self.device_per_node}."
            )
        return self


class JobConfig(BaseModel):
    model_config = ConfigDict(populate_by_name=True, extra="forbid")

    job_name: str
    dl_config: DLConfig
    master_cpu: int = Field(default=2, ge=0)
    master_mem: int = Field(default=4096, ge=0, validation_alias=AliasChoices("master_mem", "master_memory"))
    """MB."""
    master_create_timeout: float = Field(
        default=600.0, gt=0, validation_alias=AliasChoices("master_create_timeout", "timeout")
    )
    master_state_backend_type: MasterStateBackendType = MasterStateBackendType.RAY_INTERNAL
    master_state_backend_config: dict[str, Any] = Field(default_factory=dict)
    node_max_restart: int = 10
    job_max_restart: int = 10
    master_max_restart: int = 10
    failover_trigger_strategy: int = Field(default=2, ge=0, le=2)
    failover_exec_strategy: int = Field(default=1, ge=0, le=2)
    master_isolation_schedule_resource: str = ""
    worker_isolation_schedule_resource: str = ""


def new_config(
    dl_config: DLConfig, job_name: str | None, overrides: Mapping[str, Any], environ: Mapping[str, str]
) -> JobConfig:
    """A generated name is overruled by the environment, and that by arguments. Raises pydantic's ValidationError."""
    fields: dict[str, Any] = {"job_name": f"dlrover-{os.urandom(3).hex()}"}
    for name in JobConfig.model_fields:
        if name != "dl_config" and (value := environ.get(ENVIRONMENT_PREFIX + name.upper())) is not None:
            fields[name] = value
    fields.update(overrides)
    if job_name:
        fields["job_name"] = job_name
    return JobConfig(dl_config=dl_config, **fields)


def _accelerators(resource: ResourceDesc) -> float:
    return resource.accelerator


def _is_omega(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "omegaconf"
