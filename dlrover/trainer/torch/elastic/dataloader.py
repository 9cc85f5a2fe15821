"""
`ElasticDataLoader`: a DataLoader whose batch size can change while it runs, and which knows where it stands.

It takes the arguments of torch's DataLoader and has its attributes. The parallel-config file (JSON) says which batch size is wanted; `load_config` reads
it, and only a newer version counts. A new batch size takes effect with the next batch that is put together, with `drop_last` or without; batches that
worker processes have ahead keep the old one. The ranks of a job agree on the version first, so that all change at the same batch.

With an `ElasticDistributedSampler` the loader counts the batches that were used: `loader.state_dict()` in the middle of an
epoch is enough to go on there, with any number of ranks.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch.utils.data import BatchSampler, DataLoader

from dlrover.host.ownership import check_directory, open_checked
from dlrover.trainer import phases
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler

log = logging.getLogger("dlrover.trainer.data")

CONFIG_FILE = "/tmp/dlrover/auto_paral_config.json"
"""Where the agent's tuner writes, unless DLROVER_PARAL_CONFIG_PATH says otherwise."""
_PREFETCH = 2
"""torch's own number of batches ahead, where none was given because there was no reading ahead."""


class _Wish(Struct, frozen=True):
    """What the file wants of the loader; -1: it does not say."""

    version: int = 0
    batch_size: int = 0
    num_workers: int = -1
    pin_memory: int = -1
    accumulation: int = 0


@dataclass
class _Pass:
    """What one iteration over the batches has put together so far."""

    sizes: deque[int] | None
    """Records of its batches, in order, until the loader hands them out. None: the loader does not count."""
    num_batches: int = 0
    num_records: int = 0

    def note(self, size: int) -> None:
        if self.sizes is not None:
            self.sizes.append(size)
        self.num_batches += 1
        self.num_records += size


class ElasticBatchSampler(BatchSampler):  # type: ignore[misc]  # torch is not followed
    """Looks at its batch size before every batch."""

    batch_size: int
    drop_last: bool
    sampler: Iterable[int]

    def __init__(self, sampler: Iterable[int], batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self._is_counted = isinstance(sampler, ElasticDistributedSampler)
        self.newest = self._begin()

    def __iter__(self) -> Iterator[list[int]]:
        self.newest = self._begin()  # at once and not with the first batch: who iterates takes it
        return self._put_together(self.newest)

    @property
    def num_batches(self) -> int:
        """Of the newest iteration: what is put together, and what is left in batches of today's size. TypeError: the sampler does not know its length."""
        left = max(0, len(self.sampler) - self.newest.num_records)  # type: ignore[arg-type]
        return self.newest.num_batches + (left // self.batch_size if self.drop_last else -(-left // self.batch_size))

    def _begin(self) -> _Pass:
        return _Pass(deque() if self._is_counted else None)

    def _put_together(self, newest: _Pass) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) >= self.batch_size:
                newest.note(len(batch))
                yield batch
                batch = []
        if batch and not self.drop_last:
            newest.note(len(batch))
            yield batch


class _CountingIterator:
    """
    torch's iterator, and a count of the records that it hands out.

    What a batch looks like is the business of `collate_fn`: it does not show its size. Batches come in the order in which they were put
    together, however far processes read ahead.
    """

    def __init__(self, inner: Any, sampler: ElasticDistributedSampler, sizes: deque[int] | None) -> None:
        self.inner = inner
        self.sizes = sizes
        """None: every item is one record, because the loader makes no batches."""
        self._sampler = sampler

    def __iter__(self) -> _CountingIterator:
        return self

    def __next__(self) -> Any:
        batch = next(self.inner)
        self._sampler.count_batch(1 if self.sizes is None else self.sizes.popleft())
        return batch

    def __len__(self) -> int:
        return len(self.inner)


class ElasticDataLoader(DataLoader[Any]):  # type: ignore[misc]  # torch is not followed
    batch_size: int | None
    batch_sampler: Any
    num_workers: int
    prefetch_factor: int | None
    sampler: Any

    def __init__(
        self, dataset: Any, *args: Any, config_file: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        """As torch's; `config_file` overrides DLROVER_PARAL_CONFIG_PATH. A file that exists is read at once."""
        super().__init__(dataset, *args, **options)
        self.config_file = os.fspath(config_file or os.environ.get("DLROVER_PARAL_CONFIG_PATH") or CONFIG_FILE)
        self._version = 0
        self._accumulation = 0
        self.script_batch_size: int | None = self.batch_size
        """As the script gave it last, whatever the file says since."""
        self._most_records = 0
        """That a batch may have; 0: any number."""
        self._batches: ElasticBatchSampler | None = None
        """Puts the batches together, unless the caller has given a batch sampler or wants no batches."""
        if self.batch_size is not None:
            self._batches = ElasticBatchSampler(self.sampler, self.batch_size, self.drop_last)
            self.__dict__["batch_sampler"] = self._batches  # torch lets nobody set it; nobody has seen torch's own yet
        elif isinstance(self.batch_sampler, ElasticBatchSampler):  # frameworks make loaders like one that they got
            self._batches = self.batch_sampler
        sampler = self.sampler if self._batches is None else self._batches.sampler
        self._elastic_sampler = sampler if isinstance(sampler, ElasticDistributedSampler) else None
        if self._elastic_sampler is not None:
            self._elastic_sampler.is_counted = True
        self._counting: _CountingIterator | None = None
        """Around the one iterator of a loader whose worker processes stay."""
        self.load_config(self.config_file)
        self._write_back()
        phases.tell_shape(micro_batch=self.get_batch_size(), loader_workers=self.num_workers)

    def __iter__(self) -> Any:
        batches = super().__iter__()
        if self._elastic_sampler is None:
            return batches
        sizes = None if self._batches is None else self._batches.newest.sizes
        if self._counting is not None and self._counting.inner is batches:
            self._counting.sizes = sizes
            return self._counting
        counting = _CountingIterator(batches, self._elastic_sampler, sizes)
        if self.persistent_workers:
            self._counting = counting
        return counting

    @property
    def num_batches(self) -> int:
        """Of the epoch that runs, as its batches were and are; `len` is what an epoch with batches of today's size would have."""
        return len(self) if self._batches is None else self._batches.num_batches

    @property
    def accumulation(self) -> int:
        """Micro-batches of one step, as the tuner wants them; 0: it does not say."""
        return self._accumulation

    def get_batch_size(self) -> int | None:
        """Of the batches that are put together now. None: the loader makes no batches, or its batch sampler does not tell."""
        size: int | None = getattr(self.batch_sampler, "batch_size", None)
        return size

    def keep_within(self, num_records: int) -> None:
        """No batch is larger from now on, whatever the file says: more would make the step of all workers larger than it is to be."""
        self._most_records = num_records
        size = self.get_batch_size()
        if size is not None and size > num_records > 0:
            self._take_batch_size(num_records)

    def update_batch_size(self, batch_size: int | None = None) -> None:
        """Directly, or as the file says. All ranks call it at the same step."""
        if batch_size is None:
            self.load_config(self.config_file)
        elif batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1 (got {batch_size}).")
        elif self.get_batch_size() is None:
            raise ValueError(
                "The batch size of this loader cannot change, because it makes no batches or its batch sampler "
                "has no attribute batch_size. Make the loader with batch_size=N."
            )
        else:
            # The script's own word: what a step consists of follows it.
            self.script_batch_size, self._most_records = batch_size, 0
            self._take_batch_size(batch_size)

    def load_config(self, config_file: str | os.PathLike[str] | None = None) -> None:
        """
        Take over what is newer in the file than what was taken before. A file that is not there or broken changes nothing. All ranks call it
        at the same step: they take what rank 0 has read.
        """
        wish = _wish_in(_read(config_file or self.config_file))
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            wish = _agreed(wish)
        if wish.version > self._version:
            self._version = wish.version
            if self._follow_batch_size(wish.batch_size) and wish.accumulation > 0:
                self._accumulation = wish.accumulation
            self._set_workers(wish.num_workers, wish.pin_memory)

    def _follow_batch_size(self, batch_size: int) -> bool:
        """Whether the batches have this size now."""
        size = self.get_batch_size()
        if self._most_records:
            batch_size = min(batch_size, self._most_records)
        if batch_size <= 0 or batch_size == size:
            return batch_size == size
        if size is None:
            log.warning("the requested batch size %d is ignored: this loader has no batch size", batch_size)
            return False
        if self._elastic_sampler is not None and self._elastic_sampler.is_played:
            log.warning(
                "The requested batch size is ignored: batches keep %d records, because ElasticTrainer keeps "
                "the global batch size constant.",
                size,
            )
            return False
        log.info("batches have %d records from now on (settings version %d)", batch_size, self._version)
        self._take_batch_size(batch_size)
        return True

    def _take_batch_size(self, batch_size: int) -> None:
        self.batch_sampler.batch_size = batch_size
        phases.tell_shape(micro_batch=batch_size)
        if self.batch_size is not None:
            self.__dict__["batch_size"] = (
                batch_size  # torch lets nobody set it, and takes the length of a stream from it
            )

    def _set_workers(self, num_workers: int, pin_memory: int) -> None:
        """From the next epoch on: processes that read ahead for this one are not disturbed."""
        if num_workers >= 0 and num_workers != self.num_workers and not self.persistent_workers:
            log.info("from the next epoch on, %d processes load data (settings version %d)", num_workers, self._version)
            self.num_workers = num_workers
            phases.tell_shape(loader_workers=num_workers)
            self.prefetch_factor = (self.prefetch_factor or _PREFETCH) if num_workers else None
        if pin_memory >= 0:
            self.pin_memory = bool(pin_memory)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands: everything that was yielded counts as used."""
        if self._elastic_sampler is None:
            raise TypeError(
                "This loader has no state to save, because its sampler does not count records. Make the loader "
                "with an ElasticDistributedSampler."
            )
        return {"sampler": self._elastic_sampler.state_dict(), "batch_size": self.get_batch_size()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._elastic_sampler is None:
            raise TypeError(
                "This loader cannot load a state, because its sampler cannot start in the middle of an epoch. "
                "Make the loader with an ElasticDistributedSampler."
            )
        self._elastic_sampler.load_state_dict(state["sampler"])
        if self._batches is not None and state["batch_size"] is not None:
            self._take_batch_size(int(state["batch_size"]))

    def _write_back(self) -> None:
        """Tell the tuner which batch size runs: one rank of the node writes, whole or not at all."""
        folder = os.path.dirname(self.config_file)
        size = self.get_batch_size()
        if size is None or int(os.environ.get("LOCAL_RANK") or 0) or not os.path.isdir(folder):
            return
        config = _read(self.config_file)
        config["dataloader"] = {**(config.get("dataloader") or {}), "batch_size": size}
        config["dataloader"].setdefault("version", self._version)
        try:
            check_directory(folder)
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
                json.dump(config, file)
            os.replace(file.name, self.config_file)
        except OSError as error:
            log.warning(
                "the batch size could not be reported to the tuner, because its file cannot be written: %s", error
            )


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with open(open_checked(os.fspath(path), os.O_RDONLY)) as file:
            config = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read and is ignored: %s", path, error)
        return {}
    return config if isinstance(config, dict) else {}


def _wish_in(config: dict[str, Any]) -> _Wish:
    section = config.get("dataloader") or {}
    try:
        return _Wish(
            version=int(section.get("version") or 0),
            batch_size=int(section.get("batch_size") or 0),
            num_workers=int(section.get("num_workers", -1)),
            pin_memory=int(section.get("pin_memory", -1)),
            accumulation=int(section.get("accumulation") or 0),
        )
    except (AttributeError, TypeError, ValueError) as error:
        log.warning("the parallel-config file is ignored, because it has an invalid value for the loader: %s", error)
        return _Wish()


def _agreed(wish: _Wish) -> _Wish:
    """What rank 0 has read: files of several nodes need not change at the same moment."""
    told = torch.tensor(
        [wish.version, wish.batch_size, wish.num_workers, wish.pin_memory, wish.accumulation], dtype=torch.int64
    )
    if dist.get_backend() == "nccl":
        told = told.cuda()
    dist.broadcast(told, src=0)
    return _Wish(*(int(each) for each in told))
