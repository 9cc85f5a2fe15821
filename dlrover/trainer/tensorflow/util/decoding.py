"""Lines of text into tensors, column by column."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dlrover.trainer.tensorflow.util.column_info import Column, label_of

_DECODED = ("float32", "float64", "int32", "int64", "string")
"""What TensorFlow decodes text to; others are cast."""


def decode(batch: Any, columns: list[Column], delimiter: str) -> tuple[dict[str, Any], Any]:
    """Features by name, and the label."""
    names = [column.tensor_dtype if column.tensor_dtype in _DECODED else "int64" for column in columns]
    defaults = [tf.constant([column.default], dtype=name) for column, name in zip(columns, names, strict=True)]
    fields = tf.io.decode_csv(batch, record_defaults=defaults, field_delim=delimiter)
    cast = {
        column.name: tf.cast(field, column.tensor_dtype) if column.tensor_dtype not in _DECODED else field
        for column, field in zip(columns, fields, strict=True)
    }
    label = cast.pop(label_of(columns).name)
    return cast, label
