"""The constants of `dlrover.trainer.constants`: names of settings with their defaults, called to get the default."""

from __future__ import annotations

from typing import Any


class Constant:
    def __init__(self, name: Any, default: Any = None) -> None:
        self.name = name
        self.default = default

    def __call__(self) -> Any:
        return self.default


class Constants:
    Executor = Constant("executor")
    PsExecutor = Constant("ps_executor")


class PlatformConstants:
    PlatformName = Constant("Platform")
    ExecutePlaform = Constant("ExecutePlaform")
    """The published spelling."""
    Local = Constant("LOCAL", "LOCAL")
    Kubernetes = Constant("KUBERNETES", "KUBERNETES")
    Ray = Constant("RAY", "RAY")
    WorkerActionRun = Constant("run", "run")


_FIVE_DAYS = 5 * 24 * 3600


class TFConstants:
    FILE_SCHEME = Constant("file", "file://")
    FAKE_SCHEME = Constant("fake", "fake://")
    Worker = Constant("worker", "worker")
    Chief = Constant("chief", "chief")
    PS = Constant("ps", "ps")
    Evaluator = Constant("evaluator", "evaluator")
    EstimatorClassifier = Constant("estimator")
    ClassifierTypeEstimator = Constant("estimator", "estimator")
    EstimatorClassifierType = Constant("classifier_type", "estimator")
    EstimatorClassifierClass = Constant("classifier_class", "estimator")
    SessionConfig = Constant("session_config")
    RunConfig = Constant("run_config")
    TrainSet = Constant("train_set")
    EvalSet = Constant("eval_set")
    ModelDir = Constant("model_dir")
    LogSteps = Constant("log_steps", 100)
    BatchSize = Constant("log_steps", 64)
    """The published name of the setting."""
    Epoch = Constant("epoch", 1)
    MaxSteps = Constant("max_steps")
    EvalSteps = Constant("eval_steps", 100)
    EvalMinSecs = Constant("eval_min_secs", 0)
    EvalMaxSecs = Constant("eval_max_secs", _FIVE_DAYS)
    SaveSteps = Constant("save_steps", 100)
    SaveSecs = Constant("save_secs")
    SaveMinSecs = Constant("save_min_secs", 0)
    SaveMaxSecs = Constant("save_max_secs", _FIVE_DAYS)
    KeepCheckpointMax = Constant("keep_checkpoint_max", 5)
    SaveCheckpoint = Constant("save_checkpoint_for_ps", False)
    CheckpointIncrementalSaveSecs = Constant("checkpoint_incremental_save_secs")
    EstimatorTrainingChiefHooks = Constant("training_chief_hooks")
    EstimatorTrainingHooks = Constant("training_hooks")
    EstimatorPredictionHooks = Constant("prediction_hooks")
    EstimatorEvaluationHooks = Constant("evaluation_hooks")
    EnableAutoScaling = Constant("enable_auto_scaling")
    EnableDynamicSharding = Constant("enable_dynamic_sharding", True)
    EnableIncrSavedModel = Constant("enable_incr_saved_model", False)
    RelaunchForPs = Constant("relaunch_for_ps", False)
    RelaunchForFailure = Constant("relaunch_for_failure", False)
    ANY_NODE_FO_LEVEL = Constant(1)
    DataShardClient = Constant("data_shard_client")
    DataShardCheckpoint = Constant("data_shard_checkpoint", "data_shard_checkpoint.json")
    ExitRecoverableSession = Constant("exit_recoverable_session")
