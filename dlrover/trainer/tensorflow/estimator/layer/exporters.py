"""When `train_and_evaluate` exports a model: the best, each, or the last."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dlrover.trainer.tensorflow.estimator.layer.evaluation import LOSS

v1 = tf.compat.v1


class ModelExporter:
    """`tf.estimator.Exporter`: users may have their own."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    def export(
        self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Any, is_the_final_export: bool
    ) -> Any:
        raise NotImplementedError


class FinalExporter(ModelExporter):
    """Once, in the end."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: dict[str, str] | None = None,
        as_text: bool = False,
    ) -> None:
        self._name = name
        self._receiver_fn = serving_input_receiver_fn
        self._assets, self._is_text = assets_extra, as_text

    @property
    def name(self) -> str:
        return self._name

    def export(
        self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Any, is_the_final_export: bool
    ) -> Any:
        return self._write(estimator, export_path, checkpoint_path) if is_the_final_export else None

    def _write(self, estimator: Any, path: str, checkpoint: str) -> Any:
        os.makedirs(path, exist_ok=True)
        return estimator.export_saved_model(
            path, self._receiver_fn, assets_extra=self._assets, as_text=self._is_text, checkpoint_path=checkpoint
        )


class LatestExporter(FinalExporter):
    """After each evaluation."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: dict[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text)
        if exports_to_keep is not None and exports_to_keep <= 0:
            raise ValueError(f"exports_to_keep must be above 0 or None (got {exports_to_keep}).")
        self._num_kept = exports_to_keep

    def export(
        self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Any, is_the_final_export: bool
    ) -> Any:
        written = self._write(estimator, export_path, checkpoint_path)
        _remove_oldest(export_path, self._num_kept)
        return written


def _loss_is_smaller(best_eval_result: dict[str, Any], current_eval_result: dict[str, Any]) -> bool:
    for which, result in (("best", best_eval_result), ("current", current_eval_result)):
        if LOSS not in (result or {}):
            raise ValueError(f"The {which} evaluation has no {LOSS}. Give BestExporter a compare_fn.")
    return bool(best_eval_result[LOSS] > current_eval_result[LOSS])


class BestExporter(LatestExporter):
    """After an evaluation that is better than all before, those of former processes included."""

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: Callable[[], Any] | None = None,
        event_file_pattern: str | None = None,
        compare_fn: Callable[..., bool] = _loss_is_smaller,
        assets_extra: dict[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        if serving_input_receiver_fn is None:
            raise ValueError("BestExporter needs a serving_input_receiver_fn.")
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)
        self._compare = compare_fn
        self._pattern = event_file_pattern
        self._best: dict[str, Any] | None = None
        self._has_looked_back = False

    def export(
        self, estimator: Any, export_path: str, checkpoint_path: str, eval_result: Any, is_the_final_export: bool
    ) -> Any:
        if self._pattern and not self._has_looked_back:
            self._best = self._best_of_former(os.path.join(estimator.model_dir, self._pattern))
        self._has_looked_back = True
        if self._best is not None and not self._compare(
            best_eval_result=self._best,
            current_eval_result=eval_result,
        ):
            return None
        self._best = eval_result
        return super().export(estimator, export_path, checkpoint_path, eval_result, is_the_final_export)

    def _best_of_former(self, pattern: str) -> dict[str, Any] | None:
        best: dict[str, Any] | None = None
        for path in sorted(glob.glob(pattern)):
            for event in v1.train.summary_iterator(path):
                found = {
                    value.tag: value.simple_value for value in event.summary.value if value.HasField("simple_value")
                }
                if found and (best is None or self._compare(best_eval_result=best, current_eval_result=found)):
                    best = found
        return best


def _remove_oldest(path: str, num_kept: int | None) -> None:
    if num_kept is None:
        return
    numbers = sorted(int(name) for name in os.listdir(path) if name.isdigit())
    for number in numbers[:-num_kept]:
        shutil.rmtree(os.path.join(path, str(number)), ignore_errors=True)
