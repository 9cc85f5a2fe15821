"""
Names of the original's replica classes.

Here the agents keep replicas of snapshots in other nodes' memory, in the background and without the trainer; what is asked for is
`replica_count` of the checkpointer. These classes carry that number and do nothing else: code that made one goes on to work.
"""

from __future__ import annotations

import abc


class CkptReplicaManger(abc.ABC):  # noqa: B024  the spelling and the form are the original's
    def __init__(self, replica_count: int = 0) -> None:
        self.replica_count = replica_count

    @classmethod
    def create_replica_manager(cls, shard_num: int, replica_count: int) -> CkptReplicaManger:
        return ShardCkptReplicaManager(replica_count) if shard_num > 1 else FullCkptReplicaManager(replica_count)

    def has_replica(self) -> bool:
        return self.replica_count > 0


class ShardCkptReplicaManager(CkptReplicaManger):
    """For states that are cut over the ranks."""


class FullCkptReplicaManager(CkptReplicaManger):
    """For states that every node holds whole: nothing has to be copied."""
