"""
The table of the historical names: where each lives now, and which are not there yet.

Only names that users write in their scripts, and those that extensions are known to use. `MISSING` says of a name which part of the
software it belongs to, so that a script stops with a sentence and not with a riddle.
"""

from __future__ import annotations

from collections.abc import Mapping

_STORAGE = "dlrover.snapshot.user_storage"
_FAILOVER = "dlrover.agent.failover"
_ACTIONS = "dlrover.master.diagnosis_actions"
_DATA = "dlrover.agent.old_diagnosis_data"
_SHARED = "dlrover.trainer.shared_objects"
_SAVER = "dlrover.trainer.torch.flash_checkpoint.old_saver"
_CONSTANTS = "dlrover.trainer.old_constants"
_DELETION = {
    "CheckpointDeletionStrategy": "dlrover.snapshot.user_deletion:CheckpointDeletionStrategy",
    "KeepLatestStepStrategy": "dlrover.snapshot.user_deletion:KeepLatestStepStrategy",
    "KeepStepIntervalStrategy": "dlrover.snapshot.user_deletion:KeepStepIntervalStrategy",
}
_STORAGES = {
    name: f"{_STORAGE}:{name}"
    for name in ("CheckpointStorage", "PosixDiskStorage", "PosixStorageWithDeletion", "get_checkpoint_storage")
} | _DELETION

ALIASES: Mapping[str, Mapping[str, str]] = {
    # old module: {old name: "new module:new name"}
    "dlrover.proto.elastic_training_pb2": {
        name: f"{_CONSTANTS}:{name}"
        for name in ("EVALUATION", "NONE", "PREDICTION", "TRAINING", "TRAIN_END_CALLBACK", "TaskType", "WAIT")
    },
    "dlrover.python.common.constants": {"CheckpointConstant": f"{_CONSTANTS}:CheckpointConstant"},
    "dlrover.python.common.env_utils": {
        name: f"{_CONSTANTS}:{name}"
        for name in (
            "get_env",
            "get_group_rank",
            "get_group_world_size",
            "get_local_rank",
            "get_local_world_size",
            "get_node_id",
            "get_node_num",
            "get_node_rank",
            "get_node_type",
            "get_torch_restart_count",
        )
    },
    "dlrover.python.common.enums": {"FailoverStrategy": f"{_FAILOVER}:FailoverStrategy"},
    "dlrover.python.common.failover": {"DynamicFailoverExtension": f"{_FAILOVER}:DynamicAgentFailoverExtension"},
    "dlrover.python.common.log": {"default_logger": f"{_CONSTANTS}:default_logger"},
    "dlrover.python.training_event": {
        name: f"dlrover.trainer.events:{name}"
        for name in ("DLRoverAgentEvent", "DLRoverMasterEvent", "TrainerProcess", "WarningType")
    },
    "dlrover.python.common.multi_process": {
        name: f"{_SHARED}:{name}"
        for name in (
            "ERROR_CODE",
            "LockedResponse",
            "SOCKET_TMP_DIR",
            "SUCCESS_CODE",
            "SharedDict",
            "SharedLock",
            "SharedMemory",
            "SharedQueue",
            "SocketResponse",
            "clear_sock_dir",
            "create_shared_memory",
            "retry_socket",
        )
    },
    "dlrover.python.common.serialize": {"ClassMeta": "dlrover.snapshot.class_meta:ClassMeta"},
    "dlrover.python.common.storage": _STORAGES,
    # The original's own guide names this module for the strategies; it never had one.
    "dlrover.python.common.store": _STORAGES,
    "dlrover.python.diagnosis.common.constants": {
        name: f"{_ACTIONS}:{name}" for name in ("DiagnosisActionType", "DiagnosisConstant")
    },
    "dlrover.python.common.diagnosis": {
        name: f"{_DATA}:{name}" for name in ("ChipMetrics", "CudaLog", "DiagnosisDataType", "TrainingLog")
    },
    "dlrover.python.diagnosis.common.diagnosis_data": {
        name: f"{_DATA}:{name}"
        for name in ("DiagnosisData", "DiagnosisDataType", "TrainingLog", "WorkerTrainingMetric")
    },
    "dlrover.python.diagnosis.common.diagnostician": {
        name: f"dlrover.master.old_diagnosticians:{name}" for name in ("DiagnosisObservation", "Diagnostician")
    },
    "dlrover.python.diagnosis.common.inference_chain": {
        name: f"dlrover.core.diagnosis.inference:{name}"
        for name in (
            "Inference",
            "InferenceAttribute",
            "InferenceDescription",
            "InferenceName",
            "InferenceOperator",
        )
    },
    "dlrover.python.diagnosis.inferencechain.inference_chain": {
        "InferenceChain": "dlrover.core.diagnosis.inference:InferenceChain"
    },
    "dlrover.python.diagnosis.common.diagnosis_action": {
        name: f"{_ACTIONS}:{name}"
        for name in (
            "DiagnosisAction",
            "DiagnosisActionQueue",
            "EventAction",
            "JobAbortionAction",
            "JobRestartAction",
            "NoAction",
            "NodeAction",
        )
    },
    "dlrover.python.elastic_agent.sharding.client": {
        name: f"dlrover.trainer.sharding_client:{name}" for name in ("IndexShardingClient", "ShardingClient")
    },
    "dlrover.python.elastic_agent.sychronization.sync_client": {"SyncClient": "dlrover.trainer.sync:SyncClient"},
    "dlrover.python.elastic_agent.torch.ckpt_saver": {
        name: f"{_SAVER}:{name}"
        for name in (
            "AsyncCheckpointSaver",
            "CheckpointConfig",
            "CheckpointEvent",
            "CheckpointEventType",
            "CommonDirCheckpointSaver",
            "DLROVER_CKPT_CONFIG_KEY",
            "DdpCheckpointSaver",
            "DeepSpeedCheckpointSaver",
            "FsdpDcpSaver",
            "MegatronCheckpointSaver",
            "SharedMemoryHandler",
            "TempDirCheckpointSaver",
            "TensorMeta",
        )
    },
    "dlrover.python.elastic_agent.torch.dynamic_failover": {
        name: f"{_FAILOVER}:{name}"
        for name in ("AgentFailureInfo", "DynamicAgentFailoverExtension", "FailoverStrategy")
    },
    "dlrover.python.elastic_agent.torch.master_kv_store": {
        "MasterKVStore": "dlrover.trainer.torch.kv_store:MasterKVStore"
    },
    "dlrover.python.elastic_agent.torch.training": {
        "ElasticLaunchConfig": "dlrover.trainer.torch.elastic_run:ElasticLaunchConfig",
        "LogConfig": "dlrover.trainer.torch.elastic_run:LogConfig",
        "launch_agent": "dlrover.trainer.torch.elastic_run:launch_agent",
    },
    "dlrover.python.master.diagnosis.precheck_operator": {
        name: f"dlrover.master.pre_checks:{name}"
        for name in (
            "ConnectionPreCheckOperator",
            "NoPreCheckOperator",
            "PreCheckOperator",
            "PreCheckResult",
            "SchedulingPreCheckOperator",
        )
    },
    "dlrover.python.master.elastic_training.net_topology": {
        "DefaultTopologyQuerier": "dlrover.master.topology:DefaultTopologyQuerier",
        "DpTopologySorter": "dlrover.master.topology:DpTopologySorter",
        "NodeTopologyMeta": "dlrover.master.topology:NodeTopologyMeta",
    },
    "dlrover.python.master.main": {"main": "dlrover.compat.master_main:main"},
}

_CLIENT = "a client of the master for scripts; workers reach the master through their agent"
_INSIDE = "a class of the original's inside; this implementation is built differently and has no such part"
_TENSORFLOW = "training with TensorFlow"

MISSING: Mapping[str, Mapping[str, str]] = {
    # old module: {old name: what it belongs to}
    "dlrover.python.brain.client": dict.fromkeys(
        ("BrainClient", "GlobalBrainClient", "build_brain_client"), "the optimiser service for several jobs"
    ),
    "dlrover.python.elastic_agent.config.paral_config_tuner": {"ParalConfigTuner": "tuning of parallel settings"},
    "dlrover.python.elastic_agent.master_client": dict.fromkeys(
        ("GlobalMasterClient", "LocalDataset", "LocalMasterClient", "MasterClient", "build_master_client"), _CLIENT
    ),
    "dlrover.python.elastic_agent.monitor.diagnosis": {
        "DiagnosisMonitor": "the original's inside; your own collector is an entry point of the group dlrover.collectors"
    },
    "dlrover.python.elastic_agent.monitor.resource": {"ResourceMonitor": "reports of used resources"},
    "dlrover.python.elastic_agent.monitor.training": dict.fromkeys(
        ("TFTrainingReporter", "TrainingProcessReporter", "is_tf_chief"), _TENSORFLOW
    ),
    "dlrover.python.elastic_agent.tensorflow.elastic_ps": {"ElasticPsClient": _TENSORFLOW},
    "dlrover.python.elastic_agent.tensorflow.hooks": {"ElasticDataShardReportHook": _TENSORFLOW},
    "dlrover.python.elastic_agent.torch.training": dict.fromkeys(
        (
            "ElasticTrainingAgent",
            "MasterRendezvousHandler",
            "NetworkCheckElasticAgent",
            "NodeCheckElasticAgent",
            "RendezvousOutSyncError",
        ),
        _INSIDE,
    ),
}
