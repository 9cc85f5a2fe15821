"""
Descriptions of roles in the historical interface. They are pydantic models, because scripts print them, edit them and expect their errors.

At `submit` they become roles of an ensemble, and pydantic is left behind.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from dlrover.protocol.errors import ConfigError
from dlrover.unified.api.enums import WorkloadEntrypointType
from dlrover.unified.entry import EntryPointKind, read_entry
from dlrover.unified.plan import RankHome


class _Model(BaseModel):
    model_config = ConfigDict(populate_by_name=True, validate_assignment=True, extra="forbid")


class ResourceDesc(_Model):
    """Of one instance. Memory and disk in MB."""

    cpu: float = Field(default=0.0, ge=0)
    memory: int = Field(default=0, ge=0, validation_alias=AliasChoices("memory", "mem"))
    disk: int = Field(default=0, ge=0)
    accelerator: float = Field(default=0.0, ge=0, validation_alias=AliasChoices("accelerator", "acc", "gpu"))
    user_defined: dict[str, float] = Field(
        default_factory=dict, validation_alias=AliasChoices("user_defined", "ud_resource")
    )

    def is_empty(self) -> bool:
        """Memory alone does not place an instance."""
        return not (self.cpu or self.accelerator or any(self.user_defined.values()))


class NodeGroupFailoverDesc(_Model):
    enabled: bool = False
    group_label_key: str = ""
    timeout: int = Field(default=300, ge=30)
    """Seconds."""


class _WorkloadDesc(_Model):
    total: int = Field(default=1, ge=0, validation_alias=AliasChoices("total", "num", "number"))
    resource: ResourceDesc = Field(default_factory=ResourceDesc, validation_alias=AliasChoices("resource", "res"))
    envs: dict[str, str] = Field(default_factory=dict, validation_alias=AliasChoices("envs", "env", "environment"))
    per_node_max_failure: int = Field(default=3, ge=0)
    max_restart: int = Field(default=10, ge=0)
    group: str | None = None
    per_group: int = Field(default=1, ge=1)
    entry_point: str = Field(default="", validation_alias=AliasChoices("entry_point", "entrypoint"))
    config: dict[str, Any] = Field(default_factory=dict)
    rank_based_gpu_selection: bool = False
    is_driver: bool = True
    node_group_failover: NodeGroupFailoverDesc = Field(default_factory=NodeGroupFailoverDesc)

    @field_validator("entry_point")
    @classmethod
    def _normal_entry(cls, text: str) -> str:
        if not text:
            return text
        try:
            return read_entry(text).text
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _fits(self) -> Any:
        if self.total % self.per_group:
            raise ValueError(f"total {self.total} must be a multiple of per_group {self.per_group}.")
        if self.rank_based_gpu_selection and (self.per_group <= 1 or self.resource.accelerator > 1):
            raise ValueError(
                "rank_based_gpu_selection needs per_group above 1 and at most 1 accelerator for each instance."
            )
        return self

    @property
    def entrypoint_type(self) -> WorkloadEntrypointType:
        is_command = read_entry(self.entry_point).kind is EntryPointKind.COMMAND
        return WorkloadEntrypointType.PY_CMD if is_command else WorkloadEntrypointType.MODULE_FUNC

    @property
    def num_groups(self) -> int:
        return self.total // self.per_group


class ElasticWorkloadDesc(_WorkloadDesc):
    backend: Literal["elastic"] = "elastic"
    comm_pre_check: bool = True
    comm_auto_setup_process_group: bool = True
    comm_backend: str = "auto"
    comm_timeout_s: int | None = None
    home: RankHome | None = None
    """None: a script is forked, and a class or function runs in actors."""

    @model_validator(mode="after")
    def _is_home_possible(self) -> Any:
        if self.home is RankHome.ACTOR and self.entry_point and self.entrypoint_type is WorkloadEntrypointType.PY_CMD:
            raise ValueError(
                f"Actors cannot run the script {self.entry_point}. Give a class or function, or leave out in_actor()."
            )
        return self

    @property
    def is_forked(self) -> bool:
        is_command = self.entrypoint_type is WorkloadEntrypointType.PY_CMD
        return is_command if self.home is None else self.home is RankHome.FORKED


class SimpleWorkloadDesc(_WorkloadDesc):
    backend: Literal["simple"] = "simple"


class CustomWorkloadDesc(_WorkloadDesc):
    backend: Literal["custom"] = "custom"
    module_name: str
    class_name: str


WorkloadDesc = Annotated[ElasticWorkloadDesc | SimpleWorkloadDesc | CustomWorkloadDesc, Field(discriminator="backend")]
