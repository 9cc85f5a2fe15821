"""TensorFlow jobs with parameter servers: readers, hooks and the processes of a cluster. Importing this imports no TensorFlow."""

from __future__ import annotations

import dlrover.python  # noqa: F401  puts the finder in place that knows the old names below
from dlrover.trainer.tensorflow.reader.file_reader import FileReader

__all__ = ["FileReader"]
