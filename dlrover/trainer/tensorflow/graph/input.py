"""
Records into tensors: batches of text lines from a reader, decoded column by column.

Training batches come from a generator in this process and carry their number of records, which is fetched with each step: so what is reported as
read is what the step has used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from dlrover.trainer.tensorflow.conf import Conf
from dlrover.trainer.tensorflow.reader.base_reader import ElasticReader, ReadingGate, in_batches
from dlrover.trainer.tensorflow.util.column_info import Column, label_of
from dlrover.trainer.tensorflow.util.decoding import decode


class TrainingInput:
    """The input of one training process. `build` is called by the Estimator inside its graph."""

    def __init__(self, settings: Conf, gate: ReadingGate) -> None:
        """`gate` is asked, in the generator's thread, around each wait for a shard."""
        self._settings = settings
        self._columns = list(settings.columns)
        self._gate = gate
        label_of(self._columns)
        self.reader = settings.reader
        self.initializer: Any = None
        self.num_records: Any = None
        """Tensor: how many records the batch of a step has."""
        self._lock = threading.Lock()
        self.num_given = 0
        """Batches that the generator has handed to TensorFlow."""
        self.is_exhausted = False
        if isinstance(self.reader, ElasticReader):
            self.reader.set_batch_size(settings.batch_size)
            self.reader.set_num_epochs(settings.epoch)

    @property
    def client(self) -> Any:
        """The sharding client; None for a reader without shards."""
        return self.reader.build_data_shard_client() if isinstance(self.reader, ElasticReader) else None

    def build(self) -> tuple[dict[str, Any], Any]:
        lines = tf.data.Dataset.from_generator(self._batches, output_signature=tf.TensorSpec([None], tf.string))
        iterator = tf.compat.v1.data.make_initializable_iterator(lines)
        self.initializer = iterator.initializer
        batch = iterator.get_next()
        self.num_records = tf.shape(batch)[0]
        return decode(batch, self._columns, self._settings.field_delim)

    def _batches(self) -> Iterator[list[str]]:
        for batch in self._read():
            with self._lock:
                self.num_given += 1
            yield batch
        self.is_exhausted = True

    def _read(self) -> Iterable[list[str]]:
        if isinstance(self.reader, ElasticReader):
            return self.reader.batches(self._gate)
        return in_batches(self.reader, self._settings.epoch, self._settings.batch_size)


def evaluation_input(settings: Conf) -> Callable[[], Any]:
    """Reads the whole set once, each time it is called. It takes no shards of any training."""
    columns = list(settings.columns)
    label_of(columns)

    def build() -> Any:
        reader = settings.reader
        if isinstance(reader, ElasticReader):
            reader.set_batch_size(settings.batch_size)
            generator: Callable[[], Iterable[list[str]]] = reader.whole
        else:
            generator = lambda: in_batches(reader, 1, settings.batch_size)  # noqa: E731
        lines = tf.data.Dataset.from_generator(generator, output_signature=tf.TensorSpec([None], tf.string))
        return lines.map(lambda batch: decode(batch, columns, settings.field_delim))

    return build


def serving_input(columns: list[Column]) -> Callable[[], Any]:
    """One placeholder for each column but the label."""

    def build() -> Any:
        features = {
            column.name: tf.compat.v1.placeholder(column.tensor_dtype, [None], name=column.name)
            for column in columns
            if not column.is_label
        }
        return tf.estimator.export.ServingInputReceiver(features, dict(features))

    return build
