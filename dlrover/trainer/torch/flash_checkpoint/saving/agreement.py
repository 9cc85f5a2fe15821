"""
Who saves which piece of the state, and one decision for all of them.

The ranks agree over gloo on the CPU, in the thread that calls us, whatever backend the training uses: a few bytes on the
loopback or the host's network, and never in the way of the devices. Where there is no process group, or no other
rank, everything here answers at once.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct

from dlrover.protocol.errors import ConfigError
from dlrover.trainer import environment

PATIENCE = timedelta(seconds=60)
"""For the slowest rank to come to the same save. One that comes later than that fails in its training anyway."""
_NUM_VALUES = 16
"""Steps that one rank can offer: two slots, now and then a third, and the newest checkpoints in storage."""
_NONE = -1


class Ranks(Struct, frozen=True, kw_only=True):
    global_rank: int
    world_size: int
    local_rank: int
    local_world_size: int


class Share(Struct, frozen=True, kw_only=True):
    """What a rank has to do with the saves of the job."""

    shard: int
    num_shards: int
    num_saving: int
    is_saving: bool
    is_writer: bool
    """Of several equal copies of the shard this rank's is the one for the storage."""


def own_ranks() -> Ranks:
    """As the process group says; as the launcher said where there is none yet."""
    where = environment.current()
    local_rank = where.local_rank if where is not None else int(os.environ.get("LOCAL_RANK", "0"))
    is_grouped = dist.is_available() and dist.is_initialized()
    world_size = dist.get_world_size() if is_grouped else int(os.environ.get("WORLD_SIZE", "1"))
    return Ranks(
        global_rank=dist.get_rank() if is_grouped else int(os.environ.get("RANK", "0")),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def share_of(ranks: Ranks, local_ranks: Sequence[int], local_shard_num: int, global_shard_num: int) -> Share:
    """
    The first `local_shard_num` ranks of every node save. They hold `global_shard_num` different pieces, in the order of their ranks and then
    again from the start: with 1 and 1 every node holds the whole state.

    `local_ranks` are those of all ranks of the job, by global rank.
    """
    saving = [rank for rank, local in enumerate(local_ranks) if local < local_shard_num]
    if global_shard_num > len(saving):
        raise ConfigError(
            f"global_shard_num is {global_shard_num}, but with local_shard_num {local_shard_num} only "
            f"{len(saving)} ranks save. Set local_shard_num to the number of ranks on each node that hold "
            "different states."
        )
    # A rank that does not save has the state of one on its node that does.
    stand_in = ranks.global_rank - ranks.local_rank + ranks.local_rank % local_shard_num
    position = saving.index(stand_in)
    is_saving = ranks.local_rank < local_shard_num
    return Share(
        shard=position % global_shard_num,
        num_shards=global_shard_num,
        num_saving=len(saving),
        is_saving=is_saving,
        is_writer=is_saving and position < global_shard_num,
    )


class Agreement:
    """Made by all ranks together, as torch's groups are."""

    def __init__(
        self, ranks: Ranks, local_shard_num: int, global_shard_num: int, *, is_group_private: bool = False
    ) -> None:
        """With a private group we may be called from another thread than the training's collectives."""
        self.ranks = ranks
        self._everybody: Any = None
        """The group of all ranks; None: no other rank."""
        self._savers: Any = None
        self.is_joint = ranks.world_size > 1 and dist.is_available() and dist.is_initialized()
        if self.is_joint:
            is_shared = dist.get_backend() == "gloo" and not is_group_private
            self._everybody = dist.group.WORLD if is_shared else dist.new_group(backend="gloo", timeout=PATIENCE)
            local_ranks = [values[0] for values in self._gather([ranks.local_rank])]
        else:
            size = max(1, ranks.local_world_size)
            local_ranks = [rank % size for rank in range(max(ranks.world_size, ranks.global_rank + 1))]
            local_ranks[ranks.global_rank] = ranks.local_rank
        self.share = share_of(ranks, local_ranks, local_shard_num, global_shard_num)
        if self.is_joint and 1 < self.share.num_saving < ranks.world_size:
            saving = [rank for rank, local in enumerate(local_ranks) if local < local_shard_num]
            self._savers = dist.new_group(saving, backend="gloo", timeout=PATIENCE)
        elif self.is_joint and self.share.num_saving > 1:
            self._savers = self._everybody
        [token] = self.tell_all([secrets.randbits(48)])
        self.token = f"{token:012x}"
        """Equal on all ranks, and never the same again."""
        self.heard_request = 0
        """Number of the newest wish for a storage save that this rank has heard of."""
        self.agreed_request = 0
        """The newest that any saving rank had heard of at the newest decision: equal on all of them."""

    @property
    def group(self) -> Any:
        """All ranks, over gloo; None: no other rank."""
        return self._everybody

    def decide(self, *, is_ready: bool, is_giving_up: bool = False) -> tuple[bool, bool]:
        """Of the saving ranks: whether all are ready, and whether any gives up."""
        if self._savers is None:
            self.agreed_request = self.heard_request
            return is_ready, is_giving_up
        votes = torch.tensor([int(not is_ready), int(is_giving_up), self.heard_request], dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._savers)
        self.agreed_request = int(votes[2].item())
        return votes[0].item() == 0, votes[1].item() == 1

    def have_all(self, is_fine: bool) -> bool:
        """Of all ranks."""
        return all(values == [1] for values in self._gather([int(is_fine)]))

    def common(self, values: Sequence[int]) -> set[int]:
        """What every rank names."""
        gathered = self._gather(sorted(values, reverse=True)[:_NUM_VALUES])
        return set.intersection(*(set(each) for each in gathered))

    def tell_all(self, values: Sequence[int]) -> list[int]:
        """What global rank 0 says, at most 16 numbers that are not negative."""
        if self._everybody is None:
            return list(values)
        packed = _pack(values)
        dist.broadcast(packed, src=0, group=self._everybody)
        return _unpack(packed)

    def _gather(self, values: Sequence[int]) -> list[list[int]]:
        if self._everybody is None:
            return [list(values)]
        found = [_pack(()) for _ in range(self.ranks.world_size)]
        dist.all_gather(found, _pack(values), group=self._everybody)
        return [_unpack(each) for each in found]


def _pack(values: Sequence[int]) -> torch.Tensor:
    padded = [*values[:_NUM_VALUES], *[_NONE] * (_NUM_VALUES - len(values))]
    return torch.tensor(padded, dtype=torch.int64)


def _unpack(packed: torch.Tensor) -> list[int]:
    return [int(value) for value in packed.tolist() if value != _NONE]
