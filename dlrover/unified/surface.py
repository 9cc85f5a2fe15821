"""
Multi-role jobs as users write them: roles that need each other, and an ensemble that starts, watches and recovers them.

    job = Ensemble("grpo", roles=[
        Role.elastic("policy", "train.py", nodes=1, nproc=2, cpus=2),
        Role.simple("rollout", "grpo.rollout.Rollout", count=2, cpus=1, needs=["policy"]),
    ], streams=[Role.stream("samples", batch=16)]).submit()
    job.wait()
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from dlrover.protocol.errors import ConfigError
from dlrover.protocol.units import in_bytes
from dlrover.unified.core.spec import EnsembleSpec, OnFailure, RoleSpec, check_spec
from dlrover.unified.entry import EntryPointKind, check_entry, read_entry
from dlrover.unified.layout import CPU, GPU, MEMORY, BundleLayout, RoleSize, Spread, lay_out
from dlrover.unified.plan import EnsemblePlan, GroupRule, ProcessGroup, RankHome, RoleKind, RolePlan

if TYPE_CHECKING:
    from dlrover.unified.shell.driver import EnsembleHandle


class Role(Struct, frozen=True, kw_only=True):
    """Made by `simple`, `elastic` or `stream`."""

    name: str
    kind: RoleKind
    entry: str
    count: int = 1
    """Instances; of an elastic role: nodes that have a bundle of their own."""
    max_nodes: int = 1
    nproc: int = 1
    demand: Mapping[str, float]
    memory_mb: int = 0
    needs: tuple[str, ...] = ()
    is_driver: bool = True
    on_failure: OnFailure = OnFailure.JOB
    max_restarts: int = 3
    restart_pause: float = 1.0
    env: Mapping[str, str] = {}
    per_group: int = 1
    options: tuple[str, ...] = ()
    """Of `dlrover-run`, for an elastic role."""
    standby: int = 0
    takes_calls: bool = True
    batch: int = 0
    lease: float = 0.0
    process_group: ProcessGroup | None = None
    max_failures_per_machine: int | None = None
    machine_group: GroupRule = GroupRule()
    is_device_by_rank: bool = False
    is_named_as_of_old: bool = False
    home: RankHome | None = None
    """None: as its kind has it, which is forked for an elastic role."""

    def forked(self) -> Role:
        """An elastic role whose ranks are forked below node actors. This is the default, and undoes `in_actor`."""
        return structs.replace(self, home=RankHome.FORKED)

    def in_actor(self) -> Role:
        """
        An elastic role whose ranks are actors, for code that needs Ray in the process of the rank.

        They join a process group before the entry point runs, and restart together. They have no agent, and so no snapshots in memory, no warm
        restarts, no changing number of nodes and no diagnosis.
        """
        return structs.replace(self, home=RankHome.ACTOR)

    def of_old(
        self,
        *,
        max_failures_per_machine: int | None = None,
        machine_group: GroupRule | None = None,
        device_by_rank: bool = False,
    ) -> Role:
        """Its instances also find the variables and names of the historical interface. Extensions may replace their machines."""
        return structs.replace(
            self,
            is_named_as_of_old=True,
            max_failures_per_machine=max_failures_per_machine,
            machine_group=machine_group or self.machine_group,
            is_device_by_rank=device_by_rank,
        )

    @classmethod
    def simple(
        cls,
        name: str,
        entry: str,
        *,
        count: int = 1,
        cpus: float = 1.0,
        gpus: float = 0.0,
        memory_mb: int = 0,
        resources: Mapping[str, float] | None = None,
        needs: Sequence[str] = (),
        driver: bool = False,
        on_failure: str | OnFailure = "",
        max_restarts: int = 3,
        restart_pause: float = 1.0,
        env: Mapping[str, str] | None = None,
        per_group: int = 1,
        process_group: ProcessGroup | None = None,
    ) -> Role:
        """`count` actors that each run the entry point and serve its `@rpc` methods. `driver`: the job waits for them."""
        return cls(
            name=name,
            kind=RoleKind.SIMPLE,
            entry=entry,
            count=count,
            demand=_demand(cpus, gpus, memory_mb, resources or {}),
            needs=tuple(needs),
            is_driver=driver,
            on_failure=_on_failure(name, on_failure or (OnFailure.JOB if driver else OnFailure.INSTANCE)),
            max_restarts=max_restarts,
            restart_pause=restart_pause,
            env=dict(env or {}),
            per_group=per_group,
            process_group=process_group,
        )

    @classmethod
    def elastic(
        cls,
        name: str,
        entry: str,
        *,
        nodes: int | tuple[int, int] = 1,
        nproc: int = 1,
        cpus: float = 1.0,
        gpus: float = 0.0,
        memory_mb: int = 0,
        resources: Mapping[str, float] | None = None,
        standby: int = 0,
        needs: Sequence[str] = (),
        driver: bool = True,
        on_failure: str | OnFailure = OnFailure.SELF,
        max_restarts: int = 3,
        restart_pause: float = 1.0,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        takes_calls: bool | None = None,
    ) -> Role:
        """
        An elastic job: `nproc` workers on each node, with all that `dlrover-run` does. `cpus` and the others: of one node.

        `takes_calls`: its script calls `serve` or publishes weights. None: a class or function takes calls, a script does not.
        """
        least, most = (nodes, nodes) if isinstance(nodes, int) else nodes
        if not 1 <= least <= most:
            raise ConfigError(
                f"Role {name}: nodes must be a number of 1 or more, or (min, max) with min <= max (got {nodes})."
            )
        return cls(
            name=name,
            kind=RoleKind.ELASTIC,
            entry=entry,
            count=least,
            max_nodes=most,
            nproc=nproc,
            demand=_demand(cpus, gpus, memory_mb, resources or {}),
            memory_mb=memory_mb,
            needs=tuple(needs),
            is_driver=driver,
            on_failure=_on_failure(name, on_failure),
            max_restarts=max_restarts,
            restart_pause=restart_pause,
            env=dict(env or {}),
            options=tuple(options),
            standby=standby,
            takes_calls=read_entry(entry).kind is not EntryPointKind.COMMAND if takes_calls is None else takes_calls,
        )

    @classmethod
    def stream(
        cls, name: str, *, batch: int, lease: float = 30.0, max_restarts: int = 100, restart_pause: float = 1.0
    ) -> Role:
        """Hands items from feeders to trainers, `batch` keys for each step. It may be lost: what it held is made again."""
        if batch < 1 or not lease > 0:
            raise ConfigError(
                f"Stream {name}: batch must be at least 1 (got {batch}) and lease above 0 s (got {lease:g})."
            )
        return cls(
            name=name,
            kind=RoleKind.STREAM,
            entry="",
            demand={},
            is_driver=False,
            on_failure=OnFailure.INSTANCE,
            max_restarts=max_restarts,
            restart_pause=restart_pause,
            batch=batch,
            lease=lease,
        )


class Ensemble:
    """A multi-role job. `build` checks it whole; `submit` starts it on a Ray cluster."""

    def __init__(
        self,
        name: str,
        *,
        roles: Sequence[Role],
        together: Sequence[Sequence[str]] = (),
        config: object = None,
        env: Mapping[str, str] | None = None,
        working_dir: str = "",
        spread: str | Spread = Spread.PACK,
        max_job_restarts: int = 3,
        placement_timeout: float = 600.0,
        stop_grace: float = 10.0,
        max_machine_replacements: int = 10,
    ) -> None:
        """`config`: any object that can be pickled; instances find it in `current().config`."""
        self.name = name
        self.roles = tuple(roles)
        self._together = together
        self._config = config
        self._env = dict(env or {})
        self._working_dir = os.path.abspath(working_dir) if working_dir else ""
        self._spread = spread
        self._limits = (max_job_restarts, placement_timeout, stop_grace)
        self._max_machine_replacements = max_machine_replacements

    def build(self, job_uid: str = "") -> EnsemblePlan:
        """Raises `ConfigError` with all that can be known before a cluster is asked."""
        from dlrover.cli.launch.discovery import new_launch

        if not self.name or not all(letter.isalnum() or letter in "-_." for letter in self.name):
            raise ConfigError(f"Job name {self.name!r}: use letters, digits, dots, dashes and underscores.")
        if self._working_dir and not os.path.isdir(self._working_dir):
            raise ConfigError(f"working_dir {self._working_dir}: there is no such directory.")
        max_job_restarts, placement_timeout, stop_grace = self._limits
        roles = [_housed(role) for role in self.roles]
        spec = check_spec(
            EnsembleSpec(
                name=self.name,
                roles=tuple(_spec_of(role) for role in roles),
                max_job_restarts=max_job_restarts,
                placement_timeout=placement_timeout,
                stop_grace=stop_grace,
                max_machine_replacements=self._max_machine_replacements,
            )
        )
        uid = job_uid or new_launch()
        return EnsemblePlan(
            job_uid=uid,
            spec=spec,
            roles={role.name: self._plan_of(role, uid) for role in roles},
            layout=self.layout(),
            config=pickle.dumps(self._config),
            environ=self._env,
        )

    def layout(self) -> BundleLayout:
        """Raises `ConfigError`."""
        try:
            spread = Spread(self._spread)
        except ValueError as error:
            raise ConfigError(f"spread {self._spread!r}: give one of {', '.join(Spread)}.") from error
        placed = [
            RoleSize(name=role.name, count=role.count, demand=role.demand, per_group=role.per_group)
            for role in map(_housed, self.roles)
        ]
        return lay_out(placed, self._together, spread=spread)

    def submit(self, address: str = "auto") -> EnsembleHandle:
        """Raises `ConfigError`; then nothing of the job is left. A connection to Ray that is there is used."""
        from dlrover.unified.shell.driver import submit_plan

        return submit_plan(self.build(), address=address, working_dir=self._working_dir)

    def _plan_of(self, role: Role, job_uid: str) -> RolePlan:
        if role.kind is RoleKind.STREAM:
            return RolePlan(kind=role.kind, batch=role.batch, lease=role.lease)
        entry = read_entry(role.entry)
        if role.kind is RoleKind.SIMPLE:
            check_entry(entry, role.name, working_dir=self._working_dir)
            return RolePlan(
                kind=role.kind,
                entry=entry,
                num_ranks=role.count,
                local_world_size=role.per_group,
                environ=dict(role.env),
                takes_calls=role.takes_calls,
                process_group=role.process_group,
                machine_group=role.machine_group,
                is_device_by_rank=role.is_device_by_rank,
                is_named_as_of_old=role.is_named_as_of_old,
            )
        if entry.kind is not EntryPointKind.COMMAND:
            check_entry(entry, role.name, working_dir=self._working_dir)
        return RolePlan(
            kind=role.kind,
            num_ranks=role.max_nodes * role.nproc,
            local_world_size=role.nproc,
            environ=dict(role.env),
            job=_elastic_plan(role, self.name, self._working_dir),
            takes_calls=role.takes_calls,
            is_named_as_of_old=role.is_named_as_of_old,
        )


def _housed(role: Role) -> Role:
    """As it runs: where ranks are actors, they are the instances of a simple role. Raises `ConfigError`."""
    if role.home is None:
        return role
    if role.kind is not RoleKind.ELASTIC:
        switch = "forked" if role.home is RankHome.FORKED else "in_actor"
        raise ConfigError(
            f"Role {role.name}: {switch}() applies only to roles of Role.elastic, but this is a {role.kind} role."
        )
    if role.home is RankHome.FORKED:
        return role
    _check_in_actor(role)
    return structs.replace(
        role,
        kind=RoleKind.SIMPLE,
        count=role.count * role.nproc,
        per_group=role.nproc,
        demand={name: amount / role.nproc for name, amount in role.demand.items()},
        on_failure=OnFailure.ROLE if role.on_failure is OnFailure.SELF else role.on_failure,
        process_group=ProcessGroup(),
    )


def _check_in_actor(role: Role) -> None:
    """Raises `ConfigError` for what only an agent can do."""
    prefix = f"Role {role.name} in actors"
    if role.nproc < 1:
        raise ConfigError(f"{prefix}: nproc must be at least 1 (got {role.nproc}).")
    if read_entry(role.entry).kind is EntryPointKind.COMMAND:
        raise ConfigError(f"{prefix}: actors cannot run a script. Give a class or function, or leave out in_actor().")
    if role.count != role.max_nodes:
        raise ConfigError(
            f"{prefix}: the number of nodes cannot change. Give one number (got {role.count} to {role.max_nodes}), or leave out in_actor()."
        )
    if role.standby:
        raise ConfigError(
            f"{prefix}: roles in actors have no agents, so they cannot have standby nodes (got {role.standby}). "
            "Leave out standby."
        )
    if role.options:
        raise ConfigError(
            f"{prefix}: options of dlrover-run have no effect (got {' '.join(role.options)}). Leave out options."
        )
    if role.on_failure is OnFailure.INSTANCE:
        raise ConfigError(
            f"{prefix}: its ranks train together, so they must restart together. Give on_failure role, job or "
            "stop (got instance)."
        )
    on_node = role.demand.get(GPU, 0.0)
    gpus = on_node / role.nproc
    if 0 < gpus < 1 and math.floor(1 / gpus) * on_node < role.nproc:
        raise ConfigError(
            f"{prefix}: {role.nproc} ranks do not fit on {on_node:g} GPUs of a node, because Ray gives a rank a "
            "share of one GPU only."
        )
    if gpus > 1 and not gpus.is_integer():
        raise ConfigError(
            f"{prefix}: each of the {role.nproc} ranks of a node gets {gpus:g} GPUs. Above 1, Ray accepts only "
            "whole numbers."
        )


def _elastic_plan(role: Role, job_name: str, working_dir: str) -> Any:
    from dlrover.cli.ray.plan import read_run

    extra = {name: amount for name, amount in role.demand.items() if name not in (CPU, GPU, MEMORY)}
    entry = read_entry(role.entry)
    if entry.kind is EntryPointKind.COMMAND:
        command = entry.words
    else:
        command = ["-m", "dlrover.unified.runtime.forked_entry", entry.text]
    argv = [
        f"--nodes={role.count}:{role.max_nodes}",
        f"--cpus={role.demand.get(CPU, 0.0)}",
        f"--gpus={int(role.demand.get(GPU, 0.0))}",
        f"--memory={role.memory_mb}",
        f"--standby={role.standby}",
        f"--job-name={job_name}.{role.name}",
        *(f"--resource={name}={amount}" for name, amount in extra.items()),
        *([f"--working-dir={working_dir}"] if working_dir else []),
        "--",
        f"--nproc-per-node={role.nproc}",
        *role.options,
        *command,
    ]
    try:
        return read_run(argv, os.environ).plan
    except ConfigError as error:
        raise ConfigError(f"Role {role.name}: {error}") from error


def _spec_of(role: Role) -> RoleSpec:
    return RoleSpec(
        name=role.name,
        count=1 if role.kind is RoleKind.ELASTIC else role.count,
        needs=role.needs,
        is_driver=role.is_driver,
        on_failure=role.on_failure,
        max_restarts=role.max_restarts,
        restart_pause=role.restart_pause,
        max_failures_per_machine=role.max_failures_per_machine,
    )


def _demand(cpus: float, gpus: float, memory_mb: int, resources: Mapping[str, float]) -> dict[str, float]:
    demand = {CPU: float(cpus), GPU: float(gpus), MEMORY: float(in_bytes(memory_mb)), **resources}
    for name, amount in demand.items():
        if not 0 <= amount < float("inf"):
            raise ConfigError(f"{name} must be 0 or more (got {amount}).")
    return {name: amount for name, amount in demand.items() if amount}


def _on_failure(name: str, text: str | OnFailure) -> OnFailure:
    try:
        return OnFailure(text)
    except ValueError as error:
        raise ConfigError(f"Role {name}: on_failure {text!r}: give one of {', '.join(OnFailure)}.") from error
