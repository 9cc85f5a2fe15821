"""
The process-wide settings of the original's master, with their defaults.

A script may read them. Our master takes its settings from its command line: setting one here has no effect, and the log says
which option does the same, where one exists.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from dlrover.compat.launch.ports import find_free_port_from_env
from dlrover.compat.names.constants import CommunicationType, HangDetectionStrategy, PendingTimeoutStrategyType, UserEnv
from dlrover.compat.tools.singleton import Singleton
from dlrover.host.edges import contained

log = logging.getLogger(__name__)

_OPTIONS = {
    "dashboard_port": "--dashboard_port",
    "dynamic_failover_extension": "--dynamic-failover-extension",
    "enable_dashboard": "--enable_dashboard",
    "hang_detection": "--hang_detection",
    "hang_downtime": "--hang_downtime",
    "max_hang_downtime": "--max_hang_downtime",
    "pending_fail_strategy": "--pending_fail_strategy",
    "pre_check_operators": "--pre_check_ops",
    "seconds_to_timeout_task_process": "--task_process_timeout",
    "seconds_to_wait_pending_pod": "--pending_timeout",
}


class ConfigKeys:
    TRAIN_SPEED_RECORD_NUM = "train_speed_record_num"
    SECONDS_TO_START_AUTOSCALE_WORKER = "seconds_to_start_autoscale_worker"
    STEP_TO_ADJUST_WORKER = "step_to_adjust_worker"
    OPTIMIZE_WORKER_CPU_THRESHOLD = "optimize_worker_cpu_threshold"
    SECONDS_FOR_STABLE_WORKER_COUNT = "seconds_for_stable_worker_count"
    SECONDS_INTERVAL_TO_OPTIMIZE = "seconds_interval_to_optimize"
    FACTOR_TO_CUT_PENDING_CPU = "factor_to_cut_pending_cpu"
    FACTOR_TO_CUT_PENDING_MEM = "factor_to_cut_pending_mem"
    SECONDS_TO_WAIT_PENDING_POD = "seconds_to_wait_pending_pod"
    SECONDS_HUGE_TRAINING_THRESHOLD = "seconds_huge_training_threshold"
    GLOBAL_STEP_COUNT_TO_AUTO_WORKER = "global_step_count_to_auto_worker"
    SECONDS_TO_CHANGE_PS = "seconds_to_change_ps"
    SECONDS_TO_WAIT_FAILED_PS = "seconds_to_wait_failed_ps"
    HANG_CPU_USAGE_RATE = "hang_cpu_usage_rate"
    MAX_HANG_DOWNTIME = "max_hang_downtime"


class DefaultValues:
    """Seconds, but for `*_DOWNTIME` and `MAX_CKPT_THRESHOLD`, which are minutes."""

    SERVICE_TYPE = CommunicationType.COMM_SERVICE_GRPC
    TRAIN_SPEED_RECORD_NUM = 50
    SEC_TO_START_AUTOSCALE_WORKER = 90
    STEP_TO_ADJUST_WORKER = 200
    OPTIMIZED_WORKER_CPU_THRESHOLD = 20
    SEC_FOR_STABLE_WORKER_COUNT = 60
    SEC_INTERVAL_TO_OPTIMIZE = 300
    SEC_TO_TIMEOUT_TASK_PROCESS = 1800
    FACTOR_TO_CUT_PENDING_CPU = 2
    FACTOR_TO_CUT_PENDING_MEM = 2
    SEC_TO_WAIT_PENDING_POD = 900
    SEC_TO_WAIT_GROUP_PENDING_POD = 300
    PENDING_FAIL_STRATEGY = PendingTimeoutStrategyType.NECESSARY
    SEC_HUGE_TRAINING_THRESHOLD = 1800
    STEP_SAMPLE_COUNT_TO_AUTO_WORKER = 5
    SEC_TO_CHANGE_PS = 3600
    SEC_TO_WAIT_FAILED_PS = 600
    HANG_CPU_USAGE_RATE = 0.05
    GPU_NUM_PER_NODE = 8
    NPU_NUM_PER_NODE = 16
    MAX_METRIC_REC = 30
    MAX_TRAIN_STEPS = 1_000_000
    PRE_CHECK_OPS = (("dlrover.python.master.diagnosis.precheck_operator", "NoPreCheckOperator", True),)
    HANG_DOWNTIME = 10
    MIN_HANG_DOWNTIME = 2
    MAX_HANG_DOWNTIME = 120
    MAX_CKPT_THRESHOLD = 15
    FIRST_GROUP_IDX = 1000
    MAX_RELAUNCH_COUNT = 3
    MAX_JOB_RESTART_COUNT = 3
    MAX_GROUP_RELAUNCH_COUNT = 3
    TRAINING_ELASTIC_MODE = "base"


_DEFAULTS: dict[str, Any] = {
    "master_service_type": DefaultValues.SERVICE_TYPE,
    "reporter_cls": ("dlrover.python.common.event.reporter", "EventReporter"),
    "train_speed_record_num": DefaultValues.TRAIN_SPEED_RECORD_NUM,
    "seconds_to_autoscale_worker": DefaultValues.SEC_TO_START_AUTOSCALE_WORKER,
    "step_to_adjust_worker": DefaultValues.STEP_TO_ADJUST_WORKER,
    "optimize_worker_cpu_threshold": DefaultValues.OPTIMIZED_WORKER_CPU_THRESHOLD,
    "seconds_for_stable_worker_count": DefaultValues.SEC_FOR_STABLE_WORKER_COUNT,
    "seconds_interval_to_optimize": DefaultValues.SEC_INTERVAL_TO_OPTIMIZE,
    "seconds_to_timeout_task_process": DefaultValues.SEC_TO_TIMEOUT_TASK_PROCESS,
    "factor_to_cut_pending_cpu": DefaultValues.FACTOR_TO_CUT_PENDING_CPU,
    "factor_to_cut_pending_mem": DefaultValues.FACTOR_TO_CUT_PENDING_MEM,
    "seconds_to_wait_pending_pod": DefaultValues.SEC_TO_WAIT_PENDING_POD,
    "seconds_to_wait_group_pending_pod": DefaultValues.SEC_TO_WAIT_GROUP_PENDING_POD,
    "pending_fail_strategy": DefaultValues.PENDING_FAIL_STRATEGY,
    "seconds_huge_training_threshold": DefaultValues.SEC_HUGE_TRAINING_THRESHOLD,
    "sample_count_to_adjust_worker": DefaultValues.STEP_SAMPLE_COUNT_TO_AUTO_WORKER,
    "hang_cpu_usage_percentage": DefaultValues.HANG_CPU_USAGE_RATE,
    "seconds_interval_to_change_ps": DefaultValues.SEC_TO_CHANGE_PS,
    "seconds_to_wait_failed_ps": DefaultValues.SEC_TO_WAIT_FAILED_PS,
    "auto_worker_enabled": False,
    "auto_ps_enabled": False,
    "is_tfv1_ps": False,
    "relaunch_always": False,
    "hang_detection": HangDetectionStrategy.DO_NOTIFY,
    "hang_downtime": DefaultValues.HANG_DOWNTIME,
    "max_hang_downtime": DefaultValues.MAX_HANG_DOWNTIME,
    "gpu_per_node": DefaultValues.GPU_NUM_PER_NODE,
    "npu_per_node": DefaultValues.NPU_NUM_PER_NODE,
    "pre_check_operators": list(DefaultValues.PRE_CHECK_OPS),
    "max_relaunch_count": DefaultValues.MAX_RELAUNCH_COUNT,
    "max_group_relaunch_count": DefaultValues.MAX_GROUP_RELAUNCH_COUNT,
    "job_max_restart_count": DefaultValues.MAX_JOB_RESTART_COUNT,
    "training_elastic_mode": DefaultValues.TRAINING_ELASTIC_MODE,
    "dynamic_failover_extension": None,
    "enable_dashboard": False,
    "dashboard_port": 8080,
}


class Context(Singleton):
    master_port: int | None

    def __init__(self) -> None:
        self.__dict__.update(_DEFAULTS, master_port=None)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"The global context has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _DEFAULTS and value != self.__dict__.get(name):
            option = _OPTIONS.get(name)
            instead = f"give `dlrover master` {option}" if option else "this version has no such setting"
            log.warning("Context.%s=%r has no effect on the job: %s.", name, value, instead)
        super().__setattr__(name, value)

    @property
    def user_id(self) -> str:
        return os.environ.get(UserEnv.USER_ID, "")

    def config_master_port(self, port: int = 0) -> None:
        """The first free port of HOST_PORTS, else the given one, else any free one from 20000 to 30000."""
        is_given = port > 0 and not os.environ.get("HOST_PORTS")
        self.master_port = port if is_given else find_free_port_from_env()

    def get_param_value_from_brain(self, key_name: str, default_value: Any, dtype: Any = float) -> Any:
        """The default: no Brain is asked."""
        return dtype(default_value)

    def set_params_from_brain(self) -> None:
        """All stay as they are: no Brain is asked."""

    def print_config(self) -> None:
        log.info("DLRover global context = %s", self.__dict__)

    def pre_check_enabled(self) -> bool:
        return bool(self.get_pre_check_operators())

    def get_pre_check_operators(self) -> list[Any]:
        """One object of each class that can be imported; the others are left out with a warning."""
        operators = []
        for named in self.pre_check_operators or ():
            tell = partial(log.warning, "The pre-check operator %r is left out: %s", named)
            with contained(tell):  # an import and a constructor run the user's code
                operators.append(_class_of(named)())
        return operators

    def is_pre_check_operator_bypass(self, pre_check_op: object) -> bool:
        for named in self.pre_check_operators or ():
            if type(pre_check_op) is _class_of(named):
                return str(named[2] if len(named) > 2 else "").lower() in ("true", "yes", "t", "y", "1")
        return False


def _class_of(named: Sequence[Any]) -> Any:
    module, name = named[:2]
    return getattr(importlib.import_module(module), name)
