"""Adapters that read records where a shard names them: files by line, CSV, Parquet, Hugging Face datasets, and a directory that grows."""

from dlrover.trainer.data_sources.csv_files import CsvSource
from dlrover.trainer.data_sources.directory_tail import DirectoryTail, TailWatch
from dlrover.trainer.data_sources.hugging_face import HuggingFaceSource
from dlrover.trainer.data_sources.lines import LineSource
from dlrover.trainer.data_sources.parquet import ParquetSource
from dlrover.trainer.data_sources.source import Source, SourceChanged, SourceError

__all__ = [
    "CsvSource",
    "DirectoryTail",
    "HuggingFaceSource",
    "LineSource",
    "ParquetSource",
    "Source",
    "SourceChanged",
    "SourceError",
    "TailWatch",
]
