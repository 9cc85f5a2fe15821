"""Every import path and name of the specs' tables: it resolves, or says which part of the software is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from dlrover.python import aliases
from dlrover.python.aliases import ALIASES, MISSING

PYTHON = "dlrover.python."
TORCH = "dlrover.trainer.torch."
SPECIFIED = {
    # Spec 09, what needs no TensorFlow; the rest is in tests/tensorflow.
    PYTHON + "elastic_agent.monitor.training": "TFTrainingReporter TrainingProcessReporter is_tf_chief",
    PYTHON + "elastic_agent.tensorflow.elastic_ps": "ElasticPsClient",
    PYTHON + "elastic_agent.tensorflow.profile_extractor": "OperationStats ProfileExtracter TensorStats",
    "dlrover.trainer.entry.local_entry": "main",
    "dlrover.trainer.tensorflow": "FileReader",
    "dlrover.trainer.tensorflow.reader": "FileReader",
    "dlrover.trainer.tensorflow.reader.base_reader": "ElasticReader",
    "dlrover.trainer.tensorflow.reader.file_reader": "FileReader",
    "dlrover.trainer.tensorflow.util.column_info": "Column",
    "dlrover.trainer.tensorflow.executor.estimator_executor": "EstimatorExecutor",
    "dlrover.trainer.tensorflow.failover.tensorflow_failover": "TensorflowFailover",
    "dlrover.trainer.util.args_util": "build_parser get_parsed_args",
    "dlrover.trainer.util.conf_util": "Configuration get_conf",
    "dlrover.trainer.worker.tf_kubernetes_worker": "TFKubernetesWorker",
    "dlrover.trainer.worker.tf_ray_worker": "TFRayWorker",
    # Spec 01 §6, §13 and §3, §8, §9, §12.
    PYTHON
    + "elastic_agent.master_client": "MasterClient build_master_client LocalMasterClient LocalDataset GlobalMasterClient",
    PYTHON + "elastic_agent.torch.training": "ElasticLaunchConfig launch_agent",
    PYTHON + "elastic_agent.torch.master_kv_store": "MasterKVStore",
    PYTHON + "elastic_agent.sharding.client": "ShardingClient IndexShardingClient",
    PYTHON + "elastic_agent.sychronization.sync_client": "SyncClient",
    PYTHON + "elastic_agent.monitor.resource": "ResourceMonitor",
    PYTHON + "elastic_agent.monitor.diagnosis": "DiagnosisMonitor",
    PYTHON + "common.diagnosis": "TrainingLog CudaLog ChipMetrics DiagnosisDataType",
    PYTHON + "common.log": "default_logger get_logger",
    PYTHON
    + "common.env_utils": "get_node_rank get_node_id get_node_type get_node_num get_local_rank get_local_world_size "
    "get_group_rank get_group_world_size get_torch_restart_count get_env",
    PYTHON
    + "common.comm": "Shard NodeMeta GPUStats TensorStats OpStats DataLoaderConfig OptimizerConfig ParallelConfig "
    "ModelInfo GlobalStep Task SyncTrainingPort KeyValuePair KeyValuePairs",
    PYTHON
    + "common.constants": "NodeEnv ConfigPath NodeType NodeStatus NodeEventType NodeExitReason JobExitReason ExitCode "
    "DistributionStrategy PlatformType OptimizeMode RendezvousName TrainingExceptionLevel Accelerators JobStage "
    "PreCheckStatus CheckpointConstant PSClusterVersionType TrainingLoopStatus JobConstant EventReportConstants "
    "NetworkFailureReason NodeResourceLimit BackendType DatasetType TaskType ElasticJobLabel GpuMetricEnum NpuMetricEnum",
    PYTHON + "common.global_context": "Context ConfigKeys DefaultValues",
    PYTHON + "common.singleton": "Singleton singleton",
    PYTHON + "common.error": "ProcessError",
    PYTHON + "util.function_util": "retry ignore_exceptions timeout threading_timeout TimeoutException",
    PYTHON + "util.common_util": "find_free_port find_free_port_in_range find_free_port_in_set find_free_port_for_hccl",
    PYTHON + "util.reflect_util": "Importer get_class new_instance import_callable",
    PYTHON + "util.actor_util.parse_actor": "parse_type parse_index parse_type_id_from_actor_name",
    PYTHON + "util.store_util": "barrier",
    # Spec 02, 03.
    PYTHON + "master.main": "main",
    PYTHON + "master.elastic_training.net_topology": "NodeTopologyMeta DefaultTopologyQuerier DpTopologySorter",
    "dlrover.trainer.torch.run_network_check": "main",
    # Spec 04 §2 and §6.
    "dlrover.proto.elastic_training_pb2": "NONE TRAINING EVALUATION PREDICTION WAIT TRAIN_END_CALLBACK TaskType",
    TORCH + "elastic": "ElasticTrainer",
    TORCH + "elastic.trainer": "ElasticTrainer",
    TORCH + "elastic.sampler": "ElasticDistributedSampler",
    TORCH + "elastic_sampler": "ElasticDistributedSampler",
    TORCH + "elastic.dataloader": "ElasticDataLoader",
    TORCH + "elastic_dataset": "ElasticDataset",
    PYTHON + "master.shard.dataset_splitter": "PartitionOffsets",
    # Spec 05 §2 and §10.
    TORCH + "main": "main",
    TORCH + "compatible_main": "main",
    TORCH + "elastic_run": "ElasticLaunch elastic_launch",
    PYTHON + "elastic_agent.torch.dynamic_failover": "DynamicAgentFailoverExtension AgentFailureInfo",
    PYTHON + "common.failover": "DynamicFailoverExtension FailureInfo",
    PYTHON + "common.enums": "FailoverStrategy",
    # Spec 06 §2.1; the front ends are in tests/cli/test_old_paths.py.
    PYTHON + "common.storage": "CheckpointStorage PosixDiskStorage PosixStorageWithDeletion CheckpointDeletionStrategy "
    "KeepStepIntervalStrategy KeepLatestStepStrategy get_checkpoint_storage",
    PYTHON + "common.store": "KeepStepIntervalStrategy",
    PYTHON
    + "common.multi_process": "SharedLock SharedQueue SharedDict SharedMemory clear_sock_dir retry_socket SOCKET_TMP_DIR",
    PYTHON + "common.serialize": "ClassMeta JsonSerializable",
    PYTHON + "elastic_agent.torch.ckpt_saver": "AsyncCheckpointSaver CommonDirCheckpointSaver TempDirCheckpointSaver "
    "DdpCheckpointSaver MegatronCheckpointSaver DeepSpeedCheckpointSaver FsdpDcpSaver SharedMemoryHandler CheckpointConfig "
    "CheckpointEvent CheckpointEventType TensorMeta DLROVER_CKPT_CONFIG_KEY",
    # Spec 09 §2.2.
    "dlrover.trainer.util.log_util": "default_logger",
    "dlrover.trainer.constants.constants": "Constant",
    "dlrover.trainer.constants.tf_constants": "TFConstants",
    "dlrover.trainer.constants.platform_constants": "PlatformConstants",
    "dlrover.trainer.util.reflect_util": "get_class",
    # Spec 10 §3, §13, §17, §18.
    PYTHON + "diagnosis.common.diagnosis_data": "DiagnosisData WorkerTrainingMetric TrainingLog",
    PYTHON + "diagnosis.common.diagnosis_action": "NoAction EventAction NodeAction JobAbortionAction JobRestartAction",
    PYTHON + "diagnosis.datacollector.data_collector": "DataCollector",
    PYTHON + "master.diagnosis.precheck_operator": "PreCheckOperator PreCheckResult",
    PYTHON + "training_event": "TrainerProcess DLRoverMasterEvent DLRoverAgentEvent WarningType",
    PYTHON + "training_event.event": "Event EventType EventTargetName EventTypeName",
    PYTHON + "training_event.config": "Config get_default_logger is_dlrover_event_enabled",
    PYTHON + "training_event.emitter": "Process DurationSpan EventEmitter",
    PYTHON + "training_event.exporter": "EventExporter",
    PYTHON + "training_event.predefined.trainer": "TrainerProcess TrainerEventName",
    PYTHON + "training_event.predefined.common": "CommonPredefined WarningType",
    PYTHON + "common.event.reporter": "EventReporter",
    PYTHON + "util.k8s_util": "gen_dict_from_k8s_label_selector gen_k8s_label_selector_from_dict",
    # Spec 11 §2.
    PYTHON + "unified.api.builder": "DLJob DLJobBuilder RLJobBuilder RLRoleType",
    PYTHON + "unified.api.builder.rl": "RLJob RLJobBuilder",
    PYTHON + "unified.api.runtime": "DataQueue RayDataLoaderIter patch_dataloader_ray Worker current_worker rpc "
    "export_rpc_method export_rpc_instance UserRpcProxy create_rpc_proxy RoleActor RoleGroup FutureSequence ActorInfo "
    "JobInfo PrimeMasterApi",
    PYTHON + "unified.api.runtime.worker": "Worker current_worker",
    PYTHON + "unified.api.runtime.queue": "DataQueue",
    PYTHON + "unified.api.runtime.ray_dataloader_iter": "RayDataLoaderIter patch_dataloader_ray",
    PYTHON
    + "unified.api.runtime.rpc_helper": "rpc export_rpc_method export_rpc_instance UserRpcProxy create_rpc_proxy "
    "RoleActor RoleGroup FutureSequence",
    PYTHON + "unified.common.enums": "RLRoleType ACCELERATOR_TYPE MasterStage MasterStateBackendType DLStreamType "
    "ExecutionResultType DiagnosticInfoType DiagnosticResponsibility WorkloadEntrypointType",
    PYTHON + "unified.common.config": "DLConfig JobConfig",
    PYTHON + "unified.common.workload_desc": "ResourceDesc ElasticWorkloadDesc SimpleWorkloadDesc CustomWorkloadDesc "
    "NodeGroupFailoverDesc",
    PYTHON + "unified.controller.master": "PrimeMaster",
    PYTHON + "unified.controller.extension": "ManagerExtension",
    PYTHON + "unified.driver.main": "submit main",
    PYTHON + "brain.client": "build_brain_client BrainClient GlobalBrainClient",
    PYTHON + "unified.util.config_util": "args_2_omega_conf omega_conf_2_args",
}
INSIDE = {
    # Spec 01 §13, §14.
    PYTHON + "elastic_agent.torch.training": "ElasticTrainingAgent MasterRendezvousHandler NodeCheckElasticAgent "
    "NetworkCheckElasticAgent RendezvousOutSyncError",
    PYTHON + "elastic_agent.diagnosis.diagnosis_agent": "DiagnosisAgent",
    # Spec 08, 12.
    PYTHON + "util.state.store_mananger": "StoreManager",
}


@pytest.mark.parametrize(("module", "names"), SPECIFIED.items())
def test_what_the_specs_name_can_be_imported(module: str, names: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


@pytest.mark.parametrize(("module", "names"), INSIDE.items())
def test_what_is_of_the_originals_inside_says_so(module: str, names: str) -> None:
    assert set(names.split()) <= MISSING[module].keys()


def test_every_missing_name_is_of_the_originals_inside_and_is_missing() -> None:
    reasons = {reason for names in MISSING.values() for reason in names.values()}
    assert reasons == {aliases._INSIDE, aliases._KUBERNETES}, "whatever a script can use is there"
    assert all(reason.startswith(("a class of the original's inside", "the original's master")) for reason in reasons)
    assert [name for module, names in MISSING.items() for name in names if name in ALIASES.get(module, {})] == []


def test_old_paths_are_lazy_and_none_imports_grpc() -> None:
    code = """if True:
        import sys
        import dlrover.python.elastic_agent.master_client, dlrover.python.common.comm, dlrover.trainer.util.log_util
        print([name for name in sys.modules if name.startswith("dlrover.compat")])
        from importlib import import_module
        from dlrover.python.aliases import ALIASES
        for module, names in ALIASES.items():
            if module != "dlrover.python.util.store_util":  # torch
                needs = ("torch", "tensorflow.hooks")
                [getattr(import_module(module), name) for name, new in names.items() if not any(need in new for need in needs)]
        print([name for name in sys.modules if name.partition(".")[0] in ("grpc", "torch", "tensorflow", "ray")])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


def test_an_old_entry_that_is_run_as_a_module_says_what_it_needs() -> None:
    command = [sys.executable, "-m", "dlrover.python.unified.driver.main"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "the JobConfig of the job as JSON" in done.stderr
