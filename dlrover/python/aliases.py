"""
The table of the historical names: where each lives now, and which are not there yet.

Only names that users write in their scripts, and those that extensions are known to use. `MISSING` says of a name which part of the
software it belongs to, so that a script stops with a sentence and not with a riddle.
"""

from __future__ import annotations

from collections.abc import Mapping

_STORAGE = "dlrover.snapshot.storage.user_storage"
_FAILOVER = "dlrover.agent.failover"
_FAILOVER_STRATEGIES = "dlrover.agent.decisions.strategies"
_ACTIONS = "dlrover.master.diagnosis.old_actions"
_DATA = "dlrover.agent.monitor.old_diagnosis_data"
_SHARED = "dlrover.compat.client.shared_objects"
_SAVER = "dlrover.compat.client.torch_saver"
_COMPAT = "dlrover.compat"
_DELETION = {
    "CheckpointDeletionStrategy": "dlrover.snapshot.storage.user_deletion:CheckpointDeletionStrategy",
    "KeepLatestStepStrategy": "dlrover.snapshot.storage.user_deletion:KeepLatestStepStrategy",
    "KeepStepIntervalStrategy": "dlrover.snapshot.storage.user_deletion:KeepStepIntervalStrategy",
}
_STORAGES = {
    name: f"{_STORAGE}:{name}"
    for name in ("CheckpointStorage", "PosixDiskStorage", "PosixStorageWithDeletion", "get_checkpoint_storage")
} | _DELETION


def _in(room: str, names: str) -> dict[str, str]:
    """Names that live in one module of `dlrover.compat`."""
    return {name: f"{_COMPAT}.{room}:{name}" for name in names.split()}


_CONSTANTS = _in(
    "names.constants",
    "Accelerators AscendConstants BackendType BasicClass CheckpointConstant CommunicationReqMeta CommunicationReqType "
    "CommunicationType ConfigPath CustomMetricKeys DatasetType DefaultNodeResource DefaultResourceLimits DictKey "
    "DistributionStrategy ElasticJobApi ElasticJobLabel EventReportConstants ExitCode GRPC GpuMetricEnum "
    "GroupNodeCheckPhase HangDetectionStrategy JobConstant JobExitReason JobOptStage JobStage KeyValueOps MemoryUnit "
    "MthreadsGPUMetricEnum NetworkFailureReason NodeEnv NodeErrorMessage NodeEventType NodeExitDescription "
    "NodeExitReason NodeResourceLimit NodeStatus NodeType NpuMetricEnum OptimizeMode OptimizeWorkerPhase "
    "PSClusterVersionType PendingTimeoutStrategyType PlatformType PreCheckStatus PriorityClass RendezvousErrorType "
    "RendezvousName ReporterType ResourceOptimizerName ScalePlanLabel SchedulingLabel ScriptPath TaskType "
    "TrainingExceptionLevel TrainingLoopStatus UserEnv k8sAPIExceptionReason",
)
_MESSAGES = _in(
    "client.comm",
    "AtorchEvent BaseRequest BaseResponse CheckHardwareResetRequest ClusterVersion ClusterVersionRequest "
    "CommWorldRequest DataLoaderConfig DatasetShardParams DiagnosisAction DiagnosisReportData ElasticRunConfig "
    "ElasticRunConfigRequest Event GPUStats GlobalStep HeartBeat HeartbeatResponse JoinRendezvousRequest KeyValuePair "
    "KeyValuePairs Message ModelInfo NetworkCheckResult NetworkReadyRequest NodeAddress NodeCheckpointState NodeEvent "
    "NodeFailure NodeMeta OpStats OptimizerConfig ParallelConfig ParallelConfigRequest PreCheckRequest "
    "PreCheckResponse PsNodes PsNodesRequest PsReady RdzvBlocked RendezvousParams RendezvousRequest RendezvousState "
    "ResourceStats Response RunningNodes RunningNodesRequest Shard ShardCheckpoint ShardCheckpointRequest "
    "StragglerExistRequest SyncBarrier SyncFinish SyncJoin SyncTrainingPort TIMEOUT_SEC Task TaskRequest TaskResult "
    "TaskType TensorStats TrainingStatus TrainingStatusRequest WaitingNodeNumRequest addr_connected "
    "deserialize_message serialize_message",
)
_EVENTS = {
    "": _in("events.training_events", "DLRoverAgentEvent DLRoverMasterEvent TrainerProcess WarningType"),
    ".config": _in(
        "events.event_export",
        "Config DEFAULT_EVENT_EXPORTER DEFAULT_FILE_DIR DEFAULT_TEXT_FORMATTER ENV_PREFIX get_default_logger "
        "get_env_key get_pid get_rank is_dlrover_event_enabled parse_bool parse_int parse_str",
    ),
    ".emitter": {
        **_in("events.training_events", "EventEmitter Process SafeAttribute SafeCallable generate_event_id safe_call"),
        "DurationSpan": "dlrover.trainer.events.process:DurationSpan",
    },
    ".event": {
        **_in("events.training_events", "Event EventTargetName EventTypeName"),
        "EventType": "dlrover.trainer.events.event:EventType",
    },
    ".exporter": _in(
        "events.event_export",
        "AsyncExporter Config ConsoleExporter EventExporter Formater JsonFormatter LogFormatter TextFileExporter "
        "close_default_exporter get_default_exporter get_default_logger init_default_exporter",
    ),
    ".predefined._dlrover": _in(
        "events.training_events",
        "DLRoverAgentEvent DLRoverAgentEventName DLRoverCommonEvent DLRoverCommonEventName DLRoverMasterEvent "
        "DLRoverMasterEventName",
    ),
    ".predefined.common": _in("events.training_events", "CommonEventName CommonPredefined WarningType"),
    ".predefined.trainer": _in("events.training_events", "TrainInitSpan TrainerEventName TrainerProcess"),
}
_REFLECTION = _in("tools.reflection", "Importer get_class import_callable new_instance")
_LOGGER = _in("tools.log", "default_logger")

_API = "dlrover.unified.api"
_CALLS = {name: f"dlrover.unified.runtime.calls:{name}" for name in ("FutureSequence", "RoleActor", "RoleGroup")}
_RPC = _CALLS | {
    "rpc": "dlrover.unified.runtime.methods:rpc",
    **{
        name: f"{_API}.worker:{name}"
        for name in ("UserRpcProxy", "create_rpc_proxy", "export_rpc_instance", "export_rpc_method")
    },
}
_WORKER = {name: f"{_API}.worker:{name}" for name in ("Worker", "current_worker")}
_QUEUE = {"DataQueue": f"{_API}.queue:DataQueue"}
_LOADER = {name: f"{_API}.dataloader:{name}" for name in ("RayDataLoaderIter", "patch_dataloader_ray")}
_BUILDER = {name: f"{_API}.builder:{name}" for name in ("DLJob", "DLJobBuilder")}
_RL_BUILDER = {name: f"{_API}.builder:{name}" for name in ("RLJob", "RLJobBuilder")}
_UNIFIED = "dlrover.python.unified"
_ENSEMBLES: Mapping[str, Mapping[str, str]] = {
    f"{_UNIFIED}.api.builder": {
        **_BUILDER,
        "RLJobBuilder": f"{_API}.builder:RLJobBuilder",
        "RLRoleType": f"{_API}.enums:RLRoleType",
    },
    f"{_UNIFIED}.api.builder.base": _BUILDER,
    f"{_UNIFIED}.api.builder.rl": _RL_BUILDER,
    f"{_UNIFIED}.api.base": {
        "DLJob": f"{_API}.builder:DLJob",
        "DLJobBuilder": f"{_API}.first_generation:FirstDLJobBuilder",
    },
    f"{_UNIFIED}.api.rl": {
        "RLJob": f"{_API}.builder:RLJob",
        "RLJobBuilder": f"{_API}.first_generation:FirstRLJobBuilder",
    },
    f"{_UNIFIED}.api.runtime": {
        **_RPC,
        **_WORKER,
        **_QUEUE,
        **_LOADER,
        **{name: f"{_API}.worker:{name}" for name in ("ActorInfo", "JobInfo")},
        "PrimeMasterApi": f"{_API}.controller:PrimeMasterApi",
    },
    f"{_UNIFIED}.api.runtime.queue": _QUEUE,
    f"{_UNIFIED}.api.runtime.ray_dataloader_iter": _LOADER,
    f"{_UNIFIED}.api.runtime.rpc_helper": _RPC,
    f"{_UNIFIED}.api.runtime.worker": _WORKER,
    f"{_UNIFIED}.common.config": {name: f"{_API}.config:{name}" for name in ("DLConfig", "JobConfig")},
    f"{_UNIFIED}.common.enums": {
        name: f"{_API}.enums:{name}"
        for name in (
            "ACCELERATOR_TYPE",
            "DLStreamType",
            "DiagnosticInfoType",
            "DiagnosticResponsibility",
            "ExecutionResultType",
            "MasterStage",
            "MasterStateBackendType",
            "RLRoleType",
            "WorkloadEntrypointType",
        )
    },
    f"{_UNIFIED}.common.workload_desc": {
        name: f"{_API}.workload:{name}"
        for name in (
            "CustomWorkloadDesc",
            "ElasticWorkloadDesc",
            "NodeGroupFailoverDesc",
            "ResourceDesc",
            "SimpleWorkloadDesc",
        )
    },
    f"{_UNIFIED}.controller.extension": {"ManagerExtension": "dlrover.unified.extension:ManagerExtension"},
    f"{_UNIFIED}.controller.master": {"PrimeMaster": f"{_API}.submit:PrimeMaster"},
    f"{_UNIFIED}.driver.main": {name: f"{_API}.submit:{name}" for name in ("main", "submit")},
    f"{_UNIFIED}.util.config_util": {
        name: f"{_API}.config_util:{name}" for name in ("args_2_omega_conf", "omega_conf_2_args")
    },
}

ALIASES: Mapping[str, Mapping[str, str]] = {
    # old module: {old name: "new module:new name"}
    "dlrover.proto.elastic_training_pb2": {
        **_in("client.task_types", "EVALUATION NONE PREDICTION TRAINING TRAIN_END_CALLBACK TaskType WAIT"),
        **_in("client.comm", "Response"),
    },
    "dlrover.python.brain.client": _in("client.brain_client", "BrainClient GlobalBrainClient build_brain_client"),
    "dlrover.python.common.comm": _MESSAGES,
    "dlrover.python.common.constants": _CONSTANTS,
    "dlrover.python.common.env_utils": _in(
        "launch.environment",
        "get_all_child_pids get_env get_group_rank get_group_world_size get_hostname_and_ip get_job_uid "
        "get_kernel_stack get_local_rank get_local_world_size get_node_id get_node_num get_node_rank get_node_type "
        "get_proc_env get_rank get_torch_restart_count get_user_stack_pyspy is_ray_mode is_worker_process "
        "print_process_list set_env",
    ),
    "dlrover.python.common.enums": {
        "FailoverStrategy": f"{_FAILOVER_STRATEGIES}:FailoverStrategy",
        **_in("names.constants", "ResourceType"),
    },
    "dlrover.python.common.error": _in("tools.serialize", "ProcessError"),
    "dlrover.python.common.event.reporter": _in("events.event_reporter", "EventReporter"),
    "dlrover.python.common.failover": {
        "DynamicFailoverExtension": f"{_FAILOVER}:DynamicAgentFailoverExtension",
        "FailureInfo": f"{_FAILOVER}:AgentFailureInfo",
        "USER_FAILOVER_TRIGGER_JOB_ABORTION": f"{_FAILOVER_STRATEGIES}:ABORTION_REASON",
        "USER_FAILOVER_TRIGGER_JOB_RESTART": f"{_FAILOVER_STRATEGIES}:GLOBAL_REASON",
    },
    "dlrover.python.common.global_context": _in("launch.global_context", "ConfigKeys Context DefaultValues"),
    "dlrover.python.common.grpc": _MESSAGES,  # as the module was called up to 0.4
    "dlrover.python.common.log": {
        **_LOGGER,
        **_in(
            "tools.log",
            "get_agent_log_dir get_base_log_dir get_base_log_file get_file_handler_backup_count "
            "get_file_handler_max_bytes get_log_level get_logger",
        ),
    },
    "dlrover.python.common.singleton": _in("tools.singleton", "Singleton singleton"),
    **{f"dlrover.python.training_event{module}": names for module, names in _EVENTS.items()},
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
    "dlrover.python.common.serialize": {
        "ClassMeta": "dlrover.snapshot.storage.class_meta:ClassMeta",
        **_in("tools.serialize", "JsonSerializable to_dict"),
    },
    "dlrover.python.common.storage": _STORAGES,
    # The original's own guide names this module for the strategies; it never had one.
    "dlrover.python.common.store": _STORAGES,
    "dlrover.python.diagnosis.common.constants": {
        **{name: f"{_ACTIONS}:{name}" for name in ("DiagnosisActionType", "DiagnosisConstant")},
        "DiagnosisDataType": f"{_DATA}:DiagnosisDataType",
        **_in("client.diagnosis", "DiagnosisErrorConstant DiagnosisResult DiagnosticianType EnvConfigKey"),
    },
    "dlrover.python.common.diagnosis": {
        name: f"{_DATA}:{name}" for name in ("ChipMetrics", "CudaLog", "DiagnosisDataType", "TrainingLog")
    },
    "dlrover.python.diagnosis.datacollector.data_collector": _in(
        "client.diagnosis", "CollectorType DataCollector SimpleDataCollector"
    ),
    "dlrover.python.diagnosis.datacollector.training_log_collector": _in("client.diagnosis", "TrainingLogCollector"),
    "dlrover.python.diagnosis.common.diagnosis_data": {
        name: f"{_DATA}:{name}"
        for name in ("DiagnosisData", "DiagnosisDataType", "TrainingLog", "WorkerTrainingMetric")
    },
    "dlrover.python.diagnosis.common.diagnostician": {
        "DiagnosisObservation": "dlrover.master.diagnosis.old_diagnosticians:DiagnosisObservation",
        "Diagnostician": "dlrover.master.diagnosis.old_diagnosticians:OldDiagnostician",
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
            "JobAction",
            "JobRestartAction",
            "NoAction",
            "NodeAction",
            "is_same_action",
        )
    },
    "dlrover.python.elastic_agent.datacollector.chip_metrics_collector": _in(
        "client.diagnosis", "ChipMetricsCollector"
    ),
    "dlrover.python.elastic_agent.datacollector.cuda_log_collector": _in("client.diagnosis", "CudaLogCollector"),
    "dlrover.python.elastic_agent.datacollector.data_collector": _in("client.diagnosis", "CollectorType DataCollector"),
    "dlrover.python.elastic_agent.datacollector.log_collector": {
        "LogCollector": f"{_COMPAT}.client.diagnosis:TrainingLogCollector"
    },
    "dlrover.python.elastic_agent.master_client": {
        **_in("client.local_dataset", "LocalDataset"),
        **_in("client.master_client", "GlobalMasterClient LocalMasterClient MasterClient build_master_client"),
    },
    "dlrover.python.elastic_agent.monitor.diagnosis": _in("client.diagnosis", "DiagnosisMonitor"),
    "dlrover.python.elastic_agent.monitor.resource": _in(
        "client.resource_monitor",
        "ResourceMonitor get_gpu_stats get_process_cpu_percent get_used_cpu get_used_disk get_used_memory",
    ),
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
        name: f"dlrover.master.diagnosis.pre_checks:{name}"
        for name in (
            "ConnectionPreCheckOperator",
            "NoPreCheckOperator",
            "PreCheckOperator",
            "PreCheckResult",
            "SchedulingPreCheckOperator",
        )
    },
    "dlrover.python.master.elastic_training.net_topology": {
        "DefaultTopologyQuerier": "dlrover.master.topology_plugins:DefaultTopologyQuerier",
        "DpTopologySorter": "dlrover.master.topology_plugins:DpTopologySorter",
        "NodeTopologyMeta": "dlrover.master.topology_plugins:NodeTopologyMeta",
        "TopologyQuerier": "dlrover.master.topology_plugins:TopologyQuerier",
        "TopologySorter": "dlrover.master.topology_plugins:TopologySorter",
    },
    "dlrover.python.master.main": {"main": "dlrover.compat.launch.master_main:main"},
    "dlrover.python.master.shard.dataset_splitter": _in("client.partitions", "PartitionOffsets"),
    "dlrover.python.util.actor_util.parse_actor": _in(
        "tools.actors", "parse_index parse_type parse_type_id_from_actor_name"
    ),
    "dlrover.python.util.args_util": _in(
        "launch.arguments", "parse_dict parse_group_affinity parse_tuple_dict parse_tuple_list pos_int str2bool"
    ),
    "dlrover.python.util.common_util": {
        **_in("launch.arguments", "print_args"),
        **_in(
            "launch.ports",
            "find_free_port find_free_port_for_hccl find_free_port_from_env find_free_port_from_env_and_bind "
            "find_free_port_in_range find_free_port_in_set is_port_in_use",
        ),
        **_in(
            "tools.reflection",
            "get_class_by_module_and_class_name get_dlrover_version get_installed_version get_methods_by_class "
            "get_version_from_setup",
        ),
    },
    "dlrover.python.util.file_util": _in("tools.files", "find_file_in_parents is_same_path read_last_n_lines"),
    "dlrover.python.util.function_util": _in(
        "tools.functions", "TIMEOUT_MAX TimeoutException ignore_exceptions retry threading_timeout timeout"
    ),
    "dlrover.python.util.k8s_util": _in(
        "tools.label_selectors", "gen_dict_from_k8s_label_selector gen_k8s_label_selector_from_dict"
    ),
    "dlrover.python.util.reflect_util": _REFLECTION,
    "dlrover.python.util.store_util": _in("tools.store_barrier", "barrier"),
    "dlrover.python.util.time_util": _in("launch.times", "get_pending_timeout has_expired timestamp_diff_in_seconds"),
    "dlrover.trainer.constants.constants": _in("names.trainer_constants", "Constant Constants"),
    "dlrover.trainer.constants.platform_constants": _in("names.trainer_constants", "PlatformConstants"),
    "dlrover.trainer.constants.tf_constants": _in("names.trainer_constants", "TFConstants"),
    "dlrover.python.elastic_agent.monitor.training": {
        **_in("tensorflow.reporting", "TFTrainingReporter is_tf_chief"),
        "TrainingProcessReporter": f"{_COMPAT}.tensorflow.reporting:TFTrainingReporter",
    },
    "dlrover.python.elastic_agent.config.paral_config_tuner": _in("client.paral_config_tuner", "ParalConfigTuner"),
    "dlrover.python.master.monitor.perf_monitor": _in("scaling.speed_monitor", "GlobalStepRecord PerfMonitor"),
    "dlrover.python.master.monitor.speed_monitor": _in("scaling.speed_monitor", "GlobalStepRecord SpeedMonitor"),
    "dlrover.python.master.monitor.throughput_monitor": _in(
        "scaling.speed_monitor", "GlobalStepRecord ThroughputMonitor"
    ),
    "dlrover.python.common.node": _in("scaling.resources", "NodeGroupResource NodeResource"),
    "dlrover.python.master.resource.job": {
        **_in(
            "scaling.resource_optimizers", "AllreduceJobResourceOptimizer JobResourceOptimizer PSJobResourceOptimizer"
        ),
        **_in("scaling.resources", "JobResource"),
    },
    "dlrover.python.master.resource.local_optimizer": _in("scaling.resource_optimizers", "PSLocalOptimizer"),
    "dlrover.python.master.resource.optimizer": {
        **_in("scaling.resource_optimizers", "ResourceOptimizer SimpleOptimizer"),
        **_in("scaling.resources", "ResourceLimits ResourcePlan"),
    },
    "dlrover.python.master.stats.job_collector": _in("scaling.job_statistics", "JobMetricCollector"),
    "dlrover.python.master.stats.reporter": _in("scaling.job_statistics", "LocalStatsReporter"),
    "dlrover.python.master.stats.training_metrics": _in(
        "scaling.job_statistics", "DatasetMetric RuntimeMetric TrainingHyperParams"
    ),
    "dlrover.python.elastic_agent.tensorflow.elastic_ps": _in("tensorflow.elastic_ps", "ElasticPsClient"),
    "dlrover.python.elastic_agent.tensorflow.hooks": {
        "ElasticDataShardReportHook": "dlrover.trainer.tensorflow.hooks.elastic_data_shard_report_hook:ElasticDataShardReportHook",
        "ReportModelInfoHook": "dlrover.trainer.tensorflow.hooks.model_info_hook:ReportModelInfoHook",
        "ReportModelMetricHook": "dlrover.trainer.tensorflow.hooks.model_info_hook:ReportModelInfoHook",
    },
    "dlrover.python.elastic_agent.tensorflow.profile_extractor": _in(
        "tensorflow.profile_extractor", "OperationStats ProfileExtracter TensorStats"
    ),
    "dlrover.trainer.util.args_util": {
        name: f"dlrover.trainer.tensorflow.starter:{name}" for name in ("build_parser", "get_parsed_args")
    },
    "dlrover.trainer.util.conf_util": {
        "Configuration": "dlrover.trainer.tensorflow.conf:Conf",
        "get_conf": "dlrover.trainer.tensorflow.conf:load_conf",
    },
    "dlrover.trainer.util.log_util": _LOGGER,
    "dlrover.trainer.util.net_util": _in("launch.ports", "get_available_port"),
    "dlrover.trainer.util.reflect_util": _REFLECTION,
    **_ENSEMBLES,
}

_INSIDE = "a class of the original's inside; this implementation is built differently and has no such part"
_KUBERNETES = (
    "the original's master on Kubernetes; here a platform does its work, and none of it is a class for scripts"
)


def _all(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


MISSING: Mapping[str, Mapping[str, str]] = {
    # old module: {old name: what it belongs to}
    "dlrover.python.common.comm": _all(_INSIDE, "build_grpc_channel grpc_server_ready"),
    "dlrover.python.common.event.context": _all(_INSIDE, "JobEventContext StepEvents"),
    "dlrover.python.common.event.train_event": _all(_INSIDE, "TrainEvent TrainEventName TrainEventState"),
    "dlrover.python.common.node": _all(_KUBERNETES, "Node NodeEvent"),
    "dlrover.python.common.resource": _all(_INSIDE, "Resource"),
    "dlrover.python.common.serialize": _all(_INSIDE, "PickleSerializable"),
    "dlrover.python.diagnosis.common.constants": _all(_INSIDE, "InferenceConfigKey JobHangPolicy JobHangWatermark"),
    "dlrover.python.diagnosis.common.diagnosis_manager": _all(_INSIDE, "DiagnosisManager"),
    "dlrover.python.diagnosis.datacollector.atorch_event_collector": _all(_INSIDE, "AtorchEventCollector"),
    "dlrover.python.diagnosis.datacollector.resource_collector": _all(_INSIDE, "ResourceCollector"),
    "dlrover.python.diagnosis.datacollector.xpu_timer_metric_collector": _all(_INSIDE, "XpuTimerMetricsCollector"),
    "dlrover.python.elastic_agent.context": _all(_INSIDE, "AgentContext get_agent_context"),
    "dlrover.python.elastic_agent.diagnosis.diagnosis_agent": _all(_INSIDE, "DiagnosisAgent"),
    "dlrover.python.elastic_agent.master_client": _all(_INSIDE, "GrpcMasterClient HttpMasterClient RayMasterClient"),
    "dlrover.python.elastic_agent.torch.training": _all(
        _INSIDE,
        "ElasticTrainingAgent MasterRendezvousHandler NetworkCheckElasticAgent NodeCheckElasticAgent "
        "RendezvousOutSyncError",
    ),
    "dlrover.python.master.shard.dataset_splitter": _all(
        _INSIDE, "DatasetSplitter StreamingDatasetSplitter TableDatasetSplitter TextDatasetSplitter"
    ),
    "dlrover.python.scheduler.job": _all(_KUBERNETES, "ElasticJob JobArgs LocalJobArgs NodeArgs"),
    "dlrover.python.training_event.error_handler": _all(_INSIDE, "ErrorHandler init_error_handler"),
    "dlrover.python.util.k8s_util": _all(_INSIDE, "is_target_labels_equal"),
    "dlrover.python.util.queue.queue": _all(_INSIDE, "ConcurrentQueue RayEventQueue"),
    "dlrover.python.util.state.memory_store": _all(_INSIDE, "MemoryStore"),
    "dlrover.python.util.state.stats_backend": _all(_INSIDE, "LocalFileStateBackend"),
    "dlrover.python.util.state.store_mananger": _all(_INSIDE, "MemoryStoreManager StoreManager"),
    "dlrover.trainer.util.conf_util": _all(_INSIDE, "ConfigurationManagerInterface ConfigurationManagerMeta"),
}
