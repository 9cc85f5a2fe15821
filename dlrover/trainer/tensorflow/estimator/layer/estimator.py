"""`Estimator`: trains, evaluates, predicts with and exports what a model function describes, each in a graph of its own."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from dlrover.trainer.tensorflow.estimator.layer import evaluation, export
from dlrover.trainer.tensorflow.estimator.layer.calling import arguments_of, call_with, read_input
from dlrover.trainer.tensorflow.estimator.layer.run_config import RunConfig, with_model_dir
from dlrover.trainer.tensorflow.estimator.layer.specs import EstimatorSpec, ModeKeys

v1 = tf.compat.v1


class Estimator:
    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: dict[str, Any] | None = None,
        warm_start_from: Any = None,
    ) -> None:
        """Raises ValueError for a model function that does not take what it needs."""
        names = arguments_of(model_fn)
        if "features" not in names:
            raise ValueError(f"The model function must have an argument features; it has {', '.join(names)}.")
        if params is not None and "params" not in names:
            raise ValueError(
                "params were given, but the model function has no argument params. Add the argument, or leave out "
                "params."
            )
        self._model_fn = model_fn
        self._config = with_model_dir(config, model_dir)
        self._params = copy.deepcopy(params or {})
        self._warm_start_from = warm_start_from

    @property
    def model_dir(self) -> str:
        assert self._config.model_dir is not None, "with_model_dir"
        return self._config.model_dir

    @property
    def config(self) -> RunConfig:
        return copy.copy(self._config)

    @property
    def params(self) -> dict[str, Any]:
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., EstimatorSpec]:
        """Of (features, labels, mode, config)."""

        def call(features: Any, labels: Any, mode: str, config: Any) -> EstimatorSpec:
            return self.call_model(features, labels, mode, config)

        return call

    def latest_checkpoint(self) -> str | None:
        found = tf.train.latest_checkpoint(self.model_dir)
        return None if found is None else str(found)

    def get_variable_names(self) -> list[str]:
        return [name for name, _ in tf.train.list_variables(self.model_dir)]

    def get_variable_value(self, name: str) -> Any:
        return tf.train.load_variable(self.model_dir, name)

    def eval_dir(self, name: str | None = None) -> str:
        return os.path.join(self.model_dir, "eval" if not name else f"eval_{name}")

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> Estimator:
        """Until the input ends, or so many `steps`, or the global step is `max_steps`."""
        if steps is not None and max_steps is not None:
            raise ValueError("Give either steps or max_steps, not both.")
        for name, value in (("steps", steps), ("max_steps", max_steps)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0 (got {value}).")
        own = list(hooks or ())
        if max_steps is not None and max_steps <= self._saved_step():
            v1.logging.info("Training ends at once, because the model already has its %d steps.", max_steps)
            return self
        if steps is not None or max_steps is not None:
            own.append(v1.train.StopAtStepHook(num_steps=steps, last_step=max_steps))
        with self._graph():
            v1.train.create_global_step()
            features, labels, of_input = read_input(input_fn, self._given(ModeKeys.TRAIN))
            spec = self.call_model(features, labels, ModeKeys.TRAIN, self._config)
            self._run(spec, [*of_input, *own], list(saving_listeners or ()))
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Metrics by name, with `loss` and `global_step`."""
        path = checkpoint_path or self.latest_checkpoint()
        with self._graph():
            step = v1.train.create_global_step()
            features, labels, of_input = read_input(input_fn, self._given(ModeKeys.EVAL))
            spec = self.call_model(features, labels, ModeKeys.EVAL, self._config)
            return evaluation.run(
                spec,
                step,
                checkpoint=path,
                steps=steps,
                hooks=[*of_input, *(hooks or ()), *spec.evaluation_hooks],
                session_config=self._config.session_config,
                directory=self.eval_dir(name),
            )

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """One prediction after the other, until the input ends."""
        path = checkpoint_path or self.latest_checkpoint()
        with self._graph():
            v1.train.create_global_step()
            features, _, of_input = read_input(input_fn, self._given(ModeKeys.PREDICT))
            spec = self.call_model(features, None, ModeKeys.PREDICT, self._config)
            predictions = spec.predictions
            if predict_keys is not None:
                predictions = {key: value for key, value in predictions.items() if key in predict_keys}
                if not predictions:
                    raise ValueError(
                        f"The model predicts {sorted(spec.predictions)}, and predict_keys contains none of them."
                    )
            creator = v1.train.ChiefSessionCreator(
                scaffold=spec.scaffold, config=self._config.session_config, checkpoint_filename_with_path=path
            )
            all_hooks = [*of_input, *(hooks or ()), *spec.prediction_hooks]
            with v1.train.MonitoredSession(creator, hooks=all_hooks) as session:
                while not session.should_stop():
                    found = session.run(predictions)
                    yield from _one_by_one(found) if yield_single_examples else [found]

    def export_saved_model(
        self,
        export_dir_base: str,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: dict[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
    ) -> bytes:
        """The directory, which is named after the time."""
        path = checkpoint_path or self.latest_checkpoint()
        if path is None:
            raise ValueError(f"There is no checkpoint in {self.model_dir} that could be exported.")
        with self._graph():
            v1.train.create_global_step()
            receiver = serving_input_receiver_fn()
            labels = getattr(receiver, "labels", None)
            spec = self.call_model(receiver.features, labels, experimental_mode, self._config)
            return export.write(
                spec,
                receiver,
                path,
                export_dir_base,
                assets=assets_extra or {},
                is_text=as_text,
                session_config=self._config.session_config,
            )

    export_savedmodel = export_saved_model

    def call_model(self, features: Any, labels: Any, mode: str, config: Any) -> EstimatorSpec:
        given = {"features": features, "mode": mode, "params": self.params, "config": config}
        if "labels" in arguments_of(self._model_fn):
            given["labels"] = labels
        elif labels is not None:
            raise ValueError("The input function returns labels, but the model function has no argument labels.")
        spec = call_with(self._model_fn, given)
        if not isinstance(spec, EstimatorSpec):
            raise ValueError(f"The model function must return an EstimatorSpec, not {type(spec).__name__}.")
        return spec

    @contextlib.contextmanager
    def _graph(self) -> Iterator[Any]:
        with tf.Graph().as_default() as graph, graph.device(self._config.device_setter()):
            v1.set_random_seed(self._config.tf_random_seed)
            yield graph

    def _given(self, mode: str) -> dict[str, Any]:
        return {"mode": mode, "params": self.params, "config": self._config}

    def _saved_step(self) -> int:
        newest = self.latest_checkpoint()
        if newest is None:
            return 0
        with contextlib.suppress(tf.errors.NotFoundError):
            return int(tf.train.load_variable(newest, v1.GraphKeys.GLOBAL_STEP))
        return 0

    def _run(self, spec: EstimatorSpec, hooks: list[Any], listeners: list[Any]) -> None:
        config = self._config
        if self._warm_start_from is not None and self.latest_checkpoint() is None:
            settings = self._warm_start_from
            v1.train.warm_start(
                **settings._asdict() if hasattr(settings, "_asdict") else {"ckpt_to_initialize_from": settings}
            )
        if not any(summary.op.name == "loss" for summary in v1.get_collection(v1.GraphKeys.SUMMARIES)):
            v1.summary.scalar("loss", spec.loss)
        v1.add_to_collection(v1.GraphKeys.LOSSES, spec.loss)
        all_hooks = [*hooks, v1.train.NanTensorHook(spec.loss)]
        if config.log_step_count_steps:
            shown = {"loss": spec.loss, "step": v1.train.get_global_step()}
            all_hooks.append(v1.train.LoggingTensorHook(shown, every_n_iter=config.log_step_count_steps))
        all_hooks += spec.training_hooks
        scaffold = spec.scaffold if spec.scaffold is not None else v1.train.Scaffold()
        if not (scaffold.saver or v1.get_collection(v1.GraphKeys.SAVERS)):
            saver = v1.train.Saver(
                sharded=True,
                max_to_keep=config.keep_checkpoint_max,
                keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
                defer_build=True,
                save_relative_paths=True,
            )
            v1.add_to_collection(v1.GraphKeys.SAVERS, saver)
        of_chief = [*spec.training_chief_hooks, *self._saver_hooks(spec, scaffold, all_hooks, listeners)]
        with v1.train.MonitoredTrainingSession(
            master=config.master,
            is_chief=config.is_chief,
            checkpoint_dir=self.model_dir,
            scaffold=scaffold,
            hooks=all_hooks,
            chief_only_hooks=of_chief,
            save_checkpoint_secs=0,
            save_summaries_steps=config.save_summary_steps,
            config=config.session_config,
            max_wait_secs=int(config.session_creation_timeout_secs),
            log_step_count_steps=config.log_step_count_steps,
        ) as session:
            while not session.should_stop():
                session.run([spec.train_op, spec.loss])

    def _saver_hooks(self, spec: EstimatorSpec, scaffold: Any, hooks: list[Any], listeners: list[Any]) -> list[Any]:
        """Of the chief. A user's own hook that saves takes the place of ours."""
        config = self._config
        own = [each for each in (*hooks, *spec.training_chief_hooks) if isinstance(each, v1.train.CheckpointSaverHook)]
        if own or not (config.save_checkpoints_secs or config.save_checkpoints_steps):
            if listeners and not own:
                raise ValueError(
                    "saving_listeners have no effect without saves. Set save_checkpoints_steps or "
                    "save_checkpoints_secs."
                )
            for listener in listeners:
                own[0]._listeners.append(listener)
            return []
        hook = v1.train.CheckpointSaverHook(
            self.model_dir,
            save_secs=config.save_checkpoints_secs,
            save_steps=config.save_checkpoints_steps,
            scaffold=scaffold,
            listeners=listeners,
        )
        return [hook]


def _one_by_one(found: Any) -> Iterator[Any]:
    if not isinstance(found, dict):
        yield from found
        return
    sizes = {len(value) for value in found.values()}
    if len(sizes) != 1:
        raise ValueError(f"Predictions of one batch have different lengths: {sorted(sizes)}.")
    for number in range(sizes.pop()):
        yield {key: value[number] for key, value in found.items()}
