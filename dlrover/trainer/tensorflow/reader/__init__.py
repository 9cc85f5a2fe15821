"""Where records come from."""

from dlrover.trainer.tensorflow.reader.file_reader import FileReader

__all__ = ["FileReader"]
