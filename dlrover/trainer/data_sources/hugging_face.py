"""
Map-style datasets of Hugging Face's `datasets`, a record per row.

The caller has loaded it, so nothing is imported here. Its own fingerprint says which data and which transformations it is made of; the name is private
there since 1.0 and unchanged up to 5.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.data_sources.source import SourceError


class HuggingFaceSource:
    def __init__(self, dataset: Any, *, name: str = "") -> None:
        """`dataset`: a `datasets.Dataset`, one split of what `load_dataset` gives."""
        if isinstance(dataset, dict):
            raise ConfigError(
                f"`dataset` must be one split, not a dict of splits ({', '.join(map(str, dataset))}). Give one of them."
            )
        if not all(hasattr(dataset, needed) for needed in ("__len__", "__getitem__", "column_names", "_fingerprint")):
            raise ConfigError(
                f"{type(dataset).__name__} is not a map-style dataset of `datasets`, so its records cannot be read by "
                "number. Load it without streaming=True."
            )
        if not len(dataset):
            raise SourceError("The dataset has no records.")
        self._dataset = dataset
        self.name = name or str(getattr(dataset.info, "dataset_name", "") or "dataset")

    @property
    def fingerprint(self) -> str:
        return str(self._dataset._fingerprint)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, places: Sequence[int], partition: str = "") -> list[Any]:
        columns = self._dataset[list(places)]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
