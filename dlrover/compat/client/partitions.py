"""Where each partition of a stream goes on, as the original names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class PartitionOffsets(Mapping[str, int]):
    """
    Partition to the first offset that is not read. Give it to `ShardingClient(..., storage_type="stream", partitions=...)`.

    As a mapping its keys are texts, as the master has them.
    """

    def __init__(self, partition_offsets: dict[Any, int]) -> None:
        self.partition_offsets = partition_offsets
        self.start_partition = 0
        """How often a partition was taken in turn."""

    @property
    def partitions(self) -> list[Any]:
        return list(self.partition_offsets)

    @property
    def partition_num(self) -> int:
        return len(self.partition_offsets)

    def get_partitions(self) -> list[Any]:
        return self.partitions

    def get_partition_index_by_name(self, partition_name: Any) -> int | None:
        """Its place among the partitions; None if there is no such partition."""
        return self.partitions.index(partition_name) if partition_name in self.partition_offsets else None

    def get_round_robin_partition(self) -> Any:
        partition = self.partitions[self.start_partition % self.partition_num]
        self.start_partition += 1
        return partition

    def get_partition_offset(self, partition_index: Any) -> int | None:
        return self.partition_offsets.get(partition_index)

    def set_partition_offset(self, partition_index: Any, offset: int) -> None:
        self.partition_offsets[partition_index] = offset

    def to_dict(self) -> dict[Any, int]:
        return self.partition_offsets

    def __getitem__(self, partition: str) -> int:
        return {str(name): offset for name, offset in self.partition_offsets.items()}[partition]

    def __iter__(self) -> Iterator[str]:
        return map(str, self.partition_offsets)

    def __len__(self) -> int:
        return self.partition_num
