"""`Column`: one column of a text record, and how it is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_NUMBERS = (
    "float", "float32", "float64", "double", "int", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
DTYPES = (*_NUMBERS, "string")
_SERVED = {"float": "float32", "double": "float64", "int": "int64"}


@dataclass(frozen=True)
class Column:
    name: str
    dtype: str = "float32"
    is_sparse: bool = False
    is_label: bool = False

    @classmethod
    def create(cls, **properties: Any) -> Column:
        """Raises ValueError for a property or a type that a column does not have."""
        known = list(cls.__dataclass_fields__)
        unknown = [name for name in properties if name not in known]
        if unknown:
            raise ValueError(f"A column has no property {unknown[0]!r}; it has {', '.join(known)}.")
        if "name" not in properties:
            raise ValueError("A column has no name. Give it one.")
        column = cls(**properties)
        if column.dtype not in DTYPES:
            raise ValueError(
                f"Column {column.name!r} has the unknown dtype {column.dtype!r}. Give one of {', '.join(DTYPES)}."
            )
        return column

    def set_dtype(self, dtype: str) -> Column:
        return Column.create(name=self.name, dtype=dtype, is_sparse=self.is_sparse, is_label=self.is_label)

    @property
    def tensor_dtype(self) -> str:
        """The name that TensorFlow has for it."""
        return _SERVED.get(self.dtype, self.dtype)

    @property
    def default(self) -> str | float | int:
        """Of a field that is empty."""
        if self.dtype == "string":
            return ""
        return 0.0 if self.dtype in ("float", "float32", "float64", "double") else 0


def label_of(columns: list[Column]) -> Column:
    """Raises ValueError unless exactly one of them is the label."""
    labels = [column for column in columns if column.is_label]
    if len(labels) != 1:
        raise ValueError(
            f"Exactly one column must be the label, but {len(labels)} are marked as label: "
            f"{[each.name for each in labels]}."
        )
    return labels[0]
