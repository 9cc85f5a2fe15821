"""From the historical configuration to an ensemble: what each setting means here."""

from __future__ import annotations

import logging
from typing import Any

from dlrover.protocol.errors import ConfigError
from dlrover.unified.api.config import JobConfig
from dlrover.unified.api.enums import ACCELERATOR_TYPE
from dlrover.unified.api.workload import CustomWorkloadDesc, ElasticWorkloadDesc
from dlrover.unified.core.spec import OnFailure
from dlrover.unified.plan import GroupRule, ProcessGroup
from dlrover.unified.surface import Ensemble, Role

log = logging.getLogger(__name__)

NO_SET_VARIABLES = (
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES",
    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES",
    "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS",
)
"""With them Ray leaves the variables of visible devices alone."""

LATER = 1
STOP, JOB, ROLE = 0, 1, 2
"""Of `failover_exec_strategy`."""
ISOLATION_OF_WORKER = 1.0
WORKING_DIR_VARIABLE = "DLROVER_WORKING_DIR"


def ensemble_of(config: JobConfig) -> Ensemble:
    """Raises `ConfigError`."""
    dl = config.dl_config
    if config.failover_trigger_strategy <= LATER:
        log.warning(
            "failover_trigger_strategy %d is treated as 2: a failure is handled when it happens.",
            config.failover_trigger_strategy,
        )
    together: dict[str, list[str]] = {}
    for name, desc in dl.workloads.items():
        if desc.group:
            together.setdefault(desc.group, []).append(name)
    return Ensemble(
        config.job_name,
        roles=[_role(name, desc, config) for name, desc in dl.workloads.items()],
        together=[names for names in together.values() if len(names) > 1],
        config=dl.user_config,
        env={name: str(value) for name, value in dl.global_envs.items()},
        working_dir=dl.global_envs.get(WORKING_DIR_VARIABLE, ""),
        max_job_restarts=config.job_max_restart,
        placement_timeout=config.master_create_timeout,
        max_machine_replacements=config.node_max_restart,
    )


def _role(name: str, desc: Any, config: JobConfig) -> Role:
    resources = dict(desc.resource.user_defined)
    if config.worker_isolation_schedule_resource:
        resources[config.worker_isolation_schedule_resource] = ISOLATION_OF_WORKER
    cpus, gpus = desc.resource.cpu, desc.resource.accelerator
    if config.dl_config.accelerator_type is ACCELERATOR_TYPE.CPU:
        cpus, gpus = max(cpus, gpus), 0.0
    elif config.dl_config.accelerator_type is ACCELERATOR_TYPE.TPU:
        resources["TPU"], gpus = gpus, 0.0
    if gpus == 0.5 and desc.per_group == 8 and not desc.rank_based_gpu_selection:
        log.warning(
            "Role %s: with 0.5 accelerators for each of 8 instances of a group, Ray may give one GPU to two of them.",
            name,
        )
    on_failure = {STOP: OnFailure.STOP, JOB: OnFailure.JOB, ROLE: OnFailure.ROLE}[config.failover_exec_strategy]
    is_elastic = isinstance(desc, ElasticWorkloadDesc)
    if isinstance(desc, CustomWorkloadDesc):
        entry = f"{desc.module_name}.{desc.class_name}"
    else:
        entry = desc.entry_point
    if not entry:
        raise ConfigError(f"Role {name} has no entry point.")
    if is_elastic and desc.is_forked:
        size = desc.per_group
        return Role.elastic(
            name,
            entry,
            nodes=desc.num_groups,
            nproc=size,
            cpus=cpus * size,
            gpus=gpus * size,
            memory_mb=desc.resource.memory * size,
            resources={key: amount * size for key, amount in resources.items()},
            driver=desc.is_driver,
            on_failure=OnFailure.STOP if on_failure is OnFailure.STOP else OnFailure.SELF,
            max_restarts=desc.max_restart,
            env=desc.envs,
            options=(f"--max-restarts={desc.max_restart}", *(["--network-check"] if desc.comm_pre_check else [])),
        ).of_old()
    is_by_rank = desc.rank_based_gpu_selection and gpus > 0
    group = None
    if is_elastic:
        if desc.home is None:
            log.info(
                "Role %s runs in actors, because its entry point is a dotted name. Its workers restart "
                "together and without snapshots in memory. To run them as forked workers, call .forked() on "
                "the role.",
                name,
            )
        on_failure = OnFailure.STOP if on_failure is OnFailure.STOP else OnFailure.ROLE
        group = ProcessGroup(
            is_set_up=desc.comm_auto_setup_process_group,
            backend=desc.comm_backend,
            timeout=desc.comm_timeout_s or 0,
            is_checked=desc.comm_pre_check,
        )
    return Role.simple(
        name,
        entry,
        count=desc.total,
        cpus=cpus,
        gpus=gpus,
        memory_mb=desc.resource.memory,
        resources=resources,
        driver=desc.is_driver,
        on_failure=on_failure,
        max_restarts=desc.max_restart,
        env={**(dict.fromkeys(NO_SET_VARIABLES, "true") if is_by_rank else {}), **desc.envs},
        per_group=desc.per_group,
        process_group=group,
    ).of_old(
        max_failures_per_machine=desc.per_node_max_failure,
        machine_group=_machine_group(desc),
        device_by_rank=is_by_rank,
    )


def _machine_group(desc: Any) -> GroupRule:
    rule = desc.node_group_failover
    return GroupRule(label=rule.group_label_key, timeout=rule.timeout) if rule.enabled else GroupRule()
