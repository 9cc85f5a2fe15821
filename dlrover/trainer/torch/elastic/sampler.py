"""
`ElasticDistributedSampler`: goes on in the middle of an epoch, also with another number of replicas.

The order of an epoch depends on seed and epoch alone, not on who reads it. What counts as done is a number of records from the front of that
order; what is left is dealt out to the replicas of today. So a state saved by 8 ranks continues on 6 without a record lost or seen twice
(but for the padding that makes all ranks take equally many, as in torch).

With `play` a rank stands in for several replicas, batch by batch in turn: a job for 4 ranks that has 3 now reads for each step of the model exactly the
records that 4 ranks would read.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sized
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from dlrover.protocol.errors import ConfigError
from dlrover.trainer import phases

VERSION = 2


class _Counting(NamedTuple):
    """How a caller counts the steps that it tells `state_dict`."""

    is_through_epochs: bool
    is_through_restart: bool


_COUNTINGS = (_Counting(True, True), _Counting(False, True), _Counting(False, False), _Counting(True, False))
"""The likeliest first: the step of the training, which a restored one goes on with."""


class ElasticDistributedSampler(DistributedSampler[Any]):  # type: ignore[misc]  # torch is not followed
    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Without a process group: one replica."""
        is_grouped = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if is_grouped else 1
        if rank is None:
            rank = dist.get_rank() if is_grouped else 0
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._completed = 0
        """Records of the epoch that are done, in its order; counted up by states."""
        self._counted_from = 0
        """The caller's step at which `_completed` was right."""
        self._former_lengths: list[int] = []
        """Records per rank of the epochs that this process went through since then: for callers that count on through epochs."""
        self._countings: tuple[_Counting, ...] = _COUNTINGS
        """Those that what the caller has told so far leaves possible."""
        self._newest: Iterator[int] | None = None
        """The newest iteration over this sampler; None: no rank has read since the restored state."""
        self._num_batches = self._num_used = 0
        self.is_counted = False
        """Whether a loader counts the batches."""
        self._num_ranks = num_replicas
        self._batch_size = 0
        """Records that one replica gets in turn; 0: every rank is one replica."""
        self._recount()

    def play(self, num_replicas: int, batch_size: int) -> None:
        """
        Deal for so many replicas, which the ranks play in turn, in batches of that size. All batches are whole then: the epoch is padded, or
        with `drop_last` cut, to whole steps.
        """
        if num_replicas < 1 or batch_size < 1:
            raise ValueError(
                f"`num_replicas` and `batch_size` must be at least 1 (got {num_replicas} and {batch_size})."
            )
        self.num_replicas, self._batch_size = num_replicas, batch_size
        self._recount()

    @property
    def is_played(self) -> bool:
        """Whether batches have a fixed size, because ranks take turns."""
        return self._batch_size > 0

    @property
    def roles(self) -> range:
        """The replicas that this rank plays."""
        return (
            range(self.rank, self.num_replicas, self._num_ranks)
            if self._batch_size
            else range(self.rank, self.rank + 1)
        )

    @property
    def dataset_size(self) -> int:
        assert isinstance(self.dataset, Sized), "checked by torch"
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        left = self._order()[self._completed :]
        wanted = self.num_samples * self.num_replicas
        if self.drop_last or not len(left):
            left = left[:wanted]
        else:
            left = left.repeat(math.ceil(wanted / len(left)))[:wanted]
        shares = [left[role :: self.num_replicas] for role in self.roles]
        if len(shares) > 1:
            # Batch by batch in turn: all batches are whole.
            size = self._batch_size
            shares = [torch.stack([share.view(-1, size) for share in shares], dim=1).flatten()]
        self._newest = iter(shares[0].tolist())  # only the share of this rank becomes Python's numbers
        return self._newest

    def __len__(self) -> int:
        return self.num_samples * len(self.roles)

    def set_epoch(self, epoch: int) -> None:
        """Call it before each epoch, beginning with `sampler.epoch`: the epoch of a restored state goes on where it was."""
        if epoch == self.epoch:
            return
        if epoch > self.epoch:
            self._former_lengths.append(self.num_samples)
        else:
            self._former_lengths.clear()
        super().set_epoch(epoch)
        self._completed = 0
        self._num_batches = self._num_used = 0
        self._recount()
        if self._newest is not None:
            self._newest = iter(range(len(self)))  # nothing of this epoch has been read

    def state_dict(self, iter_step: int | None = None, micro_batch_size: int | None = None) -> dict[str, Any]:
        """
        Where the epoch stands after so many steps of so many records on every rank.

        `iter_step` may count from the beginning of the epoch or of the training, and from the restored state on or through it: how, shows in
        what is told, and is remembered. Only a first state that would fit either way counts as a step of the training. Without arguments the
        batches count that `count_batch` was told of.
        """
        if iter_step is None:
            completed = self._completed + self._num_counted
        else:
            if micro_batch_size is None or micro_batch_size < 1 or iter_step < 0:
                raise ValueError("state_dict() needs both a step and a batch size of at least 1, or neither of them.")
            steps = self._steps_of_epoch(iter_step, micro_batch_size)
            completed = self._completed + steps * micro_batch_size * self.num_replicas
        return {
            "epoch": self.epoch,
            "completed_num": min(completed, self.dataset_size),
            "version": VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "dataset_size": self.dataset_size,
            "iter_step": iter_step or 0,
        }

    def count_batch(self, size: int) -> None:
        """A batch of that size has been used on every rank; where a rank stands in for several, one of theirs."""
        self._num_batches += 1
        if not self._batch_size:
            self._num_used += size * self.num_replicas

    @property
    def _num_counted(self) -> int:
        """Records of the epoch that were used since the restored state: of ranks that take turns, in whole steps."""
        if not self._batch_size:
            return self._num_used
        return self._num_batches // len(self.roles) * self._batch_size * self.num_replicas

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Go on there, with the replicas of today. States of the original are read, too; an empty one is the very beginning. Raises ConfigError
        for another dataset.
        """
        epoch, completed = int(state.get("epoch", 0)), int(state.get("completed_num", 0))
        if state.get("version", 1) >= VERSION:
            for name, ours in (("dataset_size", self.dataset_size), ("seed", self.seed), ("shuffle", self.shuffle)):
                if state[name] != ours:
                    raise ConfigError(
                        f"The sampler's state cannot be loaded: it was saved with {name} {state[name]!r}, and "
                        f"this sampler has {ours!r}. Its position would name other records. Make the sampler "
                        "with the same arguments as before."
                    )
        elif completed > self.dataset_size:
            completed %= self.dataset_size  # steps of the original count through all epochs
        if completed >= self.dataset_size:
            epoch, completed = epoch + 1, 0
        super().set_epoch(epoch)
        self._completed = max(0, completed)
        self._counted_from = int(state.get("iter_step", 0))
        self._former_lengths.clear()
        self._countings, self._newest = _COUNTINGS, None
        self._num_batches = self._num_used = 0
        self._recount()
        phases.tell_data(epoch, self._completed)

    def _steps_of_epoch(self, iter_step: int, batch_size: int) -> int:
        """How many steps of the running epoch were done since the restored state, however the caller counts."""
        former = sum(
            length // batch_size if self.drop_last else math.ceil(length / batch_size)
            for length in self._former_lengths
        )
        steps: dict[_Counting, int] = {}
        for each in _COUNTINGS:
            is_of_restored = each.is_through_restart and (each.is_through_epochs or not self._former_lengths)
            before = (former if each.is_through_epochs else 0) + (self._counted_from if is_of_restored else 0)
            steps[each] = iter_step - before
        num_read = self._num_read
        longest = math.ceil(self.num_samples / batch_size)
        read = longest if num_read is None else math.ceil(num_read / batch_size)
        # A caller whose batches had several sizes may seem to have used more than was read, and one may change its mind.
        for known, most in itertools.product((self._countings, _COUNTINGS), (read, longest)):
            possible = [each for each in known if 0 <= steps[each] <= most]
            if possible:
                break
        else:
            is_through = not self._former_lengths and iter_step >= self._counted_from
            return iter_step - self._counted_from if is_through else iter_step
        # Who saves has mostly done something: the last step of an epoch rather than none of the next.
        if num_read or (num_read is None and self._former_lengths):
            possible = [each for each in possible if steps[each]] or possible
        self._countings = tuple(possible)
        return steps[possible[0]]

    @property
    def _num_read(self) -> int | None:
        """Records of each replica that were read of this epoch since the restored state, perhaps ahead; None: not through this sampler."""
        if self._newest is None:
            return None
        return (len(self) - operator.length_hint(self._newest)) // len(self.roles)

    def _recount(self) -> None:
        """How much is left of this epoch for each rank."""
        left = max(0, self.dataset_size - self._completed)
        unit = max(1, self._batch_size)
        step = self.num_replicas * unit
        self.num_samples = unit * (left // step if self.drop_last else math.ceil(left / step))
        self.total_size = self.num_samples * self.num_replicas

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.dataset_size)
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self.dataset_size, generator=generator)
