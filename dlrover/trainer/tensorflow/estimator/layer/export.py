"""Saved models: what a served model takes and gives, and how it is written."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from dlrover.trainer.tensorflow.estimator.layer.specs import EstimatorSpec

v1 = tf.compat.v1
_DEFAULT = "serving_default"
_FEATURE, _RECEIVER, _LABEL = "feature", "input", "label"


class _Receiver(NamedTuple):
    features: Any
    receiver_tensors: dict[str, Any]
    receiver_tensors_alternatives: dict[str, dict[str, Any]] | None


class ServingInputReceiver(_Receiver):
    """What a request is made of, and the features that the model gets."""

    __slots__ = ()

    def __new__(
        cls, features: Any, receiver_tensors: Any, receiver_tensors_alternatives: Any = None
    ) -> ServingInputReceiver:
        return super().__new__(
            cls, _named(features, _FEATURE), _named(receiver_tensors, _RECEIVER), receiver_tensors_alternatives
        )


class TensorServingInputReceiver(_Receiver):
    """The same for a model whose features are one tensor."""

    __slots__ = ()

    def __new__(
        cls, features: Any, receiver_tensors: Any, receiver_tensors_alternatives: Any = None
    ) -> TensorServingInputReceiver:
        return super().__new__(cls, features, _named(receiver_tensors, _RECEIVER), receiver_tensors_alternatives)


class ExportOutput:
    """What a signature gives."""

    def signature(self, receiver: dict[str, Any]) -> Any:
        """None: such requests do not fit it."""
        raise NotImplementedError


class PredictOutput(ExportOutput):
    def __init__(self, outputs: Any) -> None:
        self.outputs = _named(outputs, "output")

    def signature(self, receiver: dict[str, Any]) -> Any:
        return v1.saved_model.predict_signature_def(receiver, self.outputs)


class ClassificationOutput(ExportOutput):
    def __init__(self, scores: Any = None, classes: Any = None) -> None:
        if scores is None and classes is None:
            raise ValueError("ClassificationOutput needs scores or classes.")
        self.scores, self.classes = scores, classes

    def signature(self, receiver: dict[str, Any]) -> Any:
        examples = _examples(receiver)
        return None if examples is None else v1.saved_model.classification_signature_def(
            examples, self.classes, self.scores
        )  # fmt: skip


class RegressionOutput(ExportOutput):
    def __init__(self, value: Any) -> None:
        self.value = value

    def signature(self, receiver: dict[str, Any]) -> Any:
        examples = _examples(receiver)
        return None if examples is None else v1.saved_model.regression_signature_def(examples, self.value)


class EvalOutput(ExportOutput):
    """Named, because scripts do; a served model has no signature for it."""

    def __init__(self, loss: Any = None, predictions: Any = None, metrics: Any = None) -> None:
        self.loss, self.predictions, self.metrics = loss, predictions, metrics

    def signature(self, receiver: dict[str, Any]) -> Any:
        return None


def build_parsing_serving_input_receiver_fn(
    feature_spec: Mapping[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Requests are serialized `tf.Example`s."""

    def build() -> ServingInputReceiver:
        serialized = v1.placeholder(tf.string, [default_batch_size], name="input_example_tensor")
        features = tf.io.parse_example(serialized, dict(feature_spec))
        return ServingInputReceiver(features, {"examples": serialized})

    return build


def build_raw_serving_input_receiver_fn(
    features: Mapping[str, Any], default_batch_size: int | None = None
) -> Callable[[], ServingInputReceiver]:
    """Requests carry the features as tensors of these types and shapes."""

    def build() -> ServingInputReceiver:
        places = {
            name: v1.placeholder(
                tensor.dtype, tf.TensorShape([default_batch_size]).concatenate(tensor.shape[1:]), name=name
            )
            for name, tensor in features.items()
        }
        return ServingInputReceiver(dict(places), places)

    return build


def write(
    spec: EstimatorSpec,
    receiver: Any,
    checkpoint: str,
    base: str,
    *,
    assets: Mapping[str, str],
    is_text: bool,
    session_config: Any,
) -> bytes:
    """Into a directory named after the time, which appears only when it is complete."""
    scaffold = spec.scaffold if spec.scaffold is not None else v1.train.Scaffold()
    os.makedirs(base, exist_ok=True)
    final = _new_directory(base)
    partial = os.path.join(base, f"temp-{os.path.basename(final)}")
    with v1.Session(config=session_config) as session:
        saver = scaffold.saver or v1.train.Saver(sharded=True)
        saver.restore(session, checkpoint)
        main_op = scaffold.local_init_op or v1.train.Scaffold.default_local_init_op()
        builder = v1.saved_model.Builder(partial)
        builder.add_meta_graph_and_variables(
            session,
            tags=[tf.saved_model.SERVING],
            signature_def_map=_signatures(spec, receiver),
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=main_op,
            saver=saver,
            strip_default_attrs=True,
        )
        builder.save(as_text=is_text)
    for name, source in assets.items():
        place = os.path.join(partial, "assets.extra", name)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        shutil.copyfile(source, place)
    os.rename(partial, final)
    return final.encode()


def _signatures(spec: EstimatorSpec, receiver: Any) -> dict[str, Any]:
    outputs = spec.export_outputs
    if outputs is None:
        outputs = {_DEFAULT: PredictOutput(spec.predictions)}
    if len(outputs) == 1:
        [only] = outputs.values()
        outputs = {**outputs, _DEFAULT: only}
    if _DEFAULT not in outputs:
        raise ValueError(f"One of several export_outputs must be called {_DEFAULT} (got {sorted(outputs)}).")
    found = {name: output.signature(receiver.receiver_tensors) for name, output in outputs.items()}
    for name, tensors in (receiver.receiver_tensors_alternatives or {}).items():
        for output_name, output in outputs.items():
            found[f"{name}:{output_name}"] = output.signature(tensors)
    return {name: signature for name, signature in found.items() if signature is not None}


def _named(tensors: Any, name: str) -> dict[str, Any]:
    return dict(tensors) if isinstance(tensors, Mapping) else {name: tensors}


def _examples(receiver: dict[str, Any]) -> Any:
    """Classification and regression are asked with one batch of serialized examples, or not at all."""
    tensors = list(receiver.values())
    return tensors[0] if len(tensors) == 1 and tensors[0].dtype == tf.string else None


def _new_directory(base: str) -> str:
    """Seconds since 1970; the next free one."""
    number = int(time.time())
    while os.path.exists(os.path.join(base, str(number))):
        number += 1
    return os.path.join(base, str(number))
