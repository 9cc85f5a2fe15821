"""From logits to what a model predicts, loses, measures and serves: classes, or numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dlrover.trainer.tensorflow.estimator.layer.export import ClassificationOutput, PredictOutput, RegressionOutput
from dlrover.trainer.tensorflow.estimator.layer.specs import EstimatorSpec, ModeKeys

v1 = tf.compat.v1


class Head:
    num_logits: int

    def spec(self, mode: str, logits: Any, labels: Any, train: Callable[[Any], Any]) -> EstimatorSpec:
        predictions = self._predictions(logits)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=predictions, export_outputs=self._outputs(predictions))
        labels = self._checked(labels)
        losses = self._losses(logits, labels)
        loss = tf.reduce_mean(losses)
        if mode == ModeKeys.EVAL:
            metrics = {"average_loss": v1.metrics.mean(losses), **self._metrics(predictions, labels)}
            return EstimatorSpec(mode, predictions=predictions, loss=loss, eval_metric_ops=metrics)
        return EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=train(loss))

    def _predictions(self, logits: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _outputs(self, predictions: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _checked(self, labels: Any) -> Any:
        """As [batch, number of label values]."""
        raise NotImplementedError

    def _losses(self, logits: Any, labels: Any) -> Any:
        raise NotImplementedError

    def _metrics(self, predictions: dict[str, Any], labels: Any) -> dict[str, Any]:
        raise NotImplementedError


class ClassHead(Head):
    """Labels are numbers from 0 to before `n_classes`."""

    def __init__(self, n_classes: int) -> None:
        if n_classes < 2:
            raise ValueError(f"n_classes must be at least 2 (got {n_classes}).")
        self._n_classes = n_classes
        self.num_logits = 1 if n_classes == 2 else n_classes

    @property
    def _is_binary(self) -> bool:
        return self._n_classes == 2

    def _predictions(self, logits: Any) -> dict[str, Any]:
        whole = tf.concat([tf.zeros_like(logits), logits], axis=-1) if self._is_binary else logits
        ids = tf.argmax(whole, axis=-1)[..., tf.newaxis]
        size = tf.shape(logits)[0]
        every = tf.range(self._n_classes)[tf.newaxis]
        found = {
            "logits": logits,
            "probabilities": tf.nn.softmax(whole),
            "class_ids": ids,
            "classes": tf.strings.as_string(ids),
            "all_class_ids": tf.tile(every, [size, 1]),
            "all_classes": tf.tile(tf.strings.as_string(every), [size, 1]),
        }
        return {**found, "logistic": tf.sigmoid(logits)} if self._is_binary else found

    def _outputs(self, predictions: dict[str, Any]) -> dict[str, Any]:
        classes = ClassificationOutput(scores=predictions["probabilities"], classes=predictions["all_classes"])
        found = {"serving_default": classes, "classification": classes, "predict": PredictOutput(predictions)}
        return {**found, "regression": RegressionOutput(predictions["logistic"])} if self._is_binary else found

    def _checked(self, labels: Any) -> Any:
        return tf.reshape(tf.cast(labels, tf.float32 if self._is_binary else tf.int64), [-1, 1])

    def _losses(self, logits: Any, labels: Any) -> Any:
        if self._is_binary:
            return tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels[:, 0], logits=logits)[:, tf.newaxis]

    def _metrics(self, predictions: dict[str, Any], labels: Any) -> dict[str, Any]:
        found = {"accuracy": v1.metrics.accuracy(labels, predictions["class_ids"])}
        if not self._is_binary:
            return found
        scores = predictions["logistic"]
        mean, update = v1.metrics.mean(labels)
        return {
            **found,
            "accuracy_baseline": (tf.maximum(mean, 1.0 - mean), update),
            "auc": v1.metrics.auc(labels, scores),
            "auc_precision_recall": v1.metrics.auc(
                labels, scores, curve="PR", summation_method="careful_interpolation"
            ),
            "label/mean": v1.metrics.mean(labels),
            "precision": v1.metrics.precision(labels, predictions["class_ids"]),
            "prediction/mean": v1.metrics.mean(scores),
            "recall": v1.metrics.recall(labels, predictions["class_ids"]),
        }


class NumberHead(Head):
    """Squared differences."""

    def __init__(self, label_dimension: int) -> None:
        if label_dimension < 1:
            raise ValueError(f"label_dimension must be at least 1 (got {label_dimension}).")
        self.num_logits = label_dimension

    def _predictions(self, logits: Any) -> dict[str, Any]:
        return {"predictions": logits}

    def _outputs(self, predictions: dict[str, Any]) -> dict[str, Any]:
        value = RegressionOutput(predictions["predictions"])
        return {"serving_default": value, "regression": value, "predict": PredictOutput(predictions)}

    def _checked(self, labels: Any) -> Any:
        return tf.reshape(tf.cast(labels, tf.float32), [-1, self.num_logits])

    def _losses(self, logits: Any, labels: Any) -> Any:
        return tf.math.squared_difference(logits, labels)

    def _metrics(self, predictions: dict[str, Any], labels: Any) -> dict[str, Any]:
        return {"label/mean": v1.metrics.mean(labels), "prediction/mean": v1.metrics.mean(predictions["predictions"])}
